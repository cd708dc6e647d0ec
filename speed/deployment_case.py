"""Single case of ``speed.deployment``: a run over real SuperNodes, and its cost."""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from unskew.config.loader import experiment
from unskew.deployment.flower.superlinks import LocalSuperLink
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.run import run

WIDTHS = {"62k": 214, "11M": 3280, "110M": 10450}
"""Sizes of the two hidden layers, by the number of parameters of the model."""
STARTING = 600.0
"""Seconds within which all sites must be connected."""
SPARE = 1500
"""Megabytes of memory that must remain free; a case that uses more is stopped."""


class Meter:
    """Proxy that forwards connections to a port and counts the bytes in each direction."""

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
            for end in (source, sink):
                end.close()


def processor_seconds(groups: Sequence[int]) -> float:
    """Return the CPU seconds of the live processes in some process groups."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) in groups:
            total += sum(int(value) for value in fields[11:15]) / tick
    return total


def available() -> float:
    """Return the available memory in megabytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def peak_of(process: int) -> float:
    """Return the peak memory of a process in megabytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class Memory(threading.Thread):
    """Watches the memory of all processes relative to the start.

    Args:
        stop: Called when almost no memory is left.
    """

    def __init__(self, stop: Callable[[], None]):
        super().__init__(daemon=True)
        self.stop, self.before, self.least = stop, available(), available()

    def run(self) -> None:
        """Check the memory twice a second."""
        while True:
            self.least = min(self.least, available())
            if self.least < SPARE:
                self.stop()
            time.sleep(0.5)

    @property
    def taken(self) -> float:
        """Peak memory in megabytes."""
        return self.before - self.least


def one_case(size: str, sites: int, rounds: int, idle: float) -> dict[str, Any]:
    """Measure one row of the table in this process."""
    config = experiment(
        {
            "data": "digits",
            "partition": "iid",
            "clients": sites,
            "model": "mlp",
            "rounds": rounds,
            "model_options": {"hidden": [WIDTHS[size], WIDTHS[size]]},
            "local_steps": 1,
            "batch_size": 8,
            "eval_clients": 0,
        }
    )
    meters: list[Meter] = []

    class Metered(LocalSuperLink):
        """SuperLink whose SuperNodes connect through the meter."""

        def _supernode(self, client: int) -> Any:
            port = int(self.superlink.address.rpartition(":")[2])
            if not meters:
                meters.append(Meter(port))
            inside, self.superlink = (
                self.superlink,
                type(self.superlink)(f"127.0.0.1:{meters[0].port}", self.superlink.ca),
            )
            try:
                return super()._supernode(client)
            finally:
                self.superlink = inside

        def connected(self) -> bool:
            """Return whether every site has loaded its data and is connected."""
            logs = {path.name: path.read_text(errors="replace") for path in self.logs.glob("site-*.log")}
            nodes = [text for name, text in logs.items() if name.endswith("-supernode.log")]
            other_logs = [text for name, text in logs.items() if not name.endswith("-supernode.log")]
            return (
                sum("SuperNode ID" in text for text in nodes)
                == sum(" answers at " in t for t in other_logs)
                == self.sites
            )

    rows: list[dict[str, Any]] = []
    crossed: list[int] = []
    superlink: list[float] = []

    class Follower:
        """Callback that records the bytes at the end of each round."""

        def start(self, config: Any, rounds_done: int) -> None:
            crossed.append(meters[0].up + meters[0].down)

        def round(self, row: dict[str, Any]) -> None:
            rows.append(row)
            assert network.main is not None, "it was started"
            superlink.append(peak_of(network.main.pid))
            crossed.append(meters[0].up + meters[0].down)

        def end(self, summary: Any) -> None:
            pass

    network = Metered(Path(tempfile.gettempdir()) / "unskew-benchmark", sites, [config])

    def stop() -> None:
        network.close()
        print(json.dumps({"failed": "it takes more memory than there is"}), flush=True)
        os._exit(0)

    memory = Memory(stop)
    memory.start()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            network.start()
            end = time.monotonic() + STARTING
            while not network.connected():
                if time.monotonic() > end:
                    return {"failed": f"not all sites were connected within {STARTING:g} s"}
                time.sleep(0.5)
            time.sleep(5.0)
            groups, before = [child.pid for child in network.family.children], time.monotonic()
            taken = processor_seconds(groups)
            time.sleep(idle)
            share = (processor_seconds(groups) - taken) / (time.monotonic() - before)
            result = run(
                config,
                Deployment(max_message_mb=4096.0),
                Path(scratch) / "run",
                [Follower()],
                lambda text: None,
                network,
            )
        finally:
            network.close()
            network.forget()
    counted, wire = rows[-1]["bytes_up"] + rows[-1]["bytes_down"], crossed[-1] - crossed[0]
    seconds = [row["seconds"] for row in rows]
    per_round = [after - before for before, after in zip([0.0, *seconds], seconds, strict=False)]
    return {
        "exact_parameters": result.summary["parameters"],
        "rounds": len(rows),
        "seconds": per_round,
        "round_seconds": median(per_round[1:] or per_round),
        "bytes_counted": counted,
        "bytes_on_the_wire": wire,
        "ratio": wire / counted,
        "resent": rows[-1].get("sites_resent", 0),
        "idle_processor_share": share,
        "run_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "superlink_megabytes": superlink[-1],
        "all_megabytes": memory.taken,
    }
