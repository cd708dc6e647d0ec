"""The rules of advice: each names a method, when it is proposed, why, and what that rests on.

They are few on purpose. A rule's ``evidence`` says how far it can be trusted, and nothing else ranks methods:

- 3: measured here, in a table of ``docs/results``, and the interval of the difference to FedAvg does not hold 0;
- 2: measured here, and not decided: one seed, an interval that holds 0, or not in all settings that were tried;
- 1: published, and not measured here in a setting like this one.

A caution takes from the evidence of a method where tables or papers speak against it. ``docs/advice.md`` shows all of them,
and how often their advice was right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from unskew.diagnosis.features import SkewFeatures
from unskew.tasks.registry import TASKS

VERSION = 1
"""Version of the rules, raised when one of them changes its advice, so that scores of both versions are kept."""

Condition = Callable[[SkewFeatures], bool]
Sentence = Callable[[SkewFeatures], str]


@dataclass(frozen=True)
class AdviceRule:
    """One piece of advice.

    Attributes:
        method: The method with its options, as it is written in a command.
        when: Whether it is proposed.
        because: Why, with the numbers it goes by.
        source: The theory or the table that it rests on.
        evidence: How far it can be trusted, 1 to 3.
    """

    method: Sentence
    when: Condition
    because: Sentence
    source: str
    evidence: int


def is_skewed(s: SkewFeatures) -> bool:
    """Labels differ clearly more than by chance; Dirichlet 1 over ten classes is about here."""
    return s.skew >= 0.15


def is_strongly_skewed(s: SkewFeatures) -> bool:
    """Return whether the skew is as strong as in the result tables: Dirichlet 0.1 over ten classes gives about 0.6."""
    return s.skew >= 0.4


def has_single_labels(s: SkewFeatures) -> bool:
    """Each sample has one class."""
    return s.task == "classification"


def one_significant_digit(value: float) -> float:
    """One significant digit, as options are written."""
    return float(f"{value:.1g}")


def proximal_mu(s: SkewFeatures) -> float:
    """``mu`` such that the term pulls back the drifting share of a round: ``mu lr tau = 1 - 1/B^2``.

    ``B^2 = 1 + zeta^2 / ||grad f||^2`` is FedProx's dissimilarity. With ``mu lr tau`` far below 1 the term does nothing in
    ``tau`` steps, above 1 it holds the model where it is.
    """
    return max(0.001, one_significant_digit(s.dissimilarity / (1 + s.dissimilarity) / (s.rate * s.tau)))


def momentum_for_rounds(s: SkewFeatures) -> float:
    """Server momentum whose memory ``1 / (1 - beta)`` is a third of the run at most, and 0.9 at most."""
    return max(0.1, min(0.9, round(1 - 3 / max(4, s.rounds), 1)))


def images_per_client(s: SkewFeatures) -> int:
    """Images a client makes so that a quarter of its data are synthetic."""
    return max(1, round(s.mean_size / 3))


LABELS = "clients' labels are {distance:.2f} away from all clients' on average (chance alone: {chance:.2f})"


def label_skew_evidence(s: SkewFeatures) -> str:
    """The number that most rules go by."""
    return LABELS.format(distance=s.distance, chance=s.chance)


def skew_unknown(s: SkewFeatures) -> str:
    """Return whether label skew is unknown."""
    if not TASKS[s.task].labeled:
        return f"the task {s.task} has no labels by which clients could be compared"
    return f"{label_skew_evidence(s)}: no label skew to speak of"


RULES: tuple[AdviceRule, ...] = (
    AdviceRule(
        lambda s: "fedft",
        lambda s: is_strongly_skewed(s) and s.task != "language",
        lambda s: (
            f"{label_skew_evidence(s)}, and training on labeled samples at the server was 8 to 25 points above FedAvg "
            "where clients do little in a round; with five local epochs it was even with Feddle."
        ),
        "docs/results/feddle.md, Table 5",
        3,
    ),
    AdviceRule(
        lambda s: f"fedssyn:generator=gan-small,n_syn={images_per_client(s)}",
        lambda s: is_strongly_skewed(s) and has_single_labels(s) and s.images and s.mean_size >= 50,
        lambda s: (
            f"{label_skew_evidence(s)}, and with a quarter of shuffled synthetic images "
            + (f"theory predicts {s.predicted:.2f} times the rounds; " if s.predicted is not None else "")
            + f"with p = 0.25 FedAvg took 3 rounds instead of 23 on digits (Dirichlet 0.01), 7 for 13 (0.1). "
            f"{images_per_client(s)} images a client are a quarter beside its {s.mean_size:.0f}."
        ),
        "docs/results/fedssyn.md, the share of synthetic images; docs/theory.md, Lemma 1 and Corollary I",
        3,
    ),
    AdviceRule(
        lambda s: "scaffold",
        lambda s: is_skewed(s) and s.linear > 0.99,
        lambda s: (
            f"{label_skew_evidence(s)}, and gradients disagree by {s.dissimilarity:.2g} times the squared mean gradient; "
            "control variates halved the rounds of networks of linear layers, as this one."
        ),
        "docs/results/fedssyn.md, Table 1",
        3,
    ),
    AdviceRule(
        lambda s: "feddle",
        lambda s: is_strongly_skewed(s) and s.task != "language",
        lambda s: (
            f"{label_skew_evidence(s)}; a search for coefficients with data at the server was 2 to 12 points above FedAvg."
        ),
        "docs/results/feddle.md, Table 5",
        3,
    ),
    AdviceRule(
        lambda s: f"fedavgm:beta={momentum_for_rounds(s):g}",
        lambda s: is_skewed(s) and not s.delayed,
        lambda s: (
            f"{label_skew_evidence(s)}; momentum at the server costs no traffic and was above FedAvg on both divisions of "
            f"CIFAR-10. beta = {momentum_for_rounds(s):g} remembers "
            f"{1 / (1 - momentum_for_rounds(s)):.0f} of the {s.rounds} rounds."
        ),
        "docs/results/fedcog.md, Table 1 (one seed each); README.md, the demo",
        2,
    ),
    AdviceRule(
        lambda s: "fedpvr",
        lambda s: is_skewed(s) and s.linear <= 0.99,
        lambda s: (
            f"{label_skew_evidence(s)}; variates on the classifier alone took eleven rounds fewer than FedAvg on a part of "
            "CIFAR-10, where those on all layers did harm."
        ),
        "docs/results/fedssyn.md, a part of CIFAR-10 (Dirichlet 0.1; the interval holds 0)",
        2,
    ),
    AdviceRule(
        lambda s: f"fedcog:start_round={s.rounds - max(1, s.rounds // 10)}",
        lambda s: is_strongly_skewed(s) and s.images and s.rounds >= 10 and not s.delayed,
        lambda s: (
            f"{label_skew_evidence(s)}; distilling from inputs that only the global model knows, in the last tenth of the "
            f"{s.rounds} rounds, gave 3 points at two classes a client in short training; in long none there, and 1.5 at "
            "Dirichlet 0.1 (one seed)."
        ),
        "docs/results/fedcog.md, Table 1 (decided on one of two divisions, in short training)",
        2,
    ),
    AdviceRule(
        lambda s: "feddyn",
        lambda s: is_skewed(s) and s.participation == 1 and not s.delayed,
        lambda s: (
            f"{label_skew_evidence(s)}; dynamic regularization took 4 to 5 rounds fewer on digits, within what seeds differ."
        ),
        "docs/results/fedssyn.md, Table 1",
        2,
    ),
    AdviceRule(
        lambda s: f"fedbuff:buffer_size={max(2, round(s.clients * s.participation))}",
        lambda s: s.delayed,
        lambda s: (
            "updates arrive late; a buffer was up to 4 points above FedAvg with long delays, within what seeds differ."
        ),
        "docs/results/feddle.md, Table 5",
        2,
    ),
    AdviceRule(
        lambda s: "fednova",
        lambda s: s.by_epochs and s.even < 0.8 and not s.delayed,
        lambda s: (
            f"sizes are those of {s.even:.0%} as many equal clients, and with epochs larger clients take more steps; "
            "FedAvg then moves towards them more than its weights say."
        ),
        "Wang et al. 2020, arXiv:2007.07481, Theorem 1",
        1,
    ),
    AdviceRule(
        lambda s: f"fedprox:mu={proximal_mu(s):g}",
        lambda s: is_skewed(s) and s.dissimilarity > 0.1,
        lambda s: (
            f"gradients disagree by {s.dissimilarity:.2g} times the squared mean gradient; mu = {proximal_mu(s):g} makes "
            f"mu lr tau {proximal_mu(s) * s.rate * s.tau:.1g} for {s.tau:.0f} steps at rate {s.rate:g}. The usual 0.01 "
            "changed nothing in our tables."
        ),
        "Li et al. 2018, arXiv:1812.06127, Theorem 4; docs/results/fedssyn.md, Table 1",
        1,
    ),
    AdviceRule(
        lambda s: "fedadam",
        lambda s: s.task == "language",
        lambda s: "on texts adaptive steps at the server were best in their paper; its rate eta wants tuning.",
        "Reddi et al. 2020, arXiv:2003.00295, Table 1",
        1,
    ),
    AdviceRule(
        lambda s: f"fedavgm:beta={momentum_for_rounds(s):g}",
        lambda s: not is_skewed(s) and not s.delayed,
        lambda s: f"{skew_unknown(s)}; momentum at the server only makes a short run of {s.rounds} rounds go further.",
        "Hsu et al. 2019, arXiv:1909.06335; not measured by us without skew",
        1,
    ),
    AdviceRule(
        lambda s: "fedbn",
        lambda s: s.norms and (s.features or 0.0) >= 0.1 and not is_skewed(s) and not s.delayed,
        lambda s: (
            f"{s.features:.0%} of the variance of one class's inputs lies between clients while labels hardly "
            "differ; each client keeps its own normalization. Read its personal accuracy."
        ),
        "Li et al. 2021, arXiv:2102.07623",
        1,
    ),
    AdviceRule(
        lambda s: f"fedals:alpha={max(2, min(25, math.ceil(s.over_traffic or 2)))}",
        lambda s: (s.over_traffic or 0.0) > 1 and not is_skewed(s) and not s.delayed,
        lambda s: (
            f"FedAvg sends {s.over_traffic:.1f} times the limit, and labels hardly differ; averaging the body less often "
            "saves up to nine tenths of the traffic. The loss of accuracy on iid data, about one point, is not decided, and "
            f"FedAvg with longer rounds was not compared there. Try all {s.asked} rounds, too."
        ),
        "docs/results/fedals.md, Table 1 (less traffic by construction; the loss of accuracy on iid data is not decided)",
        2,
    ),
)
"""In the order in which those of the same evidence are ranked."""
