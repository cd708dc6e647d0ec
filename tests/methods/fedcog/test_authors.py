"""FedCOG's options: the generator network, augmented synthesis, explicit labels, and the authors' settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.augment import one_by_one
from support.fedcog import context, other_vector, small_net, train
from support.tolerance import MAGNIFIED, assert_close
from torch import nn

import unskew
from unskew.data.augment import keyed_crop_and_flip
from unskew.data.federation import Federation
from unskew.data.pixel_scaling import PixelScaling
from unskew.errors import ConfigError, MethodConflictError
from unskew.generators.learned import decoder, model_pair
from unskew.generators.learned.inversion import random_crop_and_flip
from unskew.methods.fedcog.authors import FedCOGAuthors
from unskew.methods.fedcog.fedcog import FedCOG
from unskew.methods.moon import Moon
from unskew.methods.registry import method
from unskew.models.registry import build_model
from unskew.protocol.training_config import Training

F64 = torch.float64


@pytest.fixture
def spec():
    return unskew.ModelSpec(small_net(0), (2, 6, 6), 3, dtype=F64)


class Generator(nn.Module):
    """The generator as modules, written from the description: the oracle."""

    def __init__(self, n, shape):
        super().__init__()
        self.shape = shape
        self.low = [-(-side // 4) for side in shape[1:]]
        self.z = nn.Parameter(torch.zeros(n, 256))
        self.first = nn.Linear(256, 128 * self.low[0] * self.low[1])
        self.rest = nn.Sequential(
            nn.BatchNorm2d(128), nn.Upsample(scale_factor=2), nn.Conv2d(128, 128, 3, padding=1, bias=False),
            nn.BatchNorm2d(128), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
            nn.Conv2d(64, shape[0], 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self):
        x = self.rest(self.first(self.z).view(len(self.z), 128, *self.low))
        return x[:, :, : self.shape[1], : self.shape[2]]


def oracle(vector, n, shape):
    """The oracle with the numbers of a flat vector; its parameters come in the same order."""
    module = Generator(n, shape).to(F64)
    nn.utils.vector_to_parameters(vector.clone(), module.parameters())
    return module


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 6, 9), (2, 4, 3)])
def test_the_network_equals_modules_and_fits_every_size(shape):
    vector = decoder.initial_decoder(torch.tensor(5), 6, shape, F64) * 3
    images = decoder.decode(vector, 6, shape)
    assert images.shape == (6, *shape)
    assert_close(images, oracle(vector, 6, shape)())
    assert bool((images > 0).all() and (images < 1).all())
    assert images.std() > 0.01


def test_the_network_of_32_pixels_begins_as_described():
    pieces = decoder.unflatten(decoder.initial_decoder(torch.tensor(1), 40, (3, 32, 32), F64), 40, (3, 32, 32))
    assert pieces["z"].shape == (40, 256)
    assert pieces["linear.weight"].shape == (8192, 256)
    for name, tensor in pieces.items():
        if name.endswith(("bias", "offset")):
            assert not tensor.any(), name
            continue
        mean, std = float(name.endswith("scale")), 1.0 if name == "z" else 0.02
        slack = 5 * std / tensor.numel() ** 0.5
        assert float(tensor.mean()) == pytest.approx(mean, abs=slack), name
        assert float(tensor.std()) == pytest.approx(std, abs=slack), name


def test_the_network_can_be_mapped_over_clients():
    def made(key):
        return decoder.decode(decoder.initial_decoder(key, 3, (1, 5, 5), F64), 3, (1, 5, 5))

    keys = torch.tensor([4, 9])
    mapped = torch.func.vmap(made)(keys)
    assert_close(mapped, torch.stack([made(key) for key in keys]))
    assert not torch.allclose(mapped[0], mapped[1])


def test_synthesis_with_a_network_equals_a_loop_of_torch(spec):
    """Ten steps of torch.optim.Adam on modules; the images are normalized before the model sees them."""
    rule = FedCOG(n=9, g_steps=10, generator="network", lambda_dis=0.0)
    ctx = context(rule, spec)
    object.__setattr__(ctx, "pixels", PixelScaling((0.5, 0.4), (0.1, 0.2)))
    made = rule.begin(ctx)
    generator = oracle(decoder.initial_decoder(ctx.key, 9, (2, 6, 6), F64), 9, (2, 6, 6))
    adam = torch.optim.Adam(generator.parameters(), 0.01, (0.5, 0.999))
    model, best = spec.load(ctx.v_global, ctx.b_global), float("inf")
    mean, std = (torch.tensor(model_pair, dtype=F64)[:, None, None] for model_pair in ([0.5, 0.4], [0.1, 0.2]))
    for _ in range(10):
        x = (generator() - mean) / std
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]))
        if loss.item() < best:
            best, kept = loss.item(), (x.detach(), logits.detach())
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert_close(made["x"], kept[0], MAGNIFIED)
    assert_close(made["z"], kept[1], MAGNIFIED)


def test_augmentation_equals_a_loop_over_images_in_a_black_frame():
    x, black = torch.randn(20, 2, 6, 5, dtype=F64), torch.tensor([-1.5, 0.25], dtype=F64)[None, :, None, None]
    key = torch.tensor(77)
    offsets, flips = keyed_crop_and_flip(key, 20, 4)
    expected = one_by_one(x - black, offsets, flips, 4) + black
    frame = black.expand(1, 2, 6, 5)
    assert_close(random_crop_and_flip(x, key, frame), expected)
    # Each visible pixel passes its gradient on, to where it came from.
    g = torch.func.grad(lambda x: (random_crop_and_flip(x, key, frame) ** 2).sum() / 2)(x)
    seen = torch.func.grad(lambda x: random_crop_and_flip(x, key, frame).sum())(x)
    assert set(seen.unique().tolist()) == {0.0, 1.0}
    assert_close(g, seen * x)


def test_keyed_draws_are_uniform_and_belong_to_the_key():
    offsets, flips = keyed_crop_and_flip(torch.tensor(3), 9000, 4)
    counts = torch.bincount(offsets.flatten(), minlength=9)
    assert len(counts) == 9
    assert bool(((counts - 2000).abs() < 5 * 2000**0.5).all())
    assert float(flips.double().mean()) == pytest.approx(0.5, abs=0.03)
    assert torch.equal(keyed_crop_and_flip(torch.tensor(3), 9000, 4)[0], offsets)
    assert not torch.equal(keyed_crop_and_flip(torch.tensor(4), 9000, 4)[0], offsets)


@pytest.mark.parametrize("generator", ["pixels", "network"])
def test_augmented_synthesis_keeps_whole_images_with_their_own_logits(spec, generator):
    rule = FedCOG(n=12, g_steps=6, augment=True, generator=generator, lambda_dis=1.0)
    made = rule.begin(context(rule, spec, previous=other_vector(spec)))
    teacher = spec.forward(spec.flatten(), spec.flatten_buffers(), made["x"]).logits
    assert_close(made["z"], teacher)
    plain = FedCOG(n=12, g_steps=6, generator=generator, lambda_dis=1.0)
    assert not torch.allclose(plain.begin(context(plain, spec, previous=other_vector(spec)))["x"], made["x"])


def test_explicit_labels_are_repeated_in_order(spec):
    rule = method("fedcog:labels=explicit,explicit=2;0;1,n=8").client[0]
    assert rule == FedCOG(labels="explicit", explicit=(2, 0, 1), n=8)
    assert rule.targets(torch.tensor([5.0, 0.0, 1.0])).tolist() == [2, 0, 1, 2, 0, 1, 2, 0]
    assert FedCOG(labels="explicit", explicit=(1, 1, 0), n=2).targets(torch.ones(3)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("labels=explicit", "vice versa"),
        ("labels=explicit,explicit=", "vice versa"),
        ("explicit=0;1", "vice versa"),
        ("labels=explicit,explicit=0;x", "must be a valid integer"),
        ("labels=explicit,explicit=0;-1", "must be greater than or equal to 0"),
        ("labels=explicit,explicit=0;3", "contains the label 3, but the classes of the data are 0 to 2"),
    ],
)
def test_wrong_labels_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        train(f"fedcog:{options}")


@pytest.mark.parametrize("option", ["generator=network", "augment=true"])
def test_what_makes_images_needs_images(option):
    """Also where the first round of generation is far away."""
    x, y = np.random.default_rng(0).normal(size=(12, 4)).astype("float32"), np.arange(12) % 2
    table = Federation.from_arrays([(x, y)], test=(x, y))
    with pytest.raises(ConfigError, match=rf"fedcog:{option} needs images, but the inputs of arrays have shape \(4,\)"):
        unskew.run(table, model="logistic", method=f"fedcog:start_round=90,{option}", rounds=1)


def test_defaults_are_those_of_the_authors_code():
    rule = method("fedcog-authors").client[0]
    assert (rule.labels, rule.coefficients, rule.g_steps, rule.name) == ("complementary", "auto", 500, "fedcog")
    same = method("fedcog-authors:labels=uniform,coefficients=fixed,g_steps=100").client[0]
    assert {name: getattr(same, name) for name in vars(FedCOG())} == vars(FedCOG())
    assert isinstance(same, FedCOGAuthors)
    short = "start_round=1,n=6,g_steps=2"
    theirs = train(f"fedcog-authors:{short}")
    assert torch.equal(theirs.vector, train(f"fedcog:{short},labels=complementary,coefficients=auto").vector)
    assert not torch.equal(theirs.vector, train(f"fedcog:{short}").vector)
    with pytest.raises(MethodConflictError, match="fedcog appears twice"):
        method("fedcog+fedcog-authors")


def test_uint8_images_are_normalized_as_the_data_are():
    """The network's images reach the model in the range that the client's own images have there."""
    draws = np.random.default_rng(0)
    images, labels = draws.integers(90, 110, size=(30, 8, 8, 1)).astype("uint8"), draws.integers(0, 2, 30)
    fed = Federation.from_arrays([(images, labels)], test=(images, labels))
    seen = []

    class Watching(FedCOG):
        name = "watching"

        def begin(self, ctx):
            made = super().begin(ctx)
            seen.append(ctx.pixels.intensities(made["x"]))
            return made

    unskew.run(
        fed, model="cnn", method=Watching(n=4, g_steps=2, start_round=0, generator="network"), rounds=1, engine="inline"
    )
    assert float(seen[0].min()) >= -1e-4
    assert float(seen[0].max()) <= 1 + 1e-4
    assert abs(float(seen[0].mean()) - 0.5) < 0.05


@pytest.mark.slow
def test_variants_change_the_numbers():
    base = "fedcog:start_round=1,n=12,g_steps=3,lambda_kd=1,lambda_dis=5"
    options = [
        "",
        "generator=network",
        "augment=true",
        "labels=explicit,explicit=2;1",
        "cycle=by_step",
        "generator=network,augment=true",
    ]
    short = {"rounds": 2, "eval_clients": 0, "local_epochs": 1}
    vectors = [train(f"{base},{option}", **short).vector for option in options]
    for place, one in enumerate(vectors):
        assert not any(torch.equal(one, other) for other in vectors[:place]), options[place]


@pytest.mark.parametrize(
    ("num_samples", "drop_last"), [(200, False), (200, True), (20, False), (20, True), (128, False)]
)
def test_every_synthetic_input_is_used_as_often_as_any_other_up_to_one(spec, num_samples, drop_last):
    """Also where real batches are not whole; by_step misses some of them there."""
    training = Training(batch_size=64, drop_last=drop_last, local_epochs=7)
    sizes = [cut.stop - cut.start for cut in training.cuts(num_samples)]
    used = {}
    for cycle in ("shuffled", "by_step"):
        rule = FedCOG(n=256, g_steps=0, source="noise", cycle=cycle)
        ctx = replace(
            context(rule, spec, counts=(num_samples, 0.0, 0.0)),
            training=training,
            epoch_steps=torch.tensor(float(len(sizes))),
        )
        carry, places = rule.begin(ctx), []
        for step, size in enumerate(sizes * 7):
            places.append(rule.step_indices(ctx, torch.tensor(step), size, carry))
            assert len(places[-1]) == size
        used[cycle] = torch.cat(places)
    counts = torch.bincount(used["shuffled"], minlength=256)
    assert counts.max() - counts.min() <= 1
    assert used["shuffled"][:64].tolist() != sorted(used["shuffled"][:64].tolist()), "classes are mixed"
    if (num_samples, drop_last) == (200, False):
        assert (torch.bincount(used["by_step"], minlength=256) == 0).any()


@pytest.mark.parametrize("coefficients", ["fixed", "auto"])
def test_what_is_written_before_belongs_to_the_loss_of_real_batches(spec, coefficients):
    """``w_real`` weighs the terms of rules to its left; those to its right have their own weight."""
    cog, moon = FedCOG(n=6, g_steps=1, coefficients=coefficients, lambda_kd=0.5), Moon(mu=2.0)
    ctx = context(cog, spec, counts=(9.0, 3.0, 1.0), previous=other_vector(spec))
    carries = {rule: rule.begin(ctx) for rule in (cog, moon)}
    draws = torch.Generator().manual_seed(3)
    batch = unskew.Batch(torch.randn(4, 2, 6, 6, generator=draws, dtype=F64), None, ctx.key, torch.tensor(0))
    v = ctx.v_global + 0.1

    def task(u, batch):
        return torch.tensor(3.0, dtype=F64)

    def value(*rules):
        loss = task
        for rule in rules:
            loss = rule.loss(loss, ctx, carries[rule])
        return float(loss(v, batch))

    w_real = float(carries[cog]["w_real"])
    term = value(moon) - 3
    assert term > 0
    assert value(cog, moon) == pytest.approx(value(cog) + term, rel=1e-12)
    assert value(moon, cog) == pytest.approx(value(cog) + w_real * term, rel=1e-12)
    assert (w_real == 1) == (coefficients == "fixed")


@pytest.mark.parametrize(
    ("name", "shape", "known"),
    [("cnn", (3, 16, 16), True), ("mlp", (7,), True), ("logistic", (1, 4, 4), True), ("resnet20", (3, 8, 8), False)],
)
def test_two_models_in_one_pass_equal_one_after_the_other(name, shape, known):
    """Their logits and the gradient for the inputs, also mapped over clients; a model with other layers falls back."""
    torch.manual_seed(0)
    spec = unskew.ModelSpec(build_model(name, shape, 4), shape, 4, dtype=torch.float64)
    assert (model_pair.sequential_layers(spec) is not None) == known
    v, b, x = spec.flatten(), spec.flatten_buffers(), torch.randn(5, *shape, dtype=torch.float64)
    w = v + 0.1 * torch.randn_like(v)

    def mapped_pair(w, x):
        first, second = model_pair.paired_logits(spec, (v, b), (w, b))(x)
        return (first.square() * second.exp()).sum(), (first, second)

    def alone(w, x):
        first, second = (spec.forward(u, b, x).logits for u in (v, w))
        return (first.square() * second.exp()).sum(), (first, second)

    found, expected = (torch.func.grad(f, argnums=1, has_aux=True)(w, x) for f in (mapped_pair, alone))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    if known:
        mapped = torch.func.vmap(torch.func.grad(mapped_pair, argnums=1, has_aux=True))(
            w.expand(2, -1), x.expand(2, *x.shape)
        )
        torch.testing.assert_close(mapped[0][1], expected[0], rtol=1e-10, atol=1e-10)
