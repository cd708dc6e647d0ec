"""What README and docs say is true: their code runs, and their tables list what is there."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from conftest import QUICK

import unskew
from benchmarks import results
from unskew.cli.app import app
from unskew.config.experiment import Experiment, NetworkConfig, TextConfig
from unskew.config.reading import experiment, load_yaml
from unskew.data.partition.make import OPTIONS, PARTITIONS
from unskew.data.sources.catalogue import SOURCES
from unskew.generators.latent import LatentGenerator
from unskew.methods.catalogue import CATALOGUE, describe, method, rule_class
from unskew.models.catalogue import MODELS, build_model
from unskew.reproduction.preset import load_preset
from unskew.reproduction.study import load_study, study_names

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text()
COMMANDS = typer.main.get_command(app).commands
SNIPPET = '--8<-- "examples/'  # a file that is included; test_examples runs it


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


def options_of(command):
    return {o for p in command.params for o in p.opts if o.startswith("--")} - {"--help"}


@pytest.mark.parametrize("page", [p for p in PAGES if fences(p, "python")], ids=lambda p: p.stem)
def test_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"page_{page.stem}")  # a module that is known, where dataclasses look up their types
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in fences(page, "python"):
        if SNIPPET not in code:
            exec(compile(code, str(page), "exec"), module.__dict__)


def commands_shown():
    for page in PAGES:
        for block in [*fences(page, "bash"), *fences(page, "text")]:
            for line in block.replace("\\\n", " ").splitlines():
                if line.removeprefix("$ ").startswith("unskew "):
                    yield pytest.param(line.removeprefix("$ "), id=f"{page.stem}: {line[:60]}")


@pytest.mark.parametrize("line", commands_shown())
def test_commands_shown_exist_and_are_valid(line):
    words = shlex.split(line, comments=True)[1:]
    command = COMMANDS[words[0]]
    with command.make_context(words[0], words[1:]) as context:
        given = context.params
    fields = {name: value for name, value in given.items() if name in Experiment.model_fields and value is not None}
    if "network" in fields:
        fields["network"] = {"delay": fields["network"]}
    for assignment in given.get("sets") or []:
        name = assignment.partition("=")[0]
        assert name.split(".")[0] in Experiment.model_fields, name
    for name in given.get("methods") or [given.get("method")]:
        if name and "examples." not in name:
            method(name)
    if words[0] == "reproduce" and given["preset"]:
        (load_study if given["preset"] in study_names() else load_preset)(given["preset"])
    config = given.get("config")
    if config and str(config).startswith("examples/"):
        fields = {**load_yaml(ROOT / config), **fields}
    experiment({k: v for k, v in fields.items() if k != "method"})


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_described_and_no_other(name):
    documented = {option.strip("`") for option in first_names(section(COMMAND_LINE, f"unskew {name}"))}
    assert documented == options_of(COMMANDS[name])


def test_every_field_of_the_configuration_is_described_with_its_default():
    rows = table(COMMAND_LINE.split("<!-- fields -->")[1])
    described = {row[0].strip("`"): row[1].strip("`") for row in rows}
    sections = {"network": NetworkConfig, "text": TextConfig}
    fields = {name: info.default for name, info in Experiment.model_fields.items() if name not in sections}
    for part, kind in sections.items():
        fields |= {f"{part}.{name}": info.default for name, info in kind.model_fields.items()}

    assert set(described) == set(fields)
    filled = experiment({}).model_dump(mode="json")
    for part in sections:
        filled |= {f"{part}.{name}": value for name, value in filled.pop(part).items()}
    shown = {None: "none", True: "true", False: "false"}
    for name, value in filled.items():
        wanted = shown[value] if value is None or isinstance(value, bool) else str(value)
        assert described[name] == wanted, name


def test_files_and_figures_of_a_run_are_described(tmp_path):
    folder = tmp_path / "run"
    options = {"model": "logistic", "rounds": 2, "local_steps": 1, "clients": 4, "target": 0.5, "engine": "inline"}
    result = unskew.run(**options, out=folder)
    result.plot(folder / "convergence.png")
    assert set(first_names(section(COMMAND_LINE, "summary.json"))) == set(result.summary)
    assert set(first_names(section(COMMAND_LINE, "metrics.jsonl"))) == set(result.history[-1])
    described = {name.rstrip("/") for name in first_names(section(COMMAND_LINE, "The run folder"))}
    assert {path.name for path in folder.iterdir()} <= described
    assert described - {path.name for path in folder.iterdir()} <= {
        "cache",
        "clients",
        "coefficients.png",
        "samples",
        "synthetic",
    }


METHODS = (ROOT / "docs" / "methods.md").read_text()
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()


def test_the_tables_of_methods_list_the_catalogue():
    for page in (ROOT / "README.md", ROOT / "docs" / "methods.md"):
        rows = table(page.read_text().split("<!-- methods -->")[1])
        listed = [(re.search("`(.*?)`", row[0])[1], *row[1:]) for row in rows]
        assert listed == [(m["name"], ", ".join(m["slots"]), m["summary"], m["paper"]) for m in describe()], page.name


def test_the_table_of_slots_names_every_method():
    rows = table(section(CONCEPTS, "A method is a sum"))
    named = {row[0].strip("`"): re.findall("`(.*?)`", row[2]) for row in rows}
    assert list(named) == ["data", "client", "sync", "server"]
    assert named == {slot: [m["name"] for m in describe() if slot in m["slots"]] for slot in named}


def test_methods_that_weigh_clients_alike_are_named():
    sentence = re.search(r"Uniformly: (.*?)\.", section(CONCEPTS, "Weights"))[1]
    assert set(re.findall("`(.*?)`", sentence)) == {name for name in CATALOGUE if rule_class(name).weights == "uniform"}


@pytest.mark.parametrize(("title", "task"), [("Several labels a sample", "multilabel"), ("Texts", "language")])
def test_methods_that_refuse_a_task_are_named(title, task):
    sentence = re.search(r"Refused are (.*?)[.;]", section((ROOT / "docs" / "data.md").read_text(), title))[1]
    refusing = [name for name in CATALOGUE if task not in rule_class(name).tasks]
    assert re.findall("`(.*?)`", sentence) == refusing


def test_the_method_shown_to_contributors_is_the_one_in_the_package():
    page = ROOT / "CONTRIBUTING.md"
    assert fences(page, "python") == [(ROOT / "unskew" / "methods" / "fedprox.py").read_text()]
    (line,) = (line for line in fences(page, "text") if "unskew.methods" in line)
    assert line.strip() in (ROOT / "unskew" / "methods" / "catalogue.py").read_text()


def test_contributors_are_told_every_folder():
    listed = {
        name.rstrip("/") for name in first_names(section((ROOT / "CONTRIBUTING.md").read_text(), "Where things are"))
    }
    assert listed == {path.name for path in (ROOT / "unskew").iterdir() if path.is_dir()} - {"__pycache__"}


def imports_between_folders():
    """Which folder of the package imports which; the modules beside them count as one, called root."""
    arrows = {}
    for path in (ROOT / "unskew").rglob("*.py"):
        inside = path.relative_to(ROOT / "unskew").parts
        if inside in (("__init__.py",), ("__main__.py",)):
            continue
        arrows.setdefault(inside[0] if len(inside) > 1 else "root", set()).update(
            name.split(".")[1] if (ROOT / "unskew" / name.split(".")[1]).is_dir() else "root"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (name := node.module or "").startswith("unskew.")
        )
    return {room: others - {room} for room, others in arrows.items()}


def test_the_picture_of_the_package_is_true():
    """Every folder is drawn, every arrow is an import, every import runs along the arrows, and none leads up."""
    (picture,) = fences(ROOT / "docs" / "concepts.md", "mermaid")
    arrows = {room: set() for room in re.findall(r'^ +(\w+)\["', picture, re.M)}
    for upper, lower in re.findall(r"^ +(\w+) --> (.*)$", picture, re.M):
        arrows[upper] |= set(lower.split(" & "))
    imports = imports_between_folders()
    assert set(arrows) == set(imports)
    below = {}
    for room in reversed(list(arrows)):  # drawn from the top down
        assert arrows[room] <= set(below), f"{room} is drawn below what it imports"
        below[room] = arrows[room].union(*(below[other] for other in arrows[room]))
        assert arrows[room] <= imports[room], f"docs/concepts.md draws an arrow that is no import of {room}"
        assert imports[room] <= below[room], f"docs/concepts.md draws no arrow for an import of {room}"
    modules = {path.stem for path in (ROOT / "unskew").glob("*.py")} - {"__init__", "__main__"}
    assert set(re.search(r'root\["(.*?)"\]', picture)[1].split(", ")) == modules


def part_of(name, label):
    """The lines of a method's section under one of its labels."""
    return section(METHODS, name).split(f"**{label}**\n", 1)[1].split("\n**", 1)[0]


def shown(default):
    """An option's default as the page writes it."""
    words = {"None": "none", "": "empty", "()": "empty", "True": "true", "False": "false"}
    return words.get(str(default), str(default))


def listed_options(text):
    """Names and defaults in a list of options, after those of the section that the text refers to."""
    known = {}
    if other := re.search(r"options are those of \[.*?\]\(#(.*?)\)", text):
        title = next(t for t in re.findall("^## (.*)$", METHODS, re.M) if t.lower().replace(" ", "-") == other[1])
        known = listed_options(part_of(title, "Options") if title in CATALOGUE else section(METHODS, title))
    return known | dict(re.findall(r"^- `(\w+)` = `?([^`:]*?)`?: ", text, re.M))


@pytest.mark.parametrize("known", describe(), ids=lambda known: known["name"])
def test_the_section_of_a_method_has_its_shape_and_its_options(known):
    name = known["name"]
    labels = re.findall(r"^\*\*(\w[\w ]*)\*\*$", section(METHODS, name), re.M)
    assert labels[:3] == ["Options", "Cost", "Goes with"]
    assert labels[3:] in ([], ["Notes"])
    assert listed_options(part_of(name, "Options")) == {k: shown(v) for k, v in known["options"].items()}

    cost, goes_with = (
        re.findall(r"^- ([A-Z][\w ]*): (.*)$", part_of(name, label), re.M) for label in ("Cost", "Goes with")
    )
    assert [line for line, _ in cost] == ["Traffic", "Work", "At the clients", "At the server"]
    assert [line for line, _ in goes_with] == ["Sums", "Server reads", "Tasks", "Delays"]
    told = dict(goes_with)
    assert told["Server reads"].startswith({"sum": "sums", "individual": "single updates"}[known["needs"]])
    tasks = {"all": {"classification", "multilabel", "language"}, "classification": {"classification"}}
    tasks["classification, several labels"] = {"classification", "multilabel"}
    assert tasks[re.split(r"\.", told["Tasks"])[0]] == set(rule_class(name).tasks)


def test_the_sums_that_are_refused_are_told():
    """The page tells once that two methods of the slot server do not add up, and what center and feddm refuse."""
    fills_server = {name for name in CATALOGUE if method(name).server is not None}
    for name in set(CATALOGUE) - {"center", "feddm"}:
        refused = set()
        for other in set(CATALOGUE) - {"center", "feddm", name}:
            if not {name, other} <= fills_server:
                try:
                    method(f"{name}+{other}")
                except unskew.UnskewError:
                    refused.add(other)
        line = re.search(r"^- Sums: (.*)$", part_of(name, "Goes with"), re.M)[1]
        told = re.match(r"not with ([^:.]*)", line)
        assert set(re.findall("`(.*?)`", told[1] if told else "")) == refused, name


def test_the_costs_of_methods_are_those_counted():
    """In the second round, when nothing is missing any more; a linear model is all classifier."""
    options = {"model": "logistic", "rounds": 2, "local_steps": 1, "clients": 4, "partition": "iid", "engine": "inline"}
    for name in CATALOGUE:
        traffic = re.search(r"^- Traffic: (.*?) down, (.*?) up\b", part_of(name, "Cost"), re.M)
        result = unskew.run(method=QUICK.get(name, name), server=100, **options)
        size = result.summary["parameters"]
        g = LatentGenerator(classes=10, noise=32, hidden=256, features=64).size
        numbers = {
            "d": size,
            "2d": 2 * size,
            "dc": size,
            "db": 0,
            "dh": size,
            "db/alpha": 0,
            "1": 1,
            "g": g,
            "C": 10,
            "none": 0,
        }
        numbers["s"] = 10 * 2 * 64 + 10 * 2 // 4  # two images of each class, a byte for a label
        first, second = result.history
        counted = [second[f"bytes_{way}"] - first[f"bytes_{way}"] for way in ("down", "up")]
        costs = [cost.strip("`") for cost in traffic.groups()]
        assert counted == [16 * sum(numbers[term] for term in cost.split(" + ")) for cost in costs], name


def test_the_table_of_models_is_true():
    rows = table((ROOT / "docs" / "models.md").read_text())
    assert [row[0].strip("`") for row in rows] == ["logistic", "mlp", "cnn", "cnn-b", "cnn-c", "resnet20", "vgg11"]
    assert {row[0].strip("`") for row in rows} == {name for name, entry in MODELS.items() if not entry.pretrained}
    pretrained = first_names(section((ROOT / "docs" / "models.md").read_text(), "Pretrained models"))
    assert set(pretrained) == {name for name, entry in MODELS.items() if entry.pretrained} | {"hf:NAME"}
    for row in rows:
        for cell, shape in zip(row[2:], [(1, 8, 8), (1, 28, 28), (3, 32, 32)], strict=True):
            model = build_model(row[0].strip("`"), shape, 10)
            assert sum(p.numel() for p in model.parameters()) == int(cell.replace(",", ""))


def test_the_tables_of_sources_and_partitions_are_complete():
    text = (ROOT / "docs" / "data.md").read_text()
    assert {name.split(":")[0] for name in first_names(section(text, "Sources"))} == set(SOURCES)
    forms = section(text, "Partitions")
    assert {name.split("`")[0].split(":")[0] for name in first_names(forms)} == set(PARTITIONS)
    options = {(row[1].strip("`"), row[0].strip("`")) for row in table(forms.split("Options:")[1])}
    assert options == {(name, option) for name, known in OPTIONS.items() for option in known}


def test_every_public_name_has_its_place_in_the_reference():
    text = (ROOT / "docs" / "reference.md").read_text()
    assert sorted(re.findall(r"^::: unskew\.(\w+)$", text, flags=re.MULTILINE)) == sorted(unskew.__all__)


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda page: page.stem)
def test_tables_of_results_are_those_of_the_kept_outcomes(page):
    text = page.read_text(encoding="utf-8")
    assert results.filled(text) == text, "run: python -m benchmarks.results"


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "The unskew authors" in text


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
