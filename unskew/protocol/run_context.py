"""Run configuration that rules validate before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from unskew.data.federation import Federation, ServerData
from unskew.errors import ConfigError
from unskew.models.head_output import head_returns_logits, parameter_outside_head
from unskew.models.spec import ModelSpec, example_inputs
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.training_config import Buffers, Training


@dataclass(frozen=True)
class PreRunContext:
    """Configuration of a run before it starts.

    The methods raise ``ConfigError`` if a requirement of a rule is not met.

    Attributes:
        federation: Data of all clients.
        build: Creates the model; called when a rule first reads ``spec``, so that data errors are reported first.
        plan: Schedule of the run.
        delayed: Whether updates may arrive in a later round than their broadcast.
        diagnose: Additional metrics to compute.
        base_run: Whether other runs continue from the end of this one, so that a rule may act only in those.
        client_weighting: ``samples``, ``uniform``, or ``auto``.
        buffers: Treatment of normalization buffers.
        save_samples: Whether generated samples are plotted.
        split_group: Column whose values are never split between training and held-out rows; None if there is none.
    """

    federation: Federation
    build: Callable[[], ModelSpec]
    plan: RoundPlan
    delayed: bool = False
    diagnose: tuple[str, ...] = ()
    base_run: bool = False
    client_weighting: str = "auto"
    buffers: Buffers = "average"
    save_samples: bool = False
    split_group: str | None = None

    @property
    def training(self) -> Training:
        """Budget of the clients."""
        return self.plan.training

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.plan.rounds

    @cached_property
    def spec(self) -> ModelSpec:
        """Layout of the model."""
        return self.build()

    def need_rounds_after(self, name: str, option: str, idle: int) -> None:
        """Validate that the run has more rounds than those in which the rule does nothing.

        Args:
            name: Name of the rule.
            option: Option that sets the number of idle rounds.
            idle: Number of rounds in which the rule does nothing.
        """
        if self.rounds <= idle and not self.base_run:
            raise ConfigError(
                f"{name} would have no effect: with {option}={idle} it acts only after {idle} rounds, and the run has "
                f"{self.rounds}. Use a smaller {option}, or more rounds."
            )

    def need_no_reports(self, name: str) -> None:
        """Validate that the sampler of the clients reads no losses or times of single clients."""
        plan = self.plan
        if plan.asks_loss or plan.reads_reports:
            learned = "the loss of each candidate" if plan.asks_loss else "losses and times of single clients"
            raise ConfigError(
                f"With sampling={plan.sampling} the server learns {learned}, which {name} does not protect. "
                "Use sampling=fixed."
            )

    def need_no_statistics(self, name: str) -> None:
        """Validate that no statistics of the clients' data are summed before the first round."""
        if self.federation.stats_traffic is not None:
            raise ConfigError(
                "Statistics of the clients' data are summed without noise before the first round (class_weights: balanced, "
                f"standardization, categories), which {name} does not protect. Give the values in the configuration."
            )

    def warn_without_body(self, name: str, option: str) -> tuple[str, ...]:
        """Return a warning for a rule that acts on features if no trained layer precedes the head.

        Args:
            name: Name of the rule.
            option: Option of the rule that uses features.
        """
        if all(spec.parts["body"] for spec in self.spec.architectures):
            return ()
        return (
            f"{name} changes how features are learned, but this model has no trained features: {option} has no effect.",
        )

    def need_logits_of_head(self, name: str) -> None:
        """Validate that the logits are what the head returns, for rules that compute or replace the head alone.

        Args:
            name: Name of the rule.
        """
        rows, objective = self.federation.test[0][:2], self.federation.objective
        for spec in self.spec.architectures:
            shared = parameter_outside_head(spec)
            if shared is not None:
                raise ConfigError(
                    f"{name} computes or replaces the head of the model alone, but another layer has the parameter "
                    f"{shared!r} of the head, too. Give the head parameters of its own."
                )
            x = rows.to("cpu", spec.input_dtype) if len(rows) > 1 else example_inputs(spec)
            if not head_returns_logits(spec, x, up_to_constant="one_class" in objective.provides):
                raise ConfigError(
                    f"{name} computes or replaces the head of the model alone, but the model changes the output of its head "
                    f"{spec.head_name!r} before it returns it. Return the output of the head itself, or name the module "
                    "whose output is returned with head='name'."
                )

    def need_numbers(self, name: str) -> None:
        """Validate that inputs are continuous, for rules that learn or generate inputs: text tokens are not."""
        if self.federation.test[0].dtype == torch.int64:
            raise ConfigError(f"{name} generates inputs, but text tokens are discrete and cannot be optimized.")

    def need_server_data(self, name: str) -> ServerData:
        """Return the server's data, of any kind."""
        if self.federation.server is None:
            raise ConfigError(
                f"{name} needs data at the server: give --server-data 1000 to take that number of samples out of "
                "the test set, or --server-data NAME for another data set."
            )
        return self.federation.server

    def need_own_task(self, name: str) -> ServerData:
        """Return the server's data, which must have the clients' classes."""
        data = self.need_server_data(name)
        if not data.in_domain:
            raise ConfigError(
                f"{name} learns from the server's labels, so they must be of the clients' classes, but the server has "
                "another data set. Give --server-data 1000 to take that number of samples out of the test set."
            )
        return data
