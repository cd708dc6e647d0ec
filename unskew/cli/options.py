"""What the commands share: their options, and how these become a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Data = Annotated[str | None, typer.Option("--data", help="Data source: digits, cifar10, ..., table:PATH, folder:PATH.")]
DataPath = Annotated[str | None, typer.Option("--data-path", help="Folder with the source's files, for offline use.")]
PartitionSpec = Annotated[str | None, typer.Option("--partition", help="iid, dirichlet:0.1, classes:2, sorted, ...")]
Clients = Annotated[int | None, typer.Option("--clients", help="Number of clients.")]
ServerSamples = Annotated[
    str | None, typer.Option("--server", help="Data at the server: a number of test samples, or another data source.")
]
ServerPath = Annotated[str | None, typer.Option("--server-path", help="Folder with the files of that other source.")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="logistic, mlp, cnn, cnn-b, cnn-c, resnet20, vgg11, hf:NAME, package.module:f"),
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Communication rounds.")]
Participation = Annotated[float | None, typer.Option("--participation", help="Share of clients per round.")]
LocalSteps = Annotated[int | None, typer.Option("--local-steps", help="Mini-batch steps per client and round.")]
LocalEpochs = Annotated[int | None, typer.Option("--local-epochs", help="Passes over a client's data per round.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Samples per step.")]
Lr = Annotated[float | None, typer.Option("--lr", help="Learning rate of the clients.")]
Momentum = Annotated[float | None, typer.Option("--momentum", help="Momentum of the clients' SGD.")]
WeightDecay = Annotated[float | None, typer.Option("--weight-decay", help="Weight decay of the clients' optimizer.")]
EngineName = Annotated[str | None, typer.Option("--engine", help="auto, inline, processes or vectorized.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1.")]
NetworkDelay = Annotated[
    str | None, typer.Option("--network", help="Rounds until updates arrive: none, fixed:3, half-normal:20, ...")
]
EvalEvery = Annotated[int | None, typer.Option("--eval-every", help="Evaluate every so many rounds.")]
Target = Annotated[float | None, typer.Option("--target", help="Report the rounds needed to this accuracy (0 to 1).")]
SaveSamples = Annotated[
    bool | None, typer.Option("--save-samples", help="Draw the inputs that clients make in the last round.")
]
Synthetic = Annotated[
    str | None, typer.Option("--synthetic", help="Run folder whose synthetic images are used again (fedssyn).")
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any other field, as any.field=value. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

_FLAGS = (
    *("data", "data_path", "partition", "clients", "model", "rounds", "participation", "local_steps", "local_epochs"),
    *("batch_size", "lr", "momentum", "weight_decay", "engine", "device", "eval_every", "target", "method", "seed"),
    *("save_samples", "server", "server_path", "synthetic"),
)


def values_of(config: Path | None, context: typer.Context) -> dict[str, Any]:
    """The configuration file, overridden by the command's flags, overridden by its ``--set``."""
    from unskew.config.reading import load_yaml, set_field

    values = load_yaml(config) if config is not None else {}
    for section, field in (("network", "delay"), ("text", "columns")):
        if isinstance(values.get(section), str | list):  # short for one field: the others may be set
            values[section] = {field: values[section]}
    flags = {name: context.params[name] for name in _FLAGS if context.params.get(name) is not None}
    if context.params.get("network") is not None:
        flags["network"] = {"delay": context.params["network"]}
    for assignment in context.params.get("sets") or []:
        set_field(flags, assignment)
    # One budget replaces the other.
    for mine, other in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
        if flags.get(mine) is not None and other not in flags:
            values.pop(other, None)
    for name, value in flags.items():
        both = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **value} if both else value
    return values


def console_for(as_json: bool = False) -> Console:
    """Progress goes to standard error when standard output must be JSON; a file has no narrow lines."""
    stream = sys.stderr if as_json else sys.stdout
    return Console(stderr=as_json, width=None if stream.isatty() else 120)


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


def free_name(base: Path) -> Path:
    """``base``, or ``base-2``, ``base-3`` ... if something is already there."""
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


@contextmanager
def stoppable(folder: Path, again: str) -> Iterator[None]:
    """Ctrl-C within ends the program with code 130 and says how to go on: with the command ``again``."""
    try:
        yield
    except KeyboardInterrupt as stop:
        from unskew.simulation.loop import Interrupted

        if isinstance(stop, Interrupted):
            text = f"Stopped; the run is saved. Go on with: {again}"
        elif folder.exists():
            text = f"Stopped at once. Go on from the last checkpoint with: {again}"
        else:
            text = "Stopped; nothing was written."
        print(text, file=sys.stderr)
        raise typer.Exit(130) from stop
