"""Configuration fields with a command-line flag, and their sections in the help of commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

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

FLAGS: dict[str, tuple[type, str]] = {
    "data": (str, "Data source: digits, cifar10, ..., table:PATH, folder:PATH, npz:PATH, text:PATH."),
    "data_path": (str, "Folder with the source's files, for offline use."),
    "partition": (str, "iid, dirichlet:0.1, classes:2, sorted, ..."),
    "clients": (int, "Number of clients."),
    "unseen": (str, "Clients that only evaluate the final model and never train: a share such as 0.2, or names."),
    "shift": (str, "Feature shift of the clients' inputs: rotate:30, rotate:270,groups=4, noise:0.1."),
    "label": (str, "Label column of a table."),
    "label_separator": (str, "Separator between the labels of a row in a string label column."),
    "image": (str, "Image column of a table."),
    "text": (str, "Text column, or a pair: premise,hypothesis."),
    "tokenizer": (str, "Tokenizer of texts: a name on the Hugging Face Hub, a folder, or bytes."),
    "features": (str, "Columns of a table that are inputs: age,income; all numeric columns by default."),
    "exclude": (str, "Columns of a table that are not inputs: patient_id,row."),
    "categories": (str, "Categorical columns of a table: drug,ward; auto for all string columns."),
    "dates": (str, "Date columns of a table."),
    "missing": (str, "How to handle missing numbers: error, mean (impute), indicator (impute and flag)."),
    "split_by": (
        str,
        "Column whose values are never split between training and test: patient_id; time:visit_date; column:split.",
    ),
    "task": (str, "regression predicts the numbers in the label column."),
    "server_data": (str, "Data at the server: a number of test samples, or another data source."),
    "server_data_path": (str, "Folder with the files of the server's data source."),
    "method": (str, "Method expression: fedprox:mu=0.1+scaffold."),
    "model": (
        str,
        "logistic, mlp, table-mlp, cnn, resnet20, resnet-18, ... (unskew models), hf:NAME, package.module:function",
    ),
    "rounds": (int, "Communication rounds."),
    "participation": (float, "Share of clients per round."),
    "sampling": (
        str,
        "Cohorts: fixed, poisson (each client with probability participation), or power-of-choice:D (those of D candidates "
        "with the largest loss).",
    ),
    "local_steps": (int, "Mini-batch steps per client and round."),
    "local_epochs": (int, "Passes over a client's data per round."),
    "batch_size": (int, "Samples per step."),
    "optimizer": (str, "Client optimizer: sgd, adam or adamw."),
    "lr": (float, "Learning rate of the clients."),
    "lr_schedule": (str, "Learning-rate schedule: constant, step:30,0.1, cosine, warmup:5+cosine, ..."),
    "momentum": (float, "Momentum of the clients' SGD."),
    "weight_decay": (float, "Weight decay of the clients' optimizer."),
    "loss": (str, "Regression loss: mse, mae, huber or huber:DELTA."),
    "class_weights": (str, "Class weights in the clients' loss: balanced, or one per class: 1,5."),
    "client_weighting": (str, "Weights of clients in the aggregation: auto, samples or uniform."),
    "seed": (int, "Random seed."),
    "engine": (str, "auto, inline, processes, vectorized, ray, or the engine of a plugin."),
    "device": (str, "auto, cpu, cuda, cuda:1."),
    "delay": (str, "Rounds until updates arrive: none, fixed:3, half-normal:20, ..."),
    "attack": (str, "Clients that attack the run: signflip:share=0.2,scale=2, labelflip, backdoor, ..."),
    "eval_every": (int, "Number of rounds between evaluations."),
    "metrics": (str, "Additional metrics: auroc,auprc,f1,balanced_accuracy,ece,brier,recall,package.module:function."),
    "positive": (str, "Positive one of two classes, for auprc, f1 and calibration: fraud."),
    "objective": (str, "Metric that judges runs: auto, accuracy, auroc, auprc, loss, r2, worst_client, ..."),
    "early_stopping": (int, "Stop after this number of evaluations without improvement on held-out data."),
    "keep": (str, "Model of the run: last, or best on held-out data."),
    "target": (float, "Report the rounds needed to reach this value of the objective (accuracy: 0 to 1)."),
    "save_samples": (bool, "Plot the inputs that clients generate in the last round."),
    "synthetic": (str, "Run folder whose synthetic images are reused (fedssyn)."),
}
"""Type and help text of each field."""
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
    return typer.Option(f"--{name.replace('_', '-')}", help=FLAGS[name][1], rich_help_panel=panel)


DEFAULTS = {
    "data": "digits",
    "task": "auto",
    "missing": "error",
    "partition": "dirichlet:0.1",
    "clients": "10",
    "model": "cnn",
    "method": "fedavg",
    "client_weighting": "auto",
    "rounds": "50",
    "participation": "1",
    "sampling": "fixed",
    "local_epochs": "5",
    "batch_size": "64",
    "optimizer": "sgd",
    "lr": "0.1",
    "lr_schedule": "constant",
    "loss": "auto",
    "delay": "none",
    "engine": "auto",
    "device": "auto",
    "eval_every": "1",
    "objective": "auto",
    "keep": "last",
}
"""Defaults that the help shows."""
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
                default = DEFAULTS.get(str(param.name)) if getattr(param, "rich_help_panel", None) else None
                record = record[0], f"{record[1]} [default: {default}]" if default else record[1]
                own = "Arguments" if param.param_type_name == "argument" else "Options"
                panels[getattr(param, "rich_help_panel", None) or own].append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
