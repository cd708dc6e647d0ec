"""Who takes part, and who drops out: decided by the seed and the round alone."""

import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.federations import blobs

import unskew
from unskew.secret_draws import SecretKey, SystemEntropy
from unskew.seeding import numpy_generator
from unskew.simulation.network import Network
from unskew.simulation.sampler import Sampler
from unskew.simulation.samplers.poisson import PoissonSampler


def test_cohort_has_its_size_and_nobody_twice():
    for share, size in ((1.0, 10), (0.3, 3), (0.01, 1), (0.55, 6)):
        sampler = Sampler(10, share, seed=0)
        for t in range(20):
            cohort = sampler.draw(t)
            assert len(cohort) == size
            assert cohort == sorted(set(cohort))
            assert set(cohort) <= set(range(10))


def test_cohort_depends_on_seed_and_round_only():
    def cohorts(seed):
        return [Sampler(100, 0.1, seed).draw(t) for t in range(5)]

    assert cohorts(0) == cohorts(0)
    assert cohorts(0) != cohorts(1)
    assert len({tuple(c) for c in cohorts(0)}) == 5
    one = Sampler(100, 0.1, 0)
    assert [one.draw(t) for t in (3, 0, 3)] == [cohorts(0)[3], cohorts(0)[0], cohorts(0)[3]], "order does not matter"


def test_cohorts_are_draws_of_the_generator_of_seed_and_round():
    """Recorded runs and comparisons with other versions depend on these numbers."""
    everyone, idle = np.arange(10), np.setdiff1d(np.arange(10), [2, 7])
    poisson, full = Sampler(10, 0.4, 3, PoissonSampler()), Sampler(10, 1.0, 3)
    for t in range(5):

        def draws(t=t):
            return numpy_generator(3, "cohort", t)

        fixed = Sampler(10, 0.4, 3)
        assert fixed.draw(t) == sorted(draws().choice(10, size=4, replace=False, shuffle=False))
        assert fixed.draw(t, [2, 7]) == sorted(draws().choice(idle, size=4, replace=False))
        assert full.draw(t) == list(everyone)
        drawn = np.flatnonzero(draws().random(10) < 0.4)
        assert poisson.draw(t) == list(drawn)
        assert poisson.draw(t, [2, 7]) == sorted({*drawn} - {2, 7})


def test_every_client_is_as_likely():
    counts = np.zeros(20)
    for t in range(4000):
        counts[Sampler(20, 0.25, 5).draw(t)] += 1
    # 4000 draws of 5 in 20: each about 1000 times, with a standard deviation of 27.
    assert abs(counts - 1000).max() < 5 * 27.4


def test_a_client_in_training_is_not_drawn():
    sampler = Sampler(10, 0.5, 0)
    busy = frozenset(range(7))
    for t in range(10):
        assert sampler.draw(t, busy) == [7, 8, 9]
        assert not set(sampler.draw(t, {1, 2})) & {1, 2}


def test_sampler_draws_from_a_million_clients():
    cohort = Sampler(1_000_000, 1e-5, 0).draw(0)
    assert len(cohort) == 10


def test_every_method_sees_the_same_clients():
    seen = {}
    for method in ("fedavg", "scaffold"):
        result = unskew.run(
            blobs([6] * 8), model="logistic", method=method, rounds=4, participation=0.4, engine="inline",
            network={"drop": 0.3}, seed=2,
        )  # fmt: skip
        seen[method] = [(row["cohort"], row["updates"], row["train_loss"] is None) for row in result.history]
    assert seen["fedavg"] == seen["scaffold"]


def test_drop_outs_have_their_probability_and_are_seeded():
    network = Network(0.3, seed=1)
    dropped = [network.drops(t, k) for t in range(200) for k in range(50)]
    assert abs(np.mean(dropped) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 10_000)
    assert dropped == [Network(0.3, seed=1).drops(t, k) for t in range(200) for k in range(50)]
    assert dropped != [Network(0.3, seed=2).drops(t, k) for t in range(200) for k in range(50)]
    assert not any(Network(0.0, seed=1).drops(t, k) for t in range(20) for k in range(20))


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
def test_drop_outs_cost_the_way_down_and_nothing_else(tmp_path, engine):
    fed, network = blobs([6, 7, 8, 9], shape=(1, 4, 4)), Network(0.5, seed=4)
    dropped = [[network.drops(t, k) for k in range(4)] for t in range(3)]
    arrived = 12 - sum(map(sum, dropped))
    never = [k for k in range(4) if all(row[k] for row in dropped)]
    assert 0 < arrived < 12
    result = unskew.run(
        fed, model="logistic", method="scaffold", rounds=3, engine=engine, network={"drop": 0.5}, seed=4,
        out=tmp_path / "run",
    )  # fmt: skip
    assert [row["updates"] for row in result.history] == [4 - sum(row) for row in dropped]
    size = 2 * 4 * result.vector.numel()  # the model and the control variate, four bytes a number
    assert result.summary["bytes_down"] == 12 * size
    assert result.summary["bytes_up"] == arrived * size
    kept = load_file(tmp_path / "run/checkpoints/0000003/clients-0000.safetensors")
    assert {int(name.split("/")[0]) for name in kept} == set(range(4)) - set(never)


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
def test_round_in_which_everybody_drops_out(monkeypatch, engine):
    fed = blobs([6, 7, 8, 9])
    monkeypatch.setattr(Network, "drops", lambda self, t, client: True)
    result = unskew.run(fed, model="logistic", method="scaffold+fedavgm", rounds=2, engine=engine)
    start = unskew.run(fed, model="logistic", rounds=1, lr=1e-30, engine="inline")
    assert torch.equal(result.vector, start.vector)
    assert result.summary["bytes_up"] == 0
    assert result.summary["updates_skipped"] == 0
    assert [row["updates"] for row in result.history] == [0, 0]
    assert [row["train_loss"] for row in result.history] == [None, None]


def test_a_dropped_client_is_as_if_it_were_not_in_the_round(monkeypatch):
    """With everybody else's numbers: SCAFFOLD keeps state, so a trace of the dropped client would show."""
    results = []
    for patched in ("drops", "draw"):
        with monkeypatch.context() as patch:
            if patched == "drops":
                patch.setattr(Network, "drops", lambda self, t, client: client == 1)
            else:
                patch.setattr(Sampler, "draw", lambda self, t, in_flight=(): [0, 2, 3])
            results.append(
                unskew.run(blobs([6, 7, 8, 9]), model="logistic", method="scaffold", rounds=3, lr=0.1, engine="inline")
            )
    assert torch.equal(results[0].vector, results[1].vector)


@pytest.mark.parametrize("secret", [None, SecretKey(bytes(32))])
def test_poisson_cohorts_draw_each_client_independently_with_the_rate(secret):
    sampler, rounds = Sampler(20, 0.15, 3, PoissonSampler(), secret=secret), 4000
    drawn = np.zeros((rounds, 20))
    for t in range(rounds):
        drawn[t, sampler.draw(t)] = 1
    deviation = math.sqrt(0.15 * 0.85 / rounds)
    assert abs(drawn.mean(0) - 0.15).max() < 5 * deviation
    sizes = drawn.sum(1)
    assert sizes.var() == pytest.approx(20 * 0.15 * 0.85, rel=0.2)  # fixed cohorts have 0
    assert (sizes == 0).any()
    assert sampler.draw(5) == Sampler(20, 0.15, 3, PoissonSampler(), secret=secret).draw(5)
    assert 7 not in {k for t in range(50) for k in sampler.draw(t, in_flight=[7])}
    entropy = Sampler(1000, 0.5, 0, PoissonSampler(), secret=SystemEntropy())
    assert entropy.draw(0) != entropy.draw(0)


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
def test_empty_rounds_leave_the_model_unchanged_and_are_counted(engine):
    fed = blobs([9, 8])
    given = {"model": "mlp", "rounds": 8, "local_steps": 1, "batch_size": 4, "participation": 0.3, "workers": 2}
    result = unskew.run(fed, sampling="poisson", engine=engine, **given)
    sizes = [row["cohort"] for row in result.history]
    assert len(sizes) == 8
    assert 0 in sizes
    for before, row in itertools.pairwise(result.history):
        if row["cohort"] == 0:
            assert (row["loss"], row["bytes_up"]) == (before["loss"], before["bytes_up"])
