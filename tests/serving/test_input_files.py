"""Rows of files for a model with harmonized inputs: the parameters of their site, and those of a new site."""

import csv
import json

import numpy as np
import pytest
from support.running import call

import unskew
from unskew.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on two hospitals, with the test rows in a file."""
    folder = tmp_path_factory.mktemp("harmonized")
    rng = np.random.default_rng(0)
    (folder / "data").mkdir()
    for part, n in (("train", 80), ("test", 30)):
        with (folder / "data" / f"{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["ward", "sex", "a", "b", "c", "sick"])
            for k in (0, 1):
                for i in range(n):
                    sex, sick = "fm"[i // 2 % 2], i % 2
                    values = np.round(rng.normal(size=3) + 3 * k + sick, 3)
                    writer.writerow([7 + k, sex, *values, ["no", "yes"][sick]])
    chosen = {"label": "sick", "partition": "natural:ward", "categories": "sex", "model": "logistic"}
    harmonize = {"method": "combat", "covariates": ["sex"]}
    unskew.run(data=f"table:{folder}/data", **chosen, harmonize=harmonize, rounds=3, out=folder / "run")
    return folder


def test_predictions_for_the_test_rows_are_those_of_the_run(run):
    predictor = unskew.load_predictor(run / "run")
    accuracy = predictor.evaluate_file(run / "data" / "test.csv", intervals=False)[0]["accuracy"]
    assert accuracy == json.loads((run / "run" / "summary.json").read_text())["accuracy"]


def test_a_single_row_gets_the_parameters_of_its_site(run, tmp_path):
    lines = (run / "data" / "test.csv").read_text().splitlines()
    (tmp_path / "row.csv").write_text("\n".join([lines[0], lines[40]]))
    predictor = unskew.load_predictor(run / "run")
    assert predictor.predict_file(tmp_path / "row.csv") == [predictor.predict_file(run / "data" / "test.csv")[39]]


def test_rows_need_a_known_site_or_the_flag_for_a_new_one(run, tmp_path, capsys):
    lines = (run / "data" / "test.csv").read_text().splitlines()
    new, few, without = (tmp_path / f"{name}.csv" for name in ("new", "few", "without"))
    new.write_text("\n".join([lines[0], *[f"9{line[1:]}" for line in lines[1:31]]]))
    few.write_text("\n".join([lines[0], *[f"9{line[1:]}" for line in lines[1:20]]]))
    without.write_text("\n".join(line.partition(",")[2] for line in lines))
    predictor = unskew.load_predictor(run / "run")
    with pytest.raises(DataError, match=r"no ward '9'. Known: 7, 8. .*--new-site"):
        predictor.predict_file(new)
    with pytest.raises(DataError, match=r"ward '9' .* has 19 rows, but at least 20 are needed"):
        predictor.predict_file(few, new_site=True)
    with pytest.raises(DataError, match="need the column 'ward'"):
        predictor.predict_file(without)
    # The same rows with another shift and scale are the same rows after their harmonization, up to shrinkage.
    assert call(capsys, "predict", run / "run", new, "--new-site").code == 0
    expected = predictor.predict_file(run / "data" / "test.csv")[:30]
    assert np.mean(np.array(predictor.predict_file(new, new_site=True)) == np.array(expected)) > 0.8


def test_unknown_categories_of_covariates_are_an_error(run, tmp_path):
    lines = (run / "data" / "test.csv").read_text().splitlines()
    (tmp_path / "x.csv").write_text("\n".join([lines[0], lines[1].replace(",f,", ",x,")]))
    with pytest.raises(DataError, match="'sex=m' of the harmonization has no known value in 1 of 1 rows"):
        unskew.load_predictor(run / "run").predict_file(tmp_path / "x.csv")


def test_a_model_with_harmonized_inputs_is_not_exported(run):
    with pytest.raises(ConfigError, match=r"harmonized for each site.*Use unskew predict"):
        unskew.export(run / "run", "torch")
