"""Whole runs of FedCOG with its hosts against a loop of plain tensors and ``torch.optim.Adam``, client by client."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.federations import blobs
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close
from torch import nn

import unskew
from unskew.engines.batches import BatchPlan
from unskew.generators.learned.inversion import minimize
from unskew.protocol.training_config import Training
from unskew.seeding import derive, fold, normal, uniform
from unskew.simulation.sampler import Sampler

SIZES, ROUNDS, START, N, STEPS = [12, 23, 17, 9], 7, 2, 10, 4
LR, INPUT_LR, KD, DISAGREE, MU, ALPHA = 0.05, 0.05, 0.7, 0.5, 0.3, 3
COG = f"fedcog:start_round={START},n={N},g_steps={STEPS},lambda_kd={KD},lambda_dis={DISAGREE},g_lr={INPUT_LR}"
BODY = 6 * 72 + 6
SIZE = BODY + 3 * 6 + 3


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def model(v, x):
    """Logits and features at the vector ``v``."""
    pieces = torch.split(v, [432, 6, 18, 3])
    h = torch.tanh(x.flatten(1) @ pieces[0].view(6, 72).T + pieces[1])
    return h @ pieces[2].view(3, 6).T + pieces[3], h


def kl(p, q):
    return (p * (p / q).log()).sum(1).mean()


def inputs(key, teacher, previous):
    """The best inputs and the teacher's logits on them."""
    y, x, best = torch.tensor([0] * 4 + [1] * 3 + [2] * 3), nn.Parameter(normal(key, (N, 2, 6, 6))), None
    adam = torch.optim.Adam([x], INPUT_LR, (0.5, 0.9))
    for _ in range(STEPS):
        z = model(teacher, x)[0]
        loss, p = F.cross_entropy(z, y), z.softmax(1)
        if previous is not None:
            q = model(previous, x)[0].softmax(1)
            loss = loss + DISAGREE * (1 - (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2)
        if best is None or loss.item() < best[0]:
            best = loss.item(), x.detach().clone(), z.detach().clone()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return best[1:]


def away(h, near, far):
    """MOON's term."""
    to = [torch.exp(F.cosine_similarity(h, other, dim=1) / 0.5) for other in (near, far)]
    return -torch.log(to[0] / (to[0] + to[1])).mean()


def by_hand(hosts, participation, momentum, alpha):
    """The mean of the last round's clients; ``alpha`` is 1 for methods whose whole model travels in every round."""
    fed, sampler, budget = blobs(SIZES), Sampler(4, participation, 0), Training(local_epochs=2, batch_size=5)
    head, zero = torch.arange(SIZE) >= BODY, torch.zeros(SIZE, dtype=torch.float64)
    server = torch.cat([p.detach().reshape(-1) for p in net().parameters()])
    c, c_k, averaged = zero, dict.fromkeys(range(4), zero), -1
    theta, last, previous, sums, steps, kept = {}, {}, {}, {}, {}, {}
    for t in range(ROUNDS):
        cohort = sampler.draw(t)
        for k in cohort:
            fresh = head if k in last and averaged < last[k] else head | True
            start = torch.where(fresh, server, theta.get(k, server))
            sums[k], steps[k] = (torch.where(fresh, zero, part.get(k, zero)) for part in (sums, steps))
            key, v, buffer = torch.tensor(derive(0, "key", t, k)), start, kept.get(k, zero)
            made = inputs(key, start, previous.get(k)) if t >= START else None
            cycle = itertools.cycle(torch.argsort(uniform(fold(key, 9), (N,))).tolist())
            for index in BatchPlan(budget, SIZES[k], 0, t, k).batches:
                at, x = v.clone().requires_grad_(), fed.clients[k].x[index].double()
                z, h = model(at, x)
                loss = F.cross_entropy(z, fed.clients[k].y[index])
                if "moon" in hosts and k in previous:
                    loss = loss + MU * away(h, *(model(other, x)[1] for other in (start, previous[k])))
                if made is not None:
                    rows = list(itertools.islice(cycle, len(index)))
                    loss = loss + KD * kl(made[1][rows].softmax(1), model(at, made[0][rows])[0].softmax(1))
                (g,) = torch.autograd.grad(loss, at)
                if "fedprox" in hosts:
                    g = g + MU * (v - start)
                sums[k], steps[k] = sums[k] + g, steps[k] + 1
                buffer = momentum * buffer + g + ((c - c_k[k]) if "scaffold" in hosts else 0)
                v = v - LR * buffer
            theta[k], previous[k], last[k] = v, v, t
            if "fedals" in hosts:
                kept[k] = buffer
        for part, period in ((head, 1), (~head, alpha)):
            if (t + 1) % period == 0:
                new = {k: torch.where(part, sums[k] / steps[k], c_k[k]) for k in cohort}
                c = c + sum(new[k] - c_k[k] for k in cohort) / 4
                c_k.update(new)
                server = torch.where(part, sum(theta[k] for k in cohort) / len(cohort), server)
        averaged = t if (t + 1) % alpha == 0 else averaged
    return sum(theta[k] for k in cohort) / len(cohort)


ALS = f"scaffold+fedals:alpha={ALPHA}"
ALL = f"fedprox:mu={MU}+moon:mu={MU},projection=0+{ALS}"
HOSTS = [("fedavg", 0.9), ("scaffold", 0.0), (ALS, 0.0), (ALS, 0.8), (ALL, 0.5)]
CASES = [(*host, share, engine) for host in HOSTS for share in (1.0, 0.5) for engine in ("inline", "vectorized")]
QUICK = [("fedavg", 0.9, 0.5, "vectorized"), (ALL, 0.5, 0.5, "inline")]


@pytest.mark.parametrize(("hosts", "momentum", "participation", "engine"), slow_but(QUICK, CASES))
def test_fedcog_with_its_hosts_equals_the_loop(hosts, momentum, participation, engine):
    """One step of momentum or none, stale previous models, bodies that stay or were missed, and variates by parts."""
    result = unskew.run(
        blobs(SIZES), model=net(), method=f"{COG}+{hosts}", rounds=ROUNDS, participation=participation, lr=LR,
        momentum=momentum, batch_size=5, local_epochs=2, precision="fp64", engine=engine, client_weighting="uniform",
        eval_clients=0,
    )  # fmt: skip
    expected = by_hand(hosts, participation, momentum, ALPHA if "fedals" in hosts else 1)
    assert_close(result.vector, expected, TRAINING)


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_inputs_of_a_whole_cohort_are_learned_at_once():
    """No operation of it falls back to one client after the other."""
    start = torch.randn(3, 4, 2, dtype=torch.float64)

    def learned(x):
        return minimize(x, lambda x, t: ((x - 1).square().sum(), x), 5, 0.1)[0]

    all_at_once = torch.func.vmap(learned)(start)
    assert_close(all_at_once, torch.stack([learned(x) for x in start]))
