"""Epsilon and noise of client-level Gaussian mechanisms, against published tools, numerical integration and each other."""

import math
import re
import sys
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad

from unskew.errors import ConfigError
from unskew.privacy import accounting
from unskew.privacy.accounting import (
    GaussianRounds,
    check_delta,
    default_delta,
    epsilon,
    exact_epsilon,
    gaussian_mu,
    noise_for,
    prv_epsilon,
    rdp_epsilon,
    replaced_epsilon,
    smallest_cohort,
    split_noise,
)
from unskew.privacy.composition import composition_note

REFERENCE = [
    # rate, noise, rounds, delta, RDP and PRV (upper bound) of opacus 1.6.0
    (120 / 3383, 1.2, 100, 1e-5, 1.98612, 1.71761),
    (0.1, 1.0, 100, 1e-3, 5.64052, 4.79489),
    (0.01, 1.0, 1000, 1e-5, 2.10137, 1.83837),
    (0.01, 0.8, 1500, 1e-6, 4.94592, 4.37204),
    (1.0, 10.0, 100, 1e-5, 4.72851, 4.38741),
    (1.0, 4.0, 30, 1e-2, 4.15929, 3.55798),
]


@pytest.fixture
def opacus():
    return pytest.importorskip("opacus")


@pytest.mark.parametrize(("rate", "noise", "rounds", "delta", "rdp", "prv"), REFERENCE)
def test_the_bounds_are_those_of_opacus(opacus, rate, noise, rounds, delta, rdp, prv):
    history = [GaussianRounds(noise, rate, rounds)]
    assert rdp_epsilon(history, delta) == pytest.approx(rdp, abs=1e-4)
    assert prv_epsilon(history, delta) == pytest.approx(prv, abs=1e-3)
    if rate < 1:
        assert epsilon(history, delta) == rdp_epsilon(history, delta)
        assert epsilon(history, delta, "prv") == prv_epsilon(history, delta)


@pytest.mark.parametrize(
    ("noise", "rounds", "delta", "exact"),
    [(10.0, 100, 1e-5, 4.377178), (4.0, 30, 1e-2, 3.547429), (2.0, 10, 1e-3, 5.587133)],
)
def test_without_amplification_epsilon_is_exact(noise, rounds, delta, exact):
    for accountant in accounting.ACCOUNTANTS:
        assert epsilon([GaussianRounds(noise, 1.0, rounds)], delta, accountant) == pytest.approx(exact, abs=1e-6)


def test_prv_is_an_upper_bound_slightly_above_privacy_loss_distributions(opacus):
    """The values of dp-accounting 0.6.0, whose error is below 0.001."""
    exact = (1.70747, 4.78435, 1.82824, 4.36179)
    for (rate, noise, rounds, delta, *_), value in zip(REFERENCE, exact, strict=False):
        assert value < epsilon([GaussianRounds(noise, rate, rounds)], delta, "prv") < value + 0.012


@pytest.mark.parametrize("mu", [1e-7, 1e-3, 0.03, 0.24, 0.26, 1.0, 5.0, 60.0, 700.0])
@pytest.mark.parametrize("delta", [0.7, 0.1, 1e-3, 1e-6, 1e-12, 1e-40])
def test_the_exact_epsilon_satisfies_delta_and_is_hardly_larger(mu, delta):
    """``delta(epsilon)`` is the mean of ``max(0, 1 - e^(epsilon - L))``, where the privacy loss L is N(mu^2/2, mu^2)."""

    def integrated(eps):
        a = eps / mu - mu / 2  # the integrand is positive above, so nothing cancels
        shift = a * a / 2 if a > 0 else 0.0  # without the factor e^-shift, which may underflow

        def integrand(x):
            return -np.expm1(-mu * x) * np.exp(-((a + x) ** 2) / 2 + shift)

        start = max(0.0, -a - 12)
        points = [start, *(max(start, -a) + step for step in (0.01, 0.1, 1, 3, 12))]
        total = sum(quad(integrand, low, high, epsabs=0, epsrel=1e-12)[0] for low, high in pairwise(points))
        return math.log(total / math.sqrt(2 * math.pi)) - shift

    eps = exact_epsilon(mu, delta)
    if eps == 0:
        assert math.erf(mu / math.sqrt(8)) <= delta
        return
    assert integrated(eps) <= math.log(delta) + 1e-12
    assert integrated(eps * (1 - 1e-6) - 1e-12) > math.log(delta) - 1e-12


def test_the_exact_epsilon_at_its_limits():
    assert exact_epsilon(0.0, 1e-5) == 0
    assert exact_epsilon(1e-6, 1e-5) == 0
    assert exact_epsilon(1e-6, 3.9e-7) > 0  # delta(0) = 3.989e-7
    assert (
        1e6 / 2 + 4263 < exact_epsilon(1e3, 1e-5) < 1e6 / 2 + 4265
    )  # Phi(-4.265) = 1e-5, and the second term is small
    assert math.isfinite(exact_epsilon(1e150, 1e-5))
    assert exact_epsilon(1e200, 1e-5) == math.inf


def test_epsilon_of_no_rounds_and_of_no_noise():
    assert epsilon([], 1e-5) == 0
    assert epsilon([GaussianRounds(1.0, 0.1, 0), GaussianRounds(0.0, 0.1, 0)], 1e-5) == 0
    assert epsilon([GaussianRounds(0.0, 0.1, 1), GaussianRounds(1.0, 0.1, 9)], 1e-5) == math.inf
    assert epsilon([GaussianRounds(0.0, 1.0, 1)], 1e-5) == math.inf


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_epsilon_grows_with_rounds_rate_and_less_noise(opacus, accountant, rate):
    def spent(noise=1.0, factor=1.0, steps=50):
        return epsilon([GaussianRounds(noise, rate * factor, steps)], 1e-5, accountant)

    for values in (
        [spent(steps=steps) for steps in (1, 2, 10, 50, 200)],
        [spent(factor=factor) for factor in (0.1, 0.3, 0.6, 1.0)],
        [spent(noise=noise) for noise in (20.0, 4.0, 1.0, 0.5, 0.2)],
    ):
        assert all(0 < low < high for low, high in pairwise(values))


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_two_halves_spend_what_the_whole_spends(opacus, accountant, rate):
    whole = epsilon([GaussianRounds(1.1, rate, 100)], 1e-5, accountant)
    assert epsilon([GaussianRounds(1.1, rate, 30), GaussianRounds(1.1, rate, 70)], 1e-5, accountant) == whole
    other = [GaussianRounds(2.0, rate, 20), GaussianRounds(1.1, rate, 100)]
    assert epsilon(other, 1e-5, accountant) == epsilon(other[::-1], 1e-5, accountant) > whole


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_rounds_with_and_without_amplification_compose(opacus, accountant):
    subsampled, full = [GaussianRounds(1.0, 0.02, 200)], [GaussianRounds(4.0, 1.0, 5)]
    both = epsilon(subsampled + full, 1e-5, accountant)
    apart = [epsilon(history, 1e-5, accountant) for history in (subsampled, full)]
    assert max(apart) < both < sum(apart) + 0.5
    unamplified = [GaussianRounds(entry.noise, 1.0, entry.steps) for entry in subsampled]
    assert both < epsilon(unamplified + full, 1e-5)


def test_prv_falls_back_to_rdp_where_its_rounding_errors_are_too_large(opacus):
    for noise, delta in ((1.0, 1e-13), (0.05, 1e-5)):
        history = [GaussianRounds(noise, 0.1, 100)]
        assert epsilon(history, delta, "prv") == epsilon(history, delta, "rdp")
    tiny = [GaussianRounds(200.0, 0.01, 10)]  # the error of PRV alone is 0.01
    assert epsilon(tiny, 1e-5, "prv") == epsilon(tiny, 1e-5, "rdp") < 0.01
    assert epsilon([GaussianRounds(1e-200, 0.1, 1)], 1e-5) == math.inf


def test_the_divergence_of_a_round_is_computed_once(opacus, monkeypatch):
    calls = []
    compute = opacus.accountants.analysis.rdp.compute_rdp
    monkeypatch.setattr(
        "opacus.accountants.analysis.rdp.compute_rdp",
        lambda **options: calls.append(options["orders"]) or compute(**options),
    )
    spent = [epsilon([GaussianRounds(1.2345, 0.0321, steps)], 1e-5) for steps in range(1, 6)]
    assert spent == sorted(spent)
    assert len(calls) == len(set(calls)) <= len(accounting._orders())


@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps", "accountant"),
    [
        (2.0, 1e-5, 120 / 3383, 100, "rdp"),
        (2.0, 1e-5, 120 / 3383, 100, "prv"),
        (0.01, 1e-5, 0.1, 100, "rdp"),
        (30.0, 1e-5, 0.1, 10, "rdp"),
        (0.001, 1e-5, 1.0, 100, "rdp"),
        (1e5, 1e-5, 1.0, 100, "prv"),
    ],
)
def test_the_noise_for_an_epsilon_is_the_smallest(target, delta, rate, steps, accountant):
    if rate < 1:
        pytest.importorskip("opacus")
    noise = noise_for(target, delta, rate, steps, accountant)
    assert epsilon([GaussianRounds(noise, rate, steps)], delta, accountant) <= target
    assert epsilon([GaussianRounds(noise / 1.0011, rate, steps)], delta, accountant) > target


def test_the_noise_is_the_inverse_of_epsilon(opacus):
    for rate, noise, rounds, delta, rdp, prv in REFERENCE[:2]:
        assert noise_for(rdp, delta, rate, rounds, "rdp") == pytest.approx(noise, rel=1.5e-3)
        assert noise_for(prv, delta, rate, rounds, "prv") == pytest.approx(noise, rel=1.5e-3)
    assert noise_for(4.377178, 1e-5, 1.0, 100) == pytest.approx(10, rel=1.5e-3)
    assert noise_for(1.0, 1e-5, 0.1, 0) == 0


def test_noise_for_rejects_impossible_targets(opacus):
    for target in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="positive number, such as epsilon=5"):
            noise_for(target, 1e-5, 1.0, 10)
    with pytest.raises(ConfigError, match="larger epsilon, or fewer rounds"):
        noise_for(1e-5, 1e-9, 0.1, 10)


def test_the_noise_of_the_update_under_adaptive_clipping():
    assert split_noise(1.0, 50 / 20) == pytest.approx(1.0206207, abs=1e-7)
    assert split_noise(1.2, 120 / 20) == pytest.approx(1.2060454, abs=1e-7)
    update = split_noise(0.7, 1.5)
    assert (update**-2 + (2 * 1.5) ** -2) ** -0.5 == pytest.approx(0.7)
    assert split_noise(0.0, 1.0) == 0
    with pytest.raises(ConfigError, match="a cohort of 13 clients suffices"):
        split_noise(1.2, 12 / 20)
    with pytest.raises(ConfigError, match=r"above 0\.5"):
        split_noise(1.0, 0.0)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3, 0.7, 1.0, 1.2, 3.3, 12.3])
def test_the_smallest_cohort_for_adaptive_clipping(noise):
    size = smallest_cohort(noise)
    assert split_noise(noise, size / 20) > noise
    if size > 1:
        with pytest.raises(ConfigError, match=f"a cohort of {size} clients"):
            split_noise(noise, (size - 1) / 20)


def test_delta_is_below_the_reciprocal_of_the_number_of_clients():
    assert default_delta(100) == pytest.approx(100**-1.1)
    for clients in (2, 3, 10, 3383, 10**6):
        check_delta(default_delta(clients), clients)
    check_delta(0.0099, 100)
    for delta in (0.01, 0.5, 0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=r"below 1/100.*Use 0\.0063, the default, or a smaller value"):
            check_delta(delta, 100)
    with pytest.raises(ConfigError, match="at least two clients"):
        check_delta(1e-5, 1)


def test_accounting_rejects_invalid_values():
    for values, match in (
        ((-1.0, 0.1, 1), "noise multiplier is -1.0"),
        ((math.nan, 0.1, 1), "noise multiplier"),
        ((1.0, 0.0, 1), "sampling rate is 0.0"),
        ((1.0, 1.1, 1), "sampling rate"),
        ((1.0, 0.1, -1), "number of rounds is -1"),
    ):
        with pytest.raises(ConfigError, match=match):
            GaussianRounds(*values)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            epsilon([GaussianRounds(1.0, 1.0, 1)], delta)
    with pytest.raises(ConfigError, match=r"no privacy accountant 'gdp'\. Use rdp or prv"):
        epsilon([], 1e-5, "gdp")


def test_opacus_is_needed_only_for_amplification(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    assert epsilon([GaussianRounds(10.0, 1.0, 100)], 1e-5, "prv") == pytest.approx(4.377178, abs=1e-6)
    assert noise_for(4.4, 1e-5, 1.0, 100, "prv") < 10
    for accountant in accounting.ACCOUNTANTS:
        with pytest.raises(ConfigError, match=r"needs opacus: pip install 'unskew\[privacy\]'\."):
            epsilon([GaussianRounds(9.87, 0.123, 1)], 1e-5, accountant)


def smallest_epsilon(shift, delta):
    """Epsilon of two normal distributions at this distance, by bisection of ``E max(0, 1 - e^(epsilon - loss))``."""
    loss = lambda x: x * shift - shift * shift / 2  # noqa: E731

    def exceeded(bound):
        start = bound / shift + shift / 2
        density = lambda x: math.exp(-((x - shift) ** 2) / 2) / math.sqrt(2 * math.pi)  # noqa: E731
        return quad(lambda x: density(x) * (1 - math.exp(bound - loss(x))), start, start + 40, epsabs=1e-14)[0]

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeded(middle) > delta else (low, middle)
    return high


def test_in_a_fixed_cohort_another_client_takes_the_place_of_a_removed_one():
    """100 clients, cohorts of 90, noise 2: the sum then changes by up to twice the clipping norm."""
    delta = default_delta(100)
    one_round = [GaussianRounds(2.0, 1.0, 1)]
    assert epsilon(one_round, delta) == pytest.approx(smallest_epsilon(0.5, delta), abs=1e-6)
    assert epsilon(one_round, delta) == pytest.approx(1.016, abs=1e-3)
    assert replaced_epsilon(one_round, delta) == pytest.approx(smallest_epsilon(1.0, delta), abs=1e-6)
    # Less is possible only if nobody knows the cohorts: a client is in them with probability 0.9.
    amplified = math.log1p(0.9 * math.expm1(smallest_epsilon(1.0, delta / 0.9)))
    assert 2.3 < amplified < replaced_epsilon(one_round, delta)
    several = [GaussianRounds(2.0, 1.0, 3), GaussianRounds(5.0, 1.0, 4)]
    assert gaussian_mu(several) == pytest.approx(math.sqrt(3 / 4 + 4 / 25))
    assert replaced_epsilon(several, 1e-3) == pytest.approx(
        smallest_epsilon(2 * math.sqrt(3 / 4 + 4 / 25), 1e-3), abs=1e-6
    )
    for without in ([GaussianRounds(2.0, 0.5, 1)], [GaussianRounds(0.0, 1.0, 1)]):
        assert gaussian_mu(without) is replaced_epsilon(without, delta) is None


def test_several_runs_on_the_same_data_add_up():
    runs = [{"epsilon": exact_epsilon(mu, 1e-3), "delta": 1e-3, "gaussian_mu": mu} for mu in (1.0, 2.0, 2.0)]
    text = composition_note(runs)
    assert text.startswith("3 private runs on the same data: together epsilon <= ")
    assert float(re.search("epsilon <= ([0-9.]+)", text)[1]) == pytest.approx(sum(r["epsilon"] for r in runs), rel=1e-3)
    assert float(re.search("exactly ([0-9.]+)", text)[1]) == pytest.approx(smallest_epsilon(3.0, 1e-3), rel=1e-3)
    other = {"epsilon": 2.0, "delta": 1e-5}
    assert "exactly" not in composition_note([*runs, other])
    assert (
        composition_note([runs[0], {"accuracy": 0.9}, {"epsilon": None, "epsilon_if_secret": 3.0, "delta": 1e-3}])
        is None
    )
    shared = {**other, "synthetic": "runs/synthetic/0123"}  # images of one generation, which several methods used
    assert composition_note([shared, shared]) is None
    assert composition_note([shared, shared, other]).startswith("2 private runs")
