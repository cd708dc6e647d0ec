"""HTML of the page on runs in progress: rows, tables and curves. Every text from a run folder is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
from matplotlib.ticker import MaxNLocator

from unskew.reporting.live_runs import POINTS, LiveRun

LONGEST = 300
"""Maximum number of characters of a text from a run folder."""
FIRST = 3
"""Number of curves that are shown at once."""
SMALL = 40
"""Maximum number of points of the curve in the table of runs."""


def escaped(text: str) -> str:
    """Return a text as HTML, shortened."""
    return escape(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def cells(texts: Iterable[str], name: str) -> str:
    """Return texts as cells of a table.

    Args:
        texts: Texts to escape.
        name: ``td``, or ``th`` for the heads of columns.
    """
    scope = ' scope="col"' if name == "th" else ""
    return "".join(f"<{name}{scope}>{escaped(text)}</{name}>" for text in texts)


def scrolling_table(key: str, caption: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table that scrolls, also with the keyboard.

    Args:
        key: Identifier on the page.
        caption: Caption.
        columns: Heads of the columns.
        rows: Texts of the cells.
    """
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    region = f'<div id="{key}" class="tall" role="region" aria-label="{escaped(caption)}" tabindex="0">'
    head = f"<caption>{escaped(caption)}</caption><thead><tr>{cells(columns, 'th')}</tr></thead>"
    return f"{region}<table>{head}<tbody>{body}</tbody></table></div>"


def axis_ticks(values: Sequence[float], integer: bool = False) -> list[float]:
    """Return round values, of which the first and the last are the ends of an axis.

    Args:
        values: Values to draw.
        integer: Whether the values are whole numbers.

    >>> axis_ticks([3, 97])
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    low, high = min(values), max(values)
    high = high if high - low > 1e-9 * abs(low) else low + (abs(low) / 10 or 1)
    return [float(f"{tick:.12g}") for tick in MaxNLocator(5, integer=integer).tick_values(low, high)]


def draw_curve(points: Sequence[tuple[int, float]], title: str = "") -> str:
    """Return a curve as SVG.

    Args:
        points: Rounds and values.
        title: Title of the metric, for axes and a description; empty for a small curve without them.
    """
    rounds, values = ([point[axis] for point in points] for axis in (0, 1))
    across, upward = axis_ticks(rounds, integer=True), axis_ticks(values)
    left, top, right, bottom = (60, 10, 590, 205) if title else (2, 2, 88, 20)
    x = [f"{np.interp(value, (across[0], across[-1]), (left, right)):.1f}" for value in (*rounds, *across)]
    y = [f"{np.interp(value, (upward[0], upward[-1]), (bottom, top)):.1f}" for value in (*values, *upward)]
    joined = "L".join(f"{x[index]} {y[index]}" for index in range(len(points)))
    line = f'<path class="line" d="M{joined}{"h3" * (len(points) == 1)}"/>'
    if not title:
        return f'<svg class="small" viewBox="0 0 90 22" aria-hidden="true">{line}</svg>'
    for place, value in zip(y[len(points) :], upward, strict=True):
        line += f'<line class="grid" x1="{left}" x2="{right}" y1="{place}" y2="{place}"/>'
        line += f'<text x="54" y="{place}" dy="4" text-anchor="end">{value:.6g}</text>'
    for place, value in zip(x[len(points) :], across, strict=True):
        line += f'<text x="{place}" y="222" text-anchor="middle">{value:.0f}</text>'
    line += '<text x="325" y="238" text-anchor="middle">round</text>'
    label = f"{title} by round, from {min(values):.4g} to {max(values):.4g}; {values[-1]:.4g} in round {rounds[-1]}"
    return f'<svg class="plot" viewBox="0 0 600 240" role="img" aria-label="{escaped(label)}">{line}</svg>'


def run_row(run: LiveRun) -> str:
    """Return the cells of a run in the table of runs; its name leads to the details."""
    curves = run.curves(SMALL)
    small = draw_curve(next(iter(curves.values()))) if curves else ""
    link = f'<a id="link-{run.number}" href="#run-{run.number}">{escaped(run.name)}</a>'
    return f'<th scope="row">{link}</th>{cells(run.row(), "td")}<td>{small}</td>'


def run_details(run: LiveRun, most: int = POINTS) -> str:
    """Return notes, curves, clients and log of a run.

    Args:
        run: The run.
        most: Maximum number of points of a curve.
    """
    notes = "".join(f"<li>{escaped(note)}</li>" for note in run.notes.values())
    if notes:
        notes = f'<ul class="told">{notes}</ul>'
    curves = []
    for index, (title, points) in enumerate(run.curves(most).items()):
        values = [(str(round_number), f"{value:.6g}") for round_number, value in points]
        table = scrolling_table(f"values-{run.number}-{index}", title, ("round", "value"), values)
        table = f'<details id="more-{run.number}-{index}"><summary>Values</summary>{table}</details>'
        curves.append(f"<div><h3>{escaped(title)}</h3>{draw_curve(points, title)}{table}</div>")
    columns, rows = run.client_table()
    clients = scrolling_table(f"clients-{run.number}", f"{len(rows)} clients, worst first", columns, rows)
    if not rows:
        clients = '<p class="soft">Clients are evaluated at the end of the run.</p>'
    log = "\n".join(map(escaped, run.log())) or "No warnings or events."
    region = f'id="log-{run.number}" class="tall wrap" role="region" aria-label="Last lines of the log" tabindex="0"'
    others = f'<details id="others-{run.number}"><summary>Other metrics</summary><div class="curves">'
    return (
        f'{notes}<div class="curves">{"".join(curves[:FIRST])}</div>'
        f"<h3>Clients</h3>{clients}<h3>Log</h3><pre {region}>{log}</pre>{others}{''.join(curves[FIRST:])}</div></details>"
    )
