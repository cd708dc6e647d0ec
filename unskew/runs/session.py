"""Session of a run: trains the remaining rounds, from the start or from the latest checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from unskew.engines.base import Engine
from unskew.filesystem import make_folder, write_atomic
from unskew.measurements.registry import make_diagnostics
from unskew.methods.registry import REFERENCES
from unskew.plots.method_plots import METHOD_PLOTS
from unskew.protocol.rules import survey_times
from unskew.records.recorder import write_about
from unskew.records.result import Result
from unskew.runs.artifacts import write_artifacts
from unskew.runs.assembly import RunParts
from unskew.runs.coefficients import NAME as COEFFICIENTS
from unskew.runs.coefficients import compute_coefficients
from unskew.runs.early_stopping import BestModelKeeper, EarlyStopping
from unskew.runs.final_evaluation import evaluate_final_model
from unskew.runs.input_spec import input_spec_of
from unskew.runs.predictor import final_predictor
from unskew.runs.resume import stored_content
from unskew.runs.run_checkpoints import RunCheckpoints
from unskew.runs.simulated_clients import SimulatedClients
from unskew.runs.summary import add_rule_fields, counted_class_names, kept_metrics, summarize
from unskew.secret_draws import KEY_FILE
from unskew.simulation import checkpoint, personal_models, run_warnings
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
        self.server = parts.server
        self.evaluator = parts.evaluator
        self.recorder = parts.recorder
        config, history, federation = parts.config, self.recorder.history, parts.prepared.federation
        self.diagnoses = make_diagnostics(config.diagnose, self.evaluator, self.server, federation, history)
        self.stopping = EarlyStopping(config, self.evaluator, history, parts.metrics)
        self.best = BestModelKeeper(config, self.stopping, self.server)
        self.samples: GeneratedSamplesRecorder | None = None
        self.checkpoints = RunCheckpoints(parts, self.best)

    def run(self, resume: bool) -> Result:
        """Train the remaining rounds and write the summary."""
        parts = self.parts
        start = self.checkpoints.start(resume)
        self.stopping.before = self.checkpoints.before
        config = parts.config
        engine, choice = self.clients.make_engine(resume)
        if config.save_samples:
            engine = self.samples = GeneratedSamplesRecorder(
                engine, parts.method.client, parts.prepared.federation, config.rounds - 1
            )
        try:
            self._begin(start)
            for diagnosis in self.diagnoses:
                diagnosis.begin()
            texts = [*self.warnings, *filter(None, [self.samples.problem if self.samples else None])]
            if personal_models.has_fine_tuning(parts.method) and not config.eval_clients:
                name = next(rule.name for rule in parts.method.rules if "final_training" in rule.needs)
                texts.append(
                    f"{name} personalizes only evaluated clients; with eval_clients=0 no personal metrics are reported."
                )
            sync = parts.method.sync
            if config.early_stopping is not None and sync is not None and sync.local_slices(parts.spec):
                texts.append(
                    f"early_stopping judges the global model, but with {sync.name} clients keep parts of their models, so "
                    "the run may end too early. Remove early_stopping, or compare personal metrics for several rounds."
                )
            for text in () if resume else parts.prepared.federation.warnings:
                self.recorder.write_warning(text)
            for text in texts:
                self.recorder.warn(text)
            if start < config.rounds and (reason := self._stop_reason()) is not None:
                self.recorder.warn(reason)
            ended = self.stopping.should_stop or self._stop_reason() is not None
            rounds = range(start, start if ended else config.rounds)
            attackers = parts.attackers
            run_rounds(
                rounds, parts.sampler, self.server, engine, parts.network, self._finished, attackers,
                self.clients.sends_model,
            )  # fmt: skip
            foretold = parts.method.sync is not None and (self.warnings or parts.method.name in REFERENCES)
            overflows = self.server.aggregator.skipped.overflows
            if rounds and not (self.server.state.changed or overflows or foretold):
                self.recorder.warn(run_warnings.model_unchanged_warning(parts.network, len(rounds)))
            if lost := run_warnings.late_updates_warning(self.recorder.history):
                self.recorder.warn(lost)
            problem = run_warnings.divergence_warning(self.recorder.history[-1], parts.attack)
            if problem is not None and not overflows:
                self.recorder.warn(problem)
            self.recorder.sync()
            self.best.take()
            closing = self._close(engine)
            client_scores, clients = self.clients.score(engine)
            coefficients, omitted = (
                compute_coefficients(parts, self.clients.exchange()) if config.coefficients else ({}, {})
            )
            if parts.network.clock is not None:
                client_scores["seconds_simulated"] = parts.network.clock.now
                closing |= {"seconds_simulated": parts.network.clock.now} if closing else {}
            add_rule_fields(clients, self.server)
            history, scored = self.recorder.history, parts.task.scored
            best = kept_metrics(history, self.best.round, parts.metrics, closing) if self.best.active else {}
            accuracy = best.get(f"kept_{scored}") if best else {**history[-1], **closing}.get(scored)
            final_results = evaluate_final_model(self.evaluator, self.server, parts.metrics, accuracy, self.best.active)
            if final_results.warning is not None and problem is None:
                self.recorder.warn(final_results.warning)
        except RunInterrupted as interruption:
            self._save(len(self.recorder.history))
            interruption.folder = parts.folder
            raise
        finally:
            engine.close()
            self.recorder.close()
        client_scores |= self.stopping.summary() | final_results.fields | best | omitted
        who = () if attackers is None else attackers.clients
        original = self.evaluator.federation
        content = ""
        if parts.folder is not None:
            content = self.checkpoints.content() if original is parts.prepared.federation else stored_content(original)
        summary = summarize(
            config,
            parts.prepared,
            content,
            self.server,
            self.recorder,
            client_scores,
            choice,
            parts.metrics,
            who,
            closing,
        )
        if parts.folder is not None:
            self.recorder.check_folder()
            more = {"curves.json": final_results.curves, COEFFICIENTS: coefficients}
            write_artifacts(parts.folder, config, self.evaluator.federation, self.server, clients, summary, more)
            (parts.folder / KEY_FILE).unlink(missing_ok=True)
        for store in (self.server.clients.store, self.server.clients.cache, parts.network.store):
            store.close()
        for callback in parts.callbacks:
            callback.end(copy.deepcopy(summary))
        module = parts.spec.load(*self.server.selection.evaluated).cpu()
        plots = METHOD_PLOTS.get(self.server.setup.rule.name, lambda history, folder: None)
        draw = partial(plots, self.recorder.history)
        inputs = input_spec_of(self.evaluator.federation, config)
        predictor = final_predictor(parts.method, config.method, module, inputs, parts.spec)
        history, vector = self.recorder.history, self.server.selection.evaluated[0].cpu()
        return Result(history, summary, module, vector, parts.folder, draw, clients, predictor)

    def _close(self, engine: Engine) -> dict[str, Any]:
        """Run the surveys after the last round, if the method has any; return the metrics of the new final model."""
        parts = self.parts
        if all("final" not in survey_times(rule) for rule in parts.method.client):
            return {}
        round, task = parts.config.rounds, parts.task
        clock = parts.network.clock
        counted = {} if clock is None else clock.counted()
        create, final = self.server.broadcaster.closing_broadcast, self.server.selection.evaluated
        broadcasts = [create(round, client, final) for client in self.clients.reachable()]
        self.server.close(round, engine.train(broadcasts))
        if clock is not None:
            clock.add_exchange(counted)
        score = self.evaluator.evaluate_test(*self.server.selection.evaluated)
        # Rows are of all rounds from 1; round 0 stands for the last one.
        before, held_out = self.recorder.history[self.best.round - 1], self.stopping.round_metrics(self.server)
        judged = self.stopping.score
        return {
            task.scored: score.accuracy,
            "loss": score.loss,
            **score.metrics,
            **held_out,
            **({f"{judged}_after_closing": held_out[judged]} if judged in held_out else {}),
            f"{task.scored}_before_closing": before[task.scored],
        }

    def _begin(self, start: int) -> None:
        """Write the configuration, remove outdated files, and notify the callbacks."""
        parts = self.parts
        if parts.folder is not None:
            write_atomic(parts.folder / "config.yaml", parts.config.to_yaml().encode())
            write_about(parts.folder, parts.setup.device, counted_class_names(self.evaluator.federation))
            for name in ("summary.json", "clients.jsonl", "curves.json", COEFFICIENTS):
                (parts.folder / name).unlink(missing_ok=True)
            make_folder(parts.folder / "checkpoints")
            checkpoint.drop_old_checkpoints(parts.folder / "checkpoints", after=start)
        for callback in parts.callbacks:
            callback.start(parts.config.model_dump(mode="json") | {"objective": parts.metrics.objective.name}, start)
        self.recorder.start_clock()
        self.clients.begin(start)

    def _finished(self, t: int, metrics: dict[str, Any]) -> bool:
        """Evaluate, record and save after round ``t``; return whether it was the last."""
        parts = self.parts
        done = t + 1
        self.clients.finishing_round(t, metrics)
        score = None
        evaluated = self.clients.evaluates(t)
        if parts.attackers is not None:
            predict = partial(self.evaluator.predict_classes, *self.server.selection.evaluated)
            metrics |= parts.attackers.metrics(predict if evaluated else None, self.evaluator.federation)
        if evaluated:
            score = self.evaluator.evaluate_test(*self.server.selection.evaluated)
            metrics |= self.stopping.round_metrics(self.server)
            self.best.offer(done, metrics.get(self.stopping.score))
            for diagnosis in self.diagnoses:
                metrics |= diagnosis.metrics() if diagnosis.updates or not diagnosis.of_clients else {}
        for diagnosis in self.diagnoses:
            diagnosis.begin()
        traffic, skipped = self.server.traffic.total, self.server.aggregator.skipped
        names = self.evaluator.federation.client_names
        if problem := run_warnings.nonfinite_update_warning(skipped, done, names, parts.attack):
            self.recorder.warn(problem)
        self.recorder.round(
            {
                "round": done,
                parts.task.scored: score and score.accuracy,
                "loss": score and score.loss,
                **(
                    score.metrics
                    if score
                    else dict.fromkeys((*parts.task.extra_metrics, *parts.task.metric_names(parts.metrics.computed)))
                ),
                "bytes_up": traffic.up + traffic.buffers_up,
                "bytes_down": traffic.down + traffic.buffers_down,
                "seconds": round(self.recorder.seconds, 4),
                **({"lr": parts.setup.training.rate(t)} if parts.setup.training.scheduled else {}),
                **metrics,
            }
        )
        reason = self._stop_reason() if done < parts.config.rounds else None
        if reason is not None:
            self.recorder.warn(reason)
        last = done == parts.config.rounds or self.stopping.should_stop or reason is not None
        if last and self.samples and parts.folder and (nothing := self.samples.draw(parts.folder / "samples")):
            self.recorder.warn(nothing)
        if last or done % parts.config.checkpoint_every == 0:
            self._save(done)
        self.clients.finished_round(t, last)
        return last

    def _save(self, done: int) -> None:
        if self.checkpoints.save(done):
            self.clients.saved(done)

    def _stop_reason(self) -> str | None:
        """Return the reason why the method allows no further round, or None."""
        rule = self.parts.method.aggregate
        if rule is None:
            return None
        return rule.report(self.server.state.rules[rule.name], self.server.setup.federation_info.plan).stop_reason
