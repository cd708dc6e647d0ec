"""Calibration file of ``engine: auto``: measured training times that later runs on the same machine use again.

The file is ``engines.json`` in the user's cache folder. Each entry belongs to one processor, PyTorch version, model, batch
size, optimizer and number of workers. Deleting the file only makes the next runs measure again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from unskew.engines.base import EngineConfig
from unskew.engines.cpu import num_cores
from unskew.errors import CheckpointError
from unskew.filesystem import make_folder, user_cache, write_atomic
from unskew.folder_locks import file_lock
from unskew.json_models import JsonModel, read_model

MAX_ENTRIES = 500
LOCK_SECONDS = 2.0


Seconds = Annotated[float, Field(gt=0, le=1e9)]
Workers = Annotated[str, Field(pattern="^[0-9]{1,4}x[0-9]{1,4}$")]
"""Number of workers and group size, as ``2x25``."""


class Measurement(JsonModel):
    """Measured training times of one model on one machine.

    Attributes:
        steps: Seconds of a local step of a group, by workers and group size, as ``"2x25"``: CPU seconds in each of several
            simultaneous workers, or with 0 workers wall-clock seconds in the process itself.
        unmeasured: Estimated seconds of the runs so far that were too short to measure what they lacked.
    """

    steps: dict[Workers, Seconds] = Field(default_factory=dict)
    unmeasured: Annotated[float, Field(ge=0, le=1e9)] = 0.0


def calibration_file() -> Path:
    """Return the path of the calibration file; it may not exist yet."""
    return user_cache() / "engines.json"


@functools.cache
def processor() -> str:
    """Return the name of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def calibration_key(setup: EngineConfig, steps: int, workers: int, inputs: str) -> str:
    """Return the key of a run's measurements: a hash of everything they depend on.

    Args:
        setup: Configuration of the engine.
        steps: Mean number of local steps of a client.
        workers: Number of worker processes.
        inputs: Data type of the stored samples.
    """
    training, spec = setup.training, setup.spec
    model: list[object] = [
        repr(spec.module),
        spec.shapes,
        spec.shape,
        spec.classes,
        str(spec.dtype),
        spec.autocast,
        inputs,
    ]
    budget: list[object] = [steps, training.batch_size, training.optimizer, training.momentum, training.weight_decay]
    budget += [training.nesterov, training.clip_grad_norm, training.augment, type(setup.task).__name__]
    machine: list[object] = [processor(), num_cores(), torch.get_num_threads(), torch.__version__, workers]
    return hashlib.sha256(json.dumps([model, budget, machine]).encode()).hexdigest()[:32]


def read_entries() -> dict[str, Measurement]:
    """Return all stored entries by key; empty if there is no valid file."""
    with contextlib.suppress(CheckpointError):
        return read_model(calibration_file(), dict[str, Measurement])
    return {}


def save_measurement(key: str, measurement: Measurement) -> None:
    """Store a measurement; without access to the cache folder nothing is stored.

    Args:
        key: Result of ``calibration_key``.
        measurement: Measured times.
    """
    path = calibration_file()
    with contextlib.suppress(Exception):  # a read-only or missing home folder must not stop a run
        make_folder(path.parent)
        with file_lock(path.with_name(".engines.lock"), LOCK_SECONDS):
            entries = {k: v for k, v in read_entries().items() if k != key}
            entries[key] = measurement
            newest = {k: v.model_dump() for k, v in list(entries.items())[-MAX_ENTRIES:]}
            write_atomic(path, (json.dumps(newest, indent=1) + "\n").encode())
