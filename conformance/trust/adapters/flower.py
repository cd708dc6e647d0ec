"""Adapter of Flower: the aggregation functions of its robust strategies, and its strategy with adaptive clipping."""

from __future__ import annotations

import logging
from importlib.metadata import version as version_of
from unittest import mock

import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.server.strategy.aggregate import (
    aggregate_bulyan,
    aggregate_krum,
    aggregate_median,
    aggregate_trimmed_avg,
)

from conformance.trust import inputs

REQUIREMENTS = ("flwr",)
Strategy = DifferentialPrivacyServerSideAdaptiveClipping
F = inputs.SUSPECTED

RULES = {
    "median": aggregate_median,
    "trimmed": lambda results: aggregate_trimmed_avg(results, F / len(results)),
    "trimmed, share": lambda results: aggregate_trimmed_avg(results, inputs.SHARE),
    "krum": lambda results: aggregate_krum(results, F, 0),
    "multikrum": lambda results: aggregate_krum(results, F, len(results) - F),
    "bulyan": lambda results: aggregate_bulyan(results, F, aggregate_krum, to_keep=0),
}


def _round(strategy: Strategy, updates: np.ndarray) -> np.ndarray:
    """Return the aggregated update of one round of the strategy, from a model of zeros."""
    strategy.current_round_params = [np.zeros(updates.shape[1])]
    done = [FitRes(Status(Code.OK, ""), ndarrays_to_parameters([update]), 1, {}) for update in updates]
    parameters, _ = strategy.aggregate_fit(1, [(None, result) for result in done], [])
    return parameters_to_ndarrays(parameters)[0]


def _strategy(clip: float, quantile: float, noise: float = 0.0) -> Strategy:
    return Strategy(FedAvg(), noise, inputs.CLIENTS, clip, quantile, inputs.CLIP_LR)


def _norms(clip: float, quantile: float) -> list[float]:
    strategy, sequence = _strategy(clip, quantile), []
    for _ in range(inputs.ROUNDS):
        _round(strategy, inputs.updates())
        sequence.append(float(strategy.clipping_norm))
    return sequence


def _noise_of_ones(clip: float, quantile: float) -> list[float]:
    """Return the update and the next clipping norm of a round in which every standard normal draw is 1."""
    strategy = _strategy(clip, quantile, noise=1.0)
    with mock.patch("numpy.random.normal", lambda loc, scale, size=(): loc + scale * np.ones(size)):
        update = _round(strategy, inputs.updates())
    return [*update.tolist(), float(strategy.clipping_norm)]


def _zero_update() -> str:
    try:
        _round(_strategy(1.0, 0.5), np.zeros((inputs.CLIENTS, 3)))
    except ZeroDivisionError as error:
        return f"ZeroDivisionError: {error}"
    return "no error"


def run() -> dict[str, list]:
    """Return the results of all rules, and of adaptive clipping."""
    logging.disable()
    found = {}
    for name, rule in RULES.items():
        sets = [[([point], 1) for point in points] for points in inputs.point_sets()]
        found[name] = [rule(results)[0].tolist() for results in sets]
    return {
        **found,
        "norms": [_norms(*case) for case in inputs.CLIPPINGS],
        "clipped mean": [_round(_strategy(*case), inputs.updates()).tolist() for case in inputs.CLIPPINGS],
        "noise split": [float(Strategy(FedAvg(), noise, cohort).noise_multiplier) for noise, cohort in inputs.NOISES],
        "noised": [_noise_of_ones(*case) for case in inputs.CLIPPINGS],
        "zero update": [_zero_update()],
    }


def version() -> str:
    """Return the version of the library."""
    return version_of("flwr")
