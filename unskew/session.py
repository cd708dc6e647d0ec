"""One sitting of a run: from a checkpoint (or the start) to the end or an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from unskew.config import Experiment
from unskew.data.federation import Federation
from unskew.engines.base import Setup
from unskew.engines.choose import make_engine, pick_engine
from unskew.errors import CheckpointError
from unskew.methods.fedavg import FedAvg
from unskew.methods.rules import Method
from unskew.models.vector import ModelSpec
from unskew.records.recorder import Callback, Recorder, write_summary
from unskew.records.result import Result
from unskew.simulation import checkpoint
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.loop import Interrupted, train
from unskew.simulation.network import Network
from unskew.simulation.sampler import Sampler
from unskew.simulation.server import Server
from unskew.simulation.store import ClientStore
from unskew.tasks import TASKS


class Session:
    """Everything of a run in memory; :meth:`go` carries it out.

    Args:
        config: The run.
        federation: Its data.
        spec: Its model.
        chosen: Its method.
        device: Where it trains.
        folder: The run folder, or None.
        callbacks: Its followers.
    """

    def __init__(
        self,
        config: Experiment,
        federation: Federation,
        spec: ModelSpec,
        chosen: Method,
        device: torch.device,
        folder: Path | None,
        callbacks: Sequence[Callback],
    ):
        self.config, self.federation, self.spec, self.method = config, federation, spec, chosen
        self.folder, self.callbacks = folder, callbacks
        task = TASKS[federation.task]
        rule = chosen.server or FedAvg()
        auto = chosen.weights or rule.weights or "samples"
        self.weights = auto if config.weights == "auto" else config.weights
        store = ClientStore(None if folder is None else folder / "clients")
        self.server = Server(chosen, rule, spec, federation, self.weights, config.buffers, store)
        self.sampler = Sampler(len(federation.clients), config.participation, config.seed)
        self.network = Network(config.network.drop, config.seed)
        self.evaluator = Evaluator(spec, federation, task, device)
        self.setup = Setup(spec, federation, chosen.client, task, config.training, config.seed, device)
        self.engine_name = pick_engine(config.engine, device, self.sampler.size, config.workers)
        self.recorder = Recorder(folder, callbacks, config.target)

    def go(self, resume: bool) -> Result:
        """Train the rounds that remain and write the summary."""
        start = self._restore() if resume else 0
        for callback in self.callbacks:
            callback.start(self.config.model_dump(mode="json"), start)
        engine = make_engine(self.engine_name, self.setup, self.config.workers)
        self._saved = start if resume else -1
        try:
            rounds = range(start, self.config.rounds)
            train(rounds, self.sampler, self.server, engine, self.network, self._finished)
        except Interrupted as interruption:
            self._save(len(self.recorder.history))
            interruption.folder = self.folder
            raise
        finally:
            engine.close()
            self.recorder.sync()
            self.recorder.close()
        summary = self._summary()
        if self.folder is not None:
            weights = {**self.spec.parameters(self.server.v), **self.spec.buffers(self.server.b)}
            data = save({name: t.contiguous() for name, t in weights.items()})
            checkpoint.write_atomic(self.folder / "model.safetensors", data)
            write_summary(self.folder, summary)
        for callback in self.callbacks:
            callback.end(summary)
        module = self.spec.load(self.server.v, self.server.b)
        return Result(self.recorder.history, summary, module, self.server.v, self.folder)

    def _finished(self, t: int, figures: dict[str, float]) -> None:
        """After round ``t``: evaluate, record, save."""
        done, last = t + 1, t + 1 == self.config.rounds
        score = None
        if last or done % self.config.eval_every == 0:
            score = self.evaluator.score(self.server.v, self.server.b)
        traffic = self.server.traffic
        self.recorder.round(
            {
                "round": done,
                "accuracy": score and score.accuracy,
                "loss": score and score.loss,
                "bytes_up": traffic.up + traffic.buffers_up,
                "bytes_down": traffic.down + traffic.buffers_down,
                "seconds": round(self.recorder.seconds, 4),
                **figures,
            }
        )
        if last or done % self.config.checkpoint_every == 0:
            self._save(done)

    def _save(self, done: int) -> None:
        if self.folder is None or done == self._saved:
            return
        self.recorder.sync()
        extra = {
            "seconds": self.recorder.seconds,
            "config": self.config.model_dump(mode="json"),
            "fingerprint": self.federation.fingerprint,
        }
        checkpoint.save_checkpoint(self.folder / "checkpoints", done, self.server, extra)
        self._saved = done

    def _restore(self) -> int:
        """Load the newest whole checkpoint; returns the number of rounds done."""
        assert self.folder is not None
        found = checkpoint.newest(self.folder / "checkpoints")
        if found is None:
            self.recorder.resume(0, 0.0)
            return 0
        path, manifest, problems = found
        for problem in problems:
            for callback in self.callbacks:
                getattr(callback, "warn", print)(f"{problem} Going on from {path.name} instead.")
        extra = manifest["extra"]
        _same_config(extra["config"], self.config)
        if extra["fingerprint"] != self.federation.fingerprint:
            raise CheckpointError(
                f"The data differ from those of the run (partition {self.federation.fingerprint} instead of "
                f"{extra['fingerprint']}); resume it with the same data and library versions."
            )
        checkpoint.restore(path, manifest, self.server)
        done = int(manifest["round"])
        self.recorder.resume(done, extra["seconds"])
        return done

    def _summary(self) -> dict[str, Any]:
        config, server, traffic = self.config, self.server, self.server.traffic
        history = self.recorder.history
        best, best_round = self.recorder.best()
        own = []
        if config.buffers == "local":
            own = [server.store.get(k).get("buffers", {}).get("b") for k in range(len(self.federation.clients))]
        clients = self.evaluator.clients(server.v, server.b, config.eval_clients, config.seed, own)
        final = history[-1]
        summary: dict[str, Any] = {
            "method": self.method.spelling or self.method.name,
            "data": self.federation.name,
            "partition": self.federation.partition,
            "partition_hash": self.federation.fingerprint,
            "clients": len(self.federation.clients),
            "seed": config.seed,
            "rounds": len(history),
            "model": config.model,
            "parameters": self.spec.size,
            "buffers": config.buffers if self.spec.buffer_sizes else "none",
            "weights": self.weights,
            "engine": self.engine_name,
            "accuracy": final["accuracy"],
            "best_accuracy": best,
            "best_round": best_round,
            "loss": final["loss"],
            "client_accuracy_mean": clients.mean,
            "client_accuracy_worst": clients.worst,
            "client_accuracy_worst_decile": clients.worst_decile,
            "clients_evaluated": len(clients.accuracies),
            "clients_evaluated_on": clients.measured_on,
            "bytes_up": traffic.up + traffic.buffers_up,
            "bytes_down": traffic.down + traffic.buffers_down,
            "buffer_bytes_up": traffic.buffers_up,
            "buffer_bytes_down": traffic.buffers_down,
            "updates_skipped": server.skipped,
            "seconds": round(self.recorder.seconds, 3),
        }
        if config.target is not None:
            summary["target"] = config.target
            summary["rounds_to_target"] = self.recorder.rounds_to(config.target)
        return summary


RESUMABLE = ("rounds", "engine", "workers", "device", "trackers", "checkpoint_every")
"""Fields that may differ when a run is resumed: they change how far or how it is carried out, not what it is."""


def _same_config(then: dict[str, Any], now: Experiment) -> None:
    current = now.model_dump(mode="json")
    differing = [k for k in current if k not in RESUMABLE and then.get(k) != current[k]]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"The run was made with {name}={then.get(name)!r}, but is resumed with {name}={current[name]!r}; "
            "a run can only go on as it began. Start a new one instead."
        )
    if now.rounds < then["rounds"] and now.rounds < int(then["rounds"]):
        raise CheckpointError(f"The run has {then['rounds']} rounds; it cannot be shortened to {now.rounds}.")
