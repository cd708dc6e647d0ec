"""The tutorials as notebooks: they have all code of the pages, in order, and it runs."""

import importlib.util
import json
import re
import shlex
import sys
import types

import pytest
from support.pages import DOCS
from support.running import call

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytestmark = pytest.mark.usefixtures("undrawn")
PAGES = sorted((DOCS / "tutorials").glob("*.md"))


@pytest.fixture(scope="module")
def notebooks():
    """The cells of each notebook, by name of the page."""
    spec = importlib.util.spec_from_file_location("make_notebooks", DOCS / "make_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name.removesuffix(".ipynb"): json.loads(text) for name, text in module.notebooks().items()}


def code_cells(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_the_text_and_the_code_of_its_page(page, notebooks):
    notebook = notebooks[page.stem]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    lines = page.read_text().splitlines()
    fences = [number for number, line in enumerate(lines) if line in ("```python", "```console")]
    blocks = [lines[first + 1 : lines.index("```", first)] for first in fences]
    shown = [[re.sub(r"^!", "$ ", line) for line in code.splitlines()] for code in code_cells(notebook)]
    assert shown == blocks
    prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert [line for line in prose.splitlines() if line.startswith("#")] == [
        line for line in lines if line.startswith(("# ", "## "))
    ]
    assert "](" not in re.sub(r"\]\(https?:", "", prose)


@pytest.mark.slow
def test_the_cells_of_a_notebook_run_in_order(notebooks, tmp_path, monkeypatch, capsys):
    """Jupyter runs lines after an exclamation mark in a shell; here, they run in this process."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("notebook_own_csv")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in code_cells(notebooks["own-csv"]):
        if code.startswith("!"):
            for line in code.splitlines():
                outcome = call(capsys, *shlex.split(line.removeprefix("!"))[1:])
                assert outcome.code == 0, (line, outcome.err)
        else:
            exec(compile(code, "own-csv.ipynb", "exec"), module.__dict__)
    assert (tmp_path / "predictions.csv").is_file()
