"""The tutorials run as they are written: Python, and commands after a dollar sign, from top to bottom."""

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


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[] if p.stem == CHEAP else [pytest.mark.slow]) for p in PAGES]
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
