"""Notes next to the ranked methods: on the budget, on limits, and on missing knowledge."""

from __future__ import annotations

import math

from unskew.diagnosis.features import AdviceLimits, SkewFeatures


def budget_notes(s: SkewFeatures, limits: AdviceLimits, rounds: int) -> list[str]:
    """About rounds, local steps and traffic.

    Args:
        s: Features of the data and the model.
        limits: Limits that the user gave.
        rounds: Number of rounds.
    """
    lines = []
    if s.over_traffic is not None and limits.traffic is not None and s.over_traffic > 1:
        fits = "not even one round fits" if s.over_traffic > s.asked else f"{rounds} rounds fit"
        lines.append(
            f"FedAvg would send {s.over_traffic:.1f} times the {limits.traffic / 1e6:.3g} MB allowed; {fits}, "
            f"and the comparison has {rounds}."
        )
    if math.isfinite(s.noise) and s.noise < s.tau / 4:
        lines.append(
            f"After {max(1, round(s.noise))} of {s.tau:.0f} local steps, client drift exceeds gradient noise; more local "
            "steps will save few rounds (Corollary I, docs/theory.md)."
        )
    elif math.isfinite(s.noise) and s.noise > 4 * s.tau:
        lines.append(
            f"Up to about {s.noise:.0f} local steps the noise of gradients outweighs drift (sigma^2 over the batch and "
            f"zeta^2): by Corollary I more than the {s.tau:.0f} of a round would save rounds and traffic (docs/theory.md)."
        )
    return lines


def notes(s: SkewFeatures, limits: AdviceLimits, any_method: bool) -> list[str]:
    """About limits, what else could help, and what is not known.

    Args:
        s: Features of the data and the model.
        limits: Limits that the user gave.
        any_method: Whether any method is suggested.
    """
    lines = []
    if not any_method:
        lines.append("No rule speaks for any method over FedAvg here.")
    if s.skew >= 0.15:
        lines.append(
            "If each client may have a model of its own, try +ft, ditto and fedrep, too: they are judged by "
            "personal_accuracy_mean, about which no rule here says anything."
        )
    if s.features is not None and s.features >= 0.1:
        lines.append(
            f"{s.features:.0%} of the variance of one class's inputs lies between clients. Only models with normalization "
            "have a rule for that."
        )
    if limits.epsilon is not None:
        lines.append(
            "unskew trains models without differential privacy: epsilon here only decides about images that clients would "
            "make and share. What updates tell of the data is not covered."
        )
    if s.task == "language":
        lines.append("Nothing was measured here on texts: what is said of them is published, no more.")
    elif s.task not in ("classification", "multilabel"):
        lines.append(f"Nothing was measured here for the task {s.task}: what is said of it is published, no more.")
    elif not s.images:
        lines.append("The tables of results are about images; on other inputs their rules are a guess.")
    if s.participation < 1:
        lines.append(f"With {s.participation:.0%} of the clients in a round little was measured here.")
    if s.delayed:
        lines.append("With late updates only Feddle's tables say something, and they are of one setting.")
    return lines
