"""Configuration fields with a command-line flag, and their sections in the help of commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from unskew.config.field_docs import flag_docs
from unskew.config.other_names import OF_OTHERS
from unskew.filesystem import parse_path

ClientName = Annotated[
    str | None,
    typer.Option("--client", metavar="NAME", help="Use the personal model of this client, not the global model."),
]
ClientNumber = Annotated[
    int | None,
    typer.Option("--client-number", min=0, help="Number of the client instead of its name, from 0 as in the tables."),
]

TABLE = ("label", "label_separator", "image", "text", "tokenizer", "features", "exclude")
COLUMNS = ("categories", "dates", "missing", "split_by", "task")
DATA = ("data", "data_path", "partition", "clients", "unseen", "shift", *TABLE, *COLUMNS)
SERVER = ("server_data", "server_data_path")
BUDGET = ("local_steps", "local_epochs", "batch_size")
OBJECTIVE = ("loss", "class_weights")
OPTIMIZER = ("optimizer", "lr", "lr_schedule", "momentum", "weight_decay")
TRAINING = ("model", "rounds", "participation", "sampling", *BUDGET, *OPTIMIZER, *OBJECTIVE, "client_weighting")
MACHINE = ("engine", "device", "delay", "attack")
EVALUATION = ("eval_every", "metrics", "positive", "objective", "early_stopping", "keep", "target")
PANELS = {
    "Data": (*DATA, *SERVER),
    "Training": ("method", *TRAINING, "seed"),
    "Machine": MACHINE,
    "Evaluation": (*EVALUATION, "save_samples", "synthetic"),
}
"""Sections of the fields in the help of a command; the command's own options come first."""
WHOLE = ("clients", "rounds", "local_steps", "local_epochs", "batch_size", "seed", "eval_every", "early_stopping")
REAL = ("participation", "lr", "momentum", "weight_decay", "target")
KINDS: dict[str, type] = {**dict.fromkeys(WHOLE, int), **dict.fromkeys(REAL, float), "save_samples": bool}
FLAGS: dict[str, type] = {name: KINDS.get(name, str) for names in PANELS.values() for name in names}
"""Types of the flags, by field."""


def path_option(*names: str, help: str) -> Any:
    """Return the Typer option of a file or folder.

    Args:
        *names: Names of the option on the command line.
        help: Description in the help of the command.
    """
    return typer.Option(*names, parser=parse_path, metavar="PATH", help=help)


def add_flag(name: str) -> Any:
    """Return the Typer option of a field."""
    panel = next(panel for panel, names in PANELS.items() if name in names)
    return typer.Option(
        f"--{name.replace('_', '-')}", help=f"{flag_docs()[name][1]}.".replace("`", ""), rich_help_panel=panel
    )


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
    "export": "unskew export runs/digits-fedavg-seed0 --out model.onnx",
    "predict": "unskew predict runs/digits-fedavg-seed0 new.csv",
    "evaluate": "unskew evaluate runs/digits-fedavg-seed0 new.csv",
    "report": "unskew report runs/compare-digits",
    "benchmark": "unskew benchmark skew --federation digits-rotated --method fedavg --method scaffold",
    "reproduce": "unskew reproduce --list",
    "audit-privacy": "unskew audit-privacy runs/private --canaries 50",
    "privacy": "unskew privacy --clients 3383 --cohort 120 --rounds 100 --noise 1.2",
    "tune": "unskew tune fedavg fedprox --trials 10",
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
        """Write the help of all options; configuration fields are shown with their defaults.

        Args:
            ctx: Context of the command.
            formatter: Receives the help text.
        """
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", "Options", *PANELS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = flag_docs()[str(param.name)][0] if getattr(param, "rich_help_panel", None) else None
                record = record[0], f"{record[1]} [default: {default}]" if default not in (None, False) else record[1]
                own = "Arguments" if param.param_type_name == "argument" else "Options"
                panels[getattr(param, "rich_help_panel", None) or own].append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
