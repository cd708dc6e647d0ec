"""Metrics of a run: the objective, and all metrics that are computed from predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.metrics import AUTO, MetricLike, is_custom_metric, metric_name, metric_reference
from unskew.data.federation import Federation
from unskew.errors import ConfigError
from unskew.option_parsing import import_callable
from unskew.simulation.update_buffer import TAKEN
from unskew.tasks.metrics import METRICS, MetricSet, OwnMetric
from unskew.tasks.primary_metric import RECALL, WORST, MetricInfo, client_metric_name, metric_info

SUMMARY = {
    *("round", "rounds", "retries", "objective", "own_metrics", "seed", "clients", "method", "data", "partition"),
    *(
        "model",
        "parameters",
        "buffers",
        "client_weighting",
        "engine",
        "clients_per_group",
        "target",
        "synthetic",
        "privacy",
        "gaussian_mu",
    ),
    *("partition_hash", "buffer_bytes_up", "buffer_bytes_down", "report_bytes_up", "updates_skipped", "diverged"),
    *("kept_round", "client", "name", "samples", "num_held_out", "class_counts"),
    *("attack", "attackers", "attacker", "backdoor_success", "unseen", "max_rounds", "seeds", "reference"),
    *("test_samples", "held_out_class_counts"),
    *("epsilon", "delta", "noise_multiplier", "clip_norm"),
}
"""Keys of rounds, summaries and client rows, which are not allowed as names of custom metrics."""
PREFIXES = ("synthetic_", "best_", "constant_", "client_", "clients_", "personal_", "validation_", "local_", "server_",
            "kept_", "unseen_", "epsilon_", "dpsgd_", "seconds_", "rounds_", "bytes_", "seeds_")  # fmt: skip
SUFFIXES = ("_std", "_before_closing", "_at_validation_round")


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of a run.

    Attributes:
        objective: Metric by which the run is judged.
        scored: Name of the task's primary metric.
        computed: Metrics computed from all predictions at once.
    """

    objective: MetricInfo
    scored: str
    computed: MetricSet

    @property
    def own(self) -> dict[str, str]:
        """Directions (``"lower"`` or ``"higher"`` is better) of custom metrics by name."""
        return {name: metric_direction(f) for name, f in self.computed.own.items()}

    @property
    def judging(self) -> list[MetricInfo]:
        """Primary metric of the task, and the objective if it is another metric."""
        return [metric_info(self.scored), *([self.objective] if self.objective.name != self.scored else [])]


def run_metrics(config: Experiment, federation: Federation) -> RunMetrics:
    """Return the metrics of a run, including custom ones.

    Args:
        config: Configuration of the run.
        federation: Data of all clients.

    Raises:
        ConfigError: If a metric does not fit the task, or a function cannot be imported, or its name is in use.
    """
    task, names = federation.objective, federation.names
    known = [str(entry) for entry in config.metrics if not is_custom_metric(entry)]
    own = {metric_name(entry): metric_function(entry) for entry in config.metrics if is_custom_metric(entry)}
    where = f"the task of {federation.name} is {federation.task}"
    if known and task.name != "classification":
        raise ConfigError(f"metrics={known[0]} needs one class per sample, but {where}, which has its own metrics.")
    objective = config.objective
    name = task.scored if objective == AUTO else metric_name(objective)
    if is_custom_metric(objective) and name not in own:
        own[name] = metric_function(objective)
    if own and task.name == "language":
        raise ConfigError(
            f"The metric {next(iter(own))} needs one value per sample, but {where}. Use loss or perplexity."
        )
    check_metric_names_free(own)
    possible = [task.scored, "loss", WORST, *task.figures, *own]
    if task.name == "classification":
        possible += [*(entry for entry in METRICS if entry != "recall"), *(f"{RECALL}{entry}" for entry in names)]
    if name not in possible:
        few = [entry for entry in possible if not entry.startswith(RECALL)]
        more = f", {RECALL}CLASS" if len(few) < len(possible) else ""
        raise ConfigError(f"objective={name} is not available: {where}. Available: {', '.join(few)}{more}.")
    base_name = "recall" if name.startswith(RECALL) else name
    if base_name in METRICS and base_name not in known:
        known.append(base_name)
    computed = MetricSet(tuple(known), own, tuple(names), judged=client_metric_name(name, task.scored))
    return RunMetrics(
        metric_info(name, {entry: metric_direction(f) for entry, f in own.items()}), task.scored, computed
    )


def metric_function(value: MetricLike) -> OwnMetric:
    """Return the function of a metric, imported if it is given as an import path.

    Args:
        value: Function, or import path ``package.module:function``.

    Raises:
        ConfigError: If it cannot be imported, or its path comes from an untrusted file.
    """
    return import_callable(value, f"the metric {value!r}") if isinstance(value, str) else value


def metric_direction(function: OwnMetric) -> str:
    """Return ``"lower"`` or ``"higher"``, from the attribute ``lower_is_better`` of a metric function.

    Args:
        function: Custom metric.

    Raises:
        ConfigError: If the attribute is not True or False.
    """
    lower: Any = getattr(function, "lower_is_better", False)
    if not isinstance(lower, bool):
        raise ConfigError(
            f"The metric {metric_reference(function)} has lower_is_better={lower!r}; set it to True or False."
        )
    return "lower" if lower else "higher"


def check_metric_names_free(own: Mapping[str, OwnMetric]) -> None:
    """Validate that no custom metric has the name of an existing metric or key (raises ``ConfigError`` otherwise)."""
    taken = sorted(
        name for name in own if name in {*TAKEN, *SUMMARY} or name.startswith(PREFIXES) or name.endswith(SUFFIXES)
    )
    if taken:
        raise ConfigError(f"The metric {taken[0]} has the name of an existing metric; rename the function.")
