"""Numbers of samples per class: which are small, and what follows from the others."""

import itertools

import pytest

from unskew.deployment.common.small_counts import reported_support


@pytest.mark.parametrize(
    ("counts", "texts"),
    [
        ((40, 9, 40), ["", "", ""]),
        ((40, 5, 41), ["", "", "41"]),
        ((10, 9, 9), ["", "", ""]),
        ((3, 4, 40), ["<10", "<10", "40"]),
        ((12, 40), ["12", "40"]),
    ],
)
def test_classes_whose_number_would_reveal_a_small_one_are_empty(counts, texts):
    assert reported_support(counts, 10) == texts


def test_labels_that_a_sample_may_share_reveal_nothing_of_each_other():
    assert reported_support([40, 9, 40], 10, exclusive=False) == ["40", "<10", "40"]


@pytest.mark.parametrize("least", [2, 3, 4])
def test_every_hidden_number_has_two_possible_values_for_all_who_know_the_rule(least):
    views = {}
    for classes in (2, 3, 4):
        for counts in itertools.product(range(9), repeat=classes):
            views.setdefault((sum(counts), *reported_support(counts, least)), []).append(counts)
    assert len(views) > 1000
    for (total, *texts), tables in views.items():
        for index, text in enumerate(texts):
            assert total == 0 or text.isdigit() or len({table[index] for table in tables}) > 1, (total, texts, tables)
