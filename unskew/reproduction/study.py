"""Studies: experiments with their own code, as presets ``paper/name.study.yaml``, run by part and by seed.

The fields of a study's class (in ``unskew.reproduction.studies``) are its settings. Each finished part of a seed is
stored as an outcome, which is identified by all inputs of the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from unskew.errors import ConfigError, DataError, unknown_name
from unskew.option_parsing import build_from_options, import_own
from unskew.records.recorder import Callback
from unskew.reproduction.outcomes import Outcome, append_outcome, read_outcome
from unskew.reproduction.preset import SCALES, Options, PublishedResult, StudyScale, presets_named, read_preset
from unskew.reproduction.settings import describe_settings
from unskew.runs.parallel import execute_jobs, num_parallel_jobs
from unskew.runs.process_pool import Job

STUDIES = {
    "quadratic": "unskew.reproduction.studies.quadratic_figure:QuadraticStudy",
    "logistic": "unskew.reproduction.studies.logistic:LogisticStudy",
}
Line = tuple[str, list[str], list[list[str]]]
"""Title, header and rows of a table, as strings."""
ByPart = dict[str, dict[int, Outcome]]
"""Outcomes by part and seed."""


class Study(Protocol):
    """Experiment with its settings."""

    def parts(self) -> list[str]:
        """Return the names of the parts."""

    def prepare(self, data_path: str | None) -> None:
        """Load what the parts need, such as data.

        Args:
            data_path: Folder with data files, or None.

        Raises:
            DataError: If the data are not available.
        """

    def run(self, part: str, seed: int) -> dict[str, Any]:
        """Run a part and return its results as plain values.

        Args:
            part: Name of the part.
            seed: Seed of the run.
        """

    def lines(self, by_part: ByPart) -> list[Line]:
        """Return the tables of the outcomes."""

    def draw(self, by_part: ByPart, path: Path) -> Path:
        """Plot the outcomes.

        Args:
            by_part: Outcomes of each part.
            path: File to write.
        """


class StudyPreset(PublishedResult):
    """Experiment of a paper."""

    study: str
    settings: Options = Field(default_factory=dict)
    scales: dict[str, StudyScale] = Field(default_factory=dict)


def study_names() -> list[str]:
    """Return all presets that are studies."""
    return presets_named(".study.yaml")


def load_study(name: str) -> StudyPreset:
    """Read a preset.

    Args:
        name: Name of the preset, such as ``fedals/figure-1``, or a YAML file.

    Raises:
        ConfigError: If there is no preset of this name, or it is not valid.
    """
    return read_preset(StudyPreset, name, study_names(), ".study")


def make_study(kind: str, settings: Options) -> Study:
    """Create a study with validated settings.

    Args:
        kind: Name of the study.
        settings: Options of the study.

    Raises:
        ConfigError: If there is no such study or setting, or a value is not valid.
    """
    if kind not in STUDIES:
        raise ConfigError(unknown_name("study", kind, STUDIES))
    cls: type[Study] = import_own(STUDIES[kind])
    return build_from_options(cls, settings, kind, f"{kind}: ", "setting")


class StudyRuns:
    """Parts of a study at one scale.

    Args:
        preset: Preset of the study.
        scale: ``smoke``, ``cpu`` or ``paper``.
        results: Folder of the outcomes.
        data_path: Folder of the data files.
        parts: Parts to run; None for all.

    Raises:
        ConfigError: If there is no such scale or part, or a setting is not valid.
    """

    def __init__(
        self,
        preset: StudyPreset,
        scale: str,
        results: Path,
        data_path: str | None = None,
        parts: Sequence[str] | None = None,
    ):
        if scale not in SCALES:
            raise ConfigError(unknown_name("scale", scale, SCALES))
        self.preset = preset
        self.results = results
        self.data_path = data_path
        self.scale_name = scale
        self.scale = preset.scales.get(scale, StudyScale())
        self.seeds = self.scale.seeds or preset.seeds
        self.settings = {**preset.settings, **self.scale.settings}
        self.study = make_study(preset.study, self.settings)
        self._wanted = parts
        for part in parts or ():
            if part not in self.study.parts():
                raise ConfigError(f"{preset.name} has no row {part!r}. Its rows are: {'; '.join(self.study.parts())}.")

    def note(self) -> str:
        """Return a sentence with the settings that are not the paper's; empty if there are none."""
        paper = make_study(self.preset.study, self.preset.settings)
        pairs = {name: [(getattr(self.study, name), getattr(paper, name))] for name in self.settings}
        return describe_settings(
            self.scale_name, {name: both for name, both in pairs.items() if both[0][0] != both[0][1]}
        )

    def parts(self) -> list[str]:
        """Return the requested parts."""
        return [part for part in self.study.parts() if not self._wanted or part in self._wanted]

    def settle(self) -> str | None:
        """Load the data; if they are not available, switch to the scale's other settings and return the reason."""
        try:
            self.study.prepare(self.data_path)
        except (DataError, ConfigError) as error:
            if not self.scale.otherwise or self.data_path is not None:
                raise
            self.turn()
            self.study.prepare(None)
            return str(error)
        return None

    def turn(self) -> None:
        """Switch to the scale's settings without the data."""
        self.settings = {**self.settings, **self.scale.otherwise}
        self.study = make_study(self.preset.study, self.settings)

    def identity(self, part: str, seed: int) -> dict[str, Any]:
        """Return all inputs that determine the outcome of a part.

        Args:
            part: Name of the part.
            seed: Seed of the run.
        """
        return {"study": self.preset.study, "part": part, "settings": self.settings, "seed": seed}

    def carry_out(self, seeds: Sequence[int], parallel: int | str | None = None) -> Iterator[tuple[str, int, Outcome]]:
        """Run every requested part for every seed and yield the outcomes as they finish; stored outcomes are read.

        Args:
            seeds: Seeds of the runs.
            parallel: Number of concurrent parts, or ``auto``.

        Yields:
            Outcomes of the parts.
        """
        wanted = [(part, seed) for seed in seeds for part in self.parts()]
        missing = [cell for cell in wanted if read_outcome(self.results, self.identity(*cell)) is None]
        works = [Job(cell, _run_part, cell) for cell in missing]
        finished = execute_jobs(works, num_parallel_jobs(parallel, len(missing)), self)
        for part, seed in [cell for cell in wanted if cell not in missing]:
            yield part, seed, self.outcome(part, seed)
        for _, (part, seed) in finished:
            yield part, seed, self.outcome(part, seed)

    def outcome(self, part: str, seed: int) -> Outcome:
        """Return the stored outcome of a part, or run the part.

        Args:
            part: Name of the part.
            seed: Seed of the run.
        """
        run = self.identity(part, seed)
        outcome = read_outcome(self.results, run)
        if outcome is None:
            append_outcome(self.results, self.preset.name, run, {"summary": self.study.run(part, seed)})
            outcome = read_outcome(self.results, run)
        assert outcome is not None
        return outcome

    def found(self, seeds: Sequence[int]) -> ByPart:
        """Return stored outcomes without running anything; if there are none, those of the scale's other settings."""
        for _ in range(2):
            by_part = {
                part: {s: o for s in seeds if (o := read_outcome(self.results, self.identity(part, s))) is not None}
                for part in self.parts()
            }
            by_part = {part: outcomes for part, outcomes in by_part.items() if outcomes}
            if by_part or not self.scale.otherwise:
                break
            self.turn()
        return by_part


def _run_part(runs: StudyRuns, part: str, seed: int, callbacks: list[Callback]) -> tuple[str, int]:
    """Run a part, perhaps in a worker process, and store its outcome."""
    runs.outcome(part, seed)
    return part, seed
