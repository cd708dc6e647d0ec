"""Positive class, class weights, undefined metrics, calibration and intervals of a run with classes."""

import warnings

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, t
from sklearn.metrics import average_precision_score, f1_score, log_loss

import unskew
from unskew.cli.tables import clients_text, summary_table
from unskew.comparison.references import without_global_model
from unskew.config.inference.infer import infer_config
from unskew.errors import ConfigError
from unskew.runs.final_evaluation import calibration_warning
from unskew.tasks.few_samples import has_few_samples

TINY = {"model": "logistic", "rounds": 2, "local_steps": 5, "lr": 0.1, "engine": "inline"}


def rows(n, rare, draws):
    y = (draws.random(n) < rare).astype(int)
    return draws.normal(size=(n, 3)).astype("float32") + y[:, None], y


def federation(rare=0.15, names=("no", "yes"), clients=3, test=None):
    draws = np.random.default_rng(0)
    return unskew.Federation.from_arrays(
        [rows(80, rare, draws) for _ in range(clients)], test=rows(200, rare, draws) if test is None else test,
        class_names=names, holdout=0.2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fed():
    return federation()


ASKED = "auprc,f1,ece,brier,observed_expected,auroc,balanced_accuracy"


def test_the_positive_class_changes_the_metrics_of_one_class_and_nothing_else(fed):
    usual, other = (unskew.run(fed, metrics=ASKED, positive=name, **TINY) for name in (None, "no"))
    p, y = other.predictor().predict_proba(fed.test[0]), fed.test[1].numpy()
    assert torch.equal(usual.vector, other.vector)
    assert other.summary["auprc"] == pytest.approx(average_precision_score(y == 0, p[:, 0]), abs=1e-6)
    assert other.summary["f1"] == pytest.approx(f1_score(y, p.argmax(1), pos_label=0))
    assert other.summary["observed_expected"] == pytest.approx((y == 0).sum() / p[:, 0].sum(), rel=1e-5)
    for name in ("accuracy", "loss", "brier", "auroc", "balanced_accuracy"):
        assert other.summary[name] == pytest.approx(usual.summary[name], rel=1e-6), name
    assert [result.summary["positive"] for result in (usual, other)] == ["yes", "no"]
    assert "AUPRC of no" in "".join(summary_table(other.summary).columns[1].cells)


def test_the_threshold_is_that_of_the_positive_class(fed):
    predictor = unskew.run(fed, positive="no", **TINY).predictor()
    p = np.array([[0.3, 0.7], [0.2, 0.8]])
    assert predictor.labels(p, threshold=0.25) == ["no", "yes"]


@pytest.mark.parametrize(
    ("names", "objective", "positive", "warns"),
    [
        (("fraud", "legit"), "auprc", None, True),
        (("fraud", "legit"), "ece", None, True),
        (("fraud", "legit"), "auprc", "legit", False),
        (("fraud", "legit"), "auroc", None, False),
        (("legit", "sham"), "auprc", None, False),
    ],
)
def test_an_objective_of_the_common_class_is_warned_about(names, objective, positive, warns):
    fed = federation(0.85 if names[0] == "fraud" else 0.15, names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unskew.run(fed, objective=objective, positive=positive, **TINY)
    assert any("Set positive=fraud" in str(warning.message) for warning in caught) is warns


@pytest.mark.parametrize("positive", ["maybe", True])
def test_a_positive_class_that_does_not_exist_is_rejected(fed, positive):
    with pytest.raises(ConfigError, match="positive"):
        unskew.run(fed, positive=positive, **TINY)


def test_more_than_two_classes_have_no_positive_one():
    draws = np.random.default_rng(0)
    parts = [(draws.normal(size=(60, 3)).astype("float32"), np.arange(60) % 3) for _ in range(3)]
    fed = unskew.Federation.from_arrays(parts[:2], test=parts[2])
    with pytest.raises(ConfigError, match="positive=1 must be one of two classes"):
        unskew.run(fed, positive=1, **TINY)
    with pytest.raises(ConfigError, match="calibration_slope needs two classes"):
        unskew.run(fed, metrics="calibration_slope", **TINY)
    with pytest.raises(ConfigError, match="objective=observed_expected is not available"):
        unskew.run(fed, objective="observed_expected", **TINY)


def test_probabilities_are_divided_by_the_class_weights_and_predicted_classes_are_not():
    fed, weights = federation(), np.array([0.5, 4.0])
    result = unskew.run(fed, class_weights=weights.tolist(), metrics=ASKED, **TINY)
    predictor, (x, y) = result.predictor(), (fed.test[0], fed.test[1].numpy())
    with torch.no_grad():
        raw = torch.softmax(predictor.module(predictor.normalize(predictor.prepared(x))).double(), 1).numpy()
    expected = raw / weights / (raw / weights).sum(1, keepdims=True)
    p = predictor.predict_proba(x)
    assert p == pytest.approx(expected, abs=1e-6)
    assert predictor.predict(x) == [("no", "yes")[k] for k in raw.argmax(1)]
    summary = result.summary
    assert summary["accuracy"] == pytest.approx((raw.argmax(1) == y).mean())
    assert summary["f1"] == pytest.approx(f1_score(y, raw.argmax(1)))
    assert summary["loss"] == pytest.approx(log_loss(y, expected), rel=1e-5)
    assert summary["brier"] == pytest.approx(np.square(p[:, 1] - y).mean(), rel=1e-5)
    assert (p.argmax(1) != raw.argmax(1)).any()


def test_probabilities_of_a_rare_class_are_calibrated_with_balanced_weights():
    draws = np.random.default_rng(0)

    def part(n):
        x = draws.normal(size=(n, 2)).astype("float32")
        return x, (draws.random(n) < 1 / (1 + np.exp(3 - x[:, 0]))).astype(int)

    fed = unskew.Federation.from_arrays([part(1500) for _ in range(3)], test=part(4000))
    options = {"model": "logistic", "rounds": 30, "local_epochs": 1, "lr": 0.1, "engine": "inline"}
    summary = unskew.run(
        fed, class_weights="balanced", metrics="observed_expected,calibration_slope", **options
    ).summary
    assert summary["observed_expected"] == pytest.approx(1, abs=0.15)
    assert summary["calibration_slope"] == pytest.approx(1, abs=0.15)


def test_clients_without_a_class_are_counted_and_named():
    draws = np.random.default_rng(0)
    parts = {"Chile": rows(80, 0.3, draws), "Peru": rows(80, 0.3, draws), "Cuba": rows(80, 0.0, draws)}
    fed = unskew.Federation.from_arrays(
        list(parts.values()), test=rows(100, 0.3, draws), holdout=0.3, client_names=list(parts)
    )
    result = unskew.run(fed, objective="auprc", **TINY)
    summary = result.summary
    assert (summary["client_auprc_undefined"], summary["client_auprc_undefined_names"]) == (1, ["Cuba"])
    assert "client_accuracy_undefined" not in summary
    assert "over 2 of 3 clients (undefined for 1 without all classes: Cuba)" in clients_text(summary, "client")
    cuba = next(row for row in result.clients if row["name"] == "Cuba")
    assert (cuba["auprc"], cuba["auprc_low"], cuba["support"]["1"]) == (None, None, 0)
    assert has_few_samples(cuba["num_held_out"], cuba["support"]["1"])
    values = [row["auprc"] for row in result.clients if row["auprc"] is not None]
    half = t.ppf(0.975, 1) * np.std(values, ddof=1) / np.sqrt(2)
    ends = [summary[f"client_auprc_mean_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx([max(0, np.mean(values) - half), min(1, np.mean(values) + half)], rel=1e-5)


def test_an_objective_without_a_test_class_is_explained_before_training(tmp_path):
    draws = np.random.default_rng(0)
    fed = federation(test=(draws.normal(size=(50, 3)).astype("float32"), np.zeros(50, int)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = unskew.run(fed, objective="auprc", **TINY)
        result.plot(tmp_path / "curve.png")
    texts = [str(warning.message) for warning in caught]
    assert sum("undefined on the test set, which has no sample of the class yes" in text for text in texts) == 1
    assert not any("legend" in text for text in texts)
    assert (result.summary["auprc"], result.summary["auprc_low"], result.summary["best_round"]) == (None, None, 0)


@pytest.mark.parametrize("options", [{"early_stopping": 2}, {"keep": "best"}])
@pytest.mark.parametrize(("objective", "undefined"), [("auprc", True), ("recall/yes", True), ("recall/no", False)])
def test_selection_by_a_class_without_held_out_samples_is_rejected(options, objective, undefined):
    draws = np.random.default_rng(0)
    fed = unskew.Federation.from_arrays(
        [rows(80, 0.0, draws) for _ in range(2)], test=rows(80, 0.3, draws), class_names=["no", "yes"], holdout=0.2
    )
    if not undefined:
        unskew.run(fed, objective=objective, **options, **TINY)
        return
    with pytest.raises(ConfigError, match="32 held-out samples, of which none has the class yes"):
        unskew.run(fed, objective=objective, **options, **TINY)
    with pytest.raises(ConfigError, match=r"Tuning needs .* none has the class yes"):
        unskew.tune(fed, methods=["fedavg"], trials=1, objective=objective, **TINY)


def test_constant_test_targets_are_explained():
    draws = np.random.default_rng(0)
    parts = [(draws.normal(size=(40, 2)).astype("float32"), draws.normal(size=40)) for _ in range(2)]
    fed = unskew.Federation.from_arrays(parts, test=(parts[0][0], np.full(40, 2.0)), task="regression")
    with pytest.warns(UserWarning, match="all targets in the test set are equal"):
        unskew.run(fed, **TINY)


@pytest.mark.parametrize("keep", ["last", "best"])
def test_intervals_and_support_are_in_the_summary_and_at_clients(fed, keep):
    result = unskew.run(fed, objective="auprc", keep=keep, **TINY)
    summary, prefix = result.summary, "kept_" if keep == "best" else ""
    y = fed.test[1].numpy()
    assert summary["support"] == {"no": int((y == 0).sum()), "yes": int((y == 1).sum())}
    wilson = binomtest(round(summary[f"{prefix}accuracy"] * len(y)), len(y)).proportion_ci(method="wilson")
    found = [summary[f"{prefix}accuracy_{end}"] for end in ("low", "high")]
    assert found == pytest.approx([wilson.low, wilson.high])
    assert summary[f"{prefix}auprc_low"] < summary[f"{prefix}auprc"] < summary[f"{prefix}auprc_high"]
    for row in result.clients:
        n = row["num_held_out"]
        wilson = binomtest(round(row["accuracy"] * n), n).proportion_ci(method="wilson")
        assert [row["accuracy_low"], row["accuracy_high"]] == pytest.approx([wilson.low, wilson.high])
        assert sum(row["support"].values()) == n
    assert "95 % interval" in "".join(summary_table(summary).columns[1].cells)
    bare = without_global_model(summary)
    assert bare[f"{prefix}accuracy_low"] is None


def test_the_interval_of_a_clients_r2_belongs_to_its_value():
    draws = np.random.default_rng(0)
    parts = [(x := draws.normal(size=(60, 2)).astype("float32"), x[:, 0] + draws.normal(size=60) / 2) for _ in range(3)]
    fed = unskew.Federation.from_arrays(parts[:2], test=parts[2], task="regression", holdout=0.3)
    result = unskew.run(fed, **TINY)
    for row in (result.summary, *result.clients):
        assert row["r2_low"] < row["r2"] < row["r2_high"]


def test_probabilities_far_from_the_observed_share_are_warned_about():
    y = np.repeat([0, 1], [900, 100])
    names = ("alive", "dead")
    high = calibration_warning(y, np.tile([0.6, 0.4], (1000, 1)), names)
    assert "mean probability of dead is 40.0%, but 10.0% of the 1000 test samples are dead" in high
    assert calibration_warning(y, np.tile([0.97, 0.03], (1000, 1)), names) is not None
    assert calibration_warning(y, np.tile([0.87, 0.13], (1000, 1)), names) is None  # below the factor
    assert calibration_warning(y[::100], np.tile([0.8, 0.2], (10, 1)), names) is None  # ten samples: chance
    assert calibration_warning(y, np.full((1000, 2), np.nan), names) is None


def test_init_chooses_the_rare_class_and_an_objective_that_the_data_measure(tmp_path):
    lines = [f"{'ABC'[k % 3]},{k % 7},{k % 11},{'fraud' if k % 25 == 0 else 'legit'}" for k in range(600)]
    (tmp_path / "claims.csv").write_text("site,amount,age,outcome\n" + "\n".join(lines))
    values = infer_config(str(tmp_path / "claims.csv"), "outcome").values
    assert (values["objective"], values["positive"]) == ("auprc", "fraud")
    lines = [f"{'ABC'[k % 3]},{k % 7},{'sarcoid' if k == 7 else ('flu', 'none')[k // 3 % 2]}" for k in range(300)]
    (tmp_path / "visits.csv").write_text("hospital,a,finding\n" + "\n".join(lines))
    values = infer_config(str(tmp_path / "visits.csv"), "finding").values
    assert values["objective"] == "balanced_accuracy"
    assert "positive" not in values
