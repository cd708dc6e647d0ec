"""What a deployment over Flower costs on one machine: ``python -m benchmarks.deployment [--short] [--json FILE]``.

A SuperLink and real SuperNodes with TLS on loopback, in the environment that Flower is in. FedAvg on the digits with an MLP
of 62 thousand, 11 million or 110 million parameters, over 2, 8 or 32 sites. Of each case it tells

- the seconds of a round, the first left out,
- the bytes between SuperNodes and SuperLink, counted where they pass, beside those of the tensors that the run counts,
- the share of a processor that all processes take while nothing is asked of them,
- the largest memory of the process that holds the run.

Each case has an interpreter of its own. The machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

WIDTHS = {"62k": 214, "11M": 3280, "110M": 10450}
SITES = (2, 8, 32)
ROUNDS = 4
IDLE = 20.0
"""Seconds in which nothing is asked."""


class Meter:
    """Hands connections on to a port and counts the bytes each way."""

    def __init__(self, to: int):
        self.to, self.up, self.down = to, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self.listener.accept()
                outer = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            for source, sink, way in ((inner, outer, "up"), (outer, inner, "down")):
                threading.Thread(target=self._hand_on, args=(source, sink, way), daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 18):
                sink.sendall(data)
                setattr(self, way, getattr(self, way) + len(data))
        except OSError:
            pass
        finally:
            for one in (source, sink):
                one.close()


def processor_seconds(groups: Sequence[int]) -> float:
    """What the processes of some process groups have taken so far, of those that live."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) in groups:
            total += sum(int(value) for value in fields[11:15]) / tick
    return total


def one_case(size: str, sites: int, rounds: int, idle: float) -> dict[str, Any]:
    """A line of the table, in this process."""
    from unskew.config.reading import experiment
    from unskew.deployment.places import Local
    from unskew.deployment.run import Deployment, run

    width = WIDTHS[size]
    config = experiment(
        {
            "data": "digits",
            "partition": "iid",
            "clients": sites,
            "model": "mlp",
            "rounds": rounds,
            "model_options": {"hidden": [width, width]},
            "local_steps": 1,
            "batch_size": 8,
            "eval_clients": 0,
        }
    )
    meters: list[Meter] = []

    class Metered(Local):
        """Its SuperNodes reach the SuperLink through the meter."""

        def _supernode(self, client: int) -> Any:
            port = int(self.superlink.address.rpartition(":")[2])
            if not meters:
                meters.append(Meter(port))
            inside, self.superlink = (
                self.superlink,
                type(self.superlink)(f"127.0.0.1:{meters[0].port}", self.superlink.ca, self.superlink.home),
            )
            try:
                return super()._supernode(client)
            finally:
                self.superlink = inside

    rows: list[dict[str, Any]] = []
    crossed: list[int] = []

    class Follower:
        """Notes the bytes at the end of each round."""

        def start(self, config: Any, rounds_done: int) -> None:
            crossed.append(meters[0].up + meters[0].down)

        def round(self, row: dict[str, Any]) -> None:
            rows.append(row)
            crossed.append(meters[0].up + meters[0].down)

        def end(self, summary: Any) -> None:
            pass

    place = Metered("benchmark", sites, [config])
    with tempfile.TemporaryDirectory() as scratch:
        try:
            place.start()
            time.sleep(15.0 + 2.0 * sites)  # until all have read their data and are connected
            groups, before = [child.pid for child in place.family.children], time.monotonic()
            taken = processor_seconds(groups)
            time.sleep(idle)
            share = (processor_seconds(groups) - taken) / (time.monotonic() - before)
            run(config, Deployment(megabytes=4096.0), Path(scratch) / "run", [Follower()], lambda text: None, place)
        finally:
            place.close()
            place.forget()
    counted = rows[-1]["bytes_up"] + rows[-1]["bytes_down"]
    return {
        "parameters": size,
        "sites": sites,
        "seconds": [row["seconds"] for row in rows],
        "round_seconds": median(row["seconds"] for row in rows[1:]),
        "bytes_counted": counted,
        "bytes_on_the_wire": crossed[-1] - crossed[0],
        "ratio": (crossed[-1] - crossed[0]) / counted,
        "idle_processor_share": share,
        "run_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure all cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--sites", nargs="+", type=int, default=list(SITES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--idle", type=float, default=IDLE)
    parser.add_argument("--short", action="store_true", help="the smallest case with two rounds, to see that it works")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--one", action="store_true", help="one case, in this process")
    asked = parser.parse_args()
    if asked.short:
        asked.sizes, asked.sites, asked.rounds, asked.idle = ["62k"], [2], 2, 5.0
    if asked.one:
        print(json.dumps(one_case(asked.sizes[0], asked.sites[0], asked.rounds, asked.idle)))
        return
    found = []
    print("parameters  sites  s/round  wire/counted  idle CPU  run's memory")
    for size in asked.sizes:
        for sites in asked.sites:
            options = ["--sizes", size, "--sites", str(sites), "--rounds", str(asked.rounds), "--idle", str(asked.idle)]
            command = [sys.executable, "-m", "benchmarks.deployment", "--one", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{size:>10}  {sites:>5}  failed: {' '.join(done.stderr.split())[-300:]}", flush=True)
                continue
            one = json.loads(done.stdout.splitlines()[-1])
            found.append(one)
            print(
                f"{size:>10}  {sites:>5}  {one['round_seconds']:7.1f}  {one['ratio']:12.3f}  "
                f"{one['idle_processor_share']:8.1%}  {one['run_megabytes']:9.0f} MB",
                flush=True,
            )
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
