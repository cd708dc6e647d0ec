"""Client-level differential privacy with noise at the sites: the server and the other sites need not be trusted.

Agarwal, Kairouz, Liu, "The Skellam Mechanism for Differentially Private Federated Learning", 2021, arXiv:2110.04995. Each
site clips its update, rounds it to a public grid, and adds a share of the noise. Under secure aggregation, only the sum of
these integers modulo ``2^32`` is opened. A simulation does the same arithmetic::

    site    x_k = round(clip(u_k) / gamma) + Skellam                 |round(.)| <= B
    server  mean = gamma (sum_k x_k mod 2^32, centered) / m

``unskew.privacy.skellam`` has the grid and the accounting, ``unskew.privacy.integer_noise`` the sampler. The clipping norm is
fixed, because the bits of adaptive clipping would need noise, too. A client whose update is not finite contributes 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.clipped_sum import ClippedSum, add_row, check_record, scale_of, split_streams, stream_names
from unskew.privacy.integer_noise import round_within, skellam_noise
from unskew.privacy.skellam import SkellamGrid, SkellamRounds, Uniform, skellam_epsilon, skellam_grid, skellam_noise_for
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import replace_fields
from unskew.protocol.payload import UPDATE
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Combined, Method, Tensors, Updates, UploadContext
from unskew.protocol.run_context import PreRunContext
from unskew.seeding import numpy_generator


@dataclass(frozen=True)
class SiteDP(ClippedSum):
    """``dp`` with ``noise_at=sites``."""

    planned: ClassVar[tuple[str, ...]] = ("noise", "round", "delta")

    @property
    def sends_model(self) -> bool:  # type: ignore[override]
        """False: clients send integers in streams of their own."""
        return False

    # ---- before the run -------------------------------------------------------------------------------------------------

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that all that clients send is in the noisy sum, and compute the noise.

        Args:
            run: Configuration, federation and model of the run.

        Returns:
            Warnings for the user.

        Raises:
            ConfigError: If something that clients send would not be protected, or the options are contradictory.
        """
        self.check_protected(run)
        if self.honest is None:
            raise ConfigError(
                "dp:noise_at=sites needs honest, the minimum number of sites in a sum that add their noise and do not "
                "reveal it, such as honest=3."
            )
        if self.adaptive:
            raise ConfigError(
                "With dp:noise_at=sites, the bits of adaptive clipping would have no noise. Set adaptive=false and a "
                "suitable clip."
            )
        if math.isinf(self.clip):
            raise ConfigError("dp:noise_at=sites needs a finite clip, because the grid of the sum depends on it.")
        for option, value in (("streams=apart", self.streams == "apart"), ("public_sizes=true", self.public_sizes)):
            if value:
                raise ConfigError(f"dp:{option} is not supported with noise_at=sites. Remove it.")
        if self.reveal:
            raise ConfigError(
                "With dp:noise_at=sites, training losses and diagnostics do not leave the sites. Remove reveal=true."
            )
        plan = run.plan
        if plan.sampling == "poisson":
            raise ConfigError(
                "A Poisson cohort may have fewer sites than dp:honest. Use sampling=fixed with noise_at=sites."
            )
        if plan.cohort < self.honest:
            raise ConfigError(
                f"dp:honest={self.honest} is more than the {plan.cohort} sites of a round. Use a smaller honest, or more "
                "sites per round."
            )
        grid = self.grid(plan, run.spec.size)
        if self.noise and self.epsilon is not None:
            first = skellam_epsilon([grid.rounds()], self.delta_of(plan))
            if first > self.epsilon:
                raise ConfigError(
                    f"With dp:noise={self.noise:g}, the first round alone gives epsilon={first:.4g}, above "
                    f"{self.epsilon:g}. Use more noise, or only epsilon."
                )
        warnings = self.common_warnings(plan)
        if not grid.rate:
            warnings.append("dp:noise=0 clips updates but adds no noise: there is no privacy.")
        return warnings

    def noise_of(self, plan: RoundPlan, size: int) -> float:
        """Return the noise multiplier ``z`` of a sum with the noise of ``honest`` sites.

        Args:
            plan: Schedule of the run.
            size: Number of parameters.
        """
        if self.noise is not None:
            return self.noise
        assert self.epsilon is not None
        assert self.honest is not None
        count = size * (1 + len(plan.scales))
        return skellam_noise_for(
            self.epsilon, self.delta_of(plan), self.clip, count, self.honest, plan.cohort, plan.rounds
        )

    def grid(self, plan: RoundPlan, size: int) -> SkellamGrid:
        """Return the grid of a round, which sites and server compute from public numbers.

        Args:
            plan: Schedule of the run.
            size: Number of parameters.
        """
        assert self.honest is not None
        count = size * (1 + len(plan.scales))
        return skellam_grid(self.clip, self.noise_of(plan, size), count, self.honest, plan.cohort)

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def encode(self, payload: Tensors, state: Tensors, ctx: UploadContext) -> tuple[Tensors, Tensors]:
        """Clip all streams as one vector, round them to the grid, and add noise.

        Args:
            payload: Streams by name.
            state: State at this client; unused.
            ctx: Upload.

        Returns:
            An update of zeros with one stream of integers modulo ``2^32`` for each stream, and the state.

        Raises:
            ConfigError: If a rule uploads a stream without declaring its scale.
        """
        update = payload[UPDATE]
        limit = torch.tensor([self.clip], dtype=torch.float64, device=update.device)
        clipped, state = super().encode(payload, state, replace_fields(ctx, download={"clip": limit}))
        names = self._names(payload, ctx.plan)
        scaled = [clipped[name].to(torch.float64) * scale_of(name, ctx.plan) for name in names]
        values = torch.cat(scaled).cpu().numpy()
        if not np.isfinite(values).all():
            values = np.zeros_like(values)
        grid, uniform = self.grid(ctx.plan, ctx.spec.size), uniform_source(ctx)
        integers = round_within(values / grid.step, grid.bound, uniform)
        integers += skellam_noise(grid.rate, len(integers), uniform)
        wrapped = torch.from_numpy(integers.astype(np.int32)).to(update.device)
        streams = torch.split(wrapped, [len(stream) for stream in scaled])
        sent = {f"{self.name}/{number}": stream for number, stream in enumerate(streams)}
        return {UPDATE: torch.zeros_like(update), **sent}, state

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the record of the rounds.

        Args:
            v: Initial model, ``[d]``.
            federation_info: Server's information about the federation.
        """
        plan = federation_info.plan
        rounds = self.grid(plan, len(v)).rounds()
        return {
            "noise": torch.tensor(self.noise_of(plan, len(v)), dtype=torch.float64),
            "round": torch.tensor([rounds.l2, rounds.l1, rounds.variance], dtype=torch.float64),
            "delta": torch.tensor(self.delta_of(plan), dtype=torch.float64),
            "spent": torch.zeros(0, 4, dtype=torch.float64),
        }

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Decode the noisy sum and divide it by a fixed number; a sum of fewer than ``honest`` sites is never opened.

        Args:
            state: State of the rule.
            updates: Updates of the round, possibly none.

        Returns:
            The new state, and the private mean with the private sums of the uploads.
        """
        plan, sums, v = updates.plan, updates.aggregate, updates.v_global
        assert self.honest is not None
        step = self.grid(plan, len(v)).step
        opened = sums.count >= self.honest
        private = {}
        for number, name in enumerate(stream_names(plan)):
            private[name] = torch.zeros_like(v)
            if opened:
                # Sums of int32 wrap around, so they are centered sums modulo 2^32.
                total = sums.upload[self.name][str(number)].to(torch.float64)
                private[name] = (total * (step / scale_of(name, plan))).to(v.dtype)
        new = {**state, "spent": self.after_round(state)} if opened else state
        delta = private[UPDATE] / plan.divisor
        return new, Combined(delta, updates.b_global, split_streams(private), plan.divisor)

    def spent(self, state: Tensors) -> float:
        """Return epsilon of the finished rounds.

        Args:
            state: State of the rule.
        """
        return skellam_epsilon(rounds_of(state), float(state["delta"]))

    def after_round(self, state: Tensors) -> Tensor:
        """Return the record of rounds with one more round.

        Args:
            state: State of the rule.
        """
        l2, l1, variance = state["round"].tolist()
        return add_row(state["spent"], (l2, l1, self.sign * variance))

    def guarantee(self, state: Tensors, plan: RoundPlan, spent: float, delta: float) -> dict[str, Any]:
        """Describe the guarantee of the finished rounds.

        Args:
            state: State of the rule.
            plan: Schedule of the run.
            spent: Epsilon of the finished rounds.
            delta: Delta.
        """
        replaced = skellam_epsilon([entry.doubled() for entry in rounds_of(state)], delta)
        text = (
            f"(epsilon={spent:.4g}, delta={delta:.3g}) for all data of one client, replaced by none (by other data or "
            f"another client: epsilon={replaced:.4g}), against the server, the other clients and everyone "
            f"who sees the released models, if at least {self.honest} clients of every sum add their noise and do not reveal "
            "it (honest); noise at the sites, without amplification, RDP accountant of the "
            "Skellam mechanism. Released: the models and sums of all rounds; for the last one alone, no smaller epsilon is "
            "proven. Not covered: what a simulation records of its clients, and its statistics that standardize inputs; when "
            "sites reply; choices made with the same data, such as tuning and early stopping; further runs on the same data."
        )
        return {"epsilon_replaced": replaced, "privacy": text}


def rounds_of(state: Tensors) -> list[SkellamRounds]:
    """Return the rounds in the record of a state.

    Args:
        state: State of the rule.
    """
    check_record(state["spent"], 4)
    return [SkellamRounds(l2, l1, abs(variance), int(steps)) for l2, l1, variance, steps in state["spent"].tolist()]


def uniform_source(ctx: UploadContext) -> Uniform:
    """Return the source of a client's random numbers.

    Args:
        ctx: Upload.
    """
    if ctx.secret is not None:
        return ctx.secret.stream("site noise", ctx.round, ctx.client)
    return numpy_generator(ctx.seed, "site noise", ctx.round, ctx.client).random


def site_noise(method: Method) -> SiteDP | None:
    """Return the rule of a method that adds noise at the sites; None if there is none.

    Args:
        method: Method of a run.
    """
    return next((rule for rule in method.client if isinstance(rule, SiteDP)), None)
