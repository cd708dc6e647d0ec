"""What the tests of README and docs read of a page."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def fences(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def section(text, title):
    """The part of a page under a heading."""
    return re.split(r"^## ", text.split(f"## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table(text):
    """The rows of the first table, each as its cells; the header is left out."""
    lines = []
    for line in text.splitlines():
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split("|")])
        elif lines:
            break
    return lines[2:]


def first_names(text):
    return [row[0].strip("`") for row in table(text)]


@cache
def generator():
    """Return the module ``docs/generate.py``, which fills in the parts of pages that follow from the code."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def built(page):
    """Return the text of a page of the documentation with its generated parts."""
    return generator().expand(page.read_text(), page.relative_to(DOCS).as_posix())


@cache
def package_modules():
    """Return the path and the syntax tree of every module of the package; tests share the trees and do not change them."""
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in sorted((ROOT / "unskew").rglob("*.py"))]
