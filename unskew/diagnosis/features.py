"""Inputs of the advice: metrics of a diagnosis, the budget, and the user's limits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation, ServerData
from unskew.errors import ConfigError, DataError, short_repr
from unskew.measurements.heterogeneity import HeterogeneityMeasurement
from unskew.models.spec import ModelSpec
from unskew.runs.build_model import ModelLike
from unskew.sums.statistics import Metrics

DIFFERENT = 0.05
"""Share of the label's variance between clients, if possible after a linear model of the inputs, from which personal models
are compared; docs/advice.md has the measurements.
"""
UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class AdviceLimits:
    """User's limits.

    Attributes:
        traffic: Bytes of the whole run, up and down, over all clients.
        secure_aggregation: Whether the server sees only the sum of a round's updates.
        server_data: Number of labeled samples at the server; None for those of the run or the federation.
        epsilon: Privacy budget of everything that a client sends.
    """

    traffic: float | None = None
    secure_aggregation: bool = False
    server_data: int | None = None
    epsilon: float | None = None

    @classmethod
    def read(
        cls,
        traffic: str | float | None = None,
        secure_aggregation: bool = False,
        server_data: int | None = None,
        privacy: str | float | None = None,
    ) -> AdviceLimits:
        """Parse limits such as ``traffic="100MB"`` and ``privacy="epsilon=5"``.

        Args:
            traffic: Traffic of a run in bytes, or a string such as ``100MB``.
            secure_aggregation: Whether the server may see only sums of updates.
            server_data: Number of samples at the server.
            privacy: Privacy budget, or a string such as ``epsilon=5``.

        Raises:
            ConfigError: If a limit cannot be parsed.
        """
        if server_data is not None and (isinstance(server_data, bool) or not isinstance(server_data, int)):
            raise ConfigError(
                f"server_data={short_repr(server_data)} is not valid: it must be a number of samples, such as 500."
            )
        if server_data is not None and server_data < 1:
            raise ConfigError(f"server_data={server_data} is not valid: it must be at least 1.")
        budget = None
        if traffic is not None:
            match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kKMGT]?B)?", str(traffic).strip())
            try:
                budget = float(match[1]) * UNITS[match[2] or "B"] if match else 0.0
            except ValueError:
                budget = 0.0
            if not 0 < budget < math.inf:
                raise ConfigError(
                    f"traffic={short_repr(traffic)} is not an amount of data. Use a number with B, kB, MB or GB: 100MB."
                )
        epsilon = None
        if privacy is not None:
            try:
                epsilon = float(str(privacy).strip().removeprefix("epsilon="))
            except ValueError:
                epsilon = 0.0
            if not 0 < epsilon < math.inf:
                raise ConfigError(
                    f"privacy={short_repr(privacy)} is not a privacy budget. Use, for example, epsilon=5."
                )
        return cls(budget, bool(secure_aggregation), server_data, epsilon)


@dataclass(frozen=True)
class AdviceContext:
    """Data, model and configuration of a diagnosis, used to validate methods."""

    config: Experiment
    federation: Federation
    model: ModelLike | None
    spec: ModelSpec
    given: bool
    """True if the federation was given in Python, so that no command can load it."""

    def under(self, limits: AdviceLimits) -> AdviceContext:
        """Return the context with the limits applied to its configuration.

        Args:
            limits: Limits stated by the user.

        Raises:
            DataError: If the test set has too few samples for the server.
        """
        changes: dict[str, Any] = {}
        fed = self.federation
        if limits.secure_aggregation:
            changes["secure_aggregation"] = "required"
        if limits.server_data is not None:
            x, y = fed.test
            n = limits.server_data
            if n >= len(y):
                raise DataError(
                    f"The {n} samples of --server-data (server_data) are taken out of the test set, which has {len(y)} and "
                    f"must keep some. Use at most {len(y) - 1}."
                )
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(self.config.seed))
            fed = replace(fed, server=ServerData(x[order[:n]], y[order[:n]]), test=(x[order[n:]], y[order[n:]]))
            changes["server_data"] = n
        return replace(self, config=self.config.model_copy(update=changes), federation=fed)


@dataclass(frozen=True)
class SkewFeatures:
    """Features of data, model and budget that the advice uses.

    Attributes:
        task: Name of the task.
        pixels: Longer side of the images.
        clients: Number of clients.
        mean_size: Mean number of training samples of a client.
        even: Effective number of clients divided by their number, 1 if sizes are equal.
        participation: Share of the clients that take part in a round.
        rounds: Number of rounds; smaller than ``asked`` if the traffic limit requires it.
        tau: Number of local steps per round of a client of mean size.
        delayed: Whether updates arrive late.
        skew: Total variation distance of clients' labels from all clients', minus the expected distance by chance; 0 to
            1. None if samples with labels were not counted.
        features: Share of the variance of inputs within a class that is between clients; None if not measured.
        dissimilarity: ``zeta^2``, corrected for finite clients, divided by ``||grad f||^2``; None if not measured.
        noise: ``sigma^2`` divided by batch size and ``zeta^2``: local steps from which drift exceeds noise.
        texts: Whether the inputs are token ids.
        asked: Configured number of rounds.
        over_traffic: FedAvg's traffic divided by the limit; None without a limit.
        between: Share of the label's variance that lies between clients; None without labels.
        unexplained: The same after a linear model of the inputs; None without such a model.
    """

    task: str
    pixels: int
    clients: int
    mean_size: float
    even: float
    participation: float
    rounds: int
    tau: float
    delayed: bool
    skew: float | None
    features: float | None
    dissimilarity: float | None
    noise: float
    texts: bool
    asked: int
    over_traffic: float | None = None
    between: float | None = None
    unexplained: float | None = None

    @property
    def needs_personal_models(self) -> bool:
        """Return whether no model for all clients can predict a considerable part of the label's differences between them."""
        return (self.unexplained if self.unexplained is not None else self.between or 0.0) >= DIFFERENT

    @classmethod
    def of(
        cls, setting: AdviceContext, labels: Metrics, measurement: HeterogeneityMeasurement, details: dict[str, Any]
    ) -> SkewFeatures:
        """Collect the features of a diagnosis at one model.

        Args:
            setting: Data, model and configuration.
            labels: Label skew metrics.
            measurement: Measurement at one model.
            details: Data and model, as in the report.
        """
        fed = setting.federation
        config = setting.config
        metrics = measurement.metrics
        sizes = fed.sizes
        x = fed.test[0]
        seen = min(float(sizes.mean()), float(details["samples"] or math.inf))
        zeta2, sigma2 = metrics["zeta2"] or 0.0, metrics["sigma2_mean"] or 0.0
        gradient2 = metrics["gradient2"] or 0.0
        excess = max(0.0, zeta2 - sigma2 / max(1.0, seen))
        distance, chance = labels.get("label_distance_mean"), labels.get("label_distance_chance")
        unknown = "counts" in fed.objective.provides and distance is None
        return cls(
            task=fed.task,
            pixels=int(max(x.shape[2:])) if x.dim() == 4 else 0,
            clients=len(fed.clients),
            mean_size=float(sizes.mean()),
            even=(labels.get("effective_clients") or 0.0) / len(fed.clients),
            participation=config.participation,
            rounds=config.rounds,
            tau=float(details["tau"]),
            delayed=config.network.delay != "none",
            skew=None if unknown else max(0.0, (distance or 0.0) - (chance or 0.0)),
            features=labels.get("feature_skew"),
            dissimilarity=None if metrics["zeta2"] is None else excess / gradient2 if gradient2 > 0 else 0.0,
            noise=sigma2 / details["batch"] / excess if excess > 0 else math.inf,
            texts=x.dtype == torch.int64,
            asked=config.rounds,
            between=labels.get("label_between"),
            unexplained=labels.get("label_unexplained"),
        )
