"""Adapter of Opacus: its accountants, and its optimizer with adaptive clipping."""

from __future__ import annotations

import warnings
from importlib.metadata import version as version_of

import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.optimizers import AdaClipDPOptimizer

from conformance.trust import inputs


def _norms(clip: float, quantile: float) -> list[float]:
    """Return the clipping norms after each step, with clients' updates as per-sample gradients."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = AdaClipDPOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        noise_multiplier=0.0,
        target_unclipped_quantile=quantile,
        clipbound_learning_rate=inputs.CLIP_LR,
        max_clipbound=1e6,
        min_clipbound=1e-6,
        unclipped_num_std=1e-12,
        max_grad_norm=clip,
        expected_batch_size=inputs.CLIENTS,
    )
    sequence = []
    for _ in range(inputs.ROUNDS):
        optimizer.zero_grad()
        parameter.grad_sample = torch.from_numpy(inputs.updates())
        optimizer.step()
        sequence.append(float(optimizer.max_grad_norm))
    return sequence


def run() -> dict[str, list]:
    """Return epsilon of all settings with Poisson cohorts, and the sequences of clipping norms."""
    found: dict[str, list] = {"rdp": [], "rdp, our orders": [], "prv": []}
    for rate, noise, rounds, delta in inputs.sampled_settings():
        rdp, prv = RDPAccountant(), PRVAccountant()
        rdp.history = prv.history = [(noise, rate, rounds)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found["rdp"].append(float(rdp.get_epsilon(delta)))
            found["rdp, our orders"].append(float(rdp.get_privacy_spent(delta=delta, alphas=inputs.ORDERS)[0]))
            found["prv"].append(float(prv.get_epsilon(delta, eps_error=0.01, delta_error=delta / 1000)))
    return {**found, "norms": [_norms(*case) for case in inputs.CLIPPINGS]}


def version() -> str:
    """Return the version of the library."""
    return version_of("opacus")
