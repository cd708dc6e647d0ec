"""FedDM: clients send a few learned images that represent their data near the global model; the server trains on them.

Xiong, Wang, Cheng, Yu, Hsieh, "FedDM: Iterative Distribution Matching for Communication-Efficient Federated Learning", 2022,
arXiv:2207.09653. A client stores ``images`` synthetic inputs for each of its classes. In each local step it draws a model
near the global one, ``theta' = theta^t + clip(eps, rho)``, where ``eps ~ N(0, spread^2 I)`` is scaled down to norm ``rho`` if
it is longer. Then it takes a gradient step with learning rate ``image_lr`` on the synthetic inputs for::

    sum_c || mean h(real_c) - mean h(made_c) ||^2 + || mean f(real_c) - mean f(made_c) ||^2

``h`` are the features, ``f`` the logits and ``c`` the classes in the mini-batch. Models are in eval mode, with the broadcast
buffers. The client keeps the images for the next round, and uploads them with their labels instead of a model. The server
trains on the union of all images with cross-entropy, and projects the model to the ball of radius ``rho`` around ``theta^t``
after every step.

The run's local budget gives the number of steps on the images: the paper uses about 1000 with batches of 256,
``local_steps: 1000``. Its batches contain samples of a single class; here the run's mini-batches are split by class. Images
are sent as 32-bit floats on the scale of the model's inputs, and labels in one byte each (two for more than 256 classes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError, UnskewError
from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.rules import ClientRule, Context, Method, ServerRule, Tensors, Updates, UploadContext
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import derive, fold, normal

Positive = Annotated[float, Field(gt=0)]
Whole = Annotated[int, Field(ge=1)]
PURPOSE = derive(0, "feddm client")
AVERAGED = 10
"""Number of real inputs per average with ``start="average"``."""


@dataclass(frozen=True)
class FedDM(ClientRule, ServerRule):
    """Distribution matching around the global model.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        sends_model: False, because clients send only their images.
        tasks_reason: Reason why other tasks are not supported: a clause that follows "because".
        images: Synthetic inputs for each class of a client.
        start: Initialize images with ``real`` inputs of the class, the ``average`` of ten of them, or ``noise``.
        image_lr: Learning rate on the images. The paper's 1 is for networks with normalization; it is too large for
            models whose outputs grow. On the digits with CNN-A, the images become non-finite in the second round and
            the updates are skipped with a warning; 0.1 or less works there.
        rho: Radius around the global model, at clients and at the server.
        spread: Standard deviation of the perturbation ``ε`` before it is scaled down.
        server_epochs: Passes over the union of the images.
        server_lr: Learning rate of the server's SGD.
        server_momentum: Momentum of the server's SGD; our choice.
        server_batch: Batch size of the server's SGD; our choice.
    """

    name: ClassVar[str] = "feddm"
    summary: ClassVar[str] = "clients send learned images, the server trains on them"
    paper: ClassVar[str] = "Xiong et al. 2022, arXiv:2207.09653"
    averaging = "none"
    supports_delays: ClassVar[bool] = False
    uploads: ClassVar[bool] = True
    # One decade on each side of the paper's 1 and 0.01.
    spaces: ClassVar[Mapping[str, Space]] = {"image_lr": log_range(0.1, 10.0), "server_lr": log_range(1e-3, 0.1)}
    needs = ("one_class", "unweighted", "individual")
    sends_model: ClassVar[bool] = False
    tasks_reason: ClassVar[str] = "each of its images has one class"

    images: Whole = 10
    start: Literal["real", "average", "noise"] = "real"
    image_lr: Positive = 1.0
    rho: Positive = 5.0
    spread: Positive = 1.0
    server_epochs: Whole = 500
    server_lr: Positive = 0.01
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    server_batch: Whole = 256

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return a mask of the client's classes ``[C]``, and real inputs for initial images ``[C, n, ...]``."""
        count = {"real": self.images, "average": self.images * AVERAGED, "noise": 0}[self.start]
        present = (data.class_counts() > 0).to(data.like.dtype)
        return {"present": present, "exemplars": data.exemplars(count)} if count else {"present": present}

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that act on local models, because feddm's clients train none."""
        other = next((rule.name for rule in method.client if rule.name != self.name), None)
        other = other or (method.sync.name if method.sync is not None else None)
        return f"feddm's clients send images and do not train a model, so {other} has no effect." if other else None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the data.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the inputs are integers such as token ids.
        """
        if run.federation.test[0].dtype == torch.int64:
            raise ConfigError(
                "feddm learns inputs by gradient descent, but the inputs are integers such as token ids. Use another method."
            )
        return ()

    # ---- at a client ----------------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> Tensors:
        """Load or initialize the client's images ``x [C, images, ...]``, with the mask of its classes ``[C]``."""
        present = ctx.client_info["present"]
        if "x" in ctx.state:
            return {"x": ctx.state["x"], "present": present}
        size = (ctx.spec.classes, self.images)
        if self.start == "noise":
            x = normal(fold(ctx.key, PURPOSE), (*size, *ctx.spec.shape)).to(ctx.v_global.dtype)
        else:
            x = ctx.client_info["exemplars"].reshape(*size, -1, *ctx.spec.shape).mean(2)
        return {"x": x, "present": present}

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Take a step on the images, and return zero as the gradient of the model."""

        def matched(v: Tensor, batch: Batch) -> Tensor:
            noise = normal(fold(fold(ctx.key, PURPOSE), batch.step), (len(v),)).to(v.dtype)
            near = ctx.v_global + shortened(self.spread * noise, self.rho)
            slope, value = torch.func.grad_and_value(
                lambda x: self.distance(ctx, near, batch.x, batch.y, x, carry["present"])
            )(carry["x"])
            carry["x"] = carry["x"] - self.image_lr * slope
            ctx.model.loss = value.detach()
            return torch.zeros_like(v)

        return matched

    def distance(self, ctx: Context, v: Tensor, x: Tensor, y: Tensor, synthetic: Tensor, present: Tensor) -> Tensor:
        """Compute the distance of the images' class means from those of a batch.

        Args:
            ctx: Context of the client in this round.
            v: Parameters of the model that computes features and logits, ``[d]``.
            x: Real inputs, ``[B, ...]``.
            y: Classes of the real inputs, ``[B]``.
            synthetic: Synthetic images, ``[C, images, ...]``.
            present: Mask of the client's classes, ``[C]`` of 0 and 1.
        """
        classes = ctx.spec.classes
        real = ctx.spec.forward(v, ctx.b_global, x)
        ours = ctx.spec.forward(v, ctx.b_global, synthetic.flatten(0, 1))
        onehot = (y[:, None] == torch.arange(classes, device=y.device)).to(v.dtype)
        counts = onehot.sum(0)
        known = present * (counts > 0)
        total = v.new_zeros(())
        for real_values, own in ((real.features, ours.features), (real.logits, ours.logits)):
            theirs_mean = onehot.T @ real_values.flatten(1) / counts.clamp_min(1)[:, None]
            own_mean = own.reshape(classes, self.images, -1).mean(1)
            total = total + (known * (theirs_mean - own_mean).square().sum(1)).sum()
        return total

    def trainable_mask(self, ctx: Context, carry: Tensors, batch: Batch) -> Tensor | None:
        """Return a mask that freezes all parameters, for any optimizer."""
        return torch.zeros_like(ctx.v_global, dtype=torch.bool)

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store and upload the images."""
        ctx.state["x"] = carry["x"]
        ctx.upload.update(x=carry["x"], present=carry["present"])

    def encode(self, payload: Tensors, state: Tensors, ctx: UploadContext) -> tuple[Tensors, Tensors]:
        """Send the images and labels of the client's classes, and no update."""
        present = payload[f"{self.name}/present"]
        which = torch.nonzero(present)[:, 0]
        small = torch.uint8 if len(present) <= 256 else torch.int16
        x = payload[f"{self.name}/x"][which].flatten(0, 1).to(torch.float32)
        y = which.repeat_interleave(self.images).to(small)
        return {f"{self.name}/x": x, f"{self.name}/y": y}, state

    # ---- at the server --------------------------------------------------------------------------------------------------

    def check_sent(self, sent: Tensors, like: Tensors | None, spec: ModelSpec) -> None:
        """Validate images and labels, whose number depends on the classes of the client."""
        y = sent.get("y", torch.zeros(0))
        if y.dim() != 1 or not 0 < len(y) <= spec.classes * self.images or not ((y >= 0) & (y < spec.classes)).all():
            raise UnskewError("The labels of feddm are invalid.")
        expected = {name: t[:1].expand(len(y), *t.shape[1:]) for name, t in (like or {}).items()}
        super().check_sent(sent, expected, spec)

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Train on all images, within the ball around the broadcast model."""
        sent = [update.upload[self.name] for update in updates]
        v = state["v"]
        trained = updates.at_server.train(
            v,
            updates.b_global,
            updates.key,
            x=torch.cat([images["x"] for images in sent]).to(v.dtype),
            y=torch.cat([images["y"] for images in sent]).to(torch.int64),
            loss=F.cross_entropy,
            ready=True,
            after=lambda new: v + shortened(new - v, self.rho),
            local_epochs=self.server_epochs,
            batch_size=self.server_batch,
            drop_last=False,
            optimizer="sgd",
            lr=self.server_lr,
            momentum=self.server_momentum,
            nesterov=False,
            weight_decay=0.0,
            clip_grad_norm=None,
            augment=False,
        )
        return {"v": trained.v, "b": trained.b}


def shortened(vector: Tensor, radius: float) -> Tensor:
    """Scale a vector down to norm ``radius`` if it is longer.

    Args:
        vector: Vector to scale.
        radius: Maximum norm.
    """
    factor: Tensor = (radius / torch.linalg.vector_norm(vector).clamp_min(1e-30)).clamp_max(1.0)
    return vector * factor
