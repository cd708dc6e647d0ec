"""The model as a vector, the client's optimizer, the batches, the random numbers, the shared memory."""

import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.tolerance import FEW, MAGNIFIED, TRAINING, assert_close
from torch import nn

import unskew
from unskew.engines import optimizers
from unskew.engines.batches import BatchPlan, InputNormalizer
from unskew.engines.shared_memory import SharedMemory
from unskew.errors import ConfigError
from unskew.models.execution import Batch, BoundModel, FunctionalModel
from unskew.models.spec import ModelSpec
from unskew.protocol.training_config import Training
from unskew.seeding import derive, fold, generator, uniform


def spec_of(module=None, **options):
    torch.manual_seed(0)
    return ModelSpec(module or SmallBatchNorm(), (2, 6, 6), 3, dtype=torch.float64, **options)


def test_the_vector_round_trip_is_exact():
    module = SmallBatchNorm()
    spec = ModelSpec(module, (2, 6, 6), 3)
    v, b = spec.flatten(), spec.flatten_buffers()
    assert v.shape == (sum(p.numel() for p in module.parameters()),)
    torch.testing.assert_close(v, nn.utils.parameters_to_vector(module.parameters()), rtol=0, atol=0)
    again = spec.load(v, b)
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert isinstance(again.drop, nn.Dropout)


def test_body_and_head_are_found_or_named():
    spec = spec_of()
    assert spec.head_name == "fc"
    assert spec.parts["head"] == [slice(spec.size - 51, spec.size)]
    assert spec.parts["body"] == [slice(0, spec.size - 51)]
    assert spec.layers == ["conv", "norm", "fc"]

    class Reversed(nn.Module):
        """Layers are defined in another order than they are used."""

        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3)
            self.first = nn.Linear(72, 4)

        def forward(self, x):
            return self.out(torch.tanh(self.first(x.flatten(1))))

    spec = spec_of(Reversed())
    assert (spec.head_name, spec.layers) == ("out", ["first", "out"])
    assert spec.parts["head"] == [slice(0, 15)]
    assert spec_of(Reversed(), head="first").parts["head"] == [slice(15, spec.size)]
    with pytest.raises(ConfigError, match=r"no module 'fcc' to use as head. Modules: conv"):
        spec_of(head="fcc")
    bare = ModelSpec(nn.Linear(4, 3), (4,), 3)
    assert (bare.head_name, bare.parts["body"]) == ("", [])


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"does not accept inputs of shape \(3, 6, 6\)"):
        ModelSpec(SmallBatchNorm(), (3, 6, 6), 3)
    with pytest.raises(ConfigError, match=r"expected \(2, 5\) logits"):
        ModelSpec(SmallBatchNorm(), (2, 6, 6), 5)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        ModelSpec(SmallBatchNorm().requires_grad_(False), (2, 6, 6), 3)
    with pytest.raises(ConfigError, match="no linear layer"):
        ModelSpec(nn.Sequential(nn.Conv2d(2, 3, 6), nn.Flatten()), (2, 6, 6), 3)


def test_frozen_parameters_are_not_part_of_the_vector():
    module = SmallBatchNorm()
    module.conv.requires_grad_(False)
    spec = ModelSpec(module, (2, 6, 6), 3)
    assert "conv.weight" not in spec.names
    result = unskew.run(blobs([9, 9]), model=module, rounds=1, lr=0.5, engine="inline")
    assert torch.equal(result.model.conv.weight, module.conv.weight)
    assert not torch.equal(result.model.fc.weight, module.fc.weight)


def batch_of(n=8, key=3):
    torch.manual_seed(1)
    return Batch(torch.randn(n, 2, 6, 6, dtype=torch.float64), torch.arange(n) % 3, torch.tensor(key), torch.tensor(0))


def test_bound_and_functional_gradients_equal_autograd_on_a_plain_module():
    spec = spec_of(SmallBatchNorm(dropout=0.0))
    v, b = spec.flatten() + 0.1, spec.flatten_buffers()
    batch = batch_of()
    plain = spec.load(v, b).train()
    loss = nn.functional.cross_entropy(plain(batch.x), batch.y) + 0.5 * (v @ v) * 0
    grads = torch.autograd.grad(loss, list(plain.parameters()))
    expected = nn.utils.parameters_to_vector(grads) + 0.3 * v

    for model in (BoundModel(spec), FunctionalModel(spec, b)):

        def loss_fn(u, batch, model=model):
            return nn.functional.cross_entropy(model(u, batch.x).logits, batch.y) + 0.15 * u @ u

        found = model.gradient(loss_fn)(v, batch)
        assert_close(found, expected, TRAINING)
        assert_close(model.b[:4], plain.norm.running_mean, TRAINING)
        assert_close(model.b[4:], plain.norm.running_var, TRAINING)


def test_a_shared_pass_is_computed_once():
    calls = []

    class Counting(SmallBatchNorm):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    spec = spec_of(Counting())
    calls.clear()
    model = BoundModel(spec)
    model.gradient(lambda v, b: model(v, b.x).logits.sum() + model(v, b.x).features.sum())(spec.flatten(), batch_of())
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "options", "build"),
    [
        ("sgd", {}, lambda p: torch.optim.SGD(p, 0.1)),
        ("sgd", {"momentum": 0.9, "weight_decay": 0.05}, lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.05)),
        ("sgd", {"momentum": 0.5, "nesterov": True}, lambda p: torch.optim.SGD(p, 0.1, 0.5, nesterov=True)),
        ("adam", {"weight_decay": 0.05}, lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.05)),
        ("adamw", {"weight_decay": 0.05}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.05)),
    ],
)
def test_optimizers_equal_torch(name, options, build):
    training = Training(optimizer=name, lr=0.1, **options)
    torch.manual_seed(0)
    v = torch.randn(7, dtype=torch.float64)
    theirs = nn.Parameter(v.clone())
    optimizer, state = build([theirs]), optimizers.init_state(training, v)
    for t in range(6):
        g = torch.randn(7, dtype=torch.float64)
        theirs.grad = g.clone()
        optimizer.step()
        v, state = optimizers.optimizer_step(training, v, g.clone(), state, t)
        assert_close(v, theirs.detach())


def test_clipping_equals_torch():
    training = Training(lr=1.0, clip_grad_norm=0.5)
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = g.clone()
    nn.utils.clip_grad_norm_([p], 0.5)
    v, _ = optimizers.optimizer_step(training, torch.zeros(2, dtype=torch.float64), g, {}, 0)
    assert_close(-v, p.grad)


@pytest.mark.parametrize(
    ("training", "num_samples", "expected"),
    [
        (Training(local_epochs=2, batch_size=4), 10, [4, 4, 2, 4, 4, 2]),
        (Training(local_epochs=2, batch_size=4, drop_last=True), 10, [4, 4, 4, 4]),
        (Training(local_epochs=1, batch_size=4, drop_last=True), 3, [3]),
        (Training(local_steps=4, batch_size=4), 10, [4, 4, 2, 4]),
        (Training(local_steps=3, batch_size=64), 10, [10, 10, 10]),
    ],
)
def test_batches_are_those_of_a_reshuffled_data_loader(training, num_samples, expected):
    plan = BatchPlan(training, num_samples, seed=0, round=1, client=2)
    assert [len(i) for i in plan.batches] == expected
    assert training.steps(num_samples, 2) == len(expected)
    per_epoch = len(training.cuts(num_samples))
    for first in range(0, len(plan.batches) - per_epoch + 1, per_epoch):
        epoch = torch.cat(plan.batches[first : first + per_epoch])
        assert len(set(epoch.tolist())) == len(epoch)
    again, other = BatchPlan(training, num_samples, 0, 1, 2), BatchPlan(training, num_samples, 0, 1, 5)
    assert all(torch.equal(a, b) for a, b in zip(plan.batches, again.batches, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(plan.batches, other.batches, strict=True))


def test_normalization_is_the_textbook_formula_and_leaves_the_data_alone():
    torch.manual_seed(0)
    x = torch.randint(0, 256, (40, 3, 5, 4), dtype=torch.uint8)
    fit = unskew.Normalization.fit(x)
    scaled = x.double() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3), correction=0)
    assert_close(fit.mean, mean)
    assert_close(fit.std, std, MAGNIFIED)
    out = InputNormalizer(fit, (3, 5, 4), torch.float64, torch.device("cpu"))(x)
    assert_close(out, (scaled - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1), MAGNIFIED)
    floats = torch.randn(30, 4)
    floats[:, 2] = 7.0  # a constant feature must not become NaN
    before = floats.clone()
    fit = unskew.Normalization.fit(floats)
    out = InputNormalizer(fit, (4,), torch.float32, torch.device("cpu"))(floats)
    assert torch.equal(floats, before)
    assert_close(out.mean(0), 0, FEW)
    assert_close(out.std(0, correction=0)[[0, 1, 3]], 1, FEW)


def test_keyed_numbers_are_uniform_independent_and_pure():
    key = torch.tensor(derive(0, "test"))
    u = uniform(key, (200_000,))
    assert torch.equal(u, uniform(key, (200_000,)))
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.003  # 4.6 standard errors
    assert abs(float(u.var()) - 1 / 12) < 0.001
    counts = torch.histc(u, 20, 0, 1)
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 43.8  # chi-square with 19 degrees, 0.1%
    other = uniform(fold(key, 1), (200_000,))
    assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 0.01
    mapped = torch.func.vmap(lambda k: uniform(k, (5,)))(torch.tensor([1, 2]))
    assert torch.equal(mapped[1], uniform(torch.tensor(2), (5,)))


def test_seeds_differ_by_purpose_round_and_client():
    seeds = {derive(s, p, r, c) for s in (0, 1) for p in ("a", "b") for r in (0, 1) for c in (0, 1)}
    assert len(seeds) == 16
    assert generator(0, "a").initial_seed() == derive(0, "a")


def test_dropout_keeps_the_expectation_and_is_off_in_evaluation():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.fc = nn.Dropout(0.25), nn.Linear(1, 1)

        def forward(self, x):
            return self.fc(self.drop(x))

    spec = ModelSpec(Dropped(), (1,), 1)
    model = BoundModel(spec)
    model.stream.start(torch.tensor(5))
    x = torch.ones(100_000, 1)
    features = model(model.leaf, x).features
    assert features.unique().tolist() == pytest.approx([0, 4 / 3])
    assert abs(float(features.mean()) - 1) < 0.01
    assert torch.equal(model.predict(spec.flatten(), spec.flatten_buffers())(x).features, x)


def test_the_arena_gives_back_what_was_written_and_writes_shared_tensors_once():
    arena = SharedMemory(1 << 20)
    shared = torch.arange(5.0)
    tree = {
        "a": shared,
        "b": {"c": shared, "d": torch.tensor([True, False])},
        "n": 7,
        "e": torch.zeros(0),
        "s": (slice(3),),
    }
    packed = arena.pack(tree)
    assert packed["a"] is packed["b"]["c"]
    back, again = arena.unpack(arena.pack([tree, {"a": shared}]))
    assert torch.equal(back["a"], shared)
    assert back["a"] is back["b"]["c"] is again["a"]  # so clients of one round are seen to start from one model
    assert back["b"]["d"].tolist() == [True, False]
    assert (back["n"], back["s"]) == (7, (slice(3),))
    assert back["e"].shape == (0,)
    copied = arena.unpack(packed, copy=True)
    arena.clear()
    arena.pack({"x": torch.full((5,), -1.0)})
    assert torch.equal(copied["a"], shared)
    with pytest.raises(unskew.UnskewError, match="shared memory"):
        arena.pack({"big": torch.zeros(1 << 20)})
