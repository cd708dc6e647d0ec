"""Worker of the process pool: runs jobs and reports events to the parent process."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from unskew.engines.auto_select import planned_runs
from unskew.engines.cpu import exit_with_parent, keep_freed_memory, set_core_limit
from unskew.engines.mmap_pickle import load_mmap
from unskew.errors import EngineError
from unskew.records.recorder import Callback, Row
from unskew.simulation import round_loop


class _CallbackRelay(Callback):
    """Callback that forwards the events of a run to the parent process."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe

    def _tell(self, name: str, *arguments: Any) -> None:
        self.pipe.send(("call", name, arguments))

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        self._tell("start", config, rounds_done)

    def prepare(self, text: str, done: float, total: float) -> None:
        self._tell("prepare", text, done, total)

    def round(self, row: Row) -> None:
        self._tell("round", row)

    def warn(self, text: str) -> None:
        self._tell("warn", text)

    def end(self, summary: dict[str, Any]) -> None:
        self._tell("end", summary)


def run_job(pipe: Connection, path: str, share: int, ending: int = signal.SIGTERM, runs: int = 1) -> None:
    """Run jobs in this process until the parent process closes the pipe.

    Args:
        pipe: Connection to the parent process.
        path: File with the object that all jobs receive.
        share: Number of cores that this process uses.
        ending: Signal that this process receives when its parent ends. After SIGTERM the round is finished and saved.
        runs: Number of jobs that this process is likely to run.
    """
    with contextlib.suppress(KeyboardInterrupt), planned_runs(runs):
        _work(pipe, path, share, ending)


def _work(pipe: Connection, path: str, share: int, ending: int) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C in a terminal should only reach the parent process, which forwards it
    signal.signal(signal.SIGTERM, _end)
    round_loop.NOTICE = b""  # the parent process prints the notice
    exit_with_parent(ending)
    set_core_limit(share)
    keep_freed_memory()
    received: list[Any] = []
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            if not received:
                received.append(load_mmap(Path(path)))
            function, arguments = pickle.loads(task)  # nosec B301
            reply: tuple[Any, ...] = ("done", function(received[0], *arguments, callbacks=[_CallbackRelay(pipe)]))
        except KeyboardInterrupt:
            reply = ("stopped", None)
        except Exception as error:
            reply = ("failed", _sent(error), traceback.format_exc())
        try:
            pipe.send(reply)
        except OSError:  # the parent process has ended
            return


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _sent(error: Exception) -> Exception:
    """Return the error, or an ``EngineError`` with its text if it cannot be pickled."""
    try:
        again = pickle.loads(pickle.dumps(error))  # nosec B301
        return error if type(again) is type(error) else EngineError(str(error))
    except Exception:
        return EngineError(f"A parallel run failed:\n{traceback.format_exc()}")
