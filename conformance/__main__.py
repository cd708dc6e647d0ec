"""Run the suite: ``python -m conformance [LIBRARY ...]``, and print the tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

from conformance.cases import FIRST, TABLE, measured
from conformance.environments import MINUTES, environment
from conformance.papers import paper

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".venv"
LIBRARIES = ("unskew", "fedlab", "pfl_research", "fedjax", "flower", "pfllib", "fl_bench")
CHECKOUTS = ("pfllib", "fl_bench")


def interpreter(library: str) -> Path:
    """Return the Python interpreter of the library's environment."""
    return environment(ENVIRONMENTS / library, HERE / "adapters" / f"{library}.py")


def outcome(library: str, checkout: Path | None, minutes: float = MINUTES) -> dict[str, object]:
    """Return the worker's measurements, or the reason why there are none within the time limit."""
    if library in CHECKOUTS and checkout is None:
        return {"skipped": "needs the path of a checkout"}
    ENVIRONMENTS.mkdir(exist_ok=True)
    out, log = ENVIRONMENTS / f"{library}.json", ENVIRONMENTS / f"{library}.log"
    out.unlink(missing_ok=True)
    path = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    try:
        python = Path(sys.executable) if library == "unskew" else interpreter(library)
        command = [python, "-m", "conformance.worker", library, out]
        with log.open("w") as file:
            command += [] if checkout is None else [checkout.resolve()]
            subprocess.run(
                command, check=True, env={**os.environ, **path}, stdout=file, stderr=file, timeout=60 * minutes
            )
    except subprocess.TimeoutExpired:
        return {"skipped": f"it took more than {minutes:g} minutes, raise --minutes; see {log}"}
    except (subprocess.SubprocessError, OSError) as error:
        return {"skipped": f"{type(error).__name__}, see {log}"}
    return json.loads(out.read_text())


def cell(numbers: list[float | None] | None, which: int) -> str:
    """Format one number of a case, or a placeholder."""
    if numbers is None:
        return "-"
    value = numbers[which]
    if value is None or value > 100:
        return "diverges"
    return f"{value:.3f}" if value >= 1e-3 else f"{value:.0e}"


def table(reports: dict[str, dict], which: int, titles: list[str]) -> str:
    """Format a table in Markdown, with a row per library."""
    rows = [["library", *titles], ["---"] * (len(titles) + 1)]
    for library, report in reports.items():
        if "skipped" not in report:
            cells = [cell(report["cases"].get(title), which) for title in titles]
            rows.append([f"{library} {report['version']}".strip(), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    """Run the requested libraries; return 1 if unskew or a library requested by name was not run."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    for library in CHECKOUTS:
        parser.add_argument(f"--{library.replace('_', '-')}", type=Path, metavar="CHECKOUT")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit per library (default: %(default)s)")
    arguments = parser.parse_args()
    if not arguments.minutes > 0:
        parser.error(f"--minutes must be above 0, not {arguments.minutes:g}")
    if unknown := set(arguments.libraries) - set(LIBRARIES):
        parser.error(f"no adapter for {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    reference = {title: list(measured(paper, asked, FIRST)) for title, asked in TABLE.items()}
    reports: dict[str, dict] = {"the papers": {"version": "", "cases": reference}}
    for library in arguments.libraries or LIBRARIES:
        print(f"{library} ...", file=sys.stderr, flush=True)
        reports[library] = outcome(library, getattr(arguments, library, None), arguments.minutes)
    print(f"{date.today()}, Python {platform.python_version()}\n")
    print(
        f"Largest difference from the paper's model in the first {FIRST} rounds\n\n{table(reports, 0, list(TABLE))}\n"
    )
    last = [title for title, asked in TABLE.items() if asked.rounds > FIRST]
    print(f"Distance from the optimum after the last round\n\n{table(reports, 1, last)}\n")
    for library, report in reports.items():
        if "skipped" in report:
            print(f"{library}: not run, {report['skipped']}.")
        for title, (words, apart) in report.get("causes", {}).items():
            print(f"{library}, {title}: {words}; with this change the paper's first rounds differ by {apart:.0e}.")
        for title, error in report.get("errors", {}).items():
            print(f"{library}, {title}: {error}")
    return int(any("skipped" in reports[library] for library in arguments.libraries or ["unskew"]))


if __name__ == "__main__":
    sys.exit(main())
