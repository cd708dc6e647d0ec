"""Layers in order of depth."""

import json
import sys

import pytest
import torch
from support.running import call
from torch import nn

from unskew.errors import ConfigError
from unskew.models.layer_groups import layer_groups, split_at_depth
from unskew.models.registry import MODELS, build_model
from unskew.models.spec import ModelSpec


def groups_of(module, shape=(3, 32, 32), classes=10, per_pixel=False):
    spec = ModelSpec(module, shape, classes, per_pixel=per_pixel)
    return spec, layer_groups(spec)


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if not (entry.pretrained or entry.texts)])
def test_groups_hold_every_number_once_and_end_with_the_head(name):
    spec, groups = groups_of(build_model(name, (3, 32, 32), 10), per_pixel=MODELS[name].pixels)
    for size, slices in (
        (spec.size, [s for g in groups for s in g.slices]),
        (sum(spec.buffer_sizes), [s for g in groups for s in g.buffers]),
    ):
        seen = torch.zeros(size)
        for piece in slices:
            seen[piece] += 1
        assert torch.equal(seen, torch.ones(size))
    assert list(groups[-1].slices) == spec.parts["head"]


def test_resnet20_has_the_twenty_groups_of_fedals():
    """292,304 parameters in the body and 650 in the head, with 3x3 convolutions in the shortcuts."""
    spec, groups = groups_of(build_model("resnet20", (3, 32, 32), 10))
    assert len(groups) == 20
    body, head = split_at_depth(groups, 19)
    assert (sum(g.size for g in body), sum(g.size for g in head)) == (292_304, 650)
    assert groups[8].layers[2:] == ("body.block4.shortcut.0", "body.block4.shortcut.1")
    statistics = [sum(s.stop - s.start for s in g.buffers) for g in groups]
    assert statistics[0] == 2 * 16
    assert statistics[8] == 2 * 2 * 32  # of its own norm and of the shortcut's
    assert sum(statistics) == sum(spec.buffer_sizes)


class Shuffled(nn.Module):
    """Registers its layers in another order than it uses them; one norm has no weights, one layer is never used."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.second = nn.Linear(5, 4)
        self.first = nn.Linear(6, 5)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.second(torch.relu(self.first(x))))))


def test_a_model_that_is_itself_a_layer_is_one_group_and_all_head():
    spec = ModelSpec(nn.Linear(5, 3), (5,), 3)
    (group,) = layer_groups(spec)
    assert (group.layers, group.slices) == (("",), (slice(0, 18),))
    assert (spec.layers, spec.head_name, spec.parts) == ([""], "", {"body": [], "head": [slice(0, 18)]})
    inside = ModelSpec(nn.Sequential(nn.Linear(5, 3)), (5,), 3)
    assert [(g.slices, g.buffers) for g in layer_groups(inside)] == [(group.slices, group.buffers)]


def test_depth_is_the_order_of_first_use():
    _, groups = groups_of(Shuffled(), (6,), 3)
    assert [g.name for g in groups] == ["first", "second", "out"]
    assert [g.size for g in groups] == [35, 24 + 6, 15]  # the unused layer stays with the last group of the body
    assert [sum(s.stop - s.start for s in g.buffers) for g in groups] == [0, 8, 0]


def test_a_split_beyond_the_model_is_refused():
    _, groups = groups_of(build_model("mlp", (4,), 2), (4,), 2)
    assert [len(part) for part in split_at_depth(groups, 3)] == [3, 0]
    with pytest.raises(ConfigError, match="3 layers"):
        split_at_depth(groups, 4)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("F.relu(x)", "Several clients are trained as one network."),
        ("self.drop(x)", "Several clients are trained as one network."),
        ("F.mish(x)", "Several clients are trained at once, but not as one network: mish."),
        ("x * x.sum().item()", "Clients are trained one after another: vmap:"),
        (
            "x * self.count(self.training)",
            "Clients are trained one after another: integer buffers that training changes.",
        ),
        (
            "F.dropout(x, training=self.training)",
            "Clients are trained one after another: random numbers other than those of nn.Dropout.",
        ),
    ],
)
def test_how_several_clients_are_trained_is_said(tmp_path, monkeypatch, capsys, body, sentence):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net_of_test", raising=False)
    (tmp_path / "net_of_test.py").write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(2, 2)\n"
        "        self.drop = nn.Dropout()\n        self.register_buffer('passes', torch.tensor(0))\n\n"
        "    def count(self, training):\n        self.passes += training\n        return self.passes\n\n"
        f"    def forward(self, x):\n        return self.head({body})\n"
    )
    said = call(capsys, "models", "net_of_test:Net", "--shape", "2", "--classes", "2").out
    assert sentence in " ".join(said.split())


def test_the_command_shows_layers_sizes_and_the_split(capsys):
    rows = json.loads(
        call(capsys, "models", "resnet20", "--json", "--split", "3", "--set", "model_options.shortcut=1x1").out
    )
    assert [row["part"] for row in rows] == ["body"] * 3 + ["head"] * 17
    assert sum(row["parameters"] for row in rows) == 272_474
    narrow = call(capsys, "models", "resnet20").out
    assert "…" not in narrow
    assert "272,474" in call(capsys, "models", "resnet20", "--set", "model_options.shortcut=1x1").out
    assert "Several clients are trained as one network." in narrow
    listed = json.loads(call(capsys, "models", "--json").out)
    assert [row["name"] for row in listed] == list(MODELS)
    assert [row["groupable"] for row in listed] == [not (entry.pretrained or entry.texts) for entry in MODELS.values()]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing"], "no model"),
        (["cnn", "--shape", "a,b"], "3,32,32"),
        (["cnn", "--split", "9"], "5 layers"),
        (["cnn", "--split", "-2"], "greater than or equal to 0"),
        (["cnn", "--shape", "32"], "image shape"),
    ],
)
def test_models_command_rejects_invalid_arguments(capsys, args, words):
    outcome = call(capsys, "models", *args)
    assert outcome.code == 2
    assert words in outcome.err
