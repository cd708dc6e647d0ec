"""Validation of the values that hooks of rules return; errors name the rule and the hook."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from unskew.data.federation import ClientData
from unskew.errors import ConfigError, short_repr
from unskew.protocol.data_preparation import ClientPayloads, PreparedData, ServerPayload
from unskew.protocol.messages import PERSONAL, PERSONAL_BUFFERS
from unskew.protocol.report import Report

Check = Callable[[Any, tuple[Any, ...]], bool]


def _tensors(value: Any, _: object = None) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def _by_client(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, int) and _tensors(t) for k, t in value.items())


def _number(value: object) -> bool:
    return isinstance(value, int | float | None) or (isinstance(value, list | tuple) and all(map(_number, value)))


def _metrics(value: Any, _: object) -> bool:
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


def _client_payload(value: Any, _: object) -> bool:
    sent = isinstance(value, ClientPayloads) and _by_client(value.sent) and isinstance(value.summary, dict)
    return sent or isinstance(value, PreparedData)


def _server_payload(value: Any, _: object) -> bool:
    return isinstance(value, ServerPayload) and _by_client(value.shares) and _tensors(value.common)


TENSORS = ("a dictionary of tensors by name", _tensors)
METRICS = ("a dictionary of metrics by name, each a number or a list of numbers", _metrics)
RETURNS: dict[str, tuple[str, Check]] = {
    **dict.fromkeys(
        ("server_init", "download", "server_update", "client_info", "survey", "begin", "decode", "init", "step"),
        TENSORS,
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
    "metrics": METRICS,
    "report": ("a Report", lambda value, _: isinstance(value, Report)),
    "adapt": ("a pair of a torch.nn.Module and the name of its head", lambda value, _: _pair(value, nn.Module, str)),
    "trainable_mask": ("None or a boolean tensor with an entry for each parameter", _moves),
    "exchanged_slices": ("a pair of tuples of slices, to download and to upload", _travels),
    "local_slices": ("a tuple of slices", _slices),
    "client_payload": ("ClientPayloads with tensors by client, or PreparedData", _client_payload),
    "server_payload": ("unskew.protocol.data_preparation.ServerPayload with tensors by client", _server_payload),
    "apply_payload": ("a ClientData", lambda value, _: isinstance(value, ClientData)),
    "conflict_with": ("None or a sentence", lambda value, _: isinstance(value, str | None)),
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
            ctx = arguments_given[0]
            for entry, like in ((PERSONAL, ctx.v_global), (PERSONAL_BUFFERS, ctx.b_global)):
                own = ctx.state.get(entry)
                if own is not None and not (rule.has_personal_model and _like(own, like)):
                    what = "a personal model" if entry == PERSONAL else "the buffers of a personal model"
                    raise ConfigError(
                        f"{rule.name}.{hook} writes ctx.state[{entry!r}], which is reserved for {what} "
                        f"{tuple(like.shape)} of rules with has_personal_model = True."
                    )
        return value

    call.checks = hook  # type: ignore[attr-defined]
    return call


def wrap_hooks(cls: type) -> None:
    """Wrap the hooks that a new rule class implements or inherits from a mixin, except those of the base classes.

    Args:
        cls: Rule class; changed in place.
    """
    for hook in (*RETURNS, *WRITES, "loss", "gradient"):
        function = getattr(cls, hook, None)
        if not isinstance(function, FunctionType) or hasattr(function, "checks"):
            continue
        if re.fullmatch(r"unskew\.protocol\.(\w+_)?rule", function.__module__) is None:
            setattr(cls, hook, checked_hook(hook, function))
