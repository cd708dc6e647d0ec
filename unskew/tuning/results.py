"""Results of tuning, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from unskew.comparison.comparison_result import Comparison
from unskew.comparison.folder_name import folder_name
from unskew.config.experiment import Experiment
from unskew.config.paths import with_absolute_paths
from unskew.filesystem import make_folder, write_atomic
from unskew.privacy.composition import composition_note
from unskew.records.notebook import NotebookTable
from unskew.tuning.study import Study, as_csv, finite_value
from unskew.tuning.trial_runner import TuningPlan


@dataclass(frozen=True)
class TunedMethod:
    """Tuned options of one method.

    Attributes:
        options: Best options, by field name, or by names such as ``fedprox.mu``.
        value: Objective on held-out samples; None if all trials diverged, and then the options are those of the first one.
        configured: Value of the first trial, which is the configuration with the fixed options; None if it was not
            completed or diverged.
        judged_by: Name of the metric in ``value``.
        trials: Number of trials that were completed, pruned or failed.
        importance: Importance of each option as shares of 1, or the reason why it is unknown.
        config: Configuration with these options.
    """

    options: dict[str, Any]
    value: float | None
    configured: float | None
    judged_by: str
    trials: dict[str, int]
    importance: dict[str, float] | str
    config: Experiment

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the configuration, and the method expression with the tuned options."""
        return {**{k: v for k, v in vars(self).items() if k != "config"}, "method": self.config.method}


@dataclass(frozen=True, repr=False)
class TuningResult(NotebookTable):
    """Result of tuning.

    Attributes:
        tuned: Result of each method, by its original expression.
        trials: One row per trial.
        comparison: Comparison of the tuned methods on fresh seeds.
        folder: Folder of the tuning, or None.
        spent: Guarantee of each private trial.
    """

    tuned: dict[str, TunedMethod]
    trials: list[dict[str, Any]]
    comparison: Comparison
    folder: Path | None = None
    spent: list[dict[str, Any]] = field(default_factory=list)

    def _shown(self) -> list[dict[str, object]]:
        values = {name: {best.judged_by: best.value, "before": best.configured} for name, best in self.tuned.items()}
        return [{"method": name, **row, **self.tuned[name].options} for name, row in values.items()]

    def _repr_html_(self) -> str:
        """Return the tuned options and the comparison as tables for notebooks."""
        return super()._repr_html_() + self.comparison._repr_html_()

    def notes(self) -> list[str]:
        """Return the notes of the comparison and of trials, and the guarantee of all private trials and runs together."""
        diverged = [name for name, best in self.tuned.items() if best.value is None]
        together = composition_note([*self.spent, *chain.from_iterable(self.comparison.summaries.values())])
        return [
            *self.comparison.notes(),
            *(f"All trials of {name} diverged, so its options are those of the first one." for name in diverged),
            *([f"Trials and comparison: {together}"] if self.spent and together else []),
        ]


def best_of_trials(plan: TuningPlan, name: str, study: Study, seed: int) -> TunedMethod:
    """Return the best result of a method's trials, with a configuration that uses ``seed``.

    Args:
        plan: Plan of the tuning.
        name: Expression of the method.
        study: Trials of the method.
        seed: Seed of the method's run.
    """
    best, rows = study.best, study.rows()
    options = study.params_of(best)
    first = next((row["value"] for row in rows if row["trial"] == 0), None)
    counts = {state: sum(row["state"] == state for row in rows) for state in ("finished", "ended early", "failed")}
    figure = f"validation {plan.objective.title}"
    figure = f"{figure} of personal models" if name in plan.personal else figure
    config = with_absolute_paths(plan.of(name, options)).model_copy(update={"seed": seed})
    return TunedMethod(options, finite_value(best), first, figure, counts, study.importance(), config)


def write_results(folder: Path, tuned: Mapping[str, TunedMethod], rows: list[dict[str, Any]]) -> None:
    """Write ``tuned/METHOD.yaml``, ``trials.csv`` and ``tuning.json``.

    Args:
        folder: Folder of the tuning.
        tuned: Result of each method.
        rows: One row per trial.
    """
    make_folder(folder / "tuned")
    for name, tuned_method in tuned.items():
        write_atomic(folder / "tuned" / f"{folder_name(name)}.yaml", tuned_method.config.to_yaml().encode())
    write_atomic(folder / "trials.csv", as_csv(rows).encode())
    as_json = {name: tuned_method.as_json() for name, tuned_method in tuned.items()}
    write_atomic(folder / "tuning.json", (json.dumps(as_json, indent=2) + "\n").encode())
