"""Terms of the rules of advice: when data are skewed, what numbers options get, and how skew is told."""

from __future__ import annotations

from unskew.diagnosis.situation import Situation
from unskew.tasks import TASKS


def skewed(s: Situation) -> bool:
    """Labels differ clearly more than by chance; Dirichlet 1 over ten classes is about here."""
    return s.skew >= 0.15


def strong(s: Situation) -> bool:
    """As strong as in the tables of results: Dirichlet 0.1 over ten classes is about 0.6."""
    return s.skew >= 0.4


def one_class(s: Situation) -> bool:
    """Each sample has one class."""
    return s.task == "classification"


def rounded(value: float) -> float:
    """One significant digit, as options are written."""
    return float(f"{value:.1g}")


def proximal(s: Situation) -> float:
    """``mu`` such that the term pulls back the drifting share of a round: ``mu lr tau = 1 - 1/B^2``.

    ``B^2 = 1 + zeta^2 / ||grad f||^2`` is FedProx's dissimilarity. With ``mu lr tau`` far below 1 the term does nothing in
    ``tau`` steps, above 1 it holds the model where it is.
    """
    return max(0.001, rounded(s.dissimilarity / (1 + s.dissimilarity) / (s.rate * s.tau)))


def horizon(s: Situation) -> float:
    """Server momentum whose memory ``1 / (1 - beta)`` is a third of the run at most, and 0.9 at most."""
    return max(0.1, min(0.9, round(1 - 3 / max(4, s.rounds), 1)))


def made(s: Situation) -> int:
    """Images a client makes so that a quarter of its data are synthetic."""
    return max(1, round(s.mean_size / 3))


LABELS = "clients' labels are {distance:.2f} away from all clients' on average (chance alone: {chance:.2f})"


def labels_differ(s: Situation) -> str:
    """The number that most rules go by."""
    return LABELS.format(distance=s.distance, chance=s.chance)


def no_skew(s: Situation) -> str:
    """Where labels are not known to differ."""
    if not TASKS[s.task].labelled:
        return f"the task {s.task} has no labels by which clients could be compared"
    return f"{labels_differ(s)}: no label skew to speak of"
