"""From an experiment to a result: the few lines that wire everything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.reading import experiment, load_yaml
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.engines.catalogue import pick_device
from unskew.errors import CheckpointError, ConfigError
from unskew.files import locked, make_folder, occupied, place, unmake_folder
from unskew.methods.catalogue import MethodLike
from unskew.methods.catalogue import method as method_of
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback
from unskew.records.result import Result
from unskew.records.trackers import make_trackers
from unskew.runs.checks import check_method
from unskew.runs.given import spelling_of, unnamed, values_of
from unskew.runs.model import ModelLike, as_wanted
from unskew.runs.preparation import SYNTHETIC, check_given_set, kept_beside, prepare
from unskew.runs.session import Session


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
        federation: The data; without it they are loaded as ``data``, ``partition``, ``clients`` ... say.
        model: A registered name, a module, a factory, ``"package.module:factory"``, ``"hf:NAME"``, or a mapping such as
            ``{"hf": NAME, "lora": {"r": 4}}``.
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
    values = values_of(options, federation, model)
    built = None if method is None else method_of(method)
    if method is not None:
        values["method"] = spelling_of(method)
    return run_experiment(
        experiment(values, built),
        federation=federation,
        model=unnamed(model),
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
    """Carry out ``config``; see ``run``. What its method makes before training is kept in ``shared`` for other runs, too.

    A ``method`` that is given is the one that ``config`` names.
    """
    folder = None if out is None else place(out)
    method = method_of(config.method) if method is None else method
    device = pick_device(config.device)
    trackers = make_trackers(config.trackers, folder)
    if resume and (folder is None or not (folder / "config.yaml").is_file()):
        raise CheckpointError(f"There is no run to resume in {out}: it has no config.yaml.")
    if folder is not None and not resume and occupied(folder):
        raise ConfigError(f"The run folder {folder} is already there; choose another with --out, or resume it.")
    if config.save_samples and folder is None:
        raise ConfigError("save_samples draws pictures into the run folder: name one with out.")
    original = federation_of(config.data_spec, config.seed) if federation is None else federation
    spec, warnings = check_method(config, original, model, method)
    check_given_set(config, method)
    original = as_wanted(original, spec)
    new_folders = [] if folder is None else make_folder(folder)
    with locked(folder):
        session = None
        try:
            prepared = prepare(method, original, config, device, folder, shared, callbacks)
            everyone = [*callbacks, *trackers]
            session = Session(config, prepared, original, spec, method, device, folder, everyone, warnings)
            for client, (up, down) in prepared.traffic:
                session.server.traffic.count(client, "up", up, 0)
                session.server.traffic.count(client, "down", down, 0)
            return session.go(resume)
        except BaseException:
            # A new run that did not finish a round leaves nothing behind but what was made for it.
            rounds = session is not None and session.recorder.history
            if folder is not None and not resume and not rounds and not (folder / SYNTHETIC).exists():
                unmake_folder(folder, new_folders)
            raise


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    model: ModelLike | None = None,
    method: MethodLike | None = None,
    callbacks: Sequence[Callback] = (),
    shared: Path | None = None,
    **changes: Any,
) -> Result:
    """Go on with an interrupted run; the result is bit for bit that of an uninterrupted one.

    Args:
        folder: The run folder.
        federation: The same data, if they were given in Python.
        model: The same model, if it was given in Python.
        method: The same method, if it was given in Python.
        callbacks: Followers of the run.
        shared: Where what its method made before training is kept for several runs, if not in ``folder``; found by itself
            where ``unskew compare`` and ``unskew reproduce`` keep it.
        changes: New values for ``rounds``, ``engine``, ``workers``, ``device``, ``trackers``, ``checkpoint_every``,
            ``target``, ``save_samples`` or ``to_be_continued``.

    Raises:
        CheckpointError: There is nothing to resume, the configuration differs, or every checkpoint is damaged.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"There is no run to resume in {folder}: it has no config.yaml.")
    values = {**load_yaml(folder / "config.yaml"), **changes}
    built = None if method is None else method_of(method)
    if built is not None:
        values["method"] = spelling_of(built)
    config = experiment(values, built)
    if federation is None and config.data == "arrays":
        raise CheckpointError(f"The data of {folder} were given in Python; resume it there, with the same federation.")
    check_unfinished(folder, config.rounds)
    return run_experiment(
        config,
        federation=federation,
        model=model,
        method=built,
        out=folder,
        resume=True,
        callbacks=callbacks,
        shared=kept_beside(folder) if shared is None else shared,
    )


def check_unfinished(folder: Path, rounds: int) -> None:
    """Refuse to go on with a run that came to its end.

    Raises:
        CheckpointError: It has so many rounds, or more.
    """
    done = finished_rounds(folder)
    if done is not None and done >= rounds:
        raise CheckpointError(f"The run in {folder} is complete ({done} rounds); raise --rounds to go further.")


def finished_rounds(folder: Path) -> int | None:
    """The rounds of a run that came to its end; None if it did not."""
    try:
        return int(json.loads((folder / "summary.json").read_bytes())["rounds"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'summary.json'} is damaged; remove it and resume the run.") from error
