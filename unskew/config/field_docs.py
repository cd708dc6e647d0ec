"""Defaults and descriptions of fields, read from the source, because importing the models takes the time of PyTorch."""

from __future__ import annotations

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path


@cache
def field_docs(file: Path) -> dict[str, dict[str, tuple[object, str]]]:
    """Return default and docstring of the fields of the classes in a file, by class and field.

    A default that is no literal is None. The text is Markdown in one line, without the last period.

    Args:
        file: A Python file.
    """
    found: dict[str, dict[str, tuple[object, str]]] = {}
    for cls in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for field, text in pairwise(cls.body if isinstance(cls, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                default = field.value.value if isinstance(field.value, ast.Constant) else None
                words = " ".join(str(text.value.value).split()).replace("``", "`").removesuffix(".")
                found.setdefault(cls.name, {})[ast.unparse(field.target)] = default, words
    return found


@cache
def flag_docs() -> dict[str, tuple[object, str]]:
    """Return default and description of each field of the configuration by its name, without its section."""
    folder = Path(__file__).parent
    sections = field_docs(folder / "sections.py").values()
    found = {name: documented for fields in sections for name, documented in fields.items()}
    return found | field_docs(folder / "experiment.py")["Experiment"]
