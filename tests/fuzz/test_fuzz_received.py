"""Folders that somebody has sent: whatever their files say, nothing outside the folder changes, and no process starts."""

import contextlib
import shutil
import warnings
from typing import Any

import numpy as np
import pytest
from support.fuzzing import random_draws, scaled
from support.received import cases, files, hostile, places, read, replaced, tree, watched, write
from support.running import call
from support.sites import TINY as SITES
from support.sites import LoopPlace, deployed

import unskew
from unskew.benchmark.suite import load_suite
from unskew.deployment.server import connection, joining, round_requests
from unskew.deployment.server.run import resume
from unskew.deployment.site.config import load_site_config, read_experiments
from unskew.engines.calibration import read_entries
from unskew.errors import CheckpointError, ConfigError, UnskewError
from unskew.filesystem import append_text, private_folder
from unskew.json_models import read_model

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("undrawn"), pytest.mark.filterwarnings("ignore")]

IMAGES = "fedssyn:generator=vae-small;epochs=1,n_syn=2"
RUN = {"data": "digits", "max_train_samples": 60, "clients": 2, "partition": "iid", "model": "logistic", "rounds": 1}
RUN = {**RUN, "local_steps": 1, "engine": "inline", "device": "cpu", "holdout": 0.2, "early_stopping": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A comparison with shared images, a run with its own, and a deployed run."""
    folder = tmp_path_factory.mktemp("made")
    unskew.compare(methods=[IMAGES], seeds=[0], out=folder / "compared", **RUN)
    unskew.run(method=IMAGES, out=folder / "run", **RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_requests, "POLL", 0.01)
        deployed(folder / "deployed", **SITES)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in; next to it a home, a cache and files that nobody may change."""
    for name in ("here", "outside", "outside/home", "outside/cache", "outside/synthetic"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "victim").write_text("mine")
    (tmp_path / "outside" / "home" / ".bashrc").write_text("mine")
    for name in ("here/evil.py", "outside/evil.py"):
        (tmp_path / name).write_text("raise SystemExit('it was imported')\n")
    np.savez(tmp_path / "here" / "rows.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.zeros(2, np.int64))
    monkeypatch.chdir(tmp_path / "here")
    for name, value in (("HOME", "home"), ("XDG_CACHE_HOME", "cache"), ("WANDB_DIR", "home"), ("HF_HOME", "cache")):
        monkeypatch.setenv(name, str(tmp_path / "outside" / value))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module, name, value in ((round_requests, "POLL", 0.01), (connection, "NODES", 0.0), (joining, "POLL", 0.01)):
        monkeypatch.setattr(module, name, value)
    private_folder()
    return tmp_path / "here"


def commands(sent):
    """The commands that take the folder that was sent."""
    (seed,) = (sent / "compared").glob("*/seed-0")
    compare = [word for name, value in RUN.items() for word in ("--set", f"{name}={value}") if name != "data"]
    return {
        "compared": [
            ("resume", seed, "--rounds", 2),
            ("compare", IMAGES, "--seeds", "0", "--data", "digits", *compare, "--out", sent / "compared", "--resume"),
            ("report", sent / "compared"),
            ("watch", sent / "compared", "--once", sent / "page.html"),
        ],
        "run": [
            ("resume", sent / "run", "--rounds", 2),
            ("predict", sent / "run", "rows.npz", "--out", sent / "run" / "p.csv"),
            ("report", sent / "run"),
            ("watch", sent / "run", "--once", sent / "page.html"),
            ("export", sent / "run", "--format", "torch"),
        ],
        "deployed": [
            ("resume", sent / "deployed" / "run"),
            ("deploy", "status", sent / "deployed" / "run"),
            ("deploy", "stop", sent / "deployed" / "run"),
            ("deploy", "log", sent / "deployed" / "run", "--verify"),
            ("watch", sent / "deployed" / "run", "--once", sent / "page.html"),
        ],
    }


def used(capsys, sent, command):
    """The command ends with a documented code, without a traceback, and changes nothing outside of the folder."""
    with watched(sent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = call(capsys, *command)
    assert outcome.code in (0, 2), outcome
    assert "Traceback" not in outcome.err
    assert outcome.code == 0 or outcome.err.startswith(("unskew: ", "Usage: ")), outcome.err


@pytest.mark.parametrize("examples", [10, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["compared", "run"])
def test_no_field_of_a_run_folder_acts_outside_of_it(here, made, capsys, kind, examples):
    draws, outside = random_draws(0), here.parent / "outside"
    every = cases(made / kind, outside)
    sent, before, failures = here / "sent", tree(outside), []
    for file, place, value in draws.sample(every, min(scaled(examples), len(every))):
        shutil.copytree(made, sent)
        command = draws.choice(commands(sent)[kind])
        try:
            write(sent / kind / file, replaced(read(sent / kind / file), place, value))
            used(capsys, sent, command)
            assert tree(outside) == before
        except Exception as error:
            failures.append(f"{command[0]}, {file}, {place}, {str(value)[:60]!r}: {error!r:.600}")
        shutil.rmtree(sent)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("examples", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_no_field_of_a_deployed_run_acts_outside_of_it(here, made, capsys, examples):
    draws, outside = random_draws(1), here.parent / "outside"
    every = [case for case in cases(made / "deployed" / "run", outside) if case[0].name != "curves.json"]
    sent, before, failures = here / "sent", tree(outside), []
    for file, place, value in draws.sample(every, min(scaled(examples), len(every))):
        shutil.copytree(made, sent)
        folder = sent / "deployed" / "run"
        command = draws.choice(commands(sent)["deployed"])
        try:
            write(folder / file, replaced(read(folder / file), place, value))
            used(capsys, sent, command)
            sites = LoopPlace(sent / "deployed", SITES, socket="/tmp/unused.sock")
            with watched(sent), contextlib.suppress(UnskewError):
                resume(folder, tell=[].append, location=sites, rounds=3)
            assert tree(outside) == before
        except Exception as error:
            failures.append(f"{command[0]}, {file}, {place}, {str(value)[:60]!r}: {error!r:.600}")
        shutil.rmtree(sent)
    assert not failures, "\n".join(failures)


OTHERS = {
    "suite.yaml": {
        "title": "t",
        "trials": 2,
        "seeds": [1, 2],
        "tuning_seed": 0,
        "federations": ["federation.yaml"],
        "methods": ["fedavg", "fedprox"],
        "untuned": ["fedavg"],
        "references": ["local"],
        "settings": {"rounds": 2},
        "space": {"lr": [0.1, 0.2]},
    },
    "federation.yaml": {
        "title": "t",
        "kind": "controlled",
        "source": "s",
        "needs": "a.csv",
        "without": {"fedprox": "slow"},
        "settings": {"data": "table:$data/a.csv", "label": "y", "clients": 2, "trackers": ["tensorboard"]},
    },
    "site.yaml": {
        "name": "a",
        "client": 0,
        "experiments": "experiment.yaml",
        "superlink": "127.0.0.1:8000",
        "ca": "ca.crt",
        "key": "k",
        "signing_key": "s",
        "roster": "r",
        "socket": "s.sock",
        "state": "state",
        "threads": 1,
        "limits": {"seconds": 1.0},
        "data": {"source": "digits"},
        "trust_code": False,
    },
    "experiment.yaml": {"data": "digits", "clients": 3, "model": "logistic", "method": "fedavg"},
    "unskew/engines.json": {"a" * 32: {"alone": 0.1, "steps": 3, "processes": {"2x25": 0.5}, "inline": 0.1}},
    "plan.json": {"methods": ["fedavg"], "trials": 2, "seeds": [1], "pruning": True, "space": {}, "rounds": 2},
}
"""Small files of the other kinds, by name."""


@pytest.mark.parametrize("examples", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_field_of_a_suite_a_site_or_a_cache_acts_outside_of_it(here, monkeypatch, examples):
    draws, outside = random_draws(2), here.parent / "outside"
    sent, before, failures = here / "sent", tree(outside), []
    (sent / "unskew").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(sent))
    for name, content in OTHERS.items():
        (sent / name).touch()
        write(sent / name, content)
    readers = {
        **dict.fromkeys(("suite.yaml", "federation.yaml"), lambda: load_suite(str(sent / "suite.yaml"))),
        "site.yaml": lambda: read_experiments(load_site_config(sent / "site.yaml"), sent),
        "experiment.yaml": lambda: read_experiments(load_site_config(sent / "site.yaml"), sent),
        "unskew/engines.json": read_entries,
        "plan.json": lambda: read_model(sent / "plan.json", dict[str, Any]),
    }
    for name, reader in readers.items():
        if name != "plan.json":
            reader()
    every = cases(sent, outside)
    for file, place, value in draws.sample(every, min(scaled(examples), len(every))):
        try:
            write(sent / file, replaced(OTHERS[str(file)], place, value))
            with watched(sent), contextlib.suppress(UnskewError, OSError):  # a sentence on the command line, too
                readers[str(file)]()
        except Exception as error:
            failures.append(f"{file}, {place}, {str(value)[:60]!r}: {error!r:.600}")
        write(sent / file, OTHERS[str(file)])
    assert tree(outside) == before
    assert not failures, "\n".join(failures)


def test_a_suite_and_a_site_name_nothing_elsewhere(here):
    for name in ("suite.yaml", "federation.yaml", "site.yaml", "experiment.yaml"):
        (here / name).touch()
        write(here / name, OTHERS[name])
    for path in ("/etc/passwd", "../outside/x.yaml", "a/../../x.yaml"):
        write(here / "suite.yaml", {**OTHERS["suite.yaml"], "federations": [path]})
        with pytest.raises(ConfigError, match=r"federations\.0: it must be|federations\.0: .*must be a path below"):
            load_suite("suite.yaml")
    write(here / "site.yaml", {**OTHERS["site.yaml"], "socket": "../outside/victim"})
    with pytest.raises(ConfigError, match=r"victim exists and is not a socket"):
        load_site_config(here / "site.yaml")


@pytest.mark.parametrize("name", ["local", "folder", "address", "socket", "place"])
def test_a_deployed_run_does_not_say_where_it_is_carried_out(here, made, capsys, name):
    sent = shutil.copytree(made / "deployed" / "run", here / "sent")
    for command in ("--local=3", "--superlink=127.0.0.1:9"):
        write(sent / "deployment.json", {**read(made / "deployed" / "run" / "deployment.json"), name: "../outside"})
        folder = [] if command == "--local=3" else [f"--folder={here.parent / 'outside'}"]
        with watched(sent):
            outcome = call(capsys, "resume", sent, command, *folder, "--rounds", 3)
        assert (outcome.code, f"deployment.json is corrupted: {name}: " in outcome.err) == (2, True), outcome.err
    with watched(sent):
        assert "do not say where its sites are" in call(capsys, "resume", sent).err
        assert "is not a deployed run" in call(capsys, "resume", made / "run", "--local", 3).err


@pytest.mark.parametrize("run", ["../../../outside", "/etc", "0123456789ABCDEF", "0123", "0123456789abcdef\n", ""])
def test_the_identifier_of_a_run_is_no_path(here, made, run):
    sent = shutil.copytree(made / "deployed" / "run", here / "sent")
    write(sent / "deployment.json", {**read(sent / "deployment.json"), "run": run})
    place = LoopPlace(here / "deployed", SITES, socket="/tmp/unused.sock")
    with watched(sent), pytest.raises(CheckpointError, match="run: String should match pattern"):
        resume(sent, tell=[].append, location=place, rounds=3)


@pytest.mark.parametrize(
    ("linked", "finished"),
    [
        *((name, True) for name in ("synthetic", "HASH", "synthetic.json", "data")),
        ("synthetic", False),
        ("HASH", False),
    ],
)
def test_a_link_above_a_run_folder_is_not_followed(here, made, capsys, linked, finished):
    """The run folder itself has none. Whatever the link leads to stays as it is, and the run makes its own images."""
    sent, outside = here / "sent", here.parent / "outside"
    shutil.copytree(made / "compared", sent)
    (key,) = (path.name for path in (sent / "synthetic").iterdir())
    path = {"synthetic": sent / "synthetic", "HASH": sent / "synthetic" / key}.get(
        linked, sent / "synthetic" / key / linked
    )
    shutil.move(path, outside / "target")
    path.symlink_to(outside / "target")
    target = (sent / "synthetic" / key).resolve()
    if not finished:
        (target / "synthetic.json").unlink(missing_ok=True)
    (target / "work").mkdir()
    (target / "work" / "thesis.txt").write_text("mine")
    before = tree(outside)
    (run,) = sent.glob("*/seed-0")
    with watched(run):
        outcome = call(capsys, "resume", run, "--rounds", 2)
    assert outcome.code == 0, outcome.err
    assert tree(outside) == before
    assert (run / "synthetic" / "synthetic.json").is_file()
    again = ["compare", IMAGES, "--seeds", "0", "--data", "digits", "--out", sent, "--resume"]
    assert "is a link" in call(capsys, *again, *(f"--set={k}={v}" for k, v in RUN.items() if k != "data")).err
    assert tree(outside) == before


def test_a_finished_set_above_a_run_folder_is_read_and_an_unfinished_one_is_not_changed(here, made, capsys):
    sent = shutil.copytree(made / "compared", here / "sent")
    (run,) = sent.glob("*/seed-0")
    with watched(run):
        assert call(capsys, "resume", run, "--rounds", 2).code == 0
    assert not (run / "synthetic").exists()
    (shared,) = (sent / "synthetic").iterdir()
    (shared / "synthetic.json").unlink()
    before = tree(shared)
    with watched(run):
        assert call(capsys, "resume", run, "--rounds", 3).code == 0
    assert tree(shared) == before
    assert (run / "synthetic" / "synthetic.json").is_file()


def test_a_file_with_a_second_name_is_not_extended(here):
    (here / "warnings.txt").hardlink_to(here.parent / "outside" / "victim")
    with pytest.raises(ConfigError, match=r"warnings\.txt has a second name"):
        append_text(here / "warnings.txt", "x")
    assert (here.parent / "outside" / "victim").read_text() == "mine"


def test_the_fuzzer_reaches_every_file(made):
    names = {path.name for kind in ("compared", "run", "deployed/run") for path in files(made / kind)}
    assert names >= {"config.yaml", "summary.json", "about.json", "inputs.json", "manifest.json", "engine.json"}
    assert names >= {
        "metrics.jsonl",
        "clients.jsonl",
        "comparison.json",
        "synthetic.json",
        "deployment.json",
        "audit.jsonl",
    }
    assert sum(1 for _ in places({"a": [{"b": 1}]})) == 3
    assert hostile(made)
