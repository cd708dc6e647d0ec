"""FedAMP: each client has its own model, which is pulled towards a mixture of the models of similar clients.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", 2021,
arXiv:2007.03797. The server knows the last model ``w_k`` of every client that took part, and mixes them for each client::

    exponential:  xi_kj = alpha / sigma exp(-||w_k - w_j||^2 / sigma)              xi_kk = 1 - sum_{j != k} xi_kj
    cosine:       xi_kj = (1 - own) softmax_{j != k}(sigma cos(w_k, w_j))          xi_kk = own
    server:       u_k = sum_j xi_kj w_j
    client:       trains from its own w_k with the gradient  g + lam / alpha (w - u_k);  sends w_k

The exponential kernel is that of FedAMP, the cosine one that of the paper's heuristic for networks, HeurFedAMP. The
distances of networks are so large that the exponential kernel can underflow, which leaves local training.

The authors' code was not found. ``alpha`` and ``lam`` are 1 as in PFLlib, ``sigma`` is 25 and ``own`` one over the number of
clients as in FLGo. In PFLlib the pull has no gradient, because the penalty is computed from values without one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.stored_models import StoredModels
from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Context, Report, Shape, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range

NEGLIGIBLE = 1e-6
"""Weight of a model below which it has no influence."""
SMALLEST = 1e-8
"""Smallest norm that the inner product of two models is divided by, as in PyTorch."""


@dataclass(frozen=True)
class FedAMP(StoredModels):
    """Attentive message passing.

    Attributes:
        kernel: Similarity of two models: ``cosine`` for networks, or ``exponential`` in the squared distance, for convex
            problems.
        sigma: Width of the exponential kernel, or factor of the cosine.
        alpha: Step length of the mixture with the exponential kernel; the pull is divided by it.
        lam: Strength of the pull towards the mixture; with 0 clients train alone.
        own: Weight of a client's own model with ``kernel=cosine``; None for one over the number of mixed models.
    """

    name: ClassVar[str] = "fedamp"
    summary: ClassVar[str] = "own models, pulled towards a mixture of the models of similar clients"
    paper: ClassVar[str] = "Huang et al. 2021, arXiv:2007.03797"
    exchange: ClassVar[str] = "clients send their own models to the server and receive mixtures of all clients' models"
    # From nearly equal weights to those of the nearest clients; from a weak pull to that of PFLlib.
    spaces: ClassVar[Mapping[str, Space]] = {"sigma": log_range(1.0, 100.0), "lam": log_range(0.01, 1.0)}
    idle_options = (
        ({"lam": 0}, ("kernel", "sigma", "alpha", "own")),
        ({"kernel": "exponential"}, ("own",)),
    )

    kernel: Literal["cosine", "exponential"] = "cosine"
    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    own: Annotated[float, Field(ge=0, le=1)] | None = None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the options, and that the server can store the clients' models; warn about negative weights.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the models are too large.
        """
        clients = len(run.federation.clients)
        notes = list(super().check(run))
        if self.kernel == "exponential" and self.alpha * (clients - 1) > self.sigma:
            notes.append(
                f"With fedamp:alpha={self.alpha:g} and sigma={self.sigma:g}, a client's own model can have a negative "
                f"weight in its mixture. Use alpha / sigma of at most 1 / {clients - 1}."
            )
        return tuple(notes)

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """``g + lam / alpha (w - u_k)``; no pull without a mixture."""
        if self.lam == 0 or not ctx.download:
            return grad_fn
        mixture = ctx.download["mixture"][0]

        def pulled(v: Tensor, batch: Batch) -> Tensor:
            return grad_fn(v, batch).add(v - mixture, alpha=self.lam / self.alpha)

        return pulled

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Create space for the clients' models, and a second mask of the known ones on the device of the models."""
        state = super().server_init(v, federation_info)
        return {**state, "mask": state["known"].to(v.device)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the mixture."""
        return {"mixture": (1, spec.size)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the mixture, if the models of the client and of another one are known."""
        known = state["known"].tolist()
        if client >= len(known) or not known[client] or sum(known) < 2:
            return {}
        return {"mixture": self.mixture_weights(state, torch.tensor([client])) @ state["models"]}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Store the models of the round."""
        new = super().server_update(state, updates)
        return {**new, "mask": new["known"].to(new["mask"].device)}

    def report(self, state: Tensors, plan: RoundPlan) -> Report:
        """Return the largest weight of another client's model; warn if none has any influence."""
        clients = state["known"].nonzero()[:, 0].tolist()
        if len(clients) < 2:
            return Report()
        weights = self.mixture_weights(state, torch.tensor(clients))
        weights[range(len(clients)), clients] = 0
        largest = float(weights.max())
        if largest < NEGLIGIBLE:
            warnings.warn(
                f"With fedamp:kernel={self.kernel} and sigma={self.sigma:g}, no client's model had a weight above "
                f"{NEGLIGIBLE:g} for another client, so each trained alone. Use kernel=cosine or a larger sigma.",
                stacklevel=2,
            )
        return Report({"largest_weight": largest})

    def mixture_weights(self, state: Tensors, clients: Tensor) -> Tensor:
        """Return the weights ``xi_kj`` of all clients' models in the mixtures of some clients, ``[m, K]``.

        Args:
            state: State of the server half, with at least two known models.
            clients: Numbers of the clients, whose models are known, ``[m]``.
        """
        models = state["models"]
        clients = clients.to(models.device)
        own = models[clients]
        others = state["mask"].repeat(len(clients), 1)
        others.scatter_(1, clients[:, None], False)
        if self.kernel == "exponential":
            distances = torch.cdist(own, models, compute_mode="donot_use_mm_for_euclid_dist").square()
            weights = torch.where(others, self.alpha / self.sigma * torch.exp(-distances / self.sigma), 0.0)
            return weights.scatter(1, clients[:, None], 1 - weights.sum(1, keepdim=True))
        norms = torch.linalg.vector_norm(models, dim=1).clamp_min(SMALLEST)
        cosines = own @ models.T / (norms[clients, None] * norms)
        counts = others.sum(1, keepdim=True).to(models)
        share = 1 / (1 + counts) if self.own is None else torch.full_like(counts, self.own)
        weights = (1 - share) * torch.softmax(torch.where(others, self.sigma * cosines, -torch.inf), dim=1)
        return weights.scatter(1, clients[:, None], share)
