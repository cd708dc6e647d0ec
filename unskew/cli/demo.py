"""``unskew demo``: the comparison of the README, from the configuration in the package."""

from __future__ import annotations

import shlex
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli.common import unused_path
from unskew.cli.verbosity import LOUDNESS

METHODS = ("fedavg", "fedprox", "scaffold", "fedavgm")


def demo(
    context: typer.Context,
    out: Path | None = None,
    again: Annotated[bool, typer.Option("--resume")] = False,
) -> None:
    """Compare four methods on skewed handwritten digits, and print the next commands.

    Options:
        out: Output folder (default: runs/compare-digits).
        again: Resume the demo in --out, reusing finished runs.
    """
    folder = out or unused_path(Path("runs") / "compare-digits")
    compare: Any = context.parent.command.commands["compare"]  # type: ignore[union-attr]
    with as_file(files("unskew") / "cli" / "demo.yaml") as config:
        words = [*METHODS, "--config", str(config), *(["--out", str(out)] if out else [])]
        if again:
            words.append("--resume")
        with compare.make_context("compare", words, parent=context) as comparison:
            compare.invoke(comparison)
    if LOUDNESS.quiet:
        return
    report, used = folder / "report.html", folder / "fedavg" / "seed-0" / "config.yaml"
    if report.is_file():
        print(f"\nOpen {report} in a browser. Next commands:")
    else:
        print("\nNext commands:")
        print(f"  pip install 'unskew[report]' && unskew report {shlex.quote(str(folder))}")
    print("  unskew init patients.csv && unskew diagnose experiment.yaml   # your own data")
    print(f"  unskew compare fedavg feddyn fednova --config {shlex.quote(str(used))}   # other methods")
