"""Any command with any flags and any values: it works, or ends with code 2 and a sentence."""

import shutil
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_folder import CSV
from support.fuzz_names import FIELDS, methods, near, of_field, scalars
from support.fuzzing import accepted, amounts, fuzz, mutated
from support.running import call

import unskew
from unskew.cli.app import commands

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("undrawn", "unstarted", "unsent")]

COMMANDS = dict(commands().commands)
COMMANDS |= {f"deploy {name}": command for name, command in COMMANDS.pop("deploy").commands.items()}
DATA = ["--data", "table:tiny.csv", "--set", "label=label", "--clients", "3", "--partition", "iid"]
TUNES = find_spec("optuna") is not None
BASE = {
    "run": [*DATA, "--model", "logistic", "--engine", "inline", "--out", "new/run"],
    "compare": ["fedavg", "scaffold", *DATA, "--model", "logistic", "--seeds", "0", "--out", "new/compare"],
    "diagnose": [*DATA, "--model", "logistic", "--samples", "4", "--out", "new/a.png"],
    "partition": ["table:tiny.csv", "--label", "label", "--clients", "3", "--out", "new/b.png"],
    "resume": ["nowhere"],
    "reproduce": ["fedcog/table-5", "--show"],
    "models": ["mlp"],
    "predict": ["trained", "tiny.csv", "--out", "new/p.csv"],
    "export": ["trained", "--format", "torchscript", "--out", "new/export"],
    "report": ["trained", "--out", "new/r.html"],
    "watch": ["trained", "--once", "new/w.html"],
    "init": ["tiny.csv", "--label", "label", "--out", "new/c.yaml"],
    "deploy init": ["new/app", "--config", "config.yaml"],
    "deploy check": ["config.yaml"],
    "deploy site": ["config.yaml"],
    "deploy run": ["config.yaml", "--local", "2", "--out", "new/sites"],
    **({"tune": ["fedavg", *DATA, "--trials", "1", "--model", "logistic", "--out", "new/tune"]} if TUNES else {}),
    "methods": [],
}
"""What makes a command work, so that what follows is looked at."""
PLACES = near("new/other", "tiny.csv", "tiny.csv/x", ".", "", "config.yaml", "no/\udcff", "a" * 300)
FLAGS = {
    name: {option for p in command.params for option in p.opts if option[:2] == "--"}
    for name, command in COMMANDS.items()
}
ALONE = {
    option for command in COMMANDS.values() for p in command.params for option in p.opts if getattr(p, "is_flag", False)
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run on the table, with personal models."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.csv").write_text(CSV)
    options = {"label": "label", "categories": "auto", "clients": 3, "partition": "iid", "method": "ft", "rounds": 1}
    run = {"model": "table-mlp", "local_steps": 1, "engine": "inline", "out": folder / "trained"}
    return unskew.run(data=f"table:{folder / 'tiny.csv'}", **options, **run).folder


@pytest.fixture
def unsent(monkeypatch):
    """No site is started, none is asked, no graph is traced and no library is written."""
    for place in (
        "deployment.server.run.run",
        "deployment.site.listener.serve_site",
        "deployment.site.check.check_site",
        "serving.export.write_model",
        "reporting.live_page.PageServer.serve_forever",
    ):
        monkeypatch.setattr(f"unskew.{place}", accepted)
    for module in ("page", "report"):
        monkeypatch.setattr(f"unskew.reporting.{module}.plotly_script", lambda: "var drawn = 1;")


@st.composite
def flags(draw, command):
    """A flag of a command with its value."""
    name = draw(st.sampled_from(sorted(FLAGS[command]) or ["--json"]) | mutated(st.sampled_from(sorted(FLAGS["run"]))))
    if name in ALONE:
        return [name]
    if name == "--set":
        field = draw(st.sampled_from(FIELDS))
        return [name, f"{draw(st.just(field) | mutated(st.just(field)))}={draw(of_field(field))}"]
    if name in ("--out", "--plot", "--results", "--runs", "--config", "--space", "--state", "--once"):
        return [name, draw(PLACES)]
    return [name, draw(of_field(name[2:].replace("-", "_")) | scalars)]


@st.composite
def command_lines(draw):
    command = draw(st.sampled_from([*BASE, "run", "run", "run", "compare"]))
    base = list(BASE[command])
    arguments = {
        "compare": methods(),
        "diagnose": near("nowhere", "."),
        "partition": of_field("data"),
        "models": of_field("model"),
        "predict": near("trained", "tiny.csv", "."),
        "export": near("trained", "tiny.csv", "."),
        "report": near("trained", "tiny.csv", ".", "nowhere"),
        "watch": near("trained", "tiny.csv", ".", "nowhere"),
        "init": near("tiny.csv", "tiny.jsonl", "bad.csv", ".", "digits"),
        "tune": methods(),
    }
    if command in arguments and draw(st.integers(0, 5)) == 0:
        base = [draw(arguments[command] | scalars), *base[command != "diagnose" :]]
    elif draw(st.integers(0, 9)) == 0:
        base = [draw(PLACES | scalars), *base]
    more = [piece for flag in draw(st.lists(flags(command), max_size=3)) for piece in flag]
    return [
        piece.replace("\0", "")
        for piece in (
            *(draw(mutated(st.just(command))) if draw(st.integers(0, 20)) == 0 else command).split(),
            *base,
            *more,
        )
    ]


@amounts(40, 1000)
def test_command_lines(box, trained, examples):
    shutil.copytree(trained, box.here / "trained")

    @fuzz(examples)
    @given(command_lines())
    def check(args):
        box.command(call, *args)

    check()
