"""Execution of trials: each is a run on the tuning seed, judged on the clients' held-out samples."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from unskew.comparison.references import is_reference, reference_config
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.clients import any_held_out
from unskew.data.federation import Federation, take_rows
from unskew.data.load import federation_of
from unskew.engines.auto_select import planned_runs
from unskew.errors import ConfigError, DataError
from unskew.generators.synthetic_dataset import SYNTHETIC
from unskew.methods.registry import method
from unskew.protocol.search_space import Space
from unskew.records.recorder import Callback
from unskew.records.result import read_history, read_summary
from unskew.runs.build_model import ModelLike
from unskew.runs.metrics import check_objective_on_held_out, run_metrics
from unskew.runs.run import finished_rounds, run_experiment
from unskew.runs.validation import resolve_run
from unskew.simulation.personal_models import has_personal_models
from unskew.tasks.primary_metric import WORST, MetricInfo, validation_metric_name
from unskew.tuning.spaces import apply_parameters, configured_values, fixed_fields, spaces_for, without_rival
from unskew.tuning.study import Study, Trial, TrialPruned, make_storage

Follow = Callable[[str], Sequence[Callback]]
WAIT = 0.2
TEST_SAMPLES = 100
"""Largest number of test samples that trials evaluate."""


def no_callbacks(title: str) -> Sequence[Callback]:
    """Nobody follows."""
    return ()


@dataclass
class TuningPlan:
    """Methods, spaces and settings of a tuning.

    Attributes:
        methods: Method expressions.
        values: Fields common to all runs.
        given: User-defined search spaces.
        trials: Number of trials per method.
        pruning: Whether trials may be pruned.
        folder: Folder of the tuning, or None.
        federation: Data given in Python; None if the fields in ``values`` describe them.
        model: Model given in Python; None if the fields in ``values`` describe it.
        personal: Names of the methods whose trials are judged by their personal models; filled by ``check``.
    """

    methods: list[str]
    values: dict[str, Any]
    given: dict[str, Space]
    trials: int
    pruning: bool = True
    folder: Path | None = None
    federation: Federation | None = None
    model: ModelLike | None = None
    personal: set[str] = field(default_factory=set)

    @cached_property
    def config(self) -> Experiment:
        """Configuration common to all methods."""
        return experiment(self.values)

    @cached_property
    def data(self) -> Federation:
        """Data used for tuning."""
        return self.federation or federation_of(self.config.data_spec, self.config.seed)

    @cached_property
    def trial_data(self) -> Federation:
        """Data of the trials, with few of the test samples, because held-out samples judge the trials.

        Metrics that are computed from all predictions at once may be undefined for few samples, and attacks read the test
        images, so both keep the whole test set.
        """
        x, y = self.data.test
        if len(y) <= TEST_SAMPLES or self.config.attack or run_metrics(self.config, self.data).computed:
            return self.data
        few = torch.linspace(0, len(y) - 1, TEST_SAMPLES).long()  # of all classes, also if samples are in order
        return replace(self.data, test=(take_rows(x, few.to(x.device)), y[few.to(y.device)]))

    @cached_property
    def objective(self) -> MetricInfo:
        """Metric that judges trials."""
        return run_metrics(self.config, self.data).objective

    def value_of(self, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], personal: bool) -> float:
        """Return the objective of a finished run on held-out samples.

        Args:
            history: Rows of the run.
            summary: Summary of the run.
            personal: Whether to judge personal models instead of the last (with ``keep=best`` the best) global model.
        """
        name = self.objective.name
        own = f"personal_{self.data.objective.scored}_worst" if name == WORST else f"personal_{name}_mean"
        values = [row.get(validation_metric_name(name)) for row in history if validation_metric_name(name) in row]
        values = [summary.get(own)] if personal else values[-1:] if self.config.keep == "last" else values
        closed = summary.get(f"{validation_metric_name(name)}_after_closing")  # the final model, if a survey changed it
        if closed is not None and not personal:
            values = [closed]
        numbers = [float(value) for value in values if value is not None]
        return max(numbers, key=self.objective.rank, default=float("nan"))

    def check(self) -> None:
        """Validate the plan before the first trial.

        Raises:
            ConfigError: If a method does not fit, or trials cannot be judged.
        """
        clients = self.data.clients
        if not any_held_out(clients):
            raise ConfigError(
                "Trials are judged on held-out samples of the clients, but no client has any. Set holdout above 0, such as "
                "0.1."
            )
        if not self.config.eval_clients:
            raise ConfigError("Trials are judged on evaluated clients, but eval_clients is 0. Set it above 0.")
        check_objective_on_held_out(run_metrics(self.config, self.data), self.config, self.data, "Tuning")
        for name in self.methods:
            first = self.of(name, fixed_fields(self.spaces(name)))
            built = method(first.method)
            spec = resolve_run(first, self.data, self.model, built).spec
            if has_personal_models(built, spec):
                self.personal.add(name)

    def of(self, name: str, params: Mapping[str, Any]) -> Experiment:
        """Return the configuration of a method with tuned options.

        Args:
            name: Expression of the method.
            params: Values by name of the search space.
        """
        spelling, fields = apply_parameters(name, params)
        values = reference_config(self.values, name) if is_reference(name) else dict(self.values)
        for key, value in fields.items():
            values = {**without_rival(values, key), key: value}
        return experiment({**values, "method": spelling})

    def spaces(self, name: str) -> dict[str, Space]:
        """Return the search spaces of a method."""
        return spaces_for(name, self.config, self.given)

    def studies(self) -> dict[str, Study]:
        """Return the trials of each method."""
        storage = make_storage(self.folder)
        warmup = max(1, self.config.rounds // 4) if self.pruning else None
        return {
            name: Study(
                name,
                self.spaces(name),
                storage,
                None if self.folder is None else self.folder / "trials" / str(number),
                self.trials,
                self.config.seed,
                not self.objective.lower_is_better,
                # For methods with personal models, the global model is not informative.
                None if name in self.personal else warmup,
                configured_values(name, self.config, self.spaces(name)),
            )
            for number, name in enumerate(self.methods)
        }


def make_trials(plan: TuningPlan, studies: Mapping[str, Study], follow: Follow = no_callbacks) -> None:
    """Run trials until all are finished or claimed by other processes.

    Args:
        plan: Plan of the tuning.
        studies: Study of each method.
        follow: Creates the callbacks of a trial.
    """
    for name, study in studies.items():
        while True:
            with planned_runs(plan.trials * len(studies)), study.next() as trial:
                if trial is None:
                    break
                make_trial(plan, name, trial, follow(f"{name}, trial {trial.number + 1} of {plan.trials}"))


def finish_trials(plan: TuningPlan, studies: Mapping[str, Study], follow: Follow = no_callbacks) -> None:
    """Run trials, wait for those of other processes, and continue those that they leave unfinished.

    Args:
        plan: Plan of the tuning.
        studies: Study of each method.
        follow: Creates the callbacks of a trial.
    """
    while any(len(study.finished) < plan.trials for study in studies.values()):
        make_trials(plan, studies, follow)
        if any(len(study.finished) < plan.trials for study in studies.values()):
            time.sleep(WAIT)


class TrialReporter(Callback):
    """Reports the objective of the global model on held-out samples after each evaluated round.

    Args:
        trial: Trial of the run.
        rounds: Number of rounds of the run.
        scored: Name of the objective.
    """

    def __init__(self, trial: Trial, rounds: int, scored: str):
        self.trial = trial
        self.rounds = rounds
        self.done = 0
        self.figure = validation_metric_name(scored)

    def round(self, row: dict[str, Any]) -> None:
        """Report the objective, which may prune the trial."""
        self.done, value = row["round"], row.get(self.figure)
        if value is not None:
            self.trial.report(row["round"], value, row["round"] == self.rounds)

    def warn(self, text: str) -> None:
        """Ignore warnings, because the final comparison repeats them."""


def make_trial(plan: TuningPlan, name: str, trial: Trial, followers: Sequence[Callback]) -> None:
    """Draw the options of a trial, train with them, and store the result.

    Args:
        plan: Plan of the tuning.
        name: Expression of the method.
        trial: Trial to run.
        followers: Callbacks of the trial.
    """
    params = trial.params()
    folder, rounds = trial.folder, plan.config.rounds
    judge = TrialReporter(trial, rounds, plan.objective.name)
    try:
        plain = {"target": None, "trackers": (), "save_samples": False, "coefficients": False}
        config = plan.of(name, params).model_copy(update=plain)
        if config.early_stopping is None:  # evaluate on held-out samples without ever stopping
            config = config.model_copy(update={"early_stopping": rounds})
        if folder is not None and finished_rounds(folder) == rounds:  # finished, but the result was not stored
            history, summary = read_history(folder), read_summary(folder)
        else:
            result = run_experiment(
                config,
                federation=plan.trial_data,
                model=plan.model,
                method=method(config.method),
                out=folder,
                resume=folder is not None and (folder / "config.yaml").is_file(),
                callbacks=[*followers, judge],
                shared=None if plan.folder is None else plan.folder / SYNTHETIC,
            )
            history, summary = result.history, result.summary
    except TrialPruned:
        trial.tell(None, judge.done)
        for follower in followers:
            follower.end({})
    except (ConfigError, DataError) as error:
        trial.tell(None, 0, str(error))
    else:
        trial.record_privacy(summary)
        trial.tell(plan.value_of(history, summary, name in plan.personal), len(history))
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
