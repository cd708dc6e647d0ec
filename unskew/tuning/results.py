"""Results of tuning, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unskew.comparison.compare import Comparison, folder_name
from unskew.config.experiment import Experiment
from unskew.config.paths import with_absolute_paths
from unskew.filesystem import make_folder, write_atomic
from unskew.tuning.study import Study, as_csv
from unskew.tuning.trial_runner import TuningPlan


@dataclass(frozen=True)
class TunedMethod:
    """Tuned options of one method.

    Attributes:
        options: The best options, by field, or as ``fedprox.mu``.
        value: Objective on what clients hold out.
        configured: The value of the first trial, the configuration as it stands; None if that did not come to its end.
        judged_by: The figure that ``value`` is.
        trials: How many came to their end, were ended early, failed.
        importance: Of each option, shares of 1; or why it is not known.
        config: The run with these options.
    """

    options: dict[str, Any]
    value: float
    configured: float | None
    judged_by: str
    trials: dict[str, int]
    importance: dict[str, float] | str
    config: Experiment

    def as_json(self) -> dict[str, Any]:
        """All but the configuration, with the method as it is written with its options."""
        return {**{k: v for k, v in vars(self).items() if k != "config"}, "method": self.config.method}


@dataclass(frozen=True)
class TuningResult:
    """Result of tuning.

    Attributes:
        tuned: What was found for each method, by how it was written.
        trials: A line for each trial.
        comparison: The tuned methods on fresh seeds.
        folder: Where all is, or None.
    """

    tuned: dict[str, TunedMethod]
    trials: list[dict[str, Any]] = field(repr=False)
    comparison: Comparison = field(repr=False)
    folder: Path | None = None


def best_of_trials(plan: TuningPlan, name: str, study: Study, seed: int) -> TunedMethod:
    """Return the best result of a method's trials; its run uses ``seed``.

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
    return TunedMethod(options, best.value, first, figure, counts, study.importance(), config)


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
