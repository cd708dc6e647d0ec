"""A run before it begins, as rules look at it to refuse what does not fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from unskew.data.federation import Federation, ServerData
from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.training_config import Training


@dataclass(frozen=True)
class PreRunContext:
    """Configuration of a run before it starts.

    Its methods raise ``ConfigError`` for requirements of a rule that are not met.

    Attributes:
        federation: The data.
        build: Makes the model; called when a rule first asks for its layout, so that data are refused before it.
        training: The clients' budget.
        rounds: Number of rounds.
        delayed: Whether updates may arrive in later rounds than they were sent out in.
        diagnose: What else is to be measured.
        base_run: Whether other runs begin where this one ends, so that a rule may act only in theirs.
    """

    federation: Federation
    build: Callable[[], ModelSpec]
    training: Training
    rounds: int
    delayed: bool = False
    diagnose: tuple[str, ...] = ()
    base_run: bool = False

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's layout."""
        return self.build()

    def need_rounds_after(self, name: str, option: str, idle: int) -> None:
        """More rounds than those in which the rule does nothing: else its results would be another method's.

        Args:
            name: Name of the rule.
            option: Option that sets the number of idle rounds.
            idle: Number of rounds in which the rule does nothing.
        """
        if self.rounds <= idle and not self.base_run:
            raise ConfigError(
                f"{name} would never act: with {option}={idle} it does so after {idle} rounds, and the run has "
                f"{self.rounds}. Give it a smaller {option}, or the run more rounds than that."
            )

    def need_no_delays(self, name: str) -> None:
        """All updates of a round must have been sent out in that round."""
        if self.delayed:
            raise ConfigError(
                f"{name} needs the updates of a round in that round; it cannot be run with network.delay."
            )

    def told_without_body(self, name: str, option: str) -> tuple[str, ...]:
        """Return a warning for a rule that acts on features if no trained layer precedes the head.

        Args:
            name: Name of the rule.
            option: Option of the rule that uses features.
        """
        if self.spec.parts["body"]:
            return ()
        return (f"{name} changes how features are learned, but this model trains none: {option} has no effect.",)

    def need_numbers(self, name: str) -> None:
        """For rules that learn or draw inputs: there is nothing between two tokens of a text."""
        if self.federation.test[0].dtype == torch.int64:
            raise ConfigError(f"{name} makes inputs of its own, and a text's tokens are not numbers to be changed.")

    def need_server_data(self, name: str) -> ServerData:
        """The server's data, of whatever kind."""
        if self.federation.server is None:
            raise ConfigError(
                f"{name} needs data at the server: give --server-data 1000 to take that number of samples out of "
                "the test set, or --server-data NAME for another data set."
            )
        return self.federation.server

    def need_own_task(self, name: str) -> ServerData:
        """The server's data, with the clients' classes."""
        data = self.need_server_data(name)
        if not data.in_domain:
            raise ConfigError(
                f"{name} learns from the server's labels, which must be of the clients' classes, but the server holds "
                "another data set; give --server-data 1000 to take that number of samples out of the test set."
            )
        return data
