"""``unskew diagnose``: how skewed a federation is at a model, and what shuffled synthetic data would change there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from unskew.config.experiment import experiment, load_yaml
from unskew.data.checks import as_inputs, as_targets, check_targets
from unskew.data.federation import Federation, cat_inputs, take
from unskew.data.reading.images import decode_column
from unskew.data.sources.catalogue import joined
from unskew.diagnosis.report import Report
from unskew.engines.catalogue import pick_device
from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.measures.heterogeneity import (
    Pair,
    Scope,
    SyntheticOf,
    drawn,
    ids_of,
    label_figures,
    measure,
)
from unskew.measures.probe import Probe
from unskew.methods.catalogue import method
from unskew.models.vector import ModelSpec
from unskew.runs.model import ModelLike, initial_spec
from unskew.runs.run import check_given, load_data
from unskew.seeding import generator
from unskew.simulation.checkpoint import checkpoints, model_in
from unskew.tasks import TASKS

Synthetic = Federation | Sequence[tuple[object, object]] | tuple[object, object]
POOL = "a sample of the clients' own data, the same for all"


def diagnose(
    federation: Federation | None = None,
    *,
    run: str | Path | None = None,
    model: ModelLike | None = None,
    synthetic: Synthetic | str | Path | None = None,
    shares: Sequence[float] = Scope.shares,
    sample_clients: int | None = Scope.clients,
    samples: int | None = Scope.samples,
    curvature: bool = True,
    iterations: int = Scope.iterations,
    epsilon: float | None = None,
    mu: float | None = None,
    **options: Any,
) -> Report:
    """Measure how far the clients of a federation disagree, at a model or along a run, and what theory says of it.

    Args:
        federation: The data; without it they are loaded as ``data``, ``partition``, ``clients`` ... say, or as the run did.
        run: A run folder, whose initial model, kept checkpoints and final model are looked at; or one checkpoint of it.
        model: A registered name, a module, a factory, or ``"package.module:factory"``; looked at as it is initialised. With
            ``run`` only where the run's model was given in Python.
        synthetic: Synthetic data, given as arrays like those of ``Federation.from_arrays``: one ``(x, y)`` that all clients
            share, a list with one for each client, or a ``Federation`` of them. Or where images are kept: a parquet file
            with the columns ``image`` and ``label``, a folder of them, or a run that made some; all clients share these.
            Without any, the run's own if it made some; else a sample of all clients' own data stands in: what perfect
            generators would give.
        shares: Shares ``p`` of synthetic data to predict for, each from 0 to 1.
        sample_clients: At most so many clients, drawn by the seed, are looked at; None for all.
        samples: At most so many samples of each; None for all.
        curvature: Whether smoothness is measured; it is most of the work.
        iterations: Of the power iteration, at most.
        epsilon: Accuracy, of the squared gradient norm, for which rounds are predicted; a tenth of the present one if None.
        mu: Strong convexity, if the loss has it; ``epsilon`` is then in units of the loss, by default a tenth of the present
            ``||grad f||^2 / (2 mu)``, which bounds its distance from the minimum.
        options: Any field of ``unskew.Experiment``: the data, ``seed``, ``device``, and the budget that predictions are for.

    Returns:
        What was measured; ``as_json`` and ``plot`` show it.

    Raises:
        ConfigError: An option is wrong.
        DataError: The data cannot be used.
        CheckpointError: The run has nothing to look at, or a checkpoint is damaged.

    >>> import unskew
    >>> fed = unskew.load_federation("digits", partition="iid", clients=3)
    >>> report = unskew.diagnose(fed, model="logistic", samples=50, curvature=False, shares=[0, 1])
    >>> (place,) = report.places
    >>> before, after = place.shares
    >>> after.get("zeta2")
    0.0
    """
    if run is not None:
        folder = run_folder(Path(run))
        allowed = {"device", "data_path"}
        wrong = next(iter(set(options) - allowed), "model" if isinstance(model, str) else None)
        if wrong is not None:
            raise ConfigError(f"The run in {folder} says what its {wrong} is; leave it out.")
        values = {**load_yaml(folder / "config.yaml"), **options}
        if synthetic is None and image_files(folder):
            synthetic = folder
        if federation is None and values.get("data") == "arrays":
            raise CheckpointError(f"The data of {folder} were given in Python; give them there again.")
    else:
        values = dict(options)
        if federation is not None:
            given = {"data": federation.name, "partition": federation.partition, "clients": len(federation.clients)}
            check_given(given, values)
            values = {**given, **values}
        if isinstance(model, str):
            values["model"] = model
    config = experiment(values)
    device = pick_device(config.device)
    fed = load_data(config) if federation is None else federation
    spec = initial_spec(config, fed, None if isinstance(model, str) else model, method(config.method)).to(device)
    sizes, times = np.unique(fed.sizes, return_counts=True)
    scope = check_scope(
        Scope(
            clients=sample_clients,
            samples=samples,
            shares=tuple(shares),
            curvature=curvature,
            iterations=iterations,
            tau=float(np.average([config.training.steps(int(n)) for n in sizes], weights=times)),
            batch=config.batch_size,
            epsilon=epsilon,
            mu=mu,
            seed=config.seed,
        )
    )
    ids = ids_of(fed, scope)
    made, source = synthetic_of(synthetic, fed, scope, ids)
    places = [
        measure(Probe(spec, TASKS[fed.task], fed, v.to(device), b.to(device)), fed, scope, made, place)
        for place, v, b in models_of(None if run is None else Path(run), spec)
    ]
    facts = {
        "data": fed.name,
        "partition": fed.partition,
        "clients": len(fed.clients),
        "clients_measured": len(ids),
        "model": config.model if model is None or isinstance(model, str) else getattr(model, "__name__", "given"),
        "parameters": spec.size,
        "synthetic": source,
        **{name: value for name, value in asdict(scope).items() if name not in ("clients", "shares", "tolerance")},
    }
    return Report(facts, label_figures(fed, ids), places)


def check_scope(scope: Scope) -> Scope:
    """The scope, if it makes sense.

    Raises:
        ConfigError: It does not.
    """
    for name, value in (
        ("sample_clients", scope.clients),
        ("samples", scope.samples),
        ("iterations", scope.iterations),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is not valid: it must be at least 1.")
    for p in scope.shares:
        if not 0 <= p <= 1:
            raise ConfigError(f"p={p} is not a share of synthetic data: it must lie between 0 and 1.")
    for name, number in (("epsilon", scope.epsilon), ("mu", scope.mu)):
        if number is not None and not 0 < number < math.inf:
            raise ConfigError(f"{name}={number} is not valid: it must be above 0 and finite.")
    if scope.mu is not None and not scope.curvature:
        raise ConfigError(
            "With mu, predicted rounds depend on the smoothness: measure curvature, too, or leave mu out."
        )
    return scope


# ---- models -------------------------------------------------------------------------------------------------------------


def run_folder(path: Path) -> Path:
    """The run folder that a path names, itself or by one of its checkpoints.

    Raises:
        CheckpointError: It is neither.
    """
    for folder in (path, path.parent.parent):
        if (folder / "config.yaml").is_file():
            return folder
    raise CheckpointError(f"{path} is neither a run folder nor a checkpoint of one: there is no config.yaml.")


def models_of(run: Path | None, spec: ModelSpec) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, models and statistics to look at.

    Raises:
        CheckpointError: A checkpoint is damaged, or belongs to another model.
    """
    if run is None:
        yield "initial model", spec.flatten(), spec.flatten_buffers()
        return
    folder = run_folder(run)
    found = [run] if folder != run else checkpoints(folder / "checkpoints")[::-1]
    if folder == run:
        yield "initial model", spec.flatten(), spec.flatten_buffers()
    for path in found:
        done, v, b = model_in(path)
        if v.shape != (spec.size,) or len(b) != sum(spec.buffer_sizes):
            raise CheckpointError(f"The checkpoint {path} was written for another model.")
        yield f"after round {done}", v, b
    final = folder / "model.safetensors"
    if folder == run and final.is_file():
        tensors = load(final.read_bytes())
        if not {*spec.names, *spec.buffer_names} <= set(tensors):
            raise CheckpointError(f"{final} holds another model.")
        statistics = [tensors[n].reshape(-1) for n in spec.buffer_names]
        v = torch.cat([tensors[n].reshape(-1) for n in spec.names])
        yield "final model", v, torch.cat(statistics) if statistics else spec.flatten_buffers()


# ---- synthetic data -----------------------------------------------------------------------------------------------------


def synthetic_of(
    given: Synthetic | str | Path | None, federation: Federation, scope: Scope, ids: Sequence[int]
) -> tuple[SyntheticOf, str]:
    """Each client's synthetic set, and what to call them all.

    Raises:
        DataError: They do not fit the federation.
    """
    if given is None:
        share = max(1, (scope.samples or 1000) // len(ids))
        few = replace(scope, samples=share)
        pairs = [drawn(federation.clients[k], few) for k in ids]
        pool = cat_inputs([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        return lambda k: pool, POOL
    if isinstance(given, str | Path):
        x, y = kept_images(Path(given))
        some = torch.randperm(len(y), generator=generator(scope.seed, "diagnosed images"))[: scope.samples]
        pair = checked((take(x, some), y[some]), federation, f"the set in {given}")
        return lambda k: pair, f"{len(some)} of the {len(y)} images in {given}, the same for all"
    if isinstance(given, Federation):
        given = [(client.x, client.y) for client in given.clients]
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], tuple | list):
        shared = checked(given, federation, "the synthetic data")
        return lambda k: shared, "given, the same for all"
    if len(given) != len(federation.clients):
        raise DataError(
            f"There are {len(given)} synthetic sets for {len(federation.clients)} clients; give one for each, or one (x, y)."
        )
    sets = {k: checked(given[k], federation, f"synthetic set {k}") for k in ids}
    return sets.__getitem__, "given, one set for each client"


def image_files(path: Path) -> list[Path]:
    """The parquet files of a folder or of the run that it is; empty if there are none."""
    places = [path, path / "data", path / "synthetic", path / "synthetic" / "data"]
    if (path / "summary.json").is_file():
        known = json.loads((path / "summary.json").read_text(encoding="utf-8")).get("synthetic")
        places += [Path(known), Path(known) / "data"] if known else []
    found = [[place] if place.is_file() else sorted(place.glob("*.parquet")) for place in places]
    return next(filter(None, found), [])


def kept_images(path: Path) -> Pair:
    """Images and labels of a parquet file, a folder of them, or a run that made some.

    Raises:
        DataError: There are none, or they cannot be read.
    """
    files = image_files(path)
    if not files:
        raise DataError(f"{path} holds no synthetic images: no parquet file, and no folder 'synthetic' with one.")
    table = joined(files)
    for column in ("image", "label"):
        if column not in table.column_names:
            raise DataError(f"{files[0]} has no column {column!r}; its columns are: {', '.join(table.column_names)}.")
    y = torch.from_numpy(table.column("label").to_numpy().copy())
    return decode_column(table.column("image"), str(files[0])), y


def checked(pair: object, federation: Federation, who: str) -> Pair:
    """A synthetic set as tensors that look like the federation's data.

    Raises:
        DataError: It is no pair, or does not fit.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{who} must be a pair (x, y), not {type(pair).__name__}.")
    x, y = as_inputs(pair[0], who), as_targets(pair[1], who, federation.task)
    check_targets(y, federation.classes, who)
    stored = federation.test[0].dtype
    if tuple(x.shape[1:]) != federation.shape or len(x) != len(y) or x.dtype != stored:
        raise DataError(
            f"{who} has {len(x)} inputs of shape {tuple(x.shape[1:])} and type {x.dtype} with {len(y)} labels; the clients' "
            f"are of shape {federation.shape} and type {stored}."
        )
    return x, y
