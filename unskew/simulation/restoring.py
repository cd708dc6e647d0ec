"""From a checkpoint to a server and a network that go on, or that begin another method there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from unskew.errors import CheckpointError
from unskew.protocol.messages import ClientState, Tensors, Update, nested
from unskew.protocol.rules import Method
from unskew.simulation.checkpoint import CACHE, CLIENTS, FLYING, FORMAT
from unskew.simulation.network import Network
from unskew.simulation.server import Sent, Server
from unskew.simulation.traffic import Traffic


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
