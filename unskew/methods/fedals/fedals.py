"""FedALS: the head is averaged in every round, the body of the model only every ``alpha`` rounds.

Gholami, Seferoglu, "Improved Generalization Bounds for Communication Efficient Federated Learning", 2024, arXiv:2404.11754,
Algorithm 1 in its intended semantics. A round has ``tau`` local steps. After round ``r`` (counted from 1)::

    h_k   <- mean_j h_j      in every round
    phi_k <- mean_j phi_j    if r is a multiple of alpha

Between two averages of the body, a client continues with *its own* body and the averaged head. Momentum stays at the client
and is neither averaged nor reset. Normalization buffers are sent with the layer before them. The evaluated model is the mean
of the clients' whole models, which the simulator computes without counting traffic. ``alpha = 1`` is FedAvg with this
momentum.

As printed, Algorithm 1 never averages the body (an ``else if`` whose condition implies the one before) and averages the
iterate before the step just taken; the authors' code tests each group separately, as this implementation does. Their code
averages after the steps 1, 1 + tau, ... instead of tau, 2 tau, ...; this shift is not reproduced. The paper weights clients
uniformly, its code by samples; for its equal splits both are the same, and the default here is by samples.

With partial participation (not in the paper), a client that missed an average of the body also downloads the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from unskew.errors import ConfigError, abbreviate
from unskew.methods.fedals.auto import PERIOD_METRICS, AutoPeriods, average_layers
from unskew.models.layer_groups import layer_groups, parameter_slices, split_at_depth
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import MetricSpec, Rule, Slices, SyncRule, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, one_of


def _pairs(value: Any) -> Any:
    """Convert ``head:1;body:10`` or a mapping to pairs."""
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
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        summary_metrics: Metrics of the method that the run summary repeats.
        alpha: Rounds between two averages of the body. 1 is FedAvg, except that momentum stays at the clients.
        split: Number of leading layers in the body, in order of depth (``unskew models MODEL`` shows them); -1 is all
            but the last. A transformer's layers are its blocks; its embeddings belong to the body and are not counted.
        periods: Rounds between two averages by pattern, such as ``body:10;head:1;*stem*:20``; in Python a dictionary.
            The last matching pattern applies. Without a match, ``alpha`` and ``split`` apply.
        auto: Set every layer's period from the measured drift: ``fedals:auto``.
        budget: With ``auto`` only, average share of the parameters sent per round.
        longest: With ``auto`` only, rounds after which the periods are set again, and the maximum period. A run of at
            most that many rounds raises an error, because it would be plain ``fedals``.
    """

    name: ClassVar[str] = "fedals"
    summary: ClassVar[str] = "averages the body of the model less often than its head"
    paper: ClassVar[str] = "Gholami and Seferoglu 2024, arXiv:2404.11754"
    # Periods from the paper, without 1 (FedAvg) and 100 (never reached in short runs).
    spaces: ClassVar[Mapping[str, Space]] = {"alpha": one_of(5, 10, 25, 50)}
    needs = ("optimizer", "mean_model")
    summary_metrics: ClassVar[tuple[MetricSpec, ...]] = PERIOD_METRICS

    alpha: Period = 10
    split: Annotated[int, Field(ge=-1)] = -1
    periods: Periods = ()
    auto: bool = False
    budget: Annotated[float, Field(gt=0, le=1)] = 0.1
    longest: Annotated[int, Field(ge=2)] = 50

    def __post_init__(self) -> None:
        """Validate that ``budget`` and ``longest`` are set only with ``auto``, and that ``budget`` suffices."""
        if not self.auto:
            for name, option_value in (("budget", self.budget), ("longest", self.longest)):
                if option_value != getattr(FedALS, name):
                    raise ConfigError(
                        f"fedals:{name}={option_value} needs auto. Use fedals:auto,{name}={option_value}."
                    )
        elif self.budget * self.longest < 1:
            raise ConfigError(
                f"fedals:budget={self.budget} is not enough to average all layers once in longest={self.longest} rounds. "
                "Increase one of them."
            )

    @property
    def slots(self) -> Mapping[str, Rule] | None:  # type: ignore[override]
        """``AutoPeriods`` with ``auto``, which is a client and a sync rule; otherwise this rule."""
        if not self.auto:
            return None
        auto = AutoPeriods(FedALS(self.alpha, self.split, self.periods), self.budget, self.longest)
        return {"client": auto, "sync": auto}

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Download layers averaged since the client last took part; upload layers averaged after this round."""
        periods = _periods(self, spec)
        missed = tuple(last is None or last // p < round // p for p in periods)
        due = tuple((round + 1) % p == 0 for p in periods)
        return parameter_slices(spec, missed), parameter_slices(spec, due)

    def metrics(self, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
        """Return the numbers of the layers averaged after the round, in order of depth, and all periods."""
        periods = _periods(self, spec)
        return average_layers([(round + 1) % p == 0 for p in periods], periods)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the model, and warn about layers that are never averaged.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the model has no body that could be averaged less often.
        """
        periods = _periods(self, run.spec)
        if len(periods) == 1 and self.alpha > 1 and self.split < 0 and not self.periods:
            raise ConfigError(
                "fedals averages the body of the model less often than its head, but this model has only one layer, its "
                "head. Use a model with more layers, or fedals:split=1 to average that layer less often."
            )
        late = [group.name for group, p in zip(layer_groups(run.spec), periods, strict=True) if p > run.rounds]
        if not late:
            return ()
        return [
            f"The run has {run.rounds} rounds, so fedals never averages {abbreviate(late, 3)}: their period is "
            f"{max(periods)} rounds. Clients do not share these layers. Set rounds to at least {max(periods)}, or "
            f"{'the periods' if self.periods else 'fedals:alpha'} to at most {run.rounds}."
        ]

    def periods_of(self, spec: ModelSpec) -> list[int]:
        """Return the number of rounds between two averages of each layer group, in order of depth.

        Args:
            spec: Layout of the model.

        Raises:
            ConfigError: If ``split`` exceeds the number of layers, or a pattern matches no layer.
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
            hint = f" To match all names that contain {unused[0]!r}, use '*{unused[0]}*'." if within else ""
            raise ConfigError(f"fedals: the pattern {unused[0]!r} matches no layer. Layers: {names}.{hint}")
        return periods


@lru_cache(maxsize=8)
def _periods(rule: FedALS, spec: ModelSpec) -> tuple[int, ...]:
    return tuple(rule.periods_of(spec))
