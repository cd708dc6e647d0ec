"""Jinja2 templates of the report. Text from data or files is escaped everywhere."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from unskew.errors import explain_missing

if TYPE_CHECKING:
    import jinja2

MISSING = "A report needs plotly and jinja2. Install them with: pip install 'unskew[report]'."


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    with explain_missing(MISSING):
        import jinja2
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("unskew.reporting", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["repr"] = repr
    return environment


def render_section(macro: str, **values: Any) -> str:
    """Render a section of the report.

    Args:
        macro: Name of a macro in ``sections.html.j2``.
        values: Arguments of the macro.

    Args:
        macro: Name of the template's macro.
        **values: Values that the macro uses.

    Returns:
        HTML that is marked as safe, so that templates do not escape it again.
    """
    section: str = getattr(_environment().get_template("sections.html.j2").module, macro)(**values)
    return section


def render_page(**values: Any) -> str:
    """Render the whole page from ``page.html.j2``."""
    return _environment().get_template("page.html.j2").render(**values)
