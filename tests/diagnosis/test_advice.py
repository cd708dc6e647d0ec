"""Advice: rules and their page, what methods declare, limits, the printed comparison, and trying it."""

import itertools
import math
import operator
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.federations import blobs
from support.pages import DOCS
from support.running import call

import unskew
from speed.advice_evidence import score_leaving_out, score_page, summarize_scores
from unskew.diagnosis import advice as advice_module
from unskew.diagnosis.evidence import (
    SCALES,
    SUGGESTED,
    WORTHWHILE,
    ExpectedGain,
    MeasuredFederation,
    complementary,
    coordinates,
    expected_gains,
    load_evidence,
    order_by_cost,
    reliability,
    similarity,
)
from unskew.diagnosis.features import AdviceLimits, SkewFeatures
from unskew.diagnosis.successive_halving import validate_advice
from unskew.diagnosis.traffic_estimate import estimate_traffic
from unskew.errors import ConfigError, DataError
from unskew.measurements.feature_skew import feature_skew
from unskew.methods.registry import method
from unskew.sums.skew import label_distance_by_chance

SMALL = {"model": "logistic", "curvature": False, "samples": 20, "rounds": 8, "local_steps": 10, "batch_size": 8}


@pytest.fixture(scope="module")
def report():
    fed = unskew.load_federation("digits", partition="classes:2", clients=5)
    return unskew.diagnose(fed, **SMALL, synthetic_fractions=[0.25], engine="inline")


IN_ORDER = {
    "fedft": 5,
    "feddle": 4,
    "scaffold": 3,
    "fedssyn:generator=gan-small": 2,
    "fedavgm": 1.4,
    "fedprox": 0.7,
    "moon": 0.1,
}
"""Gains in the evidence of these tests, which does not depend on measurements."""


@pytest.fixture(autouse=True)
def evidence(monkeypatch):
    """Evidence of one federation that is unlike any other."""
    gains = {"global": IN_ORDER, "clients": {"fedavgm": 2.0, "ditto": 1.0}}
    place = {"clients": 9.0}
    only = MeasuredFederation("only", "Only", place, gains, {"global": [], "clients": []}, {})
    monkeypatch.setattr(advice_module, "load_evidence", lambda: ([only], {}))


def names(spellings):
    return [spelling.partition(":")[0] for spelling in spellings]


def measured(name, place, gains, traffic=1.0):
    """A federation of the benchmark with the same gains in both views."""
    by_view = {"global": gains, "clients": gains}
    return MeasuredFederation(name, name, place, by_view, {"global": [], "clients": []}, dict.fromkeys(gains, traffic))


def test_expected_gain_is_a_kernel_average_shrunk_to_the_mean():
    near, far = {"label skew": 0.5, "clients": 1.0}, {"label skew": 0.0, "clients": 2.4}
    evidence = [measured("a", near, {"x": 4.0, "y": -1.0}), measured("b", far, {"x": 0.0})]
    weight = math.exp(-((0.5 / 0.25) ** 2 + (1.4 / 0.7) ** 2) / 2)
    by_name = {entry.method: entry for entry in expected_gains(near, "global", evidence)}
    assert by_name["x"].gain == pytest.approx((2.0 + 1.0 * 4.0 + weight * 0.0) / (1 + 1 + weight))
    assert by_name["y"].gain == pytest.approx(-1.0)  # measured once: the mean is that measurement
    assert by_name["x"].measured == [("a", 4.0), ("b", 0.0)]
    large = expected_gains(near, "global", [measured("a", near, {"x": 500.0})])
    assert large[0].gain == pytest.approx(10.0)
    assert similarity({"kind of inputs": "images"}, {"kind of inputs": "texts"}) == pytest.approx(math.exp(-0.5))
    assert similarity({"feature skew": None, "clients": 1.0}, {"feature skew": 0.9, "clients": 1.0}) == 1.0


@pytest.mark.parametrize("kind", ["images", "texts", "vectors"])
def test_kind_of_inputs_does_not_depend_on_the_model(tmp_path, kind):
    """A table with categories has a model with embeddings, as texts have."""
    path = tmp_path / "rows.csv"
    rows = "".join(f"{i % 3},{('low', 'high')[i % 2]} {i},{'ABC'[i % 3]},{'NY'[i % 2]}\n" for i in range(60))
    path.write_text(f"x,note,group,y\n{rows}")
    options = {
        "images": {"data": "digits", "model": "mlp"},
        "texts": {"data": f"text:{path}", "text": "note", "label": "y", "model": "text-mlp"},
        "vectors": {"data": f"table:{path}", "exclude": ["note"], "categories": ["group"], "label": "y"},
    }[kind]
    report = unskew.diagnose(**{**SMALL, "model": "table-mlp", "clients": 3, **options})
    features = SkewFeatures.of(report.setting, report.labels, report.measurements[0], report.details)
    assert coordinates(features)["kind of inputs"] == kind


def test_close_gains_are_ordered_by_cost():
    gains = [("a", 3.0, 2.0), ("b", 2.6, 1.0), ("c", 2.4, 0.5), ("d", -1.0, 0.1)]
    expected = [ExpectedGain(name, gain, [], 1, traffic) for name, gain, traffic in gains]
    assert [entry.method for entry in order_by_cost(expected, lambda entry: entry.traffic)] == ["b", "a", "c", "d"]


def test_the_first_three_methods_complement_each_other():
    """``b`` gains where ``a`` does not; ``c`` gains more than ``b`` on average, but only where ``a`` gains more."""
    place = {"label skew": 0.5}
    evidence = [measured("first", place, {"a": 6.0, "b": -1.0, "c": 5.0, "d": 1.0})]
    evidence.append(measured("second", place, {"a": 1.0, "b": 4.0, "c": 0.0, "d": 2.0}))
    expected = expected_gains(place, "global", evidence)
    assert [entry.method for entry in expected] == ["a", "c", "b", "d"]
    assert {entry.federations for entry in expected} == {2}
    ordered = complementary(expected, place, "global", evidence)
    assert [entry.method for entry in ordered] == ["a", "b", "c", "d"]
    assert complementary([], place, "global", evidence) == []


def test_scores_leave_the_federation_out():
    """With itself in the evidence, the advice for ``odd`` would be ``x``."""
    place = {"label skew": 0.5}
    evidence = [measured(name, place, {"x": -2.0, "y": 2.0}, 0.5) for name in "abc"]
    evidence.append(measured("odd", place, {"x": 50.0, "y": 1.0}, 0.5))
    rows = {row["federation"]: row for row in score_leaving_out(evidence, "global")}
    assert rows["odd"]["advised"] == ["y"]
    assert (rows["odd"]["first"], rows["odd"]["best_of_all"], rows["odd"]["best_method"]) == (1.0, 50.0, "x")
    assert rows["odd"]["traffic"] == 0.5
    assert score_leaving_out(evidence[:3], "global", evidence[3:]) == [rows["odd"]]
    scores = summarize_scores(list(rows.values()))
    assert scores["first_above"] == 1.0 or rows["a"]["advised"][0] == "x"
    assert scores["missing"] == pytest.approx(
        sum(row["best_of_all"] - max(0, row["best_of_advised"]) for row in rows.values()) / 4
    )


def test_page_and_terminal_have_the_scores_of_the_evidence():
    page = " ".join((DOCS / "advice.md").read_text().split())
    evidence, stored = load_evidence()
    others = [MeasuredFederation(**federation) for federation in stored["other_federations"]]
    assert {federation.name for federation in evidence}.isdisjoint(federation.name for federation in others)
    for tables in (score_page(evidence), score_page(evidence, others)):
        assert tables in (DOCS / "results" / "advice.md").read_text()
    for view in ("global", "clients"):
        scores = summarize_scores(score_leaving_out(evidence, view))
        assert {name: round(value, 3) for name, value in scores.items()} == stored["scores"][view]
    assert f"{stored['scores']['global']['within_one_point']:.0%}" in reliability("global")
    for name, scale in SCALES.items():
        assert f"| {name} | {scale:g} |" in page
    for federation in evidence:
        assert set(federation.coordinates) == set(SCALES)
        for expression in federation.gains["clients"]:
            method(expression)


def test_suggestions_are_the_expected_gains_that_fit(report):
    advice = report.advice()
    assert names(s.method for s in advice.suggestions) == ["scaffold", "fedssyn", "fedavgm", "fedprox"]
    assert [s.gain for s in advice.suggestions] == pytest.approx([3, 2, 1.4, 0.7])
    assert [s.method for s in advice.personal] == ["fedavgm", "ditto"]
    assert advice.methods == ["fedavg", *(s.method for s in advice.suggestions[:3]), "ditto", "local"]
    assert advice.suggestions[0].reason.startswith("Expected gain over tuned FedAvg: +3.0 points, a mean over ")
    assert "a mean over 1 measured federation," in advice.suggestions[0].reason
    assert advice.suggestions[0].reason.endswith("The most similar: Only (+3.0).")
    assert {e.method: "needs data at the server" in e.reason for e in advice.excluded} == {
        "fedft": True,
        "feddle": True,
    }
    assert any("Tune first" in note for note in advice.notes)


def test_measured_evidence_suggests_methods_that_exist():
    """The file in the package, whatever was measured."""
    for entry in expected_gains({"label skew": 0.5}, "clients", load_evidence()[0]):
        method(entry.method)
    assert WORTHWHILE > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice_module, "load_evidence", lambda: ([], {}))
        fed = unskew.load_federation("digits", partition="iid", clients=4)
        advice = unskew.diagnose(fed, **SMALL).advice()
    assert advice.suggestions == []
    assert advice.methods == ["fedavg"]
    assert any("Keep FedAvg" in note for note in advice.notes)


def test_costs_order_methods_of_close_gains(report):
    advice = report.advice().with_costs()
    assert {s.method for s in advice.suggestions} == {s.method for s in report.advice().suggestions}
    for part in (advice.suggestions[:SUGGESTED], advice.suggestions[SUGGESTED:]):
        ordered = order_by_cost(sorted(part, key=lambda s: -s.gain), lambda s: s.cost or math.inf)
        assert [s.method for s in part] == [s.method for s in ordered]
    assert all(s.cost > 0 for s in advice.suggestions if not s.method.startswith("fedssyn"))
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
    assert feature_skew(pairs.__getitem__, [0, 1], 2) == pytest.approx(0.5, abs=0.02)
    alike = [(fed.clients[0].x[k::2], fed.clients[0].y[k::2]) for k in (0, 1)]
    assert feature_skew(alike.__getitem__, [0, 1], 2) < 0.002
    assert feature_skew(lambda k: (pairs[k][0].long(), pairs[k][1]), [0, 1], 2) is None
    drawn = [draws.multinomial(50, np.full(5, 0.2)) / 50 for _ in range(400)]
    measured = np.mean([0.5 * np.abs(q - 0.2).sum() for q in drawn])
    assert label_distance_by_chance(np.full(5, 0.2), 50**-0.5) == pytest.approx(measured, rel=0.05)


def test_trying_says_what_held_and_ends_in_time():
    draws = np.random.default_rng(0)
    pairs = [(draws.normal(size=(n, 3)).astype("float32"), np.arange(n) % 3) for n in (12, 15, 9, 11)]
    fed = unskew.Federation.from_arrays(pairs, test=pairs[1], holdout=0.3)
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
    stopping = {**vars(advice.setting.config), "early_stopping": 1, "keep": "best"}
    setting = replace(advice.setting, config=advice.setting.config.model_copy(update=stopping))
    same = validate_advice(replace(advice, setting=setting), 5)
    assert [replace(t, seconds=0) for t in same.tried] == [replace(t, seconds=0) for t in trial.tried]
    unknown = unskew.Federation.from_arrays(pairs, test=pairs[1], holdout=0)
    with pytest.raises(ConfigError, match="held-out samples of clients, but there are none"):
        validate_advice(replace(advice, setting=replace(advice.setting, federation=unknown)), 5)
    short = validate_advice(advice, 1e-9)
    assert "time was up" in str(short)
    with pytest.raises(ConfigError, match="minutes above 0"):
        validate_advice(advice, 0)
    diverged = replace(trial.tried[0], accuracy=None, baseline=1.5, held=False)
    assert "(loss -, FedAvg 1.5000)" in str(replace(trial, tried=[diverged], figure="loss"))


@pytest.mark.parametrize("objective", ["loss", "worst_client"])
def test_trying_ranks_by_the_objective(objective, monkeypatch):
    monkeypatch.delitem(IN_ORDER, "fedssyn:generator=gan-small")  # training generators takes seconds
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
    assert found["suggestions"][0]["measured"] == [["Only", 3.0]]
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
    methods = itertools.takewhile(lambda word: not word.startswith("--"), shlex.split(line)[2:])
    assert [row["method"] for row in compared.json()["rows"]] == list(methods)


def test_the_terminal_says_how_often_advice_was_right(capsys):
    """Also that a method's name is not repeated before a reason that begins with it."""
    from rich.console import Console

    from unskew.cli.advice import print_advice
    from unskew.diagnosis.advice import Advice, Excluded, Suggestion

    left = [Excluded("fedft", "fedft needs data."), Excluded("hfcl", "It would send too much.")]
    some = [Suggestion("scaffold", 1.25, [("Only", 2.0)], 1, [])]
    print_advice(
        Console(width=200),
        Advice(some, [], left, [], 1, None, SimpleNamespace(needs_personal_models=False, task="classification")),
        "unskew compare",
    )
    printed = capsys.readouterr().out
    assert reliability("global") in " ".join(printed.split())
    assert "fedft: fedft" not in printed
    assert "hfcl: It would" in printed


def test_without_evidence_for_the_task_there_are_no_expected_gains(capsys, monkeypatch):
    from rich.console import Console

    from unskew.cli.advice import print_advice

    draws = np.random.default_rng(0)
    clients = [
        (draws.normal(size=(60, 2)), np.stack([draws.exponential(100, 60), draws.random(60) < 0.7], 1))
        for _ in range(3)
    ]
    federation = unskew.Federation.from_arrays(clients, test=clients[0], task="survival", options={"until": 500})
    advice = unskew.diagnose(federation, model="proportional", curvature=False).advice()
    assert advice.suggestions
    print_advice(Console(width=200), advice, "unskew compare")
    printed = capsys.readouterr().out
    assert printed.strip().startswith("There is no evidence for the task survival")
    assert "Expected gain" not in printed
    assert reliability("global") not in " ".join(printed.split())
    plain = advice.as_json()
    assert {entry["gain"] for entry in plain["suggestions"] + plain["personal"]} == {None}
    assert plain["notes"][0] == advice.caveat == str(advice).splitlines()[0]


@pytest.mark.filterwarnings("ignore:With power-of-choice")
@pytest.mark.parametrize("name", ["fedavg", "fedper", "local"])
def test_the_traffic_estimate_counts_the_candidates_of_power_of_choice(name):
    values = {"model": "mlp", "participation": 0.25, "sampling": "power-of-choice:5", "local_steps": 1, "lr": 0.1}
    fed = blobs([6, 30, 12, 24, 9, 18, 15, 21])
    setting = unskew.diagnose(fed, **values, curvature=False, samples=6).setting
    each = estimate_traffic(setting, method(name))[1]
    summary = unskew.run(fed, method=name, rounds=4, engine="inline", **values).summary
    assert each == (summary["bytes_up"] + summary["bytes_down"]) / 4


TINY_RUN = {"model": "mlp", "model_options": {"hidden": [8]}, "local_steps": 1, "batch_size": 8, "lr": 0.05}


def estimated_and_sent(federation, name, **values):
    """Return the estimated bytes of a run, and those that the run has sent."""
    values = {**TINY_RUN, **values}
    setting = unskew.diagnose(federation, **values, curvature=False, samples=6).setting
    before, each = estimate_traffic(setting, method(name))
    summary = unskew.run(federation, method=name, engine="inline", **values).summary
    return before + each * values["rounds"], summary["bytes_up"] + summary["bytes_down"]


@pytest.mark.parametrize(
    "name",
    [
        *("fedavg", "fedfomo", "fedals:alpha=4", "ccvr", "int8:down=true", "topk:down=true", "floco:endpoints=8"),
        *("vhl:per_class=3", "feddm:server_epochs=1,image_lr=0.1", "ifca", "scaffold"),
    ],
)
def test_the_estimated_traffic_is_that_of_a_run(name):
    """Also if messages depend on the number of clients, on missed rounds, on classes, or follow the last round."""
    estimated, sent = estimated_and_sent(blobs([16, 30, 12, 24, 18, 16, 15, 21]), name, rounds=6, participation=0.5)
    assert estimated == pytest.approx(sent)


@pytest.mark.parametrize("name", ["fedavg", "fedals", "fedfomo", "ccvr"])
def test_the_estimated_traffic_of_many_rounds_is_that_of_a_run(name):
    estimated, sent = estimated_and_sent(blobs([16] * 7), name, rounds=33)
    assert estimated == pytest.approx(sent)


@pytest.mark.parametrize("name", ["fedavg", "fedfomo:models=3", "floco:endpoints=15"])
def test_the_estimated_traffic_of_many_clients_is_that_of_a_run(name):
    """One of the methods needs more clients than the estimate counts."""
    estimated, sent = estimated_and_sent(blobs([16] * 15), name, rounds=3)
    assert estimated == pytest.approx(sent)


def test_a_method_whose_traffic_cannot_be_estimated_does_not_end_the_advice(report, monkeypatch):
    def failing(setting, chosen):
        if chosen.name == "scaffold":
            raise KeyError("y")
        return estimate_traffic(setting, chosen)

    monkeypatch.setattr("unskew.diagnosis.advice.estimate_traffic", failing)
    advice = report.advice(traffic="100MB")
    reasons = {entry.method: entry.reason for entry in advice.excluded}
    assert reasons["scaffold"] == "Its traffic could not be estimated (KeyError): 'y'"
    assert advice.suggestions
