"""Trials of one method in a database that several processes share: claims, options and results."""

from __future__ import annotations

import csv
import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from unskew.errors import CheckpointError, ConfigError, explain_missing, short_repr
from unskew.filesystem import check_database, escape_formula, make_folder
from unskew.folder_locks import file_lock
from unskew.json_models import JsonModel
from unskew.protocol.search_space import CategoricalSpace, Space
from unskew.seeding import derive
from unskew.simulation.checkpoint import checkpoint_errors
from unskew.tuning.spaces import fixed_fields, is_in_space, rounded

NAME = "study.db"
MISSING = "Tuning needs Optuna. Install it with: pip install 'unskew[tune]'."
LONG = 600.0
"""Seconds to wait for another process that is drawing its next trial."""
STARTUP = 5
"""Number of trials of a method before a trial may be pruned."""
ENOUGH = 10
"""Number of completed trials needed to compute the importance of options."""


def optuna_library() -> Any:
    """Import Optuna and silence its log.

    Raises:
        ConfigError: If Optuna is not installed.
    """
    with explain_missing(MISSING):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def make_storage(folder: Path | None) -> Any:
    """Open the database ``study.db``, or create a storage in memory."""
    optuna = optuna_library()
    if folder is None:
        return optuna.storages.InMemoryStorage()
    path = (folder / NAME).absolute()
    check_database(path)
    # The name of a folder may contain characters that have a meaning in a URL.
    connect = partial(sqlite3.connect, path, timeout=LONG, check_same_thread=False)
    return optuna.storages.RDBStorage(f"sqlite:///{NAME}", engine_kwargs={"creator": connect})


@contextmanager
def database() -> Iterator[None]:
    """Context manager that converts errors of the trials' database.

    Raises:
        CheckpointError: If the disk is full, or the file is corrupted or locked.
    """
    import sqlalchemy

    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna_library().exceptions.StorageInternalError) as error:
        reason = str(getattr(error, "orig", None) or error.__cause__ or error).splitlines()[0]
        raise CheckpointError(
            f"The database of the trials, study.db, could not be used: {reason}. Free some disk space or repair the folder, "
            "then continue with --resume. Finished trials are kept."
        ) from error


class PrivacySpent(JsonModel):
    """Privacy of its data that a trial has spent."""

    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(ge=0, le=1)]
    gaussian_mu: Annotated[float, Field(ge=0)] | None = None
    synthetic: str | None = None


class TrialAttributes(JsonModel):
    """Values that ``Trial`` adds to a trial."""

    rounds: Annotated[int, Field(ge=0)] | None = None
    reason: str | None = None
    configured: bool = False
    privacy: PrivacySpent | None = None


class StoredTrial(JsonModel):
    """Values of a trial in the database, besides its options."""

    model_config = ConfigDict(allow_inf_nan=True)

    values: Annotated[list[float], Field(max_length=1)] | None
    intermediate_values: dict[int, float]
    user_attrs: TrialAttributes


class TrialPruned(Exception):
    """Raised if a trial is worse than other trials were after the same number of rounds."""


class Study:
    """Trials of a method.

    Args:
        name: Method expression.
        spaces: Search space of each option.
        storage: Result of ``make_storage``.
        folder: Folder for the run folders of running trials, or None.
        trials: Total number of trials.
        seed: Seed of the sampler.
        maximize: Whether larger values are better.
        warmup: Number of rounds before a trial may be pruned; None to disable pruning.
        configured: Values of the first trial, also outside their spaces; options without a value are not set.
    """

    def __init__(
        self,
        name: str,
        spaces: Mapping[str, Space],
        storage: Any,
        folder: Path | None,
        trials: int,
        seed: int,
        maximize: bool,
        warmup: int | None,
        configured: Mapping[str, Any],
    ):
        self.optuna = optuna = optuna_library()
        self.name = name
        self.spaces = dict(spaces)
        self.folder = folder
        self.trials = trials
        self.seed = seed
        self.maximize = maximize
        self.configured = dict(configured)
        pruner = optuna.pruners.NopPruner()
        if warmup is not None:
            pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warmup)
        with self._claiming():
            self.study = optuna.create_study(
                storage=storage,
                study_name=name,
                direction="maximize" if maximize else "minimize",
                pruner=pruner,
                load_if_exists=True,
            )
            with checkpoint_errors(Path(NAME)):
                for trial in self.study.get_trials(deepcopy=False):
                    StoredTrial.model_validate(trial, from_attributes=True)
                    self.params_of(trial)
            if not self.study.get_trials(deepcopy=False):
                inside = {key: self.configured[key] for key in self.spaces if self.configured_in_space(key)}
                self.study.enqueue_trial(inside, user_attrs={"configured": True})

    @contextmanager
    def _claiming(self) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        make_folder(self.folder)  # a process that finished the tuning may have removed it
        with file_lock(self.folder / ".claim", LONG):
            yield

    @property
    def all(self) -> list[Any]:
        """Optuna's list of all trials so far."""
        state = self.optuna.trial.TrialState.WAITING
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state != state]

    @property
    def finished(self) -> list[Any]:
        """Trials that were completed, pruned, or failed."""
        return [trial for trial in self.all if trial.state.is_finished()]

    @contextmanager
    def next(self) -> Iterator[Trial | None]:
        """Context manager that claims a trial: one whose process died, or a new one; None if all are taken."""
        with ExitStack() as stack:
            trial = None
            with self._claiming():
                for known in [trial for trial in self.all if not trial.state.is_finished()]:
                    if self._taken(stack, known.number):
                        trial = self.optuna.trial.Trial(self.study, known._trial_id)
                        break
                if trial is None and len(self.all) < self.trials:
                    trial = self.study.ask()
                    self._taken(stack, trial.number)
            yield None if trial is None else Trial(self, trial)

    def _taken(self, held: ExitStack, number: int) -> bool:
        """Return whether the trial could be claimed; the claim lasts until ``held`` ends or this process dies."""
        if self.folder is None:
            return True
        try:
            held.enter_context(file_lock(self.folder / f".{number:04d}", 0))
        except ConfigError:
            return False
        # The previous owner may have just finished it.
        return not any(trial.number == number for trial in self.finished)

    @property
    def best(self) -> Any:
        """Best completed trial; the first of equal ones.

        Raises:
            ConfigError: If no trial was completed.
        """
        state = self.optuna.trial.TrialState.COMPLETE
        done = [trial for trial in self.all if trial.state == state]
        if not done:
            reasons = [trial.user_attrs.get("reason") for trial in self.all]
            raise ConfigError(f"No trial of {self.name} was completed. {next(filter(None, reasons), '')}".strip())
        sign = 1 if self.maximize else -1
        return max(done, key=lambda trial: (sign * trial.value, -trial.number))

    def configured_in_space(self, key: str) -> bool:
        """Return whether the configured value of an option is in its search space.

        Args:
            key: Name of the option.
        """
        return key in self.configured and is_in_space(self.configured[key], self.spaces[key])

    def params_of(self, trial: Any) -> dict[str, Any]:
        """Return the options of a trial as used, including fixed ones."""
        fixed = fixed_fields(self.spaces)
        if trial.user_attrs.get("configured"):
            used = {**self.configured, **fixed}
            return {key: used[key] for key in self.spaces if key in used}
        used = {**trial.params, **fixed}
        wrong = next(
            (key for key, space in self.spaces.items() if key in used and not is_in_space(used[key], space)), None
        )
        if wrong is not None:  # for example an import path in a manipulated database
            raise ConfigError(
                f"study.db contains {wrong}={short_repr(used[wrong])} for {self.name}, which is outside its search space. "
                "Tune in another folder with --out."
            )
        return {key: rounded(used[key], space) for key, space in self.spaces.items() if key in used}

    def importance(self) -> dict[str, float] | str:
        """Return the importance of each option as shares of 1, or the reason why it is unknown."""
        state = self.optuna.trial.TrialState.COMPLETE
        done = [trial for trial in self.all if trial.state == state and math.isfinite(trial.value)]
        if len(done) > 1 and len({trial.value for trial in done}) == 1:
            return f"unknown, because all {len(done)} trials have the same value; the options are the first trial's"
        if len(done) < ENOUGH:
            return f"needs {ENOUGH} completed trials, but there are {len(done)}"
        tuned = sorted(self.spaces.keys() - fixed_fields(self.spaces).keys())
        # The first trial lacks options whose configured values are outside of their spaces.
        if len({trial.value for trial in done if trial.params.keys() >= {*tuned}}) == 1:
            return "unknown, because all trials except the configuration have the same value"
        evaluator = self.optuna.importance.FanovaImportanceEvaluator(seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importances = self.optuna.importance.get_param_importances(self.study, evaluator=evaluator, params=tuned)
        return {key: float(share) for key, share in importances.items()}

    def spent(self) -> list[dict[str, Any]]:
        """Return what each trial has spent of the privacy of its data; one that ended early counts like the largest one."""
        finished = [trial.user_attrs["privacy"] for trial in self.all if "privacy" in trial.user_attrs]
        early = sum(trial.state.name == "PRUNED" for trial in self.all)
        return finished + early * [max(finished, key=lambda each: each["epsilon"])] if finished else []

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per trial; the value of a trial that diverged is None."""
        states = {"COMPLETE": "finished", "PRUNED": "ended early", "FAIL": "failed"}
        return [
            {
                "method": self.name,
                "trial": trial.number,
                "state": states.get(trial.state.name, "begun"),
                "value": finite_value(trial) if trial.state.name == "COMPLETE" else None,
                "rounds": trial.user_attrs.get("rounds", trial.last_step),
                "options": self.params_of(trial),
                "reason": trial.user_attrs.get("reason"),
            }
            for trial in self.all
        ]


def finite_value(trial: Any) -> float | None:
    """Return the value of a completed trial, or None if it diverged."""
    return float(trial.value) if math.isfinite(trial.value) else None


class Trial:
    """A trial that is running."""

    def __init__(self, study: Study, trial: Any):
        self.study = study
        self.trial = trial
        self.number = trial.number
        known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self.reported = max(known, default=0)  # rounds reported by a process that died
        self.folder = None if study.folder is None else study.folder / f"{trial.number:04d}"

    def params(self) -> dict[str, Any]:
        """Options to try: the configured ones, or drawn from the seed, the trial's number and the results of the others.

        A process that continues the trial of a dead process draws the same options.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns that constant_liar is experimental
            seed = derive(self.study.seed, f"tune {self.number}") % 2**32
            sampler = self.study.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self.study.study.sampler = sampler
        configured = self.trial.user_attrs.get("configured", False)
        for key, space in self.study.spaces.items():
            if configured and not self.study.configured_in_space(key):
                continue  # Optuna's distribution does not contain the value
            if isinstance(space, CategoricalSpace):
                if len(space.values) > 1:
                    self.trial.suggest_categorical(key, space.values)
            elif space.integer:
                self.trial.suggest_int(key, int(space.low), int(space.high), log=space.log)
            else:
                self.trial.suggest_float(key, space.low, space.high, log=space.log)
        return self.study.params_of(self.trial)

    def report(self, round: int, value: float, last: bool) -> None:
        """Store the value after a round.

        Args:
            round: Number of finished rounds.
            value: Objective after the round.
            last: Whether it is the last round.

        Raises:
            TrialPruned: If the trial is unlikely to be the best.
        """
        if round > self.reported:
            self.trial.report(value, round)
        if round >= self.reported and not last and self.trial.should_prune():
            raise TrialPruned

    def record_privacy(self, summary: Mapping[str, Any]) -> None:
        """Store what the trial has spent of the privacy of its data, if it was private.

        Args:
            summary: Summary of its run.
        """
        known = {name: summary[name] for name in ("epsilon", "delta", "gaussian_mu", "synthetic") if summary.get(name)}
        if "epsilon" in known:
            self.trial.set_user_attr("privacy", known)

    def tell(self, value: float | None, rounds: int, reason: str | None = None) -> None:
        """Store the result of the trial.

        Args:
            value: Result, or None if the trial failed or was pruned.
            rounds: Number of rounds that were trained.
            reason: Error that ended a failed trial, or None.
        """
        states = self.study.optuna.trial.TrialState
        self.trial.set_user_attr("rounds", rounds)
        if reason is not None:
            self.trial.set_user_attr("reason", reason)
            self.study.study.tell(self.trial, state=states.FAIL)
        elif value is None:
            self.study.study.tell(self.trial, state=states.PRUNED)
        else:
            worst = -math.inf if self.study.maximize else math.inf
            self.study.study.tell(self.trial, value if math.isfinite(value) else worst)


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Format the trials as CSV, with options such as ``lr=0.1 fedprox.mu=0.01``."""
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        options = " ".join(f"{key}={value}" for key, value in row["options"].items())
        cells = (options if key == "options" else value for key, value in row.items())
        writer.writerow([escape_formula(cell) for cell in cells])
    return text.getvalue()
