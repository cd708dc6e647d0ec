"""FedBN: every client keeps its own BatchNorm layers, the rest of the model is averaged.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", 2021,
arXiv:2102.07623, Algorithm 1. ``w^l`` are the parameters of layer ``l``::

    w^l <- sum_k p_k w_k^l     if l is not BatchNorm
    w_k^l stays at client k    if it is, its running mean and variance, too

The personal model of a client consists of the shared layers and its own BatchNorm. The global model has the initial
BatchNorm parameters; it serves clients that never took part, which the paper does not discuss. The average is uniform, as
in the paper. LayerNorm and GroupNorm layers are averaged. Statistics of a BatchNorm without trained parameters are exchanged
together with the layer before it, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import nn

from unskew.models.body_head import slices_where
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import Method, Slices, SyncRule, Tensors, Weights
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class FedBN(SyncRule):
    """Local BatchNorm."""

    name: ClassVar[str] = "fedbn"
    summary: ClassVar[str] = "shares all of the model but BatchNorm"
    paper: ClassVar[str] = "Li et al. 2021, arXiv:2102.07623"
    weights: ClassVar[Weights | None] = "uniform"

    def conflict_with(self, method: Method) -> str | None:
        """Reject other rules with personal models."""
        other = next((rule.name for rule in method.client if rule.has_personal_model), None)
        return f"{other} and fedbn both define a client's personal model. Remove one of them." if other else None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if the whole model is averaged, or the statistics of a BatchNorm without trained parameters."""
        spec = run.spec
        trained = {name.rpartition(".")[0] for name in spec.names}
        averaged = sorted({name.rpartition(".")[0] for name in spec.buffer_names} - trained)
        averaged = [name for name in averaged if _is_batch_norm(spec, name)]
        if averaged and run.buffers == "average":
            return [
                f"fedbn averages the statistics of BatchNorm without trained parameters ({', '.join(averaged)}), which "
                "are exchanged with the layer before. Set buffers=local to keep them at clients."
            ]
        if self.local_slices(spec):
            return ()
        return [
            "fedbn keeps no layers at clients, because this model has no trainable BatchNorm: all parameters are averaged, "
            "uniformly."
        ]

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the BatchNorm parameters."""
        return _slices(spec, True)

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Exchange all other parameters in both directions."""
        rest = _slices(spec, False)
        return rest, rest


@lru_cache(maxsize=16)
def _slices(spec: ModelSpec, norm: bool) -> Slices:
    """Return the slices of BatchNorm parameters, or of all others."""
    return slices_where(spec.names, spec.sizes, lambda name: _is_batch_norm(spec, name.rpartition(".")[0]) == norm)


def _is_batch_norm(spec: ModelSpec, name: str) -> bool:
    """Return whether a module of the model is BatchNorm."""
    return isinstance(spec.module.get_submodule(name), nn.modules.batchnorm._BatchNorm)
