"""Validation on clients' held-out samples, for early stopping and for keeping the best model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unskew.config.experiment import Experiment
from unskew.data.clients import any_held_out
from unskew.errors import ConfigError
from unskew.runs.metrics import RunMetrics, check_objective_on_held_out
from unskew.simulation import personal_models
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server
from unskew.tasks.primary_metric import WORST, validation_metric_name


class EarlyStopping:
    """Early stopping on the global model's objective on clients' held-out samples, never on the test set.

    The decision depends only on the run's history, so a resumed run stops in the same round as an uninterrupted one. Rounds
    of the run ``start_from`` are not among the candidates, because this run may have another method.

    Attributes:
        before: Number of rounds of the run ``start_from``.

    Args:
        config: Configuration of the run, which stops after ``early_stopping`` evaluations without improvement.
        evaluator: Evaluator of the run.
        history: Rows of the run; the list grows during the run.
        metrics: Metrics of the run.

    Raises:
        ConfigError: If no client has held-out samples or is evaluated, or an option needs to know the last round.
    """

    def __init__(
        self, config: Experiment, evaluator: Evaluator, history: Sequence[dict[str, Any]], metrics: RunMetrics
    ):
        self.config = config
        self.evaluator = evaluator
        self.history = history
        self.before = 0
        self._counts: np.ndarray | None = None
        self.metrics = metrics
        self.objective = metrics.objective
        self.score = validation_metric_name(self.objective.name)
        self.worst = self.objective.name == WORST
        self.selects = config.early_stopping is not None or config.keep == "best"
        if not (self.selects or self.worst):
            return
        why = "early_stopping" if config.early_stopping is not None else "keep=best" if self.selects else "objective"
        if config.save_samples and config.early_stopping is not None:
            raise ConfigError(
                "save_samples needs to know the last round in advance and cannot be combined with early_stopping. "
                "Remove one of them."
            )
        if not any_held_out(evaluator.federation.clients):
            raise ConfigError(f"{why} needs held-out samples of clients. Set holdout above 0, such as 0.1.")
        if not config.eval_clients:
            raise ConfigError(f"{why} needs evaluated clients, but eval_clients=0. Set eval_clients above 0.")
        if self.selects:
            check_objective_on_held_out(metrics, config, evaluator.federation, why)

    def round_metrics(self, server: Server) -> dict[str, float]:
        """Compute validation metrics on the evaluated clients' held-out samples.

        These are ``validation_accuracy`` (or another primary metric), ``validation_loss`` and the objective. Each held-out
        sample (of texts, each token) has the same weight, and a ranking is one of the samples of all clients; the objective
        ``worst_client`` is the primary metric of the worst client.
        """
        if not (self.selects or self.worst):
            return {}
        v, b = server.selection.evaluated
        scored = self.evaluator.task.scored
        name = self.objective.name
        others = name not in (scored, "loss", WORST)
        pooled = others or self.evaluator.task.ranked
        scores = self.evaluator.evaluate_clients(v, b, self.config.eval_clients, self.config.seed, pooled=pooled)
        known = np.isfinite(scores.accuracies) | ~np.array(self.evaluator.task.ranked)  # a ranking may be undefined
        worst = {WORST: float(scores.accuracies[known].min()) if known.any() else np.nan} if self.worst else {}
        if not self.selects:
            return worst
        weights = self._predictions(scores.ids)
        mean = _mean(scores.accuracies[known], weights[known]) if known.any() else np.nan
        return {
            f"validation_{scored}": scores.pooled.get(scored, mean),
            "validation_loss": _mean(scores.losses, weights),
            **({self.score: scores.pooled[name]} if others else worst),
        }

    def _predictions(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of predictions on each client's held-out samples; the clients are those of every round."""
        if self._counts is None:
            evaluator = self.evaluator
            held_out = (evaluator.federation.clients[int(k)].y_test for k in ids)
            self._counts = np.array([float(evaluator.task.predictions(y).sum()) for y in held_out])
        return self._counts

    @property
    def best(self) -> dict[str, Any] | None:
        """First row with the best objective; None if it is not finite in any."""
        finite = [row for row in self._rows if row[self.score] is not None]
        return max(finite, key=lambda row: self.objective.rank(float(row[self.score])), default=None)

    @property
    def should_stop(self) -> bool:
        """Return whether the last ``early_stopping`` evaluations brought no improvement.

        An evaluation whose objective is NaN or infinite counts as no improvement.
        """
        if self.config.early_stopping is None:
            return False
        rows, best = self._rows, self.best
        since = rows if best is None else rows[rows.index(best) + 1 :]
        return len(since) >= self.config.early_stopping

    @property
    def _rows(self) -> list[dict[str, Any]]:
        """Rows of the evaluated rounds."""
        return [row for row in self.history[self.before :] if self.score in row]

    def summary(self) -> dict[str, Any]:
        """Return the best round on held-out samples, its test metrics, and the configured number of rounds."""
        best = self.best
        if not self.selects:
            return {}
        if best is None:
            return {"max_rounds": self.config.rounds}
        judging = {metric.name: best[metric.name] for metric in self.metrics.judging}
        return {
            "validation_round": best["round"],
            self.score: best[self.score],
            **{f"{name}_at_validation_round": value for name, value in judging.items()},
            "max_rounds": self.config.rounds,
        }


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean; 0 if all weights are 0."""
    return float(values @ weights / max(1.0, weights.sum()))


class BestModelKeeper:
    """Tracker of the best evaluated round, whose model becomes the final model with ``keep: best``.

    The model itself is stored in ``ModelSelection.best``, so that checkpoints contain it.

    Args:
        config: Configuration of the run.
        stopping: Validation of the run.
        server: Server of the run.

    Raises:
        ConfigError: If clients store parts of their models, which would belong to the last round.
    """

    def __init__(self, config: Experiment, stopping: EarlyStopping, server: Server):
        self.active = config.keep == "best"
        self.stopping = stopping
        self.server = server
        self.round = 0
        self.value = -math.inf
        own = personal_models.keeps_client_state(server.setup.method, server.setup.spec) or (
            config.buffers == "local" and server.setup.spec.buffer_sizes
        )
        if self.active and own:
            raise ConfigError(
                f"keep=best cannot be combined with method={config.method} and buffers={config.buffers}: clients store "
                "parts of their models, and these belong to the last round. Use keep=last."
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
            self.server.selection.keep_best()

    def about(self) -> dict[str, Any]:
        """Return the values that a checkpoint must contain in addition to the model."""
        return {"best": [self.round, self.value]} if self.round else {}

    def restore(self, extra: dict[str, Any]) -> None:
        """Restore the best round and its value from a checkpoint."""
        if "best" in extra:
            self.round, self.value = int(extra["best"][0]), float(extra["best"][1])

    def take(self) -> None:
        """Make the best model the final model of the run."""
        if self.active:
            self.server.selection.finish(self.server.selection.best)
