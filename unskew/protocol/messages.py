"""Messages between server and client in a round, and the state that stays at the client."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Slices = tuple[slice, ...]
Record = TypeVar("Record")


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element is finite.

    The sum propagates NaN and infinity, and is much faster than checking each element.
    """
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def replace_fields(record: Record, **fields: Any) -> Record:
    """The same with other values for some fields; ``dataclasses.replace`` takes ten times as long."""
    other = object.__new__(type(record))
    other.__dict__.update(record.__dict__, **fields)
    return other


@dataclass(frozen=True)
class ClientState:
    """State that stays at a client between rounds; it is never sent and never counts as traffic.

    Attributes:
        rules: What each client rule keeps, by the rule's name.
        model: The client's model ``[d]``, where not all of it travels.
        statistics: Its normalization statistics ``[m]``, where not all of them travel.
        optimizer: The optimizer's state, where a rule keeps it.
    """

    rules: dict[str, Tensors] = field(default_factory=dict)
    model: Tensor | None = None
    buffers: Tensor | None = None
    optimizer: Tensors = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """All of it under names that cannot clash, whatever a rule is called; contiguous, but not copied."""
        own = {"model": self.model, "statistics": self.buffers}
        return {
            **{name: t.contiguous() for name, t in own.items() if t is not None},
            **{f"optimizer/{name}": t.contiguous() for name, t in self.optimizer.items()},
            **flatten_records("rules", self.rules),
        }

    @staticmethod
    def of(tensors: Tensors) -> ClientState:
        """Inverse of ``tensors``."""
        optimizer = {name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")}
        return ClientState(
            unflatten_records("rules", tensors), tensors.get("model"), tensors.get("statistics"), optimizer
        )

    def updated(self, newer: ClientState) -> ClientState:
        """This state with what ``newer`` holds instead of what it held before."""
        return ClientState(
            {**self.rules, **newer.rules},
            self.model if newer.model is None else newer.model,
            self.buffers if newer.buffers is None else newer.buffers,
            newer.optimizer or self.optimizer,
        )


def flatten_records(kind: str, rules: dict[str, Tensors]) -> Tensors:
    """``{rule: {name: tensor}}`` as ``{"kind/rule/name": tensor}``.

    Args:
        kind: Prefix of the names.
        rules: Tensors by rule and name.
    """
    return {f"{kind}/{rule}/{name}": t.contiguous() for rule, ts in rules.items() for name, t in ts.items()}


def unflatten_records(kind: str, tensors: Tensors) -> dict[str, Tensors]:
    """Inverse of ``flatten_records``; what is of another kind is passed over.

    Args:
        kind: Prefix of the names.
        tensors: Tensors by full name.
    """
    rules: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        if key.startswith(f"{kind}/"):
            rule, _, name = key.removeprefix(f"{kind}/").partition("/")
            rules.setdefault(rule, {})[name] = tensor
    return rules


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class Broadcast:
    """Message from the server to one client.

    Attributes:
        round, client: When, and who.
        v, b: The model ``[d]`` and its statistics ``[m]``. A client reads of them what is sent, and ``initial``.
        download: Each rule's extra tensors.
        state: What stays at the client; it is there already, and not sent.
        weight: The client's aggregation weight before normalization.
        down, up: Slices of ``v`` that are sent, and that are sent back; None stands for all.
        initial: Slices that a client without a model of its own begins with although they are not sent: those of the model
            that the run began with, which follows from the seed and costs no traffic.
        accepted: Round of the client's last update that the server took in, None if there is none. The client goes on from
            the state that it had after that one.
        report: Whether the whole model is to be reported, slices that stay at the client included.
        show: Whether the inputs that the client made are to be shown.
        keeps: Whether the optimizer's state stays at the client from round to round.
        kept: Where ``state`` lies in files that whoever trains the client reads and writes itself: the file to read, empty if
            there is none yet, and the file to write. None: ``state`` is here.
    """

    round: int
    client: int
    v: Tensor
    b: Tensor
    download: dict[str, Tensors]
    state: ClientState
    weight: float
    down: Slices | None = None
    up: Slices | None = None
    initial: Slices = ()
    accepted: int | None = None
    report: bool = False
    show: bool = False
    keeps: bool = False
    kept: tuple[str, str] | None = None


FIELDS = ("client", "born", "examples", "weight", "metrics", "arrived", "version")
"""Fields of an update other than tensors."""


@dataclass(frozen=True)
class Update:
    """Message from one client to the server.

    Attributes:
        client, born, arrived: Who, the round of its broadcast, the round of its arrival.
        examples: Real samples it trained on; ``weight`` is its aggregation weight before normalization.
        delta: Local result minus the model that was broadcast, ``[d]``; zero on slices that did not travel.
        buffers: The statistics after training, ``[m]``.
        upload: Each rule's extra tensors.
        state: What stays at the client.
        metrics: Figures such as the mean training loss and the number of steps.
        report: The whole model ``v [d]``, if it was asked for; to be measured, no part of the method's traffic.
        made: Inputs ``x`` and targets ``y`` that the client made, if it was asked for them.
        kept: The file that was written instead of ``state``, and its SHA-256.
        start, b_start, last, version: What the server knows beside it, for rules that need it: the model ``[d]`` and the
            statistics ``[m]`` that were broadcast, the client's last update ``[d]`` before this one (None: it is the first),
            and the number of updates that the server had taken in when it was sent out.
    """

    client: int
    born: int
    examples: int
    weight: float
    delta: Tensor
    buffers: Tensor
    upload: dict[str, Tensors]
    state: ClientState
    metrics: dict[str, float]
    arrived: int = -1
    report: Tensors = field(default_factory=dict)
    made: Tensors = field(default_factory=dict)
    kept: tuple[str, str] | None = None
    start: Tensor | None = None
    b_start: Tensor | None = None
    last: Tensor | None = None
    version: int = 0

    def is_finite(self) -> bool:
        """Return whether all numbers are finite, both those that are sent and those that stay at the client."""
        uploads = [t for tensors in self.upload.values() for t in tensors.values()]
        return all(map(is_finite, [self.delta, self.buffers, *uploads, *self.state.tensors().values()]))

    def fields(self) -> dict[str, Any]:
        """Return the fields that are not tensors, as JSON values."""
        return {name: getattr(self, name) for name in FIELDS}

    def tensors(self) -> Tensors:
        """Its tensors by name, in the memory of the CPU, but for inputs that are only shown."""
        single = {"delta": self.delta, "buffers": self.buffers}
        known = {"start": self.start, "b_start": self.b_start, "last": self.last}
        named = {
            **single,
            **{name: t for name, t in known.items() if t is not None},
            **flatten_records("upload", self.upload),
            **{f"report/{name}": t for name, t in self.report.items()},
            **{f"state/{name}": t for name, t in self.state.tensors().items()},
        }
        return {name: t.cpu() for name, t in named.items()}

    @staticmethod
    def of(fields: dict[str, Any], tensors: Tensors, device: torch.device | None = None) -> Update:
        """Inverse of ``fields`` and ``tensors``, on ``device``; without tensors it is an update that is on its way.

        Args:
            fields: Plain values by field name.
            tensors: Tensors by full name.
            device: Device of the tensors; None leaves them where they are.
        """
        moved = {name: t.to(device) for name, t in tensors.items()}
        state, report = (
            {n.removeprefix(k): t for n, t in moved.items() if n.startswith(k)} for k in ("state/", "report/")
        )
        none = torch.empty(0)
        return Update(
            delta=moved.get("delta", none),
            buffers=moved.get("buffers", none),
            upload=unflatten_records("upload", moved),
            state=ClientState.of(state),
            report=report,
            start=moved.get("start"),
            b_start=moved.get("b_start"),
            last=moved.get("last"),
            **fields,
        )
