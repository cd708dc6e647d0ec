"""A small table of a paper, made on one way or another."""

from unskew.reproduction.preset import load_preset
from unskew.reproduction.sweep import Sweep


def small_table(place, parallel, seeds, model, engine="inline"):
    """Accuracies of two rows that share their first rounds, and what was told of, sorted."""
    told = []

    def follow(title, common):
        told.append(title)
        return []

    settings = {"engine": engine, "model": model, "local_steps": 3}
    rows = ["FedAvg", "FedCOG"]
    made = Sweep(
        load_preset("fedcog/table-1"), "smoke", place / "runs", place / "results", settings, rows, None, follow
    )
    made.otherwise = True
    return [(c.row, c.column, o["curve"]["accuracy"]) for c, o in made.carry_out(seeds, parallel)], sorted(told)
