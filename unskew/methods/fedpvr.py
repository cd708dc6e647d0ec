"""FedPVR: SCAFFOLD's variance reduction, applied only to the classifier.

Li, Schmidt, Alstrøm, Stich, "Partial Variance Reduction improves Non-Convex Federated learning on heterogeneous data",
2022, arXiv:2212.02191. The last layers differ most between clients, so only they are corrected; variates of other layers are
zero and neither stored nor sent. By default all linear layers are corrected (three in VGG-11); ``layers=1`` corrects only
the head.

The paper trains these layers without momentum. Here the run's optimizer is used for all parameters. The variate is the mean
of the gradients, which is also correct with momentum.

The server's variate is ``c = sum_k p_k c_k`` with the weights of the average, so that the fixed point of the corrected layers
is that of the objective with these weights (see ``unskew.methods.scaffold``). In the paper the weights are uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Context, Shape, Tensors, Updates, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.training_config import Training


@dataclass(frozen=True)
class FedPVR(ClientRule):
    """Partial variance reduction.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        layers: Number of linear layers corrected, counted from the end: 1 is the last one only, 0 all of them.
    """

    name: ClassVar[str] = "fedpvr"
    summary: ClassVar[str] = "SCAFFOLD on the classifier only"
    paper: ClassVar[str] = "Li et al. 2022, arXiv:2212.02191"
    shifts_gradient: ClassVar[bool] = True
    sums_over_rounds: ClassVar[bool] = True
    uploads: ClassVar[bool] = True
    private: ClassVar[Mapping[str, Callable[[Training], float]]] = {"change": lambda training: training.step_length}
    weights: ClassVar[Weights | None] = "uniform"

    layers: Annotated[int, Field(ge=0)] = 0

    def corrected(self, spec: ModelSpec) -> Tensor:
        """Return the indices of the corrected parameters in the parameter vector.

        Args:
            spec: Layout of the model.

        Raises:
            ConfigError: If the model has no trained linear layer.
        """
        modules = dict(spec.module.named_modules())
        linear = [name for name in spec.layers if isinstance(modules[name], nn.Linear)]
        if not linear:
            raise ConfigError("fedpvr corrects linear layers, but the model has no trained ones. Use another model.")
        chosen = linear[-self.layers :] if self.layers else linear
        starts = [sum(spec.sizes[:i]) for i in range(len(spec.sizes))]
        indices = [
            torch.arange(start, start + size)
            for name, start, size in zip(spec.names, starts, spec.sizes, strict=True)
            if name.rpartition(".")[0] in chosen
        ]
        return torch.cat(indices)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the model has a trained linear layer."""
        self.corrected(run.spec)
        return ()

    def begin(self, ctx: Context) -> Tensors:
        """Compute the correction ``c - c_k`` of the chosen parameters, and initialize the sum of their gradients."""
        index = self.corrected(ctx.spec).to(ctx.v_global.device)
        c_k = ctx.state.get("c")
        c = ctx.download.get("c")
        zero = torch.zeros_like(ctx.v_global[index])
        c = zero if c is None else c
        return {"index": index, "correction": c if c_k is None else c - c_k, "sum": zero}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``g - c_k + c`` on the chosen parameters."""

        def corrected(v: Tensor, batch: Batch) -> Tensor:
            g = grad_fn(v, batch)
            if batch.track:  # ignore additional gradients of a step, such as FedSAM's second one
                carry["sum"] = carry["sum"] + g[carry["index"]]
            return g.index_add(0, carry["index"], carry["correction"])

        return corrected

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the mean gradient of the local steps as the new variate, and upload its change."""
        new = carry["sum"] / ctx.steps
        c_k = ctx.state.get("c")
        ctx.upload["change"] = ctx.weight * (new if c_k is None else new - c_k)
        ctx.state["c"] = new

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the total weight; the variate is zero until its first update."""
        return {"total": torch.tensor(federation_info.total_weight(), dtype=v.dtype)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the variate."""
        return {"c": (len(self.corrected(spec)),)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the server's variate."""
        return {"c": state["c"]} if "c" in state else {}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """``c <- c + sum_S p_k (c_k+ - c_k)``."""
        change = updates.aggregate.upload[self.name]["change"] / state["total"]
        return {**state, "c": state["c"] + change if "c" in state else change}
