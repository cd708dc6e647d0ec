"""Schedule of a run, from its configuration."""

from __future__ import annotations

from unskew.config.experiment import Experiment
from unskew.protocol.round_plan import RoundPlan, cohort_size
from unskew.protocol.rules import Method
from unskew.simulation.samplers.registry import parse_sampling


def make_round_plan(config: Experiment, clients: int, method: Method) -> RoundPlan:
    """Return the schedule of a run, which server and clients compute alike.

    Args:
        config: Configuration of the run.
        clients: Number of clients ``K``.
        method: Method of the run.
    """
    training = config.training
    scales = {
        f"{rule.name}/{name}": float(scale(training)) for rule in method.client for name, scale in rule.private.items()
    }
    sampler = parse_sampling(config.sampling)
    return RoundPlan(
        rounds=config.rounds,
        clients=clients,
        participation=config.participation,
        cohort=cohort_size(clients, config.participation),
        sampling=sampler.name,
        asks_loss=sampler.asks_loss,
        reads_reports=sampler.reads_reports,
        scales=scales,
        training=training,
        masked=config.secure_aggregation == "required",
    )
