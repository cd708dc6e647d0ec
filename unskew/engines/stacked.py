"""Several runs at once: the clients of their cohorts are trained as one group, with the numbers of single runs.

The runs have the same model, client rules, budget and kind of data. They may differ in the seed, in the samples of their
clients, and in all that the server does. Each run has a thread of its own, but one thread works at a time: a run works until
it asks for the training of a cohort, and waits until the runs of earlier rounds have asked, too.
"""

from __future__ import annotations

import contextvars
import hashlib
import io
import pickle
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from unskew.data.clients import ArrayClients, stack_clients
from unskew.data.pixel_scaling import PixelScaling
from unskew.engines.base import EngineConfig
from unskew.engines.batches import BatchPlan
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.vectorized import VectorizedEngine
from unskew.models.user_modules import describe_error
from unskew.protocol.messages import Broadcast, Tensors, Update, replace_fields
from unskew.protocol.rules import SurveyTime

_current: ContextVar[RunThread | None] = ContextVar("current", default=None)


class _ContentPickler(pickle.Pickler):
    """Pickler that writes a digest instead of each tensor, and only the shape of tensors that are exchanged."""

    def __init__(self, file: io.BytesIO, exchanged: Sequence[Tensor]):
        super().__init__(file)
        self.exchanged = {id(tensor) for tensor in exchanged}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        data = b""
        if id(obj) not in self.exchanged:
            data = obj.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return str(obj.dtype), tuple(obj.shape), obj.requires_grad, hashlib.sha256(data).digest()


def content_of(setup: EngineConfig) -> bytes | None:
    """Return all that runs must share to be trained together; None if a run must be trained by itself.

    Args:
        setup: Configuration of the engine.
    """
    federation, spec = setup.federation, setup.spec
    clients = federation.clients
    if not isinstance(clients, ArrayClients) or clients.mapped:
        return None
    named = {**dict(spec.module.named_parameters()), **dict(spec.module.named_buffers())}
    exchanged = [named[name] for name in (*spec.names, *spec.buffer_names)]
    first = clients[0]
    data = first.x.dtype, federation.shape, first.y.dtype, first.y.shape[1:]
    scaling = federation.normalization, PixelScaling.of(federation)
    work = setup.rules, setup.task, setup.training, setup.plan, setup.buffers, setup.common, setup.secret is None
    model = spec.module, spec.names, spec.buffer_names, spec.parts, spec.dtype, spec.autocast
    file = io.BytesIO()
    try:
        _ContentPickler(file, exchanged).dump((data, scaling, work, model, str(setup.device), setup.keeps_encoded))
    except Exception:  # a model or rule that cannot be pickled cannot be compared either
        return None
    return hashlib.sha256(file.getvalue()).digest()


@dataclass(frozen=True)
class StackedConfig(EngineConfig):
    """Configuration of several runs as one federation: client ``k`` of run ``r`` has the number ``firsts[r] + k``.

    Attributes:
        parts: Configurations of the runs.
        firsts: Number of the first client of each run.
    """

    parts: tuple[EngineConfig, ...] = ()
    firsts: tuple[int, ...] = ()

    @staticmethod
    def of(parts: Sequence[EngineConfig]) -> StackedConfig:
        """Return the joined configuration of runs with the same ``content_of``.

        Args:
            parts: Configurations of the runs.
        """
        sources = [part.federation.clients for part in parts]
        federation = replace(parts[0].federation, clients=stack_clients(sources), client_names=())

        def warn(text: str) -> None:
            for part in parts:
                part.warn(text)

        values = {f.name: getattr(parts[0], f.name) for f in fields(EngineConfig)}
        values |= {"federation": federation, "warn": warn, "secret": None}
        firsts = tuple(accumulate(map(len, sources[:-1]), initial=0))
        return StackedConfig(**values, parts=tuple(parts), firsts=firsts)

    def run_of(self, client: int) -> int:
        """Return the index of the run of a client."""
        return bisect_right(self.firsts, client) - 1

    def origin(self, broadcast: Broadcast) -> tuple[EngineConfig, Broadcast]:
        """Return the configuration of a client's run, and the broadcast with the client's number there."""
        run = self.run_of(broadcast.client)
        return self.parts[run], replace_fields(broadcast, client=broadcast.client - self.firsts[run])

    def batch_plan(self, round: int, client: int) -> BatchPlan:
        """Draw the batches of a client in a round, as its own run does."""
        run = self.run_of(client)
        return self.parts[run].batch_plan(round, client - self.firsts[run])


class StackedTrainer(LocalTrainer):
    """Trains single clients of several runs, each by the trainer of its own run.

    Args:
        setup: Joined configuration.
        trainers: Trainer of each run.
    """

    setup: StackedConfig

    def __init__(self, setup: StackedConfig, trainers: Sequence[LocalTrainer]):
        super().__init__(setup)
        self.trainers = trainers

    def _own(self, broadcast: Broadcast) -> tuple[LocalTrainer, Broadcast]:
        return self.trainers[self.setup.run_of(broadcast.client)], self.setup.origin(broadcast)[1]

    def train(self, broadcast: Broadcast) -> Update:
        """Run the local training of one client."""
        trainer, own = self._own(broadcast)
        return trainer.train(own)

    def inputs_of(self, broadcast: Broadcast, plan: BatchPlan) -> dict[str, Any]:
        """Return the training inputs of a client."""
        trainer, own = self._own(broadcast)
        return trainer.inputs_of(own, plan)

    def surveys(
        self, when: SurveyTime, broadcast: Broadcast, inputs: dict[str, Any], v: Tensor, b: Tensor
    ) -> dict[str, Tensors]:
        """Take the surveys of a model over all samples of a client."""
        trainer, own = self._own(broadcast)
        return trainer.surveys(when, own, inputs, v, b)


class StackedEngine(VectorizedEngine):
    """Engine of one of several runs that are trained together.

    Args:
        setup: Configuration of the run.
        thread: Thread of the run.

    Attributes:
        content: What the run must share with others; None if it is trained by itself.
    """

    def __init__(self, setup: EngineConfig, thread: RunThread):
        super().__init__(setup)
        self.thread = thread
        self.content = None if self.width == 1 else content_of(setup)
        thread.waits = self.content is not None

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort together with those of other runs, and yield its updates in order."""
        if self.content is None or not broadcasts or broadcasts[0].closing or broadcasts[0].asks_loss:
            return super().train(broadcasts)
        began = time.perf_counter()
        updates, seconds = self.thread.ask((broadcasts[0].round, self, broadcasts))
        self.setup.waited(time.perf_counter() - began - seconds)
        return iter(updates)

    def train_alone(self, broadcasts: Sequence[Broadcast]) -> Reply:
        """Train a cohort without those of other runs."""
        began = time.perf_counter()
        try:
            return list(super().train(broadcasts)), time.perf_counter() - began
        except Exception as error:  # raised in the thread of the run
            return error


Request = tuple[float, StackedEngine | None, Sequence[Broadcast]]
"""Round, engine and cohort to train; without an engine, a run waits until the others have finished the round."""
Reply = tuple[list[Update], float] | BaseException
"""Updates of a cohort and the run's share of the seconds, or an error to raise in the run."""


class JointEngine(VectorizedEngine):
    """Engine that trains the cohorts of several runs as one.

    Args:
        engines: Engines of the runs, whose widths it sets.
    """

    def __init__(self, engines: Sequence[StackedEngine]):
        self.engines = engines
        joined = StackedConfig.of([engine.setup for engine in engines])
        super().__init__(joined, engines[0].memory)
        self.trainer.single = StackedTrainer(joined, [engine.trainer.single for engine in engines])
        self.firsts = joined.firsts
        self.width = min((engine.width for engine in engines if engine.width is not None), default=None)

    def train_cohorts(self, cohorts: Sequence[Sequence[Broadcast]]) -> list[list[Update]]:
        """Train the cohorts of all runs in a round, and return the updates of each."""
        numbered = zip(self.firsts, cohorts, strict=True)
        updates = self.train([replace_fields(b, client=first + b.client) for first, own in numbered for b in own])
        return [[next(updates) for _ in cohort] for cohort in cohorts]

    def _set_width(self, width: int) -> None:
        super()._set_width(width)
        for engine in self.engines:
            engine._set_width(width)


class RunThread(threading.Thread):
    """Thread of one run, which works only while ``resume`` waits for it.

    Args:
        function: Executes the run.
        stopped: List that is not empty once the run must end after its round.

    Attributes:
        request: Request that the run waits for; None if it has not started or has ended.
        waits: Whether the run waits for others after each round.
        result: Result of the function, once it has ended.
        error: Error that ended the function.
    """

    def __init__(self, function: Callable[[], Any], stopped: list[int]):
        super().__init__(daemon=True)
        self.function = function
        self.stopped = stopped
        self.waits = False
        self.request: Request | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._context = contextvars.copy_context()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run(self) -> None:
        """Execute the run; called in the thread."""
        self._context.run(_current.set, self)
        try:
            if self._device is not None:  # the current device of PyTorch belongs to a thread
                torch.cuda.set_device(self._device)
            self.result = self._context.run(self.function)
        except BaseException as error:  # raised by ``run_together``
            self.error = error
        self._requests.put(None)

    def ask(self, request: Request) -> tuple[list[Update], float]:
        """Wait for the training of a cohort; called in the thread."""
        self._requests.put(request)
        reply = self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def resume(self, reply: Reply | None = None) -> None:
        """Let the run work until its next request or its end.

        Args:
            reply: Reply to its request; None starts the run.
        """
        if reply is None:
            self.start()
        else:
            self._replies.put(reply)
        try:
            self.request = self._requests.get()
        except BaseException:  # Ctrl-C, while the run works
            self.request = self._requests.get()
            raise

    def stop(self) -> None:
        """End the run if it waits for a request."""
        while self.request is not None:
            self.resume(KeyboardInterrupt())


def run_together(functions: Sequence[Callable[[], Any]], stopped: list[int]) -> list[Any]:
    """Execute runs whose cohorts are trained together, and return the result of each.

    The cohorts of the earliest round are trained first, so that resumed runs catch up with each other. If a run fails, the
    others finish their round and end.

    Args:
        functions: Each executes a run.
        stopped: List that is not empty once all runs must end after their round; an error in a run adds a number.

    Raises:
        BaseException: If a run failed or was interrupted.
    """
    threads = [RunThread(function, stopped) for function in functions]
    joint: dict[bytes | None, JointEngine] = {}

    def resume(thread: RunThread, reply: Reply | None = None) -> None:
        thread.resume(reply)
        if thread.error is not None and not stopped:
            stopped.append(signal.SIGTERM)

    try:
        for thread in threads:
            if not stopped:
                resume(thread)
        while requests := {thread: thread.request for thread in threads if thread.request is not None}:
            kinds = {thread: (round, engine and engine.content) for thread, (round, engine, _) in requests.items()}
            kind = min(kinds.values(), key=lambda kind: kind[0])
            group = [thread for thread in requests if kinds[thread] == kind]
            replies = _train_group([requests[thread] for thread in group], joint)
            for thread, reply in zip(group, replies, strict=True):
                resume(thread, reply)
    finally:
        for thread in threads:
            thread.stop()
    errors = [thread.error for thread in threads if thread.error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt)):
        raise error
    return [thread.result for thread in threads]


def _train_group(requests: Sequence[Request], joint: dict[bytes | None, JointEngine]) -> list[Reply]:
    """Train cohorts together; if that fails, each by itself, so that an error ends only the run that has it."""
    engines = [engine for _, engine, _ in requests if engine is not None]
    if not engines:
        return [([], 0.0)] * len(requests)
    cohorts = [broadcasts for _, _, broadcasts in requests]
    if len(engines) == 1:
        return [engines[0].train_alone(cohorts[0])]
    began, content = time.perf_counter(), engines[0].content
    try:
        if content not in joint or joint[content].engines != engines:
            joint[content] = JointEngine(engines)
        each = joint[content].train_cohorts(cohorts)
        share = (time.perf_counter() - began) / len(engines)
        return [(updates, share) for updates in each]
    except Exception as error:
        reason = describe_error(error)
    replies = [engine.train_alone(broadcasts) for engine, broadcasts in zip(engines, cohorts, strict=True)]
    if all(isinstance(reply, tuple) for reply in replies):
        for engine in engines:
            engine.setup.warn(f"The runs could not be trained together in this round, but one by one: {reason}")
    return replies


def wait_for_runs(round: int) -> list[int]:
    """Wait until the runs that are trained together with this one have finished a round, so that all can end after it.

    Args:
        round: Number of the round that this run has finished, from 0.

    Returns:
        Signals, if all runs must end.
    """
    thread = _current.get()
    if thread is None:
        return []
    if thread.waits:
        thread.ask((round + 0.5, None, ()))
    return thread.stopped


def make_vectorized(setup: EngineConfig) -> VectorizedEngine:
    """Create the engine ``vectorized`` of a run; in ``run_together``, it trains together with the other runs.

    Args:
        setup: Configuration of the engine.
    """
    thread = _current.get()
    return VectorizedEngine(setup) if thread is None else StackedEngine(setup, thread)
