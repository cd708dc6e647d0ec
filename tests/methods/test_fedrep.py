"""FedRep against two linear layers in NumPy, and by what must not move, travel or be asked for."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.federations import SmallBatchNorm, blobs
from support.protocol import state_at
from support.quadratic import Quadratics, problem
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import MethodConflictError
from unskew.methods.registry import method
from unskew.protocol.training_config import Training

LR, STEPS, MOMENTUM, DECAY = 0.03, 7, 0.8, 0.05
HIDDEN = 2


def two_layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, HIDDEN, bias=False), torch.nn.Linear(HIDDEN, 1, bias=False))


def quadratics(spelling, participation=0.5, engine="inline"):
    A, b = problem()
    training = Training(
        local_steps=STEPS, batch_size=100, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, precision="fp64"
    )
    return A, b, Quadratics(A, b, spelling, training, participation=participation, engine=engine, module=two_layers())


def oracle(A, b, rounds, cohort, head_steps, start, mu=0.0):
    """Algorithm 1 of the paper: bodies ``W [h, d]`` are averaged, heads ``u [h]`` stay; SGD as ``torch.optim``'s."""
    W, u0 = start[: HIDDEN * 3].reshape(HIDDEN, 3).copy(), start[HIDDEN * 3 :].copy()
    heads = {}
    for t in range(rounds):
        bodies = []
        for k in cohort(t):
            a, y, w, u = A[k], b[k], W.copy(), heads.get(k, u0).copy()
            anchor, m_w, m_u = u.copy(), np.zeros_like(w), np.zeros_like(u)
            for step in range(STEPS):
                error = (a @ w.T @ u - y) / len(y)
                if step < head_steps:
                    m_u = MOMENTUM * m_u + (a @ w.T).T @ error + mu * (u - anchor) + DECAY * u
                    u = u - LR * m_u
                else:
                    m_w = MOMENTUM * m_w + np.outer(u, error @ a) + mu * (w - W) + DECAY * w
                    w = w - LR * m_w
            heads[k] = u
            bodies.append(w)
        W = np.mean(bodies, axis=0)
    return W.reshape(-1), heads


@pytest.mark.parametrize("engine", slow_but(["inline"], ["inline", "vectorized"]))
@pytest.mark.parametrize(
    ("spelling", "head_steps", "mu"),
    [
        ("fedrep", 5, 0.0),  # round(4.67)
        ("fedrep:head_share=0.5", 4, 0.0),  # round(3.5), upwards
        ("fedrep:head_share=0.3", 2, 0.0),
        ("fedrep:head_share=0", 0, 0.0),
        ("fedrep:head_share=1", 7, 0.0),
        ("fedrep+fedprox:mu=0.4", 5, 0.4),
    ],
)
def test_fedrep_equals_numpy(spelling, head_steps, mu, engine):
    A, b, run = quadratics(spelling, engine=engine)
    start = run.server.state.v.numpy().copy()
    found = run.rounds(5)
    body, heads = oracle(A, b, 5, run.sampler.draw, head_steps, start, mu)
    assert_close(found[-1][: HIDDEN * 3], body, TRAINING)
    for k, head in heads.items():
        assert_close(state_at(run.server, k).model[HIDDEN * 3 :], head, TRAINING)
    assert {k for k in range(4) if run.server.clients.store.get(k)} == set(heads)


def test_what_is_frozen_does_not_move_by_a_bit():
    start = quadratics("fedrep")[2].server.state.v
    body, head = slice(0, HIDDEN * 3), slice(HIDDEN * 3, None)
    for share, moved, still in (("0", body, head), ("1", head, body)):
        _, _, run = quadratics(f"fedrep:head_share={share}", participation=1.0)
        run.rounds(3)
        for k in range(4):
            v = state_at(run.server, k).model
            assert torch.equal(v[still], start[still])
            assert not torch.isclose(v[moved], start[moved]).any()
        assert torch.equal(run.server.state.v[head], start[head]), "the server never sees a head"


def test_nothing_of_a_head_is_sent():
    _, _, run = quadratics("fedrep+fedprox", participation=1.0)
    run.rounds(1)
    for update in run.engine.train([run.server.broadcaster.broadcast(1, k) for k in range(4)]):
        assert torch.equal(update.delta[HIDDEN * 3 :], torch.zeros(HIDDEN, dtype=torch.float64))
        assert not update.upload
        assert torch.count_nonzero(update.delta) == HIDDEN * 3


def train(chosen, fed=None, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "participation": 0.5, "engine": "inline"}
    return unskew.run(
        fed or blobs([12, 23, 17, 9]), model=SmallBatchNorm(), method=chosen, **{**given, **options}
    )  # fmt: skip


def test_only_the_body_is_paid_for_to_the_byte():
    result = train("fedrep")
    body, statistics = 4 * 2 * 9 + 4 + 4, 4 + 4  # convolution, scale and shift; means and variances
    for way in ("up", "down"):
        assert result.summary[f"bytes_{way}"] == 3 * 2 * 8 * (body + statistics)
        assert result.summary[f"buffer_bytes_{way}"] == 3 * 2 * 8 * statistics
    assert result.summary["parameters"] == body + 16 * 3 + 3
    assert result.summary["client_weighting"] == "uniform"


def test_without_head_steps_it_is_fedavg_with_a_frozen_head():
    class Frozen(SmallBatchNorm):
        def __init__(self):
            super().__init__()
            self.fc.requires_grad_(False)

    given = {"momentum": 0.9, "weight_decay": 0.01, "client_weighting": "uniform"}
    mine = train("fedrep:head_share=0", **given)
    torch.manual_seed(0)
    options = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "participation": 0.5, **given}
    theirs = unskew.run(blobs([12, 23, 17, 9]), model=Frozen(), head="conv", engine="inline", **options)
    for name, tensor in theirs.model.state_dict().items():
        assert torch.equal(mine.model.state_dict()[name], tensor), name
    assert [r["accuracy"] for r in mine.history] == [r["accuracy"] for r in theirs.history]


def test_a_client_is_served_by_the_global_body_and_its_own_head(tmp_path):
    draws = np.random.default_rng(3)

    def images(n, k):
        y = draws.choice([k % 3, (k + 1) % 3], n)
        return (draws.normal(size=(n, 2, 6, 6)) + y[:, None, None, None]).astype(np.float32), y

    clients = [(*images(20, k), *images(30, k)) for k in range(4)]
    fed = unskew.Federation.from_arrays(clients, test=images(20, 0), classes=3)
    result = train("fedrep", fed, rounds=1, local_epochs=8, out=tmp_path / "run")
    kept = load_file(tmp_path / "run/checkpoints/0000001/clients-0000.safetensors")
    spec = unskew.ModelSpec(SmallBatchNorm(), fed.shape, 3, dtype=torch.float64)
    rights = []
    for k, (_, _, x, y) in enumerate(clients):
        v = result.vector.clone()
        for piece in spec.parts["head"]:
            if f"{k}/model" in kept:
                v[piece] = kept[f"{k}/model"][piece]
        module = spec.load(v, spec.flatten_buffers(result.model))
        rights.append((module(torch.from_numpy(x).double()).argmax(1).numpy() == y).mean())
    served = [name for name in kept if name.endswith("/model")]
    assert len(served) == 2, "half of the clients never took part"
    assert result.summary["personal_accuracy_mean"] == pytest.approx(np.mean(rights))
    assert result.summary["personal_accuracy_std"] == pytest.approx(np.std(rights))
    assert result.summary["personal_accuracy_worst"] == pytest.approx(min(rights))
    assert result.summary["client_accuracy_mean"] != pytest.approx(np.mean(rights)), "the test could not fail otherwise"


@pytest.mark.parametrize("other", ["scaffold", "fedpvr", "feddyn", "fedexp", "ditto", "fedreg", "fedgen"])
def test_sums_that_mean_nothing_are_refused(other):
    for spelling in (f"fedrep+{other}", f"{other}+fedrep"):
        with pytest.raises(MethodConflictError, match=rf"^{other} .*fedrep"):
            method(spelling)


OTHERS = ["fedadam", "fedavgm", "moon:projection=0", "fedcog:start_round=1,n=6,g_steps=2", "fedsam"]


@pytest.mark.parametrize("other", slow_but(["fedadam", "moon:projection=0"], OTHERS))
def test_other_sums_train_and_leave_the_initial_head_at_the_server(other):
    result = train(f"fedrep+{other}")
    start = train("fedrep", rounds=1, lr=1e-300).vector
    head = unskew.ModelSpec(result.model, (2, 6, 6), 3).parts["head"]
    assert torch.isfinite(result.vector).all()
    assert all(torch.equal(result.vector[piece], start[piece]) for piece in head)
    assert result.summary["bytes_up"] == train("fedrep").summary["bytes_up"]
    assert not torch.equal(result.vector, train("fedrep").vector)
