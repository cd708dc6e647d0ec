"""The stacked twin of a network does to every client what the module does to it alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.federations import SmallBatchNorm, blobs
from support.tolerance import MAGNIFIED, assert_close
from torch import nn

import unskew
from unskew import functorch_api
from unskew.models.execution import Batch, BoundModel, FunctionalModel
from unskew.models.grouped.context import GroupedModel, MappedModel, group_form, grouped_form_or_reason, use_grouped
from unskew.models.grouped.vmap_op import GroupingError
from unskew.models.registry import MODELS, build_model
from unskew.models.spec import ModelSpec
from unskew.models.zoo.unet import UNet
from unskew.testing import assert_engines_agree

CLIENTS, BATCH, CLASSES = 3, 4, 5


class Body(nn.Module):
    """Layers, then a head."""

    def __init__(self, layers, features, function=lambda x: x):
        super().__init__()
        self.layers, self.function, self.head = nn.Sequential(*layers), function, nn.Linear(features, CLASSES)

    def forward(self, x):
        return self.head(self.function(self.layers(x)).flatten(1))


class Residual(nn.Module):
    """A sum with what was there before, in place and not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.head = nn.Linear(2, CLASSES)

    def forward(self, x):
        x = F.relu(self.first(x))
        y = self.norm(self.second(x)) * 2
        y += x
        y = torch.add(F.pad(y[:, :, ::2, ::2], (0, 1, 0, 1)), 0.5)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(y.tanh(), 1), 1))


class Tokens(nn.Module):
    """An embedding, and layers along the last axis."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(2, 6), nn.LayerNorm(6)
        self.inner, self.drop, self.head = nn.Linear(6, 6, bias=False), nn.Dropout(0.3), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.drop(F.gelu(self.inner(self.norm(self.embed(x)))).mean(1)))


def frozen():
    module = Body([nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3)], 3 * 36)
    module.layers[0].weight.requires_grad_(False)
    module.layers[1].bias.requires_grad_(False)
    return module


PICTURE, SERIES, ROW = (2, 8, 8), (2, 9), (6,)
CASES = {
    "convolution": (lambda: Body([nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2)], 4 * 9), PICTURE),
    "same": (lambda: Body([nn.Conv2d(2, 3, 3, padding="same", bias=False), nn.ReLU(inplace=True)], 3 * 64), PICTURE),
    "three-channels": (lambda: Body([nn.Conv2d(3, 2, 3, padding=1), nn.MaxPool2d(2)], 2 * 16), (3, 8, 8)),
    "three-channels-inside": (lambda: Body([nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 3)], 2 * 36), PICTURE),
    "series": (lambda: Body([nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.AvgPool1d(2)], 3 * 3), SERIES),
    "batch-norm": (lambda: Body([nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=0.3), nn.ELU()], 4), ROW),
    "no-affine": (
        lambda: Body([nn.BatchNorm2d(2, affine=False), nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2)][:2], 2 * 64),
        PICTURE,
    ),
    "no-statistics": (lambda: Body([nn.BatchNorm2d(2, track_running_stats=False)], 2 * 64), PICTURE),
    "group-norm": (lambda: Body([nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveMaxPool2d(2)], 4 * 4), PICTURE),
    "layer-norm": (lambda: Body([nn.LayerNorm([2, 8, 8]), nn.AvgPool2d(2)], 2 * 16), PICTURE),
    "dropout": (lambda: Body([nn.Dropout(0.4), nn.Conv2d(2, 3, 3), nn.Dropout(0.2), nn.Tanh()], 3 * 36), PICTURE),
    "view": (lambda: Body([nn.Conv2d(2, 3, 3), nn.SiLU()], 3 * 36, lambda x: x.view(x.size(0), -1)), PICTURE),
    "frozen": (frozen, PICTURE),
    "residual": (Residual, PICTURE),
    "tokens": (Tokens, (7,)),
    "small": (SmallBatchNorm, (2, 6, 6)),
    **{
        name: (lambda name=name: build_model(name, (3, 16, 16), CLASSES), (3, 16, 16))
        for name, entry in MODELS.items()
        if not (entry.pretrained or entry.texts)
        and name not in ("vgg11", "resnet20")  # of layers that are tested, but slow in float64
    },
}


def drawn(make, shape, dtype=torch.float64):
    torch.manual_seed(0)
    module, tokens = make(), make is Tokens
    classes = 3 if make is SmallBatchNorm else CLASSES
    pixels = isinstance(module, UNet)
    kind = torch.int64 if tokens else None
    spec = ModelSpec(module, shape, classes, dtype=dtype, input_dtype=kind, per_pixel=pixels)
    v = spec.flatten() + 0.05 * torch.randn(CLIENTS, spec.size, dtype=dtype)
    b = spec.flatten_buffers().repeat(CLIENTS, 1)
    x = torch.randn(CLIENTS, BATCH, *shape, dtype=dtype)
    x = (x > 0).long() if tokens else x
    y = torch.randint(0, classes, (CLIENTS, BATCH, *shape[1:]) if pixels else (CLIENTS, BATCH))
    return spec, v, b, x, y, torch.arange(CLIENTS)


def loss_of(model):
    def loss(v, batch):
        out = model(v, batch.x)
        return F.cross_entropy(out.logits, batch.y) + 0.1 * out.features.square().mean()

    return loss


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_statistics_are_those_of_the_module(case):
    spec, v, b, x, y, keys = drawn(*CASES[case])
    form, why = grouped_form_or_reason(spec)
    assert form is not None, why
    alone = BoundModel(spec)

    def step(v, b, x, y, key):
        model = FunctionalModel(spec, b)
        return model.gradient(loss_of(model))(v, Batch(x, y, key, torch.tensor(0))), model.b, model.loss

    with use_grouped(spec, form):
        slopes, statistics, losses = torch.func.vmap(step, randomness="error")(v, b, x, y, keys)
    for k in range(CLIENTS):
        alone.start(b[k])
        slope = alone.gradient(loss_of(alone))(v[k], Batch(x[k], y[k], keys[k], torch.tensor(0)))
        assert_close(slopes[k], slope, MAGNIFIED)
        assert_close(statistics[k], alone.b, MAGNIFIED)
        assert_close(losses[k], alone.loss, MAGNIFIED)


@pytest.mark.parametrize("own", [True, False], ids=["own-models", "one-model"])
def test_gradients_with_respect_to_inputs(own):
    """As FedCOG's generation takes them, of models of the clients' own and of one model for all."""
    spec, v, b, x, y, _ = drawn(SmallBatchNorm, (2, 6, 6))
    form, _ = grouped_form_or_reason(spec)
    v, b = (v, b) if own else (v[0], b[0])

    def objective(x, v, b, y):
        out = spec.forward(v, b, x)
        return F.cross_entropy(out.logits, y) + out.features.square().mean()

    dims = (0, 0 if own else None, 0 if own else None, 0)
    mapped = torch.func.vmap(torch.func.grad(objective, argnums=(0, 1)), in_dims=dims)
    wanted = mapped(x, v, b, y)
    with use_grouped(spec, form):
        for found, expected in zip(mapped(x, v, b, y), wanted, strict=True):
            assert_close(found, expected, MAGNIFIED)


@pytest.mark.parametrize(
    "twice",
    [
        lambda f, v: torch.func.grad(lambda v: torch.func.grad(f)(v).square().sum())(v),
        lambda f, v: torch.func.jvp(f, (v,), (v,))[1],
        lambda f, v: torch.func.vmap(f)(v.expand(2, -1)),
    ],
    ids=["second-derivative", "forward-mode", "mapping-within"],
)
def test_what_one_network_cannot_give_is_refused(twice):
    """Rather than wrong; such clients are trained one after another."""
    spec, v, b, x, y, _ = drawn(SmallBatchNorm, (2, 6, 6))
    form, _ = grouped_form_or_reason(spec)

    def asked(v, b, x, y):
        return twice(lambda v: F.cross_entropy(spec.forward(v, b, x).logits, y), v)

    with use_grouped(spec, form), pytest.raises(GroupingError):
        torch.func.vmap(asked)(v, b, x, y)


def test_a_derivative_within_the_loss_is_refused():
    """Its dependence on the model would be lost."""
    spec, v, b, x, y, keys = drawn(SmallBatchNorm, (2, 6, 6))
    form, _ = grouped_form_or_reason(spec)

    def step(v, b, x, y, key):
        model = FunctionalModel(spec, b)

        def penalised(v, batch):
            slope = torch.func.grad(lambda x: F.cross_entropy(model(v, x).logits, batch.y))(batch.x)
            return slope.square().sum()

        return model.gradient(penalised)(v, Batch(x, y, key, torch.tensor(0)))

    with use_grouped(spec, form), pytest.raises(GroupingError):
        torch.func.vmap(step)(v, b, x, y, keys)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, CLASSES)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else -self.fc(x)


class Overwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 2, 1), nn.Linear(128, CLASSES)

    def forward(self, x):
        x = self.conv(x)
        y = x.flatten(1)
        y.relu_()
        return self.head(F.relu(y, inplace=True) + x.flatten(1))


class AcrossSamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, CLASSES)

    def forward(self, x):
        return self.head(x - x.mean(0))


def hooked():
    module = Body([nn.Linear(2, 2)], 2)
    module.layers.register_forward_hook(lambda m, args, out: 2 * out)
    return module


def test_every_model_but_the_pretrained_ones_has_a_twin():
    """As ``unskew models`` says."""
    own = [name for name, entry in MODELS.items() if not (entry.pretrained or entry.texts)]
    specs = [
        ModelSpec(build_model(name, (3, 16, 16), CLASSES), (3, 16, 16), CLASSES, per_pixel=MODELS[name].pixels)
        for name in own
    ]
    specs.append(ModelSpec(build_model("resnet20", (3, 16, 16), 2, norm="group", shortcut="none"), (3, 16, 16), 2))
    assert all(isinstance(group_form(spec, check=False), GroupedModel) for spec in specs)
    assert not isinstance(group_form(ModelSpec(SmallBatchNorm(), (2, 6, 6), 3, autocast=True)), GroupedModel)


def test_a_pytorch_without_the_private_functions_trains_one_client_after_another(monkeypatch):
    options = {"model": SmallBatchNorm(), "rounds": 2, "local_steps": 3, "engine": "inline", "clients_per_group": 4}
    together = unskew.run(blobs([9, 9, 9, 9], shape=(2, 6, 6)), **options)
    monkeypatch.setattr(functorch_api, "_functorch", SimpleNamespace(current_level=None))
    _, reason = grouped_form_or_reason(ModelSpec(Body([nn.ReLU()], 2), (2,), CLASSES))
    assert "without _add_batch_dim, get_unwrapped" in reason
    single = unskew.run(blobs([9, 9, 9, 9], shape=(2, 6, 6)), **options)
    assert_engines_agree(single.vector, together.vector)


@pytest.mark.parametrize(
    ("make", "shape", "reason"),
    [
        (lambda: Body([nn.PReLU()], 2), (2,), "PReLU"),
        (lambda: Body([nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")], 128), PICTURE, "padding_mode"),
        (lambda: Body([nn.BatchNorm1d(2, momentum=None)], 2), (2,), "momentum=None"),
        (lambda: nn.Linear(2, CLASSES), (2,), "whole model"),
        (Branch, (2,), "cannot trace"),
        (Overwritten, PICTURE, "relu_"),
        (hooked, (2,), "hook"),
        (AcrossSamples, (2,), "do not support"),
    ],
)
def test_what_is_unknown_is_named(make, shape, reason):
    form, why = grouped_form_or_reason(ModelSpec(make(), shape, CLASSES))
    assert form is None
    assert reason in why
    assert type(group_form(ModelSpec(make(), shape, CLASSES))) is MappedModel  # each operator is mapped
