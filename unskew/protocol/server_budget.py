"""Options shared by methods that train a model on data at the server; by default the clients' budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import ServerRule, Tensors
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class TrainsAtServer(ServerRule):
    """A server rule with a budget for training at the server.

    Attributes:
        epochs: Passes over the server's data per round; None: as clients train.
        steps: Mini-batch steps per round instead.
        lr: Learning rate at the server; None: the clients'.
        batch: Samples per step; None: as clients.
        optimizer: Made afresh in each round; None: the clients', with its other settings.
    """

    epochs: Annotated[int, Field(ge=0)] | None = None
    steps: Annotated[int, Field(ge=0)] | None = None
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    batch: Annotated[int, Field(ge=1)] | None = None
    optimizer: Literal["sgd", "adam", "adamw"] | None = None

    @property
    def budget(self) -> dict[str, Any]:
        """Return the fields that differ from the clients' budget, as ``ServerTraining.train`` takes them."""
        none = self.epochs == 0  # for a client no budget means one epoch
        budget_fields = {
            "local_epochs": None if none else self.epochs,
            "local_steps": 0 if none else self.steps,
            "batch_size": self.batch,
            "lr": self.lr,
            "optimizer": self.optimizer,
        }
        return {name: value for name, value in budget_fields.items() if value is not None}

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Labels of the clients' classes, and one budget."""
        self.check_budget()
        run.need_own_task(self.name)
        return ()

    def check_budget(self) -> None:
        """Refuse two budgets.

        Raises:
            ConfigError: Both budgets are set.
        """
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(f"{self.name} is given both epochs and steps; give one of them.")

    def init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """The model, and no training yet."""
        return {"v": v, "loss": torch.tensor(math.nan)}

    def metrics(self, state: Tensors) -> dict[str, Any]:
        """The mean loss of the last training at the server."""
        return {f"{self.name}_loss": float(state["loss"])}
