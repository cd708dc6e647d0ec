"""Any command with any flags and any values: it works, or ends with code 2 and a sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_names import FIELDS, methods, near, of_field, scalars
from support.fuzzing import amounts, fuzz, mutated
from support.running import call

from unskew.cli.app import commands

pytestmark = pytest.mark.usefixtures("undrawn", "unstarted")

COMMANDS = commands().commands
DATA = ["--data", "table:tiny.csv", "--set", "label=label", "--clients", "3", "--partition", "iid"]
BASE = {
    "run": [*DATA, "--model", "logistic", "--engine", "inline", "--out", "new/run"],
    "compare": ["fedavg", "scaffold", *DATA, "--model", "logistic", "--seeds", "0", "--out", "new/compare"],
    "diagnose": [*DATA, "--model", "logistic", "--samples", "4", "--out", "new/a.png"],
    "partition": ["table:tiny.csv", "--label", "label", "--clients", "3", "--out", "new/b.png"],
    "resume": ["nowhere"],
    "reproduce": ["fedcog/table-5", "--show"],
    "models": ["mlp"],
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


@st.composite
def flags(draw, command):
    """A flag of a command with its value."""
    name = draw(st.sampled_from(sorted(FLAGS[command])) | mutated(st.sampled_from(sorted(FLAGS["run"]))))
    if name in ALONE:
        return [name]
    if name == "--set":
        field = draw(st.sampled_from(FIELDS))
        return [name, f"{draw(st.just(field) | mutated(st.just(field)))}={draw(of_field(field))}"]
    if name in ("--out", "--plot", "--results", "--runs", "--config"):
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
    }
    if command in arguments and draw(st.integers(0, 5)) == 0:
        base = [draw(arguments[command] | scalars), *base[command != "diagnose" :]]
    elif draw(st.integers(0, 9)) == 0:
        base = [draw(PLACES | scalars), *base]
    more = [piece for flag in draw(st.lists(flags(command), max_size=3)) for piece in flag]
    return [
        piece.replace("\0", "")
        for piece in (draw(mutated(st.just(command))) if draw(st.integers(0, 20)) == 0 else command, *base, *more)
    ]


@amounts(40, 1000)
def test_command_lines(box, examples):
    @fuzz(examples)
    @given(command_lines())
    def check(args):
        box.command(call, *args)

    check()
