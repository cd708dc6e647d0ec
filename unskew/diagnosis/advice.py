"""Advice on skewed data: methods with an expected gain over tuned FedAvg, and methods that do not fit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unskew.config.loader import experiment
from unskew.diagnosis.advice_notes import budget_notes, evidence_note, notes
from unskew.diagnosis.evidence import (
    CONSIDERED,
    MEASURED_TASKS,
    SUGGESTED,
    WORTHWHILE,
    ExpectedGain,
    View,
    complementary,
    coordinates,
    expected_gains,
    load_evidence,
    order_by_cost,
)
from unskew.diagnosis.features import AdviceContext, AdviceLimits, SkewFeatures
from unskew.diagnosis.traffic_estimate import estimate_traffic
from unskew.errors import UnskewError
from unskew.methods.registry import method
from unskew.protocol.rules import Method
from unskew.records.notebook import NotebookTable
from unskew.runs.cost import duration, estimate
from unskew.runs.validation import resolve_run
from unskew.simulation.personal_models import has_personal_models

if TYPE_CHECKING:
    from unskew.measurements.heterogeneity import HeterogeneityMeasurement
    from unskew.sums.statistics import Metrics

PERSONAL = 2
"""Number of methods with personal models to try, if one model for all clients cannot be enough."""
LISTED = 5
"""Maximum number of suggestions, of each kind."""


@dataclass(frozen=True)
class Suggestion:
    """Suggested method.

    Attributes:
        method: Method expression.
        gain: Expected difference to tuned FedAvg in points of the primary metric.
        measured: Title and measured difference of the most similar federations of the benchmark; empty if no method was
            measured on the task, so that the gain only orders methods.
        federations: Number of federations of the benchmark over which the gain is a weighted mean.
        cautions: Warnings of the method about this setting.
        megabytes: Traffic up and down over all clients; None if no traffic limit was set.
        seconds: Estimated time of the run in seconds; None if it was not estimated.
        cost: Estimated time relative to FedAvg's.
    """

    method: str
    gain: float
    measured: list[tuple[str, float]]
    federations: int
    cautions: list[str]
    megabytes: float | None = None
    seconds: float | None = None
    cost: float | None = None

    @property
    def reason(self) -> str:
        """Expected gain and the measurements that it is based on, as a sentence."""
        if not self.measured:
            return "Above tuned FedAvg on other tasks; the gain on this one is unknown."
        similar = "; ".join(f"{title} ({gain:+.1f})" for title, gain in self.measured)
        number = f"{self.federations} measured federation{'s' if self.federations != 1 else ''}"
        return (
            f"Expected gain over tuned FedAvg: {self.gain:+.1f} points, a mean over {number}, weighted by similarity to "
            f"these data. The most similar: {similar}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return all fields as plain values; the gain is None if no method was measured on the task."""
        return {**asdict(self), "gain": self.gain if self.measured else None}


@dataclass(frozen=True)
class Excluded:
    """Method with an expected gain that does not fit.

    Attributes:
        method: Method expression.
        reason: Reason as a sentence.
    """

    method: str
    reason: str


@dataclass(frozen=True, repr=False)
class Advice(NotebookTable):
    """Methods to compare with FedAvg.

    Attributes:
        suggestions: Methods for one global model: three that complement each other, then the others. Within each part, the
            largest expected gain is first; of close ones, the cheaper.
        personal: Methods by their gains on the clients' own data, with personal or global models, in the same order.
        excluded: Methods with an expected gain that do not fit, with the reason.
        notes: Further information, including gaps of knowledge.
        rounds: Rounds of the comparison; fewer than configured if FedAvg would exceed the traffic limit.
        setting: Diagnosed data, model and configuration, with the limits applied.
        situation: Features of the data and the model.
    """

    suggestions: list[Suggestion]
    personal: list[Suggestion]
    excluded: list[Excluded]
    notes: list[str]
    rounds: int
    setting: AdviceContext = field(compare=False)
    situation: SkewFeatures

    @property
    def methods(self) -> list[str]:
        """Methods of the comparison: FedAvg and the best suggestions, and personal ones if the label differs by client."""
        names = ["fedavg", *(s.method for s in self.suggestions[:SUGGESTED])]
        if not self.situation.needs_personal_models:
            return names
        spec = self.setting.spec
        personal = [s.method for s in self.personal if has_personal_models(method(s.method), spec)]
        return [*names, *(personal[:PERSONAL] or ["ft"]), "local"]

    @property
    def caveat(self) -> str:
        """Note that no method was measured on the task; empty if some were."""
        return evidence_note(self.situation.task)

    def _sentences(self) -> list[str]:
        return [*filter(None, [self.caveat]), f"Compare {', '.join(self.methods)}.", *self.notes]

    def _shown(self) -> list[dict[str, object]]:
        groups = {"one global model": self.suggestions, "the clients' own data": self.personal}
        rows: list[dict[str, object]] = [
            {"for": group, "method": suggestion.method, "reason": " ".join([suggestion.reason, *suggestion.cautions])}
            for group, suggestions in groups.items()
            for suggestion in suggestions
        ]
        return [*rows, *({"for": "not applicable", **vars(excluded)} for excluded in self.excluded)]

    def with_costs(self) -> Advice:
        """Return the advice with the estimated time of each method; of close expected gains, the faster comes first.

        One client is trained for two rounds of FedAvg and of each suggested method. Methods that train generators
        before the first round have no estimate, because generators take most of their time.
        """
        setting = self.setting
        config = setting.config.model_copy(update={"rounds": self.rounds})
        estimated = [
            suggestion.method
            for suggestion in (*self.suggestions, *self.personal)
            if not any(rule.generates_data for rule in method(suggestion.method).data)
        ]
        names = ["fedavg", *estimated]
        runs = {name: (config.model_copy(update={"method": name}), method(name), 1) for name in names}
        costs = estimate(runs, setting.federation, setting.model, worth=0.0)
        if costs is None or "fedavg" not in costs.seconds:
            return self

        def with_time(suggestions: list[Suggestion]) -> list[Suggestion]:
            timed = [
                replace(suggestion, seconds=costs.seconds[suggestion.method], cost=costs.ratio(suggestion.method))
                if suggestion.method in costs.seconds
                else suggestion
                for suggestion in suggestions
            ]
            ordered: list[Suggestion] = []
            for part in (timed[:SUGGESTED], timed[SUGGESTED:]):  # the first ones complement each other
                part.sort(key=lambda suggestion: -suggestion.gain)
                ordered += order_by_cost(part, lambda entry: math.inf if entry.cost is None else entry.cost)
            return ordered

        text = f"Estimated time of FedAvg: {duration(costs.seconds['fedavg'])}."
        return replace(
            self,
            suggestions=with_time(self.suggestions),
            personal=with_time(self.personal),
            notes=[*self.notes, " ".join([text, *costs.notes])],
        )

    def options(self, file: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the fields of the comparison that differ from the defaults.

        Args:
            file: Values of a configuration file that the comparison reads; fields equal to these are omitted.
        """
        config = self.setting.config.model_copy(update={"rounds": self.rounds})
        values = config.model_dump(mode="json")
        usual = experiment({**(file or {}), "method": "fedavg"}).model_dump(mode="json")
        if values["local_steps"] is not None:
            usual["local_epochs"] = None
        return {k: v for k, v in values.items() if v != usual[k] and k not in ("method", "seed", "diagnose", "target")}

    def command(
        self, flags: Collection[str] = (), file: Path | None = None, stored: Mapping[str, Any] | None = None
    ) -> str:
        """Return the command that compares the methods, or Python code if the data were given in Python.

        Args:
            flags: Fields that have their own flag; others are written with ``--set``.
            file: Configuration file to append to the command.
            stored: Values of that file.
        """
        values = self.options(stored)
        if self.setting.given or self.setting.model is not None:
            for name in ("data", "partition", "clients", "model"):
                values.pop(name, None)
            rest = "".join(f", {name}={value!r}" for name, value in values.items())
            return f"unskew.compare(federation, methods={self.methods!r}, model=model{rest})"
        words = ["unskew", "compare", *self.methods]
        for name, value in values.items():
            if name in flags and isinstance(value, str | int | float) and not isinstance(value, bool):
                words += [f"--{name.replace('_', '-')}", str(value)]
            else:
                words += [
                    "--set",
                    f"{name}={yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}",
                ]
        return shlex.join([*words, *([] if file is None else [str(file)])])

    def as_json(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return {
            "suggestions": [entry.as_json() for entry in self.suggestions],
            "personal": [entry.as_json() for entry in self.personal],
            "excluded": [asdict(entry) for entry in self.excluded],
            "notes": [*filter(None, [self.caveat]), *self.notes],
            "methods": self.methods,
            "command": self.command(),
        }

    def __str__(self) -> str:
        """Return the advice as text."""
        lines = [self.caveat] if self.caveat else []
        for title, entries in (
            ("", self.suggestions),
            ("On the clients' own data, also with a model for each client:", self.personal),
        ):
            lines += [title] if title and entries else []
            for number, entry in enumerate(entries, 1):
                lines += [f"{number}. {entry.method}", *(f"   {text}" for text in (entry.reason, *entry.cautions))]
        lines += [f"not {entry.method}: {entry.reason}" for entry in self.excluded]
        return "\n".join([*lines, *self.notes, self.command()])


def advise(
    setting: AdviceContext,
    labels: Metrics,
    measurement: HeterogeneityMeasurement,
    details: dict[str, Any],
    limits: AdviceLimits,
) -> Advice:
    """Derive advice from a diagnosis and the user's limits.

    Args:
        setting: Data, model and configuration that were diagnosed.
        labels: Label skew metrics.
        measurement: Measurement at the first model.
        details: Data and model, as in the report.
        limits: User's limits.

    Raises:
        DataError: If the limits do not fit the data.
    """
    setting = setting.under(limits)
    # The first measured model is the one that training starts from.
    situation = SkewFeatures.of(setting, labels, measurement, details)
    rounds = setting.config.rounds
    if limits.traffic is not None:
        before, each = estimate_traffic(setting, method("fedavg"))
        situation = replace(situation, over_traffic=(before + each * rounds) / limits.traffic)
        rounds = max(1, min(rounds, int((limits.traffic - before) // each)))
        if rounds < setting.config.rounds:
            # Options that depend on the number of rounds use the number that the traffic limit allows.
            situation = replace(situation, rounds=rounds)
            setting = replace(setting, config=setting.config.model_copy(update={"rounds": rounds}))
    suggestions, excluded = suggest("global", situation, setting, limits)
    personal, excluded_personal = suggest("clients", situation, setting, limits)
    excluded += [entry for entry in excluded_personal if entry not in excluded]
    notes_list = [*budget_notes(situation, limits, rounds), *notes(situation, limits, bool(suggestions))]
    return Advice(suggestions, personal, excluded, notes_list, rounds, setting, situation)


def suggest(
    view: View, situation: SkewFeatures, setting: AdviceContext, limits: AdviceLimits
) -> tuple[list[Suggestion], list[Excluded]]:
    """Return the methods with an expected gain: those that fit, and those that do not.

    Args:
        view: ``global`` for methods with one global model on test data, ``clients`` for all methods on the clients' data.
        situation: Features of the data and the model.
        setting: Data, model and configuration.
        limits: User's limits.
    """
    here, evidence = coordinates(situation), load_evidence()[0]
    fitting: dict[str, Suggestion] = {}
    entries: list[ExpectedGain] = []
    excluded = []
    for expected in expected_gains(here, view, evidence):
        if expected.gain < WORTHWHILE or len(entries) == CONSIDERED:
            continue
        evaluated = evaluate_suggestion(expected, method(expected.method), setting, limits)
        if isinstance(evaluated, Excluded):
            excluded.append(evaluated)
        else:
            entries.append(expected)
            fitting[expected.method] = evaluated
    ordered = complementary(entries, here, view, evidence)
    return [fitting[entry.method] for entry in ordered[:LISTED]], excluded


def evaluate_suggestion(
    expected: ExpectedGain, chosen: Method, setting: AdviceContext, limits: AdviceLimits
) -> Suggestion | Excluded:
    """Evaluate a method with an expected gain: return it as a suggestion, or the reason why it does not fit.

    Args:
        expected: Expected gain of the method.
        chosen: The method.
        setting: Data, model and configuration.
        limits: User's limits.
    """
    try:
        warnings = resolve_run(setting.config, setting.federation, setting.model, chosen).warnings
    except UnskewError as error:
        return Excluded(expected.method, str(error))
    if limits.epsilon is not None and any(data_rule.generates_data for data_rule in chosen.data):
        return Excluded(
            expected.method,
            f"Generated images would have to be private at epsilon = {limits.epsilon:g}, and private generators took more "
            "rounds than no images (docs/results/fedssyn.md, privacy).",
        )
    total = None
    if limits.traffic is not None:
        try:
            before, each = estimate_traffic(setting, chosen)
        except Exception as error:  # of any kind: one method must not end the advice on the others
            return Excluded(expected.method, f"Its traffic could not be estimated ({type(error).__name__}): {error}")
        total = before + each * setting.config.rounds
        if total > limits.traffic:
            return Excluded(
                expected.method,
                f"It would send {total / 1e6:.3g} MB in {setting.config.rounds} rounds, more than the "
                f"{limits.traffic / 1e6:.3g} MB allowed.",
            )
    megabytes = None if total is None else total / 1e6
    measured = expected.measured if setting.federation.task in MEASURED_TASKS else []
    return Suggestion(expected.method, expected.gain, measured, expected.federations, list(warnings), megabytes)
