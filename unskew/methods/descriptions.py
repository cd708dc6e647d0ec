"""Descriptions of registered methods for listings."""

from __future__ import annotations

from typing import Any

from unskew.errors import ConfigError
from unskew.methods.registry import METHODS, rule_class
from unskew.option_parsing import option_defaults, option_meanings
from unskew.protocol.method import class_slots
from unskew.protocol.rules import ServerRule
from unskew.tasks.registry import tasks_with


def own_diagnostics() -> list[str]:
    """Return the names of the diagnostics that registered methods define."""
    classes = [rule_class(name) for name in METHODS]
    metrics = [metric for cls in classes if issubclass(cls, ServerRule) for metric in cls.summary_metrics]
    return sorted({metric.diagnosis for metric in metrics if metric.diagnosis is not None})


def describe_all() -> list[dict[str, Any]]:
    """Return the descriptions of all registered methods, see ``describe_method``."""
    return [describe_method(name) for name in METHODS]


def describe_method(name: str) -> dict[str, Any]:
    """Describe a method: slots, summary, what the server needs, tasks, support of delays, options and paper.

    ``options`` has the defaults of the options, ``meanings`` their descriptions.

    Args:
        name: Name or import path of the method.

    Raises:
        ConfigError: If the method does not exist, or a plugin cannot be loaded.
    """
    cls = rule_class(name)
    try:
        rule = cls()
        needs = "individual" if "individual" in rule.needs else "sum"
        texts = {"summary": cls.summary, "paper": cls.paper}
    except (AttributeError, TypeError) as error:  # a plugin with options that have no defaults
        raise ConfigError(f"The method {name!r} cannot be described: {error}.") from error
    return {
        "name": name,
        "slots": class_slots(cls),
        "summary": texts["summary"],
        "needs": needs,
        "tasks": tasks_with(rule.needs),
        "delays": cls.supports_delays,
        "options": option_defaults(cls),
        "meanings": option_meanings(cls),
        "paper": texts["paper"],
    }
