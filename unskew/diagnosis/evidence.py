"""Expected gains of methods: a kernel average over the federations of the benchmark (Nadaraya 1964, Watson 1964).

The gain of a method on new data is the mean of its measured gains over tuned FedAvg, weighted by the similarity of the
measured federations to the new one, and shrunk towards the mean over all federations.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, Protocol, TypeVar

from unskew.diagnosis.features import SkewFeatures
from unskew.tasks.registry import TASKS

View = Literal["global", "clients"]
"""Global model on test data, or clients on their own data with a personal model if the method has one."""
MEASURED_TASKS = ("classification", "regression")
"""Tasks of the federations that are evidence.

The suites ``survival`` and ``segmentation`` are not: they have three federations and two, and no coordinate below tells a
federation of another task apart, so that they would change the advice for other tasks, too.
"""
PRIOR = 1.0
"""Weight of the mean over all federations; a federation with the same features has weight 1."""
LARGEST = 10.0
"""Larger measured differences in points count as this one, so that a single federation does not decide."""
TIE = 0.5
"""Methods whose expected gains differ by less than this number of points are ordered by cost."""
WORTHWHILE = 0.25
"""Smallest expected gain in points of a suggestion."""
SUGGESTED = 3
"""Number of methods to try in addition to FedAvg."""
CONSIDERED = 8
"""Number of methods with the largest expected gains from which these are chosen."""
SCALES = {
    "label skew": 0.25,
    "feature skew": 0.4,
    "dissimilarity": 0.8,
    "clients": 0.7,
    "samples per client": 0.7,
    "participation": 0.7,
    "unequal sizes": 0.3,
    "late updates": 0.7,
    "kind of inputs": 1.0,
    "regression": 0.7,
}
"""Difference of each coordinate that reduces the weight of a federation to exp(-1/2)."""


def coordinates(features: SkewFeatures) -> dict[str, float | str | None]:
    """Return the coordinates by which federations are compared; None for what was not measured.

    Args:
        features: Features of the data, the model and the configuration.
    """
    inputs = "images" if features.pixels else "texts" if features.texts else "vectors"
    return {
        "label skew": features.skew,
        "feature skew": features.features,
        "dissimilarity": None if features.dissimilarity is None else math.log10(0.1 + features.dissimilarity),
        "clients": math.log10(features.clients),
        "samples per client": math.log10(features.mean_size),
        "participation": math.log10(features.participation),
        "unequal sizes": 1.0 - features.even,
        "late updates": float(features.delayed),
        "kind of inputs": inputs,
        "regression": float(TASKS[features.task].numeric_labels),
    }


def similarity(a: Mapping[str, float | str | None], b: Mapping[str, float | str | None]) -> float:
    """Return the weight of a federation, from 0 to 1: a Gaussian kernel over the coordinates that both have.

    Args:
        a: Coordinates of one federation.
        b: Coordinates of the other.

    >>> similarity({"label skew": 0.5}, {"label skew": 0.5})
    1.0
    """
    squared = 0.0
    for name, scale in SCALES.items():
        first, second = a.get(name), b.get(name)
        if isinstance(first, str) or isinstance(second, str):
            squared += float(first != second) / scale**2
        elif first is not None and second is not None:
            squared += ((first - second) / scale) ** 2
    return math.exp(-squared / 2)


@dataclass(frozen=True)
class MeasuredFederation:
    """Federation of the benchmark.

    Attributes:
        name: Name in the suite.
        title: Description in a few words.
        coordinates: Coordinates, see ``coordinates``.
        gains: Mean difference to tuned FedAvg in points, by view and method.
        decided: Methods whose difference is decided, by view.
        traffic: Bytes relative to tuned FedAvg's, by method.
    """

    name: str
    title: str
    coordinates: dict[str, float | str | None]
    gains: dict[View, dict[str, float]]
    decided: dict[View, list[str]]
    traffic: dict[str, float]


@dataclass(frozen=True)
class ExpectedGain:
    """Expected gain of a method over tuned FedAvg.

    Attributes:
        method: Method expression.
        gain: Expected difference in points.
        measured: Title and measured difference of the most similar federations, most similar first.
        federations: Number of federations in which the method was measured.
        traffic: Mean traffic relative to FedAvg's over the federations where the method ran.
    """

    method: str
    gain: float
    measured: list[tuple[str, float]]
    federations: int
    traffic: float


def expected_gains(
    here: Mapping[str, float | str | None], view: View, evidence: Sequence[MeasuredFederation], nearest: int = 3
) -> list[ExpectedGain]:
    """Return the expected gain of every measured method, the largest first; of close ones, the cheaper first.

    Args:
        here: Coordinates of the new federation.
        view: Global model or clients.
        evidence: Measured federations.
        nearest: Number of federations to list as reasons.
    """
    weights = {federation.name: similarity(here, federation.coordinates) for federation in evidence}
    expected = []
    for name in dict.fromkeys(name for federation in evidence for name in federation.gains[view]):
        measured = [federation for federation in evidence if name in federation.gains[view]]
        gains = [limited(federation.gains[view][name]) for federation in measured]
        weighted = [weights[federation.name] for federation in measured]
        prior = math.fsum(gains) / len(gains)
        total = PRIOR * prior + math.fsum(w * gain for w, gain in zip(weighted, gains, strict=True))
        closest = sorted(measured, key=lambda federation: -weights[federation.name])[:nearest]
        listed = [(federation.title, federation.gains[view][name]) for federation in closest]
        ratios = [federation.traffic[name] for federation in measured if name in federation.traffic]
        traffic = math.fsum(ratios) / len(ratios) if ratios else 1.0
        gain = total / (PRIOR + math.fsum(weighted))
        expected.append(ExpectedGain(name, gain, listed, len(measured), traffic))
    return order_by_cost(sorted(expected, key=lambda entry: -entry.gain), lambda entry: entry.traffic)


def limited(gain: float) -> float:
    """Return a measured difference in points, at least ``-LARGEST`` and at most ``LARGEST``."""
    return max(-LARGEST, min(LARGEST, gain))


def complementary(
    expected: Sequence[ExpectedGain],
    here: Mapping[str, float | str | None],
    view: View,
    evidence: Sequence[MeasuredFederation],
) -> list[ExpectedGain]:
    """Order methods so that the best of the first three, or FedAvg if it is better, is expected to gain most.

    The first method stays the first. The second and the third are chosen one after the other, for the largest weighted mean
    over the federations of the best gain so far. Weights are those of ``expected_gains``. Where a method was not measured,
    its expected gain is used.

    Args:
        expected: Methods in order; only the first ``CONSIDERED`` are considered.
        here: Coordinates of the new federation.
        view: Global model or clients.
        evidence: Measured federations.

    Returns:
        The three methods, and the others in their order.
    """
    pool, chosen = list(expected[:CONSIDERED]), list(expected[:1])
    weights = [similarity(here, federation.coordinates) + PRIOR / len(evidence) for federation in evidence]

    def best_with(entry: ExpectedGain) -> float:
        total = 0.0
        for weight, federation in zip(weights, evidence, strict=True):
            gains = [limited(federation.gains[view].get(other.method, other.gain)) for other in (*chosen, entry)]
            total += weight * max(0.0, *gains)
        return total

    while len(chosen) < min(SUGGESTED, len(pool)):
        chosen.append(max((entry for entry in pool if entry not in chosen), key=best_with))
    return [*chosen, *(entry for entry in expected if entry not in chosen)]


class _WithGain(Protocol):
    @property
    def gain(self) -> float: ...


Entry = TypeVar("Entry", bound=_WithGain)


def order_by_cost(entries: Sequence[Entry], cost: Callable[[Entry], float]) -> list[Entry]:
    """Order methods whose expected gains are close to the best remaining one by their cost.

    Args:
        entries: Methods with expected gains, largest first.
        cost: Returns the cost of a method.
    """
    ordered: list[Entry] = []
    rest = list(entries)
    while rest:
        close = [entry for entry in rest if rest[0].gain - entry.gain < TIE]
        ordered += sorted(close, key=cost)
        rest = rest[len(close) :]
    return ordered


@functools.cache
def load_evidence() -> tuple[list[MeasuredFederation], dict[str, Any]]:
    """Read the measured federations, and the other entries: the gain by tuning, and the scores of the advice."""
    text = (files("unskew") / "diagnosis" / "evidence.json").read_text(encoding="utf-8")
    stored = json.loads(text)
    return [MeasuredFederation(**federation) for federation in stored.pop("federations")], stored


def reliability(view: View) -> str:
    """Return a sentence on how often advice was right for federations that were left out of the evidence.

    Args:
        view: Global model or clients.
    """
    scores = load_evidence()[1]["scores"][view]
    return (
        f"For {scores['federations']:.0f} federations left out in turn, the best of the first three methods, which "
        f"complement each other, was above tuned FedAvg in {scores['best_of_three_above']:.0%} of the cases, "
        f"not clearly below it in {scores['best_of_three_not_worse']:.0%}, and within 1 point of the best method in "
        f"{scores['within_one_point']:.0%}."
    )
