"""Vectorized engine: a whole cohort at once under ``torch.func.vmap``, for GPUs that one client cannot fill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from unskew.engines.base import EngineConfig
from unskew.engines.device import DeviceMemory
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vmap_trainer import GroupTrainer, client_kind
from unskew.errors import UnskewError
from unskew.json_models import JsonModel, read_model, write_model
from unskew.models.grouped.context import grouped_form
from unskew.models.user_modules import describe_error
from unskew.protocol.messages import Broadcast, Update

WIDTH = 64
"""Largest number of clients mapped at once on a device whose memory is not measured; a larger cohort is split."""
PROBE_WIDTH = 8
"""Number of clients whose memory is measured before the first larger group."""
MAX_WIDTH = 512
"""Largest number of clients mapped at once, whatever the memory."""
MEMORY_SHARE = 0.8
"""Share of the free memory that a group may take: batches differ, and memory is fragmented."""


FILE = "vectorized.json"


class GroupWidth(JsonModel):
    """Content of ``vectorized.json``: the largest number of clients that a run maps at once."""

    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)]


class VectorizedEngine:
    """Maps local training over the clients of a cohort.

    On a CUDA device, the number of clients mapped at once follows from the memory that a small group takes, and is halved
    if memory is exhausted. A round is trained with one width, so that a resumed run, which knows it, repeats every bit.

    Args:
        setup: Configuration of the engine.
        memory: Memory of the device; None for that of a CUDA device. On other devices, nothing is measured.
        convolution: Convolutions of several clients: ``grouped`` as ``vmap`` maps them, or ``channels_last`` for one grouped
            network.

    Attributes:
        name: Name of the engine.
        width: Largest number of clients mapped at once; None until it is measured.
    """

    name = "vectorized"

    def __init__(self, setup: EngineConfig, memory: DeviceMemory | None = None, convolution: str = "grouped"):
        self.setup = setup
        self.memory = DeviceMemory(setup.device) if memory is None and setup.device.type == "cuda" else memory
        form = grouped_form(setup.spec) if convolution == "channels_last" else None
        self.trainer = GroupTrainer(setup, LocalTrainer(setup), form)
        self.width = WIDTH if self.memory is None else None
        pretrained = any(type(part).__module__.startswith("transformers.") for part in setup.spec.module.modules())
        if pretrained or setup.spec.draws_globally or any(rule.trains_alone for rule in setup.rules):
            self.width = 1  # one client of a pretrained model fills a device; random numbers differ in a mapping
        self._file: Path | None = None

    def remember_width(self, folder: Path, resume: bool) -> None:
        """Store a measured width in the run folder.

        Args:
            folder: Run folder.
            resume: Whether to use the width that is stored there.
        """
        if self.width is None:
            self._file = folder / FILE
            self.width = read_model(self._file, GroupWidth).width if resume and self._file.is_file() else None

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order."""
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, broadcast in enumerate(broadcasts):
            groups[client_kind(broadcast)].append(index)
        largest = max(groups.values(), key=len, default=[])
        if self.width is None and len(largest) > PROBE_WIDTH:
            self._measure_width([broadcasts[index] for index in largest[:PROBE_WIDTH]])
        while True:
            width = self.width or PROBE_WIDTH
            parts = [group[i : i + width] for group in groups.values() for i in range(0, len(group), width)]
            done: dict[int, Update] = {}
            try:
                for part in parts:
                    sent = [broadcasts[index] for index in part]
                    updates = [self.trainer.single.train(sent[0])] if width == 1 else self._mapped(sent)
                    done.update(zip(part, updates, strict=True))
                return (done[index] for index in range(len(broadcasts)))
            except torch.OutOfMemoryError:
                if width == 1 or self.memory is None:
                    raise
            # Outside of the handler, because its traceback refers to the tensors of the failed group.
            done.clear()
            self.memory.release()
            self._set_width(width // 2)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def _mapped(self, broadcasts: Sequence[Broadcast]) -> list[Update]:
        """Train clients of one kind under ``vmap``, or one at a time, with a warning, if their training cannot be mapped."""
        try:
            return self.trainer.mapped(broadcasts)
        except (UnskewError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a mistake in a model or rule is raised again below
            reason = describe_error(error)
        remedy = "The engines inline and processes give the same numbers, usually sooner."
        return self.trainer.train_singly(broadcasts, reason, remedy)

    def _measure_width(self, probe: Sequence[Broadcast]) -> None:
        """Train a small group, discard its updates, and set the width from the memory that it took."""
        assert self.memory is not None
        width = len(probe) // 2  # if not even the small group fits
        try:
            each = max(1, self.memory.peak_of(lambda: self._mapped(probe)) // len(probe))
            width = min(MAX_WIDTH, int(MEMORY_SHARE * self.memory.free()) // each)
        except torch.OutOfMemoryError:
            pass
        self.memory.release()
        # A power of two, so that a little more or less free memory does not change the groups.
        self._set_width(1 << (max(1, width).bit_length() - 1))

    def _set_width(self, width: int) -> None:
        self.width = width
        if self._file is not None:
            write_model(self._file, GroupWidth(width=width))
