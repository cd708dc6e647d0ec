"""Attackers who know the configuration and the seed of a private run: they compute nothing of its noise.

With ``reproducible=true`` each attack succeeds, which shows that it can.
"""

import math
from importlib.util import find_spec

import pytest
import torch
from support.federations import blobs
from support.slow import slow_but

import unskew
from unskew.engines.base import EngineConfig
from unskew.methods.dpsgd import DPSGD
from unskew.models.spec import ModelSpec
from unskew.protocol.training_config import Training
from unskew.secret_draws import SecretKey

SIZES = [9, 14, 9, 14, 9, 9, 14, 9]
FEW = {"model": "mlp", "local_steps": 2, "batch_size": 4, "lr": 0.05, "precision": "fp64", "eval_clients": 0}
SEEDED = ",reproducible=true"
pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore::UserWarning")]


def run(method, data=0, engine="inline", rounds=1, **options):
    return unskew.run(
        blobs(SIZES, seed=data), method=method, engine=engine, workers=2, rounds=rounds, **{**FEW, **options}
    )


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("seeded", ["", SEEDED])
def test_noise_at_the_server_cannot_be_removed(seeded):
    """The attacker runs the same command on data of his own, with and without noise, and subtracts the difference."""
    method = "dp:noise={},clip=1,adaptive=false"
    released, plain = run(method.format(2) + seeded).vector, run(method.format(0)).vector
    guess = run(method.format(2) + seeded, data=1, lr=1e-12).vector - run(method.format(0), data=1, lr=1e-12).vector
    noise = released - plain
    if seeded:
        assert cosine(guess, noise) > 0.999999
    else:
        assert abs(cosine(guess, noise)) < 5 / math.sqrt(len(noise))


LOUD = {
    "server": "dp:noise=1e5,clip=1,adaptive=false",
    "sites": "dp:noise=1e5,clip=1,adaptive=false,noise_at=sites,honest=4",
    "dpsgd": "dpsgd:noise=1e5",
}


EVERYWHERE = [(where, engine) for where in LOUD for engine in ("inline", "vectorized", "processes")]
QUICK = [*((where, "inline") for where in LOUD), ("dpsgd", "vectorized"), ("dpsgd", "processes")]
"""At the engines, the clients draw."""


@pytest.mark.parametrize(("where", "engine"), slow_but(QUICK, EVERYWHERE))
def test_the_noise_of_a_repeated_run_is_another_one_on_every_engine(where, engine):
    """The noise is so large that the change of the model is the noise alone."""
    changes = []
    for suffix in ("", "", SEEDED, SEEDED):
        torch.manual_seed(0)  # all runs start from the same model
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 60), torch.nn.Linear(60, 3))
        begin = ModelSpec(module, (2, 6, 6), 3, dtype=torch.float64).flatten()
        changes.append(run(LOUD[where] + suffix, data=len(changes), engine=engine, model=module).vector - begin)
    limit = 5 / math.sqrt(len(changes[0]))
    assert abs(cosine(changes[0], changes[1])) < limit
    assert abs(cosine(changes[0], changes[2])) < limit
    assert cosine(changes[2], changes[3]) > 0.99


@pytest.mark.parametrize("seeded", ["", SEEDED])
def test_the_noise_of_the_bits_of_adaptive_clipping_cannot_be_computed(seeded):
    """All updates are clipped, so the norms depend on the noise of the bits alone, except where a share is cut off at 0."""
    method = f"dp:noise=1,clip=1e-9,bit_noise=2{seeded}"
    norms = [[row["clip_norm"] for row in run(method, data=data, rounds=12).history] for data in (0, 1)]
    assert (norms[0] == norms[1]) is bool(seeded)


@pytest.mark.parametrize("seeded", ["", SEEDED])
def test_poisson_cohorts_cannot_be_computed(seeded):
    """Equal sizes of ten cohorts of 8 clients have a probability below 1e-6."""
    pytest.importorskip("opacus")
    given = {"rounds": 10, "participation": 0.5, "sampling": "poisson", "model": "logistic", "local_steps": 1}
    method = f"dp:noise=1,adaptive=false,clip=1{seeded}"
    sizes = [[row["cohort"] for row in run(method, data=data, **given).history] for data in (0, 1)]
    assert (sizes[0] == sizes[1]) is bool(seeded)


def test_batches_and_augmentation_of_dpsgd_cannot_be_computed():
    spec, fed = ModelSpec(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 3)), (2, 6, 6), 3), blobs([200])
    budget = Training(local_steps=3, local_epochs=None, batch_size=100, augment=True)

    def plan(secret):
        rules = (DPSGD(noise=1.0),)
        setup = EngineConfig(spec, fed, rules, fed.objective, budget, 3, torch.device("cpu"), secret=secret)
        own = setup.batch_plan(0, 0)
        return [b[w > 0].tolist() for b, w in zip(own.batches, own.weights, strict=True)], own.draw_augmentation()

    keys = None, None, SecretKey(bytes(32)), SecretKey(bytes(32)), SecretKey(bytes([1] * 32))
    seeded, again, first, same, other = (plan(key) for key in keys)
    assert seeded[0] == again[0]
    assert first[0] == same[0]
    for one, another in ((seeded, first), (first, other)):
        assert all(a != b for a, b in zip(one[0], another[0], strict=True))
        assert not any(torch.equal(a[0][:9], b[0][:9]) for a, b in zip(one[1], another[1], strict=True))


@pytest.mark.xdist_group("heavy")
@pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed")
@pytest.mark.parametrize("seeded", ["", SEEDED])
def test_images_of_private_generators_cannot_be_computed(seeded, monkeypatch):
    from unskew.generators.trained.dp_sgd import PrivateTraining

    drawn, batches = [], PrivateTraining.batches

    def recorded(self, epoch):
        drawn.append([index.tolist() for index in batches(self, epoch)])
        return batches(self, epoch)

    monkeypatch.setattr(PrivateTraining, "batches", recorded)
    generator = "ddpm-small;steps=20;sampling_steps=3;width=8;batch=4;multipliers=1/2;blocks=1;attention=8/4"
    method = f"fedssyn:generator={generator},epochs=1,noise_multiplier=1.5,rho=0.5,n_syn=6{seeded}"
    given = {"data": "digits", "partition": "iid", "clients": 2, "max_train_samples": 100, "model": "logistic"}
    runs = [unskew.run(method=method, rounds=1, local_steps=1, engine="inline", **given) for _ in range(2)]
    assert torch.equal(runs[0].vector, runs[1].vector) is bool(seeded)
    assert (drawn[:2] == drawn[2:]) is bool(seeded)
    assert runs[0].summary["privacy"].startswith("None: noise was computed from the seed") is bool(seeded)
    assert (runs[0].summary["epsilon"] is None) is bool(seeded)
