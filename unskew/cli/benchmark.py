"""``unskew benchmark``: tune and compare methods on many federations, with equal budgets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unskew.cli.common import (
    AsJson,
    DataPath,
    Parallel,
    TrustCode,
    console_for,
    exit_on_signal,
    print_json,
    repeat_command,
)
from unskew.errors import ConfigError
from unskew.filesystem import parse_path

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.benchmark.runner import SuiteRuns, Unit


def benchmark(
    suite: Annotated[str, typer.Argument()] = "skew",
    federations: Annotated[list[str] | None, typer.Option("--federation")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method")] = None,
    data_path: DataPath = None,
    results: Path = Path("results/benchmark"),
    parallel: Parallel = "1",
    part: Annotated[str | None, typer.Option(metavar="I/N")] = None,
    listing: Annotated[bool, typer.Option("--list")] = False,
    estimate: bool = False,
    show: bool = False,
    pages: Path | None = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Tune methods with equal budgets on many federations, and compare them; finished parts are not repeated.

    Options:
        suite: Name of a suite, or a YAML file.
        federations: Run only this federation. Repeatable.
        methods: Run only this method. Repeatable.
        results: Folder of the outcomes.
        part: Run only part I of N of the units, in a --results that the other parts share; print no tables.
        listing: List the federations and methods, and missing files.
        estimate: Only estimate the time.
        show: Show the stored outcomes without running anything.
        pages: Folder for Markdown pages and heat maps.
    """
    from unskew.benchmark.pages import write_pages
    from unskew.benchmark.runner import SuiteRuns
    from unskew.benchmark.suite import load_suite
    from unskew.runs.cost import duration
    from unskew.runs.parallel import num_parallel_jobs, read_parallel
    from unskew.runs.parts import parse_part
    from unskew.tuning.study import optuna_library

    at_once, console = read_parallel(parallel), console_for(as_json)
    own_part = None if part is None else parse_part(part, at_once)
    other = next((name for name, value in (("--list", listing), ("--show", show), ("--pages", pages)) if value), None)
    if own_part is not None and other is not None:
        raise ConfigError(f"--part runs units and prints no tables. Run {other} without --part.")
    runs = SuiteRuns(*load_suite(suite, trust_code), results, None if data_path is None else parse_path(data_path))
    wanted = runs.units(federations or (), methods or ())
    if own_part is not None:
        wanted = runs.units_of_part(wanted, own_part)
    elif not (listing or estimate or show):
        runs.merge_parts()
    missing, stored = runs.missing(), runs.stored()
    if listing:
        _list(runs, missing, stored, console, as_json)
        return
    todo = [unit for unit in wanted if unit not in stored and unit.federation not in missing]
    left_out = dict.fromkeys(unit.federation for unit in wanted if unit.federation in missing)
    failures: dict[Unit, str] = {}
    if not show:
        for name in left_out:
            text = f"{name} is left out: the file {missing[name]} is missing. Set --data-path to its folder."
            console.print(text, style="yellow", soft_wrap=True, highlight=False)
        if todo:
            optuna_library()
            seconds, unknown = runs.estimate(todo, num_parallel_jobs(at_once, len(todo)))
            text = (
                f"{len(todo)} of {len(wanted)} units to run: about {duration(seconds)} if all took as long as FedAvg."
            )
            if unknown:
                text += f" Not measured: {', '.join(unknown)}."
            console.print(text, soft_wrap=True, highlight=False)
        if estimate:
            return
        if todo:
            failures = _run(runs, todo, at_once, own_part is not None, results, console)
            stored = runs.stored()
            for unit in todo:
                if reason := stored.get(unit, {}).get("not_applicable"):
                    text = f"{unit.method} does not apply to {unit.federation}, and is not repeated: {reason}"
                    console.print(text, style="yellow", soft_wrap=True, highlight=False)
    if pages is not None:
        write_pages(runs, pages)
    if as_json:
        shown = [{**vars(unit), **stored[unit]} for unit in wanted if unit in stored]
        print_json(
            {
                "suite": runs.suite.name,
                **({} if own_part is None else {"part": str(own_part)}),
                "units": shown,
                "failures": [[*vars(u).values(), t] for u, t in failures.items()],
            }
        )
    elif own_part is not None:
        done = sum(unit in stored for unit in wanted)
        console.print(f"Part {own_part}: {done} of {len(wanted)} units are stored in {results}.", soft_wrap=True)
    else:
        _show(runs, set(federations or ()), console)
        if pages is not None:
            console.print(f"The pages are in {pages}; start with {pages}/index.md.", soft_wrap=True, highlight=False)
    if failures:
        unit, reason = next(iter(failures.items()))
        raise ConfigError(
            f"{len(failures)} units failed, first {unit.method} on {unit.federation}: {reason} Run the command again to "
            "repeat them."
        )


def _run(
    runs: SuiteRuns, todo: list[Unit], at_once: int | str | None, in_parts: bool, results: Path, console: Console
) -> dict[Unit, str]:
    """Run units with a progress bar, and return the errors of those that failed."""
    from unskew.cli.progress import make_progress

    failures = {}
    with exit_on_signal(results, repeat_command()), make_progress(console) as progress:
        progress.start()
        task = progress.add_task(runs.suite.name, total=len(todo), accuracy="")
        for unit, failure in runs.carry_out(todo, at_once, in_parts):
            progress.advance(task)
            if failure is not None:
                failures[unit] = failure
    return failures


def _list(
    runs: SuiteRuns, missing: dict[str, str], stored: dict[Unit, dict[str, object]], console: Console, as_json: bool
) -> None:
    """Print the federations of a suite, with their finished units and missing files."""
    from unskew.cli.fit_table import table_of

    suite, units = runs.suite, runs.units()
    if as_json:
        names = [federation.model_dump() for federation in runs.federations.values()]
        print_json({"suite": suite.model_dump() | {"federations": names}, "missing": missing})
        return
    rows = []
    for name, federation in runs.federations.items():
        own = [unit for unit in units if unit.federation == name]
        done = sum(unit in stored for unit in own)
        rows.append((name, federation.title, f"{done} of {len(own)}", missing.get(name, "")))
    console.print(table_of(("federation", "title", "finished", "missing file"), rows, suite.title))
    console.print(f"Methods: {', '.join(suite.methods)}; references: {', '.join(suite.references)}.", soft_wrap=True)


def _show(runs: SuiteRuns, federations: set[str], console: Console) -> None:
    """Print the table of each requested federation, or the overview of all."""
    from unskew.benchmark.pages import KINDS, VIEWS
    from unskew.benchmark.results import read_results
    from unskew.benchmark.tables import federation_table, overview_table, ranks_note, tuning_table
    from unskew.cli.fit_table import table_of

    results = [own for own in read_results(runs) if not federations or own.federation.name in federations]
    if not results:
        console.print(f"There are no outcomes of {runs.suite.baseline} yet.")
        return

    def put(title: str, header: list[str], rows: list[list[str]]) -> None:
        plain = ([cell.replace("`", "").replace("**", "") for cell in row] for row in rows)
        console.print(table_of(header, plain, title))

    if federations:
        for own in results:
            title, header, rows = federation_table(own)
            put(f"{own.federation.title}: {title}", header, rows)
        return
    for kind, name in KINDS.items():
        own_kind = [own for own in results if own.federation.kind == kind]
        if not own_kind:
            continue
        console.print(name, style="bold")
        put(*tuning_table(own_kind))
        for view in VIEWS:
            overview = overview_table(own_kind, runs.suite.methods[1:], view)
            if overview[2]:
                put(*overview)
                console.print(ranks_note(own_kind, view), soft_wrap=True)
