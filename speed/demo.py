"""Demo: the table of the README, the output on ``docs/results/demo.md`` and both pictures, made from one run.

``python -m speed.demo`` runs the comparison of ``make demo``. If its results differ from those recorded in
``docs/assets/demo.json``, or the pages show other output, it writes the output, ``demo.png`` (the curves of the comparison)
and ``report.png`` (a screenshot of its report, taken with Chromium) again. Times vary between runs and are not compared.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
COMMAND = "unskew demo"
PAGE = ROOT / "docs" / "results" / "demo.md"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = (1280, 1480)
"""Width and height of the screenshot in pixels."""
OUT = Path("runs/compare-digits")
"""Folder of the comparison below the folder in which the demo runs."""
BLOCK = re.compile(r"```text\n\$ unskew demo\n.*?```", re.S)


def run_demo(folder: Path) -> str:
    """Run the comparison in ``folder`` and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *COMMAND.split()],
        cwd=folder,
        env={**os.environ, "COLUMNS": "126"},
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines() if "━" not in line)  # without progress bars


def results(folder: Path) -> dict[str, list[float | None]]:
    """Return the test accuracy of every round, by run."""
    curves = {}
    for path in sorted((folder / OUT).rglob("metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        curves[path.parent.relative_to(folder / OUT).as_posix()] = [row.get("accuracy") for row in rows]
    return curves


def without_times(block: str) -> list[str]:
    """Return the lines of a table without the seconds, which vary between runs."""
    lines = re.sub(r"in \d+ s\.", "", block).splitlines()
    return [re.sub(r"\s+\d+\.\d+\s*$", "", line).rstrip() for line in lines]


def shown(page: Path) -> str:
    """Return the block of a page that begins with the command of the demo."""
    block = BLOCK.search(page.read_text())
    if block is None:
        raise SystemExit(f"{page.name} has no block that begins with the command of the demo.")
    return block.group()


def excerpt(output: str) -> str:
    """Return the block of the README: of the whole output, the table of test accuracies."""
    table = re.search(r"^Test accuracy in %.*?\n\n.*?(?=\n\n)", output, re.S | re.M)
    if table is None:
        raise SystemExit("The demo has not printed its table of test accuracies.")
    return f"```text\n$ {COMMAND}\n\n{table.group()}\n```"


def take_screenshot(page: Path, target: Path, size: tuple[int, int] = SIZE) -> None:
    """Write the top of an HTML page as a PNG file of ``size``, width and height in pixels."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("Screenshots of reports need Chromium. Install it and repeat.")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    options += [f"--window-size={size[0]},{size[1]}", f"--screenshot={target}"]
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(target) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(target, optimize=True)


def main() -> None:
    """Run the demo; update the pages and the pictures if they are out of date."""
    record = ASSETS / "demo.json"
    known = json.loads(record.read_text()) if record.exists() else None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        output = run_demo(folder).strip()
        blocks = {ROOT / "README.md": excerpt(output), PAGE: f"```text\n$ {COMMAND}\n\n{output}\n```"}
        measured = results(folder)
        if measured == known and all(without_times(shown(page)) == without_times(new) for page, new in blocks.items()):
            print("README.md, docs/results/demo.md and both pictures show the results of the demo.")
            return
        take_screenshot(folder / OUT / "report.html", ASSETS / "report.png")
        shutil.copy(folder / OUT / "convergence.png", ASSETS / "demo.png")
        record.write_text(json.dumps(measured) + "\n")
        for page, new in blocks.items():
            page.write_text(page.read_text().replace(shown(page), new))
        print("README.md, docs/results/demo.md, demo.png and report.png were updated.")


if __name__ == "__main__":
    main()
