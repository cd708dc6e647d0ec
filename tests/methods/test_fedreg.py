"""FedReg against a step-by-step NumPy version of its formulas on logistic regression."""

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.tolerance import MAGNIFIED, assert_close

import unskew
from unskew.methods.fedreg import FedReg

LR, STEPS = 0.1, 3


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def numpy_fedreg(x, y, W0, rule, rates=(LR,) * STEPS):
    """One client's round with full batches; ``W [C, f+1]`` holds the bias in its last column."""
    onehot = np.eye(W0.shape[0])[y]

    def forward(W, x):
        return softmax(x @ W[:, :-1].T + W[:, -1])

    def grad(W, x, target):
        e = (forward(W, x) - target) / len(x)
        return np.concatenate([e.T @ x, e.sum(0)[:, None]], axis=1)

    low, high = x.min(), x.max()

    def moved(x, eta):
        for _ in range(rule.iterations):
            x = x - eta * np.sign((forward(W0, x) - onehot) @ W0[:, :-1])
            x = np.clip(x, low, high) if rule.clamp else x
        return x

    x_s, x_p = moved(x, rule.eta_s), moved(x, rule.eta_s / 100)
    y_s = forward(W0, x_s)
    W = W0.copy()
    for rate in rates:
        W = W - rate * grad(rule.gamma * W + (1 - rule.gamma) * W0, x, onehot)
        q = 0.5 * W + 0.5 * W0
        g2 = grad(q, x_s, y_s)
        w = max(0.0, ((W - W0) * g2).sum() / (g2**2).sum())
        g3 = grad(q, x_p, onehot)
        w_p = max(0.0, ((W - W0 - w * g2) * g3).sum() / (g3**2).sum())
        W = W - w * g2 - w_p * g3
    return W


@pytest.mark.parametrize(
    ("rule", "schedule", "rates"),
    [
        (FedReg(), "constant", (LR,) * STEPS),
        (FedReg(gamma=0.8, eta_s=0.3, iterations=4), "constant", (LR,) * STEPS),
        (FedReg(eta_s=0.5, clamp=True), "constant", (LR,) * STEPS),
        (FedReg(), "step:1,0.5", (LR, LR / 2, LR / 4)),
    ],
)
def test_fedreg_equals_the_formulas(rule, schedule, rates):
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(12, 5)).astype("float32"), draws.integers(0, 3, 12)
    fed = unskew.Federation.from_arrays([(x, y)], test=(x, y), classes=3, holdout=0)
    torch.manual_seed(0)
    module = torch.nn.Linear(5, 3).double()
    W0 = np.concatenate([module.weight.detach().numpy(), module.bias.detach().numpy()[:, None]], axis=1)
    given = {"rounds": 1, "local_steps": STEPS, "batch_size": 50, "lr": LR, "precision": "fp64", "engine": "inline"}
    given |= {"lr_schedule": schedule, "lr_schedule_per": "step"}
    result = unskew.run(fed, model=module, method=rule, **given)
    W = numpy_fedreg(x.astype(float), y, W0, rule, rates)
    assert_close(result.model.weight.detach(), W[:, :-1], MAGNIFIED)
    assert_close(result.model.bias.detach(), W[:, -1], MAGNIFIED)


def test_fedreg_stays_nearer_to_the_global_model():
    """What the projections take away is movement from the global model, so a client ends nearer to it."""
    torch.manual_seed(0)
    fed, module = blobs([30], skew=True), SmallBatchNorm(dropout=0.0)
    start = unskew.ModelSpec(module, (2, 6, 6), 3, dtype=torch.float64).flatten()

    def drift(method):
        result = unskew.run(fed, model=module, method=method, rounds=1, local_steps=10, lr=0.1, precision="fp64")
        return float(torch.linalg.vector_norm(result.vector - start))

    assert drift("fedreg:gamma=1") < 0.95 * drift("fedavg")


def test_fedreg_refuses_momentum():
    with pytest.raises(unskew.UnskewError, match="plain SGD"):
        unskew.run(blobs([9, 9]), model="logistic", method="fedreg", rounds=1, momentum=0.9)
