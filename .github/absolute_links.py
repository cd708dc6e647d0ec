"""Make the links of README.md absolute, because PyPI shows it outside of the repository: ``absolute_links.py v0.3.0``.

The release workflow runs this before it builds the package. Links lead to the files of the tag.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
PAGES = "https://github.com/unskew/unskew/blob"
IMAGES = "https://raw.githubusercontent.com/unskew/unskew"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)]+)\)")


def with_absolute_links(text: str, tag: str) -> str:
    """Return Markdown whose links to files of the repository are absolute.

    Args:
        text: Markdown of a file in the root of the repository.
        tag: Tag whose files the links lead to.
    """

    def absolute(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        return f"{image}[{label}]({IMAGES if image else PAGES}/{tag}/{target})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Name the tag of the release: absolute_links.py v0.3.0")
    README.write_text(with_absolute_links(README.read_text(), sys.argv[1]))
