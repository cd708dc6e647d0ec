"""Columns that may name the clients of a table: hospitals, stores, countries, devices or persons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unskew.data.readers.column_roles import is_string, names_or_whole_numbers

KINDS = (
    "client site center centre hospital hosp clinic practice surgery institution institute inst facility organization "
    "organisation org company firm bank branch store shop outlet supermarket pharmacy restaurant hotel school university "
    "college campus plant factory mill farm warehouse building laboratory lab station airport agency trust studysite "
    "trialsite clinicalsite klinik klinikum krankenhaus standort zentrum praxis filiale werk schule hopital clinique "
    "ospedale clinica szpital sjukhus ziekenhuis tenant merchant vendor supplier dealer operator carrier airline",
    "abteilung land stadt pays ville ciudad "
    "country nation region state province county district municipality city town village borough community ward "
    "department dept division territory market location loc domain source network",
    "device machine sensor turbine vehicle truck bus robot phone node gateway house household home product",
    "user patient patienten proband probanden "
    "subject person participant member customer consumer writer author speaker drawer worker employee driver "
    "student player respondent doctor physician role subj usubj",
)
"""Words for organizations, places, devices and persons; the first kinds are preferred."""
PERSON = 3
AROUND = ("id", "num", "nbr", "no", "nr", "number", "name", "code", "key")
"""Words after such a word."""
BETWEEN = {"in", "to", "at", "of", "from", "per", "since", "by", "near", "web", "body", "tumor", "primary"}
"""Words in names of other columns that end with such a word."""
FEWEST = 10
"""Minimum mean number of rows per value."""
ENOUGH = 50
"""Mean number of rows per value from which a column is preferred as client column."""
MOST_CATEGORIES = 50
"""Maximum number of distinct values of a category."""
SHOWN = 5


class ClientColumns(NamedTuple):
    """Columns that may name clients.

    Attributes:
        chosen: Column that names the clients, or None.
        named: Kind of each other column whose name is that of an organization, a place, a device or a person.
        unused: Columns of ``named`` that are not inputs, with the reason; the others are categories.
        others: Columns that the user may choose instead, the most likely first.
    """

    chosen: str | None
    named: dict[str, int]
    unused: dict[str, str]
    others: list[str]


def kind_of_client(name: str, text: bool = True) -> int | None:
    """Return the index in ``KINDS`` of the word in a column name, in any case and with usual suffixes; or None.

    Args:
        name: Name of a column.
        text: Whether the values are strings; a number such as ``distance_to_hospital`` is a measurement.

    >>> [kind_of_client(name) for name in ("HOSPNUM", "siteId", "store_nbr", "COUNTRY", "treating hospital", "size")]
    [0, 0, 0, 1, 0, None]
    """
    words = words_of(name)
    stem = [*words]
    while len(stem) > 1 and stem[-1] in AROUND:
        stem.pop()
    text = text or len(stem) < len(words)
    while len(stem) > 1 and stem[0] in ("id", "code", "the"):
        stem.pop(0)
    joined = "".join(stem)
    glued = re.sub(rf"({'|'.join(AROUND)})$", "", joined)
    for kind, known in enumerate(KINDS):
        if {joined, glued} & {*known.split()}:
            return kind
    compound = text and len(stem) > 1 and not BETWEEN & {*stem} and stem[-1] in KINDS[0].split()
    return 0 if compound else None


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case.

    >>> words_of("siteId"), words_of("STORE_NBR"), words_of("Hospital.Name 2")
    (['site', 'id'], ['store', 'nbr'], ['hospital', 'name'])
    """
    return re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower())


def client_columns(
    table: Any, columns: Sequence[str], distinct: Mapping[str, int], clients: str | None
) -> ClientColumns:
    """Return the columns of a table that may name clients.

    The client column has whole numbers or strings, none missing, and at least ``FEWEST`` rows per value on average. Of
    several, those with at least ``ENOUGH`` rows per value come first, then the order of ``KINDS``, then fewer values.

    Args:
        table: Rows of the data, a pyarrow table.
        columns: Columns to consider, without the label.
        distinct: Number of distinct values of each column.
        clients: Column that the user chose, or None.
    """
    n = table.num_rows
    usable = [c for c in columns if distinct[c] > 1 and names_or_whole_numbers(table.column(c)) is not None]
    strings = dict.fromkeys(c for c in usable if is_string(table.column(c).type))
    kinds = {c: kind for c in usable if (kind := kind_of_client(c, c in strings)) is not None}
    frequent = dict.fromkeys(c for c in usable if distinct[c] * FEWEST <= n)

    def rank(c: str) -> tuple[bool, int, bool, int]:
        return n < ENOUGH * distinct[c], kinds[c], distinct[c] < 3, distinct[c]

    ranked = sorted((c for c in kinds if c in frequent), key=rank)
    chosen = clients or next((c for c in ranked if not table.column(c).null_count), None)
    scales = Counter(frozenset(table.column(c).unique().to_pylist()) for c in strings if c in frequent)
    numbered = [c for c in frequent if c not in strings and len(words_of(c)) > 1 and words_of(c)[-1] in AROUND]
    # Columns with common values are answers on a scale, such as yes, no and unknown.
    unlike = [c for c in strings if c in frequent and distinct[c] > 2]
    unlike = [c for c in unlike if scales[frozenset(table.column(c).unique().to_pylist())] == 1]
    more = [] if chosen else [*numbered, *sorted(unlike, key=lambda c: -distinct[c])]
    others = [c for c in dict.fromkeys([*ranked, *more]) if c != chosen][:SHOWN]
    named = {c: kind for c, kind in kinds.items() if c != chosen}
    equal = {c for c in named if chosen in kinds and not clients and rank(c)[:2] == rank(chosen)[:2]}
    unused = {}
    for c, kind in named.items():
        few = distinct[c] <= min(MOST_CATEGORIES, n // 4)
        if chosen is None or not few:
            unused[c] = "may name the clients"
        elif relation := dependency(table, c, chosen):
            unused[c] = relation
        elif kind == PERSON and distinct[c] > 2:
            unused[c] = "may name persons, which other data do not contain"
        elif c in equal:
            unused[c] = f"may name the clients as well as {chosen}"
    return ClientColumns(chosen, named, unused, others)


def dependency(table: Any, column: str, chosen: str) -> str | None:
    """Return why a column has no information besides the client column, or contains it; None if neither is the case.

    Args:
        table: Rows of the data, a pyarrow table.
        column: Column to compare.
        chosen: Column that names the clients.
    """
    pairs = {*zip(table.column(column).to_pylist(), table.column(chosen).to_pylist(), strict=True)}
    pairs = {pair for pair in pairs if None not in pair}
    values, clients = ({pair[k] for pair in pairs} for k in (0, 1))
    if len(pairs) == len(values):
        return f"each of its values belongs to one value of {chosen}"
    return f"the same value in all rows of each {chosen}" if len(pairs) == len(clients) else None
