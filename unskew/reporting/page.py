"""The page itself: one file that holds everything and asks nothing of a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from importlib import resources
from typing import Any

from unskew.errors import ConfigError
from unskew.version import __version__

MISSING = "A report's figures need plotly. Install it with: pip install 'unskew[report]'."


def plotly_script() -> str:
    """The library that draws the figures.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(MISSING) from error
    return str(get_plotlyjs())


def page_file(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files("unskew.reporting").joinpath("page", name).read_text(encoding="utf-8")


def escape_script(text: str) -> str:
    """A script as it stands in a page: a browser would end it at ``</script`` and reads every line end as one sign."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def to_json(value: object) -> str:
    r"""Plain values as JSON that no page takes for its own mark-up; six digits, and null for what is not finite.

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


def page(title: str, body: str, data: object) -> str:
    """The whole file.

    Args:
        title: Of the page.
        body: What stands in it, as HTML.
        data: What its figures show.

    Raises:
        ConfigError: The library that draws the figures is not installed.
    """
    library, style = escape_script(plotly_script()), page_file("report.css")
    own = escape_script(page_file("tables.js") + page_file("report.js"))
    # The library makes an empty style element that it fills by calls, and empties attributes: the empty text is allowed.
    policy = (
        f"default-src 'none'; script-src {csp_hash(library)} {csp_hash(own)}; style-src {csp_hash(style)} {csp_hash('')}; "
        f"style-src-attr 'unsafe-hashes' {csp_hash('')}; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    # It also brings styles for maps, unless they are there; there are no maps here.
    maps = "".join(f'<meta id="{name}">' for name in re.findall(r'getElementById\("([0-9a-f]{40,})"\)', library))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="unskew {html.escape(__version__)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
{maps}
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{to_json(data)}</script>
<script>{library}</script>
<script>{own}</script>
</body>
</html>
"""
