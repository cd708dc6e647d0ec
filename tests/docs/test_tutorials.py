"""The tutorials run as they are written: Python, and commands after a dollar sign, from top to bottom.

``test_notebooks.py`` runs those with a notebook in ``examples/``.
"""

import re
import shlex
import sys
import types

import pytest
from support.pages import DOCS, ROOT
from support.running import call

pytestmark = pytest.mark.usefixtures("undrawn")
PAGES = sorted((DOCS / "tutorials").glob("*.md"))
CHEAP = "own-method"
IN_JUPYTER = {path.stem for path in (ROOT / "examples").glob("*.ipynb")}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[] if page.stem == CHEAP else [pytest.mark.slow])
        for page in PAGES
        if page.stem not in IN_JUPYTER
    ],
)
def test_a_tutorial_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"tutorial_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(compile(block, str(page), "exec"), module.__dict__)
        elif language == "console":
            for line in block.splitlines():
                outcome = call(capsys, *shlex.split(line.removeprefix("$ "))[1:])
                assert outcome.code == 0, (line, outcome.err)


def test_tutorials_are_in_the_navigation():
    listed = re.findall(r"tutorials/([\w-]+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == [page.stem for page in PAGES]
