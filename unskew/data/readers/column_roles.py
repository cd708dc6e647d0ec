"""Roles of table columns: inputs, labels, and the reasons why other columns are not used."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from unskew.data.readers.arrow import pa, pc, plain_numbers
from unskew.data.readers.cell_types import CODES, ColumnUses, why_text
from unskew.data.spec import Split
from unskew.errors import ConfigError, DataError, abbreviate, unknown_name
from unskew.expressions import parse_names, quote

if TYPE_CHECKING:
    from unskew.tasks.base import Task

INPUT, LABEL, DIVIDES = "input", "label", "decides the partition"
SPLITS = "decides the split"
FILE = "file"
"""Name of the column with the file of each row, if a table has several training files."""
CATEGORY, DATE = f"{INPUT}, a category", f"{INPUT}, days since 1970"
AUTO = ("auto",)
FEWEST = 20  # with fewer rows, all values of a measurement may be distinct by chance
SHOWN = 40


class ColumnSelection(NamedTuple):
    """User's selection of table columns.

    Attributes:
        features: Input columns, in this order; if empty, every numeric column is an input.
        exclude: Columns that are not inputs.
        divides: Column that decides the partition; it is an input only if ``features`` contains it.
        categories: Categorical columns; ``auto`` means every string column.
        dates: Date columns.
        missing: Treatment of missing numbers: ``error``, ``mean``, or ``indicator``, which also adds an input that
            marks them.
        task: Task of the configuration, or ``auto``.
        agreed: Whether the selection is shared with other sites. A selected column may then be empty and an excluded
            column absent in this table.
        split: Columns that decide which rows are held out; inputs only if ``features`` or ``dates`` contains them.
        sorts: Whether the values of the column ``divides`` are sorted, and are not names.
        harmonized: Whether columns are harmonized before they are standardized.
        options: Section of the configuration with the options of the task; None if it has none.
    """

    features: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    divides: str | None = None
    categories: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    missing: str = "error"
    task: str = "auto"
    agreed: bool = False
    split: tuple[str | None, ...] = ()
    sorts: bool = False
    harmonized: bool = False
    options: Any = None

    @property
    def objective(self) -> Task | None:
        """Task of the configuration with its options; None for ``auto``."""
        if self.task == "auto":
            return None
        from unskew.tasks.registry import TASKS

        task = TASKS[self.task]
        return task if self.options is None else task.configured(self.options)

    @property
    def numeric(self) -> bool:
        """True if the label columns are numbers to predict."""
        return self.objective is not None and self.objective.numeric_labels

    @property
    def masks(self) -> bool:
        """True if the label column has masks of images."""
        if self.task == "auto":
            return False
        from unskew.tasks.registry import TASKS

        return TASKS[self.task].pixels

    @property
    def mixed(self) -> bool:
        """True if each column has a separate encoder that is fitted with global statistics."""
        return bool(self.categories or self.dates) or self.missing != "error" or self.numeric

    def labels(self, label: str, columns: Collection[str]) -> tuple[str, ...]:
        """Return the label columns; more than one is possible only for regression.

        Args:
            label: Name of the label column.
            columns: Columns of the table.
        """
        several = self.numeric and label not in columns
        return parse_names(label) if several else (label,)

    def uses(self, label: str | None, one_class: bool) -> ColumnUses:
        """Return the uses of columns that decide how a CSV file is read.

        Args:
            label: Name of the label column or columns.
            one_class: Whether each row has one class, unless the label is a number to predict.
        """
        names = {*self.categories, *self.dates, self.divides, *self.split}
        numbers = [column for column in self.features if column not in names]
        columns = () if label is None else parse_names(label)
        coded = () if self.objective is None else self.objective.coded_labels
        labels = () if label is None else (label, *(c for i, c in enumerate(columns) if i not in coded))
        distinct = {*self.categories, *self.split[:1], None if self.sorts else self.divides} - {None, *self.dates}
        known = tuple(str(name) for name in distinct)
        time = Split(*self.split).time
        dates = self.dates if time is None or time in known else (*self.dates, time)
        if self.numeric:
            return ColumnUses(numbers=(*numbers, *labels), names=known, dates=dates)
        return ColumnUses(tuple(numbers), labels[:1] if one_class else (), known, dates)


def select_inputs(
    table: Any, label: tuple[str, ...], choice: ColumnSelection, name: str
) -> tuple[list[str], dict[str, str]]:
    """Return the input columns, in order, and the role of every column of the table.

    Args:
        table: Training rows, a pyarrow table.
        label: Names of the label columns.
        choice: Column selection of the user.
        name: Name of the data, for errors.

    Raises:
        ConfigError: If a column is both selected and excluded, or selected twice.
        DataError: If a column does not exist, a selected column is not numeric, a column looks like an identifier, or
            no input column remains.
    """
    check_named(table, label, choice, name)
    roles = {field.name: column_role(table.column(field.name), field.name, label, choice) for field in table.schema}
    for column in choice.features:
        kind = table.column(column).type
        is_input = roles[column].removesuffix(f", and {DIVIDES}") == INPUT
        if is_input and not is_numeric(kind) and not (choice.agreed and is_empty(kind)):
            reason = exclusion_reason(table.column(column)).removeprefix("left out: ")
            raise DataError(f"{name}: the column {column!r} in features is not numeric ({reason}). Remove it.")
    strict = choice.missing == "error"
    gaps = [c for c, role in roles.items() if strict and role == INPUT and table.column(c).null_count]
    problems = [] if not (choice.mixed or gaps) else undeclared_dates(table, roles)
    numbered = [c for c, role in roles.items() if role == INPUT and is_identifier(table.column(c), c)]
    if suspects := [column for column in numbered if column and column not in choice.features]:
        listed = ",".join(map(quote, suspects))
        problems.append(
            f"the column {' and the column '.join(map(repr, suspects))} looks like an identifier: whole numbers that "
            f"are distinct in nearly all of the {table.num_rows} rows. Exclude it (--exclude {listed}), or "
            "if it is a measurement, list it and the other inputs in features (--features)."
        )
    if gaps and (problems or len(gaps) > 1):
        problems.append(
            f"values are missing in {', '.join(f'{c} ({table.column(c).null_count})' for c in gaps)}. Fill them, "
            "exclude the columns (--exclude), or set missing to mean or indicator (--missing)."
        )
    if problems:
        further = "".join(f" {problem[0].upper()}{problem[1:]}" for problem in problems[1:])
        more = " unskew init proposes a complete configuration." if further else ""
        raise DataError(f"{name}: {problems[0]}{further}{more}")
    if "" in numbered and "" not in choice.features:  # a column without a name cannot be excluded by the user
        roles[""] = "left out: numbers of rows"
    inputs = list(choice.features) or [column for column, role in roles.items() if role in (INPUT, CATEGORY, DATE)]
    if not inputs:
        listed = ", ".join(f"{column} ({role})" for column, role in describe_roles(roles))
        raise DataError(
            f"{name} has no numeric input columns besides the label {', '.join(map(repr, label))}: {listed}. "
            "For images, set image (--image) to their column; for texts, set text.columns (--text)."
        )
    return inputs, roles


def roles_next_to_images(
    table: Any, label: tuple[str, ...], image: str, choice: ColumnSelection, name: str
) -> dict[str, str]:
    """Return the role of every column of a table whose inputs are images.

    Args:
        table: Rows of the data.
        label: Names of the label columns.
        image: Name of the image column.
        choice: Column selection of the user.
        name: Name of the data, for errors.

    Raises:
        ConfigError: If the selection has options for numeric inputs, such as features.
    """
    if choice.features or choice.exclude or choice.categories or choice.dates or choice.missing != "error":
        raise ConfigError(
            f"The inputs of {name} are the images in its column {image!r}, so features, exclude, categories, dates and "
            "missing are not supported."
        )
    known: dict[str | None, str] = {choice.divides: DIVIDES, **dict.fromkeys(choice.split, SPLITS)}
    known |= {**dict.fromkeys(label, LABEL), image: INPUT}
    return {column: known.get(column, "left out: the inputs are images") for column in table.column_names}


def check_named(table: Any, label: tuple[str, ...], choice: ColumnSelection, name: str) -> None:
    """Validate that the selected columns exist and do not contradict each other or the label.

    Args:
        table: Rows of the data.
        label: Names of the label columns.
        choice: Column selection of the user.
        name: Name of the data, for errors.

    Raises:
        ConfigError: If a column is selected twice, both selected and excluded, or is a label.
        DataError: If a column does not exist.
    """
    existing = set(table.column_names)
    for field in ("features", "exclude", "categories", "dates"):
        for column in () if field == "exclude" and choice.agreed else getattr(choice, field):
            if column not in existing and not (field == "categories" and choice.categories == AUTO):
                raise DataError(f"{name}, {field}: {unknown_name('column', column, table.column_names)}")
    if len(set(choice.features)) < len(choice.features):
        twice = next(column for column in choice.features if choice.features.count(column) > 1)
        raise ConfigError(f"features contains the column {twice!r} twice.")
    both = [column for column in choice.features if column in choice.exclude]
    if both:
        raise ConfigError(f"The column {both[0]!r} is both in features and in exclude. Remove it from one of them.")
    for column in (column for column in label if column in choice.features):
        raise ConfigError(f"The column {column!r} is the label, which is predicted. Remove it from features.")


def column_role(column: Any, name: str, label: tuple[str, ...], choice: ColumnSelection) -> str:
    """Return the role of one column.

    Args:
        column: Values of the column.
        name: Name of the column.
        label: Names of the label columns.
        choice: Column selection of the user.
    """
    if name in label:
        return LABEL
    if name in choice.features:
        kind = declared_kind(column, name, choice) or INPUT
        kind = CATEGORY if kind.startswith("left out") else kind
        return f"{kind}, and {DIVIDES}" if name == choice.divides else kind
    if name == choice.divides:
        return DIVIDES
    if name in choice.split and name not in choice.dates:
        return SPLITS
    if name in choice.exclude:
        return "left out: excluded"
    if choice.features:
        return "left out: not among the features"
    if name.startswith("__index_level_"):
        return "left out: numbers of rows"
    if name == FILE and name not in (*choice.categories, *choice.dates):
        return "left out: names of files"
    return declared_kind(column, name, choice) or (INPUT if is_numeric(column.type) else exclusion_reason(column))


def declared_kind(column: Any, name: str, choice: ColumnSelection) -> str | None:
    """Return the role of a column declared as categorical or as a date; None if it is not declared.

    Args:
        column: Values of the column.
        name: Name of the column.
        choice: Column selection of the user.

    Raises:
        DataError: If the values contradict the declaration.
    """
    if name in choice.dates:
        if not is_date(column.type) and not (choice.agreed and is_empty(column.type)):
            present = column.drop_null()
            values = f"{present[0].as_py()!r}, which is not a date" if len(present) else str(column.type)
            reason = f" ({why})" if is_string(column.type) and (why := why_text(column)) else ""
            raise DataError(
                f"The column {name!r} in dates contains {values}{reason}. Write dates as 2024-01-31, or set csv.dates to "
                "their format, such as %d.%m.%Y."
            )
        return DATE
    if name in choice.categories and choice.categories != AUTO:
        if not is_category(column) and not (choice.agreed and is_empty(column.type)):
            raise DataError(
                f"The column {name!r} in categories contains {column.type}. Categories must be strings, whole numbers or "
                "booleans."
            )
        return CATEGORY
    if choice.categories != AUTO or not is_string(column.type) or not is_category_text(column):
        return None
    differ = len(column.drop_null().unique())
    mostly_different = len(column) >= FEWEST and differ > len(column) / 2
    return f"left out: text, {differ} values in {len(column)} rows" if mostly_different else CATEGORY


def undeclared_dates(table: Any, roles: Mapping[str, str]) -> list[str]:
    """Return a message for each date column that is neither declared nor excluded.

    Args:
        table: Rows of the data.
        roles: Role of each column.
    """
    return [
        f"the column {column!r} contains dates. List it in dates (--dates) to use the days since 1970 as an input, or "
        "exclude it (--exclude)."
        for column, role in roles.items()
        if is_date(table.column(column).type) and role == exclusion_reason(table.column(column))
    ]


def exclusion_reason(column: Any) -> str:
    """Return the reason why a column that is not numeric is not an input."""
    if pa.types.is_null(column.type):
        return "left out: empty"
    if not is_string(column.type):
        return f"left out: {column.type}"
    return f"left out: {why_text(column) or 'text'}"


def is_empty(kind: Any) -> bool:
    """Return whether a pyarrow type is the null type of a column without values."""
    return bool(pa.types.is_null(kind))


def is_numeric(kind: Any) -> bool:
    """Return whether a pyarrow type is numeric or boolean."""
    t = pa.types
    return bool(t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind))


def is_date(kind: Any) -> bool:
    """Return whether a pyarrow type is a date, with or without time."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_category(column: Any) -> bool:
    """Return whether the values of a column can be categories: strings, whole numbers or truth values."""
    column = plain_numbers(column)
    if pa.types.is_floating(column.type):
        return pc.all(pc.equal(column, pc.round(column))).as_py() is not False
    return is_string(column.type) or is_numeric(column.type)


def is_category_text(column: Any) -> bool:
    """Return whether a column of strings contains names or codes, and not numbers or dates in an unusual notation."""
    return why_text(column) in (None, CODES)


def is_string(kind: Any) -> bool:
    """Return whether a pyarrow type is a string type."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_identifier(column: Any, name: str) -> bool:
    """Return whether a column looks like an identifier: strings or whole numbers that are (nearly) all distinct.

    Of numbers, at most a tenth may repeat, and fewer than if they were drawn from their range. If the name looks like that
    of an identifier, half as many distinct values suffice. Numbers with fractions are measurements.

    Args:
        column: Values of the column; missing ones do not count.
        name: Name of the column.
    """
    known = names_or_whole_numbers(column)
    n = 0 if known is None else len(known)
    if known is None or n < FEWEST:
        return False
    repeated = n - len(known.unique())
    if re.search(r"(^|[_\W])(id|uuid)$", name, re.I) or re.search(r"[a-z]I[dD]$", name):
        return 2 * repeated <= n
    if is_string(known.type) or repeated == 0 or 10 * repeated > n:
        return 10 * repeated <= n
    ends = pc.min_max(known).as_py()
    size = 1.0 + float(ends["max"]) - float(ends["min"])
    return repeated < (n + size * math.expm1(-n / size)) / 2  # n - size (1 - exp(-n / size)) repetitions by chance


def names_or_whole_numbers(column: Any) -> Any:
    """Return the values of a column without missing ones if they are strings or whole numbers; otherwise None."""
    kind = column.type
    if is_string(kind) or pa.types.is_integer(kind):
        return column.drop_null()
    if not pa.types.is_floating(kind) and not pa.types.is_decimal(kind):
        return None
    known = column.cast(pa.float64(), safe=False).drop_null()
    known = known.filter(pc.invert(pc.is_nan(known)))
    integral = pc.and_(pc.is_finite(known), pc.equal(known, pc.floor(known)))
    return known if pc.all(integral).as_py() else None


def describe_roles(columns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each column and its role; for wide tables, one entry per role with the first columns that have it.

    >>> describe_roles({"age": "input", "name": "left out: text"})
    [('age', 'input'), ('name', 'left out: text')]
    """
    named = {name or "(no name)": role for name, role in columns.items()}
    if len(named) <= SHOWN:
        return list(named.items())
    alike: dict[str, list[str]] = {}
    for name, role in named.items():
        alike.setdefault(role, []).append(name)
    return [(abbreviate(names), role) for role, names in alike.items()]
