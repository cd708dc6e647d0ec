"""Several runs at once: the clients of their cohorts are trained as one group, with the numbers of single runs.

The runs have the same model, client rules, budget and kind of data. They may differ in the seed, in the samples of their
clients, and in all that the server does.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from unskew.data.clients import ArrayClients, stack_clients
from unskew.data.pixel_scaling import PixelScaling
from unskew.engines.base import EngineConfig
from unskew.engines.batches import BatchPlan
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.run_threads import Reply, Request, RunThread, current_thread
from unskew.engines.training_checkpoint import CheckpointStore
from unskew.engines.vectorized import VectorizedEngine
from unskew.models.user_modules import describe_error
from unskew.protocol.messages import Broadcast, SummedUpdate, Tensors, Update, replace_fields
from unskew.protocol.rules import SurveyTime


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
    """Return all that runs must share to be trained together; None if a run must be trained separately.

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
    work = (
        setup.rules,
        setup.task,
        setup.training,
        setup.plan,
        setup.buffers,
        setup.common,
        setup.secret is None,
        setup.sums,
    )
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

    def train(self, broadcast: Broadcast, store: CheckpointStore | None = None) -> Update:
        """Run the local training of one client."""
        trainer, own = self._own(broadcast)
        return trainer.train(own, store)

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
        content: What the run must share with others; None if it is trained separately.
    """

    def __init__(self, setup: EngineConfig, thread: RunThread):
        super().__init__(setup)
        self.thread = thread
        self.content = None if self.width == 1 else content_of(setup)
        thread.waited = None if self.content is None else setup.waited

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort together with those of other runs, and yield its updates in order."""
        if self.content is None or not broadcasts or broadcasts[0].closing or broadcasts[0].asks_loss:
            return super().train(broadcasts)
        return iter(self.thread.ask(Request(broadcasts[0].round, self.content, (self, broadcasts))))

    def train_alone(self, broadcasts: Sequence[Broadcast]) -> Reply:
        """Train a cohort without those of other runs."""
        began = time.perf_counter()
        try:
            return list(super().train(broadcasts)), time.perf_counter() - began
        except Exception as error:  # raised in the thread of the run
            return error


class JointEngine(VectorizedEngine):
    """Engine that trains the cohorts of several runs as one.

    Args:
        engines: Engines of the runs, whose widths it sets.
    """

    def __init__(self, engines: Sequence[StackedEngine]):
        self.engines = engines
        joined = StackedConfig.of([engine.setup for engine in engines])
        super().__init__(joined, engines[0].memory, record=engines[0].trainer.record)
        self.trainer.single = StackedTrainer(joined, [engine.trainer.single for engine in engines])
        self.firsts = joined.firsts
        self.width = min((engine.width for engine in engines if engine.width is not None), default=None)
        forms = {engine.channels_last for engine in engines}
        if self.channels_last is None and None not in forms:
            self._use_form(all(forms))

    def train_cohorts(self, cohorts: Sequence[Sequence[Broadcast]]) -> list[list[Update]]:
        """Train the cohorts of all runs in a round, and return the updates of each."""
        numbered = list(zip(self.firsts, cohorts, strict=True))
        sent = [replace_fields(b, client=first + b.client) for first, own in numbered for b in own]
        done = self.train_by_index(sent)
        each: list[list[Any]] = [[] for _ in cohorts]
        for index in sorted(done):
            run, update = self.setup.run_of(sent[index].client), done[index]
            if isinstance(update, SummedUpdate):
                own = {
                    name: tuple(k - self.firsts[run] for k in getattr(update, name)) for name in ("clients", "unusable")
                }
                update = replace_fields(update, **own)
            each[run].append(update)
        return each

    def _write(self) -> None:
        for engine in self.engines:
            engine.width = self.width
            if self.channels_last is not None and engine.channels_last is None:
                engine._use_form(self.channels_last)
            engine._write()


class JointTraining:
    """Trains the cohorts of several runs, and keeps the engine for each kind of runs."""

    def __init__(self) -> None:
        self.engines: dict[bytes | None, JointEngine] = {}

    def __call__(self, works: Sequence[tuple[StackedEngine, Sequence[Broadcast]]]) -> list[Reply]:
        """Train cohorts together; if that fails, each separately, so that an error ends only the run that has it.

        Args:
            works: Engine of each run, and its cohort.
        """
        engines, cohorts = [engine for engine, _ in works], [cohort for _, cohort in works]
        if len(works) == 1:
            return [engines[0].train_alone(cohorts[0])]
        began, content = time.perf_counter(), engines[0].content
        try:
            if content not in self.engines or self.engines[content].engines != engines:
                self.engines[content] = JointEngine(engines)
            each = self.engines[content].train_cohorts(cohorts)
            share = (time.perf_counter() - began) / len(works)
            return [(updates, share) for updates in each]
        except Exception as error:
            reason = describe_error(error)
        replies = [engine.train_alone(cohort) for engine, cohort in works]
        if all(isinstance(reply, tuple) for reply in replies):
            for engine in engines:
                engine.setup.warn(f"The runs could not be trained together in this round, but one by one: {reason}.")
        return replies


def make_vectorized(setup: EngineConfig) -> VectorizedEngine:
    """Create the engine ``vectorized`` of a run; in ``run_together``, it trains together with the other runs.

    Args:
        setup: Configuration of the engine.
    """
    thread = current_thread()
    return VectorizedEngine(setup) if thread is None else StackedEngine(setup, thread)
