"""Personal model of one client of a finished run, from the last checkpoint or from its own file."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from unskew.config.experiment import Experiment
from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import parse_json, read_file
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import PERSONAL, ClientState, Tensors
from unskew.protocol.rules import Method
from unskew.records.result import read_summary
from unskew.runs.personal_model_files import NAME, load_personal_model
from unskew.simulation.checkpoint import CLIENTS, checkpoint_errors, newest_checkpoint
from unskew.simulation.personal_models import has_fine_tuning, has_personal_models, serving_model


def find_client(folder: Path, client: int | str) -> tuple[int, bool]:
    """Return the number of a client, given its number or name, and whether it is unseen.

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
        unseen = {int(row["client"]): row.get("unseen", False) is True for row in rows}
    number = names.get(str(client), int(client) if str(client).isdigit() else -1)
    if number in unseen:
        return number, unseen[number]
    known = ", ".join(sorted(names)[:10]) if names else f"0 to {max(unseen, default=0)}"
    raise ConfigError(f"The run in {folder} has no client {client!r}; its clients are {known}.")


def model_of_client(
    folder: Path, config: Experiment, method: Method, spec: ModelSpec, final: tuple[Tensor, Tensor], client: int | str
) -> tuple[Tensor, Tensor, str]:
    """Load the parameters ``v [d]`` and buffers ``b [m]`` of a client's model; the global ones if it never took part.

    The third value is a note on the use of the global model, or an empty string.

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
    number, unseen = find_client(folder, client)
    if has_fine_tuning(method):
        return *_tuned(folder, config, final, number, unseen), ""
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
    if not own or state.model is not None or any(PERSONAL in rule_state for rule_state in state.rules.values()):
        return v, b, ""
    cause = (
        f"Client {client} is unseen: it took no part in training, so the global model serves it."
        if unseen
        else f"The run has no personal model of client {client}, so the global model serves it: the client took part in no "
        "round, or its model stays at its site."
    )
    return v, b, f"{cause} {initial_values_note(method, spec)}".rstrip()


def initial_values_note(method: Method, spec: ModelSpec) -> str:
    """Return a note on the parameters of the global model that no client sends; empty if all are sent.

    Args:
        method: Method of the run.
        spec: Layout of the model.
    """
    slices = method.sync.local_slices(spec) if method.sync is not None else ()
    if method.sync is None or not slices:
        return ""
    share = sum(part.stop - part.start for part in slices) / spec.size
    return (
        f"With {method.sync.name}, {100 * share:.3g} % of the parameters stay at the clients; in the global model they have "
        "their initial values."
    )


def _tuned(
    folder: Path, config: Experiment, final: tuple[Tensor, Tensor], number: int, unseen: bool
) -> tuple[Tensor, Tensor]:
    """Load the model that a client fine-tuned at the end of the run."""
    if unseen:
        raise ConfigError(
            f"Client {number} is unseen: it took no part in training, and the run stores no model of it. Omit --client to "
            "use the global model."
        )
    # The summary is missing while a resumed run is training, when personal models of an earlier end may still exist.
    read_summary(folder)
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
