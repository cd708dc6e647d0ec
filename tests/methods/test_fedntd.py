"""FedNTD against Equations 4 and 5 written as loops over classes, and a run against a loop of ``torch.optim``."""

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.tolerance import TRAINING, assert_close, near

import unskew
from unskew.methods.fedntd import not_true
from unskew.testing import assert_engines_agree


def some(samples=7, classes=5, seed=0):
    """Logits of a teacher and of a student, and true classes."""
    draws = np.random.default_rng(seed)
    teacher, student = 2 * draws.normal(size=(2, samples, classes))
    return teacher, student, draws.integers(0, classes, samples)


def equations(teacher, student, y, tau):
    """Sample by sample, class by class."""
    total = 0.0
    for g, z, true in zip(teacher, student, y, strict=True):
        others = [c for c in range(len(z)) if c != true]
        q_g = np.array([np.exp(g[c] / tau) for c in others])
        q = np.array([np.exp(z[c] / tau) for c in others])
        q_g, q = q_g / q_g.sum(), q / q.sum()
        total += sum(-q_g[i] * np.log(q[i] / q_g[i]) for i in range(len(others)))
    return tau**2 * total / len(y)


def value(teacher, student, y, tau=1.0):
    return not_true(*(torch.as_tensor(t) for t in (teacher, student, y)), tau)


@pytest.mark.parametrize("tau", [1.0, 0.5, 3.0])
def test_the_term_is_that_of_the_equations(tau):
    teacher, student, y = some()
    assert float(value(teacher, student, y, tau)) == near(equations(teacher, student, y, tau))


def test_the_true_class_does_not_count_and_a_colder_softmax_is_that_of_smaller_logits():
    teacher, student, y = some()
    before = float(value(teacher, student, y))
    for logits in (teacher, student):
        logits[np.arange(len(y)), y] += 9.0
    assert float(value(teacher, student, y)) == near(before)
    assert float(value(teacher, student, y, 4.0)) == near(16 * float(value(teacher / 4, student / 4, y)))


def test_at_the_global_models_logits_there_is_nothing_to_keep():
    teacher, student, y = (torch.as_tensor(t) for t in some())
    for start, zero in ((teacher, True), (student, False)):
        logits = start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(not_true(teacher, logits, y, 2.0), logits)
        assert (float(slope.abs().max()) < 1e-15) is zero
        assert torch.equal(slope[torch.arange(len(y)), y], torch.zeros(len(y), dtype=slope.dtype))


def test_with_two_classes_there_is_one_other_class_and_no_term():
    teacher, student, y = some(classes=2)
    assert float(value(teacher, student, y)) == 0.0


def train(chosen, dropout=0.2, **options):
    torch.manual_seed(0)
    given = {
        "rounds": 3,
        "lr": 0.05,
        "batch_size": 8,
        "local_steps": 4,
        "precision": "fp64",
        "engine": "inline",
        **options,
    }
    return unskew.run(blobs([12, 23, 17]), model=SmallBatchNorm(dropout=dropout), method=chosen, **given)


def test_strength_zero_is_fedavg_and_nothing_more_is_sent():
    plain, kept = train("fedavg"), train("fedntd")
    assert torch.equal(train("fedntd:beta=0").vector, plain.vector)
    assert not torch.equal(kept.vector, plain.vector)
    for name in ("bytes_up", "bytes_down", "buffer_bytes_up", "buffer_bytes_down"):
        assert kept.summary[name] == plain.summary[name]


def test_engines_agree():
    """With BatchNorm and dropout in the model in training, and neither at work in the global one."""
    assert_engines_agree(train("fedntd:tau=2", engine="vectorized").vector, train("fedntd:tau=2").vector)


def test_a_run_is_a_plain_loop_with_the_global_model_in_eval_mode():
    """``kl_div`` of softmaxes in which the true class has no weight; full batches, BatchNorm, weights by samples."""
    beta, tau, steps, lr = 0.7, 2.0, 3, 0.1
    options = {"rounds": 2, "lr": lr, "local_steps": steps, "batch_size": 100}
    mine = train(f"fedntd:beta={beta},tau={tau}", 0.0, **options).model.state_dict()
    torch.manual_seed(0)
    server, fed, functional = SmallBatchNorm(dropout=0.0).double(), blobs([12, 23, 17]), torch.nn.functional
    start = {name: t.clone() for name, t in server.state_dict().items()}
    for _ in range(2):
        total = {name: torch.zeros_like(t) for name, t in start.items() if t.is_floating_point()}
        for client in fed.clients:
            net = SmallBatchNorm(dropout=0.0).double()
            net.load_state_dict(start)
            server.load_state_dict(start)
            server.eval(), net.train()
            optimizer, x = torch.optim.SGD(net.parameters(), lr=lr), client.x.double()
            hidden = functional.one_hot(client.y, 3) * -1e9
            for _ in range(steps):
                optimizer.zero_grad()
                logits = net(x)
                with torch.no_grad():
                    teacher = ((server(x) + hidden) / tau).softmax(1)
                student = ((logits + hidden) / tau).log_softmax(1)
                term = functional.kl_div(student, teacher, reduction="batchmean")
                (functional.cross_entropy(logits, client.y) + beta * tau**2 * term).backward()
                optimizer.step()
            for name in total:
                total[name] += net.state_dict()[name] * client.num_samples / 52
        start = {**start, **total}
    for name in total:
        assert_close(mine[name].double(), start[name], TRAINING, msg=name)
