"""Metrics of a run: the objective, and all metrics that are computed from predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unskew.config.experiment import Experiment
from unskew.config.metrics import AUTO, MetricLike, is_custom_metric, metric_name, metric_reference
from unskew.data.federation import Federation
from unskew.errors import ConfigError
from unskew.option_parsing import import_callable
from unskew.simulation.evaluate import evaluated_clients
from unskew.simulation.update_buffer import RESERVED_METRICS
from unskew.tasks.intervals import colliding_end
from unskew.tasks.metrics import TWO_CLASSES, MetricSet, OwnMetric, missing_classes
from unskew.tasks.primary_metric import ONE_CLASS, RECALL, WORST, MetricInfo, metric_info
from unskew.tasks.registry import TASKS

SUMMARY = {
    *("round", "rounds", "retries", "objective", "own_metrics", "seed", "clients", "method", "data", "partition"),
    *("model", "parameters", "buffers", "client_weighting", "engine", "clients_per_group", "target", "synthetic"),
    *("partition_hash", "buffer_bytes_up", "buffer_bytes_down", "report_bytes_up", "updates_skipped", "diverged"),
    "data_checksum",
    *(
        "kept_round",
        "client",
        "name",
        "samples",
        "num_held_out",
        "num_all",
        "class_counts",
        "positive",
        "support",
        "unseen",
    ),
    *("attack", "attackers", "attacker", "backdoor_success", "max_rounds", "seeds", "reference", "test_samples"),
    *("epsilon", "delta", "noise_multiplier", "clip_norm", "privacy", "gaussian_mu"),
}
"""Keys of rounds, summaries and client rows, which are not allowed as names of custom metrics."""
PREFIXES = (
    *("synthetic_", "best_", "constant_", "client_", "clients_", "personal_", "validation_", "local_", "server_"),
    *("kept_", "unseen_", "all_", "epsilon_", "dpsgd_", "seconds_", "rounds_", "bytes_", "seeds_"),
)
NO_OBJECTIVES = (*TWO_CLASSES, "risk_gap")
"""Metrics whose best value is between worse ones."""
SUFFIXES = ("_std", "_low", "_high", "_before_closing", "_at_validation_round")


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of a run.

    Attributes:
        objective: Metric by which the run is judged.
        scored: Name of the task's primary metric.
        computed: Metrics computed from all predictions at once.
        positive: Name of the positive one of two classes; None with more classes and other tasks.
    """

    objective: MetricInfo
    scored: str
    computed: MetricSet
    positive: str | None = None

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
    for entry in known:
        if entry not in task.requestable:
            others = " or ".join(name for name, other in TASKS.items() if entry in other.requestable)
            raise ConfigError(f"metrics={entry} requires {others}, but {where}, which has its own metrics.")
    one_class = "one_class" in task.provides
    two_classes = one_class and len(names) == 2
    if config.positive is not None and not (two_classes and config.positive in names):
        classes = f" of the classes {', '.join(names[:20])}" if one_class else ""
        raise ConfigError(f"positive={config.positive} must be one of two classes, but {where}{classes}.")
    two_only = [entry for entry in known if entry in TWO_CLASSES]
    if two_only and len(names) != 2:
        raise ConfigError(f"metrics={two_only[0]} needs two classes, but {federation.name} has {len(names)}.")
    objective = config.objective
    name = task.judged_by if objective == AUTO else metric_name(objective)
    if is_custom_metric(objective) and name not in own:
        own[name] = metric_function(objective)
    if own and "vector" not in task.provides:
        raise ConfigError(
            f"The metric {next(iter(own))} needs one value per sample, but {where}. Use one of loss, "
            f"{', '.join((*task.extra_metrics, *task.requestable))}."
        )
    check_metric_names_free(own)
    possible = [task.scored, "loss", WORST, *task.extra_metrics, *own]
    judging = tuple(entry for entry in task.requestable if entry not in NO_OBJECTIVES)
    possible += task.metric_names(MetricSet(judging, class_names=tuple(names)))
    if name not in possible:
        few = [entry for entry in possible if not entry.startswith(RECALL)]
        more = f", {RECALL}CLASS" if len(few) < len(possible) else ""
        raise ConfigError(f"objective={name} is not available: {where}. Available: {', '.join(few)}{more}.")
    base_name = name.partition("/")[0]
    if base_name in task.requestable and base_name not in known:
        known.append(base_name)
    index = 1 if config.positive is None else names.index(config.positive)
    with_intervals = task.names_with_intervals(entry for entry in (task.scored, name) if entry not in (WORST, *own))
    computed = MetricSet(tuple(known), own, tuple(names), index, task.weights, with_intervals)
    of_classes = task.metric_names(computed)
    if collision := colliding_end((*with_intervals, *of_classes), (*task.extra_metrics, *of_classes)):
        metric, end = collision
        kind, _, other = end.partition("/")
        raise ConfigError(
            f"The lower or upper end of the interval of {metric} is written as {end}, which is also the metric of another "
            f"class. Rename the class {other!r}, or use metrics and an objective without {kind}."
        )
    directions = {entry: metric_direction(f) for entry, f in own.items()}
    positive = names[index] if two_classes else None
    judge = metric_info(name, directions, positive)
    if config.target is not None and config.target > 1 and judge.percent:
        raise ConfigError(f"target={config.target:g} is not valid: it must be at most 1, such as 0.9 for 90 %.")
    return RunMetrics(judge, task.scored, computed, positive)


def objective_warnings(metrics: RunMetrics, config: Experiment, federation: Federation) -> list[str]:
    """Return warnings about an objective that the test set cannot measure, or that judges the common class.

    Args:
        metrics: Metrics of the run.
        config: Configuration of the run.
        federation: Data of all clients.
    """
    name, title, y = metrics.objective.name, metrics.objective.title, federation.test[1].cpu().numpy()
    if metrics.scored == "r2" and name == "r2" and bool((y == y[:1]).all(0).any()):
        return [
            "The test R² says nothing: all targets in the test set are equal. Use a larger test set or objective=mae."
        ]
    if "one_class" not in federation.objective.provides:
        return []
    if missing := missing_classes(name, y, federation.names):
        return [
            f"The {title} is undefined on the test set, which has no sample of the class {', '.join(missing)}: there are "
            "no test values and no best round. Set objective=balanced_accuracy, or provide more rows of this class."
        ]
    share = float((y == 1).mean())
    if name in ONE_CLASS and metrics.positive is not None and config.positive is None and share > 0.5:
        rare, common = federation.names
        return [
            f"The objective is the {title}, but {common} is the common class ({share:.0%} of the {len(y)} test samples). "
            f"Set positive={rare} to judge the rare class."
        ]
    return []


def check_objective_on_held_out(metrics: RunMetrics, config: Experiment, federation: Federation, why: str) -> None:
    """Validate that the clients' held-out samples can measure the objective.

    Args:
        metrics: Metrics of the run.
        config: Configuration of the run.
        federation: Data of all clients.
        why: Option that needs the objective on held-out samples.

    Raises:
        ConfigError: If the objective is undefined because a class has no held-out sample.
    """
    name = metrics.objective.name
    one_class = "one_class" in federation.objective.provides
    if not one_class or not missing_classes(name, np.zeros(0, np.int64), federation.names):
        return
    clients = evaluated_clients(len(federation.clients), config.eval_clients, config.seed)
    y = np.concatenate([federation.clients[k].y_test.cpu().numpy() for k in clients])
    if missing := missing_classes(name, y, federation.names):
        raise ConfigError(
            f"{why} needs the {metrics.objective.title} on the clients' {len(y)} held-out samples, of which none has the "
            f"class {', '.join(missing)}. Set objective=balanced_accuracy, increase holdout, or provide more rows of this "
            "class."
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
    names = {*RESERVED_METRICS, *SUMMARY}
    taken = sorted(name for name in own if name in names or name.startswith(PREFIXES) or name.endswith(SUFFIXES))
    if taken:
        raise ConfigError(f"The metric {taken[0]} has the name of an existing metric; rename the function.")
