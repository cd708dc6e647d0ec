"""Code that a file names is run only if the user says so; what the user names is run as ever."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from support.running import call

import unskew
from unskew.errors import ConfigError
from unskew.options import imported, untrusted

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
BUDGET = {"rounds": 1, "clients": 3, "partition": "iid", "local_steps": 1, "engine": "inline"}
CODE = {
    "model": {"model": "sent_module:net"},
    "method": {"model": "logistic", "method": "fedavgm+sent_module.Rule"},
    "generator": {"model": "logistic", "method": "fedssyn:generator=sent_module:net"},
    "keep": {"model": "logistic", "method": "fedssyn:generator=vae-small,epochs=1,keep=sent_module:net"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Somebody's folder with a module of theirs, which one works in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sent_module.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("sent_module", None)


def write(path, **values):
    path.write_text(yaml.safe_dump({**BUDGET, **values}))
    return path


@pytest.mark.parametrize("what", CODE)
def test_a_file_does_not_run_code(folder, capsys, what):
    config = write(folder / "config.yaml", **CODE[what])
    other = write(folder / "other.yaml", model="logistic", method="fedprox")
    for command in (["run", config], ["run", config, "--seed", 1], ["compare", other, config]):
        outcome = call(capsys, *command, "--out", "run")
        assert outcome.code == 2
        assert "config.yaml names code of its own" in outcome.err
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
    assert "sent names code of its own, the method 'sent_module.Rule'" in refused.err
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


def test_our_own_modules_are_trusted_and_the_working_folder_comes_last(folder):
    with untrusted({"generator": "unskew.methods.fedavg:FedAvg"}, "a file"):
        assert imported("unskew.methods.fedavg:FedAvg", "the method").name == "fedavg"
    (folder / "json.py").write_text("raise SystemExit")
    imported("sent_module:net", "the model")
    assert sys.path[-1] == str(folder)
