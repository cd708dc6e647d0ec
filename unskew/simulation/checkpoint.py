"""Checkpoints: everything a run needs to go on, bit for bit.

A checkpoint is a folder of safetensors files and a JSON manifest with their checksums. It is written beside its final place
and renamed, so it is there whole or not at all; the last two are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from unskew.errors import CheckpointError
from unskew.files import sync_path, write_synced, writing
from unskew.protocol.messages import ClientState, Tensors, Update, bytes_of, nested
from unskew.protocol.rules import Method
from unskew.simulation.network import Network
from unskew.simulation.server import Sent, Server
from unskew.simulation.store import ClientStore, encode
from unskew.simulation.traffic import Traffic

FORMAT = 3
KEEP = 2
CHUNK = 256 << 20  # bytes of client state per file, so that writing needs little memory
CLIENTS, CACHE, FLYING = "client", "cached", "flying"
"""Beginnings of file names: what clients keep, what the server keeps of them, and updates on their way."""


def _chunks(store: ClientStore) -> Iterator[Tensors]:
    chunk: Tensors = {}
    size = 0
    for client, tensors in store.in_memory():
        more = bytes_of(tensors.values())
        if chunk and size + more > CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk |= {f"{client}/{name}": tensor for name, tensor in tensors.items()}
        size += more
    if chunk:
        yield chunk


def save_checkpoint(folder: Path, round: int, server: Server, network: Network, extra: dict[str, Any]) -> Path:
    """Write the checkpoint after ``round`` rounds into ``folder`` and drop all but the last two.

    Args:
        folder: The run's ``checkpoints`` folder.
        round: Rounds finished.
        server: Whose state is saved.
        network: Whose updates on their way are saved.
        extra: What else the run needs to go on; JSON.

    Raises:
        CheckpointError: The disk is full or cannot be written; older checkpoints are left as they were.
    """
    final, fresh = folder / f"{round:07d}", folder / f".{round:07d}.new"
    checksums: dict[str, str] = {}

    def put(name: str, data: bytes) -> None:
        write_synced(fresh / name, data)
        checksums[name] = hashlib.sha256(data).hexdigest()

    with writing(final):
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            put("server.safetensors", encode(server.tensors()))
            for kind, store in ((CLIENTS, server.store), (CACHE, server.cache), (FLYING, network.store)):
                for number, chunk in enumerate(_chunks(store)):
                    put(f"{kind}s-{number:04d}.safetensors", encode(chunk))
                for client, path in store.on_disk():
                    name = f"{kind}-{client}.safetensors"
                    checksums[name] = _keep(path, fresh / name)
            manifest = {
                "format": FORMAT,
                "round": round,
                "rules": sorted(server.rules),
                "skipped": server.skipped,
                "last": server.last,
                "version": server.version,
                "sent": {client: [sent.version, sent.born] for client, sent in server.sent.items()},
                "traffic": asdict(server.traffic),
                "waiting": server.waiting.about(),
                "in_flight": [update.fields() for update in network.pending],
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
    drop(folder, keep=KEEP)
    return final


def _keep(path: Path, copy: Path) -> str:
    """Keep a client's file under a second name; gives its checksum."""
    try:
        os.link(path, copy)
    except OSError:  # not every file system has hard links
        shutil.copyfile(path, copy)
    sync_path(copy)
    return _checksum(copy)


def drop(folder: Path, keep: int | None = None, after: int | None = None) -> None:
    """Remove unfinished checkpoints, all but the last ``keep`` and those ``after`` a round (damaged, to be redone)."""
    found = checkpoints(folder)
    kept = [path for path in found if after is None or int(path.name) <= after][:keep]
    for path in [*found, *folder.glob(".*.new")]:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


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


def model_in(path: Path) -> tuple[int, Tensor, Tensor]:
    """The round of a checkpoint, its server's model ``[d]`` and the statistics ``[m]``.

    Raises:
        CheckpointError: It is damaged.
    """
    done = int(read_manifest(path)["round"])
    tensors = load((path / "server.safetensors").read_bytes())
    return done, tensors["state/v"], tensors["b"]


def restore(path: Path, manifest: dict[str, Any], server: Server, network: Network) -> None:
    """Put a checkpoint's contents into a freshly made server and network.

    Raises:
        CheckpointError: It was written for another model or method, or by another version.
    """
    state, rules, b, server.mean, sent, waiting = _server_part(path, manifest, server)
    # What a rule holds may grow; the configuration, options included, was compared before.
    if state.keys() != server.state.keys() or state["v"].shape != server.v.shape or b.shape != server.b.shape:
        raise CheckpointError(f"The checkpoint {path} was written for another model or method.")
    server.state, server.b = state, b
    server.version = manifest["version"]
    server.sent = sent
    server.rules = {name: rules.get(name, {}) for name in manifest["rules"]}
    server.waiting.restore(waiting, manifest["waiting"], b.device)
    for kind, store in ((CLIENTS, server.store), (CACHE, server.cache), (FLYING, network.store)):
        for client, tensors in _client_parts(path, kind):
            store.put(client, tensors)
    _counters(manifest, server)
    network.pending = [Update.of(fields, {}) for fields in manifest["in_flight"]]


def branch(path: Path, manifest: dict[str, Any], server: Server, before: Method | None) -> None:
    """Begin another method where a run ended: its model and traffic, and what both methods keep under the same names.

    Args:
        path: The checkpoint.
        manifest: What it says of itself.
        server: Freshly made.
        before: The other run's method, if it is known. What a rule holds that both have with the same options is taken over;
            the others begin anew at the model.

    Raises:
        CheckpointError: It was written for another model, or by another version.
    """
    state, rules, b, mean, _, waiting = _server_part(path, manifest, server)
    if state["v"].shape != server.v.shape or b.shape != server.b.shape:
        raise CheckpointError(f"The checkpoint {path} was written for another model.")
    method, known = server.method, () if before is None else (*before.client, before.sync)
    server.state, server.b = server.rule.init(state["v"], server.facts), b
    if before is not None and before.server == method.server:
        server.state = state
        server.waiting.restore(waiting, manifest["waiting"], b.device)
        for client, tensors in _client_parts(path, CACHE):
            server.cache.put(client, tensors)
    shared: set[str] = set()
    for name, half in server.halves.items():
        fresh, old = half.server_init(state["v"], server.facts), rules.get(name, {})
        # A rule that begins in a later round may have kept something in common rounds, with other options.
        alike = half in method.client and name in manifest["rules"] and shapes(old) == shapes(fresh)
        server.rules[name] = old if half in known or alike else fresh
        shared |= {name} if half in known or alike else set()
    parted = before is not None and method.sync is not None and before.sync is not None
    if parted:
        server.mean = mean
    for client, tensors in _client_parts(path, CLIENTS):
        own = ClientState.of(tensors)
        stays = ClientState(
            {rule: held for rule, held in own.rules.items() if rule in shared},
            own.model if parted else None,
            own.statistics if parted or server.mode == "local" else None,
            own.optimizer if parted else {},
        )
        server.store.put(client, stays.tensors())
    _counters(manifest, server)
    if not parted:
        server.last = {}


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: tuple(t.shape) for name, t in tensors.items()}


def _server_part(
    path: Path, manifest: dict[str, Any], server: Server
) -> tuple[Tensors, dict[str, Tensors], Tensor, tuple[Tensor, Tensor] | None, dict[int, Sent], Tensors]:
    """Its server's part: state, the rules' halves, statistics, the clients' mean, what was sent, and what waits."""
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"The checkpoint {path} was written by another version of unskew; resume it with that one."
        )
    device = server.b.device
    tensors = {n: t.to(device) for n, t in load((path / "server.safetensors").read_bytes()).items()}
    state, waiting = (
        {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)} for kind in ("state/", "waiting/")
    )
    mean = (tensors["mean/v"], tensors["mean/b"]) if "mean/v" in tensors else None
    sent = {
        int(k): Sent(version, born, tensors.get(f"sent/{born}"), tensors.get(f"sent-b/{born}"))
        for k, (version, born) in manifest["sent"].items()
    }
    return state, nested("rules", tensors), tensors["b"], mean, sent, waiting


def _client_parts(path: Path, kind: str) -> Iterator[tuple[int, Tensors]]:
    """What each client keeps, or the server of it."""
    clients: dict[int, Tensors] = {}
    for file in sorted(path.glob(f"{kind}s-*.safetensors")):
        for key, tensor in load(file.read_bytes()).items():
            client, _, name = key.partition("/")
            clients.setdefault(int(client), {})[name] = tensor
    yield from clients.items()
    for file in path.glob(f"{kind}-*.safetensors"):
        yield int(file.stem.partition("-")[2]), load(file.read_bytes())


def _counters(manifest: dict[str, Any], server: Server) -> None:
    traffic = dict(manifest["traffic"])
    per_client = {int(k): list(pair) for k, pair in traffic.pop("clients").items()}
    server.traffic = Traffic(**traffic, clients=per_client)
    server.skipped = manifest["skipped"]
    server.last = {int(k): t for k, t in manifest["last"].items()}
