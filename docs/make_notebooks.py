"""Tutorials as notebooks: a hook of mkdocs that adds ``tutorials/NAME.ipynb`` to the site and links to it on the tutorial.

``python docs/make_notebooks.py FOLDER`` writes the notebooks without building the site. Python blocks become code cells,
and so do commands after a dollar sign, as ``!unskew ...``. Everything else becomes Markdown cells. Links to other pages
become their text, because they would lead nowhere from a downloaded notebook.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TUTORIALS = Path(__file__).parent / "tutorials"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)[^)]*\)")


def cell(kind: str, text: str, number: int) -> dict[str, Any]:
    """Return a cell of a notebook.

    Args:
        kind: ``code`` or ``markdown``.
        text: Content.
        number: Position in the notebook, which identifies the cell.
    """
    content = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.strip().splitlines(keepends=True),
    }
    return {**content, "execution_count": None, "outputs": []} if kind == "code" else content


def notebook(text: str) -> dict[str, Any]:
    """Convert a tutorial to a notebook of format 4.5.

    Args:
        text: The tutorial in Markdown.
    """
    cells: list[dict[str, Any]] = []

    def append(kind: str, content: str) -> None:
        if content.strip():
            cells.append(cell(kind, content, len(cells)))

    end = 0
    for block in BLOCK.finditer(text):
        append("markdown", LINK.sub(r"\1", text[end : block.start()]))
        language, code = block.groups()
        append("code", code if language == "python" else re.sub(r"^\$ ", "!", code, flags=re.MULTILINE))
        end = block.end()
    append("markdown", LINK.sub(r"\1", text[end:]))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def notebooks() -> dict[str, str]:
    """Return the notebooks as JSON, by file name."""
    pages = sorted(TUTORIALS.glob("*.md"))
    return {f"{page.stem}.ipynb": json.dumps(notebook(page.read_text()), indent=1) + "\n" for page in pages}


def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks to the files of the site; mkdocs calls this.

    Args:
        files: Files of the site.
        config: Configuration of the site.
    """
    for name, content in notebooks().items():
        files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Add a link to the notebook below the title of each tutorial; mkdocs calls this.

    Args:
        markdown: Text of the page.
        page: The page.
        config: Configuration of the site.
        files: Files of the site.
    """
    path = Path(page.file.src_uri)
    if path.parent.name != TUTORIALS.name:
        return markdown
    title, rest = markdown.split("\n", 1)
    return f"{title}\n\n[Download this tutorial as a notebook]({path.stem}.ipynb).\n{rest}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Name the folder for the notebooks: python docs/make_notebooks.py FOLDER")
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    for name, content in notebooks().items():
        (Path(sys.argv[1]) / name).write_text(content)
