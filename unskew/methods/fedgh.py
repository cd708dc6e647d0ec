"""FedGH: clients send class means and no model, and the server trains a common head on them.

Yi, Wang, Liu, Shi, Yu, "FedGH: Heterogeneous Federated Learning with Generalized Global Header", 2023, arXiv:2303.13137. With
the mean feature ``m_kc`` of the samples of class ``c`` at client ``k``, and the common head ``h``::

    client:  (phi_k, h_k): local training from its own body phi_k and the received head h;  sends m_kc
    server:  SGD over all (m_kc, c):  CE(h(m_kc), c)            starts from the last h

In the authors' code, the optimizer contains the parameters of a client instead of those of ``h``, which never changes
(``FedGH.py``); in HtFLlib it is trained. ``lr`` is that of both, ``epochs`` and ``batch`` are those of HtFLlib (its
option for clients' batches). The authors take one pass in the order of the clients and clip gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.own_models import ClassMeans, list_means, train_on_means
from unskew.models.spec import ModelSpec
from unskew.protocol.payload import slices_length
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import START, Context, Shape, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class FedGH(ClassMeans):
    """A head that the server trains on class means.

    Attributes:
        epochs: Epochs of the server's training in each round. With 0, the head is the initial one in every round.
        lr: Learning rate of the server's training.
        batch: Number of class means in each step of the server's training.
    """

    name: ClassVar[str] = "fedgh"
    summary: ClassVar[str] = "own bodies, under a head that the server trains on class means"
    paper: ClassVar[str] = "Yi et al. 2023, arXiv:2303.13137"
    changes_start: ClassVar[bool] = True
    exchange: ClassVar[str] = (
        "clients send the mean features of their classes and receive a head that the server trains on them"
    )
    needs = ("one_class", "unweighted", "individual", "logits_of_head")
    # One decade on each side of the authors' 0.01.
    spaces: ClassVar[Mapping[str, Space]] = {"lr": log_range(1e-3, 0.1)}
    idle_options = (({"epochs": 0}, ("lr", "batch")),)

    epochs: Annotated[int, Field(ge=0)] = 100
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    batch: Annotated[int, Field(ge=1)] = 10

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the head is trained, and that it has one shape.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the head is frozen, or the heads of several architectures differ.
        """
        for spec in run.spec.architectures:
            if not spec.head_trains:
                raise ConfigError(f"fedgh trains the head of the model, but {spec.head_name!r} is frozen. Unfreeze it.")
        notes = super().check(run)
        shapes = [list(spec.head_shapes.values()) for spec in run.spec.architectures]
        if any(shape != shapes[0] for shape in shapes):
            raise ConfigError(
                f"fedgh gives all clients one head, but the heads of the models have parameters of different shapes: "
                f"{', '.join(map(str, shapes))}. Use models with equal heads."
            )
        return notes

    def begin(self, ctx: Context) -> Tensors:
        """Start from the own body and the received head."""
        if not ctx.download:
            return {}
        device = ctx.v_global.device
        index = torch.cat([torch.arange(part.start, part.stop, device=device) for part in ctx.spec.parts["head"]])
        return {START: ctx.v_global.scatter(0, index, ctx.download["head"][0])}

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shape of the head."""
        return {"head": (1, slices_length(tuple(spec.parts["head"]), spec.size))}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the head, ``[1, h]``: of vectors as long as the model only the exchanged slices are sent."""
        return {"head": state["head"][None]} if state else {}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Train the head on the class means of the round; the first time, the head of the initial model."""
        spec = updates.spec
        head = state["head"] if state else spec.head_of(updates.v_global)

        def loss(values: Tensor, means: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(spec.head(values, means.view(-1, *spec.feature_shape)), labels)

        means, labels = list_means(updates, self.name)
        return {"head": train_on_means(loss, head, means, labels, updates.key, self.epochs, self.lr, self.batch)}
