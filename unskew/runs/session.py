"""One sitting of a run: from a checkpoint (or the start) to the end or an interruption."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.engines.auto_select import EngineChoice, EngineRequest, choose_engine
from unskew.engines.base import Engine, EngineConfig
from unskew.engines.registry import make_engine
from unskew.errors import CheckpointError
from unskew.filesystem import make_folder, write_atomic
from unskew.measurements.registry import make_diagnostics
from unskew.methods.fedavg import FedAvg
from unskew.methods.registry import REFERENCES
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback, Recorder, write_about
from unskew.records.result import Result
from unskew.runs.artifacts import write_artifacts
from unskew.runs.early_stopping import BestModelKeeper, EarlyStopping
from unskew.runs.input_spec import input_spec_of
from unskew.runs.metrics import run_metrics
from unskew.runs.personal_model_files import kept_personal_models
from unskew.runs.prediction_curves import classifier_curves
from unskew.runs.predictor import Predictor
from unskew.runs.resume import (
    check_data,
    check_frozen,
    check_never_saved,
    check_same,
    check_target_rounds,
    data_identity,
    stored_content,
    warm_start,
)
from unskew.runs.state_stores import make_client_store
from unskew.runs.summary import client_metrics, client_rows, counted_class_names, kept_metrics, summarize
from unskew.runs.validation import resolve_weighting
from unskew.simulation import checkpoint, personal_models, restore, run_warnings
from unskew.simulation.client_store import ClientStore
from unskew.simulation.delays import Delays
from unskew.simulation.evaluate import ClientScores, Evaluator, Models
from unskew.simulation.generated_samples import GeneratedSamplesRecorder
from unskew.simulation.network import Network
from unskew.simulation.round_loop import RunInterrupted, run_rounds
from unskew.simulation.sampler import Sampler
from unskew.simulation.server import Server
from unskew.simulation.server_trainer import ServerTrainer


class Session:
    """Everything of a run in memory; ``go`` carries it out.

    Args:
        config: The run.
        prepared: What its clients train with.
        original: The data before the method changed them, which clients are evaluated on.
        spec: Its model.
        method: Its method.
        device: Where it trains.
        folder: The run folder, or None.
        callbacks: Its followers.
        warnings: What they are told before the first round.
    """

    def __init__(
        self,
        config: Experiment,
        prepared: PreparedData,
        original: Federation,
        spec: ModelSpec,
        method: Method,
        device: torch.device,
        folder: Path | None,
        callbacks: Sequence[Callback],
        warnings: Sequence[str] = (),
    ):
        spec = spec.to(device)
        if device.type != "cpu":
            moved = prepared.to(device)
            original, prepared = moved.federation if original is prepared.federation else original, moved
        self.config, self.prepared, self.spec, self.method = config, prepared, spec, method
        self.folder, self.callbacks, self.warnings = folder, callbacks, list(warnings)
        federation = prepared.federation
        self.task = task = federation.objective.unweighted
        self.metrics = run_metrics(config, original)
        self.figures = (*task.figures, *self.metrics.computed.names)
        rule, weights = method.server or FedAvg(), resolve_weighting(config, method)
        here, cache = (ClientStore(None if folder is None else folder / name) for name in ("clients", "cache"))
        store = make_client_store(config, folder, here)
        self.sampler = Sampler(len(federation.clients), config.participation, config.seed)
        observed = any(figure.diagnosis in config.diagnose for figure in rule.summary_metrics)
        trainer = ServerTrainer(spec, federation, config.training, device, self.sampler.size, observed, weights)
        self.server = Server(
            method, rule, spec, prepared.federation_info, weights, config.buffers, store, config.seed, trainer, cache
        )
        self.server.evaluates = self._evaluates
        delays = Delays(config.network.delay, config.seed, config.network.delay_per == "client")
        delays.check(len(federation.clients))
        flying = ClientStore(None if folder is None else folder / "in-flight")
        self.network = Network(config.network.drop, config.seed, delays, flying, device)
        self.evaluator = Evaluator(spec, original, task, device, self.metrics.computed)
        self.recorder = Recorder(folder, callbacks)
        self.setup = EngineConfig(
            spec,
            federation,
            method.client,
            federation.objective,
            prepared.training,
            config.seed,
            device,
            config.buffers,
            prepared.common,
            config.stall_warning_seconds,
            self.recorder.warn,
            self.recorder.retried,
        )
        self.diagnoses = make_diagnostics(
            config.diagnose, self.evaluator, self.server, federation, self.recorder.history
        )
        self.stopping = EarlyStopping(config, self.evaluator, self.recorder.history, self.metrics)
        self.best = BestModelKeeper(config, self.stopping, self.server)
        self.samples: GeneratedSamplesRecorder | None = None
        self._content = lru_cache(partial(stored_content, prepared))
        self._saved = 0

    def run(self, resume: bool) -> Result:
        """Train the rounds that remain and write the summary."""
        start = self._restore() if resume else self._branch()
        config, (engine, choice) = self.config, self.make_engine(resume)
        if self.config.save_samples:
            engine = self.samples = GeneratedSamplesRecorder(
                engine, self.method.client, self.prepared.federation, config.rounds - 1
            )
        try:
            self._begin(start)
            for diagnosis in self.diagnoses:
                diagnosis.begin()
            texts = [*self.warnings, *filter(None, [self.samples.problem if self.samples else None])]
            if personal_models.has_fine_tuning(self.method) and not self.config.eval_clients:
                texts.append(
                    "ft fine-tunes only evaluated clients; with eval_clients=0 no personal metrics are reported."
                )
            for text in texts:
                self.recorder.warn(text)
            rounds = range(start, start if self.stopping.should_stop else self.config.rounds)
            run_rounds(rounds, self.sampler, self.server, engine, self.network, self._finished)
            foretold = self.method.sync is not None and (self.warnings or self.method.name in REFERENCES)
            if rounds and not (self.server.moved or self.server.overflows or foretold):
                self.recorder.warn(run_warnings.model_unchanged_warning(self.network, len(rounds)))
            if not self.server.overflows and (problem := run_warnings.divergence_warning(self.recorder.history[-1])):
                self.recorder.warn(problem)
            self.recorder.sync()
            self.best.take()
            client_scores, clients = self._client_scores(engine)
        except RunInterrupted as interruption:
            self._save(len(self.recorder.history))
            interruption.folder = self.folder
            raise
        finally:
            engine.close()
            self.recorder.close()
        client_scores |= self.stopping.summary()
        if self.best.active:
            client_scores |= kept_metrics(self.recorder.history, self.best.round, self.metrics)
        summary = summarize(self.config, self.prepared, self.server, self.recorder, client_scores, choice, self.metrics)
        if self.folder is not None:
            self.recorder.check_folder()
            write_artifacts(
                self.folder, config, self.evaluator.federation, self.server, clients, summary, self._curves()
            )
        for store in (self.server.store, self.server.cache, self.network.store):
            store.close()
        for callback in self.callbacks:
            callback.end(copy.deepcopy(summary))
        module = self.spec.load(self.server.evaluated, self.server.evaluated_b).cpu()
        draw = partial(self.server.rule.draw, self.recorder.history)
        predictor = partial(Predictor, module, input_spec_of(self.evaluator.federation, config), self.spec.dtype)
        history, vector = self.recorder.history, self.server.evaluated.cpu()
        return Result(history, summary, module, vector, self.folder, draw, clients, predictor)

    def make_engine(self, resume: bool) -> tuple[Engine, EngineChoice]:
        """Create the engine and return it with the reason for its choice."""
        config = self.config
        if self.folder is not None and not resume:  # before engine.json, so that a run killed in between can be resumed
            write_atomic(self.folder / "config.yaml", config.to_yaml().encode())
        request = EngineRequest(config.engine, config.workers, config.clients_per_group, config.ray.address)
        choice = choose_engine(request, self.setup, self.sampler.size, config.rounds, self.folder, resume)
        ray = config.ray.model_dump(exclude_none=True, exclude={"state"}) if choice.engine == "ray" else None
        return make_engine(choice.engine, self.setup, choice.workers, choice.clients_per_group, ray), choice

    def _begin(self, start: int) -> None:
        """Everything fits: write down what is run, and tell the followers."""
        self._saved = start
        if self.folder is not None:
            write_atomic(self.folder / "config.yaml", self.config.to_yaml().encode())
            write_about(self.folder, self.setup.device, counted_class_names(self.evaluator.federation))
            for name in ("summary.json", "clients.jsonl", "curves.json"):
                (self.folder / name).unlink(missing_ok=True)
            make_folder(self.folder / "checkpoints")
            checkpoint.drop_old_checkpoints(self.folder / "checkpoints", after=start)
        for callback in self.callbacks:
            callback.start(self.config.model_dump(mode="json"), start)
        self.recorder.start_clock()

    def _evaluates(self, t: int) -> bool:
        """Return whether the model is evaluated after round ``t``."""
        return t + 1 == self.config.rounds or (t + 1) % self.config.eval_every == 0

    def _finished(self, t: int, figures: dict[str, Any]) -> bool:
        """After round ``t``: evaluate, record, save; returns whether it was the last."""
        done = t + 1
        score = None
        if self._evaluates(t):
            score = self.evaluator.evaluate_test(self.server.evaluated, self.server.evaluated_b)
            figures |= self.stopping.figures(self.server)
            self.best.offer(done, figures.get(self.stopping.score))
            for diagnosis in self.diagnoses:
                figures |= diagnosis.metrics() if diagnosis.updates or not diagnosis.of_clients else {}
        for diagnosis in self.diagnoses:
            diagnosis.begin()
        traffic = self.server.traffic
        if problem := run_warnings.nonfinite_update_warning(self.server, done, self.evaluator.federation.client_names):
            self.recorder.warn(problem)
        self.recorder.round(
            {
                "round": done,
                self.task.scored: score and score.accuracy,
                "loss": score and score.loss,
                **(score.figures if score else dict.fromkeys(self.figures)),
                "bytes_up": traffic.up + traffic.buffers_up,
                "bytes_down": traffic.down + traffic.buffers_down,
                "seconds": round(self.recorder.seconds, 4),
                **({"lr": self.setup.training.rate(t)} if self.setup.training.scheduled else {}),
                **figures,
            }
        )
        last = done == self.config.rounds or self.stopping.should_stop
        if last and self.samples and self.folder and (nothing := self.samples.draw(self.folder / "samples")):
            self.recorder.warn(nothing)
        if last or done % self.config.checkpoint_every == 0:
            self._save(done)
        return last

    def _save(self, done: int) -> None:
        if self.folder is None or done == self._saved:
            return
        self.recorder.sync()
        extra = {
            "seconds": self.recorder.seconds,
            "config": self.config.model_dump(mode="json"),
            "data": data_identity(self.prepared),
            "content": self._content(),
            "frozen": self.spec.frozen,
            "delays": self.network.delays.identity,
            **self.best.about(),
        }
        checkpoint.save_checkpoint(self.folder / "checkpoints", done, self.server, self.network, extra)
        self._saved = done

    def _restore(self) -> int:
        """Load the newest whole checkpoint; returns the number of rounds done."""
        assert self.folder is not None
        newest = checkpoint.newest_checkpoint(self.folder / "checkpoints")
        if newest is None:
            check_never_saved(self.folder)
            self.recorder.resume(0, 0.0)
            return self._branch()
        path, manifest, problems = newest
        for problem in problems:
            self.recorder.warn(f"{problem} Resuming from {path.name} instead.")
        extra, done = manifest["extra"], int(manifest["round"])
        check_same(extra["config"], self.config)
        check_target_rounds(extra["config"].get("rounds"), done, self.config)
        check_data(extra, self.prepared)
        check_frozen(extra, self.spec)
        if extra.get("delays", "") != self.network.delays.identity:
            raise CheckpointError("The trace of delays has changed since the run began; resume it with the same file.")
        restore.restore(path, manifest, self.server, self.network)
        self.best.restore(extra)
        self.recorder.resume(done, extra["seconds"])
        return done

    def _branch(self) -> int:
        """Begin where the run ``start_from`` ended; returns the number of rounds it had (0 without one)."""
        if self.config.start_from is None:
            return 0
        return warm_start(
            Path(self.config.start_from), self.config, self.server, self.recorder, data_identity(self.prepared)
        )

    def _curves(self) -> dict[str, Any]:
        """Compute curves of a classifier of which metrics are requested: they need its probabilities, and scikit-learn."""
        if not self.metrics.computed.known:
            return {}
        y, p = self.evaluator.test_scores(self.server.evaluated, self.server.evaluated_b)
        return classifier_curves(y, p, self.evaluator.federation.names)

    def _client_scores(self, engine: Engine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Evaluate the final model and the personal models on clients: overall, and per client."""
        config, server = self.config, self.server

        def score(own: Models | None) -> ClientScores:
            v, b = server.evaluated, server.evaluated_b
            return self.evaluator.evaluate_clients(v, b, config.eval_clients, config.seed, own, each=True)

        own_statistics = config.buffers == "local" and self.spec.buffer_sizes
        scores = score(partial(personal_models.with_client_buffers, server) if own_statistics else None)
        own: ClientScores | None = None
        if personal_models.has_fine_tuning(self.method):
            tuned = partial(personal_models.fine_tuned_models, server, engine, config.rounds, self.sampler.size)
            own = score(kept_personal_models(tuned, self.folder, self.recorder.warn))
        elif personal_models.has_personal_models(self.method, self.spec):
            own = score(partial(personal_models.kept_model, server))
        federation = self.evaluator.federation
        figures = client_metrics(scores, own, self.metrics, federation.client_names)
        return figures, client_rows(federation, scores, own, self.server.last)
