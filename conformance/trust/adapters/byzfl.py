"""Adapter of ByzFL: its aggregators, pre-aggregators and attacks, on NumPy arrays, which it keeps in float64."""

from __future__ import annotations

from importlib.metadata import version as version_of

import numpy as np

from conformance.adapters.absent import stand_in
from conformance.trust import inputs

ALONE = ("byzfl==0.0.11",)

# Its benchmark imports these; the suite does not run it.
stand_in("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.models")
stand_in("seaborn")

from byzfl import (  # noqa: E402
    NNM,
    ALittleIsEnough,
    CenteredClipping,
    GeometricMedian,
    InnerProductManipulation,
    Krum,
    Median,
    Mimic,
    MultiKrum,
    SignFlipping,
    TrMean,
)

RULES = {
    "median": Median,
    "trimmed": lambda: TrMean(f=inputs.SUSPECTED),
    "krum": lambda: Krum(f=inputs.SUSPECTED),
    "multikrum": lambda: MultiKrum(f=inputs.SUSPECTED),
    "geomedian": lambda: GeometricMedian(nu=inputs.SMOOTHING, T=inputs.WEISZFELD_STEPS),
    "geomedian, 200 steps": lambda: GeometricMedian(nu=inputs.SMOOTHING, T=200),
    "cclip": lambda: CenteredClipping(L=inputs.CLIP_STEPS, tau=inputs.TAU),
    "nnm": lambda: NNM(f=inputs.SUSPECTED),
}
ATTACKS = {
    "ipm": lambda: InnerProductManipulation(tau=inputs.IPM_EPSILON),
    "signflip": SignFlipping,
    "alie": lambda: ALittleIsEnough(tau=inputs.ALIE_Z),
    "mimic": lambda: Mimic(epsilon=0),
}


def run() -> dict[str, list]:
    """Return the results of the rules on all points, and of the attacks on the honest ones."""
    sets = inputs.point_sets()
    found = {name: [rule()(points).tolist() for points in sets] for name, rule in RULES.items()}
    centered = [points - points.mean(0) for points in sets]
    moved = [RULES["geomedian"]()(points) + original.mean(0) for points, original in zip(centered, sets, strict=True)]
    honest = [points[: -inputs.ATTACKERS] for points in sets]
    return {
        **found,
        "geomedian, mean 0": [np.asarray(point).tolist() for point in moved],
        **{name: [attack()(points).tolist() for points in honest] for name, attack in ATTACKS.items()},
    }


def version() -> str:
    """Return the version of the library."""
    return version_of("byzfl")
