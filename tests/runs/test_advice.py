"""Advice: rules and their page, what methods declare, limits, the printed comparison, and trying it."""

import dataclasses
import math
import operator
import re
import shlex

import numpy as np
import pytest
from support.federations import blobs
from support.pages import DOCS, section, table
from support.running import call

import unskew
from unskew.diagnosis.advice_cautions import CAUTIONS
from unskew.diagnosis.advice_rules import RULES
from unskew.diagnosis.features import AdviceLimits
from unskew.diagnosis.successive_halving import validate_advice
from unskew.errors import ConfigError, DataError
from unskew.measurements.feature_skew import feature_skew
from unskew.measurements.label_skew import label_distance_by_chance
from unskew.methods.registry import method

SMALL = {"model": "logistic", "curvature": False, "samples": 20, "rounds": 8, "local_steps": 10, "batch_size": 8}


@pytest.fixture(scope="module")
def report():
    fed = unskew.load_federation("digits", partition="classes:2", clients=5)
    return unskew.diagnose(fed, **SMALL, synthetic_fractions=[0.25], engine="inline")


def names(spellings):
    return [spelling.partition(":")[0] for spelling in spellings]


def test_the_page_lists_the_rules_as_they_are(report):
    """Sources and evidence in their order; the method is that which the rule makes of some situation."""
    text = section((DOCS / "advice.md").read_text(), "The rules")
    rows = table(text)
    situation = dataclasses.replace(report.advice().situation, over_traffic=2.0, features=0.2)
    told = [(re.search("`(.*?)`", row[0])[1], row[2], row[3]) for row in rows]
    assert told == [(names([r.method(situation)])[0], str(r.evidence), r.source) for r in RULES]
    rows = table(text.split("Cautions take")[1])
    assert [(tuple(re.findall("`(.*?)`", row[0])), row[2]) for row in rows] == [(c.methods, c.source) for c in CAUTIONS]
    for rule in (*RULES, *CAUTIONS):
        assert rule.because(situation)


def test_what_skew_asks_for_comes_with_its_numbers(report):
    advice = report.advice()
    assert names(s.method for s in advice.suggestions)[:2] == ["fedssyn", "scaffold"]
    assert [s.rank for s in advice.suggestions] == sorted((s.rank for s in advice.suggestions), reverse=True)
    distance = f"{report.labels['label_distance_mean']:.2f}"
    assert all(distance in s.reasons[0] for s in advice.suggestions if s.method.startswith(("scaffold", "fedavgm")))
    for one in advice.suggestions:
        method(one.method)  # options are within their bounds
        assert one.reasons
        assert one.sources
    prox = next(s for s in advice.suggestions if s.method.startswith("fedprox"))
    found = advice.situation.dissimilarity
    wanted = found / (1 + found) / (0.1 * 10)
    assert float(prox.method.split("=")[1]) == pytest.approx(wanted, rel=0.1)
    assert {e.method: "needs data at the server" in e.reason for e in advice.excluded} == {
        "fedft": True,
        "feddle": True,
    }


def test_costs_sort_methods_of_equal_evidence(report):
    advice = report.advice().with_costs()
    assert {s.method for s in advice.suggestions} == {s.method for s in report.advice().suggestions}
    keys = [(-s.rank, math.inf if s.seconds is None else s.seconds) for s in advice.suggestions]
    assert keys == sorted(keys)
    missing = [s.method.partition(":")[0] for s in advice.suggestions if s.seconds is None]
    assert missing == ["fedssyn"]
    assert all(s.cost > 0 for s in advice.suggestions if s.seconds is not None)
    assert any("Estimated time of FedAvg" in note for note in advice.notes)


def test_limits_leave_out_what_does_not_fit(report):
    advice = report.advice(secure_aggregation=True, server_data=50, privacy="epsilon=5")
    assert advice.suggestions[0].method == "fedft"
    left = {names([e.method])[0]: e.reason for e in advice.excluded}
    assert set(left) == {"feddle", "fedssyn"}
    assert "individual client" in left["feddle"]
    assert "epsilon = 5" in left["fedssyn"]
    assert any("add dp:epsilon=" in note for note in advice.notes)
    assert len(advice.setting.federation.test[1]) == len(report.setting.federation.test[1]) - 50
    # FedAvg sends 2 x 4 x 650 bytes to and from each of five clients, SCAFFOLD twice that.
    each = 2 * 4 * 650 * 5
    advice = report.advice(traffic=1.5 * 8 * each)
    left = {names([e.method])[0]: e.reason for e in advice.excluded}
    assert "more than" in left["scaffold"]
    assert advice.rounds == 8
    assert next(s for s in advice.suggestions if s.method.startswith("fedavgm")).megabytes == pytest.approx(
        8 * each / 1e6
    )
    few = report.advice(traffic=5 * each)
    assert few.rounds == 5
    assert "rounds=5" in few.command()
    assert any("1.6 times" in note for note in few.notes)


def test_limits_are_read_and_refused(report):
    assert AdviceLimits.read("100MB").traffic == 1e8
    assert AdviceLimits.read("1.5 GB", privacy="epsilon=5") == AdviceLimits(traffic=1.5e9, epsilon=5.0)
    for wrong in (
        {"traffic": "many"},
        {"traffic": "-1MB"},
        {"traffic": "1.2.3"},
        {"privacy": "delta=1"},
        {"server_data": 0},
    ):
        with pytest.raises(ConfigError, match=r"is no|not valid"):
            AdviceLimits.read(**wrong)
    with pytest.raises(DataError, match="must keep some"):
        report.advice(server_data=360)


def test_without_skew_it_says_so():
    fed = unskew.load_federation("digits", partition="iid", clients=4)
    advice = unskew.diagnose(fed, **SMALL).advice()
    assert names(s.method for s in advice.suggestions) == ["fedavgm"]
    assert "no label skew" in advice.suggestions[0].reasons[0]
    delayed = unskew.diagnose(fed, **SMALL, network="fixed:2", method="fedavg").advice()
    assert names(s.method for s in delayed.suggestions) == ["fedbuff"]


def test_feature_skew_is_the_share_between_clients():
    """Two clients of one class whose means are ``2 d`` apart and noise of variance 1: ``d^2 / (d^2 + 1)``."""
    draws = np.random.default_rng(0)
    fed = unskew.Federation.from_arrays(
        [((draws.normal(size=(4000, 2)) + s).astype("float32"), np.zeros(4000, int)) for s in (-1, 1)],
        test=(np.zeros((2, 2), "float32"), [0, 1]),
        holdout=0.0,
        normalize=False,
    )
    pairs = [(c.x, c.y) for c in fed.clients]
    assert feature_skew(pairs.__getitem__, [0, 1]) == pytest.approx(0.5, abs=0.02)
    alike = [(fed.clients[0].x[k::2], fed.clients[0].y[k::2]) for k in (0, 1)]
    assert feature_skew(alike.__getitem__, [0, 1]) < 0.002
    assert feature_skew(lambda k: (pairs[k][0].long(), pairs[k][1]), [0, 1]) is None
    drawn = [draws.multinomial(50, np.full(5, 0.2)) / 50 for _ in range(400)]
    measured = np.mean([0.5 * np.abs(q - 0.2).sum() for q in drawn])
    assert label_distance_by_chance(np.full(5, 0.2), [50]) == pytest.approx(measured, rel=0.05)


def test_trying_says_what_held_and_ends_in_time():
    fed = blobs([12, 15, 9, 11])
    advice = unskew.diagnose(
        fed, model="logistic", curvature=False, rounds=4, local_steps=3, lr=0.1, engine="inline"
    ).advice()
    trial = validate_advice(advice, 5)
    assert [t.method for t in trial.tried] == [s.method for s in advice.suggestions]
    assert trial.rungs[-1][1] == 4
    assert [n for n, _ in trial.rungs] == sorted((n for n, _ in trial.rungs), reverse=True)
    plain = unskew.run(fed, model="logistic", rounds=4, local_steps=3, lr=0.1, engine="inline")
    best = next(t for t in trial.tried if t.rounds == 4)
    assert best.baseline == plain.summary["accuracy"]  # as if it had never been stopped
    again = unskew.run(fed, model="logistic", method=best.method, rounds=4, local_steps=3, lr=0.1, engine="inline")
    assert best.accuracy == again.summary["accuracy"]
    assert {t.held for t in trial.tried} <= {True, False, None}
    assert all(t.held == (t.accuracy > t.baseline) for t in trial.tried if t.held is not None)
    short = validate_advice(advice, 1e-9)
    assert "time was up" in str(short)
    with pytest.raises(ConfigError, match="minutes above 0"):
        validate_advice(advice, 0)


@pytest.mark.parametrize("objective", ["loss", "worst_client"])
def test_trying_ranks_by_the_objective(objective):
    options = {
        "model": "logistic",
        "rounds": 2,
        "local_steps": 3,
        "lr": 0.1,
        "engine": "inline",
        "objective": objective,
    }
    fed = unskew.load_federation("digits", partition="dirichlet:0.3", clients=4, max_train_samples=300)
    trial = validate_advice(unskew.diagnose(fed, curvature=False, **options).advice(), 5)
    assert trial.figure == objective
    ranked = next(t for t in trial.tried if t.rounds == 2)
    summary = unskew.run(fed, method=ranked.method, **options).summary
    assert ranked.accuracy == summary[objective]
    assert ranked.selected == (-summary["client_loss_mean"] if objective == "loss" else summary["worst_client"])
    better = operator.lt if objective == "loss" else operator.gt
    assert all(t.held == better(t.accuracy, t.baseline) for t in trial.tried if t.held is not None)


WORDS = (
    "--data digits --clients 3 --model logistic --samples 20 --no-curvature --rounds 1 --local-steps 1 --batch-size 9"
)
LIMITS = "--max-traffic 1MB --secure-aggregation --server-data 100 --privacy epsilon=5 --set engine=inline"


def test_the_command_gives_advice_as_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = call(capsys, "diagnose", *WORDS.split(), "--json").json()["advice"]
    assert found["suggestions"][0]["sources"]
    assert found["command"].startswith("unskew compare fedavg ")
    assert "--local-steps 1" in found["command"]
    assert call(capsys, "diagnose", "--max-traffic", "lots").code == 2
    assert call(capsys, "diagnose", "--validate-minutes", "0").code == 2


@pytest.mark.slow
def test_the_comparison_that_is_printed_can_be_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = call(capsys, "diagnose", *WORDS.split(), *LIMITS.split(), "--out", "x.png", "--validate-minutes", "0.2")
    assert outcome.code == 0, outcome.err
    assert "tested suggestions were confirmed" in outcome.out
    line = next(line for line in outcome.out.splitlines() if line.startswith("unskew compare"))
    assert "--server-data 100" in line
    compared = call(capsys, *shlex.split(line)[1:], "--seeds", "0", "--out", "compared", "--json")
    assert compared.code == 0, compared.err
    assert [row["method"] for row in compared.json()["rows"]] == shlex.split(line)[2:6]


def test_the_terminal_says_that_the_ranking_is_weak(capsys):
    """Also that a method's name is not repeated before a reason that begins with it."""
    from rich.console import Console

    from unskew.cli.advice import print_advice
    from unskew.diagnosis.advice import Advice, Excluded

    left = [Excluded("fedft", "fedft needs data."), Excluded("hfcl", "It would send too much.")]
    print_advice(Console(width=200), Advice([], left, [], 1, None, None), "unskew compare")
    printed = capsys.readouterr().out
    assert "the ranking itself is weak, see docs/advice.md" in printed
    assert "fedft: fedft" not in printed
    assert "hfcl: It would" in printed
