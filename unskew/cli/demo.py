"""``unskew demo``: the comparison of the README, from the configuration in the package."""

from __future__ import annotations

import shlex
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli.common import unused_path
from unskew.cli.flags import path_option
from unskew.cli.verbosity import LOUDNESS

METHODS = ("fedavg", "fedprox", "scaffold", "fedavgm")


def demo(
    context: typer.Context,
    out: Annotated[Path | None, path_option("--out", help="Output folder (default: runs/compare-digits).")] = None,
    again: Annotated[bool, typer.Option("--resume", help="Resume the demo in --out, reusing finished runs.")] = False,
) -> None:
    """Compare four methods on skewed handwritten digits, and print the next commands."""
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
