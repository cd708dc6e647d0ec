"""Client-level differential privacy: clipped updates and Gaussian noise at the server.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", 2018, arXiv:1710.06963
(FlatClip)::

    u'_k = u_k min(1, C / |u_k|)
    s    = sum_S w_k u'_k + N(0, (z C)^2 I)
    mean = s / (q W)                               W = sum of w_k over all clients; never the realized weight

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping", 2021, arXiv:1905.03871: ``C``
follows the quantile ``gamma`` of the norms, estimated from one bit per client, ``b_k = 1`` if ``|u_k| <= C``::

    b~ = 1/2 + (sum_S (b_k - 1/2) + N(0, sigma_b^2)) / m,    clamped to [0, 1] (the paper does not clamp)
    C <- C exp(-eta_C (b~ - gamma))
    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)       noise of the updates, so that both releases cost as much as ``z``

A method with several uploads sends several streams. ``joint`` scales each to the unit of an update and clips them as one
vector. ``apart`` clips each of ``J`` streams to its own norm, with noise ``z sqrt(J)``.

A client whose update is not finite, or that drops out, contributes 0, and the noise stays the same.

Noise and Poisson cohorts are drawn from a secret key (``unskew.secret_draws``), or from the seed with ``reproducible``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.methods.clipped_sum import ClippedSum, add_row, check_record, scale_of, split_streams, stream_names
from unskew.methods.dp_sites import SiteDP
from unskew.models.spec import ModelSpec
from unskew.privacy.accounting import GaussianRounds, epsilon, gaussian_mu, noise_for, replaced_epsilon, split_noise
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.payload import UPDATE
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Combined, Rule, Shape, Tensors, Updates
from unskew.protocol.run_context import PreRunContext


@dataclass(frozen=True)
class DP(ClippedSum):
    """Differentially private mean of the updates; with ``noise_at=sites`` it is built as ``SiteDP``."""

    planned: ClassVar[tuple[str, ...]] = ("noise", "rate", "largest", "mean_weight", "delta")

    @property
    def slots(self) -> Mapping[str, Rule] | None:  # type: ignore[override]
        """Slots that the rule fills; with noise at the sites, another rule fills them."""
        if self.noise_at == "server":
            return None
        at_sites = SiteDP(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        return {"client": at_sites, "aggregate": at_sites}

    # ---- before the run -------------------------------------------------------------------------------------------------

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that all that clients send is protected, and compute the noise.

        Args:
            run: Configuration, federation and model of the run.

        Returns:
            Warnings for the user.

        Raises:
            ConfigError: If something that clients send would not be protected, or the options are contradictory.
        """
        self.check_protected(run)
        if self.honest is not None:
            raise ConfigError("dp:honest applies to noise_at=sites only. Set noise_at=sites, or remove honest.")
        if math.isinf(self.clip) and (self.adaptive or self.noise != 0):
            raise ConfigError("dp:clip=inf needs noise=0 and adaptive=false; it does not protect anything.")
        noise = self.noise_of(run.plan)
        if self.adaptive and noise > 0:
            split_noise(noise, self.bit_noise_of(run.plan))
        if self.noise and self.epsilon is not None:
            first = epsilon(
                [GaussianRounds(noise, run.plan.amplification, 1)], self.delta_of(run.plan), self.accountant
            )
            if first > self.epsilon:
                raise ConfigError(
                    f"With dp:noise={self.noise:g}, the first round alone gives epsilon={first:.4g}, above {self.epsilon:g}. "
                    "Use more noise, or only epsilon."
                )
        warnings = self.common_warnings(run.plan)
        if self.streams == "apart" and not run.plan.scales:
            warnings.append("dp:streams=apart has no effect, because the method sends nothing besides the model.")
        if self.accountant == "prv" and run.plan.amplification == 1:
            warnings.append(
                "dp:accountant=prv has no effect: the accountant matters only with sampling=poisson and a participation "
                "below 1. Otherwise epsilon is exact."
            )
        if noise == 0:
            warnings.append("dp:noise=0 clips updates but adds no noise: there is no privacy.")
        elif run.plan.sampling == "fixed" and run.plan.cohort < run.plan.clients:
            warnings.append(
                "Cohorts of a fixed size do not amplify privacy, and epsilon is for a client whose data are replaced by "
                "none; the summary also has the larger one for a client that is added or removed. With sampling=poisson, "
                "the same noise gives a smaller epsilon for both."
            )
        return warnings

    def noise_of(self, plan: RoundPlan) -> float:
        """Return the noise multiplier ``z`` of a round.

        Args:
            plan: Schedule of the run.
        """
        if self.noise is not None:
            return self.noise
        assert self.epsilon is not None
        return noise_for(self.epsilon, self.delta_of(plan), plan.amplification, plan.rounds, self.accountant)

    def bit_noise_of(self, plan: RoundPlan) -> float:
        """Return the standard deviation of the noise of the bits.

        Args:
            plan: Schedule of the run.
        """
        return plan.divisor / 20 if self.bit_noise is None else self.bit_noise

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the number of clipping norms."""
        return {"clip": (1 if self.streams == "joint" else 1 + len(plan.scales),)}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the clipping norms."""
        return {"clip": state["clip"]}

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the clipping norms, and the record of the noise and number of rounds.

        Args:
            v: Initial model, ``[d]``.
            federation_info: Server's information about the federation.
        """
        plan = federation_info.plan
        count = 1 if self.streams == "joint" else 1 + len(plan.scales)
        largest = float(federation_info.sizes().max()) if federation_info.weights == "samples" else 1.0
        total = federation_info.total_weight() / largest
        return {
            "clip": torch.full((count,), self.clip, dtype=v.dtype, device=v.device),
            "noise": torch.tensor(self.noise_of(plan), dtype=torch.float64),
            "rate": torch.tensor(plan.amplification, dtype=torch.float64),
            "largest": torch.tensor(largest, dtype=torch.float64),
            "mean_weight": torch.tensor(total / plan.clients, dtype=torch.float64),
            "delta": torch.tensor(self.delta_of(plan), dtype=torch.float64),
            "spent": torch.zeros(0, 3, dtype=torch.float64),
        }

    def combine(self, state: Tensors, updates: Updates) -> tuple[Tensors, Combined]:
        """Sum the clipped streams, add noise, and divide by a fixed number.

        Args:
            state: State of the rule.
            updates: Updates of the round, possibly none.

        Returns:
            The new state, and the private mean with the private sums of the uploads.
        """
        plan, sums, v = updates.plan, updates.aggregate, updates.v_global
        z, clip = float(state["noise"]), state["clip"]
        names = stream_names(plan)
        bit_noise = self.bit_noise_of(plan)
        streams = split_noise(z, bit_noise) if self.adaptive and z > 0 else z
        streams *= math.sqrt(len(clip))
        sent = None if sums.sent is None else sums.sent[0]
        private = {}
        for number, name in enumerate(names):
            rule, _, upload = name.partition("/")
            total = sums.total if name == UPDATE else sums.upload.get(rule, {}).get(upload)
            total = torch.zeros_like(v) if total is None else total
            if name == UPDATE:
                total = total / float(state["largest"])
            if streams > 0:
                limit = clip[0 if self.streams == "joint" else number]
                noise = updates.normal(number, v) * (streams * limit / scale_of(name, plan))
                total = total + (noise if sent is None else torch.where(sent, noise, 0.0))
            private[name] = total
        new = {**state, "spent": add_row(state["spent"], (self.sign * z, plan.amplification))}
        if self.adaptive:
            bits = sums.upload.get(self.name, {}).get("bits")
            bits = torch.zeros_like(clip) if bits is None else bits.to(clip)
            noise = updates.normal(len(names), clip) * (bit_noise * math.sqrt(len(clip)) if z > 0 else 0.0)
            share = (0.5 + (bits + noise) / plan.divisor).clamp(0.0, 1.0)
            new["clip"] = clip * torch.exp(-self.clip_lr * (share - self.quantile))
        divisor = plan.divisor * float(state["mean_weight"])
        weight = divisor * float(state["largest"])
        return new, Combined(private[UPDATE] / divisor, updates.b_global, split_streams(private), weight)

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the privacy spent so far, and the clipping norm of the next round."""
        clip = state["clip"].tolist()
        return {**super().metrics(state, round, spec), "clip_norm": clip[0] if len(clip) == 1 else clip}

    def spent(self, state: Tensors) -> float:
        """Return epsilon of the finished rounds.

        Args:
            state: State of the rule.
        """
        return epsilon(rounds_of(state), float(state["delta"]), self.accountant)

    def after_round(self, state: Tensors) -> Tensor:
        """Return the record of rounds with one more round.

        Args:
            state: State of the rule.
        """
        return add_row(state["spent"], (self.sign * float(state["noise"]), float(state["rate"])))

    def guarantee(self, state: Tensors, plan: RoundPlan, spent: float, delta: float) -> dict[str, Any]:
        """Describe the guarantee of the finished rounds.

        Args:
            state: State of the rule.
            plan: Schedule of the run.
            spent: Epsilon of the finished rounds.
            delta: Delta.
        """
        history = rounds_of(state)
        fields: dict[str, Any] = {}
        replaced, mu = replaced_epsilon(history, delta), gaussian_mu(history)
        relation, instead = "added or removed", "replaced by another one"
        if mu is not None:
            fields = {"epsilon_replaced": replaced, "gaussian_mu": mu}
            if plan.cohort < plan.clients:
                relation = "replaced by none"
                instead = "added, removed or replaced, because another one takes its place in a cohort"
            relation += f" (epsilon={replaced:.4g} if the client is {instead})"
        accountant = f"{self.accountant.upper()} (opacus)" if mu is None else "exact Gaussian"
        cohorts = "Poisson cohorts" if plan.sampling == "poisson" else "fixed cohorts, without amplification"
        text = (
            f"(epsilon={spent:.4g}, delta={delta:.3g}) for all data of one client, {relation}, against everyone who sees the "
            f"released models; {cohorts}, {accountant} accountant. Released: the models of all "
            f"{sum(entry.steps for entry in history)} rounds; for the last one alone, no smaller epsilon is proven. Not "
            "covered: the server, which sees clipped updates; files other than the model, with cohort sizes, class counts "
            "and metrics on the clients' own samples (clients.jsonl; client_*, constant_*, personal_* and validation_* in "
            "summary.json and metrics.jsonl); statistics that standardize inputs; choices made with the same data, such as "
            "tuning and early stopping; further runs on the same data"
            f"{'; training losses and diagnostics (reveal=true)' if self.reveal else ''}."
        )
        return {**fields, "privacy": text}


def rounds_of(state: Tensors) -> list[GaussianRounds]:
    """Return the rounds in the record of a state.

    Args:
        state: State of the rule.
    """
    check_record(state["spent"], 3)
    return [GaussianRounds(abs(z), rate, int(steps)) for z, rate, steps in state["spent"].tolist()]
