"""FedFomo: each client mixes other clients' models, with weights that its validation samples decide.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization", 2021,
arXiv:2012.08565. Client ``k`` has its own model ``theta_k`` and receives the last models of some others. With its loss
``L_k`` on validation samples, which it does not train on, and a baseline ``theta_b``::

    gain_j  = (L_k(theta_b) - L_k(theta_j)) / ||theta_j - theta_b||       w_j = max(0, gain_j)
    theta_k <- sum_j w_j theta_j / sum_j w_j      unchanged if all w_j are 0;    then local training
    server:  P_kj <- P_kj + gain_j;   the client next receives the models with the largest P_kj

With ``baseline=last``, ``theta_b`` is the model that the client's last training started from, so ``theta_k`` itself is one of
the mixed models. With ``baseline=current``, ``theta_b`` is ``theta_k``, which has no weight once another model is better.

Ties of ``P_kj``, which starts as 0, are broken at random. In the authors' code (NVlabs/FedFomo), clients receive 4 or 9
models and validate on a share of 0.2. The baseline is the client's first model, the distance the L1 norm, and models are
drawn at random with a probability of 0.3, which decreases by 0.05 in each round. FL-bench and PFLlib use 5 models and the L2
norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.methods.stored_models import StoredModels
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec
from unskew.protocol.client_rule import Forward
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import START, Context, Shape, SurveyTime, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, one_of
from unskew.seeding import fold, uniform

PURPOSE = 12
"""Separates the draws of models from other draws with the server's key."""

ROUNDINGS = 8
"""Distance to the baseline up to which a model counts as equal to it, in machine epsilons times the baseline's norm."""


@dataclass(frozen=True)
class FedFomo(StoredModels):
    """Mixtures of other clients' models, weighted by the loss on validation samples.

    Attributes:
        models: Number of other clients' models that a client receives in a round; all if there are fewer.
        validation: Share of a client's training samples that only decide the weights.
        baseline: Model that others are compared with: the one that the client's last training started from (``last``), or
            the client's own (``current``).
        explore: Probability of a received model to be drawn at random instead of by its gains so far.
    """

    name: ClassVar[str] = "fedfomo"
    summary: ClassVar[str] = "own models, mixed from other clients' models by their loss on validation samples"
    paper: ClassVar[str] = "Zhang et al. 2021, arXiv:2012.08565"
    changes_start: ClassVar[bool] = True
    exchange: ClassVar[str] = "clients send their own models to the server and receive models of other clients"
    survey_at: ClassVar[SurveyTime | None] = "received"
    # Around the numbers of models in the paper's experiments.
    spaces: ClassVar[Mapping[str, Space]] = {"models": one_of(2, 5, 10)}

    models: Annotated[int, Field(ge=1)] = 5
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2
    baseline: Literal["last", "current"] = "last"
    explore: Annotated[float, Field(ge=0, le=1)] = 0.0

    def numbers_per_client(self, size: int, clients: int) -> int:
        """Return how many numbers the server stores per client: a model, and the gains of others' models."""
        return size + clients

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if rows of one group can be both in batches and in the validation samples."""
        notes = super().check(run)
        if run.split_group is None:
            return notes
        return (
            *notes,
            f"fedfomo draws its validation samples by row, so rows of one {run.split_group} (split_by) can be both in "
            "batches and in the validation samples, which then prefer the client's own model. Held-out samples are not "
            "affected.",
        )

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def candidates(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the baseline, ``[d]``, and the models to mix, of which those of other clients are the last ones."""
        if self.baseline == "current":
            return ctx.v_global, ctx.download["models"]
        return ctx.state.get("start", ctx.v_global), torch.cat([ctx.v_global[None], ctx.download["models"]])

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return the sums of the losses of the baseline and the models to mix, and the number of predictions."""
        if not ctx.download:
            return {}
        baseline, models = self.candidates(ctx)
        predictions = ctx.task.predictions(batch.y)
        losses = [ctx.task.losses(forward(model, batch.x).logits, batch.y) for model in (baseline, *models)]
        sums = [(own * predictions.to(own.dtype)).sum() for own in losses]
        return {"loss": torch.stack(sums), "count": predictions.sum().to(v.dtype)}

    def begin(self, ctx: Context) -> Tensors:
        """Start from the mixture; return the gains of the other clients' models."""
        if not ctx.download:
            return {}
        baseline, models = self.candidates(ctx)
        loss = ctx.survey["loss"] / ctx.survey["count"].clamp_min(1)
        distances = torch.linalg.vector_norm(models - baseline, dim=1)
        gains = (loss[0] - loss[1:]) / distances
        # The gain of a model that differs from the baseline only by rounding would be noise divided by noise.
        rounding = ROUNDINGS * torch.finfo(baseline.dtype).eps * torch.linalg.vector_norm(baseline)
        gains = torch.where(gains.isfinite() & (distances > rounding), gains, 0.0)  # not finite: a model that diverged
        weights = gains.clamp_min(0)
        total = weights.sum()
        mixture = (weights / torch.where(total > 0, total, 1.0)) @ models
        others = len(ctx.download["models"])
        return {START: torch.where(total > 0, mixture, ctx.v_global), "gains": gains[-others:]}

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload the model and the gains of other models; store the model that training started from as a baseline."""
        super().end(ctx, carry, v)
        if "gains" in carry:
            ctx.upload["gains"] = carry["gains"]
        if self.baseline == "last":
            ctx.state["start"] = ctx.v_global

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Create space for the clients' models, the sums of gains, ``[K, K]``, and the key of random choices."""
        clients = federation_info.clients
        gains, key = torch.zeros(clients, clients, dtype=v.dtype), torch.tensor(0)
        return {**super().server_init(v, federation_info), "gains": gains, "key": key}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the models: at most ``models``, because a client reports losses of each."""
        return {"models": (range(1, self.models + 1), spec.size)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the models of the other clients with the largest gains."""
        chosen = self.chosen(state, client)
        return {"models": state["models"][chosen]} if len(chosen) else {}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Store the models of the round, and add the gains of those that were sent."""
        new = super().server_update(state, updates)
        for update in updates:
            if "gains" in (sent := update.upload[self.name]):
                new["gains"][update.client, self.chosen(state, update.client)] += sent["gains"].to(new["gains"])
        return {**new, "key": updates.key}

    def chosen(self, state: Tensors, client: int) -> Tensor:
        """Return the clients whose models a client receives, at most ``models``; it depends only on the state.

        Args:
            state: State of the server half.
            client: Client number.
        """
        known = state["known"].clone()
        if client >= len(known):
            return torch.empty(0, dtype=torch.int64)
        known[client] = False
        others = known.nonzero()[:, 0]
        key = fold(fold(state["key"].cpu(), PURPOSE), client)
        others = others[uniform(fold(key, 0), (len(others),)).argsort(stable=True)]
        at_random = int((uniform(fold(key, 1), (self.models,)) < self.explore).sum())
        first, rest = others[:at_random], others[at_random:]
        best = state["gains"][client][rest].argsort(descending=True, stable=True)
        return torch.cat([first, rest[best]])[: self.models]
