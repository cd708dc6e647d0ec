"""Code that a file names is run only if the user says so; what the user names is run as ever."""

import json
import shutil
import sys
from pathlib import Path

import pydantic
import pytest
import yaml
from support.running import call

import unskew
from unskew.benchmark.suite import load_suite
from unskew.config.experiment import Experiment
from unskew.config.loader import load_config
from unskew.config.trust import TRUST, NamesCode, is_registered_method, no_import_path
from unskew.errors import ConfigError
from unskew.option_parsing import import_from_path
from unskew.simulation import checkpoint

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("undrawn")]

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
    "one of several models": {"model": "hf:opt,sent_module:net", "method": "local"},
    "list of models": {"model": ["logistic", {"name": "sent_module:net"}], "method": "local"},
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
    assert "sent/config.yaml names code to import, the model 'sent_module:net'" in refused.err
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
        ["watch", sent, "--once", "page.html"],
    ]
    for command in commands:
        outcome = call(capsys, *command)
        assert outcome.code == (0 if command[0] in ("report", "watch") else 2)
        assert command[0] in ("report", "watch", "predict") or "names code to import" in outcome.err
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


@pytest.mark.parametrize("value", [["head:1;+sent_module.Rule:2"], "head:1;+sent_module.Rule:2"])
def test_a_value_of_a_space_does_not_become_another_method(folder, capsys, value):
    Path("space.yaml").write_text(yaml.safe_dump({"fedals.periods": value}))
    tune = ["tune", "fedals", "--data", "digits", "--model", "mlp", "--clients", 3, "--rounds", 1, "--trials", 1]
    outcome = call(capsys, *tune, "--space", "space.yaml", "--out", "tuned")
    assert outcome.code == 2
    assert "is not one method with its options" in outcome.err
    assert not (folder / "imported").exists()


def fields(model=Experiment, prefix=()):
    """Every field of the configuration, by the names of its sections and its own, with its annotations."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
            yield from fields(kind, (*prefix, name))
        yield (*prefix, name), field.metadata


def nested(path, value):
    for name in reversed(path):
        value = {name: value}
    return value


WRITTEN = ("sent_module:net", "sent_module.Rule", "fedssyn:generator=sent_module:net", "signflip:share=sent_module:net")


@pytest.mark.parametrize("text", WRITTEN)
def test_no_field_of_an_untrusted_file_imports_code(folder, capsys, text):
    """Each field of the models is tried, so a new field that imports code and is not annotated fails here."""
    for path, _ in fields():
        for value in (text, [text], {"name": text}):
            values = nested(path, value)
            config = write(folder / "config.yaml", model="logistic", **values) if path[0] != "model" else None
            call(capsys, "run", config or write(folder / "config.yaml", **values), "--out", "run")
            shutil.rmtree("run", ignore_errors=True)
            assert not (folder / "imported").exists(), f"{'.'.join(path)}: {value}"


OUTSIDE = {
    "ray.address": "10.0.0.1:6379",
    "trackers": "wandb",
    "engine": "ray:address=evil",
    "method": "sent_module.Rule",
}
ANNOTATED = [(path, rule) for path, metadata in fields() for rule in metadata if isinstance(rule, NamesCode)]


@pytest.mark.parametrize(("path", "rule"), ANNOTATED, ids=[".".join(path) for path, _ in ANNOTATED])
def test_annotated_fields_reject_what_is_not_registered(folder, path, rule):
    text = OUTSIDE.get(".".join(path), "sent_module:net")
    for value in (text, [text], [[text]]):
        config = write(folder / "config.yaml", **nested(path, value))
        with pytest.raises(ConfigError, match=r"config\.yaml names .*trust the file: "):
            load_config(config, TRUST)
        assert load_config(config, None)[path[0]]  # the user trusts the file
        replaced = nested(path, "what the user sets")
        assert path[-1] not in str(load_config(config, TRUST, replaced).get(path[0]))
    default = nested(path, Experiment().model_dump()[path[0]]) if len(path) == 1 else {}
    assert load_config(write(folder / "config.yaml", **default), TRUST)


def test_fields_that_a_command_does_not_use_are_dropped_only_if_they_name_code(folder):
    config = write(folder / "config.yaml", objective="sent_module:net", target=40, metrics=["auroc"])
    values = load_config(config, TRUST, ignored=("objective", "metrics"))
    assert values == {**BUDGET, "metrics": ["auroc"]}


def test_an_unknown_field_is_an_error_that_names_the_file(folder):
    with pytest.raises(ConfigError, match=r"config\.yaml: .*round"):
        load_config(write(folder / "config.yaml", round=3), TRUST)


@pytest.mark.parametrize(
    ("expression", "registered"),
    [
        ("fedprox:mu=0.1+scaffold", True),
        ("fedals:periods=head:2;first: 3", True),
        ("fedssyn:generator=vae;epochs=2", True),
        ("fedspeed", True),
        ("sent_module.Rule", False),
        ("fedavgm+sent_module.inner.Rule:mu=1", False),
        ("fedssyn:generator=sent_module:net;epochs=2", False),
        ('fedssyn:keep="sent_module:net"', False),
        ("fedssyn:keep= sent_module : net", False),
    ],
)
def test_registered_methods_name_no_import_path(expression, registered):
    assert is_registered_method(expression) is registered


@pytest.mark.parametrize(
    "path", ["sent_module:2", "sent_module:-1", "sent_module:.5", "sent_module: 3", "sent_module:1.net"]
)
def test_texts_without_import_path_cannot_be_imported(folder, path):
    """Texts that ``no_import_path`` accepts are rejected before a module is imported."""
    assert no_import_path(path)
    with pytest.raises(ConfigError, match="is not an import path"):
        import_from_path(path, "the model")
    assert not (folder / "imported").exists()


def test_a_checkpoint_of_another_run_does_not_run_code(folder, monkeypatch):
    """The method of the run in ``start_from`` is read from its checkpoint."""
    first = finished_run(folder / "first")
    read = checkpoint.newest_checkpoint

    def manipulated(where):
        path, manifest, problems = read(where)
        manifest["extra"]["config"]["method"] = "sent_module.Rule"
        return path, manifest, problems

    monkeypatch.setattr(checkpoint, "newest_checkpoint", manipulated)
    values = {**BUDGET, "rounds": 2, "data": "digits", "model": "logistic", "method": "fedavgm"}
    unskew.run(out=folder / "second", start_from=str(first), **values)
    assert not (folder / "imported").exists()


def test_a_suite_and_its_federations_do_not_run_code(folder):
    suite = {"title": "-", "federations": ["here.yaml"], "methods": ["fedavg", "fedprox"]}
    federation = {"title": "-", "kind": "controlled", "source": "-", "settings": {"data": "digits", "rounds": 1}}
    evil = {"data": "digits", "model": "sent_module:net"}
    for in_suite, in_federation in (
        ({"methods": ["fedavg", "sent_module.Rule"]}, {}),
        ({"untuned": ["sent_module.Rule"]}, {}),
        ({"settings": evil}, {}),
        ({"space": {"fedprox.mu": ["sent_module:net"]}}, {}),
        ({}, {"settings": evil}),
    ):
        Path("suite.yaml").write_text(yaml.safe_dump({**suite, **in_suite}))
        Path("here.yaml").write_text(yaml.safe_dump({**federation, **in_federation}))
        with pytest.raises(ConfigError, match=r"\.yaml names code to import, .*trust"):
            load_suite("suite.yaml")
    assert not (folder / "imported").exists()
