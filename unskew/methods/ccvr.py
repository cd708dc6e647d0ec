"""CCVR: classifier calibration with virtual representations, once after the last round.

Luo, Chen, Hu, Zhang, Liang, Feng, "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID
Data", 2021, arXiv:2106.05001, Equations 3 to 5 and Algorithm 1, written with sums, so that secure aggregation can add them.
With features ``a`` of the final model's body, each client sends per class ``n_kc``, ``sum a`` and ``sum a a^T``::

    mu_c = sum_k sum a / n_c;    S_c = (sum_k sum a a^T - n_c mu_c mu_c^T) / (n_c - 1)
    train the head on ``samples`` draws from N(mu_c, S_c + ridge I) of each class; the body stays

Mean and covariance are those of the pooled features, whatever the split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from unskew.errors import ConfigError
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec
from unskew.protocol.payload import scatter_slices
from unskew.protocol.rules import (
    EVALUATED,
    ClientRule,
    Context,
    Forward,
    Method,
    SurveyTime,
    SyncRule,
    Tensors,
    Updates,
)
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range, one_of
from unskew.seeding import fold, normal, uniform

LARGE_UPLOAD = 10_000_000
"""Bytes of the sums of one client above which a warning is given."""


@dataclass(frozen=True)
class CCVR(ClientRule):
    """Head trained at the end on features drawn from the classes' normal distributions.

    Attributes:
        samples: Drawn features per class.
        epochs: Passes over the drawn features.
        lr: Learning rate of the head; by default that of the run.
        ridge: Variance added to each feature.
        cov: ``full`` covariance, or ``diagonal``, which sends less.
    """

    name: ClassVar[str] = "ccvr"
    summary: ClassVar[str] = "head retrained at the end on features drawn from class distributions"
    paper: ClassVar[str] = "Luo et al. 2021, arXiv:2106.05001"
    uploads: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"counts": (0.0, 1e38)}
    survey_at: ClassVar[SurveyTime | None] = "final"
    needs = ("one_class", "unweighted", "logits_of_head")
    spaces: ClassVar[Mapping[str, Space]] = {"lr": log_range(0.001, 0.1), "samples": one_of(100, 500, 2000)}
    idle_options = (({"epochs": 0}, ("samples", "lr", "ridge")),)

    samples: Annotated[int, Field(ge=1)] = 200
    epochs: Annotated[int, Field(ge=0)] = 10
    lr: Annotated[float, Field(gt=0)] | None = None
    ridge: Annotated[float, Field(gt=0)] = 1e-4
    cov: Literal["full", "diagonal"] = "full"

    def conflict_with(self, method: Method) -> str | None:
        """Reject methods whose clients keep parts of the model."""
        sync = method.sync
        if sync is not None and type(sync).local_slices is not SyncRule.local_slices:
            return f"ccvr calibrates one head for all clients, but with {sync.name} clients keep parts of the model."
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the head takes vectors.

        Args:
            run: Configuration, federation and model of the run.

        Returns:
            A warning if the sums of a client are large.

        Raises:
            ConfigError: If the head takes other inputs.
        """
        shape = run.spec.feature_shape
        if len(shape) != 1:
            raise ConfigError(
                f"ccvr draws feature vectors, but the head {run.spec.head_name!r} takes inputs of shape {shape}. Use a model "
                "whose head is a linear layer."
            )
        features = shape[0]
        numbers = run.federation.classes * (1 + features + (features**2 if self.cov == "full" else features))
        size = numbers * run.spec.flatten().element_size()
        if size > LARGE_UPLOAD:
            return (f"ccvr sends {size / 1e6:.0f} MB per client, once. With cov=diagonal it sends less.",)
        return ()

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return the number of samples, the sum of the features, and the sum of their products, per class."""
        features = forward(v, batch.x).features.to(torch.float64)
        one_hot = F.one_hot(batch.y, ctx.spec.classes).to(features)
        sums = {"counts": one_hot.sum(0), "features": one_hot.T @ features}
        if self.cov == "diagonal":
            return {**sums, "products": one_hot.T @ features.square()}
        products = features.new_zeros(ctx.spec.classes, features.shape[1], features.shape[1])
        for label in torch.unique(batch.y).tolist():
            own = features[batch.y == label]
            products[label] = own.T @ own
        return {**sums, "products": products}

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Send the sums, if this is the survey after the last round."""
        for name, tensor in ctx.survey.items():
            ctx.upload[name] = tensor.to(v.dtype)

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Calibrate the head with the sums of the survey; other rounds have none.

        Args:
            state: State before the round.
            updates: Updates of the round.
        """
        sums = updates.aggregate.upload.get(self.name)
        if not sums:
            return state
        mean, factor = class_distributions(sums, self.ridge)
        present = torch.nonzero(sums["counts"] > 0).flatten()
        noise = normal(updates.key, (len(present), self.samples, mean.shape[1])).to(mean)
        drawn = mean[present, None] + (noise * factor[present, None] if factor.dim() == 2 else noise @ factor[present])
        v, training = updates.v_global, updates.plan.training
        lr = training.lr if self.lr is None else self.lr
        features, labels = drawn.flatten(0, 1).to(v.dtype), present.repeat_interleave(self.samples)
        return {
            **state,
            EVALUATED: self.train_head(updates.spec, v, features, labels, lr, training.batch_size, updates.key),
        }

    def train_head(
        self, spec: ModelSpec, v: Tensor, features: Tensor, labels: Tensor, lr: float, batch_size: int, key: Tensor
    ) -> Tensor:
        """Return the model whose head was trained by SGD on features, ``[d]``.

        Args:
            spec: Layout of the model.
            v: Model before, ``[d]``.
            features: Features, ``[n, f]``.
            labels: Their classes, ``[n]``.
            lr: Learning rate.
            batch_size: Samples per step.
            key: Random key of the order.
        """
        head = spec.head_of(v).clone().requires_grad_()
        for epoch in range(self.epochs):
            order = uniform(fold(key, epoch + 1), (len(labels),)).argsort()
            for index in torch.split(order, batch_size):
                loss = F.cross_entropy(spec.head(head, features[index]), labels[index])
                (gradient,) = torch.autograd.grad(loss, head)
                with torch.no_grad():
                    head -= lr * gradient
        return scatter_slices(v.clone(), tuple(spec.parts["head"]), head.detach())


def class_distributions(sums: Tensors, ridge: float) -> tuple[Tensor, Tensor]:
    """Return mean and a factor of the covariance of each class, in float64.

    Args:
        sums: ``counts [C]``, ``features [C, f]`` and ``products``, ``[C, f, f]`` or, for a diagonal covariance, ``[C, f]``.
        ridge: Variance added to each feature.

    Returns:
        Means ``[C, f]``, and symmetric factors ``L [C, f, f]`` with ``L L = S + ridge I``, or standard deviations ``[C, f]``.
        Classes with one sample have only the ridge as variance; classes without samples have mean 0.
    """
    counts, total, products = (sums[name].to(torch.float64) for name in ("counts", "features", "products"))
    counts = counts.round()
    mean = total / counts.clamp_min(1)[:, None]
    divisor = (counts - 1).clamp_min(1)
    if products.dim() == 2:
        variance = (products - counts[:, None] * mean.square()) / divisor[:, None]
        return mean, (variance.clamp_min(0) + ridge).sqrt()
    outer = counts[:, None, None] * mean[:, :, None] * mean[:, None, :]
    covariance = (products - outer) / divisor[:, None, None]
    # Rounding may leave small negative eigenvalues, for example if there are fewer samples than features.
    values, vectors = torch.linalg.eigh((covariance + covariance.transpose(1, 2)) / 2)
    # The symmetric root does not depend on the choice of eigenvectors, so it changes little if the sums change little.
    return mean, (vectors * (values.clamp_min(0) + ridge).sqrt()[:, None, :]) @ vectors.transpose(1, 2)
