"""FedALS: the head is averaged in every round, the body of the model ten times less often.

Gholami, Seferoglu, "Improved Generalization Bounds for Communication Efficient Federated Learning", 2024, arXiv:2404.11754,
Algorithm 1 in its intended semantics. A round is ``tau`` local steps. After round ``r`` (counted from 1)::

    h_k   <- mean_j h_j      in every round
    phi_k <- mean_j phi_j    if r is a multiple of alpha

so between two averages of the body a client goes on with *its own* body and the averaged head. Momentum stays at the client,
neither averaged nor reset; normalization statistics travel with the layer before them. What is evaluated is the mean of the
clients' whole models, which the simulator knows and nobody pays for. ``alpha = 1`` is FedAvg (with that momentum).

As printed, Algorithm 1 never averages the body (an ``else if`` whose condition implies the one before) and averages the
iterate before the step just taken; the authors' code tests each group on its own, as here. It averages after the steps
1, 1 + tau, ... instead of tau, 2 tau, ...: that shift is not reproduced. The paper weighs clients alike, its code by samples;
for its equal splits that is the same, and here the default is by samples.

With a part of the clients per round (not in the paper) one that missed an average of the body downloads the body, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from unskew.errors import ConfigError
from unskew.methods.fedals.auto import FIGURES, AutoPeriods, average_layers
from unskew.models.layer_groups import layer_groups, parameter_slices, split_at_depth
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import Method, MetricSpec, Slices, SyncRule, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, one_of


def _pairs(value: Any) -> Any:
    """``head:1;body:10`` or a mapping as pairs."""
    if isinstance(value, str):
        pairs = [part.split(":") for part in value.split(";") if part.strip()]
        if any(len(part) != 2 for part in pairs):
            raise ValueError("write it as head:1;body:10;*stem*:20")
        return tuple((name.strip(), period) for name, period in pairs)
    return tuple(value.items()) if isinstance(value, Mapping) else value


Period = Annotated[int, Field(ge=1)]
Periods = Annotated[tuple[tuple[str, Period], ...], BeforeValidator(_pairs)]


@dataclass(frozen=True)
class FedALS(SyncRule):
    """Adaptive local steps.

    Attributes:
        alpha: Rounds between two averages of the body.
        split: Number of leading layers in the body, in order of depth; -1: all but the last. A transformer's layers are its
            blocks; its embeddings are in the body in any case and are not counted.
        periods: Rounds between two averages, by pattern: ``head``, ``body``, or a layer's name with ``*`` for any text. Of
            several that fit a layer the last counts; without one that fits, ``alpha`` and ``split`` decide.
        auto: Set the periods from the measured drift (``unskew.methods.fedals.auto``), beginning with these.
        budget: With ``auto``: share of the parameters that travel per round on the average.
        longest: With ``auto``: rounds after which the periods are set anew, and the longest period.
    """

    name: ClassVar[str] = "fedals"
    summary: ClassVar[str] = "averages the body of the model less often than its head"
    paper: ClassVar[str] = "Gholami and Seferoglu 2024, arXiv:2404.11754"
    # Periods that the paper studies, without 1, which is FedAvg, and 100, which short runs never reach.
    spaces: ClassVar[Mapping[str, Space]] = {"alpha": one_of(5, 10, 25, 50)}
    needs = ("optimizer", "mean_model")
    summary_metrics: ClassVar[tuple[MetricSpec, ...]] = FIGURES

    alpha: Period = 10
    split: Annotated[int, Field(ge=-1)] = -1
    periods: Periods = ()
    auto: bool = False
    budget: Annotated[float, Field(gt=0, le=1)] = 0.1
    longest: Annotated[int, Field(ge=2)] = 50

    def build(self) -> Method:
        """This rule, or the one that adapts its periods.

        Raises:
            ConfigError: The budget is less than averaging every layer once per ``longest`` rounds, or belongs to ``auto``.
        """
        if not self.auto:
            for name, option_value in (("budget", self.budget), ("longest", self.longest)):
                if option_value != getattr(FedALS, name):
                    raise ConfigError(
                        f"fedals:{name}={option_value} belongs to auto; write fedals:auto,{name}={option_value}."
                    )
            return super().build()
        if self.budget * self.longest < 1:
            raise ConfigError(
                f"fedals:budget={self.budget} is less than averaging everything once in longest={self.longest} rounds; "
                "raise one of the two."
            )
        auto = AutoPeriods(FedALS(self.alpha, self.split, self.periods), self.budget, self.longest)
        return Method(name=self.name, client=(auto,), sync=auto)

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Down: what was averaged since the client last took part. Up: what is averaged after this round."""
        periods = _periods(self, spec)
        missed = tuple(last is None or last // p < round // p for p in periods)
        due = tuple((round + 1) % p == 0 for p in periods)
        return parameter_slices(spec, missed), parameter_slices(spec, due)

    def round_metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """The layers that were averaged after the round, by their numbers in order of depth, and all periods."""
        periods = _periods(self, spec)
        return average_layers([(round + 1) % p == 0 for p in periods], periods)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Layers that are never averaged are told.

        Raises:
            ConfigError: The model has no body that could be averaged less often; or updates are delayed.
        """
        super().check(run)
        periods = _periods(self, run.spec)
        if len(periods) == 1 and self.alpha > 1 and self.split < 0 and not self.periods:
            raise ConfigError(
                "fedals averages the body of the model less often than its head, but this model has one layer only, its "
                "head. Use a model with more layers, or fedals:split=1 to average that layer less often."
            )
        late = [group.name for group, p in zip(layer_groups(run.spec), periods, strict=True) if p > run.rounds]
        if not late:
            return ()
        names = ", ".join(late[:3]) + (f" and {len(late) - 3} more" if len(late) > 3 else "")
        return [
            f"The run has {run.rounds} rounds, so fedals never averages {names}: {max(periods)} rounds lie between two "
            f"averages, so every client keeps these layers as they were. Set rounds to at least {max(periods)}, or "
            f"{'the periods' if self.periods else 'fedals:alpha'} to at most {run.rounds}."
        ]

    def periods_of(self, spec: ModelSpec) -> list[int]:
        """Rounds between two averages of each layer group, in order of depth.

        Raises:
            ConfigError: The split is beyond the model, or a pattern fits no layer.
        """
        groups = layer_groups(spec)
        body, _ = split_at_depth(groups, self.split)
        periods = []
        used = set()
        for number, group in enumerate(groups):
            part = "body" if number < len(body) else "head"
            fitting = [
                (pattern, period)
                for pattern, period in self.periods
                if pattern == part or any(fnmatch(layer, pattern) for layer in (group.name, *group.layers))
            ]
            used |= {pattern for pattern, _ in fitting}
            periods.append(fitting[-1][1] if fitting else (self.alpha if part == "body" else 1))
        unused = [pattern for pattern, _ in self.periods if pattern not in used and pattern not in ("head", "body")]
        if unused:
            names = ", ".join(group.name for group in groups)
            within = any(unused[0] in layer for group in groups for layer in (group.name, *group.layers))
            hint = f" For all with {unused[0]!r} in their name write '*{unused[0]}*'." if within else ""
            raise ConfigError(f"fedals: the pattern {unused[0]!r} fits no layer; the layers are {names}.{hint}")
        return periods


@lru_cache(maxsize=8)
def _periods(rule: FedALS, spec: ModelSpec) -> tuple[int, ...]:
    return tuple(rule.periods_of(spec))
