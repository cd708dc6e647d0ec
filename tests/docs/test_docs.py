"""What README and docs say is true: their code runs, and their tables list what is there."""

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from support.pages import DOCS, ROOT, built, fences, first_names, generator, section, table

import unskew
from unskew.cli.app import commands
from unskew.config.experiment import Experiment
from unskew.models.registry import MODELS

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(p for f in ("", "methods/", "reference/") for p in sorted(DOCS.glob(f"{f}*.md"))),
]
COMMAND_LINE = built(DOCS / "command-line.md")
CONFIGURATION = built(DOCS / "configuration.md")
RUN_FOLDER = (DOCS / "run-folder.md").read_text()
COMMANDS = commands().commands


LONGER = ("index", "report", "gallery")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in LONGER else [])
        for page in PAGES
        if fences(page, "python")
    ],
)
def test_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "unskew.engines.auto_select.num_cores", lambda: 1
    )  # no processes, which take longer than the runs
    module = types.ModuleType(f"page_{page.stem}")  # a module that is known, where dataclasses look up their types
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in fences(page, "python"):
        exec(compile(code, str(page), "exec"), module.__dict__)


def test_the_first_code_of_writing_a_method_is_the_example():
    """The page shows it itself, so that it can be read in a checkout, too."""
    example = (ROOT / "examples" / "own_method.py").read_text()
    assert fences(DOCS / "methods" / "writing-a-method.md", "python")[0] == example.split('"""\n\n', 1)[1]


def shared_options(name):
    """The options in the shared tables whose preceding line names the command."""
    parts = re.split(r"^(For .*:)$", section(COMMAND_LINE, "Shared options"), flags=re.MULTILINE)[1:]
    groups = zip(parts[::2], parts[1::2], strict=True)
    return [option for commands, text in groups if f"`{name}`" in commands for option in option_names(text)]


def option_names(text):
    """The names in the first column of the first table of options."""
    _, header, rest = text.partition("| option | default | meaning |")
    return re.findall(r"`(--[\w-]+)`", " ".join(row[0] for row in table(header + rest)))


def all_first_names(text):
    """The names in the first column of the first table; a cell may have several."""
    return {name for row in table(text) for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "deploy"])
def test_every_option_of_a_command_is_described_and_no_other(name):
    text = section(COMMAND_LINE, f"unskew {name}")
    known = {o for p in COMMANDS[name].params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
    assert sorted([*option_names(text), *shared_options(name)]) == sorted(known - {"--help"})
    assert bool(shared_options(name)) == ("[shared options](#shared-options)" in text)


def test_every_generated_part_is_on_a_page_and_can_be_generated():
    pages = sorted(DOCS.rglob("*.md"))
    named = {name for page in pages for name in re.findall(r"<!-- generated: (\w+)", page.read_text())}
    assert named == set(generator().GENERATORS)
    assert [page for page in pages if "<!-- generated" in built(page)] == []  # a part without its end


def test_every_field_of_the_configuration_is_described():
    described = {row[0].strip("`"): row[2] for row in table(CONFIGURATION.split("`seed: 010` is 10.")[1])}
    assert {name.partition(".")[0] for name in described} == set(Experiment.model_fields)
    assert all(len(text) > 10 for text in described.values())


def test_files_and_figures_of_a_run_are_described(tmp_path):
    folder = tmp_path / "run"
    options = {"model": "logistic", "rounds": 2, "local_steps": 1, "clients": 4, "target": 0.5, "engine": "inline"}
    result = unskew.run(**options, early_stopping=2, keep="best", out=folder)
    result.plot(folder / "convergence.png")
    always, _, with_early_stopping = section(RUN_FOLDER, "summary.json").partition("With `early_stopping`")
    assert all_first_names(always) | all_first_names(with_early_stopping) == set(result.summary)
    assert all_first_names(section(RUN_FOLDER, "metrics.jsonl")) == set(result.history[-1])
    described = {name.rstrip("/") for name in first_names(RUN_FOLDER.split("\n## ")[0])}
    assert {path.name for path in folder.iterdir()} <= described
    assert described - {path.name for path in folder.iterdir()} <= {
        "cache",
        "clients",
        "coefficients.json",
        "coefficients.png",
        "curves.json",
        "personal",
        "evaluation.json",
        "privacy.key",
        "report.html",
        "samples",
        "vectorized.json",
        "synthetic",
        "warnings.txt",
    }


def test_the_table_of_pretrained_models_is_complete():
    pretrained = first_names(section((DOCS / "models.md").read_text(), "Pretrained models"))
    assert set(pretrained) == {name for name, entry in MODELS.items() if entry.pretrained} | {"hf:NAME"}


def test_every_public_name_has_its_place_in_the_reference():
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(r"^::: unskew\.(\w+)$", text, flags=re.MULTILINE)) == sorted(unskew.__all__)


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), target


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "The unskew authors" in text


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path):
    mkdocs = shutil.which("mkdocs", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mkdocs is None:
        pytest.skip("mkdocs is not installed")
    site = tmp_path / "site"
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", site], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (site / "reference" / "index.html").is_file()
    html = "".join(path.read_text() for path in site.rglob("*.html"))
    outside = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', html)
    assert not [url for url in outside if "canonical" not in url], "the site must work without a network"
