"""Independent runs side by side: each in a process of its own, with its share of the cores.

The processes are spawned, not forked, so whatever they are given must be found by its name there. A run tells its followers
here what happens; what it gives back is what it gives alone. The first Ctrl-C lets all of them finish their round and save.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, cast

from unskew.config.experiment import Experiment
from unskew.engines.catalogue import pick_device
from unskew.engines.laid_out import lay_out
from unskew.engines.machine import cores
from unskew.errors import ConfigError, EngineError, UnskewError, shown
from unskew.records.recorder import Callback, warn
from unskew.runs.beside import work_beside
from unskew.simulation.loop import Interrupted, interruptible

SMALL = 1_000_000
"""Parameters of a model up to which ``auto`` takes a core for each run: so small ones gain little from a second thread."""
MOST = 256
"""Runs at a time."""
GLANCE = 0.2
"""Seconds between two looks whether Ctrl-C was pressed."""


@dataclass(frozen=True)
class Work:
    """A run, or anything else that takes long.

    Attributes:
        name: What its result is found by.
        function: Called in another process as ``function(given, *arguments, callbacks=...)``; it has a name there, too.
        arguments: Its own.
        follow: Gives its followers, which stay here, when it begins.
        after: Names of works that must be done before.
    """

    name: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    follow: Callable[[], Sequence[Callback]] = tuple
    after: tuple[Hashable, ...] = ()


def check_parallel(parallel: object) -> None:
    """Refuse what is no number of runs.

    Raises:
        ConfigError: It is none.
    """
    number = isinstance(parallel, int) and not isinstance(parallel, bool) and 1 <= parallel <= MOST
    if not number and parallel != "auto":
        raise ConfigError(f"parallel={shown(parallel)} is no number of runs at a time; write 1 to {MOST}, or auto.")


def read_parallel(text: str) -> int | str:
    """``parallel`` as it is written on a command line.

    Raises:
        ConfigError: It is neither a number nor ``auto``.
    """
    parallel = int(text) if text.isdecimal() and len(text) < 10 else text
    check_parallel(parallel)
    return parallel


def places(parallel: int | str, configs: Sequence[Experiment], size: int) -> int:
    """How many runs are made at a time.

    Args:
        parallel: What was asked for: a number, or ``auto``.
        configs: The runs.
        size: Parameters of the largest model among them.

    Raises:
        ConfigError: Each run would start a cluster of its own.
    """
    check_parallel(parallel)
    if parallel == 1 or len(configs) < 2:
        return 1
    clusters = [one for one in configs if one.engine == "ray" and one.ray.address in (None, "local")]
    if isinstance(parallel, int):
        if clusters:
            raise ConfigError(
                "Runs side by side would each start a Ray cluster of their own on this machine: name one that runs already "
                "(ray.address=auto, after ray start --head), or take engine=inline."
            )
        return min(parallel, len(configs))
    divided = any(
        one.engine == "vectorized" or one.workers is not None or pick_device(one.device).type != "cpu"
        for one in configs
    )
    return 1 if divided or clusters or size > SMALL else min(cores(), len(configs))


def side_by_side(works: Sequence[Work], places: int, given: Any = None) -> Iterator[tuple[Hashable, Any]]:
    """Carry out works, ``places`` at a time; gives the name and the result of each when it is done.

    The first that fails ends the others after their round, and its error is raised.

    Args:
        works: What is to be done; those that others come ``after`` stand before them.
        places: Processes.
        given: What all of them need, such as data. It lies in memory once for all processes.

    Raises:
        ConfigError: Something cannot be sent to another process.
        EngineError: A process died.
        Interrupted: Ctrl-C was pressed; all have finished their round.
    """
    with tempfile.TemporaryDirectory(prefix="unskew-") as folder:
        path = Path(folder) / "given"
        with _sendable():
            lay_out(given, path)
        crew = _Crew(max(1, min(places, len(works))), path)
        try:
            yield from crew.carry_out(works)
        finally:
            crew.close()


@contextlib.contextmanager
def _sendable() -> Iterator[None]:
    """Within, what cannot be pickled becomes a sentence."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Runs side by side are made in processes of their own, and a part of these cannot be sent there: {error}. "
            "Define classes and functions at the top of a module and hold no open files, or leave out parallel."
        ) from error


@dataclass
class _Busy:
    """A work that is being done."""

    work: Work
    callbacks: list[Callback]


@dataclass
class _Crew:
    """The processes, and who does what."""

    places: int
    given: Path
    processes: dict[Connection, BaseProcess] = field(default_factory=dict)
    busy: dict[Connection, _Busy] = field(default_factory=dict)
    done: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        share = max(1, cores() // self.places)
        for _ in range(self.places):
            ours, theirs = context.Pipe()
            # Not daemons: these may have no worker processes of their own.
            process = context.Process(target=work_beside, args=(theirs, str(self.given), share))
            process.start()
            theirs.close()
            self.processes[ours] = process

    def carry_out(self, works: Sequence[Work]) -> Iterator[tuple[Hashable, Any]]:
        """See ``side_by_side``."""
        waiting = list(works)
        with interruptible() as stopped:
            try:
                while (waiting or self.busy) and not stopped:
                    self._hand_out(waiting)
                    for ready in wait(list(self.busy), GLANCE):
                        yield from self._hear(cast(Connection, ready))
            except BaseException:
                self._wind_up()
                raise
            if stopped:
                self._wind_up()
                raise Interrupted(stopped[0])

    def _hand_out(self, waiting: list[Work]) -> None:
        for pipe in self.processes:
            if pipe in self.busy:
                continue
            work = next((work for work in waiting if all(name in self.done for name in work.after)), None)
            if work is None:
                return
            with _sendable():
                task = pickle.dumps((work.function, work.arguments))
            waiting.remove(work)
            self.busy[pipe] = _Busy(work, list(work.follow()))
            with contextlib.suppress(OSError):  # noticed, with its reason, when the answer is read
                pipe.send_bytes(task)

    def _hear(self, pipe: Connection) -> Iterator[tuple[Hashable, Any]]:
        """One message of a process; if that is the end of its work, its name and result."""
        busy = self.busy[pipe]
        try:
            kind, *rest = pipe.recv()
        except (EOFError, OSError):
            del self.busy[pipe]
            self._died(self.processes.pop(pipe), busy.work)
        if kind == "call":
            name, arguments = rest
            if name == "warn":
                warn(busy.callbacks, *arguments)
                return
            for callback in busy.callbacks:
                told = getattr(callback, name, None)
                if told is not None:
                    told(*arguments)
            return
        del self.busy[pipe]
        if kind == "failed":
            error, text = rest
            if not isinstance(error, UnskewError):
                error.add_note(text)
            raise error
        if kind == "stopped":
            raise Interrupted(signal.SIGTERM)
        self.done.add(busy.work.name)
        yield busy.work.name, rest[0]

    @staticmethod
    def _died(process: BaseProcess, work: Work) -> NoReturn:
        process.join(timeout=5)
        if process.exitcode == 1:  # Python ended before it came to the work
            raise EngineError(
                "A process for a run beside others could not begin; its reason is above. A script that begins runs "
                'side by side does so under: if __name__ == "__main__".'
            )
        raise EngineError(
            f"The process of a run beside others died (exit code {process.exitcode}, {work.name}); memory may have run "
            "out. Go on with what is there (resume), with fewer runs at a time."
        )

    def _wind_up(self) -> None:
        """Let those that are at work finish their round and save it, and wait for them."""
        for pipe in self.busy:
            self.processes[pipe].terminate()
        while self.busy:
            for ready in wait(list(self.busy)):
                with contextlib.suppress(Exception, Interrupted):  # the first reason to stop is the one that is told
                    list(self._hear(cast(Connection, ready)))

    def close(self) -> None:
        """End the processes: those that are still at work at once."""
        for pipe, process in self.processes.items():
            pipe.close()
            if pipe in self.busy:
                process.terminate()
        patience = time.monotonic() + 5
        for process in self.processes.values():
            process.join(timeout=max(0.0, patience - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
