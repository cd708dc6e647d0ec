"""Canary audit: the estimate against closed forms, and runs with and without noise."""

import math

import numpy as np
import pytest

import unskew
from unskew.config.loader import experiment
from unskew.errors import ConfigError
from unskew.privacy.accounting import exact_epsilon
from unskew.privacy.canaries import empirical_epsilon, gaussian_epsilon
from unskew.runs.privacy_audit import audit

RUN = {
    "data": "digits",
    "clients": 100,
    "partition": "dirichlet:0.5,min=1,balanced=false",
    "model": "mlp",
    "rounds": 3,
    "local_steps": 1,
    "batch_size": 8,
    "lr": 0.05,
    "engine": "inline",
}


@pytest.mark.parametrize("mu", [0.5, 2.0, 5.0])
def test_equal_deviations_give_the_epsilon_of_a_gaussian_mechanism(mu):
    assert gaussian_epsilon(mu * 0.3, 0.3, 0.3, 1e-3) == pytest.approx(exact_epsilon(mu, 1e-3), rel=1e-3)
    assert gaussian_epsilon(0.0, 1.0, 1.0, 1e-3) == 0.0


def test_the_estimate_converges_and_the_bound_is_below_it():
    draws, d, mu = np.random.default_rng(0), 10_000, 3.0
    cosines = (draws.normal(size=20_000) + mu) / math.sqrt(d)
    estimate, lower = empirical_epsilon(cosines, d, 1e-3)
    assert estimate == pytest.approx(exact_epsilon(mu, 1e-3), rel=0.05)
    few, few_lower = empirical_epsilon(cosines[:50], d, 1e-3)
    assert few_lower < lower < exact_epsilon(mu, 1e-3) * 1.01
    assert few_lower <= few


def test_an_audit_finds_less_than_promised_and_much_more_without_noise():
    config = experiment({**RUN, "method": "dp:epsilon=6,delta=0.001,bit_noise=8"})
    # The noise is secret, and a 95 % bound exceeds the true value in up to one of 40 audits; three in a row in one of 64,000.
    audits = (audit(config, 50) for _ in range(3))
    private = next((one for one in audits if one.lower_bound < one.epsilon), None)
    assert private is not None
    assert 5.9 < private.epsilon <= 6.0
    assert private.canaries == 50
    assert abs(private.unused_cosine) < 5 / math.sqrt(50 * 10_000)
    open_run = audit(experiment({**RUN, "method": "dp:noise=0"}), 50)
    assert open_run.epsilon is None
    assert open_run.lower_bound > 6 * max(private.lower_bound, 1.0)
    assert open_run.estimate > 5 * private.epsilon


def test_the_command_reads_a_run_folder(tmp_path):
    given = {**RUN, "rounds": 2, "clients": 20, "partition": "iid"}
    unskew.run(method="dp:noise=1,adaptive=false,delta=0.01", out=tmp_path / "a", **given)
    result = unskew.audit_privacy(tmp_path / "a", canaries=8)
    assert result.canaries == 8
    assert result.epsilon == pytest.approx(exact_epsilon(math.sqrt(2), 0.01))
    unskew.run(method="fedavg", out=tmp_path / "b", **given)
    with pytest.raises(ConfigError, match="needs one with dp"):
        unskew.audit_privacy(tmp_path / "b")
    with pytest.raises(ConfigError, match="at most half of the 6 clients"):
        audit(experiment({**given, "clients": 6, "method": "dp:noise=1,adaptive=false"}), 50)
    with pytest.raises(ConfigError, match="cannot repeat a run that starts"):
        audit(experiment({**given, "method": "dp:noise=1,adaptive=false", "start_from": str(tmp_path / "a")}), 8)
