"""Clipping of what clients send, which both variants of ``dp`` share: noise at the server and noise at the sites."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.privacy.accounting import LARGEST_NOISE, check_delta, default_delta
from unskew.protocol.payload import UPDATE
from unskew.protocol.requirements import single_reads
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import (
    AggregateRule,
    ClientRule,
    DataRule,
    Method,
    Report,
    Stage,
    Tensors,
    UploadContext,
    Weights,
)
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.secret_draws import is_seeded, seeded_report, seeded_warnings

Positive = Annotated[float, Field(gt=0)]
LARGEST_DELTA = 0.05
"""Largest delta without a warning."""
BITS = "dp/bits"
"""Stream with one number per clipped vector: 1/2 if it was within its norm, otherwise -1/2."""


@dataclass(frozen=True)
class ClippedSum(ClientRule, AggregateRule):
    """Differentially private mean of the updates, for one client added or removed.

    Attributes:
        noise: Noise multiplier ``z``. Set ``noise``, ``epsilon`` or both.
        epsilon: Privacy budget of the run. Without ``noise``, the noise is computed from it; with ``noise``, the run
            stops before it is exceeded.
        delta: Probability that the guarantee does not hold; none for ``K^-1.1``. It must be below ``1/K``.
        clip: Clipping norm ``C``; with ``adaptive``, that of the first round.
        adaptive: Adapt ``C`` to the norms of the updates.
        quantile: Share of updates that should not be clipped.
        clip_lr: Step size of the adaptation. ``quantile``, ``clip_lr`` and ``bit_noise`` are errors with
            ``adaptive=false``.
        bit_noise: Standard deviation ``σ_b`` of the noise on the number of clients that were not clipped; none for
            ``m/20``. It must be above ``noise/2``.
        streams: Clip the update and other uploads as one vector (``joint``), or each on its own (``apart``).
        per_layer: Clip each of the model's ``L`` parameter tensors to ``C/√L``.
        accountant: How the ``epsilon`` of all rounds together is computed with Poisson cohorts: ``rdp`` (Rényi
            differential privacy) or ``prv`` (privacy random variables), which is slower and gives a smaller
            ``epsilon``. ``noise_at=sites`` has an accountant of its own.
        public_sizes: The clients' numbers of samples are public, so ``client_weighting: samples`` may be used.
        reveal: Record the training loss, and allow ``diagnose`` and ``save_samples``, which the guarantee does not
            cover.
        noise_at: Who adds the noise: the ``server``, or the ``sites``.
        honest: With ``noise_at=sites``, minimum number of clients in a sum that add their noise and do not reveal it.
        reproducible: Compute noise and cohorts from the seed, so that the run can be repeated. There is then no
            guarantee.
    """

    name: ClassVar[str] = "dp"
    summary: ClassVar[str] = "differential privacy of clients: clipped updates and noise"
    paper: ClassVar[str] = "McMahan et al. 2018, arXiv:1710.06963; Andrew et al. 2021, arXiv:1905.03871"
    supports_delays: ClassVar[bool] = False
    weights: ClassVar[Weights | None] = "uniform"
    needs = ("equal_slices",)
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"bits": (-0.5, 0.5)}
    stage: ClassVar[Stage] = "clip"
    combines_empty: ClassVar[bool] = True
    continued: ClassVar[tuple[str, ...]] = ("spent",)
    spaces: ClassVar[Mapping[str, Space]] = {"clip": log_range(0.01, 10.0)}
    idle_options = (
        ({"adaptive": False}, ("quantile", "clip_lr", "bit_noise")),
        ({"noise": 0}, ("epsilon", "bit_noise")),
        ({"noise_at": "sites"}, ("accountant",)),
    )

    noise: Annotated[float, Field(ge=0, le=LARGEST_NOISE)] | None = None
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
    noise_at: Literal["server", "sites"] = "server"
    honest: Annotated[int, Field(ge=1)] | None = None
    reproducible: bool = False

    @property
    def draws_secretly(self) -> bool:  # type: ignore[override]
        """Return whether noise and cohorts are drawn from a secret key."""
        return self.noise != 0 and not self.reproducible

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
            if rule is not self and (reads := single_reads(rule)):
                return f"{rule.name} {reads}, but dp protects only the sum of updates. Remove one of them."
        for client_rule in method.client:
            if client_rule.uploads and not client_rule.private:
                return (
                    f"{client_rule.name} uploads values of unknown sensitivity besides the model, which dp cannot protect. "
                    "Use scaffold, fedpvr, or a method that sends only the model."
                )
        if callable(method.weights):
            return (
                f"{method.name} weights clients by their data, which dp does not protect. Remove one of the two rules."
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

    def check_protected(self, run: PreRunContext) -> None:
        """Validate that all that clients send is clipped.

        Args:
            run: Configuration, federation and model of the run.

        Raises:
            ConfigError: If something that clients send would not be protected, or the options are contradictory.
        """
        run.need_no_reports(self.name)
        if self.noise is None and self.epsilon is None:
            raise ConfigError("dp needs noise or epsilon, such as dp:epsilon=8.")
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

    def delta_of(self, plan: RoundPlan) -> float:
        """Return delta, by default ``K^-1.1``.

        Args:
            plan: Schedule of the run.
        """
        delta = default_delta(plan.clients) if self.delta is None else self.delta
        check_delta(delta, plan.clients)
        return delta

    def common_warnings(self, plan: RoundPlan) -> list[str]:
        """Return a warning if delta is so large that the guarantee means little, and one if there is none.

        Args:
            plan: Schedule of the run.
        """
        warnings = seeded_warnings(self.name, self.reproducible)
        if self.delta_of(plan) <= LARGEST_DELTA:
            return warnings
        return [
            *warnings,
            f"delta={self.delta_of(plan):.2g} is large, because there are only {plan.clients} clients: the guarantee means "
            "little. Use more clients.",
        ]

    @property
    def sign(self) -> int:
        """Sign of the noise in the record of rounds; -1 if it was computed from the seed."""
        return -1 if self.reproducible else 1

    # ---- at the clients -------------------------------------------------------------------------------------------------

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
        # A norm that overflows gives the factor 0, so that the update contributes nothing.
        factors = torch.where(within | norms.isnan(), torch.ones_like(norms), limits / norms)
        like = next(iter(streams.values()))
        # Rounded down, so that rounding does not exceed the norm.
        factors = round_down(factors, like)
        if self.per_layer:
            factors = factors.repeat_interleave(torch.tensor([math.prod(s) for s in ctx.shapes], device=like.device))
        else:
            factors = factors[0]
        return factors, within.all()

    # ---- at the server --------------------------------------------------------------------------------------------------

    def spent(self, state: Tensors) -> float:
        """Return epsilon of the finished rounds.

        Args:
            state: State of the rule.
        """
        raise NotImplementedError

    def guarantee(self, state: Tensors, plan: RoundPlan, spent: float, delta: float) -> dict[str, Any]:
        """Describe the guarantee of the finished rounds, as fields of the report.

        Args:
            state: State of the rule.
            plan: Schedule of the run.
            spent: Epsilon of the finished rounds.
            delta: Delta.
        """
        raise NotImplementedError

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the privacy spent so far."""
        spent = self.spent(state)
        return {"epsilon_if_secret" if is_seeded(state["spent"]) else "epsilon": None if math.isinf(spent) else spent}

    def report(self, state: Tensors, plan: RoundPlan) -> Report:
        """Return the guarantee of the finished rounds, and the reason to stop if the budget is spent."""
        spent, delta = self.spent(state), float(state["delta"])
        fields: dict[str, Any] = {"epsilon": spent, "delta": delta, "noise_multiplier": float(state["noise"])}
        if math.isinf(spent):
            fields |= {"epsilon": None, "privacy": "None: updates were clipped without noise."}
        elif is_seeded(state["spent"]):
            fields = seeded_report(fields)
        else:
            fields |= self.guarantee(state, plan, spent, delta)
        return Report(fields, stop_reason=self.stop_reason(state))

    def after_round(self, state: Tensors) -> Tensor:
        """Return the record of rounds with one more round.

        Args:
            state: State of the rule.
        """
        raise NotImplementedError

    def stop_reason(self, state: Tensors) -> str | None:
        """Return a sentence if one more round would exceed ``epsilon``.

        Args:
            state: State of the rule.
        """
        if self.epsilon is None or not len(state["spent"]):
            return None
        after = self.spent({**state, "spent": self.after_round(state)})
        if after <= self.epsilon * (1 + 1e-9):
            return None
        return f"The privacy budget is spent: one more round would give epsilon={after:.4g}, above {self.epsilon:g}."


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


def split_streams(streams: Tensors) -> dict[str, Tensors]:
    """Return the uploads among streams, by rule and name.

    Args:
        streams: Streams by name.
    """
    uploads: dict[str, Tensors] = {}
    for name, stream in streams.items():
        if name != UPDATE:
            rule, _, upload = name.partition("/")
            uploads.setdefault(rule, {})[upload] = stream
    return uploads


def check_record(spent: Tensor, columns: int) -> None:
    """Validate that a record of rounds has the numbers of this kind of noise.

    Args:
        spent: Record of the rounds, ``[n, columns]``.
        columns: Expected number of columns.

    Raises:
        ConfigError: If the record belongs to another kind of noise.
    """
    if spent.shape[1] != columns:
        raise ConfigError(
            "The run in start_from added its noise elsewhere (noise_at), and the privacy of both cannot be added. Use the "
            "same noise_at."
        )


def add_row(spent: Tensor, values: tuple[float, ...]) -> Tensor:
    """Add one round to a record of rounds, ``[n, columns]``; the last column counts equal rounds in a row.

    Args:
        spent: Record of the rounds so far.
        values: Numbers that describe the round.

    Raises:
        ConfigError: If the record belongs to another kind of noise.
    """
    check_record(spent, len(values) + 1)
    row = spent.new_tensor([*values, 1.0])
    if len(spent) and torch.equal(spent[-1, :-1], row[:-1]):
        spent = spent.clone()
        spent[-1, -1] += 1
        return spent
    return torch.cat([spent, row[None]])
