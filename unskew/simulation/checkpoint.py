"""Checkpoints: everything a run needs to go on, bit for bit.

A checkpoint is a folder of safetensors files and a JSON manifest with their checksums. It is written beside its final place
and renamed, so it is there whole or not at all; the last two are kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from unskew.errors import CheckpointError
from unskew.methods.rules import Tensors
from unskew.simulation.server import Server, Traffic
from unskew.simulation.store import State, flat, nested, size_of

KEEP = 2
CHUNK = 256 << 20  # bytes of client state per file, so that writing needs little memory


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise _disk_error(path, error) from error


def _disk_error(path: Path, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(
            f"The disk is full: {path} could not be written. What was saved before is intact; "
            "make room and resume the run."
        )
    return CheckpointError(f"{path} could not be written: {error.strerror or error}.")


def _client_chunks(server: Server) -> Iterator[Tensors]:
    chunk: Tensors = {}
    size = 0
    for client, state in server.store.in_memory():
        if chunk and size + size_of(state) > CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk |= {f"{client}/{key}": tensor for key, tensor in flat(state).items()}
        size += size_of(state)
    if chunk:
        yield chunk


def save_checkpoint(folder: Path, round: int, server: Server, extra: dict[str, Any]) -> Path:
    """Write the checkpoint after ``round`` rounds into ``folder`` and drop all but the last two.

    Args:
        folder: The run's ``checkpoints`` folder.
        round: Rounds finished.
        server: Whose state is saved.
        extra: What else the run needs to go on; JSON.

    Raises:
        CheckpointError: The disk is full or cannot be written; older checkpoints are left as they were.
    """
    final, fresh = folder / f"{round:07d}", folder / f".{round:07d}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    checksums: dict[str, str] = {}
    try:
        fresh.mkdir(parents=True)

        def put(name: str, data: bytes) -> None:
            with (fresh / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            checksums[name] = hashlib.sha256(data).hexdigest()

        tensors = {"b": server.b} | {f"state/{n}": t for n, t in server.state.items()}
        tensors |= {f"rules/{key}": t for key, t in flat(server.rules).items()}
        put("server.safetensors", save({n: t.contiguous() for n, t in tensors.items()}))
        for number, chunk in enumerate(_client_chunks(server)):
            put(f"clients-{number:04d}.safetensors", save(chunk))
        for client, path in server.store.on_disk():
            os.link(path, fresh / f"client-{client}.safetensors")
            checksums[f"client-{client}.safetensors"] = _checksum(path)
        manifest = {
            "format": 1,
            "round": round,
            "rules": sorted(server.rules),
            "skipped": server.skipped,
            "last": server.last,
            "traffic": asdict(server.traffic),
            "extra": extra,
        }
        text = json.dumps({**manifest, "files": checksums})
        put("manifest.json", json.dumps({"sha256": _digest(text), "manifest": text}).encode())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(fresh, final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise _disk_error(final, error) from error
    for old in checkpoints(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()), reverse=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files all match their checksums.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    try:
        outer = json.loads((path / "manifest.json").read_bytes())
        text = outer["manifest"]
        if _digest(text) != outer["sha256"]:
            raise ValueError("its checksum differs")
        manifest: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint {path} is damaged: its manifest cannot be read ({error}).") from error
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file() or _checksum(file) != expected:
            raise CheckpointError(f"The checkpoint {path} is damaged: {name} is missing or its checksum differs.")
    return manifest


def newest(folder: Path) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest checkpoint that is whole, its manifest, and what was wrong with newer ones; None if there is none.

    Raises:
        CheckpointError: There are checkpoints, but all of them are damaged.
    """
    problems: list[str] = []
    for path in checkpoints(folder):
        try:
            return path, read_manifest(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"No checkpoint in {folder} is usable. {problems[0]}")
    return None


def restore(path: Path, manifest: dict[str, Any], server: Server) -> None:
    """Put a checkpoint's contents into a freshly made server.

    Raises:
        CheckpointError: It was written for another model or method.
    """
    tensors = load((path / "server.safetensors").read_bytes())
    state = {n.removeprefix("state/"): t for n, t in tensors.items() if n.startswith("state/")}
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in server.state.items()}:
        raise CheckpointError(f"The checkpoint {path} was written for another model or method.")
    rules = nested({n.removeprefix("rules/"): t for n, t in tensors.items() if n.startswith("rules/")})
    server.state, server.b = state, tensors["b"]
    server.rules = {name: rules.get(name, {}) for name in manifest["rules"]}
    clients: dict[int, State] = {}
    for file in sorted(path.glob("clients-*.safetensors")):
        for key, tensor in load(file.read_bytes()).items():
            client, rule, name = key.split("/")
            clients.setdefault(int(client), {}).setdefault(rule, {})[name] = tensor
    for number, held in clients.items():
        server.store.put(number, held)
    for file in path.glob("client-*.safetensors"):
        server.store.put(int(file.stem.partition("-")[2]), nested(load(file.read_bytes())))
    traffic = manifest["traffic"]
    per_client = {int(k): list(pair) for k, pair in traffic.pop("clients").items()}
    server.traffic = Traffic(**traffic, clients=per_client)
    server.skipped = manifest["skipped"]
    server.last = {int(k): t for k, t in manifest["last"].items()}
