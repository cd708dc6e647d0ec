"""What passes between server and client, and the sums that a server needs of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.vector import ModelSpec
from unskew.protocol.server_training import ServerTraining

Tensors = dict[str, Tensor]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Broadcast:
    """What one client receives: the model ``v [d]``, its statistics ``b [m]`` and each rule's extra tensors.

    ``down`` and ``up`` are the slices of ``v`` that are sent; None stands for all. ``show`` asks for the inputs that the
    client made, to be looked at; with ``keeps`` the optimizer's state stays at the client from round to round.
    """

    round: int
    client: int
    v: Tensor
    b: Tensor
    download: dict[str, Tensors]
    state: dict[str, Tensors]
    weight: float
    down: Slices | None = None
    up: Slices | None = None
    show: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class Update:
    """What one client sends back.

    Attributes:
        client, born, arrived: Who, the round of its broadcast, the round of its arrival.
        examples: Real samples it trained on; ``weight`` is its aggregation weight before normalisation.
        delta: Local result minus the model that was broadcast, ``[d]``; zero on slices that did not travel.
        buffers: The statistics after training, ``[m]``.
        upload: Each rule's extra tensors.
        state: What stays at the client (never counted as traffic).
        metrics: Figures such as the mean training loss and the number of steps.
        start, version: For rules that say ``remembers``: the model that was broadcast, ``[d]``, and the updates that the
            server had taken in before.
        b_start: For rules that say ``remembers_statistics``: the statistics that were broadcast, ``[m]``.
        made: Inputs ``x`` and targets ``y`` that the client made, if it was asked for them (never counted as traffic).
    """

    client: int
    born: int
    examples: int
    weight: float
    delta: Tensor
    buffers: Tensor
    upload: dict[str, Tensors]
    state: dict[str, Tensors]
    metrics: dict[str, float]
    arrived: int = -1
    made: Tensors = field(default_factory=dict)
    start: Tensor | None = None
    version: int = 0
    b_start: Tensor | None = None

    def is_finite(self) -> bool:
        """Whether every number is finite, of what is sent and of what would stay at the client."""
        stays = [t for rules in (self.upload, self.state) for tensors in rules.values() for t in tensors.values()]
        return all(map(finite, [self.delta, self.buffers, *stays]))


class Aggregate:
    """The sums that a server needs: ``sum_k w_k delta_k / sum_k w_k`` and plain sums of the rules' uploads.

    Updates are added in the order given, so the result does not depend on who finished first.

    Args:
        single: Rules whose uploads are read one by one and not added up.
    """

    def __init__(self, single: frozenset[str] = frozenset()) -> None:
        self.single = single
        self.count, self.weight, self.examples = 0, 0.0, 0
        self._delta: Tensor | None = None
        self._buffers: Tensor | None = None
        self._moved: Tensor | None = None
        self.upload: dict[str, Tensors] = {}

    def add(self, update: Update) -> None:
        """Add one client's update."""
        self.count += 1
        self.weight += update.weight
        self.examples += update.examples
        if self._delta is None or self._buffers is None:
            self._delta, self._buffers = update.delta * update.weight, update.buffers * update.weight
        else:
            self._delta.add_(update.delta, alpha=update.weight)
            self._buffers.add_(update.buffers, alpha=update.weight)
        if update.b_start is not None:
            moved = (update.buffers - update.b_start) * update.weight
            self._moved = moved if self._moved is None else self._moved + moved
        for rule, tensors in update.upload.items():
            if rule in self.single:
                continue
            sums = self.upload.setdefault(rule, {})
            for name, tensor in tensors.items():
                sums[name] = sums[name] + tensor if name in sums else tensor.clone()

    @property
    def delta(self) -> Tensor:
        """The weighted mean of the updates, ``[d]``."""
        assert self._delta is not None, "an aggregate of no update has no mean"
        return self._delta / self.weight

    @property
    def buffers(self) -> Tensor:
        """The weighted mean of the clients' statistics, ``[m]``."""
        assert self._buffers is not None, "an aggregate of no update has no mean"
        return self._buffers / self.weight

    @property
    def moved(self) -> Tensor | None:
        """The weighted mean of how far their statistics moved, ``[m]``; None unless the rule ``remembers_statistics``."""
        return None if self._moved is None else self._moved / self.weight


class Updates:
    """The usable updates of a round: always their ``Aggregate``; one by one only where a rule says it needs them.

    Attributes:
        round: Number of the round, from 0.
        aggregate: Their sums.
        v_global: The model that was broadcast, ``[d]``: a client's own is ``v_global + update.delta``.
        spec: The model's layout.
        key: A random 64-bit key of the server and round.
        version: Updates that the server had taken in before these.
        portions: Sums of as many consecutive updates as ``ServerRule.portions`` asks for; empty if it does not.
        cached: For rules that say ``caches``: the last update ``[d]`` of a client before these, None if there was none. It
            may be read from disk, so ask for one at a time.
        b_global: The statistics that were broadcast, ``[m]``.
    """

    def __init__(
        self,
        round: int,
        aggregate: Aggregate,
        individual: Sequence[Update] | None = None,
        v_global: Tensor | None = None,
        spec: ModelSpec | None = None,
        key: Tensor | None = None,
        portions: Sequence[Aggregate] = (),
        version: int = 0,
        b_global: Tensor | None = None,
        at_server: ServerTraining | None = None,
        cached: Callable[[int], Tensor | None] = lambda client: None,
    ):
        self.version, self.b_global, self._at_server, self.cached = version, b_global, at_server, cached
        self.round, self.aggregate, self._individual = round, aggregate, individual
        self.v_global, self.spec, self.key, self.portions = v_global, spec, key, portions

    @property
    def at_server(self) -> ServerTraining:
        """What the server has to learn with."""
        assert self._at_server is not None, "these updates were made by hand"
        return self._at_server

    def __len__(self) -> int:
        return self.aggregate.count

    def __iter__(self) -> Iterator[Update]:
        if self._individual is None:
            raise ConfigError("This rule says its server half needs only sums, but reads single updates; set needs.")
        return iter(self._individual)


def finite(tensor: Tensor) -> bool:
    """Whether every element is finite. A sum shows any NaN or infinity, many times faster than a look at each."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
