"""Notes next to the ranked methods: on the budget, on limits, and on gaps of knowledge."""

from __future__ import annotations

import math

from unskew.diagnosis.features import AdviceLimits, SkewFeatures


def budget_notes(s: SkewFeatures, limits: AdviceLimits, rounds: int) -> list[str]:
    """Return notes on rounds, local steps and traffic.

    Args:
        s: Features of the data and the model.
        limits: User's limits.
        rounds: Number of rounds.
    """
    lines = []
    if s.over_traffic is not None and limits.traffic is not None and s.over_traffic > 1:
        fits = "not even one round fits" if s.over_traffic > s.asked else f"{rounds} rounds fit"
        lines.append(
            f"FedAvg would send {s.over_traffic:.1f} times the {limits.traffic / 1e6:.3g} MB allowed; {fits}, "
            f"and the comparison has {rounds}. Compressed uploads need fewer bytes: +int8 a quarter, +qsgd a sixth "
            "(docs/send-less.md)."
        )
    if math.isfinite(s.noise) and s.noise < s.tau / 4:
        lines.append(
            f"After {max(1, round(s.noise))} of {s.tau:.0f} local steps, client drift exceeds gradient noise; more local "
            "steps will save few rounds (Corollary I, docs/theory.md)."
        )
    elif math.isfinite(s.noise) and s.noise > 4 * s.tau:
        lines.append(
            f"Up to about {s.noise:.0f} local steps, gradient noise exceeds client drift (sigma^2 over batch size and "
            f"zeta^2). By Corollary I, more than {s.tau:.0f} steps per round would save rounds and traffic (docs/theory.md)."
        )
    return lines


def notes(s: SkewFeatures, limits: AdviceLimits, any_method: bool) -> list[str]:
    """Return notes on limits, on other possible remedies, and on gaps of knowledge.

    Args:
        s: Features of the data and the model.
        limits: User's limits.
        any_method: Whether any method is suggested.
    """
    lines = []
    if not any_method:
        lines.append("No rule suggests any method over FedAvg here.")
    if s.skew >= 0.15:
        lines.append(
            "If each client may have its own model, try +ft, ditto and fedrep, too. Judge them by personal_accuracy_mean; "
            "no rule here covers it."
        )
    if s.features is not None and s.features >= 0.1:
        lines.append(
            f"{s.features:.0%} of the variance of inputs within a class is between clients. Only models with normalization "
            "layers have a rule for feature skew."
        )
    if limits.epsilon is not None:
        lines.append(
            f"For a private model, add dp:epsilon={limits.epsilon:g} and sampling=poisson to a method, and check with unskew "
            "privacy whether the cohorts are large enough. The rules do not include the cost of noise: in "
            "docs/results/trust.md, SCAFFOLD did not survive it, and FedAvg lost 1.3 points at epsilon 8."
        )
    if s.task == "language":
        lines.append("Nothing was measured here on text: advice for it rests on publications only.")
    elif s.task not in ("classification", "multilabel"):
        lines.append(f"Nothing was measured here for the task {s.task}: advice for it rests on publications only.")
    elif not s.images:
        lines.append("The result tables are about images; for other inputs their rules are a guess.")
    if s.participation < 1:
        lines.append(f"Few results here have {s.participation:.0%} of the clients in a round.")
    if s.delayed:
        lines.append("Only Feddle's result tables have late updates, and only in one setting.")
    return lines
