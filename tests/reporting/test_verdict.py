"""Verdict and tables of small groups of runs, by hand."""

from pathlib import Path

from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.run_reader import RunFiles
from unskew.reporting.tables import difference_table, target_table
from unskew.reporting.verdict import verdict


def summary(method, seed, accuracy, **more):
    scored = {"objective": "accuracy", "accuracy": accuracy, "best_accuracy": accuracy, "loss": 1.0}
    costs = {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0, "rounds": 1}
    return {"method": method, "seed": seed, "partition_hash": "p", **scored, **costs, **more}


def history(summary):
    """Return the only round of a run, before a closing step if there was one."""
    names = ("accuracy", "loss", "bytes_up", "bytes_down", "seconds")
    before = {"accuracy": summary.get("accuracy_before_closing", summary["accuracy"])}
    return [{"round": 1, **{name: summary[name] for name in names}, **before}]


def group(accuracies, more=None, target=0.5):
    """Return a group with the accuracies of each method's seeds."""
    series = []
    for name, values in accuracies.items():
        own = [summary(name, seed, value, **(more or {}).get(name, {})) for seed, value in enumerate(values)]
        series.append(MethodRuns(name, name, [RunFiles(Path(name), {}, one, history(one), [], {}, []) for one in own]))
    return RunGroup("title", series, target)


def test_a_lead_that_is_equal_in_all_seeds_is_not_tested():
    part = group({"a": [0.31, 0.41, 0.61], "b": [0.30, 0.40, 0.60]})
    lead = next(text for text in verdict(part) if "ahead" in text)
    assert lead == (
        "It is ahead of b, the second best, by 1.0 points; all 3 seeds differ by the same amount, which cannot show "
        "whether it is more than chance."
    )
    cells = [[cell.text for cell in row] for row in difference_table(part).rows]
    assert cells[0] == ["b", "a", "3", "-1.0", "equal in all seeds", "-1.0", "equal in all seeds"]
    assert [row["low"] for row in part.comparison.differences()] == [None, None]


def test_a_closing_step_that_reaches_the_target_is_in_the_table_of_costs():
    part = group({"ccvr": [0.9]}, {"ccvr": {"accuracy_before_closing": 0.2}}, target=0.8)
    assert [cell.text for cell in target_table(part).rows[0]][:3] == ["ccvr", "1 of 1", "1.0"]
