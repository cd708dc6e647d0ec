"""What makes images: the diffusion model's arithmetic against closed forms and diffusers, VAE and GAN, resuming."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.slow import slow_but
from support.tolerance import FEW, FORMULA, MAGNIFIED, assert_close, near

from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.generators.base import GeneratorJob, num_halvings, pad_to_halvings, to_uint8
from unskew.generators.registry import GENERATORS, generator_factory
from unskew.generators.trained import train_loop
from unskew.generators.trained.ddpm import DDPM, build_unet
from unskew.generators.trained.diffusion import Diffusion, beta_schedule, spaced_timesteps
from unskew.generators.trained.dp_sgd import PrivacyOptions
from unskew.generators.trained.train_loop import ExponentialAverage, TrainingState
from unskew.generators.trained.vae import VAE, VAEGenerator, kl_divergence, negative_elbo

pytestmark = pytest.mark.xdist_group("heavy")

TINY = {
    "ddpm": "ddpm-small;steps=20;sampling_steps=4;width=8;epochs=2;batch=8;multipliers=1/2",
    "vae": "vae-small;epochs=2;batch=8;hidden=16;channels=4;latent=3",
    "gan": "gan-small;epochs=2;batch=8;width=4;noise=5",
}


def images(n=20, shape=(1, 8, 8), classes=3, seed=0):
    draws = np.random.default_rng(seed)
    y = torch.from_numpy(draws.integers(0, classes, n))
    x = (
        torch.from_numpy(draws.integers(0, 100, (n, *shape)).astype("uint8"))
        + (60 * y).to(torch.uint8)[:, None, None, None]
    )
    return x, y


def test_noise_schedules_are_the_closed_forms():
    steps = 50
    s = np.arange(steps + 1) / steps
    abar = np.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
    cosine = np.minimum(1 - abar[1:] / abar[:-1], 0.999)
    assert_close(beta_schedule("cosine", steps).numpy(), cosine)
    assert_close(beta_schedule("linear", 1000).numpy(), np.linspace(1e-4, 0.02, 1000))
    assert_close(Diffusion("cosine", steps).abar.numpy(), np.cumprod(1 - cosine))
    # Up to the cap the product is the formula again; at the start almost nothing is noise, at the end almost all.
    assert_close(Diffusion("cosine", steps).abar.numpy()[:-1], abar[1:-1] / abar[0], MAGNIFIED)


def test_schedule_and_samplers_agree_with_diffusers():
    diffusers = pytest.importorskip("diffusers")
    steps, diffusion = 40, Diffusion("cosine", 40)
    theirs = diffusers.DDPMScheduler(steps, beta_schedule="squaredcos_cap_v2", clip_sample=True)
    assert_close(theirs.alphas_cumprod.double(), diffusion.abar, FORMULA, dtype=torch.float32)
    start = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))

    def predict(x, t):
        return torch.tanh(0.3 * x) + 0.01 * t.view(-1, 1, 1, 1)

    # Every step, so that both make the same ones; the noise comes from the same generator.
    theirs.set_timesteps(steps)
    x, draws = start, torch.Generator().manual_seed(1)
    for t in theirs.timesteps:
        x = theirs.step(predict(x, t.repeat(3)), t, x, generator=draws).prev_sample
    mine = diffusion.sample(predict, start, steps, generator=torch.Generator().manual_seed(1))
    assert_close(mine, x, FORMULA)
    ddim = diffusers.DDIMScheduler(
        steps, beta_schedule="squaredcos_cap_v2", clip_sample=True, set_alpha_to_one=True, timestep_spacing="linspace"
    )
    ddim.set_timesteps(14)
    assert ddim.timesteps.tolist() == spaced_timesteps(steps, 14)[::-1]
    x, times = start, spaced_timesteps(steps, 14)
    for t in reversed(times):
        # diffusers takes the step before as t - steps//14, which is not the one it makes next; so its step is done by hand.
        abar = float(diffusion.abar[t])
        before = float(diffusion.abar[times[times.index(t) - 1]]) if t != times[0] else 1.0
        eps = predict(x, torch.full((3,), t))
        x0 = ((x - math.sqrt(1 - abar) * eps) / math.sqrt(abar)).clamp(-1, 1)
        x = math.sqrt(before) * x0 + math.sqrt(1 - before) * (x - math.sqrt(abar) * x0) / math.sqrt(1 - abar)
    assert_close(diffusion.sample(predict, start, 14, "ddim"), x, FEW)


@pytest.mark.parametrize(("sampler", "steps"), [("ancestral", 200), ("ancestral", 100), ("ddim", 200)])
def test_a_perfect_noise_predictor_recovers_a_gaussian(sampler, steps):
    """For x_0 ~ N(m, s^2) the best prediction is linear: E[eps | x_t] = sqrt(1 - abar) (x_t - sqrt(abar) m) / var(x_t)."""
    mean, std, diffusion = 0.3, 0.5, Diffusion("cosine", 200)

    def predict(x, t):
        abar = diffusion.abar[t].view(-1, 1)
        variance = abar * std**2 + 1 - abar
        return (1 - abar).sqrt() * (x - abar.sqrt() * mean) / variance

    draws = torch.Generator().manual_seed(0)
    start = torch.randn(20000, 1, generator=draws, dtype=torch.float64)
    x = diffusion.sample(predict, start, steps, sampler, draws, clip=None)
    assert float(x.mean()) == pytest.approx(mean, abs=0.02)
    assert float(x.std()) == pytest.approx(std, abs=0.03)


def test_respacing_keeps_the_ends_and_the_cumulative_products():
    assert spaced_timesteps(1000, 250)[0] == 0
    assert spaced_timesteps(1000, 250)[-1] == 999
    assert len(set(spaced_timesteps(1000, 250))) == 250
    assert spaced_timesteps(20, 50) == list(range(20))
    # One step from T to 0 with DDIM is the clipped prediction of x_0 itself.
    diffusion, x = Diffusion("linear", 30), torch.randn(4, 1, 2, 2)
    once = diffusion.sample(lambda x, t: 0.1 * x, x, 1, "ddim")
    abar = float(diffusion.abar[-1])
    expected = ((x - math.sqrt(1 - abar) * 0.1 * x) / math.sqrt(abar)).clamp(-1, 1)
    assert_close(once, expected, FEW)


def test_the_loss_of_a_diffusion_model_is_the_squared_error_of_the_noise():
    model = generator_factory(TINY["ddpm"])(GeneratorJob((1, 8, 8), 3, 0))
    x, y = torch.rand(5, 1, 8, 8) * 2 - 1, torch.tensor([0, 1, 2, 0, 1])
    torch.manual_seed(3)
    loss = model.loss(x, y)
    torch.manual_seed(3)
    t, eps = torch.randint(0, 20, (5,)), torch.randn(5, 1, 8, 8)
    abar = np.cumprod(1 - beta_schedule("cosine", 20).numpy())[t.numpy()][:, None, None, None]
    noised = np.sqrt(abar) * x.numpy() + np.sqrt(1 - abar) * eps.numpy()
    predicted = model.net(torch.from_numpy(noised).float(), t, y).detach().numpy()
    assert float(loss.detach()) == near(float(np.mean((predicted - eps.numpy()) ** 2)), FEW, dtype=torch.float32)
    # A network that always says zero has the expected loss 1.
    zero = [float(model.loss(x, y, net=lambda x, t, y: torch.zeros_like(x)).detach()) for _ in range(100)]
    assert np.mean(zero) == pytest.approx(1, abs=0.05)


def test_the_network_grows_with_the_image_and_has_attention_where_it_should():
    paper = build_unet(DDPM(), (3, 32, 32), 10)
    kinds = [type(block).__name__ for block in paper.down_blocks]
    assert kinds == ["AttnDownBlock2D"] * 3 + ["DownBlock2D"]
    assert [block.resnets[-1].out_channels for block in paper.down_blocks] == [64, 128, 128, 128]
    assert all(len(block.resnets) == 3 for block in paper.down_blocks)
    assert paper.down_blocks[1].attentions[0].heads == 2  # 128 channels, 64 per head
    assert paper.config.resnet_time_scale_shift == "scale_shift"
    assert [num_halvings((s, s), 3) for s in (4, 6, 8, 16, 28, 32, 64)] == [0, 0, 1, 2, 3, 3, 3]
    assert pad_to_halvings(torch.rand(1, 1, 9, 8), 1).shape == (1, 1, 10, 8)
    assert pad_to_halvings(torch.rand(1, 1, 28, 30), 3).shape == (1, 1, 32, 32)


def test_the_average_follows_its_recursion():
    module = torch.nn.Linear(1, 1, bias=False)
    average, expected = ExponentialAverage(module, 0.6), module.weight.item()
    for step in range(8):
        with torch.no_grad():
            module.weight.fill_(step)
        average.update(step)
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert average.module.weight.item() == near(expected, FEW, dtype=torch.float32)


def test_the_bound_of_the_vae_is_its_closed_form():
    draws = np.random.default_rng(0)
    mu, logvar, x, logits = (draws.normal(size=s) for s in ((4, 2), (4, 2), (4, 6), (4, 6)))
    x = 1 / (1 + np.exp(-x))
    p = 1 / (1 + np.exp(-logits))
    reconstruction = -(x * np.log(p) + (1 - x) * np.log(1 - p)).sum(1)
    divergence = 0.5 * (mu**2 + np.exp(logvar) - 1 - logvar).sum(1)
    tensors = [torch.from_numpy(a) for a in (logits, x, mu, logvar)]
    assert_close(kl_divergence(tensors[2], tensors[3]).numpy(), divergence, MAGNIFIED)
    gauss = torch.distributions.Normal(tensors[2], (tensors[3] / 2).exp())
    theirs = torch.distributions.kl_divergence(gauss, torch.distributions.Normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(kl_divergence(tensors[2], tensors[3]), theirs)
    assert float(negative_elbo(*tensors, 4.0)) == pytest.approx((reconstruction + 4 * divergence).mean())


def test_the_vae_samples_around_the_mean_code_of_each_class():
    x, y = images(30)
    model = generator_factory(TINY["vae"])(GeneratorJob((1, 8, 8), 5, 0))
    model.fit(x, y)
    with torch.no_grad():
        codes = model.net.encode(x.float() / 255)[0]
    for c in range(3):
        assert_close(model.means[c], codes[y == c].mean(0), FEW)
    assert model.means[3:].abs().sum() == 0
    full = VAEGenerator(VAE(), GeneratorJob((1, 64, 64), 3, 0))
    convolutions = [m for m in full.net.encoder if isinstance(m, torch.nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size, c.stride) for c in convolutions] == [(32, (4, 4), (2, 2))] * 4


FITS = [(kind, shape) for kind in TINY for shape in ((1, 8, 8), (3, 6, 6), (1, 5, 9))]
SMALL = [(kind, (1, 5, 9)) for kind in TINY if kind != "ddpm"]


@pytest.mark.parametrize(("kind", "shape"), slow_but(SMALL, FITS))
def test_every_generator_fits_any_size_and_is_decided_by_its_seed(kind, shape):
    x, y = images(shape=shape)
    wanted, state = torch.tensor([2, 0, 1, 1]), torch.get_rng_state()
    samples = []
    for seed in (0, 0, 1):
        g = generator_factory(TINY[kind])(GeneratorJob(shape, 3, seed))
        g.fit(x, y)
        samples.append(g.sample(wanted))
        torch.rand(3)
    assert samples[0].shape == (4, *shape)
    assert samples[0].dtype == torch.uint8
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    torch.set_rng_state(state)
    before = torch.rand(1)
    torch.set_rng_state(state)
    generator_factory(TINY[kind])(GeneratorJob(shape, 3, 0)).fit(x, y)
    assert torch.equal(torch.rand(1), before), "the global generator is left as it was"


@pytest.mark.parametrize("kind", slow_but(["vae"], list(TINY)))
def test_an_interrupted_training_goes_on_bit_for_bit(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(train_loop, "SECONDS", 0.0)
    x, y = images()
    spec, wanted = TINY[kind].replace("epochs=2", "epochs=4"), torch.tensor([0, 1, 2])

    class Stop(Exception):
        pass

    def stop(progress):
        if progress["epoch"] == 3:
            raise Stop

    whole = generator_factory(spec)(GeneratorJob((1, 8, 8), 3, 7))
    whole.fit(x, y)
    with pytest.raises(Stop):
        generator_factory(spec)(GeneratorJob((1, 8, 8), 3, 7, folder=tmp_path, report=stop)).fit(x, y)
    seen = []
    rest = generator_factory(spec)(
        GeneratorJob((1, 8, 8), 3, 7, folder=tmp_path, report=lambda f: seen.append(f["epoch"]))
    )
    rest.fit(x, y)
    assert seen == [3, 4], "epochs that were kept are not made again"
    assert torch.equal(rest.sample(wanted), whole.sample(wanted))
    (tmp_path / train_loop.STATE).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="corrupted"):
        generator_factory(spec)(GeneratorJob((1, 8, 8), 3, 7, folder=tmp_path)).fit(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("private", slow_but([False], [False, True]))
def test_a_shorter_training_is_an_earlier_checkpoint_of_a_longer_one(private, tmp_path, monkeypatch):
    """What is sampled after fewer epochs is what a checkpoint of that epoch would give, with privacy at a given noise."""
    if private:
        pytest.importorskip("opacus")
    privacy = PrivacyOptions(noise_multiplier=1.0) if private else None
    monkeypatch.setattr(train_loop, "SECONDS", 0.0)
    x, y = images()
    spec, wanted, checkpoints = TINY["ddpm"].replace("epochs=2;", ""), torch.tensor([0, 1, 2]), []

    def keep(progress):
        # The checkpoint of the epoch before lies there when an epoch is reported.
        if progress["epoch"] == 3:
            checkpoints.append((tmp_path / train_loop.STATE).read_bytes())

    generator_factory(spec, 5)(GeneratorJob((1, 8, 8), 3, 7, folder=tmp_path, report=keep, privacy=privacy)).fit(x, y)
    (tmp_path / train_loop.STATE).write_bytes(checkpoints[0])
    early, short = (
        generator_factory(spec, 2)(GeneratorJob((1, 8, 8), 3, 7, folder=f, privacy=privacy)) for f in (tmp_path, None)
    )
    early.fit(x, y)  # nothing is left to do
    short.fit(x, y)
    assert torch.equal(early.sample(wanted), short.sample(wanted))
    assert early.epsilon == short.epsilon


@pytest.mark.slow
def test_generators_learn_what_classes_look_like():
    """Class 0 is dark, class 1 bright: so must be what is made of them."""
    y = torch.arange(64) % 2
    x = (torch.rand(64, 1, 8, 8) * 60 + 160 * y[:, None, None, None]).to(torch.uint8)
    for spec in ("vae-small;epochs=60", "gan-small;epochs=60"):
        model = generator_factory(spec)(GeneratorJob((1, 8, 8), 2, 0))
        model.fit(x, y)
        level = model.sample(torch.tensor([0] * 10 + [1] * 10)).float().mean((1, 2, 3))
        assert level[10:].mean() > level[:10].mean() + 60, spec


def test_a_loss_that_is_not_finite_is_said():
    net = torch.nn.Linear(1, 1)
    with pytest.raises(DataError, match="loss is nan"):
        train_loop.train(
            GeneratorJob((1, 8, 8), 2, 0), TrainingState({"net": net}, {}), lambda i, s: torch.tensor(math.nan), 4, 1, 2
        )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ddmp", "Did you mean 'ddpm'"),
        ("ddpm;widht=8", "the generator ddpm has no option 'widht'"),
        ("ddpm;width=9", "multiple of 8"),
        ("ddpm;fast", "is not an option"),
        ("ddpm;steps=9;steps=8", "sets steps twice"),
        ("ddpm;attention=8/x", "ddpm;attention=8/x is not valid"),
        ("no.such:thing", "cannot be imported"),
        ("unskew.errors:__name__", "not a function"),
    ],
)
def test_generator_factory_rejects_invalid_spellings(spec, words):
    with pytest.raises(ConfigError, match=words):
        generator_factory(spec)


def test_the_defaults_are_the_papers():
    paper = generator_factory("ddpm")
    assert (paper.epochs, paper.batch, paper.lr, paper.steps, paper.sampling_steps) == (500, 256, 1e-4, 1000, 250)
    assert (paper.width, paper.multipliers, paper.blocks, paper.ema) == (64, (1, 2, 2, 2), 3, 0.9995)
    assert generator_factory("gan").lr == 2e-4
    assert generator_factory("vae").beta == 4
    assert {name.removesuffix("-small") for name in GENERATORS} == set(TINY)
    assert replace(generator_factory("ddpm-small"), epochs=3) == generator_factory("ddpm-small", 3)
    assert to_uint8(torch.full((1, 1, 1, 1), 2.0), (1, 1, 1)).item() == 255


@pytest.mark.slow
@pytest.mark.parametrize("asked", [4, 50])
def test_sampling_tells_how_far_it_is(asked):
    seen = []
    spec = TINY["ddpm"].replace("sampling_steps=4", f"sampling_steps={asked}").replace("epochs=2", "epochs=1")
    model = generator_factory(spec)(GeneratorJob((1, 8, 8), 3, 0, sampled=seen.append))
    model.fit(*images())
    assert seen == []
    model.sample(torch.tensor([0, 1, 2]))
    steps = min(asked, 20)
    assert seen == pytest.approx([(i + 1) / steps for i in range(steps)])
