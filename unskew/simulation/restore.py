"""Restore a server and a network from a checkpoint, to resume the run or to start another method from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load
from torch import Tensor

from unskew.errors import CheckpointError, ConfigError
from unskew.protocol.messages import EVALUATED, ClientState, Tensors, Update, unflatten_records
from unskew.protocol.rules import Method, ServerRule
from unskew.simulation.checkpoint import CACHE, CLIENTS, FLYING, checkpoint_errors
from unskew.simulation.client_records import SentModel
from unskew.simulation.model_selection import ModelPair
from unskew.simulation.network import Network
from unskew.simulation.server import Server
from unskew.simulation.traffic import Traffic


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
        stored, state = _read_server(path, manifest, server), server.state
        # The state of a rule may grow, so its keys are not compared; the options were compared with the configuration.
        same_types = stored.server_rule["v"].dtype == state.v.dtype and stored.b.dtype == state.b.dtype
        same_keys = stored.server_rule.keys() == state.server_rule.keys() and {*manifest["rules"]} == {*state.rules}
        if not same_types or not same_keys:
            raise CheckpointError(
                f"The checkpoint {path} was written for another model or method. Use those of its run."
            )
        rules = {name: stored.rules.get(name, {}) for name in manifest["rules"]}
        state.restore(stored.server_rule, rules, stored.b, manifest["version"])
        state.waiting.restore(stored.waiting, manifest["waiting"], stored.b.device)
        server.selection.restore(stored.mean, stored.best)
        _check_initial(path, stored, server)
        for kind, observed in server.observed.items():
            observed.update(stored.observed[kind])
        clients = server.clients
        for kind, store in ((CLIENTS, clients.store), (CACHE, clients.cache), (FLYING, network.store)):
            for client, tensors in _client_parts(path, manifest, kind, server):
                store.put(client, tensors)
        _restore_counts(manifest, server)
        clients.restore(manifest["last"], stored.sent)
        if network.clock is not None:
            network.clock.restore(manifest["clock"])
        network.pending = [Update.of(fields, {}) for fields in manifest["in_flight"]]
        for update in network.pending:
            if not {"delta", "buffers"} <= set(network.store.get(update.client)):
                raise ValueError(f"the update of client {update.client} is missing")


def start_from_run(
    path: Path, manifest: dict[str, Any], server: Server, before: Method | None, observed: Collection[str] = ()
) -> None:
    """Start a method from the end of another run: its model, its traffic and the state that both methods share.

    Args:
        path: Folder of the checkpoint.
        manifest: Content of its manifest.
        server: New server.
        before: Method of the other run, if known. Rules that both methods have with the same options keep their state;
            other rules start anew from the model.
        observed: Entries of ``Server.observed`` to continue; the others start anew.

    Raises:
        CheckpointError: If the checkpoint is of another model, or is corrupted.
    """
    with checkpoint_errors(path):
        _branch(path, manifest, server, before, observed)


def _branch(
    path: Path, manifest: dict[str, Any], server: Server, before: Method | None, observed: Collection[str]
) -> None:
    stored, setup, state = _read_server(path, manifest, server), server.setup, server.state
    _check_initial(path, stored, server)
    server.broadcaster.initial.update(stored.observed["initial"])
    method, known = setup.method, () if before is None else before.halves
    v = stored.server_rule["v"]
    server_rule = setup.rule.init(v, setup.federation_info)
    keeps_server = before is not None and before.server == method.server
    if keeps_server:
        server_rule = stored.server_rule
        state.waiting.restore(stored.waiting, manifest["waiting"], stored.b.device)
        for client, tensors in _client_parts(path, manifest, CACHE, server):
            server.clients.cache.put(client, tensors)
    shared: set[str] = set()
    rules: dict[str, Tensors] = {}
    for half in method.halves:
        name = half.name
        fresh, old = half.server_init(v, setup.federation_info), stored.rules.get(name, {})
        # A rule that starts in a later round may have stored state in shared rounds, even with other options.
        alike = half in method.client and name in manifest["rules"] and tensor_shapes(old) == tensor_shapes(fresh)
        # The states of clients and server belong together, as in FedDyn: h = sum_k p_k g_k.
        alike = alike and (keeps_server or not isinstance(half, ServerRule))
        if half.continued and name not in manifest["rules"]:
            raise ConfigError(
                f"The run that start_from names was trained without {name}, so nothing that follows can have its guarantee. "
                f"Start from a run with {name}, or from none."
            )
        continued = {entry: old[entry] for entry in half.continued if entry in old}
        planned = {entry: fresh[entry] for entry in half.planned if entry in fresh}
        rules[name] = {**old, **planned} if half in known or alike else {**fresh, **continued}
        shared |= {name} if half in known or alike else set()
    state.restore(server_rule, setup.with_broadcast_model(rules, v), stored.b)
    for kind in observed:
        server.observed[kind].update(stored.observed[kind])
    parted = before is not None and method.sync is not None and before.sync is not None
    if parted:
        server.selection.use_mean(stored.mean)
    for client, tensors in _client_parts(path, manifest, CLIENTS, server):
        own = ClientState.of(tensors)
        stays = ClientState(
            {rule: rule_tensors for rule, rule_tensors in own.rules.items() if rule in shared},
            own.model if parted else None,
            own.buffers if parted or setup.buffers == "local" else None,
            own.optimizer if parted else {},
        )
        server.clients.store.put(client, stays.tensors())
    _restore_counts(manifest, server)
    # Clients keep the models of compressed broadcasts, and miss the codes since their last round.
    follows = method.sync is None and setup.compressor is not None and setup.compressor.name in shared
    server.clients.restore(manifest["last"] if parted or follows else {}, {})


def tensor_shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(t.shape) for name, t in tensors.items()}


OTHER_MODEL = (
    "The checkpoint {path} was written for another model. Use the model of its run, or the same models in the same order if "
    "clients have different ones."
)


def _check_initial(path: Path, stored: StoredServer, server: Server) -> None:
    """Validate that clients have models of the same architectures as in the run."""
    if tensor_shapes(stored.observed["initial"]) != tensor_shapes(server.broadcaster.initial):
        raise CheckpointError(OTHER_MODEL.format(path=path))


class StoredServer(NamedTuple):
    """Content of a checkpoint's file ``server.safetensors``; see the parts of ``Server``."""

    server_rule: Tensors
    rules: dict[str, Tensors]
    b: Tensor
    mean: ModelPair | None
    best: ModelPair | None
    sent: dict[int, SentModel]
    waiting: Tensors
    observed: dict[str, Tensors]


def _read_server(path: Path, manifest: dict[str, Any], server: Server) -> StoredServer:
    """Load and validate the server's part of a checkpoint."""
    device, clients = server.state.b.device, server.setup.federation_info.clients
    tensors = {n: t.to(device) for n, t in load((path / "server.safetensors").read_bytes()).items()}
    if tensors["state/v"].shape != server.state.v.shape or tensors["b"].shape != server.state.b.shape:
        raise CheckpointError(OTHER_MODEL.format(path=path))
    sized = {name: kind for name in tensors if (kind := _sized_at_server(name)) is not None}
    _check_sizes(tensors, sized, server.state.v, server.state.b)
    numbers = [int(k) for part in ("last", "sent") for k in manifest[part]]
    if max([*numbers, *(fields["client"] for fields in manifest["in_flight"])], default=0) >= clients:
        raise ValueError(f"it names a client beyond the {clients} that there are")

    def part(kind: str) -> Tensors:
        return {n.removeprefix(f"{kind}/"): t for n, t in tensors.items() if n.startswith(f"{kind}/")}

    mean, best = (
        (tensors[f"{kind}/v"], tensors[f"{kind}/b"]) if f"{kind}/v" in tensors else None for kind in ("mean", "best")
    )
    sent = {
        int(k): SentModel(
            version, origin_round, tensors.get(f"sent/{origin_round}"), tensors.get(f"sent-b/{origin_round}")
        )
        for k, (version, origin_round) in manifest["sent"].items()
    }
    observed = {kind: part(kind) for kind in server.observed}
    rules = unflatten_records("rules", tensors)
    return StoredServer(part("state"), rules, tensors["b"], mean, best, sent, part("waiting"), observed)


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


def _check_sizes(tensors: Tensors, sized: dict[str, str], v: Tensor, b: Tensor) -> None:
    """Validate the sizes of models and buffers; tensors of rules may have any size."""
    for name, kind in sized.items():
        own = v if kind == "v" else b
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
        if not 0 <= client < server.setup.federation_info.clients:
            raise ValueError(f"there is no client {client}")
        state = server.state
        v, b = server.broadcaster.model_for(client, (state.v, state.b)) if kind == CLIENTS else (state.v, state.b)
        if kind == CLIENTS and "model" in tensors and tensors["model"].shape != v.shape:
            raise CheckpointError(OTHER_MODEL.format(path=path))
        _check_sizes(tensors, SIZED[kind], v, b)
        yield client, tensors


def _restore_counts(manifest: dict[str, Any], server: Server) -> None:
    traffic = dict(manifest["traffic"])
    per_client = {int(k): list(pair) for k, pair in traffic.pop("clients").items()}
    server.traffic.restore(Traffic(**traffic, clients=per_client))
    server.aggregator.restore(manifest["skipped"])
