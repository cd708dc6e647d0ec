"""Tables of numbers, categories, dates and gaps: fitted by sums of the clients, and used again for new rows."""

import csv

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from support.running import call
from support.tolerance import near

import unskew
from unskew.config.loader import experiment
from unskew.data.column_statistics import category_bytes, column_totals
from unskew.data.readers.encoders import Encoder, category_counts, read_column
from unskew.errors import ConfigError, DataError
from unskew.methods.registry import method
from unskew.models.registry import MODELS, build_model
from unskew.models.zoo.basic import Logistic
from unskew.models.zoo.tabular import TableMLP
from unskew.runs.validation import resolve_run
from unskew.sums.base import ClientRows
from unskew.sums.exchange import SimulatedExchange
from unskew.testing import assert_engines_agree

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")
parquet = pytest.importorskip("pyarrow.parquet")
TINY = {"rounds": 2, "local_steps": 3, "batch_size": 8, "lr": 0.1, "engine": "inline"}
COLUMNS = {"label": "sick", "partition": "natural:ward", "clients": None}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Three wards; the column drug has values that only one of them knows, dose and since have gaps."""
    draws = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("mixed") / "t.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["ward", "age", "dose", "drug", "smoker", "since", "grade", "sick"])
        for n in range(90):
            ward = "abc"[n % 3]
            dose = "" if n % 7 == 0 else f"{draws.normal(1e4, 2):.3f}"
            drug = "" if n % 11 == 0 else f"{ward}{n % 2}"
            since = "" if n == 40 else f"2024-{1 + n % 12:02}-{1 + n % 28:02}"
            age, smoker = 20 + n % 37, ["no", "yes"][n % 2]
            out.writerow([ward, age, dose, drug, smoker, since, 1 + n % 4, "yes" if age > 35 else "no"])
    return path


def load(table, **options):
    said = {"categories": "auto", "dates": "since", "missing": "indicator", **options}
    return unskew.load_federation(f"table:{table}", **COLUMNS, **said)


def column(table, name):
    return [row[name] for row in csv.DictReader(table.open())]


def test_means_and_deviations_from_sums_are_those_of_all_rows():
    draws = np.random.default_rng(0)
    parts = [draws.normal(1e6, 3, size=(n, 2)) for n in (1, 50, 7)]
    parts[1][3, 0] = np.nan
    pooled = np.concatenate(parts)
    rows = [ClientRows(columns=("a", "b"), numbers=part) for part in parts]
    exchange = SimulatedExchange(lambda: rows)
    found = column_totals(exchange, ["a", "b"]).columns
    assert found.counts.tolist() == [57, 58]
    assert found.mean.tolist() == near(np.nanmean(pooled, 0).tolist())
    assert found.std.tolist() == near(np.nanstd(pooled, 0).tolist(), size=1e6)
    assert exchange.traffic.tolist() == [[48, 16]] * 3
    empty = [ClientRows(columns=("a", "b"), numbers=np.array([[1.0, np.nan]]))]
    with pytest.raises(DataError, match="a value in the column 'b'"):
        column_totals(SimulatedExchange(lambda: empty), ["a", "b"])


def test_what_the_server_learns_is_what_all_training_rows_say(table):
    fed = load(table)
    by_name = {one.name: one for one in fed.encoders}
    assert fed.columns["drug"] == "input, a category"
    assert fed.columns["since"] == "input, days since 1970"
    assert fed.columns["ward"] == "decides the partition"
    x = torch.cat([client.x for client in fed.clients]).double().numpy()
    place = {name: list(by_name).index(name) for name in by_name}
    marks = [name for name, one in by_name.items() if one.marks]
    assert marks[0] == "dose"
    for j, name in enumerate(marks, len(by_name)):
        gone = x[:, j] == 1
        assert (x[gone, place[name]] == np.float32(by_name[name].mean)).all()
        x[gone, place[name]] = np.nan
    for name in ("age", "dose", "since", "grade"):
        assert by_name[name].mean == near(np.nanmean(x[:, place[name]]))
        assert by_name[name].std == near(np.nanstd(x[:, place[name]]), size=2e4)
    assert by_name["smoker"].values == ("no", "yes")
    assert category_counts(fed.encoders)[place["drug"]] == 1 + len(by_name["drug"].values)
    held = [{by_name["drug"].values[int(c) - 1] for c in client.x[:, place["drug"]] if c} for client in fed.clients]
    assert set.union(*held) == set(by_name["drug"].values)
    assert [{name[0] for name in names} for names in held] == [{"a"}, {"b"}, {"c"}]
    for (up, down), drugs in zip(fed.stats_traffic.tolist(), held, strict=True):
        assert up == 4 * 24 + category_bytes(sorted(drugs)) + category_bytes(["no", "yes"])
        assert down == 4 * 24 + category_bytes(by_name["drug"].values) + category_bytes(["no", "yes"])
    days = [(np.datetime64(day) - np.datetime64("1970-01-01")).astype(int) for day in column(table, "since") if day]
    found = x[:, place["since"]]
    assert set(found[~np.isnan(found)]) <= set(days)
    result = unskew.run(fed, model="table-mlp", **TINY)
    sent = 4 * result.summary["parameters"] * 2 * 3
    assert result.summary["bytes_up"] == sent + fed.stats_traffic[:, 0].sum()


def test_gaps_become_the_mean_without_a_mark_or_are_refused(table):
    assert not any(one.marks for one in load(table, missing="mean").encoders)
    with pytest.raises(DataError, match="missing to mean or indicator"):
        load(table, missing="error")


def test_a_plain_table_is_read_as_before(table):
    fed = unskew.load_federation(f"table:{table}", **COLUMNS, features="age,grade")
    assert fed.encoders == ()
    assert fed.stats_traffic is None
    values = np.array([[float(a), float(g)] for a, g in zip(column(table, "age"), column(table, "grade"), strict=True)])
    assert all(any((row == value).all() for value in values) for row in fed.test[0].numpy())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dates": ()}, "'since' contains dates. List it in dates"),
        ({"dates": "age"}, "'age' in dates contains 20, which is not a date"),
        ({"categories": "dose"}, "'dose' in categories contains double"),
        ({"categories": "drugs"}, "Did you mean 'drug'"),
        ({"missing": "median"}, "median"),
    ],
)
def test_columns_that_are_not_what_they_are_called_are_refused(table, options, words):
    with pytest.raises((DataError, ConfigError), match=words):
        load(table, **options)


@pytest.mark.parametrize("kind", ["date32", "date64", "s", "ms", "us", "ns"])
def test_dates_of_every_resolution_are_days_since_1970(kind):
    half = kind not in ("date32", "date64")
    days = pa.array(["2024-01-31 12:00:00" if half else "2024-01-31", None, "9999-12-31" if kind != "ns" else None])
    dates = days.cast(pa.timestamp("s")).cast(getattr(pa, kind)() if not half else pa.timestamp(kind))
    if kind in ("us", "ns"):
        dates = pc.add(dates, pa.scalar(1, pa.duration(kind)))  # below the resolution of microseconds for ns
    read = read_column(pa.chunked_array([dates]), Encoder("d", "date", fills=True), "d")
    last = np.nan if kind == "ns" else 2_932_896.0
    assert read == pytest.approx([19_753 + half / 2, np.nan, last], abs=1e-8, nan_ok=True)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "decimal"])
def test_whole_numbers_of_every_type_are_categories_clients_and_classes(tmp_path, kind):
    values = np.arange(120) % 3 + 9
    decimals = pa.array(values.astype(str)).cast(pa.decimal128(9, 2))
    numbers = decimals if kind == "decimal" else pa.array(values.astype(kind))
    rows = {"c": numbers, "s": numbers, "a": np.arange(120) % 7 / 2, "y": numbers}
    parquet.write_table(pa.table(rows), tmp_path / "t.parquet")
    options = {"label": "y", "partition": "natural:s"}
    fed = unskew.load_federation(f"table:{tmp_path / 't.parquet'}", categories="c", **options)
    assert fed.encoders[0].values == ("10", "11", "9")
    assert (fed.client_names, fed.class_names) == (("9", "10", "11"), ("9", "10", "11"))
    fraction = pa.array(["1.5", "2.0"] * 60).cast(pa.decimal128(9, 2) if kind == "decimal" else pa.float64())
    for name, words in (("c", "'c' in categories contains"), ("y", "'y' .* contains fractions or NaN")):
        parquet.write_table(pa.table(rows | {name: fraction}), tmp_path / "t.parquet")
        with pytest.raises(DataError, match=words):
            unskew.load_federation(f"table:{tmp_path / 't.parquet'}", categories="c", **options)


def test_tables_alone_have_categories():
    with pytest.raises(ConfigError, match="require a table"):
        unskew.load_federation("digits", categories="auto")


def test_new_rows_are_encoded_as_those_it_was_trained_on(table, tmp_path, capsys):
    options = {"data": f"table:{table}", **COLUMNS, "categories": "auto", "dates": "since", "missing": "indicator"}
    result = unskew.run(model="table-mlp", out=tmp_path / "run", **options, **TINY)
    loaded, fed = unskew.load_predictor(tmp_path / "run"), load(table)
    assert loaded.inputs.encoders == fed.encoders
    new = tmp_path / "new.csv"
    new.write_text(
        "since,smoker,drug,dose,age,grade,city\n2024-03-05,yes,b1,10001.5,33,2,x\n2024-03-05,yes,zzz,,33,2,y\n"
    )
    known, gap = fed.encoders, [one.name for one in fed.encoders if one.marks]
    rows = []
    for drug, dose in (("b1", 10001.5), ("zzz", None)):
        said = {"age": 33, "dose": dose, "grade": 2, "since": 19787, "drug": drug, "smoker": "yes"}
        row = [
            one.mean if said[one.name] is None
            else said[one.name] if one.kind != "category"
            else one.values.index(said[one.name]) + 1 if said[one.name] in one.values else 0
            for one in known
        ]  # fmt: skip
        rows.append([*row, *(float(said[name] is None) for name in gap)])
    told = "'drug' has values in 1 row that did not occur in training; they count as missing: 'zzz'."
    with pytest.warns(UserWarning, match=told):
        assert loaded.predict_file(new) == loaded.predict(rows) == result.predict(rows)
    said = call(capsys, "predict", tmp_path / "run", new, "--json")
    assert told in said.err
    assert [(line["row"], line["unknown"]) for line in said.json()] == [(0, []), (1, ["drug"])]
    for text, words in (
        ("since,smoker,drug,dose,age\n2024-03-05,yes,b1,1,2\n", "'grade'"),
        ("since,smoker,drug,dose,age,grade\nsoon,yes,b1,1,2,3\n", "'since' contains 'soon' in row 0, not dates"),
        ("since,smoker,drug,dose,age,grade\n2024-03-05,yes,b1,1,old,3\n", "'age' contains 'old' in row 0, not numbers"),
    ):
        new.write_text(text)
        with pytest.raises(DataError, match=words):
            loaded.predict_file(new)


def test_embeddings_are_vectors_of_the_codes():
    model = TableMLP((3,), 2, categories=(0, 4, 0), hidden=[5])
    assert sum(p.numel() for p in model.parameters()) == 4 * 2 + (2 + 2) * 5 + 5 + 5 * 2 + 2
    x = torch.tensor([[0.5, 3.0, -1.0]])
    vector = model.body[1](x)
    table = model.body[1].embeddings[0].weight
    assert torch.equal(vector, torch.cat([torch.tensor([[0.5, -1.0]]), table[3:4]], 1))
    assert category_counts((Encoder("a"), Encoder("b", "category", ("x", "y"), marks=False))) == (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"engine": "vectorized"}, {"clients_per_group": 3}])
def test_every_engine_trains_embeddings_alike(table, options):
    fed, same = load(table), {"model": "table-mlp", "precision": "fp64", "method": "fedprox:mu=0.1+scaffold"}
    reference = unskew.run(fed, **same, **TINY | {"clients_per_group": 1}).vector
    assert_engines_agree(unskew.run(fed, **same, **TINY | options).vector, reference)


def test_values_of_a_category_are_no_sum(table):
    with pytest.raises(ConfigError, match="values of the category 'drug'"):
        unskew.run(load(table), model="table-mlp", secure_aggregation="required", **TINY)
    numbers = load(table, categories=(), features="age,dose")
    assert unskew.run(numbers, model="logistic", secure_aggregation="required", **TINY).summary["bytes_up"] > 0
    with pytest.warns(UserWarning, match="mlp treats the category codes of drug, smoker as numbers"):
        unskew.run(load(table), model="mlp", **TINY)


@pytest.mark.parametrize("model", [name for name, entry in MODELS.items() if entry.reads_categories])
def test_models_with_weights_for_each_category_do_not_warn_of_codes(table, model):
    config = experiment({"model": model, "rounds": 1})
    warnings = resolve_run(config, load(table), None, method("fedavg")).warnings
    assert not any("category codes" in warning for warning in warnings)


def test_logistic_regression_has_a_weight_for_each_category():
    """Without categories it is the linear layer of before; a code that never occurs has weight 0."""
    torch.manual_seed(3)
    plain = build_model("logistic", (2,), 2)
    torch.manual_seed(3)
    assert torch.equal(plain.head.weight, torch.nn.Linear(2, 2).weight)
    model = Logistic((3,), 2, categories=(0, 3, 0))
    x = torch.tensor([[0.5, 2.0, -1.0], [0.5, 0.0, -1.0], [0.5, 9.0, -1.0]])
    coded = torch.tensor([[0.5, -1.0, 0, 0, 1], [0.5, -1.0, 1, 0, 0], [0.5, -1.0, 0, 0, 0]])
    assert torch.equal(model.body(x), coded)
    assert not model.head.weight[:, 2:].any()
    model.head.weight.data.normal_()
    assert torch.equal(torch.vmap(lambda row: model(row[None])[0])(x), model(x))


def test_logistic_regression_on_categories_ranks_as_scikit_learn_does(tmp_path, capsys):
    """At the optimum of the sum over clients, and so are the probabilities that ``predict`` writes."""
    draws = np.random.default_rng(7)
    n = 600
    ward, drug = draws.choice(list("abc"), n), draws.choice(["x", "y", "z", "w"], n)
    age = draws.normal(50, 10, n).round(2)
    effect = pd.Series(drug).map({"w": 2.0, "x": -1.0, "y": 1.5, "z": -1.5}).to_numpy()
    sick = draws.random(n) < 1 / (1 + np.exp(-effect - (age - 50) / 20))
    frame = pd.DataFrame({"ward": ward, "drug": drug, "age": age, "sick": np.where(sick, "yes", "no")})
    frame["part"] = np.where(np.arange(n) % 4 == 0, "test", "train")
    frame.loc[frame.index % 9 == 0, "drug"] = None
    frame.to_csv(tmp_path / "d.csv", index=False)
    data = {"label": "sick", "partition": "natural:ward", "split_by": "column:part", "features": ["age", "drug"]}
    steps = {"rounds": 150, "local_steps": 1, "batch_size": 10_000, "lr": 1.5, "holdout": 0.0, "engine": "inline"}
    options = {"categories": ["drug"], "metrics": ["auroc"], "eval_every": 150, "out": tmp_path / "run"}
    run = unskew.run(data=f"table:{tmp_path / 'd.csv'}", model="logistic", **data, **steps, **options)
    x = pd.get_dummies(frame[["age", "drug"]].fillna({"drug": "missing"}), columns=["drug"])
    train, y = frame["part"] == "train", frame["sick"] == "yes"
    x["age"] = (x["age"] - x["age"][train].mean()) / x["age"][train].std()
    p = LogisticRegression(C=np.inf, tol=1e-8).fit(x[train], y[train]).predict_proba(x)[:, 1]
    assert run.summary["auroc"] == pytest.approx(roc_auc_score(y[~train], p[~train]), abs=2e-3)
    assert call(capsys, "predict", tmp_path / "run", tmp_path / "d.csv", "--out", tmp_path / "p.csv").code == 0
    assert pd.read_csv(tmp_path / "p.csv")["p(sick=yes)"].to_numpy() == pytest.approx(p, abs=0.01)
