"""Options shared by the commands, and how they become a configuration."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.cli.flags import FLAGS, add_flag
from unskew.errors import ConfigError
from unskew.filesystem import parse_path

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.config.experiment import Experiment

SEEDS = "which, as 0,1,2 or 0..4; a single number from 1 is how many."
"""Help text of ``--seeds``."""
DataPath = Annotated[str | None, add_flag("data_path")]
Rounds = Annotated[int | None, add_flag("rounds")]
EngineName = Annotated[str | None, add_flag("engine")]
Device = Annotated[str | None, add_flag("device")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any other field, as any.field=value. Repeatable.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", parser=parse_path, metavar="PATH", help="Configuration file; flags override it."),
]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Run models and methods of one's own that a file names.")]
Client = Annotated[
    str | None,
    typer.Option("--client", help="The client whose own model it is, by number or name; else the global one."),
]
Parallel = Annotated[
    str,
    typer.Option(
        "--parallel", metavar="N|auto", help="Runs at a time, each in a process; on a Ray cluster N@HOST:PORT."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def given_on_command_line(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these flags, after its ``config``, which they override.

    ``config_values`` reads them from its context.
    """

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters: list[inspect.Parameter] = []
        for parameter in own.values():
            parameters.append(parameter)
            if parameter.name == "config":
                kinds = {name: Annotated[FLAGS[name][0] | None, add_flag(name)] for name in names}
                parameters += [parameter.replace(name=name, annotation=kind) for name, kind in kinds.items()]

        @functools.wraps(command)
        def call(**arguments: Any) -> None:
            arguments = load_config(arguments)
            command(**{name: arguments[name] for name in own})

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return with_flags


def load_config(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a command with the configuration file as ``config``, wherever it was named.

    It may stand after ``--config``, or among what a command takes without a flag, where it is known by its ending. Several
    files and no method besides are each a method with its configuration, and stay where they are.
    """
    files = [arguments["config"], arguments.get("file")]
    for name in ("source", "run", "methods"):
        value = arguments.get(name)
        each = isinstance(value, list) and len(value) > 1 and all(map(is_config_file, value))
        if each and "trials" not in arguments:  # a tuning makes its methods' configurations itself
            continue
        if isinstance(value, list):
            files += [Path(item) for item in value if is_config_file(item)]
            arguments[name] = [item for item in value if not is_config_file(item)]
        elif value is not None and is_config_file(str(value)):
            files.append(Path(value))
            arguments[name] = None
    files = [file for file in files if file is not None]
    if len(files) > 1:
        raise ConfigError(f"Name one configuration file, not {' and '.join(map(str, files))}.")
    return {**arguments, "file": None, "config": files[0] if files else None}


def is_config_file(word: str) -> bool:
    """Return whether a word names a configuration file."""
    return word.lower().endswith((".yaml", ".yml"))


def config_values(config: Path | None, context: typer.Context) -> dict[str, Any]:
    """The configuration file, overridden by the command's flags, overridden by its ``--set``."""
    from unskew.config.loader import load_yaml, set_field
    from unskew.provenance import TRUST

    values = {} if config is None else load_yaml(config, None if context.params.get("trust_code") else TRUST)
    for section, field in (("network", "delay"), ("text", "columns")):
        if isinstance(values.get(section), str | list):  # short for one field: the others may be set
            values[section] = {field: values[section]}
    flags = {name: context.params[name] for name in FLAGS if context.params.get(name) is not None}
    if flags.get("class_weights", "balanced") != "balanced":
        flags["class_weights"] = parse_numbers(flags["class_weights"])
    if "delay" in flags:
        flags["network"] = {"delay": flags.pop("delay")}
    texts = {"columns": flags.pop("text", None), "tokenizer": flags.pop("tokenizer", None)}
    if any(texts.values()):
        flags["text"] = {field: value for field, value in texts.items() if value is not None}
    for assignment in context.params.get("sets") or []:
        set_field(flags, assignment)
    # One budget replaces the other.
    for given_field, other in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
        if flags.get(given_field) is not None and other not in flags:
            values.pop(other, None)
    for name, value in flags.items():
        both = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **value} if both else value
    return values


def parse_numbers(text: str) -> list[float]:
    """The weights of ``--class-weights``.

    Raises:
        ConfigError: The text is not a list of numbers.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--class-weights {text!r} is neither balanced nor numbers such as 1,5.") from None


def set_default_model(config: Experiment, values: Mapping[str, Any]) -> None:
    """Print which model is used where none is named and it is not the usual one.

    Args:
        config: Configuration of the run.
        values: Fields that the user set.
    """
    if "model" not in values and config.model in ("table-mlp", "text-mlp"):
        kind = "texts" if config.model == "text-mlp" else "tables"
        print(f"unskew: model: {config.model}, the default for {kind}; --model names another", file=sys.stderr)


def parse_seeds(text: str, first: int = 0) -> list[int]:
    """Read the seeds of ``--seeds``: a list names them; a single number from 1 is how many, and then they are printed.

    Args:
        text: As it was written.
        first: The first of so many.
    """
    from unskew.expressions import parse_seed_list

    which = parse_seed_list(text)
    if text.strip().isdigit() and which[0] > 0:
        named = f"{first}..{first + which[0] - 1}"
        which = parse_seed_list(named)
        print(f"{len(which)} seed{'s' if len(which) > 1 else ''}: {', '.join(map(str, which))}", file=sys.stderr)
    return which


def confirm_resume_target(again: bool, out: Path | None) -> None:
    """Refuse to go on nowhere.

    Args:
        again: Whether ``--resume`` was given.
        out: Output folder, or None.

    Raises:
        ConfigError: ``--resume`` is there without ``--out``.
    """
    if again and out is None:
        raise ConfigError("--resume continues the folder that --out names; give both.")


def console_for(as_json: bool = False) -> Console:
    """Progress goes to standard error when standard output must be JSON; a file has wide lines, unless COLUMNS is set."""
    from rich.console import Console

    stream = sys.stderr if as_json else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else 120
    return Console(stderr=as_json, width=width, markup=False, emoji=False)  # names in files are no markup


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


def unused_path(base: Path) -> Path:
    """``base``, or ``base-2``, ``base-3`` ... if something is already there."""
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def resume_command(folder: Path, config: Experiment) -> str:
    """The command that goes on with a run.

    Args:
        folder: Run folder.
        config: Configuration of the run.
    """
    own = ":" in config.model and not config.model.startswith("hf:")
    own = own or bool(re.search(r"(^|\+)\s*\w+\.\w|=[\w.]+:\w", config.method))
    return shlex.join(["unskew", "resume", str(folder), *(["--trust-code"] if own else [])])


def shorten_name(config: Experiment) -> str:
    """Return the name of the data in default folder names, independent of how the path was written."""
    from unskew.config.paths import PREFIXES

    prefix, _, path = config.data.partition(":")
    if prefix in PREFIXES and (path or config.data_path):
        return Path(path or str(config.data_path)).expanduser().resolve().name
    return Path(config.data).name


@contextmanager
def exit_on_signal(folder: Path, again: str) -> Iterator[None]:
    """Context manager in which a signal ends the program with 128 and its number; it says how to resume: with ``again``.

    Args:
        folder: Run folder.
        again: Command that resumes the run.
    """
    ended: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ended.append(number)
        raise KeyboardInterrupt

    ending = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    handlers = {signal_number: signal.getsignal(signal_number) for signal_number in ending}
    before = {
        signal_number: former for signal_number, former in handlers.items() if former is not signal.SIG_IGN
    }  # as by nohup
    for signal_number in before:
        signal.signal(signal_number, end)
    try:
        yield
    except KeyboardInterrupt as stop:
        from unskew.simulation.round_loop import RunInterrupted

        number = stop.number if isinstance(stop, RunInterrupted) else ended[0] if ended else signal.SIGINT
        if not any(path.is_file() for path in folder.rglob("*")):  # as where a run has not begun
            text = "Stopped; nothing was written."
        elif isinstance(stop, RunInterrupted):
            text = f"Stopped; the run is saved. Go on with: {again}"
        else:
            text = f"Interrupted. Resume from the last checkpoint with: {again}"
        print(text, file=sys.stderr)
        raise typer.Exit(128 + number) from stop
    finally:
        for signal_number, former in before.items():
            signal.signal(signal_number, former)


def show(result: Any, folder: Path, console: Console, as_json: bool) -> None:
    """The end of a run: its figures, and its summary as a table or JSON.

    Args:
        result: Result of the run.
        folder: Run folder.
        console: Console that prints.
        as_json: Whether to print JSON.
    """
    from unskew.cli.tables import summary_table

    result.plot(folder / "convergence.png")
    result.draw(folder)
    if as_json:
        print_json({**result.summary, "folder": str(folder)})
        return
    console.print(summary_table(result.summary))
    from unskew.cli.verbosity import LOUDNESS

    if LOUDNESS.quiet:
        return
    text = f"Everything is in {folder}: config.yaml, metrics.jsonl, summary.json, model.safetensors, figures."
    console.print(text, markup=False, highlight=False, soft_wrap=True)
