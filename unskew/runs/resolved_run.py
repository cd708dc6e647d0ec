"""A run whose configuration is resolved: its texts are parsed, and its method, data and model are known."""

from __future__ import annotations

from dataclasses import dataclass

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.models.spec import ModelSpec
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Method, Weights
from unskew.runs.metrics import RunMetrics


@dataclass(frozen=True)
class ResolvedRun:
    """Validated run before its data are prepared; everything after the validation receives it.

    Attributes:
        config: Configuration of the run.
        method: Method of the run.
        federation: Data of all clients before the data rules of the method, used for evaluation.
        spec: Layout and initial parameters of the model.
        plan: Schedule of the run, with the sampling and the budget of the clients.
        weights: Aggregation weights.
        metrics: Metrics that the run reports.
        accepts_late: Whether updates that miss ``network.deadline`` are used in a later round.
        warnings: Warnings for the user.
    """

    config: Experiment
    method: Method
    federation: Federation
    spec: ModelSpec
    plan: RoundPlan
    weights: Weights
    metrics: RunMetrics
    accepts_late: bool = False
    warnings: tuple[str, ...] = ()
