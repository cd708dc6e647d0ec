"""Vectorized engine: a whole cohort at once under ``torch.func.vmap``, for GPUs that one client cannot fill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch.nn.modules.conv import _ConvNd

from unskew.engines.base import EngineConfig
from unskew.engines.device import DeviceMemory
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.recording import CudaGraphs, Recorder
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
MARGIN = 0.9
"""Clients are trained as one network with the channels last if a step takes at most this share of the time."""


FILE = "vectorized.json"


class DeviceChoices(JsonModel):
    """Content of ``vectorized.json``: what was measured at the start of a run, which a resumed run uses again.

    Attributes:
        width: Largest number of clients mapped at once; None if no cohort was larger than the smallest group.
        channels_last: Whether clients are trained as one network with the channels of images last; None if not measured.
    """

    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] | None = None
    channels_last: bool | None = None


class VectorizedEngine:
    """Maps local training over the clients of a cohort.

    On a CUDA device, the number of clients mapped at once follows from the memory that a small group takes, and is halved
    if memory is exhausted. A round is trained with one width, so that a resumed run, which knows it, repeats every bit. If
    steps are recorded, one step is timed in both forms of convolutions.

    Args:
        setup: Configuration of the engine.
        memory: Memory of the device; None for that of a CUDA device. On other devices, nothing is measured.
        convolution: Convolutions of several clients: ``grouped`` as ``vmap`` maps them, ``channels_last`` for one grouped
            network, or ``auto`` for the faster of both if steps are recorded, otherwise ``grouped``.
        record: Records steps; None for CUDA graphs on a CUDA device, unless ``setup`` says no.

    Attributes:
        name: Name of the engine.
        width: Largest number of clients mapped at once; None until it is measured.
        channels_last: Whether the clients are trained as one network; None until it is measured.
    """

    name = "vectorized"

    def __init__(
        self,
        setup: EngineConfig,
        memory: DeviceMemory | None = None,
        convolution: Literal["auto", "grouped", "channels_last"] = "auto",
        record: Recorder | None = None,
    ):
        self.setup = setup
        if record is None and setup.graphs and setup.device.type == "cuda":
            record = CudaGraphs(setup.device)
        self.memory = DeviceMemory(setup.device) if memory is None and setup.device.type == "cuda" else memory
        self.trainer = GroupTrainer(setup, LocalTrainer(setup), record=record)
        self.channels_last: bool | None = None
        convolves = any(isinstance(part, _ConvNd) for part in setup.spec.module.modules())
        if convolution != "auto" or record is None or not convolves:
            self._use_form(convolution == "channels_last")
        self.width = WIDTH if self.memory is None else None
        if setup.trains_alone:
            self.width = 1
        self._file: Path | None = None

    def remember_choices(self, folder: Path, resume: bool) -> None:
        """Store what is measured in the run folder.

        Args:
            folder: Run folder.
            resume: Whether to use what is stored there.
        """
        if self.width is not None and self.channels_last is not None:
            return
        self._file = folder / FILE
        if resume and self._file.is_file():
            stored = read_model(self._file, DeviceChoices)
            self.width = stored.width if self.width is None else self.width
            if self.channels_last is None and stored.channels_last is not None:
                self._use_form(stored.channels_last)

    def _use_form(self, channels_last: bool) -> None:
        """Train clients as one network with the channels of images last, or map each operator."""
        self.channels_last = channels_last
        if channels_last:
            single, record = self.trainer.single, self.trainer.record
            self.trainer = GroupTrainer(self.setup, single, grouped_form(self.setup.spec), record=record)

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order."""
        done = self.train_by_index(broadcasts)
        return (done[index] for index in sorted(done))

    def train_by_index(self, broadcasts: Sequence[Broadcast]) -> dict[int, Any]:
        """Train a cohort and return its updates by the index of their broadcast, or sums by that of their first one."""
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, broadcast in enumerate(broadcasts):
            groups[client_kind(broadcast)].append(index)
        largest = max(groups.values(), key=len, default=[])
        if self.width is None and len(largest) > PROBE_WIDTH:
            self._measure_width([broadcasts[index] for index in largest[:PROBE_WIDTH]])
        if self.channels_last is None and len(largest) > 1 and self.width != 1:
            self._choose_form([broadcasts[index] for index in largest[: self.width or PROBE_WIDTH]])
        while True:
            width = self.width or PROBE_WIDTH
            parts = [group[i : i + width] for group in groups.values() for i in range(0, len(group), width)]
            done: dict[int, Any] = {}
            try:
                for part in parts:
                    sent = [broadcasts[index] for index in part]
                    updates = [self.trainer.single.train(sent[0])] if width == 1 else self._mapped(sent)
                    done.update(zip(part, updates, strict=True))
                return {index: update for index, update in done.items() if update is not None}
            except torch.OutOfMemoryError:
                if width == 1 or self.memory is None:
                    raise
            # Outside of the handler, because its traceback refers to the tensors of the failed group.
            done.clear()
            self.memory.release()
            self._set_width(width // 2)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def _mapped(self, broadcasts: Sequence[Broadcast]) -> list[Any]:
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
        record, self.trainer.record = self.trainer.record, None
        share = MEMORY_SHARE if record is None else MEMORY_SHARE / 2  # graphs have memory of their own
        try:
            each = max(1, self.memory.peak_of(lambda: self._mapped(probe)) // len(probe))
            width = min(MAX_WIDTH, int(share * self.memory.free()) // each)
        except torch.OutOfMemoryError:
            pass
        self.trainer.record = record
        self.memory.release()
        # A power of two, so that a little more or less free memory does not change the groups.
        self._set_width(1 << (max(1, width).bit_length() - 1))

    def _choose_form(self, probe: Sequence[Broadcast]) -> None:
        """Time a recorded step of a group in both forms, and use the network with the channels last if it is faster."""
        grouped = self.trainer.step_seconds(probe)
        form = grouped_form(self.setup.spec)
        other = GroupTrainer(self.setup, self.trainer.single, form, record=self.trainer.record)
        self._use_form(form is not None and other.step_seconds(probe) < MARGIN * grouped)
        self._write()

    def _set_width(self, width: int) -> None:
        self.width = width
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            write_model(self._file, DeviceChoices(width=self.width, channels_last=self.channels_last))
