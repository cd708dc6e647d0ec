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
from unskew.records.recorder import write_about
from unskew.records.result import Result
from unskew.runs.artifacts import write_artifacts
from unskew.runs.assembly import RunParts
from unskew.runs.early_stopping import BestModelKeeper, EarlyStopping
from unskew.runs.final_evaluation import evaluate_final_model
from unskew.runs.input_spec import input_spec_of
from unskew.runs.predictor import Predictor
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
        self.server.evaluates = self.clients.sends_model
        config, history, federation = parts.config, self.recorder.history, parts.prepared.federation
        self.diagnoses = make_diagnostics(config.diagnose, self.evaluator, self.server, federation, history)
        self.stopping = EarlyStopping(config, self.evaluator, history, parts.metrics)
        self.best = BestModelKeeper(config, self.stopping, self.server)
        self.samples: GeneratedSamplesRecorder | None = None
        self.checkpoints = RunCheckpoints(parts, self.best)

    def run(self, resume: bool) -> Result:
        """Train the remaining rounds and write the summary."""
        start = self.checkpoints.start(resume)
        config = self.parts.config
        engine, choice = self.clients.make_engine(resume)
        if config.save_samples:
            engine = self.samples = GeneratedSamplesRecorder(
                engine, self.parts.method.client, self.parts.prepared.federation, config.rounds - 1
            )
        try:
            self._begin(start)
            for diagnosis in self.diagnoses:
                diagnosis.begin()
            texts = [*self.warnings, *filter(None, [self.samples.problem if self.samples else None])]
            if personal_models.has_fine_tuning(self.parts.method) and not self.parts.config.eval_clients:
                name = next(rule.name for rule in self.parts.method.rules if "final_training" in rule.needs)
                texts.append(
                    f"{name} personalizes only evaluated clients; with eval_clients=0 no personal metrics are reported."
                )
            sync = self.parts.method.sync
            if self.parts.config.early_stopping is not None and sync is not None and sync.local_slices(self.parts.spec):
                texts.append(
                    f"early_stopping judges the global model, but with {sync.name} clients keep parts of their models, so "
                    "the run may end too early. Remove early_stopping, or compare personal metrics for several rounds."
                )
            for text in texts:
                self.recorder.warn(text)
            if start < self.parts.config.rounds and (reason := self._stop_reason()) is not None:
                self.recorder.warn(reason)
            ended = self.stopping.should_stop or self._stop_reason() is not None
            rounds = range(start, start if ended else self.parts.config.rounds)
            attackers = self.parts.attackers
            run_rounds(rounds, self.parts.sampler, self.server, engine, self.parts.network, self._finished, attackers)
            foretold = self.parts.method.sync is not None and (self.warnings or self.parts.method.name in REFERENCES)
            if rounds and not (self.server.moved or self.server.overflows or foretold):
                self.recorder.warn(run_warnings.model_unchanged_warning(self.parts.network, len(rounds)))
            if lost := run_warnings.late_updates_warning(self.recorder.history):
                self.recorder.warn(lost)
            problem = run_warnings.divergence_warning(self.recorder.history[-1], self.parts.attack)
            if problem is not None and not self.server.overflows:
                self.recorder.warn(problem)
            self.recorder.sync()
            self.best.take()
            closing = self._close(engine)
            client_scores, clients = self.clients.score(engine)
            if self.parts.network.clock is not None:
                client_scores["seconds_simulated"] = self.parts.network.clock.now
                closing |= {"seconds_simulated": self.parts.network.clock.now} if closing else {}
            add_rule_fields(clients, self.server)
            history, scored = self.recorder.history, self.parts.task.scored
            best = kept_metrics(history, self.best.round, self.parts.metrics, closing) if self.best.active else {}
            accuracy = best.get(f"kept_{scored}") if best else {**history[-1], **closing}.get(scored)
            final_results = evaluate_final_model(
                self.evaluator, self.server, self.parts.metrics, accuracy, self.best.active
            )
            if final_results.warning is not None and problem is None:
                self.recorder.warn(final_results.warning)
        except RunInterrupted as interruption:
            self._save(len(self.recorder.history))
            interruption.folder = self.parts.folder
            raise
        finally:
            engine.close()
            self.recorder.close()
        client_scores |= self.stopping.summary() | final_results.fields | best
        who = () if attackers is None else attackers.clients
        summary = summarize(
            self.parts.config,
            self.parts.prepared,
            self.server,
            self.recorder,
            client_scores,
            choice,
            self.parts.metrics,
            who,
            closing,
        )
        if self.parts.folder is not None:
            self.recorder.check_folder()
            write_artifacts(
                self.parts.folder,
                config,
                self.evaluator.federation,
                self.server,
                clients,
                summary,
                final_results.curves,
            )
            (self.parts.folder / KEY_FILE).unlink(missing_ok=True)
        for store in (self.server.store, self.server.cache, self.parts.network.store):
            store.close()
        for callback in self.parts.callbacks:
            callback.end(copy.deepcopy(summary))
        module = self.parts.spec.load(self.server.evaluated, self.server.evaluated_b).cpu()
        plots = METHOD_PLOTS.get(self.server.rule.name, lambda history, folder: None)
        draw = partial(plots, self.recorder.history)
        predictor = partial(Predictor, module, input_spec_of(self.evaluator.federation, config), self.parts.spec.dtype)
        history, vector = self.recorder.history, self.server.evaluated.cpu()
        return Result(history, summary, module, vector, self.parts.folder, draw, clients, predictor)

    def _close(self, engine: Engine) -> dict[str, Any]:
        """Run the surveys after the last round, if the method has any; return the metrics of the new final model."""
        if all(rule.survey_at != "final" for rule in self.parts.method.client):
            return {}
        round, task = self.parts.config.rounds, self.parts.task
        clock = self.parts.network.clock
        counted = {} if clock is None else clock.counted()
        broadcasts = [self.server.closing_broadcast(round, client) for client in self.clients.reachable()]
        self.server.close(round, engine.train(broadcasts))
        if clock is not None:
            clock.add_exchange(counted)
        score = self.evaluator.evaluate_test(self.server.evaluated, self.server.evaluated_b)
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
        if self.parts.folder is not None:
            write_atomic(self.parts.folder / "config.yaml", self.parts.config.to_yaml().encode())
            write_about(self.parts.folder, self.parts.setup.device, counted_class_names(self.evaluator.federation))
            for name in ("summary.json", "clients.jsonl", "curves.json"):
                (self.parts.folder / name).unlink(missing_ok=True)
            make_folder(self.parts.folder / "checkpoints")
            checkpoint.drop_old_checkpoints(self.parts.folder / "checkpoints", after=start)
        for callback in self.parts.callbacks:
            callback.start(self.parts.config.model_dump(mode="json"), start)
        self.recorder.start_clock()
        self.clients.begin(start)

    def _finished(self, t: int, figures: dict[str, Any]) -> bool:
        """Evaluate, record and save after round ``t``; return whether it was the last."""
        done = t + 1
        self.clients.finishing_round(t, figures)
        score = None
        evaluated = self.clients.evaluates(t)
        if self.parts.attackers is not None:
            predict = partial(self.evaluator.predict_classes, self.server.evaluated, self.server.evaluated_b)
            figures |= self.parts.attackers.metrics(predict if evaluated else None, self.evaluator.federation)
        if evaluated:
            score = self.evaluator.evaluate_test(self.server.evaluated, self.server.evaluated_b)
            figures |= self.stopping.figures(self.server)
            self.best.offer(done, figures.get(self.stopping.score))
            for diagnosis in self.diagnoses:
                figures |= diagnosis.metrics() if diagnosis.updates or not diagnosis.of_clients else {}
        for diagnosis in self.diagnoses:
            diagnosis.begin()
        traffic = self.server.traffic
        names = self.evaluator.federation.client_names
        if problem := run_warnings.nonfinite_update_warning(self.server, done, names, self.parts.attack):
            self.recorder.warn(problem)
        self.recorder.round(
            {
                "round": done,
                self.parts.task.scored: score and score.accuracy,
                "loss": score and score.loss,
                **(
                    score.figures
                    if score
                    else dict.fromkeys((*self.parts.task.figures, *self.parts.metrics.computed.names))
                ),
                "bytes_up": traffic.up + traffic.buffers_up,
                "bytes_down": traffic.down + traffic.buffers_down,
                "seconds": round(self.recorder.seconds, 4),
                **({"lr": self.parts.setup.training.rate(t)} if self.parts.setup.training.scheduled else {}),
                **figures,
            }
        )
        reason = self._stop_reason() if done < self.parts.config.rounds else None
        if reason is not None:
            self.recorder.warn(reason)
        last = done == self.parts.config.rounds or self.stopping.should_stop or reason is not None
        if (
            last
            and self.samples
            and self.parts.folder
            and (nothing := self.samples.draw(self.parts.folder / "samples"))
        ):
            self.recorder.warn(nothing)
        if last or done % self.parts.config.checkpoint_every == 0:
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
        return rule.report(self.server.rules[rule.name], self.server.federation_info.plan).stop_reason
