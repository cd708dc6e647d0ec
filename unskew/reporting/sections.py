"""The sections of a part of the report, as HTML, and what their figures show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import yaml

from unskew.reporting import chart_data, html_elements, run_description, tables
from unskew.reporting.label_distribution import label_distributions
from unskew.reporting.run_description import synthetic_folders
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.section_errors import guard_section, section_html
from unskew.reporting.synthetic_vs_real import synthetic_and_real
from unskew.reporting.verdict import verdict
from unskew.tasks.formatting import value_text

LATER = (
    *("train_loss", "setup_seconds", "train_seconds", "lr", "local_", "consensus/", "generalization/", "gradients/"),
    *("updates/", "server/", "arrivals", "in_flight", "staleness", "discarded"),
)
"""Figures of a round that any method may have, or that begin so; a method's own come first."""
REAL = (
    "These are real images of a client's data: mind whom this page is sent to. <code>unskew report --no-images</code> makes "
    "one without any."
)
Styles = Mapping[str, Mapping[str, str]]
UNITS = (
    "MB are millions of bytes that all clients of a run send (up) or receive (down); seconds are the time of one run."
)


def group_content(part: RunGroup, styles: Styles) -> dict[str, Any]:
    """Return the data of a group's charts."""
    curves: dict[str, Any] = {"figures": {}, "scored": part.scored, "unit": "", "target": None, "lines": {}}
    measured: dict[str, Any] = {"titles": {}, "lines": {}, "dots": {}}
    return {
        "methods": [{"label": entry.label, **styles[entry.label]} for entry in part.series],
        "curves": guard_section("Curves", lambda: chart_data.learning_curves(part), lambda _: curves),
        "measured": guard_section(
            "What the methods measured", lambda: chart_data.diagnostic_charts(part), lambda _: measured
        ),
        "holdings": guard_section("Who holds what", lambda: label_distributions(part), lambda _: []),
        "boxes": guard_section("Accuracy of clients", lambda: chart_data.client_boxes(part), lambda _: {}),
        "classifier": guard_section(
            "Classifier", lambda: chart_data.classifier_curves(part), lambda _: {"axes": {}, "lines": {}}
        ),
        "axes": {
            name: chart_data.axis_title(entry, " on a client's own data")
            for name, entry in chart_data.per_client_metrics(part).items()
        },
    }


def group_html(part: RunGroup, shown: Mapping[str, Any], group: str, images: bool = True) -> str:
    """A part of the page, from its content; ``group`` is its name there. ``images``: whether it may hold any."""
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Result", partial(_verdict, part)),
        ("Warnings", partial(_warnings, part)),
        ("Comparison", partial(_comparison, part, shown["methods"])),
        ("Curves", partial(_curves, part, shown["curves"], group)),
        ("Paired differences", partial(_differences, part)),
        ("Who holds what", partial(_holdings, shown["holdings"], group)),
        ("Accuracy of clients", partial(_clients, part, shown["boxes"])),
        ("Classifier on the test set", partial(_classifier, part, shown["classifier"], group)),
        ("Cost", partial(_costs, part)),
        ("What the methods measured", partial(_methods, part, shown["measured"], images)),
        ("Run it again", partial(_again, part)),
    ]
    return "\n".join(filter(None, (section_html(title, write) for title, write in sections)))


def _verdict(part: RunGroup) -> str:
    lines = verdict(part)
    return f"<h3>Result</h3>{html_elements.bullet_list(lines, 'verdict')}" if lines else ""


def _comparison(part: RunGroup, methods: Sequence[Mapping[str, str]]) -> str:
    both = (tables.comparison_table(part), tables.comparison_table(part, references=True))
    units = f'<p class="soft">{UNITS}</p>'
    tables_html = "".join(html_elements.table(entry) for entry in both if entry)
    return f"{html_elements.legend(methods)}<h3>Comparison</h3>{tables_html}{units}"


def _costs(part: RunGroup) -> str:
    return f"<h3>Cost</h3>{html_elements.table(tables.cost_table(part))}{_server_cost(part)}"


def _curves(part: RunGroup, shown: Mapping[str, Any], group: str) -> str:
    axes = {"round": "rounds", "mb": "traffic", "seconds": "seconds"}
    titles = {name: title.removesuffix(" (%)") for name, title in shown["figures"].items()}
    reached = tables.target_table(part)
    band = (
        "Lines are means over seeds, bands one standard deviation. "
        if any(len(s.runs) > 1 for s in part.series)
        else ""
    )
    return (
        '<h3>Curves</h3><div class="controls">'
        + html_elements.radio_buttons("figure", "show", titles, group)
        + html_elements.radio_buttons("axis", "against", axes, group)
        + '<label><input type="checkbox" data-role="log" autocomplete="off"> logarithmic</label></div>'
        + html_elements.plot("curves")
        + f'<p class="soft">{band}Draw a frame to zoom in. With the figure in focus, '
        + "+ and - zoom, arrows move, 0 shows all.</p>"
        + (html_elements.table(reached) if reached else "")
    )


def _differences(part: RunGroup) -> str:
    table = tables.difference_table(part)
    if table is None:
        return ""
    note = "If the interval excludes zero, the difference is significant at the 5 % level. With few seeds intervals are wide."
    return f'<h3>Paired differences</h3>{html_elements.table(table)}<p class="soft">{note}</p>'


def _holdings(shown: Sequence[Mapping[str, Any]], group: str) -> str:
    if not shown:
        missing = "These run folders do not say what each client holds: they were made by an earlier version."
        return f'<h3>Label distribution across clients</h3><p class="soft">{missing}</p>'
    maps = any("map" in entry for entry in shown)
    chooser = (
        html_elements.dropdown("partition", "partition of", {str(k): entry["title"] for k, entry in enumerate(shown)})
        if len(shown) > 1
        else ""
    )
    cells = (
        html_elements.radio_buttons("cells", "cells", {"shares": "share of the client", "counts": "samples"}, group)
        if maps
        else ""
    )
    numbers = "".join(
        f'<div data-partition="{k}"{" hidden" if k else ""}>'
        + html_elements.definition_list(
            {**{name: _short(value) for name, value in entry["figures"].items()}, "partition hash": entry["hash"]}
        )
        + "</div>"
        for k, entry in enumerate(shown)
    )
    missing = (
        ""
        if maps
        else '<p class="soft">There are no classes, or these folders do not say how many samples of each a client holds.</p>'
    )
    left = html_elements.plot("map") + '<p class="soft" data-role="map-note"></p>' if maps else ""
    right = f"<div>{numbers}{html_elements.plot('sizes', low=True)}</div>"
    both = f'<div class="pair"><div>{left}</div>{right}</div>' if maps else missing + right
    return f'<h3>Label distribution across clients</h3><div class="controls">{chooser}{cells}</div>{both}'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _clients(part: RunGroup, shown: Mapping[str, Any]) -> str:
    table = tables.fairness_table(part)
    if table is None:
        return '<h3>Accuracy of clients</h3><p class="soft">No client was evaluated in these runs.</p>'
    title = part.at_clients.title
    head = f"<h3>{html_elements.text(title[0].upper() + title[1:])} of clients</h3>"
    if shown:
        known = chart_data.per_client_metrics(part)
        choices = {
            name: f"{known[name].title}, {'own models' if name.startswith('personal_') else 'global model'}"
            for name in shown
        }
        head += f'<div class="controls">{html_elements.dropdown("whose", "show", choices)}</div>'
        head += html_elements.plot("boxes") + (
            '<p class="soft">A dot is a client of one seed, a box the quartiles of all, its whiskers the best and the worst '
            "client, the diamond the worst decile of the table: the mean of the worst tenth, averaged over seeds.</p>"
        )
    gini = "Gini: 0 = all clients equally well served, 1 = all benefit goes to few."
    gini = gini if part.at_clients.name == "accuracy" else ""
    where = sorted(
        {str(run.summary.get("clients_evaluated_on")) for method_runs in part.series for run in method_runs.runs}
    )
    note = f"Measured on {html_elements.text(', '.join(where))}. {gini}"
    return f'{head}{html_elements.table(table)}<p class="soft">{note}</p>'


def _classifier(part: RunGroup, shown: Mapping[str, Any], group: str) -> str:
    kinds = {kind: chart_data.KINDS[kind][0] for kind, lines in shown["lines"].items() if lines}
    if not kinds:
        return ""
    best = chart_data.best_classifiers(part)
    parts = [
        "<h3>Classifier on the test set</h3>"
        f'<div class="controls">{html_elements.radio_buttons("kind", "curve", kinds, group)}</div>'
    ]
    parts.append(html_elements.plot("classifier"))
    parts.append(
        f'<p class="soft">The {len(best)} best methods, first seed of each. With more than two classes ROC and precision are '
        "means over the classes, each against all others, and calibration is that of the predicted class.</p>"
    )
    parts += [
        html_elements.table(confusion)
        for classifier in best
        if (confusion := tables.confusion_table(classifier)) is not None
    ]
    return "".join(parts)


def _server_cost(part: RunGroup) -> str:
    if any("server/gflops" in run.summary for method_runs in part.series for run in method_runs.runs):
        return ""
    return '<p class="soft">Memory and arithmetic of the server are measured with <code>diagnose: [server]</code>.</p>'


def _methods(part: RunGroup, shown: Mapping[str, Any], images: bool) -> str:
    parts = ["<h3>What the methods measured</h3>"]
    names = {name: title if title == name else f"{title} ({name})" for name, title in shown["titles"].items()}
    names = {name: title for name, title in names.items() if name in shown["lines"] or name in shown["dots"]}
    if names:
        own = {name: sum(name.startswith(late) for late in LATER) for name in names}
        options = {name: names[name] for name in sorted(names, key=lambda name: own[name])}
        parts.append(
            f'<div class="controls">{html_elements.dropdown("measure", "figure", options)}</div>'
            f"{html_elements.plot('measured')}"
        )
    seen: set[str] = set()
    for method_runs in part.series:
        for fact in run_description.method_facts(method_runs.method):
            if fact.name not in seen:
                seen.add(fact.name)
                line = "; ".join(filter(None, (fact.summary, fact.paper, fact.slots and f"slot: {fact.slots}")))
                parts.append(f"<h4>{html_elements.text(fact.name)}</h4><p>{html_elements.text(line)}</p>")
                if fact.text:
                    parts.append(
                        html_elements.collapsible(
                            "Formula, and what the paper leaves open", html_elements.docstring_html(fact.text)
                        )
                    )
        parts.append(_periods(method_runs))
        if images:
            parts.append(_pictures(method_runs) + _beside(method_runs))
    return "".join(parts)


def _periods(one: MethodRuns) -> str:
    table = run_description.averaging_periods(one)
    if table is None:
        return ""
    note = "Layers are numbered in order of depth, as <code>unskew models</code> lists them."
    return f'{html_elements.table(table)}<p class="soft">{note}</p>'


def _pictures(one: MethodRuns) -> str:
    pictures = run_description.sample_pictures(one)
    if not pictures:
        return ""
    images = "".join(
        f'<figure><img src="{address}" alt="{html_elements.text(title)}">'
        f"<figcaption>{html_elements.text(title)}</figcaption></figure>"
        for title, address in pictures
    )
    return f'<h4>What clients made with {html_elements.text(one.label)}</h4><div class="pictures">{images}</div>'


def _beside(one: MethodRuns) -> str:
    if not run_description.generates_data(one) or not any(synthetic_folders(run) for run in one.runs):
        return ""
    comparison = synthetic_and_real(one)
    title = f"<h4>Images made with {html_elements.text(one.label)} beside real ones</h4>"
    if comparison is None:
        return f'{title}<p class="soft">Real images are not shown: the data of the run are not at hand.</p>'
    who, rows = comparison
    lines = "".join(
        f"<tr><td>{html_elements.text(row.name)}</td>{_strip(row.real, f'real images of {row.name}')}"
        f"{_strip(row.made, f'made images of {row.name}')}</tr>"
        for row in rows
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("class", "real", "made"))
    inside = f"<caption>{html_elements.text(who)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    shown = f'<div class="scroll beside"><table data-name="beside">{inside}</table></div>'
    return f'{title}<p class="warned">{REAL}</p>{shown}'


def _strip(address: str, title: str) -> str:
    return f'<td><img src="{address}" alt="{html_elements.text(title)}"></td>' if address else "<td>none</td>"


def _warnings(part: RunGroup) -> str:
    messages = run_description.collect_warnings(part)
    lines = [f"{text} ({runs})" for runs, text in messages]
    lines += [
        f"{run.summary['updates_skipped']} updates were not finite and left out "
        f"({method_runs.label}, seed {run.summary['seed']})"
        for method_runs in part.series
        for run in method_runs.runs
        if run.summary.get("updates_skipped")
    ]
    return f"<h3>Warnings</h3>{html_elements.bullet_list(lines, 'told')}" if lines else ""


def _again(part: RunGroup) -> str:
    runs = [run for method_runs in part.series for run in method_runs.runs]
    parts = [
        "<h3>Run it again</h3>",
        *(html_elements.copyable_command(line) for line in run_description.repeat_commands(part)[:20]),
    ]
    parts.append('<p class="soft">A single run is repeated by <code>unskew run FOLDER/config.yaml</code>.</p>')
    parts.append(html_elements.collapsible("Every run and its folder", html_elements.table(tables.runs_table(part))))
    for method_runs in part.series:
        written = yaml.safe_dump(method_runs.runs[0].config, sort_keys=False, allow_unicode=True)
        seed = method_runs.runs[0].summary["seed"]
        inside = f"<pre><code>{html_elements.text(written)}</code></pre>"
        parts.append(html_elements.collapsible(f"Configuration of {method_runs.label}, seed {seed}", inside))
    for count, machine in run_description.versions_and_machines(runs):
        title = f"Versions and machine of {count} run{'s' if count > 1 else ''}"
        note = (
            "" if len(machine) > 1 else '<p class="soft">The folders do not say more: an earlier version made them.</p>'
        )
        parts.append(f"<h4>{title}</h4>{html_elements.definition_list(machine)}{note}")
    return "".join(parts)


def summary_line(part: RunGroup) -> str:
    """Return a one-line description of a group."""
    seeds = sorted({run.summary["seed"] for method_runs in part.series for run in method_runs.runs})
    rounds = sorted({run.summary["rounds"] for method_runs in part.series for run in method_runs.runs})
    methods = part.ranked or part.series
    references = ", with references" if len(methods) < len(part.series) else ""
    said = f"{len(methods)} method{'s' if len(methods) > 1 else ''}{references}, seeds {', '.join(map(str, seeds))}"
    target = f", target {value_text(part.objective, part.target, sign=' %')}" if part.counts else ""
    newest = max(
        (run.folder / "summary.json").stat().st_mtime for method_runs in part.series for run in method_runs.runs
    )
    day = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d")
    return f"{said}, {' or '.join(map(str, rounds))} rounds{target}; finished on {day}"
