"""Private generators at real sites: nobody who knows the experiment can compute their noise, and they draw it once."""

import stat
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from support.sites import TINY, LoopPlace, crossed, deployed

from unskew.deployment.server.config import Deployment
from unskew.deployment.wire.tensor_codec import decode_record
from unskew.errors import UnskewError
from unskew.generators.trained import ddpm

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.usefixtures("short_waits"),
    pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed"),
    pytest.mark.xdist_group("heavy"),  # Opacus takes several seconds to import
]
GENERATOR = "ddpm-small;steps=10;sampling_steps=2;width=8;batch=8;multipliers=1/2;blocks=1;attention=8/4"
PRIVATE = {
    "method": f"fedssyn:generator={GENERATOR},epochs=1,noise_multiplier=1.5",
    "rounds": 1,
    "eval_clients": 0,
    "clients": 2,
    "partition": "iid",
    "max_train_samples": 30,
}


def contributions(folder, run, place=None):
    """The images that each site sent in a run, and the place with its sites."""
    place, sent = place or LoopPlace(folder, {**TINY, **PRIVATE}), {}
    place.link.spoil = lambda client, asked, answer: (
        sent.__setitem__(client, decode_record(answer, "sent")["x"]) if answer.kind == "contribution" else None,
        answer,
    )[1]
    result, _ = deployed(folder, place, Deployment(run=run * 16, startup_timeout=0.5), **PRIVATE)
    return sent, place, result


def test_two_runs_of_one_experiment_have_different_images(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    first, _, result = contributions(tmp_path / "a", "a")
    second, _, _ = contributions(tmp_path / "b", "b")
    assert result.summary["epsilon"] > 0
    for client in (0, 1):
        assert first[client].shape == second[client].shape
        assert not torch.equal(first[client], second[client])


@pytest.mark.parametrize("client", [0, 1])
def test_the_guarantee_is_that_of_the_largest_epsilon_with_the_options_of_the_run(client, tmp_path):
    place = LoopPlace(tmp_path, {**TINY, **PRIVATE})
    place.link.spoil = lambda k, asked, answer: (
        replace(answer, metrics={**answer.metrics, "epsilon": 20.0 + (k == client)})
        if answer.kind == "contribution"
        else answer
    )
    result, _ = deployed(tmp_path, place, Deployment(run="a" * 16, startup_timeout=0.5), **PRIVATE)
    assert result.summary["epsilon"] == 21
    assert result.summary["delta"] == 1e-5
    assert "(21, 1e-05)-differentially private for one example of that client" in result.summary["privacy"]


def test_a_site_that_is_asked_again_sends_the_same_images(tmp_path):
    """A second draw would be a second release."""
    sent, place, _ = contributions(tmp_path, "a")
    asked = [frame for client, frame in place.link.sent if client == 0 and frame.kind == "contribute"]
    site = place.sites[0]
    again = site.answer(crossed(asked[0]))
    assert torch.equal(decode_record(crossed(again), "sent")["x"], sent[0])
    assert not list(tmp_path.rglob("privacy.key"))
    other = crossed(asked[0])
    other.config["mean_size"] += 1  # another number of images would be another release
    assert site.answer(other).kind == "refused"


def test_an_unfinished_contribution_keeps_its_key(tmp_path, monkeypatch):
    place = LoopPlace(tmp_path, {**TINY, **PRIVATE})
    sample = ddpm.DDPMGenerator.sample

    def fails(self, labels):
        raise UnskewError("stopped")

    monkeypatch.setattr(ddpm.DDPMGenerator, "sample", fails)
    with pytest.raises(UnskewError):
        contributions(tmp_path, "a", place)
    keys = list(tmp_path.rglob("privacy.key"))
    assert keys
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in keys)
    asked = next(frame for client, frame in place.link.sent if frame.kind == "contribute" and client == 0)
    before = keys[0].read_bytes()
    place.sites[0].answer(crossed(asked))
    assert keys[0].read_bytes() == before  # the draws of the finished part are repeated, not drawn anew
    monkeypatch.setattr(ddpm.DDPMGenerator, "sample", sample)
    assert place.sites[0].answer(crossed(asked)).kind == "contribution"
    assert len(list(tmp_path.rglob("privacy.key"))) == len(keys) - 1
