"""Share of held-out samples that is large enough for a comparison to test most clients."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from unskew.config.inference.inferred_config import InferredConfig
from unskew.data.federation import Federation
from unskew.data.from_arrays import num_training_samples
from unskew.data.spec import DataSpec
from unskew.errors import abbreviate
from unskew.tasks.few_samples import FEWEST, compares_classes, has_few_samples
from unskew.tasks.primary_metric import metric_info

DEFAULT: float = DataSpec.model_fields["holdout"].default
SHARES = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
"""Larger shares, of which the smallest that is sufficient is set."""
MOST = 0.8
"""Share of the clients that should be tested."""


class HeldOut(NamedTuple):
    """Held-out samples of each client.

    Attributes:
        sizes: Number of all samples, ``[K]``.
        samples: Number of held-out samples, ``[K]``.
        events: Numbers of all samples and of held-out samples of the rarest class, each ``[K]``; None if the objective does
            not compare classes.
    """

    sizes: np.ndarray
    samples: np.ndarray
    events: tuple[np.ndarray, np.ndarray] | None

    @property
    def few(self) -> np.ndarray:
        """Mask of the clients that a comparison does not test, ``[K]``."""
        events = [None] * len(self.samples) if self.events is None else self.events[1].tolist()
        return np.array([n == 0 or has_few_samples(n, e) for n, e in zip(self.samples.tolist(), events, strict=True)])

    def few_with(self, share: float) -> np.ndarray:
        """Return the mask of the clients that would have few held-out samples.

        The number of held-out events varies between seeds; one standard deviation more than required is expected.

        Args:
            share: Share of held-out samples.
        """
        samples = np.array([n - num_training_samples(n, share) for n in self.sizes.tolist()])
        few = samples < FEWEST
        if self.events is not None:
            few |= self.events[0] * samples / np.maximum(1, self.sizes) < FEWEST + math.sqrt(FEWEST)
        return few


def count_held_out(federation: Federation, objective: str) -> HeldOut:
    """Count the held-out samples of each client.

    Args:
        federation: Data of all clients.
        objective: Name of the objective.
    """
    training, held_out = zip(*((client.y.numpy(), client.y_test.numpy()) for client in federation.clients), strict=True)
    samples = np.array([len(y) for y in held_out])
    sizes = samples + [len(y) for y in training]
    if not compares_classes(metric_info(objective), federation.objective.scored):
        return HeldOut(sizes, samples, None)
    of_classes = [np.array([np.bincount(y, minlength=federation.classes) for y in ys]) for ys in (training, held_out)]
    rarest = int(of_classes[1].sum(0).argmin())
    trained, evaluated = (counts[:, rarest] for counts in of_classes)
    return HeldOut(sizes, samples, (trained + evaluated, evaluated))


def set_holdout(inferred: InferredConfig, federation: Federation) -> bool:
    """Set a larger ``holdout`` if the default leaves too many clients untested; return whether it is set.

    Args:
        inferred: Configuration to complete.
        federation: Data of all clients, with the default.
    """
    counts = count_held_out(federation, _objective(inferred, federation))
    few, clients = counts.few, len(counts.sizes)
    if few.sum() <= (1 - MOST) * clients:
        return False
    remaining = {share: int(counts.few_with(share).sum()) for share in SHARES}
    enough = max((1 - MOST) * clients, min(remaining.values()))
    share = next(share for share in SHARES if remaining[share] <= enough)
    if remaining[share] >= few.sum():
        return False
    why = _untested(federation, counts, DEFAULT)
    inferred.set("holdout", share, f"share for evaluation; {why}")
    inferred.seen.append(f"holdout is {share}, because {why}")
    return True


def report_untested(inferred: InferredConfig, federation: Federation) -> None:
    """Report the clients that a comparison does not test with the ``holdout`` that is set.

    Args:
        inferred: Configuration.
        federation: Data of all clients, with this ``holdout``.
    """
    counts = count_held_out(federation, _objective(inferred, federation))
    few = counts.few
    if not few.any():
        return
    share = inferred.values.get("holdout", DEFAULT)
    hopeless = few & counts.few_with(SHARES[-1])
    text = f"holdout {_untested(federation, counts, share)}"
    if hopeless.any() and share < SHARES[-1]:
        which = "all of these" if (hopeless == few).all() else _names(federation, hopeless)
        text += f"; {SHARES[-1]} is too low for {which}, too"
    inferred.seen.append(text)


def _objective(inferred: InferredConfig, federation: Federation) -> str:
    return str(inferred.values.get("objective", federation.objective.scored))


def _names(federation: Federation, mask: np.ndarray) -> str:
    return abbreviate([federation.client_label(int(k)) for k in np.flatnonzero(mask)])


def _untested(federation: Federation, counts: HeldOut, share: float) -> str:
    """Describe the clients that a comparison does not test with a share of held-out samples."""
    what = "held-out samples" if counts.events is None else "held-out samples or events"
    number = f"{counts.few.sum()} of {len(counts.few)} clients"
    return f"{share} leaves {number} fewer than {FEWEST} {what}, too few for a test in compare: " + _names(
        federation, counts.few
    )
