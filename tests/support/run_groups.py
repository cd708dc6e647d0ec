"""Groups of runs with given metrics, for tests of reports."""

from pathlib import Path

from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.run_reader import RunFiles


def summary(method, seed, accuracy, **more):
    scored = {"objective": "accuracy", "accuracy": accuracy, "best_accuracy": accuracy, "loss": 1.0}
    costs = {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0, "rounds": 1}
    return {"method": method, "seed": seed, "partition_hash": "p", **scored, **costs, **more}


def history(summary):
    """Return the only round of a run, before a closing step if there was one."""
    names = ("accuracy", "loss", "bytes_up", "bytes_down", "seconds")
    before = {"accuracy": summary.get("accuracy_before_closing", summary["accuracy"])}
    return [{"round": 1, **{name: summary[name] for name in names}, **before}]


def group(accuracies, more=None, target=0.5, clients=()):
    """Return a group with the accuracies of each method's seeds; ``more`` has further fields of summaries by method."""
    series = []
    for name, values in accuracies.items():
        own = [summary(name, seed, value, **(more or {}).get(name, {})) for seed, value in enumerate(values)]
        series.append(
            MethodRuns(name, name, [RunFiles(Path(name), {}, one, history(one), [*clients], {}, []) for one in own])
        )
    return RunGroup("title", series, target)
