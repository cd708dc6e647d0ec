"""FedSA-LoRA: of the LoRA factors only ``A`` is averaged, and every client has its own ``B``.

Guo, Zeng, Wang, Fan, Wang, Qu, "Selective Aggregation for Low-Rank Adaptation in Federated Learning", 2024, arXiv:2410.01463.
A weight of the model of client ``k`` is ``W + s B_k A``. Both factors are trained, ``A`` is averaged::

    (A_k, B_k): local training from (A, B_k);   A <- sum_k p_k A_k

In the authors' code, a classifier's head stays at the clients, too (``glue/yamls/fedsa-lora.yaml`` of
Pengxin-Guo/FedSA-LoRA, with ``r`` 8 and ``alpha`` 16), as here with ``head=local``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from unskew.errors import ConfigError
from unskew.methods.lora_factors import no_factors
from unskew.methods.partial_sharing import PartialSharing
from unskew.models.body_head import slices_where
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import Slices
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, one_of


@dataclass(frozen=True)
class FedSA(PartialSharing):
    """A common first LoRA factor, and a second one of each client's own.

    Attributes:
        head: What happens to a trained head: it stays at each client (``local``) or is averaged (``shared``).
    """

    name: ClassVar[str] = "fedsa"
    summary: ClassVar[str] = "averages the first LoRA factor; the second one stays at each client"
    paper: ClassVar[str] = "Guo et al. 2024, arXiv:2410.01463"
    spaces: ClassVar[Mapping[str, Space]] = {"head": one_of("local", "shared")}

    head: Literal["local", "shared"] = "local"

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the model trains both LoRA factors, and its head if that is shared.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If a factor is missing, or the head is frozen.
        """
        spec = run.spec
        if not any(".lora_B." in name for name in spec.names):
            raise ConfigError(no_factors(self.name))
        if not any(".lora_A." in name for name in spec.names):
            raise ConfigError("fedsa averages the first LoRA factor. Remove freeze_a, with which it does not change.")
        if self.head == "shared" and not spec.head_trains:
            raise ConfigError(f"fedsa:head=shared has no effect, because {spec.head_name!r} is frozen. Use head=local.")
        return super().check(run)

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the first factors, and of a shared head."""
        return factor_slices(spec, self.head == "shared", True)

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of everything else."""
        return factor_slices(spec, self.head == "shared", False)


@lru_cache(maxsize=16)
def factor_slices(spec: ModelSpec, with_head: bool, shared: bool) -> Slices:
    """Return the slices of what is shared, or of the rest.

    Args:
        spec: Layout of a model with LoRA factors.
        with_head: Whether the head is shared.
        shared: Select what is shared.
    """
    prefix = f"{spec.head_name}."

    def is_shared(name: str) -> bool:
        in_head = with_head and name.startswith(prefix) and ".lora_B." not in name
        return ".lora_A." in name or in_head

    return slices_where(spec.names, spec.sizes, lambda name: is_shared(name) == shared)
