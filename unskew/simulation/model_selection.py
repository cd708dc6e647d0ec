"""Selection of the model that a run evaluates and returns."""

from __future__ import annotations

from torch import Tensor

from unskew.protocol.messages import EVALUATED, Tensors
from unskew.simulation.server_state import ServerState

ModelPair = tuple[Tensor, Tensor]
"""Model ``[d]`` and its buffers ``[m]``."""


class ModelSelection:
    """Model that is evaluated and returned.

    This is the final model of the finished run if there is one, otherwise the mean of the clients' models, otherwise the
    model that the server rule marks as the evaluated one, otherwise the global model.

    Args:
        state: State of the server.

    Attributes:
        mean: Mean of the clients' whole models and of their buffers, if that is the evaluated model.
        best: Best model so far, if the run keeps it.
        finished: Model that the finished run returns instead of the last round's.
    """

    mean: ModelPair | None
    best: ModelPair | None
    finished: ModelPair | None

    def __init__(self, state: ServerState):
        self.state = state
        self.mean = self.best = self.finished = None

    @property
    def evaluated(self) -> ModelPair:
        """Model to evaluate and to return, ``[d]``, and its buffers ``[m]``."""
        rule_model = self.state.server_rule.get(EVALUATED, self.state.v), self.state.b
        return self.finished or self.mean or rule_model

    def tensors(self) -> Tensors:
        """Return all tensors, by name."""
        pairs = {"mean": self.mean, "best": self.best}
        return {f"{name}/{n}": t for name, pair in pairs.items() if pair for n, t in zip("vb", pair, strict=True)}

    def use_mean(self, mean: ModelPair | None) -> None:
        """Evaluate a mean of the clients' models; None evaluates the global model again."""
        self.mean = mean

    def keep_best(self) -> None:
        """Store the evaluated model as the best one so far."""
        v, b = self.evaluated
        self.best = v.clone(), b.clone()

    def finish(self, model: ModelPair | None) -> None:
        """Return this model at the end of the run; None returns that of the last round."""
        self.finished = model

    def restore(self, mean: ModelPair | None, best: ModelPair | None) -> None:
        """Restore the mean model and the best model.

        Args:
            mean: Mean of the clients' models, or None.
            best: Best model so far, or None.
        """
        self.mean, self.best = mean, best
