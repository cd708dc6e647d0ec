"""Loading of the model of a finished run for predictions on new inputs."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_config
from unskew.config.trust import NOT_OF_MODEL, TRUST
from unskew.data.federation import Federation
from unskew.diagnosis.diagnose import FINAL, final_model
from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import check_run, parse_path, read_file
from unskew.methods.registry import method as method_of
from unskew.models.names import split_models
from unskew.models.registry import check_models_known
from unskew.models.spec import ModelSpec
from unskew.runs.build_model import ModelLike, initial_spec
from unskew.runs.input_spec import NAME as INPUTS
from unskew.runs.input_spec import InputSpec, read_inputs
from unskew.runs.predictor import Predictor, check_global_model, initial_values_note
from unskew.serving.client_model import ServedClient, find_client, model_of_client
from unskew.serving.evaluation import evaluate_rows
from unskew.serving.input_files import read_rows
from unskew.simulation.checkpoint import checkpoint_errors


class ServedModel(Predictor):
    """Trained model that predicts for arrays and files."""

    def predict_file(self, path: str | Path, new_site: bool = False) -> list[Any]:
        """Predict for the rows of a table, an image, or a folder of images.

        Categories that did not occur in training count as missing, with a warning.

        Args:
            path: File or folder.
            new_site: Whether rows of sites without training rows are harmonized by their own rows.

        Raises:
            DataError: If the file cannot be read, lacks columns, or does not contain inputs of this model.
        """
        rows = read_rows(Path(path), self.inputs, new_site)
        for unknown in rows.unknown:
            warnings.warn(str(unknown), stacklevel=2)
        return self.predict(rows.x)

    def evaluate_file(
        self, path: str | Path, by: str | None = None, intervals: bool = True, new_site: bool = False
    ) -> list[dict[str, Any]]:
        """Return the metrics on the labeled rows of a file, overall and for each value of the column ``by``.

        Args:
            path: File with labeled rows.
            by: Column whose values form groups; None forms no groups.
            intervals: Whether to compute 95 % intervals.
            new_site: Whether rows of sites without training rows are harmonized by their own rows.

        Raises:
            ConfigError: If the run does not name a label column, or ``by`` is used with images.
            DataError: If the file does not fit the model, or has other classes.
        """
        rows = read_rows(Path(path), self.inputs, new_site)
        return evaluate_rows(self.outputs(rows.x), rows, self.inputs, Path(path), by, intervals)


@dataclass(frozen=True)
class OpenedRun:
    """A finished run, loaded from its folder.

    Attributes:
        folder: The run folder.
        config: Configuration of the run, with the name of this model if clients have different ones.
        inputs: Input specification of the model.
        spec: Layout of the model.
        module: The model in eval mode: the global model, or a client's personal model.
        note: Sentences on parameters with initial values, and on a client that the global model serves; empty if none.
        client: Client whose model was chosen, or None.
    """

    folder: Path
    config: Experiment
    inputs: InputSpec
    spec: ModelSpec
    module: nn.Module
    note: str = ""
    client: ServedClient | None = None


def load_predictor(
    run: str | Path,
    *,
    client: str | None = None,
    client_number: int | None = None,
    model: ModelLike | None = None,
    trust_code: bool = False,
) -> ServedModel:
    """Load the trained model of a run folder for predictions on new inputs.

    A client that never took part in a run whose clients keep models is served by the global one, with a warning. There
    is also a warning if parts of the global model, which clients keep, have their initial values.

    Args:
        run: The run folder.
        client: Name of a client whose personal model to load.
        client_number: Number of this client instead of its name, from 0 in the order of ``clients.jsonl``. Without both,
            the global model is loaded.
        model: The model, if it was passed to the run in Python.
        trust_code: Whether custom code that the run's ``config.yaml`` names, such as a model or method, may be imported and
            run.

    Raises:
        CheckpointError: If the folder contains no finished run, or its files are corrupted.
        ConfigError: If the model cannot be built from the folder, the client is unknown or has no personal model, or no
            client is chosen and the method trains no global model.
    """
    opened = open_run(run, client, client_number, model, trust_code)
    check_trained(opened)
    if opened.inputs.objective.tokens:
        raise ConfigError(
            f"{opened.folder} contains a language model, which does not predict classes. Use unskew export --format "
            "transformers to use it with transformers."
        )
    return ServedModel(opened.module, opened.inputs, opened.spec.dtype)


def open_run(
    run: str | Path,
    client: str | None = None,
    client_number: int | None = None,
    model: ModelLike | None = None,
    trust_code: bool = False,
) -> OpenedRun:
    """Load a finished run with its model; see ``load_predictor``, which also calls ``check_trained``.

    Args:
        run: Run folder.
        client: Name of a client whose personal model to load.
        client_number: Number of this client instead of its name, from 0 in the order of ``clients.jsonl``. Without both,
            the global model is loaded.
        model: The model, if it was passed to the run in Python.
        trust_code: Whether custom code that the run's ``config.yaml`` names may be imported and run.
    """
    folder = parse_path(run)
    check_run(folder)
    if not (folder / FINAL).is_file():
        raise CheckpointError(f"The run in {folder} is not finished: it has no model.safetensors. Resume it first.")
    inputs = read_inputs(folder)
    remedy, replaced = None if trust_code else TRUST, {} if model is None else {"model": model}
    config = experiment(load_config(folder / "config.yaml", remedy, replaced, NOT_OF_MODEL))
    if model is None:
        check_models_known(config.model)
    method = method_of(config.method)
    spec = initial_spec(config, empty_federation(inputs), model, method)
    final = final_model(folder, spec)
    with checkpoint_errors(folder / INPUTS), safe_open(folder / FINAL, "pt") as file:
        about = json.loads(file.metadata()["about"])
        if about["inputs"] != hashlib.sha256(read_file(folder / INPUTS)).hexdigest():
            raise ValueError("it is not the file that was written with model.safetensors, or it is damaged")
    served = None if client is None and client_number is None else find_client(folder, client, client_number)
    if served is None:
        v, b, note = *final, initial_values_note(method, spec)
    else:
        v, b, note = model_of_client(folder, config, method, spec, final, served)
    number = 0 if served is None else served.number
    names = split_models(config.model)
    spec, config = spec.of_client(number), config.model_copy(update={"model": names[number % len(names)]})
    module = spec.load(v.to(spec.dtype), b.to(spec.dtype) if len(b) else b)
    return OpenedRun(folder, config, inputs, spec, module, note, served)


def check_trained(opened: OpenedRun) -> None:
    """Validate that a run has trained the model that serves; warn, for the caller's caller, if parts of it are not trained.

    Args:
        opened: Run with its model.

    Raises:
        ConfigError: If no client is chosen, and the method trains no global model.
    """
    if opened.client is None:
        check_global_model(method_of(opened.config.method), opened.config.method)
    if opened.note:
        warnings.warn(opened.note, RuntimeWarning, stacklevel=3)


def empty_federation(inputs: InputSpec) -> Federation:
    """Create a federation without clients that has the shapes and number of classes of ``inputs``."""
    kinds = {"uint8": torch.uint8, "tokens": torch.int64}
    # Texts are empty (padding), so they need no positions of the model.
    x = torch.full(
        (1, *inputs.shape), -1 if inputs.kind == "tokens" else 0, dtype=kinds.get(inputs.kind, torch.float32)
    )
    return Federation(
        clients=(), test=(x, torch.zeros(1, dtype=torch.int64)), task=inputs.task, classes=inputs.classes,
        normalization=inputs.known, class_names=inputs.class_names, encoders=inputs.encoders,
    )  # fmt: skip
