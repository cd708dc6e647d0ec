"""A configuration under construction: values, comments, and observations on the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass
class InferredConfig:
    """Inferred configuration and the observations behind it.

    Attributes:
        values: Fields of the experiment with their values.
        why: Comment of each field; may be empty.
        seen: Lines that describe the data.
        commented: Values of fields that are written as a comment, with the reason, after the field with this name.
    """

    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    commented: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    def set(self, name: str, value: Any, why: str = "") -> None:
        """Add a field.

        Args:
            name: Name of the field.
            value: Value of the field.
            why: Comment that explains the value.
        """
        self.values[name] = value
        self.why[name] = why

    def text(self, command: str) -> str:
        """Return the content of the configuration file."""
        lines = [
            f"# Written by: {command}",
            "# Other fields have their defaults. unskew run writes all fields to config.yaml in the run folder;",
            "# the configuration reference explains them.",
            *(f"# {line}" for line in self.seen),
            "",
        ]
        for name, value in self.values.items():
            if name in ("model", "rounds", "target"):
                lines.append("")
            lines.append(_line(name, value, self.why[name]))
            fields, why = self.commented.get(name, ({}, ""))
            lines += [f"# {_line(other, alternative, why)}" for other, alternative in fields.items()]
        return "\n".join(lines) + "\n"


def _line(name: str, value: Any, why: str) -> str:
    flow = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    written = f"{name}: {flow.strip().removesuffix('...').strip()}"
    return f"{written}  # {why}" if why else written
