"""Each method against an independent oracle: NumPy in float64, a closed form, or an identity."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.batch_loop import run, skewed, two_layers
from support.protocol import an_update, facts, some_updates, state_at
from support.quadratic import LR, STEPS, Quadratics, gradient, optimum, oracle, problem, sizes
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError
from unskew.methods.fedavgm import FedAvgM
from unskew.methods.feddle.feddle import Feddle
from unskew.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from unskew.methods.fedprox import FedProx
from unskew.methods.registry import METHODS, method, rule_class
from unskew.option_parsing import check_options_have_effect
from unskew.protocol.rules import ClientRule
from unskew.protocol.training_config import Training
from unskew.runs import validation


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedavg_equals_numpy_with_sample_weights(participation):
    A, b = problem()
    run = Quadratics(A, b, "fedavg", participation=participation)
    expected = oracle(A, b, 4, run.sampler.draw, sizes(A))
    assert_close(run.rounds(4), expected, TRAINING)


def test_fedavg_with_one_step_and_all_clients_is_gradient_descent():
    A, b = problem()
    run = Quadratics(A, b, "fedavg", Training(local_steps=1, batch_size=100, lr=0.1, precision="fp64"))
    everything, targets = np.concatenate(A), np.concatenate(b)
    v = np.zeros(3)
    for x in run.rounds(5):
        v = v - 0.1 * gradient(everything, targets, v)
        assert_close(x, v, TRAINING)


def test_fedprox_equals_numpy_and_pulls_towards_the_global_model():
    A, b = problem()
    mu = 0.7
    expected = oracle(A, b, 3, lambda t: range(4), sizes(A), lambda k, g, v, x: g + mu * (v - x))
    assert_close(Quadratics(A, b, f"fedprox:mu={mu}").rounds(3), expected, TRAINING)
    free, held = (np.linalg.norm(Quadratics(A, b, m).rounds(1)[0]) for m in ("fedprox:mu=0", "fedprox:mu=5"))
    assert held < free


@pytest.mark.parametrize("same", ["fedprox:mu=0", "fedavgm:beta=0", "fedavg:eta=1"])
def test_reductions_to_fedavg(same):
    A, b = problem()
    np.testing.assert_array_equal(Quadratics(A, b, same).rounds(3), Quadratics(A, b, "fedavg").rounds(3))


def test_scaffold_with_zero_variates_is_uniform_fedavg():
    A, b = problem()
    first = Quadratics(A, b, "scaffold").rounds(1)[0]
    assert_close(first, Quadratics(A, b, "fedavg", weights="uniform").rounds(1)[0], TRAINING)


def scaffold_oracle(A, b, rounds, cohort, option):
    """Algorithm 1 of the paper, line by line, in NumPy."""
    K, d = len(A), A[0].shape[1]
    x, c, c_k, path = np.zeros(d), np.zeros(d), np.zeros((K, d)), []
    for t in range(rounds):
        chosen, moves, changes = cohort(t), [], []
        for k in chosen:
            y = x.copy()
            for _ in range(STEPS):
                y -= LR * (gradient(A[k], b[k], y) - c_k[k] + c)
            new = gradient(A[k], b[k], x) if option == "I" else c_k[k] - c + (x - y) / (LR * STEPS)
            moves.append(y - x)
            changes.append(new - c_k[k])
            c_k[k] = new
        x = x + np.mean(moves, axis=0)
        c = c + np.sum(changes, axis=0) / K
        path.append((x, c))
    return path


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("spelling", ["scaffold:option=I", "scaffold:option=II", "scaffold:variate=mean"])
def test_scaffold_equals_the_papers_algorithm(spelling, participation):
    A, b = problem()
    run = Quadratics(A, b, spelling, participation=participation)
    expected = scaffold_oracle(A, b, 6, run.sampler.draw, "I" if spelling.endswith("=I") else "II")
    assert_close(run.rounds(6), [x for x, _ in expected], TRAINING)
    assert_close(run.server.state.rules["scaffold"]["c"], expected[-1][1], TRAINING)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffolds_server_variate_is_the_mean_over_all_clients(momentum):
    A, b = problem()
    training = Training(local_steps=4, batch_size=2, lr=0.01, momentum=momentum, precision="fp64")
    run = Quadratics(A, b, "scaffold", training, participation=0.5)
    run.rounds(7)
    held = [state_at(run.server, k).rules.get("scaffold", {}).get("c") for k in range(4)]
    assert any(c is not None for c in held)
    mean = sum(c for c in held if c is not None) / 4
    assert_close(run.server.state.rules["scaffold"]["c"], mean, TRAINING)


def test_scaffolds_variate_is_the_mean_gradient_also_with_momentum():
    A, b = problem()
    run = Quadratics(A, b, "scaffold", Training(local_steps=3, batch_size=100, lr=LR, momentum=0.9, precision="fp64"))
    run.rounds(1)
    v, buffer, seen = np.zeros(3), np.zeros(3), []
    for _ in range(3):
        seen.append(gradient(A[0], b[0], v))
        buffer = 0.9 * buffer + seen[-1]
        v = v - LR * buffer
    assert_close(state_at(run.server, 0).rules["scaffold"]["c"], np.mean(seen, axis=0), TRAINING)


@pytest.mark.slow  # the conformance suite decides it for every method with a fixed point
@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_scaffold_reaches_the_optimum_where_fedavg_does_not(engine):
    A, b = problem(sizes=(6, 6, 6, 6))
    best = optimum(A, b, np.full(4, 0.25))
    training = Training(local_steps=3, batch_size=100, lr=0.4, precision="fp64")
    off = {m: np.linalg.norm(Quadratics(A, b, m, training, engine=engine).rounds(40)[-1] - best)
           for m in ("fedavg", "scaffold")}  # fmt: skip
    assert off["scaffold"] < 1e-6
    assert off["fedavg"] > 1e-3


def test_sums_apply_both_rules():
    A, b = problem()
    mu, K = 0.5, 4
    x, c, c_k = np.zeros(3), np.zeros(3), np.zeros((K, 3))
    run = Quadratics(A, b, f"fedprox:mu={mu}+scaffold")
    for found in run.rounds(3):
        moves, new = [], []
        for k in range(K):
            y = x.copy()
            for _ in range(STEPS):
                y -= LR * (gradient(A[k], b[k], y) + mu * (y - x) - c_k[k] + c)
            new.append(c_k[k] - c + (x - y) / (LR * STEPS))
            moves.append(y - x)
        x, c, c_k = x + np.mean(moves, axis=0), c + np.mean(new - c_k, axis=0), np.array(new)
        assert_close(found, x, TRAINING)


def updates_of(delta, round=0):
    return some_updates([an_update(delta=delta, round=round)], round)


def steps_of(rule, deltas):
    state = rule.init(torch.zeros(len(deltas[0]), dtype=torch.float64), facts(1))
    for delta in deltas:
        state = rule.step(state, updates_of(delta))
    return state


DELTAS = np.random.default_rng(0).normal(size=(6, 5))


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_equals_the_formula(nesterov):
    beta, eta = 0.6, 0.8
    theta, v = np.zeros(5), np.zeros(5)
    for delta in DELTAS:
        v = beta * v - delta  # the paper's sign: theta - mean(theta_k)
        theta = theta - eta * ((beta * v - delta) if nesterov else v)
    found = steps_of(FedAvgM(beta=beta, eta=eta, nesterov=nesterov), DELTAS)
    assert_close(found["v"], theta)


@pytest.mark.parametrize("rule", [FedAdagrad(), FedYogi(), FedAdam(), FedAdagrad(beta1=0.5, eta=0.3, tau=0.1)])
def test_fedopt_equals_the_formulas(rule):
    theta, m, v = np.zeros(5), np.zeros(5), np.full(5, rule.tau**2)
    for delta in DELTAS:
        m = rule.beta1 * m + (1 - rule.beta1) * delta
        square = delta**2
        if isinstance(rule, FedAdagrad):
            v = v + square
        elif isinstance(rule, FedYogi):
            v = v - (1 - rule.beta2) * square * np.sign(v - square)
        else:
            v = rule.beta2 * v + (1 - rule.beta2) * square
        theta = theta + rule.eta * m / (np.sqrt(v) + rule.tau)
    assert_close(steps_of(rule, DELTAS)["v"], theta)


def test_one_fedadagrad_step_has_a_closed_form():
    rule = FedAdagrad(eta=0.5, tau=0.2)
    delta = DELTAS[0]
    expected = 0.5 * delta / (np.sqrt(0.2**2 + delta**2) + 0.2)
    assert_close(steps_of(rule, [delta])["v"], expected)


def test_fedopt_with_unit_second_moment_is_fedavg():
    class Held(FedAdam):
        def second_moment(self, second, square):
            return torch.ones_like(second)

    found = steps_of(Held(eta=1.0, beta1=0.0, tau=1e-300), DELTAS)
    assert_close(found["v"], DELTAS.sum(0))


def test_defaults_are_those_of_the_papers():
    assert method("fedprox").client[0].mu == 0.01
    assert (method("fedavgm").server.beta, method("fedavgm").server.eta) == (0.9, 1.0)
    moon, decorr = (method(name).client[0] for name in ("moon", "feddecorr"))
    assert (moon.mu, moon.temperature, moon.projection) == (1.0, 0.5, 256)
    assert (decorr.beta, decorr.form, decorr.scale) == (0.1, "authors", 1.0)
    assert method("fedgen").client[0].labels == "all"
    assert method("fedrep").client[0].head_share == 10 / 15
    assert not method("fedreg").client[0].clamp
    assert (method("dense").server.keep_optimizer, method("dense").server.augment) == (True, True)
    for name in ("fedadam", "fedyogi"):
        rule = method(name).server
        assert (rule.eta, rule.beta1, rule.beta2, rule.tau) == (0.01, 0.9, 0.99, 1e-3)
    assert method("fedadagrad").server.beta1 == 0.0
    assert method("scaffold").weights == "uniform"
    assert method("fedavg").weights is None


def test_options_are_typed():
    assert method("fedavgm:nesterov=true,beta=0.5").server == FedAvgM(beta=0.5, nesterov=True)
    assert method("fedavgm", beta="1e-1").server.beta == 0.1


@dataclass(frozen=True)
class Own(ClientRule):
    name, summary, paper = "own", "for tests", "none"
    beta: float = 0.5


def test_an_option_beyond_all_numbers_is_refused():
    for option in ("fedavg:eta=1e300", "fedadam:tau=-1e300"):
        with pytest.raises(ConfigError, match="not valid"):
            method(option)
    assert method("feddle:lam=inf").server.lam == float("inf")
    assert method(Feddle(lam=float("inf"))).server.lam == float("inf")
    with pytest.raises(ConfigError, match=r"fedprox:mu=inf is not valid"):
        method(FedProx(mu=float("inf")))
    with pytest.raises(ConfigError, match=r"own:beta=nan is not valid: it must be a finite number"):
        method([Own(beta=float("nan")), "scaffold"])


IDLE = {
    "apfl:adaptive=false": "decay=0.5",
    "ccvr:epochs=0": "samples=9 lr=0.5 ridge=0.1",
    "dense:epochs=1": "keep_optimizer=false",
    "dense:momentum=0": "keep_optimizer=false",
    "dp:noise=1,adaptive=false": "quantile=0.9 clip_lr=0.3 bit_noise=2",
    "dp:noise=0": "epsilon=8 bit_noise=2",
    "dpsgd:noise=0": "epsilon=8",
    "fedala:eta=0": "share=0.3",
    "fedamp:lam=0": "kernel=exponential sigma=2 alpha=2 own=0.9",
    "fedamp:kernel=exponential": "own=0.9",
    "fedas:epochs=0": "eta=0.5",
    "fedasync:staleness=constant": "a=0.9 b=9",
    "fedasync:staleness=polynomial": "b=9",
    "fedavgm:beta=0": "nesterov=true",
    "fedcog:coefficients=auto": "lambda_kd=0.5",
    "fedcog:supervision=hard": "t=4",
    "fedcog:lambda_dis=0": "t_js=4 js=reversed_clamped max_prev_age=3",
    "fedcog:source=global": "lambda_dis=5 t_js=4 js=reversed_clamped max_prev_age=3",
    "fedcog:source=noise": "g_lr=0.5 lambda_ce=3 lambda_dis=5 lambda_bn=1 t_js=4 js=reversed_clamped max_prev_age=3",
    "feddbe:kappa=0": "mu=0.5",
    "feddf:epochs=0": "lr=0.5 batch=3 optimizer=adam",
    "feddf:steps=0": "lr=0.5 batch=3 optimizer=adam",
    "feddisco:a=0": "distance=l1 target=all",
    "fedgen:gen_steps=0": "gen_lr=0.5 beta_s=1 eta_div=2",
    "fedgh:epochs=0": "lr=0.1 batch=3",
    "fedntd:beta=0": "tau=3",
    "fedreg:iterations=0": "eta_s=0.5 clamp=true",
    "fedsol:rho=0": "tau=2 form=fixed",
    "fedssyn:data=real": "rho=0.5 n_syn=9 generator=gan epochs=3 refuse=0.5 keep=math:sqrt match_steps=false",
    "fedssyn:data=central_real": "rho=0.5 n_syn=9 generator=gan epochs=3 refuse=0.5 keep=math:sqrt match_steps=false",
    "fedtgp:epochs=0": "threshold=1 lr=0.1 batch=3",
    "floco:endpoints=1": "tau=9 rho=0.1",
    "hetlora:gamma=1": "lam=0.5",
    "hfcl:n_s=0": "epochs=3 steps=3 lr=0.5 batch=3 optimizer=adam",
    "ifca:groups=1": "spread=0.9",
    "knnper:lam=0": "k=3 scale=2",
    "moon:mu=0": "temperature=0.1 first=global",
    "perfedavg:version=fo": "delta=0.1",
    "scaffold:option=I": "variate=mean",
    "vhl:lam=0": "align_epochs=2 temperature=0.5",
}
"""Options without an effect, by the options that make them so."""


@pytest.mark.parametrize("expression", IDLE)
def test_options_without_an_effect_are_rejected(expression):
    """All that the class declares for these values."""
    name, _, values = expression.partition(":")
    (rule,) = {rule for rule in method(expression).rules if rule.name == name}
    check_options_have_effect(rule)
    declared = [options for idle, options in rule.idle_options if str(idle).lower() == written(values)]
    options = IDLE[expression].split()
    assert [option.partition("=")[0] for option in options] == list(*declared)
    for option in options:
        (rule,) = {rule for rule in method(f"{expression},{option}").rules if rule.name == name}
        with pytest.raises(ConfigError, match=f"{option.partition('=')[0]} has no effect with {values.split(',')[-1]}"):
            check_options_have_effect(rule)


def written(values):
    """Return the last of the values as Python writes it in a dictionary, in lower case."""
    option, _, value = values.split(",")[-1].partition("=")
    number = value.isdigit() or value == "false"
    return f"{{'{option}': {value if number else repr(value.lower())}}}"


def test_all_options_without_an_effect_are_tested():
    tested = {expression.partition(":")[0] for expression in IDLE}
    inherited = {"center", "fedcog-authors", "fedft"}
    for name in METHODS.keys() - tested - inherited:
        assert not rule_class(name).idle_options, name


QUICK = (
    *("apfl", "ccvr", "fedala", "fedasync", "fedavgm", "fedcog", "feddisco", "fedgen", "fedntd", "fedreg", "ifca"),
    *("knnper", "moon", "perfedavg", "scaffold", "vhl"),
)
"""Methods whose runs are short and need no special data."""


@pytest.mark.parametrize("expression", [e for e in IDLE if e.partition(":")[0] in QUICK])
def test_options_that_are_declared_without_an_effect_have_none(expression, monkeypatch):
    """Neither on the model nor on the traffic nor on personal models."""
    monkeypatch.setattr(validation, "check_options_have_effect", lambda rule: None)
    quick = expression.replace("fedcog:", "fedcog:start_round=0,n=6,g_steps=2,")

    def outcome(*options):
        budget = {"lr": 0.1, "local_epochs": 1, "batch_size": 4, "rounds": 3, "precision": "fp64", "engine": "inline"}
        result = unskew.run(skewed(sizes=(8, 8, 12)), method=",".join((quick, *options)), model=two_layers(), **budget)
        keys = [key for key in result.summary if "bytes" in key or "accuracy" in key or "loss" in key]
        return result.vector, {key: result.summary[key] for key in keys}

    vector, summary = outcome()
    for option in IDLE[expression].split():
        other = outcome(option)
        assert torch.equal(vector, other[0]), option
        assert summary == pytest.approx(other[1], nan_ok=True, abs=0, rel=0), option


def test_a_run_rejects_an_option_without_an_effect():
    with pytest.raises(ConfigError, match=r"fedsol:tau has no effect with rho=0\. Remove one of the two"):
        run("fedsol:rho=0,tau=2", rounds=1)
