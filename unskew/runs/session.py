"""Session of a run: trains the remaining rounds, from the start or from the latest checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from unskew.engines.base import Engine
from unskew.errors import CheckpointError
from unskew.filesystem import make_folder, write_atomic
from unskew.measurements.registry import make_diagnostics
from unskew.methods.registry import REFERENCES
from unskew.plots.method_plots import METHOD_PLOTS
from unskew.records.recorder import write_about
from unskew.records.result import Result
from unskew.runs.artifacts import write_artifacts
from unskew.runs.assembly import RunParts
from unskew.runs.early_stopping import BestModelKeeper, EarlyStopping
from unskew.runs.final_evaluation import evaluate_final_model
from unskew.runs.input_spec import input_spec_of
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
from unskew.runs.simulated_clients import SimulatedClients
from unskew.runs.summary import add_rule_fields, counted_class_names, kept_metrics, summarize
from unskew.secret_draws import KEY_FILE
from unskew.simulation import checkpoint, personal_models, restore, run_warnings
from unskew.simulation.generated_samples import GeneratedSamplesRecorder
from unskew.simulation.round_loop import RunInterrupted, run_rounds


class Session:
    """Session of a run, from the start or a checkpoint to its end or an interruption.

    Args:
        parts: Parts of the run, see ``unskew.runs.assembly.assemble``.
        clients: Trains and evaluates clients; None simulates them.
        warnings: Warnings that callbacks receive before the first round.
    """

    def __init__(self, parts: RunParts, clients: SimulatedClients | None = None, warnings: Sequence[str] = ()):
        self.parts = parts
        self.clients = SimulatedClients(parts) if clients is None else clients
        self.warnings = warnings
        self.config = config = parts.config
        self.folder = parts.folder
        self.callbacks = parts.callbacks
        self.attack = None if config.attack is None else config.attack.kind
        self.prepared = parts.prepared
        self.spec = parts.spec
        self.method = parts.method
        self.server = parts.server
        self.network = parts.network
        self.evaluator = parts.evaluator
        self.recorder = parts.recorder
        self.metrics = parts.metrics
        self.figures = (*parts.task.figures, *parts.metrics.computed.names)
        history, federation = self.recorder.history, parts.prepared.federation
        self.diagnoses = make_diagnostics(config.diagnose, self.evaluator, self.server, federation, history)
        self.stopping = EarlyStopping(config, self.evaluator, history, self.metrics)
        self.best = BestModelKeeper(config, self.stopping, self.server)
        self.samples: GeneratedSamplesRecorder | None = None
        self._content = lru_cache(partial(stored_content, self.prepared))
        self._saved = 0

    def run(self, resume: bool) -> Result:
        """Train the remaining rounds and write the summary."""
        start = self._restore() if resume else self._branch()
        config = self.config
        engine, choice = self.clients.make_engine(resume)
        if config.save_samples:
            engine = self.samples = GeneratedSamplesRecorder(
                engine, self.method.client, self.prepared.federation, config.rounds - 1
            )
        try:
            self._begin(start)
            for diagnosis in self.diagnoses:
                diagnosis.begin()
            texts = [*self.warnings, *filter(None, [self.samples.problem if self.samples else None])]
            if personal_models.has_fine_tuning(self.method) and not self.config.eval_clients:
                name = next(rule.name for rule in self.method.rules if "final_training" in rule.needs)
                texts.append(
                    f"{name} personalizes only evaluated clients; with eval_clients=0 no personal metrics are reported."
                )
            sync = self.method.sync
            if self.config.early_stopping is not None and sync is not None and sync.local_slices(self.spec):
                texts.append(
                    f"early_stopping judges the global model, but with {sync.name} clients keep parts of their models, so "
                    "the run may end too early. Remove early_stopping, or compare personal metrics for several rounds."
                )
            for text in texts:
                self.recorder.warn(text)
            if start < self.config.rounds and (reason := self._stop_reason()) is not None:
                self.recorder.warn(reason)
            ended = self.stopping.should_stop or self._stop_reason() is not None
            rounds = range(start, start if ended else self.config.rounds)
            attackers = self.parts.attackers
            run_rounds(
                rounds, self.parts.sampler, self.server, engine, self.network, self._finished, attackers,
                self.clients.sends_model,
            )  # fmt: skip
            foretold = self.method.sync is not None and (self.warnings or self.method.name in REFERENCES)
            overflows = self.server.aggregator.skipped.overflows
            if rounds and not (self.server.state.moved or overflows or foretold):
                self.recorder.warn(run_warnings.model_unchanged_warning(self.network, len(rounds)))
            if lost := run_warnings.late_updates_warning(self.recorder.history):
                self.recorder.warn(lost)
            problem = run_warnings.divergence_warning(self.recorder.history[-1], self.attack)
            if problem is not None and not overflows:
                self.recorder.warn(problem)
            self.recorder.sync()
            self.best.take()
            closing = self._close(engine)
            client_scores, clients = self.clients.score(engine)
            if self.network.clock is not None:
                client_scores["seconds_simulated"] = self.network.clock.now
                closing |= {"seconds_simulated": self.network.clock.now} if closing else {}
            add_rule_fields(clients, self.server)
            history, scored = self.recorder.history, self.parts.task.scored
            best = kept_metrics(history, self.best.round, self.metrics, closing) if self.best.active else {}
            accuracy = best.get(f"kept_{scored}") if best else {**history[-1], **closing}.get(scored)
            final_results = evaluate_final_model(self.evaluator, self.server, self.metrics, accuracy, self.best.active)
            if final_results.warning is not None and problem is None:
                self.recorder.warn(final_results.warning)
        except RunInterrupted as interruption:
            self._save(len(self.recorder.history))
            interruption.folder = self.folder
            raise
        finally:
            engine.close()
            self.recorder.close()
        client_scores |= self.stopping.summary() | final_results.fields | best
        who = () if attackers is None else attackers.clients
        summary = summarize(
            self.config, self.prepared, self.server, self.recorder, client_scores, choice, self.metrics, who, closing
        )
        if self.folder is not None:
            self.recorder.check_folder()
            write_artifacts(
                self.folder, config, self.evaluator.federation, self.server, clients, summary, final_results.curves
            )
            (self.folder / KEY_FILE).unlink(missing_ok=True)
        for store in (self.server.clients.store, self.server.clients.cache, self.network.store):
            store.close()
        for callback in self.callbacks:
            callback.end(copy.deepcopy(summary))
        module = self.spec.load(*self.server.selection.evaluated).cpu()
        plots = METHOD_PLOTS.get(self.server.setup.rule.name, lambda history, folder: None)
        draw = partial(plots, self.recorder.history)
        predictor = partial(Predictor, module, input_spec_of(self.evaluator.federation, config), self.spec.dtype)
        history, vector = self.recorder.history, self.server.selection.evaluated[0].cpu()
        return Result(history, summary, module, vector, self.folder, draw, clients, predictor)

    def _close(self, engine: Engine) -> dict[str, Any]:
        """Run the surveys after the last round, if the method has any; return the metrics of the new final model."""
        if all(rule.survey_at != "final" for rule in self.method.client):
            return {}
        round, task = self.config.rounds, self.parts.task
        clock = self.network.clock
        counted = {} if clock is None else clock.counted()
        create, final = self.server.broadcaster.closing_broadcast, self.server.selection.evaluated
        broadcasts = [create(round, client, final) for client in self.clients.reachable()]
        self.server.close(round, engine.train(broadcasts))
        if clock is not None:
            clock.add_exchange(counted)
        score = self.evaluator.evaluate_test(*self.server.selection.evaluated)
        before, held_out = self.recorder.history[-1], self.stopping.figures(self.server)
        judged = self.stopping.score
        return {
            task.scored: score.accuracy,
            "loss": score.loss,
            **score.figures,
            **held_out,
            **({f"{judged}_after_closing": held_out[judged]} if judged in held_out else {}),
            f"{task.scored}_before_closing": before[task.scored],
        }

    def _begin(self, start: int) -> None:
        """Write the configuration, remove outdated files, and notify the callbacks."""
        self._saved = start
        if self.folder is not None:
            write_atomic(self.folder / "config.yaml", self.config.to_yaml().encode())
            write_about(self.folder, self.parts.setup.device, counted_class_names(self.evaluator.federation))
            for name in ("summary.json", "clients.jsonl", "curves.json"):
                (self.folder / name).unlink(missing_ok=True)
            make_folder(self.folder / "checkpoints")
            checkpoint.drop_old_checkpoints(self.folder / "checkpoints", after=start)
        for callback in self.callbacks:
            callback.start(self.config.model_dump(mode="json"), start)
        self.recorder.start_clock()
        self.clients.begin(start)

    def _finished(self, t: int, figures: dict[str, Any]) -> bool:
        """Evaluate, record and save after round ``t``; return whether it was the last."""
        done = t + 1
        self.clients.finishing_round(t, figures)
        score = None
        evaluated = self.clients.evaluates(t)
        if self.parts.attackers is not None:
            predict = partial(self.evaluator.predict_classes, *self.server.selection.evaluated)
            figures |= self.parts.attackers.metrics(predict if evaluated else None, self.evaluator.federation)
        if evaluated:
            score = self.evaluator.evaluate_test(*self.server.selection.evaluated)
            figures |= self.stopping.figures(self.server)
            self.best.offer(done, figures.get(self.stopping.score))
            for diagnosis in self.diagnoses:
                figures |= diagnosis.metrics() if diagnosis.updates or not diagnosis.of_clients else {}
        for diagnosis in self.diagnoses:
            diagnosis.begin()
        traffic, skipped = self.server.traffic.total, self.server.aggregator.skipped
        names = self.evaluator.federation.client_names
        if problem := run_warnings.nonfinite_update_warning(skipped, done, names, self.attack):
            self.recorder.warn(problem)
        self.recorder.round(
            {
                "round": done,
                self.parts.task.scored: score and score.accuracy,
                "loss": score and score.loss,
                **(score.figures if score else dict.fromkeys(self.figures)),
                "bytes_up": traffic.up + traffic.buffers_up,
                "bytes_down": traffic.down + traffic.buffers_down,
                "seconds": round(self.recorder.seconds, 4),
                **({"lr": self.parts.setup.training.rate(t)} if self.parts.setup.training.scheduled else {}),
                **figures,
            }
        )
        reason = self._stop_reason() if done < self.config.rounds else None
        if reason is not None:
            self.recorder.warn(reason)
        last = done == self.config.rounds or self.stopping.should_stop or reason is not None
        if last and self.samples and self.folder and (nothing := self.samples.draw(self.folder / "samples")):
            self.recorder.warn(nothing)
        if last or done % self.config.checkpoint_every == 0:
            self._save(done)
        self.clients.finished_round(t, last)
        return last

    def _stop_reason(self) -> str | None:
        """Return the reason why the method allows no further round, or None."""
        rule = self.method.aggregate
        if rule is None:
            return None
        return rule.report(self.server.state.rules[rule.name], self.server.setup.federation_info.plan).stop_reason

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
            "speeds": "" if self.network.clock is None else self.network.clock.identity,
            **self.best.about(),
        }
        checkpoint.save_checkpoint(self.folder / "checkpoints", done, self.server, self.network, extra)
        self._saved = done
        self.clients.saved(done)

    def _restore(self) -> int:
        """Load the newest intact checkpoint; returns the number of finished rounds."""
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
        check_data(extra, self.prepared, self._content())
        check_frozen(extra, self.spec)
        if extra.get("delays", "") != self.network.delays.identity:
            raise CheckpointError("The delay trace has changed since the run started. Resume it with the same file.")
        clock = self.network.clock
        if clock is not None and self.config.network.trace and extra.get("speeds") != clock.identity:
            raise CheckpointError("The trace of client speeds has changed since the run started. Restore the file.")
        restore.restore(path, manifest, self.server, self.network)
        self.best.restore(extra)
        self.recorder.resume(done, extra["seconds"])
        return done

    def _branch(self) -> int:
        """Start from the end of the run ``start_from``, if any; returns its number of rounds, otherwise 0."""
        if self.config.start_from is None:
            return 0
        parent, data = Path(self.config.start_from), data_identity(self.prepared)
        done = warm_start(parent, self.config, self.server, self.recorder, data)
        if self.network.clock is not None:
            self.network.clock.now = self.recorder.history[-1].get("seconds_simulated", 0.0)
        return done
