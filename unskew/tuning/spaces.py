"""Search spaces: options common to all methods, options of each method, and user-defined spaces."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.errors import ConfigError, short_repr, unknown_name
from unskew.expressions import Expression, parse_expression
from unskew.methods.registry import COMPOSITIONS, check_expression, rule_class, written_parts
from unskew.option_parsing import build_from_options, option_defaults, options_without_effect
from unskew.protocol.search_space import CategoricalSpace, RangeSpace, Space, log_range, one_of, read_space

SHARED = (
    *("lr", "batch_size", "local_steps", "local_epochs", "momentum", "weight_decay", "nesterov", "clip_grad_norm"),
    *("optimizer", "lr_schedule", "lr_schedule_per", "client_weighting", "buffers", "drop_last", "augment"),
)
"""Fields that may be tuned: training fields, but no fields of the data, the rounds or the machine."""
BUDGETS = {"local_steps": "local_epochs", "local_epochs": "local_steps"}
SERVER_BUDGETS = {"steps": "epochs", "epochs": "steps"}
"""Pairs of options of which only one may be set."""
DIGITS = 3
"""Significant digits of a tuned number, which keep method expressions short."""


def split_expression(composition: str) -> list[tuple[str, dict[str, str]]]:
    """Return the name of each method of a composition and its written options, as strings."""
    parts = []
    for part in check_expression(composition):
        expression = parse_expression(part)
        name = expression.name if "." in expression.name else expression.name.lower()
        parts.append((name, expression.with_flags(expression.values)))
    return parts


def join_expression(parts: list[tuple[str, dict[str, str]]]) -> str:
    """Invert ``split_expression``.

    Args:
        parts: Name and options of each method.

    Raises:
        ConfigError: If the value of an option would be read as another option, or as another method.

    >>> join_expression(split_expression("fedprox:mu=0.1 + scaffold"))
    'fedprox:mu=0.1+scaffold'
    """
    texts = [str(Expression(name, options=options)) for name, options in parts]
    for text, (name, options) in zip(texts, parts, strict=True):
        if written_parts(text) != [text] or parse_expression(text) != Expression(name, options=options):
            raise ConfigError(
                f"{short_repr(text)} is not one method with its options: a value contains a comma, quotes, blanks at an end, "
                "or a plus sign before a letter. Use other values."
            )
    return "+".join(texts)


def canonical_expression(composition: str) -> str:
    """Return a composition in a single notation; names of published compositions stay, so that their options are tuned.

    >>> canonical_expression("FedSpeed + fedprox:mu=0.1")
    'fedspeed+fedprox:mu=0.1'
    """
    split_expression(composition)  # validates it
    return "+".join(
        part.lower() if part.lower() in COMPOSITIONS else join_expression(split_expression(part))
        for part in written_parts(composition)
    )


def common_spaces(config: Experiment) -> dict[str, Space]:
    """Return the search spaces common to all methods, around the configured values.

    The learning rate ranges from a hundredth to ten times its value; local work and batch size range from half to twice
    their values, which bounds the cost of a trial.
    """
    budget = "local_epochs" if config.local_steps is None else "local_steps"
    work, batch = int(getattr(config, budget)), config.batch_size
    return {
        "lr": log_range(float(f"{config.lr / 100:.3g}"), min(1e6, float(f"{config.lr * 10:.3g}"))),
        budget: log_range(max(1, work // 2), 2 * work),
        "batch_size": one_of(*sorted({max(1, batch // 2), batch, 2 * batch})),
    }


def method_spaces(spelling: str) -> dict[str, Space]:
    """Return the search spaces of a composition's methods, with names such as ``fedprox.mu``.

    Options that are set in the expression or that have no effect with it are omitted. The authors' options of a published
    composition, such as ``fedspeed``, are tuned, like the default options of a method.
    """
    spaces: dict[str, Space] = {}
    for part in written_parts(spelling):
        is_published = part.lower() in COMPOSITIONS
        for name, options in split_expression(part):
            written = {} if is_published else options
            idle = _idle_options(name, options)
            for option, space in rule_spaces(name).items():
                if option not in written and SERVER_BUDGETS.get(option) not in written and option not in idle:
                    spaces[f"{name}.{option}"] = space
    return spaces


def _idle_options(name: str, options: Mapping[str, object]) -> set[str]:
    """Return the options of a rule that have no effect with the given ones."""
    return set(options_without_effect(build_from_options(rule_class(name), options, name, f"{name}:")))


def rule_spaces(name: str) -> dict[str, Space]:
    """Return the search spaces that the class of a rule declares, as spaces or in the format of ``--space``.

    Args:
        name: Name or import path of the rule.

    Raises:
        ConfigError: If the class has no such option, or the option does not accept such values.
    """
    cls = rule_class(name)
    if not isinstance(cls.spaces, Mapping):
        raise ConfigError(f"The spaces of {name} must be a mapping, such as {{'OPTION': '0.001:0.3:log'}}.")
    spaces: dict[str, Space] = {}
    for option, space in cls.spaces.items():
        if option not in option_defaults(cls):
            raise ConfigError(unknown_name("option", str(option), option_defaults(cls), f"The class of {name}"))
        if not isinstance(space, RangeSpace | CategoricalSpace):
            space = read_space(space, f"{name}.{option}", partial(_check_option, cls, option, name))
        spaces[option] = space
    return spaces


def user_spaces(given: Mapping[str, object], methods: list[str], values: Mapping[str, Any]) -> dict[str, Space]:
    """Validate user-defined spaces: of fields for all methods, or of a method's option, such as ``fedprox.mu``.

    Args:
        given: Search spaces by name.
        methods: Method expressions.
        values: Fields of the run.

    Raises:
        ConfigError: If there is no such field or option, none of the methods has it, or it does not accept such values.
    """
    spaces: dict[str, Space] = {}
    known_names = {name for spelling in methods for name, _ in split_expression(spelling)}
    for key, value in given.items():
        owner, dot, option = str(key).rpartition(".")
        if not dot:
            if key not in SHARED:
                raise ConfigError(unknown_name("option to tune for all methods", str(key), SHARED))
            spaces[key] = read_space(value, key, partial(_check_field, values, key))
            continue
        if owner not in known_names:
            raise ConfigError(f"The space {key} belongs to none of the methods {', '.join(sorted(known_names))}.")
        cls = rule_class(owner)
        if option not in option_defaults(cls):
            raise ConfigError(unknown_name("option", option, option_defaults(cls), owner))
        spaces[key] = read_space(value, key, partial(_check_option, cls, option, owner))
    both = [name for name in BUDGETS if name in spaces]
    if len(both) == 2:
        raise ConfigError("local_steps and local_epochs both have a search space. Set only one of them.")
    return spaces


def _check_field(values: Mapping[str, Any], key: str, value: Any) -> None:
    experiment({**without_rival(values, key), key: value})


def _check_option(cls: type, option: str, owner: str, value: Any) -> None:
    build_from_options(cls, {option: value}, owner, f"{owner}.")


def without_rival(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values without the option that excludes ``key``.

    Args:
        values: Options by name.
        key: Option that is set.
    """
    return {name: value for name, value in values.items() if name != BUDGETS.get(key)}


def spaces_for(spelling: str, config: Experiment, given: Mapping[str, Space]) -> dict[str, Space]:
    """Return all search spaces of a method; a space with one value fixes the option.

    Args:
        spelling: Method expression.
        config: Configuration common to all runs.
        given: User-defined spaces, which replace others of the same name.
    """
    names = {name for name, _ in split_expression(spelling)}
    own_spaces = {key: space for key, space in given.items() if "." not in key or key.rpartition(".")[0] in names}
    spaces = {**common_spaces(config), **method_spaces(spelling), **own_spaces}
    return {key: space for key, space in spaces.items() if BUDGETS.get(key) not in own_spaces}


def rounded(value: Any, space: Space) -> Any:
    """Round a value to few digits, inside its range.

    Args:
        value: Value that was drawn.
        space: Its search space.

    >>> rounded(0.0123456, log_range(0.001, 1.0))
    0.0123
    """
    if not isinstance(space, RangeSpace) or not isinstance(value, float):
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), space.low), space.high)


def apply_parameters(spelling: str, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a method expression with options, and the other fields of the run.

    Options of the expression that have no effect with these values are omitted, because a run would reject them.

    Args:
        spelling: Method expression.
        params: Values by name of the search space.

    >>> apply_parameters("fedprox+scaffold", {"lr": 0.1, "fedprox.mu": 0.5})
    ('fedprox:mu=0.5+scaffold', {'lr': 0.1})
    """
    parts, fields = split_expression(spelling), {}
    idle = [_idle_options(name, options) for name, options in parts]
    for key, value in params.items():
        owner, dot, option = key.rpartition(".")
        if not dot:
            fields[key] = value
        for name, options in parts:
            if dot and name == owner:
                options[option] = str(value)
    join_expression(parts)  # validates the values
    for (name, options), before in zip(parts, idle, strict=True):
        for option in _idle_options(name, options) - before:
            options.pop(option, None)
    return join_expression(parts), fields


def fixed_fields(spaces: Mapping[str, Space]) -> dict[str, Any]:
    """Return the options with only one possible value."""
    return {
        key: space.values[0]
        for key, space in spaces.items()
        if isinstance(space, CategoricalSpace) and len(space.values) == 1
    }


def is_in_space(value: Any, space: Space) -> bool:
    """Return whether a space contains a value.

    Args:
        value: Any value.
        space: Search space.
    """
    if isinstance(space, CategoricalSpace):
        return value in space.values
    return isinstance(value, int | float) and space.low <= value <= space.high


def configured_values(spelling: str, config: Experiment, spaces: Mapping[str, Space]) -> dict[str, Any]:
    """Return the values of the configuration and of the method's options that are tuned, also outside their spaces.

    Options without a value (None) and fixed ones are omitted.

    Args:
        spelling: Method expression.
        config: Configuration of the run.
        spaces: Search spaces by name.
    """
    values_found: dict[str, Any] = {}
    fixed = fixed_fields(spaces)
    rules = {
        name: build_from_options(rule_class(name), options, name, f"{name}:")
        for name, options in split_expression(spelling)
    }
    for key, space in spaces.items():
        owner, dot, option = key.rpartition(".")
        value = getattr(rules[owner], option) if dot else getattr(config, key)
        if value is not None and key not in fixed:
            is_float = isinstance(space, RangeSpace) and not space.integer
            values_found[key] = float(value) if is_float else value
    return values_found
