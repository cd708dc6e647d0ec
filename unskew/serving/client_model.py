"""Personal model of one client of a finished run, from the last checkpoint or from its own file."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors.torch import load
from torch import Tensor

from unskew.config.experiment import Experiment
from unskew.errors import CheckpointError, ConfigError, short_repr, unknown_name
from unskew.filesystem import parse_json, read_file
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import PERSONAL, ClientState, Tensors
from unskew.protocol.rules import Method
from unskew.records.result import read_summary
from unskew.runs.personal_model_files import NAME, load_personal_model
from unskew.runs.predictor import initial_values_note
from unskew.simulation.checkpoint import CLIENTS, checkpoint_errors, newest_checkpoint
from unskew.simulation.personal_models import has_fine_tuning, has_personal_models, serving_model


class ServedClient(NamedTuple):
    """A client whose model is used.

    Attributes:
        number: Number of the client, from 0.
        name: Its name, or its number if the clients have no names.
        unseen: Whether it took no part in training.
        row: Its row in ``clients.jsonl``.
    """

    number: int
    name: str
    unseen: bool
    row: Mapping[str, Any] = MappingProxyType({})


def find_client(folder: Path, name: str | None, number: int | None) -> ServedClient:
    """Return a client of a run by its name or its number.

    Args:
        folder: Run folder.
        name: Name of the client, or None to use ``number``.
        number: Number of the client from 0, as in ``clients.jsonl``, or None.

    Raises:
        ConfigError: If the run has no such client, or not exactly one of ``name`` and ``number`` is used.
        CheckpointError: If ``clients.jsonl`` is missing or corrupted.
    """
    kinds = isinstance(name, str | None) and isinstance(number, Integral | None) and not isinstance(number, bool)
    if not kinds or (name is None) == (number is None):
        choice = f"client={short_repr(name)}, client_number={short_repr(number)}"
        raise ConfigError(f"{choice}: choose a client either by its name, a string, or by its number, an integer.")
    path = folder / "clients.jsonl"
    with checkpoint_errors(path):
        rows = [parse_json(line) for line in read_file(path).splitlines()]
        names = [str(row["name"]) for row in rows if "name" in row]
        for row in rows:
            if row.get("name") == name if name is not None else row["client"] == number:
                shown = str(row.get("name", row["client"]))
                return ServedClient(int(row["client"]), shown, row.get("unseen") is True, row)
        numbers = f"from 0 to {max((int(row['client']) for row in rows), default=0)}"
    if name is not None and names:
        raise ConfigError(f"{folder}: {unknown_name('client', name, names)}")
    which = f"number {number}" if name is None else f"{name!r}, because its clients have no names"
    raise ConfigError(f"The run in {folder} has no client {which}. Choose --client-number (client_number) {numbers}.")


def model_of_client(
    folder: Path,
    config: Experiment,
    method: Method,
    spec: ModelSpec,
    final: tuple[Tensor, Tensor],
    client: ServedClient,
) -> tuple[Tensor, Tensor, str]:
    """Load the parameters ``v [d]`` and buffers ``b [m]`` of a client's model; the global ones if it never took part.

    The third value is a note on the use of the global model, or an empty string.

    Args:
        folder: Run folder.
        config: Configuration of the run.
        method: Method of the run.
        spec: Layout of the model.
        final: Parameters and buffers of the global model.
        client: The client.

    Raises:
        ConfigError: If the client has no personal model.
        CheckpointError: If the checkpoint with the personal model is missing or corrupted.
    """
    if has_fine_tuning(method):
        return *_tuned(folder, config, final, client), ""
    own = has_personal_models(method, spec)
    if not own and config.buffers != "local":
        raise ConfigError(f"{config.method} has no personal models; all clients use the global model. Omit the client.")
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"Personal models are stored in the last checkpoint, but {folder} has no checkpoint.")
    path, manifest, _ = newest
    if not _is_last(folder, manifest["round"]):
        raise CheckpointError(
            f"The last checkpoint of {folder}, which contains the personal models, is missing or corrupted."
        )
    serving = "the global model"
    if spec.others:
        spec = spec.of_client(client.number)
        final, serving = (spec.flatten(), spec.flatten_buffers()), "the initial model of its architecture"
    with checkpoint_errors(path):
        state = ClientState.of(_kept(path, list(manifest["files"]), client.number))
        if state.model is not None and state.model.shape != final[0].shape:
            raise CheckpointError(f"{path} contains another model of client {client.name}. Use the models of the run.")
        v, b = serving_model(method, spec, config.buffers, state, *final, own)
        if v.shape != final[0].shape or b.shape != final[1].shape:
            raise ValueError(f"the model of client {client.name} has another size")
    if not own or state.model is not None or any(PERSONAL in rule_state for rule_state in state.rules.values()):
        return v, b, ""
    cause = (
        f"Client {client.name} is unseen: it took no part in training, so {serving} serves it."
        if client.unseen
        else f"The run has no personal model of client {client.name}, so {serving} serves it: the client took part in "
        "no round, or its model stays at its site."
    )
    return v, b, f"{cause} {initial_values_note(method, spec)}".rstrip()


def _tuned(
    folder: Path, config: Experiment, final: tuple[Tensor, Tensor], client: ServedClient
) -> tuple[Tensor, Tensor]:
    """Load the model that a client fine-tuned at the end of the run."""
    if client.unseen:
        raise ConfigError(
            f"Client {client.name} is unseen: it took no part in training, and the run stores no model of it. Omit "
            "the client to use the global model."
        )
    # The summary is missing while a resumed run is training, when personal models of an earlier end may still exist.
    read_summary(folder)
    with checkpoint_errors(folder / NAME / str(client.number)):
        personal = load_personal_model(folder, client.number)
        if personal is not None and (personal[0].shape, personal[1].shape) != (final[0].shape, final[1].shape):
            raise ValueError(f"the model of client {client.name} has another size")
    if personal is None:
        raise ConfigError(
            f"{config.method} trains personal models at the end of the run, but {folder} has none of client {client.name}. "
            "Personal models exist only for evaluated clients (eval_clients, holdout), are not stored if they are too "
            "large in total, and stay at the sites of a deployed run. Omit the client, and train the global model on the "
            "client's data."
        )
    return personal


def _is_last(folder: Path, round: int) -> bool:
    return bool(read_summary(folder)["rounds"] == round)


def _kept(path: Path, files: list[str], client: int) -> Tensors:
    """Load a client's state from the files of a checkpoint."""
    single = f"{CLIENTS}-{client}.safetensors"
    if single in files:
        return load((path / single).read_bytes())
    own: Tensors = {}
    for name in (name for name in files if name.startswith(f"{CLIENTS}s-")):
        tensors = load((path / name).read_bytes())
        own |= {key.partition("/")[2]: t for key, t in tensors.items() if key.partition("/")[0] == str(client)}
    return own
