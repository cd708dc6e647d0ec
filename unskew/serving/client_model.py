"""Personal model of one client of a finished run, from the last checkpoint or from its own file."""

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
    """Return the number of a client, given its number or name.

    Args:
        folder: Run folder.
        client: Number or name of the client.

    Raises:
        ConfigError: If the run has no such client.
        CheckpointError: If ``clients.jsonl`` is missing or corrupted.
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
    """Load the parameters ``v [d]`` and buffers ``b [m]`` of a client's model; the global ones if it never took part.

    Args:
        folder: Run folder.
        config: Configuration of the run.
        method: Method of the run.
        spec: Layout of the model.
        final: Parameters and buffers of the global model.
        client: Number or name of the client.

    Raises:
        ConfigError: If there is no such client, or it has no personal model.
        CheckpointError: If the checkpoint with the personal model is missing or corrupted.
    """
    number = client_number(folder, client)
    if has_fine_tuning(method):
        return _tuned(folder, config, final, number)
    own = has_personal_models(method, spec)
    if not own and config.buffers != "local":
        raise ConfigError(f"{config.method} has no personal models; all clients use the global model. Omit --client.")
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"Personal models are stored in the last checkpoint, but {folder} has no checkpoint.")
    path, manifest, _ = newest
    if not _is_last(folder, manifest["round"]):
        raise CheckpointError(
            f"The last checkpoint of {folder}, which contains the personal models, is missing or corrupted."
        )
    with checkpoint_errors(path):
        state = ClientState.of(_kept(path, list(manifest["files"]), number))
        v, b = serving_model(method, spec, config.buffers, state, *final, own)
        if v.shape != final[0].shape or b.shape != final[1].shape:
            raise ValueError(f"the model of client {number} has another size")
    return v, b


def _tuned(folder: Path, config: Experiment, final: tuple[Tensor, Tensor], number: int) -> tuple[Tensor, Tensor]:
    """Load the model that a client fine-tuned at the end of the run."""
    # The summary is missing while a resumed run is training, when personal models of an earlier end may still exist.
    with checkpoint_errors(folder / "summary.json"):
        read_json(folder / "summary.json")
    with checkpoint_errors(folder / NAME / str(number)):
        personal = load_personal_model(folder, number)
        if personal is not None and (personal[0].shape, personal[1].shape) != (final[0].shape, final[1].shape):
            raise ValueError(f"the model of client {number} has another size")
    if personal is None:
        raise ConfigError(
            f"{config.method} trains personal models at the end of the run, but {folder} has none of client {number}. "
            "Personal models exist only for evaluated clients (eval_clients, holdout), are not stored if they are too "
            "large in total, and stay at the sites of a deployed run. Omit --client, and train the global model on the "
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
