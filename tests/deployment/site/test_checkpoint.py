"""A site whose machine stops in the middle of local training continues from its checkpoint, with the simulator's bits."""

import stat

import pytest
import torch
from support.running import metrics
from support.sites import TINY, LoopLink, LoopPlace, deployed

import unskew
from unskew.deployment.server import round_requests
from unskew.deployment.site.checkpoint import FILE, SiteCheckpoint
from unskew.deployment.site.process import SiteProcess
from unskew.deployment.site.state import SiteState
from unskew.engines import optimizers
from unskew.errors import ConfigError

pytestmark = pytest.mark.usefixtures("short_waits")
EVERY_STEP = {"checkpoint_minutes": 1e-9}
RUN = "0123456789abcdef"


class PowerCut(BaseException):
    """The machine stops: nothing in the process can handle this."""


class NightLink(LoopLink):
    """A site whose machine stops is away for some polls of the server, and then starts again."""

    polls, cuts = 0, 0

    def push(self, node, frame, round, seconds):
        try:
            return super().push(node, frame, round, seconds)
        except PowerCut:
            self.away.add(node - 100)
            self.polls, self.cuts = 3, self.cuts + 1
            return f"lost-{len(self.sent)}"

    def nodes(self):
        self.polls -= 1
        if self.polls <= 0:
            for client in self.away:
                folder = self.sites[client].folder
                self.sites[client] = SiteProcess(folder / "site.yaml", log=lambda line: None)
            self.away.clear()
        return super().nodes()


@pytest.fixture
def steps(monkeypatch):
    """The list of all local steps that sites take."""
    taken = []
    original = optimizers.optimizer_step

    def counting(training, v, g, state, t, trainable=None):
        taken.append(t)
        return original(training, v, g, state, t, trainable)

    monkeypatch.setattr(optimizers, "optimizer_step", counting)
    return taken


@pytest.fixture
def cuts(monkeypatch):
    """Numbers of the checkpoints right after which the machine stops; the first has number 1."""
    numbers, stored = set(), []
    original = SiteCheckpoint.save

    def save(self, tensors):
        original(self, tensors)
        stored.append(len(stored) + 1)
        if stored[-1] in numbers:
            raise PowerCut

    monkeypatch.setattr(SiteCheckpoint, "save", save)
    monkeypatch.setattr(round_requests, "SELDOM", 0.0)
    return numbers


def interrupted(folder, **options):
    place = LoopPlace(folder, {**TINY, **options}, **EVERY_STEP)
    place.link = NightLink(place.sites)
    return deployed(folder, place, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "scaffold", "momentum": 0.9},
        {
            "method": "fedprox+scaffold",
            "optimizer": "adam",
            "lr": 0.003,
            "secure_aggregation": "required",
            "clients": 4,
        },
    ],
    ids=["scaffold", "masked"],
)
def test_a_site_that_is_away_for_a_night_trains_no_step_twice(options, cuts, steps, tmp_path):
    cuts |= {2, 8}
    result, place = interrupted(tmp_path, **options)
    assert place.link.cuts == 2
    config = {**TINY, **options}
    placeholder = 1  # of the server, which learns the layout of the uploads
    assert len(steps) == config["rounds"] * config["clients"] * config["local_steps"] + placeholder
    if "secure_aggregation" in options:  # whose sums are rounded, which a simulation does not repeat
        cuts.clear()
        assert torch.equal(result.vector, deployed(tmp_path / "whole", **options)[0].vector)
        return
    simulated = unskew.run(out=tmp_path / "simulated", **config)
    assert torch.equal(result.vector, simulated.vector)
    own = [{n: value for n, value in row.items() if not n.startswith("sites_")} for row in metrics(tmp_path / "run")]
    assert own == metrics(tmp_path / "simulated")


def folder_of(tmp_path, client):
    return SiteState(tmp_path / "sites" / str(client) / "state", RUN, client).folder


def test_a_checkpoint_is_its_owners_alone_and_of_one_training(cuts, steps, tmp_path):
    cuts |= {3}
    interrupted(tmp_path, method="scaffold")
    for client in range(3):
        folder = folder_of(tmp_path, client)
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        assert (folder / FILE).is_file()  # the reply may have been lost
    corrupted = folder_of(tmp_path, 0) / FILE
    corrupted.write_bytes(b"\x00" * 100)
    store = SiteCheckpoint(None, corrupted.parent, None, None)
    assert store.load() == {}


def test_private_training_continues_and_leaves_no_checkpoint(cuts, steps, tmp_path):
    """Steps after a restart draw batches and noise anew: their key is stored nowhere."""
    cuts |= {2, 5}
    _, place = interrupted(tmp_path, method="dpsgd:noise=1.0", rounds=1)
    assert place.link.cuts == 2
    assert sorted(steps) == sorted([0, 1, 2] * 3)
    assert not list(tmp_path.rglob(FILE))


def test_there_is_no_checkpoint_before_it_is_due(cuts, steps, tmp_path):
    deployed(tmp_path, method="scaffold")
    assert not list(tmp_path.rglob(FILE))
    with pytest.raises(ConfigError, match="checkpoint_minutes=0 is not valid"):
        LoopPlace(tmp_path / "other", TINY, checkpoint_minutes=0)
