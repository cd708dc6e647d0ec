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
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.option_parsing import check_no_effect
from unskew.privacy.accounting import GaussianRounds, check_delta, default_delta, epsilon, noise_for, split_noise
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.payload import UPDATE
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import (
    AggregateRule,
    ClientRule,
    Combined,
    DataRule,
    Method,
    Report,
    Stage,
    Tensors,
    Updates,
    UploadContext,
    Weights,
)
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
LARGEST_DELTA = 0.05
"""Largest delta without a warning."""
BITS = "dp/bits"
"""Stream with one number per clipped vector: 1/2 if it was within its norm, otherwise -1/2."""


@dataclass(frozen=True)
class DP(ClientRule, AggregateRule):
    """Differentially private mean of the updates, for one client added or removed.

    Attributes:
        noise: Noise multiplier ``z``: standard deviation of the noise divided by the clipping norm.
        epsilon: Largest privacy loss of the run. Without ``noise``, it determines the noise.
        delta: Probability that the guarantee does not hold; by default ``K^-1.1``.
        clip: Clipping norm ``C``; with ``adaptive``, that of the first round.
        adaptive: Adapt the clipping norm to the quantile of the norms.
        quantile: Share ``gamma`` of updates that should be within the norm.
        clip_lr: Step size ``eta_C`` of the adaptation.
        bit_noise: Standard deviation ``sigma_b`` of the noise of the bits; by default a 20th of the cohort.
        streams: Clip all streams as one vector (``joint``), or each on its own (``apart``).
        per_layer: Clip each of the ``L`` parameters of the model to ``C / sqrt(L)``.
        accountant: Accountant for Poisson cohorts, ``rdp`` or the tighter ``prv``.
        public_sizes: The clients' numbers of samples are public, so they may be used as weights.
        reveal: Record the clients' training loss and diagnostics, which the guarantee does not cover.
    """

    name: ClassVar[str] = "dp"
    summary: ClassVar[str] = "differential privacy of clients: clipped updates and noise"
    paper: ClassVar[str] = "McMahan et al. 2018, arXiv:1710.06963; Andrew et al. 2021, arXiv:1905.03871"
    weights: ClassVar[Weights | None] = "uniform"
    stage: ClassVar[Stage] = "clip"
    combines_empty: ClassVar[bool] = True
    continued: ClassVar[tuple[str, ...]] = ("spent",)
    spaces: ClassVar[Mapping[str, Space]] = {"clip": log_range(0.01, 10.0)}

    noise: NonNegative | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 0.1
    adaptive: bool = True
    quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
    clip_lr: Positive = 0.2
    bit_noise: Positive | None = None
    streams: Literal["joint", "apart"] = "joint"
    per_layer: bool = False
    accountant: Literal["rdp", "prv"] = "rdp"
    public_sizes: bool = False
    reveal: bool = False

    @property
    def hidden_metrics(self) -> Collection[str]:  # type: ignore[override]
        """The clients' training loss, unless it is revealed."""
        return () if self.reveal else ("train_loss",)

    # ---- before the run -------------------------------------------------------------------------------------------------

    def conflict_with(self, method: Method) -> str | None:
        """Name rules that need more than the private sum.

        Args:
            method: The composition.
        """
        for rule in method.rules:
            if rule is not self and {"individual", "sent_statistics", "last_update"} & set(rule.needs):
                return f"{rule.name} reads single updates, but dp protects only their sum. Remove one of them."
        for client_rule in method.client:
            if client_rule.uploads and not client_rule.private:
                return (
                    f"{client_rule.name} uploads values of unknown sensitivity besides the model, which dp cannot protect. "
                    "Use scaffold, fedpvr, or a method that sends only the model."
                )
        for data_rule in method.data:
            if type(data_rule).client_payload is not DataRule.client_payload:
                return (
                    f"{data_rule.name} sends data of the clients before the first round, which dp does not protect. Train "
                    "on a finished synthetic set as server data, or remove one of them."
                )
        server = method.server
        if server is not None and server.updates_per_step is not None:
            return f"{server.name} may apply two updates of one client at once, so its sensitivity is not that of dp."
        if server is not None and server.steps_without == "clients":
            return f"{server.name} trains without clients, so dp has nothing to protect."
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that all that clients send is protected, and compute the noise.

        Args:
            run: Configuration, federation and model of the run.

        Returns:
            Warnings for the user.

        Raises:
            ConfigError: If something that clients send would not be protected, or the options are contradictory.
        """
        run.need_no_delays(self.name)
        if self.noise is None and self.epsilon is None:
            raise ConfigError("dp needs noise or epsilon, such as dp:epsilon=8.")
        if not self.adaptive:
            check_no_effect(self, ("quantile", "clip_lr", "bit_noise"), "with adaptive=false")
        if self.noise == 0:
            check_no_effect(self, ("epsilon", "bit_noise"), "with noise=0, which gives no privacy")
        if sum(run.spec.buffer_sizes):
            raise ConfigError(
                "dp does not protect normalization buffers, and this model has some. Use a model with GroupNorm or without "
                "normalization."
            )
        run.need_no_statistics(self.name)
        if run.client_weighting == "samples" and not self.public_sizes:
            raise ConfigError(
                "dp weights clients uniformly, because their numbers of samples are private. Remove "
                "client_weighting=samples, or set dp:public_sizes=true if they are public."
            )
        if run.plan.scales and run.training.local_steps is None:
            raise ConfigError(
                f"{next(iter(run.plan.scales)).partition('/')[0]}+dp needs local_steps, because the number of steps in an "
                "epoch depends on the clients' private numbers of samples. Set local_steps instead of local_epochs."
            )
        if self.public_sizes and run.plan.scales:
            raise ConfigError("dp:public_sizes=true supports only methods that send nothing besides the model.")
        if not self.reveal and (run.diagnose or run.save_samples):
            what = f"diagnose={run.diagnose[0]}" if run.diagnose else "save_samples"
            raise ConfigError(
                f"{what} shows values of single clients that dp does not protect. Remove it, or set dp:reveal=true."
            )
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
        warnings = []
        if self.streams == "apart" and not run.plan.scales:
            warnings.append("dp:streams=apart has no effect, because the method sends nothing besides the model.")
        if self.accountant == "prv" and run.plan.amplification == 1:
            warnings.append(
                "dp:accountant=prv has no effect: the accountant matters only with sampling=poisson and a participation "
                "below 1. Otherwise epsilon is exact."
            )
        if self.delta_of(run.plan) > LARGEST_DELTA:
            warnings.append(
                f"delta={self.delta_of(run.plan):.2g} is large, because there are only {run.plan.clients} clients: the "
                "guarantee means little. Use more clients."
            )
        if noise == 0:
            warnings.append("dp:noise=0 clips updates but adds no noise: there is no privacy.")
        elif run.plan.sampling == "fixed" and run.plan.cohort < run.plan.clients:
            warnings.append(
                "Cohorts of a fixed size do not amplify privacy. With sampling=poisson the same noise gives a smaller "
                "epsilon."
            )
        return warnings

    def delta_of(self, plan: RoundPlan) -> float:
        """Return delta, by default ``K^-1.1``.

        Args:
            plan: Schedule of the run.
        """
        delta = default_delta(plan.clients) if self.delta is None else self.delta
        check_delta(delta, plan.clients)
        return delta

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

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the clipping norms."""
        return {"clip": state["clip"]}

    def encode(self, payload: Tensors, state: Tensors, ctx: UploadContext) -> tuple[Tensors, Tensors]:
        """Clip all streams.

        Args:
            payload: Streams by name.
            state: State at this client; unused.
            ctx: Upload.

        Returns:
            The clipped streams with the bits, and the state.

        Raises:
            ConfigError: If a rule uploads a stream without declaring its scale.
        """
        names = self._names(payload, ctx.plan)
        limits = ctx.download["clip"]
        groups = [names] if self.streams == "joint" else [[name] for name in names]
        clipped: Tensors = {}
        bits = []
        for limit, group in zip(limits, groups, strict=True):
            factors, within = self._factors({name: payload[name] for name in group}, limit, ctx)
            bits.append(within)
            clipped |= {name: payload[name] * factors for name in group}
        if self.adaptive:
            clipped[BITS] = torch.stack(bits).to(limits) - 0.5
        return clipped, state

    def _names(self, streams: Collection[str], plan: RoundPlan) -> list[str]:
        """Return the names of the streams, the update first."""
        names = stream_names(plan)
        unknown = sorted(set(streams) - {*names, BITS})
        if unknown:
            raise ConfigError(
                f"{unknown[0].partition('/')[0]} uploads {unknown[0]!r} without declaring it as private, so dp cannot "
                "protect it. Add its scale to the rule's `private`, or remove one of the two."
            )
        return names

    def _factors(self, streams: Tensors, limit: Tensor, ctx: UploadContext) -> tuple[Tensor, Tensor]:
        """Return the factors that clip streams as one vector, and whether no stream was clipped."""
        squares = []
        for name, stream in streams.items():
            scaled = stream.to(torch.float64) * scale_of(name, ctx.plan)
            if self.per_layer:
                sizes = [math.prod(shape) for shape in ctx.shapes]
                squares.append(torch.stack([part.square().sum() for part in torch.split(scaled, sizes)]))
            else:
                squares.append(scaled.square().sum()[None])
        norms = torch.stack(squares).sum(0).sqrt()
        limits = limit.to(torch.float64) / math.sqrt(len(norms))
        within = norms <= limits
        factors = torch.where(within | ~norms.isfinite(), torch.ones_like(norms), limits / norms)
        like = next(iter(streams.values()))
        # Rounded down, so that rounding does not exceed the norm.
        factors = round_down(factors, like)
        if self.per_layer:
            factors = factors.repeat_interleave(torch.tensor([math.prod(s) for s in ctx.shapes], device=like.device))
        else:
            factors = factors[0]
        return factors, within.all()

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, facts: FederationInfo) -> Tensors:
        """Initialize the clipping norms, and the record of the noise and number of rounds.

        Args:
            v: Initial model, ``[d]``.
            facts: Server's information about the federation.
        """
        plan = facts.plan
        count = 1 if self.streams == "joint" else 1 + len(plan.scales)
        largest = float(facts.sizes().max()) if facts.weights == "samples" else 1.0
        total = facts.total_weight() / largest
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
        new = {**state, "spent": add_round(state["spent"], z, plan.amplification)}
        if self.adaptive:
            bits = sums.upload.get(self.name, {}).get("bits")
            bits = torch.zeros_like(clip) if bits is None else bits.to(clip)
            noise = updates.normal(len(names), clip) * (bit_noise * math.sqrt(len(clip)) if z > 0 else 0.0)
            share = (0.5 + (bits + noise) / plan.divisor).clamp(0.0, 1.0)
            new["clip"] = clip * torch.exp(-self.clip_lr * (share - self.quantile))
        uploads: dict[str, Tensors] = {}
        for name in names[1:]:
            rule, _, upload = name.partition("/")
            uploads.setdefault(rule, {})[upload] = private[name]
        divisor = plan.divisor * float(state["mean_weight"])
        return new, Combined(private[UPDATE] / divisor, updates.b_global, uploads, divisor * float(state["largest"]))

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the privacy spent so far, and the clipping norm of the next round."""
        spent = self.spent(state)
        clip = state["clip"].tolist()
        return {
            "epsilon": None if math.isinf(spent) else spent,
            "clip_norm": clip[0] if len(clip) == 1 else clip,
        }

    def spent(self, state: Tensors) -> float:
        """Return epsilon of the finished rounds.

        Args:
            state: State of the rule.
        """
        history = [GaussianRounds(z, rate, int(steps)) for z, rate, steps in state["spent"].tolist()]
        return epsilon(history, float(state["delta"]), self.accountant)

    def stop_reason(self, state: Tensors) -> str | None:
        """Return a sentence if one more round would exceed ``epsilon``, otherwise None.

        Args:
            state: State of the rule.
        """
        if self.epsilon is None or not len(state["spent"]):
            return None
        more = add_round(state["spent"], float(state["noise"]), float(state["rate"]))
        after = self.spent({**state, "spent": more})
        if after <= self.epsilon * (1 + 1e-9):
            return None
        return f"The privacy budget is spent: one more round would give epsilon={after:.4g}, above {self.epsilon:g}."

    def report(self, state: Tensors, plan: RoundPlan) -> Report:
        """Return the guarantee of the finished rounds, and the reason to stop if the budget is spent."""
        spent, delta = self.spent(state), float(state["delta"])
        fields = {"epsilon": spent, "delta": delta, "noise_multiplier": float(state["noise"])}
        reason = self.stop_reason(state)
        if math.isinf(spent):
            text = "None: updates were clipped without noise."
            return Report({**fields, "epsilon": None, "privacy": text}, stop_reason=reason)
        rates = {float(rate) for _, rate, _ in state["spent"].tolist()}
        accountant = "exact Gaussian" if rates == {1.0} else f"{self.accountant.upper()} (opacus)"
        cohorts = "Poisson cohorts" if plan.sampling == "poisson" else "fixed cohorts, without amplification"
        text = (
            f"(epsilon={spent:.4g}, delta={delta:.3g}) for all data of one client, added or removed, against everyone who "
            f"sees the released models; {cohorts}, {accountant} accountant. Not covered: the server, which sees clipped "
            "updates; files other than the model, such as cohort sizes, class counts and metrics on the clients' held-out "
            "samples; statistics that standardize inputs; choices made with the same data, such as tuning and early stopping"
            f"{'; training losses and diagnostics (reveal=true)' if self.reveal else ''}."
        )
        return Report({**fields, "privacy": text}, stop_reason=reason)


def stream_names(plan: RoundPlan) -> list[str]:
    """Return the names of the protected streams, the update first."""
    return [UPDATE, *sorted(plan.scales)]


def scale_of(stream: str, plan: RoundPlan) -> float:
    """Return the factor that gives a stream the unit of an update.

    Args:
        stream: Name of the stream.
        plan: Schedule of the run.
    """
    return 1.0 if stream == UPDATE else plan.scales[stream]


def round_down(factors: Tensor, like: Tensor) -> Tensor:
    """Convert factors to the data type of ``like``; factors below 1 are rounded down by at least one step.

    Args:
        factors: Factors in float64.
        like: Tensor with the data type.
    """
    rounded = factors.to(like.dtype)
    # A product is rounded once more, by at most half a step of its own.
    return torch.where(factors < 1, rounded * (1 - 2 * torch.finfo(like.dtype).eps), rounded)


def add_round(spent: Tensor, noise: float, rate: float) -> Tensor:
    """Add one round to the record of noise multiplier, sampling rate and number of rounds, ``[n, 3]``.

    Args:
        spent: Record of the rounds so far.
        noise: Noise multiplier of the round.
        rate: Sampling rate of the round.
    """
    if len(spent) and spent[-1, 0] == noise and spent[-1, 1] == rate:
        spent = spent.clone()
        spent[-1, 2] += 1
        return spent
    return torch.cat([spent, spent.new_tensor([[noise, rate, 1.0]])])
