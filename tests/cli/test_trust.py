"""Code that a file names is run only if the user says so; what the user names is run as ever."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from support.running import call

import unskew
from unskew.config.loader import experiment, load_yaml
from unskew.errors import ConfigError
from unskew.methods.registry import method
from unskew.option_parsing import import_from_path
from unskew.provenance import UntrustedText
from unskew.runs.run import run_experiment

pytestmark = pytest.mark.usefixtures("undrawn")

MODULE = """
import unskew
from pathlib import Path
from torch import nn
from dataclasses import dataclass

Path("imported").touch()

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

@dataclass(frozen=True)
class Rule(unskew.ClientRule):
    name, summary, paper = "rule", "-", "-"
"""
EVIL = "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['imported']]"
BUDGET = {"rounds": 1, "clients": 3, "partition": "iid", "local_steps": 1, "engine": "inline"}
CODE = {
    "model": {"model": "sent_module:net"},
    "method": {"model": "logistic", "method": "fedavgm+sent_module.Rule"},
    "generator": {"model": "logistic", "method": "fedssyn:generator=sent_module:net"},
    "keep": {"model": "logistic", "method": "fedssyn:generator=vae-small,epochs=1,keep=sent_module:net"},
    "mapping": {"model": {"name": "sent_module:net"}},
    "of unskew": {"model": "unskew.config.loader:yaml.unsafe_load", "model_options": {"stream": EVIL}},
    "numpy by unskew": {"model": "unskew.data.sources.npz:np.load", "model_options": {"file": "evil.npy"}},
    "a class of unskew": {"model": "logistic", "method": "unskew.methods.fedprox.FedProx"},
    "soft hyphen": {"model": "sent\xad_module:net"},
    "quotes": {"model": "sent'\"_module:net"},
    "like a path": {"model": "text:net"},
    "of Python itself": {"model": "os:system", "model_options": {"command": "touch imported"}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Somebody's folder with a module of theirs, which one works in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    for name in ("sent_module", "sent\xad_module", "sent'\"_module", "text"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("sent") or name == "text":
            del sys.modules[name]


def write(path, **values):
    path.write_text(yaml.safe_dump({**BUDGET, **values}))
    return path


@pytest.mark.parametrize("what", CODE)
def test_a_file_does_not_run_code(folder, capsys, what):
    config = write(folder / "config.yaml", **CODE[what])
    other = write(folder / "other.yaml", model="logistic", method="fedprox:mu=0.5")
    for command in (["run", config], ["run", config, "--seed", 1], ["compare", other, config]):
        outcome = call(capsys, *command, "--out", "run")
        assert outcome.code == 2
        assert "config.yaml names code to import, " in outcome.err
        assert "--trust-code" in outcome.err
    assert not (folder / "imported").exists()
    assert not (folder / "run").exists()


@pytest.mark.parametrize(("command", "takes"), [("os:system", "command"), ("subprocess:getoutput", "cmd")])
def test_a_command_of_the_system_is_no_model(folder, capsys, command, takes):
    """Not even if it is trusted."""
    evil = {"model": command, "model_options": {takes: "touch ran"}}
    config = write(folder / "config.yaml", **evil)
    for args in (
        [config],
        [config, "--trust-code"],
        ["--model", command, "--set", f"model_options.{takes}=touch ran"],
    ):
        assert call(capsys, "run", *args, "--out", "run").code == 2
    assert not (folder / "ran").exists()
    assert call(capsys, "run", write(folder / "good.yaml", model="logistic"), "--out", "run").code == 0
    stored = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump({**stored, **evil, "rounds": 3}))
    for args in (["resume", "run"], ["resume", "run", "--trust-code"], ["diagnose", "run", "--no-curvature"]):
        assert call(capsys, *args).code == 2
    assert not (folder / "ran").exists()


def test_what_the_user_names_or_trusts_is_run(folder, capsys):
    config = write(folder / "config.yaml", **CODE["model"], method="sent_module.Rule")
    assert call(capsys, "run", config, "--trust-code", "--out", "trusted").code == 0
    shutil.copytree("trusted", "sent")
    flags = ["--model", "sent_module:net", "--set", "method=sent_module.Rule"]
    assert call(capsys, "run", config, *flags, "--out", "named", "--json").code == 0
    refused = call(capsys, "resume", "sent", "--rounds", 2)
    assert refused.code == 2
    assert "sent/config.yaml names code to import, the method 'sent_module.Rule'" in refused.err
    with pytest.raises(ConfigError, match="trust_code=True"):
        unskew.resume("sent", rounds=2)
    assert len(unskew.resume("sent", rounds=2, trust_code=True).history) == 2
    assert call(capsys, "resume", "trusted", "--rounds", 2, "--trust-code").code == 0
    seen = call(capsys, "diagnose", "sent")
    assert seen.code == 2
    assert "give the model in Python" in seen.err
    sys.modules.pop("sent_module")
    Path("imported").unlink()
    look = ["diagnose", "--config", write(folder / "model.yaml", **CODE["model"]), "--no-curvature", "--json"]
    seen = call(capsys, *look)
    assert seen.code == 2
    assert "--trust-code" in seen.err
    assert not Path("imported").exists()
    assert call(capsys, *look, "--trust-code").code == 0


def test_a_table_of_a_comparison_takes_the_file_for_its_settings_only(folder, capsys):
    config = write(folder / "config.yaml", method="sent_module.Rule", model="logistic")
    outcome = call(capsys, "compare", "fedavg", "--seeds", 1, "--config", config, "--out", "c", "--json")
    assert json.loads(outcome.out)["rows"][0]["method"] == "fedavg"
    assert not (folder / "imported").exists()


def test_the_working_folder_comes_last(folder):
    (folder / "json.py").write_text("raise SystemExit")
    import_from_path("sent_module:net", "the model")
    assert sys.path[-1] == str(folder)


def finished_run(folder, **values):
    """A folder with a run of one round, whose configuration then has these values."""
    unskew.run(data="digits", model="logistic", method="fedavg", out=folder, **BUDGET)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **values}))
    return folder


@pytest.mark.parametrize("what", ["method", "mapping", "of unskew", "soft hyphen", "like a path"])
def test_a_run_folder_does_not_run_code(folder, capsys, what):
    sent = finished_run(folder / "sent", **CODE[what])
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    commands = [
        ["resume", sent, "--rounds", 2],
        ["predict", sent, "rows.csv"],
        ["export", sent],
        ["diagnose", sent],
        ["run", sent / "config.yaml", "--rounds", 2, "--resume", "--out", sent],
        ["report", sent],
    ]
    for command in commands:
        outcome = call(capsys, *command)
        assert outcome.code == (0 if command[0] == "report" else 2)
        assert command[0] in ("report", "predict") or "names code to import" in outcome.err
    with pytest.raises(ConfigError, match="names code to import"):
        unskew.load_predictor(sent)
    assert not (folder / "imported").exists()


def test_spaces_of_a_file_do_not_run_code(folder, capsys):
    Path("space.yaml").write_text(yaml.safe_dump({"fedssyn.generator": ["vae", "sent_module:net"]}))
    tune = ["tune", "fedssyn", "--data", "digits", "--trials", 1, "--space", "space.yaml", "--out", "tuned"]
    outcome = call(capsys, *tune)
    assert outcome.code == 2
    assert "space.yaml names code to import" in outcome.err
    assert not (folder / "imported").exists()


def test_an_experiment_carries_where_it_came_from(folder):
    """Into copies and other processes, and so to the engine that imports the model."""
    import pickle

    from unskew.config.paths import with_absolute_paths

    config = experiment(load_yaml(write(folder / "config.yaml", **CODE["model"])))
    for one in (
        config,
        config.model_copy(update={"seed": 3}),
        pickle.loads(pickle.dumps(config)),
        with_absolute_paths(config),
    ):
        with pytest.raises(ConfigError, match="names code to import"):
            run_experiment(one)
    assert config == experiment(load_yaml(folder / "config.yaml", None))
    assert "sent_module:net" in config.to_yaml()
    assert not (folder / "imported").exists()


def test_options_in_python_keep_the_mark_of_a_file(folder):
    with pytest.raises(ConfigError, match="a file names code to import"):
        method("fedssyn", generator=UntrustedText("sent_module:net", "a file", "trust it"))
    assert not (folder / "imported").exists()
