"""From an experiment to a result: the few lines that wire everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unskew.config import Experiment, experiment, load_yaml, set_field
from unskew.data.federation import Federation
from unskew.data.load import load_federation
from unskew.engines.choose import pick_device
from unskew.errors import CheckpointError, ConfigError
from unskew.files import locked, make_folder, occupied, unmake_folder
from unskew.methods.catalogue import MethodLike, method
from unskew.methods.fedavg import FedAvg
from unskew.methods.rules import Method
from unskew.models.groups import layer_groups, split_at
from unskew.models.registry import resolve_model
from unskew.models.vector import ModelSpec
from unskew.records.recorder import Callback
from unskew.records.result import Result
from unskew.records.trackers import make_trackers
from unskew.seeding import derive
from unskew.session import Session
from unskew.simulation.secure import check_sums_suffice

ModelLike = str | nn.Module | Callable[..., nn.Module]
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def run(
    federation: Federation | None = None,
    *,
    model: ModelLike | None = None,
    method: MethodLike | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Result:
    """Train one model across the clients of a federation.

    Args:
        federation: The data; without it they are loaded as ``data``, ``partition``, ``clients`` ... say.
        model: A registered name, a module, a factory, or ``"package.module:factory"``.
        method: A method or a sum, as ``unskew.method`` takes it.
        out: Run folder to write; without it nothing is written to disk.
        resume: Go on with the run in ``out``.
        callbacks: Followers of the run.
        options: Any field of ``unskew.Experiment``, such as ``rounds=50, local_steps=100, lr=0.01, seed=0``.

    Returns:
        The history, the summary and the final model.

    Raises:
        ConfigError: An option is wrong, or the run folder is already there.
        DataError: The data cannot be used.
        CheckpointError: The run cannot be resumed, or the disk is full.
    """
    values = dict(options)
    if federation is not None:
        given = {"data": federation.name, "partition": federation.partition, "clients": len(federation.clients)}
        check_given(given, values)
        values = {**given, **values}
    if model is not None:
        values["model"] = model if isinstance(model, str) else _name_of(model)
    if method is not None:
        values["method"] = method if isinstance(method, str) else "fedavg"
    return run_experiment(
        experiment(values),
        federation=federation,
        model=None if isinstance(model, str) else model,
        method_given=None if isinstance(method, str) else method,
        out=out,
        resume=resume,
        callbacks=callbacks,
    )


def _name_of(model: object) -> str:
    return str(getattr(model, "__name__", type(model).__name__))


def check_given(given: dict[str, Any], options: dict[str, Any]) -> None:
    """Options about data that are given already must not say something else.

    Raises:
        ConfigError: They do.
    """
    for name in ("data", "partition", "clients", "data_path", "holdout", "server", "label", "label_separator"):
        if name in options and options[name] != given.get(name):
            raise ConfigError(f"{name}={options[name]!r} has no effect on a federation that is given.")


def check_task(chosen: Method, federation: Federation) -> None:
    """Refuse a task that a part of the method cannot be trained for.

    Raises:
        ConfigError: There is such a part.
    """
    task = federation.task
    for part in (*chosen.data, *chosen.client, chosen.sync, chosen.server):
        if part is not None and task not in part.tasks:
            reason = f", because {part.tasks_reason}" if part.tasks_reason else ""
            raise ConfigError(
                f"{part.name} cannot be trained for the task {task!r}{reason}. It is for: {', '.join(part.tasks)}."
            )


def check_method(config: Experiment, federation: Federation, model: ModelLike | None, chosen: Method) -> ModelSpec:
    """Refuse, before anything is trained, a method that does not fit the data, the model, the optimizer or the server.

    Raises:
        ConfigError: It does not fit.
        MethodConflict: It needs single updates, which secure aggregation forbids.
    """
    check_task(chosen, federation)
    if config.secure_aggregation == "required":
        check_sums_suffice(chosen, chosen.server or FedAvg(), config.diagnose)
    if config.network.delay != "none":
        check_delays(chosen, config.diagnose)
    for rule in chosen.client:
        rule.check(federation, config.training.plain_sgd)
    spec = initial_spec(config, federation, model, chosen)
    if chosen.sync is not None:
        chosen.sync.travels(0, 0, None, spec)
    return spec


def check_delays(chosen: Method, diagnose: Sequence[str]) -> None:
    """Refuse what has no meaning if updates arrive in later rounds than they were sent out in.

    Raises:
        ConfigError: There is such a part.
    """
    late = [part.name for part in (*chosen.client, chosen.sync, chosen.server) if part is not None and part.synchronous]
    if late:
        raise ConfigError(f"{late[0]} needs the updates of a round in that round; it cannot be run with network.delay.")
    if diagnose:
        raise ConfigError(
            f"diagnose={diagnose[0]} compares the clients of one round; it cannot be run with network.delay."
        )


def load_data(config: Experiment) -> Federation:
    """The federation that a configuration describes."""
    return load_federation(
        config.data,
        partition=config.partition,
        clients=config.clients,
        seed=config.seed,
        path=config.data_path,
        label=config.label,
        image=config.image,
        label_separator=config.label_separator,
        holdout=config.holdout,
        server=config.server,
        server_path=config.server_path,
    )


def initial_spec(config: Experiment, federation: Federation, model: ModelLike | None, chosen: Method) -> ModelSpec:
    """The model's layout and initial weights, which depend on the seed only."""
    x = federation.test[0]

    def spec_of(module: nn.Module, head: str | None) -> ModelSpec:
        return ModelSpec(
            module,
            federation.shape,
            federation.classes,
            head,
            DTYPES[config.precision],
            torch.int64 if x.dtype == torch.int64 else None,
            autocast=config.precision == "bf16",
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "initial model"))
        try:
            module = resolve_model(
                config.model if model is None else model, federation.shape, federation.classes, config.model_options
            )
        except RuntimeError as error:  # such as a layer larger than the memory
            raise ConfigError(f"The model {config.model!r} cannot be built: {str(error).splitlines()[0]}") from error
        spec = spec_of(module, config.head)
        for rule in chosen.client:
            adapted, head = rule.adapt(module, spec.head_name)
            if adapted is not module:
                module, spec = adapted, spec_of(adapted, head)
    return spec


def layers_of(model: str, shape: str, classes: int, split: int | None, sets: Sequence[str]) -> list[dict[str, Any]]:
    """What ``unskew models MODEL`` shows: a row per layer, in order of depth.

    Args:
        model: A name or an import path.
        shape: Shape of one input, as ``3,32,32``.
        classes: Number of classes.
        split: Layers in the body; by default all before the head.
        sets: ``model_options.NAME=VALUE`` and ``head=NAME``.

    Raises:
        ConfigError: There is no such model, or it does not take such inputs.
    """
    values: dict[str, Any] = {"model": model}
    for assignment in sets:
        set_field(values, assignment)
    if not {"model", "model_options", "head"} >= set(values):
        raise ConfigError("unskew models takes --set model_options.NAME=VALUE and --set head=NAME, no other field.")
    config = experiment(values)
    try:
        sides = tuple(int(side) for side in shape.split(","))
    except ValueError:
        raise ConfigError(f"--shape {shape!r} is not a shape such as 3,32,32.") from None
    module = resolve_model(config.model, sides, classes, config.model_options)
    groups = layer_groups(ModelSpec(module, sides, classes, config.head))
    body, _ = split_at(groups, len(groups) - 1 if split is None else split)
    return [
        {
            "layer": number,
            "name": group.name,
            "with": list(group.layers[1:]),
            "parameters": group.size,
            "buffers": sum(s.stop - s.start for s in group.buffers),
            "part": "body" if number <= len(body) else "head",
        }
        for number, group in enumerate(groups, start=1)
    ]


def run_experiment(
    config: Experiment,
    *,
    federation: Federation | None = None,
    model: ModelLike | None = None,
    method_given: MethodLike | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Carry out ``config``; see ``run``."""
    folder = None if out is None else Path(out)
    chosen = method(config.method if method_given is None else method_given)
    if method_given is not None:
        config = config.model_copy(update={"method": chosen.spelling or chosen.name})
    device = pick_device(config.device)
    trackers = make_trackers(config.trackers, folder)
    if resume and (folder is None or not (folder / "config.yaml").is_file()):
        raise CheckpointError(f"There is no run to resume in {out}: it has no config.yaml.")
    if folder is not None and not resume and occupied(folder):
        raise ConfigError(f"The run folder {folder} is already there; choose another with --out, or resume it.")
    if config.save_samples and folder is None:
        raise ConfigError("save_samples draws pictures into the run folder: name one with out.")
    federation = load_data(config) if federation is None else federation
    check_task(chosen, federation)
    prepared: list[tuple[int, tuple[int, int]]] = []
    for rule in chosen.data:
        federation, traffic = rule.prepare(federation, config.seed)
        prepared += traffic.items()
    spec = check_method(config, federation, model, chosen)
    made = [] if folder is None else make_folder(folder)
    with locked(folder):
        session = None
        try:
            session = Session(config, federation, spec, chosen, device, folder, [*callbacks, *trackers])
            for client, (up, down) in prepared:
                session.server.traffic.count(client, "up", up, 0)
                session.server.traffic.count(client, "down", down, 0)
            return session.go(resume)
        except BaseException:
            # A new run that did not finish a round leaves nothing behind.
            if folder is not None and not resume and (session is None or not session.recorder.history):
                unmake_folder(folder, made)
            raise


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    model: ModelLike | None = None,
    method: MethodLike | None = None,
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Result:
    """Go on with an interrupted run; the result is bit for bit that of an uninterrupted one.

    Args:
        folder: The run folder.
        federation: The same data, if they were given in Python.
        model: The same model, if it was given in Python.
        method: The same method, if it was given in Python.
        callbacks: Followers of the run.
        changes: New values for ``rounds``, ``engine``, ``workers``, ``device``, ``trackers``, ``checkpoint_every``,
            ``target`` or ``save_samples``.

    Raises:
        CheckpointError: There is nothing to resume, the configuration differs, or every checkpoint is damaged.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"There is no run to resume in {folder}: it has no config.yaml.")
    # A method given in Python has a name that only Python knows.
    named = {} if method is None or isinstance(method, str) else {"method": "fedavg"}
    config = experiment({**load_yaml(folder / "config.yaml"), **changes, **named})
    if federation is None and config.data == "arrays":
        raise CheckpointError(f"The data of {folder} were given in Python; resume it there, with the same federation.")
    done = finished_rounds(folder)
    if done is not None and done >= config.rounds:
        raise CheckpointError(f"The run in {folder} is complete ({done} rounds); raise --rounds to go further.")
    return run_experiment(
        config, federation=federation, model=model, method_given=method, out=folder, resume=True, callbacks=callbacks
    )


def finished_rounds(folder: Path) -> int | None:
    """The rounds of a run that came to its end; None if it did not."""
    try:
        return int(json.loads((folder / "summary.json").read_bytes())["rounds"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'summary.json'} is damaged; remove it and resume the run.") from error
