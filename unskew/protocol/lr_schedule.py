"""Learning-rate schedules of clients over a run.

A schedule is written ``kind`` or ``kind:numbers``. ``t`` counts the ``T`` rounds (or local steps) of the run from 0::

    constant       lr
    step:N,F       lr F^floor(t / N)                       times F every N
    cosine         lr (1 + cos(pi t / T)) / 2              down to 0 at the end
    cosine:F       lr (F + (1 - F) (1 + cos(pi t / T)) / 2)  down to the share F of lr
    inverse:A,B    lr / (A + t / B)
    warmup:N       lr (t + 1) / N while t < N, then lr

``warmup:N+kind`` rises to the first rate of the other kind, which then counts ``t`` and ``T`` from the end of the
warm-up. ``step`` and ``cosine`` equal PyTorch's ``StepLR`` and ``CosineAnnealingLR``. ``inverse:10,100`` over local
steps is the schedule of FedALS's released code, ``eta_0 / (10 + t / 100)`` with ``lr`` for ``eta_0``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unskew.errors import ConfigError, unknown_name
from unskew.expressions import parse_expression

EXAMPLES = {
    "constant": "constant",
    "step": "step:30,0.1",
    "cosine": "cosine or cosine:0.01",
    "inverse": "inverse:10,100",
    "warmup": "warmup:5",
}


@dataclass(frozen=True)
class LRSchedule:
    """Parsed learning-rate schedule.

    Attributes:
        kind: Schedule after the warm-up: ``constant``, ``step``, ``cosine`` or ``inverse``.
        numbers: Parameters of that schedule.
        warmup: Length of the warm-up in rounds (or steps); 0 for none.
    """

    kind: str = "constant"
    numbers: tuple[float, ...] = ()
    warmup: int = 0

    @property
    def ends(self) -> bool:
        """Return whether the factors depend on the length of the run."""
        return self.kind == "cosine"

    def factor(self, t: int, total: int) -> float:
        """Return the factor of ``lr`` at time ``t``.

        Args:
            t: Number of the round (or step), from 0.
            total: Number of rounds (or steps) in the run.
        """
        if t < self.warmup:
            return (t + 1) / self.warmup * self._after(0, total - self.warmup)
        return self._after(t - self.warmup, total - self.warmup)

    def _after(self, t: int, total: int) -> float:
        """Return the factor of the schedule that follows the warm-up."""
        if self.kind == "step":
            every, times = self.numbers
            return float(times ** (t // int(every)))
        if self.kind == "cosine":
            (floor,) = self.numbers
            # Equals (1 + cos(pi t / T)) / 2 without cancellation near the end, so no rate is exactly 0.
            return floor + (1 - floor) * math.sin(math.pi * (total - t) / (2 * total)) ** 2
        if self.kind == "inverse":
            offset, scale = self.numbers
            return 1 / (offset + t / scale)
        return 1.0


def parse_schedule(text: str) -> LRSchedule:
    """Parse a learning-rate schedule.

    Args:
        text: Schedule expression, such as ``warmup:5+cosine``.

    Raises:
        ConfigError: If the text is not a valid schedule.

    >>> parse_schedule("warmup:5+cosine")
    LRSchedule(kind='cosine', numbers=(0.0,), warmup=5)
    >>> [parse_schedule("step:2,0.1").factor(t, total=4) for t in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """
    terms = [_read(term.strip(), text) for term in text.split("+")]
    warmups = [numbers for kind, numbers in terms if kind == "warmup"]
    others = [(kind, numbers) for kind, numbers in terms if kind != "warmup"]
    if len(warmups) > 1 or len(others) > 1:
        raise ConfigError(
            f"The learning-rate schedule {text!r} combines too many kinds. Use at most a warm-up and one other kind, such as "
            "warmup:5+cosine."
        )
    kind, numbers = others[0] if others else ("constant", ())
    return LRSchedule(kind, numbers, int(warmups[0][0]) if warmups else 0)


def _read(piece: str, text: str) -> tuple[str, tuple[float, ...]]:
    """Parse one term of a schedule into its kind and numbers."""
    expression = parse_expression(piece)
    kind, numbers = expression.name, expression.numbers()
    if kind not in EXAMPLES:
        raise ConfigError(unknown_name("learning-rate schedule", kind, EXAMPLES))
    if piece == "cosine":
        numbers = (0.0,)
    reason = _wrong(kind, numbers)
    if expression.options or len(numbers) != len(expression.values) + (piece == "cosine") or piece.endswith(":"):
        reason = reason or f"{kind} takes only numbers"
    if reason:
        raise ConfigError(f"The learning-rate schedule {text!r} is not valid: {reason}. Example: {EXAMPLES[kind]}.")
    return kind, numbers


def _wrong(kind: str, numbers: tuple[float, ...]) -> str | None:
    """Return the reason why the numbers of a schedule are invalid; None if they are valid."""
    wanted = {"constant": 0, "step": 2, "cosine": 1, "inverse": 2, "warmup": 1}[kind]
    if len(numbers) != wanted:
        return f"{kind} takes {wanted or 'no'} number{'' if wanted == 1 else 's'}"
    if kind in ("step", "warmup") and (numbers[0] != int(numbers[0]) or numbers[0] < 1):
        return f"the {'first ' if kind == 'step' else ''}number of {kind} must be an integer of at least 1"
    if kind == "step" and not 0 < numbers[1] <= 1:
        return "the second number of step must be above 0 and at most 1"
    if kind == "cosine" and not 0 <= numbers[0] <= 1:
        return "the number of cosine must be from 0 to 1"
    if kind == "inverse" and min(numbers) <= 0:
        return "the numbers of inverse must be above 0"
    return None
