"""Options shared by commands, and their conversion to a configuration."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.cli.flags import FLAGS, add_flag, path_option
from unskew.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.config.experiment import Experiment

SEEDS = "a list such as 0,1,2 or 0..4, or a single number N for N seeds."
"""Help text of ``--seeds``."""
DataPath = Annotated[str | None, add_flag("data_path")]
ServerDataPath = Annotated[str | None, add_flag("server_data_path")]
Rounds = Annotated[int | None, add_flag("rounds")]
EngineName = Annotated[str | None, add_flag("engine")]
Device = Annotated[str | None, add_flag("device")]
CsvSets = Annotated[
    list[str] | None, typer.Option("--set", help="Format of CSV files, as csv.field=value. Repeatable.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any other field, as any.field=value. Repeatable.")]
ConfigFile = Annotated[Path | None, path_option("--config", help="Configuration file; flags override it.")]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Import custom models and methods that a file names.")]
LocalSites = Annotated[
    int | None, typer.Option("--local", min=1, help="Start a SuperLink and this number of sites on this machine.")
]
DeploymentFolder = Annotated[
    Path | None, path_option("--folder", help="Deployment folder, written by unskew deploy init.")
]
SuperLinkAddress = Annotated[str | None, typer.Option("--superlink", help="Host and port of the SuperLink.")]
References = Annotated[
    bool | None,
    typer.Option(
        "--references/--no-references",
        help="Also train on pooled data (pooled) and each client alone (local). [default: on]",
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="N|auto|stacked",
        help="Number of concurrent runs, each in a process; N@HOST:PORT on a Ray cluster; stacked: train seeds together "
        "with the engine vectorized, the default on a GPU (1 switches it off).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def escape_controls(text: str) -> str:
    r"""Escape the control characters of a string for the terminal, which would obey them.

    >>> escape_controls("red" + chr(27) + "[0m")
    'red\\x1b[0m'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def escape_lines(text: str) -> str:
    """Escape the control characters of each line of a text."""
    return "\n".join(map(escape_controls, text.split("\n")))


@contextmanager
def printed_warnings() -> Iterator[None]:
    """Context manager that prints each warning once to stderr, as a line of the command."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"unskew: {escape_lines(text)}", file=sys.stderr)


def given_on_command_line(
    *names: str, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with flags of configuration fields, after its parameter ``config``.

    ``config_values`` reads the flags from the command's context; they override the configuration file.

    Args:
        *names: Names of flags, and panels, which stand for all their flags.
        without: Names of flags that the command does not have.
    """
    chosen = {name: flag for name, flag in FLAGS.items() if {name, flag.panel} & {*names} and name not in without}

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters: list[inspect.Parameter] = []
        for parameter in own.values():
            parameters.append(parameter)
            if parameter.name == "config":
                kinds = {name: Annotated[flag.kind | None, add_flag(name)] for name, flag in chosen.items()}
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
    """Return the arguments of a command with the configuration file as ``config``.

    The file is the value of ``--config``, or a positional argument with the suffix .yaml or .yml. If all methods of a
    comparison are files, each configures one method, and they are left unchanged.
    """
    files = [arguments["config"], arguments.get("file")]
    for name in ("source", "run", "methods"):
        value = arguments.get(name)
        each = isinstance(value, list) and len(value) > 1 and all(map(is_config_file, value))
        if each and "trials" not in arguments:  # tune does not support one configuration per method
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
    """Return whether a command-line argument is the name of a configuration file."""
    return word.lower().endswith((".yaml", ".yml"))


def config_values(config: Path | None, context: typer.Context, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of the configuration file, overridden by flags, which are overridden by ``--set``.

    Args:
        config: Configuration file, or None.
        context: Context of the command.
        ignored: Fields of the file that the command does not use, because it may be written for a single run.
    """
    from unskew.attacks.registry import attack_values
    from unskew.config.loader import load_config, set_field
    from unskew.config.trust import TRUST

    flags: dict[str, Any] = {}
    for name, flag in FLAGS.items():
        if context.params.get(name) is not None:
            *sections, last = flag.path
            inner = functools.reduce(lambda values, section: values.setdefault(section, {}), sections, flags)
            inner[last] = context.params[name]
    attack = flags.pop("attack", None)
    for assignment in context.params.get("sets") or []:
        set_field(flags, assignment)
    remedy = None if context.params.get("trust_code") else TRUST
    values = {} if config is None else load_config(config, remedy, {**dict.fromkeys(ignored), **flags})
    for section, field in (("network", "delay"), ("text", "columns"), ("harmonize", "method")):
        if isinstance(values.get(section), str | list):  # expand the short form, so that --set can add other fields
            values[section] = {field: values[section]}
    if isinstance(values.get("attack"), str):
        values["attack"] = attack_values(values["attack"])
    if attack is not None:  # replaces the attack of the file, whose options another kind does not have
        values["attack"] = attack_values(attack)
    # One budget replaces the other.
    for given_field, other in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
        if flags.get(given_field) is not None and other not in flags:
            values.pop(other, None)
    for name, value in flags.items():
        both = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **value} if both else value
    return values


def csv_values(sets: list[str] | None) -> dict[str, Any]:
    """Return the format of CSV files from ``--set csv.field=value`` of a command that has no other fields.

    Args:
        sets: Assignments.

    Raises:
        ConfigError: If another field is set.
    """
    from unskew.config.loader import set_field

    values: dict[str, Any] = {}
    for assignment in sets or []:
        set_field(values, assignment)
    if values.keys() - {"csv"}:
        raise ConfigError(f"--set {(sets or [''])[0]}: this command takes only csv.field=value.")
    csv: dict[str, Any] = values.get("csv", {})
    return csv


def set_default_model(config: Experiment, values: Mapping[str, Any]) -> None:
    """Print the default model if it depends on the data and the user did not set a model.

    Args:
        config: Configuration of the run.
        values: Fields that the user set.
    """
    kinds = {"table-mlp": "tables", "text-mlp": "texts", "unet": "masks"}
    if "model" not in values and config.model in kinds:
        kind = kinds[config.model]
        print(f"unskew: using model {config.model}, the default for {kind}; --model sets another", file=sys.stderr)


def parse_seeds(text: str, first: int = 0) -> list[int]:
    """Parse ``--seeds``: a list of seeds, or a single positive number of seeds, which are then printed.

    Args:
        text: Value of the option.
        first: First seed if ``text`` is a number of seeds.
    """
    from unskew.expressions import parse_seed_list

    which = parse_seed_list(text)
    if text.strip().isdigit() and which[0] > 0:
        named = f"{first}..{first + which[0] - 1}"
        which = parse_seed_list(named)
        print(f"{len(which)} seed{'s' if len(which) > 1 else ''}: {', '.join(map(str, which))}", file=sys.stderr)
    return which


def confirm_resume_target(again: bool, out: Path | None) -> None:
    """Validate that ``--resume`` is combined with ``--out``.

    Args:
        again: Whether ``--resume`` was given.
        out: Output folder, or None.

    Raises:
        ConfigError: If ``--resume`` was given without ``--out``.
    """
    if again and out is None:
        raise ConfigError("--resume requires --out with the folder to resume.")


def console_for(as_json: bool = False) -> Console:
    """Return a console, on standard error if standard output has JSON.

    Without a terminal, lines have 120 characters unless COLUMNS is set.
    """
    from rich.console import Console

    stream = sys.stderr if as_json else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else 120
    return Console(stderr=as_json, width=width, markup=False, emoji=False)  # names in data may look like markup


def print_json(value: object) -> None:
    """Print a value to standard output as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


def repeat_command(*words: str) -> str:
    """Return the current command, followed by further words."""
    return shlex.join(["unskew", *sys.argv[1:], *words])


def unused_path(base: Path) -> Path:
    """Return ``base``, or ``base-2``, ``base-3`` ... if the path already exists."""
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def resume_command(folder: Path, config: Experiment) -> str:
    """Return the command that resumes a run.

    Args:
        folder: Run folder.
        config: Configuration of the run.
    """
    from unskew.config.trust import is_registered_model

    own = not is_registered_model(config.model)
    own = own or bool(re.search(r"(^|\+)\s*\w+\.\w|=[\w.]+:\w", config.method))
    trackers = ["--set", f"trackers=[{', '.join(config.trackers)}]"] if {*config.trackers} - {"tensorboard"} else []
    return shlex.join(["unskew", "resume", str(folder), *trackers, *(["--trust-code"] if own else [])])


def shorten_name(config: Experiment) -> str:
    """Return the name of the data for default folder names, independent of the form of its path; files without suffix."""
    from unskew.config.paths import PREFIXES
    from unskew.data.spec import TABLES

    prefix, _, path = config.data.partition(":")
    file = Path(config.data)
    if prefix in PREFIXES and (path or config.data_path):
        file = Path(path or str(config.data_path)).expanduser().resolve()
    return file.stem if file.suffix.lower() in (*TABLES, ".npz") else file.name


@contextmanager
def exit_on_signal(folder: Path, again: str) -> Iterator[None]:
    """Context manager that ends the program on a signal, with exit code 128 plus its number, and prints how to resume.

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
    }  # nohup ignores SIGHUP
    for signal_number in before:
        signal.signal(signal_number, end)
    try:
        yield
    except KeyboardInterrupt as stop:
        from unskew.simulation.round_loop import RunInterrupted

        number = stop.number if isinstance(stop, RunInterrupted) else ended[0] if ended else signal.SIGINT
        if not any(path.is_file() for path in folder.rglob("*")):
            text = "Stopped; nothing was written."
        elif isinstance(stop, RunInterrupted):
            text = f"Stopped; the run was saved. To resume, run: {again}"
        else:
            text = f"Interrupted. To resume from the last checkpoint, run: {again}"
        print(text, file=sys.stderr)
        raise typer.Exit(128 + number) from stop
    finally:
        for signal_number, former in before.items():
            signal.signal(signal_number, former)


def show(result: Any, folder: Path, console: Console, as_json: bool) -> None:
    """Write the plots of a finished run, and print its summary as a table or JSON.

    Args:
        result: Result of the run.
        folder: Run folder.
        console: Console to print to.
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
    more = "coefficients.json, " if (folder / "coefficients.json").exists() else ""
    text = f"Results are in {folder}: config.yaml, metrics.jsonl, summary.json, model.safetensors, {more}figures."
    console.print(text, highlight=False, soft_wrap=True)
