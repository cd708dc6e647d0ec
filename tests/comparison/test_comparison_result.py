"""Target and notes of a comparison: a constant prediction must not reach the target, and notes regard all seeds."""

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


@pytest.mark.parametrize(
    ("rounds", "text"),
    [
        ({"a": {0: 9, 1: 8}, "b": {0: 9, 1: 8}}, None),
        ({"a": {0: 9}, "b": {1: 9, 2: 9}}, None),
        ({"a": {0: 9, 1: 8}, "b": {0: 9, 1: 9}}, "a 8 to 9, b 9"),
        ({"a": {1: 9, 0: 8}, "b": {0: 9, 1: 8}}, "a 8 to 9, b 8 to 9"),
        ({"a": {0: 9}, "b": {0: 8}}, "a 9, b 8"),
    ],
)
def test_a_note_says_if_rounds_differ_in_any_seed(rounds, text):
    summaries = {
        name: [summary(0.5) | {"method": name, "seed": seed, "rounds": count} for seed, count in own.items()]
        for name, own in rounds.items()
    }
    notes = Comparison({name: [[] for _ in own] for name, own in summaries.items()}, summaries, 0.5, None).notes()
    known = f"The methods were trained for different numbers of rounds: {text}."
    assert notes == ([] if text is None else [known])


def test_a_row_with_undefined_seeds_says_how_many_have_a_value():
    summaries = {"a": [summary(0.5), summary(None), summary(0.7)], "b": [summary(0.5)] * 3}
    result = Comparison({name: [[]] * 3 for name in summaries}, summaries, 0.5, None)
    table = comparison_table(result.rows())
    assert [cell.text for cell in table.columns[0].cells] == ["a (value in 2 of 3 seeds)", "b"]


def test_personal_metrics_replace_those_of_clients_only_without_a_global_model():
    """A client metric of a global model may be undefined, although that of personal models is not."""
    metrics = {"client_accuracy_mean": None, "personal_accuracy_mean": 0.9}
    shown = {}
    for name, fields in (("global", {}), ("none", {"global_model": False})):
        result = Comparison({"a": [[]]}, {"a": [summary(0.5) | metrics | fields]}, 0.5, None)
        table = comparison_table(result.rows())
        (column,) = [column for column in table.columns if str(column.header).startswith("clients, mean")]
        shown[name] = [*column.cells]
    assert shown == {"global": ["-"], "none": ["90.0"]}
