"""Shared base of methods that average a fixed part of the model while the rest stays at the clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from unskew.errors import ConfigError
from unskew.models.body_head import merge_slices, slices_where
from unskew.models.layer_groups import layer_groups
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import ClientRule, Method, ServerRule, Slices, SyncRule, Tensors
from unskew.protocol.run_context import PreRunContext


class PartialSharing(SyncRule):
    """Exchanges the same slices in every round and keeps the others at the clients."""

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices that are averaged.

        Args:
            spec: Layout of the model.
        """
        raise NotImplementedError

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Exchange the shared slices in both directions; a client starts with the others of the initial model."""
        shared = self.shared_slices(spec)
        return shared, shared

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that a trained part of the model is shared.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If nothing would be sent.
        """
        if not self.shared_slices(run.spec):
            raise ConfigError(
                f"{self.name} shares the body of the model and keeps its head at the clients, but this model has no trained "
                "body. Use a model with more layers, or another method."
            )
        return ()

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules with a server part, which would need the local slices, and other rules with personal models."""
        own: object = self  # may also be a client rule
        for rule in method.client:
            if rule is own:
                continue
            if type(rule).server_update is not ClientRule.server_update or isinstance(rule, ServerRule):
                return f"{rule.name} uses the whole model at the server, but {self.name} shares only a part of it."
            if rule.has_personal_model:
                return f"{rule.name} and {self.name} both define a client's personal model. Remove one of them."
        return None


class LocalHeadParameters(PartialSharing):
    """Keeps named parameters of the head at the clients, whose values in the global model are the initial ones."""

    local_parameters: ClassVar[tuple[str, ...]]
    """Names of these parameters within the head."""

    def shared_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of all other parameters."""
        return head_parameters(spec, self.local_parameters, False)

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the slices of the parameters that stay at the clients."""
        return head_parameters(spec, self.local_parameters, True)


@lru_cache(maxsize=16)
def head_parameters(spec: ModelSpec, names: tuple[str, ...], selected: bool) -> Slices:
    """Return the slices of named parameters of the head, or of the rest of the model.

    Args:
        spec: Layout of the model.
        names: Names of parameters within the head.
        selected: Return the slices of these parameters.
    """
    own = {f"{spec.head_name}.{name}" for name in names}
    return slices_where(spec.names, spec.sizes, lambda name: (name in own) == selected)


def last_layers(spec: ModelSpec, count: int, option: str) -> tuple[Slices, Slices]:
    """Return the slices of all but the last layers, and those of the last layers.

    Args:
        spec: Layout of the model.
        count: Number of last layers, in order of depth as in ``unskew.models.layer_groups``.
        option: Method and option that set the number, for the error.

    Raises:
        ConfigError: If the model has fewer layers.
    """
    groups = layer_groups(spec)
    if count > len(groups):
        raise ConfigError(f"{option}={count} is too large: the model has {len(groups)} layers (see unskew models).")
    split = len(groups) - count
    first, last = ([span for group in part for span in group.slices] for part in (groups[:split], groups[split:]))
    return merge_slices(first), merge_slices(last)
