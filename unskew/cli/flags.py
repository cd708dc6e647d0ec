"""Configuration fields with a command-line flag, and their sections in the help of commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from typer.core import TyperCommand
from typer.models import OptionInfo

from unskew.config.experiment import Experiment
from unskew.config.other_names import OF_OTHERS
from unskew.config_fields import Flag, inner_section
from unskew.filesystem import parse_path
from unskew.option_parsing import docstring_entries

ClientName = Annotated[
    str | None,
    typer.Option("--client", metavar="NAME", help="Use the personal model of this client, not the global model."),
]
ClientNumber = Annotated[
    int | None,
    typer.Option("--client-number", min=0, help="Number of the client instead of its name, from 0 as in the tables."),
]
NewSite = Annotated[
    bool,
    typer.Option(
        "--new-site", help="Harmonize rows of sites without training rows by their own rows, at least 20 per site."
    ),
]


@dataclass(frozen=True)
class FieldFlag:
    """Command-line flag of a configuration field.

    Attributes:
        path: Sections of the field, and its name.
        kind: Type of the value on the command line.
        panel: Section of the flag in the help of a command.
        help: Help text, with the default.
    """

    path: tuple[str, ...]
    kind: type
    panel: str
    help: str


def field_flags(section: type[BaseModel] = Experiment, path: tuple[str, ...] = ()) -> Iterator[tuple[str, FieldFlag]]:
    """Find the fields that are annotated with ``Flag``.

    Args:
        section: Section of the configuration.
        path: Name of the section; empty for the whole configuration.

    Yields:
        Name and flag of each.
    """
    for name, field in section.model_fields.items():
        inner = inner_section(field)
        if inner is not None:
            yield from field_flags(inner, (*path, name))
        for flag in field.metadata:
            if isinstance(flag, Flag):
                value = field.get_default(call_default_factory=True)
                default = "" if value in (None, "", (), {}, False) else f" [default: {value}]"
                text = " ".join((field.description or "").replace("``", "").split())
                yield (
                    flag.name or name,
                    FieldFlag((*path, name), value_type(field.annotation), flag.panel, text + default),
                )


def value_type(annotation: Any) -> type:
    """Return the type of a flag's value: that of the field, or text if the field has several.

    >>> value_type(int | None), value_type(float | tuple[str, ...])
    (<class 'int'>, <class 'str'>)
    """
    if get_origin(annotation) is Annotated:
        return value_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return value_type(members[0]) if len(members) == 1 else str
    return annotation if annotation in (bool, int, float) else str


FLAGS = dict(field_flags())
"""Flags of configuration fields by name."""
PANELS = tuple(dict.fromkeys(flag.panel for flag in FLAGS.values()))
"""Sections of the flags in the help of a command; the command's own options come first."""
SERVER = ("server_data", "server_data_path")


def path_option(*names: str, help: str) -> Any:
    """Return the Typer option of a file or folder.

    Args:
        *names: Names of the option on the command line.
        help: Description in the help of the command.
    """
    return typer.Option(*names, parser=parse_path, metavar="PATH", help=help)


class DocumentedCommands(typer.Typer):
    """Typer application whose commands describe their options in the section ``Options`` of their docstrings."""

    def command(  # type: ignore[override]
        self, *arguments: Any, **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that registers a command.

        Args:
            *arguments: Arguments of ``typer.Typer.command``.
            **settings: Further arguments of it.
        """

        def register(command: Callable[..., None]) -> Callable[..., None]:
            text = inspect.getdoc(command) or ""
            settings["help"] = text.partition("\n\nOptions:\n")[0]
            return typer.Typer.command(self, *arguments, **settings)(with_described_options(command))

        return register


def with_described_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose options have their names and the help texts of its docstring.

    A parameter ``cost`` is the option ``--cost``, and ``--cost/--no-cost`` if it is a boolean that is true by default; a
    parameter without a default is an argument. ``typer.Option`` or ``typer.Argument`` in the annotation overrides this.

    Args:
        command: Function with a section ``Options`` in its docstring.
    """
    described = docstring_entries(command.__doc__ or "", "Options")

    @functools.wraps(command)
    def call(**arguments: Any) -> None:
        command(**arguments)

    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name in described:
            annotated = get_origin(parameter.annotation) is Annotated
            kind, *infos = get_args(parameter.annotation) if annotated else (parameter.annotation,)
            info = infos[0] if infos else typer.Argument() if parameter.default is parameter.empty else typer.Option()
            info.help = described[parameter.name]
            if isinstance(info, OptionInfo):
                complete_option(info, parameter, kind)
            parameter = parameter.replace(annotation=Annotated[kind, info])
        parameters.append(parameter)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def complete_option(info: OptionInfo, parameter: inspect.Parameter, kind: Any) -> None:
    """Complete an option by its name on the command line, and by the parser of files and folders.

    Args:
        info: Option of the parameter.
        parameter: Parameter of a command.
        kind: Type of its values.
    """
    if info.default is ...:  # an option without a name; otherwise Typer stores its first name here
        flag = f"--{parameter.name.replace('_', '-')}"
        info.param_decls = (f"{flag}/--no-{flag[2:]}" if parameter.default is True else flag,)
    if kind in (Path, Path | None):
        info.parser, info.metavar = parse_path, "PATH"


def add_flag(name: str) -> Any:
    """Return the Typer option of a field."""
    flag = FLAGS[name]
    return typer.Option(f"--{name.replace('_', '-')}", help=flag.help, rich_help_panel=flag.panel)


EXAMPLES = {
    "run": "unskew run --method fedprox:mu=0.1 --rounds 20",
    "compare": "unskew compare fedavg scaffold --seeds 0..2 --rounds 20",
    "resume": "unskew resume runs/digits-fedavg-seed0 --rounds 100",
    "methods": "unskew methods",
    "models": "unskew models",
    "partition": "unskew partition digits --partition dirichlet:0.3",
    "demo": "unskew demo",
    "doctor": "unskew doctor",
    "init": "unskew init patients.csv",
    "diagnose": "unskew diagnose --data digits --partition dirichlet:0.1",
    "export": "unskew export runs/digits-fedavg-seed0 --out exported",
    "predict": "unskew predict runs/digits-fedavg-seed0 new.csv",
    "evaluate": "unskew evaluate runs/digits-fedavg-seed0 new.csv",
    "report": "unskew report runs/compare-digits",
    "benchmark": "unskew benchmark skew --federation digits-rotated --method fedavg --method scaffold",
    "reproduce": "unskew reproduce --list",
    "audit-privacy": "unskew audit-privacy runs/private --canaries 50",
    "privacy": "unskew privacy --clients 3383 --cohort 120 --rounds 100 --noise 1.2",
    "tune": "unskew tune fedavg fedprox --trials 10",
    "watch": "unskew watch runs",
}
"""Example of each command, shown at the end of its help."""


def suggest_flag(flag: str) -> str | None:
    """Return the flag for another library's name of a flag; None if the name is not known."""
    bare = flag.lstrip("-")
    name, equals, value = OF_OTHERS.get(bare.replace("-", "_"), "").partition("=")
    if name not in FLAGS:
        return f"--set {name}=..." if name else None
    return f"--{name.replace('_', '-')}{' ' if equals else ''}{value}"


class Sections(TyperCommand):
    """Command whose help lists configuration fields in sections after its own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; for an unknown flag that another library uses, the error suggests the flag of unskew.

        Args:
            ctx: Context of the command.
            args: Arguments of the command line.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # from the click module that Typer uses, which may be a vendored copy
            ours = suggest_flag(str(getattr(error, "option_name", "")))
            if ours is not None and hasattr(error, "possibilities"):
                error.possibilities = [ours]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of all options in sections.

        Args:
            ctx: Context of the command.
            formatter: Receives the help text.
        """
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", "Options", *PANELS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                own = "Arguments" if param.param_type_name == "argument" else "Options"
                panels[getattr(param, "rich_help_panel", None) or own].append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
