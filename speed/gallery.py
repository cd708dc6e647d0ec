"""Pictures of ``docs/gallery.md``: ``python -m speed.gallery`` runs the code on the page and stores its pictures.

The pictures are written to ``docs/assets/gallery``. Each must be smaller than 60 kB, as the page shows all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
ASSETS = ROOT / "docs" / "assets" / "gallery"
LIMIT = 60_000
"""Maximum size of a picture in bytes."""


def pictures() -> list[str]:
    """Return the file names of the pictures on the page."""
    return re.findall(r"\(assets/gallery/([\w.-]+)\)", PAGE.read_text())


def main() -> None:
    """Run the code of the page in a temporary folder and copy the pictures that the page shows."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE))
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # SVG files then have no time of creation
    import matplotlib

    # and the same identifiers each time; text stays text, which is smaller than outlines
    matplotlib.rcParams.update({"svg.hashsalt": "unskew", "svg.fonttype": "none"})
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            exec(compile(code, str(PAGE), "exec"), {"__name__": "gallery"})
        finally:
            os.chdir(before)
        ASSETS.mkdir(exist_ok=True)
        for name in pictures():
            size = (Path(scratch) / name).stat().st_size
            if size > LIMIT:
                raise SystemExit(f"{name} has {size} bytes; make it smaller than {LIMIT}.")
            shutil.copy(Path(scratch) / name, ASSETS / name)
    print(f"{len(pictures())} pictures were written to {ASSETS.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
