"""The estimated time of a comparison: it comes before the start, grows with the work, and changes no result."""

import sys
import time

import pytest
import torch
from support.running import TINY, call

import unskew
from unskew.config.loader import experiment
from unskew.engines.cpu import time_limit
from unskew.errors import ConfigError
from unskew.methods.registry import method
from unskew.runs import cost

pytestmark = pytest.mark.usefixtures("undrawn")
QUICK = {"model": "logistic", "local_steps": 2, "batch_size": 8, "engine": "inline"}


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """The load of the machine that ``cost`` sees, 0 unless a test sets another one."""
    monkeypatch.setattr(cost.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return lambda value: monkeypatch.setattr(cost.os, "getloadavg", lambda: (value, 0.0, 0.0))


@pytest.fixture
def fed():
    return unskew.load_federation("digits", partition="dirichlet:0.3", clients=3, max_train_samples=100)


def runs(*names, count=1, rounds=100):
    return {
        n: (experiment({**QUICK, "rounds": rounds, "eval_every": rounds, "method": n}), method(n), count) for n in names
    }


def test_generation_counts_in_the_rounds_that_have_it(fed, monkeypatch):
    monkeypatch.setattr(cost, "measured_seconds", lambda session, rounds, client, steps: (7.0, 0.0, 0.0))
    found = cost.estimate(runs("fedavg", "fedcog:start_round=90", count=2), fed, "logistic", worth=0)
    late, always = found.seconds["fedcog:start_round=90"], found.seconds["fedavg"]
    assert 210 <= late < 240, "3 clients, 10 rounds"
    assert 2100 <= always < 2130
    assert found.total == pytest.approx(2 * (late + always))
    assert found.runs == 4


def test_measuring_draws_nothing_and_acts_in_the_last_round(fed, monkeypatch):
    monkeypatch.setattr(cost, "LIMIT", 3600.0)
    begun = []
    kind = type(method("fedcog").client[0])
    begin = kind.begin
    monkeypatch.setattr(kind, "begin", lambda rule, ctx: begun.append(int(ctx.round)) or begin(rule, ctx))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = cost.estimate(runs("fedavg", "fedcog:start_round=99,n=4,g_steps=2"), fed, "logistic", worth=0)
    assert torch.equal(before, torch.get_rng_state())
    assert found.notes == ()
    assert begun == [0, 99]
    assert cost.estimate(runs("fedavg", rounds=1), fed, "logistic") is None, "too short to be measured"


def test_a_limit_holds_although_its_first_exception_is_discarded(monkeypatch):
    class Slow:
        def __del__(self):
            time.sleep(60)  # the first exception ends it, and is then discarded

    def work():
        Slow()
        time.sleep(60)

    discarded = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: discarded.append(one.exc_type))
    with pytest.raises(cost.TooLongError), time_limit(0.1, cost.TooLongError()):
        work()
    assert discarded == [cost.TooLongError]


def test_a_long_measurement_ends_early(fed, monkeypatch):
    cost.estimate(
        runs("fedcog:start_round=0,n=64,g_steps=1"), fed, "logistic", worth=0
    )  # a limit may interrupt imports
    monkeypatch.setattr(cost, "LIMIT", 0.01)
    monkeypatch.setattr(cost, "SHARE", 0.0)
    found = cost.estimate(runs("fedcog:start_round=0,n=64,g_steps=100000"), fed, "logistic", worth=0)
    assert "reached the time limit" in str(found)


def test_what_fedssyn_generates_is_named(fed):
    assert "fedssyn generates before training are not included" in str(
        cost.estimate(runs("fedavg", "fedssyn"), fed, "logistic", worth=0)
    )


def test_a_budget_rejects_before_anything_is_written(fed, tmp_path):
    out = tmp_path / "out"
    options = {"methods": ["fedavg"], "seeds": 1, "references": False, "out": out, **QUICK}
    with pytest.raises(ConfigError, match=r"Estimated time per run: fedavg .* above the budget of 1e-05 min.*rounds"):
        unskew.compare(fed, rounds=200, budget_minutes=1e-5, **options)
    assert not out.exists()
    with pytest.raises(ConfigError, match="not valid"):
        unskew.compare(fed, rounds=2, budget_minutes=0, **options)
    plain = unskew.compare(fed, rounds=2, **{**options, "out": None})
    heard = []
    with_estimate = unskew.compare(fed, rounds=2, budget_minutes=60, on_estimate=heard.append, **options)
    assert heard[0].startswith("Estimated time per run: fedavg ")
    losses = [[row["loss"] for row in one.histories["fedavg"][0]] for one in (plain, with_estimate)]
    assert losses[0] == losses[1]


def test_the_command_has_the_budget(capsys, tmp_path):
    result = call(capsys, "compare", "fedavg", *TINY, "--seeds", "0", "--budget", "0", "--out", str(tmp_path / "x"))
    assert result.code != 0
    assert "A time of 0.0 minutes is not valid" in result.err


def test_an_estimate_on_a_busy_machine_says_so(fed, load):
    load(1000.0)
    found = cost.estimate(runs("fedavg"), fed, "logistic", worth=0)
    assert "Other programs keep this machine busy (load 1000)" in str(found)
