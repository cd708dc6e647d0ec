"""Roles of table columns: which are inputs, and what happens to the others."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from unskew.errors import ConfigError, DataError, unknown_name

INPUT, LABEL, DIVIDES = "input", "label", "decides the partition"
SPLITS = "decides the split"
CATEGORY, DATE = f"{INPUT}, a category", f"{INPUT}, days since 1970"
AUTO = ("auto",)
FEWEST = 20  # in fewer rows all values of a measurement may well differ
COMMA_NUMBER = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*$"
SHOWN = 40


class ColumnSelection(NamedTuple):
    """User's selection of table columns.

    Attributes:
        features: Only these are inputs, in this order; if empty, every numeric column.
        exclude: These are no inputs.
        divides: Decides the partition; it is an input only where ``features`` names it.
        categories: These hold categories; ``auto`` stands for every column of text.
        dates: These hold dates.
        missing: What is done to missing numbers: ``error``, ``mean``, or ``indicator``, which also says where they were.
        regression: Whether the label is a number.
        agreed: Whether columns are those that others have, too: then one may be empty here, and one that is excluded absent.
        split: Columns that decide which rows are held out; inputs only where ``features`` or ``dates`` names them.
    """

    features: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    divides: str | None = None
    categories: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    missing: str = "error"
    regression: bool = False
    agreed: bool = False
    split: tuple[str | None, ...] = ()

    @property
    def mixed(self) -> bool:
        """Return whether columns are encoded one by one with global statistics."""
        return bool(self.categories or self.dates) or self.missing != "error" or self.regression

    def labels(self, label: str, columns: Collection[str]) -> tuple[str, ...]:
        """The columns that are predicted: several only where they are numbers.

        Args:
            label: Name of the label column.
            columns: Columns of the table.
        """
        several = self.regression and label not in columns
        return tuple(part.strip() for part in label.split(",")) if several else (label,)


def select_inputs(
    table: Any, label: tuple[str, ...], choice: ColumnSelection, name: str
) -> tuple[list[str], dict[str, str]]:
    """The columns that are inputs, in order, and what is done to every column of the table.

    Args:
        table: The training rows, a pyarrow table.
        label: Names of the columns that are predicted.
        choice: What the user says.
        name: What the table is called, for errors.

    Raises:
        ConfigError: A column is both chosen and excluded, or chosen twice.
        DataError: There is no such column, a chosen one holds no numbers, one looks like an identifier, or no input is left.
    """
    check_named(table, label, choice, name)
    done = {field.name: column_role(table.column(field.name), field.name, label, choice) for field in table.schema}
    for column in choice.features:
        empty = choice.agreed and is_empty(table.column(column).type)
        if (
            done[column].removesuffix(f", and {DIVIDES}") == INPUT
            and not empty
            and not is_numeric(table.column(column).type)
        ):
            reason = exclusion_reason(table.column(column)).removeprefix("left out: ")
            raise DataError(f"{name}: the column {column!r} of features holds no numbers ({reason}); take it out.")
    gaps = [c for c, what in done.items() if what == INPUT and table.column(c).null_count] * (choice.missing == "error")
    problems = [] if not (choice.mixed or gaps) else undeclared_dates(table, done)
    numbered = [c for c, what in done.items() if what == INPUT and is_identifier(table.column(c), c)]
    suspects = [column for column in numbered if column and column not in choice.features]
    if suspects:
        problems.append(
            f"the column {' and the column '.join(map(repr, suspects))} looks like an identifier: integers, "
            f"another one in nearly every of the {table.num_rows} rows. Leave it out with exclude "
            f"(--exclude {','.join(suspects)}); "
            "if it is a measurement, name it and the other inputs in features (--features)."
        )
    if gaps and (problems or len(gaps) > 1):
        problems.append(
            f"values are missing in {', '.join(f'{c} ({table.column(c).null_count})' for c in gaps)}: fill them, leave the "
            "columns out with exclude, or set missing to mean or indicator (--missing)."
        )
    if problems:
        more = " unskew init proposes a whole configuration." if len(problems) > 1 else ""
        raise DataError(
            f"{name}: {' '.join(p[0].upper() * (k > 0) + p[k > 0 :] for k, p in enumerate(problems))}{more}"
        )
    if "" in numbered and "" not in choice.features:  # it has no name that could be excluded
        done[""] = "left out: numbers of rows"
    inputs = list(choice.features) or [column for column, what in done.items() if what in (INPUT, CATEGORY, DATE)]
    if not inputs:
        listed = ", ".join(f"{column} ({what})" for column, what in describe_roles(done))
        raise DataError(
            f"{name} has no numeric columns besides the label {', '.join(map(repr, label))} that could be inputs: {listed}. "
            "For images, name their column with image (--image), for texts with text.columns (--text)."
        )
    return inputs, done


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
        ConfigError: Features are chosen or excluded.
    """
    if choice.features or choice.exclude or choice.categories or choice.dates or choice.missing != "error":
        raise ConfigError(
            f"The inputs of {name} are the images of its column {image!r}; it takes no features, exclude, categories, dates "
            "or missing."
        )
    known: dict[str | None, str] = {
        choice.divides: DIVIDES,
        **dict.fromkeys(choice.split, SPLITS),
        **dict.fromkeys(label, LABEL),
        image: INPUT,
    }
    return {column: known.get(column, "left out: the inputs are images") for column in table.column_names}


def check_named(table: Any, label: tuple[str, ...], choice: ColumnSelection, name: str) -> None:
    """Refuse names in ``features`` and ``exclude`` that are no columns, or contradict each other or the label.

    Args:
        table: Rows of the data.
        label: Names of the label columns.
        choice: Column selection of the user.
        name: Name of the data, for errors.
    """
    there = set(table.column_names)
    for field in ("features", *(() if choice.agreed else ("exclude",)), "categories", "dates"):
        for column in getattr(choice, field):
            if column not in there and not (field == "categories" and choice.categories == AUTO):
                raise DataError(f"{name}, {field}: {unknown_name('column', column, table.column_names)}")
    if len(set(choice.features)) < len(choice.features):
        twice = next(column for column in choice.features if choice.features.count(column) > 1)
        raise ConfigError(f"features names the column {twice!r} twice.")
    both = [column for column in choice.features if column in choice.exclude]
    if both:
        raise ConfigError(f"The column {both[0]!r} is both in features and in exclude; name it in one of them.")
    for column in (column for column in label if column in choice.features):
        raise ConfigError(f"The column {column!r} is the label, which is predicted; take it out of features.")


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
    return declared_kind(column, name, choice) or (INPUT if is_numeric(column.type) else exclusion_reason(column))


def declared_kind(column: Any, name: str, choice: ColumnSelection) -> str | None:
    """Return whether a column was declared categorical or a date, or None.

    Args:
        column: Values of the column.
        name: Name of the column.
        choice: Column selection of the user.

    Raises:
        DataError: The values contradict the declaration.
    """
    if name in choice.dates:
        if not is_date(column.type) and not (choice.agreed and is_empty(column.type)):
            raise DataError(f"The column {name!r} of dates holds {column.type}; write dates as 2024-01-31.")
        return DATE
    if name in choice.categories and choice.categories != AUTO:
        if not is_category(column.type) and not (choice.agreed and is_empty(column.type)):
            raise DataError(
                f"The column {name!r} of categories holds {column.type}; categories are text, integers, true or false."
            )
        return CATEGORY
    if choice.categories != AUTO or not is_string(column.type) or has_decimal_commas(column):
        return None
    differ = len(column.drop_null().unique())
    many = len(column) >= FEWEST and differ > len(column) / 2
    return f"left out: text, {differ} values in {len(column)} rows" if many else CATEGORY


def undeclared_dates(table: Any, done: Mapping[str, str]) -> list[str]:
    """Return a sentence for each column of dates of which nothing is said.

    Args:
        table: Rows of the data.
        done: Role of each column.
    """
    return [
        f"the column {column!r} holds dates. Name it in dates (--dates), and the days since 1970 are an input, or leave it "
        "out with exclude (--exclude)."
        for column, what in done.items()
        if what.startswith("left out")
        and is_date(table.column(column).type)
        and what == exclusion_reason(table.column(column))
    ]


def exclusion_reason(column: Any) -> str:
    """Why a column that holds no numbers is not an input, and what would help."""
    import pyarrow as pa

    if pa.types.is_null(column.type):
        return "left out: empty"
    if not is_string(column.type):
        return f"left out: {column.type}"
    return "left out: decimal commas, see csv.decimal" if has_decimal_commas(column) else "left out: text"


def is_empty(kind: Any) -> bool:
    """Return whether a pyarrow type is that of a column without values."""
    import pyarrow as pa

    return bool(pa.types.is_null(kind))


def is_numeric(kind: Any) -> bool:
    """Return whether a pyarrow type is numeric or boolean."""
    import pyarrow as pa

    t = pa.types
    return bool(t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind))


def is_date(kind: Any) -> bool:
    """Return whether a pyarrow type is a date, with or without time."""
    import pyarrow as pa

    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_category(kind: Any) -> bool:
    """Return whether values of a pyarrow type can be categories."""
    import pyarrow as pa

    return is_string(kind) or bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def is_string(kind: Any) -> bool:
    """Return whether a pyarrow type is text, or categories of text."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_identifier(column: Any, name: str) -> bool:
    """Return whether a column has unique integers in enough rows to be an identifier.

    Half as many rows suffice if it is named like one.

    Args:
        column: Values of the column.
        name: Name of the column.
    """
    import pyarrow as pa

    if not pa.types.is_integer(column.type) or column.null_count or len(column) < FEWEST:
        return False
    called = re.search(r"(^|[_\W])(id|uuid)$", name, re.I) or re.search(r"[a-z]I[dD]$", name)
    return len(column.unique()) >= (len(column) / 2 if called else len(column))


def has_decimal_commas(column: Any) -> bool:
    """Return whether a text column has numbers with decimal commas such as 1,5."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = column.cast(pa.string()).drop_null()
    if not pc.any(pc.match_substring(texts, ",")).as_py():
        return False
    return bool(pc.all(pc.match_substring_regex(texts, COMMA_NUMBER)).as_py())


def describe_roles(columns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each column and what is done to it; of a wide table, a line for all columns to which the same is done.

    >>> describe_roles({"age": "input", "name": "left out: text"})
    [('age', 'input'), ('name', 'left out: text')]
    """
    named = {name or "(no name)": what for name, what in columns.items()}
    if len(named) <= SHOWN:
        return list(named.items())
    alike: dict[str, list[str]] = {}
    for name, what in named.items():
        alike.setdefault(what, []).append(name)
    return [(abbreviate(names), what) for what, names in alike.items()]


def abbreviate(names: list[str], most: int = 5) -> str:
    """The first few names, and how many more there are.

    Args:
        names: Names to list.
        most: Largest number of names.

    >>> abbreviate(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
