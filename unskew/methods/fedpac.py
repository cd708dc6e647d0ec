"""FedPAC: features aligned with common class means, and for each client a mixture of all heads.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", 2023,
arXiv:2306.11867. Client ``k`` receives the body, its mixture ``h_k`` of heads and the class means ``m_c``. Over its ``n_k``
samples with features ``a`` in the received body, of which ``n_kc`` have class ``c`` and the mean ``mu_kc``::

    H_kc = n_kc mu_kc / n_k;    V_k = (mean ||a||^2 - ||H_k||^2) / n_k
    trains first h_k, then the body on CE + lam MSE(a, m_y);      m_y = mu_ky for classes without a received mean
    sends body, h_k, H_k, V_k and the class means m_kc of its trained body
    server:  m_c <- sum_k n_kc m_kc / sum_k n_kc
             alpha_k = argmin  sum_j alpha_j^2 V_j + ||H_k - sum_j alpha_j H_j||^2,   alpha_j >= 0,  sum_j alpha_j = 1
             h_k <- sum_j alpha_kj h_j

The second term of the loss starts in the second round. Weights below 1e-3 are set to 0, as in the authors' code
(``tools.py`` of JianXu95/FedPAC), which also drops eigenvalues of the matrix below 0.01 if rounding has made one negative.
Here the program is solved as a non-negative least-squares problem, which is exact: because the weights add up to 1, the
objective is ``||B alpha||^2`` with ``B`` the square roots of ``V`` above the columns ``H_j - H_k``. The minimum of
``||B x||^2 + (sum x - 1)^2`` over ``x >= 0`` is a multiple of ``alpha_k``.

A client that takes part again starts from its last mixture, and that mixture serves it after the last round. The authors
train the head for one epoch and the body for five, hence ``head_share=1/6``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.fedrep import FedRep
from unskew.models.execution import Batch, GradFn, LossFn
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.client_rule import Forward
from unskew.protocol.federation_info import ClientDataView, FederationInfo
from unskew.protocol.payload import slices_length
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import START, Context, Shape, SurveyTime, Tensors, Updates, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.protocol.updates import nonzero_divisors

LEAST = 1e-3
"""Weights below are set to 0."""
MOST_BYTES = 4e9
"""Largest size of the mixtures at the server."""


@dataclass(frozen=True)
class FedPAC(FedRep):
    """Shared body with aligned features, and a mixture of heads per client.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        head_share: Share of the local steps that train the head, before those of the body. The default is one epoch of
            six, as in the authors' code.
        lam: Strength of the pull of features towards the mean of their class; 0 removes it.
        mixing: Mix the heads of the round's clients. Otherwise each client keeps its own one, as with ``fedrep``.
        head_lr: Learning rate of the head; none for that of the run. The authors use 0.1, and 0.01 for the body. It needs
            SGD without weight decay and clipping.
    """

    name: ClassVar[str] = "fedpac"
    summary: ClassVar[str] = "a shared body with common class means, and a mixture of heads for each client"
    paper: ClassVar[str] = "Xu et al. 2023, arXiv:2306.11867"
    class_targets: ClassVar[bool] = True
    changes_start: ClassVar[bool] = True
    needs = ("one_class", "vector", "individual", "final_training")
    weights: ClassVar[Weights | None] = None
    uploads: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"counts": (0.0, 1e38), "variance": (0.0, 1e38)}
    final_steps: ClassVar[int | None] = 0
    survey_at: ClassVar[SurveyTime | tuple[SurveyTime, ...] | None] = ("received", "trained")
    # One decade on each side of the authors' 1.
    spaces: ClassVar[Mapping[str, Space]] = {"lam": log_range(0.1, 10.0)}

    head_share: Annotated[float, Field(ge=0, le=1)] = 1 / 6
    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    mixing: bool = True
    head_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    # ---- before the run -------------------------------------------------------------------------------------------------

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the server can store the mixtures, and that the optimizer supports ``head_lr``."""
        head = sum(part.stop - part.start for part in run.spec.parts["head"])
        needed = run.spec.dtype.itemsize * head * len(run.federation.clients)
        if needed > MOST_BYTES:
            raise ConfigError(
                f"fedpac stores a head for each client at the server, which needs {needed / 1e9:.0f} GB here. Use fewer "
                "clients or a smaller head."
            )
        training = run.training
        scales = training.optimizer == "sgd" and not training.weight_decay and training.clip_grad_norm is None
        if self.head_lr is not None and not scales:
            raise ConfigError(
                f"fedpac:head_lr={self.head_lr:g} scales the gradient of the head, which is a learning rate only with SGD "
                "without weight_decay and clip_grad_norm. Remove one of these options."
            )
        return super().check(run)

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the client's number of samples per class, ``[C]``."""
        return {"counts": data.class_counts()}

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return the sums of the features of each class, ``[C, f]``, and in the received body that of their squares."""
        if ctx.final:
            return {}
        features = forward(v, batch.x).features
        sums = features.new_zeros(len(ctx.client_info["counts"]), features.shape[1])
        own = {"features": sums.index_add(0, batch.y, features)}
        return own if ctx.survey else {**own, "squares": features.square().sum()}

    def begin(self, ctx: Context) -> Tensors:
        """Start from the mixture of heads; compute ``H_k``, ``V_k`` and the goals of the features."""
        carry: Tensors = {}
        if "head" in ctx.download:
            entries = slices_mask(ctx.spec.parts["head"], ctx.spec.size).nonzero()[:, 0].to(ctx.v_global.device)
            carry[START] = ctx.v_global.scatter(0, entries, ctx.download["head"])
        if ctx.final:
            return carry
        counts, sums = ctx.client_info["counts"], ctx.survey["features"]
        n = counts.sum()
        shares = sums / n
        variance = ((ctx.survey["squares"] / n - shares.square().sum()) / n).clamp_min(0)
        carry |= {**super().begin(ctx), "shares": shares, "variance": variance}
        if "means" in ctx.download:
            own = sums / nonzero_divisors(counts)[:, None]
            carry["goals"] = torch.where(ctx.download["known"][:, None] > 0, ctx.download["means"], own)
        return carry

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Add ``lam MSE(a, m_y)``."""
        if self.lam == 0 or "goals" not in carry:
            return loss_fn

        def aligned(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            features = ctx.model(v, batch.x, batch.track).features.to(v.dtype)
            return loss + self.lam * (features - carry["goals"][batch.y]).square().mean()

        return aligned

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Scale the gradient of the head to its learning rate."""
        if self.head_lr is None or ctx.final:
            return grad_fn
        scale = self.head_lr / ctx.training.lr

        def scaled(v: Tensor, batch: Batch) -> Tensor:
            g = grad_fn(v, batch)
            return torch.where(carry["head"], scale * g, g)

        return scaled

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload the head, ``H_k``, ``V_k``, the class means and the number of samples of each class."""
        if ctx.final:
            return
        counts = ctx.client_info["counts"]
        ctx.upload["head"] = ctx.spec.head_of(v)
        ctx.upload["shares"], ctx.upload["variance"] = carry["shares"], carry["variance"]
        ctx.upload["means"] = ctx.survey["features"] / nonzero_divisors(counts)[:, None]
        ctx.upload["counts"] = counts

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Store the number of clients."""
        return {"clients": torch.tensor(federation_info.clients)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shapes of the head, the class means and the mask of known ones."""
        head = slices_length(tuple(spec.parts["head"]), spec.size)
        return {"head": (head,), "means": (spec.classes, *spec.feature_shape), "known": (spec.classes,)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the client's mixture of heads, the class means, and which of them are known, after the first round."""
        if "heads" not in state:
            return {}
        # The last row is for clients that are not in the federation.
        head = state["heads"][min(client, len(state["heads"]) - 1)]
        return {"head": head, "means": state["means"], "known": state["known"]}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Average the class means, and mix the heads of the clients of the round."""
        clients = [update.client for update in updates]
        sent = [update.upload[self.name] for update in updates]
        stacked = {name: torch.stack([upload[name] for upload in sent]) for name in sent[0]}
        n = stacked["counts"].sum(0)
        means = (stacked["counts"][:, :, None] * stacked["means"]).sum(0) / nonzero_divisors(n)[:, None]
        known = (n > 0).to(means.dtype)
        if "heads" in state:
            means = torch.where(n[:, None] > 0, means, state["means"])
            known, heads = torch.maximum(known, state["known"]), state["heads"].clone()
        else:
            heads = updates.spec.head_of(updates.v_global).repeat(int(state["clients"]) + 1, 1)
        mixed = stacked["head"]
        if self.mixing:
            alpha = mixing_weights(stacked["shares"].flatten(1).double().cpu(), stacked["variance"].double().cpu())
            mixed = alpha.to(mixed) @ mixed
        heads[clients] = mixed
        return {**state, "heads": heads, "means": means, "known": known}


def mixing_weights(shares: Tensor, variances: Tensor) -> Tensor:
    """Return the weights ``alpha_kj`` of client ``j``'s head in the mixture of client ``k``, ``[m, m]``.

    Args:
        shares: ``H_k`` of each client, float64 ``[m, n]``.
        variances: ``V_k`` of each client, float64 ``[m]``, not negative.
    """
    from scipy.optimize import nnls

    m = len(variances)
    # Distances between the columns are those between the columns of the triangular factor.
    columns, v = torch.linalg.qr(shares.T, mode="r").R.numpy(), variances.numpy()
    alpha = np.eye(m)
    for k in np.flatnonzero(v):  # a client without variance keeps its own head
        objective = np.vstack([np.diag(np.sqrt(v)), columns - columns[:, k : k + 1]]) / np.sqrt(v[k])
        x, _ = nnls(np.vstack([objective, np.ones(m)]), np.eye(len(objective) + 1)[-1], maxiter=100 * m)
        x /= x.sum()
        x[x < LEAST] = 0
        alpha[k] = x / x.sum()
    return torch.from_numpy(alpha)
