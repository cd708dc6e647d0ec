"""Columns that predict the label almost alone, compared with scikit-learn."""

import numpy as np
import pytest
from support.running import call

from unskew.data.leaks import LEAST, auroc_of, cells_of, find_leaks, r2_of
from unskew.data.spec import DataSpec

N = 1200
DRAWS = np.random.default_rng(0)
WORDS = np.array(["ill", "well"])


@pytest.fixture(autouse=True)
def same_draws():
    """Each test has the same data, whichever tests run before it."""
    DRAWS.bit_generator.state = np.random.default_rng(0).bit_generator.state


def write(path, columns):
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def leaks_of(path, columns, **options):
    options = {"label": "y", "partition": "iid", "clients": 2, **options}
    return find_leaks(DataSpec(data=write(path / "t.csv", columns), **options))


def noise(n=N):
    return {
        "age": DRAWS.integers(20, 90, n),
        "crp": DRAWS.normal(size=n).round(3),
        "ward": DRAWS.choice(list("abc"), n),
    }


def test_the_auroc_of_a_column_is_that_of_scikit_learn():
    from sklearn.metrics import roc_auc_score

    y = DRAWS.integers(0, 3, N)
    column = np.where(DRAWS.random(N) < 0.8, y, DRAWS.integers(0, 3, N)).astype(float)
    first = np.arange(N) % 2 == 0
    second = ~first
    areas = []
    for known, new in ((first, second), (second, first)):
        shares = np.array([[np.mean(y[known][column[known] == value] == c) for c in range(3)] for value in range(3)])
        areas += [roc_auc_score(y[new] == c, shares[column[new].astype(int), c]) for c in range(3)]
    assert auroc_of(cells_of(column, False, 32), y, 3) == pytest.approx(np.mean(areas), abs=1e-9)


def test_the_r2_of_numbers_is_that_of_a_linear_regression():
    from sklearn.linear_model import LinearRegression

    x = DRAWS.normal(size=(N, 2))
    y = x[:, 0] - 2 * x[:, 1] + x[:, 0] * x[:, 1] + 0.5 * DRAWS.normal(size=N)
    terms = np.column_stack([x, x[:, 0] * x[:, 1]])
    first = np.arange(N) % 2 == 0
    second = ~first
    error = sum(
        ((LinearRegression().fit(terms[a], y[a]).predict(terms[b]) - y[b]) ** 2).sum()
        for a, b in ((first, second), (second, first))
    )
    expected = 1 - error / ((y - y.mean()) ** 2).sum()
    assert r2_of(np.zeros(N, int), [x[:, 0], x[:, 1]], y) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("wrong", [0.0, 0.01])
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_copy_of_the_label_with_few_errors_is_reported(tmp_path, share, wrong):
    y = (DRAWS.random(N) < share).astype(int)
    dead = np.where(DRAWS.random(N) < wrong, 1 - y, y)
    (sentence,) = leaks_of(tmp_path, {**noise(), "dead": dead, "y": WORDS[y]})
    assert sentence.startswith(
        "dead predicts y almost alone (AUROC 9" if wrong else "dead predicts y almost alone (AUROC 100"
    )
    assert sentence.endswith("exclude it if it is not known at prediction time")
    by_words = {**noise(), "dead": np.array(["no", "yes"])[dead], "y": WORDS[y]}
    assert leaks_of(tmp_path, by_words, categories=("ward", "dead"))[0].startswith("dead predicts y almost alone")


def test_strong_honest_predictors_and_categories_without_meaning_are_not_reported(tmp_path):
    y = DRAWS.integers(0, 2, N)
    strong = np.where(DRAWS.random(N) < 0.1, 1 - y, y)  # AUROC 0.9
    risk = (y + 0.5 * DRAWS.normal(size=N)).round(3)  # AUROC 0.92
    many = np.array([f"v{k}" for k in DRAWS.integers(0, N // 3, N)])
    columns = {**noise(), "strong": strong, "risk": risk, "many": many, "y": WORDS[y]}
    assert leaks_of(tmp_path, columns, categories=("many", "ward")) == []
    target = DRAWS.normal(size=N)
    good = target + 0.5 * DRAWS.normal(size=N)  # R² 0.8
    columns = {**noise(), "good": good, "many": many, "y": target}
    assert leaks_of(tmp_path, columns, categories=("many", "ward"), task="regression") == []


def test_the_best_columns_of_public_data_stay_below_the_threshold():
    from sklearn.datasets import load_breast_cancer, load_diabetes

    cancer, diabetes = load_breast_cancer(return_X_y=True), load_diabetes(return_X_y=True)
    x, y = cancer
    order = np.random.default_rng(0).permutation(len(y))
    areas = [auroc_of(cells_of(column[order], False, 32), y[order], 2) for column in x.T]
    assert 0.93 < max(areas) < LEAST["one_class"][1]
    x, y = diabetes
    shares = [r2_of(cells_of(column, False, 32), [column], y) for column in x.T]
    assert 0.2 < max(shares) < LEAST["numbers"][1]


def test_pairs_missing_values_dates_and_functions_of_the_label_are_reported(tmp_path):
    a, b = DRAWS.integers(0, 2, (2, N))
    assert leaks_of(tmp_path, {**noise(), "a": a, "b": b, "y": WORDS[a ^ b]}) == [
        "a and b predict y almost alone (AUROC 100.0 %); exclude them if they are not known at prediction time"
    ]
    y = DRAWS.integers(0, 2, N)
    days = np.datetime64("2020-01-01") + np.where(y, 0, 400) + DRAWS.integers(0, 300, N)
    gaps = [f"{value:.3f}" if ill else "" for ill, value in zip(y, DRAWS.normal(size=N), strict=True)]
    columns = {**noise(), "since": days, "dose": gaps, "y": WORDS[y]}
    found = leaks_of(tmp_path, columns, dates=("since",), missing="mean")
    assert sorted(line.split()[0] for line in found) == ["dose", "since"]
    price, sold = DRAWS.lognormal(size=(2, N))
    columns = {**noise(), "price": price, "sold": sold, "y": price * sold}
    assert leaks_of(tmp_path, columns, task="regression")[0].split(" predict")[0] in (
        "price and sold",
        "sold and price",
    )
    (logarithm,) = leaks_of(tmp_path, {**noise(), "log": np.log(price), "y": price}, task="regression")
    assert logarithm.startswith("log predicts y almost alone (R² 9")


def test_the_client_column_is_never_reported(tmp_path):
    store = DRAWS.integers(1, 13, N)
    columns = {**noise(), "store": store, "y": 100 * store + DRAWS.normal(size=N)}
    assert leaks_of(tmp_path, columns, partition="natural:store", clients=None, task="regression") == []
    named = {"partition": "natural:store", "clients": None, "features": ("store", "age"), "task": "regression"}
    assert leaks_of(tmp_path, columns, **named) == []
    assert len(leaks_of(tmp_path, columns, task="regression")) == 1


def test_init_partition_and_diagnose_report_a_leak_in_the_same_words(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    y = DRAWS.integers(0, 2, 240)
    write(tmp_path / "t.csv", {**noise(240), "site": ["A", "B", "C"] * 80, "dead": y, "outcome": WORDS[y]})
    line = "dead predicts outcome almost alone (AUROC 100.0 %); exclude it if it is not known at prediction time"
    assert line in call(capsys, "init", "t.csv").out.splitlines()
    assert f"# {line}" in (tmp_path / "experiment.yaml").read_text().splitlines()
    assert line in call(capsys, "partition", "experiment.yaml").out.splitlines()
    assert call(capsys, "partition", "experiment.yaml", "--json").json()["leaks"] == [line]
    quick = ("--no-curvature", "--no-cost", "--samples", "10", "--synthetic-fraction", "0")
    assert line in call(capsys, "diagnose", "experiment.yaml", *quick).out.splitlines()
    assert "almost alone" not in call(capsys, "partition", "experiment.yaml", "--exclude", "dead").out
