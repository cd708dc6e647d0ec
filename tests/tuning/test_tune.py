"""Methods are tuned alike, by what clients hold out, and a tuning that was killed ends as it would have ended."""

import contextlib
import csv
import json
import os
import shutil
import signal
import sqlite3
import struct
import sys
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.running import Process, call, metrics
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.config.loader import experiment, load_yaml
from unskew.errors import CheckpointError, ConfigError, UnskewError
from unskew.methods.registry import METHODS, method, rule_class
from unskew.option_parsing import check_options_have_effect, option_defaults
from unskew.protocol.search_space import CategoricalSpace, RangeSpace, log_range, one_of, read_space, uniform_range
from unskew.records.mlflow_store import is_complete_database
from unskew.reporting.run_description import repeat_commands
from unskew.reporting.run_groups import group_runs
from unskew.reporting.run_reader import read_runs
from unskew.tuning.spaces import apply_parameters, configured_values, method_spaces, spaces_for, user_spaces
from unskew.tuning.study import Study, database, make_storage
from unskew.tuning.trial_runner import TEST_SAMPLES, TuningPlan

pytestmark = pytest.mark.usefixtures("undrawn")
pytest.importorskip("optuna")
TINY = {"model": "logistic", "rounds": 2, "local_steps": 1, "engine": "inline"}


def ends(space):
    return (space.low, space.high) if isinstance(space, RangeSpace) else space.values


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_spaces_are_of_its_options_and_every_end_can_be_taken(name):
    found = method_spaces(name)
    for key, space in found.items():
        assert key.rpartition(".")[2] in option_defaults(rule_class(name))
        for value in ends(space):
            experiment({"method": apply_parameters(name, {key: value})[0]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.001:0.3:log", RangeSpace(0.001, 0.3, log=True)),
        ("1:2", RangeSpace(1, 2)),
        ({"low": 0.1, "high": 1}, RangeSpace(0.1, 1)),
        ("0.1|1", one_of(0.1, 1)),
        ([0.5, 0.25], one_of(0.5, 0.25)),
        (0.3, one_of(0.3)),
    ],
)
def test_spaces_are_read(text, expected):
    assert user_spaces({"lr": text}, ["fedavg"], {}) == {"lr": expected}
    assert read_space(str(expected), "lr", lambda value: None) == expected


def test_whole_numbers_are_known_by_what_the_option_takes():
    found = user_spaces({"local_steps": "1:8", "lr": "1:8", "fedbuff.buffer_size": "2:4"}, ["fedbuff"], {})
    assert [space.integer for space in found.values()] == [True, False, True]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"rounds": "1:5"}, "no option to tune for all methods 'rounds'"),
        ({"fedprox.mu": "0.1:1"}, "none of the methods"),
        ({"fedavg.beta": "0.1:1"}, "'beta'"),
        ({"lr": "0.3:0.1"}, "must be below"),
        ({"lr": "0:0.1:log"}, "lr=0"),
        ({"momentum": "0:0.5:log"}, "above 0"),
        ({"lr": "0.1:0.3:lgo"}, "0.1:0.3:lgo"),
        ({"lr": ""}, "empty"),
        ({"lr": {"low": 1}}, "low, high"),
        ({"local_steps": 2, "local_epochs": 2}, "both"),
    ],
)
def test_spaces_that_make_no_sense_are_sentences(space, words):
    with pytest.raises(ConfigError, match=words):
        user_spaces(space, ["fedavg"], {})


OWN_RULE = """
from dataclasses import dataclass
import unskew

@dataclass(frozen=True)
class Half(unskew.ClientRule):
    name, summary, paper = "half", "sends a share of the update", "own"
    spaces = SPACES
    share: float = 0.5
    times: int = 1
"""


def spaces_of_own_rule(tmp_path, monkeypatch, spaces):
    """Write a rule with these spaces to a new module, and return how they are read."""
    module = f"own_rule_{len(sys.modules)}"
    (tmp_path / f"{module}.py").write_text(OWN_RULE.replace("SPACES", spaces))
    monkeypatch.syspath_prepend(tmp_path)
    found = method_spaces(f"{module}.Half")
    return {key.rpartition(".")[2]: space for key, space in found.items()}


@pytest.mark.parametrize(
    ("spaces", "expected"),
    [
        ('{"share": "0.1:1", "times": "1:4"}', {"share": RangeSpace(0.1, 1), "times": RangeSpace(1, 4, integer=True)}),
        ('{"share": "0.1:1:log", "times": [1, 4]}', {"share": log_range(0.1, 1), "times": one_of(1, 4)}),
        ('{"share": "0.1|0.2", "times": {"low": 1, "high": 4}}', {"share": one_of(0.1, 0.2), "times": uniform_range(1, 4)}),
    ],
)  # fmt: skip
def test_a_rule_declares_its_spaces_in_the_format_of_the_command_line(tmp_path, monkeypatch, spaces, expected):
    assert spaces_of_own_rule(tmp_path, monkeypatch, spaces) == expected


@pytest.mark.parametrize(
    ("spaces", "words"),
    [
        ('{"share": "0.1-1"}', "0.1-1 is not valid.*such as 0.001:0.3:log"),
        ('{"share": None}', "such as 0.001:0.3:log"),
        ('{"share": "1:0.1"}', "must be below"),
        ('{"shares": "0.1:1"}', "no option 'shares'"),
        ('"0.1:1"', "must be a mapping, such as"),
    ],
)
def test_spaces_of_a_rule_that_are_not_valid_are_sentences(tmp_path, monkeypatch, spaces, words):
    with pytest.raises(ConfigError, match=words):
        spaces_of_own_rule(tmp_path, monkeypatch, spaces)


def test_options_without_an_effect_are_neither_tuned_nor_part_of_a_trial():
    assert list(method_spaces("fedasync:staleness=constant")) == ["fedasync.alpha0"]
    assert "fedcog.lambda_kd" not in method_spaces("fedcog:coefficients=auto")
    beta = method_spaces("fedavgm:nesterov=true")["fedavgm.beta"]
    for value in beta.values:
        trial, _ = apply_parameters("fedavgm:nesterov=true+fedprox", {"fedavgm.beta": value})
        check_options_have_effect(method(trial).server)
        assert ("nesterov" in trial) == (value > 0)
    assert apply_parameters("fedsol:rho=0,tau=2", {"lr": 0.1})[0] == "fedsol:rho=0,tau=2"  # an error of the run


def test_options_of_all_parts_of_a_sum_are_tuned_but_for_those_that_are_written():
    config = experiment({"local_steps": 4, "lr": 0.1})
    found = spaces_for("fedcog:lambda_kd=0.5+scaffold", config, {"fedcog.n": one_of(8), "local_epochs": one_of(1, 2)})
    assert list(found) == ["lr", "batch_size", "fedcog.lambda_dis", "scaffold.eta_g", "fedcog.n", "local_epochs"]
    assert apply_parameters("fedcog:lambda_kd=0.5+scaffold", {"fedcog.lambda_kd": 1.0, "lr": 0.2}) == (
        "fedcog:lambda_kd=1.0+scaffold",
        {"lr": 0.2},
    )
    spaces = {"lr": log_range(0.2, 1.0), "fedprox.mu": one_of(0.2), "local_epochs": log_range(1, 2)}
    assert configured_values("fedprox", config, spaces) == {"lr": 0.1}
    assert "feddf.epochs" not in method_spaces("feddf:steps=3")


@pytest.mark.parametrize("value", ["1+mine.Rule", "1 + scaffold", "0.5,mu=3", '"0.5"', " 1"])
def test_values_that_would_be_read_as_more_than_one_option_are_rejected(value):
    with pytest.raises(ConfigError, match=r"is not one method with its options|sets mu twice"):
        apply_parameters("fedprox", {"fedprox.mu": value})


def test_the_authors_options_of_a_published_composition_are_tuned_and_tried_first():
    published, written = "fedspeed+fedprox:mu=0.3", "fedsam:rho=0.1+feddyn:alpha=0.1+fedprox:mu=0.3"
    assert list(method_spaces(published)) == ["fedsam.rho", "feddyn.alpha"]
    assert method_spaces(written) == {}
    tried_first = configured_values(published, experiment({}), method_spaces(published))
    assert tried_first == {"fedsam.rho": 0.1, "feddyn.alpha": 0.1}
    assert apply_parameters(published, tried_first)[0] == written
    assert apply_parameters(published, {"feddyn.alpha": 0.02})[0] == written.replace("alpha=0.1", "alpha=0.02")


def digits(noise):
    """A federation, and the same with a test set whose labels are noise."""
    fed = unskew.load_federation("digits", partition="dirichlet:0.3", clients=3, max_train_samples=120)
    if not noise:
        return fed
    draws = np.random.default_rng(3)
    x, y = fed.test
    return replace(fed, test=(x, torch.from_numpy(draws.integers(0, 10, len(y)))))


def test_methods_are_tuned_alike_and_the_test_set_has_no_say():
    options = {"methods": ["fedprox", "ditto"], "trials": 3, "seeds": 1, **TINY}
    found, noisy = (unskew.tune(digits(noise), **options) for noise in (False, True))
    assert [row["trial"] for row in found.trials] == [0, 1, 2] * 2
    assert found.trials == noisy.trials
    assert found.tuned["fedprox"].options == noisy.tuned["fedprox"].options
    assert noisy.comparison.rows()[0]["accuracy"] < found.comparison.rows()[0]["accuracy"]
    one = found.tuned["fedprox"]
    best = max(found.trials[:3], key=lambda row: row["value"])
    assert (best["value"], best["options"]) == (one.value, one.options)
    assert found.trials[0]["options"] == {"lr": 0.1, "local_steps": 1, "batch_size": 64, "fedprox.mu": 0.01}
    assert found.trials[0]["value"] == one.configured
    assert found.tuned["ditto"].judged_by == "validation accuracy of personal models"
    assert "needs 10 completed trials" in one.importance
    assert [summary["seed"] for summary in found.comparison.summaries[one.config.method]] == [1]


def test_the_first_trial_is_the_configuration_and_equal_methods_are_compared_once():
    options = {**TINY, "lr": 0.12345, "references": False}
    found = unskew.tune(digits(False), methods=["fedprox", "fedprox:mu=0.01"], trials=1, seeds=1, **options)
    assert [row["options"]["lr"] for row in found.trials] == [0.12345, 0.12345]
    assert found.tuned["fedprox"].config.lr == 0.12345
    assert list(found.comparison.summaries) == ["fedprox:mu=0.01"]
    (note,) = found.comparison.left_out
    assert note.startswith("fedprox:mu=0.01 is left out of the comparison: after tuning, it is fedprox:mu=0.01")


def test_the_first_trial_is_the_configuration_also_outside_of_its_spaces(tmp_path):
    """Options that a space fixes are fixed in all trials; the others are those of a run that is not tuned."""
    spaces = {"lr": "1e-9:1e-8:log", "fedprox.mu": [5.0, 6.0], "local_steps": 2, "batch_size": [8, 16]}
    options = {**TINY, "lr": 0.1, "early_stopping": TINY["rounds"]}
    fields = {"methods": ["fedprox"], "trials": 11, "seeds": 1, "search_space": spaces, "references": False}
    found = unskew.tune(digits(False), **fields, **options, pruning=False)
    first, *others = found.trials
    assert first["options"] == {"lr": 0.1, "local_steps": 2, "batch_size": 64, "fedprox.mu": 0.01}
    run = unskew.run(digits(False), method="fedprox", **{**options, "local_steps": 2})
    assert first["value"] == pytest.approx(run.history[-1]["validation_accuracy"])
    one = found.tuned["fedprox"]
    assert (one.configured, one.value, one.options) == (first["value"], first["value"], first["options"])
    assert (one.config.lr, one.config.method) == (0.1, "fedprox:mu=0.01")
    assert all(1e-9 <= row["options"]["lr"] <= 1e-8 and row["options"]["fedprox.mu"] in (5.0, 6.0) for row in others)
    assert isinstance(one.importance, str) or one.importance.keys() == {"lr", "batch_size", "fedprox.mu"}


def test_the_configuration_keeps_its_local_steps_if_epochs_are_tuned():
    found = unskew.tune(
        digits(False),
        methods=["fedavg"],
        trials=2,
        seeds=1,
        search_space={"local_epochs": "2:3"},
        references=False,
        **TINY,
    )
    assert [row["options"].get("local_epochs") in (2, 3) for row in found.trials] == [False, True]
    run = unskew.run(digits(False), method="fedavg", early_stopping=TINY["rounds"], **TINY)
    assert found.tuned["fedavg"].configured == pytest.approx(run.history[-1]["validation_accuracy"])


def test_fresh_seeds_of_a_method_are_trained_together(joint):
    options = {"methods": ["fedavg"], "trials": 2, "seeds": 2, "references": False, "data": "digits", "clients": 3}
    options |= {**TINY, "engine": "vectorized", "device": "cpu", "precision": "fp64"}
    alone, together = (unskew.tune(**options, parallel=parallel) for parallel in (1, "stacked"))
    assert joint == [2, 2]
    assert together.tuned == alone.tuned
    losses = [[row["loss"] for row in rows] for rows in alone.comparison.histories["fedavg"]]
    for rows, wanted in zip(together.comparison.histories["fedavg"], losses, strict=True):
        assert_close([row["loss"] for row in rows], wanted, TRAINING)
    with pytest.raises(ConfigError, match="Set engine=vectorized"):
        unskew.tune(**{**options, "engine": "inline"}, parallel="stacked")


def test_references_are_tuned_with_as_many_trials_and_compared_with_their_own_options():
    space = {"lr": [0.05, 0.5], "local_steps": 1, "batch_size": 16}
    tuning = unskew.tune(
        methods=["fedavg"], trials=3, seeds=2, search_space=space, references=True, clients=4, participation=0.5, **TINY
    )
    assert list(tuning.tuned) == ["fedavg", "pooled:participation=0.5", "local"]
    assert [sum(row["method"] == name for row in tuning.trials) for name in tuning.tuned] == [3, 3, 3]
    judged = [tuned.judged_by for tuned in tuning.tuned.values()]
    assert judged == ["validation accuracy", "validation accuracy", "validation accuracy of personal models"]
    for tuned in tuning.tuned.values():
        values = [row["value"] for row in tuning.trials if row["method"] == tuned.config.method]
        assert tuned.value == max(values)
    assert [row["reference"] for row in tuning.comparison.rows()] == [False, True, True]
    assert set(tuning.comparison.benefit.labels) == {"federated", "pooled", "local", "constant"}


def test_trials_that_all_diverge_have_no_value(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    part = (1e30 * x).astype(np.float32), y
    federation = unskew.Federation.from_arrays([part] * 3, part, holdout=0.4)
    space = {"lr": [1e6, 1e5], "batch_size": 8, "local_steps": 1}
    options = {"objective": "loss", "lr": 1e6, "references": False, "search_space": space}
    found = unskew.tune(federation, methods=["fedavg"], trials=2, seeds=[5], out=tmp_path / "t", **{**TINY, **options})
    assert [row["value"] for row in found.trials] == [None, None]
    assert found.tuned["fedavg"].options["lr"] == 1e6
    assert "All trials of fedavg diverged, so its options are those of the first one." in found.notes()
    assert (
        json.loads((tmp_path / "t" / "tuning.json").read_text(), parse_constant=pytest.fail)["fedavg"]["value"] is None
    )


def test_where_no_trial_is_better_that_is_said():
    spaces = {"lr": 1e-9, "local_steps": 1, "batch_size": 8, "fedprox.mu": one_of(0.1, 0.2)}
    one = unskew.tune(digits(False), methods=["fedprox"], trials=2, seeds=1, search_space=spaces, **TINY).tuned[
        "fedprox"
    ]
    assert "all 2 trials have the same value" in one.importance
    assert one.value == one.configured


def test_a_trial_that_cannot_be_made_is_one_of_its_methods_trials():
    spaces = {"batch_size": one_of(8, 16), "fedprox.mu": 0.5, "optimizer": one_of("adam", "sgd"), "momentum": 0.5}
    found = unskew.tune(digits(False), methods=["fedprox"], trials=4, seeds=1, search_space=spaces, **TINY)
    states = [row["state"] for row in found.trials]
    assert states.count("failed") == [row["options"]["optimizer"] for row in found.trials].count("adam") > 0
    assert all("momentum requires optimizer=sgd" in row["reason"] for row in found.trials if row["state"] == "failed")
    assert found.tuned["fedprox"].options["optimizer"] == "sgd"
    assert found.tuned["fedprox"].config.method == "fedprox:mu=0.5"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"holdout": 0}, "no client has any"),
        ({"eval_clients": 0}, "eval_clients"),
        ({"methods": []}, "at least one"),
        ({"methods": ["fedavg", "FedAvg"]}, "only once"),
        ({"methods": [rule_class("fedavg")()]}, "must be strings"),
        ({"trials": 0}, "trials=0"),
        ({"seeds": "0..2"}, "used for tuning"),
        ({"method": "fedavg"}, "instead of method"),
        ({"parallel": 2}, "Set out"),
        ({"resume": True}, "Set out"),
        ({"methods": ["feddf"]}, "server"),
    ],
)
def test_what_cannot_be_tuned_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        unskew.tune(**{"data": "digits", "clients": 2, "methods": ["fedavg"], **TINY, **options})


def test_without_optuna_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"unskew\[tune\]"):
        unskew.tune(methods=["fedavg"])


def test_the_command_leaves_configurations_that_run_and_compare_take(tmp_path, capsys):
    words = ("--data", "digits", "--clients", "3", "--model", "logistic", "--local-steps", "1", "--engine", "inline")
    command = ("tune", "fedavg", "fedprox", "--trials", "1", "--seeds", "1", "--rounds", "1", *words)
    out = tmp_path / "t"
    found = call(capsys, *command, "--space", "lr=0.5", "--out", out, "--json").json()
    assert found["tuned"]["fedavg"]["options"]["lr"] == 0.5
    assert json.loads((out / "tuning.json").read_text()).keys() == {"fedavg", "fedprox"}
    assert len(list(csv.DictReader((out / "trials.csv").open()))) == len(found["trials"]) == 2
    assert not (out / "trials").exists()
    files = [out / "tuned" / f"{name}.yaml" for name in ("fedavg", "fedprox")]
    method = load_yaml(files[1])["method"]
    call(capsys, "run", files[1], "--out", tmp_path / "run")
    folder = next((out / "compare").glob("fedprox*")) / "seed-1"
    assert metrics(tmp_path / "run") == metrics(folder)
    rows = call(capsys, "compare", *files, "--seeds", "0", "--out", tmp_path / "both", "--json").json()["rows"]
    assert [row["method"] for row in rows] == ["fedavg", method]
    again = call(capsys, *command, "--out", out, "--resume")
    assert "space" in again.err
    assert again.code == 2
    assert "already exists" in call(capsys, *command, "--out", out).err
    (tmp_path / "s.yaml").write_text("fedssyn.generator: somebodys_module:net\n")
    sent = call(capsys, "tune", "fedssyn", "--space", tmp_path / "s.yaml", *words, "--out", tmp_path / "sent")
    assert "names code to import" in sent.err
    twice = call(capsys, "compare", files[0], files[0], "--out", tmp_path / "twice")
    assert "must contain different methods" in twice.err


def test_methods_of_a_comparison_may_have_fields_of_their_own_but_not_other_data(tmp_path):
    options = {"methods": ["fedavg", "fedprox"], "seeds": 1, "data": "digits", "clients": 3, **TINY}
    found = unskew.compare(**options, overrides={"fedprox": {"lr": 1e-6}}, out=tmp_path / "c")
    rows = {row["method"]: row for row in found.rows()}
    assert rows["fedprox"]["loss"] > rows["fedavg"]["loss"]
    (part,) = group_runs(read_runs([tmp_path / "c"])[0])[0]
    files = [tmp_path / "c" / name / "seed-0" / "config.yaml" for name in options["methods"]]
    assert repeat_commands(part)[0].startswith(
        f"unskew compare {files[0]} {files[1]} --seeds 0 --no-references --target"
    )
    for target, shown in ((0.25, "0.25"), (19 / 36, repr(19 / 36))):  # six digits would be below or above the target
        assert repeat_commands(replace(part, target=target))[0].endswith(f" --target {shown}")
    for each, words in (
        ({"fedprox": {"clients": 4}}, "same data, but clients is 3"),
        ({"moon": {"lr": 1}}, "'moon'"),
        ({"fedprox": {"seed": 1}}, "seed"),
        ({"fedprox": 3}, "mapping"),
    ):
        with pytest.raises(ConfigError, match=words):
            unskew.compare(**options, overrides=each)


KILLED = (
    *("tune", "fedavg", "fedprox", "--trials", "7", "--seeds", "1", "--rounds", "4", "--data", "digits"),
    *(
        "--clients",
        "3",
        "--model",
        "logistic",
        "--local-steps",
        "1",
        "--engine",
        "inline",
        "--set",
        "checkpoint_every=1",
    ),
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert Process(folder, *KILLED, "--out", folder / "t").wait().code == 0
    return folder / "t"


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 150, 310])
def test_killed_and_gone_on_with_it_finds_the_same(tmp_path, straight, count):
    """In the middle of a trial, or of the comparison: every trial is there once, with the value that it would have had."""
    out = tmp_path / "t"
    ended = Process(tmp_path, *KILLED, "--out", out, hook="die", value=count).wait()
    assert ended.code == -signal.SIGKILL, ended.err
    again = Process(tmp_path, *KILLED, "--out", out, "--resume").wait()
    assert again.code == 0, again.err
    assert (out / "trials.csv").read_text() == (straight / "trials.csv").read_text()
    assert (out / "tuning.json").read_text() == (straight / "tuning.json").read_text()
    rows = [json.loads((folder / "compare" / "comparison.json").read_text()) for folder in (out, straight)]
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in rows[0]] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in rows[1]
    ]


@pytest.mark.slow
def test_processes_share_the_trials(tmp_path):
    """Three at once, one of them killed: as many trials as were asked for, each once."""
    out = tmp_path / "t"
    first = Process(tmp_path, *KILLED, "--out", out, "--parallel", "2")
    first.wait_until(lambda: (out / "study.db").exists())
    (tmp_path / "b").mkdir()
    second = Process(tmp_path / "b", *KILLED, "--out", out, "--resume", hook="die", value=40)
    assert second.wait().code == -signal.SIGKILL
    assert first.wait().code == 0
    rows = list(csv.DictReader((out / "trials.csv").open()))
    for name in ("fedavg", "fedprox"):
        mine = [row for row in rows if row["method"] == name]
        assert [int(row["trial"]) for row in mine] == list(range(7))
        assert {row["state"] for row in mine} <= {"finished", "ended early"}


@pytest.mark.slow
def test_a_language_model_is_tuned_by_its_loss(tmp_path):
    pytest.importorskip("transformers")
    from support.tiny import opt_folder

    found = unskew.tune(
        methods=["fedavg"], data="sentences", model=f"hf:{opt_folder(tmp_path / 'opt')}", partition="sorted:genre",
        trials=3, seeds=1, rounds=2, local_steps=2, clients=3, max_train_samples=60, engine="inline", optimizer="adamw",
    )  # fmt: skip
    one = found.tuned["fedavg"]
    assert one.judged_by == "validation loss"
    assert one.value == min(row["value"] for row in found.trials if row["value"] is not None)


def test_a_plan_prunes_no_method_with_personal_models():
    plan = TuningPlan(["fedavg", "fedrep"], {"data": "digits", "clients": 2, **TINY, "model": "mlp"}, {}, 2)
    plan.check()
    names = {name: type(study.study.pruner).__name__ for name, study in plan.studies().items()}
    assert names == {"fedavg": "MedianPruner", "fedrep": "NopPruner"}
    assert isinstance(plan.spaces("fedavg")["batch_size"], CategoricalSpace)


def test_trials_evaluate_few_test_samples_unless_something_reads_them_all():
    fed = digits(noise=False)
    order = fed.test[1].argsort(stable=True)
    fed = replace(fed, test=(fed.test[0][order], fed.test[1][order]))

    def samples(**settings):
        plan = TuningPlan(["fedavg"], {"data": "digits", **TINY, **settings}, {}, 2, federation=fed)
        return plan.trial_data.test[1]

    assert len(samples()) == TEST_SAMPLES < len(order)
    assert samples().unique().tolist() == list(range(10))
    assert len(samples(metrics=["auroc"])) == len(samples(objective="f1")) == len(order)
    assert len(samples(attack="backdoor:share=0.4")) == len(order)


@pytest.mark.parametrize(("key", "value"), [("fedprox.mu", "1+mine.Rule"), ("fedssyn.generator", "mine:net")])
def test_a_database_of_somebody_else_names_no_code(key, value):
    """Its values must lie in the spaces that were asked for."""
    spaces = {"fedprox.mu": log_range(0.1, 1.0), "fedssyn.generator": one_of("vae", "gan")}
    study = Study("fedprox", spaces, make_storage(None), None, 1, 0, True, None, {})
    good = {"fedprox.mu": 0.5, "fedssyn.generator": "gan"}

    class Stored:
        params = good
        user_attrs: ClassVar = {}

    assert study.params_of(Stored) == good
    Stored.params = {**good, key: value}
    with pytest.raises(ConfigError, match=f"study.db contains {key}='{value}'".replace("+", r"\+")):
        study.params_of(Stored)


def test_a_full_disk_is_a_sentence(tmp_path):
    """SQLite says of its own accord that its file may not grow."""
    import sqlalchemy

    with sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'study.db'}").connect() as connection:
        connection.execute(sqlalchemy.text("PRAGMA max_page_count=2"))
        connection.execute(sqlalchemy.text("CREATE TABLE first (x TEXT)"))

        @database()
        def grow():
            connection.execute(sqlalchemy.text("CREATE TABLE second (x TEXT)"))

        with pytest.raises(CheckpointError, match=r"study\.db, could not be used: database or disk is full"):
            grow()


def test_a_tuning_whose_database_fails_is_a_sentence(tmp_path, monkeypatch):
    import optuna

    def full(*_, **__):
        raise optuna.exceptions.StorageInternalError("the disk is full")

    monkeypatch.setattr(optuna.study.Study, "ask", full)
    with pytest.raises(CheckpointError, match="continue with --resume"):
        unskew.tune(methods=["fedavg"], trials=1, seeds=1, out=tmp_path / "t", data="digits", clients=2, **TINY)


TUNE = {"methods": ["fedavg"], "trials": 1, "seeds": 1, "data": "digits", "clients": 2, "max_train_samples": 60, **TINY}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "a?timeout=1&b%20{SCHEMA_VERSION}#c"
    unskew.tune(out=folder, **TUNE)
    return folder


def test_the_database_is_in_the_folder_whatever_its_name(tuned):
    assert (tuned / "study.db").is_file()
    assert [path.name for path in tuned.parent.iterdir()] == [tuned.name]


def test_a_tuning_is_resumed_only_with_the_same_data(tuned, tmp_path):
    folder = shutil.copytree(tuned, tmp_path / "sent")
    plan = json.loads((folder / "plan.json").read_text())
    own = plan.pop("data_checksum")
    (folder / "plan.json").write_text(json.dumps(plan | {"data_checksum": "00000000"}))
    with pytest.raises(ConfigError, match=rf"The data differ .*\(content {own} instead of 00000000\)"):
        unskew.tune(out=folder, resume=True, **TUNE)
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match="contains a tuning with data_checksum=None"):
        unskew.tune(out=folder, resume=True, **TUNE)


def test_a_journal_that_names_another_file_does_not_remove_it(tuned, tmp_path):
    """SQLite applies the journal of an interrupted program, and removes the file that the end of the journal names."""
    folder, mine = shutil.copytree(tuned, tmp_path / "sent"), tmp_path / "mine.txt"
    mine.write_text("mine")
    data, magic = (folder / "study.db").read_bytes(), bytes.fromhex("d9d505f920a163d7")
    name = bytes(mine)
    header = magic + struct.pack(">IIIII", 0, 7, len(data) // 4096, 512, 4096)
    end = struct.pack(">I", (1 << 30) // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    journal = folder / "study.db-journal"
    journal.write_bytes(header.ljust(512, b"\0") + end)
    shutil.copytree(folder, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"study\.db-journal names another file"):
        unskew.tune(out=folder, resume=True, **TUNE)
    assert mine.exists()
    os.replace(tmp_path / "other" / "study.db", tmp_path / "other" / "mlflow.db")
    os.replace(tmp_path / "other" / "study.db-journal", tmp_path / "other" / "mlflow.db-journal")
    with pytest.raises(ConfigError, match=r"mlflow\.db-journal names another file"):
        is_complete_database(tmp_path / "other" / "mlflow.db")
    assert mine.exists()
    with sqlite3.connect(tmp_path / "other" / "mlflow.db") as connection:
        connection.execute("SELECT * FROM sqlite_master").fetchall()
    if mine.exists():
        pytest.skip(f"SQLite {sqlite3.sqlite_version} does not remove it, so the test shows nothing")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial_values SET value='x'",
        "UPDATE trial_intermediate_values SET intermediate_value='x'",
        "UPDATE trial_params SET distribution_json='{'",
        "UPDATE trial_params SET distribution_json='[1]'",
        "UPDATE trial_params SET param_value='x'",
        "UPDATE trial_user_attributes SET value_json='{'",
        "UPDATE trial_user_attributes SET value_json='[1]'",
        "INSERT INTO trial_user_attributes VALUES (99, 1, 'privacy', '{\"epsilon\": \"x\"}')",
        "INSERT INTO trial_user_attributes VALUES (99, 1, 'reason', '1')",
        "UPDATE trials SET state='x'",
        "UPDATE trials SET datetime_start='x'",
    ],
)
def test_a_database_with_other_values_than_unskews_is_a_sentence(tuned, tmp_path, capsys, statement):
    folder = shutil.copytree(tuned, tmp_path / "sent")
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(UnskewError, match=r"study\.db"):
        unskew.tune(out=folder, resume=True, **TUNE)
