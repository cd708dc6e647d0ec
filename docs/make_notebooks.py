"""Tutorials as notebooks: a hook of mkdocs that adds ``tutorials/NAME.ipynb`` to the site and links to it on the tutorial.

``python docs/make_notebooks.py FOLDER`` writes the notebooks without building the site. Without a folder, it writes those in
``examples/``, which Colab opens from there. Python blocks become code cells, and so do commands after a dollar sign, as
``!unskew ...``. Everything else becomes Markdown cells. Links to other pages become their text, because they would lead
nowhere from a downloaded notebook.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TUTORIALS = Path(__file__).parent / "tutorials"
EXAMPLES = Path(__file__).parents[1] / "examples"
COLAB = "https://colab.research.google.com/github/unskew/unskew/blob/main/examples"
STORED = ("hospital", "quickstart")
"""Tutorials whose notebooks are in ``examples/``. They install unskew if it is missing."""
INSTALL = """
import importlib.util

if importlib.util.find_spec("unskew") is None:  # as on Colab
    %pip install -q 'unskew[hub,report]'
"""
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


def notebook(text: str, install: bool = False) -> dict[str, Any]:
    """Convert a tutorial to a notebook of format 4.5.

    Args:
        text: The tutorial in Markdown.
        install: Whether the first cell installs unskew if it is missing.
    """
    cells: list[dict[str, Any]] = []

    def append(kind: str, content: str) -> None:
        if content.strip():
            cells.append(cell(kind, content, len(cells)))

    append("code", INSTALL if install else "")
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
    contents = {page.stem: notebook(page.read_text(), page.stem in STORED) for page in pages}
    return {f"{name}.ipynb": json.dumps(content, indent=1) + "\n" for name, content in contents.items()}


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
    link = f"[Download this tutorial as a notebook]({path.stem}.ipynb)"
    if path.stem in STORED:
        link += f", or [open it in Colab]({COLAB}/{path.stem}.ipynb)"
    return f"{title}\n\n{link}.\n{rest}"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in notebooks().items():
        if len(sys.argv) > 1 or Path(name).stem in STORED:
            (folder / name).write_text(content)
