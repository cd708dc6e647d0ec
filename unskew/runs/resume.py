"""Checks for resuming a run, and the warm start of a run from another one."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew.config.experiment import Experiment
from unskew.config.loader import load_yaml
from unskew.config.paths import without_data_locations
from unskew.config.trust import is_registered_method
from unskew.data.federation import ArrayClients, Federation
from unskew.data.validation import to_float32
from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import check_plain
from unskew.methods.registry import method
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData
from unskew.records.recorder import Recorder, check_rounds
from unskew.records.result import read_history
from unskew.simulation import checkpoint, restore
from unskew.simulation.server import Server

RESUMABLE = (
    *("rounds", "engine", "workers", "clients_per_group", "graphs", "ray", "stall_warning_seconds", "device"),
    *("trackers", "checkpoint_every", "target", "save_samples", "coefficients", "base_run"),
)
"""Fields that may change when a run is resumed: they change its length or execution, but not its results per round."""

OBSERVED = {"attack": "attack", "measured": "diagnose", "sampler": "sampling"}
"""Fields on which the entries of ``Server.observed`` depend: a run that starts from another one with the same value of the
field continues with the entry."""


def warm_start(parent: Path, config: Experiment, server: Server, recorder: Recorder, data: str) -> int:
    """Start from the model, traffic and history of the run in ``parent``.

    The state of rules that both methods contain is kept. Rules that only the new method contains start with their initial
    state. The states of sampler, attack and diagnostics are kept if both runs have the same ones. Updates in flight are lost,
    with a warning.

    Args:
        parent: Folder of the other run.
        config: Configuration of the new run.
        server: Newly created server of the new run.
        recorder: Recorder of the new run.
        data: Identity of the new run's data, from ``data_identity``.

    Returns:
        The number of rounds of the other run.

    Raises:
        ConfigError: If the folder is not a run, contains a link, pipe or device, or its run has other data or too many
            rounds.
        CheckpointError: If the run has another model, or is corrupted.
    """
    check_plain(parent)
    newest = checkpoint.newest_checkpoint(parent / "checkpoints")
    if newest is None:
        raise ConfigError(f"start_from={str(parent)!r} is not a run folder with a checkpoint.")
    path, manifest, _ = newest
    extra, done = manifest["extra"], int(manifest["round"])
    if done >= config.rounds:
        raise ConfigError(
            f"The run in {parent} has {done} rounds; a run that starts from it needs more than that, not {config.rounds}."
        )
    if extra["data"] != data:
        raise ConfigError(
            f"The run in {parent} used other data or another partition, so no run can start from it here."
        )
    check_frozen(extra, server.setup.spec)
    aggregate = server.setup.method.aggregate
    private = aggregate is not None and bool(aggregate.continued)
    both = (extra["config"], vars(config))
    partial = {each.get("sampling") == "fixed" and each.get("participation") != 1 for each in both}
    if private and len(partial) > 1:
        raise ConfigError(
            "Only one of this run and the run in start_from has fixed cohorts of some clients, for which epsilon has another "
            "meaning, so the privacy of both cannot be added. Use the same sampling and participation."
        )
    named = extra["config"].get("method")
    trusted = isinstance(named, str) and (named == config.method or is_registered_method(named))
    try:
        before = method(named) if trusted else None
    except ConfigError:  # a method that was defined in Python
        before = None
    differing = differing_fields(extra["config"], config)
    observed = [kind for kind, field in OBSERVED.items() if field not in differing]
    restore.start_from_run(path, manifest, server, before, observed)
    with checkpoint.checkpoint_errors(path):
        flying, kept = len(manifest["in_flight"]), int(extra["best"][0]) if "best" in extra else done
    if flying:
        recorder.warn(
            f"{flying} updates that were in flight at the end of the run in {parent} are lost: their clients train again."
        )
    if kept != done:
        recorder.warn(
            f"The run continues from the last round of the run in {parent}, not from the model of round {kept} that it has "
            "kept."
        )
    recorder.adopt(check_rounds(read_history(parent)[:done], parent / "metrics.jsonl", done), extra["seconds"])
    return done


def check_never_saved(folder: Path) -> None:
    """Validate that a run without checkpoints never saved any, so that it can start again from round 1.

    Args:
        folder: Run folder.

    Raises:
        CheckpointError: If rounds are finished, but the checkpoints were removed.
    """
    config = load_yaml(folder / "config.yaml")
    parent = config.get("start_from")
    common = len(read_history(Path(parent))) if parent else 0
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    rounds = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    emptied = rounds > common + int(config.get("checkpoint_every", 1)) or (folder / "summary.json").exists()
    if rounds and (emptied or not checkpoints.is_dir()):
        raise CheckpointError(
            f"The run in {folder} has {rounds} rounds, but its checkpoints are missing, so it cannot be resumed. Restore "
            "the folder checkpoints, or start a new run with config.yaml."
        )


def data_identity(prepared: PreparedData) -> str:
    """Return a text that identifies the data and must match on resume: partition, sizes, server and synthetic data."""
    federation, sizes = prepared.federation, ""
    if isinstance(federation.clients, ArrayClients):
        sizes = hashlib.sha256(np.asarray(federation.sizes, np.int64).tobytes()).hexdigest()[:8]
    server = 0 if federation.server is None else len(federation.server.y)
    synthetic = f", synthetic {prepared.digest}" if prepared.digest else ""
    partition = federation.fingerprint or "unknown"
    return f"partition {partition}, sizes {sizes}, test {len(federation.test[1])}, {server=}{synthetic}"


def stored_content(federation: Federation) -> str:
    """Return a checksum of all samples; empty if clients are loaded one by one or memory-mapped."""
    clients, unseen = federation.clients, federation.unseen
    if not isinstance(clients, ArrayClients) or clients.mapped:
        return ""
    crc = 0
    server = () if federation.server is None else (federation.server.x, federation.server.y)
    others = chain(unseen.inputs(), (unseen.y,)) if isinstance(unseen, ArrayClients) else ()
    for part in chain(clients.inputs(), (clients.y, *federation.test), server, others):
        rows = to_float32(part.permute(0, 2, 3, 1) if part.dim() == 4 else part)  # memory layout of images
        raw: Any = rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, crc)
    return f"{crc:08x}"


def check_data(extra: dict[str, Any], prepared: PreparedData, content: str) -> None:
    """Validate that a run is resumed with the same data.

    Args:
        extra: Additional values of the checkpoint.
        prepared: Data of the resumed run.
        content: Checksum of these data, from ``stored_content``.

    Raises:
        CheckpointError: If the data differ from those of the run.
    """
    _check_equal((extra["data"], extra.get("content")), (data_identity(prepared), content))


def check_finished_data(summary: Mapping[str, Any], federation: Federation, content: str) -> None:
    """Validate that a finished run used the same data.

    Args:
        summary: Summary of the run.
        federation: Data before the method changes them.
        content: Checksum of these data, from ``stored_content``.

    Raises:
        CheckpointError: If the data differ from those of the run.
    """
    before = f"partition {summary.get('partition_hash')}", summary.get("data_checksum")
    _check_equal(before, (f"partition {federation.fingerprint}", content))


def _check_equal(before: tuple[str, str | None], now: tuple[str, str]) -> None:
    """Validate that the identity of the data and their checksum, if it is known, have not changed."""
    if before[0] != now[0] or before[1] not in (None, now[1]):
        texts = [f"{identity}, content {content}" for identity, content in (now, before)]
        raise CheckpointError(
            f"The data differ from those of the run ({texts[0]} instead of {texts[1]}); resume it with the same data and "
            "library versions."
        )


def check_frozen(extra: dict[str, Any], spec: ModelSpec) -> None:
    """Validate that the frozen parameters of the model are the same as in the checkpointed run.

    Args:
        extra: Additional values of the checkpoint.
        spec: Layout of the model.

    Raises:
        CheckpointError: If the frozen parameters differ.
    """
    if extra.get("frozen", spec.frozen) != spec.frozen:
        raise CheckpointError(
            "The frozen parameters differ from those of the run: the model's folder or its version on the Hub has "
            "changed. Restore the former one."
        )


def check_target_rounds(before: object, done: int, config: Experiment) -> None:
    """Validate the number of rounds of a resumed run.

    Args:
        before: Configured number of rounds when the run started.
        done: Number of finished rounds.
        config: Configuration of the run.

    Raises:
        CheckpointError: If there are fewer rounds than finished ones, or the learning rate schedule depends on the number
            of rounds and that number changed.
    """
    if config.rounds < done:
        raise CheckpointError(f"The run has {done} rounds already; it cannot be shortened to {config.rounds}.")
    if config.training.schedule.ends and config.rounds != before:
        raise CheckpointError(
            f"With lr_schedule={config.lr_schedule}, learning rates depend on the number of rounds, which was {before} and "
            f"is now {config.rounds}. Resume with rounds={before}, or start a new run."
        )


def check_same(then: dict[str, Any], now: Experiment) -> None:
    """Validate that a run is resumed with the same configuration; paths of data may differ.

    Args:
        then: Fields of the configuration when the run started.
        now: Configuration of the resumed run.

    Raises:
        CheckpointError: If a field that determines the results differs; the message names all such fields.
    """
    differing = {name: pair for name, pair in differing_fields(then, now).items() if name not in RESUMABLE}
    if differing:
        before = ", ".join(f"{name}={was!r}" for name, (was, _) in differing.items())
        current = ", ".join(f"{name}={value!r}" for name, (_, value) in differing.items())
        raise CheckpointError(
            f"The run was started with {before} and cannot be resumed with {current}. Use the same values, or start a new "
            "run."
        )


def differing_fields(then: dict[str, Any], now: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return the values of the fields in which two configurations differ, by name; paths of data may differ.

    Args:
        then: Fields of the earlier configuration.
        now: Later configuration.
    """
    neutral = Experiment().model_dump(mode="json")
    current, before = without_data_locations(now.model_dump(mode="json")), without_data_locations({**neutral, **then})
    differing = {}
    for name in current:
        was = before[name]
        if isinstance(was, dict) and isinstance(neutral[name], dict):  # a newer version may have added fields
            was = {**neutral[name], **was}
        if was != current[name]:
            differing[name] = was, current[name]
    return differing
