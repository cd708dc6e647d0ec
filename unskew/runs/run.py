"""Running and resuming an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_config, load_yaml
from unskew.config.paths import with_absolute_paths
from unskew.config.trust import TRUST
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.data.spec import TABLES
from unskew.data.task_options import apply_task_options
from unskew.data.unseen import split_federation
from unskew.engines.cpu import default_torch_modes
from unskew.engines.device import device_modes
from unskew.engines.registry import pick_device
from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import DEPLOYMENT, check_run, parse_path
from unskew.folder_locks import folder_lock, output_folder
from unskew.generators.synthetic_dataset import SYNTHETIC
from unskew.methods.registry import MethodLike, check_expression
from unskew.methods.registry import method as method_of
from unskew.models.registry import check_models_known
from unskew.progress import report_progress_to
from unskew.protocol.rules import Method
from unskew.records.notebook import notebook_progress
from unskew.records.recorder import Callback, callback_hooks
from unskew.records.result import Result, read_summary
from unskew.records.trackers import make_trackers
from unskew.runs.api_arguments import (
    check_callbacks,
    check_federation,
    config_from_arguments,
    method_expression,
    model_object,
)
from unskew.runs.assembly import assemble
from unskew.runs.build_model import ModelLike, match_model_input_range
from unskew.runs.preparation import check_given_set, prepare
from unskew.runs.session import Session
from unskew.runs.validation import resolve_run
from unskew.secret_draws import KEY_FILE


def run(
    federation: Federation | None = None,
    *,
    model: ModelLike | Mapping[str, Any] | None = None,
    method: MethodLike | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Result:
    """Train one model across the clients of a federation.

    Args:
        federation: Data of all clients. If None, data are loaded from the options ``data``, ``partition``, ``clients`` etc.
        model: Registered name, module, factory, ``"package.module:factory"``, ``"hf:NAME"``, or a mapping such as
            ``{"hf": NAME, "lora": {"r": 4}}``.
        method: Method, in any form that ``unskew.method`` accepts.
        out: Run folder to create; None writes nothing to disk.
        resume: Resume the run in ``out``.
        callbacks: Callbacks of the run, see ``unskew.Callback``.
        **options: Fields of ``unskew.Experiment``, such as ``rounds=50, local_steps=100, lr=0.01, seed=0``.

    Returns:
        The history, the summary and the final model.

    Raises:
        ConfigError: If an option is not valid, or the run folder already exists and is not empty.
        DataError: If the data cannot be used.
        CheckpointError: If the run cannot be resumed, or the disk is full.
    """
    values = config_from_arguments(options, federation, model)
    built = None if method is None else method_of(method)
    if method is not None:
        values["method"] = method_expression(method)
    return run_experiment(
        experiment(values, built),
        federation=federation,
        model=model_object(model),
        method=built,
        out=out,
        resume=resume,
        callbacks=callbacks,
    )


def run_experiment(
    config: Experiment,
    *,
    federation: Federation | None = None,
    model: ModelLike | None = None,
    method: Method | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    shared: Path | None = None,
) -> Result:
    """Run an experiment.

    Args:
        config: Configuration of the run.
        federation: Data of all clients; None loads them as configured.
        model: Model; None builds it as configured.
        method: Method that ``config`` names; None creates it from the configuration.
        out: Run folder to create; None writes nothing.
        resume: Whether to resume the run in ``out``.
        callbacks: Callbacks of the run.
        shared: Folder in which several runs share generated data, or None.
    """
    check_federation(federation)
    folder = None if out is None else parse_path(out).absolute()
    if resume:
        with resumed_folder(folder):
            return _execute(config, federation, model, method, folder, True, callbacks, shared)
    with output_folder(folder, False, partial(keep_on_error, folder)):
        return _execute(config, federation, model, method, folder, False, callbacks, shared)


@contextmanager
def resumed_folder(folder: Path | None) -> Iterator[None]:
    """Context manager that locks the folder of an existing run.

    Args:
        folder: Run folder.

    Raises:
        CheckpointError: If there is no run in the folder.
        ConfigError: If ``folder`` is None, or another process uses the folder.
    """
    if folder is None:
        raise ConfigError("resume needs a run folder. Pass its path as out.")
    check_run(folder, resume=True)
    with folder_lock(folder):
        yield


def keep_on_error(folder: Path | None) -> bool:
    """Return whether the folder of a failed run contains a finished round or generated data, which should be kept."""
    if folder is None:
        return False
    metrics = folder / "metrics.jsonl"
    return (folder / SYNTHETIC).exists() or (metrics.is_file() and b"\n" in metrics.read_bytes())


@default_torch_modes()
def _execute(
    config: Experiment,
    federation: Federation | None,
    model: ModelLike | None,
    method: Method | None,
    folder: Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
    shared: Path | None,
) -> Result:
    """Run an experiment in a folder that the caller has locked."""
    if folder is not None and (folder / DEPLOYMENT).exists():
        raise CheckpointError(
            f"{folder} is the folder of a deployed run, which a simulation cannot continue. Use unskew resume with --local, "
            "or with --folder and --superlink."
        )
    check_callbacks(callbacks)
    callbacks = [*callbacks, *notebook_progress()]
    config = with_absolute_paths(config)
    method = method_of(config.method) if method is None else method
    device = pick_device(config.device)
    store = None if shared is None else shared.parent
    callbacks = [*callbacks, *make_trackers(config.trackers, folder, store, resume, callbacks)]
    if config.save_samples and folder is None:
        raise ConfigError("save_samples writes images to the run folder. Pass a run folder as out.")
    if config.coefficients and folder is None:
        raise ConfigError("coefficients are written to the run folder. Pass a run folder as out.")
    original = load_federation_for(config, callbacks) if federation is None else federation
    original = with_unseen_clients(original, config)
    notify_loaded(callbacks, original)
    original = apply_task_options(original, config.loss, config.class_weights)
    run = resolve_run(config, original, model, method)
    check_given_set(config, method)
    run = replace(run, federation=match_model_input_range(original, run.spec))
    with device_modes(device, config.precision):
        prepared = prepare(run, device, folder, shared, callbacks, resume)
        parts = assemble(run, prepared, device, folder, callbacks)
        return Session(parts, warnings=run.warnings).run(resume)


def load_federation_for(config: Experiment, callbacks: Sequence[Callback]) -> Federation:
    """Load the data of a run and report progress to callbacks that have a method ``prepare``.

    Args:
        config: Configuration of the run.
        callbacks: Callbacks of the run.
    """

    def follow(text: str, done: float, total: float) -> None:
        for hook in callback_hooks(callbacks, "prepare"):
            hook(text, done, total)

    with report_progress_to(follow):
        return federation_of(config.data_spec, config.seed)


def with_unseen_clients(federation: Federation, config: Experiment) -> Federation:
    """Return the data with the unseen clients of a run, if they were passed without them.

    Args:
        federation: Data of all clients.
        config: Configuration of the run.
    """
    if not config.unseen or federation.unseen:
        return federation
    return split_federation(federation, config.unseen, config.seed)


def notify_loaded(callbacks: Sequence[Callback], federation: Federation) -> None:
    """Pass the data to the callbacks that have a method ``loaded``, before training.

    Args:
        callbacks: Callbacks of the run.
        federation: Data of all clients.
    """
    for hook in callback_hooks(callbacks, "loaded"):
        hook(federation)


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    model: ModelLike | None = None,
    method: MethodLike | None = None,
    callbacks: Sequence[Callback] = (),
    shared: Path | None = None,
    trust_code: bool = False,
    **changes: Any,
) -> Result:
    """Resume an interrupted run; the result is bitwise identical to that of an uninterrupted run.

    Args:
        folder: Run folder.
        federation: The same data, if they were passed as an object.
        model: The same model, if it was passed as an object.
        method: The same method, if it was passed as an object.
        callbacks: Callbacks of the run, see ``unskew.Callback``.
        shared: Folder in which several runs share generated data. If None, a finished set of ``unskew compare`` or
            ``unskew reproduce`` is found automatically and only read.
        trust_code: Whether a custom model or method that the folder's ``config.yaml`` names may be imported, which runs
            its code.
        **changes: New values for ``rounds``, ``engine``, ``workers``, ``clients_per_group``, ``graphs``,
            ``stall_warning_seconds``, ``device``, ``trackers``, ``checkpoint_every``, ``target``, ``save_samples``,
            ``coefficients`` or ``base_run``; and, if the data were moved, for ``data_path``, or ``data`` with another path.

    Raises:
        CheckpointError: If there is nothing to resume, the configuration differs, or all checkpoints are corrupted.
    """
    check_federation(federation)
    folder = parse_path(folder).absolute()
    with resumed_folder(folder):
        built = None if method is None else method_of(method)
        objects = {"method": method, "model": model}  # passed in Python, so the names in the file create nothing
        replaced = changes | {name: value for name, value in objects.items() if value is not None}
        stored = load_config(folder / "config.yaml", None if trust_code else TRUST, replaced)
        values = override_paths(stored, changes)
        if model is not None:
            values["model"] = load_yaml(folder / "config.yaml").get("model")
        if built is not None:
            values["method"] = method_expression(built)
        else:
            check_method_known(str(values.get("method")))
        config = experiment(values, built)
        if model is None:
            check_models_known(config.model)
        if federation is None and config.data == "arrays":
            raise CheckpointError(
                f"The data of the run in {folder} were passed as an object in Python. Resume it there with "
                "unskew.resume(..., federation=...)."
            )
        check_unfinished(folder, config.rounds)
        shared = None if shared is None else parse_path(shared)
        return _execute(config, federation, model, built, folder, True, callbacks, shared)


def check_method_known(spelling: str) -> None:
    """Validate that the method of a run can be created from its expression.

    Args:
        spelling: Method expression of the run.

    Raises:
        ConfigError: If the method is not known, for example because it was passed as an object in Python.
    """
    try:
        check_expression(spelling)
    except ConfigError as error:
        raise ConfigError(f"{error} If it is a custom rule, pass it again: unskew.resume(..., method=...).") from error


def override_paths(stored: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to a stored configuration; a new ``data_path`` also replaces a path in the field ``data``.

    Args:
        stored: Stored configuration.
        changes: New values of fields.
    """
    values, path = {**stored, **changes}, changes.get("data_path")
    if not path or "data" in changes:
        return values
    name = str(values.get("data"))
    prefix, colon, _ = name.partition(":")
    if colon or name.lower().endswith(TABLES):
        values |= {"data": f"{prefix if colon else 'table'}:{path}", "data_path": None}
    return values


def check_unfinished(folder: Path, rounds: int) -> None:
    """Validate that a run is not finished.

    Args:
        folder: Run folder.
        rounds: Number of rounds.

    Raises:
        CheckpointError: If the run has finished with at least this number of rounds.
    """
    done = finished_rounds(folder)
    if done is not None and done >= rounds:
        raise CheckpointError(f"The run in {folder} is complete ({done} rounds). To continue it, increase --rounds.")


def finished_rounds(folder: Path) -> int | None:
    """Return the number of rounds of a finished run (if it stopped early, the configured number), or None."""
    if not (folder / "summary.json").exists():
        return None
    (folder / KEY_FILE).unlink(missing_ok=True)  # left if the run was killed just before its end
    summary = read_summary(folder)
    return int(summary.get("max_rounds", summary["rounds"]))
