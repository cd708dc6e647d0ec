"""Pieces of the page as HTML. Whatever comes from data or files is text and nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from unskew.reporting.run_description import docstring_paragraphs
from unskew.reporting.tables import Table

DASH = {"solid": "", "dash": "8 4", "dot": "2 3", "dashdot": "8 3 2 3"}
COPIED = (
    '<div class="copies">{buttons}<span role="status" class="soft"></span></div>'
    '<textarea hidden readonly aria-label="What was copied"></textarea>'
)


def text(value: object) -> str:
    """A text as HTML.

    >>> text('<script>"')
    '&lt;script&gt;&quot;'
    """
    return html.escape(str(value))


def copy_buttons(*kinds: str) -> str:
    """Buttons that copy what stands above them."""
    titles = {"csv": "Copy as CSV", "latex": "Copy as LaTeX", "text": "Copy"}
    return COPIED.format(
        buttons="".join(f'<button type="button" data-copy="{kind}">{titles[kind]}</button>' for kind in kinds)
    )


def table(one: Table) -> str:
    """A table that can be sorted and copied; of one with groups, the first group is shown, and the reader chooses."""
    heads = "".join(
        f'<th scope="col" class="{"word" if index < one.words else "number"}">'
        f'<button type="button">{text(title)}</button></th>'
        for index, title in enumerate(one.columns)
    )
    lines = []
    for index, row in enumerate(one.rows):
        cells = []
        for column, cell in enumerate(row):
            kind = ' class="word"' if column < one.words else ""
            value = "" if cell.value is None else f' data-value="{cell.value!r}"'
            std = "" if cell.std is None else f' data-std="{cell.std!r}"'
            cells.append(f"<td{kind}{value}{std}>{text(cell.text)}</td>")
        group = one.groups[index] if one.groups else ""
        shown = f' data-group="{text(group)}"' if one.groups else ""
        hidden = " hidden" if one.groups and group != one.groups[0] else ""
        lines.append(f"<tr{shown}{hidden}>{''.join(cells)}</tr>")
    chooser = ""
    if one.groups:
        options = "".join(f'<option value="{text(name)}">{text(name)}</option>' for name in dict.fromkeys(one.groups))
        chooser = f'<div class="controls"><label>against <select data-groups="yes">{options}</select></label></div>'
    return (
        f'<div class="copyable">{chooser}<p class="hint soft" hidden>Wider than the page: scroll sideways.</p>'
        f'<div class="scroll" tabindex="0"><table class="sortable" data-name="{text(one.name)}">'
        f"<caption><span>{text(one.caption)}</span></caption><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"{copy_buttons('csv', 'latex')}</div>"
    )


def definition_list(pairs: Mapping[str, object]) -> str:
    """Names and what they are."""
    return "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs.items()) + "</dl>"


def plot(role: str, low: bool = False) -> str:
    """The place of a figure, with a button for what a key does, too."""
    kind = "plot low" if low else "plot"
    return (
        f'<figure><div class="{kind}" data-role="{role}" tabindex="0" role="img"></div></figure>'
        f'<div class="controls"><button type="button" data-reset="{role}">Reset zoom</button></div>'
    )


def radio_buttons(name: str, title: str, options: Mapping[str, str], group: str) -> str:
    """Radio buttons, the first one chosen; ``group`` is their name on the page."""
    buttons = "".join(
        f'<label><input type="radio" name="{text(group)}-{name}" value="{text(value)}"{" checked" if not index else ""}> '
        f"{text(label)}</label>"
        for index, (value, label) in enumerate(options.items())
    )
    return f'<fieldset data-choice="{name}"><legend>{text(title)}</legend>{buttons}</fieldset>'


def dropdown(name: str, title: str, options: Mapping[str, str]) -> str:
    """A list to choose from, for many options."""
    items = "".join(f'<option value="{text(value)}">{text(label)}</option>' for value, label in options.items())
    return f'<label data-choice="{name}">{text(title)} <select>{items}</select></label>'


def legend(methods: Sequence[Mapping[str, str]]) -> str:
    """The methods with their colours; each can be hidden."""
    labels = "".join(
        f'<label><input type="checkbox" value="{text(method["label"])}" checked autocomplete="off">'
        f'<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true"><line x1="0" y1="6" x2="34" y2="6" stroke-width="3" '
        f'stroke="{method["color"]}" stroke-dasharray="{DASH[method["dash"]]}"/></svg>{text(method["label"])}</label>'
        for method in methods
    )
    return f'<fieldset class="legend"><legend>methods shown</legend>{labels}</fieldset>'


def copyable_command(line: str) -> str:
    """A command that can be copied."""
    return f'<div class="copyable"><pre class="wrap"><code>{text(line)}</code></pre>{copy_buttons("text")}</div>'


def docstring_html(docstring: str) -> str:
    """The head of a method's file: its paragraphs and formulas."""
    parts = []
    for kind, words in docstring_paragraphs(docstring):
        shown = text(words)
        if kind == "formula":
            parts.append(f"<pre><code>{shown}</code></pre>")
        else:
            parts.append("<p>" + re.sub(r"``(.+?)``", r"<code>\1</code>", shown) + "</p>")
    return "".join(parts)


def bullet_list(lines: Sequence[str], kind: str = "") -> str:
    """A list of sentences."""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if kind else f"<ul>{items}</ul>"


def collapsible(title: str, inside: str) -> str:
    """Return a collapsible element."""
    return f"<details><summary>{text(title)}</summary>{inside}</details>"
