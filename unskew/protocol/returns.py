"""Validation of the values that hooks of rules return; errors name the rule and the hook."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from unskew.data.federation import ClientData
from unskew.errors import ConfigError, short_repr
from unskew.protocol.data_preparation import ClientPayloads, PreparedData, ServerPayload

Check = Callable[[Any, tuple[Any, ...]], bool]


def _tensors(value: Any, _: object = None) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def _by_client(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, int) and _tensors(t) for k, t in value.items())


def _number(value: object) -> bool:
    return isinstance(value, int | float | None) or (isinstance(value, list | tuple) and all(map(_number, value)))


def _figures(value: Any, _: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and _number(v) for k, v in value.items())


def _slices(value: Any, _: object = None) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(span, slice) for span in value)


def _pair(value: Any, first: type, second: type) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], first) and isinstance(value[1], second)


def _like(value: Any, model: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == model.shape


def _moves(value: Any, arguments: tuple[Any, ...]) -> bool:
    return value is None or (_like(value, arguments[0].v_global) and value.dtype == torch.bool)


def _travels(value: Any, _: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(value_part is None or _slices(value_part) for value_part in value)
    )


def _contributed(value: Any, _: object) -> bool:
    return isinstance(value, ClientPayloads) and _by_client(value.sent) and isinstance(value.about, dict)


def _dealt(value: Any, _: object) -> bool:
    return isinstance(value, ServerPayload) and _by_client(value.shares) and _tensors(value.common)


TENSORS = ("a dictionary of tensors by name", _tensors)
FIGURES = ("a dictionary of metrics by name, each a number or a list of numbers", _figures)
RETURNS: dict[str, tuple[str, Check]] = {
    **dict.fromkeys(
        ("server_init", "download", "server_update", "client_info", "begin", "decode", "init", "step"), TENSORS
    ),
    "encode": (
        "a pair of dictionaries of tensors by name: streams and state",
        lambda value, _: isinstance(value, tuple) and len(value) == 2 and all(map(_tensors, value)),
    ),
    "combine": (
        "the new state, a dictionary of tensors, and a Combined with a tensor delta",
        lambda value, _: (
            isinstance(value, tuple) and len(value) == 2 and _tensors(value[0]) and hasattr(value[1], "delta")
        ),
    ),
    "metrics": FIGURES,
    "round_metrics": FIGURES,
    "adapt": ("a pair of a torch.nn.Module and the name of its head", lambda value, _: _pair(value, nn.Module, str)),
    "trainable_mask": ("None or a boolean tensor with an entry for each parameter", _moves),
    "generated_samples": ("None or a pair of tensors", lambda value, _: value is None or _pair(value, Tensor, Tensor)),
    "personal": ("None or a tensor", lambda value, _: value is None or isinstance(value, Tensor)),
    "evaluated": ("a model like state['v']", lambda value, given: _like(value, given[0]["v"])),
    "exchanged_slices": ("a pair of tuples of slices, to download and to upload", _travels),
    "local_slices": ("a tuple of slices", _slices),
    "client_payload": ("unskew.protocol.data_preparation.ClientPayloads with tensors by client", _contributed),
    "server_payload": ("unskew.protocol.data_preparation.ServerPayload with tensors by client", _dealt),
    "apply_payload": ("a ClientData", lambda value, _: isinstance(value, ClientData)),
    "prepare": ("a PreparedData", lambda value, _: isinstance(value, PreparedData)),
    "for_client": ("None or a data rule", lambda value, _: value is None or hasattr(value, "client_payload")),
    "conflict_with": ("None or a sentence", lambda value, _: isinstance(value, str | None)),
    "buffer": ("None or an integer number of updates from 1", lambda value, _: isinstance(value, int | None)),
}
"""Description of each hook's return value, and its check, which gets the returned value and the arguments."""
WRITES = ("end", "transform_update")
"""Hooks that may write to ``ctx.state`` and ``ctx.upload``."""


def checked_hook(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook of a rule so that a wrong return value raises an error.

    Args:
        hook: Name of the hook.
        function: Its implementation.

    Returns:
        Function with the same arguments that raises ``ConfigError`` for a wrong value.
    """
    described, valid = RETURNS.get(hook, ("", None))

    @functools.wraps(function)
    def call(rule: Any, *arguments: Any, **named: Any) -> Any:
        try:
            value = function(rule, *arguments, **named)
        except StopIteration as error:
            raise ConfigError(
                f"{rule.name}.{hook} raised StopIteration: an iterator is exhausted. Create a new iterator, or call "
                "next(iterator, default)."
            ) from error
        arguments_given = (*arguments, *named.values())
        if valid is not None and not valid(value, arguments_given):
            raise ConfigError(f"{rule.name}.{hook} must return {described}, not {short_repr(value)[:200]}.")
        if hook in WRITES:
            for field in ("state", "upload"):
                if not _tensors(getattr(arguments_given[0], field)):
                    raise ConfigError(
                        f"{rule.name}.{hook} may write only tensors to ctx.{field}, each under a string name."
                    )
        return value

    call.checks = hook  # type: ignore[attr-defined]
    return call


def wrap_hooks(cls: type, base: str) -> None:
    """Wrap the hooks that a new rule class implements or inherits from a mixin.

    Args:
        cls: Rule class; changed in place.
        base: Module of the base classes; their own hooks are not wrapped.
    """
    for hook in (*RETURNS, *WRITES, "loss", "gradient"):
        function = getattr(cls, hook, None)
        if isinstance(function, FunctionType) and function.__module__ != base and not hasattr(function, "checks"):
            setattr(cls, hook, checked_hook(hook, function))
