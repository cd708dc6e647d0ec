"""A trained model in use: the same predictions as where it was trained, and refusals of what it does not take."""

import csv
import json
import math
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.received import bind_inputs
from support.running import call

import unskew
from unskew.checked_tensors import encode_checked
from unskew.cli.predict import format_value
from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.progress import report_progress_to

TINY = {"rounds": 2, "local_steps": 5, "engine": "inline"}
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict") / "run"
    return unskew.run(data="digits", model="mlp", method="scaffold", clients=3, lr=0.1, out=folder, **TINY)


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """A table whose sum of two columns decides, and a run on it that leaves one column out."""
    folder = tmp_path_factory.mktemp("patients")
    draws = np.random.default_rng(0)
    with (folder / "p.csv").open("w") as file:
        out = csv.writer(file)
        out.writerow(["bmi", "ward", "age", "noise", "sick"])
        for number in range(80):
            age, bmi, noise = draws.normal(size=3)
            out.writerow([bmi, "abc"[number % 3], age, noise, "yes" if age + bmi > 0 else "no"])
    options = {"label": "sick", "partition": "natural:ward", "features": ["age", "bmi"], "model": "logistic", "lr": 0.5}
    unskew.run(data=f"table:{folder / 'p.csv'}", out=folder / "run", **options, **TINY)
    return folder


def test_a_loaded_model_says_of_the_test_set_what_the_run_said(digits):
    x, y = unskew.load_federation("digits", clients=3).test
    loaded = unskew.load_predictor(digits.folder)
    labels = loaded.predict(x)
    assert (
        np.mean([label == str(int(true)) for label, true in zip(labels, y, strict=True)]) == digits.summary["accuracy"]
    )
    assert digits.predict(x) == labels
    probabilities = loaded.predict_proba(x)
    assert probabilities.shape == (len(y), 10)
    assert np.allclose(probabilities.sum(1), 1)
    assert loaded.predict(x[:0]) == []


def test_images_of_any_size_and_order_of_channels_are_brought_to_the_models(digits, tmp_path, capsys):
    x = unskew.load_federation("digits", clients=3).test[0][:3]
    loaded = unskew.load_predictor(digits.folder)
    first = loaded.predict_proba(x)
    assert np.array_equal(loaded.predict_proba(x.permute(0, 2, 3, 1).numpy()), first)
    colors = x.expand(-1, 3, -1, -1)
    assert np.allclose(loaded.predict_proba(colors), first, atol=0.02)  # luminance is rounded to integers
    for number, image in enumerate(x):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{number}.png")
    said = []
    with report_progress_to(lambda *what: said.append(what), after=0):
        loaded.predict_file(tmp_path)
    assert said == [("images read", 0, 3), ("predicted", 0, 3)]
    found = call(capsys, "predict", str(digits.folder), str(tmp_path), "--json").json()
    assert [line["row"] for line in found] == ["0.png", "1.png", "2.png"]
    assert [line["predicted_label"] for line in found] == loaded.predict(x)
    assert [line["p(3)"] for line in found] == pytest.approx(first[:, 3].tolist(), rel=1e-5)
    Image.fromarray(x[0, 0].numpy()).resize((21, 13)).save(tmp_path / "other.png")
    assert len(call(capsys, "predict", str(digits.folder), str(tmp_path / "other.png"), "--json").json()) == 1


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_of_a_table_are_read_by_the_names_of_their_columns(patients, capsys, tmp_path, kind):
    """In another order, without the label, with a column that nobody knows."""
    rows = [{"age": 2.0, "bmi": 1.5, "city": "x"}, {"age": -2.0, "bmi": -1.0, "city": "y"}]
    new = tmp_path / f"new.{kind}"
    if kind == "csv":
        new.write_text("city,age,bmi\n" + "".join(f"{r['city']},{r['age']},{r['bmi']}\n" for r in rows))
    else:
        new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / f"out.{kind}"
    text = call(capsys, "predict", str(patients / "run"), str(new), "--out", str(out)).out
    assert "yes" in text
    if kind == "csv":
        written = list(csv.DictReader(out.open()))
    else:
        written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["predicted_sick"] for line in written] == ["yes", "no"]
    expected = unskew.load_predictor(patients / "run").predict_proba([[2.0, 1.5], [-2.0, -1.0]])
    assert [float(line["p(sick=yes)"]) for line in written] == pytest.approx(expected[:, 1].tolist(), abs=1e-6)
    assert [line["row"] for line in written] == (["0", "1"] if kind == "csv" else [0, 1])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "age\n1\n", "'bmi'"),
        ("a.csv", "age,bmi\n1,2\n1,\n", "'bmi' has 1 missing or infinite values, the first in row 1;"),
        ("a.csv", "age,bmi\n1,2\n1,x\n", "'bmi' contains 'x' in row 1, not numbers"),
        ("a.csv", "age;bmi\n1,5;2.5\n", "decimal commas in 'age', but points in 'bmi'"),
        ("a.csv", "age,bmi\n", "no rows"),
        ("a.png", "", "rows of a table"),
        ("gone.csv", None, "no file or folder"),
    ],
)
def test_rows_that_do_not_fit_are_sentences(patients, capsys, tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    failed = call(capsys, "predict", str(patients / "run"), str(tmp_path / name))
    assert failed.code
    assert words in " ".join(failed.err.split())


def test_inputs_that_do_not_fit_are_sentences(digits, patients):
    with pytest.raises(DataError, match="1 x 8 x 8"):
        unskew.load_predictor(digits.folder).predict(np.zeros((2, 64), np.uint8))
    with pytest.raises(DataError, match="uint8"):
        digits.predict(torch.zeros(2, 1, 8, 8))
    with pytest.raises(DataError, match="shape 2, not 3"):
        unskew.load_predictor(patients / "run").predict([[1.0, 2.0, 3.0]])
    with pytest.raises(DataError):
        unskew.load_predictor(patients / "run").predict([[1.0, float("nan")]])
    with pytest.raises(DataError, match="numbers"):
        unskew.load_predictor(patients / "run").predict([["a", "b"]])


def test_folders_without_a_usable_model_are_refused(digits, tmp_path):
    with pytest.raises(CheckpointError, match=r"not a run folder: config\.yaml is missing"):
        unskew.load_predictor(tmp_path)
    (tmp_path / "config.yaml").write_text((digits.folder / "config.yaml").read_text())
    with pytest.raises(CheckpointError, match="not finished"):
        unskew.load_predictor(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((digits.folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"no inputs\.json"):
        unskew.load_predictor(tmp_path)
    for text in ("{", "[]", '{"task": "classification"}'):
        (tmp_path / "inputs.json").write_text(text)
        with pytest.raises(CheckpointError, match="corrupted"):
            unskew.load_predictor(tmp_path)


@pytest.mark.fuzz
def test_every_flipped_bit_of_the_model_is_noticed(digits, tmp_path, capsys):
    """By prediction, evaluation, export and diagnosis, also if only the file of the model was copied."""
    folder = tmp_path / "run"
    shutil.copytree(digits.folder, folder)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little") + 8
    draws = np.random.default_rng(0)
    for bit in [*draws.integers(0, 8 * len(data), 15), *draws.integers(0, 8 * header, 10)]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupted.*Copy it again"):
            unskew.load_predictor(folder)
    for command in (
        ("export", folder, "--format", "torchscript"),
        ("diagnose", folder, "--no-curvature", "--samples", "20"),  # the models before it are measured first
        ("evaluate", folder, "x.csv"),
    ):
        outcome = call(capsys, *command)
        assert outcome.code == 2
        assert "model.safetensors is corrupted" in outcome.err
    save_file(load_file(digits.folder / "model.safetensors"), file)
    with pytest.raises(CheckpointError, match="it has no checksum"):
        unskew.load_predictor(folder)
    file.write_bytes(data)
    x = unskew.load_federation("digits", clients=3).test[0][:3]
    assert unskew.load_predictor(folder).predict(x) == digits.predict(x)


@pytest.mark.fuzz
def test_inputs_other_than_those_of_the_model_are_noticed(digits, tmp_path, capsys):
    """Another digit of the normalization would change predictions, and nobody would see it."""
    folder = tmp_path / "run"
    shutil.copytree(digits.folder, folder)
    text = (folder / "inputs.json").read_text()
    (place,) = [match.start(1) for match in re.finditer(r'"mean": ?\[\s*([0-9])', text)]
    (folder / "inputs.json").write_text(f"{text[:place]}7{text[place + 1 :]}")
    with pytest.raises(CheckpointError, match=r"inputs\.json is corrupted: it is not the file that was written with"):
        unskew.load_predictor(folder)
    for command in (
        ("predict", folder, "x.csv"),
        ("export", folder, "--format", "torch"),
        ("evaluate", folder, "x.csv"),
    ):
        outcome = call(capsys, *command)
        assert (outcome.code, "inputs.json is corrupted" in outcome.err) == (2, True)
    bind_inputs(folder)
    unskew.load_predictor(folder)


@pytest.mark.fuzz
def test_code_that_a_folder_names_is_not_run(digits, tmp_path):
    text = (digits.folder / "config.yaml").read_text().replace("model: mlp", "model: somewhere:net")
    (tmp_path / "config.yaml").write_text(text)
    for name in ("model.safetensors", "inputs.json"):
        (tmp_path / name).write_bytes((digits.folder / name).read_bytes())
    with pytest.raises(ConfigError, match="trust"):
        unskew.load_predictor(tmp_path)


def test_a_checkpoint_that_cannot_be_read_is_no_matter_to_a_finished_model(digits, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(digits.folder, folder)
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    x = unskew.load_federation("digits", clients=3).test[0][:3]
    assert unskew.load_predictor(folder).predict(x) == digits.predict(x)


def test_patients_are_ranked_kept_and_called_by_a_threshold(patients, tmp_path, capsys):
    table = tmp_path / "new.csv"
    table.write_text("patient_id,age,bmi\n" + "".join(f"P{k},{k - 2},0.5\n" for k in range(5)))
    run = [str(patients / "run"), str(table), "--keep", "patient_id"]
    chance = unskew.load_predictor(patients / "run").predict_proba(
        np.array([[k - 2, 0.5] for k in range(5)], "float32")
    )[:, 1]
    cut = float(np.sort(chance)[1])
    out = tmp_path / "p.csv"
    shown = call(capsys, "predict", *run, "--out", str(out), "--threshold", str(cut)).out
    assert "p(sick=yes)" in shown
    assert "P4" in shown
    with out.open() as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == ["row", "patient_id", "predicted_sick", "p(sick=no)", "p(sick=yes)"]
    assert [line["patient_id"] for line in written] == [f"P{k}" for k in range(5)]
    assert [line["predicted_sick"] for line in written] == ["yes" if p >= cut else "no" for p in chance]
    assert {line["predicted_sick"] for line in written} == {"yes", "no"}
    assert all(len(line["p(sick=yes)"]) <= len("0.123456e-05") for line in written)
    for options, words in (
        (["--keep", "ward"], "no column 'ward'"),
        (["--threshold", "2"], "--threshold"),
    ):
        failed = call(capsys, "predict", str(patients / "run"), str(table), *options)
        assert (failed.code, words in " ".join(failed.err.split())) == (2, True)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_of_the_table_stay_next_to_predictions_of_any_name(tmp_path, capsys, kind):
    """Of two numbers, in a table with columns that are named like those of the predictions."""
    import pyarrow as pa
    import pyarrow.parquet

    draws = np.random.default_rng(0)
    table = {name: draws.normal(size=30).round(3) for name in ("a", "b", "row", "unknown", "predicted_cost")}
    table |= {"cost": table["a"] + 2 * table["b"], "days": table["a"] - table["b"], "predicted_cost_2": table["a"]}
    path, lines = tmp_path / f"t.{kind}", [{name: float(table[name][k]) for name in table} for k in range(30)]
    missing = [None, math.nan if kind == "parquet" else None]
    lines = [{**line, "weight": weight} for line, weight in zip(lines, [*missing, *[0.5] * 28], strict=True)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(lines), path)
    else:
        path.write_text(format_value(lines, f".{kind}"))
    options = {"label": "cost,days", "task": "regression", "features": ["a", "b"], "partition": "iid", "clients": 2}
    unskew.run(data=f"table:{path}", out=tmp_path / "run", model="logistic", lr=0.2, **options, **TINY)
    kept = ["row", "cost", "predicted_cost", "predicted_cost_2", "days", "unknown"]
    expected = unskew.load_predictor(tmp_path / "run").predict(np.stack([table["a"], table["b"]], 1).astype("float32"))
    found = call(capsys, "predict", tmp_path / "run", path, "--keep", ",".join(kept), "--json").json()
    assert list(found[0]) == ["row_2", *kept, "predicted_cost_3", "predicted_days"]
    assert [[float(line[name]) for name in kept] for line in found] == [[line[name] for name in kept] for line in lines]
    given = [[line["predicted_cost_3"], line["predicted_days"]] for line in found]
    assert np.allclose(given, expected, rtol=1e-5, atol=1e-5)
    for out in (tmp_path / "p.csv", tmp_path / "p.jsonl"):
        shown = call(
            capsys, "predict", tmp_path / "run", path, "--keep", "cost,predicted_cost,weight", "--out", out
        ).out
        assert "predicted_cost_2" in shown
        assert "None" not in shown
        text = out.read_text()
        written = (
            list(csv.DictReader(text.splitlines()))
            if out.suffix == ".csv"
            else [json.loads(line) for line in text.splitlines()]
        )
        absent = "" if kind == "csv" or out.suffix == ".csv" else None
        assert [line["weight"] for line in written] in ([absent] * 2 + [x] * 28 for x in (0.5, "0.5"))
        assert [float(line["cost"]) for line in written] == table["cost"].tolist()


def test_the_observed_class_stays_next_to_the_predicted_one(tmp_path, capsys):
    """Also if the outcome is called like a column of the predictions."""
    rows = "".join(f"{k % 2},{k % 2},{k % 3}\n" for k in range(30))
    (tmp_path / "t.csv").write_text("label,p(label=1),a\n" + rows)
    shared = {"data": f"table:{tmp_path / 't.csv'}", "label": "label", "features": ["a"], "model": "logistic"}
    unskew.run(partition="iid", clients=2, out=tmp_path / "run", **shared, **TINY)
    found = call(capsys, "predict", tmp_path / "run", tmp_path / "t.csv", "--keep", "label,p(label=1)", "--json").json()
    assert list(found[0]) == ["row", "label", "p(label=1)", "predicted_label", "p(label=0)", "p(label=1)_2"]
    assert [int(line["label"]) for line in found] == [int(line["p(label=1)"]) for line in found] == [0, 1] * 15
    assert {line["predicted_label"] for line in found} <= {"0", "1"}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_of_unknown_patients_have_no_interval(tmp_path, kind):
    """They would be resampled as if they all were one patient."""
    draws = np.random.default_rng(0)
    frame = pd.DataFrame({"who": [f"p{k % 30}" for k in range(90)], "x": draws.normal(size=90).round(3)})
    frame["y"] = draws.integers(0, 2, 90)
    frame.to_csv(tmp_path / "t.csv", index=False)
    shared = {"data": f"table:{tmp_path / 't.csv'}", "label": "y", "features": ["x"], "model": "logistic"}
    unskew.run(partition="iid", clients=2, split_by="who", out=tmp_path / "run", **shared, **TINY)
    model, path = unskew.load_predictor(tmp_path / "run"), tmp_path / f"new.{kind}"
    frame.loc[:6, "who"] = None
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    with pytest.raises(DataError, match=r"'who' has 7 missing values.*--no-intervals"):
        model.evaluate_file(path)
    (row,) = model.evaluate_file(path, intervals=False)
    assert row["rows"] == 90


def test_a_threshold_needs_two_classes(digits, tmp_path, capsys):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    failed = call(capsys, "predict", str(digits.folder), str(tmp_path / "a.png"), "--threshold", "0.3")
    assert (failed.code, "two classes" in failed.err) == (2, True)


def test_other_data_are_evaluated_overall_and_by_site(patients, tmp_path, capsys):
    from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

    draws = np.random.default_rng(1)
    x, sick = draws.normal(size=(60, 2)).round(3), draws.integers(0, 2, 60)
    sites = np.array(["north", "south", "empty"])[np.minimum(np.arange(60) // 25, 2)]
    sick[50:] = 1
    rows = [f"{s},{a},{b},{'yes' if k else 'no'}" for s, (a, b), k in zip(sites, x, sick, strict=True)]
    (tmp_path / "new.csv").write_text("site;age;bmi;sick\n".replace(";", ",") + "\n".join(rows) + "\n")
    out = tmp_path / "m.csv"
    arguments = ["evaluate", str(patients / "run"), str(tmp_path / "new.csv"), "--by", "site"]
    found = call(capsys, *arguments, "--out", str(out), "--json").json()
    assert [(row["group"], row["rows"]) for row in found] == [("all", 60), ("empty", 10), ("north", 25), ("south", 25)]
    chance = unskew.load_predictor(patients / "run").predict_proba(x.astype("float32")).astype(float)
    chance /= chance.sum(1, keepdims=True)
    for row in found:
        own = slice(None) if row["group"] == "all" else sites == row["group"]
        p, y = chance[own], sick[own]
        assert row["accuracy"] == pytest.approx(np.mean((p[:, 1] > 0.5) == y))
        assert row["loss"] == pytest.approx(log_loss(y, p, labels=[0, 1]), rel=1e-6)
        wanted = (None, None) if y.all() else (roc_auc_score(y, p[:, 1]), average_precision_score(y, p[:, 1]))
        assert (row["auroc"], row["auprc"]) == (pytest.approx(wanted[0]), pytest.approx(wanted[1]))
    with out.open() as file:
        assert [line["group"] for line in csv.DictReader(file)] == ["all", "empty", "north", "south"]
    assert "south" in call(capsys, *arguments).out
    model = unskew.load_predictor(patients / "run")
    assert model.evaluate_file(tmp_path / "new.csv", by="site") == found
    unnamed = (tmp_path / "new.csv").read_text().replace("empty,", ",")
    (tmp_path / "unnamed.csv").write_text(unnamed)
    groups = model.evaluate_file(tmp_path / "unnamed.csv", by="site")
    assert [row["group"] for row in groups] == ["all", "(missing)", "north", "south"]
    assert groups[1] == {**found[1], "group": "(missing)"}
    for text, words in (
        ("age,bmi\n1,2\n", "The label column is required"),
        ("age,bmi,sick\n1,2,dead\n", "has the class 'dead'"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        failed = call(capsys, "evaluate", str(patients / "run"), str(tmp_path / "bad.csv"))
        assert (failed.code, words in " ".join(failed.err.split())) == (2, True)
    failed = call(capsys, "evaluate", str(patients / "run"), str(tmp_path / "new.csv"), "--by", "ward")
    assert (failed.code, "no column 'ward'" in failed.err) == (2, True)


def test_recalls_with_the_names_of_ends_of_intervals_are_rejected(patients, tmp_path, capsys):
    from sklearn.metrics import recall_score

    table = tmp_path / "p.csv"
    table.write_text((patients / "p.csv").read_text().replace("yes", "risk_low").replace(",no\n", ",risk\n"))
    options = {"label": "sick", "partition": "natural:ward", "features": ["age", "bmi"], "model": "logistic", **TINY}
    for wanted in ({"metrics": ["recall"]}, {"objective": "recall/risk"}):
        with pytest.raises(ConfigError, match=r"Rename the class 'risk_low', or use metrics .* without recall\."):
            unskew.run(data=f"table:{table}", **options, **wanted)
    unskew.run(data=f"table:{table}", metrics=["auroc"], out=tmp_path / "run", **options)
    failed = call(capsys, "evaluate", tmp_path / "run", table)
    assert (failed.code, "Use --no-intervals" in failed.err) == (2, True)
    (found,) = call(capsys, "evaluate", tmp_path / "run", table, "--no-intervals", "--json").json()
    predicted = unskew.load_predictor(tmp_path / "run").predict_file(table)
    with table.open() as file:
        true = [line["sick"] for line in csv.DictReader(file)]
    recalls = recall_score(true, predicted, average=None, labels=["risk", "risk_low"])
    assert [found["recall/risk"], found["recall/risk_low"]] == pytest.approx(recalls.tolist())
    shown = call(capsys, "evaluate", tmp_path / "run", table, "--no-intervals").out
    assert "recall of risk_low" in shown


def test_a_site_may_be_called_like_the_group_of_all_rows(patients, tmp_path, capsys):
    rows = "".join(f"{('all', 'b')[k % 3 > 1]},{k % 5},{k % 4 - 2},{('yes', 'no')[k % 2]}\n" for k in range(30))
    (tmp_path / "new.csv").write_text("site,age,bmi,sick\n" + rows)
    found = call(capsys, "evaluate", patients / "run", tmp_path / "new.csv", "--by", "site", "--json").json()
    assert [(row["group"], row["rows"]) for row in found] == [("all", 30), ("all", 20), ("b", 10)]


def test_intervals_of_other_data_resample_the_units_of_the_split(tmp_path, capsys):
    draws = np.random.default_rng(0)
    x = draws.normal(size=(120, 2)).round(3)
    sick = (draws.random(120) < 1 / (1 + np.exp(1 - x[:, 0]))).astype(int)
    lines = [f"{'ns'[k % 2]},{k},{x[k, 0]},{x[k, 1]},{('no', 'yes')[sick[k]]}" for k in range(120)]
    head = "site,patient,age,bmi,sick\n"
    (tmp_path / "t.csv").write_text(head + "\n".join(lines))
    (tmp_path / "copies.csv").write_text(head + "\n".join(np.repeat(lines, 4)))
    unskew.run(
        data=str(tmp_path / "t.csv"), label="sick", partition="natural:site", split_by="patient", exclude="patient",
        model="logistic", rounds=2, local_steps=5, engine="inline", positive="no", out=tmp_path / "run",
    )  # fmt: skip
    once, copies = (
        call(capsys, "evaluate", str(tmp_path / "run"), str(tmp_path / name), "--json").json()[0]
        for name in ("t.csv", "copies.csv")
    )
    assert copies["auprc_low"] == pytest.approx(once["auprc_low"])
    assert (copies["support/no"], copies["support/yes"]) == (4 * (120 - sick.sum()), 4 * sick.sum())
    assert copies["accuracy_low"] == pytest.approx(once["accuracy_low"])
    p = unskew.load_predictor(tmp_path / "run").predict_proba(x.astype("float32"))
    assert once["observed_expected"] == pytest.approx((sick == 0).sum() / p[:, 0].sum(), rel=1e-5)
    without = call(
        capsys, "evaluate", str(tmp_path / "run"), str(tmp_path / "t.csv"), "--no-intervals", "--json"
    ).json()
    assert not any(name.endswith(("_low", "_high")) for name in without[0])
    assert "AUPRC of no" in call(capsys, "evaluate", str(tmp_path / "run"), str(tmp_path / "t.csv")).out


def test_a_run_without_a_recorded_label_column_cannot_be_evaluated_on_files(patients, tmp_path, capsys):
    run = tmp_path / "older"
    shutil.copytree(patients / "run", run)
    inputs = json.loads((run / "inputs.json").read_text())
    del inputs["label"]
    (run / "inputs.json").write_text(json.dumps(inputs))
    bind_inputs(run)
    failed = call(capsys, "evaluate", str(run), str(patients / "p.csv"))
    assert (failed.code, "Run it again with --label" in " ".join(failed.err.split())) == (2, True)


def test_images_in_folders_of_their_classes_are_evaluated(digits, tmp_path, capsys):
    x, y = unskew.load_federation("digits", clients=3).test
    for number in range(30):
        folder = tmp_path / str(int(y[number]))
        folder.mkdir(exist_ok=True)
        Image.fromarray(x[number, 0].numpy()).save(folder / f"{number}.png")
    (found,) = call(capsys, "evaluate", str(digits.folder), str(tmp_path), "--json").json()
    right = np.mean([label == str(int(true)) for label, true in zip(digits.predict(x[:30]), y[:30], strict=True)])
    assert (found["rows"], found["accuracy"]) == (30, pytest.approx(right))


def test_numbers_and_several_labels_are_evaluated(tmp_path):
    from sklearn.metrics import f1_score, r2_score

    draws = np.random.default_rng(0)
    x = draws.normal(size=(60, 2)).round(3)
    marks = ["|".join(name for name, there in (("a", p > 0), ("b", q > 0)) if there) for p, q in x]
    rows = "".join(f"{p},{q},{p + 2 * q + 100},{mark}\n" for (p, q), mark in zip(x, marks, strict=True))
    (tmp_path / "t.csv").write_text("p,q,cost,marks\n" + rows)
    shared = {"data": f"table:{tmp_path / 't.csv'}", "features": ["p", "q"], "partition": "iid", "clients": 2, **TINY}
    options = {"model": "logistic", "lr": 0.2}
    unskew.run(label="cost", task="regression", out=tmp_path / "cost", **shared, **options)
    unskew.run(label="marks", label_separator="|", out=tmp_path / "marks", **shared, **options)
    loaded = unskew.load_predictor(tmp_path / "cost")
    (found,) = loaded.evaluate_file(tmp_path / "t.csv")
    assert found["r2"] == pytest.approx(r2_score(x @ [1, 2] + 100, loaded.predict(x.astype("float32"))), abs=1e-5)
    loaded = unskew.load_predictor(tmp_path / "marks")
    (found,) = loaded.evaluate_file(tmp_path / "t.csv")
    wanted = f1_score(x > 0, loaded.predict_proba(x.astype("float32")) > 0.5, average="micro")
    assert found["micro_f1"] == pytest.approx(wanted)


@pytest.fixture(scope="module")
def diverged(patients):
    """The same run at a rate that no loss survives."""
    folder = patients / "diverged"
    options = {"label": "sick", "partition": "natural:ward", "features": ["age", "bmi"], "model": "mlp", "lr": 1e5}
    with pytest.warns(UserWarning, match="The run diverged: the test loss after round 3"):
        result = unskew.run(
            data=f"table:{patients / 'p.csv'}", out=folder, **options, **{**TINY, "rounds": 3, "local_steps": 1}
        )
    assert result.summary["diverged"] is True
    return folder


def test_a_diverged_run_predicts_nothing(patients, diverged, capsys):
    rows = str(patients / "p.csv")
    for more in ((), ("--json",), ("--out", patients / "never.csv")):
        outcome = call(capsys, "predict", diverged, rows, *more)
        assert (outcome.code, outcome.out) == (2, "")
        assert "diverged" in outcome.err
        assert "Traceback" not in outcome.err
    assert not (patients / "never.csv").exists()
    for more in (("diagnose", diverged, "--no-curvature"), ("export", diverged, "--format", "torchscript")):
        outcome = call(capsys, *more)
        assert outcome.code == 2
        assert "not finite: the run diverged" in " ".join(outcome.err.split())
    outcome = call(capsys, "report", diverged)
    assert outcome.code == 0
    assert "diverged" in (diverged / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.fill_(float("nan")), "values that are not finite"),
        (lambda t: t.view(-1)[0].fill_(float("inf")) and t, "values that are not finite"),
        (lambda t: t.view(torch.int32), "has the type torch.int32"),
    ],
)
def test_weights_that_are_no_finite_numbers_with_a_fraction(patients, tmp_path, capsys, change, words):
    run = tmp_path / "run"
    shutil.copytree(patients / "run", run)
    tensors = load_file(run / "model.safetensors")
    name = next(iter(tensors))
    data = encode_checked({**tensors, name: change(tensors[name].clone())})
    (run / "model.safetensors").write_bytes(data)
    for command in (
        ("predict", run, patients / "p.csv"),
        ("export", run, "--format", "torchscript"),
        ("diagnose", run),
    ):
        outcome = call(capsys, *command)
        assert outcome.code == 2
        assert words in outcome.err


def test_predictions_overwrite_neither_their_input_nor_the_run(patients, capsys, tmp_path, monkeypatch):
    shutil.copy(patients / "p.csv", tmp_path / "new.csv")
    before = (tmp_path / "new.csv").read_bytes(), (patients / "run" / "metrics.jsonl").read_bytes()
    monkeypatch.chdir(tmp_path)
    for out in ("new.csv", tmp_path / "." / "new.csv", patients / "run" / "metrics.jsonl"):
        outcome = call(capsys, "predict", patients / "run", "new.csv", "--out", out)
        assert outcome.code == 2
        assert "Choose another file" in outcome.err
    assert before == ((tmp_path / "new.csv").read_bytes(), (patients / "run" / "metrics.jsonl").read_bytes())


def test_names_of_classes_are_neither_commands_of_a_terminal_nor_formulas(patients, capsys, tmp_path):
    run, rows = tmp_path / "run", patients / "p.csv"
    shutil.copytree(patients / "run", run)
    inputs = json.loads((run / "inputs.json").read_text())
    inputs["class_names"] = ["red\x1b]0;PWNED\x07", "=cmd|'/C calc'!A1"]
    (run / "inputs.json").write_text(json.dumps(inputs))
    bind_inputs(run)
    outcome = call(capsys, "predict", run, rows, "--out", tmp_path / "p.csv")
    assert "PWNED" in outcome.out
    assert "\x1b" not in outcome.out
    with (tmp_path / "p.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert "'=cmd|'/C calc'!A1" in cells
    assert format_value([{"label": "-1", "row": "@x"}], ".csv") == "label,row\n-1,'@x\n"
    assert not any(cell.startswith(("=", "@", "+")) for cell in cells)
