"""The tutorials as notebooks: they have all code of the pages, in order, and those in ``examples/`` run in Jupyter."""

import importlib.util
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.html_cells import Cells
from support.pages import DOCS, ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
EXAMPLES = ROOT / "examples"
STORED = ("hospital", "quickstart")
PAGES = sorted((DOCS / "tutorials").glob("*.md"))


@pytest.fixture(scope="module")
def module():
    """The hook of mkdocs."""
    spec = importlib.util.spec_from_file_location("make_notebooks", DOCS / "make_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cells(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_the_text_and_the_code_of_its_page(page, module):
    notebook = json.loads(module.notebooks()[f"{page.stem}.ipynb"])
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    lines = page.read_text().splitlines()
    fences = [number for number, line in enumerate(lines) if line in ("```python", "```console")]
    blocks = [lines[first + 1 : lines.index("```", first)] for first in fences]
    codes = code_cells(notebook)
    if page.stem in STORED:
        assert "%pip install" in codes.pop(0)
    shown = [[re.sub(r"^!", "$ ", line) for line in code.splitlines()] for code in codes]
    assert shown == blocks
    prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert [line for line in prose.splitlines() if line.startswith("#")] == [
        line for line in lines if line.startswith(("# ", "## "))
    ]
    assert "](" not in re.sub(r"\]\(https?:", "", prose)


def test_the_notebooks_in_examples_are_those_of_their_tutorials(module):
    """Stored without outputs: ``python docs/make_notebooks.py`` writes them again."""
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == sorted(STORED)
    for name in STORED:
        assert (EXAMPLES / f"{name}.ipynb").read_text() == module.notebooks()[f"{name}.ipynb"]


def test_colab_opens_the_notebooks_of_this_repository(module):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Homepage"].removeprefix("https://github.com/")
    folder = f"https://colab.research.google.com/github/{repository}/blob/main/examples"
    assert f"]({folder}/quickstart.ipynb)" in (ROOT / "README.md").read_text()
    for name in STORED:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=f"tutorials/{name}.md"))
        assert f"]({folder}/{name}.ipynb)" in module.on_page_markdown("# Title\n", page, None, None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tables", "figures"), [("quickstart", 6, 3), ("hospital", 4, 1)])
def test_jupyter_runs_a_notebook_and_displays_its_results(name, tables, figures, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat")
    for variable, first in {"PYTHONPATH": ROOT, "PATH": Path(sys.executable).parent}.items():
        monkeypatch.setenv(variable, os.pathsep.join(filter(None, [str(first), os.environ.get(variable)])))
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    nbformat.validate(notebook)
    work = tmp_path / "work"
    work.mkdir()
    client = nbclient.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": work}}
    )
    client.execute()  # raises the error of a cell
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    pages = [Cells(data["text/html"]) for data in shown if "text/html" in data]
    assert len(pages) == tables
    assert all(len(page.rows) > 1 for page in pages)
    assert sum("image/png" in data for data in shown) == figures
