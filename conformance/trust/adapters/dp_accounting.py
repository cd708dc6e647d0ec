"""Adapter of Google's dp-accounting: Renyi and privacy loss distribution accountants, and the exact Gaussian mechanism."""

from __future__ import annotations

import math
from importlib.metadata import version as version_of

import dp_accounting
from dp_accounting import pld, rdp

from conformance.trust import inputs

REQUIREMENTS = ("dp-accounting==0.6.0",)


def _event(rate: float, noise: float, rounds: int) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(gaussian, rounds)


def _epsilon(accountant: dp_accounting.PrivacyAccountant, setting: inputs.Setting) -> float:
    accountant.compose(_event(setting.rate, setting.noise, setting.rounds))
    return float(accountant.get_epsilon(setting.delta))


def _noise(epsilon: float, delta: float, rate: float, rounds: int) -> float:
    def fresh() -> dp_accounting.PrivacyAccountant:
        return rdp.RdpAccountant(inputs.ORDERS)

    def event(noise: float) -> dp_accounting.DpEvent:
        return _event(rate, noise, rounds)

    return float(dp_accounting.calibrate_dp_mechanism(fresh, event, epsilon, delta, tol=1e-6))


def run() -> dict[str, list]:
    """Return epsilon of all settings, and the noise for some epsilons."""
    sampled = inputs.sampled_settings()
    integer = [order for order in inputs.ORDERS if float(order).is_integer()]
    return {
        "rdp": [_epsilon(rdp.RdpAccountant(), setting) for setting in sampled],
        "rdp, integer orders": [_epsilon(rdp.RdpAccountant(integer), setting) for setting in sampled],
        "pld": [_epsilon(pld.PLDAccountant(), setting) for setting in sampled],
        "exact": [
            float(dp_accounting.get_epsilon_gaussian(setting.noise / math.sqrt(setting.rounds), setting.delta))
            for setting in inputs.exact_settings()
        ],
        "noise": [_noise(*target) for target in inputs.TARGETS],
    }


def version() -> str:
    """Return the version of the library."""
    return version_of("dp-accounting")
