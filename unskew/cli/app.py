"""Entry point of the command line, and the commands ``run``, ``compare`` and ``resume``."""

from __future__ import annotations

import functools
import shlex
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli import info as cli_info
from unskew.cli.audit_privacy import audit_privacy
from unskew.cli.benchmark import benchmark
from unskew.cli.common import (
    SEEDS,
    AsJson,
    ConfigFile,
    DataPath,
    DeploymentFolder,
    Device,
    EngineName,
    LocalSites,
    Parallel,
    References,
    Rounds,
    Sets,
    SuperLinkAddress,
    TrustCode,
    config_values,
    confirm_resume_target,
    console_for,
    escape_lines,
    exit_on_signal,
    given_on_command_line,
    is_config_file,
    parse_seeds,
    print_json,
    repeat_command,
    resume_command,
    set_default_model,
    shorten_name,
    show,
    unused_path,
)
from unskew.cli.demo import demo
from unskew.cli.deploy import deploy
from unskew.cli.diagnose import diagnose
from unskew.cli.doctor import doctor
from unskew.cli.evaluate import evaluate
from unskew.cli.export import export
from unskew.cli.flags import EXAMPLES, PANELS, DocumentedCommands, Sections, with_described_options
from unskew.cli.init import init
from unskew.cli.predict import predict
from unskew.cli.privacy import privacy
from unskew.cli.report import report, report_after_runs
from unskew.cli.reproduce import reproduce
from unskew.cli.tune import tune
from unskew.cli.verbosity import LOUDNESS, log_event, normalize_global_flags, prepare_streams, print_notices
from unskew.cli.watch import watch
from unskew.errors import ConfigError, UnskewError, short_repr
from unskew.filesystem import check_run

app = DocumentedCommands(
    help="Federated learning on skewed data: run, compare and resume composable methods.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(invoke_without_command=True)(with_described_options(cli_info.version))


@app.command(cls=Sections)
@given_on_command_line(*PANELS)
def run(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument()] = None,
    file: Annotated[Path | None, typer.Option("--config")] = None,
    sets: Sets = None,
    out: Path | None = None,
    again: Annotated[bool, typer.Option("--resume")] = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Train one model across clients with one method.

    Options:
        config: Configuration file; flags override it.
        file: Configuration file.
        out: Output folder (default: runs/DATA-METHOD-seedN).
        again: Resume the run in --out.
    """
    from unskew.config.loader import experiment

    values = config_values(config, context)
    checked = experiment(values)  # report mistakes before PyTorch is loaded
    set_default_model(checked, values)
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.comparison.folder_name import folder_name
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
@given_on_command_line(*PANELS, without=("method", "seed", "save_samples"))
def compare(
    context: typer.Context,
    methods: list[str],
    seeds: Annotated[str, typer.Option("--seeds", help=f"Seeds: {SEEDS}")] = "0..2",
    config: ConfigFile = None,
    sets: Sets = None,
    out: Path | None = None,
    again: Annotated[bool, typer.Option("--resume")] = False,
    parallel: Parallel = None,
    part: Annotated[str | None, typer.Option(metavar="I/N")] = None,
    references: References = None,
    budget: Annotated[float | None, typer.Option(metavar="MINUTES")] = None,
    leave_out: Annotated[bool, typer.Option("--leave-one-out")] = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same data, partition, cohorts and initial model per seed.

    Options:
        methods: Methods, such as fedprox+scaffold, and optionally a configuration file (.yaml); or only configuration
            files, each with a method.
        out: Output folder (default: runs/compare-DATA).
        again: Resume the comparison in --out, reusing finished runs.
        part: Execute only part I of N of the runs, in an --out that the other parts share; --resume completes the comparison.
        budget: Start nothing if all runs are estimated to take longer.
        leave_out: Also train without each client in turn, or without each of those in --unseen, and evaluate on it.
    """
    from unskew.config.loader import experiment
    from unskew.methods.registry import check_expression

    files = [Path(name) for name in methods if is_config_file(name)]  # each file configures one method
    each = {}
    for file in files:
        own = {name: value for name, value in config_values(file, context).items() if name not in ("seed", "target")}
        name = own.pop("method", "fedavg")
        if not isinstance(name, str):
            raise ConfigError(f"{file}: method={short_repr(name)} is not a method expression such as fedprox+scaffold.")
        each[name] = own
    if len(each) < len(files):
        raise ConfigError(f"{' and '.join(methods)} must contain different methods: each file configures one method.")
    methods = list(each) or methods
    for name in methods:  # report mistakes before PyTorch is loaded
        check_expression(name)
    from unskew.cli.comparison_tables import (
        clients_table,
        comparison_tables,
        leave_one_out_table,
        metrics_table,
        print_benefit,
        reaching_table,
    )
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.cli.tables import format_count
    from unskew.comparison.compare import compare as compare_methods
    from unskew.comparison.compare_part import compare_part
    from unskew.comparison.cost_to_target import target_costs
    from unskew.comparison.leave_one_out import LeaveOneOut, leave_one_out
    from unskew.runs.parallel import read_parallel
    from unskew.runs.parts import parse_part

    at_once = read_parallel(parallel)
    own_part = None if part is None else parse_part(part, at_once)
    confirm_resume_target(again, out)
    if own_part is not None and out is None:
        raise ConfigError("--part requires --out with the folder that all parts share.")
    if own_part is not None and leave_out:
        raise ConfigError("--part does not divide the runs of --leave-one-out. Remove one of them.")
    for name in (assignment.partition("=")[0].strip() for assignment in sets or []):
        if name in ("method", "seed"):
            raise ConfigError(
                f"--set {name} has no effect on a comparison. List the methods, as in unskew compare fedavg moon, "
                "and set the seeds with --seeds 0..4."
            )
    which = parse_seeds(seeds)
    # The file may be written for a single run; methods and seeds of the comparison come from the command line.
    values = config_values(config, context, ignored=("method", "seed"))
    checked = experiment({**next(iter(each.values()), {}), **values})
    set_default_model(checked, {**next(iter(each.values()), {}), **values})
    target = values.pop("target", None)
    folder = out or unused_path(Path("runs") / f"compare-{shorten_name(checked)}")
    console = console_for(as_json)
    started = time.perf_counter()
    with_resume = again or own_part is not None
    go_on = repeat_command(*([] if out else ["--out", str(folder)]), *([] if with_resume else ["--resume"]))
    with exit_on_signal(folder, go_on), make_progress(console) as progress:
        arguments: dict[str, Any] = {
            "methods": methods,
            "seeds": which,
            "out": folder,
            "target": target,
            "parallel": at_once,
            "references": references,
            "budget_minutes": budget,
            "on_estimate": lambda text: None if LOUDNESS.quiet else console.print(text, markup=False, highlight=False),
            "callback_factory": lambda name, seed, _: [ProgressLine(progress, f"{name}, seed {seed}", named=True)],
            "overrides": each,
            **values,
        }
        if own_part is not None:
            finished = compare_part(own_part, **arguments)
        else:
            outcome = (leave_one_out if leave_out else compare_methods)(resume=again, **arguments)
    if own_part is not None:
        if as_json:
            print_json({"folder": str(folder), "part": str(own_part), **asdict(finished)})
            return
        text = (
            f"Part {own_part}: {format_count(len(finished.runs), 'run')} finished. In {folder}, {finished.finished} of "
        )
        text += f"{finished.total} are. When all are, replace --part {own_part} by --resume to complete the comparison."
        console.print(text, highlight=False, soft_wrap=True)
        return
    result = outcome.comparison if isinstance(outcome, LeaveOneOut) else outcome
    rows = result.rows()
    ranked = [row for row in rows if not row["reference"]]
    of_methods = {name: result.closed_histories[name] for name in result.ranked if result.has_global_model(name)}
    if as_json:
        target_rows = [] if target is None else target_costs(of_methods, target, result.objective)
        costs_of = [asdict(cost) for cost in target_rows]
        left_out = {"leave_one_out": outcome.as_json()} if isinstance(outcome, LeaveOneOut) else {}
        benefit = result.benefit
        compared = {"answers": result.answers(), "rows": rows, "clients": benefit.rows() if benefit else []}
        print_json({"folder": str(folder), **compared, "notes": result.notes(), "reaching": costs_of, **left_out})
        report_after_runs(console, [folder])
        return
    costs = None
    if target is not None and of_methods:
        judge = result.objective
        costs = reaching_table(target_costs(of_methods, target, judge), target, judge)
    print_benefit(console, result)
    for note in result.notes():
        console.print(f"{note}\n", markup=False)
    for table in filter(None, (*comparison_tables(rows), metrics_table(rows), clients_table(ranked), costs)):
        console.print(table)
    if isinstance(outcome, LeaveOneOut):
        console.print(leave_one_out_table(outcome))
    if not LOUDNESS.quiet:
        text = f"{folder}/convergence.png shows the learning curves, clients.png the label distribution across clients."
        console.print(text, markup=False)
    report_after_runs(console, [folder])
    if not LOUDNESS.quiet:
        console.print(f"{format_count(len(rows) * len(which), 'run')} in {time.perf_counter() - started:.0f} s.")


@app.command()
def resume(
    folder: Path,
    rounds: Rounds = None,
    data_path: DataPath = None,
    engine: EngineName = None,
    device: Device = None,
    sets: Sets = None,
    local: LocalSites = None,
    deployment_folder: DeploymentFolder = None,
    superlink: SuperLinkAddress = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Resume an interrupted run, or extend a finished run with --rounds; a deployed run needs its sites.

    Options:
        folder: Run folder.
    """
    check_run(folder, resume=True)
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.config.loader import set_field
    from unskew.deployment.flower.superlinks import RunLocation
    from unskew.deployment.server.config import is_deployed
    from unskew.deployment.server.run import resume as resume_deployed
    from unskew.runs.run import resume as resume_run

    location, deployed = RunLocation(local, deployment_folder, superlink), is_deployed(folder)
    if deployed:
        location.check(f" {folder} is a deployed run, and its files do not say where its sites are.")
    elif location != RunLocation():
        raise ConfigError(f"{folder} is not a deployed run. Remove --local, --folder and --superlink.")
    flags = {"rounds": rounds, "data_path": data_path, "engine": engine, "device": device}
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for assignment in sets or []:
        set_field(changes, assignment)
    console = console_for(as_json)
    where = location.options if deployed else []
    again = shlex.join(["unskew", "resume", str(folder), *where, *(["--trust-code"] if trust_code else [])])
    with exit_on_signal(folder, again), make_progress(console) as progress:
        go_on = functools.partial(resume_deployed, location=location) if deployed else resume_run
        result = go_on(folder, callbacks=[ProgressLine(progress, folder.name)], trust_code=trust_code, **changes)
    show(result, folder, console, as_json)


COMMANDS = (
    *(cli_info.methods, cli_info.models, cli_info.partition, init, diagnose, demo, doctor, evaluate, export, predict),
    *(privacy, benchmark, audit_privacy, report, reproduce, tune, watch),
)
for function in COMMANDS:
    app.command(cls=Sections if function in (cli_info.partition, diagnose, tune) else None)(function)
for command in app.registered_commands:
    name = command.callback.__name__  # type: ignore[union-attr]
    command.epilog = f"Example: {EXAMPLES[name.replace('_', '-')]}"
app.add_typer(deploy, name="deploy")


def _print_error(message: str) -> None:
    """Print an error message to standard error."""
    if LOUDNESS.log_json:
        log_event("error", text=message.removeprefix("unskew: "))
        return
    from rich.console import Console  # slow to import, and not needed otherwise

    Console(stderr=True).print(escape_lines(message), style="red", markup=False, highlight=False, soft_wrap=True)


@functools.cache
def commands() -> Any:
    """Return the command with all subcommands; cached because building it is slow."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line; user errors give a message and exit code 2 instead of a traceback."""
    prepare_streams()
    print_notices()
    try:
        commands()(prog_name="unskew", args=normalize_global_flags(sys.argv[1:]))
    except (UnskewError, OSError) as error:
        if LOUDNESS.verbose:
            traceback.print_exc()
        _print_error(f"unskew: {error}")
        sys.exit(2)
    except (MemoryError, RuntimeError, ImportError) as error:
        # The second text is the message of a library that cannot be loaded.
        out_of_memory = any(text in str(error) for text in ("memory", "failed to map segment"))
        if not isinstance(error, MemoryError) and not out_of_memory:
            raise
        message = (
            f"unskew: there is not enough memory: {str(error).splitlines()[-1] if str(error) else 'allocation failed'}"
        )
        _print_error(message)
        sys.exit(2)
