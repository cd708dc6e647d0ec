"""Verdict and tables of small groups of runs, by hand."""

import pytest
from scipy import stats
from support.run_groups import group

from unskew.cli.comparison_tables import clients_table
from unskew.reporting.tables import difference_table, fairness_table
from unskew.reporting.verdict import verdict


def ranking(*arguments):
    """Return the verdict without whether federated training helps, which is not known without clients."""
    return verdict(group(*arguments))[1:]


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


def test_differences_are_those_of_the_kept_model():
    kept = {"a": {"kept_accuracy": 0.8, "kept_round": 1}, "b": {"kept_accuracy": 0.5, "kept_round": 2}}
    part = group({"a": [0.31, 0.41, 0.61], "b": [0.30, 0.40, 0.60]}, kept)
    assert [row["difference"] for row in part.comparison.differences()] == pytest.approx([-0.3, 0.3])
    assert part.comparison.differences("accuracy")[1]["difference"] == pytest.approx(0.01)
    table = difference_table(part)
    assert table.columns[3].startswith("kept model: ")
    assert [cell.text for cell in table.rows[0]][3] == "-30.0"


def test_methods_with_lost_seeds_are_not_ranked_ahead_and_the_number_of_seeds_is_stated():
    part = group({"a": [None, 0.9, None], "b": [0.30, 0.31, 0.35], "c": [0.2, 0.25, 0.21]}, {"a": {"diverged": True}})
    lines = verdict(part)[1:]
    assert lines[0] == "b is the best of 3 methods: test accuracy 32.0 % after the last round, mean over 3 seeds."
    assert lines[1] == "Ranked last, because seeds diverged or have no value: a (3 of 3 seeds)."
    low, high = stats.t.interval(0.95, 2, 10, stats.sem([10, 6, 14]))
    assert lines[2].startswith(
        f"It is ahead of c, the second best, by 10.0 points (95 % interval {low:+.1f} to {high:+.1f}"
    )
    (row,) = [row for row in part.comparison.rows() if row["method"] == "a"]
    assert (row["accuracy"], row["accuracy_std"]) == (0.9, None)
    alone = ranking({"a": [None, 0.9, None]})
    assert alone[0] == "a reaches a test accuracy of 90.0 % after the last round, mean over 1 of 3 seeds."


def test_methods_that_are_equal_in_every_seed_have_no_lead():
    lines = ranking({"a": [0.3, 0.4], "b": [0.3, 0.4]})
    assert lines[0] == "a and b are equal in every seed: test accuracy 35.0 % after the last round, mean over 2 seeds."
    assert not any("ahead" in text for text in lines)
    lines = ranking({"a": [0.3, 0.4], "b": [0.3, 0.4], "c": [0.1, 0.3]})
    assert lines[0].startswith("a and b are equal in every seed and the best of 3 methods: ")
    assert lines[1].startswith("It is ahead of c, the second best, by 15.0 points")
    same_mean = ranking({"a": [0.3, 0.4], "b": [0.4, 0.3]})
    assert same_mean[1].startswith("Its mean equals that of b, the second best (95 % interval ")


def test_the_verdict_and_the_choice_of_the_best_are_those_of_the_kept_models():
    kept = {"test_samples": 100, "kept_round": 1, "kept_accuracy_low": 0.6, "kept_accuracy_high": 0.8}
    more = {"a": {**kept, "kept_accuracy": 0.7, "client_accuracy_mean": 0.6}, "b": {**kept, "kept_accuracy": 0.5}}
    clients = [{"client": k, "samples": 9, "num_held_out": 50, "accuracy": 0.5 + k / 10} for k in range(3)]
    part = group({"a": [0.2], "b": [0.4]}, more, clients=clients)
    assert part.comparison.benefit.labels["federated"] == "a"
    sampling = "(95 % interval 60.0 to 80.0, sampling error of 100 test samples)"
    assert part.comparison.answers()[-1] == f"Test set: a scores 70.0 % {sampling}."
    assert f"a is the best of 2 methods: test accuracy 70.0 % of the kept model {sampling}." in verdict(part)
    assert "It is ahead of b, the second best, by 20.0 points; one seed" in " ".join(verdict(part))
    assert fairness_table(part).caption == "Accuracy over clients of the kept model, mean over seeds"
    rows = [{**row, "personal_accuracy_mean": 0.5} for row in part.comparison.rows()]
    assert str(clients_table(rows).title).endswith("on the clients' own data, kept model")
