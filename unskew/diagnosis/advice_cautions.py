"""Cautions: reasons against a suggested method, each with its source.

The lambdas receive the measured ``SkewFeatures`` of a federation as ``s``.
"""

from __future__ import annotations

from dataclasses import dataclass

from unskew.diagnosis.advice_rules import Condition, Sentence


@dataclass(frozen=True)
class Caution:
    """Reason against suggesting some methods under a condition.

    Attributes:
        methods: Names of the methods that the caution applies to.
        when: Returns whether the caution applies.
        because: Returns the argument, with the metrics that it is based on.
        source: Theory or result table that the argument is based on.
        takes: Number that is subtracted from the evidence of a suggestion when suggestions are ranked.
    """

    methods: tuple[str, ...]
    when: Condition
    because: Sentence
    source: str
    takes: int = 2


CAUTIONS: tuple[Caution, ...] = (
    Caution(
        ("scaffold", "fedpvr"),
        lambda s: s.tau < 10,
        lambda s: (
            f"With {s.tau:.0f} local steps a variate averages few gradients; with 5, SCAFFOLD stayed near chance."
        ),
        "docs/results/fedals.md, Table 1",
    ),
    Caution(
        ("scaffold", "fedpvr", "feddyn"),
        lambda s: s.participation < 0.5,
        lambda s: (
            f"Only {s.participation:.0%} of the clients take part in a round, so the state of clients is outdated; our "
            "result tables have all clients in every round."
        ),
        "Karimireddy et al. 2019, arXiv:1910.06378, Theorem III; not measured by us",
        1,
    ),
    Caution(
        ("feddyn", "fedpvr"),
        lambda s: s.linear <= 0.99 and s.skew >= 0.65,
        lambda s: (
            f"The label distance is {s.distance:.2f}; at the strongest skew, with a convolutional network, it was 6 points "
            "below FedAvg, within the variation between seeds."
        ),
        "docs/results/fedssyn.md, a part of CIFAR-10",
        1,
    ),
    Caution(
        ("fedssyn",),
        lambda s: s.pixels > 16,
        lambda s: f"Images of {s.pixels} pixels are larger than the 16 for which small generators were tested.",
        "docs/results/fedssyn.md, a part of CIFAR-10",
        1,
    ),
    Caution(
        ("feddle",),
        lambda s: s.tau >= 20,
        lambda s: "With much local work, its advantage over training at the server disappeared.",
        "docs/results/feddle.md, more work at the clients",
        1,
    ),
)
