"""The reference models have the papers' sizes, run everywhere, and are found however the user names them."""

import functools
import re
import sys
import types

import pytest
import torch
from support.slow import slow_but
from support.tolerance import FEW, assert_close
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from unskew.errors import ConfigError
from unskew.models.registry import MODELS, build_model, resolve_model
from unskew.models.zoo.basic import MLP
from unskew.models.zoo.cnn import CNNA
from unskew.models.zoo.resnet import PaddedShortcut, ResNet20

BUILT = [name for name, entry in MODELS.items() if not (entry.pretrained or entry.texts)]
CLASSIFIERS = [name for name in BUILT if not MODELS[name].pixels]
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
SMALL = (1, 8, 8)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "expected"),
    [
        ("cnn", (3, 32, 32), 10, {}, 62_006),
        ("cnn", (1, 28, 28), 10, {}, 44_426),
        ("cnn-b", (3, 32, 32), 100, {}, 69_380),
        ("cnn-c", (3, 32, 32), 10, {}, 321_290),
        ("cnn-c", (3, 32, 32), 10, {"stride": 2}, 321_290),
        ("vgg11", (3, 32, 32), 10, {}, 9_750_922),
        ("resnet20", (3, 32, 32), 10, {}, 292_954),
        ("resnet20", (3, 32, 32), 10, {"norm": "group"}, 292_954),
        ("resnet20", (3, 32, 32), 10, {"shortcut": "1x1"}, 272_474),
        ("resnet20", (3, 32, 32), 10, {"shortcut": "none"}, 269_722),
        ("mlp", (1, 28, 28), 10, {}, 199_210),
        ("unet", (3, 64, 64), 4, {}, 118_964),
        ("logistic", (60,), 10, {}, 610),
    ],
)
def test_models_have_the_documented_number_of_parameters(name, shape, classes, options, expected):
    assert size(build_model(name, shape, classes, **options)) == expected


def test_resnet20_splits_into_the_papers_body_and_head():
    model = build_model("resnet20", (3, 32, 32), 10)
    assert (size(model.body), size(model.head)) == (292_304, 650)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_are_the_head_of_the_features(name, shape):
    model = build_model(name, shape, 7).eval()
    x = torch.randn(2, *shape)
    logits = model(x)
    assert logits.shape == (2, 7)
    torch.testing.assert_close(model.head(model.body(x)), logits, rtol=0, atol=0)
    assert model.body(x).shape == (2, model.head.in_features)
    assert list(model.parameters())[-1] is model.head.bias


@pytest.mark.parametrize("name", BUILT)
def test_eval_mode_is_deterministic_and_layout_free(name):
    model = build_model(name, (3, 8, 8), 4).eval()
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)
    assert_close(model(x.to(memory_format=torch.channels_last)), model(x), FEW)


VARIANTS = [(name, {}) for name in BUILT] + [
    ("resnet20", {"norm": "group"}),
    ("resnet20", {"shortcut": "1x1"}),
    ("resnet20", {"shortcut": "none"}),
    ("mlp", {"norm": "batch"}),
    ("cnn", {"norm": "batch"}),
    ("cnn", {"norm": "group"}),
]


@pytest.mark.parametrize(("name", "options"), slow_but([v for v in VARIANTS if v[0] != "vgg11"], VARIANTS))
def test_vmap_over_two_models_equals_the_loop(name, options):
    models = [build_model(name, SMALL, 3, **options) for _ in range(2)]
    for model in models:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # Dropout differs between the two by its nature.
                module.eval()
    sides = SMALL[1:] if MODELS[name].pixels else ()
    x, y = torch.randn(2, 4, *SMALL), torch.randint(3, (2, 4, *sides))
    # Clones, so that the running statistics which vmap writes are not those of the loop.
    params, buffers = stack_module_state(models)
    buffers = {name: buffer.clone() for name, buffer in buffers.items()}

    def loss(params, buffers, x, y):
        logits = functional_call(models[0], (params, buffers), (x,))
        return nn.functional.cross_entropy(logits, y), buffers

    gradients, updated = vmap(grad(loss, has_aux=True))(params, buffers, x, y)
    for k, model in enumerate(models):
        nn.functional.cross_entropy(model(x[k]), y[k]).backward()
        for key, parameter in model.named_parameters():
            assert_close(gradients[key][k], parameter.grad, FEW)
        for key, buffer in model.named_buffers():
            assert_close(updated[key][k], buffer, FEW)


def test_vgg11_dropout_runs_under_vmap_in_training_mode():
    models = [build_model("vgg11", SMALL, 3).train() for _ in range(2)]
    params, _ = stack_module_state(models)
    x = torch.randn(4, *SMALL)
    logits = vmap(lambda p: functional_call(models[0], p, (x,)), randomness="different")(params)
    assert logits.shape == (2, 4, 3)
    assert not torch.equal(models[0](x), models[0](x))


def test_cnn_order_of_relu_and_pooling_does_not_matter():
    conv, pool, relu = CNNA((3, 32, 32), 10).body[:3]
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(relu(pool(conv(x))), pool(relu(conv(x))), rtol=0, atol=0)


def test_padding_is_used_only_where_the_image_needs_it():
    def padding(name, side):
        return {m.padding for m in build_model(name, (1, side, side), 2).modules() if isinstance(m, nn.Conv2d)}

    assert padding("cnn", 16) == {(0, 0)}
    assert padding("cnn", 15) == {(2, 2)}
    assert padding("cnn-b", 22) == {(0, 0)}
    assert padding("cnn-b", 21) == {(1, 1)}


@pytest.mark.parametrize(("name", "side"), [("cnn", 4), ("cnn-b", 8), ("cnn-c", 1), ("resnet20", 1), ("vgg11", 1)])
def test_models_accept_the_smallest_image(name, side):
    model = build_model(name, (1, side, side), 2).eval()
    assert model(torch.randn(2, 1, side, side)).shape == (2, 2)


@pytest.mark.parametrize("shape", [(3, 20, 33), (1, 64, 64)])
@pytest.mark.parametrize("name", ["cnn", "cnn-b", "cnn-c", "resnet20", "vgg11"])
def test_models_accept_other_image_sizes(name, shape):
    assert build_model(name, shape, 2).eval()(torch.randn(1, *shape)).shape == (1, 2)


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_models_accept_flat_samples(name):
    assert build_model(name, (5,), 2)(torch.randn(3, 5)).shape == (3, 2)


def test_vgg11_first_linear_layer_follows_the_image():
    linear = [m for m in build_model("vgg11", (3, 64, 96), 2).modules() if isinstance(m, nn.Linear)]
    assert linear[0].in_features == 512 * 2 * 3


def test_vgg11_he_initialization_lets_the_image_reach_the_logits():
    x = torch.randn(8, *SMALL)
    spread = {init: build_model("vgg11", SMALL, 5, init=init).eval()(x).std(0).mean() for init in ("he", "default")}
    assert spread["he"] > 10 * spread["default"]


def test_padded_shortcut_subsamples_and_appends_zero_channels():
    x = torch.randn(1, 2, 5, 5)
    y = PaddedShortcut(3)(x)
    assert y.shape == (1, 5, 3, 3)
    assert torch.equal(y[:, :2], x[:, :, ::2, ::2])
    assert not y[:, 2:].any()


def test_group_norm_has_no_buffers_and_batch_norm_has():
    assert not list(ResNet20(SMALL, 2, norm="group").buffers())
    assert list(ResNet20(SMALL, 2, norm="batch").buffers())


def test_normalization_comes_before_each_relu_of_the_small_models():
    layers = [type(layer).__name__ for layer in build_model("cnn", SMALL, 2, norm="batch").body]
    stage, hidden = ["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU"], ["Linear", "BatchNorm1d", "ReLU"]
    assert layers == [*stage, *stage, "Flatten", *hidden, *hidden]
    layers = [type(layer).__name__ for layer in build_model("mlp", SMALL, 2, hidden=[8], norm="group").body]
    assert layers == ["Flatten", "Linear", "GroupNorm", "ReLU"]


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        ("resnet2", SMALL, 2, {}, "Did you mean 'resnet20'"),
        ("transformer-xxl", SMALL, 2, {}, "Known: cnn, cnn-b, cnn-c, logistic"),
        ("resnet20", SMALL, 2, {"shorcut": "1x1"}, "has no option 'shorcut'. Its options are: 'shortcut', 'norm'"),
        ("cnn", SMALL, 2, {"width": 3}, "has no option 'width'. Its options are: 'norm'"),
        ("resnet20", SMALL, 2, {"shortcut": "2x2"}, "'shortcut' must be one of '3x3', '1x1', 'none', not '2x2'"),
        ("resnet20", SMALL, 2, {"norm": None}, "'norm' must be one of 'batch', 'group', not None"),
        ("vgg11", SMALL, 2, {"init": "xavier"}, "'init' must be one of 'he', 'default'"),
        ("mlp", SMALL, 2, {"hidden": 200}, "'hidden' must be a list of positive integers, not 200"),
        ("mlp", SMALL, 2, {"hidden": [200, 0]}, "list of positive integers"),
        ("mlp", SMALL, 2, {"norm": "layer"}, "'norm' must be one of 'none', 'batch', 'group', not 'layer'"),
        ("mlp", (), 2, {}, "shape of a sample"),
        ("cnn", (3, 3, 3), 2, {}, "at least 4x4 pixels, but got 3x3"),
        ("cnn-b", (1, 8, 7), 2, {}, "at least 8x8 pixels, but got 8x7"),
        ("vgg11", (64,), 2, {}, "but got (64,). Use table-mlp"),
        ("cnn", SMALL, 0, {}, "at least one class"),
    ],
)
def test_build_model_rejects_invalid_options(name, shape, classes, options, message):
    with pytest.raises(ConfigError) as caught:
        build_model(name, shape, classes, **options)
    assert message in str(caught.value)


def test_every_entry_describes_itself():
    for name, entry in MODELS.items():
        assert entry.name == name
        assert entry.description
        assert re.search("arXiv:|Annals of Statistics", entry.reference)


def test_resolve_by_name_and_options():
    assert resolve_model("mlp", (4,), 2, {"hidden": [3]}).head.in_features == 3


def test_resolve_returns_a_module_as_it_is():
    module = nn.Linear(4, 2)
    assert resolve_model(module, (4,), 2) is module
    with pytest.raises(ConfigError, match="already built"):
        resolve_model(module, (4,), 2, {"hidden": [3]})


def test_resolve_gives_a_factory_what_it_names():
    seen = []

    def make(**arguments):
        seen.append(arguments)
        return nn.Identity()

    resolve_model(lambda: make(), (4,), 2)
    resolve_model(lambda classes: make(classes=classes), (4,), 2)
    resolve_model(lambda shape, width=1: make(shape=shape, width=width), (4,), 2, {"width": 5})
    resolve_model(make, (4,), 2)
    resolve_model(functools.partial(make, classes=9), (4,), 2)
    assert seen == [
        {},
        {"classes": 2},
        {"shape": (4,), "width": 5},
        {"shape": (4,), "classes": 2},
        {"classes": 9, "shape": (4,)},
    ]


def test_resolve_a_class_like_a_factory():
    assert resolve_model(MLP, (4,), 2).head.out_features == 2


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda width: nn.Identity(), {}, "needs 'width', but only 'shape' and 'classes' are known"),
        (lambda shape, /: nn.Identity(), {}, "needs 'shape'"),
        (lambda: nn.Identity(), {"depth": 3}, "has no option 'depth'. It has no options"),
        (lambda shape: nn.Identity(), {"shape": (1,)}, "has no option 'shape'"),
        (lambda: "not a module", {}, "must return a torch.nn.Module, but returned a str"),
        (42, {}, "but got 42"),
        (torch.zeros, {}, "cannot be called to create a model"),
    ],
)
def test_resolve_explains_a_wrong_factory(model, options, message):
    with pytest.raises(ConfigError) as caught:
        resolve_model(model, (4,), 2, options)
    assert message in str(caught.value)


def test_resolve_imports_a_factory(monkeypatch):
    module = types.ModuleType("users_models")
    module.make = lambda classes: nn.Linear(4, classes)
    module.Group = types.SimpleNamespace(ready=nn.Linear(4, 3))
    module.number = 7
    monkeypatch.setitem(sys.modules, "users_models", module)
    assert resolve_model("users_models:make", (4,), 2).out_features == 2
    assert resolve_model("users_models:Group.ready", (4,), 2) is module.Group.ready
    with pytest.raises(ConfigError, match="but is 7"):
        resolve_model("users_models:number", (4,), 2)
    with pytest.raises(ConfigError, match="'users_models' has no 'mak'"):
        resolve_model("users_models:mak", (4,), 2)


def test_resolve_explains_a_module_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_models.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="RuntimeError: no luck"):
        resolve_model("broken_models:make", (4,), 2)
    with pytest.raises(ConfigError, match=r"'no_such_models'.*cannot be imported"):
        resolve_model("no_such_models:make", (4,), 2)
    with pytest.raises(ConfigError, match="is not an import path"):
        resolve_model(":make", (4,), 2)
