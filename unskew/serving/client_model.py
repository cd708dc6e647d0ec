"""The model that a method keeps for one client of a finished run, from its last checkpoint or from a file of its own."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from unskew.config.experiment import Experiment
from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import parse_json, read_file, read_json
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import ClientState, Tensors
from unskew.protocol.rules import Method
from unskew.runs.personal_model_files import NAME, load_personal_model
from unskew.simulation.checkpoint import CLIENTS, checkpoint_errors, newest_checkpoint
from unskew.simulation.personal_models import has_fine_tuning, has_personal_models, serving_model


def client_number(folder: Path, client: int | str) -> int:
    """The number of a client that is named by its number or its name.

    Args:
        folder: Run folder.
        client: Number or name of the client.

    Raises:
        ConfigError: The run has no such client.
        CheckpointError: ``clients.jsonl`` is missing or damaged.
    """
    path = folder / "clients.jsonl"
    with checkpoint_errors(path):
        rows = [parse_json(line) for line in read_file(path).splitlines()]
        names = {str(row["name"]): int(row["client"]) for row in rows if "name" in row}
        numbers = {int(row["client"]) for row in rows}
    if str(client) in names:
        return names[str(client)]
    if str(client).isdigit() and int(client) in numbers:
        return int(client)
    known = ", ".join(sorted(names)[:10]) if names else f"0 to {max(numbers, default=0)}"
    raise ConfigError(f"The run in {folder} has no client {client!r}; its clients are {known}.")


def model_of_client(
    folder: Path, config: Experiment, method: Method, spec: ModelSpec, final: tuple[Tensor, Tensor], client: int | str
) -> tuple[Tensor, Tensor]:
    """The model ``v [d]`` and the statistics ``b [m]`` that serve a client; the global ones if it never took part.

    Args:
        folder: The run folder.
        config: Of the run.
        method: Of the run.
        spec: Its model.
        final: The global model and its statistics.
        client: By its number, or its name where clients have any.

    Raises:
        ConfigError: There is no such client, or the method keeps no model of its own for one.
        CheckpointError: The checkpoint that holds it is gone or damaged.
    """
    number = client_number(folder, client)
    if has_fine_tuning(method):
        return _tuned(folder, config, final, number)
    own = has_personal_models(method, spec)
    if not own and config.buffers != "local":
        raise ConfigError(
            f"{config.method} has no personal models: all clients are served by the global one. Leave --client out."
        )
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"The clients' own models are in the last checkpoint, and {folder} has none any more.")
    path, manifest, _ = newest
    if not _is_last(folder, manifest["round"]):
        raise CheckpointError(
            f"The last checkpoint of {folder} is missing or damaged, which holds the clients' own models."
        )
    with checkpoint_errors(path):
        state = ClientState.of(_kept(path, list(manifest["files"]), number))
        v, b = serving_model(method, spec, config.buffers, state, *final, own)
        if v.shape != final[0].shape or b.shape != final[1].shape:
            raise ValueError(f"the model of client {number} has another size")
    return v, b


def _tuned(folder: Path, config: Experiment, final: tuple[Tensor, Tensor], number: int) -> tuple[Tensor, Tensor]:
    """Load what a client fine-tuned at the end of the run."""
    with checkpoint_errors(
        folder / "summary.json"
    ):  # it is gone while a run goes on, whose earlier models are still there
        read_json(folder / "summary.json")
    with checkpoint_errors(folder / NAME / str(number)):
        personal = load_personal_model(folder, number)
        if personal is not None and (personal[0].shape, personal[1].shape) != (final[0].shape, final[1].shape):
            raise ValueError(f"the model of client {number} has another size")
    if personal is None:
        raise ConfigError(
            f"{config.method} trains the clients' own models at the end of the run, and {folder} keeps none of client "
            f"{number}: only clients that are evaluated have one (eval_clients, holdout), only where all of them are not too "
            "large, and none of a run across real sites, where they stay. Leave --client out, and train the model on the "
            "client's data."
        )
    return personal


def _is_last(folder: Path, round: int) -> bool:
    with checkpoint_errors(folder / "summary.json"):
        return bool(read_json(folder / "summary.json")["rounds"] == round)


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
