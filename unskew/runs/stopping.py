"""Early stopping: a run ends when its rounds bring nothing better on what the clients hold out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unskew.config.experiment import Experiment
from unskew.errors import ConfigError
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


class EarlyStopping:
    """Looks at the global model's accuracy on the clients' held-out samples, never at the test set.

    It follows from the run's history alone, so a resumed run ends where it would have ended without a stop.

    Args:
        config: ``early_stopping`` evaluations without a higher accuracy end the run; None never does.
        evaluator: Of the run.
        history: The run's rows so far; grows while it runs.

    Raises:
        ConfigError: No client holds anything out, or something is asked for that only the last round has.
    """

    def __init__(self, config: Experiment, evaluator: Evaluator, history: Sequence[dict[str, Any]]):
        self.config, self.evaluator, self.history = config, evaluator, history
        self.score = f"validation_{evaluator.task.scored}"
        if config.early_stopping is None:
            return
        if config.save_samples:
            raise ConfigError(
                "save_samples draws the last round, and with early_stopping none is known to be; drop one."
            )
        clients = evaluator.federation.clients
        if not any(len(clients[k].y_test) for k in range(min(len(clients), 1000))):
            raise ConfigError(
                "early_stopping looks at what clients hold out; give them a holdout above 0, such as 0.1."
            )
        if not config.eval_clients:
            raise ConfigError("early_stopping looks at eval_clients clients; with eval_clients=0 there are none.")

    def figures(self, server: Server) -> dict[str, float]:
        """``validation_accuracy`` (or ``_r2``) and ``validation_loss`` over all that the evaluated clients hold out."""
        if self.config.early_stopping is None:
            return {}
        v, b = server.evaluated, server.evaluated_b
        scores = self.evaluator.clients(v, b, self.config.eval_clients, self.config.seed)
        sizes = [len(self.evaluator.federation.clients[int(k)].y_test) for k in scores.ids]
        return {
            self.score: float(np.average(scores.accuracies, weights=sizes)),
            "validation_loss": float(np.average(scores.losses, weights=sizes)),
        }

    @property
    def best(self) -> dict[str, Any] | None:
        """The first row with the highest accuracy."""
        return max(self._rows, key=lambda row: float(row[self.score]), default=None)

    @property
    def due(self) -> bool:
        """Whether so many evaluations came after the best one."""
        if self.config.early_stopping is None:
            return False
        rows, best = self._rows, self.best
        return best is not None and len(rows) - 1 - rows.index(best) >= self.config.early_stopping

    @property
    def _rows(self) -> list[dict[str, Any]]:
        return [row for row in self.history if row.get(self.score) is not None]

    def summary(self) -> dict[str, Any]:
        """The round that was best on what clients hold out, its test accuracy, and how many rounds there could have been."""
        best = self.best
        if self.config.early_stopping is None or best is None:
            return {}
        scored = self.evaluator.task.scored
        return {
            "validation_round": best["round"],
            self.score: best[self.score],
            f"{scored}_at_validation_round": best[scored],
            "rounds_at_most": self.config.rounds,
        }
