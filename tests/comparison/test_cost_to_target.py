"""Rounds, traffic and bounds of a target, by hand."""

import pytest

from unskew.comparison.comparison_result import Comparison
from unskew.comparison.cost_to_target import target_costs


def history(accuracies, step=10):
    """Return rows whose traffic grows by ``step`` bytes in each round."""
    return [
        {"round": r, "accuracy": a, "loss": 1.0, "bytes_up": step * r, "bytes_down": 0, "seconds": 1.0 * r}
        for r, a in enumerate(accuracies, 1)
    ]


def test_bounds_count_what_each_seed_needs_at_least():
    """FedAvg needs 1 round and at least 11 (10 bytes and at least 100), the other one 5 in both seeds (50 bytes)."""
    late, never = history([0.1] * 4 + [0.9]), history([0.1] * 10)
    histories = {"fedavg": [history([0.9]), never], "fedssyn": [late, late]}
    fedavg, own = target_costs(histories, 0.5)
    assert (fedavg.rounds, fedavg.bytes, fedavg.limit) == (None, None, 10)
    assert (own.rounds, own.bytes, own.speed_up_at_least, own.saving_at_least) == (5, 50, True, True)
    assert own.speed_up == pytest.approx((1 + 11) / 2 / 5)
    assert own.saving == pytest.approx(1 - 50 / ((10 + 100) / 2))


def test_a_closing_step_that_reaches_the_target_counts():
    costs = {"bytes_up": 30, "bytes_down": 0, "seconds": 3.0}
    metrics = {"objective": "accuracy", "accuracy": 0.9, "best_accuracy": 0.9, "accuracy_before_closing": 0.4}
    summary = {"seed": 0, "rounds": 2, "loss": 0.1, **metrics, **costs}
    result = Comparison({"fedavg+ccvr": [history([0.3, 0.4])]}, {"fedavg+ccvr": [summary]}, 0.8, None)
    (row,), (cost,) = result.rows(), target_costs(result.closed_histories, 0.8)
    assert (row["rounds_to_target"], row["seeds_reaching_target"]) == (2, 1)
    assert (cost.rounds, cost.bytes, cost.limit) == (2, 30, 2)
