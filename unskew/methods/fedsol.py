"""FedSOL: gradients at a point where the model is farther from the global model's predictions.

Lee, Jeong, Kim, Oh, Yun, "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning", 2024,
arXiv:2308.12532. With the logits ``z`` of the received model and ``z_k`` of the trained one::

    r = grad KL(softmax(z / tau) || softmax(z_k / tau))           at theta_k
    e = rho N * r / ||r||
    theta_k <- theta_k - lr grad CE(theta_k + e)

``N`` is ``|theta_k - theta|``, divided by its norm over the first axis of each parameter (``form=adaptive``), or 1
(``form=fixed``). The norm of ``r`` is over all parameters. Each step computes two gradients; normalization buffers are
updated in the first pass only, and the received model is in eval mode. In the first local step both models are equal, so
``r`` is set to 0 instead of the normalized rounding error.

The defaults are those of the authors' code (``configs/fedsol_adaptive.json`` and ``algorithms/fedsol_adaptive`` of
Lee-Gihun/FedSOL), which perturbs head and body.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedSOL(ClientRule):
    """Gradients at a point of a larger proximal loss.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        rho: Radius of the perturbation, as in the authors' code; 0 is FedAvg.
        tau: Temperature of both softmaxes.
        form: Scaling of the perturbation: ``adaptive`` by the change of each parameter, or ``fixed``.
    """

    name: ClassVar[str] = "fedsol"
    summary: ClassVar[str] = "gradients at a point farther from the global model's predictions"
    paper: ClassVar[str] = "Lee et al. 2024, arXiv:2308.12532"
    needs = ("one_class",)
    # Around the authors' 1.
    spaces: ClassVar[Mapping[str, Space]] = {"rho": log_range(0.1, 3.0)}
    idle_options = (({"rho": 0}, ("tau", "form")),)

    rho: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    tau: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
    form: Literal["adaptive", "fixed"] = "adaptive"

    def begin(self, ctx: Context) -> Tensors:
        """Number the columns of the parameters, on the device."""
        return {"columns": column_numbers(ctx.spec)[0].to(ctx.v_global.device)} if self.form == "adaptive" else {}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Compute the gradient at ``theta_k + e``."""
        if self.rho == 0:
            return grad_fn

        def divergence(v: Tensor, batch: Batch) -> Tensor:
            log_q = (ctx.model(v, batch.x, batch.track).logits / self.tau).log_softmax(1)
            with torch.no_grad():
                log_p = (ctx.spec.forward(ctx.v_global, ctx.b_global, batch.x).logits / self.tau).log_softmax(1)
            return (log_p.exp() * (log_p - log_q)).sum(1).mean()

        slope = ctx.model.gradient(divergence)

        def orthogonal(v: Tensor, batch: Batch) -> Tensor:
            r = slope(v, batch)
            e = r * (self.rho / torch.linalg.vector_norm(r).clamp_min(1e-12))
            if self.form == "adaptive":
                e = e * normalized_over_rows(v - ctx.v_global, carry["columns"], column_numbers(ctx.spec)[1])
            return grad_fn(v + torch.where(batch.step > 0, e, 0.0), batch.untracked())

        return orthogonal


def normalized_over_rows(change: Tensor, columns: Tensor, count: int) -> Tensor:
    """Return magnitudes divided by their norm over the first axis of each parameter, ``[d]``.

    Args:
        change: Vector with the layout of the model, ``[d]``.
        columns: Number of the column of each entry, ``[d]``.
        count: Number of columns.
    """
    squares = change.new_zeros(count).index_add(0, columns, change.square())
    return change.abs() / squares.sqrt().clamp_min(1e-12)[columns]


@lru_cache(maxsize=16)
def column_numbers(spec: ModelSpec) -> tuple[Tensor, int]:
    """Return a number for each entry ``[d]``, equal for entries that differ only in the first index, and their count."""
    widths = [math.prod(shape[1:]) for shape in spec.shapes]
    starts = accumulate(widths, initial=0)
    numbers = [
        start + torch.arange(size) % width for start, size, width in zip(starts, spec.sizes, widths, strict=False)
    ]
    return torch.cat(numbers), sum(widths)
