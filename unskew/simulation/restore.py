"""Restore a server and a network from a checkpoint, to resume the run or to start another method from it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from unskew.errors import CheckpointError, ConfigError
from unskew.protocol.messages import EVALUATED, ClientState, Tensors, Update, unflatten_records
from unskew.protocol.rules import Method
from unskew.simulation.checkpoint import CACHE, CLIENTS, FLYING, checkpoint_errors
from unskew.simulation.network import Network
from unskew.simulation.server import SentModel, Server
from unskew.simulation.traffic import Traffic

Pair = tuple[Tensor, Tensor]
"""Model and buffers."""
Observed = dict[str, Tensors]
"""State of attackers (``attack``) and of diagnostics (``measured``)."""


def restore(path: Path, manifest: dict[str, Any], server: Server, network: Network) -> None:
    """Load a checkpoint into a new server and network.

    Args:
        path: Folder of the checkpoint.
        manifest: Content of its manifest.
        server: New server.
        network: New network.

    Raises:
        CheckpointError: If the checkpoint is of another model or method, or is corrupted.
    """
    with checkpoint_errors(path):
        state, rules, b, server.mean, server.best, sent, waiting, observed = _server_part(path, manifest, server)
        # The state of a rule may grow, so its keys are not compared; the options were compared with the configuration.
        same_types = state["v"].dtype == server.v.dtype and b.dtype == server.b.dtype
        if not same_types or state.keys() != server.state.keys() or {*manifest["rules"]} != {*server.halves}:
            raise CheckpointError(f"The checkpoint {path} was written for another model or method.")
        server.state, server.b = state, b
        server.attack_state.update(observed["attack"])
        server.measured = observed["measured"]
        server.version = manifest["version"]
        server.sent = sent
        server.rules = {name: rules.get(name, {}) for name in manifest["rules"]}
        server.waiting.restore(waiting, manifest["waiting"], b.device)
        for kind, store in ((CLIENTS, server.store), (CACHE, server.cache), (FLYING, network.store)):
            for client, tensors in _client_parts(path, manifest, kind, server):
                store.put(client, tensors)
        _counters(manifest, server)
        if network.clock is not None:
            network.clock.restore(manifest["clock"])
        network.pending = [Update.of(fields, {}) for fields in manifest["in_flight"]]
        for update in network.pending:
            if not {"delta", "buffers"} <= set(network.store.get(update.client)):
                raise ValueError(f"the update of client {update.client} is missing")


def start_from_run(path: Path, manifest: dict[str, Any], server: Server, before: Method | None) -> None:
    """Start a method from the end of another run: its model, its traffic and the state that both methods share.

    Args:
        path: Folder of the checkpoint.
        manifest: Content of its manifest.
        server: New server.
        before: Method of the other run, if known. Rules that both methods have with the same options keep their state;
            other rules start anew from the model.

    Raises:
        CheckpointError: If the checkpoint is of another model, or is corrupted.
    """
    with checkpoint_errors(path):
        _branch(path, manifest, server, before)


def _branch(path: Path, manifest: dict[str, Any], server: Server, before: Method | None) -> None:
    state, rules, b, mean, _, _, waiting, _ = _server_part(path, manifest, server)
    method, known = server.method, () if before is None else before.halves
    server.state, server.b = server.rule.init(state["v"], server.federation_info), b
    if before is not None and before.server == method.server:
        server.state = state
        server.waiting.restore(waiting, manifest["waiting"], b.device)
        for client, tensors in _client_parts(path, manifest, CACHE, server):
            server.cache.put(client, tensors)
    shared: set[str] = set()
    for name, half in server.halves.items():
        fresh, old = half.server_init(state["v"], server.federation_info), rules.get(name, {})
        # A rule that starts in a later round may have stored state in shared rounds, even with other options.
        alike = half in method.client and name in manifest["rules"] and tensor_shapes(old) == tensor_shapes(fresh)
        if half.continued and name not in manifest["rules"]:
            raise ConfigError(
                f"The run that start_from names was trained without {name}, so nothing that follows can have its guarantee. "
                f"Start from a run with {name}, or from none."
            )
        continued = {entry: old[entry] for entry in half.continued if entry in old}
        server.rules[name] = old if half in known or alike else {**fresh, **continued}
        shared |= {name} if half in known or alike else set()
    if server.compressor is not None and "broadcast_model" not in server.rules[server.compressor.name]:
        first = {"broadcast_model": state["v"], "broadcast_bytes": torch.zeros(0, dtype=torch.int64)}
        server.rules[server.compressor.name] = {**server.rules[server.compressor.name], **first}
    parted = before is not None and method.sync is not None and before.sync is not None
    if parted:
        server.mean = mean
    for client, tensors in _client_parts(path, manifest, CLIENTS, server):
        own = ClientState.of(tensors)
        stays = ClientState(
            {rule: rule_tensors for rule, rule_tensors in own.rules.items() if rule in shared},
            own.model if parted else None,
            own.buffers if parted or server.mode == "local" else None,
            own.optimizer if parted else {},
        )
        server.store.put(client, stays.tensors())
    _counters(manifest, server)
    if not parted:
        server.last = {}


def tensor_shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(t.shape) for name, t in tensors.items()}


def _server_part(
    path: Path, manifest: dict[str, Any], server: Server
) -> tuple[Tensors, dict[str, Tensors], Tensor, Pair | None, Pair | None, dict[int, SentModel], Tensors, Observed]:
    """Load server state, rules, buffers, mean model, best model, sent models, buffered updates and observed state."""
    device, clients = server.b.device, server.federation_info.clients
    tensors = {n: t.to(device) for n, t in load((path / "server.safetensors").read_bytes()).items()}
    if tensors["state/v"].shape != server.v.shape or tensors["b"].shape != server.b.shape:
        raise CheckpointError(f"The checkpoint {path} was written for another model.")
    sized = {name: kind for name in tensors if (kind := _sized_at_server(name)) is not None}
    _check_sizes(tensors, sized, server)
    numbers = [int(k) for part in ("last", "sent") for k in manifest[part]]
    if max([*numbers, *(fields["client"] for fields in manifest["in_flight"])], default=0) >= clients:
        raise ValueError(f"it names a client beyond the {clients} that there are")
    parts = {
        kind: {n.removeprefix(f"{kind}/"): t for n, t in tensors.items() if n.startswith(f"{kind}/")}
        for kind in ("state", "waiting", "attack", "measured")
    }
    mean, best = (
        (tensors[f"{kind}/v"], tensors[f"{kind}/b"]) if f"{kind}/v" in tensors else None for kind in ("mean", "best")
    )
    sent = {
        int(k): SentModel(version, born, tensors.get(f"sent/{born}"), tensors.get(f"sent-b/{born}"))
        for k, (version, born) in manifest["sent"].items()
    }
    state, waiting = parts.pop("state"), parts.pop("waiting")
    return state, unflatten_records("rules", tensors), tensors["b"], mean, best, sent, waiting, parts


UPDATE = {
    **dict.fromkeys(("delta", "start", "last", "report/v", "state/model", "sent", "entries"), "v"),
    **dict.fromkeys(("buffers", "b_start", "state/statistics", "sent_b", "entries_b", "sent_buffers"), "b"),
}
SIZED = {
    CLIENTS: {"model": "v", "statistics": "b"},
    CACHE: {"delta": "v"},
    FLYING: UPDATE,
}
"""Tensors in checkpoint files that have the size of the model (``v``) or of its buffers (``b``)."""


def _check_sizes(tensors: Tensors, sized: dict[str, str], server: Server) -> None:
    """Validate the sizes of models and buffers; tensors of rules may have any size."""
    for name, kind in sized.items():
        own = server.v if kind == "v" else server.b
        if name in tensors and tensors[name].shape != own.shape:
            raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)} and not {tuple(own.shape)}")


def _sized_at_server(name: str) -> str | None:
    """Return ``v`` or ``b`` for tensors in the server's file that have the size of the model or of its buffers."""
    kind, _, rest = name.partition("/")
    if kind in ("sent", "sent-b"):
        return "v" if kind == "sent" else "b"
    if kind == "waiting":
        return UPDATE.get(rest.partition("/")[2])
    if name in ("attack/direction", "attack/previous", "measured/previous"):
        return "v"
    return {
        "state/v": "v",
        f"state/{EVALUATED}": "v",
        "mean/v": "v",
        "best/v": "v",
        "b": "b",
        "mean/b": "b",
        "best/b": "b",
    }.get(name)


def _client_parts(path: Path, manifest: dict[str, Any], kind: str, server: Server) -> Iterator[tuple[int, Tensors]]:
    """Iterate over the stored tensors of clients."""
    joint: dict[int, Tensors] = {}
    for file in sorted(name for name in manifest["files"] if name.startswith(f"{kind}s-")):
        for key, tensor in load((path / file).read_bytes()).items():
            number, _, name = key.partition("/")
            joint.setdefault(int(number), {})[name] = tensor
    singles = [name for name in manifest["files"] if name.startswith(f"{kind}-")]
    # Loaded lazily, because together they need not fit into memory.
    one_by_one = ((int(Path(name).stem.partition("-")[2]), load((path / name).read_bytes())) for name in singles)
    for client, tensors in chain(joint.items(), one_by_one):
        if not 0 <= client < server.federation_info.clients:
            raise ValueError(f"there is no client {client}")
        _check_sizes(tensors, SIZED[kind], server)
        yield client, tensors


def _counters(manifest: dict[str, Any], server: Server) -> None:
    traffic = dict(manifest["traffic"])
    per_client = {int(k): list(pair) for k, pair in traffic.pop("clients").items()}
    server.traffic = Traffic(**traffic, clients=per_client)
    server.num_skipped = manifest["skipped"]
    server.last = {int(k): t for k, t in manifest["last"].items()}
