"""Audit of a private run: repeat it with canary clients, and estimate epsilon from what the model reveals of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic.dataclasses import dataclass as rule_dataclass
from torch import Tensor

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_config
from unskew.config.trust import NOT_OF_MODEL, TRUST
from unskew.errors import ConfigError
from unskew.filesystem import parse_path
from unskew.methods.clipped_sum import round_down
from unskew.methods.dp import DP
from unskew.methods.registry import method as method_of
from unskew.privacy.canaries import empirical_epsilon
from unskew.protocol.payload import UPDATE
from unskew.protocol.rules import Method, Tensors, UploadContext
from unskew.records.notebook import NotebookTable
from unskew.runs.build_model import initial_spec
from unskew.runs.run import load_federation_for, run_experiment
from unskew.seeding import derive, normal


def canary_direction(seed: int, client: int, like: Tensor) -> Tensor:
    """Return the random unit vector of a canary, like a vector ``[d]``.

    Args:
        seed: Seed of the run.
        client: Client number; numbers beyond the clients give directions that nobody sends.
        like: Vector with the size, dtype and device.
    """
    direction = normal(torch.tensor(derive(seed, "canary", 0, client), device=like.device), tuple(like.shape))
    unit: Tensor = (direction / direction.norm()).to(like.dtype)
    return unit


@rule_dataclass(frozen=True)
class AuditedDP(DP):
    """``dp`` in which some clients send a random direction of the clipping norm instead of their update.

    Attributes:
        canaries: Client numbers of the canaries.
    """

    canaries: tuple[int, ...] = ()

    def encode(self, payload: Tensors, state: Tensors, ctx: UploadContext) -> tuple[Tensors, Tensors]:
        """Clip the streams, and replace those of canaries.

        Args:
            payload: Streams by name.
            state: State at this client.
            ctx: Upload.
        """
        clipped, state = super().encode(payload, state, ctx)
        if ctx.client in self.canaries:
            limit = ctx.download["clip"][0].to(torch.float64)
            clipped |= {name: torch.zeros_like(clipped[name]) for name in payload}
            factor = round_down(torch.where(limit < 1, limit, limit * (1 - 1e-7)), clipped[UPDATE])
            clipped[UPDATE] = canary_direction(ctx.seed, ctx.client, clipped[UPDATE]) * factor
        return clipped, state


@dataclass(frozen=True)
class PrivacyAudit(NotebookTable):
    """Result of an audit.

    Attributes:
        epsilon: Promised epsilon; None if the run has no noise.
        delta: Delta of the guarantee.
        estimate: Epsilon estimated from the canaries.
        lower_bound: Lower bound of epsilon with 95 % confidence.
        canaries: Number of canaries.
        mean_cosine: Mean cosine of the change of the model and the directions of canaries.
        unused_cosine: Mean cosine with directions that nobody sent.
    """

    epsilon: float | None
    delta: float
    estimate: float
    lower_bound: float
    canaries: int
    mean_cosine: float
    unused_cosine: float

    def _shown(self) -> list[dict[str, object]]:
        return [self.as_dict()]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return dataclasses.asdict(self)


def audit_privacy(folder: str | Path, canaries: int = 50, trust_code: bool = False) -> PrivacyAudit:
    """Repeat a private run with canary clients and estimate its epsilon.

    Canaries replace clients of the run, so the mechanism and its epsilon are the same. The estimate is a check of the
    implementation, not a guarantee: an attack on real data may reveal more or less than the canaries.

    Args:
        folder: Run folder of a run with ``dp``.
        canaries: Number of canaries; at most half of the clients.
        trust_code: Whether code that the configuration names may be imported.

    Returns:
        The promised epsilon, the estimate and its lower bound.

    Raises:
        ConfigError: If the folder has no run with ``dp``, or there are too few clients.
    """
    file = parse_path(folder) / "config.yaml"
    config = experiment(load_config(file, None if trust_code else TRUST, ignored=NOT_OF_MODEL))
    return audit(config, canaries)


def audit(config: Experiment, canaries: int) -> PrivacyAudit:
    """Run an experiment with canaries.

    Args:
        config: Configuration of a run with ``dp``.
        canaries: Number of canaries.

    Raises:
        ConfigError: If the method has no ``dp``, or there are too few clients.
    """
    method = method_of(config.method)
    if not isinstance(method.aggregate, DP):
        raise ConfigError(
            f"The run's method is {config.method}; an audit needs one with dp and noise_at=server, such as "
            "fedavg+dp:epsilon=8."
        )
    if method.sync is not None or method.aggregate.streams == "apart":
        raise ConfigError("An audit supports methods that exchange the whole model, with dp:streams=joint.")
    if config.start_from is not None:
        raise ConfigError(
            "An audit cannot repeat a run that starts from another one. Audit the run in start_from, or a run from scratch."
        )
    federation = load_federation_for(config, ())
    clients = len(federation.clients)
    count = canaries
    if not 5 <= count <= clients // 2:
        raise ConfigError(
            f"An audit needs at least 5 canaries, and at most half of the {clients} clients of the run, not {count}."
        )
    numbers = tuple(range(0, 2 * count, 2))
    result = run_experiment(
        config.model_copy(update={"eval_clients": 0, "eval_every": config.rounds}),
        federation=federation,
        method=with_canaries(method, numbers),
    )
    change = (result.vector - initial_spec(config, federation, None, method).flatten()).to(torch.float64)
    norm = float(change.norm())
    cosines, unused = (
        np.array([float(canary_direction(config.seed, k, change) @ change) / norm for k in drawn])
        for drawn in (numbers, range(clients, clients + 2 * count))
    )
    delta = result.summary["delta"]
    estimate, lower = empirical_epsilon(cosines, len(change), delta)
    return PrivacyAudit(
        epsilon=result.summary.get("epsilon_if_secret", result.summary["epsilon"]),
        delta=delta,
        estimate=estimate if math.isfinite(estimate) else 0.0,
        lower_bound=lower,
        canaries=count,
        mean_cosine=float(cosines.mean()),
        unused_cosine=float(unused.mean()),
    )


def with_canaries(method: Method, numbers: tuple[int, ...]) -> Method:
    """Return a private method in which some clients are canaries.

    Args:
        method: Method with ``dp``.
        numbers: Client numbers of the canaries.
    """
    rule = method.aggregate
    assert isinstance(rule, DP)
    options = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    audited = AuditedDP(**options, canaries=numbers)
    client = tuple(audited if isinstance(part, DP) else part for part in method.client)
    return dataclasses.replace(method, client=client, aggregate=audited)
