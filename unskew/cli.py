"""The command line: options in, a table or JSON out. No logic lives here."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from unskew.errors import UnskewError

app = typer.Typer(
    help="Federated learning for skewed data: run, compare and resume methods that add up.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Data = Annotated[str | None, typer.Option("--data", help="Data source: digits, cifar10, ..., table:PATH, folder:PATH.")]
DataPath = Annotated[str | None, typer.Option("--data-path", help="Folder with the source's files, for offline use.")]
PartitionSpec = Annotated[str | None, typer.Option("--partition", help="iid, dirichlet:0.1, classes:2, sorted, ...")]
Clients = Annotated[int | None, typer.Option("--clients", help="Number of clients.")]
Model = Annotated[
    str | None, typer.Option("--model", help="logistic, mlp, cnn, cnn-b, resnet20, vgg11, package.module:f")
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
EvalEvery = Annotated[int | None, typer.Option("--eval-every", help="Evaluate every so many rounds.")]
Target = Annotated[float | None, typer.Option("--target", help="Report the rounds needed to this accuracy (0 to 1).")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any other field, as any.field=value. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file; flags override it.")]

_FLAGS = (
    *("data", "data_path", "partition", "clients", "model", "rounds", "participation", "local_steps", "local_epochs"),
    *("batch_size", "lr", "momentum", "weight_decay", "engine", "device", "eval_every", "target"),
)


def _values(config: Path | None, sets: list[str] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The configuration file, overridden by flags, overridden by --set."""
    from unskew.config import load_yaml, set_field

    values = load_yaml(config) if config is not None else {}
    given = {name: value for name, value in flags.items() if value is not None}
    if "local_steps" in given and "local_epochs" not in given:
        values.pop("local_epochs", None)
    if "local_epochs" in given and "local_steps" not in given:
        values.pop("local_steps", None)
    values |= given
    for assignment in sets or []:
        set_field(values, assignment)
    return values


def _flags(context: typer.Context) -> dict[str, Any]:
    return {name: context.params.get(name) for name in _FLAGS}


def _console(as_json: bool) -> Console:
    """Progress goes to standard error when standard output must be JSON."""
    return Console(stderr=as_json)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _free_name(base: Path) -> Path:
    """``base``, or ``base-2``, ``base-3`` ... if a run is already there."""
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


@app.command()
def run(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="Configuration file; flags override it.")] = None,
    data: Data = None,
    data_path: DataPath = None,
    partition: PartitionSpec = None,
    clients: Clients = None,
    method: Annotated[str | None, typer.Option("--method", help="A method or a sum: fedprox:mu=0.1+scaffold.")] = None,
    model: Model = None,
    rounds: Rounds = None,
    participation: Participation = None,
    local_steps: LocalSteps = None,
    local_epochs: LocalEpochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    momentum: Momentum = None,
    weight_decay: WeightDecay = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Decides every random draw.")] = None,
    engine: EngineName = None,
    device: Device = None,
    eval_every: EvalEvery = None,
    target: Target = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; runs/DATA-METHOD-seedN by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model across clients with one method."""
    from unskew.comparison import folder_name
    from unskew.config import experiment
    from unskew.records.progress import ProgressLine, make_progress
    from unskew.records.tables import summary_table
    from unskew.runs import run_experiment

    values = _values(config, sets, _flags(context) | {"method": method, "seed": seed})
    checked = experiment(values)
    name = folder_name(f"{Path(checked.data).name}-{checked.method}-seed{checked.seed}")
    folder = out or _free_name(Path("runs") / name)
    console = _console(as_json)
    with make_progress(console) as progress:
        result = run_experiment(checked, out=folder, callbacks=[ProgressLine(progress, checked.method)])
    if as_json:
        _print_json({**result.summary, "folder": str(folder)})
        return
    result.plot(folder / "convergence.png")
    console.print(summary_table(result.summary))
    console.print(f"Everything is in {folder}: config.yaml, metrics.jsonl, summary.json, model.safetensors, figures.")


@app.command()
def compare(
    context: typer.Context,
    methods: Annotated[list[str], typer.Argument(help="Methods or sums of methods.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds: 0, 1, ...")] = 3,
    config: ConfigFile = None,
    data: Data = None,
    data_path: DataPath = None,
    partition: PartitionSpec = None,
    clients: Clients = None,
    model: Model = None,
    rounds: Rounds = None,
    participation: Participation = None,
    local_steps: LocalSteps = None,
    local_epochs: LocalEpochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    momentum: Momentum = None,
    weight_decay: WeightDecay = None,
    engine: EngineName = None,
    device: Device = None,
    eval_every: EvalEvery = None,
    target: Target = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the comparison; runs/compare-... by default.")
    ] = None,
    again: Annotated[bool, typer.Option("--resume", help="Go on in --out: finished runs are reused.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same data, partition, cohorts and initial model per seed."""
    from unskew.comparison import compare as compare_methods
    from unskew.records.progress import ProgressLine, make_progress
    from unskew.records.tables import comparison_table

    values = _values(config, sets, _flags(context))
    values.pop("method", None)
    target = values.pop("target", None)
    folder = out or _free_name(Path("runs") / f"compare-{Path(values.get('data', 'digits')).name}")
    console = _console(as_json)
    started = time.perf_counter()
    with make_progress(console) as progress:
        result = compare_methods(
            methods=methods,
            seeds=seeds,
            out=folder,
            again=again,
            target=target,
            follow=lambda name, seed, _: [ProgressLine(progress, f"{name}, seed {seed}")],
            **values,
        )
    rows = result.rows()
    if as_json:
        _print_json({"folder": str(folder), "rows": rows})
        return
    console.print(comparison_table(rows))
    console.print(f"{folder}/convergence.png and clients.png show the curves and what each client holds.")
    console.print(f"{len(methods) * seeds} runs in {time.perf_counter() - started:.0f} s.")


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    rounds: Rounds = None,
    engine: EngineName = None,
    device: Device = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Go on with an interrupted run, or make a finished one longer with --rounds."""
    from unskew.config import set_field
    from unskew.records.progress import ProgressLine, make_progress
    from unskew.records.tables import summary_table
    from unskew.runs import resume as resume_run

    given = {"rounds": rounds, "engine": engine, "device": device}
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    for assignment in sets or []:
        set_field(changes, assignment)
    console = _console(as_json)
    with make_progress(console) as progress:
        result = resume_run(folder, callbacks=[ProgressLine(progress, folder.name)], **changes)
    if as_json:
        _print_json({**result.summary, "folder": str(folder)})
        return
    result.plot(folder / "convergence.png")
    console.print(summary_table(result.summary))


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List every method with the slot it fills, its options and its paper."""
    from unskew.methods.catalogue import describe
    from unskew.records.tables import methods_table

    rows = describe()
    if as_json:
        _print_json(rows)
    else:
        Console().print(methods_table(rows))


@app.command()
def partition(
    data: Annotated[str, typer.Argument(help="Data source.")] = "digits",
    partition: Annotated[str, typer.Option("--partition", help="How samples are split.")] = "dirichlet:0.1",
    clients: Annotated[int | None, typer.Option("--clients", help="Number of clients; 10, or all of a column.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    data_path: DataPath = None,
    label: Annotated[str | None, typer.Option("--label", help="Label column of a table.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Image file for the plot.")] = Path("clients.png"),
    as_json: AsJson = False,
) -> None:
    """Show what each client would hold: a table, a plot, and the partition's hash."""
    from unskew.comparison import range_names
    from unskew.data.load import load_federation
    from unskew.records.plots import clients_by_class
    from unskew.records.tables import partition_table

    clients = clients if clients is not None or partition.startswith("natural") else 10
    fed = load_federation(
        data, partition=partition, clients=clients, seed=seed, path=data_path, label=label, holdout=0.0
    )
    counts, names = fed.class_counts(), fed.class_names or range_names(fed)
    if as_json:
        sizes = counts.sum(1)
        _print_json(
            {
                "data": fed.name,
                "partition": fed.partition,
                "clients": len(fed.clients),
                "seed": seed,
                "hash": fed.fingerprint,
                "smallest": int(sizes.min()),
                "largest": int(sizes.max()),
                "class_names": list(names),
                "counts": counts.tolist(),
            }
        )
        return
    console = Console()
    console.print(partition_table(counts, names))
    clients_by_class(counts, names, out)
    console.print(f"partition hash {fed.fingerprint}, plot in {out}")


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning for skewed data: run, compare and resume methods that add up."""
    if show:
        from unskew import __version__

        print(f"unskew {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    # Models and methods given as "package.module:name" may lie in the folder one works in.
    sys.path.insert(0, str(Path.cwd()))
    try:
        app(standalone_mode=True)
    except UnskewError as error:
        Console(stderr=True).print(f"unskew: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt as interruption:
        folder = getattr(interruption, "folder", None)
        again = "again with --out FOLDER --resume" if "compare" in sys.argv[1:2] else f"with: unskew resume {folder}"
        text = f"Stopped and saved. Go on {again}" if folder else "Stopped at once; go on from the last checkpoint."
        print(text, file=sys.stderr)
        sys.exit(130)
