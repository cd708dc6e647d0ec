"""Fields that differ between the methods of a comparison, such as tuned options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.metrics import metric_reference
from unskew.config.paths import with_absolute_paths
from unskew.errors import ConfigError, short_repr, unknown_name
from unskew.runs.metrics import RunMetrics
from unskew.tasks.primary_metric import ONE_CLASS
from unskew.tasks.registry import changed_loss


def overrides_by_method(each: Any, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Validate the overrides and return them for each method.

    Args:
        each: Fields by method name.
        names: Method expressions of the comparison.

    Raises:
        ConfigError: If a method is not in the comparison, or a field is set by the comparison itself.
    """
    if not isinstance(each, Mapping | None) or not all(isinstance(fields, Mapping) for fields in (each or {}).values()):
        raise ConfigError(f"overrides must be a mapping such as {{'fedavg': {{'lr': 0.1}}}}, not {short_repr(each)}.")
    by_method = {name: dict(fields) for name, fields in (each or {}).items()}
    for name, fields in by_method.items():
        if name not in names:
            raise ConfigError(unknown_name("method in this comparison", str(name), names))
        wrong = next((key for key in ("method", "seed", "target") if key in fields), None)
        if wrong is not None:
            raise ConfigError(f"overrides[{name!r}] contains {wrong}, which the comparison sets. Remove it.")
    return {name: by_method.get(name, {}) for name in names}


def check_same_data(configs: Iterable[Experiment]) -> None:
    """Validate that all methods use the same data.

    Args:
        configs: Configuration of each method.

    Raises:
        ConfigError: If a data field differs between methods.
    """
    specs = [with_absolute_paths(config).data_spec.model_dump() for config in configs]
    for spec in specs[1:]:
        for name, value in spec.items():
            if value != specs[0][name]:
                raise ConfigError(
                    f"Methods are compared on the same data, but {name} is {short_repr(specs[0][name])} for one of them and "
                    f"{short_repr(value)} for another."
                )


def check_same_objective(configs: Iterable[Experiment]) -> None:
    """Validate that all methods have the same objective, which may be their loss.

    Args:
        configs: Configuration of each method.

    Raises:
        ConfigError: If their objectives differ.
    """
    configs = list(configs)
    texts = list(dict.fromkeys(metric_reference(config.objective) for config in configs))
    if len(texts) > 1:
        raise ConfigError(f"All methods of a comparison must have the same objective, not {' and '.join(texts)}.")
    losses = {config.loss: changed_loss(config.loss) for config in configs}
    different = [loss for loss, task in losses.items() if task != losses[configs[0].loss]]
    if texts == ["loss"] and different:
        raise ConfigError(
            f"With objective=loss, all methods of a comparison must have the same loss, not {configs[0].loss} and "
            f"{' and '.join(different)}. Use one loss, or another objective such as mae."
        )


def check_same_positive(metrics: Sequence[RunMetrics]) -> None:
    """Validate that metrics that depend on the positive class have the same one in all methods.

    Args:
        metrics: Metrics of each method.

    Raises:
        ConfigError: If the positive classes differ.
    """
    names = [name for name in ONE_CLASS if any(name in of_method.computed.known for of_method in metrics)]
    classes = list(dict.fromkeys(str(of_method.positive) for of_method in metrics))
    if names and len(classes) > 1:
        raise ConfigError(
            f"All methods of a comparison must have the same positive class, on which {names[0]} depends, not "
            f"{' and '.join(classes)}. Set positive to the same class for all of them."
        )
