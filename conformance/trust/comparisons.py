"""Comparisons of the outputs of unskew and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.trust import inputs, ours
from unskew.attacks.registry import InnerProduct, LittleIsEnough, Mimic, SignFlip
from unskew.methods.robust import estimators
from unskew.methods.robust.rules import Trimmed

F, H = inputs.SUSPECTED, inputs.ATTACKERS
Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Comparison:
    """One output of a library and the corresponding function of unskew.

    Attributes:
        library: Name of the adapter.
        title: What is compared.
        output: Name of the library's output, with one value per case.
        cases: Inputs.
        ours: Computes unskew's value of a case.
        tolerance: Largest absolute difference that counts as agreement.
        cause: Reason of a difference; empty if both should agree.
        changed: Computes unskew's value of a case with the change that the cause names; None for ``ours``.
        changed_output: Name of the library's output with the change that the cause names; None for ``output``.
        bound: unskew's value is an upper bound of the library's, at most ``tolerance`` above it.
        slow: Only some cases are computed again by the tests.
    """

    library: str
    title: str
    output: str
    cases: Sequence[Any]
    ours: Function
    tolerance: float
    cause: str = ""
    changed: Function | None = None
    changed_output: str | None = None
    bound: bool = False
    slow: bool = False

    @property
    def has_change(self) -> bool:
        """True if the difference is explained by a change of one of the two sides."""
        return self.changed is not None or self.changed_output is not None

    def differences(self, values: dict[str, list], every: int = 1) -> list[float]:
        """Return the largest difference as it is, and, with a cause, with the change.

        Args:
            values: Outputs of the library.
            every: Compare every n-th case only.
        """
        largest = [self._largest(self.ours, values[self.output], every)]
        if self.has_change:
            largest.append(self._largest(self.changed or self.ours, values[self.changed_output or self.output], every))
        return largest

    def _largest(self, function: Function, theirs: list, every: int) -> float:
        assert len(theirs) == len(self.cases), f"{self.library}, {self.title}: run the suite again"
        pairs = list(zip(self.cases, theirs, strict=True))[::every]
        apart = [np.asarray(function(case), float) - np.asarray(value, float) for case, value in pairs]
        if self.bound and min(float(difference.min()) for difference in apart) < -1e-9:
            return float("inf")
        return max(float(np.abs(difference).max()) for difference in apart)

    def verdict(self, largest: Sequence[float]) -> str:
        """Return ``agrees``, the cause of a difference that the change removes, or ``unexplained``.

        Args:
            largest: Largest differences.
        """
        if self.bound:
            return self.cause if largest[0] <= self.tolerance else "unexplained"
        if largest[0] <= self.tolerance:
            return "agrees"
        return self.cause if self.has_change and largest[1] <= self.tolerance else "unexplained"


SAMPLED, SETTINGS = inputs.sampled_settings(), inputs.exact_settings()
POINTS = inputs.point_sets()
QUANTIZED = list(enumerate(inputs.vectors()))
SPARSE = [(share, vector) for (share, _), vector in zip(inputs.SHARES, inputs.sparse_vectors(), strict=True)]


def _rdp(setting: inputs.Setting) -> float:
    return ours.rounds_epsilon(setting, "rdp")


def _prv(setting: inputs.Setting) -> float:
    return ours.rounds_epsilon(setting, "prv")


def _geometric_median(steps: int) -> Function:
    return ours.robust(lambda points: estimators.weiszfeld_steps(points, steps, inputs.SMOOTHING))


ACCOUNTANTS = [
    Comparison(
        "opacus",
        "epsilon, RDP",
        "rdp",
        SAMPLED,
        _rdp,
        1e-9,
        "orders end at 63, unskew's at 1024; both are valid bounds",
        changed_output="rdp, our orders",
        slow=True,
    ),
    # Rounding of its Fourier transforms, about 1e-16, counts relative to delta and differs between versions of NumPy.
    Comparison("opacus", "epsilon, PRV upper bound", "prv", SAMPLED, _prv, 1e-8, slow=True),
    Comparison(
        "dp_accounting",
        "epsilon, RDP",
        "rdp",
        SAMPLED,
        _rdp,
        1e-6,
        "larger bound at fractional orders, other large orders; the change uses the same integer orders",
        changed=ours.integer_order_epsilon,
        changed_output="rdp, integer orders",
        slow=True,
    ),
    Comparison(
        "dp_accounting",
        "epsilon, PRV upper bound against PLD",
        "pld",
        SAMPLED,
        _prv,
        0.012,
        "is an upper bound; PRV adds its error of 0.01",
        bound=True,
        slow=True,
    ),
    Comparison("dp_accounting", "epsilon without amplification, exact", "exact", SETTINGS, _rdp, 1e-6),
    Comparison(
        "dp_accounting", "noise multiplier for an epsilon, RDP", "noise", inputs.TARGETS, ours.noise_of, 1e-3, slow=True
    ),
    Comparison("prv_accountant", "epsilon, PRV upper bound", "upper", SAMPLED, _prv, 1e-3, slow=True),
    Comparison("prv_accountant", "epsilon without amplification, PRV estimate", "exact", SETTINGS, _rdp, 1e-3),
]
CLIPPING = [
    Comparison(
        "opacus", "clipping norms of 40 rounds", "norms", inputs.CLIPPINGS, ours.clipping_norms, 1e-5, slow=True
    ),
    Comparison(
        "flower",
        "clipping norms of 40 rounds",
        "norms",
        inputs.CLIPPINGS,
        ours.clipping_norms,
        1e-9,
        "its bit means clipped, with the sign for the opposite bit, and the norm runs away; unskew follows the paper",
        changed=lambda case: ours.clipping_norms(case, inverted=True),
        slow=True,
    ),
    Comparison(
        "flower",
        "mean of the clipped updates",
        "clipped mean",
        inputs.CLIPPINGS,
        lambda case: ours.PrivateRounds(case).step(),
        1e-12,
    ),
    Comparison("flower", "noise multiplier of the updates", "noise split", inputs.NOISES, ours.split, 1e-12),
    Comparison(
        "flower",
        "noised update, all draws 1",
        "noised",
        inputs.CLIPPINGS,
        ours.noised,
        1e-12,
        "also scales noise by the next norm, where unskew follows the paper; only unskew clamps the noised share",
        changed=ours.noised_by_the_next_norm,
    ),
]


def _one_more(points: np.ndarray) -> np.ndarray:
    return ours.krum(points, F, len(points) - F - 1)


def _one_more_mean(points: np.ndarray) -> np.ndarray:
    return ours.krum(points, F, len(points) - F - 1, keep=len(points) - F)


def _krum(points: np.ndarray) -> np.ndarray:
    return ours.krum(points, F, len(points) - F - 2)


def _multikrum(points: np.ndarray) -> np.ndarray:
    return ours.krum(points, F, len(points) - F - 2, keep=len(points) - F)


MEDIAN = ours.robust(estimators.coordinate_median)
TRIMMED = ours.robust(lambda points: estimators.trimmed_mean(points, F))
NEIGHBORS = "counts n - f - 1 neighbors; unskew follows the paper (n - f - 2)"
RULES = [
    Comparison("byzfl", "Median", "median", POINTS, MEDIAN, 1e-12),
    Comparison("byzfl", "TrMean", "trimmed", POINTS, TRIMMED, 1e-12),
    Comparison("byzfl", "Krum", "krum", POINTS, _krum, 1e-12, NEIGHBORS, changed=_one_more),
    Comparison("byzfl", "MultiKrum", "multikrum", POINTS, _multikrum, 1e-12, NEIGHBORS, changed=_one_more_mean),
    Comparison(
        "byzfl",
        "GeometricMedian, 4 steps",
        "geomedian",
        POINTS,
        _geometric_median(inputs.WEISZFELD_STEPS),
        1e-12,
        "starts from 0, unskew from the mean; the change moves the points to mean 0",
        changed_output="geomedian, mean 0",
    ),
    Comparison("byzfl", "GeometricMedian, 200 steps", "geomedian, 200 steps", POINTS, _geometric_median(200), 1e-6),
    Comparison("byzfl", "CenteredClipping, 3 steps from 0", "cclip", POINTS, ours.robust(ours.clipped), 1e-12),
    Comparison(
        "byzfl", "NNM", "nnm", POINTS, ours.robust(lambda points: estimators.nearest_neighbor_means(points, F)), 1e-12
    ),
    Comparison("flower", "FedMedian", "median", POINTS, MEDIAN, 1e-12),
    Comparison("flower", "FedTrimmedAvg, share f/n", "trimmed", POINTS, TRIMMED, 1e-12),
    Comparison(
        "flower",
        "FedTrimmedAvg, share 0.2",
        "trimmed, share",
        POINTS,
        ours.robust(lambda points: estimators.trimmed_mean(points, Trimmed(share=inputs.SHARE).suspected(len(points)))),
        1e-12,
        "rounds 0.2 n down, unskew up; the paper leaves it open",
        changed=ours.robust(lambda points: estimators.trimmed_mean(points, int(inputs.SHARE * len(points)))),
    ),
    Comparison("flower", "Krum", "krum", POINTS, _krum, 1e-12),
    Comparison("flower", "Krum, n - f to keep", "multikrum", POINTS, _multikrum, 1e-12),
    Comparison(
        "flower",
        "Bulyan",
        "bulyan",
        POINTS,
        ours.robust(lambda points: estimators.bulyan(points, F)),
        1e-12,
        "selects by the numbering of clients among equal scores; unskew by the points",
        changed=ours.robust(ours.bulyan_with_ties_by_number),
    ),
]
ATTACKS = [
    Comparison(
        "byzfl",
        "InnerProductManipulation",
        "ipm",
        POINTS,
        ours.attacked(InnerProduct, epsilon=inputs.IPM_EPSILON),
        1e-12,
    ),
    Comparison(
        "byzfl",
        "SignFlipping",
        "signflip",
        POINTS,
        ours.attacked(SignFlip),
        1e-12,
        "negates the mean of the honest updates, unskew the attacker's own; no paper defines it",
        changed=ours.attacked(InnerProduct, epsilon=1.0),
    ),
    Comparison(
        "byzfl",
        "ALittleIsEnough",
        "alie",
        POINTS,
        ours.attacked(LittleIsEnough, z=inputs.ALIE_Z),
        1e-12,
        "adds the standard deviations; unskew and the authors' code subtract them",
        changed=lambda points: 2 * points[:-H].mean(0) - ours.attacked(LittleIsEnough, z=inputs.ALIE_Z)(points),
    ),
    Comparison(
        "byzfl",
        "Mimic",
        "mimic",
        POINTS,
        ours.attacked(Mimic),
        1e-12,
        "copies the client that the user names, here the first; unskew follows the paper",
        changed=lambda points: points[0],
    ),
]
COMPRESSION = [
    Comparison(
        "fedlab",
        "QSGD, 16 levels, same random numbers",
        "qsgd",
        QUANTIZED,
        ours.quantized,
        1e-6,
        "divides by the largest entry; unskew follows the paper; the change adds an entry equal to the norm",
        changed_output="qsgd, norm",
    ),
    Comparison("fedlab", "top-k", "topk", SPARSE[:3], lambda case: ours.sparse(*case), 1e-12),
    Comparison(
        "fedlab",
        "top-k, share 0.07 of 100",
        "topk, rounding",
        SPARSE[3:],
        lambda case: ours.sparse(*case),
        1e-12,
        "sends 8 entries, because 0.07 * 100 is above 7 in floating point; unskew sends 7",
        changed=lambda case: ours.sparse(0.08, case[1]),
    ),
    Comparison(
        "pytorch",
        "PowerSGD, error feedback, 4 rounds",
        "powersgd",
        [(inputs.SHAPES, inputs.RANK, 4, 10)],
        ours.low_rank,
        1e-9,
    ),
    Comparison(
        "pytorch",
        "PowerSGD of a matrix that shrinks twofold",
        "powersgd, twofold",
        [(inputs.EDGE_SHAPES, inputs.EDGE_RANK, 1, 20)],
        ours.low_rank,
        1e-9,
        "does not compress at the limit, unskew does; the paper has no limit",
        changed_output="powersgd, below twofold",
    ),
]
SECTIONS: dict[str, list[Comparison]] = {
    "Accountants": ACCOUNTANTS,
    "Adaptive clipping": CLIPPING,
    "Robust rules": RULES,
    "Attacks": ATTACKS,
    "Compression": COMPRESSION,
}
