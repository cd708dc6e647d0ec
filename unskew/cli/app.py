"""The command line: options in, a table or JSON out. No logic lives here."""

from __future__ import annotations

import functools
import shlex
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.cli import info as cli_info
from unskew.cli.common import (
    SEEDS,
    AsJson,
    ConfigFile,
    DataPath,
    Device,
    EngineName,
    Parallel,
    Rounds,
    Sets,
    TrustCode,
    config_values,
    confirm_resume_target,
    console_for,
    exit_on_signal,
    given_on_command_line,
    is_config_file,
    parse_seeds,
    print_json,
    resume_command,
    set_default_model,
    shorten_name,
    show,
    unused_path,
)
from unskew.cli.deploy import deploy
from unskew.cli.diagnose import diagnose
from unskew.cli.evaluate import evaluate
from unskew.cli.export import export
from unskew.cli.flags import DATA, EVALUATION, EXAMPLES, MACHINE, SERVER, TRAINING, Sections
from unskew.cli.init import init
from unskew.cli.predict import predict
from unskew.cli.report import report, report_after_runs
from unskew.cli.reproduce import reproduce
from unskew.cli.tune import tune
from unskew.cli.verbosity import LOUDNESS, normalize_global_flags, print_notices
from unskew.errors import ConfigError, UnskewError, short_repr
from unskew.filesystem import check_run, parse_path

if TYPE_CHECKING:
    pass

app = typer.Typer(
    help="Federated learning for skewed data: run, compare and resume methods that add up.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(invoke_without_command=True)(cli_info.version)


@app.command(cls=Sections)
@given_on_command_line(*DATA, *SERVER, "method", *TRAINING, "seed", *MACHINE, *EVALUATION, "save_samples", "synthetic")
def run(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="Configuration file; flags override it.")] = None,
    file: Annotated[
        Path | None, typer.Option("--config", parser=parse_path, metavar="PATH", help="Configuration file.")
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", parser=parse_path, metavar="PATH", help="Output folder (default: runs/DATA-METHOD-seedN)."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Train one model across clients with one method."""
    from unskew.config.loader import experiment

    values = config_values(config, context)
    checked = experiment(values)  # a mistake is told before PyTorch is loaded
    set_default_model(checked, values)
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.comparison.compare import folder_name
    from unskew.runs.run import check_unfinished, run_experiment

    confirm_resume_target(again, out)
    if again and out is not None:
        check_unfinished(out, checked.rounds)
    name = folder_name(f"{shorten_name(checked)}-{checked.method}-seed{checked.seed}")
    folder = out or unused_path(Path("runs") / name)
    console = console_for(as_json)
    with exit_on_signal(folder, resume_command(folder, checked)), make_progress(console) as progress:
        follower = ProgressLine(progress, checked.method, columns=True)
        result = run_experiment(checked, out=folder, resume=again, callbacks=[follower])
    show(result, folder, console, as_json)


@app.command(cls=Sections)
@given_on_command_line(*DATA, *SERVER, *TRAINING, *MACHINE, *EVALUATION, "synthetic")
def compare(
    context: typer.Context,
    methods: Annotated[
        list[str],
        typer.Argument(
            help="Methods, such as fedprox+scaffold; a .yaml file is the configuration, several alone are a method each."
        ),
    ],
    seeds: Annotated[str, typer.Option("--seeds", help=f"Seeds: {SEEDS}")] = "0..2",
    config: ConfigFile = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=parse_path, metavar="PATH", help="Output folder (default: runs/compare-DATA)."),
    ] = None,
    again: Annotated[bool, typer.Option("--resume", help="Go on in --out: finished runs are reused.")] = False,
    parallel: Parallel = "1",
    references: Annotated[
        bool | None,
        typer.Option(
            "--references/--no-references",
            help="Also train on all data in one place (pooled) and each client alone (local). [default: on]",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="MINUTES", help="Do not start if the estimated time is above this."),
    ] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same data, partition, cohorts and initial model per seed."""
    from unskew.config.loader import experiment
    from unskew.methods.registry import check_expression

    files = [Path(name) for name in methods if is_config_file(name)]  # each a method with its configuration
    each = {}
    for file in files:
        own = {name: value for name, value in config_values(file, context).items() if name not in ("seed", "target")}
        name = own.pop("method", "fedavg")
        if not isinstance(name, str):
            raise ConfigError(
                f"{file}: method={short_repr(name)} is not a method expression; write one such as fedprox+scaffold."
            )
        each[name] = own
    if len(each) < len(files):
        raise ConfigError(f"{' and '.join(methods)} name one method twice; each file is one with its configuration.")
    methods = list(each) or methods
    for name in methods:  # a mistake is told before PyTorch is loaded
        check_expression(name)
    from unskew.cli.comparison_tables import clients_table, comparison_table, metrics_table, reaching_table
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.comparison.compare import compare as compare_methods
    from unskew.comparison.cost_to_target import target_costs
    from unskew.runs.parallel import read_parallel

    at_once = read_parallel(parallel)
    confirm_resume_target(again, out)
    for name in (assignment.partition("=")[0].strip() for assignment in sets or []):
        if name in ("method", "seed"):
            raise ConfigError(
                f"--set {name} has no effect on a comparison: its methods are listed, as in unskew compare fedavg moon, "
                "and --seeds 0..4 takes the seeds 0 to 4."
            )
    which = parse_seeds(seeds)
    values = config_values(config, context)
    # A file made for one run may be used: what is compared, and for which seeds, is said here.
    for name in ("method", "seed"):
        values.pop(name, None)
    checked = experiment({**next(iter(each.values()), {}), **values})
    set_default_model(checked, {**next(iter(each.values()), {}), **values})
    target = values.pop("target", None)
    folder = out or unused_path(Path("runs") / f"compare-{shorten_name(checked)}")
    console = console_for(as_json)
    started = time.perf_counter()
    go_on = [*sys.argv[1:], *([] if out else ["--out", str(folder)]), *([] if again else ["--resume"])]
    with exit_on_signal(folder, shlex.join(["unskew", *go_on])), make_progress(console) as progress:
        result = compare_methods(
            methods=methods,
            seeds=which,
            out=folder,
            resume=again,
            target=target,
            parallel=at_once,
            references=references,
            budget_minutes=budget,
            on_estimate=lambda text: None if LOUDNESS.quiet else console.print(text, markup=False, highlight=False),
            callback_factory=lambda name, seed, _: [ProgressLine(progress, f"{name}, seed {seed}", named=True)],
            overrides=each,
            **values,
        )
    rows = result.rows()
    ranked = [row for row in rows if not row["reference"]]
    others = [row for row in rows if row["reference"]]
    of_methods = {name: result.histories[name] for name in result.ranked}
    if as_json:
        target_rows = [] if target is None else target_costs(of_methods, target, result.objective)
        costs_of = [asdict(cost) for cost in target_rows]
        print_json({"folder": str(folder), "rows": rows, "notes": result.notes(), "reaching": costs_of})
        report_after_runs(console, [folder])
        return
    costs = None
    if target is not None:
        judge = result.objective
        costs = reaching_table(target_costs(of_methods, target, judge), target, judge)
    for note in result.notes():
        console.print(f"{note}\n", markup=False)
    tables = [comparison_table(ranked), comparison_table(others) if others else None]
    for table in filter(None, (*tables, metrics_table(rows), clients_table(ranked), costs)):
        console.print(table)
    if not LOUDNESS.quiet:
        text = f"{folder}/convergence.png and clients.png show the curves and what each client holds."
        console.print(text, markup=False)
    report_after_runs(console, [folder])
    if not LOUDNESS.quiet:
        from unskew.cli.tables import format_count

        console.print(f"{format_count(len(rows) * len(which), 'run')} in {time.perf_counter() - started:.0f} s.")


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    rounds: Rounds = None,
    data_path: DataPath = None,
    engine: EngineName = None,
    device: Device = None,
    sets: Sets = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Go on with an interrupted run, or make a finished one longer with --rounds."""
    check_run(folder, resume=True)
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.config.loader import set_field
    from unskew.deployment.server.config import is_deployed
    from unskew.deployment.server.run import resume as resume_deployed
    from unskew.runs.run import resume as resume_run

    flags = {"rounds": rounds, "data_path": data_path, "engine": engine, "device": device}
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for assignment in sets or []:
        set_field(changes, assignment)
    console = console_for(as_json)
    again = shlex.join(["unskew", "resume", str(folder), *(["--trust-code"] if trust_code else [])])
    with exit_on_signal(folder, again), make_progress(console) as progress:
        go_on = resume_deployed if is_deployed(folder) else resume_run
        result = go_on(folder, callbacks=[ProgressLine(progress, folder.name)], trust_code=trust_code, **changes)
    show(result, folder, console, as_json)


app.command()(cli_info.methods)
app.command()(cli_info.models)
app.command(cls=Sections)(cli_info.partition)
app.command()(init)
app.command(cls=Sections)(diagnose)
app.command()(evaluate)
app.command()(export)
app.command()(predict)
app.command()(report)
app.command()(reproduce)
app.command(cls=Sections)(tune)
for command in app.registered_commands:
    name = command.name or command.callback.__name__  # type: ignore[union-attr]
    command.epilog = f"Example: {EXAMPLES[name]}"
app.add_typer(deploy, name="deploy")


def _refuse(text: str) -> None:
    """Say on standard error why nothing was done."""
    from rich.console import Console  # it takes as long as all else, and most that only ask for help do without

    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


@functools.cache
def commands() -> Any:
    """All commands, put together once in a process: that takes longer than to refuse a bad option."""
    return typer.main.get_command(app)


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    print_notices()
    try:
        commands()(prog_name="unskew", args=normalize_global_flags(sys.argv[1:]))
    except (UnskewError, OSError) as error:
        if LOUDNESS.verbose:
            traceback.print_exc()
        _refuse(f"unskew: {error}")
        sys.exit(2)
    except (MemoryError, RuntimeError, ImportError) as error:
        scarce = any(words in str(error) for words in ("memory", "failed to map segment"))  # the latter of a library
        if not isinstance(error, MemoryError) and not scarce:
            raise
        text = (
            f"unskew: there is not enough memory for this: {str(error).splitlines()[-1] if str(error) else 'none left'}"
        )
        _refuse(text)
        sys.exit(2)
