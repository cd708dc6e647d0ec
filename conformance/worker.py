"""Run one library in its own interpreter: ``python -m conformance.worker NAME OUT [CHECKOUT]``."""

from __future__ import annotations

import importlib
import json
import math
import sys
import traceback
from pathlib import Path

from conformance.cases import FIRST, TABLE, measured, reproduced
from conformance.causes import CAUSES


def main(name: str, out: str, checkout: str | None = None) -> None:
    """Run every case whose method the library has, and write the measurements."""
    library = importlib.import_module(f"conformance.adapters.{name}")
    if checkout is not None:
        library.use(Path(checkout))
    report: dict[str, object] = {"version": library.version(), "cases": {}, "causes": {}, "errors": {}}
    for title, asked in TABLE.items():
        if asked.method not in library.METHODS:
            continue
        try:
            numbers = measured(library.run, asked, FIRST)
        except Exception as error:
            traceback.print_exc()
            report["errors"][title] = f"{type(error).__name__}: {error}"
            continue
        report["cases"][title] = [x if math.isfinite(x) else None for x in numbers]
        if asked.method in CAUSES.get(name, {}):
            words, changed = CAUSES[name][asked.method]
            report["causes"][title] = [words, reproduced(library.run, asked, changed)]
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
