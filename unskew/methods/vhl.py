"""VHL: all clients also train on the same virtual set of noise, and align their features with it.

Tang, Zhang, Shi, He, Han, Chu, "Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated Learning",
2022, arXiv:2206.02465. Before the first round the server sends a labeled set of noise, with one cluster per class. A client
minimizes, on its own batch ``(x, y)`` and a virtual batch ``(x~, y~)``::

    CE(f(x), y) + virtual CE(f(x~), y~) + lam align(h(x), y, h(x~), y~)

``h`` are the features. The alignment is the supervised contrastive loss (Khosla et al. 2020, arXiv:2004.11362). Natural
features are the anchors. Virtual features, without gradient, are positives (same class) and negatives (other classes)::

    align = mean_i mean_{p: y~_p = y_i} -log( exp(cos(h_i, h_p)/T) / sum_j exp(cos(h_i, h_j)/T) )

It is used in the first ``align_epochs`` local epochs of each round. Virtual and natural batches use separate forward passes,
and the virtual pass does not change the normalization buffers. The virtual set cycles through the classes, so a virtual batch
of at least the number of classes contains every class. Anchors without positives are ignored.

For 8-bit data the virtual set is sent as 8-bit pixels, otherwise as 32-bit floats. Labels use the smallest integer type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.data.federation import take_rows
from unskew.data.normalization import Normalization
from unskew.errors import ConfigError
from unskew.generators.virtual.gaussian import gaussian_clusters
from unskew.generators.virtual.style import style_images
from unskew.models.execution import Batch, LossFn
from unskew.protocol.data_preparation import ServerPayload, smallest_integer_dtype
from unskew.protocol.federation_info import ClientDataView, FederationInfo
from unskew.protocol.rules import ClientRule, Context, DataRule, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import derive, fold, uniform
from unskew.tasks.classification import cross_entropy

NonNegative = Annotated[float, Field(ge=0)]
Whole = Annotated[int, Field(ge=1)]
PURPOSE = derive(0, "vhl client")


@dataclass(frozen=True)
class VHL(DataRule, ClientRule):
    """Virtual homogeneity learning.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        tasks_reason: Reason why other tasks are not supported: a clause that follows "because".
        source: Noise around a random center per class, for inputs of any shape; for images, on an 8 × 8 grid that is
            enlarged, as in the authors' code. ``style`` draws images from an untrained style-based generator, similar
            to a small StyleGAN2; each class is a cluster of its latents.
        per_class: Virtual inputs per class. The authors' scripts use 200 or 5000.
        lam: Strength of the alignment. ``lam=0,virtual=0`` is FedAvg.
        virtual: Weight of the cross-entropy on the virtual set.
        align_epochs: Number of local epochs at the start of each round with alignment. With few ``local_steps`` all steps
            have it.
        virtual_batch: Virtual inputs per step, or all if there are fewer.
        temperature: Temperature ``T`` of the alignment, as in the code of the supervised contrastive loss.
    """

    name: ClassVar[str] = "vhl"
    summary: ClassVar[str] = "aligns features with those of a shared labeled set of noise"
    paper: ClassVar[str] = "Tang et al. 2022, arXiv:2206.02465"
    class_targets: ClassVar[bool] = True
    # One decade on each side of the paper's 1.
    spaces: ClassVar[Mapping[str, Space]] = {"lam": log_range(0.1, 10.0)}
    needs = ("one_class", "unweighted")
    tasks_reason: ClassVar[str] = "it aligns the features of each sample with virtual samples of its class"
    idle_options = (({"lam": 0}, ("align_epochs", "temperature")),)

    source: Literal["gaussian", "style"] = "gaussian"
    per_class: Whole = 200
    lam: NonNegative = 1.0
    virtual: NonNegative = 1.0
    align_epochs: Annotated[int, Field(ge=0)] = 5
    virtual_batch: Whole = 128
    temperature: Annotated[float, Field(gt=0)] = 0.07

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the inputs.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the inputs are integers such as token ids, or ``source=style`` is used without images.
        """
        run.need_numbers(self.name)
        shape = run.federation.shape
        if self.source == "style" and len(shape) != 3:
            raise ConfigError(
                f"vhl:source=style generates images, but the inputs have shape {shape}. Use source=gaussian."
            )
        return ()

    def server_payload(self, sent: dict[int, Tensors], federation_info: FederationInfo, seed: int) -> ServerPayload:
        """Generate the virtual set, which is the same for all clients, on the scale of the data."""
        shape, classes = federation_info.shape, federation_info.classes
        y = torch.arange(self.per_class * classes) % classes
        key = torch.tensor(derive(seed, "virtual set"))
        x = (
            gaussian_clusters(key, y, shape)
            if self.source == "gaussian"
            else style_images(key, y, (shape[0], shape[1], shape[2]))
        )
        return ServerPayload(
            common={
                "x": encode_virtual_set(x, federation_info.normalization, federation_info.dtype),
                "y": smallest_integer_dtype(y, classes),
            }
        )

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return factor and offset of the input normalization."""
        factor, offset = virtual_normalizer(data.normalization, data.client.x.dim() - 1)
        return {"factor": factor.to(data.like.device), "offset": offset.to(data.like.device)}

    def begin(self, ctx: Context) -> Tensors:
        """Draw the client's first position in the virtual set."""
        chance = uniform(fold(ctx.key, PURPOSE), ()).to(torch.float64)
        return {"start": (chance * len(ctx.common["y"])).to(torch.int64)}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """``loss + virtual CE + lam align``."""
        lam = self.lam if self.align_epochs else 0.0
        if not lam and not self.virtual:
            return loss_fn
        total = len(ctx.common["y"])
        steps = torch.arange(min(self.virtual_batch, total), device=ctx.common["y"].device)
        aligned_steps = self.align_epochs * ctx.epoch_steps

        def homogenised(v: Tensor, batch: Batch) -> Tensor:
            at = (carry["start"] + batch.step * len(steps) + steps) % total
            x = take_rows(ctx.common["x"], at).to(v.dtype)
            x = x * ctx.client_info["factor"].to(v.dtype) + ctx.client_info["offset"].to(v.dtype)
            y = ctx.common["y"][at].to(torch.int64)
            # The natural pass comes last, because ``ctx.model`` stores one pass for the rules around this one.
            seen = ctx.model(v, x, False)
            loss = loss_fn(v, batch)
            if self.virtual:
                loss = loss + self.virtual * cross_entropy(seen.logits, y)
            if lam:
                z, anchor = ctx.model(v, batch.x, batch.track).features, seen.features.detach()
                z, anchor = z.flatten(1).to(v.dtype), anchor.flatten(1).to(v.dtype)
                distance = alignment_loss(z, batch.y, anchor, y, self.temperature)
                loss = loss + lam * (batch.step < aligned_steps).to(v.dtype) * distance
            return loss

        return homogenised


def alignment_loss(z: Tensor, y: Tensor, virtual: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Compute the supervised contrastive loss of anchors ``z [B, f]`` with the virtual features ``[V, f]``; a scalar.

    Args:
        z: Features of the batch, ``[B, f]``.
        y: Classes of the batch, ``[B]``.
        virtual: Features of the virtual set, ``[V, f]``.
        labels: Classes of the virtual set, ``[V]``.
        temperature: Temperature of the softmax.
    """
    cosines = F.normalize(z, dim=-1) @ F.normalize(virtual, dim=-1).T / temperature
    same = (y[:, None] == labels[None, :]).to(z.dtype)
    positives = same.sum(1)
    terms = -(same * F.log_softmax(cosines, dim=-1)).sum(1) / positives.clamp_min(1)
    return terms.sum() / (positives > 0).sum().clamp_min(1)


def encode_virtual_set(x: Tensor, normalization: Normalization | None, dtype: torch.dtype) -> Tensor:
    """Convert standardized inputs ``x [n, c, ...]`` to the scale of the data, as pixels for 8-bit data, otherwise floats.

    Without a normalization, pixels get mean 1/2 and standard deviation 1/4 of their range; other data are not scaled.

    Args:
        x: Standardized inputs, ``[n, c, ...]``.
        normalization: Normalization of the data, or None.
        dtype: Data type in which samples are stored.
    """
    pixels = dtype == torch.uint8
    if normalization is None and pixels:
        normalization = Normalization((0.5,), (0.25,), 1 / 255)
    if normalization is not None:
        factor, offset = virtual_normalizer(normalization, x.dim() - 1)
        x = (x - offset) / factor
    x = x.round().clamp(0, 255).to(torch.uint8) if pixels else x.float()
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if x.dim() == 4 else x


def virtual_normalizer(normalization: Normalization | None, dims: int) -> tuple[Tensor, Tensor]:
    """Return ``factor`` and ``offset`` that standardize inputs as engines do: ``x * factor + offset``.

    Args:
        normalization: Normalization of the data, or None.
        dims: Number of axes of one input, including channels.
    """
    if normalization is None:
        return torch.ones(()), torch.zeros(())
    mean, std = (torch.tensor(t, dtype=torch.float64) for t in (normalization.mean, normalization.std))
    shape = (-1,) + (1,) * (dims - 1)
    return (normalization.scale / std).view(shape), (-mean / std).view(shape)
