"""Schedule of a run, from its configuration."""

from __future__ import annotations

from unskew.config.experiment import Experiment
from unskew.protocol.round_plan import RoundPlan, parse_sampling
from unskew.protocol.rules import Method
from unskew.simulation.sampler import Sampler


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
    cohort = Sampler(clients, config.participation, config.seed).size
    sampling, masked = parse_sampling(config.sampling)[0], config.secure_aggregation == "required"
    return RoundPlan(config.rounds, clients, config.participation, cohort, sampling, scales, training, masked)
