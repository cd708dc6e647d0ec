"""Every command, every flag, and what lies in a run folder afterwards."""

import csv
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import typer
import yaml
from pydantic import BaseModel, Field
from support.running import TINY, Stop, StopAfter, assert_same_run, call, metrics, summary

import unskew
from unskew.cli.app import app
from unskew.cli.common import config_values
from unskew.cli.flags import field_flags
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.config_fields import DATA
from unskew.methods.registry import COMPOSITIONS

pytestmark = pytest.mark.usefixtures("undrawn")

QUICK = (*TINY, "--rounds", "2")
UNTIMED = dict.fromkeys(("uplink", "downlink", "latency", "compute", "deadline", "trace"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Nothing may be written outside of the folder one works in."""
    monkeypatch.chdir(tmp_path)


# ---- the program ------------------------------------------------------------------------------------------------------


def test_version_flag_prints_the_version(capsys):
    outcome = call(capsys, "--version")
    assert (outcome.code, outcome.out) == (0, f"unskew {unskew.__version__}\n")


def test_import_is_light():
    """``import unskew`` and the first look at the command line must not wait for PyTorch."""
    heavy = {"torch", "sklearn", "matplotlib", "rich.console"}
    for module, unwanted in (("unskew", {*heavy, "numpy", "yaml", "pydantic"}), ("unskew.cli.app", heavy)):
        code = f"import sys, {module}; print({unwanted} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"


def test_public_names_exist():
    for name in unskew.__all__:
        assert getattr(unskew, name) is not None
    assert set(unskew.__all__) <= set(dir(unskew))


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "run",
            "data data-path partition clients method model rounds participation local-steps local-epochs batch-size lr "
            "momentum weight-decay seed engine device eval-every target set out json",
        ),
        ("compare", "seeds config data partition clients model rounds lr target set out resume json"),
        ("resume", "rounds engine device set json"),
        ("methods", "json"),
        ("partition", "partition clients seed data-path label out json"),
    ],
)
def test_help_names_every_flag(capsys, command, flags):
    outcome = call(capsys, command, "--help")
    assert outcome.code == 0
    assert set(flags.split()) <= set(re.findall(r"--([a-z-]+)", outcome.out))


def test_no_help_shows_an_undefined_default(capsys):
    for name in typer.main.get_command(app).commands:
        outcome = call(capsys, name, "--help")
        assert (outcome.code, "Pydantic" in outcome.out) == (0, False), name


def test_help_shows_the_value_of_a_default_factory():
    class Fields(BaseModel):
        levels: Annotated[tuple[str, ...], DATA] = Field(default_factory=lambda: ("a", "b"))
        limits: Annotated[dict[str, int], DATA] = Field(default_factory=dict)

    shown = {name: flag.help for name, flag in field_flags(Fields)}
    assert shown == {"levels": " [default: ('a', 'b')]", "limits": ""}


def test_fields_of_tables_and_of_the_loss_have_flags_and_the_help_has_sections(capsys):
    said = "--categories a,b --dates d --missing mean --task regression --loss huber:2 --class-weights 1,5"
    said += " --client-weighting uniform"
    words = f"--data table:t.csv --label y {said} --metrics auroc,f1 --early-stopping 3 --optimizer adam --lr-schedule cosine"
    with typer.main.get_command(app).commands["run"].make_context("run", words.split()) as context:
        config = experiment(config_values(None, context))
    assert (config.categories, config.dates, config.missing, config.task) == (("a", "b"), ("d",), "mean", "regression")
    assert (config.loss, config.class_weights, config.client_weighting) == ("huber:2", (1.0, 5.0), "uniform")
    assert (config.metrics, config.early_stopping) == (("auroc", "f1"), 3)
    assert (config.optimizer, config.lr, config.lr_schedule) == ("adam", 0.001, "cosine")
    heads = [line for line in call(capsys, "run", "--help").out.splitlines() if line[:1].strip() and line.endswith(":")]
    assert heads == ["Arguments:", "Options:", "Data:", "Training:", "Machine:", "Evaluation:"]


def test_installed_program_ignores_modules_in_the_working_folder(tmp_path):
    """As a user starts it: a mistake is a sentence on standard error and exit code 2; no file in the way takes part."""
    for name in ("datasets", "queue", "logging", "typer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file in the working folder')")
    program = Path(sys.executable).with_name("unskew")
    for command, said in (
        ([program, "rum"], "No such command 'rum'"),  # which is known without PyTorch
        ([sys.executable, "-m", "unskew", "run", "--method", "fedprix"], "There is no method 'fedprix'. Did you mean"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert said in done.stderr
        assert (done.returncode, done.stdout) == (2, "")
    assert len(list(tmp_path.iterdir())) == 4


# ---- run --------------------------------------------------------------------------------------------------------------


def test_every_flag_reaches_the_configuration(capsys):
    flags = {
        "--data": "digits",
        "--partition": "iid",
        "--clients": 3,
        "--method": "fedprox:mu=0.1+scaffold",
        "--model": "mlp",
        "--rounds": 2,
        "--participation": 0.5,
        "--local-steps": 2,
        "--batch-size": 16,
        "--lr": 0.05,
        "--momentum": 0.5,
        "--weight-decay": 0.001,
        "--seed": 7,
        "--engine": "inline",
        "--device": "cpu",
        "--eval-every": 2,
        "--delay": "fixed:1",
        "--target": 0.05,
    }
    sets = [
        "--set",
        "network.drop=0.25",
        "--set",
        "model_options.hidden=[8]",
        "--set",
        "holdout=0.2",
        "--set",
        "clip_grad_norm=1",
    ]
    outcome = call(capsys, "run", *(str(x) for pair in flags.items() for x in pair), *sets, "--out", "a/b", "--json")
    assert outcome.code == 0, outcome.err
    config = yaml.safe_load(Path("a/b/config.yaml").read_text())
    fields = {flag: value for flag, value in flags.items() if flag != "--delay"}
    assert {flag: config[flag[2:].replace("-", "_")] for flag in fields} == fields
    assert config["network"] == {"drop": 0.25, "delay": "fixed:1", "delay_per": "dispatch", **UNTIMED}
    assert config["model_options"] == {"hidden": [8]}
    assert (config["holdout"], config["clip_grad_norm"], config["local_epochs"]) == (0.2, 1.0, None)
    assert list(config) == list(Experiment.model_fields), "complete, and in order"
    printed = outcome.json()
    assert printed.pop("folder") == "a/b"
    assert printed == summary("a/b", without=())
    assert printed["rounds_to_target"] == next(
        (row["round"] for row in metrics("a/b") if (row["accuracy"] or 0) >= 0.05), None
    )
    assert [row["accuracy"] is None for row in metrics("a/b")] == [True, False], "--eval-every 2"


def test_local_epochs_flag_is_written_to_the_configuration(capsys):
    assert (
        call(
            capsys, "run", "--clients", 2, "--model", "logistic", "--rounds", 1, "--local-epochs", 3, "--out", "a"
        ).code
        == 0
    )
    config = yaml.safe_load(Path("a/config.yaml").read_text())
    assert (config["local_epochs"], config["local_steps"]) == (3, None)


@pytest.mark.draws
def test_run_writes_the_files_of_a_run_folder(capsys):
    outcome = call(capsys, "run", *QUICK, "--out", "a")
    assert outcome.code == 0
    assert "Results are in a" in outcome.out
    files = {str(path.relative_to("a")) for path in Path("a").rglob("*") if path.is_file()}
    assert {p for p in files if "/" not in p} == {
        "config.yaml", "engine.json", "inputs.json", "about.json", "metrics.jsonl", "summary.json", "clients.jsonl",
        "model.safetensors", "convergence.png",
    }  # fmt: skip
    assert {p for p in files if "/" in p} == {
        "checkpoints/0000002/manifest.json",
        "checkpoints/0000002/server.safetensors",
    }
    needed = "method data partition seed rounds accuracy best_accuracy client_accuracy_mean client_accuracy_worst "
    needed += "client_accuracy_worst_decile loss bytes_up bytes_down seconds parameters partition_hash updates_skipped"
    found = summary("a", without=())
    assert set(needed.split()) <= set(found)
    assert all(found[name] is not None for name in needed.split())
    for number, row in enumerate(metrics("a", without=()), start=1):
        assert {"round", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "train_loss"} <= set(row)
        assert row["round"] == number
    # 4 clients, 650 parameters of 4 bytes, each way in each of 2 rounds; nothing else crosses.
    assert found["bytes_up"] == found["bytes_down"] == 2 * 4 * 650 * 4
    assert found["parameters"] == 650
    assert Path("a/convergence.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["scaffold+fedadam:eta=0.1", "fedprox:mu=0.5"])
def test_its_configuration_runs_again_bit_for_bit(capsys, method):
    args = ("--method", method, "--set", "network.drop=0.3", "--participation", "0.6", "--seed", 3)
    assert call(capsys, "run", *QUICK, *args, "--out", "a").code == 0
    assert call(capsys, "run", "a/config.yaml", "--out", "b").code == 0
    assert Path("a/config.yaml").read_text() == Path("b/config.yaml").read_text()
    assert_same_run("a", "b")
    assert call(capsys, "run", "a/config.yaml", "--seed", 4, "--out", "c").code == 0
    assert Path("a/model.safetensors").read_bytes() != Path("c/model.safetensors").read_bytes()


def test_flags_override_the_file_and_set_overrides_flags(capsys):
    Path("my.yaml").write_text(
        "clients: 5\nmodel: logistic\nrounds: 3\nlocal_epochs: 2\nlr: 0.5\nnetwork: {drop: 0.1}\n"
    )
    args = ("--rounds", 1, "--local-steps", 1, "--lr", 0.3, "--set", "lr=0.2", "--engine", "inline")
    assert call(capsys, "run", "my.yaml", *args, "--out", "a").code == 0
    config = yaml.safe_load(Path("a/config.yaml").read_text())
    found = {name: config[name] for name in ("clients", "rounds", "local_steps", "local_epochs", "lr", "network")}
    assert found == {
        "clients": 5, "rounds": 1, "local_steps": 1, "local_epochs": None, "lr": 0.2,
        "network": {"drop": 0.1, "delay": "none", "delay_per": "dispatch", **UNTIMED},
    }  # fmt: skip
    assert call(capsys, "run", "my.yaml", "--rounds", 1, "--set", "local_steps=2", "--out", "b").code == 0
    assert yaml.safe_load(Path("b/config.yaml").read_text())["local_epochs"] is None


def test_an_empty_configuration_is_the_default(capsys):
    Path("empty.yaml").write_text("# nothing\n")
    assert call(capsys, "run", "empty.yaml", *QUICK, "--out", "a").code == 0


def test_folders_are_named_and_never_overwritten(capsys):
    first = call(capsys, "run", *QUICK, "--rounds", 1, "--json").json()
    second = call(capsys, "run", *QUICK, "--rounds", 1, "--json").json()
    third = call(
        capsys, "run", *QUICK, "--rounds", 1, "--method", "fedprox:mu=0.1+scaffold", "--seed", 2, "--json"
    ).json()
    assert first["folder"] == "runs/digits-fedavg-seed0"
    assert second["folder"] == "runs/digits-fedavg-seed0-2"
    assert third["folder"] == "runs/digits-fedprox-mu=0.1+scaffold-seed2"
    before = Path("runs/digits-fedavg-seed0/summary.json").read_bytes()
    refused = call(capsys, "run", *QUICK, "--out", first["folder"])
    assert refused.code == 2
    assert "already exists" in refused.err
    assert Path("runs/digits-fedavg-seed0/summary.json").read_bytes() == before


def test_json_is_all_that_standard_output_gets(capsys):
    for args in (
        ("run", *QUICK, "--out", "a"),
        ("resume", "a", "--rounds", 3),
        ("compare", "fedavg", "fedprox", "--seeds", 1, *QUICK),
        ("methods",),
        ("partition", "digits"),
    ):
        outcome = call(capsys, *args, "--json")
        assert outcome.code == 0, outcome.err
        assert outcome.json()


def test_a_model_and_a_method_of_ones_own_from_the_folder_one_works_in(capsys, monkeypatch):
    Path("mine_for_test.py").write_text(
        "import torch\n"
        "from dataclasses import dataclass\n"
        "from unskew import ServerRule\n"
        "def model(shape, classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], classes))\n"
        "@dataclass(frozen=True)\n"
        "class Half(ServerRule):\n"
        "    name, summary, paper = 'half', 'half a step', 'none'\n"
        "    def step(self, state, updates):\n"
        "        return {'v': state['v'] + 0.5 * updates.aggregate.delta}\n"
    )
    args = ("--model", "mine_for_test:model", "--method", "mine_for_test.Half", "--rounds", 3)
    assert call(capsys, "run", *QUICK, *args, "--out", "a").code == 0
    assert summary("a")["parameters"] == 650
    Path("a/summary.json").unlink()
    assert call(capsys, "resume", "a", "--trust-code").code == 0


# ---- methods, partition -----------------------------------------------------------------------------------------------


def test_methods_lists_names_options_and_compositions(capsys):
    rows = call(capsys, "methods", "--json").json()
    names = [row["name"] for row in rows]
    assert {"fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedprox", "scaffold"} <= set(names)
    for row in rows:
        extra = {"expression"} if row["name"] in COMPOSITIONS else set()
        stated = {"name", "slots", "needs", "summary", "tasks", "delays", "options", "meanings", "paper"}
        assert set(row) == stated | extra
        assert row["slots"]
        assert set(row["slots"]) <= {"data", "client", "sync", "aggregate", "server"}
        assert row["summary"]
        assert row["paper"]
    table = call(capsys, "methods").out
    for name in names:
        assert name in table


def test_one_method_is_described_with_its_conflicts(capsys):
    row = call(capsys, "methods", "scaffold", "--json").json()
    assert list(row["meanings"]) == list(row["options"]) == ["option", "variate", "eta_g"]
    assert (
        row["conflicts"]["fedrep"]
        == "scaffold uses the whole model at the server, but fedrep shares only a part of it."
    )
    assert "fedprox" not in row["conflicts"]
    printed = " ".join(call(capsys, "methods", "scaffold").out.split())
    assert "Server learning rate." in printed
    assert "but the other method shares only a part of it." in printed
    assert call(capsys, "methods", "scafold").code == 2


@pytest.mark.draws
def test_partition_draws_and_prints_the_counts(capsys):
    outcome = call(capsys, "partition", "digits", "--partition", "dirichlet:0.3", "--clients", 6, "--out", "p/who.png")
    assert outcome.code == 0
    assert Path("p/who.png").read_bytes().startswith(b"\x89PNG")
    report = call(capsys, "partition", "digits", "--partition", "dirichlet:0.3", "--clients", 6, "--json").json()
    assert report["hash"] in outcome.out
    counts = np.array(report["counts"])
    assert counts.shape == (6, 10)
    assert counts.sum() == 1437
    assert (report["smallest"], report["largest"]) == (counts.sum(1).min(), counts.sum(1).max())
    for total in counts.sum(1):
        assert str(total) in outcome.out
    assert not Path("clients.png").exists()


def test_partition_writes_no_picture_unless_it_is_named(capsys):
    outcome = call(capsys, "partition")
    assert (outcome.code, "--out clients.png plots it" in outcome.out) == (0, True)
    assert not Path("clients.png").exists()


def test_many_clients_and_classes_are_shortened_with_a_hint_and_classes_without_clients_reported(capsys):
    draws = np.random.default_rng(0)
    rows = [f"{draws.normal():.3f},c{i % 25:02},u{i % 25}" for i in range(400)]
    Path("many.csv").write_text("\n".join(["a,kind,user", *rows]))
    table = ("partition", "table:many.csv", "--label", "kind", "--partition", "natural:user")
    shown = call(capsys, *table)
    assert "20 of 25 clients are shown, --clients-shown 25 shows all" in " ".join(shown.out.split())
    assert "20 of 25 classes are shown" in shown.out
    assert "u9" not in shown.out
    assert "clients are shown" not in call(capsys, *table, "--clients-shown", 25).out
    assert "that no client has" not in shown.err
    few = call(capsys, *table, "--clients", 3)
    assert "the test set has 22 classes that no client has: c" in few.err


def test_the_partition_of_numbers_shows_their_means_and_the_variance_between_clients(capsys):
    draws = np.random.default_rng(0)
    cost = {"a": 10, "b": 30}
    rows = [
        ("ab"[i % 3 == 0], round(draws.normal(), 3), round(cost["ab"[i % 3 == 0]] + draws.normal(), 3))
        for i in range(90)
    ]
    Path("cost.csv").write_text("\n".join(["site,age,cost", *(",".join(map(str, row)) for row in rows)]))
    args = ("partition", "table:cost.csv", "--label", "cost", "--task", "regression", "--partition", "natural:site")
    found = call(capsys, *args, "--json").json()
    fed = unskew.load_federation("table:cost.csv", label="cost", task="regression", partition="natural:site", holdout=0)
    values = [fed.objective.outputs(client.y.double()).numpy()[:, 0] for client in fed.clients]
    everything = np.concatenate(values)
    within = sum(((v - v.mean()) ** 2).sum() for v in values)
    expected = 1 - within / ((everything - everything.mean()) ** 2).sum()
    assert found["variance_between_clients"]["cost"] == pytest.approx(expected)
    shown = call(capsys, *args).out
    assert f"{expected:.0%} of the variance of cost is between clients" in shown
    assert f"{values[0].mean():.4g} ± " in shown
    assert "total" not in shown.replace("total variation", "")


def test_the_partition_of_a_language_model_counts_rows(capsys):
    rows = [f'{{"role": "r{i % 3}", "text": "some words {i}"}}' for i in range(30)]
    Path("roles.jsonl").write_text("\n".join(rows))
    shown = call(capsys, "partition", "text:roles.jsonl", "--tokenizer", "bytes", "--partition", "natural:role")
    assert shown.code == 0, shown.err
    header = next(line for line in shown.out.splitlines() if "client" in line and "name" in line)
    assert "r1" not in header
    assert "total" in header


def test_numeric_labels_of_many_values_and_several_problems_of_a_table_are_reported_at_once(capsys):
    rows = [
        f"{i},{i % 20},{i % 9 / 2},{'' if i % 5 else 3},{'' if i % 4 else 1},2024-01-{i % 28 + 1:02}" for i in range(60)
    ]
    Path("t.csv").write_text("\n".join(["id,grade,half,dose,weight,day", *rows]))
    args = ("partition", "table:t.csv", "--partition", "iid", "--clients", 2, "--exclude", "id,dose,weight")
    assert (
        "'grade' has 20 different numbers, each a class; to predict the number, use --task regression"
        in call(capsys, *args, "--label", "grade").err
    )
    assert "use --task regression" in call(capsys, *args, "--label", "half").err
    outcome = call(capsys, *args[:-2], "--label", "grade", "--set", "max_train_samples=30")
    told = " ".join(outcome.err.split())
    for words in (
        "'id' looks like an identifier",
        "dose (48), weight (45)",
        "'day' contains dates",
        "unskew init proposes",
    ):
        assert words in told
    Path("texts.csv").write_text("review,stars\ngood,a\nbad,b\n")
    assert "for texts, set text.columns" in call(capsys, "partition", "table:texts.csv", "--label", "stars").err


@pytest.mark.parametrize("holdout", [0, 0.3])
def test_every_run_records_the_hash_of_its_partition(capsys, holdout):
    args = ("--partition", "dirichlet:0.3", "--clients", 6, "--seed", 5)
    shown = call(capsys, "partition", "digits", *args, "--json").json()["hash"]
    ran = call(capsys, "run", *QUICK, *args, "--set", f"holdout={holdout}", "--out", "a", "--json").json()
    assert ran["partition_hash"] == shown
    assert call(capsys, "partition", "digits", *args[:-1], 6, "--json").json()["hash"] != shown


def test_natural_partition_has_as_many_clients_as_there_are(capsys):
    draws = np.random.default_rng(0)
    with Path("train.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["a", "b", "label", "user"])
        for i in range(90):
            table.writerow([*draws.normal(size=2).round(3), i % 3, f"u{i % 5}"])
    args = ("--partition", "natural:user")
    report = call(capsys, "partition", "table:train.csv", "--label", "label", *args, "--json")
    assert report.code == 0, report.err
    assert report.json()["clients"] == 5
    args = (*args, "--data", "table:train.csv", "--set", "label=label", "--model", "logistic", "--rounds", 1)
    ran = call(capsys, "run", *args, "--out", "a", "--json").json()
    assert (ran["clients"], ran["partition_hash"]) == (5, report.json()["hash"])


def test_the_columns_of_a_table_are_shown_once_and_never_in_json(capsys):
    rows = [f"{i},{i % 9},{i % 7}.5,{i % 2}" for i in range(40)]
    Path("my.csv").write_text("\n".join(["number,age,height,label", *rows]))
    table = ("--partition", "iid", "--clients", 2, "--exclude", "number")
    told = call(capsys, "partition", "table:my.csv", "--label", "label", *table, "--features", "age").out
    assert [word in told for word in ("left out: excluded", "left out: not among the features")] == [True, True]
    options = (*table, "--data", "table:my.csv", "--set", "label=label", "--model", "logistic", "--rounds", 1)
    ran = call(capsys, "run", *options, "--engine", "inline", "--out", "a")
    assert ran.out.count("role") == ran.out.count("left out: excluded") == 1, ran
    assert ran.out.index("left out") < ran.out.index("test accuracy, last round")
    compared = call(capsys, "compare", "fedavg", *options, "--engine", "inline", "--seeds", 1, "--out", "c", "--json")
    assert (len(compared.json()["rows"]), "left out" in compared.out) == (1, False)
    quiet = call(capsys, "run", *options, "--engine", "inline", "--out", "b", "--json")
    assert (quiet.json()["parameters"], "left out" in quiet.out) == (6, False)
    assert "'number' looks like an identifier" in call(capsys, "run", *options, "--set", "exclude=[]").err


# ---- compare ----------------------------------------------------------------------------------------------------------


def test_compare_shows_personal_models_in_a_second_table(capsys):
    outcome = call(capsys, "compare", "fedavg", "fedrep+ft", "--seeds", 1, *QUICK, "--model", "mlp", "--out", "c")
    assert outcome.code == 0, outcome.err
    _, second = outcome.out.split("on the clients' own data")
    assert second.count("global") == 2
    assert second.count("personal") == 1
    rows = json.loads(Path("c/comparison.json").read_text())
    assert [row["personal_accuracy_mean"] is None for row in rows] == [True, False]


@pytest.mark.draws
def test_compare_prints_a_table_and_writes_its_files(capsys):
    outcome = call(capsys, "compare", "fedavg", "fedprox:mu=0", "scaffold", "--seeds", 2, *QUICK, "--out", "c")
    assert outcome.code == 0, outcome.err
    for name in ("fedavg", "fedprox:mu=0", "scaffold", "MB up", "worst client"):
        assert name in outcome.out
    for name in ("convergence.png", "clients.png"):
        assert Path("c", name).read_bytes().startswith(b"\x89PNG")
    rows = json.loads(Path("c/comparison.json").read_text())
    assert [row["method"] for row in rows] == ["fedavg", "fedprox:mu=0", "scaffold"]
    note, _ = outcome.out.split("Test accuracy")
    assert "the methods weight them differently" in " ".join(note.split())
    # Without its term FedProx is FedAvg: same data, cohorts, batches and initial model, for each seed.
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    for seed in (0, 1):
        folders = [Path("c", name, f"seed-{seed}") for name in ("fedavg", "fedprox-mu=0", "scaffold")]
        one, two, _ = ((folder / "model.safetensors").read_bytes() for folder in folders)
        assert one == two
        assert len({summary(folder)["partition_hash"] for folder in folders}) == 1
        assert summary(folders[0])["seed"] == seed
    assert summary("c/fedavg/seed-0")["partition_hash"] != summary("c/fedavg/seed-1")["partition_hash"]
    accuracies = [summary(f"c/scaffold/seed-{seed}")["accuracy"] for seed in (0, 1)]
    assert rows[2]["accuracy"] == pytest.approx(np.mean(accuracies))
    assert rows[2]["accuracy_std"] == pytest.approx(np.std(accuracies, ddof=1))
    assert rows[2]["bytes_up"] == 2 * rows[0]["bytes_up"], "SCAFFOLD sends two vectors"
    best = max(np.mean([summary(f"c/{m}/seed-{s}")["best_accuracy"] for s in (0, 1)]) for m in ("fedavg", "scaffold"))
    assert rows[0]["target"] == pytest.approx(0.9 * best, abs=5.1e-4)


def test_compare_counts_rounds_to_the_target(capsys):
    args = ("compare", "fedavg", "--seeds", 2, *QUICK, "--lr", 0.5, "--rounds", 6, "--out", "c", "--json")
    (row,) = call(capsys, *args, "--target", 0.25).json()["rows"]
    histories = [metrics(f"c/fedavg/seed-{seed}") for seed in (0, 1)]
    firsts = [next((r["round"] for r in h if r["accuracy"] >= 0.25), None) for h in histories]
    known = [first for first in firsts if first is not None]
    assert row["target"] == 0.25
    assert row["seeds_reaching_target"] == len(known)
    assert row["rounds_to_target"] == (np.mean(known) if len(known) == 2 else None)
    (row,) = call(capsys, *args, "--target", 1, "--resume").json()["rows"]
    assert (row["rounds_to_target"], row["seeds_reaching_target"]) == (None, 0)


def test_compare_resumes_unfinished_runs(capsys):
    args = ("compare", "fedavg", "scaffold", "--seeds", 1, *QUICK, "--rounds", 3, "--set", "checkpoint_every=1")
    assert call(capsys, *args, "--out", "whole").code == 0
    assert call(capsys, *args, "--out", "c").code == 0
    refused = call(capsys, *args, "--out", "c")
    assert refused.code == 2
    assert "--resume" in refused.err
    done, half = Path("c/fedavg/seed-0"), Path("c/scaffold/seed-0")
    untouched = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    # As if killed after round 2, before the figures of the comparison were written.
    (half / "summary.json").unlink()
    (half / "model.safetensors").unlink()
    for path in (half / "checkpoints" / "0000003").iterdir():
        path.unlink()
    (half / "checkpoints" / "0000003").rmdir()
    Path("c/comparison.json").unlink()
    outcome = call(capsys, *args, "--out", "c", "--resume", "--json")
    assert outcome.code == 0, outcome.err
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == untouched
    for method in ("fedavg", "scaffold"):
        assert_same_run(f"c/{method}/seed-0", f"whole/{method}/seed-0")
    assert Path("c/comparison.json").exists()
    # More rounds, another seed and another method are added to what is there; another learning rate is another run.
    more = call(capsys, *args, "--rounds", 4, "--seeds", 2, "--out", "c", "--resume", "--json")
    assert more.code == 0, more.err
    assert summary("c/fedavg/seed-0")["rounds"] == 4
    assert Path("c/scaffold/seed-1/summary.json").exists()
    other = call(capsys, *args, "--lr", 0.3, "--out", "c", "--resume")
    assert other.code == 2
    assert "lr=0.1" in other.err
    # Another method, or another seed, has the same settings as the runs in the folder.
    settings = (*QUICK, "--batch-size", 5, "--resume", "--out", "c")
    for name, seeds in (("fedprox", "0"), ("fedavg", "5,6")):
        other = call(capsys, "compare", name, "--seeds", seeds, *settings)
        words = " ".join(other.err.split())
        assert other.code == 2
        assert "rounds=4 instead of 2" in words
        assert "batch_size=" in words
        assert "lr=" not in words
    assert call(capsys, *args, "--resume").code == 2, "--resume without --out"


def test_compare_takes_a_file_made_for_one_run(capsys):
    Path("my.yaml").write_text("clients: 3\nmodel: logistic\nrounds: 1\nmethod: scaffold\nseed: 5\ntarget: 0.01\n")
    outcome = call(capsys, "compare", "fedavg", "--seeds", 1, "--config", "my.yaml", "--json")
    assert outcome.code == 0, outcome.err
    (row,) = outcome.json()["rows"]
    assert (row["method"], row["target"]) == ("fedavg", 0.01)
    assert outcome.json()["folder"] == "runs/compare-digits"
    assert summary("runs/compare-digits/fedavg/seed-0")["clients"] == 3


@pytest.mark.parametrize("leave_out", [(), ("--leave-one-out", "--unseen", "0")])
def test_compare_takes_options_of_each_of_several_models(capsys, leave_out):
    Path("my.yaml").write_text("model: [mlp, mlp]\nmodel_options: [{hidden: [8]}, {hidden: [12, 8]}]\n")
    each = ("--model", "mlp,mlp", "--set", "model_options=[{hidden: [8]}, {hidden: [12, 8]}]")
    for number, words in enumerate((("my.yaml",), each)):
        options = ("--clients", 4, "--rounds", 1, "--local-steps", 1, "--engine", "inline", "--no-references")
        outcome = call(capsys, "compare", "fedproto", *words, "--seeds", 1, *options, *leave_out, "--out", f"c{number}")
        assert outcome.code == 0, outcome.err
        config = yaml.safe_load(Path(f"c{number}/fedproto/seed-0/config.yaml").read_text())
        assert config["model_options"] == [{"hidden": [8]}, {"hidden": [12, 8]}]


# ---- trackers ---------------------------------------------------------------------------------------------------------


def test_tensorboard_events_go_on_after_resume(capsys):
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    assert call(capsys, "run", *QUICK, "--set", "trackers=tensorboard", "--out", "a").code == 0
    outcome = call(capsys, "resume", "a", "--rounds", 3, "--json")
    assert outcome.json()["rounds"] == 3
    events = reader.EventAccumulator("a/tensorboard").Reload()
    for name in ("accuracy", "loss", "bytes_up", "train_loss"):
        points = [(point.step, pytest.approx(point.value, rel=1e-6)) for point in events.Scalars(name)]
        assert points == [(row["round"], row[name]) for row in metrics("a")]


def test_tensorboard_of_a_run_that_died(capsys):
    """Rounds that are done again are there once, those before the checkpoint are not missing."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    options = {"data": "digits", "clients": 4, "model": "logistic", "local_steps": 1, "engine": "inline", "rounds": 6}
    with pytest.raises(Stop):
        unskew.run(**options, trackers="tensorboard", checkpoint_every=2, out="a", callbacks=[StopAfter(4)])
    assert len(metrics("a")) == 4
    unskew.resume("a")
    points = reader.EventAccumulator("a/tensorboard").Reload().Scalars("accuracy")
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_mlflow_runs_go_on_and_files_start_no_tracker(capsys):
    client_class = importlib.import_module("mlflow").MlflowClient
    assert call(capsys, "run", *QUICK, "--set", "trackers=[mlflow]", "--out", "runs/a").code == 0
    assert "trackers" in call(capsys, "resume", "runs/a", "--rounds", 3).err  # a file starts none outside its folder
    outcome = call(capsys, "resume", "runs/a", "--rounds", 3, "--set", "trackers=[mlflow]", "--json")
    assert outcome.json()["rounds"] == 3
    client = client_class("sqlite:///runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("unskew").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "fedavg"
    assert run.data.metrics["final_accuracy"] == summary("runs/a")["accuracy"]
    for name in ("accuracy", "bytes_up"):
        points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        assert points == [(row["round"], row[name]) for row in metrics("runs/a")]
    assert {path.name for path in Path("runs").iterdir()} == {"a", "mlflow.db"}
    assert {path.name for path in Path().iterdir()} == {"runs"}


@pytest.mark.parametrize(("tracker", "module"), [("mlflow", "mlflow"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_tracker_that_is_not_installed(capsys, monkeypatch, tmp_path, tracker, module):
    monkeypatch.setitem(sys.modules, module, None)
    outcome = call(capsys, "run", *QUICK, "--set", f"trackers={tracker}", "--out", "a")
    assert outcome.code == 2
    assert f"pip install 'unskew[{tracker}]'" in outcome.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_warning_names_its_run_among_several(capsys, tmp_path):
    late = ["--delay", "fixed:5", "--rounds", 2, "--clients", 3, "--partition", "iid", "--local-steps", 1]
    several = call(capsys, "compare", "fedavg", "fedprox", *late, "--out", tmp_path / "many")
    text = " ".join((several.out + several.err).split())
    assert "fedavg, seed 0: The model did not change in 2 rounds" in text
    assert "fedprox, seed 0: The model did not change" in text
    single = call(capsys, "run", *late, "--out", tmp_path / "one")
    assert "fedavg: The model" not in single.out + single.err


# ---- one vocabulary ---------------------------------------------------------------------------------------------------


def test_seeds_are_a_list_and_a_number_is_still_how_many(capsys):
    args = ("compare", "fedavg", *QUICK, "--rounds", 1)
    for number, (seeds, which) in enumerate(
        {"1,3": [1, 3], "2..3": [2, 3], "2..2": [2], "0": [0], "2": [0, 1]}.items()
    ):
        outcome = call(capsys, *args, "--seeds", seeds, "--out", f"c{number}")
        assert outcome.code == 0
        assert sorted(p.name for p in Path(f"c{number}/fedavg").iterdir()) == [f"seed-{k}" for k in which]
        assert ("2 seeds: 0, 1\n" in outcome.err) == (seeds == "2")
    rows = unskew.compare(methods="fedavg", seeds="4..5", rounds=1, clients=2, local_steps=1, model="logistic").rows()
    assert rows[0]["seeds"] == 2


def test_a_configuration_is_named_by_a_flag_or_by_its_place(capsys):
    Path("my.yaml").write_text(
        "rounds: 1\nclients: 3\npartition: iid\nmodel: logistic\nlocal_steps: 1\nengine: inline\n"
    )
    for number, args in enumerate((["run", "my.yaml"], ["run", "--config", "my.yaml"])):
        assert call(capsys, *args, "--out", f"r{number}").code == 0
        assert summary(f"r{number}")["rounds"] == 1
    for number, args in enumerate((["fedavg", "my.yaml"], ["--config", "my.yaml", "fedavg"])):
        assert call(capsys, "compare", *args, "--seeds", "0", "--out", f"c{number}").code == 0
    for args in (["my.yaml"], ["--config", "my.yaml"], ["digits", "--set", "partition=iid", "--clients", 3]):
        assert call(capsys, "partition", *args, "--json").json()["clients"] == 3
    assert call(capsys, "diagnose", "my.yaml", "--no-curvature", "--json").json()["clients"] == 3
    assert "Name one configuration file" in call(capsys, "run", "my.yaml", "--config", "my.yaml").err
    assert "The data are set twice" in call(capsys, "partition", "digits", "--data", "digits").err


def test_a_run_goes_on_by_a_flag(capsys):
    args = ("run", *QUICK, "--out", "a")
    assert "--resume requires --out" in call(capsys, *args[:-2], "--resume").err
    assert call(capsys, *args, "--rounds", 1).code == 0
    assert "is complete" in call(capsys, *args, "--rounds", 1, "--resume").err
    assert call(capsys, *args, "--rounds", 2, "--resume").code == 0
    assert summary("a")["rounds"] == 2


def test_the_default_folder_is_called_alike_however_the_data_are_written(capsys, tmp_path):
    rows = "\n".join(["x,y", *(f"{i / 7:.3f},{i % 2}" for i in range(40))])
    Path("rows.csv").write_text(rows)
    here = Path.cwd()
    spellings = ["rows.csv", "./rows.csv", "table:rows.csv", f"table:{here}/rows.csv", f"{here.name}/../rows.csv"]
    Path(here.name).mkdir()
    options = ("--label", "y", "--model", "logistic", "--rounds", 1, "--clients", 2, "--partition", "iid")
    for spelling in spellings:
        assert call(capsys, "run", "--data", spelling, *options, "--engine", "inline").code == 0
    names = ["rows-fedavg-seed0", *(f"rows-fedavg-seed0-{k}" for k in range(2, 6))]
    assert sorted(path.name for path in Path("runs").iterdir()) == names


def test_the_list_of_methods_is_kept_until_a_method_changes(capsys, tmp_path, monkeypatch):
    from unskew.methods import descriptions

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = call(capsys, "methods", "--json").json()
    assert first[: -len(COMPOSITIONS)] == json.loads(json.dumps(descriptions.describe_all()))
    real = descriptions.describe_all
    monkeypatch.setattr(descriptions, "describe_all", None)
    assert call(capsys, "methods", "--json").json() == first
    (kept,) = (tmp_path / "cache" / "unskew").iterdir()
    monkeypatch.setattr(descriptions, "describe_all", real)
    kept.write_text("damaged")
    assert call(capsys, "methods", "--json").json() == first
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert call(capsys, "methods", "--json").json() == first
