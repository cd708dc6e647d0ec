"""All local benchmarks, with one summary table at the end: ``python -m speed``, or ``make bench``.

Runs ``speed``, ``memory``, ``generation``, a quick ``cluster`` and ``auto`` one after another, each in its own interpreter.
It takes about half an hour on an idle machine with two cores and stores nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str]
SCRIPTS = {"speed": (), "memory": (), "generation": (), "cluster": ("--quick",), "auto": ("--trials", "2")}


def speed_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Return the fastest unskew engine relative to the tuned loop in each setting."""
    for setting in sorted({row["setting"] for row in found["speed"]}):
        rows = [row for row in found["speed"] if row["setting"] == setting]
        fastest = max((row for row in rows if row["loop"].startswith("unskew")), key=lambda row: row["of_tuned"])
        value = f"{fastest['rounds_per_s']:.2f} rounds/s, {fastest['of_tuned']:.2f} of the tuned loop"
        yield f"setting {setting}: {fastest['loop']}", value


def memory_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Return the peak memory of every case."""
    for row in found["memory"]:
        name = f"peak memory, {row['loop']}, setting {row['setting']}, {row['kind']} data of {row['data_mb']:.0f} MiB"
        yield name, f"{row['peak_mb']:.0f} MiB"


def generation_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Return the cost of FedCOG's generation relative to training."""
    for row in found["rows"]:
        yield f"FedCOG's generation of {row['n']} samples", f"{row['inline'] / found['training']:.2f} of training"


def cluster_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Return the seconds per round of each case on a local Ray cluster."""
    for row in found["rows"]:
        case = ", ".join(f"{row[key]}" for key in ("engine", "parameters", "cohort") if key in row)
        yield f"cluster: {case}", f"{row['seconds']:.3f} s per round"


def auto_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Return the mean and largest regret of ``auto`` in each condition."""
    for condition in found["rows"][0]["regret"]:
        values = [value for row in found["rows"] for value in row["regret"][condition]["values"]]
        yield f"regret of auto, {condition}", f"mean {statistics.mean(values):.3f}, largest {max(values):.3f}"


ROWS = {
    "speed": speed_rows,
    "memory": memory_rows,
    "generation": generation_rows,
    "cluster": cluster_rows,
    "auto": auto_rows,
}


def main() -> None:
    """Run the benchmarks and print the table."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in SCRIPTS.items():
            target = Path(scratch) / f"{name}.json"
            command = [sys.executable, "-m", f"speed.{name}", *options, "--json", str(target)]
            if subprocess.run(command, check=False).returncode or not target.exists():
                rows.append((f"speed.{name}", "failed; see its output above"))
                continue
            rows += ROWS[name](json.loads(target.read_text()))
    print("\n| benchmark | result |\n|---|---|")
    for benchmark, result in rows:
        print(f"| {benchmark} | {result} |")


if __name__ == "__main__":
    main()
