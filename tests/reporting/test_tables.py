"""Tables of small groups of runs, by hand."""

from support.run_groups import group

from unskew.reporting.tables import difference_table, fairness_table, target_table


def test_a_closing_step_that_reaches_the_target_is_in_the_table_of_costs():
    part = group({"ccvr": [0.9]}, {"ccvr": {"accuracy_before_closing": 0.2}}, target=0.8)
    assert [cell.text for cell in target_table(part).rows[0]][:3] == ["ccvr", "1 of 1", "1.0"]


CLIENTS = [
    {"client": k, "samples": 9, "num_held_out": 50, "accuracy": a, "personal_accuracy": p, **more}
    for k, a, p, more in (
        (0, 0.4, 0.5, {}),
        (1, 0.8, 0.7, {}),
        (2, 0.0, 1.0, {"attacker": True}),
        (3, 0.1, 0.9, {"unseen": True}),
    )
]


def test_attackers_and_unseen_clients_are_not_part_of_the_distribution_over_clients():
    """The Gini coefficient of two values a < b is (b - a) / (2 (a + b))."""
    means = {"client_accuracy_mean": 0.6, "personal_accuracy_mean": 0.6}
    table = fairness_table(group({"a": [0.5]}, {"a": means}, clients=CLIENTS))
    shown = {row[1].text: [cell.text for cell in row[-2:]] for row in table.rows}
    assert shown == {"global": [f"{0.4 / 2.4:.3f}", "-"], "personal": [f"{0.2 / 2.4:.3f}", "50.0"]}


def test_differences_count_the_seeds_in_which_both_methods_have_a_value():
    best = {"best_accuracy": 0.5}
    part = group({"a": [0.5, 0.7, None, None], "b": [0.4, 0.5, 0.6, 0.9]})
    assert [row[2].text for row in difference_table(part).rows] == ["2", "2"]
    part = group({"a": [0.5, 0.7, None, None], "b": [0.4, 0.5, 0.6, 0.9]}, {"a": best, "b": best})
    assert [row[2].text for row in difference_table(part).rows] == ["2, best 4"] * 2
