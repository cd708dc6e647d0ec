"""SCAFFOLD: control variates correct client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2019,
arXiv:1910.06378, Algorithm 1. ``x`` is the global model, ``c`` the server's control variate and ``c_k`` the client's::

    y <- y - eta (g(y) - c_k + c)                          every local step
    c_k+ = gradient of f_k at x                            option I
    c_k+ = c_k - c + (x - y) / (eta tau)                   option II
    x <- x + eta_g mean_S(y - x),  c <- c + (1/K) sum_S (c_k+ - c_k)

If a part of the model is exchanged only every few rounds, ``x``, ``y``, ``tau`` and both variates of that part refer to the
interval since it was last sent. This is FedALS's Algorithm 4 (arXiv:2404.11754) in the standard form; as printed, it has
the signs of ``c`` and ``c_k`` swapped and no ``1/K`` in the local step. A client that was absent when the part was sent
downloads it later and starts a new interval; its steps before that are not used in any variate.

``K`` counts all clients, including those that do not take part. A client that has not taken part yet has ``c_k = 0``. The
average is uniform, as in the paper. Variates cover parameters, not buffers.

With other weights (``client_weighting=samples``) the objective is ``F = sum_k p_k f_k`` with ``p_k = w_k / sum_j w_j`` over
all clients, and the server's variate uses the same weights::

    c <- c + sum_S p_k (c_k+ - c_k),    so that always    c = sum_k p_k c_k

At a fixed point, ``c_k`` is the mean of the client's gradients along its local steps, so every client moves by
``-eta tau c``. All clients move in the same direction, so for any average the model is at rest only if ``c = 0``. Then no
client moves, ``c_k = grad f_k(x)``, and ``c = grad F(x) = 0``. The weights of the variate therefore determine the objective;
the weights of the average and the choice of clients do not. With ``1/K`` the fixed point is that of the uniform mean,
however the server averages.

If the learning rate changes (``lr_schedule``), local steps move the model by ``x - y = sum_t eta_t (g_t - c_k + c)``. So
``eta tau`` becomes ``sum_t eta_t`` over the steps of the interval, and option II is the mean gradient weighted by ``eta_t``.

For plain SGD, the quotient of option II is the mean of the gradients along the local steps. With momentum, weight decay or
an adaptive optimizer it is not, so ``variate="auto"`` uses the mean gradient instead. It counts one gradient per step:
additional untracked gradients of other rules (FedSAM, Ditto) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.fedavg import FedAvg
from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Context, Rule, Shape, Tensors, Updates, Weights
from unskew.protocol.search_space import Space, log_range
from unskew.protocol.training_config import Training


@dataclass(frozen=True)
class Scaffold(ClientRule):
    """Stochastic controlled averaging.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        option: How the client's variate is updated: ``I``, the full gradient at the global model, or ``II``, from the
            local steps.
        variate: For option II, the ``difference`` quotient of the formula, or the ``mean`` of the gradients of the
            local steps. The two agree only for plain SGD. ``auto`` uses the mean with momentum, weight decay, clipping
            or Adam, and the quotient otherwise.
        eta_g: Server learning rate. Any value other than 1 fills the server slot. With another server method, set that
            method's ``eta`` instead.
    """

    name: ClassVar[str] = "scaffold"
    summary: ClassVar[str] = "control variates correct client drift"
    paper: ClassVar[str] = "Karimireddy et al. 2019, arXiv:1910.06378"
    shifts_gradient: ClassVar[bool] = True
    sums_over_rounds: ClassVar[bool] = True
    uploads: ClassVar[bool] = True
    private: ClassVar[Mapping[str, Callable[[Training], float]]] = {"change": lambda training: training.step_length}
    # The paper's theory requires at least 1; its experiments use 1.
    spaces: ClassVar[Mapping[str, Space]] = {"eta_g": log_range(1.0, 3.0)}
    weights: ClassVar[Weights | None] = "uniform"
    idle_options = (({"option": "I"}, ("variate",)),)

    option: Literal["I", "II"] = "II"
    variate: Literal["auto", "difference", "mean"] = "auto"
    eta_g: Annotated[float, Field(gt=0)] = 1.0

    @property
    def slots(self) -> Mapping[str, Rule]:  # type: ignore[override]
        """This client rule, and a server rule only if ``eta_g`` is not 1."""
        return {"client": self, **({"server": FedAvg(eta=self.eta_g)} if self.eta_g != 1 else {})}

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        """``full_gradient`` for option I, which needs a gradient over all of the client's data."""
        return ("full_gradient",) if self.option == "I" else ()

    def _averages(self, ctx: Context) -> bool:
        wanted = self.variate == "mean" or (self.variate == "auto" and not ctx.plain_sgd)
        return self.option == "II" and wanted

    def begin(self, ctx: Context) -> Tensors:
        """Compute the correction ``c - c_k`` of all steps; an interval of several rounds continues with its sums."""
        c = ctx.download["c"]
        c_k = ctx.state.get("c", torch.zeros_like(c))
        steps = 0 * ctx.steps
        name, since = ("sum", torch.zeros_like(c)) if self._averages(ctx) else ("start", ctx.v_global)
        if ctx.received is not None:
            steps = torch.where(ctx.received, steps, ctx.state.get("steps", steps))
            since = torch.where(steps == 0, since, ctx.state.get(name, since))
        carry = {"c_k": c_k, "correction": c - c_k, "steps": steps, name: since}
        if name == "start" and ctx.training.scheduled:  # eta_1 + ... + eta_tau of the interval's earlier rounds
            known = ctx.lr * steps
            carry["rates"] = torch.where(steps == 0, known, ctx.state.get("rates", known))
        return carry

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``g - c_k + c``."""
        averages = self._averages(ctx)

        def corrected(v: Tensor, batch: Batch) -> Tensor:
            g = grad_fn(v, batch)
            if averages and batch.track:
                carry["sum"] = carry["sum"] + g
            return g + carry["correction"]

        return corrected

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the new variate, and upload its change for the parameters that are sent."""
        steps = carry["steps"] + ctx.steps
        if self.option == "I":
            assert ctx.full_gradient is not None
            new = ctx.full_gradient
        elif self._averages(ctx):
            new = carry["sum"] / steps
        else:
            rates = ctx.lr * steps
            if "rates" in carry:
                rates = carry["rates"] = carry["rates"] + ctx.lr * ctx.steps
            # A rule that is written later may have replaced the model that training starts from.
            start = ctx.v_global if ctx.received is None else carry["start"]
            new = (start - v) / rates - carry["correction"]
        if ctx.sent is not None:
            new = torch.where(ctx.sent, new, carry["c_k"])
            new_state: Tensors = {"steps": steps.expand_as(v)}
            new_state |= {n: carry[n].expand_as(v) for n in ("sum", "start", "rates") if n in carry}
            ctx.state.update({name: torch.where(ctx.sent, 0.0, t) for name, t in new_state.items()})
        ctx.upload["change"] = ctx.weight * (new - carry["c_k"])
        ctx.state["c"] = new

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize ``c = 0``, and the total weight of all clients for the mean over them."""
        return {"c": torch.zeros_like(v), "total": torch.tensor(federation_info.total_weight(), dtype=v.dtype)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the variate."""
        return {"c": (spec.size,)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the server's variate."""
        return {"c": state["c"]}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``c <- c + sum_S p_k (c_k+ - c_k)``."""
        change = updates.aggregate.upload[self.name]["change"]
        return {**state, "c": state["c"] + change / state["total"]}
