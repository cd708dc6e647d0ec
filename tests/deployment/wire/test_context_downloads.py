"""A hostile server: a site accepts from it only what the method that it has agreed to sends."""

from dataclasses import replace

import pytest
import torch
from support.batch_loop import skewed
from support.deployed_runs import FULL_BATCHES, QUICK
from support.federations import LORA
from support.lora import model as lora_model
from support.sites import TINY, LoopPlace, deployed

import unskew
from unskew.deployment.wire.context import has_shape
from unskew.deployment.wire.tensor_codec import decode_record, encode_tensor
from unskew.errors import EngineError, UnskewError
from unskew.methods.registry import METHODS, method
from unskew.protocol.rules import WithServerHalf
from unskew.simulation.broadcaster import Broadcaster

pytestmark = pytest.mark.fuzz

FOMO = {"method": "fedfomo:models=1,validation=0.5", "partition": "iid"}
TWO = [{"name": "mlp", "hidden": [84]}, {"name": "mlp", "hidden": [20, 84]}]
MORE = {"floco": "floco:endpoints=2,tau=1", "flora": "flora:ranks=1/2", "hetlora": "hetlora:ranks=1/2"}


def sends(name):
    return any(type(half).download is not WithServerHalf.download for half in method(name).halves)


SENDERS = sorted(name for name in METHODS if sends(MORE.get(name, name)))


@pytest.mark.parametrize("name", SENDERS)
def test_methods_send_what_they_declare(name, monkeypatch):
    """In a run, each download has a declared shape, and each declared one is sent."""
    original, messages = Broadcaster._message, []

    def recorded(broadcaster, *args, **fields):
        broadcast = original(broadcaster, *args, **fields)
        messages.append((broadcaster.setup.spec, broadcaster.setup.federation_info.plan, broadcast.download))
        return broadcast

    monkeypatch.setattr(Broadcaster, "_message", recorded)
    chosen = MORE.get(name, QUICK.get(name, name))
    options = {**TINY, "clients": 4, "rounds": 3, "model": "mlp", **FULL_BATCHES.get(name, {}), "method": chosen}
    if name in LORA:
        budget = {
            option: options[option] for option in ("method", "rounds", "local_steps", "batch_size", "lr", "engine")
        }
        unskew.run(skewed(), model=lora_model(), **budget)
    else:
        unskew.run(**options)
    rules, seen = {half.name: half for half in method(chosen).halves}, set()
    for spec, plan, download in messages:
        for rule, tensors in download.items():
            shapes = rules[rule].download_shapes(spec, plan)
            for entry, tensor in tensors.items():
                assert has_shape(tensor, shapes[entry]), (entry, tensor.shape, shapes[entry])
                assert tensor.dtype == spec.dtype
                seen.add((rule, entry))
    spec, plan, _ = messages[0]
    assert seen == {(rule, entry) for rule, half in rules.items() for entry in half.download_shapes(spec, plan)}


def attacked(folder, change, **values):
    """Kinds, reasons and arrays of the replies of a site from round 2 on, whose broadcasts are changed."""
    place = LoopPlace(folder, {**TINY, **values})
    site, replies = place.sites[1], []
    answer = site.answer

    def changed(frame):
        late = frame.kind == "train" and frame.config["round"] >= 1
        if late:
            frame = replace(frame, arrays={**frame.arrays, **change})
        reply = answer(frame)
        if late:
            replies.append(reply)
        return reply

    site.answer = changed
    try:
        deployed(folder, place, **values)
    except UnskewError:  # the server ends without enough sites
        assert change
    assert replies
    return replies


def test_an_honest_server_learns_one_gain_for_each_model(tmp_path):
    replies = attacked(tmp_path, {}, **FOMO)
    assert {decode_record(reply, "upload")["fedfomo/gains"].shape for reply in replies} == {(1,)}


@pytest.mark.parametrize(
    ("entry", "tensor", "why", "values"),
    [
        ("fedfomo/models", torch.zeros(139, 650), "float32 139x650, but the agreed experiment sends float32 1x650", FOMO),
        ("fedfomo/models", torch.zeros(0, 650), "float32 0x650", FOMO),
        ("fedfomo/models", torch.zeros(1, 3), "float32 1x3", FOMO),
        ("fedfomo/models", torch.zeros(650), "float32 650", FOMO),
        ("fedfomo/models", torch.zeros(1, 650).double(), "float64 1x650", FOMO),
        ("fedfomo/models", torch.full((1, 650), torch.nan), "non-finite", FOMO),
        ("fedfomo/zzz", torch.zeros(1, 650), "fedfomo/zzz', which fedfomo never sends", FOMO),
        ("fedavg/zzz", torch.zeros(1), "fedavg/zzz', which fedavg never sends", {"method": "fedavg"}),
        ("fedproto/means", torch.zeros(3, 5), "sends float32 10x84", {"method": "fedproto", "model": TWO}),
        ("fedgh/head", torch.zeros(1, 5), "sends float32 1x850", {"method": "fedgh", "model": TWO}),
        ("scaffold/c", torch.zeros(2, 650), "sends float32 650", {"method": "scaffold"}),
    ],
)  # fmt: skip
def test_a_site_rejects_what_its_method_does_not_send(entry, tensor, why, values, tmp_path):
    for reply in attacked(tmp_path, {f"download/{entry}": encode_tensor(tensor)}, **values):
        assert reply.kind == "refused"
        assert not reply.arrays
        assert why in reply.config["reason"]


def test_a_site_reports_no_losses_on_few_samples(tmp_path):
    place = LoopPlace(tmp_path, {**TINY, **FOMO, "max_train_samples": 30}, statistics={"min_count": 10})
    with pytest.raises(EngineError, match="3 replies were rejected"):
        deployed(tmp_path, place, **FOMO, max_train_samples=30)
    replies = [frame for _, frame in place.link.received if frame.kind in ("update", "refused")]
    assert {reply.kind for reply in replies} == {"refused"}
    assert all("losses on few samples reveal them" in reply.config["reason"] for reply in replies)
