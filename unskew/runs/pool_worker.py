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

from unskew.engines.cpu import exit_with_parent, keep_freed_memory, set_core_limit
from unskew.engines.mmap_pickle import load_mmap
from unskew.errors import EngineError
from unskew.records.recorder import Callback, Row
from unskew.simulation import round_loop


class _CallbackRelay(Callback):
    """Follows a run, and tells the process that began it."""

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


def run_job(pipe: Connection, path: str, share: int, ending: int = signal.SIGTERM) -> None:
    """The life of a process: one work after another, until nobody asks for more.

    Args:
        pipe: To the process that began this one.
        path: File with what all works are given.
        share: Cores that it may use.
        ending: Signal that it sends itself when that process ends: the round is finished and saved, or not.
    """
    with contextlib.suppress(KeyboardInterrupt):
        _work(pipe, path, share, ending)


def _work(pipe: Connection, path: str, share: int, ending: int) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a terminal's Ctrl-C is for the process that began us, which passes it on
    signal.signal(signal.SIGTERM, _end)
    round_loop.NOTICE = b""  # it says so itself
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
            answer: tuple[Any, ...] = ("done", function(received[0], *arguments, callbacks=[_CallbackRelay(pipe)]))
        except KeyboardInterrupt:
            answer = ("stopped", None)
        except Exception as error:
            answer = ("failed", _sent(error), traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # nobody waits for it any more
            return


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _sent(error: Exception) -> Exception:
    """The error as it can be sent: a user's own class may not be."""
    try:
        again = pickle.loads(pickle.dumps(error))  # nosec B301
        return error if type(again) is type(error) else EngineError(str(error))
    except Exception:
        return EngineError(f"A parallel run failed:\n{traceback.format_exc()}")
