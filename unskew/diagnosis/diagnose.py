"""Implementation of ``unskew diagnose``: skew of a federation at a model, and the effect of synthetic data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.checked_tensors import load_checked
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_config
from unskew.config.trust import NOT_OF_MODEL
from unskew.data.federation import Federation
from unskew.data.leaks import find_leaks
from unskew.data.load import federation_of
from unskew.data.task_options import apply_task_options
from unskew.diagnosis.features import AdviceContext
from unskew.diagnosis.report import DiagnosisReport
from unskew.diagnosis.synthetic import Synthetic, image_files, synthetic_sets
from unskew.engines.costs import step_seconds, threads_of
from unskew.engines.cpu import default_torch_modes, num_cores, num_threads
from unskew.engines.device import device_modes
from unskew.engines.registry import pick_device
from unskew.errors import CheckpointError, ConfigError, list_items, short_repr
from unskew.filesystem import check_run, parse_path
from unskew.measurements.feature_skew import feature_skew
from unskew.measurements.gradient_probe import BATCH, GradientProbe
from unskew.measurements.heterogeneity import Follow, MeasurementScope, measure, selected_clients, selected_samples
from unskew.measurements.label_skew import label_skew_metrics
from unskew.measurements.site_differences import site_differences
from unskew.methods.registry import method
from unskew.models.spec import ModelSpec
from unskew.runs.api_arguments import check_federation, config_from_arguments, model_object
from unskew.runs.build_model import ModelLike, initial_spec
from unskew.simulation.checkpoint import list_checkpoints, read_model


@default_torch_modes()
def diagnose(
    federation: Federation | None = None,
    *,
    run: str | Path | None = None,
    model: ModelLike | None = None,
    synthetic: Synthetic | str | Path | None = None,
    synthetic_fractions: Sequence[float] = MeasurementScope.shares,
    sample_clients: int | None = MeasurementScope.clients,
    samples: int | None = MeasurementScope.samples,
    curvature: bool = True,
    iterations: int = MeasurementScope.iterations,
    epsilon: float | None = None,
    mu: float | None = None,
    progress: Follow | None = None,
    **options: Any,
) -> DiagnosisReport:
    """Measure how much the clients of a federation disagree, at one model or along a run, and apply theory to it.

    Args:
        federation: Data of all clients; if None, they are loaded as configured in ``options`` or in the run.
        run: A run folder, whose initial model, checkpoints and final model are measured; or one of its checkpoints.
        model: Name of a model, a module, a factory, or ``"package.module:factory"``; measured at its initialization.
            With ``run``, only if the run's model was given in Python.
        synthetic: Synthetic data as arrays like those of ``Federation.from_arrays``: one ``(x, y)`` for all clients, a
            list with one pair per client, or a ``Federation``. Or the location of images for all clients: a parquet
            file with the columns ``image`` and ``label``, a folder of such files, or a run that generated some. If
            None, the images that the run generated; otherwise a sample of all clients' data, which represents perfect
            generators.
        synthetic_fractions: Shares ``p`` of synthetic data to predict for, each in [0, 1].
        sample_clients: Maximum number of clients to measure, drawn by the seed; None for all.
        samples: Maximum number of samples per client; None for all.
        curvature: Whether to measure smoothness, which takes most of the time.
        iterations: Maximum number of iterations of the power method.
        epsilon: Accuracy, as a squared gradient norm, for which rounds are predicted; None for a tenth of the current
            one.
        mu: Strong convexity, if the loss has it. ``epsilon`` is then in units of the loss, by default a tenth of the
            current ``||grad f||^2 / (2 mu)``, which bounds the distance of the loss from its minimum.
        progress: Called with a description and two numbers: the amount done and the total.
        **options: Fields of ``unskew.Experiment``: the data, ``seed``, ``device``, and the budget used for predictions.

    Returns:
        Report with the measurements; see its methods ``as_json`` and ``plot``.

    Raises:
        ConfigError: If an option is not valid.
        DataError: If the data cannot be used.
        CheckpointError: If the run has no model to measure, or a checkpoint is corrupted.
    >>> import unskew
    >>> fed = unskew.load_federation("digits", partition="iid", clients=3)
    >>> report = unskew.diagnose(fed, model="logistic", samples=50, curvature=False, synthetic_fractions=[0, 1])
    >>> (measurement,) = report.measurements
    >>> before, after = measurement.shares
    >>> after.get("zeta2")
    0.0
    """
    check_federation(federation)
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be a function of a text and two numbers, not {short_repr(progress)}.")
    synthetic_fractions = list_items(
        synthetic_fractions,
        ConfigError(f"synthetic_fractions must be a list such as [0, 0.5, 1], not {short_repr(synthetic_fractions)}."),
    )
    if run is not None:
        folder = find_run_folder(parse_path(run))
        allowed = {"device", "data_path"}
        wrong = next(iter(set(options) - allowed), "model" if isinstance(model, str) else None)
        if wrong is not None:
            raise ConfigError(f"The run in {folder} determines {wrong}. Remove this option.")
        remedy = "give the model in Python with unskew.diagnose(run=..., model=...)"
        replaced = options if model is None else {**options, "model": model}
        values = {**load_config(folder / "config.yaml", remedy, replaced, NOT_OF_MODEL), **options}
        if synthetic is None and image_files(folder):
            synthetic = folder
        if federation is None and values.get("data") == "arrays":
            raise CheckpointError(f"The data of {folder} were given in Python. Pass the same data as federation.")
    else:
        values = config_from_arguments(options, federation, model)
    config = experiment(values)
    device = pick_device(config.device)
    fed = federation_of(config.data_spec, config.seed) if federation is None else federation
    fed = apply_task_options(fed, config.loss, config.class_weights)
    spec = initial_spec(config, fed, model_object(model), method(config.method)).to(device)
    if spec.others:
        raise ConfigError("The diagnosis measures one model. Choose one of those of the clients.")
    scope = validate_scope(
        MeasurementScope(
            clients=sample_clients,
            samples=samples,
            shares=tuple(synthetic_fractions),
            curvature=curvature,
            iterations=iterations,
            tau=mean_local_steps(config, fed.sizes),
            batch=config.batch_size,
            epsilon=epsilon,
            mu=mu,
            seed=config.seed,
        )
    )
    ids = selected_clients(fed, scope)
    sets, source = synthetic_sets(synthetic, fed, scope, ids)
    with device_modes(device, config.precision), num_threads(threads_for(spec)):
        measured = [
            measure(
                GradientProbe(spec, fed.objective, fed, v.to(device), b.to(device)), fed, scope, sets, label, progress
            )
            for label, v, b in models_to_measure(None if run is None else Path(run), spec)
        ]
    details = {
        "data": fed.name,
        "partition": fed.partition,
        "clients": len(fed.clients),
        "clients_measured": len(ids),
        "model": config.model if model is None or isinstance(model, str) else getattr(model, "__name__", "given"),
        "parameters": spec.size,
        "synthetic": source,
        "leaks": find_leaks(config.data_spec) if federation is None else [],
        "harmonization": None if fed.harmonization is None else str(fed.harmonization),
        **{name: value for name, value in asdict(scope).items() if name not in ("clients", "shares", "tolerance")},
    }
    labels = label_skew_metrics(fed, ids)
    labels["feature_skew"] = feature_skew(lambda k: selected_samples(fed.clients[k], scope), ids, fed.classes)
    sites = site_differences(fed, ids, config.features)
    labels |= {"label_between": sites.label_between, "label_unexplained": sites.label_unexplained}
    if fed.harmonization is not None:
        before, after = fed.harmonization.between
        labels |= {"harmonized_between_before": before, "harmonized_between_after": after}
    setting = AdviceContext(config, fed, model_object(model), spec, federation is not None)
    return DiagnosisReport(details, labels, measured, sites, setting)


def threads_for(spec: ModelSpec) -> int:
    """Return the number of threads for the gradients of a model: 1 for a small one, for which more threads only wait.

    Args:
        spec: Model.
    """
    return min(torch.get_num_threads(), threads_of(step_seconds(spec, BATCH), num_cores()))


def mean_local_steps(config: Experiment, sizes: np.ndarray) -> float:
    """Return the mean number of local steps of a client in a round.

    Args:
        config: Configuration of a run.
        sizes: Number of training samples of each client, ``[K]``.
    """
    different, times = np.unique(sizes, return_counts=True)
    return float(np.average([config.training.steps(int(n), 0) for n in different], weights=times))


def validate_scope(scope: MeasurementScope) -> MeasurementScope:
    """Validate the scope of a measurement and return it.

    Args:
        scope: Scope to check.

    Raises:
        ConfigError: If a limit is out of range.
    """
    wholes: dict[str, Any] = {"sample_clients": scope.clients, "samples": scope.samples, "iterations": scope.iterations}
    for name, value in wholes.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            raise ConfigError(f"{name}={short_repr(value, str)} is not valid: it must be an integer, at least 1.")
    if not scope.shares:
        raise ConfigError("synthetic_fractions is empty. Name at least one share of synthetic data, such as 0.5.")
    shares: Sequence[Any] = scope.shares
    for p in shares:
        if not (isinstance(p, Real) and not p < 0 and p <= 1):
            raise ConfigError(f"p={short_repr(p, str)} is not a share of synthetic data: it must be between 0 and 1.")
    strengths: dict[str, Any] = {"epsilon": scope.epsilon, "mu": scope.mu}
    for name, number in strengths.items():
        if number is not None and not (isinstance(number, Real) and not number <= 0 and number <= sys.float_info.max):
            raise ConfigError(f"{name}={short_repr(number, str)} is not valid: it must be above 0 and finite.")
    if scope.mu is not None and not scope.curvature:
        raise ConfigError("With mu, predicted rounds depend on the smoothness. Measure curvature too, or remove mu.")
    return scope


# ---- models -------------------------------------------------------------------------------------------------------------

FINAL = "model.safetensors"


def find_run_folder(path: Path) -> Path:
    """Return the run folder of a path to it or to one of its checkpoints.

    Args:
        path: Run folder or checkpoint folder.

    Raises:
        CheckpointError: If the path is neither a run folder nor a checkpoint of one.
        ConfigError: If the run folder contains a link, pipe or device.
    """
    for folder in (path, path.parent.parent):
        if (folder / "config.yaml").is_file():
            check_run(folder)
            return folder
    raise CheckpointError(f"{path} is neither a run folder nor a checkpoint of one: it has no config.yaml.")


def models_to_measure(run: Path | None, spec: ModelSpec) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Iterate over the models to measure: name, parameters and buffers.

    Args:
        run: Run folder, or None.
        spec: Layout of the model.

    Raises:
        CheckpointError: If a checkpoint is corrupted, or belongs to another model.
    """
    if run is None:
        yield "initial model", spec.flatten(), spec.flatten_buffers()
        return
    folder = find_run_folder(run)
    paths = [run] if folder != run else list_checkpoints(folder / "checkpoints")[::-1]
    if folder == run:
        yield "initial model", spec.flatten(), spec.flatten_buffers()
    for path in paths:
        done, v, b = read_model(path)
        if v.shape != (spec.size,) or b.shape != (sum(spec.buffer_sizes),):
            raise CheckpointError(f"The checkpoint {path} was written for another model.")
        yield f"after round {done}", v, b
    if folder == run and (folder / FINAL).is_file():
        yield "final model", *final_model(folder, spec)


def final_model(folder: Path, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return the model ``v [d]`` and the buffers ``b [m]`` of a finished run.

    Args:
        folder: Run folder.
        spec: Layout of the model.

    Raises:
        CheckpointError: If the files are corrupted, or of another model.
    """
    final = folder / FINAL
    tensors = load_checked(final)
    if not {*spec.names, *spec.buffer_names} <= set(tensors):
        raise CheckpointError(f"{final} contains another model. Use the model of the run.")
    for name in (*spec.names, *spec.buffer_names):
        if not tensors[name].is_floating_point():
            raise CheckpointError(
                f"{final} is corrupted: {name} has the type {tensors[name].dtype}, not a floating-point type."
            )
        if not bool(torch.isfinite(tensors[name]).all()):
            raise CheckpointError(
                f"{name} in {final} has values that are not finite: the run diverged, or the file is corrupted. Repeat the "
                "run with a smaller learning rate."
            )
    statistics = [tensors[n].reshape(-1) for n in spec.buffer_names]
    v = torch.cat([tensors[n].reshape(-1) for n in spec.names])
    if len(v) != spec.size or sum(map(len, statistics)) != sum(spec.buffer_sizes):
        raise CheckpointError(f"{final} contains another model. Use the model of the run.")
    return v, torch.cat(statistics) if statistics else spec.flatten_buffers()
