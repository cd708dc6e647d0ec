"""Messages between server and client in a round, and client state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Slices = tuple[slice, ...]
Record = TypeVar("Record")

PERSONAL = "personal"
"""Reserved entry of a rule's state at a client: its personal model, ``[d]``, for rules with ``has_personal_model``."""
PERSONAL_BUFFERS = "personal_buffers"
"""Reserved entry of the same state: the buffers of the personal model, ``[m]``; those of the global one if missing."""
START = "initial_model"
"""Entry of the carry that ``begin`` returns: the model ``[d]`` that training starts from instead of the received one."""
SHIFT = "update_shift"
"""Entry of the same carry: a vector ``[d]`` that is added to the update before all ``transform_update`` hooks, such as
``START`` minus the received model."""

EVALUATED = "evaluated"
"""Reserved entry of the state of the server rule: the model to evaluate and to save, ``[d]``, instead of ``"v"``."""


def finite_flags(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether every element is finite; a device is read once for all of its tensors.

    A sum propagates NaN and infinity, and is much faster than checking each element; only sums of large elements may
    overflow.
    """
    flags = [True] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        sums = torch.stack([tensors[index].sum().to(torch.float32) for index in indices]).tolist()
        for index, total in zip(indices, sums, strict=True):
            flags[index] = math.isfinite(total) or bool(torch.isfinite(tensors[index]).all())
    return flags


def replace_fields(record: Record, **fields: Any) -> Record:
    """Return a copy of a dataclass record with some fields replaced; ten times as fast as ``dataclasses.replace``."""
    other = object.__new__(type(record))
    other.__dict__.update(record.__dict__, **fields)
    return other


@dataclass(frozen=True)
class ClientState:
    """State that stays at a client between rounds; it is never sent and never counts as traffic.

    Attributes:
        rules: State of each client rule, by the rule's name.
        model: Client's model ``[d]``, if not all of it is exchanged.
        buffers: Client's normalization buffers ``[m]``, if not all of them are exchanged.
        optimizer: State of the optimizer, if a rule needs to keep it.
    """

    rules: dict[str, Tensors] = field(default_factory=dict)
    model: Tensor | None = None
    buffers: Tensor | None = None
    optimizer: Tensors = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """Return all tensors, contiguous but not copied, under names that cannot clash for any rule names."""
        own = {"model": self.model, "statistics": self.buffers}
        return {
            **{name: t.contiguous() for name, t in own.items() if t is not None},
            **{f"optimizer/{name}": t.contiguous() for name, t in self.optimizer.items()},
            **flatten_records("rules", self.rules),
        }

    @staticmethod
    def of(tensors: Tensors) -> ClientState:
        """Build the state from the output of ``tensors``."""
        optimizer = {name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")}
        return ClientState(
            unflatten_records("rules", tensors), tensors.get("model"), tensors.get("statistics"), optimizer
        )

    def updated(self, newer: ClientState) -> ClientState:
        """Return this state with the entries of ``newer`` replacing those of the same name."""
        return ClientState(
            {**self.rules, **newer.rules},
            self.model if newer.model is None else newer.model,
            self.buffers if newer.buffers is None else newer.buffers,
            newer.optimizer or self.optimizer,
        )


def flatten_records(kind: str, rules: dict[str, Tensors]) -> Tensors:
    """Flatten ``{rule: {name: tensor}}`` to ``{"kind/rule/name": tensor}``.

    Args:
        kind: Prefix of the names.
        rules: Tensors by rule and name.
    """
    return {f"{kind}/{rule}/{name}": t.contiguous() for rule, ts in rules.items() for name, t in ts.items()}


def unflatten_records(kind: str, tensors: Tensors) -> dict[str, Tensors]:
    """Invert ``flatten_records``; tensors of other kinds are ignored.

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
    """Return the total size of tensors in bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class Broadcast:
    """Message from the server to one client.

    Attributes:
        round: Number of the round, from 0.
        client: Client number.
        v: Model, ``[d]``. The client reads only the slices that are sent, and ``initial``.
        b: Normalization buffers, ``[m]``.
        download: Extra tensors of each rule.
        state: Client state; it is already at the client and not sent.
        weight: Client's aggregation weight before normalization.
        down: Slices of ``v`` to download; None for all.
        up: Slices of ``v`` to upload; None for all.
        initial: Slices that a client without its own model reads although they are not sent. They come from the initial
            model of the run, which follows from the seed and costs no traffic.
        accepted: Round of the client's last update that the server applied; None if there is none. The client continues
            from its state after that update.
        report: Whether the client must report its whole model, including slices that are not exchanged.
        carry_of: Client rule whose carry the client must return, so that its generated samples can be plotted; or empty.
        keeps_optimizer: Whether the state of the optimizer stays at the client from round to round.
        closing: Whether the client only answers the surveys after the last round, without training.
        asks_loss: Whether the client only reports the mean loss of its training samples, without training.
        state_files: Paths of the files that the process training the client reads (empty if there is none yet) and writes;
            None if ``state`` is in memory.
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
    carry_of: str = ""
    keeps_optimizer: bool = False
    closing: bool = False
    asks_loss: bool = False
    state_files: tuple[str, str] | None = None


FIELDS = ("client", "origin_round", "num_samples", "weight", "metrics", "arrived", "version", "sent_bytes")
"""Fields of an update that are not tensors."""


@dataclass(frozen=True)
class Update:
    """Message from one client to the server.

    Attributes:
        client: Client number.
        origin_round: Round of the broadcast that the client trained from.
        num_samples: Number of real training samples.
        weight: Aggregation weight before normalization.
        delta: Local model minus broadcast model, ``[d]``; zero on slices that were not exchanged.
        buffers: Buffers after training, ``[m]``.
        upload: Extra tensors of each rule.
        state: State that stays at the client.
        metrics: Metrics such as the mean training loss and the number of steps.
        arrived: Round in which the update reached the server; -1 until then.
        report: Whole model ``v [d]``, if requested; used for measurements and not counted as traffic.
        carry: Carry of the rule that the broadcast names in ``carry_of``, before the first step.
        state_file: Path and SHA-256 of the file that contains the state, if ``state`` is not in memory.
        start: Broadcast model, ``[d]``; the server adds it for rules that need it.
        b_start: Broadcast buffers, ``[m]``; the server adds them for rules that need them.
        last: The client's previous update, ``[d]``; the server adds it for rules that need it. None for the first
            update.
        version: Number of updates that the server had applied at broadcast.
        sent_bytes: Number of bytes of the encoded update and uploads; None if they are sent as vectors.
        encoded: Encoded streams, kept only at sites that send them as a message.
        known_finite: Whether the engine found all numbers finite; ``dataclasses.replace`` resets it.
    """

    client: int
    origin_round: int
    num_samples: int
    weight: float
    delta: Tensor
    buffers: Tensor
    upload: dict[str, Tensors]
    state: ClientState
    metrics: dict[str, float]
    arrived: int = -1
    report: Tensors = field(default_factory=dict)
    carry: Tensors = field(default_factory=dict)
    state_file: tuple[str, str] | None = None
    start: Tensor | None = None
    b_start: Tensor | None = None
    last: Tensor | None = None
    version: int = 0
    sent_bytes: int | None = None
    encoded: Tensors = field(default_factory=dict)
    known_finite: bool = field(default=False, init=False)

    def is_finite(self) -> bool:
        """Return whether all numbers are finite, both uploaded tensors and client state."""
        if self.known_finite:
            return True
        uploads = [t for tensors in self.upload.values() for t in tensors.values()]
        return all(finite_flags([self.delta, self.buffers, *uploads, *self.state.tensors().values()]))

    @property
    def clients(self) -> tuple[int, ...]:
        """The client, as in a ``SummedUpdate``."""
        return (self.client,)

    @property
    def unusable(self) -> tuple[int, ...]:
        """No clients, as in a ``SummedUpdate``."""
        return ()

    def fields(self) -> dict[str, Any]:
        """Return the fields that are not tensors, as JSON values."""
        return {name: getattr(self, name) for name in FIELDS}

    def tensors(self) -> Tensors:
        """Return the tensors by name, in CPU memory, except generated samples."""
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
        """Build an update on ``device`` from the output of ``fields`` and ``tensors``.

        Without tensors, the update represents one that has not arrived yet.

        Args:
            fields: Plain values by field name.
            tensors: Tensors by full name.
            device: Device of the tensors; None to leave them unmoved.
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


def without_model(update: Update, size: int, num_buffers: int) -> Update:
    """Return an update whose model stays at the client, if clients have models of different architectures.

    Updates are summed, so all have the length of one model; nothing of it is exchanged.

    Args:
        update: Update of a client.
        size: Number ``d`` of parameters of the model at the server.
        num_buffers: Number ``m`` of values in its buffers.
    """
    delta, buffers = update.delta.new_zeros(size), update.buffers.new_zeros(num_buffers)
    return replace_fields(update, delta=delta, buffers=buffers)


@dataclass(frozen=True)
class SummedUpdate:
    """Sum of the updates of several clients of a round: opened under secure aggregation, or computed by an engine.

    Attributes:
        origin_round: Round of the broadcasts that the clients trained from.
        clients: Clients whose updates are in the sum.
        unusable: Clients that trained, but whose updates were not finite or too large.
        num_samples: Number of real training samples of the clients.
        weight: Sum of the aggregation weights.
        delta: Weighted sum of the updates, ``[d]``.
        buffers: Weighted sum of the buffers after training, ``[m]``.
        upload: Sums of the extra tensors of each rule.
        report: Weighted sum of the clients' whole models ``v [d]``, if requested.
        metrics: Sums of the metrics.
        state: State of each rule at the clients, ``[n, ...]`` in the order of ``clients``, if an engine computed the sum.
        b_start: Broadcast buffers, ``[m]``; the server adds them for rules that need them.
        known_finite: Whether the engine found all numbers of the clients finite.
        masked: Whether the clients send masked numbers.
    """

    origin_round: int
    clients: tuple[int, ...]
    unusable: tuple[int, ...]
    num_samples: int
    weight: float
    delta: Tensor
    buffers: Tensor
    upload: dict[str, Tensors] = field(default_factory=dict)
    report: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Tensors] = field(default_factory=dict)
    b_start: Tensor | None = None
    known_finite: bool = False
    masked: bool = True

    def is_finite(self) -> bool:
        """Return whether all numbers are finite."""
        if self.known_finite:
            return True
        uploads = [t for tensors in self.upload.values() for t in tensors.values()]
        return all(finite_flags([self.delta, self.buffers, *uploads]))
