"""Going on with a run, and beginning one where another ended: what must be the same, and what is taken over."""

from __future__ import annotations

import hashlib
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew.config.experiment import Experiment
from unskew.config.loader import load_yaml
from unskew.config.paths import without_data_locations
from unskew.data.federation import ArrayClients
from unskew.data.validation import to_float32
from unskew.errors import CheckpointError, ConfigError
from unskew.methods.registry import method
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData
from unskew.provenance import TRUST, UntrustedText
from unskew.records.recorder import Recorder, check_rounds
from unskew.records.result import read_history
from unskew.simulation import checkpoint, restore
from unskew.simulation.server import Server

RESUMABLE = (
    *(
        "rounds",
        "engine",
        "workers",
        "clients_per_group",
        "ray",
        "stall_warning_seconds",
        "device",
        "trackers",
        "checkpoint_every",
        "target",
        "save_samples",
    ),
    "base_run",
)
"""Fields that may differ when a run is resumed: they change how far or how it is carried out, not what it is."""


def warm_start(parent: Path, config: Experiment, server: Server, recorder: Recorder, data: str) -> int:
    """Take over the model, traffic and history of the run in ``parent``, and what both methods keep.

    What a client keeps under a rule that both methods have stays; rules that only the new method has begin as in their first
    round.

    Args:
        parent: Folder of the other run.
        config: Of the run that begins.
        server: Its server, freshly made.
        recorder: Its recorder.
        data: What identifies its data.

    Returns:
        The number of rounds that the other run had.

    Raises:
        ConfigError: The folder is not a run, has other data, or has as many rounds already.
        CheckpointError: The run has another model, or is corrupted.
    """
    newest = checkpoint.newest_checkpoint(parent / "checkpoints")
    if newest is None:
        raise ConfigError(f"start_from={str(parent)!r} is not a run folder with a checkpoint.")
    path, manifest, _ = newest
    extra, done = manifest["extra"], int(manifest["round"])
    if done >= config.rounds:
        raise ConfigError(
            f"The run in {parent} has {done} rounds; one that starts from it needs more, not {config.rounds}."
        )
    if extra["data"] != data:
        raise ConfigError(f"The run in {parent} was made on other data or another partition.")
    check_frozen(extra, server.spec)
    named = extra["config"].get("method")
    if isinstance(named, str):  # what this run names, too, is as trusted as this run
        named = config.method if named == config.method else UntrustedText(named, str(path), TRUST)
    try:
        before = method(named) if isinstance(named, str) else None
    except ConfigError:  # a method that only Python knew
        before = None
    restore.start_from_run(path, manifest, server, before)
    recorder.adopt(check_rounds(read_history(parent)[:done], parent / "metrics.jsonl", done), extra["seconds"])
    return done


def check_never_saved(folder: Path) -> None:
    """Refuse to begin anew with a run whose checkpoints somebody removed.

    Raises:
        CheckpointError: Rounds are finished, but the folder of its checkpoints is gone or was emptied.
    """
    config = load_yaml(folder / "config.yaml")
    parent = config.get("start_from")
    common = len(read_history(Path(parent))) if parent else 0
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    rounds = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    emptied = rounds > common + int(config.get("checkpoint_every", 1)) or (folder / "summary.json").exists()
    if rounds and (emptied or not checkpoints.is_dir()):
        raise CheckpointError(
            f"The run in {folder} has {rounds} rounds, but its checkpoints are gone, so it cannot go on. Bring the folder "
            "checkpoints back, or start a new run with config.yaml."
        )


def data_identity(prepared: PreparedData) -> str:
    """Return the fingerprint that must match when a run is resumed: partition, training data and evaluation data."""
    federation, sizes = prepared.federation, ""
    if isinstance(federation.clients, ArrayClients):
        sizes = hashlib.sha256(np.asarray(federation.sizes, np.int64).tobytes()).hexdigest()[:8]
    server = 0 if federation.server is None else len(federation.server.y)
    synthetic = f", synthetic {prepared.digest}" if prepared.digest else ""
    partition = federation.fingerprint or "unknown"
    return f"partition {partition}, sizes {sizes}, test {len(federation.test[1])}, {server=}{synthetic}"


def stored_content(prepared: PreparedData) -> str:
    """A checksum of what is trained and evaluated on; empty where clients are loaded one by one or lie in files."""
    federation = prepared.federation
    clients = federation.clients
    if not isinstance(clients, ArrayClients) or clients.mapped:
        return ""
    crc = 0
    server = () if federation.server is None else (federation.server.x, federation.server.y)
    for part in chain(clients.inputs(), (clients.y, *federation.test), server):
        rows = to_float32(part.permute(0, 2, 3, 1) if part.dim() == 4 else part)  # as images lie in memory
        raw: Any = rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, crc)
    return f"{crc:08x}"


def check_data(extra: dict[str, Any], prepared: PreparedData) -> None:
    """Refuse to go on with other data.

    Args:
        extra: Values of the checkpoint.
        prepared: Data of the resumed run.

    Raises:
        CheckpointError: The data differ from those that the run was started with.
    """
    before, now = (extra["data"], extra.get("content")), (data_identity(prepared), stored_content(prepared))
    if before[0] != now[0] or before[1] not in (None, now[1]):
        texts = [f"{identity}, content {content}" for identity, content in (now, before)]
        raise CheckpointError(
            f"The data differ from those of the run ({texts[0]} instead of {texts[1]}); resume it with the same data and "
            "library versions."
        )


def check_frozen(extra: dict[str, Any], spec: ModelSpec) -> None:
    """Refuse to go on with the trained part of a model whose other part has changed since.

    Args:
        extra: Values of the checkpoint.
        spec: Layout of the model.

    Raises:
        CheckpointError: The parameters that are not trained are others than those of the run.
    """
    if extra.get("frozen", spec.frozen) != spec.frozen:
        raise CheckpointError(
            "The parameters that are not trained differ from those of the run: the model's folder, or its version at the "
            "hub, has changed. Bring the former one back."
        )


def check_target_rounds(before: object, done: int, config: Experiment) -> None:
    """Refuse another number of rounds where it would change what was done.

    Args:
        before: Number of rounds when the run began.
        done: Number of finished rounds.
        config: Configuration of the run.

    Raises:
        CheckpointError: Fewer rounds than are done, or a learning rate that falls towards the last one.
    """
    if config.rounds < done:
        raise CheckpointError(f"The run has {done} rounds already; it cannot be shortened to {config.rounds}.")
    if config.training.schedule.ends and config.rounds != before:
        raise CheckpointError(
            f"With lr_schedule={config.lr_schedule} the rates of a run of {before} rounds are not those of one of "
            f"{config.rounds}; resume it with rounds={before}, or start a new run."
        )


def check_same(then: dict[str, Any], now: Experiment) -> None:
    """Refuse to go on with a run under another configuration; its data may lie elsewhere by now.

    Args:
        then: Fields of the configuration when the run began.
        now: Configuration of the resumed run.

    Raises:
        CheckpointError: A field differs that determines the results.
    """
    neutral = Experiment().model_dump(mode="json")
    current, before = without_data_locations(now.model_dump(mode="json")), without_data_locations({**neutral, **then})
    for name in current:
        was = before[name]
        if isinstance(was, dict) and isinstance(neutral[name], dict):  # a section may have more fields by now
            was = {**neutral[name], **was}
        if name not in RESUMABLE and was != current[name]:
            raise CheckpointError(
                f"The run was made with {name}={was!r}, but is resumed with {name}={current[name]!r}; "
                "a run can only go on as it began. Start a new one instead."
            )
