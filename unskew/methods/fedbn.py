"""FedBN: every client keeps its own BatchNorm, the rest of the model is averaged.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", 2021,
arXiv:2102.07623, Algorithm 1. With ``w^l`` the parameters of layer ``l``::

    w^l <- sum_k p_k w_k^l     if l is not BatchNorm
    w_k^l stays at client k    if it is, its running mean and variance, too

A client is served by the shared layers with its own BatchNorm, which is its personal model. The global model, with the
BatchNorm of the beginning, is that of a client that never took part; the paper says nothing of it. The paper averages
uniformly. LayerNorm and GroupNorm are no BatchNorm and are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import nn

from unskew.models.body_head import merge_slices
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import ClientRule, Method, Slices, SyncRule, Tensors, Weights
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class FedBN(SyncRule):
    """Local BatchNorm."""

    name: ClassVar[str] = "fedbn"
    summary: ClassVar[str] = "shares all of the model but BatchNorm"
    paper: ClassVar[str] = "Li et al. 2021, arXiv:2102.07623"
    weights: ClassVar[Weights | None] = "uniform"

    def conflict_with(self, method: Method) -> str | None:
        """A client has one personal model."""
        other = next((rule.name for rule in method.client if type(rule).personal is not ClientRule.personal), None)
        return f"{other} and fedbn each give a client a personal model; leave out one of the two." if other else None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Without trainable BatchNorm all of the model is averaged, which is told."""
        super().check(run)
        return (
            ()
            if self.local_slices(run.spec)
            else [
                "fedbn keeps BatchNorm at the clients, but this model trains none, so all of it is averaged, uniformly."
            ]
        )

    def local_slices(self, spec: ModelSpec) -> Slices:
        """The parameters of BatchNorm."""
        return _slices(spec, True)

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """The other parameters, both ways."""
        rest = _slices(spec, False)
        return rest, rest


@lru_cache(maxsize=16)
def _slices(spec: ModelSpec, norm: bool) -> Slices:
    """The parameters that belong to BatchNorm, or those that do not."""
    modules, spans, start = dict(spec.module.named_modules()), [], 0
    for name, size in zip(spec.names, spec.sizes, strict=True):
        layer = modules[name.rpartition(".")[0]]
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) == norm:
            spans.append(slice(start, start + size))
        start += size
    return merge_slices(spans)
