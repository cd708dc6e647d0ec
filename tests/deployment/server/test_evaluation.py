"""``deploy evaluate``: only metrics leave the sites, and they are those of a simulation."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.running import call
from support.sites import TINY, LoopPlace, deployed

import unskew
from unskew.config.loader import experiment
from unskew.data.load import load_partitioned
from unskew.deployment.common.audit_log import read_events
from unskew.deployment.flower.superlinks import RunLocation
from unskew.deployment.server.evaluation import EvaluationPlan, evaluate_run
from unskew.deployment.site.evaluation import every_metric
from unskew.deployment.site.process import SiteProcess
from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.serving.load import load_predictor
from unskew.simulation.evaluate import Evaluator

CANCER = {**TINY, "data": "breast_cancer", "partition": "iid", "max_train_samples": None, "holdout": 0.4}
EVERYTHING = {"allow": ["global", "local", "personal", "foreign"], "share_local": True}
NAMES = [
    *("auroc", "auprc", "f1", "recall", "balanced_accuracy", "ece", "brier"),
    "observed_expected",
    "calibration_slope",
]
DIGITS = {"holdout": 0.3, "max_train_samples": 300}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of a finished run over sites, which each test copies."""
    folder = tmp_path_factory.mktemp("finished")
    deployed(folder, **CANCER)
    return folder


@pytest.fixture
def again(finished, tmp_path):
    """Return a function that starts the sites of the finished run with other permissions."""
    shutil.copytree(finished, tmp_path / "of")

    def start(options=CANCER, **policy):
        return LoopPlace(tmp_path / "of", options, evaluate=policy)

    return start


def evaluated(place, *models, **plan):
    told = []
    rows = evaluate_run(place.folder / "run", EvaluationPlan(models or ("global",), **plan), place, told.append)
    return rows, told


def values(rows, model="global", **about):
    found = [row for row in rows if row["model"] == model and all(row[name] == value for name, value in about.items())]
    return {row["metric"]: row["value"] for row in found}


def test_the_global_model_has_the_metrics_of_the_simulation_at_every_site(again):
    place = again()
    rows, _ = evaluated(place)
    simulated = unskew.run(**CANCER, metrics=NAMES, objective="auroc")
    for client in simulated.clients:
        found = values(rows, client=client["client"])
        assert len(found) == len(NAMES) + 3  # accuracy, loss and the recall of two classes
        for name, value in found.items():
            assert value == pytest.approx(client[name], rel=1e-6), (
                name
            )  # a simulation evaluates all clients in one batch
        (auroc,) = (row for row in rows if row["client"] == client["client"] and row["metric"] == "auroc")
        assert (auroc["low"], auroc["high"]) == pytest.approx((client["auroc_low"], client["auroc_high"]), rel=1e-6)
        assert auroc["n"] == client["num_held_out"]
        assert auroc["support"] == dict(zip(("malignant", "benign"), client["support"].values(), strict=True))
    assert json.loads((place.folder / "run" / "evaluation.json").read_text()) == rows
    replies = [frame for _, frame in place.link.received if frame.kind == "scored"]
    assert len(replies) == 3
    assert not any(frame.arrays for frame in replies)
    events, _ = read_events(place.folder / "run" / "audit.jsonl", verify=True)
    assert [event["event"] for event in events[-4:]] == ["evaluation requested", *["evaluated"] * 3]


BATCH_NORM = {
    "model": "resnet20",
    "rounds": 2,
    "local_steps": 1,
    "max_train_samples": 90,
    "batch_size": 4,
    "holdout": 0.3,
}


@pytest.mark.parametrize(
    "options",
    [
        {**CANCER, "participation": 0.7, "rounds": 3, "method": "scaffold"},
        {**CANCER, "class_weights": "balanced"},
        pytest.param({**TINY, **BATCH_NORM, "method": "fedprox", "buffers": "local"}, marks=pytest.mark.slow),
    ],
)
def test_local_is_the_reference_of_the_simulation(options, tmp_path):
    place = LoopPlace(tmp_path, options, evaluate={"allow": ["local"]})
    deployed(tmp_path, place, **options)
    rows, told = evaluated(place, "local")
    alone = unskew.run(**{**options, "method": "local", "buffers": "average"})
    for client in alone.clients:
        found = values(rows, "local", client=client["client"], trained_at=f"site-{client['client']}")
        assert found["accuracy"] == client["personal_accuracy"]
        assert found["loss"] == client["personal_loss"]
    assert len(told) == 1  # no reason, only that it waits for the sites


@pytest.mark.parametrize("method", ["fedrep", "scaffold+ft"])
def test_personal_models_are_those_of_the_run(method, tmp_path):
    options = {**CANCER, "method": method, "model": "mlp"}
    place = LoopPlace(tmp_path, options, evaluate={"allow": ["personal"]})
    deployed(tmp_path, place, **options)
    rows, _ = evaluated(place, "personal")
    for client in unskew.run(**options).clients:
        found = values(rows, "personal", client=client["client"])
        assert found["accuracy"] == client["personal_accuracy"]
        assert found["loss"] == client["personal_loss"]
    shutil.rmtree(place.sites[1].folder / "state")
    with_lost, told = evaluated(LoopPlace(tmp_path, options, evaluate={"allow": ["personal"]}), "personal", level=0.9)
    assert values(with_lost, "personal", client=1) == {"accuracy": None}
    assert values(with_lost, "personal", client=0)["loss"] == values(rows, "personal", client=0)["loss"]
    assert any("this site's" in text for text in told)


def test_the_matrix_has_every_model_on_the_data_of_every_site(again):
    place = again(**EVERYTHING)
    rows, _ = evaluated(place, "global", cross=True, metrics=("accuracy", "loss"))
    alone = unskew.run(**{**CANCER, "method": "local"}, out=place.folder / "alone")
    federation = federation_of_cancer()
    for trainer in range(3):
        predictor = load_predictor(place.folder / "alone", client_number=trainer)
        for client in range(3):
            data = federation.clients[client]
            right = predictor.outputs(data.x_test.numpy()).argmax(1) == data.y_test.numpy()
            found = values(rows, "local", client=client, trained_at=f"site-{trainer}")
            assert found["accuracy"] == pytest.approx(float(np.mean(right)))
    assert [row["personal_loss"] for row in alone.clients] == [
        values(rows, "local", client=k, trained_at=f"site-{k}")["loss"] for k in range(3)
    ]
    assert {*values(rows, client=0)} == {"accuracy", "loss"}


def federation_of_cancer():
    config = experiment(CANCER)
    drawn = load_partitioned(config.data_spec, config.seed)
    return drawn.federation(drawn.known())


def test_missing_permissions_leave_cells_of_the_matrix_empty(again):
    place = again(**EVERYTHING)
    policies = [{"share_local": False}, {"allow": ("global", "local")}, {"allow": ("global",)}]
    for site, change in zip(place.sites, policies, strict=True):
        policy = site.config.evaluate.model_copy(update=change)
        site.config = site.config.model_copy(update={"evaluate": policy})
    rows, _ = evaluated(place, cross=True, metrics=("accuracy",))
    matrix = {(row["trained_at"], row["site"]): row for row in rows if row["model"] == "local"}
    filled = {cell for cell, row in matrix.items() if row["value"] is not None}
    assert filled == {("site-0", "site-0"), ("site-1", "site-1"), ("site-1", "site-0")}
    assert len(matrix) == 9
    assert "needs evaluate.share_local: true" in matrix["site-0", "site-1"]["reason"]
    assert "needs evaluate.allow: [global, foreign]" in matrix["site-1", "site-2"]["reason"]
    assert "needs evaluate.allow: [global, local]" in matrix["site-2", "site-0"]["reason"]
    shared = [frame for client, frame in place.link.received if frame.kind == "scored" and frame.arrays]
    assert len(shared) == 1


def test_without_any_permission_the_line_of_the_sites_file_is_named(again):
    with pytest.raises(ConfigError, match=r"No site has scored .* site.yaml needs evaluate.allow: \[global\]"):
        evaluated(again(allow=[]))


def test_a_repeated_request_gets_the_stored_reply_and_the_number_of_models_is_limited(again, monkeypatch):
    place = again(allow=["global", "local"], max_models=2)
    rows, _ = evaluated(place, "global", "local")
    restarted = again(allow=["global", "local"], max_models=2)

    def unexpected(*args, **kwargs):
        raise AssertionError("a site evaluated a model again")

    with monkeypatch.context() as stored_only:
        stored_only.setattr(Evaluator, "evaluate_client", unexpected)
        assert evaluated(restarted, "global", "local")[0] == rows
        assert evaluated(restarted, "global", metrics=("loss",))[0] == [row for row in rows if is_global_loss(row)]
    with pytest.raises(ConfigError, match=r"has scored 2 models of this experiment, the evaluate\.max_models"):
        evaluated(restarted, level=0.9)


def is_global_loss(row):
    return row["model"] == "global" and row["metric"] == "loss"


def test_a_site_that_is_killed_is_asked_again_when_it_is_back(again, short_waits):
    place = again(allow=["global", "local"])
    lost = {1: 2, 2: 1}

    def killed(client, asked, answer):
        """A restarted process has nothing but its disk."""
        if asked.kind not in ("score", "local") or not lost.get(client):
            return answer
        lost[client] -= 1
        place.sites[client] = SiteProcess(place.sites[client].folder / "site.yaml", log=lambda line: None)
        return type(answer)("failed", {"reason": "the site's process ended"})

    place.link.spoil = killed
    rows, _ = evaluated(place, "global", "local")
    assert lost == {1: 0, 2: 0}
    assert {row["client"] for row in rows if row["value"] is not None} == {0, 1, 2}
    assert {*values(rows, "local", client=1)} == {*values(rows, "local", client=0)}


def test_small_classes_are_neither_counted_nor_recalled(tmp_path):
    _, place = deployed(tmp_path, **DIGITS)
    rows, _ = evaluated(place)
    supports = {row["client"]: row["support"] for row in rows}
    for client in unskew.run(**{**TINY, **DIGITS}).clients:
        shown = supports[client["client"]]
        for name, count in client["support"].items():
            assert shown[name] == (count if count >= 10 else "<10") or shown[name] is None
            assert (f"recall/{name}" in values(rows, client=client["client"])) == isinstance(shown[name], int)
    assert any(isinstance(count, int) for shown in supports.values() for count in shown.values())


def test_a_site_without_held_out_samples_says_so(tmp_path):
    _, place = deployed(tmp_path, holdout=0)
    with pytest.raises(ConfigError, match="site-0 has no held-out samples"):
        evaluated(place)


def test_a_local_model_is_not_trained_without_the_privacy_of_the_experiment(tmp_path):
    options = {**CANCER, "method": "dpsgd:noise=1", "rounds": 1, "local_steps": 1}
    place = LoopPlace(tmp_path, options, evaluate=EVERYTHING)
    deployed(tmp_path, place, **options)
    rows, told = evaluated(place, "global", "local")
    assert values(rows, client=0)["accuracy"] is not None
    assert any("would lack the privacy of dpsgd" in text for text in told)
    assert not [frame for _, frame in place.link.received if frame.arrays and frame.kind == "scored"]


def test_a_regression_is_evaluated_with_the_scale_of_the_run(tmp_path):
    options = {**CANCER, "data": "diabetes"}
    _, place = deployed(tmp_path, **options)
    rows, _ = evaluated(place, level=0.9)
    for client in unskew.run(**options).clients:
        found = values(rows, client=client["client"])
        for name in ("r2", "loss", "mae", "rmse"):
            assert found[name] == pytest.approx(client[name], rel=1e-6), name
    assert all(row["low"] < row["value"] < row["high"] and row["support"] == {} for row in rows)


def test_language_models_have_no_intervals():
    """The tokens of a text are not independent."""
    texts = np.arange(40).reshape(10, 4) % 7
    parts = [(texts[:, :-1], texts[:, 1:])] * 2
    data = unskew.Federation.from_arrays(parts, parts[0], task="language", classes=7, holdout=0.5)
    metric_set = every_metric(SimpleNamespace(original=data, config=experiment({})), 0.9)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
    spec = ModelSpec(model, (3,), 7, input_dtype=torch.int64, per_token=True)
    evaluator = Evaluator(spec, data, data.objective, torch.device("cpu"), metric_set)
    score = evaluator.evaluate_client(spec.flatten(), spec.flatten_buffers(), data.clients[0], each=True)
    assert {*score.metrics} == {"perplexity", "exact_match"}


def test_the_command_prints_tables_or_json(again, monkeypatch, capsys):
    place = again(**EVERYTHING)
    monkeypatch.setattr(RunLocation, "superlink", lambda self, folder, config, resumed: place)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["deploy", "evaluate", place.folder / "run", "--local", 3]
    shown = call(capsys, *arguments, "--models", "global,local,pooled", "--cross", "--metrics", "accuracy,auroc")
    assert shown.code == 0
    assert "pooled is left out" in shown.out
    assert "accuracy, %: each model (rows) on the held-out samples of each site (columns)" in " ".join(
        shown.out.split()
    )
    assert "local of site-2" in shown.out
    as_json = call(capsys, *arguments, "--json", "--level", "0.8", "--out", place.folder / "other.json")
    assert as_json.json() == json.loads((place.folder / "other.json").read_text())
    for option, why in {
        "--models=best": "There is no model 'best'",
        "--metrics=auc": "There is no metric 'auc'. Did you mean 'auroc'",
        "--level=95": "level=95 must be at least 0.5 and below 1",
        "--local=2": "--local 2 does not match the 3 clients of the run",
    }.items():
        refused = call(capsys, *arguments, option)
        assert refused.code == 2
        assert why in refused.err
    unskew.run(**CANCER, out=place.folder / "simulated")
    refused = call(capsys, "deploy", "evaluate", place.folder / "simulated", "--local", 3)
    assert refused.code == 2
    assert "was simulated. Evaluate it on a file with unskew evaluate" in refused.err


def test_a_model_of_another_size_or_without_a_name_is_refused(again):
    place = again(**EVERYTHING)
    evaluated(place)
    client, asked = next((client, frame) for client, frame in place.link.sent if frame.kind == "score")
    site = place.sites[client]
    for changed, why in (
        (replace(asked, config={**asked.config, "model": "best"}), "unknown model"),
        (replace(asked, config={**asked.config, "level": 2.0}), "level"),
        (replace(asked, arrays={**asked.arrays, "model/v": asked.arrays["model/b"]}), "model/v"),
    ):
        answer = site.answer(changed)
        assert answer.kind == "refused"
        assert why in answer.config["reason"]
