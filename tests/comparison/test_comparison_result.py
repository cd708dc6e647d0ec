"""Default target of a comparison, which a constant prediction must not reach."""

import pytest

from unskew.cli.comparison_tables import comparison_table
from unskew.comparison.comparison_result import Comparison, default_target


def summary(best, constant=None, objective="accuracy"):
    known = {} if constant is None else {f"constant_{objective}": constant}
    scored = {"accuracy": best, "best_accuracy": best, objective: best, f"best_{objective}": best, "loss": 1.0}
    costs = {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0, "rounds": 1, "seed": 0}
    return {"objective": objective, **scored, **known, **costs}


def caption(result):
    return str(comparison_table(result.rows()).title)


@pytest.mark.parametrize(
    ("objective", "values", "constants", "target"),
    [
        ("accuracy", (0.8, 0.7), (0.5, 0.5), 0.72),
        ("accuracy", (0.8, 0.7), (None, None), 0.72),
        ("accuracy", (0.8, 0.7), (0.76, 0.76), 0.76 + 0.9 * 0.04),
        ("accuracy", (0.8, 0.7), (0.72, 0.72), 0.72 + 0.9 * 0.08),
        ("accuracy", (0.8, 0.7), (0.76, 0.72), 0.74 + 0.9 * 0.06),  # the mean over the runs
        ("auroc", (0.54, 0.5), (0.5, 0.5), 0.536),
        ("loss", (0.63, 0.7), (0.69, 0.69), 0.69 - 0.9 * 0.06),
    ],
)
def test_the_target_is_above_a_constant_if_a_method_is(objective, values, constants, target):
    pairs = zip(values, constants, strict=True)
    summaries = {name: [summary(*pair, objective)] for name, pair in zip("ab", pairs, strict=True)}
    found = default_target(summaries)
    assert found == pytest.approx(target)
    histories = {name: [[]] for name in summaries}
    assert "constant" not in caption(Comparison(histories, summaries, found, None))


@pytest.mark.parametrize(("target", "noted"), [(None, True), (0.7, True), (0.767, True), (0.78, False)])
def test_the_table_says_if_a_constant_reaches_the_target(target, noted):
    summaries = {"fedavg": [summary(0.767, 0.767)]}
    result = Comparison({"fedavg": [[]]}, summaries, default_target(summaries) if target is None else target, None)
    note = f"A constant prediction, which scores 76.7 %, reaches the target of {100 * (target or 0.69):.1f} %."
    assert caption(result).endswith(f"\n{note}") == noted
