"""``unskew reproduce``: run tables of papers at a chosen scale, and compare with the published numbers."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.cli.common import (
    AsJson,
    DataPath,
    Device,
    EngineName,
    Parallel,
    ServerDataPath,
    console_for,
    exit_on_signal,
    print_json,
    repeat_command,
)
from unskew.cli.report import report_after_runs
from unskew.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.reproduction.preset import Preset
    from unskew.reproduction.study import Line, StudyPreset


def reproduce(
    preset: Annotated[str | None, typer.Argument()] = None,
    scale: str = "smoke",
    listing: Annotated[bool, typer.Option("--list")] = False,
    seeds: str | None = None,
    rows: Annotated[list[str] | None, typer.Option("--row")] = None,
    columns: Annotated[list[str] | None, typer.Option("--column")] = None,
    data_path: DataPath = None,
    server_data_path: ServerDataPath = None,
    engine: EngineName = None,
    device: Device = None,
    runs: Path = Path("runs/reproduce"),
    results: Path = Path("results/runs"),
    parallel: Parallel = None,
    minutes: float | None = None,
    show: bool = False,
    plot: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Run or resume a table of a paper, and print the paper's numbers next to ours.

    Options:
        preset: Preset, such as fedcog/table-3.
        scale: smoke (minutes), cpu (hours) or paper.
        listing: List the presets.
        seeds: Seeds, such as 0,1,2; by default, those of the scale.
        rows: Run only this row. Repeatable.
        columns: Run only this column. Repeatable.
        runs: Folder for run folders.
        results: Folder of the outcomes.
        minutes: Stop after this time; the same command continues.
        show: Show the table of existing outcomes without running anything.
        plot: Write a plot of the table to this image file.
    """
    from unskew.cli.fit_table import table_of
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.expressions import parse_seed_list
    from unskew.reproduction import tables as report
    from unskew.reproduction.figures import draw_curves, draw_points
    from unskew.reproduction.preset import SCALES, load_preset, num_seeds, preset_names
    from unskew.reproduction.settings import settings_note
    from unskew.reproduction.study import load_study, study_names
    from unskew.reproduction.sweep import Sweep
    from unskew.reproduction.time_limit import TimeLimit
    from unskew.runs.parallel import read_parallel
    from unskew.simulation.checkpoint import checkpoint_errors

    console, at_once = console_for(as_json), read_parallel(parallel)
    limit, state = None if minutes is None else TimeLimit(minutes), None
    if listing or preset is None:
        presets = [load_preset(name) for name in preset_names()] + [load_study(name) for name in study_names()]
        if as_json:
            print_json(
                [{"name": p.name, "title": p.title, "where": p.where, "reference": p.reference} for p in presets]
            )
            return
        title = "unskew reproduce PRESET --scale " + "|".join(SCALES)
        console.print(table_of(("preset", "title", "where"), [(p.name, p.title, p.where) for p in presets], title))
        return
    if preset in study_names():
        if columns or any(option is not None for option in (engine, device, server_data_path, minutes)):
            raise ConfigError(
                f"{preset} supports --row, but not --column, --engine, --device, --server-data-path and --minutes."
            )
        which = parse_seed_list(seeds) if seeds else None
        _study(preset, scale, which, rows, data_path, results, show, plot, as_json, at_once)
        return
    if preset not in preset_names():
        raise ConfigError(unknown_name("preset", preset, [*preset_names(), *study_names()]))
    table = load_preset(preset)
    paths = {"data_path": data_path, "server_data_path": server_data_path}
    extra: dict[str, Any] = {**paths, "engine": engine, "device": device}
    extra = {name: value for name, value in extra.items() if value is not None}
    which = parse_seed_list(seeds) if seeds else list(range(num_seeds(table, scale)))
    for kind, wanted, available in (("row", rows, table.rows), ("column", columns, table.columns)):
        for name in wanted or ():
            if name not in available:
                raise ConfigError(f"{preset} has no {kind} {name!r}. Available: {'; '.join(available)}.")
    with exit_on_signal(runs, repeat_command()), make_progress(console) as progress:

        def follow(title: str, common: bool) -> list[ProgressLine]:
            return [ProgressLine(progress, title, warnings=not common, named=True)]

        warn = partial(console.print, style="yellow", soft_wrap=True)
        sweep = Sweep(table, scale, runs, results, extra, rows, columns, follow, warn, limit)
        if show:
            outcomes = sweep.known(which)
        else:
            missing = sweep.settle()
            if missing:
                other = sweep.cells(0)[0].config.data
                console.print(f"{missing} This scale uses {other} instead.", style="yellow", soft_wrap=True)
            outcomes = sweep.carry_out(which, at_once)
            state = None if limit is None else sweep.progress()
    with checkpoint_errors(results):
        entries = report.table_entries(table, outcomes)
    settings = settings_note(table, scale, (cell for cell, _ in outcomes))
    folders = list(dict.fromkeys(folder for folder in map(sweep.folder, (cell for cell, _ in outcomes)) if folder))
    if folders and not show:
        name = f"{preset.replace('/', '-')}-{scale}.html"
        report_after_runs(console, folders, runs / name)
    if plot is not None and outcomes:
        (draw_curves(table, outcomes, plot) if table.curves else draw_points(table, entries, plot))
    if as_json:
        print_json(
            {
                "preset": preset,
                "scale": scale,
                "settings": settings,
                "entries": report.as_json(entries),
                "published": table.published,
                **({} if state is None else {"progress": asdict(state)}),
            }
        )
        return
    if not outcomes:
        requested = {
            value: {
                c: {r: n for r, n in of.items() if r in (rows or of)} for c, of in by.items() if c in (columns or by)
            }
            for value, by in table.published.items()
        }
        table = table.model_copy(update={"published": requested})
    lines = report.table_lines(table, entries, whole=not outcomes)
    _print(console, table, scale, settings, lines, bool(outcomes))
    for note in report.footnotes(outcomes):
        console.print(note, soft_wrap=True)
    if state is not None:
        console.print(str(state), soft_wrap=True, highlight=False)
        if not state.is_complete:
            console.print(f"To continue, run: {repeat_command()}", soft_wrap=True, highlight=False)


def _study(
    name: str,
    scale: str,
    seeds: list[int] | None,
    parts: list[str] | None,
    data_path: str | None,
    results: Path,
    show: bool,
    plot: Path | None,
    as_json: bool,
    parallel: int | str | None,
) -> None:
    """Run a preset that is implemented as a custom study."""
    from unskew.cli.progress import make_progress
    from unskew.reproduction.study import StudyRuns, load_study
    from unskew.simulation.checkpoint import checkpoint_errors

    console = console_for(as_json)
    preset = load_study(name)
    runs = StudyRuns(preset, scale, results, data_path, parts)
    which = list(range(runs.seeds)) if seeds is None else seeds
    if not show:
        missing = runs.settle()
        if missing:
            console.print(f"{missing} This scale uses {runs.settings['data']} instead.", style="yellow", soft_wrap=True)
        with exit_on_signal(results, repeat_command()), make_progress(console) as progress:
            progress.start()
            task = progress.add_task(name, total=len(which) * len(runs.parts()), accuracy="")
            for _ in runs.carry_out(which, parallel):
                progress.advance(task)
    outcomes = runs.found(which)
    if plot is not None and outcomes:
        runs.study.draw(outcomes, plot)
    if as_json:
        plain = [
            {"part": part, "seed": s, **o["summary"]} for part, by_seed in outcomes.items() for s, o in by_seed.items()
        ]
        print_json({"preset": name, "scale": scale, "settings": runs.note(), "entries": plain})
        return
    with checkpoint_errors(results):
        lines = runs.study.lines(outcomes)
    _print(console, preset, scale, runs.note(), lines, bool(outcomes))


def _print(
    console: Console, preset: Preset | StudyPreset, scale: str, settings: str, tables: list[Line], done: bool
) -> None:
    """Print the title, settings and tables of a preset."""
    from unskew.cli.fit_table import table_of

    console.print(f"{preset.title}: {preset.where} of {preset.reference}; scale {scale}")
    if preset.text:
        console.print(preset.text.strip())
    if settings:
        console.print(settings, style="yellow", soft_wrap=True, highlight=False)
    for title, header, lines in tables:
        console.print(table_of(header, lines, title))
    if not done:
        console.print("There are no outcomes yet.")
