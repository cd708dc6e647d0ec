"""Checkpoints: everything a run needs to resume with bit-identical results.

A checkpoint is a folder of safetensors files and a JSON manifest with their checksums. It is written under a temporary
name and then renamed, so it is never incomplete. The last two checkpoints are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from unskew.errors import CheckpointError
from unskew.filesystem import disk_errors, read_file, sync_path, write_synced
from unskew.protocol.client_state_files import encode_tensors
from unskew.protocol.messages import Tensors, num_bytes
from unskew.simulation.checkpoint_manifest import check_manifest
from unskew.simulation.client_store import ClientStore
from unskew.simulation.network import Network
from unskew.simulation.server import Server

FORMAT = 9
KEEP = 2
CHUNK = 256 << 20  # bytes of client state per file, so that writing needs little memory
CLIENTS = "client"
CACHE = "cached"
FLYING = "flying"
"""Prefixes of file names: client state, server-side cache per client, and updates in flight."""


def _chunks(store: ClientStore) -> Iterator[Tensors]:
    chunk: Tensors = {}
    size = 0
    for client, tensors in store.in_memory():
        more = num_bytes(tensors.values())
        if chunk and size + more > CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk |= {f"{client}/{name}": tensor for name, tensor in tensors.items()}
        size += more
    if chunk:
        yield chunk


def save_checkpoint(folder: Path, round: int, server: Server, network: Network, extra: dict[str, Any]) -> Path:
    """Write the checkpoint after ``round`` rounds and remove all but the last two.

    Args:
        folder: Folder of the run's checkpoints.
        round: Number of finished rounds.
        server: Server to save.
        network: Network whose updates in flight are saved.
        extra: Further JSON data that the run needs to resume.

    Raises:
        CheckpointError: If the disk is full or cannot be written; older checkpoints are unchanged.
    """
    final, fresh = folder / f"{round:07d}", folder / f".{round:07d}.new"
    checksums: dict[str, str] = {}

    def put(name: str, data: bytes) -> None:
        write_synced(fresh / name, data)
        checksums[name] = hashlib.sha256(data).hexdigest()

    with disk_errors(final):
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            put("server.safetensors", encode_tensors(server.tensors()))
            clients = server.clients
            for kind, store in ((CLIENTS, clients.store), (CACHE, clients.cache), (FLYING, network.store)):
                for number, chunk in enumerate(_chunks(store)):
                    put(f"{kind}s-{number:04d}.safetensors", encode_tensors(chunk))
                for client, path in store.on_disk():
                    name = f"{kind}-{client}.safetensors"
                    checksums[name] = _keep(path, fresh / name, store.checksum(client))
            manifest = {
                "format": FORMAT,
                "round": round,
                "rules": sorted(server.state.rules),
                "skipped": server.aggregator.skipped.total,
                "last": clients.last_rounds,
                "version": server.state.version,
                "sent": {client: [sent.version, sent.origin_round] for client, sent in clients.sent.items()},
                "traffic": vars(server.traffic.total),
                "waiting": server.state.waiting.fields(),
                "in_flight": [update.fields() for update in network.pending],
                "clock": None if network.clock is None else network.clock.state(),
                "extra": extra,
            }
            text = json.dumps({**manifest, "files": checksums})
            put("manifest.json", json.dumps({"sha256": _digest(text), "manifest": text}).encode())
            sync_path(fresh)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(fresh, final)
            sync_path(folder)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    drop_old_checkpoints(folder, keep=KEEP)
    return final


def _keep(path: Path, copy: Path, known: str | None) -> str:
    """Link or copy a client's file into the checkpoint and return its checksum, ``known`` if given."""
    try:
        os.link(path, copy)
    except OSError:  # not every file system has hard links
        shutil.copyfile(path, copy)
    sync_path(copy)
    return known or _checksum(copy)


def drop_old_checkpoints(folder: Path, keep: int | None = None, after: int | None = None) -> None:
    """Remove unfinished checkpoints, all but the last ``keep``, and those after a round (corrupted ones to be redone).

    Args:
        folder: Folder of the checkpoints.
        keep: Number of checkpoints to keep; None for all.
        after: Round after which checkpoints are removed; None for none.
    """
    checkpoints = list_checkpoints(folder)
    kept_checkpoints = [path for path in checkpoints if after is None or int(path.name) <= after][:keep]
    for path in [*checkpoints, *folder.glob(".*.new")]:
        if path not in kept_checkpoints:
            shutil.rmtree(path, ignore_errors=True)


class OtherVersionError(CheckpointError):
    """Raised for an intact checkpoint of another version of unskew; older checkpoints are not tried instead."""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, newest first."""
    if not folder.is_dir():
        return []
    checkpoints = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    return sorted(checkpoints, key=lambda path: int(path.name), reverse=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint and verify the checksums of all its files.

    Args:
        path: Folder of the checkpoint.

    Raises:
        OtherVersionError: If the checkpoint was written by another version.
        CheckpointError: If a file is missing or corrupted.
    """
    try:
        outer = json.loads(read_file(path / "manifest.json"))
        text = outer["manifest"]
        if _digest(text) != outer["sha256"]:
            raise ValueError("its checksum differs")
        manifest: dict[str, Any] = json.loads(text)
        if not isinstance(manifest, dict):
            raise ValueError("it is not a mapping")
        if manifest.get("format") != FORMAT:
            raise OtherVersionError(
                f"The checkpoint {path} was written by another version of unskew. Resume the run with that version."
            )
        check_manifest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint {path} is corrupted: its manifest cannot be read ({error}).") from error
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file() or _checksum(file) != expected:
            raise CheckpointError(f"The checkpoint {path} is corrupted: {name} is missing or its checksum differs.")
    return manifest


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Context manager that converts errors of a corrupted file to an error with the path.

    Args:
        path: File or folder that is named in the error.

    Raises:
        CheckpointError: If part of the file is missing or invalid.
    """
    try:
        yield
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        SafetensorError,
    ) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is corrupted: {what[:200]}.") from error


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Find the newest intact checkpoint.

    Args:
        folder: Folder with the checkpoints of a run.

    Returns:
        Its path, its manifest and the errors of newer checkpoints; None if there are no checkpoints.

    Raises:
        CheckpointError: If all checkpoints are corrupted, or the newest is of another version.
    """
    problems: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, read_manifest(path), problems
        except OtherVersionError:
            raise
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"No checkpoint in {folder} is usable. {problems[0]}")
    return None


def read_model(path: Path) -> tuple[int, Tensor, Tensor]:
    """Return the round of a checkpoint, its global model ``[d]`` and buffers ``[m]``.

    Args:
        path: Folder of the checkpoint.

    Raises:
        CheckpointError: If the checkpoint is corrupted.
    """
    done = int(read_manifest(path)["round"])
    with checkpoint_errors(path):
        tensors = load((path / "server.safetensors").read_bytes())
        return done, tensors["state/v"], tensors["b"]
