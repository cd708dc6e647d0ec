"""Data, a model and a method given in Python: the configuration holds what they are called."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import yaml

import unskew
from unskew.config.loader import experiment
from unskew.errors import CheckpointError, ConfigError, UnskewError
from unskew.methods.fedcog.authors import FedCOGAuthors
from unskew.methods.fedprox import FedProx
from unskew.methods.registry import method

BUDGET = {"local_steps": 1, "model": "logistic", "engine": "inline"}


class Mine(unskew.ClientRule):
    name = "only-here"


@pytest.fixture(scope="module")
def fed():
    return unskew.load_federation("digits", partition="iid", clients=3)


def test_a_name_that_only_python_knows_needs_its_method():
    with pytest.raises(ConfigError, match="There is no method 'only-here'"):
        experiment({"method": "only-here"})
    assert experiment({"method": "only-here"}, method(Mine())).method == "only-here"


def test_a_run_carries_its_method_and_its_configuration_the_spelling(fed, tmp_path):
    result = unskew.run(fed, method=["fedprox:mu=0.1", Mine()], rounds=1, out=tmp_path / "run", **BUDGET)
    spelling = "fedprox:mu=0.1+only-here"
    assert result.summary["method"] == spelling
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"] == spelling
    again = {"federation": fed, "rounds": 2}
    longer = unskew.resume(tmp_path / "run", method=["fedprox:mu=0.1", Mine()], **again)
    assert (len(longer.history), longer.summary["method"]) == (2, spelling)
    with pytest.raises(CheckpointError, match="cannot be resumed with method='fedprox'"):
        unskew.resume(tmp_path / "run", method="fedprox", federation=fed, rounds=3)
    with pytest.raises(ConfigError, match="only-here"):
        unskew.resume(tmp_path / "run", federation=fed, rounds=3)


class Half:
    """A follower that lacks two of three functions."""

    def round(self, row):
        pass


HUGE = 10**5000
"""Python writes no such number."""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda fed: unskew.run(fed, out=5, **BUDGET), "must be a string or Path, got 5"),
        (lambda fed: unskew.run(fed, out="a\0b", **BUDGET), "contains a null character"),
        (lambda fed: unskew.run(fed, callbacks=3, **BUDGET), "callbacks must be a list of callback objects, not 3"),
        (lambda fed: unskew.run(fed, callbacks=[Half()], **BUDGET), "is not a callback"),
        (lambda fed: unskew.run(fed, method=HUGE, **BUDGET), "cannot be written out is not a method"),
        (lambda fed: unskew.run(fed, method=["fedavg"], lr=HUGE), "lr=an object of type int"),
        (lambda fed: unskew.run(fed, model="mlp", model_options={"hidden": HUGE}), "positive integers, not an object"),
        (lambda fed: unskew.run(fed, label=HUGE, **BUDGET), "has no effect when a federation is passed"),
        (lambda fed: unskew.run(fed, partition=np.zeros(0), **BUDGET), "has no effect when a federation is passed"),
        (lambda fed: unskew.method("fedprox", mu=-HUGE), "fedprox:mu=an object of type int"),
        (lambda fed: unskew.method(HUGE, mu=1), "not an object of type int"),
        (lambda fed: unskew.compare(fed, methods=5, **BUDGET), "methods must be a list such as"),
        (
            lambda fed: unskew.compare(fed, methods="fedavg", callback_factory="me", **BUDGET),
            "callback_factory must be a function",
        ),
        (
            lambda fed: unskew.compare(fed, methods="fedavg", seeds=None, **BUDGET),
            "seeds must be a number of seeds or a list",
        ),
        (
            lambda fed: unskew.compare(fed, methods="fedavg", seeds=HUGE, **BUDGET),
            "the number of seeds must be from 1 to",
        ),
        (lambda fed: unskew.compare(fed, methods="fedavg", seeds=True, **BUDGET), "seeds must be a number of seeds"),
        (lambda fed: unskew.compare(fed, methods="fedavg", seeds=[[]], **BUDGET), "A seed must be an integer"),
        (lambda fed: unskew.compare(fed, methods="fedavg", seeds=[0, True], **BUDGET), "A seed must be an integer"),
        (lambda fed: unskew.run(fed, resume="yes", **BUDGET), "resume needs a run folder"),
        (lambda fed: unskew.resume(None, federation=fed), "must be a string or Path, got None"),
        (lambda fed: unskew.resume("x", federation="digits"), "not str"),
        (lambda fed: unskew.diagnose(fed, run=5), "must be a string or Path, got 5"),
        (
            lambda fed: unskew.diagnose(fed, synthetic_fractions=torch.tensor(1), **BUDGET),
            "synthetic_fractions must be a list",
        ),
        (lambda fed: unskew.diagnose(fed, synthetic_fractions=[], **BUDGET), "synthetic_fractions is empty"),
        (lambda fed: unskew.diagnose(fed, synthetic_fractions=["x"], **BUDGET), "p=x is not a share"),
        (lambda fed: unskew.diagnose(fed, samples="5", **BUDGET), "samples=5 is not valid: it must be an integer"),
        (lambda fed: unskew.diagnose(fed, epsilon="0", **BUDGET), "epsilon=0 is not valid"),
        (lambda fed: unskew.diagnose(fed, mu=HUGE, **BUDGET), "mu=an object of type int"),
        (lambda fed: unskew.diagnose(fed, synthetic=5, **BUDGET), "a list of such pairs, or a path, not 5"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_in_a_sentence(fed, tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnskewError, match=words):
        call(fed)
    assert not list(tmp_path.iterdir())


def test_seeds_may_be_an_array_of_whole_numbers(fed):
    compared = unskew.compare(fed, methods="fedavg", seeds=np.array([1, 0]), rounds=1, **BUDGET)
    assert compared.rows()[0]["seeds"] == 2


def test_a_spelling_with_spaces_stays_as_it_was_written(fed, tmp_path):
    unskew.run(fed, method="fedprox + scaffold", rounds=1, out=tmp_path / "run", **BUDGET)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"] == "fedprox + scaffold"
    assert unskew.resume(tmp_path / "run", federation=fed, rounds=2).summary["method"] == "fedprox+scaffold"


def test_two_methods_of_one_name_are_refused(fed):
    with pytest.raises(ConfigError, match="fedprox is listed twice"):
        unskew.compare(fed, methods=["fedprox", FedProx()], rounds=1, **BUDGET)


@dataclass(frozen=True)
class L1(unskew.ClientRule):
    """Adds the sum of absolute values to the loss."""

    name, summary, paper = "l1", "sparse weights", "-"
    lam: float = 0.01

    def loss(self, loss_fn, ctx, carry):
        return lambda v, batch: loss_fn(v, batch) + self.lam * v.abs().sum()


def test_options_of_ones_own_rules_are_part_of_what_a_run_is(fed, tmp_path):
    rules = [L1(lam=0.001), L1(lam=0.1), L1()]
    compared = unskew.compare(fed, methods=rules, seeds=1, rounds=1, out=tmp_path / "c", **BUDGET)
    assert [row["method"] for row in compared.rows()] == ["l1:lam=0.001", "l1:lam=0.1", "l1"]
    run = tmp_path / "c" / "l1-lam=0.1" / "seed-0"
    assert yaml.safe_load((run / "config.yaml").read_text())["method"] == "l1:lam=0.1"
    assert len(unskew.resume(run, method=L1(lam=0.1), federation=fed, rounds=2).history) == 2
    with pytest.raises(
        CheckpointError, match=r"was started with method='l1:lam=0\.1' and cannot be resumed with method='l1:lam=0.2'"
    ):
        unskew.resume(run, method=L1(lam=0.2), federation=fed, rounds=3)
    with pytest.raises(ConfigError, match=r"no method 'l1'\..* If it is a custom rule, pass it again"):
        unskew.resume(run, federation=fed, rounds=3)
    (run / "summary.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is corrupted: it must be an object"):
        unskew.resume(run, method=L1(lam=0.1), federation=fed, rounds=3)
    assert method(FedCOGAuthors(n=8)).expression == "fedcog-authors:n=8"


class Plain(unskew.ClientRule):
    """No dataclass: it keeps what it is given in an attribute."""

    name = "plain"

    def __init__(self, **given):
        vars(self).update(given)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.5, 0.1),
        (lambda x: x, lambda x: 2 * x),
        (torch.zeros(3000), torch.zeros(3000).index_fill(0, torch.tensor([1500]), 1.0)),
        (np.zeros(3000), np.ones(3000)),
        (torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)),
    ],
)
def test_rules_differ_by_whatever_they_hold(one, other):
    spellings = [method(Plain(w=value)).expression for value in (one, one, other)]
    assert spellings[0] == spellings[1] != spellings[2]
    assert all(len(text) < 60 for text in spellings)


def test_a_comparison_goes_on_with_methods_of_ones_own(fed, tmp_path):
    methods = ["fedprox + scaffold", Mine(), method("fedprox", mu=0.5)]
    options = {"seeds": 1, "out": tmp_path / "c", **BUDGET}
    first = unskew.compare(fed, methods=methods, rounds=1, **options)
    assert list(first.summaries) == ["fedprox + scaffold", "only-here", "fedprox:mu=0.5"]
    (tmp_path / "c" / "only-here" / "seed-0" / "summary.json").unlink()  # as if it had been interrupted
    longer = unskew.compare(fed, methods=methods, rounds=2, resume=True, **options)
    assert all(len(history) == 2 for (history,) in longer.histories.values())
    with pytest.raises(ConfigError, match="cannot be resumed"):
        unskew.compare(fed, methods=methods, rounds=2, resume=True, **{**options, "lr": 0.5})
    with pytest.raises(CheckpointError, match=r"is complete \(2 rounds\)"):
        unskew.compare(fed, methods=methods, rounds=1, resume=True, **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_modes_of_pytorch_around_a_run_change_nothing(fed, mode):
    plain = unskew.run(fed, rounds=1, **BUDGET)
    with mode():
        inside = unskew.run(fed, rounds=1, **BUDGET)
    assert torch.equal(plain.vector, inside.vector.clone())
