"""HeteroFL and FedRolex: clients with less memory or compute train narrower parts of the global model.

- Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients", 2021,
  arXiv:2010.01264, Section 3, Equations 1 to 3.
- Alam, Liu, Yan, Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", 2022,
  arXiv:2212.01548, Equation 1 and Algorithm 1.

A client of rate ``r`` receives, trains and sends ``ceil(r n)`` of the ``n`` units (channels) of each hidden layer, all inputs
and all classes. In round ``t``, counted from 0, these are::

    HeteroFL  the units 0, 1, ..., ceil(r n) - 1
    FedRolex  the units t, t + 1, ..., t + ceil(r n) - 1   modulo n

Each entry of the model becomes the plain mean over the clients that trained it, and other entries do not change. In training,
the outputs of hidden layers are divided by ``r`` before normalization and activation, as large as those of the full model.
In classification, logits of classes that a client does not have are 0 in its loss (``mask_labels``). Evaluation uses the full
model.

The authors use rates from 1 to 1/16 and normalize by the statistics of the batch in training, by those of all clients' data
in evaluation. Here BatchNorm is evaluated with the mean running statistics of the clients with rate 1. The default rates
are larger than theirs: models without normalization diverge at rates far below 1/4. Their code also leaves the rows of absent
classes out of the mean, which would tell the server the classes of each client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.methods.logit_adjustment import LogitAdjustment
from unskew.methods.partial_sharing import PartialSharing
from unskew.models.execution import Batch, LossFn
from unskew.models.spec import ModelSpec, mask_slices, slices_mask
from unskew.protocol.federation_info import ClientDataView, FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Context, Method, Shape, Slices, Tensors, Weights
from unskew.protocol.run_context import PreRunContext

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class HeteroFL(LogitAdjustment, PartialSharing):
    """Sub-models of different width.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        rolling: Whether the units of a sub-model shift by one in every round.
        rates: Shares of the units, separated by slashes. Client ``k`` has rate number ``k`` modulo their count, so with
            three rates clients 0, 3, 6, ... train the full model. ``rates: 1`` is FedAvg.
        mask_labels: In classification, logits of classes that a client does not have are 0 in its loss.
    """

    name: ClassVar[str] = "heterofl"
    summary: ClassVar[str] = "clients train narrower parts of the model, always the first units"
    paper: ClassVar[str] = "Diao et al. 2021, arXiv:2010.01264"
    successive_models_differ: ClassVar[bool] = True
    needs = ("vector",)
    acts_last: ClassVar[bool] = True
    weights: ClassVar[Weights | None] = "uniform"
    rolling: ClassVar[bool] = False

    rates: str = "1/0.5/0.25"
    mask_labels: bool = True

    def __post_init__(self) -> None:
        """Validate the rates."""
        if not all(0 < rate <= 1 for rate in self.shares):
            raise ConfigError(
                f"{self.name}:rates={self.rates} is not valid: write numbers above 0 and at most 1, separated by slashes, "
                "such as 1/0.5/0.25."
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """Rates as numbers; NaN for text that is not a number."""
        numbers = []
        for text in self.rates.split("/"):
            try:
                numbers.append(float(text))
            except ValueError:
                numbers.append(math.nan)
        return tuple(numbers)

    @property
    def trains_sub_models(self) -> bool:
        """True if a client has a narrower model."""
        return min(self.shares) < 1

    @property
    def neutral(self) -> bool:
        """True if all logits stay in the loss."""
        return not self.mask_labels

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that all layers of the model can be narrowed.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If a layer is neither linear, a convolution nor BatchNorm, layers do not follow each other, or no
                client could send the statistics of BatchNorm.
        """
        submodel(run.spec, min(self.shares), 0)
        broken = break_in_sequence(run.spec) if self.trains_sub_models else None
        if broken is not None:
            raise ConfigError(
                f"Sub-models of different width need layers that follow each other, but {broken} gets something else than "
                "the outputs of the layer before it, unit by unit. Use mlp, cnn or another sequential model."
            )
        if sum(run.spec.buffer_sizes) and 1 not in self.shares:
            raise ConfigError(
                f"Only clients with the full model send the statistics of BatchNorm, but {self.name}:rates={self.rates} has "
                "no rate 1. Add it, or use a model without BatchNorm."
            )
        return ()

    def conflict_with(self, method: Method) -> str | None:
        """Reject what rules with a shared part or adjusted logits reject."""
        scaling = next((rule.name for rule in method.client if rule.scales_loss), None) if self.mask_labels else None
        if scaling is not None:
            return (
                f"{scaling} scales the cross-entropy that {self.name} replaces by that of masked logits. Set "
                f"coefficients=fixed of {scaling}, or mask_labels=false of {self.name}."
            )
        return PartialSharing.conflict_with(self, method) or LogitAdjustment.conflict_with(self, method)

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the client's training samples per class, if absent classes are masked; they stay at the client."""
        masks = self.mask_labels and "one_class" in data.task.provides
        return LogitAdjustment.client_info(self, data) if masks else {}

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Exchange the client's sub-model of the round in both directions."""
        part = submodel(spec, self.shares[client % len(self.shares)], round if self.rolling else 0)
        return part, part

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Store the rates."""
        return {"rates": v.new_tensor(self.shares)}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the rate."""
        return {"rate": ()}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the client's rate."""
        return {"rate": state["rates"][client % len(self.shares)]}

    def begin(self, ctx: Context) -> Tensors:
        """Return the factors of the parameters: 0 outside the sub-model, ``1 / r`` in hidden layers, 1 elsewhere."""
        assert ctx.received is not None, "sub-models are slices"
        inside = ctx.received.to(ctx.v_global)
        divided = divided_entries(ctx.spec).to(inside.device)
        return {"factors": torch.where(divided, inside / ctx.download["rate"], inside)}

    def adjust(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits with 0 for absent classes."""
        return torch.where(counts > 0, logits, 0.0)

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Evaluate the loss of the sub-model."""
        of_full_model = LogitAdjustment.loss(self, loss_fn, ctx, carry) if "counts" in ctx.client_info else loss_fn

        def narrow(v: Tensor, batch: Batch) -> Tensor:
            return of_full_model(v * carry["factors"], batch)

        return narrow


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """Sub-models of different width that roll over all units."""

    name: ClassVar[str] = "fedrolex"
    summary: ClassVar[str] = "clients train narrower parts of the model, which roll over all units"
    paper: ClassVar[str] = "Alam et al. 2022, arXiv:2212.01548"
    rolling: ClassVar[bool] = True


def units(width: int, rate: float, shift: int) -> Tensor:
    """Return the mask of the units that a sub-model has of a hidden layer, boolean ``[width]``.

    Args:
        width: Number of units ``n``.
        rate: Share of the units.
        shift: Number of the first unit, modulo the width.

    >>> units(5, 0.5, 3).tolist()
    [True, False, False, True, True]
    """
    mask = torch.zeros(width, dtype=torch.bool)
    mask[(shift + torch.arange(math.ceil(width * rate))) % width] = True
    return mask


@lru_cache(maxsize=16)
def divided_entries(spec: ModelSpec) -> Tensor:
    """Return the mask of the parameters of hidden layers without those of BatchNorm, boolean ``[d]``.

    Args:
        spec: Layout of the model.
    """
    modules = dict(spec.module.named_modules())
    plain = [not isinstance(modules[name.rpartition(".")[0]], NORM) for name in spec.names]
    hidden = torch.repeat_interleave(torch.tensor(plain), torch.tensor(spec.sizes))
    return hidden & ~slices_mask(spec.parts["head"], spec.size)


@lru_cache(maxsize=256)
def submodel(spec: ModelSpec, rate: float, shift: int) -> Slices:
    """Return the slices of a sub-model.

    Args:
        spec: Layout of the model.
        rate: Share of the units of each hidden layer.
        shift: Number of the first unit of each hidden layer, modulo its width.

    Raises:
        ConfigError: If a layer cannot be narrowed.
    """
    modules = dict(spec.module.named_modules())
    masks: dict[str, Tensor] = {}
    before: Tensor | None = None  # units of the layer before
    for name in spec.layers:
        layer = modules[name]
        if isinstance(layer, NORM):
            rows = torch.ones(layer.num_features, dtype=torch.bool) if before is None else before
            masks[f"{name}.weight"] = masks[f"{name}.bias"] = rows
            continue
        if not isinstance(layer, LAYERS) or getattr(layer, "groups", 1) != 1:
            raise ConfigError(
                f"Sub-models of different width need a model of linear layers, convolutions without groups and BatchNorm, "
                f"but {name} is a {type(layer).__name__}. Use mlp, cnn or another such model."
            )
        n_out, n_in = layer.weight.shape[:2]
        rows = units(n_out, 1.0 if name == spec.head_name else rate, shift)
        columns = torch.ones(n_in, dtype=torch.bool)
        if before is not None:
            if n_in % len(before):
                raise ConfigError(
                    f"Sub-models of different width need layers that follow each other, but {name} has {n_in} inputs and the "
                    f"layer before it {len(before)} outputs. Use mlp, cnn or another sequential model."
                )
            columns = before.repeat_interleave(n_in // len(before))  # a convolution's channels, flattened
        inside = rows[:, None] & columns[None, :]
        masks[f"{name}.weight"] = inside.view(n_out, n_in, *[1] * (layer.weight.dim() - 2)).expand_as(layer.weight)
        masks[f"{name}.bias"] = rows
        before = rows
    prefix = {name.removeprefix("."): mask for name, mask in masks.items()}
    mask = torch.cat([prefix[name].reshape(-1) for name in spec.names]) if spec.names else torch.zeros(0)
    return mask_slices(mask)


def break_in_sequence(spec: ModelSpec) -> str | None:
    """Return what does not only depend on the units of the layer before it: a layer, or the output of the model.

    In one pass, the output of each layer becomes a new variable. Gradients then show on which of them an input depends.

    Args:
        spec: Layout of a model that can be narrowed.

    Returns:
        The name of the layer, "the output of the model", or None if all layers follow each other.
    """
    modules = dict(spec.module.named_modules())
    inputs: list[tuple[str, Tensor]] = []
    outputs: list[Tensor] = []

    def cut(name: str, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        inputs.append((name, (*args, *kwargs.values())[0].movedim(unit_axis(name), 1)))
        outputs.append(output.detach().movedim(unit_axis(name), 1).requires_grad_())
        return outputs[-1].clone().movedim(1, unit_axis(name))  # a copy, which may be changed in place

    def unit_axis(name: str) -> int:
        return -1 if isinstance(modules[name], nn.Linear) else 1

    hooks = [
        modules[name].register_forward_hook(
            lambda _m, args, kwargs, output, name=name: cut(name, args, kwargs, output), with_kwargs=True
        )
        for name in spec.layers
    ]
    training = spec.module.training
    x = torch.arange(2 * math.prod(spec.shape)).sin().view(2, *spec.shape).to(spec.flatten()).requires_grad_()
    try:
        with torch.enable_grad():
            inputs.append(("the output of the model", spec.module.eval()(x.clone())))
    finally:
        spec.module.train(training)
        for hook in hooks:
            hook.remove()
    names = [name for name, _ in inputs]
    if spec.head_trains and spec.layers[-1] != spec.head_name:
        return names[-1]
    for number, (name, values) in enumerate(inputs):
        if names[: number + 1] != [*spec.layers, names[-1]][: number + 1]:
            return name  # a layer that is used twice
        if number and not follows(values, outputs[number - 1], [x, *outputs[: number - 1]], number == len(outputs)):
            return name
    return None


def follows(values: Tensor, before: Tensor, others: Sequence[Tensor], last: bool) -> bool:
    """Return whether the inputs of a layer depend only on the layer before it, unit by unit.

    Args:
        values: Inputs of the layer, or with ``last`` the outputs of the model.
        before: Outputs of the layer before it; units are along axis 1.
        others: Inputs of the model and outputs of earlier layers.
        last: Whether values may mix units.
    """
    counted = values
    if not last:
        odd = (torch.arange(before.shape[1]) % 2 == 1).repeat_interleave(values.shape[1] // before.shape[1])
        counted = values[:, ~odd]
    if not counted.requires_grad:
        return False
    slope, *rest = torch.autograd.grad(counted.sum(), [before, *others], retain_graph=True, allow_unused=True)
    return slope is not None and all(g is None for g in rest) and (last or not slope[:, 1::2].any())
