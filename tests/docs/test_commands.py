"""The commands that README and docs show: all are valid here, those that train nothing are run, and, slowly, the rest."""

import os
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from support.pages import DOCS, ROOT, fences
from support.running import call

from unskew.cli.app import commands
from unskew.cli.common import config_values
from unskew.cli.demo import METHODS as DEMO_METHODS
from unskew.cli.flags import EXAMPLES, FLAGS
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.load import federation_of
from unskew.data.partition.parsing import parse_partition
from unskew.data.sources.registry import SOURCES
from unskew.methods.registry import method
from unskew.models.names import split_models
from unskew.models.registry import HUB, MODELS
from unskew.reproduction.preset import load_preset, preset_cells
from unskew.reproduction.study import load_study, study_names
from unskew.runs.validation import resolve_run

pytestmark = pytest.mark.usefixtures("undrawn")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = commands().commands
TRAINING = ("run", "compare", "diagnose")


def lines_of(page):
    """The commands of a page, without what they are said to print."""
    for block in [*fences(page, "bash"), *fences(page, "text")]:
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\$ )?unskew (?!deploy)", line):
                yield line.removeprefix("$ ")


def words_of(line):
    """Words of a command, with an address for the variable of a shell script that has one."""
    return shlex.split(line.replace("$ip:", "127.0.0.1:"), comments=True)[1:]


def shown(wanted=lambda words: True):
    """Every command once, with the page that shows it first."""
    found = {line: page for page in reversed(PAGES) for line in lines_of(page) if wanted(words_of(line))}
    return [pytest.param(line, id=f"{page.stem}: {line[:60]}") for line, page in reversed(found.items())]


def trains_nothing(words):
    """Whether a command is done in a moment, with nothing but what is in the package."""
    if words[0] == "reproduce":
        return "--list" in words or "--show" in words
    if words[0] == "models":
        return not any(word.startswith(HUB) for word in words)
    return words[0] == "methods" or words[:2] == ["partition", "digits"]


def here(values):
    """Whether the data and the model need no network and no file that is not there."""
    return values.get("data", "digits") == "digits" and not str(values.get("model", "")).startswith(HUB)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with what lies in a checkout, where commands may write."""
    for name in ("examples", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def after_demo(checkout):
    """A checkout in which the demo was run, as far as commands of the pages read it."""
    folder = Path("runs/compare-digits/fedavg/seed-0")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(Path("examples/demo.yaml").read_text())


@pytest.mark.parametrize("line", [*shown(), *(line for name, line in EXAMPLES.items() if name != "init")])
def test_a_command_that_is_shown_is_valid(line, after_demo):
    """Options exist and names are known; a run on data that are here passes every check that comes before training."""
    words = words_of(line)
    with COMMANDS[words[0]].make_context(words[0], words[1:]) as context:
        given = context.params
        own = str(given.get("config")) in ("my.yaml", "experiment.yaml")  # the reader's
        values = config_values(None if own else given.get("config"), context)
    names = given.get("methods") or [values.get("method", "fedavg")]
    known = words[0] in ("run", "compare")  # other commands have options that are no fields of a run
    config = experiment({name: value for name, value in values.items() if known or name in Experiment.model_fields})
    parse_partition(config.partition)
    assert config.data.partition(":")[0] in SOURCES
    assert all(name in MODELS or ":" in name for name in split_models(config.model))
    if words[0] == "reproduce" and given["preset"]:
        (load_study if given["preset"] in study_names() else load_preset)(given["preset"])
        named = given["rows"] or given["columns"]
        if named and given["preset"] not in study_names():
            table = preset_cells(load_preset(given["preset"]), given["scale"], 0, {})
            assert {*given["rows"], *given["columns"]} <= {name for cell in table for name in (cell.row, cell.column)}
    for name in names:
        chosen = method(name)
        if known and here(values) and not config.synthetic:
            resolve_run(experiment({**values, "method": name}), federation_of(config.data_spec, 0), None, chosen)


def test_the_help_gives_defaults_an_example_and_the_whole_text(capsys):
    printed = " ".join(call(capsys, "run", "--help").out.split())
    assert "--rounds <int> Number of communication rounds. [default: 50]" in printed
    assert "--delay <str> Rounds until an update arrives: none, fixed:K" in printed
    for flag in FLAGS.values():
        assert len(flag.help) > 10
        assert "".join(flag.help.split()) in "".join(printed.split())  # words are broken at hyphens
    for name in COMMANDS:
        assert name == "deploy" or f"Example: unskew {name}" in " ".join(call(capsys, name, "--help").out.split())


def test_without_a_command_a_start_is_shown(capsys):
    outcome = call(capsys)
    assert (outcome.code, outcome.err) == (0, "")
    for line in re.findall(r"unskew (\w+)", outcome.out):
        assert line in COMMANDS


def test_the_commands_of_a_deployment_that_are_shown_are_valid():
    """They need sites, so only their words are read."""
    page = DOCS / "deployment.md"
    lines = [line for block in fences(page, "bash") for line in block.splitlines() if line.startswith("unskew deploy")]
    assert lines
    for line in lines:
        words = words_of(line)[1:]
        with COMMANDS["deploy"].commands[words[0]].make_context(words[0], words[1:]) as context:
            assert context.params


@pytest.mark.parametrize("line", shown(trains_nothing))
def test_a_command_that_trains_nothing_does_what_it_is_shown_for(line, checkout, capsys):
    outcome = call(capsys, *words_of(line))
    assert (outcome.code, outcome.err) == (0, "")
    assert len(outcome.out.splitlines()) > 5
    assert "There are no outcomes yet" not in outcome.out


def trained_here(page):
    """The commands of a page that train on data that are here, in their order."""
    for line in lines_of(page):
        words = words_of(line)
        if words[0] not in (*TRAINING, "resume") or any(word.startswith(("my.yaml", "path/to/")) for word in words):
            continue
        options = dict(pairwise(words))
        if options.get("--data", "digits") == "digits" and not options.get("--model", "").startswith(HUB):
            yield line


LESS = {
    "run": "--rounds 2 --engine inline",
    "compare": "--rounds 2 --engine inline --seeds 1",
    "diagnose": "--samples 30 --sample-clients 3",
    "resume": "--rounds {} --engine inline",
}
"""What makes a command short; of an option that is given twice the last one counts."""


def shortened(line, place):
    """The command's words, with generators that are trained for a moment and make a few images, and the rest as above."""
    line = re.sub(r",epochs=\d+", "", line)
    line = re.sub(r"(generator=[\w-]+[^,+\"]*)", r"\1,epochs=1,n_syn=4", line)
    words = words_of(line)
    less = LESS[words[0]].format(place + 3)
    if "stacked" in words:  # which needs the engine of the command, and several runs
        less = less.replace("--engine inline", "").replace("--seeds 1", "--seeds 0,1")
    return [*words, *less.split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.stem != "cluster" and any(trained_here(p))], ids=lambda p: p.stem
)
def test_the_commands_of_a_page_run_one_after_the_other(page, after_demo, capsys):
    """The run that pages go on with is made before."""
    known = ("run", "--out", "runs/digits-fedavg-seed0", "--model", "logistic", "--engine", "inline", "--rounds", 2)
    assert call(capsys, *known).code == 0
    for place, line in enumerate(trained_here(page)):
        if "ddpm" in line:
            pytest.importorskip("diffusers")
        if "epsilon" in line:
            pytest.importorskip("opacus")
        outcome = call(capsys, *shortened(line, place))
        assert outcome.code == 0, (line, outcome.err)


@pytest.mark.slow
def test_the_table_of_the_demo_is_what_the_demo_prints(checkout, capsys, monkeypatch):
    """Rounds may differ by one and accuracies by some tenths where sums are rounded in another order."""
    monkeypatch.setattr("unskew.comparison.references.BY_DEFAULT", True)
    (block,) = (text for text in fences(DOCS / "results" / "demo.md", "text") if text.startswith("$ unskew demo"))
    line, *rest = block.splitlines()
    printed = call(capsys, *words_of(line.removeprefix("$ "))).out.splitlines()
    assert os.path.isfile("runs/compare-digits/convergence.png")
    assert {"pooled", "local"} <= {row.split()[0] for row in printed if row.strip()}
    for name in DEMO_METHODS:
        starts = [
            [row.split() for row in rows if row.startswith(f" {name} ") and "±" in row] for rows in (printed, rest)
        ]
        ours, shown = (rows[0] for rows in starts)
        figures = [[float(word) for word in row if re.fullmatch(r"[\d.]+", word)] for row in (ours, shown)]
        assert len(figures[0]) == len(figures[1]) == 12
        for place, tolerance in {0: 0.5, 2: 0.5, 8: 1.0, 9: 0.0, 10: 0.0}.items():
            assert abs(figures[0][place] - figures[1][place]) <= tolerance + 0.05, (name, place)
