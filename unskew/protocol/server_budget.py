"""Server rule with a budget for training a model on server data; by default it is the clients' budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rule import IdleOptions
from unskew.protocol.rules import ServerRule, Tensors
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class TrainsAtServer(ServerRule):
    """Server rule with a budget for training at the server.

    Attributes:
        epochs: Passes over the server's data per round.
        steps: Mini-batch steps per round; use either ``epochs`` or ``steps``.
        lr: The learning rate; by default the clients' of the round.
        batch: Samples per step.
        optimizer: ``sgd``, ``adam`` or ``adamw``.
    """

    idle_options: ClassVar[IdleOptions] = (
        ({"epochs": 0}, ("lr", "batch", "optimizer")),
        ({"steps": 0}, ("lr", "batch", "optimizer")),
    )

    epochs: Annotated[int, Field(ge=0)] | None = None
    steps: Annotated[int, Field(ge=0)] | None = None
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    batch: Annotated[int, Field(ge=1)] | None = None
    optimizer: Literal["sgd", "adam", "adamw"] | None = None

    @property
    def budget(self) -> dict[str, Any]:
        """Fields that differ from the clients' budget, as arguments of ``ServerTraining.train``."""
        none = self.epochs == 0  # a client without a budget would train for one epoch
        budget_fields = {
            "local_epochs": None if none else self.epochs,
            "local_steps": 0 if none else self.steps,
            "batch_size": self.batch,
            "lr": self.lr,
            "optimizer": self.optimizer,
        }
        return {name: value for name, value in budget_fields.items() if value is not None}

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that server labels are of the clients' classes and only one budget is set."""
        self.check_budget()
        run.need_own_task(self.name)
        return ()

    def check_budget(self) -> None:
        """Validate the budget.

        Raises:
            ConfigError: If both ``epochs`` and ``steps`` are set.
        """
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(f"{self.name} got both epochs and steps. Set only one of them.")

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Return the initial model, with an undefined training loss."""
        return {"v": v, "loss": torch.tensor(math.nan)}

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the mean loss of the last training at the server."""
        return {f"{self.name}_loss": float(state["loss"])}
