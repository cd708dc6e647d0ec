"""Shared bases of methods whose clients have models of their own and exchange something else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from unskew.autograd import grad_and_value
from unskew.errors import ConfigError
from unskew.models.execution import Batch
from unskew.models.spec import ModelSpec
from unskew.protocol.client_rule import Forward
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.rules import (
    ClientRule,
    Context,
    Method,
    ServerRule,
    Slices,
    SurveyTime,
    SyncRule,
    Tensors,
    Updates,
    Weights,
    WithServerHalf,
    changes_updates,
)
from unskew.protocol.run_context import PreRunContext
from unskew.seeding import fold, uniform

PURPOSE = 8
"""Separates the order of class means from other draws with the server's key."""


class OwnModels(ClientRule, SyncRule, ServerRule):
    """Base of methods in which every client has its own model, which starts from the initial model.

    Clients send no update of a common model; what they send instead is an upload.
    """

    weights: ClassVar[Weights | None] = "uniform"
    uploads: ClassVar[bool] = True
    sends_model: ClassVar[bool] = False
    trains_global_model: ClassVar[bool] = False
    averaging = "none"
    exchange: ClassVar[str]
    """Clause for warnings on the content of messages, such as "clients send ..."."""

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that need a common model, or that change updates."""
        for rule in method.client:
            if rule is self:
                continue
            if type(rule).server_update is not WithServerHalf.server_update or changes_updates((rule,)):
                return f"{rule.name} acts on the clients' updates, but with {self.name}, {self.exchange}."
            if rule.has_personal_model:
                return f"{rule.name} and {self.name} both define a client's personal model. Remove one of them."
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn about the global model, and tell what is exchanged instead."""
        return (
            f"With {self.name}, {self.exchange}. The global model stays the initial one, so read the personal metrics.",
        )

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Exchange no part of a common model. A client starts with the initial model."""
        return (), ()

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slice of the entire model."""
        return (slice(0, spec.size),)

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Leave the global model unchanged."""
        return state


class ClassMeans(OwnModels):
    """Base of methods whose clients send the mean feature of each of their classes."""

    needs: Collection[str] = ("one_class",)
    supports_several_models: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"present": (0.0, 1.0)}
    survey_at: ClassVar[SurveyTime | None] = "trained"

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the features of all architectures have one shape; warn about the global model.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the shapes differ.
        """
        shapes = [spec.feature_shape for spec in run.spec.architectures]
        if len(set(shapes)) > 1:
            raise ConfigError(
                f"{self.name} exchanges the mean features of classes, but the models have features (inputs of the head) of "
                f"different shapes: {', '.join(map(str, shapes))}. Set their widths in model_options, such as hidden of mlp."
            )
        return super().check(run)

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the client's number of samples per class, ``[C]``."""
        return {"counts": data.class_counts()}

    def survey(self, ctx: Context, v: Tensor, forward: Forward, batch: Batch) -> Tensors:
        """Return the sums of the features of each class, ``[C, f]``."""
        features = forward(v, batch.x).features.flatten(1)
        sums = features.new_zeros(len(ctx.client_info["counts"]), features.shape[1])
        return {"features": sums.index_add(0, batch.y, features)}

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload the mean of each class, and which classes the client has."""
        counts = ctx.client_info["counts"]
        ctx.upload["means"] = ctx.survey["features"] / counts.clamp_min(1)[:, None]
        ctx.upload["present"] = (counts > 0).to(counts.dtype)


def list_means(updates: Updates, name: str) -> tuple[Tensor, Tensor]:
    """Return the class means of all clients of a round, ``[n, f]``, and their classes, ``[n]``.

    Args:
        updates: Updates of the round; single ones are read.
        name: Name of the rule.
    """
    sent = [update.upload[name] for update in updates]
    present = torch.stack([tensors["present"] for tensors in sent]) > 0
    means = torch.stack([tensors["means"] for tensors in sent])
    return means[present], present.nonzero()[:, 1]


def train_on_means(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    values: Tensor,
    means: Tensor,
    classes: Tensor,
    key: Tensor,
    epochs: int,
    lr: float,
    batch: int,
) -> Tensor:
    """Return parameters after plain SGD on class means, in a new random order in every epoch.

    Args:
        loss: Function ``(values, means [B, f], classes [B]) -> scalar``.
        values: Parameters at first, ``[p]``.
        means: Class means, ``[n, f]``.
        classes: Their classes, ``[n]``.
        key: Random key of the server and round.
        epochs: Number of epochs.
        lr: Learning rate.
        batch: Number of class means per step.
    """
    slope = grad_and_value(loss)
    for epoch in range(epochs):
        order = uniform(fold(fold(key, PURPOSE), epoch), (len(classes),)).argsort(stable=True).to(classes.device)
        for part, labels in zip(torch.split(means[order], batch), torch.split(classes[order], batch), strict=True):
            values = values - lr * slope(values, part, labels)[0]
    return values
