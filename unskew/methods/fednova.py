"""FedNova: updates are normalized per local step before averaging, so clients with more steps do not dominate.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020,
arXiv:2007.07481, Algorithm 1. ``a_k`` are the weights of a client's gradients in its update after ``tau_k`` steps::

    d_k = Delta_k / ||a_k||_1,    theta <- theta + tau_eff sum_k p_k d_k,    tau_eff = sum_k p_k ||a_k||_1

    ||a_k||_1 = tau_k                                                  SGD
    ||a_k||_1 = (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho)  SGD with momentum rho

A learning rate ``eta_t`` that changes (``lr_schedule``) is part of these weights, relative to the run's ``lr``:
``||a_k||_1 = sum_t (eta_t / lr) (1 - rho^(t+1)) / (1 - rho)`` with ``t`` from 0 to ``tau_k - 1``. So updates from rounds with
different learning rates are also normalized correctly.

A client sends ``d_k`` instead of its update, and one number, so the server needs only sums. If all clients take the same
number of steps, this is FedAvg. BatchNorm buffers are averaged as without it. The paper's proximal variant and its server
momentum are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.protocol.rules import ClientRule, Context, ServerRule, Tensors, Updates
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class FedNova(ClientRule, ServerRule):
    """Normalized averaging."""

    name: ClassVar[str] = "fednova"
    summary: ClassVar[str] = "averages updates per local step, so clients with more steps get no more weight"
    paper: ClassVar[str] = "Wang et al. 2020, arXiv:2007.07481"
    needs = ("whole_updates",)
    uploads: ClassVar[bool] = True
    sends_model_changes: ClassVar[bool] = False
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"length": (0.0, 1e38)}

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the optimizer; the weights of the gradients are known only for SGD.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the clients' optimizer is not SGD, or uses Nesterov momentum.
        """
        if run.training.optimizer != "sgd" or run.training.nesterov:
            raise ConfigError(
                "fednova supports only SGD, with or without momentum. Use optimizer=sgd without nesterov."
            )
        return ()

    def length(self, ctx: Context) -> Tensor:
        """Compute ``||a_k||_1``."""
        training, steps = ctx.training, ctx.steps
        rho = training.momentum
        if training.scheduled and training.lr_schedule_per == "step":  # all clients take the same number of steps
            within = range(training.local_steps or 1)
            weights = [training.rate(ctx.round, t) * (1 - rho ** (t + 1)) / (1 - rho) for t in within]
            return 0 * steps + sum(weights) / training.lr
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return length * (ctx.lr / training.lr) if training.scheduled else length

    def transform_update(self, ctx: Context, carry: Tensors, delta: Tensor) -> Tensor:
        """Normalize the update to ``d_k``."""
        return delta / self.length(ctx)

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload ``w_k ||a_k||_1``."""
        ctx.upload["length"] = ctx.weight * self.length(ctx)

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """``theta <- theta + tau_eff sum_k p_k d_k``."""
        mean = updates.aggregate
        tau_eff = mean.upload[self.name]["length"] / mean.weight
        return {"v": state["v"] + tau_eff * mean.delta}
