"""Methods, models, data and partitions of other packages, by entry points."""

import sys

import numpy as np
import pytest
import torch
from support.running import call

import unskew
from unskew import plugins
from unskew.diagnosis.traffic_estimate import estimate_traffic
from unskew.errors import ConfigError
from unskew.simulation.sampler import client_numbers
from unskew.simulation.samplers.registry import parse_sampling
from unskew.testing import check_data, check_engine, check_model, check_rule

CODE = '''
"""What a package of somebody else's offers."""
from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
import unskew
from unskew.data.sources.registry import SampleTable, Source
from unskew.engines.local_trainer import LocalTrainer


@dataclass(frozen=True)
class Damped(unskew.ClientRule):
    name, summary, paper = "damped", "smaller updates", "nobody 2020"
    by: float = 0.5

    def transform_update(self, ctx, carry, delta):
        return delta * self.by


def tiny(shape, classes, width=3):
    """A tiny network."""
    n = int(np.prod(shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(n, width), nn.ReLU(), nn.Linear(width, classes))


def moons(path=None):
    draws = np.random.default_rng(0)
    y = draws.integers(0, 2, 90)
    x = (draws.normal(size=(90, 3)) + y[:, None]).astype("float32")
    return (x[:60], y[:60]), (x[60:], y[60:])


def clinics():
    draws = np.random.default_rng(0)
    parts = []
    for count in (60, 20):
        x = torch.from_numpy(draws.normal(size=(count, 2)).astype("float32"))
        parts.append(SampleTable(x, (x[:, 0] > 0).long(), {"hospital": np.arange(count) % 4}))
    return Source("clinics", parts[0], parts[1], class_names=("new", "full"), classes=2)


def halves(labels, clients, rng, value="0", shift="0"):
    order = np.roll(np.argsort(labels, kind="stable"), int(value) + int(shift))
    return np.array_split(order, clients)


@dataclass(frozen=True)
class RoundRobin(unskew.ClientSampler):
    name = "round-robin"
    stride: int = 1

    def draw(self, state, round, idle, plan, draws):
        if self.stride == 9:
            return [0, 0]
        first = round * plan.cohort * self.stride
        return [(first + i) % plan.clients for i in range(plan.cohort)]


@dataclass(frozen=True)
class Returning(unskew.ClientSampler):
    name = "returning"
    asks_loss = True
    reads_reports = True
    hook: str
    value: str = "None"

    def returned(self, hook, value):
        return eval(self.value, {"torch": torch, "np": np}) if hook == self.hook else value

    def init(self, info):
        return self.returned("init", {})

    def draw(self, state, round, idle, plan, draws):
        return self.returned("draw", idle)

    def select(self, state, candidates, losses, plan):
        return self.returned("select", candidates)

    def record(self, state, round, reports):
        return self.returned("record", state)

    def recrod(self):
        pass


class Unnamed(unskew.ClientSampler):
    def draw(self, state, round, idle, plan, draws):
        return idle


class WithoutDraw(unskew.ClientSampler):
    name = "without-draw"


class Text(Unnamed):
    name = "text"
    asks_loss = "yes"


class Deaf(Unnamed):
    name = "deaf"

    def select(self, state, candidates, losses, plan):
        return candidates


class Idle(Unnamed):
    name = "idle"
    reads_reports = True


class Counting:
    name = "counting"

    def __init__(self, setup, log):
        self.trainer, self.log = LocalTrainer(setup), log

    def train(self, broadcasts):
        for broadcast in broadcasts:
            with open(self.log, "a") as file:
                file.write(f"{broadcast.client}\\n")
            yield self.trainer.train(broadcast)

    def close(self):
        with open(self.log, "a") as file:
            file.write("closed\\n")


def counting(setup, workers, clients_per_group, options):
    return Counting(setup, options["log"])


class Lines(unskew.Callback):
    def __init__(self, folder, resumed):
        self.file = open(folder / "lines.txt", "a" if resumed else "w")

    def round(self, row):
        print(row["round"], row["accuracy"], file=self.file, flush=True)

    def end(self, summary):
        self.file.close()

class Hooks(unskew.Callback):
    def __init__(self, folder, resumed):
        self.called = open(folder / "hooks.txt", "w")

    def note(self, text):
        print(text, file=self.called, flush=True)

    def loaded(self, federation):
        self.note(f"loaded {len(federation.clients)}")

    def start(self, config, rounds_done):
        self.note(f"start {rounds_done}")

    def warn(self, text):
        self.note(f"warn {text.split(',')[0]}")
'''
ENTRIES = """
[unskew.methods]
damped = PACKAGE:Damped
broken = PACKAGE_missing:Rule
fedavg = PACKAGE:Damped
[unskew.models]
tiny = PACKAGE:tiny
[unskew.data]
moons = PACKAGE:moons
clinics = PACKAGE:clinics
[unskew.partitions]
halves = PACKAGE:halves
[unskew.samplers]
round-robin = PACKAGE:RoundRobin
halved = PACKAGE:halves
returning = PACKAGE:Returning
unnamed = PACKAGE:Unnamed
other = PACKAGE:Idle
without-draw = PACKAGE:WithoutDraw
text = PACKAGE:Text
deaf = PACKAGE:Deaf
idle = PACKAGE:Idle
[unskew.engines]
counting = PACKAGE:counting
[unskew.trackers]
lines = PACKAGE:Lines
hooks = PACKAGE:Hooks
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package, as an installer leaves it."""
    site = tmp_path / "site"
    info = site / "friend-1.2.dist-info"
    info.mkdir(parents=True)
    (site / "friend_of_unskew.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: friend\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES.replace("PACKAGE", "friend_of_unskew"))
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("friend_of_unskew", None)
    plugins._plugins.cache_clear()


RUN = {"rounds": 1, "local_steps": 2, "clients": 3, "engine": "inline", "lr": 0.1}


def test_what_a_package_offers_is_used_by_its_name(package):
    result = unskew.run(data="moons", partition="halves:3,shift=1", model="tiny", method="damped:by=0.25", **RUN)
    assert result.summary["method"] == "damped:by=0.25"
    assert result.summary["partition"] == "halves:3,shift=1"
    assert result.summary["parameters"] == 3 * 3 + 3 + 3 * 2 + 2
    whole = unskew.run(data="moons", partition="halves:3,shift=1", model="tiny", method="fedavg", **RUN)
    start = unskew.run(data="moons", partition="halves:3,shift=1", model="tiny", method="damped:by=0", **RUN).vector
    assert (result.vector - start - 0.25 * (whole.vector - start)).abs().max() < 1e-6


def test_a_column_of_a_data_set_of_a_package_divides_it(package):
    rows = unskew.run(data="clinics", partition="natural:hospital", model="tiny", rounds=1, local_steps=2).clients
    assert [(row["name"], row["samples"] + row["num_held_out"]) for row in rows] == [(str(k), 15) for k in range(4)]
    result = unskew.run(data="clinics", partition="sorted:hospital", clients=2, model="tiny", rounds=1, local_steps=2)
    assert [row["samples"] + row["num_held_out"] for row in result.clients] == [30, 30]
    with pytest.raises(ConfigError, match=r"'clinics' of the package friend 1\.2 does not support table options"):
        unskew.run(data="clinics", csv={"decimal": "comma"}, model="tiny", rounds=1)


def test_a_package_passes_the_checks_for_authors(package, tmp_path):
    check_data("moons")
    check_rule("damped:by=0.25", rounds=2)
    check_model("tiny")
    check_engine(f"counting:log={tmp_path / 'log'}", ["scaffold"])


def test_a_tracker_of_a_package_receives_the_rounds(package, tmp_path):
    result = unskew.run(data="moons", model="tiny", trackers="lines", out=tmp_path / "run", **RUN)
    assert (tmp_path / "run" / "lines.txt").read_text() == f"1 {result.history[0]['accuracy']}\n"
    unskew.resume(tmp_path / "run", rounds=2, trackers="lines")
    assert len((tmp_path / "run" / "lines.txt").read_text().splitlines()) == 2


def test_a_tracker_of_a_package_receives_everything_that_a_callback_does(package, tmp_path, recwarn):
    unskew.run(data="moons", model="mlp", method="fedproto", trackers="hooks", out=tmp_path / "run", **RUN)
    called = (tmp_path / "run" / "hooks.txt").read_text().splitlines()
    assert called[0] == "loaded 3"
    assert "start 0" in called
    assert [line for line in called if line.startswith("warn ")]
    assert not recwarn.list  # the tracker is a listener


def test_a_sampler_of_a_package_draws_the_cohorts(package, tmp_path):
    log = tmp_path / "log"
    options = {**RUN, "rounds": 3, "participation": 0.34, "engine": f"counting:log={log}"}
    result = unskew.run(data="moons", model="tiny", sampling="round-robin:2", **options)
    assert log.read_text().split() == ["0", "2", "1", "closed"]
    assert result.summary["rounds"] == 3
    same = unskew.run(data="moons", model="tiny", sampling="round-robin:stride=2", **options)
    assert torch.equal(same.vector, result.vector)


def test_the_traffic_estimate_counts_the_losses_that_a_sampler_of_a_package_asks_for(package):
    values = {"data": "moons", "sampling": "returning:hook=nothing", **RUN}
    setting = unskew.diagnose(model="tiny", **values, curvature=False, samples=6).setting
    summary = unskew.run(model="tiny", **values).summary
    each = summary["bytes_up"] + summary["bytes_down"]
    assert estimate_traffic(setting, unskew.method("fedavg"))[1] == each
    assert (
        each == unskew.run(model="tiny", **{**values, "sampling": "fixed"}).summary["bytes_up"] * 2 + 3 * 4
    )  # three losses


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ("round-robin:stride=x", "sampling=round-robin:stride=x is not valid"),
        ("round-robin:9", r"round-robin returned clients in draw.*occur twice: \[0, 0\]"),
        ("halved", r"friend 1\.2 provides 'halved'.*not a subclass of unskew.ClientSampler"),
        ("round-robbin", "Did you mean 'round-robin'"),
        ("unnamed", r"Unnamed of the package friend 1\.2 needs the name of its entry point, 'unnamed', not None"),
        ("other", "needs the name of its entry point, 'other', not 'idle'"),
        ("without-draw", "must define the method 'draw'"),
        ("text", "asks_loss must be True or False, not 'yes'"),
        ("deaf", "defines the method 'select', which is called only with asks_loss = True"),
        ("idle", "has reads_reports = True, so it must define the method 'record'"),
        ("returning", "needs the option hook; write sampling=returning:hook=VALUE"),
        ("returning:draw", "returning returned None in draw. Return a list or an array of client numbers"),
    ],
)
def test_a_wrong_sampler_is_rejected_with_a_remedy(package, sampling, words):
    with pytest.raises(ConfigError, match=words):
        unskew.run(data="moons", model="tiny", sampling=sampling, **RUN)


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        *(
            ("draw", value)
            for value in ("'01'", "{0, 1}", "[0.5, 1.5]", "[True, False]", "[True, 2]", "[[0, 1]]", "[[0], []]")
        ),
        *(("draw", value) for value in ("1", "np.zeros(2)", "torch.ones(2)", "torch.tensor([True])", "iter([0])")),
        *(("select", value) for value in ("None", "[0.0]")),
        *(
            (hook, value)
            for hook in ("init", "record")
            for value in ("None", "[1]", "{'a': 1.0}", "{1: torch.ones(1)}")
        ),
    ],
)
def test_wrong_results_of_a_sampler_are_rejected_in_a_sentence(package, monkeypatch, hook, value):
    sampling = f"returning:hook={hook}"
    sampler = parse_sampling(sampling)
    object.__setattr__(sampler, "value", value)  # expressions cannot contain it
    monkeypatch.setattr("unskew.runs.assembly.parse_sampling", lambda text: sampler)
    with pytest.raises(ConfigError, match=f"The sampling returning returned .* in {hook}. Return a"):
        unskew.run(data="moons", model="tiny", sampling=sampling, **RUN)


@pytest.mark.parametrize(
    "value", ["(0, 2)", "np.array([2, 0])", "torch.tensor([0, 2])", "range(0, 3, 2)", "[np.int64(2), 0]"]
)
def test_a_sampler_may_return_any_sequence_of_integers(value):
    assert sorted(client_numbers(eval(value, {"np": np, "torch": torch}))) == [0, 2]


def test_misspelled_hooks_of_a_sampler_are_reported(package):
    with pytest.warns(UserWarning, match="returning: nothing calls or reads Returning.recrod; did you mean 'record'"):
        unskew.run(data="moons", model="tiny", sampling="returning:hook=nothing", **RUN)


def test_an_engine_of_a_package_gives_the_same_numbers(package, tmp_path):
    log = tmp_path / "log"
    by_package = unskew.run(data="moons", model="tiny", method="scaffold", **RUN | {"engine": f"counting:log={log}"})
    own = unskew.run(data="moons", model="tiny", method="scaffold", **RUN)
    assert by_package.summary["engine"] == f"counting:log={log}"
    assert torch.equal(by_package.vector, own.vector)
    assert log.read_text().split() == ["0", "1", "2", "closed"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("processses", "There is no engine 'processses'. Did you mean 'processes'"),
        ("inline:threads=2", "'inline' takes no options in its name. Remove them"),
        ("ray:retries=2", "'ray' takes no options in its name. Set them in the section ray"),
        ("counting:log", "is not an option; write option=value"),
    ],
)
def test_a_wrong_engine_is_refused_with_a_remedy(package, engine, words):
    with pytest.raises(ConfigError, match=words):
        unskew.run(data="moons", model="tiny", **RUN | {"engine": engine})


def test_a_broken_one_is_told_with_its_package_and_the_others_are_shown(package, capsys):
    outcome = call(capsys, "methods", "--json")
    assert outcome.code == 0
    (row,) = (row for row in outcome.json() if row["name"] == "damped")
    assert (row["package"], row["options"], row["slots"]) == ("friend 1.2", {"by": 0.5}, ["client"])
    told = outcome.err.splitlines()
    assert len(told) == 2
    assert "friend 1.2" in told[0]
    assert "'broken'" in told[0]
    assert "ModuleNotFoundError" in told[0]
    assert "is ignored" in told[1]
    shown = call(capsys, "methods").out
    assert "Partitions of other packages: halves [friend 1.2]" in shown
    assert "friend 1.2" in call(capsys, "models").out
    with pytest.raises(ConfigError, match=r"friend 1\.2 provides 'broken'.*cannot be loaded"):
        unskew.method("broken")
    with pytest.raises(ConfigError, match="Did you mean 'damped'"):
        unskew.method("dampd")


def test_a_package_in_the_folder_one_works_in_is_not_installed(package, monkeypatch):
    monkeypatch.chdir(package)
    with pytest.raises(ConfigError, match="There is no method 'damped'"):
        unskew.method("damped")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "moons", "label": "y"}, "does not support table options"),
        ({"data": "moons", "partition": "halves:1,other=2"}, "halves cannot be called with.*other"),
        ({"data": "moons", "partition": "halves:1", "model": "tiny", "model_options": {"depth": 2}}, "friend 1.2"),
    ],
)
def test_what_a_package_cannot_do_is_told(package, options, words):
    with pytest.raises(ConfigError, match=words):
        unskew.run(**options, **RUN)
