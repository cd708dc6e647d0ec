"""FedRS: a restricted softmax scales the logits of classes that a client does not have.

Li, Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021. With ``n_kc``
samples of class ``c`` at client ``k``::

    CE(a_k z, y)     a_kc = 1 if n_kc > 0, else alpha                form=paper
                     a_kc = alpha + (1 - alpha) n_kc / max n_k       form=authors

The second form is that of the authors' code (``algorithms/fedrs.py`` of lxcnju/FedRepo), meant for Dirichlet splits, in
which few classes are absent; there the head has no bias.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.methods.head_replacement import HeadReplacement
from unskew.methods.logit_adjustment import LogitAdjustment
from unskew.protocol.rules import ClientRule
from unskew.protocol.search_space import Space, uniform_range


@dataclass(frozen=True)
class FedRS(LogitAdjustment):
    """Restricted softmax.

    Attributes:
        alpha: Factor of the logits of absent classes; 1 is FedAvg.
        form: Factors as in the ``paper`` or in the ``authors``' code.
    """

    name: ClassVar[str] = "fedrs"
    summary: ClassVar[str] = "smaller logits for classes that a client does not have"
    paper: ClassVar[str] = "Li and Zhan 2021, KDD"
    # The authors' runs use 0.1 to 0.9.
    spaces: ClassVar[Mapping[str, Space]] = {"alpha": uniform_range(0.1, 0.9)}

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    form: Literal["paper", "authors"] = "paper"

    @property
    def neutral(self) -> bool:
        """True if ``alpha`` is 1."""
        return self.alpha == 1

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the other rule scales the loss, or replaces the head: only the linear one has a bias to remove."""
        return super().acts_before(other) or isinstance(other, HeadReplacement)

    def adapt(self, module: nn.Module, head: str) -> tuple[nn.Module, str]:
        """Remove the bias of the head in the authors' form.

        Args:
            module: The model.
            head: Name of its head.

        Raises:
            ConfigError: If the head is not a linear layer.
        """
        if self.form == "authors":
            module = copy.deepcopy(module)
            linear = module.get_submodule(head)
            if not isinstance(linear, nn.Linear):
                raise ConfigError(
                    "fedrs:form=authors removes the bias of a linear head, but the head of the model is a "
                    f"{type(linear).__name__}. Use form=paper."
                )
            linear.register_parameter("bias", None)
        return module, head

    def adjust(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return ``a_k z``."""
        present = counts / counts.max() if self.form == "authors" else (counts > 0).to(counts.dtype)
        return logits * torch.lerp(torch.full_like(present, self.alpha), torch.ones_like(present), present)
