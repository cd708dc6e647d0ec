"""Grammar of expressions: ``name:value,key=value`` for partitions, delays, schedules, engines, generators and methods."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from unskew.errors import ConfigError, short_repr

MOST_SEEDS = 1000


@dataclass(frozen=True)
class Expression:
    """A name with values and options.

    Attributes:
        name: Text before the first colon or comma.
        values: Parts without an equals sign, in order.
        options: Values of the other parts, by key.
    """

    name: str
    values: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the expression as text."""
        parts = [*self.values, *(f"{key}={value}" for key, value in self.options.items())]
        return f"{self.name}:{','.join(parts)}" if parts else self.name

    def numbers(self) -> tuple[float, ...]:
        """Return the values as numbers, or an empty tuple if one of them is not a finite number."""
        try:
            numbers = tuple(float(value) for value in self.values)
        except ValueError:
            return ()
        return numbers if all(map(math.isfinite, numbers)) else ()

    def with_flags(self, flags: Collection[str]) -> dict[str, str]:
        """Return the options; a value that names a flag means ``flag=true``.

        Args:
            flags: Options that can be set to true without a value.

        Raises:
            ConfigError: If a value is not a flag, or an option is set twice.
        """
        options = dict(self.options)
        for value in self.values:
            if value not in flags:
                raise ConfigError(f"{value!r} in {str(self)!r} is not an option; write option=value.")
            if value in options:
                raise ConfigError(f"{str(self)!r} sets {value} twice.")
            options[value] = "true"
        return options


def split_list(text: str, separator: str = ",") -> list[str]:
    """Split a list; a part in double quotes, or whose value is in double quotes, may contain the separator.

    Args:
        text: The list.
        separator: Separator between its parts.

    >>> split_list('age, "weight, kg"'), split_list('0.1,by="site, name"')
    (['age', '"weight, kg"'], ['0.1', 'by="site, name"'])
    """
    part = re.compile(rf'(?:[^"{separator}]*[=:]\s*|\s*)"(?:[^"]|"")*"\s*(?={separator}|\Z)|[^{separator}]*')
    parts = []
    position = 0
    while position <= len(text):
        match = part.match(text, position)
        assert match is not None  # the pattern also matches the empty string
        parts.append(match[0].strip())
        position = match.end() + 1
    return parts


def unquote(text: str) -> str:
    """Return a name without blanks at its ends, and without the double quotes around it.

    >>> unquote(' age '), unquote('"weight, kg"')
    ('age', 'weight, kg')
    """
    quoted = re.fullmatch(r'\s*"((?:[^"]|"")*)"\s*', text)
    return (quoted[1].replace('""', '"') if quoted else text).strip()


def quote(name: str) -> str:
    """Return a name as part of an expression, in double quotes if it contains a separator.

    >>> quote("age"), quote("weight, kg")
    ('age', '"weight, kg"')
    """
    return '"' + name.replace('"', '""') + '"' if re.search('[",=:]', name) else name


def parse_names(value: object) -> tuple[str, ...]:
    """Return the names in a list or in a comma-separated string, without blanks at their ends.

    Args:
        value: List of names, or names separated by commas; a name with commas is in double quotes.

    Raises:
        ConfigError: If the value is neither a string nor a list of strings.

    >>> parse_names('age, "weight, kg"'), parse_names(["a,b"])
    (('age', 'weight, kg'), ('a,b',))
    """
    if isinstance(value, str):
        return tuple(unquote(part) for part in split_list(value) if part)
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"{short_repr(value)} is not a list of names. Write a string such as 'age,income', or a list of strings."
        )
    return tuple(name.strip() for name in value)


def parse_expression(text: str, opener: str = ":", separator: str = ",") -> Expression:
    """Parse an expression; double quotes around a value, such as the name of a column, may contain separators.

    Args:
        text: The expression.
        opener: Separator between the name and its values and options.
        separator: Separator between values and options; it also ends a name without values.

    Raises:
        ConfigError: If an option has no key, or a key occurs twice.

    >>> parse_expression("dirichlet:0.1, min=half")
    Expression(name='dirichlet', values=('0.1',), options={'min': 'half'})
    >>> parse_expression("iid,each=5").options, parse_expression("ddpm;steps=9;ema", ";", ";").values
    ({'each': '5'}, ('ema',))
    """
    end = min((text.index(sign) for sign in (opener, separator) if sign in text), default=len(text))
    values: list[str] = []
    options: dict[str, str] = {}
    for part in filter(None, split_list(text[end + 1 :], separator)):
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals or part.startswith('"'):
            values.append(unquote(part))
            continue
        if not key:
            raise ConfigError(f"{part!r} in {text!r} is not an option; write option=value.")
        if key in options:
            raise ConfigError(f"{text!r} sets {key} twice.")
        options[key] = unquote(value)
    return Expression(text[:end].strip(), tuple(values), options)


def parse_seed_list(text: str) -> list[int]:
    """Parse a list of seeds.

    Args:
        text: Seeds and ranges separated by commas.

    Raises:
        ConfigError: If the text is not a list of seeds, a seed occurs twice, or there are more than ``MOST_SEEDS``.

    >>> parse_seed_list("0..2,7")
    [0, 1, 2, 7]
    """
    wrong = ConfigError(f"seeds={text!r} is not a list of seeds; write 0,1,2 or 0..2: each once, at most {MOST_SEEDS}.")
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            low, high = int(first), int(last if dots else first)
        except ValueError:
            raise wrong from None
        if not 0 <= low <= high < 2**63 or high - low >= MOST_SEEDS:
            raise wrong
        seeds += range(low, high + 1)
    if len(set(seeds)) < len(seeds) or len(seeds) > MOST_SEEDS:
        raise wrong
    return seeds
