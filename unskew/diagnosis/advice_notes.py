"""Notes next to the ranked methods: on the budget, on limits, and on gaps of knowledge."""

from __future__ import annotations

import math

from unskew.diagnosis.evidence import MEASURED_TASKS, load_evidence
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
    """Return notes on tuning, on limits, and on gaps of knowledge.

    Args:
        s: Features of the data and the model.
        limits: User's limits.
        any_method: Whether any method is suggested.
    """
    tuning = load_evidence()[1]["tuning_gain"]
    lines = [
        f"Tune first: on the {tuning['federations']} federations of the benchmark, tuning FedAvg's learning rate, local "
        f"steps and batch size gave {tuning['mean']:.1f} points on average (unskew tune). Methods are compared with tuned "
        "FedAvg, and are themselves tuned."
    ]
    if s.needs_personal_models:
        share = f"{s.between or 0:.0%} of the label's variance lies between the clients"
        if s.unexplained is not None:
            share += f", {s.unexplained:.0%} after a linear model of the inputs, which is the same for all clients"
        lines.append(
            f"{share}. A global model cannot predict what the inputs do not explain. Compare methods with personal models, "
            "and each client alone (local), by the metrics on the clients' own data."
        )
    if not any_method:
        lines.append("No measured method is expected to beat tuned FedAvg here. Keep FedAvg, and tune it.")
    if limits.epsilon is not None:
        lines.append(
            f"For a private model, add dp:epsilon={limits.epsilon:g} and sampling=poisson to a method, and check with unskew "
            "privacy whether the cohorts are large enough. The expected gains do not include the cost of noise: in "
            "docs/results/trust.md, SCAFFOLD did not survive it, and FedAvg lost 1.3 points at epsilon 8."
        )
    return lines


def evidence_note(task: str) -> str:
    """Return the note that no method was measured on a task; empty if some were.

    Args:
        task: Name of the task.
    """
    if task in MEASURED_TASKS:
        return ""
    return (
        f"There is no evidence for the task {task}: the order of the methods is that of gains on other tasks, and a guess. "
        "docs/results/benchmark.md has the suites survival and segmentation, which are too small to be evidence."
    )
