"""Measure the cost of a Flower deployment on one machine: ``python -m speed.deployment [--only 62k/2 11M/8]``.

It runs a SuperLink and real SuperNodes with TLS on loopback, in the environment that Flower is installed in: FedAvg on
the digits with an MLP of 62 thousand, 11 million or 110 million parameters, over 2, 8 or 32 sites. It measures for each
case

- the seconds per round, without the first one,
- the bytes between SuperNodes and SuperLink on the wire, next to those of the tensors that the run counts,
- the share of a processor that all idle processes use,
- the peak memory of the process with the run, of the SuperLink, and of all processes together.

Each case runs in its own interpreter and is stored in ``results/deployment.json``. Stored cases are not measured again
without ``--again``. A case that would exhaust the memory of the machine is stopped, which is stored too. ``--show``
writes the table to ``docs/results/speed.md`` and measures nothing. The machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from speed.deployment_case import WIDTHS, one_case
from unskew.errors import UnskewError
from unskew.filesystem import write_atomic
from unskew.reproduction.tables import markdown

SITES = (2, 8, 32)
ROUNDS = {"62k": 6, "11M": 4, "110M": 3}
IDLE = 20.0
"""Seconds of the idle measurement."""
LONGEST = 2400.0
"""Time limit of a case in seconds."""
KEPT = Path("results/deployment.json")
PAGE, MARKS = Path("docs/results/speed.md"), ("<!-- measured -->", "<!-- /measured -->")


def in_a_process(size: str, sites: int, rounds: int, idle: float) -> dict[str, Any]:
    """Run a case in its own interpreter; the result has ``failed`` if there are no measurements."""
    options = ["--only", f"{size}/{sites}", "--rounds", str(rounds), "--idle", str(idle)]
    command = [sys.executable, "-m", "speed.deployment", "--one", *options]
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "XDG_CACHE_HOME": scratch, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LONGEST, env=environment
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"it has not ended within {LONGEST:g} s"}
    if done.returncode:
        return {"failed": " ".join(done.stderr.split())[-300:]}
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def table(cases: dict[str, dict[str, Any]]) -> str:
    """Return the table for the page."""
    rows = []
    for name in (f"{size}/{sites}" for size in WIDTHS for sites in SITES):
        outcome, (size, _, sites) = cases.get(name), name.partition("/")
        if outcome is None:
            rows.append([size, sites, "not measured", *[""] * 5])
        elif "failed" in outcome:
            rows.append([size, sites, outcome["failed"], *[""] * 5])
        else:
            memory = [f"{outcome[f'{of}_megabytes']:,.0f}" for of in ("run", "superlink", "all")]
            rows.append(
                [
                    size,
                    sites,
                    f"{outcome['round_seconds']:.1f}",
                    f"{outcome['ratio']:.3f}",
                    f"{outcome['idle_processor_share']:.0%}",
                    *memory,
                ]
            )
    machine = next((outcome["machine"] for outcome in cases.values() if "machine" in outcome), "")
    head = ["parameters", "sites", "seconds a round", "bytes on the wire / counted", "processor at idle"]
    head += [f"MB, {who}" for who in ("the run's process", "the SuperLink", "all together")]
    return f"Measured by `python -m speed.deployment` on {machine}:\n\n{markdown(head, rows)}"


def show(cases: dict[str, dict[str, Any]]) -> None:
    """Write the table to the page."""
    begin, end = MARKS
    before, _, rest = PAGE.read_text().partition(begin)
    after = rest.partition(end)[2]
    write_atomic(PAGE, f"{before}{begin}\n{table(cases)}\n{end}{after}".encode())


def main() -> None:
    """Measure the cases without a result, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [f"{size}/{sites}" for size in WIDTHS for sites in SITES]
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="cases, as PARAMETERS/SITES")
    parser.add_argument("--again", action="store_true", help="measure stored cases again")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--idle", type=float, default=IDLE, help="seconds in which the idle processes are measured")
    parser.add_argument("--show", action="store_true", help="write the table and measure nothing")
    parser.add_argument("--quick", action="store_true", help="the smallest case with two rounds; nothing is stored")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.only, arguments.rounds, arguments.idle = ["62k/2"], 2, 5.0
    cases: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in [] if arguments.show else arguments.only:
        size, _, sites = name.partition("/")
        rounds = arguments.rounds or ROUNDS[size]
        if arguments.one:
            try:
                print(json.dumps(one_case(size, int(sites), rounds, arguments.idle)))
            except UnskewError as error:
                print(json.dumps({"failed": str(error).splitlines()[0]}))
            return
        if name in cases and not (arguments.again or arguments.quick):
            continue
        began = time.monotonic()
        outcome = in_a_process(size, int(sites), rounds, arguments.idle)
        duration = time.monotonic() - began
        description = outcome.get("failed") or (
            f"{outcome['round_seconds']:.1f} s per round, {outcome['ratio']:.3f} of the bytes counted, "
            f"{outcome['idle_processor_share']:.1%} at idle, {outcome['run_megabytes']:.0f} MB, "
            f"{outcome['all_megabytes']:.0f} MB in total"
        )
        print(f"{name}: {description}; the case took {duration:.0f} s", flush=True)
        if not arguments.quick:
            machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
            cases[name] = {**outcome, "took": duration, "machine": machine}
            write_atomic(KEPT, json.dumps(cases, indent=1).encode())
    if arguments.show:
        show(cases)


if __name__ == "__main__":
    main()
