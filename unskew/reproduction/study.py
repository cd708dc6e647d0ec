"""Experiments that are programs of their own: presets ``paper/name.study.yaml``, run part by part and seed by seed.

A study's class (in ``unskew.reproduction.studies``) has its settings as fields. Its parts are what is kept: a finished part
of a seed is read from its file, which is named by all that decides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from unskew.engines.cpu import num_cores
from unskew.errors import ConfigError, DataError, plain_message, unknown_name
from unskew.option_parsing import build_from_options, import_own
from unskew.records.recorder import Callback
from unskew.reproduction.outcomes import Outcome, outcome_files, read_outcome, write_outcome
from unskew.reproduction.preset import SCALES, Options, presets_named, read_yaml
from unskew.reproduction.settings import describe_settings
from unskew.runs.parallel import check_parallel, run_in_pool, run_jobs, run_on_cluster
from unskew.runs.process_pool import Job

STUDIES = {
    "quadratic": "unskew.reproduction.studies.quadratic_figure:QuadraticStudy",
    "logistic": "unskew.reproduction.studies.logistic:LogisticStudy",
}
Line = tuple[str, list[str], list[list[str]]]
"""Title, header and rows of a table, as text."""
ByPart = dict[str, dict[int, Outcome]]
"""Outcomes by part and seed."""


class Study(Protocol):
    """An experiment with its settings."""

    def parts(self) -> list[str]:
        """Names of its parts."""

    def prepare(self, data_path: str | None) -> None:
        """Get what the parts need, such as data.

        Raises:
            DataError: The data are not available.
        """

    def run(self, part: str, seed: int) -> dict[str, Any]:
        """Carry out a part: what was found, as plain values.

        Args:
            part: Name of the part.
            seed: Seed of the run.
        """

    def lines(self, by_part: ByPart) -> list[Line]:
        """Tables of the outcomes."""

    def draw(self, by_part: ByPart, path: Path) -> Path:
        """A figure of the outcomes.

        Args:
            by_part: Outcomes of each part.
            path: File to write.
        """


class StudyScale(BaseModel):
    """Differences from the paper's settings."""

    model_config = ConfigDict(extra="forbid")
    settings: Options = Field(default_factory=dict)
    seeds: int | None = None
    otherwise: Options = Field(default_factory=dict)
    """Settings if the data are not at hand."""


class StudyPreset(BaseModel):
    """An experiment of a paper."""

    model_config = ConfigDict(extra="forbid")
    name: str
    study: str
    title: str
    where: str
    reference: str
    text: str = ""
    settings: Options = Field(default_factory=dict)
    seeds: int = 3
    scales: dict[str, StudyScale] = Field(default_factory=dict)


def study_names() -> list[str]:
    """All presets that are studies."""
    return presets_named(".study.yaml")


def load_study(name: str) -> StudyPreset:
    """Read a preset.

    Raises:
        ConfigError: There is none of this name, or it is not valid.
    """
    if name not in study_names():
        raise ConfigError(unknown_name("preset", name, study_names()))
    try:
        return StudyPreset.model_validate({"name": name, **read_yaml(f"{name}.study")})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"The preset {name} is not valid at {first['loc']}: {plain_message(first['msg'])}."
        ) from error


def make_study(kind: str, settings: Options) -> Study:
    """A study with checked settings.

    Args:
        kind: Name of the study.
        settings: Options of the study.

    Raises:
        ConfigError: There is no such study or setting, or a value is wrong.
    """
    if kind not in STUDIES:
        raise ConfigError(unknown_name("study", kind, STUDIES))
    cls: type[Study] = import_own(STUDIES[kind])
    return build_from_options(cls, settings, kind, f"{kind}: ", "setting")


class StudyRuns:
    """The parts of a study at one scale.

    Args:
        preset: The study.
        scale: ``smoke``, ``cpu`` or ``paper``.
        results: Where outcomes are kept.
        data_path: Folder with the data's files.
        parts: Only these; all if None.

    Raises:
        ConfigError: There is no such scale or part, or a setting is wrong.
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
        self.preset, self.results, self.data_path, self.scale_name = preset, results, data_path, scale
        self.scale = preset.scales.get(scale, StudyScale())
        self.seeds = self.scale.seeds or preset.seeds
        self.settings = {**preset.settings, **self.scale.settings}
        self.study = make_study(preset.study, self.settings)
        self._wanted = parts
        for part in parts or ():
            if part not in self.study.parts():
                raise ConfigError(f"{preset.name} has no row {part!r}; it has: {'; '.join(self.study.parts())}.")

    def note(self) -> str:
        """Return a sentence with the settings that are not the paper's; empty if there are none."""
        paper = make_study(self.preset.study, self.preset.settings)
        pairs = {name: [(getattr(self.study, name), getattr(paper, name))] for name in self.settings}
        return describe_settings(
            self.scale_name, {name: both for name, both in pairs.items() if both[0][0] != both[0][1]}
        )

    def parts(self) -> list[str]:
        """The parts that are asked for."""
        return [part for part in self.study.parts() if not self._wanted or part in self._wanted]

    def settle(self) -> str | None:
        """Get the data; where they are not at hand, take the scale's others and give the reason, to be told."""
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
        """Go over to the scale's settings without the data."""
        self.settings = {**self.settings, **self.scale.otherwise}
        self.study = make_study(self.preset.study, self.settings)

    def identity(self, part: str, seed: int) -> dict[str, Any]:
        """All that decides a part.

        Args:
            part: Name of the part.
            seed: Seed of the run.
        """
        return {"study": self.preset.study, "part": part, "settings": self.settings, "seed": seed}

    def carry_out(self, seeds: Sequence[int], parallel: int | str = 1) -> Iterator[tuple[str, int, Outcome]]:
        """Every chosen part of every seed, as they are done; those that are there already are read.

        Args:
            seeds: Which.
            parallel: Parts at a time, or ``auto``.
        """
        check_parallel(parallel)
        wanted = [(part, seed) for seed in seeds for part in self.parts()]
        missing = [cell for cell in wanted if read_outcome(self.results, self.identity(*cell)) is None]
        if isinstance(parallel, str) and "@" in parallel:
            at_once: int = run_on_cluster(parallel, len(missing), small=True)
        else:
            at_once = min(num_cores() if isinstance(parallel, str) else parallel, len(missing))
        if run_in_pool(at_once):
            works = [Job(cell, _beside, cell) for cell in missing]
            for _, (part, seed) in run_jobs(works, at_once, self):
                yield part, seed, self.outcome(part, seed)
            wanted = [cell for cell in wanted if cell not in missing]
        for part, seed in wanted:
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
            write_outcome(self.results, run, {"summary": self.study.run(part, seed)}, indent=None)
            outcome = read_outcome(self.results, run)
        assert outcome is not None
        return outcome

    def found(self, seeds: Sequence[int]) -> ByPart:
        """Return existing outcomes without running anything; of the scale's other settings if the first have none."""
        files = outcome_files(self.results)
        for _ in range(2):
            by_part = {
                part: {s: o for s in seeds if (o := read_outcome(files, self.identity(part, s))) is not None}
                for part in self.parts()
            }
            by_part = {part: outcomes for part, outcomes in by_part.items() if outcomes}
            if by_part or not self.scale.otherwise:
                break
            self.turn()
        return by_part


def _beside(runs: StudyRuns, part: str, seed: int, callbacks: list[Callback]) -> tuple[str, int]:
    """A part in a process of its own, which keeps its outcome."""
    runs.outcome(part, seed)
    return part, seed
