"""Benchmark suites: federations, methods and seeds that are declared in YAML files.

A federation file describes data and their clients, and the settings of its runs; ``$data`` in a setting stands for the
folder of the data files. A suite lists federations and methods, and the budget that each method gets.
"""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_yaml
from unskew.config.trust import METHOD, TRUST, check_spaces, check_trusted
from unskew.errors import ConfigError, first_problem, unknown_name
from unskew.json_models import InnerPath
from unskew.methods.registry import REFERENCES, check_expression

Settings = dict[str, Any]
PLACEHOLDER = "$data"
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class BenchmarkFederation(BaseModel):
    """Federation of a suite.

    Attributes:
        name: Name of its file without the ending.
        title: Description in a few words.
        kind: ``natural`` if the clients are real, ``controlled`` if the skew was created; the two kinds have separate tables.
        source: Citation of the data, and their license.
        needs: File below the folder of the data that must exist; omit it for data that unskew creates or downloads.
        without: Reason by method for methods that are not run, such as their cost.
        settings: Fields of a run, except ``method`` and ``seed``.
    """

    model_config = ConfigDict(extra="forbid")
    name: str
    title: str
    kind: Literal["natural", "controlled"]
    source: str
    needs: InnerPath | None = None
    without: dict[str, str] = Field(default_factory=dict)
    settings: Settings


class Suite(BaseModel):
    """Federations and methods that are compared with one budget.

    Attributes:
        name: Name of its file without the ending.
        title: Description in a few words.
        trials: Number of tuning trials of each method.
        trials_per_option: Number of additional trials for each tuned option beyond three, which are the learning rate,
            the local work and the batch size of every method.
        seeds: Seeds of the tuned methods; the tuning uses ``tuning_seed``, which is none of them.
        tuning_seed: Seed of the tuning.
        settings: Fields of all runs, which a federation may override.
        federations: Names of included federations, or YAML files next to the suite.
        methods: Method expressions; the first is the baseline.
        untuned: Method expressions that are also run with their default options.
        references: ``pooled`` and ``local``, tuned like methods, but not ranked.
        space: Search spaces in addition to those of the methods, as for ``unskew.tune``.
    """

    model_config = ConfigDict(extra="forbid")
    name: str
    title: str
    trials: Annotated[int, Field(ge=1, le=10_000)] = 16
    trials_per_option: Annotated[int, Field(ge=0, le=1000)] = 0
    seeds: Annotated[list[Seed], Field(min_length=2, max_length=1000)] = [1, 2, 3, 4, 5]
    tuning_seed: Seed = 0
    settings: Settings = Field(default_factory=dict)
    federations: Annotated[list[InnerPath], Field(min_length=1)]
    methods: Annotated[list[str], Field(min_length=1), METHOD]
    untuned: Annotated[list[str], METHOD] = Field(default_factory=list)
    references: list[str] = Field(default_factory=list)
    space: dict[str, Any] = Field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """Method that the others are compared with."""
        return self.methods[0]

    @pydantic.model_validator(mode="after")
    def _is_consistent(self) -> Suite:
        for name in (*self.methods, *self.untuned):
            check_expression(name)
        unknown = [name for name in self.references if name not in REFERENCES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a reference; use {' or '.join(sorted(REFERENCES))}")
        if self.tuning_seed in self.seeds:
            raise ValueError(f"the seed {self.tuning_seed} is used for tuning; remove it from the seeds")
        for kind, names in (("method", self.methods), ("federation", self.federations), ("seed", map(str, self.seeds))):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"the {kind} {twice[0]} is listed twice")
        return self


File = TypeVar("File", Suite, BenchmarkFederation)


def included(kind: str) -> list[str]:
    """Return the names of the files that the package contains.

    Args:
        kind: ``suites`` or ``federations``.
    """
    folder = files("unskew") / "benchmark" / kind
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_suite(name: str, trust_code: bool = False) -> tuple[Suite, list[BenchmarkFederation]]:
    """Read a suite and its federations.

    Args:
        name: Name of an included suite, or a YAML file, whose federations may be files relative to it.
        trust_code: Whether files may name code to import.

    Raises:
        ConfigError: If a file does not exist, is not valid, or names code to import without being trusted.
    """
    suite = _read(Suite, name, "suites", None, trust_code)
    folder = Path(name).parent if _is_file(name) else None
    federations = [_read(BenchmarkFederation, entry, "federations", folder, trust_code) for entry in suite.federations]
    names = [federation.name for federation in federations]
    twice = [federation for federation in names if names.count(federation) > 1]
    if twice:
        raise ConfigError(f"Two federations of the suite are named {twice[0]}. Rename one of their files.")
    for federation in federations:
        check_settings(suite, federation)
    return suite, federations


def check_settings(suite: Suite, federation: BenchmarkFederation) -> None:
    """Validate the settings of a federation's runs.

    Args:
        suite: Suite with common settings.
        federation: Federation with its own settings.

    Raises:
        ConfigError: If a setting is not valid.
    """
    for name in ("method", "seed"):
        if name in {**suite.settings, **federation.settings}:
            raise ConfigError(f"The federation {federation.name} sets {name}, which the suite chooses. Remove it.")
    try:
        experiment(run_settings(suite, federation, None))
    except ConfigError as error:
        raise ConfigError(f"The settings of the federation {federation.name} are not valid. {error}") from error


def run_settings(suite: Suite, federation: BenchmarkFederation, data: Path | None) -> Settings:
    """Return the fields of a federation's runs.

    Args:
        suite: Suite with common settings.
        federation: Federation with its own settings, which override those of the suite.
        data: Folder of the data files that replaces the placeholder; None keeps the placeholder.
    """
    settings = {**suite.settings, **federation.settings}
    if data is None:
        return settings
    return {
        name: value.replace(PLACEHOLDER, str(data)) if isinstance(value, str) else value
        for name, value in settings.items()
    }


def missing_file(federation: BenchmarkFederation, data: Path | None) -> str | None:
    """Return the file that a federation needs and that does not exist; None if nothing is missing.

    Args:
        federation: Federation of a suite.
        data: Folder of the data files, or None.
    """
    if federation.needs is None or (data is not None and (data / federation.needs).is_file()):
        return None
    return federation.needs


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _mapping(values: Settings, name: str) -> Settings:
    value = values.get(name)
    return value if isinstance(value, dict) else {}  # another value is an error later


def _read(kind: type[File], name: str, where: str, folder: Path | None, trust_code: bool) -> File:
    """Read and validate a file: an included one by its name, or one relative to a folder."""
    if _is_file(name):
        values = load_yaml(Path(name) if folder is None else folder / name)
        if not trust_code:
            check_trusted(values, kind, name, TRUST)
            check_trusted(_mapping(values, "settings"), Experiment, name, TRUST)
            check_spaces(_mapping(values, "space"), name, TRUST)
    elif name in included(where):
        path = files("unskew") / "benchmark" / where / f"{name}.yaml"
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    else:
        raise ConfigError(unknown_name("suite" if kind is Suite else "federation", name, included(where)))
    try:
        return kind.model_validate({"name": Path(name).stem if _is_file(name) else name, **values})
    except pydantic.ValidationError as error:
        raise ConfigError(f"{name} is not valid: {first_problem(error)}.") from error
