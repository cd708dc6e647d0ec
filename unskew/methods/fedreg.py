"""FedReg: local steps are corrected to reduce forgetting of the global model's knowledge.

Xu, Hong, Huang, Jiang, "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", 2022,
arXiv:2203.02645. For each batch ``(x, y)`` and the received model ``theta^t``, 10 sign-gradient steps each generate:

- pseudo data ``x_s``: ``x <- x - eta_s sign(grad_x CE(theta^t; x, y))``, soft labels ``y_s = softmax(f_{theta^t}(x_s))``;
- perturbed data ``x_p`` in the same way with ``eta_p = eta_s / 100``, and labels ``y``.

A local step is then::

    m = gamma theta + (1 - gamma) theta^t;   theta <- theta - eta grad CE(m; x, y);   q = (theta + theta^t) / 2
    g2 = grad CE(q; x_s, y_s),  w  = max(0, <theta - theta^t, g2> / ||g2||^2)
    g3 = grad CE(q; x_p, y),    w' = max(0, <theta - theta^t - w g2, g3> / ||g3||^2)
    theta <- theta - w g2 - w' g3

The projections assume plain SGD steps, so the client must use plain SGD. The average is uniform, as in the original.
``eta_s = 0.1`` is the original's value; the FedCOG paper does not state one, and its code's single 1e-3 equals ``eta_p``.

``clamp`` limits the generated inputs to the range of the batch after every sign step. The authors' code
(``FedUtils/models/utils.py`` of Zoesgithub/FedReg) calls torch's ``clamp`` there but discards its result, so its inputs are
not bounded. The default here is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.perfedavg import need_plain_sgd
from unskew.models.execution import Batch, GradFn
from unskew.protocol.rules import ClientRule, Context, Method, Tensors, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range, uniform_range


@dataclass(frozen=True)
class FedReg(ClientRule):
    """Alleviated forgetting.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        tasks_reason: Reason why other tasks are not supported: a clause that follows "because".
        gamma: Share of the local model in the point ``m`` at which the gradient is taken.
        eta_s: Step size of the pseudo data.
        iterations: Number of sign-gradient steps.
        clamp: Clamp the inputs to the range of the batch after every sign step. The authors' code calls ``clamp`` but
            discards the result, so its inputs are not bounded either.
    """

    name: ClassVar[str] = "fedreg"
    summary: ClassVar[str] = "local steps that do not forget the global model"
    paper: ClassVar[str] = "Xu et al. 2022, arXiv:2203.02645"
    # Around the paper's 0.5 and 0.1.
    spaces: ClassVar[Mapping[str, Space]] = {"gamma": uniform_range(0.25, 0.75), "eta_s": log_range(0.01, 1.0)}
    weights: ClassVar[Weights | None] = "uniform"
    needs = ("one_class",)
    tasks_reason: ClassVar[str] = "it labels pseudo data with a softmax, which assumes one class per sample"
    idle_options = (({"iterations": 0}, ("eta_s", "clamp")),)

    gamma: Annotated[float, Field(ge=0, le=1)] = 0.5
    eta_s: Annotated[float, Field(gt=0)] = 0.1
    iterations: Annotated[int, Field(ge=0)] = 10
    clamp: bool = False

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that freeze a part of the model, because the projections assume steps of the whole model.

        Rules whose loss needs classes are rejected, too, because pseudo data have probabilities of classes.

        Args:
            method: The composition.
        """
        classes = next((rule.name for rule in method.client if rule.class_targets), None)
        if classes is not None:
            return (
                f"fedreg computes the loss of pseudo data, which have probabilities of classes, but the loss of {classes} "
                "needs one class that the client has. Remove one of them."
            )
        other = next(
            (rule.name for rule in method.client if type(rule).trainable_mask is not ClientRule.trainable_mask), None
        )
        return f"fedreg corrects steps of the whole model, but {other} freezes a part of it." if other else None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the optimizer, which must be plain SGD, and the inputs, which must be numbers."""
        run.need_numbers(self.name)
        need_plain_sgd(self.name, run)
        return ()

    def perturbed_inputs(self, ctx: Context, x: Tensor, y: Tensor, eta: float) -> Tensor:
        """Move inputs by sign-gradient steps that reduce the global model's loss.

        Args:
            ctx: Context of the client in this round.
            x: Inputs, ``[B, ...]``.
            y: Targets, ``[B]``.
            eta: Size of a step.
        """

        def loss(x: Tensor) -> Tensor:
            return ctx.task.loss(ctx.spec.forward(ctx.v_global, ctx.b_global, x).logits, y)

        low, high = x.min(), x.max()
        for _ in range(self.iterations):
            x = x - eta * torch.sign(torch.func.grad(loss)(x))
            if self.clamp:
                x = torch.clamp(x, low, high)
        return x

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Return the direction for which a plain SGD step equals the corrected step."""

        def corrected(v: Tensor, batch: Batch) -> Tensor:
            v_t, lr = ctx.v_global, batch.lr
            g1 = grad_fn(self.gamma * v + (1 - self.gamma) * v_t, batch)
            x_s = self.perturbed_inputs(ctx, batch.x, batch.y, self.eta_s)
            x_p = self.perturbed_inputs(ctx, batch.x, batch.y, self.eta_s / 100)
            with torch.no_grad():
                y_s = ctx.task.probabilities(ctx.spec.forward(v_t, ctx.b_global, x_s).logits)
            after = v - lr * g1
            q = (after + v_t) / 2
            g2 = grad_fn(q, batch._replace(x=x_s, y=y_s, track=False))
            g3 = grad_fn(q, batch._replace(x=x_p, track=False))
            moved = after - v_t
            w = projection(moved, g2)
            w_p = projection(moved - w * g2, g3)
            return g1 + (w * g2 + w_p * g3) / lr

        return corrected


def projection(vector: Tensor, onto: Tensor) -> Tensor:
    """Compute ``max(0, <vector, onto> / ||onto||^2)``; 0 if ``onto`` is zero.

    Args:
        vector: Vector to project.
        onto: Direction of the projection.
    """
    return (vector @ onto).clamp_min(0) / (onto @ onto).clamp_min(1e-30)
