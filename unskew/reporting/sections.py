"""Sections of a group of the report, and the data of their charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import yaml

from unskew.comparison.benefit import client_label
from unskew.errors import abbreviate
from unskew.json_models import read_model
from unskew.reporting import chart_data, run_description, site_evaluation, tables
from unskew.reporting.label_distribution import label_distributions
from unskew.reporting.run_description import synthetic_folders
from unskew.reporting.run_groups import RunGroup
from unskew.reporting.section_errors import guard_section, section_html
from unskew.reporting.segmented_images import segmented_images
from unskew.reporting.site_evaluation import TITLE as EVALUATION
from unskew.reporting.synthetic_vs_real import synthetic_and_real
from unskew.reporting.templating import render_section
from unskew.reporting.verdict import verdict
from unskew.runs.coefficients import NAME as COEFFICIENTS
from unskew.tasks.few_samples import FEWEST
from unskew.tasks.formatting import value_text
from unskew.tasks.registry import task_scored_by

GENERAL = (
    *("train_loss", "setup_seconds", "train_seconds", "lr", "local_", "consensus/", "generalization/", "gradients/"),
    *("updates/", "server/", "arrivals", "in_flight", "staleness", "discarded"),
)
"""Round metrics that any method may report, or their prefixes; other metrics of methods are listed before them."""
LABELS = "Label distribution across clients"
SURVIVAL = "Survival"
MEASUREMENTS = "Measurements of the methods"
Styles = Mapping[str, Mapping[str, str]]


def group_content(part: RunGroup, styles: Styles) -> dict[str, Any]:
    """Return the data of a group's charts.

    Args:
        part: Runs of the group.
        styles: Color and dash of each method.
    """
    curves: dict[str, Any] = {"metric_titles": {}, "scored": part.scored, "unit": "", "target": None, "lines": {}}
    measured: dict[str, Any] = {"titles": {}, "lines": {}, "dots": {}}
    classifier: dict[str, Any] = {"axes": {}, "lines": {}}
    return {
        "methods": [{"label": entry.label, **styles[entry.label]} for entry in part.series],
        "curves": guard_section("Curves", lambda: chart_data.learning_curves(part), lambda _: curves),
        "measured": guard_section(MEASUREMENTS, lambda: chart_data.diagnostic_charts(part), lambda _: measured),
        "holdings": guard_section(LABELS, lambda: label_distributions(part), lambda _: []),
        "boxes": guard_section("Accuracy of clients", lambda: chart_data.client_boxes(part), lambda _: {}),
        "evaluations": guard_section(EVALUATION, lambda: site_evaluation.evaluation_charts(part), lambda _: []),
        "classifier": guard_section("Classifier", lambda: chart_data.classifier_curves(part), lambda _: classifier),
        "survival": guard_section(SURVIVAL, lambda: chart_data.survival_curves(part), lambda _: {"observed": {}}),
        "axes": {
            name: chart_data.axis_title(entry, " on a client's own data")
            for name, entry in chart_data.per_client_metrics(part).items()
        },
    }


def group_sections(part: RunGroup, shown: Mapping[str, Any], group: str, images: bool = True) -> list[str]:
    """Render the sections of a group; a failed section shows its error, and the others are rendered.

    Args:
        part: Runs of the group.
        shown: Data of the charts, from ``group_content``.
        group: Name of the group, which is unique on the page.
        images: Whether the page may contain images.

    Returns:
        HTML of each section that has content.
    """
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Result", partial(_result, part)),
        ("Does it help?", partial(_benefit, part)),
        ("Warnings", partial(_warnings, part)),
        ("Comparison", partial(_comparison, part, shown["methods"])),
        ("Curves", partial(_curves, part, shown["curves"], group)),
        ("Paired differences", partial(_differences, part)),
        (LABELS, partial(_label_distribution, shown["holdings"], group)),
        ("Accuracy of clients", partial(_clients, part, shown["boxes"])),
        (EVALUATION, partial(_evaluation, part, shown["evaluations"])),
        ("Classifier on the test set", partial(_classifier, part, shown["classifier"], group)),
        (SURVIVAL, partial(_survival, part, shown["survival"], group)),
        ("Masks of the test set", partial(_masks, part, images)),
        ("Coefficients", partial(_coefficients, part)),
        ("Cost", partial(_costs, part)),
        (MEASUREMENTS, partial(_methods, part, shown["measured"], images)),
        ("Run it again", partial(_repeat, part)),
    ]
    return [html for title, write in sections if (html := section_html(title, write))]


def _result(part: RunGroup) -> str:
    lines = verdict(part)
    return render_section("result", lines=lines) if lines else ""


def _benefit(part: RunGroup) -> str:
    benefit = part.comparison.benefit
    if benefit is None or not benefit.clients:
        return ""
    overview, clients = tables.benefit_tables(benefit)
    scored, same = part.at_clients.name, benefit.same_clients
    events = task_scored_by(benefit.scored).client_events if benefit.shows_events else ""
    return render_section("benefit", overview=overview, clients=clients, same=same, scored=scored, events=events)


def _warnings(part: RunGroup) -> str:
    lines = [f"{text} ({runs})" for runs, text in run_description.collect_warnings(part)]
    for method_runs in part.series:
        for own in (run.summary for run in method_runs.runs):
            if skipped := own.get("updates_skipped"):
                which = f"({method_runs.label}, seed {own['seed']})"
                lines.append(f"{skipped} updates were not finite and were skipped {which}")
    return render_section("warnings", lines=lines) if lines else ""


def _comparison(part: RunGroup, methods: Sequence[Mapping[str, str]]) -> str:
    both = (tables.comparison_table(part), tables.comparison_table(part, references=True))
    return render_section("comparison", methods=methods, tables=[table for table in both if table])


def _curves(part: RunGroup, shown: Mapping[str, Any], group: str) -> str:
    lines = [line for of_method in shown["lines"].values() for line in of_method.values() if line is not None]
    return render_section(
        "curves",
        titles={name: title.removesuffix(" (%)") for name, title in shown["metric_titles"].items()},
        group=group,
        several_seeds=any(len(method_runs.runs) > 1 for method_runs in part.series),
        reached=tables.target_table(part),
        timed=any("simulated" in line for line in lines),
    )


def _differences(part: RunGroup) -> str:
    table = tables.difference_table(part)
    return "" if table is None else render_section("differences", entry=table)


def _label_distribution(shown: Sequence[Mapping[str, Any]], group: str) -> str:
    partitions = []
    for entry in shown:
        numbers = {name: _short(value) for name, value in entry["statistics"].items()} | {
            "partition hash": entry["hash"]
        }
        partitions.append({"title": entry["title"], "numbers": numbers})
    has_map = any("map" in entry for entry in shown)
    return render_section("label_distribution", partitions=partitions, group=group, has_map=has_map)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _clients(part: RunGroup, shown: Mapping[str, Any]) -> str:
    table = tables.fairness_table(part)
    title = f"{part.at_clients.heading if table else 'Accuracy'} of clients"
    known = chart_data.per_client_metrics(part) if shown else {}
    choices = {
        name: f"{known[name].title}, {'own models' if name.startswith('personal_') else 'global model'}"
        for name in shown
    }
    evaluated_on = sorted({str(run.summary.get("clients_evaluated_on")) for run in part.runs})
    rows = [row for run in part.runs for row in run.clients]
    is_small = chart_data.few_samples_by_row(part, part.at_clients)
    few = {client_label(row) for row in rows if is_small(row)}
    everyone = {client_label(row) for row in rows}
    notes = [f"Measured on {', '.join(evaluated_on)}."]
    if part.at_clients.name == "accuracy":
        notes.append("Gini: 0 = all clients equally well served, 1 = all benefit goes to few.")
    if few:
        notes.append(
            f"{len(few)} of {len(everyone)} clients have fewer than {FEWEST} held-out samples or events, so their metric is "
            f"mostly chance: {abbreviate(sorted(few))}."
        )
    if part.at_clients.name == "r2":
        notes.append("The R² of a client divides by the variance of all clients' targets, not of its own.")
    return render_section("clients", title=title, choices=choices, entry=table, note=" ".join(notes))


def _evaluation(part: RunGroup, shown: Sequence[Mapping[str, Any]]) -> str:
    table = site_evaluation.evaluation_table(part)
    if table is None:
        return ""
    titles = {name: title.partition(" on ")[0] for chart in shown for name, title in chart["metrics"].items()}
    return render_section(
        "evaluation",
        runs=[chart["title"] for chart in shown],
        metrics=titles,
        matrix=any(chart["matrix"] for chart in shown),
        entry=table,
        reasons=site_evaluation.refusals(part),
    )


def _classifier(part: RunGroup, shown: Mapping[str, Any], group: str) -> str:
    kinds = {kind: chart_data.KINDS[kind][0] for kind, lines in shown["lines"].items() if lines}
    if not kinds:
        return ""
    best = chart_data.best_classifiers(part)
    confusions = [table for classifier in best if (table := tables.confusion_table(classifier)) is not None]
    return render_section("classifier", kinds=kinds, group=group, count=len(best), tables=confusions)


def _survival(part: RunGroup, shown: Mapping[str, Any], group: str) -> str:
    if not shown["observed"]:
        return ""
    kinds = {"curve": "observed and predicted"}
    kinds |= {horizon: f"calibration at {horizon}" for horizon in shown["calibration"]}
    rows = {name: name for name in shown["observed"]}
    if len(rows) > 2:
        rows = {"": "all of them, observed", **rows}
    return render_section("survival", kinds=kinds, rows=rows, group=group, count=len(chart_data.best_classifiers(part)))


def _masks(part: RunGroup, images: bool) -> str:
    shown = segmented_images(part) if images else None
    return "" if shown is None else render_section("masks", entry=shown)


def _coefficients(part: RunGroup) -> str:
    path = next((path for run in part.runs if (path := run.folder / COEFFICIENTS).is_file()), None)
    if path is None:
        return ""
    content = read_model(path, dict[str, Any])
    return render_section("coefficients", entry=tables.coefficient_table(content), note=content["meaning"])


def _costs(part: RunGroup) -> str:
    server_measured = any("server/gflops" in run.summary for run in part.runs)
    return render_section("cost", entry=tables.cost_table(part), server_measured=server_measured)


def _methods(part: RunGroup, shown: Mapping[str, Any], images: bool) -> str:
    names = {name: title if title == name else f"{title} ({name})" for name, title in shown["titles"].items()}
    names = {name: title for name, title in names.items() if name in shown["lines"] or name in shown["dots"]}
    general = {name: sum(name.startswith(prefix) for prefix in GENERAL) for name in names}
    options = {name: names[name] for name in sorted(names, key=lambda name: general[name])}
    entries = []
    seen: set[str] = set()
    for method_runs in part.series:
        details = []
        for fact in run_description.method_details(method_runs.method):
            if fact.name not in seen:
                seen.add(fact.name)
                line = "; ".join(filter(None, (fact.summary, fact.paper, fact.slots and f"slot: {fact.slots}")))
                paragraphs = run_description.docstring_paragraphs(fact.text) if fact.text else []
                details.append({"name": fact.name, "line": line, "paragraphs": paragraphs})
        generated = images and run_description.generates_data(method_runs)
        generated = generated and any(synthetic_folders(run) for run in method_runs.runs)
        client, rows = (synthetic_and_real(method_runs) if generated else None) or (None, [])
        entry = {"label": method_runs.label, "details": details, "generated": generated, "client": client, "rows": rows}
        entry["periods"] = run_description.averaging_periods(method_runs)
        entry["pictures"] = run_description.sample_pictures(method_runs) if images else []
        entries.append(entry)
    return render_section("methods", options=options, entries=entries)


def _repeat(part: RunGroup) -> str:
    configurations = []
    for method_runs in part.series:
        first = method_runs.runs[0]
        text = yaml.safe_dump(first.config, sort_keys=False, allow_unicode=True)
        configurations.append((f"Configuration of {method_runs.label}, seed {first.summary['seed']}", text))
    return render_section(
        "repeat",
        commands=run_description.repeat_commands(part)[:20],
        runs=tables.runs_table(part),
        configurations=configurations,
        machines=run_description.versions_and_machines(part.runs),
    )


def summary_line(part: RunGroup) -> str:
    """Return a one-line description of a group."""
    seeds = sorted({run.summary["seed"] for run in part.runs})
    rounds = sorted({run.summary["rounds"] for run in part.runs})
    methods = part.ranked or part.series
    references = ", with references" if len(methods) < len(part.series) else ""
    line = f"{len(methods)} method{'s' if len(methods) > 1 else ''}{references}, seeds {', '.join(map(str, seeds))}"
    target = f", target {value_text(part.objective, part.target, sign=' %')}"
    newest = max((run.folder / "summary.json").stat().st_mtime for run in part.runs)
    day = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d")
    return f"{line}, {' or '.join(map(str, rounds))} rounds{target}; finished on {day}"
