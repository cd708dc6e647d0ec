"""Validation on what clients hold out: it ends a run early, and decides which model of a run is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unskew.config.experiment import Experiment
from unskew.errors import ConfigError
from unskew.runs.metrics import RunMetrics
from unskew.simulation import personal_models
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server
from unskew.tasks.primary_metric import WORST, validation_metric_name


class EarlyStopping:
    """Looks at the global model's objective on the clients' held-out samples, never at the test set.

    It follows from the run's history alone, so a resumed run ends where it would have ended without a stop.

    Args:
        config: ``early_stopping`` evaluations without a better objective end the run; None never does.
        evaluator: Of the run.
        history: The run's rows so far; grows while it runs.
        metrics: Metrics of the run.

    Raises:
        ConfigError: No client holds anything out, or something is asked for that only the last round has.
    """

    def __init__(
        self, config: Experiment, evaluator: Evaluator, history: Sequence[dict[str, Any]], metrics: RunMetrics
    ):
        self.config, self.evaluator, self.history, self.metrics = config, evaluator, history, metrics
        self.objective = metrics.objective
        self.score = validation_metric_name(self.objective.name)
        self.worst = self.objective.name == WORST
        self.selects = config.early_stopping is not None or config.keep == "best"
        if not (self.selects or self.worst):
            return
        why = "early_stopping" if config.early_stopping is not None else "keep=best" if self.selects else "objective"
        if config.save_samples and config.early_stopping is not None:
            raise ConfigError(
                "save_samples needs to know the last round in advance and cannot be combined with early_stopping; "
                "leave one out."
            )
        clients = evaluator.federation.clients
        if not any(len(clients[k].y_test) for k in range(min(len(clients), 1000))):
            raise ConfigError(f"{why} looks at what clients hold out; give them a holdout above 0, such as 0.1.")
        if not config.eval_clients:
            raise ConfigError(f"{why} looks at eval_clients clients; with eval_clients=0 there are none.")

    def figures(self, server: Server) -> dict[str, float]:
        """``validation_accuracy`` (or ``_r2``), ``validation_loss`` and the objective on what the evaluated clients hold out.

        All held-out samples count alike; the objective ``worst_client`` is the accuracy of the worst client.
        """
        if not (self.selects or self.worst):
            return {}
        v, b, scored, name = server.evaluated, server.evaluated_b, self.evaluator.task.scored, self.objective.name
        others = name not in (scored, "loss", WORST)
        scores = self.evaluator.evaluate_clients(v, b, self.config.eval_clients, self.config.seed, pooled=others)
        worst = {WORST: float(scores.accuracies.min())} if self.worst else {}
        if not self.selects:
            return worst
        sizes = [len(self.evaluator.federation.clients[int(k)].y_test) for k in scores.ids]
        return {
            f"validation_{scored}": float(np.average(scores.accuracies, weights=sizes)),
            "validation_loss": float(np.average(scores.losses, weights=sizes)),
            **({self.score: scores.pooled[name]} if others else worst),
        }

    @property
    def best(self) -> dict[str, Any] | None:
        """The first row with the best objective."""
        return max(self._rows, key=lambda row: self.objective.rank(float(row[self.score])), default=None)

    @property
    def should_stop(self) -> bool:
        """Return whether the best evaluation is longer ago than the patience allows."""
        if self.config.early_stopping is None:
            return False
        rows, best = self._rows, self.best
        return best is not None and len(rows) - 1 - rows.index(best) >= self.config.early_stopping

    @property
    def _rows(self) -> list[dict[str, Any]]:
        return [row for row in self.history if row.get(self.score) is not None]

    def summary(self) -> dict[str, Any]:
        """The round that was best on what clients hold out, its test figures, and how many rounds there could have been."""
        best = self.best
        if not self.selects or best is None:
            return {}
        judging = {metric.name: best[metric.name] for metric in self.metrics.judging}
        return {
            "validation_round": best["round"],
            self.score: best[self.score],
            **{f"{name}_at_validation_round": value for name, value in judging.items()},
            "max_rounds": self.config.rounds,
        }


class BestModelKeeper:
    """The model of the best evaluated round so far, which ``keep: best`` makes the model of the run.

    The model itself is at the server, ``Server.best``, so that checkpoints have it.

    Args:
        config: Of the run.
        stopping: Validation of the run.
        server: Of the run.

    Raises:
        ConfigError: If clients keep parts of their models that belong to the last round.
    """

    def __init__(self, config: Experiment, stopping: EarlyStopping, server: Server):
        self.active, self.stopping, self.server = config.keep == "best", stopping, server
        self.round = 0
        self.value = -math.inf
        own = personal_models.keeps_client_state(server.method, server.spec) or (
            config.buffers == "local" and server.spec.buffer_sizes
        )
        if self.active and own:
            raise ConfigError(
                f"keep=best does not go with method={config.method} and buffers={config.buffers}: clients keep parts of "
                "their models, and these are of the last round. Use keep=last."
            )

    def offer(self, round: int, value: float | None) -> None:
        """Store the server's model if its objective on the held-out samples is the best so far.

        Args:
            round: Number of finished rounds.
            value: Objective on the held-out samples, or None.
        """
        if not self.active or value is None or not math.isfinite(value):
            return
        rank = self.stopping.objective.rank(value)
        if rank > self.value:
            self.round, self.value = round, rank
            self.server.best = self.server.evaluated.clone(), self.server.evaluated_b.clone()

    def about(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the model."""
        return {"best": [self.round, self.value]} if self.round else {}

    def restore(self, extra: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if "best" in extra:
            self.round, self.value = int(extra["best"][0]), float(extra["best"][1])

    def take(self) -> None:
        """Make it the model of the run, after the last round."""
        self.server.finished = self.server.best if self.active else None
