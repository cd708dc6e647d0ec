"""Pages of a benchmark as Markdown and images: an overview, and a page per federation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unskew.benchmark.results import FederationResults, View, read_results
from unskew.benchmark.runner import COMMON_OPTIONS, SuiteRuns
from unskew.benchmark.suite import BenchmarkFederation, Suite, included
from unskew.benchmark.tables import FEWEST, TITLES, federation_table, overview_table, ranks_note, tuning_table
from unskew.filesystem import make_folder, write_atomic
from unskew.plots.heat_map import plot_heat_map
from unskew.reproduction.study import Line
from unskew.reproduction.tables import markdown

KINDS = {"natural": "Natural federations", "controlled": "Controlled skew"}
VIEWS: tuple[View, ...] = ("global", "clients")
LEGEND = (
    "Each cell is the mean difference to the tuned baseline over paired seeds, {unit}. Bold and colored differences "
    "are decided (paired t-test, 5 %, Holm's correction over the methods of a federation); all others are ties. "
    "Intervals are 95 %, of one method without correction; in the overview, from resampled federations if there are at "
    f"least {FEWEST}."
)


def legend(results: Sequence[FederationResults]) -> str:
    """Return the explanation of differences, with their unit.

    Args:
        results: Outcomes of the federations of a page.
    """
    if all(own.metric.percent for own in results):
        return LEGEND.format(unit="in points")
    unit = "in points for metrics in percent and in the unit of the metric for others; positive is better"
    return LEGEND.format(unit=unit)


def write_pages(runs: SuiteRuns, folder: Path) -> list[Path]:
    """Write ``index.md``, a page per federation, and heat maps.

    Args:
        runs: Units of the suite.
        folder: Folder to write to.

    Returns:
        Files that were written.
    """
    results = read_results(runs)
    make_folder(folder)
    written = []
    for own in results:
        path = folder / f"{own.federation.name}.md"
        write_atomic(path, federation_page(runs, own).encode())
        written.append(path)
    for kind in KINDS:
        own_kind = [own for own in results if own.federation.kind == kind]
        for view in VIEWS:
            if any(own.differences(view) for own in own_kind):
                written.append(_heat_map(runs, own_kind, view, folder / f"{kind}-{view}.svg"))
    index = folder / "index.md"
    write_atomic(index, overview_page(runs, results).encode())
    return [index, *written]


def federation_page(runs: SuiteRuns, results: FederationResults) -> str:
    """Return the page of one federation.

    Args:
        runs: Units of the suite.
        results: Outcomes of the federation.
    """
    federation, suite = results.federation, runs.suite
    title, header, rows = federation_table(results)
    lines = [
        f"# {federation.title}",
        f"Source: {federation.source}. {budget(suite)}",
        f"```bash\n{command(runs, federation)}\n```",
        f"{title}. Rounds and MB are those until the mean final score of tuned {results.baseline} is reached in every "
        f"seed. {legend([results])}",
        markdown(header, rows),
    ]
    fewer = [unit.method for unit in runs.with_fewer_trials() if unit.federation == federation.name]
    if fewer:
        names = ", ".join(f"`{name}`" for name in fewer)
        lines.append(f"With {suite.trials} trials, because their larger budgets have not been run yet: {names}.")
    if results.not_applicable:
        reasons = (f"- `{name}`: {reason}" for name, reason in results.not_applicable.items())
        lines.append("Not applicable:\n\n" + "\n".join(reasons))
    if federation.without:
        reasons = (f"- `{name}`: {reason}" for name, reason in federation.without.items())
        lines.append("Not run:\n\n" + "\n".join(reasons))
    return "\n\n".join(lines) + "\n"


def budget(suite: Suite) -> str:
    """Return a sentence with the seeds and the trials of a suite."""
    text = f"{len(suite.seeds)} seeds, {suite.trials} trials per method"
    if suite.trials_per_option:
        text += f" and {suite.trials_per_option} more for each tuned option beyond {COMMON_OPTIONS}"
    return text + "."


def command(runs: SuiteRuns, federation: BenchmarkFederation | None = None) -> str:
    """Return the command that computes the numbers of a page.

    Args:
        runs: Units of the suite.
        federation: Federation of the page; None for all.
    """
    name = runs.suite.name
    words = ["unskew", "benchmark", name if name in included("suites") else f"{name}.yaml"]
    if federation is not None:
        words += ["--federation", federation.name]
    if federation is None or federation.needs is not None:
        words += ["--data-path", "DATA"]
    return " ".join(words)


def overview_page(runs: SuiteRuns, results: Sequence[FederationResults]) -> str:
    """Return the overview of all federations.

    Args:
        runs: Units of the suite.
        results: Outcomes of the federations.
    """
    suite = runs.suite
    planned, stored, fewer = runs.units(), runs.stored(), runs.with_fewer_trials()
    lines = [
        f"# {suite.title}",
        f"{len(stored)} of {len(planned)} units (a method on a federation) are finished; methods that are not "
        f"applicable count as finished. {budget(suite)}"
        + (f" {len(fewer)} further units are shown with {suite.trials} trials." if fewer else ""),
        f"```bash\n{command(runs)}\n```",
        legend(results),
    ]
    for kind, title in KINDS.items():
        own_kind = [own for own in results if own.federation.kind == kind]
        if not own_kind:
            continue
        lines += [f"## {title}", *_as_text(tuning_table(own_kind))]
        lines.append(
            "The best method is the largest of many differences, so it is biased upward; use the overview below."
        )
        for view in VIEWS:
            overview = overview_table(own_kind, suite.methods[1:], view)
            if overview[2]:
                lines += [*_as_text(overview), ranks_note(own_kind, view), f"![{TITLES[view]}]({kind}-{view}.svg)"]
        pages = (f"[{own.federation.title}]({own.federation.name}.md)" for own in own_kind)
        lines.append("Pages: " + ", ".join(pages) + ".")
    return "\n\n".join(lines) + "\n"


def _as_text(line: Line) -> list[str]:
    title, header, rows = line
    return [f"### {title}", markdown(header, rows)]


def _heat_map(runs: SuiteRuns, results: Sequence[FederationResults], view: View, path: Path) -> Path:
    """Draw the heat map of one kind of federations and one view."""
    differences = {own.federation.name: own.differences(view) for own in results}
    return plot_heat_map(
        {name: {method: d.mean for method, d in own.items()} for name, own in differences.items()},
        {name: {method: d.verdict != "tie" for method, d in own.items()} for name, own in differences.items()},
        [name for name in runs.suite.methods[1:] if any(name in own for own in differences.values())],
        f"{TITLES[view]}: difference to tuned {runs.suite.baseline}",
        path,
        {own.federation.name: own.metric for own in results},
    )
