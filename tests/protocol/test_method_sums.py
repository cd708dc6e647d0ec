"""Sums of methods, and a part of the clients per round, against NumPy: what one rule must know of what the others do."""

import numpy as np
import pytest
import torch
from support.protocol import state_at
from support.quadratic import Quadratics, gradient, problem
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close

from unskew.methods.registry import method
from unskew.protocol.messages import ClientState
from unskew.protocol.rules import ServerRule
from unskew.protocol.training_config import Training
from unskew.simulation.network import Network

LR, STEPS, HIDDEN = 0.03, 3, 2
BODY = np.arange(HIDDEN * 3 + HIDDEN) < HIDDEN * 3


def two_layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, HIDDEN, bias=False), torch.nn.Linear(HIDDEN, 1, bias=False))


def slope(a, y, v):
    """Gradient of the mean half square of ``u W a - y`` at ``v = [W, u]``."""
    W, u = v[BODY].reshape(HIDDEN, 3), v[~BODY]
    error = (a @ W.T @ u - y) / len(y)
    return np.concatenate([np.outer(u, error @ a).ravel(), (a @ W.T).T @ error])


def run(spelling, participation, engine="inline", momentum=0.0):
    A, b = problem()
    training = Training(local_steps=STEPS, batch_size=100, lr=LR, momentum=momentum, precision="fp64")
    return A, b, Quadratics(A, b, spelling, training, None, participation, engine=engine, module=two_layers())


def scaffold_by_parts(A, b, rounds, cohort, start, alpha, momentum=0.0):
    """FedALS with SCAFFOLD's variates per part; a client that missed an average of the body begins anew from it.

    Variates are the mean gradients of a client's interval, which for plain SGD is the difference quotient.
    """
    K, d = len(A), len(start)
    server, c, c_k, averaged = start.copy(), np.zeros(d), np.zeros((K, d)), -1
    theta, sums, steps, last, buffers = {}, {}, {}, {}, dict.fromkeys(range(K), np.zeros(d))
    for t in range(rounds):
        chosen = cohort(t)
        for k in chosen:
            new = ~BODY if k in last and averaged < last[k] else np.full(d, True)
            theta[k] = np.where(new, server, theta.get(k)) if k in last else server.copy()
            sums[k], steps[k] = (np.where(new, 0, part.get(k, 0.0)) for part in (sums, steps))
            for _ in range(STEPS):
                g = slope(A[k], b[k], theta[k])
                sums[k], steps[k] = sums[k] + g, steps[k] + 1
                buffers[k] = momentum * buffers[k] + g - c_k[k] + c
                theta[k] = theta[k] - LR * buffers[k]
            last[k] = t
        for part, period in ((~BODY, 1), (BODY, alpha)):
            if (t + 1) % period == 0:
                change = np.zeros(d)
                for k in chosen:
                    new = np.where(part, sums[k] / steps[k], c_k[k])
                    change, c_k[k] = change + new - c_k[k], new
                c = c + change / K
                server = np.where(part, np.mean([theta[k] for k in chosen], axis=0), server)
                averaged = t if period == alpha else averaged
        yield server.copy(), c.copy()


CASES = [
    (variate, momentum, participation, engine)
    for variate, momentum in (("auto", 0.0), ("mean", 0.0), ("auto", 0.9))
    for participation in (1.0, 0.5)
    for engine in ("inline", "vectorized")
]
QUICK = [(*case, 0.5, "inline") for case in (("auto", 0.0), ("mean", 0.0), ("auto", 0.9))]


@pytest.mark.parametrize(
    ("variate", "momentum", "participation", "engine"), slow_but([*QUICK, ("auto", 0.9, 0.5, "vectorized")], CASES)
)
def test_scaffold_forgets_the_steps_before_a_body_that_it_missed(variate, momentum, participation, engine):
    A, b, mine = run(f"fedals:alpha=3+scaffold:variate={variate}", participation, engine, momentum)
    start = mine.server.state.v.numpy().copy()
    found = mine.rounds(12)
    expected = list(scaffold_by_parts(A, b, 12, mine.sampler.draw, start, 3, momentum))
    assert_close(found, [v for v, _ in expected], TRAINING)
    assert_close(mine.server.state.rules["scaffold"]["c"], expected[-1][1], TRAINING)


@pytest.mark.parametrize("rule", ["scaffold:variate=mean", "fedpvr"])
@pytest.mark.parametrize("outer", ["fedsam:rho=1e-9", "ditto"])
def test_a_variate_counts_one_gradient_a_step(rule, outer):
    """Both outer rules ask for a second gradient in every step."""
    name = rule.partition(":")[0]
    variates = []
    for chosen in (rule, f"{outer}+{rule}", f"{rule}+{outer}"):
        _, _, mine = run(chosen, 1.0)
        mine.rounds(1)
        variates.append(mine.server.state.rules[name]["c"].numpy())
    np.testing.assert_allclose(variates[1], variates[0], rtol=1e-6)
    np.testing.assert_allclose(variates[2], variates[0], rtol=1e-6)


class Norms(ServerRule):
    """FedExP's step, from the updates one by one."""

    name, summary, paper, needs = "norms", "for tests", "none", ("individual",)

    def step(self, state, updates):
        squares = sum(u.weight * float(u.delta.square().sum()) for u in updates) / updates.aggregate.weight
        mean = updates.aggregate.delta
        eta = max(1.0, squares / (2 * (float(mean.square().sum()) + 1e-3)))
        return {"v": state["v"] + eta * mean}


@pytest.mark.parametrize("engine", slow_but(["inline"], ["inline", "vectorized"]))
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedexp_measures_the_updates_that_are_sent(participation, engine):
    """A body that stays at the client is not a part of the update, and one that is sent has moved since it was received."""
    _, _, mine = run("fedals:alpha=3+fedexp:evaluate=last", participation, engine)
    _, _, theirs = run(method(["fedals:alpha=3", Norms()]), participation, engine)
    assert_close(mine.rounds(9), theirs.rounds(9), TRAINING)


def test_an_untracked_pass_of_another_rule_leaves_scaffold_the_correction():
    """FedSAM around SCAFFOLD steps along the corrected gradient at the perturbed point."""
    A, b = problem()
    rho, x, c, c_k = 0.3, np.zeros(3), np.zeros(3), np.zeros((4, 3))
    training = Training(local_steps=STEPS, batch_size=100, lr=LR, precision="fp64")
    for found in Quadratics(A, b, f"scaffold:variate=mean+fedsam:rho={rho}", training).rounds(3):
        moved, new = [], []
        for k in range(4):
            y, seen = x.copy(), []
            for _ in range(STEPS):
                seen.append(gradient(A[k], b[k], y))
                g = seen[-1] - c_k[k] + c
                y = y - LR * (gradient(A[k], b[k], y + rho * g / np.linalg.norm(g)) - c_k[k] + c)
            moved.append(y)
            new.append(np.mean(seen, axis=0))
        x, c, c_k = np.mean(moved, axis=0), c + np.mean(np.array(new) - c_k, axis=0), np.array(new)
        assert_close(found, x, TRAINING)


def test_auto_sets_its_periods_although_nobody_reports_at_the_end_of_an_epoch(monkeypatch):
    """Then the next round with an update is the epoch's last: everything is averaged, and the periods are set anew."""
    monkeypatch.setattr(Network, "drops", lambda self, t, client: t == 5)
    _, _, mine = run("fedals:auto,alpha=3,longest=6,budget=0.6", 1.0)
    mine.rounds(6)
    assert int(mine.server.state.rules["fedals"]["begun"]) == 0
    mine.rounds(1)
    state = mine.server.state.rules["fedals"]
    assert int(state["begun"]) == 7
    assert state["synced"].tolist() == [6.0, 6.0]


def test_an_interval_that_another_method_left_at_a_client_is_over():
    """A run with SCAFFOLD alone may begin where one with FedALS ended: then everything is received in every round."""
    _, _, first = run("fedals:alpha=3+scaffold", 1.0)
    first.rounds(2)
    variates = []
    for names in (("c",), ("c", "start", "steps")):
        _, _, mine = run("scaffold", 1.0)
        mine.server.state.rules["scaffold"] = first.server.state.rules["scaffold"]
        for k in range(4):
            held = state_at(first.server, k).rules["scaffold"]
            own = ClientState({"scaffold": {name: held[name] for name in names}})
            mine.server.clients.store.put(k, own.tensors())
        mine.rounds(2)
        variates.append(mine.server.state.rules["scaffold"]["c"])
    assert torch.equal(*variates)


def test_scaffold_doubles_the_traffic_of_fedals():
    """Variates travel with their part of the model, both ways."""
    sent = []
    for chosen in ("fedals:alpha=3", "fedals:alpha=3+scaffold"):
        _, _, mine = run(chosen, 0.5)
        mine.rounds(7)
        sent.append((mine.server.traffic.total.up, mine.server.traffic.total.down))
    up, down = sent[0]
    assert sent[1] == (2 * up, 2 * down)
    assert up == 2 * 8 * (7 * HIDDEN + 2 * 3 * HIDDEN)  # two clients a round; the body after rounds 3 and 6


@pytest.mark.parametrize("engine", slow_but(["vectorized"], ["inline", "vectorized"]))
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddyn_keeps_h_the_mean_of_all_linear_terms_part_by_part(participation, engine):
    A, b, mine = run("fedals:alpha=3+feddyn:alpha=0.3", participation, engine)
    server, K, d = mine.server.state.v.numpy().copy(), len(A), len(BODY)
    h, g, averaged, theta, start, last = np.zeros(d), np.zeros((K, d)), -1, {}, {}, {}
    for t, found in enumerate(mine.rounds(9)):
        sent = ~BODY | ((t + 1) % 3 == 0)
        chosen = mine.sampler.draw(t)
        for k in chosen:
            new = ~BODY if k in last and averaged < last[k] else np.full(d, True)
            theta[k], start[k] = (np.where(new, server, part.get(k, server)) for part in (theta, start))
            for _ in range(STEPS):
                theta[k] = theta[k] - LR * (slope(A[k], b[k], theta[k]) - g[k] + 0.3 * (theta[k] - start[k]))
            g[k], last[k] = np.where(sent, g[k] - 0.3 * (theta[k] - start[k]), g[k]), t
        h = np.where(sent, h - 0.3 / K * sum(theta[k] - start[k] for k in chosen), h)
        server = np.where(sent, np.mean([theta[k] for k in chosen], axis=0) - h / 0.3, server)
        averaged = t if (t + 1) % 3 == 0 else averaged
        assert_close(found, server, TRAINING)
    assert_close(mine.server.state.server_rule["h"], g.mean(0), TRAINING)
