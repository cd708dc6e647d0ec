"""Privacy accounting of client-level Gaussian mechanisms: epsilon of a history of rounds, and the noise for an epsilon.

In each round, a mechanism adds Gaussian noise with standard deviation ``z C`` to a sum of clipped updates. Each client
contributes at most ``C`` in norm. Neighboring data sets differ in one client, whose data are replaced by none. There are two
cases:

- Without amplification by sampling, the rounds compose to one Gaussian mechanism with ``mu = sqrt(sum_t z_t^-2)``, whose
  guarantee is known exactly (Balle and Wang 2018, arXiv:1805.06530; Dong et al. 2019, arXiv:1905.02383)::

      delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

- With Poisson cohorts, each client takes part in a round with probability ``q``, independently of the others, and nobody can
  predict the cohort. Two upper bounds are available from opacus: ``rdp`` (Mironov et al. 2019, arXiv:1908.10530) and ``prv``
  (Gopi et al. 2021, arXiv:2106.02848), which is tighter and slower.

With Poisson cohorts, or if all clients take part, a client that is added or removed is the same. In a fixed cohort of fewer
clients, however, another client takes the place of one that is removed, and the sum changes by up to ``2 C``, as it does if a
client is replaced. The same noise then has half the noise multiplier (``replaced_epsilon``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from unskew.errors import ConfigError

Accountant = Literal["rdp", "prv"]
ACCOUNTANTS: tuple[str, ...] = get_args(Accountant)
COHORT_PER_BIT_NOISE = 20
"""Cohort size divided by the noise of the clipping bit (Andrew et al. 2021, arXiv:1905.03871)."""
MARGIN = 1e-13
"""Relative margin of ``log delta``, larger than its rounding errors."""
LARGER_ORDERS = (72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Orders in addition to those of opacus, which end at 63; needed for an epsilon below 0.2."""
EPSILON_ERROR = 0.01
"""Error of epsilon that PRV adds to its upper bound, as in opacus."""
LARGEST_DOMAIN = 2**24
"""Largest number of points of a PRV."""
LARGEST_LOSS = 500.0
"""Largest privacy loss that PRV can compute in float64."""
SMALLEST_NOISE = 1e-3
"""Smallest noise multiplier of the accountants; below it, opacus' sums may overflow, and epsilon exceeds 1e5."""
LARGEST_NOISE = 1e6
"""Largest noise multiplier of ``dp`` and of the search."""


@dataclass(frozen=True)
class GaussianRounds:
    """A number of equal rounds of a Gaussian mechanism.

    Attributes:
        noise: Noise multiplier ``z``: standard deviation of the noise divided by the clipping norm.
        rate: Probability with which a client is in a cohort, in (0, 1]; 1 claims no amplification by sampling.
        steps: Number of rounds.

    Raises:
        ConfigError: If a value is out of its range.
    """

    noise: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        if not self.noise >= 0:
            raise ConfigError(f"The noise multiplier is {self.noise}; it must be 0 or a positive number.")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"The sampling rate is {self.rate}; it must be above 0 and at most 1.")
        if self.steps < 0:
            raise ConfigError(f"The number of rounds is {self.steps}; it must be 0 or a positive integer.")


def epsilon(history: Iterable[GaussianRounds], delta: float, accountant: str = "rdp") -> float:
    """Compute an upper bound of the ``epsilon`` spent by a history of rounds.

    If no entry claims amplification (all rates are 1), the value is exact, and the accountant does not matter.

    Args:
        history: Rounds so far; entries may differ in noise and rate.
        delta: Probability ``delta`` of the guarantee, in (0, 1).
        accountant: Privacy accountant for rates below 1: ``rdp`` (Renyi) or ``prv`` (tighter, slower).

    Returns:
        The bound; 0 for an empty history, infinity without noise.

    Raises:
        ConfigError: If ``delta`` is out of its range, the accountant is unknown, or opacus is needed and not installed.

    >>> round(epsilon([GaussianRounds(2.0, 1.0, 4), GaussianRounds(2.0, 1.0, 6)], delta=1e-3), 6)
    5.587133
    """
    if accountant not in ACCOUNTANTS:
        raise ConfigError(f"There is no privacy accountant {accountant!r}. Use {' or '.join(ACCOUNTANTS)}.")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must be between 0 and 1.")
    history = _merge(history)
    if not history:
        return 0.0
    if any(entry.noise == 0 for entry in history):
        return math.inf
    mu = gaussian_mu(history)
    if mu is not None:
        return exact_epsilon(mu, delta)
    return rdp_epsilon(history, delta) if accountant == "rdp" else prv_epsilon(history, delta)


def gaussian_mu(history: Iterable[GaussianRounds]) -> float | None:
    """Return ``mu`` of the one Gaussian mechanism to which rounds compose; None if they are amplified or have no noise.

    Args:
        history: Rounds so far.
    """
    history = _merge(history)
    if any(entry.rate < 1 or entry.noise == 0 for entry in history):
        return None
    return math.hypot(*(math.sqrt(entry.steps) / entry.noise for entry in history))


def replaced_epsilon(history: Iterable[GaussianRounds], delta: float) -> float | None:
    """Return ``epsilon`` if a client is replaced, so that the sum changes by up to ``2 C``; None with amplification.

    Args:
        history: Rounds so far.
        delta: Probability ``delta`` of the guarantee, in (0, 1).

    >>> round(replaced_epsilon([GaussianRounds(4.0, 1.0, 10)], delta=1e-3), 6)
    5.587133
    """
    mu = gaussian_mu(history)
    return None if mu is None else exact_epsilon(2 * mu, delta)


def _merge(history: Iterable[GaussianRounds]) -> tuple[GaussianRounds, ...]:
    """Merge equal rounds, so that the result does not depend on their order or on how they are divided into entries."""
    steps: dict[tuple[float, float], int] = {}
    for entry in history:
        key = entry.noise, entry.rate
        steps[key] = steps.get(key, 0) + entry.steps
    return tuple(GaussianRounds(noise, rate, count) for (noise, rate), count in sorted(steps.items()) if count)


def exact_epsilon(mu: float, delta: float) -> float:
    """Compute the exact ``epsilon`` of a Gaussian mechanism, rounded up slightly.

    With ``s = epsilon/mu``, ``phi`` the normal density and ``R(x) = Phi(-x) / phi(x)`` (Mills' ratio), the guarantee is
    ``delta = phi(s - mu/2) (R(s - mu/2) - R(s + mu/2))``. Its logarithm neither overflows nor cancels. It is solved for ``s``
    by bisection.

    Args:
        mu: Sensitivity divided by the standard deviation of the noise; ``sqrt(T) / z`` for T rounds.
        delta: Probability ``delta`` of the guarantee, in (0, 1).

    Returns:
        The smallest ``epsilon``; 0 if ``epsilon = 0`` already satisfies ``delta``, infinity if it exceeds all floats.

    >>> round(exact_epsilon(1.0, 1e-5), 6)
    4.377178
    """
    if math.isinf(mu * mu):
        return math.inf
    if mu == 0 or math.erf(mu / math.sqrt(8)) <= delta:
        return 0.0
    target = math.log(delta) - MARGIN * max(1.0, -math.log(delta))
    low, width = 0.0, max(1.0, 1e-15 * mu)
    while _log_delta(mu / 2 + width, mu) > target:
        low, width = mu / 2 + width, 2 * width
    high = mu / 2 + width
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-15 * high:
            break
        if _log_delta(middle, mu) > target:
            low = middle
        else:
            high = middle
    return mu * high * (1 + 1e-12)


def _log_delta(s: float, mu: float) -> float:
    """Compute ``log delta(epsilon)`` at ``epsilon = s mu``."""
    from scipy.integrate import fixed_quad

    a, b = s - mu / 2, s + mu / 2
    log_density = -a * a / 2 - math.log(2 * math.pi) / 2
    if a < -1:  # R(a) may overflow here, and the difference of the two probabilities does not cancel
        return math.log(math.erfc(a / math.sqrt(2)) / 2 - math.exp(log_density) * _mills(b))
    if mu > 0.25:
        return log_density + math.log(_mills(a) - _mills(b))
    # R(a) - R(b) would cancel; it is the integral of -R'(x) = 1 - x R(x) from a to b (five-point Gauss quadrature).
    mean, _ = fixed_quad(lambda share: 1 - (s + mu * share) * _mills(s + mu * share), -0.5, 0.5)
    return log_density + math.log(mu * mean)


def _mills(x: Any) -> Any:
    """Compute Mills' ratio ``R(x) = Phi(-x) / phi(x)`` of a number or an array."""
    from scipy.special import erfcx

    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


def _opacus() -> Any:
    try:
        import opacus.accountants
        import opacus.accountants.analysis.rdp
    except ImportError as error:
        raise ConfigError(
            "Privacy accounting with Poisson cohorts needs opacus: pip install 'unskew[privacy]'."
        ) from error
    return opacus.accountants


def _orders() -> tuple[float, ...]:
    return tuple(map(float, (*_opacus().RDPAccountant.DEFAULT_ALPHAS, *LARGER_ORDERS)))


@lru_cache(maxsize=1 << 17)
def _rdp_per_step(noise: float, rate: float, order: float) -> float:
    """Compute the Renyi divergence of one round; cached, since epsilon is computed in every round."""
    if noise < SMALLEST_NOISE:
        return math.inf
    compute = _opacus().analysis.rdp.compute_rdp
    return max(0.0, float(compute(q=rate, noise_multiplier=noise, steps=1, orders=order)))


def rdp_epsilon(history: Iterable[GaussianRounds], delta: float) -> float:
    """Compute an upper bound of ``epsilon`` with Renyi differential privacy.

    The bound is a quasiconvex function of the order, because it is a convex function divided by the order minus 1. So its
    minimum over all orders is between the neighbors of the best integer order. Divergences of fractional orders take most
    of the time, and only a few of them are needed.

    Args:
        history: Rounds so far, with positive noise.
        delta: Probability ``delta`` of the guarantee, in (0, 1).

    Raises:
        ConfigError: If opacus is not installed.
    """
    history = tuple(history)

    def best_of(orders: list[float]) -> tuple[float, float]:
        divergences = [
            sum(entry.steps * _rdp_per_step(entry.noise, entry.rate, order) for entry in history) for order in orders
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the bound is valid even if the best order is the smallest or largest one
            bound, order = _opacus().analysis.rdp.get_privacy_spent(orders=orders, rdp=divergences, delta=delta)
        return float(bound), float(order)

    integers = [1.0, *(order for order in _orders() if order.is_integer()), math.inf]
    best = integers.index(best_of(integers[1:-1])[1])
    bound, _ = best_of([order for order in _orders() if integers[best - 1] < order < integers[best + 1]])
    return max(0.0, bound)


@lru_cache(maxsize=1024)
def _prv_epsilon(history: tuple[GaussianRounds, ...], delta: float) -> float:
    bound = rdp_epsilon(history, delta)
    delta_error = delta / 1000
    rounds = sum(entry.steps for entry in history)
    losses = [rdp_epsilon(history, delta_error / 4)]
    losses += [
        rdp_epsilon([GaussianRounds(entry.noise, entry.rate, 1)], delta_error / (8 * rounds)) for entry in history
    ]
    mesh = EPSILON_ERROR / math.sqrt(rounds * math.log(12 / delta_error) / 2)
    points = 2 * max(losses) / mesh
    rounding_error = 2**-52 * math.sqrt(points)  # of delta, by the Fourier transforms
    if max(losses) > LARGEST_LOSS or points > LARGEST_DOMAIN or rounding_error > delta_error:
        return bound
    accountant = _opacus().PRVAccountant()
    accountant.history = [(entry.noise, entry.rate, entry.steps) for entry in history]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # log(1 - q) at q = 1, and overflows that are replaced
            upper = float(accountant.get_epsilon(delta, eps_error=EPSILON_ERROR, delta_error=delta_error))
    except (RuntimeError, ValueError):  # the discretization is too coarse for this delta or noise
        return bound
    return max(0.0, min(bound, upper)) if math.isfinite(upper) else bound


def prv_epsilon(history: Iterable[GaussianRounds], delta: float) -> float:
    """Compute an upper bound of ``epsilon`` with privacy loss random variables.

    The result is the upper bound of PRV, not its estimate, or the bound of RDP if that is lower. PRV adds up to 0.01, so RDP
    is lower if epsilon is very small. If PRV cannot be computed (epsilon of several hundred, delta below about 1e-10), the
    result is the bound of RDP.

    Args:
        history: Rounds so far, with positive noise.
        delta: Probability ``delta`` of the guarantee, in (0, 1).

    Raises:
        ConfigError: If opacus is not installed.
    """
    return _prv_epsilon(_merge(history), delta)


@lru_cache(maxsize=4096)
def noise_for(target_epsilon: float, delta: float, rate: float, steps: int, accountant: str = "rdp") -> float:
    """Find the smallest noise multiplier with which a number of rounds spends at most ``target_epsilon``.

    Args:
        target_epsilon: Privacy budget.
        delta: Probability ``delta`` of the guarantee, in (0, 1).
        rate: Probability with which a client is in a cohort, in (0, 1]; 1 claims no amplification by sampling.
        steps: Number of rounds.
        accountant: Privacy accountant for rates below 1: ``rdp`` or ``prv``.

    Returns:
        The noise multiplier, at most 0.1 % larger than necessary.

    Raises:
        ConfigError: If no noise multiplier reaches the budget, or opacus is needed and not installed.

    >>> round(noise_for(5.587133, delta=1e-3, rate=1.0, steps=10), 2)
    2.0
    """
    if not 0 < target_epsilon < math.inf:
        raise ConfigError(f"No noise reaches epsilon={target_epsilon:g}. Use a positive number, such as epsilon=5.")

    def is_within(noise: float) -> bool:
        return epsilon([GaussianRounds(noise, rate, steps)], delta, accountant) <= target_epsilon

    return smallest_noise(is_within, target_epsilon, f"delta={delta:g} with the accountant {accountant}")


def smallest_noise(is_within: Callable[[float], bool], target_epsilon: float, what: str) -> float:
    """Find the smallest noise multiplier that is within a budget, to 0.1 %.

    Args:
        is_within: Returns whether a noise multiplier is within the budget.
        target_epsilon: Privacy budget, for the error message.
        what: Further conditions, for the error message.

    Raises:
        ConfigError: If no noise multiplier reaches the budget.
    """
    if is_within(0.0):  # without rounds
        return 0.0
    low = high = 1.0
    while not is_within(high):
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise ConfigError(
                f"No noise multiplier up to {LARGEST_NOISE:g} reaches epsilon={target_epsilon:g} for {what}. Use a larger "
                "epsilon, or fewer rounds."
            )
    while is_within(low):
        low, high = low / 2, low
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        if is_within(middle):
            high = middle
        else:
            low = middle
    return high


def smallest_cohort(noise: float) -> int:
    """Return the smallest cohort size for which adaptive clipping with the bit noise ``cohort / 20`` is possible.

    >>> smallest_cohort(1.0), smallest_cohort(1.25)
    (11, 13)
    """
    size = max(1, math.floor(noise * COHORT_PER_BIT_NOISE / 2))
    while noise >= 2 * size / COHORT_PER_BIT_NOISE:
        size += 1
    return size


def split_noise(noise: float, bit_noise: float) -> float:
    """Compute the noise multiplier of the update under adaptive clipping.

    The update and the clipping bit are both noised. Together they cost as much as one Gaussian mechanism with ``noise``::

        z_update = (z^-2 - (2 sigma_b)^-2)^(-1/2)

    Args:
        noise: Noise multiplier ``z`` of both together.
        bit_noise: Standard deviation ``sigma_b`` of the noise of the summed clipping bits.

    Raises:
        ConfigError: If the bit alone costs more than both together may cost.

    >>> round(split_noise(1.0, 50 / 20), 7)
    1.0206207
    """
    if noise == 0:
        return 0.0
    if noise >= 2 * bit_noise:
        raise ConfigError(
            f"Adaptive clipping with the noise multiplier {noise:g} needs a bit noise above {noise / 2:g}, not "
            f"{bit_noise:g}. With the default bit noise, cohort / {COHORT_PER_BIT_NOISE}, a cohort of "
            f"{smallest_cohort(noise)} clients suffices."
        )
    share = noise / (2 * bit_noise)
    return noise / math.sqrt((1 - share) * (1 + share))


def default_delta(clients: int) -> float:
    """Return the default of ``delta``, ``K^-1.1`` for K clients."""
    return float(clients**-1.1)


def check_delta(delta: float, clients: int) -> None:
    """Validate that ``delta`` is positive and below ``1/K`` (raises ``ConfigError`` otherwise).

    Args:
        delta: Probability ``delta`` of the guarantee.
        clients: Number of clients K.
    """
    if clients < 2:
        raise ConfigError("Client-level privacy needs at least two clients.")
    if not 0 < delta < 1 / clients:
        raise ConfigError(
            f"delta={delta:g} must be above 0 and below 1/{clients}, the reciprocal of the number of clients. "
            f"Use {default_delta(clients):.2g}, the default, or a smaller value."
        )
