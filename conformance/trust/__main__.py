"""Run the libraries: ``python -m conformance.trust [LIBRARY ...]``; print the table and store the results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from conformance.environments import MINUTES, constant, environment
from conformance.trust.comparisons import SECTIONS
from conformance.trust.results import RESULTS, read, table
from unskew.version import __version__

HERE = Path(__file__).parent
LIBRARIES = ("opacus", "dp_accounting", "prv_accountant", "byzfl", "flower", "fedlab", "pytorch")
SHARED = ("opacus", "pytorch")
"""Libraries in the environment of unskew, which uses them."""


def outputs(library: str, environments: Path) -> dict[str, object]:
    """Return the version and the outputs of a library, or the reason why there are none.

    Args:
        library: Name of the adapter.
        environments: Folder of the virtual environments.
    """
    adapter = HERE / "adapters" / f"{library}.py"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        try:
            python = Path(sys.executable) if library in SHARED else environment(environments / library, adapter)
            command = [python, "-m", "conformance.trust.worker", library, out]
            path = {"PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env={**os.environ, **path}, timeout=60 * MINUTES)
        except (subprocess.SubprocessError, OSError) as error:
            packages = ", ".join((*constant(adapter, "REQUIREMENTS"), *constant(adapter, "ALONE")))
            return {"skipped": f"{type(error).__name__} with {packages or library}"}
        return json.loads(out.read_text())


def main() -> int:
    """Run the requested libraries; return 1 if one of them was not run or a difference is unexplained."""
    parser = argparse.ArgumentParser(prog="python -m conformance.trust", description=__doc__)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    parser.add_argument("--environments", type=Path, default=HERE.parent / ".venv" / "trust", metavar="FOLDER")
    options = parser.parse_args()
    if unknown := set(options.libraries) - set(LIBRARIES):
        parser.error(f"no adapter for {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    options.environments.mkdir(parents=True, exist_ok=True)
    results = read() if RESULTS.exists() else {"libraries": {}}
    for library in options.libraries or LIBRARIES:
        print(f"{library} ...", file=sys.stderr, flush=True)
        results["libraries"][library] = outputs(library, options.environments)
    results |= {"date": str(date.today()), "python": platform.python_version(), "unskew": __version__}
    results["differences"] = {comparison.library: {} for comparisons in SECTIONS.values() for comparison in comparisons}
    for comparison in (comparison for comparisons in SECTIONS.values() for comparison in comparisons):
        library = results["libraries"].get(comparison.library, {})
        if "values" in library:
            measured = comparison.differences(library["values"])
            results["differences"][comparison.library][comparison.title] = measured
    RESULTS.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    print(table(results))
    for library, measured in results["libraries"].items():
        if "skipped" in measured:
            print(f"{library}: not run, {measured['skipped']}.")
    skipped = any("skipped" in results["libraries"][library] for library in options.libraries or LIBRARIES)
    return int(skipped or "unexplained" in table(results))


if __name__ == "__main__":
    sys.exit(main())
