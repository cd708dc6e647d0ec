"""Nodes of a Ray cluster on loopback, each with an address of its own, ended by their own pids."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
"""What nodes and who connects to them must show; set before Ray is loaded."""
STORE = 150_000_000
SECONDS = 180


class Node:
    """One ``ray start``; all its processes are children of a session of its own.

    Args:
        address: Its own, such as 127.0.0.2.
        head: Address and port of the head; None if it is the head.
        cpus: Cores that it offers.
        folder: Where its logs go.
    """

    def __init__(self, address, head, cpus, folder):
        self.address, self.log = address, Path(folder) / f"{address}.log"
        where = [f"--address={head}"] if head else ["--head", "--port=0", "--include-dashboard=false"]
        where += (
            [] if head else [f"--temp-dir={folder}/r"]
        )  # a socket there has a short name  # a socket there has a short name
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            *where,
            f"--node-ip-address={address}",
            "--block",
        ]
        command += [f"--num-cpus={cpus}", f"--object-store-memory={STORE}", "--disable-usage-stats"]
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "OMP_NUM_THREADS": "1",
            **TOKEN,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def port(self):
        """Of the head, as it says."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(rf"--address='{self.address}:(\d+)'", self.log.read_text()):
                return int(found[1])
            time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    def pids(self):
        """Of all its processes: those below the one that was started."""
        below = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            below.setdefault(int(rest[1]), []).append(pid)
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            waiting += below.get(pid, [])
        return found

    def kill(self):
        """All at once, as when a machine loses its power."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@contextmanager
def cluster(folder, nodes=2, cpus=1):
    """A cluster of so many nodes; gives its address and the nodes, the head first."""
    started = []
    try:
        started.append(Node("127.0.0.2", None, cpus, folder))
        address = f"127.0.0.2:{started[0].port()}"
        started += [Node(f"127.0.0.{2 + number}", address, cpus, folder) for number in range(1, nodes)]
        yield address, started
    finally:
        for node in reversed(started):
            node.kill()
        shutil.rmtree(Path(folder) / "r", ignore_errors=True)
