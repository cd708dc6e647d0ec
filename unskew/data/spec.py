"""Data specification: samples and their partition; together with a seed it determines a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from unskew.config_fields import DATA, Flag, Section, as_value_error
from unskew.data.csv_format import CsvConfig
from unskew.data.partition.parsing import parse_count, parse_positive
from unskew.errors import ConfigError
from unskew.expressions import parse_expression, parse_names, split_list, unquote
from unskew.tasks.survival_columns import MOST_HORIZONS, value_text

TABLES = (".parquet", ".csv", ".jsonl")
"""File name extensions of tables."""


class Split(NamedTuple):
    """Columns that decide which rows are held out.

    Attributes:
        group: Column whose values are never split between training and held-out rows.
        time: Time column; the newest rows, or the groups with the newest rows, are held out.
        given: Column with the values ``train`` and ``test``.
    """

    group: str | None = None
    time: str | None = None
    given: str | None = None


def parse_split(text: str) -> Split:
    """Parse ``COLUMN``, ``time:COLUMN``, ``COLUMN,time:COLUMN`` or ``column:COLUMN``.

    Args:
        text: Value of ``split_by``.

    Raises:
        ConfigError: If the text has none of these forms.

    >>> parse_split("patient_id,time:visit")
    Split(group='patient_id', time='visit', given=None)
    """
    values: dict[str, str] = {}
    for part in split_list(text):
        prefix, colon, name = (part, "", "") if part.startswith('"') else part.partition(":")
        kind = {"time": "time", "column": "given"}.get(prefix) if colon else "group"
        value = unquote(name if colon else prefix)
        if kind is None or kind in values or not value:
            raise ConfigError(
                f"split_by={text!r} is not valid. Write a column such as patient_id, time:visit_date, both joined by a "
                "comma, or column:split."
            )
        values[kind] = value
    if "given" in values and len(values) > 1:
        raise ConfigError(f"split_by={text!r}: column:{values['given']} cannot be combined with other columns.")
    return Split(**values)


class Shift(NamedTuple):
    """Feature shift.

    Attributes:
        kind: ``rotate`` or ``noise``.
        size: Largest angle in degrees, or largest standard deviation.
        groups: Number of different angles; None means one per client.
    """

    kind: str
    size: float
    groups: int | None = None

    def amount(self, client: int, clients: int) -> float:
        """Return the angle or the standard deviation of a client.

        Args:
            client: Client number, from 0.
            clients: Number of clients ``K``.

        >>> [Shift("rotate", 270, 4).amount(k, 8) for k in range(5)], Shift("noise", 1.0).amount(1, 4)
        ([0.0, 90.0, 180.0, 270.0, 0.0], 0.5)
        """
        if self.kind == "noise":
            return self.size * (client + 1) / clients
        groups = clients if self.groups is None else self.groups
        return self.size * (client % groups) / max(1, groups - 1)


def parse_shift(text: str) -> Shift:
    """Parse ``rotate:ANGLE[,groups=G]`` or ``noise:SIGMA``.

    Args:
        text: Value of ``shift``.

    Raises:
        ConfigError: If the text has none of these forms.

    >>> parse_shift("rotate:270,groups=4")
    Shift(kind='rotate', size=270.0, groups=4)
    """
    expression = parse_expression(text)
    name, values = expression.name, expression.values
    options = dict(expression.options)
    groups = options.pop("groups", None) if name == "rotate" else None
    if name not in ("rotate", "noise") or len(values) != 1 or options:
        raise ConfigError(f"shift={text!r} is not valid. Write rotate:ANGLE, rotate:ANGLE,groups=G or noise:SIGMA.")
    size = parse_positive(values[0], f"The number in shift={text!r}")
    count = None if groups is None else parse_count(groups, f"groups in shift={text!r}")
    if count == 1:
        raise ConfigError(f"shift={text!r} rotates nothing: one group has the angle 0. Use groups of at least 2.")
    return Shift(name, size, count)


Unseen = float | tuple[str, ...]
"""Share of unseen clients, or their names."""


def as_text_source(data: str, columns: Sequence[str]) -> str:
    """Return the name of a text source for a table if text columns are selected; other names are returned unchanged.

    Args:
        data: Name of the data source.
        columns: Names of the text columns.

    >>> as_text_source("table:reviews.csv", ["review"]), as_text_source("table:patients.csv", [])
    ('text:reviews.csv', 'table:patients.csv')
    """
    prefix, colon, path = data.partition(":")
    if not columns or not is_table(data):
        return data
    return f"text{colon}{path}" if prefix == "table" else f"text:{data}"


def is_table(data: str) -> bool:
    """Return whether a data source is a table: ``table:PATH``, a file name with an extension in ``TABLES``, or ``lung``."""
    return data.partition(":")[0] in ("table", "lung") or (":" not in data and data.lower().endswith(TABLES))


def parse_unseen(value: object) -> Unseen:
    """Return the share of unseen clients, or their names: a number from 0 and below 1 is a share, anything else names.

    Args:
        value: Number, list of names, or names separated by commas.

    Raises:
        ConfigError: If the value is neither, or the share is out of range.

    >>> parse_unseen("0.2"), parse_unseen("Oslo,Bergen"), parse_unseen(7), parse_unseen([0, 7])
    (0.2, ('Oslo', 'Bergen'), ('7',), ('0', '7'))
    """
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            share = float(value)
        except (ValueError, OverflowError):
            share = 1.0
        if 0 <= share < 1:
            return share
        if isinstance(value, float):
            raise ConfigError(f"unseen must be at least 0 and below 1, or names of clients, not {value}.")
        value = [value] if isinstance(value, int) else value
    if not isinstance(value, list | tuple):
        return parse_names(value)
    odd = [name for name in value if not isinstance(name, str | int) or isinstance(name, bool)]
    if odd:
        raise ConfigError(
            f"unseen has {odd[0]!s}, which is not a name. Write names such as NO and 2024-01-31 in quotes."
        )
    return parse_names([f"{name:d}" if isinstance(name, int) and abs(name) < 1 << 63 else name for name in value])


def _split_column_names(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    several = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return parse_names(value) if several else value


def known_task(task: str) -> str:
    """Validate that ``task`` is ``auto`` or a task that must be named (raises ``ValueError`` otherwise)."""
    if task == "auto":
        return task
    from unskew.tasks.registry import TASKS

    if task not in (
        names := ["auto", *(name for name, other in TASKS.items() if other.numeric_labels or other.pixels)]
    ):
        raise ValueError(f"it must be {' or '.join(map(repr, names))}")
    return task


PositiveTime = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Time after 0."""


def _split_numbers(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


GrayValue = Annotated[int, Field(ge=0, le=255)]
"""Gray value of a pixel."""
ColumnName = Annotated[str, AfterValidator(unquote)]
"""Name of one column."""
ColumnNames = Annotated[tuple[str, ...], BeforeValidator(_split_column_names)]
"""Names of columns: a list, or a string with commas."""


class TextSpec(Section):
    """Tokenization of texts."""

    columns: Annotated[ColumnNames, Flag("Data", "text")] = ()
    """Text columns, one or a pair: ``premise,hypothesis``; if empty, ``text`` or the data source's default."""
    tokenizer: Annotated[Annotated[str, Field(min_length=1)] | None, DATA] = None
    """Name on the Hugging Face Hub, a folder, ``words`` or ``bytes``; None means the model's tokenizer."""
    block: Annotated[int, Field(ge=2, le=1_000_000)] = 128
    """Maximum number of tokens per text."""
    prompt: ColumnName | None = None
    """Column of prompts, which do not count in the loss; requires ``answer``."""
    answer: ColumnName | None = None
    """Column of answers, whose tokens and end token count in the loss and in metrics; requires ``prompt``."""
    messages: ColumnName | None = None
    """Column of chats, lists of messages with ``role`` and ``content``; only the assistant's tokens count."""
    pack: bool = False
    """Join short texts of a client in one row of at most ``block`` tokens, in which each attends only to itself."""

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Columns that the configuration names, in order."""
        named = (self.prompt, self.answer, self.messages)
        return (*self.columns, *(column for column in named if column is not None))

    @property
    def answers_only(self) -> bool:
        """True if only the answers, or the messages of an assistant, count."""
        return self.answer is not None or self.messages is not None

    @pydantic.model_validator(mode="after")
    def _one_form(self) -> TextSpec:
        if (self.prompt is None) != (self.answer is None):
            raise ValueError("text.prompt and text.answer need each other; set both, or none")
        if sum(map(bool, (self.columns, self.answer, self.messages))) > 1:
            raise ValueError("use one of text.columns, text.prompt with text.answer, and text.messages")
        return self


class SegmentationSpec(Section):
    """Classes of the pixels of masks."""

    classes: ColumnNames = ()
    """Names of the classes, such as ``background,vessel``; the first is the background."""
    values: Annotated[tuple[GrayValue, ...], BeforeValidator(_split_numbers)] = ()
    """Gray value of each class in the masks; if empty, 0 to C - 1, or 0 and 255 for two classes."""
    ignore: GrayValue | None = None
    """Gray value of pixels without truth, which count neither in the loss nor in metrics."""


class HarmonizeSpec(Section):
    """Harmonization of the columns of sites before training."""

    method: Annotated[Literal["none", "combat"], Flag("Data", "harmonize")] = "none"
    """``combat`` removes shifts and scales of the numeric columns of each site; requires ``natural:COLUMN``."""
    columns: ColumnNames = ()
    """Columns to harmonize; if empty, all numeric inputs that are no covariates."""
    covariates: ColumnNames = ()
    """Inputs whose effects on the columns are preserved, such as ``age,sex``."""
    empirical_bayes: bool = True
    """Shrink the parameters of a site to those of all columns."""
    mean_only: bool = False
    """Remove only shifts."""
    confounded: Literal["error", "allow"] = "error"
    """Data whose labels differ strongly between sites, from which a part of the label would be removed: raise an error, or
    allow them."""


class SurvivalSpec(Section):
    """Bins of time and event of the task ``survival``."""

    event: str | None = None
    """Value of the second label column that means the event; by default 1 or true."""
    until: Annotated[float, Field(gt=0, le=2.0**44, allow_inf_nan=False)] | None = None
    """Last time: later times are censored there. By default, the upper end of the last occupied cell of a public grid, which
    discloses the largest time to 4.4 %."""
    bins: Annotated[int, Field(ge=1, le=256)] | tuple[PositiveTime, ...] | None = None
    """Number of bins with about equal numbers of events, or increasing cut points, the last of which is ``until``; by default
    10, or fewer with fewer than 100 events."""
    horizons: tuple[PositiveTime, ...] = ()
    """Times at which risks are reported; by default, the cut points nearest to the quartiles of the events."""

    rates: tuple[PositiveTime, ...] = ()
    """Events per unit of time in each bin, if ``bins`` are cut points; nothing is then summed over clients before training,
    as ``dpsgd`` requires. By default, the clients' own."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _event_as_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("event") is not None:
            return {**values, "event": value_text(values["event"])}
        return values

    @pydantic.model_validator(mode="after")
    def _times_in_order(self) -> SurvivalSpec:
        cuts = self.bins if isinstance(self.bins, tuple) else (self.until or math.inf,)
        last = cuts[-1] if cuts else 0.0
        if not cuts or any(a >= b for a, b in pairwise(cuts)):
            raise ValueError("survival.bins must be a number, or increasing cut points")
        if isinstance(self.bins, tuple) and self.until not in (None, last):
            raise ValueError(
                f"the last of survival.bins is {last:g}, but survival.until is {self.until:g}; make them equal, or remove "
                "until"
            )
        if self.rates and not (isinstance(self.bins, tuple) and len(self.bins) == len(self.rates)):
            raise ValueError("survival.rates needs one number per bin, and survival.bins as cut points")
        if len(self.horizons) > MOST_HORIZONS:
            raise ValueError(f"survival.horizons has {len(self.horizons)} times; write at most {MOST_HORIZONS}")
        if late := [horizon for horizon in self.horizons if horizon > last]:
            raise ValueError(
                f"survival.horizons has {late[0]:g}, which is after {last:g}, the last time with a prediction; remove it, or "
                "set a later survival.until"
            )
        return self


def text_columns(text: object) -> Any:
    """Return the columns of the section ``text``, which may be written as the columns alone."""
    if isinstance(text, str | list | tuple):
        return text
    if isinstance(text, Mapping):
        return text.get("columns") or [text[name] for name in ("answer", "messages") if text.get(name)]
    return getattr(text, "used_columns", ())


class DataSpec(Section):
    """Data of a run: samples and their partition.

    Equal specifications with the same seed give the same federation.
    """

    data: Annotated[str, DATA] = "digits"
    """Data source: digits, cifar10, ..., ``table:PATH``, ``folder:PATH``, ``npz:PATH``, ``text:PATH``, ``leaf:PATH``; or
    ``arrays`` for data passed in Python."""
    data_path: Annotated[str | None, DATA] = None
    """Folder with the source's files, for offline use."""
    label: Annotated[ColumnName | None, DATA] = None
    """Label column of a table; if it contains lists, the task is multi-label; several columns with ``task: regression``; the
    columns of time and event with ``task: survival``."""
    label_separator: Annotated[Annotated[str, Field(min_length=1)] | None, DATA] = None
    """Separator between the labels of a sample in a string label column."""
    image: Annotated[ColumnName | None, DATA] = None
    """Image column of a table; for ``leaf``, the folder of image files."""
    features: Annotated[ColumnNames, DATA] = ()
    """Columns of a table that are inputs, in this order: ``age,income``; if empty, all numeric columns."""
    exclude: Annotated[ColumnNames, DATA] = ()
    """Columns of a table that are not inputs: ``patient_id,row``."""
    task: Annotated[str, AfterValidator(known_task), DATA] = "auto"
    """``regression`` predicts the numbers of one or more label columns, ``survival`` the time until an event, and
    ``segmentation`` the class of each pixel; ``auto`` infers the task from the label column."""
    categories: Annotated[ColumnNames, DATA] = ()
    """Categorical columns of a table: ``drug,ward``; ``auto`` means every string column. In a file, a mapping of columns to
    their values; secure aggregation needs it."""
    category_values: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Values of categorical columns that are agreed in advance, so that clients do not send them. Others count as missing."""
    dates: Annotated[ColumnNames, DATA] = ()
    """Date columns of a table."""
    missing: Annotated[Literal["error", "mean", "indicator"], DATA] = "error"
    """Missing numbers of a table: ``error`` (raise an error), ``mean`` (impute), or ``indicator`` (impute and flag)."""
    split_by: Annotated[str | None, DATA] = None
    """Column whose values are never divided between training, held-out and test data; ``time:COLUMN`` holds out the newest
    rows, ``column:COLUMN`` uses a predefined split."""
    csv: CsvConfig = CsvConfig()
    """Format of CSV files, if detection fails."""
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Side length in pixels to which all images and masks are resized, including the server's; None leaves them unchanged."""
    max_classes: Annotated[int, Field(ge=2)] | None = None
    """Use only samples of the first classes, up to this number of classes."""
    max_train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of training samples to keep, drawn by the seed; the test set is not reduced."""
    partition: Annotated[str, DATA] = "dirichlet:0.1"
    """Data partition, which assigns samples to clients: ``iid``, ``dirichlet:0.1``, ``classes:2``, ``sorted``, ..."""
    clients: Annotated[Annotated[int, Field(ge=1, le=100_000_000)] | None, DATA] = 10
    """Number of clients; None, the default of ``natural`` partitions, means one client per value of the column."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of each client's samples that is held out to evaluate on that client."""
    unseen: Annotated[Unseen, DATA] = 0.0
    """Clients that take no part in training and are evaluated after it: their share, drawn by the seed, or their names."""
    shift: Annotated[str | None, DATA] = None
    """Feature shift of the clients' inputs: ``rotate:ANGLE``, ``rotate:ANGLE,groups=G`` or ``noise:SIGMA``."""
    server_data: Annotated[Annotated[int, Field(ge=0)] | str | None, DATA] = None
    """Data at the server: a number of test samples (removed from evaluation) or another data source."""
    server_data_path: Annotated[str | None, DATA] = None
    """Folder with the files of that other data source."""
    text: TextSpec = TextSpec()
    """Columns and tokenizer of texts; a list of columns is accepted, too."""
    segmentation: SegmentationSpec = SegmentationSpec()
    """Classes of the pixels of masks."""
    harmonize: HarmonizeSpec = HarmonizeSpec()
    """Harmonization of sites; ``combat`` alone is accepted, too."""
    survival: SurvivalSpec = SurvivalSpec()
    """Options of ``task: survival``."""
    reserve_test_samples: Annotated[int, Field(ge=0)] = 0
    """Exclude at least this many test samples from evaluation, to compare runs with and without server data."""

    @pydantic.field_validator("unseen", mode="before")
    @classmethod
    def _unseen(cls, value: Any) -> Any:
        return parse_unseen(value)

    @pydantic.field_validator("split_by", "shift")
    @classmethod
    def _is_expression(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if value is not None:
            with as_value_error():
                (parse_split if info.field_name == "split_by" else parse_shift)(value)
        return value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _data_defaults(cls, values: Any) -> Any:
        """Expand short forms, and fill defaults that depend on other fields."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if str(values.get("partition", "")).startswith("natural"):
            values.setdefault("clients", None)
        if isinstance(values.get("server_data"), str) and values["server_data"].isdigit():
            values["server_data"] = int(values["server_data"])
        if isinstance(values.get("categories"), Mapping):
            values["category_values"] = values["categories"]
            values["categories"] = [*values["categories"]]
        if isinstance(values.get("text"), str | list | tuple):
            values["text"] = {"columns": values["text"]}
        harmonize = values.get("harmonize")
        if isinstance(harmonize, str):
            values["harmonize"] = {"method": harmonize}
        elif isinstance(harmonize, dict) and harmonize:
            values["harmonize"] = {"method": "combat", **harmonize}
        if isinstance(values.get("data"), str):
            values["data"] = as_text_source(values["data"], text_columns(values.get("text")))
        return values
