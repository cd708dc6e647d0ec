"""Vectorized engine: a whole cohort at once under ``torch.func.vmap``, for GPUs that one client cannot fill."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from unskew.engines.base import EngineConfig
from unskew.engines.device import CudaMemory, DeviceMemory
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer, client_kind
from unskew.filesystem import read_json, write_atomic
from unskew.models.grouped.context import grouped_form
from unskew.protocol.messages import Broadcast, Update

WIDTH = 64
"""Largest number of clients mapped at once on a device whose memory is not measured; a larger cohort is split."""
PROBE_WIDTH = 8
"""Number of clients whose memory is measured before the first larger group."""
MAX_WIDTH = 512
"""Largest number of clients mapped at once, whatever the memory."""
MEMORY_SHARE = 0.8
"""Share of the free memory that a group may take: batches differ, and memory is fragmented."""

ConvolutionForm = Literal["grouped", "channels_last", "unfold"]
"""Computation of the convolutions of several clients: as ``vmap`` maps them, as one grouped network in channels-last
memory, or as matrix products of unfolded inputs."""


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module contains a model of the library ``transformers``, which is large and fills a device."""
    return any(type(part).__module__.startswith("transformers.") for part in module.modules())


class VectorizedEngine:
    """Maps local training over the clients of a cohort.

    On a CUDA device, the number of clients that are mapped at once follows from the free memory: it is measured with a
    small group whose result is discarded, and halved if memory is exhausted. All clients of a round are mapped with the
    same width, so that a resumed run, which knows the width, repeats every bit.

    Args:
        setup: Configuration of the engine.
        memory: Memory of the device; None for that of a CUDA device, and no measurement on other devices.
        convolution: Computation of convolutions.

    Attributes:
        name: Name of the engine.
        width: Largest number of clients mapped at once; None until it is measured.
    """

    name = "vectorized"

    def __init__(
        self, setup: EngineConfig, memory: DeviceMemory | None = None, convolution: ConvolutionForm = "grouped"
    ):
        self.setup = setup
        self.memory = CudaMemory(setup.device) if memory is None and setup.device.type == "cuda" else memory
        form = grouped_form(setup.spec) if convolution == "channels_last" else None
        self.trainer = GroupTrainer(setup, LocalTrainer(setup), form, unfold=convolution == "unfold")
        self.width = 1 if is_pretrained(setup.spec.module) else WIDTH if self.memory is None else None
        self._file: Path | None = None

    def remember_width(self, file: Path, resume: bool) -> None:
        """Store a measured width in a file, or use the one that is stored there.

        Args:
            file: JSON file of the run folder.
            resume: Whether the run is resumed.
        """
        if self.width is not None:
            return
        self._file = file
        if resume and file.is_file():
            width = read_json(file).get("width")
            self.width = width if isinstance(width, int) and width > 0 else None

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order.

        Args:
            broadcasts: Messages from the server.

        Returns:
            The updates.

        Raises:
            torch.OutOfMemoryError: If a single client does not fit in memory.
        """
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, broadcast in enumerate(broadcasts):
            groups[client_kind(broadcast)].append(index)
        largest = max(groups.values(), key=len, default=[])
        if self.width is None and len(largest) > PROBE_WIDTH:
            self._measure_width([broadcasts[index] for index in largest[:PROBE_WIDTH]])
        while True:
            width = self.width or PROBE_WIDTH
            try:
                done = self._train_groups(broadcasts, list(groups.values()), width)
                return (done[index] for index in range(len(broadcasts)))
            except torch.OutOfMemoryError:
                if width == 1 or self.memory is None:
                    raise
            # Outside of the handler, because its traceback refers to the tensors of the failed group.
            self.memory.release()
            self._set_width(width // 2)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def _train_groups(
        self, broadcasts: Sequence[Broadcast], groups: Sequence[list[int]], width: int
    ) -> dict[int, Update]:
        done: dict[int, Update] = {}
        for group in groups:
            for first in range(0, len(group), width):
                part = group[first : first + width]
                sent = [broadcasts[index] for index in part]
                updates = [self.trainer.single.train(sent[0])] if width == 1 else self.trainer.mapped(sent)
                done.update(zip(part, updates, strict=True))
        return done

    def _measure_width(self, probe: Sequence[Broadcast]) -> None:
        """Train a small group, discard its updates, and set the width from the memory that it took."""
        assert self.memory is not None
        width = len(probe) // 2
        self.memory.start()
        try:
            self.trainer.mapped(probe)
            each = max(1, self.memory.peak() // len(probe))
            width = min(MAX_WIDTH, int(MEMORY_SHARE * self.memory.free()) // each)
        except torch.OutOfMemoryError:
            pass  # the round starts with half of the group
        self.memory.release()
        # A power of two, so that a little more or less free memory does not change the groups.
        self._set_width(1 << (max(1, width).bit_length() - 1))

    def _set_width(self, width: int) -> None:
        self.width = width
        if self._file is not None:
            record = {"engine": self.name, "width": width}
            write_atomic(self._file, (json.dumps(record, indent=2) + "\n").encode())
