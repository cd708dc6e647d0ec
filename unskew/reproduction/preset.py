"""Presets: a table of a paper as a YAML file with rows times columns of experiments, at three scales.

A preset contains the paper's settings, some of which each scale overrides. ``$name`` is replaced by a value in
``with``, which a scale may override too. A row with ``after`` continues from the end of a common run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, TypeVar

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.sources.registry import DRAWN, HUB
from unskew.errors import ConfigError, first_problem, unknown_name

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader is ten times as fast, if the yaml package includes it."""
SCALES = ("smoke", "cpu", "paper")
MARK = " †"
"""Suffix of rows whose outcomes were measured before a default of their method changed."""
Options = dict[str, Any]


class StudyScale(BaseModel):
    """Differences from the paper's settings."""

    model_config = ConfigDict(extra="forbid")
    settings: Options = Field(default_factory=dict)
    seeds: int | None = None
    otherwise: Options = Field(default_factory=dict)
    """Settings to use if the data are not available."""


class PresetScale(StudyScale):
    """Differences of a table from the paper's settings."""

    with_: Options = Field(default_factory=dict, alias="with")
    rows: dict[str, Options] = Field(default_factory=dict)
    columns: dict[str, Options] | None = None


class PublishedResult(BaseModel):
    """Result of a paper that a preset reproduces."""

    model_config = ConfigDict(extra="forbid")
    name: str
    title: str
    where: str
    reference: str
    text: str = ""
    seeds: int = 3


class Preset(PublishedResult):
    """Table or figure of a paper."""

    values: list[str] = ["accuracy"]
    curves: bool | Literal["traffic"] = False
    """True if the figure shows curves over rounds, or over traffic."""
    settings: Options
    with_: Options = Field(default_factory=dict, alias="with")
    rows: dict[str, Options]
    columns: dict[str, Options]
    pairs: dict[str, str] = Field(default_factory=dict)
    """Pairs of rows whose differences per seed are shown in a separate table."""
    common: dict[str, Options] = Field(default_factory=dict)
    published: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    scales: dict[str, PresetScale] = Field(default_factory=dict)


Kind = TypeVar("Kind", bound=PublishedResult)


@dataclass(frozen=True)
class PresetCell:
    """One run of a table: its experiment and, if it continues from another run, that one."""

    row: str
    column: str
    config: Experiment
    parent: Experiment | None = None

    def of_seed(self, seed: int) -> PresetCell:
        """Return the same run with another seed."""
        parent = self.parent and self.parent.model_copy(update={"seed": seed})
        return replace(self, config=self.config.model_copy(update={"seed": seed}), parent=parent)


def without_mark(row: str) -> str:
    """Return the name of a row in the preset."""
    return row.removesuffix(MARK)


def preset_names() -> list[str]:
    """Return all presets that are tables of runs, as ``paper/table``."""
    return [name for name in presets_named(".yaml") if not name.endswith(".study")]


def presets_named(ending: str) -> list[str]:
    """Return all presets whose file name has this ending, as ``paper/name``, in numeric order."""
    root = files("unskew") / "presets"
    paths = [
        f"{folder.name}/{file.name.removesuffix(ending)}"
        for folder in root.iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
        if file.name.endswith(ending) and not file.name.startswith("_")
    ]
    # Numeric order: table-3 comes before table-10.
    return sorted(paths, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def load_preset(name: str) -> Preset:
    """Read a preset.

    Args:
        name: Name of the preset, such as ``fedcog/table-1``, or a YAML file.

    Raises:
        ConfigError: If there is no preset of this name, or it is not valid.
    """
    return read_preset(Preset, name, preset_names())


def read_preset(kind: type[Kind], name: str, names: Collection[str], ending: str = "") -> Kind:
    """Read and validate a preset's file.

    Args:
        kind: Kind of the preset.
        name: Name of the preset.
        names: Names of all presets of this kind.
        ending: End of the file's name, before ``.yaml``.

    Raises:
        ConfigError: If there is no preset of this name, or it is not valid.
    """
    if name not in names:
        raise ConfigError(unknown_name("preset", name, names))
    try:
        return kind.model_validate({"name": name, **read_yaml(name + ending)})
    except pydantic.ValidationError as error:
        raise ConfigError(f"The preset {name} is not valid: {first_problem(error)}.") from error


def read_yaml(name: str) -> Options:
    """Return the values of a preset's file, merged into those of the preset that it extends."""
    text = (files("unskew") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    values: Options = yaml.load(text, Loader=LOADER)  # nosec B506
    base = values.pop("extends", None)
    return values if base is None else merge_values(read_yaml(base), values)


def merge_values(base: Options, over: Options) -> Options:
    """Merge ``over`` into ``base``: sections entry by entry, while rows, columns and published numbers are replaced.

    Args:
        base: Options to start from.
        over: Options that replace them.

    >>> merge_values({"settings": {"lr": 1, "rounds": 2}, "rows": {"a": {}}}, {"settings": {"lr": 3}, "rows": {"b": {}}})
    {'settings': {'lr': 3, 'rounds': 2}, 'rows': {'b': {}}}
    """
    result = dict(base)
    for key, value in over.items():
        both = (
            isinstance(value, dict) and isinstance(base.get(key), dict) and key not in ("rows", "columns", "published")
        )
        result[key] = merge_values(base[key], value) if both else value
    return result


def fill_placeholders(options: Options, values: Options) -> Options:
    """Replace every ``$name`` in the options; a string that becomes a number is converted.

    Args:
        options: Options with placeholders.
        values: Value of each placeholder.

    >>> fill_placeholders({"method": "fedcog:n=$n", "rounds": "$start"}, {"n": 8, "start": 40})
    {'method': 'fedcog:n=8', 'rounds': 40}
    """
    text = re.sub(r"\$([a-z][a-z0-9_]*)", lambda name: str(values[name[1]]), json.dumps(options))
    result: Options = json.loads(text)
    for name, value in result.items():
        if isinstance(value, str) and "$" in str(options[name]) and re.fullmatch(r"-?\d+(\.\d+)?", value):
            result[name] = float(value) if "." in value else int(value)
    return result


def preset_cells(preset: Preset, scale: str, seed: int, extra: Options, otherwise: bool = False) -> list[PresetCell]:
    """Return the runs of a table at one scale and seed.

    Args:
        preset: Preset of the table.
        scale: ``smoke``, ``cpu`` or ``paper``.
        seed: Seed of all runs.
        extra: Settings of this machine (``data_path``, ``server_data_path``, ``engine``, ``device``); rows whose data need
            no file ignore the path.
        otherwise: Whether to use the scale's settings for unavailable data.

    Raises:
        ConfigError: If a setting of the preset is not valid.
    """
    if scale not in SCALES:
        raise ConfigError(unknown_name("scale", scale, SCALES))
    at_scale = preset.scales.get(scale, PresetScale())
    values = {**preset.with_, **at_scale.with_}
    base = {**preset.settings, **at_scale.settings, **(at_scale.otherwise if otherwise else {})}
    if otherwise:
        extra = {k: v for k, v in extra.items() if k != "data_path"}
    table = []
    for column, its in (at_scale.columns or preset.columns).items():
        for row, own_options in preset.rows.items():
            own_options = {**own_options, **at_scale.rows.get(row, {})}
            after = own_options.pop("after", None)
            shared = {**base, **its}

            def build(options: Options, shared: Options = shared) -> Experiment:
                all_options = {**fill_placeholders({**shared, **options}, values), **extra, "seed": seed}
                if all_options["data"] in DRAWN:
                    all_options.pop("data_path", None)
                if str(all_options.get("server_data")).partition(":")[0] not in HUB:
                    all_options.pop("server_data_path", None)
                return experiment(all_options)

            # The common run uses the row's settings of data and model, but not its method.
            rest = {k: v for k, v in own_options.items() if k != "method"}
            parent = None if after is None else build({**rest, **preset.common[after], "base_run": True})
            table.append(PresetCell(row, column, build(own_options), parent))
    return table


def num_seeds(preset: Preset, scale: str) -> int:
    """Return the number of seeds of a scale.

    Args:
        preset: The preset.
        scale: Scale of the preset.
    """
    return preset.scales.get(scale, PresetScale()).seeds or preset.seeds
