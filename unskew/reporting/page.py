"""HTML file of a report, which contains all resources and needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from unskew.errors import explain_missing
from unskew.reporting.templating import MISSING, render_page
from unskew.version import __version__


def plotly_script() -> str:
    """Return the source of plotly.js.

    Raises:
        ConfigError: If plotly is not installed.
    """
    with explain_missing(MISSING):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())


def page_file(name: str) -> str:
    """Return the content of a resource of the page: its style, or a script."""
    return resources.files("unskew.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def escape_script(text: str) -> str:
    """Escape a script for a page: a browser would end it at ``</script`` and normalizes line ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def to_json(value: object) -> str:
    r"""Encode plain values as JSON that cannot be parsed as markup; six digits, and null for non-finite numbers.

    >>> to_json({"<": [1 / 3, float("nan")]})
    '{"\\u003c":[0.333333,null]}'
    """
    text = json.dumps(_rounded(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        value = float(f"{value:.6g}")
        return int(value) if value.is_integer() else value if math.isfinite(value) else None
    return value


def csp_hash(text: str) -> str:
    """Return the content-security-policy hash of a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_file(title: str, notes: Sequence[str], parts: Sequence[Mapping[str, Any]], data: object) -> str:
    """Render the whole file of a report.

    Args:
        title: Title of the page.
        notes: Notes at the top of the page.
        parts: ``title``, ``summary`` and ``sections`` of each group of comparable runs.
        data: Data of the charts.

    Raises:
        ConfigError: If plotly or jinja2 is not installed.
    """
    library, style = escape_script(plotly_script()), page_file("report.css")
    own = escape_script(page_file("tables.js") + page_file("report.js"))
    # Plotly creates an empty style element and fills it by calls, so the hash of the empty text is allowed.
    policy = (
        f"default-src 'none'; script-src {csp_hash(library)} {csp_hash(own)}; style-src {csp_hash(style)} {csp_hash('')}; "
        f"style-src-attr 'unsafe-hashes' {csp_hash('')}; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return render_page(
        title=title,
        notes=notes,
        parts=parts,
        policy=policy,
        version=__version__,
        # Plotly adds styles for maps unless elements of these names exist; reports have no maps.
        map_styles=re.findall(r'getElementById\("([0-9a-f]{40,})"\)', library),
        style=style,
        data=to_json(data),
        library=library,
        own=own,
    )
