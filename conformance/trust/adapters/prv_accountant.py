"""Adapter of Microsoft's prv-accountant."""

from __future__ import annotations

import warnings
from importlib.metadata import version as version_of

from prv_accountant import PRVAccountant
from prv_accountant.privacy_random_variables import GaussianMechanism, PoissonSubsampledGaussianMechanism

from conformance.trust import inputs

REQUIREMENTS = ("prv-accountant==0.2.0",)


def _bounds(setting: inputs.Setting) -> list[float]:
    """Return estimate and upper bound of epsilon, with the error that unskew uses."""
    if setting.rate == 1:
        variable = GaussianMechanism(setting.noise)
    else:
        variable = PoissonSubsampledGaussianMechanism(setting.rate, setting.noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountant = PRVAccountant(variable, 0.01, setting.delta / 1000, max_self_compositions=setting.rounds)
        _, estimate, upper = accountant.compute_epsilon(setting.delta, [setting.rounds])
    return [float(estimate), float(upper)]


def run() -> dict[str, list]:
    """Return bounds of epsilon of all settings."""
    sampled = [_bounds(setting) for setting in inputs.sampled_settings()]
    return {
        "estimate": [estimate for estimate, _ in sampled],
        "upper": [upper for _, upper in sampled],
        "exact": [_bounds(setting)[0] for setting in inputs.exact_settings()],
    }


def version() -> str:
    """Return the version of the library."""
    return version_of("prv-accountant")
