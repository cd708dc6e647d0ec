"""Runs of the command line: in this process, or in a process of its own that can be killed."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

TINY = ("--data", "digits", "--clients", "4", "--model", "logistic", "--local-steps", "2", "--engine", "inline")
"""The smallest useful run."""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out, parse_constant=lambda text: (_ for _ in ()).throw(ValueError(text)))


def call(capsys, *args) -> Outcome:
    """The command line in this process."""
    from unskew.cli import app as cli

    before, path = sys.argv, list(sys.path)
    sys.argv = ["unskew", *map(str, args)]
    capsys.readouterr()
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv, sys.path[:] = before, path
    return Outcome(code, *capsys.readouterr())


TIMES = ("seconds", "setup_seconds", "train_seconds", "client_seconds")


def blank(figure, file, **options):
    """In the place of ``Figure.savefig`` where no test looks at the picture: drawing one takes as long as a small run."""
    file.write(b"not drawn")


def metrics(folder, without=TIMES):
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in without} for row in rows]


def summary(folder, without=TIMES):
    found = json.loads((Path(folder) / "summary.json").read_text())
    return {k: v for k, v in found.items() if k not in without}


def assert_same_run(a, b, without=TIMES):
    """Bit for bit the same model, the same figures."""
    assert (Path(a) / "model.safetensors").read_bytes() == (Path(b) / "model.safetensors").read_bytes()
    assert metrics(a) == metrics(b)
    assert summary(a, without) == summary(b, without)


class Stop(Exception):
    """As if the process died."""


class StopAfter:
    """A follower that ends the run after a round."""

    def __init__(self, last):
        self.last = last

    def start(self, config, rounds_done):
        pass

    def round(self, row):
        if row["round"] == self.last:
            raise Stop

    def end(self, summary):
        pass


# ---- processes of their own -------------------------------------------------------------------------------------------


def _wait_for_a_signal(marker):
    """In round 3: say so, and wait there until Ctrl-C comes; then go on with the round."""
    from unskew.simulation.sampler import Sampler

    draw = Sampler.draw

    def waiting(self, t, in_flight=()):
        if t == 2:
            handler = signal.getsignal(signal.SIGINT)
            Path(marker).touch()
            while signal.getsignal(signal.SIGINT) is handler:
                time.sleep(0.005)
            Path(marker + ".seen").touch()
        return draw(self, t, in_flight)

    Sampler.draw = waiting


def _wait_twice(marker):
    """As before, but the round does not go on: only a second Ctrl-C ends it."""
    _wait_for_a_signal(marker)
    from unskew.simulation.sampler import Sampler

    draw = Sampler.draw

    def stuck(self, t, in_flight=()):
        cohort = draw(self, t, in_flight)
        while t == 2:
            time.sleep(0.005)
        return cohort

    Sampler.draw = stuck


def _die_at_sync(count):
    """The process kills itself at its ``count``-th wait for the disk: in the middle of a checkpoint or another file."""
    seen = 0
    fsync = os.fsync

    def dying(handle):
        nonlocal seen
        seen += 1
        if seen == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    os.fsync = dying


def _small_files(size):
    """No file may become larger than ``size`` bytes, as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))


HOOKS = {
    "": lambda _: None,
    "wait": _wait_for_a_signal,
    "wait twice": _wait_twice,
    "die": _die_at_sync,
    "small files": _small_files,
}


def _child(args, log, hook, value):
    import torch
    from matplotlib.figure import Figure

    from unskew.cli import app as cli

    os.setsid()  # a session of its own, so that all its workers can be found
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    torch.set_num_threads(1)
    if hook != "small files":  # there the size of the picture matters
        Figure.savefig = blank
    if callable(hook):
        hook(value)
        return
    HOOKS[hook](value)
    sys.argv = ["unskew", *args]
    cli.main()


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["unskew.cli.app", "unskew.comparison.compare", "unskew.cli.progress", "sklearn.datasets", "matplotlib.figure"]
)
_number = 0
_started = []


def end_all():
    """Kill what a failed test left running."""
    for one in _started:
        if one.process.is_alive():
            one.process.kill()
            one.process.join()
    _started.clear()


class Process:
    """``unskew ARGS`` in a process of its own; started from a server that has everything imported already."""

    def __init__(self, folder, *args, hook="", value=""):
        global _number
        _number += 1
        self.log = str(Path(folder).absolute() / f".log-{_number}")
        self.process = _context.Process(target=_child, args=([str(a) for a in args], self.log, hook, str(value)))
        self.process.start()
        self.pid = self.process.pid
        _started.append(self)

    def wait(self) -> Outcome:
        self.process.join(120)
        assert self.process.exitcode is not None, "the process does not end"
        texts = [Path(f"{self.log}.{name}") for name in ("out", "err")]
        return Outcome(self.process.exitcode, *(t.read_text() if t.exists() else "" for t in texts))

    def wait_until(self, condition):
        """Poll, as long as the process lives; whether the condition came true."""
        while not condition():
            if not self.process.is_alive():
                return condition()
            time.sleep(0.001)
        return True

    def signal(self, number, everyone=False):
        (os.killpg if everyone else os.kill)(self.pid, number)

    def alive(self):
        """Processes of its session that still run, it and its workers."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found
