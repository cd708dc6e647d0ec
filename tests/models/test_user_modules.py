"""Modules of users: which can be copied, and what is reported of those that cannot or that raise errors."""

import threading
import warnings

import numpy as np
import pytest
import torch
from support.tolerance import TRAINING, assert_close
from torch import nn

import unskew
from unskew.errors import ConfigError, DataError
from unskew.models.spec import ModelSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    WEIGHT_NORM = nn.utils.weight_norm(nn.Linear(6, 8))


def federation(*sizes):
    draws = np.random.default_rng(0)
    total = sum(sizes) + 30
    x, y = draws.normal(size=(total, 6)).astype("float32"), draws.integers(0, 2, total)
    ends = np.cumsum(sizes)
    parts = [(x[end - size : end], y[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    names = [f"Site {k}" for k in "ABC"[: len(sizes)]]
    return unskew.Federation.from_arrays(parts, test=(x[-30:], y[-30:]), classes=2, client_names=names, holdout=0)


def train(model, sizes=(20, 20), **options):
    given = {"rounds": 1, "local_steps": 2, "batch_size": 8, "engine": "inline"}
    return unskew.run(federation(*sizes), model=model, **{**given, **options})


class Two(nn.Module):
    """Two linear layers, with ``before`` applied to the inputs of the first."""

    def __init__(self, before=lambda self, x: x):
        super().__init__()
        self.first, self.head, self.before = nn.Linear(6, 8), nn.Linear(8, 2), before

    def forward(self, x):
        self.hidden = self.first(self.before(self, x))  # as many models do, to show it later
        return self.head(self.hidden.relu())


def rejects(self, x):
    assert x.dim() == 4, "images only"
    return x


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (rejects, r"inputs of shape \(6,\): AssertionError: images only \(test_user_modules.py, line \d+\)"),
        (lambda self, x: {"ids": x}["pixels"], "inputs of shape .*: KeyError: 'pixels' "),
        (lambda self, x: self.encoder(x), "inputs of shape .*: AttributeError: .*encoder"),
        (lambda self, x: x * (1 // 0), "inputs of shape .*: ZeroDivisionError"),
        (lambda self, x: self.encoder(x) if self.training else x, "in training mode: AttributeError: .*encoder"),
    ],
)
def test_errors_of_a_forward_pass_are_reported_before_training(before, text):
    with pytest.raises(ConfigError, match=text):
        train(Two(before))


def test_an_error_of_a_factory_names_its_line():
    def factory(shape, classes):
        return {"small": Two()}["large"]

    with pytest.raises(ConfigError, match=r"factory.* cannot be built: KeyError: 'large' \(test_user_modules.py, line"):
        train(factory)


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
@pytest.mark.parametrize("method", ["fedavg", "moon"])
def test_a_module_may_store_activations(engine, method):
    """Its copy after training has no graph; the numbers are those of a module that stores nothing."""
    torch.manual_seed(0)
    module = Two()
    plain = nn.Sequential(module.first, nn.ReLU(), module.head)
    stored, expected = (train(model, engine=engine, method=method) for model in (module, plain))
    torch.testing.assert_close(stored.vector, expected.vector)


def test_weight_norm_in_its_old_form_trains_as_in_the_new_one():
    new = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    with torch.no_grad():
        new.weight = WEIGHT_NORM.weight.detach()
        new.bias.copy_(WEIGHT_NORM.bias)
    head = nn.Linear(8, 2)
    old, again = (train(nn.Sequential(layer, nn.ReLU(), head)).model for layer in (WEIGHT_NORM, new))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(old(x), again(x))


def test_a_compiled_module_is_trained_as_the_module_that_was_compiled():
    torch.manual_seed(0)
    module = Two()
    assert torch.equal(train(torch.compile(module, backend="eager")).vector, train(module).vector)


class Locked(Two):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Locked, "cannot be copied.*'_thread.lock' object. Create"),
        (lambda: nn.Sequential(Locked(), nn.Linear(2, 2)), "cannot be copied.*'_thread.lock' object. Create"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 2))), "Pass the nn.Module"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_rejects_a_module_that_cannot_be_copied(model, text):
    with pytest.raises(ConfigError, match=text):
        train(model())


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ((20, 1), {}, r"The client Site B trains on a batch of one sample \(1 sample in batches of 8\)"),
        ((20, 17), {"local_steps": 3}, r"Site B .* \(17 samples in batches of 8\)"),
        ((20, 12), {"batch_size": 1}, r"Site A .* \(20 samples in batches of 1\)"),
        (
            (24, 19),
            {"method": "perfedavg", "local_steps": 3},
            r"Site B .* \(19 samples in batches of 8, each split into 2 parts\)",
        ),
    ],
)
def test_a_batch_of_one_sample_is_rejected_before_training(engine, sizes, options, text, tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(DataError, match=text):
        train(model, sizes, engine=engine, out=tmp_path / "run", rounds=50, participation=0.5, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), {"local_steps": 2}),
        (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), {"local_steps": 4, "drop_last": True}),
        (nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 2)), {"local_steps": 4}),
    ],
)
def test_seventeen_samples_suffice_if_no_batch_of_one_is_used_or_it_has_several_values(model, options):
    assert train(model, (20, 17), **options).summary["rounds"] == 1


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_control_flow_that_depends_on_data_gives_the_same_numbers_under_vectorized(engine):
    model = Two(lambda self, x: x.tanh() if x.mean().item() > 0 else x)
    with pytest.warns(UserWarning, match="one at a time"):
        mapped = train(model, engine="vectorized")
    assert torch.equal(mapped.vector, train(model, engine=engine).vector)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_rejects_complex_numbers(kind):
    model, numbers = Two(), torch.ones(3, dtype=torch.complex64)
    if kind == "parameter":
        model.spectrum = nn.Parameter(numbers)
    else:
        model.register_buffer("spectrum", numbers, persistent=False)
    with pytest.raises(ConfigError, match=r"spectrum of the model has complex numbers, .* torch.view_as_real"):
        ModelSpec(model, (6,), 2)


class Tracked(Two):
    """Subtracts a buffer from the inputs, which ``change`` may change first."""

    def __init__(self, change, persistent, dtype=torch.float32):
        super().__init__()
        self.change = change
        self.register_buffer("mean", torch.zeros(6, dtype=dtype), persistent=persistent)

    def forward(self, x):
        self.change(self, x)
        return super().forward(x - self.mean)


def track_in_place(model, x):
    if model.training:
        model.mean.lerp_(x.mean(0), 0.5)


def track_anew(model, x):
    if model.training:
        model.mean = 0.5 * model.mean + 0.5 * x.mean(0)


def count(model, x):
    if model.training:
        model.mean += 1


def grow_a_cache(model, x):
    model.mean = x.view(-1, 1, x.shape[1])[0, 0] * 0 + 1


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Tracked(track_in_place, False), "Training changes the buffer mean, .* Register it with persistent=True"),
        (Tracked(track_anew, False), "Training changes the buffer mean, .* Register it with persistent=True"),
        (Tracked(count, False, torch.int64), "Training changes the buffer mean, .* Register it with persistent=True"),
        (Tracked(track_anew, True), r"assigns a new tensor to the buffer mean .* self.mean.copy_\(...\)"),
        (Tracked(track_in_place, True), None),
        (Tracked(grow_a_cache, False), None),
    ],
)
def test_rejects_changes_of_buffers_that_are_not_part_of_the_model(model, text):
    if text is None:
        assert train(model).vector.isfinite().all()
        return
    with pytest.raises(ConfigError, match=text):
        train(model)


class Named(nn.Module):
    """Layers with two names each, and two layers with one weight; ``twice=False`` is the same with one name each."""

    def __init__(self, twice):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 6))
        self.backbone[4].weight = self.backbone[0].weight
        self.head = nn.Linear(6, 2)
        if twice:
            self.first, self.norm, self.drop, self.out = *(self.backbone[i] for i in (0, 1, 3)), self.head

    def forward(self, x):
        features = self.backbone(x)
        return self.out(features) if hasattr(self, "out") else self.head(features)


def test_layers_with_several_names_give_the_same_outputs_and_keep_the_model():
    spec = ModelSpec(Named(True), (6,), 2)
    v, b, x = spec.flatten(), spec.flatten_buffers(), torch.randn(4, 6)
    module = Named(False).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    assert torch.equal(spec.forward(0.5 * v, b, x).logits, module(x))
    assert torch.equal(spec.forward(v, b, x).logits, Named(False).eval()(x))
    assert torch.equal(spec.flatten(), v)


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
@pytest.mark.parametrize("method", ["fedavg", "mime", "fedrod"])
def test_layers_with_several_names_train_as_those_with_one(engine, method):
    once, twice = (train(Named(names), method=method, engine=engine, drop_last=True) for names in (False, True))
    assert torch.equal(twice.vector, once.vector)


def test_a_head_that_shares_a_parameter_with_another_layer_is_not_computed_alone():
    model = Two()
    model.first, model.head = nn.Linear(6, 6), nn.Linear(6, 2)
    model.shared = nn.Linear(6, 2)
    model.shared.weight = model.head.weight
    with pytest.raises(
        ConfigError, match=r"ccvr computes .* another layer has the parameter 'head.weight' of the head"
    ):
        train(model, method="ccvr")


class Viewed(nn.Module):
    """A convolution, and a view of its output that only works in row order, or a copy of it that always works."""

    def __init__(self, channels, view):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.view = nn.Conv2d(channels, 3, 3), nn.Linear(3 * 6 * 6, 2), view

    def forward(self, x):
        x = self.conv(x).relu()
        return self.head(x.view(-1, 3 * 6 * 6) if self.view else x.reshape(-1, 3 * 6 * 6))


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_view_after_a_convolution_gives_the_numbers_of_a_copy(channels, dtype, engine, tmp_path):
    draws = np.random.default_rng(0)
    x, y = draws.integers(0, 256, (48, channels, 8, 8)).astype(dtype), draws.integers(0, 2, 48)
    parts = [(x[:16], y[:16]), (x[16:32], y[16:32])]
    fed = unskew.Federation.from_arrays(parts, test=(x[32:], y[32:]), classes=2, holdout=0)
    budget = {"rounds": 1, "local_steps": 2, "batch_size": 8, "lr": 0.01, "precision": "fp64", "engine": engine}
    viewed = unskew.run(fed, model=Viewed(channels, True), out=tmp_path / "viewed", **budget)
    copied = unskew.run(fed, model=Viewed(channels, False), **budget)
    assert_close(viewed.vector, copied.vector, TRAINING)
    predictor = unskew.load_predictor(tmp_path / "viewed", model=Viewed(channels, True))
    assert_close(predictor.predict_proba(x[32:]), copied.predictor().predict_proba(x[32:]), TRAINING)
