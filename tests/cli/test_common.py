"""What bad input gets: one sentence, exit code 2, and nothing half-written."""

import csv
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.federations import SmallBatchNorm, blobs
from support.running import TINY, call, metrics, summary
from support.slow import slow_but
from support.tolerance import FEW, assert_close

import unskew
from unskew.cli.tables import summary_table
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.errors import ConfigError, DataError, MethodConflictError, UnskewError
from unskew.methods.fedprox import FedProx
from unskew.protocol.rules import ClientRule
from unskew.simulation.network import Network

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(capsys, *args, files=()):
    """The sentence; asserts that it is one, and that nothing new lies in the folder."""
    outcome = call(capsys, *args)
    said = outcome.err
    assert outcome.code == 2, (args, outcome)
    assert outcome.out == ""
    assert "Traceback" not in said
    assert said.startswith(("unskew: ", "Usage: unskew"))
    assert sorted(str(p) for p in Path().rglob("*")) == sorted(files)
    return " ".join(said.split())


RUN = ("run", *TINY, "--rounds", "1")

OPTIONS = [
    # names
    ("--method fedpro", "no method 'fedpro'. Did you mean 'fedprox'"),
    ("--method FEDAVGG", "Did you mean 'fedavg'"),
    ("--method fedavg,scaffold", "no method"),
    ("--method fedavg+", "name is missing next to"),
    ("--method +", "name is missing next to"),
    ("--method=", "is not a method"),
    ("--method fedprox+fedprix", "no method 'fedprix'"),
    ("--method no.such.Rule", "cannot be imported"),
    ("--method ../x", "The method '../x' is not an import path"),
    ("--method .x", "The method '.x' is not an import path"),
    ("--model ..:x", "The model '..:x' is not an import path"),
    ("--model torch.nn:Module", "'torch.nn:Module' is not a model"),
    ("--loss evil", "loss='evil' is not valid: it must be auto, mse"),
    ("--tokenizer bytes", "The section text requires texts, but digits contains none"),
    ("--model torch:zeros", "'torch:zeros' is not a model: it must be a torch.nn.Module"),
    ("--delay fixed:1e99", "The delay 'fixed:1e99' is longer than any run"),
    ("--out=", "'' is not a name of a file or folder"),
    ("--out=\ud800", "it is not valid Unicode"),
    ("--method unskew.protocol.rules.Context", "is not a method"),
    ("--method fedavgm+fedadam", "both fill the slot 'server'"),
    ("--method fedprox:mu=0.1+fedprox:mu=0.2", "twice"),
    ("--method fedprox:mu=abc", "fedprox:mu=abc"),
    ("--method fedprox:mu=-1", "fedprox:mu=-1"),
    ("--method fedprox:mu=nan", "fedprox:mu=nan"),
    ("--method fedprox:mu=inf", "fedprox:mu=inf is not valid: it must be a finite number"),
    ("--method fedexp+fedsam:rho=.inf", "fedsam:rho=.inf is not valid"),
    ("--method fedprox:nu=1", "fedprox has no option 'nu'; it has mu. Did you mean 'mu'?"),
    ("--method fedprox:mu", "option=value"),
    ("--method fedprox:mu=", "fedprox:mu="),
    ("--method scaffold:option=III", "scaffold:option=III"),
    ("--model cn", "no model 'cn'. Did you mean 'cnn'"),
    ("--model=", "no model ''"),
    ("--model no_such_module:make", "cannot be imported"),
    ("--model torch.nn:NoSuch", "has no 'NoSuch'"),
    ("--data cifar11", "no data set 'cifar11'. Did you mean 'cifar1"),
    ("--data=", "no data set ''"),
    ("--data table:nowhere.csv", "no file or folder"),
    ("--data digits --data-path .", "is built in. Remove path"),
    ("--partition dirichlett:0.1", "no partition 'dirichlett'. Did you mean 'dirichlet'"),
    ("--partition dirichlet", "requires a value"),
    ("--partition dirichlet:abc", "must be a number"),
    ("--partition dirichlet:0", "must be a positive number"),
    ("--partition dirichlet:-1", "must be a positive number"),
    ("--partition dirichlet:nan", "must be a positive number"),
    ("--partition dirichlet:0.1,mni=3", "Did you mean 'min'"),
    ("--partition classes:3", "does not divide the 10 classes"),
    ("--partition classes:0", "at least 1"),
    ("--partition natural:user", "no columns"),
    ("--partition=", "no partition ''"),
    ("--class-weights=-1,2", "class_weights=-1.0 is not valid: it must be greater than 0"),
    ("--engine gpu", "There is no engine 'gpu'. Known: auto, inline, processes, ray, vectorized"),
    ("--device gpu", "device='gpu'"),
    ("--device meta", "device='meta' is not valid: the devices of this machine are auto, cpu"),
    ("--device cpu:1", "device='cpu:1' is not valid: the devices of this machine are"),
    ("--device cuda:99", "device 'cuda:99' is not available here"),
    # methods that would do nothing in so few rounds
    (
        "--method fedcog",
        "fedcog would have no effect: with start_round=50 it acts only after 50 rounds, and the run has 1",
    ),
    ("--method scaffold+fedcog-authors:start_round=1", "or more rounds"),
    ("--method dense:start_round=1", "dense would have no effect"),
    ("--method fedals:auto --set momentum=0.9", "fedals:auto would have no effect: with longest=50"),
    # numbers
    ("--clients 0", "clients=0"),
    ("--clients -3", "clients=-3"),
    ("--clients 5000", "5000 clients"),
    ("--clients 99999999999", "clients=99999999999"),
    ("--rounds 0", "rounds=0"),
    ("--rounds -1", "rounds=-1"),
    ("--rounds 99999999999", "rounds=99999999999"),
    ("--rounds 2.5", "--rounds"),
    ("--rounds many", "--rounds"),
    ("--participation 0", "participation=0"),
    ("--participation 1.5", "participation=1.5"),
    ("--participation nan", "participation=nan"),
    ("--local-steps 0", "local_steps=0"),
    ("--local-steps 99999999999", "local_steps=99999999999"),
    ("--local-epochs 2", "cannot be combined"),
    ("--batch-size 0", "batch_size=0"),
    ("--batch-size -64", "batch_size=-64"),
    ("--lr 0", "lr=0"),
    ("--lr -0.1", "lr=-0.1"),
    ("--lr nan", "lr=nan"),
    ("--set ray.address=127.0.0.1", "is not a cluster address"),
    ("--engine ray --set ray.address=127.0.0.1:1", "no Ray cluster at '127.0.0.1:1'"),
    ("--set model_options={hidden:[8,.inf]}", "hidden.1: inf is not a finite number"),
    ("--lr inf", "lr=inf"),
    ("--lr 1e9", "lr=1000000000"),
    ("--lr fast", "--lr"),
    ("--momentum 1", "momentum=1"),
    ("--momentum -0.1", "momentum=-0.1"),
    ("--weight-decay -1", "weight_decay=-1"),
    ("--weight-decay inf", "weight_decay=inf"),
    ("--seed -1", "seed=-1"),
    ("--seed 99999999999999999999", "seed=99999999999999999999"),
    ("--eval-every 0", "eval_every=0"),
    ("--target 0", "target=0"),
    ("--target 7", "target=7"),
    # typing mistakes
    ("--round 3", "--round"),
    ("--rouds 3", "--rounds"),
    ("--learning-rate 3", "No such option: --learning-rate (Possible options: --lr)"),
    ("--num-clients 3", "(Possible options: --clients)"),
    ("--alpha 3", "(Possible options: --partition dirichlet:ALPHA)"),
    ("--method fedprox:lambda=0.1", "fedprox has no option 'lambda'; it has mu."),
    ("--method fedprox(mu=0.1)", "write fedprox:mu=0.1."),
    ("--set num_rounds=3", "no option 'num_rounds'. Did you mean 'rounds'?"),
    # any.field=value
    ("--set lr", "any.field=value"),
    ("--set =3", "any.field=value"),
    ("--set learning_rate=0.1", "There is no option 'learning_rate'. Did you mean 'lr'?"),
    ("--set momentun=0.1", "Did you mean 'momentum'"),
    ("--set network.dropp=0.1", "Did you mean 'network.drop'"),
    ("--set network.drop=1", "network.drop=1"),
    ("--set network.drop=-0.1", "network.drop=-0.1"),
    ("--set network=0.1", "network=0.1"),
    ("--set lr.x=0.1", "lr="),
    ("--set lr=[1", "not YAML"),
    ("--set lr=", "lr=None"),
    ("--set target=2020-13-45", "not YAML"),
    ("--set rounds=true", "rounds=True"),
    ("--set lr=true", "lr=True"),
    ("--set rounds=1.5", "rounds=1.5"),
    ("--set model=5", "model=5"),
    ("--set augment=maybe", "augment='maybe'"),
    ("--set holdout=1", "holdout=1"),
    ("--set holdout=-0.1", "holdout=-0.1"),
    ("--set server_data=0", "server_data=0"),
    ("--set server_data=-5", "server_data=-5"),
    ("--set server_data=100000", "server_data=100000"),
    ("--set server_data=cifar11", "no data set 'cifar11'"),
    ("--set server_data_path=.", "server"),
    ("--set clip_grad_norm=0", "clip_grad_norm=0"),
    ("--set clip_grad_norm=.inf", "clip_grad_norm=inf"),
    ("--set precision=fp8", "precision='fp8'"),
    ("--set optimizer=lion", "optimizer='lion'"),
    ("--set nesterov=true", "nesterov requires momentum"),
    ("--set optimizer=adam --momentum 0.9", "momentum requires optimizer=sgd"),
    ("--set buffers=keep", "buffers='keep'"),
    ("--set client_weighting=equal", "client_weighting='equal'"),
    ("--set workers=0", "workers=0"),
    ("--set eval_clients=-1", "eval_clients=-1"),
    ("--set checkpoint_every=0", "checkpoint_every=0"),
    ("--set trackers=wandbee", "There is no tracker 'wandbee'. Did you mean 'wandb'"),
    ("--set head=nowhere", "no module 'nowhere'"),
    ("--set model_options.hidden=[3]", "no option 'hidden'"),
    ("--model mlp --set model_options.hidden=[0]", "hidden"),
    ("--model mlp --set model_options.hidden=wide", "hidden"),
    ("--model mlp --set model_options.hidden=[1000000000000]", "cannot be built"),
    ("--set clients=null", "requires the number of clients"),
    # shapes
    (
        "--model torch.nn:Linear --set model_options.in_features=64 --set model_options.out_features=10",
        "does not accept",
    ),
    ("--model torch.nn:Flatten", "no trainable parameters"),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=[options for options, _ in OPTIONS])
def test_run_rejects_invalid_options(capsys, options, words):
    assert words in refused(capsys, *RUN, *options.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("compare", "Missing argument"),
        ("compare fedavg fedavg", "only once"),
        ("compare fedavg fedprix", "Did you mean 'fedprox'"),
        ("compare fedavg --seeds 0,0", "seeds='0,0'"),
        ("compare fedavg --seeds 99999999999", "seeds='0..99999999998' is not a list of seeds"),
        ("compare fedavg --target 2", "target=2"),
        ("compare fedavg --class-weights 1,1e39", "class_weights"),
        ("run --out s3://bucket/run", "s3://bucket/run is a URL, but unskew reads and writes only local files"),
        ("run --out file:///tmp/x", "is a URL"),
        ("models cnn --classes 999999999999999999999999999999", "must be numbers from 1 to"),
        ("models logistic --shape 111111111111111111111111111111", "must be numbers from 1 to"),
        ("models logistic --shape 0,3", "must be numbers from 1 to"),
        ("compare fedavg --class-weights 1,x", "'1,x' is neither balanced nor numbers"),
        ("compare fedavg --resume", "--out"),
        ("compare fedavg --model cn", "no model 'cn'"),
        ("compare fedavg --set model_options.x=1", "no option 'x'"),
        ("compare fedavg --data digit", "Did you mean 'digits'"),
        ("compare fedavg --set data=5", "data=5"),
        ("compare fedavg --set seed=7", "--set seed has no effect on a comparison"),
        ("compare fedavg --set method=moon", "set the seeds with --seeds 0..4"),
        ("compare fedavg --out=", "'' is not a name of a file or folder"),
        ("partition digits --out=", "'' is not a name of a file or folder"),
        ("diagnose --out=", "'' is not a name of a file or folder"),
        ("reproduce fedcog/table-1 --results=", "'' is not a name of a file or folder"),
        ("compare fedavg --clients 5000", "5000 clients"),
        ("compare fedavg --device meta", "device='meta'"),
        ("compare fedavg --config nowhere.yaml", "nowhere.yaml cannot be read"),
        ("compare fedavg fedavgm+fedadam", "both fill the slot"),
        ("compare fedavg fedcog:start_round=50 --rounds 20", "Use a smaller start_round"),
        ("resume", "Missing argument"),
        ("resume nowhere", "no run to resume"),
        ("partition digit", "Did you mean 'digits'"),
        ("partition digits --clients 0", "clients=0"),
        ("partition digits --clients 5000", "5000 clients"),
        ("partition digits --partition x", "no partition 'x'"),
        ("partition digits --seed -1", "seed=-1"),
        ("partition digits --out who.xyz", "no known suffix"),
        ("partition digits --out who", "no known suffix"),
        ("partition digits --label y", "Remove path, label"),
        ("runn", "No such command"),
        ("run nowhere.yaml", "nowhere.yaml cannot be read"),
        ("run digits", "For data with this name, use --data digits"),
        ("run .", "cannot be read"),
    ],
)
def test_commands_reject_invalid_arguments(capsys, args, words):
    assert words in refused(capsys, *args.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rouds: 3", "no option 'rouds'. Did you mean 'rounds'"),
        ("network: {dorp: 0.1}", "Did you mean 'network.drop'"),
        ("network: {drop: {x: 1}}", "network.drop="),
        ("rounds: [1", "my.yaml is not a valid YAML file"),
        ("a: b: c", "my.yaml is not a valid YAML file"),
        ("- rounds", "must contain a mapping"),
        ("rounds", "must contain a mapping"),
        ("5: 3", "no option '5'"),
        ("rounds: many", "rounds='many'"),
        ("rounds: 1\nlr: 0.1\nrounds: 2", "line 3: the key 'rounds' occurs twice; remove one of them"),
        ("network: {drop: 0.1, drop: 0.2}", "the key 'drop' occurs twice"),
        ("clients: yes", "clients=True"),
        ("local_steps: 1\nlocal_epochs: 1", "cannot be combined"),
        ("target: 2020-13-45", "my.yaml is not a valid YAML file"),
        ("data: !!python/object/apply:os.system ['true']", "my.yaml is not a valid YAML file"),
        ("model_options: 5", "model_options=5"),
        ("method: [fedavg]", "method="),
        ("model_options: &a {x: *a}", "the alias *a is not supported"),
        ("model_options: &a\n  <<: *a", "line 2: the alias *a is not supported"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 2: the alias *a is not supported"),
        ("network:\n  <<: {drop: 0.1}", "line 2: the merge key << is not supported"),
        ("drop_last: !!bool maybe", "the tag !!bool is not supported"),
        ("data: digits\nlabel: !!timestamp x", "line 2: the tag !!timestamp is not supported"),
        ("rounds: 12:30:45", "reads 12:30:45 as a base-60 number"),
        ("clip: 1:30.5", "as a base-60 number"),
        ("\x00", "my.yaml is not a valid YAML file"),
    ],
)
def test_configuration_file_is_refused(capsys, text, words):
    Path("my.yaml").write_text(text)
    assert words in refused(capsys, "run", "my.yaml", files=["my.yaml"])
    if "local_steps" not in text and "method" not in text:
        assert words in refused(capsys, "compare", "fedavg", "--config", "my.yaml", files=["my.yaml"])


def test_near_misses_are_answered_with_what_was_meant(capsys):
    Path("patients.csv").write_text("a,b\n1,2\n")
    said = refused(capsys, "run", "--data", "patients.cvs", files=["patients.csv"])
    assert said == "unskew: There is no file or folder at patients.cvs. Did you mean patients.csv?"
    said = refused(capsys, "run", "--method", "fedprox mu=0.1", files=["patients.csv"])
    assert "'fedprox mu=0.1' is not a method; write fedprox:mu=0.1." in said
    Path("my.yaml").write_text("rounds: 3\nnum_clients: 4\n")
    said = refused(capsys, "run", "my.yaml", files=["my.yaml", "patients.csv"])
    assert said == "unskew: my.yaml: There is no option 'num_clients'. Did you mean 'clients'?"


@pytest.mark.parametrize("command", ["predict {} x.csv", "evaluate {} x.csv", "export {}", "resume {}"])
def test_a_folder_without_a_run_is_noticed_before_pytorch_is_loaded(capsys, monkeypatch, command):
    for module in ("unskew.serving.load", "unskew.serving.export", "unskew.runs.run", "unskew.deployment.server.run"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    assert "config.yaml is missing" in refused(capsys, *command.format("nowhere").split())


def test_configuration_that_is_not_text(capsys):
    Path("my.yaml").write_bytes(b"\xff\xfe\x00\x81rounds")
    assert "my.yaml is not a valid YAML file" in refused(capsys, "run", "my.yaml", files=["my.yaml"])


def test_numbers_as_yaml_writes_them(capsys):
    """YAML reads 1e-3 as text; it is a number all the same."""
    Path("my.yaml").write_text("lr: 1e-3\nrounds: 1.0\nclients: '3'\nmodel: logistic\n")
    assert call(capsys, "run", "my.yaml", "--out", "a").code == 0
    config = yaml.safe_load(Path("a/config.yaml").read_text())
    assert (config["lr"], config["rounds"], config["clients"]) == (0.001, 1, 3)


@pytest.mark.parametrize("out", ["there", "a.txt", "a.txt/below"])
def test_place_that_cannot_be_the_run_folder(capsys, out):
    Path("there").mkdir()
    Path("there/mine").write_text("mine")
    Path("a.txt").write_text("mine")
    words = {"there": "already exists", "a.txt": "is a file", "a.txt/below": "a.txt/below"}[out]
    files = ["there", "there/mine", "a.txt"]
    assert words in refused(capsys, *RUN, "--out", out, files=files)
    assert words in refused(capsys, "compare", "fedavg", *TINY, "--rounds", "1", "--out", out, files=files)
    assert Path("there/mine").read_text() == Path("a.txt").read_text() == "mine"


def test_the_processor_may_be_called_as_pytorch_calls_it():
    assert experiment({"device": "cpu:0"}).device == "cpu"


def test_empty_folder_may_be_the_run_folder(capsys):
    Path("there").mkdir()
    assert call(capsys, *RUN, "--out", "there").code == 0
    Path("here").mkdir()
    refused(capsys, *RUN, "--set", "head=nowhere", "--out", "here", files=[str(p) for p in Path().rglob("*")])
    assert Path("here").is_dir()


def test_folder_that_cannot_be_made(capsys):
    assert "could not be written" in refused(capsys, *RUN, "--out", "/proc/no/such/run")


# ---- data -------------------------------------------------------------------------------------------------------------

X, Y = np.zeros((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2])


def with_value(value):
    x = X.copy()
    x[3, 1] = value
    return x


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([(X, Y), (with_value(np.nan), Y)], "client 1 contain NaN or infinite"),
        ([(X, Y), (with_value(np.inf), Y)], "client 1 contain NaN or infinite"),
        ([(X, Y), (X[:0], Y[:0])], "client 1 is empty"),
        ([(X, Y), (X, Y + 1)], "client 1 contain 3, but with 3 classes they must be 0 to 2"),
        ([(X, Y), (X, Y - 1)], "client 1 contain -1"),
        ([(X, Y), (X, Y + 0.5)], "client 1 are not integers"),
        ([(X, Y), (X, Y[:5])], "Client 1 has 6 inputs but 5 labels"),
        ([(X, Y), (X[:, :3], Y)], "client 1 has inputs of shape (3,), but client 0 has shape (4,)"),
        ([(X, Y), (X.astype(str), Y)], "client 1 are not a numeric array"),
        ([(X, Y), (X,)], "Client 1 must be (x, y)"),
        ([], "at least one client"),
    ],
)
def test_data_in_arrays_are_refused(clients, words):
    with pytest.raises(DataError) as error:
        unskew.Federation.from_arrays(clients, test=(X, Y), classes=3)
    assert words in str(error.value)


@pytest.mark.parametrize("budget", [{"local_steps": 2}, {"local_epochs": 1}])
def test_a_client_without_samples_is_refused_when_it_is_drawn(budget):
    """Clients of one's own sequence are looked at only then; a number of steps would never be reached."""
    x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
    clients = [unskew.ClientData(k, x[:n], y[:n], x[:0], y[:0]) for k, n in enumerate((4, 0))]
    fed = unskew.Federation(clients=clients, test=(x, y), classes=2)
    with pytest.raises(DataError, match="Client 1 has no samples to train on"):
        unskew.run(fed, model="logistic", rounds=1, engine="inline", eval_clients=0, **budget)


@pytest.mark.parametrize("cell", ["nan", "inf", ""])
def test_data_in_a_table_are_refused(capsys, cell):
    draws = np.random.default_rng(0)
    with Path("my.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["a", "b", "label"])
        table.writerows([[*draws.normal(size=2), i % 2] for i in range(30)])
        table.writerow(["0.5", cell, "1"])
    args = ("--data", "table:my.csv", "--clients", 2, "--partition", "iid", "--model", "logistic", "--rounds", 1)
    assert "column 'b' has 1 missing or infinite" in refused(
        capsys, "run", *args, "--set", "label=label", files=["my.csv"]
    )
    assert "Did you mean 'label'" in refused(capsys, "run", *args, "--set", "label=labell", files=["my.csv"])


def test_shapes_that_do_not_fit_the_model(tmp_path):
    fed = blobs([8, 8])
    for model, words in (
        (SmallBatchNorm(channels=3), "does not accept inputs of shape (2, 6, 6)"),
        (SmallBatchNorm(classes=4), "expected (2, 3) logits"),
        (torch.nn.Linear(5, 3), "does not accept"),
    ):
        with pytest.raises(ConfigError) as error:
            unskew.run(fed, model=model, rounds=1, out=tmp_path / "run")
        assert words in str(error.value)
        assert not (tmp_path / "run").exists()


def test_python_functions_raise_unskew_errors(tmp_path):
    fed = blobs([8, 8])
    for options, kind in (
        ({"rouds": 3}, ConfigError),
        ({"rounds": 0}, ConfigError),
        ({"method": "fedavgm+fedadam"}, MethodConflictError),
        ({"method": []}, ConfigError),
        ({"method": FedProx(mu=math.inf)}, ConfigError),
        ({"out": ""}, ConfigError),
        ({"trackers": ["mlflow"]}, ConfigError),
        ({"model_options": {"classes": torch.nn.Linear}, "out": tmp_path / "run"}, ConfigError),
    ):
        with pytest.raises(kind):
            unskew.run(fed, **{"model": "logistic", "rounds": 1, **options})
    for options in (
        {"methods": []},
        {"seeds": []},
        {"seeds": [1, 1]},
        {"seeds": -1},
        {"seed": 3},
        {"method": "fedavg"},
        {"out": " "},
    ):
        with pytest.raises(ConfigError):
            unskew.compare(fed, **{"methods": ["fedavg"], "model": "logistic", "rounds": 1, **options})
    assert not list(tmp_path.iterdir())


def test_the_description_of_a_run_refuses_unknown_fields():
    with pytest.raises(ValueError, match="rouds"):
        Experiment(rouds=3)
    with pytest.raises(ValueError, match="dorp"):
        Experiment(network={"dorp": 0.1})


def test_options_that_cannot_be_written_down(tmp_path):
    """config.yaml could not be run again; without a folder nobody needs it."""

    def make(shape, classes, layer):
        return torch.nn.Sequential(torch.nn.Flatten(), layer(72, classes))

    options = {"model": make, "model_options": {"layer": torch.nn.Linear}, "rounds": 1, "engine": "inline"}
    assert unskew.run(blobs([8, 8]), **options).summary["rounds"] == 1
    with pytest.raises(ConfigError, match="cannot be written to config"):
        unskew.run(blobs([8, 8]), **options, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_numeric_option_has_bounds():
    """No field takes NaN, infinity or an absurd negative number."""
    numeric = [
        n for n, f in Experiment.model_fields.items() if "int" in str(f.annotation) or "float" in str(f.annotation)
    ]
    assert len(numeric) >= 15
    for name in numeric:
        for value in (-1, -(10**30), math.nan, math.inf, -math.inf):
            with pytest.raises(UnskewError):
                unskew.run(**{"data": "digits", "model": "logistic", "rounds": 1, name: value})


# ---- training that goes wrong -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poison(ClientRule):
    """Clients of a certain size compute or send what is not finite."""

    name, summary, paper = "poison", "", ""

    size: int = 0
    where: str = "delta"
    value: float = math.nan

    def poison(self, ctx, tensor):
        # A client is known by its weight, the number of its samples; written so that it can be mapped over clients.
        return torch.where(ctx.weight == self.size, torch.full_like(tensor, self.value), tensor)

    def gradient(self, grad_fn, ctx, carry):
        def poisoned(v, batch):
            g = grad_fn(v, batch)
            return self.poison(ctx, g) if self.where == "delta" else g

        return poisoned

    def end(self, ctx, carry, v):
        zeros = torch.zeros_like(v[:2])
        ctx.upload["x"] = self.poison(ctx, zeros) if self.where == "upload" else zeros
        ctx.state["x"] = self.poison(ctx, zeros) if self.where == "state" else zeros


SIZES = (10, 12, 14, 16)


def train(rule=None, **options):
    options = {"rounds": 2, "lr": 0.1, "local_epochs": 1, "engine": "inline", "seed": 3, **options}
    return unskew.run(blobs(SIZES, shape=(1, 4, 4)), model="logistic", method=rule or "fedavg", **options)


POISONS = [("delta", math.nan), ("delta", math.inf), ("upload", -math.inf), ("state", math.nan)]
POISONED = [(engine, *poison) for engine in ("inline", "processes", "vectorized") for poison in POISONS]
QUICK = [POISONED[0], POISONED[6], POISONED[11]]


@pytest.mark.parametrize(("engine", "where", "value"), slow_but(QUICK, POISONED))
def test_poisoned_client_is_left_out(tmp_path, monkeypatch, engine, where, value):
    """The result is that of a run in which it never takes part in the average."""
    with pytest.warns(UserWarning, match="Round 1: the updates of clients 2 are not finite"):
        poisoned = train(Poison(14, where, value), engine=engine, out=tmp_path / "run")
    monkeypatch.setattr(Network, "drops", lambda self, t, client: client == 2)
    without = train(Poison(0, where, value), engine=engine)
    if engine == "vectorized":  # other clients beside one can change the last bit there
        assert_close(poisoned.vector, without.vector, FEW)
    else:
        assert torch.equal(poisoned.vector, without.vector)
    assert not torch.equal(poisoned.vector, train(lr=1e-30).vector)
    assert poisoned.summary["updates_skipped"] == 2
    for row in metrics(tmp_path / "run"):
        assert (row["updates"], row["skipped"]) == (3, 1)
        assert math.isfinite(row["train_loss"])
    # It crossed the network all the same: 4 clients, 2 rounds, the model and the two numbers of the rule.
    assert poisoned.summary["bytes_up"] == 4 * 2 * 4 * (poisoned.vector.numel() + 2)
    # Nothing of it stays at the client.
    kept = load_file(tmp_path / "run" / "checkpoints" / "0000002" / "clients-0000.safetensors")
    assert sorted(kept) == ["0/rules/poison/x", "1/rules/poison/x", "3/rules/poison/x"]
    monkeypatch.undo()
    fed, rule = blobs(SIZES, shape=(1, 4, 4)), Poison(14, where, value)
    longer = unskew.resume(tmp_path / "run", federation=fed, method=rule, rounds=3)
    assert longer.summary["updates_skipped"] == 3


@pytest.mark.parametrize("method", slow_but(["scaffold"], ["fedavg", "scaffold", "fedadam"]))
def test_training_that_diverges_leaves_the_model_as_it_was(capsys, method):
    args = ["--clients", 4, "--model", "mlp", "--local-steps", 6, "--lr", 1e6, "--rounds", 2, "--engine", "inline"]
    outcome = call(capsys, "run", *args, "--method", method, "--out", "a", "--json")
    assert outcome.code == 0, outcome.err
    assert "Round 1: the updates of clients 0, 1, 2, 3 are not finite" in " ".join(outcome.err.split())
    assert outcome.json()["updates_skipped"] == 8
    first, second = metrics("a")
    assert (first["updates"], first["skipped"], first["train_loss"]) == (0, 4, None)
    assert (first["accuracy"], first["loss"]) == (second["accuracy"], second["loss"])
    assert call(capsys, "run", *args, "--set", "lr=1e-30", "--out", "b").code == 0
    assert (first["accuracy"], first["loss"]) == (metrics("b")[0]["accuracy"], metrics("b")[0]["loss"])
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    for name in ("a/metrics.jsonl", "a/summary.json"):
        assert "NaN" not in Path(name).read_text()
        assert "Infinity" not in Path(name).read_text()
    table = call(capsys, "run", *args, "--method", method, "--out", "c")
    assert "8 updates that were not finite" in table.out
    assert "Round 1: the updates" in table.out
    (row,) = call(capsys, "compare", method, "--seeds", 1, *args, "--json").json()["rows"]
    assert row["accuracy"] == second["accuracy"]


@dataclass(frozen=True)
class Huge(ClientRule):
    """Every client sends numbers that are finite."""

    name, summary, paper = "huge", "", ""

    def gradient(self, grad_fn, ctx, carry):
        def huge(v, batch):
            signs = 1 - 2 * (torch.arange(len(v)) % 2)
            return 3e38 * signs + 0 * grad_fn(v, batch)

        return huge


def test_updates_that_overflow_in_the_sum_are_left_out(tmp_path):
    """Neither the server nor the clients remember anything of such a round."""
    with pytest.warns(UserWarning, match="Round 1: the server step gave values that are not finite"):
        result = train([Huge(), "scaffold+fedavgm"], lr=1.0, out=tmp_path / "run")
    assert torch.equal(result.vector, train(lr=1e-30).vector)
    assert result.summary["updates_skipped"] == 8
    assert not list((tmp_path / "run").rglob("clients-*"))


def test_loss_that_is_not_finite_is_null(tmp_path):
    """A model that is finite, but so large that its outputs are not."""
    result = train([Huge()], lr=0.2, rounds=1, client_weighting="uniform", out=tmp_path / "run")
    assert torch.isfinite(result.vector).all()
    assert result.summary["updates_skipped"] == 0
    assert result.summary["loss"] is None
    assert result.history == metrics(tmp_path / "run", without=())
    assert result.summary == summary(tmp_path / "run", without=())
    summary_table(result.summary)


def test_python_functions_explain_wrong_arguments():
    x, y = np.random.default_rng(0).normal(size=(9, 4)).astype("float32"), np.arange(9) % 3
    fed = unskew.Federation.from_arrays([(x, y), (x, y)], test=(x, y), classes=3, holdout=0)

    class Rule(unskew.ClientRule):
        name, summary, paper = "rule", "for tests", "none"

    class Started(unskew.Callback):
        def start(self, config, rounds_done):
            pytest.fail("the error is known before the start")

    normalized = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    lonely = unskew.Federation.from_arrays([(x, y), (x[:1], y[:1])], test=(x, y), classes=3, holdout=0)
    named = unskew.Federation.from_arrays(
        [(x, y), (x[:1], y[:1])], test=(x, y), classes=3, holdout=0, client_names=["SE", "NO"]
    )
    integers = unskew.Federation.from_arrays(
        [((x * 9).astype("int64"), y)], test=((x * 9).astype("int64"), y), classes=3
    )
    given = {"model": "logistic", "rounds": 1}
    for wrong, message in [
        (lambda: unskew.Federation.from_arrays([(x, y)], test=None), r"test must be a pair"),
        (lambda: unskew.Federation.from_arrays({0: (x, y)}, test=(x, y)), r"not a dictionary"),
        (lambda: unskew.run(fed, clients=7, **given), r"clients=7 has no effect"),
        (lambda: unskew.compare(fed, methods="fedavg", partition="iid", **given), r"partition='iid' has no effect"),
        (lambda: unskew.run(fed, method=Rule, **given), r"Rule is not a method"),
        (lambda: unskew.run(fed, method=[3], **given), r"3 is not a method"),
        (lambda: unskew.run(fed, model=torch.nn.LazyLinear(3), rounds=1), r"lazy layers"),
        (lambda: unskew.run(lonely, model=normalized, engine="inline", rounds=1), r"Client 1 trains on a batch of one"),
        (
            lambda: unskew.run(lonely, model=normalized, engine="processes", rounds=1),
            r"Client 1 trains on a batch of one",
        ),
        (
            lambda: unskew.run(named, model=normalized, rounds=1, callbacks=[Started()]),
            r"The client NO trains on a batch of",
        ),
        (lambda: unskew.run(integers, model="mlp", rounds=1), r"convert features to floats"),
    ]:
        with pytest.raises(unskew.UnskewError, match=message):
            wrong()
    assert list(unskew.compare(fed, methods="fedavg", seeds=1, **given).summaries) == ["fedavg"]


# ---- what a newcomer stumbled over ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "options", "words"),
    [
        (["fedavg", "fedgen"], {"secure_aggregation": "required"}, "individual client"),
        (["fedavg", "fedreg"], {"momentum": 0.9}, "plain SGD"),
        (["fedavg", "fedals:split=99"], {}, "split=99"),
        (["fedavg", "fedcog:source=noise,augment=true"], {}, "no effect"),
    ],
)
def test_a_comparison_refuses_before_anything_is_trained(tmp_path, methods, options, words):
    with pytest.raises(UnskewError, match=words):
        unskew.compare(methods=methods, seeds=1, model="logistic", rounds=1, out=tmp_path / "o", **options)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fedprox:mu=0.1,mu=1", "sets mu twice"),
        ("fedavg+", "name is missing next to"),
        ("+fedavg", "name is missing next to"),
    ],
)
def test_a_method_written_wrongly_gets_a_sentence(spec, words):
    with pytest.raises(ConfigError, match=words):
        unskew.method(spec)


def test_options_of_a_method_may_be_python_values():
    assert (
        unskew.method("fedcog", labels="explicit", explicit=(0, 1)).client
        == unskew.method("fedcog:labels=explicit,explicit=0;1").client
    )
    assert unskew.method("fedals", periods={"body": 4}).sync.periods == (("body", 4),)
    assert unskew.method("fedprox", mu=0.5).expression == "fedprox:mu=0.5"
    for spec, options, words in (
        ("fedcog", {"n": -5}, "not valid"),
        ("fedcog", {"m": 5}, "fedcog has no option 'm'"),
        ("fedcog+moon", {"n": 5}, "need the name of one method"),
    ):
        with pytest.raises(ConfigError, match=words):
            unskew.method(spec, **options)


def test_off_is_read_as_off_from_yaml():
    assert experiment({"secure_aggregation": False}).secure_aggregation == "off"
    assert experiment({"secure_aggregation": True}).secure_aggregation == "required"


def test_local_models_of_several_labels_and_of_parts_that_stay(tmp_path):
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(24, 5)).astype(np.float32), draws.integers(0, 2, (24, 3))
    fed = unskew.Federation.from_arrays(
        [(x[:8], y[:8]), (x[8:16], y[8:16])], test=(x[16:], y[16:]), task="multilabel", holdout=0
    )
    row = unskew.run(fed, model="logistic", rounds=1, engine="inline", diagnose="local_models").history[0]
    assert row["local_personal_accuracy"] is None
    assert 0 <= row["local_accuracy"] <= 1
    run = {"model": "mlp", "model_options": {"hidden": [6]}, "rounds": 1, "local_steps": 3, "batch_size": 8, "lr": 0.1}
    run |= {"engine": "inline", "diagnose": "local_models", "clients": 4, "partition": "iid"}
    names = ("local_accuracy", "local_personal_accuracy")
    whole, parts = (unskew.run(method=m, **run).history[0] for m in ("fedavg", "fedals:alpha=9"))
    assert [whole[n] for n in names] == [parts[n] for n in names]


def test_ft_without_evaluated_clients_warns():
    with pytest.warns(UserWarning, match="no personal metrics"):
        unskew.run(method="fedavg+ft", model="logistic", rounds=1, clients=3, eval_clients=0, engine="inline")


def test_a_library_that_finds_no_memory_is_no_traceback(capsys, monkeypatch):
    def load(*_, **__):
        raise ImportError("libfreetype.so.6: failed to map segment from shared object")

    monkeypatch.setattr("unskew.cli.app.print_json", load)
    monkeypatch.setattr("unskew.cli.info.print_json", load)
    outcome = call(capsys, "methods", "--json")
    assert outcome.code == 2
    assert "not enough memory" in outcome.err


def test_diverged_runs_are_marked_in_tables_and_notes(capsys):
    """A rate at which every update of one method's clients is infinite."""
    args = ["--clients", 2, "--model", "mlp", "--local-steps", 6, "--rounds", 1, "--engine", "inline"]
    rows = call(capsys, "compare", "fedavg", "--seeds", 1, *args, "--lr", 1e6, "--json").json()
    assert rows["rows"][0]["diverged"] == 1
    assert "fedavg (1 of 1 seeds)" in rows["notes"][0]
    table = call(capsys, "compare", "fedavg", "--seeds", 1, *args, "--lr", 1e6).out
    assert "(diverged)" in " ".join(table.split())
    assert "(diverged)" not in call(capsys, "compare", "fedavg", "--seeds", 1, *args).out


def test_a_list_of_methods_in_a_file_of_a_comparison_is_rejected(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("data: digits\nmethod: [fedavg, moon]\n")
    (tmp_path / "d.yaml").write_text("data: digits\n")
    outcome = call(capsys, "compare", tmp_path / "c.yaml", tmp_path / "d.yaml", "--seeds", "0")
    assert (outcome.code, "is not a method expression" in outcome.err) == (2, True)
