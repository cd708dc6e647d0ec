"""Rules of the advice: each suggests a method, with a condition, a reason and a source.

There are few rules on purpose. The ``evidence`` of a rule states how reliable it is; only evidence ranks methods:

- 3: measured here, in a table of ``docs/results``, and the interval of the difference to FedAvg does not contain 0;
- 2: measured here, but not decided: one seed, an interval that contains 0, or only some of the tested settings;
- 1: published, but not measured here in a similar setting.

A caution reduces the evidence of a method if tables or papers contradict it. ``docs/advice.md`` lists all rules and
cautions, and how often the advice was right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from unskew.diagnosis.features import SkewFeatures
from unskew.tasks.registry import TASKS

VERSION = 1
"""Version of the rules, increased when a rule changes its advice, so that scores of both versions are kept."""

Condition = Callable[[SkewFeatures], bool]
Sentence = Callable[[SkewFeatures], str]


@dataclass(frozen=True)
class AdviceRule:
    """Rule that suggests one method.

    Attributes:
        method: Returns the method expression with its options.
        when: Returns whether the method is suggested.
        because: Returns the reason, with the metrics that it is based on.
        source: Theory or result table that the reason is based on.
        evidence: Reliability of the rule, 1 to 3.
    """

    method: Sentence
    when: Condition
    because: Sentence
    source: str
    evidence: int


def is_skewed(s: SkewFeatures) -> bool:
    """Return whether labels differ clearly more than by chance; Dirichlet 1 over ten classes is near the bound."""
    return s.skew >= 0.15


def is_strongly_skewed(s: SkewFeatures) -> bool:
    """Return whether the skew is as strong as in the result tables: Dirichlet 0.1 over ten classes gives about 0.6."""
    return s.skew >= 0.4


def has_single_labels(s: SkewFeatures) -> bool:
    """Return whether each sample has one class."""
    return s.task == "classification"


def one_significant_digit(value: float) -> float:
    """Round to one significant digit, for options."""
    return float(f"{value:.1g}")


def proximal_mu(s: SkewFeatures) -> float:
    """Return a ``mu`` whose term pulls back the drifting share of a round: ``mu lr tau = 1 - 1/B^2``.

    ``B^2 = 1 + zeta^2 / ||grad f||^2`` is FedProx's dissimilarity. With ``mu lr tau`` far below 1, the term has no
    effect in ``tau`` steps; above 1, the model hardly moves.
    """
    return max(0.001, one_significant_digit(s.dissimilarity / (1 + s.dissimilarity) / (s.rate * s.tau)))


def momentum_for_rounds(s: SkewFeatures) -> float:
    """Return the server momentum whose memory ``1 / (1 - beta)`` is at most a third of the run; at most 0.9."""
    return max(0.1, min(0.9, round(1 - 3 / max(4, s.rounds), 1)))


def images_per_client(s: SkewFeatures) -> int:
    """Return the number of images per client with which a quarter of its data are synthetic."""
    return max(1, round(s.mean_size / 3))


LABELS = "clients' labels are at a distance of {distance:.2f} from all clients' on average (chance alone: {chance:.2f})"


def label_skew_evidence(s: SkewFeatures) -> str:
    """Return the label distance, on which most rules are based."""
    return LABELS.format(distance=s.distance, chance=s.chance)


def skew_unknown(s: SkewFeatures) -> str:
    """Explain why label skew is unknown or negligible."""
    if not TASKS[s.task].labeled:
        return f"the task {s.task} has no labels by which clients could be compared"
    return f"{label_skew_evidence(s)}: practically no label skew"


RULES: tuple[AdviceRule, ...] = (
    AdviceRule(
        lambda s: "fedft",
        lambda s: is_strongly_skewed(s) and s.task != "language",
        lambda s: (
            f"{label_skew_evidence(s)}, and training on labeled samples at the server was 8 to 25 points above FedAvg "
            "if clients do little work in a round; with five local epochs it equaled Feddle."
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
            f"{images_per_client(s)} images per client are a quarter, next to its {s.mean_size:.0f} samples."
        ),
        "docs/results/fedssyn.md, the share of synthetic images; docs/theory.md, Lemma 1 and Corollary I",
        3,
    ),
    AdviceRule(
        lambda s: "scaffold",
        lambda s: is_skewed(s) and s.linear > 0.99,
        lambda s: (
            f"{label_skew_evidence(s)}, and gradients disagree by {s.dissimilarity:.2g} times the squared mean gradient; "
            "control variates halved the rounds of networks of linear layers, such as this one."
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
            f"{label_skew_evidence(s)}; momentum at the server costs no traffic and was above FedAvg on both partitions of "
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
            "CIFAR-10, whereas variates on all layers did harm."
        ),
        "docs/results/fedssyn.md, a part of CIFAR-10 (Dirichlet 0.1; the interval holds 0)",
        2,
    ),
    AdviceRule(
        lambda s: f"fedcog:start_round={s.rounds - max(1, s.rounds // 10)}",
        lambda s: is_strongly_skewed(s) and s.images and s.rounds >= 10 and not s.delayed,
        lambda s: (
            f"{label_skew_evidence(s)}; distilling from inputs that only the global model recognizes, in the last tenth of "
            f"the {s.rounds} rounds, gained 3 points at two classes per client in short training; in long training 0 there, "
            "and 1.5 at Dirichlet 0.1 (one seed)."
        ),
        "docs/results/fedcog.md, Table 1 (decided on one of two divisions, in short training)",
        2,
    ),
    AdviceRule(
        lambda s: "feddyn",
        lambda s: is_skewed(s) and s.participation == 1 and not s.delayed,
        lambda s: (
            f"{label_skew_evidence(s)}; dynamic regularization took 4 to 5 rounds fewer on digits, within the variation "
            "between seeds."
        ),
        "docs/results/fedssyn.md, Table 1",
        2,
    ),
    AdviceRule(
        lambda s: f"fedbuff:buffer_size={max(2, round(s.clients * s.participation))}",
        lambda s: s.delayed,
        lambda s: (
            "updates arrive late; a buffer was up to 4 points above FedAvg with long delays, within the variation between "
            "seeds."
        ),
        "docs/results/feddle.md, Table 5",
        2,
    ),
    AdviceRule(
        lambda s: "fednova",
        lambda s: s.by_epochs and s.even < 0.8 and not s.delayed,
        lambda s: (
            f"sizes are as unequal as if only {s.even:.0%} of the clients existed, and with epochs larger clients take more "
            "steps; FedAvg then moves towards them more than its weights imply."
        ),
        "Wang et al. 2020, arXiv:2007.07481, Theorem 1",
        1,
    ),
    AdviceRule(
        lambda s: f"fedprox:mu={proximal_mu(s):g}",
        lambda s: is_skewed(s) and s.dissimilarity > 0.1,
        lambda s: (
            f"gradients disagree by {s.dissimilarity:.2g} times the squared mean gradient; mu = {proximal_mu(s):g} makes "
            f"mu lr tau {proximal_mu(s) * s.rate * s.tau:.1g} for {s.tau:.0f} steps at learning rate {s.rate:g}. The usual "
            "0.01 changed nothing in our tables."
        ),
        "Li et al. 2018, arXiv:1812.06127, Theorem 4; docs/results/fedssyn.md, Table 1",
        1,
    ),
    AdviceRule(
        lambda s: "fedadam",
        lambda s: s.task == "language",
        lambda s: "on text, adaptive steps at the server were best in their paper; its learning rate eta needs tuning.",
        "Reddi et al. 2020, arXiv:2003.00295, Table 1",
        1,
    ),
    AdviceRule(
        lambda s: f"fedavgm:beta={momentum_for_rounds(s):g}",
        lambda s: not is_skewed(s) and not s.delayed,
        lambda s: f"{skew_unknown(s)}; momentum at the server only speeds up a short run of {s.rounds} rounds.",
        "Hsu et al. 2019, arXiv:1909.06335; not measured by us without skew",
        1,
    ),
    AdviceRule(
        lambda s: "fedbn",
        lambda s: s.norms and (s.features or 0.0) >= 0.1 and not is_skewed(s) and not s.delayed,
        lambda s: (
            f"{s.features:.0%} of the variance of inputs within a class is between clients while labels hardly "
            "differ; each client keeps its own normalization. Compare personal accuracy."
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
"""Rules in the order in which methods of equal evidence are ranked."""
