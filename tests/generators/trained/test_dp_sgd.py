"""DP-SGD: gradients per sample against a loop, clipping, noise, empty batches, and epsilon against other computations."""

import itertools
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tolerance import FEW, FORMULA, TRAINING, assert_close, near

import unskew
from unskew.errors import ConfigError
from unskew.generators.base import GeneratorJob
from unskew.generators.registry import generator_factory
from unskew.generators.trained.dp_sgd import (
    PrivacyOptions,
    PrivateTraining,
    noise_multiplier,
    replace_batchnorm,
    spent_epsilon,
)

pytestmark = [
    pytest.mark.xdist_group("heavy"),
    pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed"),
]
TINY = "ddpm-small;steps=20;sampling_steps=3;width=8;batch=4;multipliers=1/2;blocks=1;attention=8/4"


def private_of(module, num_samples=8, epochs=2, batch=4, lr=1.0, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    privacy = PrivacyOptions(**{"noise_multiplier": 1.0, **options})
    return PrivateTraining(privacy, module, optimizer, 0, None, num_samples, epochs, batch)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_gradients_per_sample_are_those_of_a_loop_also_behind_attention():
    """Attention hands strided images to the next convolution, for which opacus alone returns zeros."""
    model = generator_factory(TINY)(GeneratorJob((1, 8, 8), 3, 0))
    net = model.net
    x, t, y = torch.randn(3, 1, 8, 8), torch.tensor([3, 9, 15]), torch.tensor([0, 2, 1])
    goal = torch.randn(3, 1, 8, 8)
    loop = []
    for i in range(3):
        loss = (net(x[i : i + 1], t[i : i + 1], y[i : i + 1]) - goal[i : i + 1]).square().mean()
        loop.append(torch.autograd.grad(loss, list(net.parameters())))
    private = private_of(net)
    (private.module(x, t, y) - goal).square().mean().backward()
    for k, (name, p) in enumerate(net.named_parameters()):
        expected = torch.stack([g[k] for g in loop])
        assert_close(p.grad_sample, expected, FEW, msg=name)
        assert expected.abs().sum() > 0 or "bias" in name, name
    private.close()
    assert not any(hasattr(p, "grad_sample") and p.grad_sample is not None for p in net.parameters())
    assert torch.isfinite(net(x, t, y)).all()


def test_a_step_is_the_clipped_sum_plus_noise_over_the_expected_batch():
    """Against NumPy, with more samples than are held at once, and with the noise read off a step without samples."""
    x, y = torch.randn(150, 3), torch.randn(150, 1)

    def step(index, scale=1.0):
        module = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.constant_(module.weight, 0.5)
        private = private_of(module, num_samples=150, batch=50, clip=0.7)
        private.step(
            torch.as_tensor(index), 4, lambda part: (private.module(x[part]) - y[part]).square().mean() * scale
        )
        return (0.5 - module.weight.detach().numpy()[0]) * 50

    noise = step([])
    assert np.abs(noise).min() > 0, "an empty batch adds noise"
    rows = list(range(0, 150, 2)) + list(range(1, 60, 2))
    gradients = 2 * (x @ torch.full((3, 1), 0.5) - y) * x
    norms = gradients.norm(dim=1, keepdim=True)
    assert (norms > 0.7).any()
    assert (norms < 0.7).any()
    clipped = (gradients * (0.7 / (norms + 1e-6)).clamp(max=1))[rows].sum(0).numpy()
    assert_close(step(rows) - noise, clipped, FORMULA)


def test_noise_has_its_deviation_and_another_one_in_every_step():
    module = torch.nn.Linear(200, 100, bias=False)
    private = private_of(module, noise_multiplier=1.5, clip=2.0, num_samples=8, batch=4)
    before = [module.weight.detach().clone()]
    for number in range(3):
        private.step(torch.arange(0), number, lambda part: module.weight.sum() * 0)
        before.append(module.weight.detach().clone())
    noises = [(a - b).flatten() * 4 for a, b in itertools.pairwise(before)]
    for noise in noises:
        assert float(noise.std()) == pytest.approx(1.5 * 2.0, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack(noises[:2]))[0, 1])) < 0.03


def test_epsilon_is_that_of_the_accountant_run_step_by_step_and_below_the_closed_form():
    from opacus.accountants import RDPAccountant

    account = RDPAccountant()
    for _ in range(40):
        account.step(noise_multiplier=2.0, sample_rate=0.1)
    assert spent_epsilon(40, 2.0, 0.1, 1e-5, "rdp") == near(account.get_epsilon(delta=1e-5), TRAINING)
    # Without subsampling: Renyi divergence T alpha / (2 sigma^2), turned into epsilon (Mironov 2017): a bound, not far.
    steps, sigma, log = 50, 8.0, math.log(1e5)
    bound = steps / (2 * sigma**2) + math.sqrt(2 * steps * log) / sigma
    spent = spent_epsilon(steps, sigma, 1.0, 1e-5, "rdp")
    assert 0.6 * bound < spent <= bound
    assert spent_epsilon(steps, sigma, 1.0, 1e-5, "prv") <= spent
    assert spent_epsilon(0, 1.0, 0.5, 1e-5, "rdp") == 0


def test_the_papers_setting_spends_about_nine():
    """3,375 images, 500 epochs, noise 1.906: 53 steps an epoch at batch 64, 14 at 256. The documentation has the numbers."""
    for steps, spent in ((53, 9.05), (14, 20.74)):
        assert spent_epsilon(500 * steps, 1.906, 1 / steps, 1e-5, "rdp") == pytest.approx(spent, abs=0.01)
        assert f"{spent:.3g}" in (Path(__file__).parents[3] / "docs" / "generators.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_budget_alone_decides_the_noise_and_with_noise_decides_the_end():
    privacy = PrivacyOptions(epsilon=3.0)
    sigma = noise_multiplier(privacy, 0.25, 80)
    assert 2.9 < spent_epsilon(80, sigma, 0.25, 1e-5, "rdp") <= 3.0
    private = private_of(torch.nn.Linear(2, 1), num_samples=16, epochs=20, batch=4, noise_multiplier=2.0, epsilon=3.0)
    assert private.epsilon(private.allowed) <= 3.0 < private.epsilon(private.allowed + 1)
    assert sum(len(private.batches(epoch)) for epoch in range(20)) == private.allowed < 80
    with pytest.raises(ConfigError, match="accountant=prv"):
        noise_multiplier(PrivacyOptions(epsilon=0.05), 0.25, 80)
    with pytest.raises(ConfigError, match="already exceeds epsilon"):
        private_of(torch.nn.Linear(2, 1), noise_multiplier=0.1, epsilon=0.5)


def test_poisson_batches_have_their_rate_and_may_be_empty():
    private = private_of(torch.nn.Linear(2, 1), num_samples=6, epochs=400, batch=2)
    batches = [batch for epoch in range(400) for batch in private.batches(epoch)]
    sizes = np.array([len(batch) for batch in batches])
    assert len(batches) == 1200
    assert sizes.mean() == pytest.approx(2, abs=0.15)
    assert sizes.var() == pytest.approx(6 * (1 / 3) * (2 / 3), abs=0.2)
    assert (sizes == 0).any()
    assert all(len(set(batch.tolist())) == len(batch) for batch in batches)


@pytest.mark.slow
def test_a_private_diffusion_model_reports_its_epsilon_and_stops_in_time(tmp_path):
    x, y = torch.randint(0, 255, (12, 1, 8, 8), dtype=torch.uint8), torch.arange(12) % 3
    seen = []
    privacy = PrivacyOptions(noise_multiplier=1.0, epsilon=6.0)
    model = generator_factory(TINY, 40)(GeneratorJob((1, 8, 8), 3, 0, privacy=privacy, report=seen.append))
    model.fit(x, y)
    spent = [row["epsilon"] for row in seen]
    assert spent == sorted(spent)
    assert spent[-1] == model.epsilon <= 6.0
    assert 1 < len(seen) < 40
    assert all("loss" not in row for row in seen), "the loss would tell of the samples"
    assert model.sample(torch.tensor([0, 1])).shape == (2, 1, 8, 8)
    again = generator_factory(TINY, 40)(GeneratorJob((1, 8, 8), 3, 0, privacy=privacy))
    again.fit(x, y)
    assert torch.equal(again.sample(torch.tensor([0, 1])), model.sample(torch.tensor([0, 1])))


def test_batchnorm_is_replaced_aloud():
    told = []
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
    fixed = replace_batchnorm(module, told.append)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in fixed.modules())
    assert any(isinstance(m, torch.nn.GroupNorm) for m in fixed.modules())
    assert "GroupNorm replaces it in 1" in told[0]
    told.clear()
    assert replace_batchnorm(torch.nn.Linear(2, 2), told.append) is not None
    assert not told
    with pytest.raises(ConfigError, match="cannot be trained privately"):
        replace_batchnorm(torch.nn.LSTM(2, 2), told.append)
    with pytest.raises(ConfigError, match="with replace_batchnorm"):
        private_of(module)
    private_of(fixed).close()


def test_what_is_said_never_understates_and_a_useless_delta_is_named():
    said = PrivacyOptions(epsilon=20.0).sentence(10.01, "")
    assert "is (10.1, 1e-05)-differentially private" in said
    told = []
    private = PrivacyOptions(epsilon=1.0, delta=0.02)
    private.check_delta([20, 98], 0.5, told.append)
    assert not told
    private.check_delta([20, 100], 0.5, told.append)
    assert "is too large for generators of up to 50 samples" in told.pop()
    private.check_delta([6, 98], 0.5, told.append)  # 2^-6 = 0.016
    assert not told
    private.check_delta([5, 98], 0.5, told.append)
    assert "is too small for clients with 5 samples: with probability 0.031, rho=0.5 draws none" in told.pop()
    private.check_delta([1], 1.0, told.append)
    assert not told


@pytest.mark.parametrize("option", ["epsilon", "noise_multiplier", "epsilon=1,clip"])
def test_a_budget_or_noise_without_end_is_refused(option):
    with pytest.raises(ConfigError, match="it must be a finite number"):
        unskew.method(f"fedssyn:generator={TINY},{option}=inf")
