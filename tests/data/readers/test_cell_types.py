"""Types of the columns of CSV files: what is a number, a date, a code or a missing value, over all files together."""

import datetime
import json
import re
import unicodedata

import numpy as np
import pandas as pd
import pytest
import torch
from support.running import call
from support.table_files import read_table_file

import unskew
from unskew.data.csv_format import CsvSpec
from unskew.data.readers.arrow_io import read_tables
from unskew.data.readers.cell_types import LOG, NO_USES, ColumnUses, kind_of_names, why_text
from unskew.data.readers.column_roles import is_string
from unskew.data.readers.encoders import Encoder, impute, read_columns
from unskew.data.readers.files import file_tables
from unskew.errors import ConfigError, DataError
from unskew.serving.input_files import read_rows

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
DAY = datetime.datetime(2010, 2, 5)


def column(tmp_path, cells, uses=NO_USES, **options):
    (tmp_path / "t.csv").write_text("v\n" + "".join(f'"{cell}"\n' for cell in cells), encoding="utf-8")
    return read_table_file(tmp_path / "t.csv", CsvSpec(**options), uses).column("v").to_pylist()


@pytest.mark.parametrize(
    ("cells", "options", "expected"),
    [
        (["7", "-3"], {}, [7, -3]),
        (["007", "42"], {}, ["007", "42"]),
        (["+4912", "+4913"], {}, ["+4912", "+4913"]),
        (["+5", "-3"], {}, [5.0, -3.0]),
        (["0x10", "0x11"], {}, ["0x10", "0x11"]),
        (["89490200001234567890", "89490200001234567891"], {}, ["89490200001234567890", "89490200001234567891"]),
        (["1_000", "2_000"], {}, ["1_000", "2_000"]),
        ([" 1.5 ", "2", "NaN"], {}, [1.5, 2.0, None]),
        (["1", "NA"], {}, [1, None]),
        (["ZA", "NA"], {}, ["ZA", "NA"]),
        (["ZA", "NA"], {"missing": "NA"}, ["ZA", None]),
        (["1", "?", "\t?"], {}, [1, None, None]),
        (["1", "."], {}, [1, None]),
        (["007", "?"], {}, ["007", "?"]),
        (["1", "-999", "-999.0"], {"missing": [-999]}, [1.0, None, None]),
        (["1", "NA", "-999"], {"missing": [-999]}, [1, None, None]),
        (["TRUE", "false", "?"], {}, [True, False, None]),
        (["true", "0"], {}, [True, False]),
        (["5,123", "999"], {}, ["5,123", "999"]),
        (["5,123", "999"], {"thousands": "comma"}, [5123, 999]),
        (["1.234,5", "2,5"], {"thousands": "point"}, [1234.5, 2.5]),
        (["1 234", "2\u202f000", "5\xa0000.5"], {"thousands": "space", "separator": ","}, [1234.0, 2000.0, 5000.5]),
        (["12,34"], {"thousands": "comma"}, ["12,34"]),
        (["05-02-2010", "31-12-2010"], {}, [DAY, datetime.datetime(2010, 12, 31)]),
        (["02/05/2010", "12/31/2010"], {}, [DAY, datetime.datetime(2010, 12, 31)]),
        (["05-02-2010", "06-02-2010"], {}, ["05-02-2010", "06-02-2010"]),
        (["05-02-2010", "?"], {"dates": "%d-%m-%Y"}, [DAY, None]),
        (["5-Feb-2010"], {}, [DAY]),
        (["2010-02-05", "n.a."], {}, [DAY.date(), None]),
        (["<5", "7", "8"], {}, ["<5", "7", "8"]),
    ],
)
def test_a_column_has_the_type_of_all_of_its_cells(tmp_path, cells, options, expected):
    assert column(tmp_path, cells, **options) == expected


def test_codes_are_numbers_only_as_inputs(tmp_path):
    assert column(tmp_path, ["007", "042"], ColumnUses(numbers=("v",))) == [7.0, 42.0]
    assert column(tmp_path, ["7", "42"], ColumnUses(kinds=(("v", "text"),))) == ["7", "42"]


@pytest.mark.parametrize(
    ("cells", "options", "words"),
    [
        (["0.123", "0.5"], {"decimal": "comma", "separator": ","}, "has points, such as 0.123.*csv.thousands"),
        (["yes", "NA"], {}, r"label column 'v' has 'NA' in 1 of 2 rows.*csv.missing to \[\]"),
    ],
)
def test_cells_that_contradict_an_option_or_may_be_missing_are_rejected(tmp_path, cells, options, words):
    with pytest.raises(DataError, match=words):
        column(tmp_path, cells, ColumnUses(labels=("v",)), **options)


def test_unusual_texts_and_numbers_for_missing_values_are_reported(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(LOG, "info", lambda text, *values: said.append(text % values))
    column(tmp_path, ["20", "?", "31"])
    column(tmp_path, ["20", "-999", "31", "-999"])
    column(tmp_path, ["ZA", "NA"])
    assert said[0].startswith("t.csv: in the column v, '?' counts as a missing value, in 1 of 3 rows")
    assert said[1].startswith("t.csv: -999 in 2 of 4 rows of the column v may mean a missing value")
    assert said[2].startswith("t.csv: 'NA' in 1 of 2 rows of the column v is read as text")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_missing_values_of_other_files_are_listed_alike(tmp_path, monkeypatch, kind):
    said = []
    monkeypatch.setattr(LOG, "info", lambda text, *values: said.append(text % values))
    frame = pd.DataFrame({"n": [20, -999, 31, -999], "x": [0.5, 0.25, -999.0, 1.5], "t": ["a", " ? ", "-999", "b"]})
    path = tmp_path / f"t.{kind}"
    frame.to_parquet(path) if kind == "parquet" else frame.to_json(path, orient="records", lines=True)
    assert file_tables(path)[0].to_pydict() == frame.to_dict("list")
    assert said == [
        f"t.{kind}: -999 in 2 of 4 rows of the column n may mean a missing value; if so, set csv.missing to it"
    ]
    table, _ = file_tables(path, CsvSpec(missing=("-999.0", "?")))
    assert table.to_pydict() == {"n": [20, None, 31, None], "x": [0.5, 0.25, None, 1.5], "t": ["a", None, "-999", "b"]}
    with pytest.raises(ConfigError, match=r"but .*t\.\w+ is none. Remove all of its options except csv.missing and"):
        file_tables(path, CsvSpec(missing=("?",), decimal="comma"))


@pytest.mark.parametrize(
    ("kind", "number"),
    [("float16", 99), ("float16", 99.9), ("float32", -99.9), ("float64", -99.9), ("uint64", 99), ("decimal", 99)],
)
def test_numbers_of_any_type_may_be_missing(tmp_path, kind, number):
    values = [1, number, number, 2]
    column = pa.array(values, pa.decimal128(9, 2)) if kind == "decimal" else pa.array(np.array(values, kind))
    parquet.write_table(pa.table({"v": column}), tmp_path / "t.parquet")
    assert file_tables(tmp_path / "t.parquet")[0].column("v").equals(pa.chunked_array([column]))
    table, _ = file_tables(tmp_path / "t.parquet", CsvSpec(missing=(str(number),)))
    assert table.column("v").to_pylist() == [1, None, None, 2]
    assert table.column("v").type == column.type


def test_predictions_know_the_missing_values_of_other_files(tmp_path):
    draws = np.random.default_rng(0)
    frame = pd.DataFrame({"x": draws.normal(size=60).round(3), "y": ["no", "yes"] * 30, "s": ["a", "a", "b", "b"] * 15})
    frame.loc[::5, "x"] = -999
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    unskew.run(
        data=f"table:{tmp_path / 't.csv'}", label="y", csv={"missing": [-999]}, missing="mean", partition="natural:s",
        model="logistic", rounds=1, local_steps=2, lr=0.5, engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    predictor = unskew.load_predictor(tmp_path / "run")
    x, y = (read_rows(tmp_path / f"t.{kind}", predictor.inputs).x for kind in ("csv", "parquet"))
    assert torch.equal(x, y)
    assert x.min() > -5


def test_views_of_strings_are_strings(tmp_path):
    values = pa.array(["a", None, "b"], pa.string_view())
    parquet.write_table(pa.table({"v": values}), tmp_path / "t.parquet")
    table, _ = file_tables(tmp_path / "t.parquet")
    assert (table.schema.field("v").type, table.column("v").to_pylist()) == (pa.string(), ["a", None, "b"])


def test_categories_of_pandas_are_strings_with_missing_values_also_next_to_files_of_strings(tmp_path):
    ward = ["a", None, "b", "?"]
    for name, dtype in (("train_a", "category"), ("train_b", "object")):
        pd.DataFrame({"ward": pd.Series(ward, dtype=dtype)}).to_parquet(tmp_path / f"{name}.parquet")
    table, _ = file_tables(tmp_path)
    assert (is_string(table.schema.field("ward").type), table.column("ward").to_pylist()) == (True, [*ward, *ward])
    table, _ = file_tables(tmp_path / "train_a.parquet", CsvSpec(missing=("?",)))
    assert table.column("ward").to_pylist() == ["a", None, "b", None]


def test_rows_without_a_site_in_a_column_of_pandas_categories_are_missing_values(tmp_path):
    site = pd.Categorical([None, "Oslo", "Bergen"] * 20)
    pd.DataFrame({"site": site, "a": np.arange(60) % 7, "y": np.arange(60) % 2}).to_parquet(tmp_path / "t.parquet")
    options = {"label": "y", "partition": "iid", "clients": 2}
    with pytest.raises(DataError, match="'site' has 17 missing values"):
        unskew.load_federation(f"table:{tmp_path / 't.parquet'}", **options | {"partition": "natural:site"})
    fed = unskew.load_federation(f"table:{tmp_path / 't.parquet'}", categories="site", **options)
    assert fed.encoders[0].values == ("Bergen", "Oslo")


def test_files_and_parts_are_typed_together(tmp_path):
    for name, codes in (("train_a", "7"), ("train_b", "007"), ("test", "42")):
        (tmp_path / f"{name}.csv").write_text(f"site,code\nA,{codes}\n")
    train, test = file_tables(tmp_path)
    assert (train.column("code").to_pylist(), test.column("code").to_pylist()) == (["7", "007"], ["42"])


def test_text_in_a_test_file_does_not_change_the_type_of_the_training_files(tmp_path):
    for name, cell in (("train", "7"), ("test", "seven")):
        (tmp_path / f"{name}.csv").write_text(f"v\n{cell}\n")
    train, test = file_tables(tmp_path)
    assert (train.column("v").to_pylist(), test.column("v").to_pylist()) == ([7], ["seven"])


def test_files_whose_types_cannot_be_combined_are_named(tmp_path):
    (tmp_path / "train_a.jsonl").write_text('{"code": 7}\n')
    (tmp_path / "train_b.jsonl").write_text('{"code": "x"}\n')
    with pytest.raises(
        DataError, match=r"'code' contains int64 in .*train_a.jsonl, but string in .*train_b.jsonl, such as 'x'"
    ):
        file_tables(tmp_path)


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("sep=;\nsite;y\nA;1\n", {}, {"site": ["A"], "y": [1]}),
        ("# exported\n# unit, mmol\nsite,y\nA,1\n", {}, {"site": ["A"], "y": [1]}),
        ("#site,y\nA,1\n", {}, {"#site": ["A"], "y": [1]}),
        ("\n\nsite,y\nA,1\n", {}, {"site": ["A"], "y": [1]}),
        ("Report\n\nsite,y\nA,1\nB,2\n", {"skip": 2}, {"site": ["A", "B"], "y": [1, 2]}),
        ("A,0.5\nB,0.7\n", {"names": "site,y"}, {"site": ["A", "B"], "y": [0.5, 0.7]}),
        ("site;y;;\nA;1;;\n;;;\n", {}, {"site": ["A"], "y": [1]}),
        ("site,y\nA,1,,\nB,2\n", {}, {"site": ["A", "B"], "y": [1, 2]}),
        ("site,y\nA,1,\nB,2,\n", {}, {"site": ["A", "B"], "y": [1, 2]}),
        ("site y\n1 A 2\n2 B 3\n", {"separator": "space"}, {"": [1, 2], "site": ["A", "B"], "y": [2, 3]}),
        ('"a\nb",y\n1,2\n', {}, {"a\nb": [1], "y": [2]}),
        (" hb,y\n1,2\n", {}, {"hb": [1], "y": [2]}),
    ],
)
def test_lines_and_separators_around_a_table_are_skipped(tmp_path, content, options, expected):
    (tmp_path / "t.csv").write_text(content)
    assert read_table_file(tmp_path / "t.csv", CsvSpec(**options)).to_pydict() == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Report of 2024\n\na,b,c\n1,2,3\n4,5,6\n", r"Line 1 .*does not look like a header.*line 3, set csv.skip to 2"),
        ("A,0.5,1\nB,0.7,0\nA,0.6,1\n", "Line 1 .*does not look like a header, but like data.*csv.names"),
        ("0,0,1\n1,2,3\n", "does not look like a header, but like data"),
        ("a,b\n1,2\n1,2,3\n", "Line 3 .*has 3 values, but the header has 2: '1,2,3'"),
        ("a,a\n1,2\n", "more than one column named 'a'"),
        (",\n1,2\n", "more than one column named ''. Name them"),
    ],
)
def test_lines_that_do_not_belong_to_the_table_are_named(tmp_path, content, words):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=words):
        read_table_file(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Łódź,zły", "cp1250"),
        ("Москва,да", "cp1251"),
        ("İstanbul,iyi", "cp1254"),
        ("医院,北京", "gb18030"),
        ("서울,병원", "cp949"),
        ("Αθήνα,καλό", "cp1253"),
    ],
)
def test_text_that_is_not_western_is_not_read_as_latin(tmp_path, text, encoding):
    (tmp_path / "t.csv").write_bytes(f"site,y\n{text}\n".encode(encoding))
    with pytest.raises(DataError, match=r"csv\.encoding"):
        read_table_file(tmp_path / "t.csv")
    assert read_table_file(tmp_path / "t.csv", CsvSpec(encoding=encoding)).column("site").to_pylist() == [
        text.split(",")[0]
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Köln Straße",
        "l’eau déjà cœur «bonjour»",
        "¿Qué mañana José Mª nº 5",
        "ação três põe",
        "blåbær Ærø",
        "m³ 5°C 10µg/ml £5m €20",
    ],
)
def test_western_text_is_read_as_latin(tmp_path, text):
    (tmp_path / "t.csv").write_bytes(f"site,y\n{text},1\n".encode("cp1252"))
    assert read_table_file(tmp_path / "t.csv").column("site").to_pylist() == [text]


@pytest.mark.parametrize(
    "options", [{"thousands": "!"}, {"thousands": "comma", "decimal": "comma"}, {"skip": -1}, {"dates": "d.m.y"}]
)
def test_formats_that_mean_nothing_are_rejected(options):
    with pytest.raises(ConfigError, match=r"csv\."):
        CsvSpec(**options)


def rows(names, label=lambda k: k // 6 % 2):
    return "".join(f"{names[k % len(names)]},{k * 7 % 10},{label(k)}\n" for k in range(120))


@pytest.mark.parametrize("names", [("north", "north "), ("Orl\u00e9ans", unicodedata.normalize("NFD", "Orl\u00e9ans"))])
@pytest.mark.parametrize(
    "options",
    [
        {"partition": "natural:site"},
        {"partition": "dirichlet:9,by=site", "clients": 2},
        {"split_by": "site"},
        {"categories": "site"},
    ],
)
def test_a_name_that_is_written_twice_is_rejected_wherever_it_names_something(tmp_path, names, options):
    (tmp_path / "t.csv").write_text(f"site,a,y\n{rows(names)}", encoding="utf-8")
    with pytest.raises(DataError, match="differ only by spaces"):
        unskew.load_federation(f"table:{tmp_path / 't.csv'}", label="y", **{"partition": "iid", "clients": 2} | options)


def test_names_have_no_spaces_around_and_one_form_of_accents(tmp_path):
    names = [" " + unicodedata.normalize("NFD", "Orl\u00e9ans"), "Tours"]
    (tmp_path / "t.csv").write_text(f"site,a,y\n{rows(names)}", encoding="utf-8")
    fed = unskew.load_federation(f"table:{tmp_path / 't.csv'}", label="y", partition="natural:site")
    assert fed.client_names == ("Orl\u00e9ans", "Tours")


def test_whole_numbers_with_gaps_are_categories_and_clients_without_a_decimal_point(tmp_path):
    lines = "".join(f"{k % 3 + 1}.0,{'' if k % 11 == 0 else f'{k % 4}.0'},{k % 7},{k // 3 % 2}\n" for k in range(120))
    (tmp_path / "t.csv").write_text("site,ward,a,y\n" + lines)
    fed = unskew.load_federation(f"table:{tmp_path / 't.csv'}", label="y", partition="natural:site", categories="ward")
    assert fed.client_names == ("1", "2", "3")
    assert fed.encoders[0].values == ("0", "1", "2", "3")


@pytest.mark.parametrize("values", [["['x', 'z']", "['x']", "[]"], ['["x"]', '["z"]']])
def test_lists_written_as_text_are_no_classes(tmp_path, values):
    lines = "".join(f'{k % 3},"{values[k % len(values)].replace(chr(34), chr(34) * 2)}"\n' for k in range(60))
    (tmp_path / "t.csv").write_text("a,y\n" + lines)
    with pytest.raises(DataError, match=r"lists written as text.*label_separator"):
        unskew.load_federation(f"table:{tmp_path / 't.csv'}", label="y", partition="iid", clients=2)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (lambda k: f'"{k + 1},000"', "thousands marks such as 1,000, see csv.thousands"),
        (lambda k: f"text{k}", "has 120 different values"),
    ],
)
def test_a_label_with_a_class_for_nearly_every_row_is_rejected(tmp_path, cell, words):
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{k % 7},{cell(k)}\n" for k in range(120)))
    with pytest.raises(DataError, match=f"{words}.*regression"):
        unskew.load_federation(f"table:{tmp_path / 't.csv'}", label="y", partition="iid", clients=2)


def test_text_of_hive_is_read_as_text_and_images_stay_bytes(tmp_path):
    from pyarrow import parquet

    parquet.write_table(
        pa.table({"site": [None, "Köln".encode()], "image": [b"\x89PNG\xff", b"\xff\xd8"]}), tmp_path / "t.parquet"
    )
    assert read_table_file(tmp_path / "t.parquet").to_pydict() == {
        "site": [None, "Köln"],
        "image": [b"\x89PNG\xff", b"\xff\xd8"],
    }


@pytest.mark.parametrize("offset", [0, 1_700_000_000, 1_700_000_000_000])
def test_large_offsets_do_not_cost_digits(offset):
    values = np.round(np.random.default_rng(0).random(600) * 300, 2)
    encoder = Encoder("t")
    x = read_columns(pa.table({"t": offset + values}), (encoder,), "rows")
    fitted = Encoder("t", mean=float((offset + values).mean()), std=float(values.std()))
    assert (x.dtype == np.float64) == (fitted.offset != 0) == (offset > 0)
    scaled = (impute(x, [fitted])[:, 0].astype(float) - (fitted.mean - fitted.offset)) / fitted.std
    # Times of 2023 in milliseconds have 2**-12 as the distance of two numbers in float64.
    assert np.abs(scaled - (values - values.mean()) / values.std()).max() < 2.0**-11 / values.std() + 2.0**-20


def test_inputs_of_a_row_do_not_depend_on_the_other_rows_of_its_file():
    days = np.round(2_459_000 + 0.3 * np.random.default_rng(0).normal(size=50), 6)
    fitted = [Encoder("t", mean=float(days.mean()), std=float(days.std())), Encoder("u", mean=0.5)]

    def inputs(values):
        table = pa.table({"t": values, "u": np.linspace(0, 1, len(values))})
        return impute(read_columns(table, fitted, "rows"), fitted)[:, 0]

    together = inputs(days)
    assert inputs(np.append(days, 0.0))[:-1].tolist() == together.tolist()
    assert [float(inputs(days[k : k + 1])[0]) for k in range(50)] == together.tolist()
    assert together == pytest.approx(days - days.mean(), abs=2.0**-24)


def test_training_rows_decide_how_test_rows_are_read(tmp_path):
    days = np.round(2_459_000 + 0.3 * np.random.default_rng(0).normal(size=60), 6)
    frame = pd.DataFrame({"t": days, "s": ["a", "b"] * 30, "y": ["no", "no", "yes"] * 20})
    frame.to_csv(tmp_path / "train.csv", index=False)
    pd.concat([frame, frame.head(1).assign(t=0.0)]).to_csv(tmp_path / "test.csv", index=False)
    fed = unskew.load_federation(f"table:{tmp_path}", label="y", partition="natural:s", holdout=0)
    train = torch.cat([client.x for client in fed.clients])
    assert sorted(train[:, 0].tolist()) == sorted(fed.test[0][:-1, 0].tolist())


def test_a_table_with_times_since_1970_trains_as_one_with_times_from_zero(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seconds, r2 = np.random.default_rng(2).integers(0, 300, 300), []
    for offset in (0, 1_700_000_000):
        lines = "".join(f"{'ABC'[k % 3]},{offset + v},{k % 7},{v}\n" for k, v in enumerate(seconds))
        (tmp_path / "t.csv").write_text("device,t,noise,target\n" + lines)
        fed = unskew.load_federation("table:t.csv", label="target", task="regression", partition="natural:device")
        result = unskew.run(fed, model="logistic", rounds=5, local_epochs=2, batch_size=16, lr=0.05, out=f"r{offset}")
        r2.append(result.summary["r2"])
    assert r2[0] == pytest.approx(r2[1], abs=1e-4)
    predicted = call(capsys, "predict", "r1700000000", "t.csv", "--out", "p.csv")
    assert predicted.code == 0, predicted.err
    module = unskew.load_predictor("r1700000000").predict_file("t.csv")
    assert np.corrcoef(np.array(module, float).ravel(), seconds)[0, 1] > 0.9


def test_columns_are_kept_and_compared_as_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = ("01234", "02139", "10001")
    lines = "".join(f"{k:05d},{codes[k % 3]},{k % 7}.50,{k // 3 % 2}\n" for k in range(90))
    (tmp_path / "p.csv").write_text("patient,zip,a,y\n" + lines)
    options = (
        "--label",
        "y",
        "--features",
        "a,zip",
        "--categories",
        "zip",
        "--partition",
        "natural:zip",
        "--model",
        "table-mlp",
    )
    run = call(capsys, "run", "--data", "table:p.csv", *options, "--rounds", "1", "--local-steps", "1", "--out", "r")
    assert run.code == 0, run.err
    kept = call(capsys, "predict", "r", "p.csv", "--keep", "patient,zip,a", "--out", "out.csv")
    assert kept.code == 0, kept.err
    assert "00004,02139,4.50" in (tmp_path / "out.csv").read_text()
    (tmp_path / "new.csv").write_text("zip,a,y\n01234,1,0\n02139,2,1\n")
    groups = call(capsys, "evaluate", "r", "new.csv", "--by", "zip")
    assert (groups.code, "01234" in groups.out, "did not occur in training" in groups.err) == (0, True, False)


def test_tables_of_several_files_have_the_columns_of_the_first(tmp_path):
    (tmp_path / "a.csv").write_text("v,w\n1,2\n")
    (tmp_path / "b.csv").write_text("w,v\n2,1\n")
    assert [table.column("v").to_pylist() for table in read_tables([tmp_path / "a.csv", tmp_path / "b.csv"])] == [
        [1],
        [1],
    ]


def test_each_file_of_a_folder_can_be_a_client(tmp_path):
    for site in ("north", "south", "test"):
        (tmp_path / f"{site}.csv").write_text("a,y\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(40)))
    (tmp_path / "._north.csv").write_bytes(b"\0\5\x16\7")
    fed = unskew.load_federation(f"table:{tmp_path}", label="y", partition="natural:file")
    assert (fed.client_names, fed.sizes.tolist(), len(fed.test[1])) == (("north", "south"), [36, 36], 40)
    assert fed.columns == {"a": "input", "y": "label", "file": "decides the partition"}
    shared = unskew.load_federation(f"table:{tmp_path}", label="y", partition="iid", clients=2, categories="auto")
    assert shared.columns["file"] == "left out: names of files"


def write_site(file, n=40):
    """Write rows of numbers and dates whose day and month only CSV files can confuse."""
    days = [f"2024-{1 + k % 12:02}-{1 + k % 28:02}" for k in range(n)]
    frame = pd.DataFrame({"a": np.arange(n) % 7, "day": pd.to_datetime(days), "y": np.arange(n) % 2})
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".parquet":
        frame.to_parquet(file)
    elif file.suffix == ".jsonl":
        frame.assign(day=days).to_json(file, orient="records", lines=True)
    else:
        frame.assign(day=frame["day"].dt.strftime("%d.%m.%Y")).to_csv(file, index=False)


def test_files_of_a_folder_may_have_different_formats(tmp_path):
    for name in ("bergen.parquet", "oslo.csv", "rome.jsonl", "test.csv"):
        write_site(tmp_path / name)
    table, test = file_tables(tmp_path)
    assert (table.num_rows, test.num_rows) == (120, 40)
    assert json.loads(table.schema.metadata[b"dates"]) == {"day": "%d.%m.%Y"}
    options = {"label": "y", "partition": "natural:file", "dates": "day"}
    fed = unskew.load_federation(f"table:{tmp_path}", **options)
    assert (fed.client_names, fed.sizes.tolist(), len(fed.test[1])) == (("bergen", "oslo", "rome"), [36] * 3, 40)
    assert (fed.test[0][:, 1].min(), fed.test[0][:, 1].max()) == (19723, 20081)


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_test_file_may_have_another_format_than_the_training_file(tmp_path, kind):
    write_site(tmp_path / "train.csv")
    write_site(tmp_path / f"test.{kind}", 22)
    for path in (tmp_path, tmp_path / "train.csv"):
        fed = unskew.load_federation(f"table:{path}", label="y", features="a", partition="iid", clients=2)
        assert (fed.sizes.sum(), len(fed.test[1])) == (36, 22)


def test_a_table_in_two_formats_is_an_error(tmp_path):
    for name in ("oslo.csv", "oslo.parquet", "rome.csv"):
        write_site(tmp_path / name)
    with pytest.raises(
        DataError, match=r"contains oslo.csv and oslo.parquet, which may have the same rows. Remove one"
    ):
        file_tables(tmp_path)
    for name in ("train.csv", "train.parquet", "test.csv", "test.parquet"):
        write_site(tmp_path / "both" / name, 10 if name.endswith("csv") else 20)
    assert [part.num_rows for part in file_tables(tmp_path / "both" / "train.parquet")] == [20, 20]


def test_tables_that_are_not_read_are_reported(tmp_path, capsys):
    for name in ("train.csv", "test.parquet", "validation.jsonl", "oslo/a.csv"):
        write_site(tmp_path / name)
    file_tables(tmp_path)
    file_tables(tmp_path / "train.csv")
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}: not read, because neither train nor test: validation.jsonl",
        f"{tmp_path}: not read, because in a subfolder: oslo/a.csv",
        f"{tmp_path / 'train.csv'}: not read, because neither train nor test: validation.jsonl",
    ]


def test_arrays_whose_digits_float32_loses_are_reported():
    x = np.column_stack([np.arange(60.0), 1.7e9 + np.arange(60.0)])
    pair = (x, np.arange(60) % 2)
    with pytest.warns(UserWarning, match="Input 1 has values such as 1700000000.0.*Subtract"):
        unskew.Federation.from_arrays([pair], test=pair)


@pytest.mark.parametrize(
    ("cells", "use", "expected"),
    [
        (["12E5", "1E400"], "names", ["12E5", "1E400"]),
        (["1E5", "10E4", "2"], "names", ["1E5", "10E4", "2"]),
        (["1E5", "10E4", "2"], "labels", ["1E5", "10E4", "2"]),
        (["1E5", "10E4", "2"], "dates", [1e5, 1e5, 2.0]),
        (["1e+05", "2.5"], "names", [1e5, 2.5]),
        (["1.10", "1.1"], "names", ["1.10", "1.1"]),
        (["1.10", "1.1"], "labels", [1.1, 1.1]),
        (["1.0", "1", "2."], "names", [1.0, 1.0, 2.0]),
        (
            ["8949020000123456789.0", "8949020000123456788.0"],
            "names",
            ["8949020000123456789.0", "8949020000123456788.0"],
        ),
        (["13.01.2020", "14.02.2020"], "labels", ["13.01.2020", "14.02.2020"]),
    ],
)
def test_different_names_stay_different(tmp_path, cells, use, expected):
    assert column(tmp_path, cells, ColumnUses(**{use: ("v",)})) == expected


def test_codes_with_an_e_are_no_numbers(tmp_path):
    assert column(tmp_path, ["1E5", "2e7"]) == ["1E5", "2e7"]
    assert column(tmp_path, ["1E5", "2e7"], ColumnUses(numbers=("v",))) == [1e5, 2e7]


def test_the_given_format_of_dates_comes_first(tmp_path):
    assert column(tmp_path, ["2020-01-02"], dates="%Y-%d-%m") == [datetime.datetime(2020, 2, 1)]
    assert column(tmp_path, ["20100205"], dates="%Y%m%d") == [20100205]
    assert column(tmp_path, ["20100205"], ColumnUses(dates=("v",)), dates="%Y%m%d") == [DAY]


def test_days_that_do_not_exist_are_no_dates(tmp_path):
    assert column(tmp_path, ["30.02.2020", "13.02.2020"]) == ["30.02.2020", "13.02.2020"]
    assert column(tmp_path, ["29.02.2020"]) == [datetime.datetime(2020, 2, 29)]


def test_dates_of_a_test_file_may_have_another_format(tmp_path):
    for name, cell in (("train", "05.02.2010\n13.02.2010"), ("test", "2010-02-05")):
        (tmp_path / f"{name}.csv").write_text(f"v\n{cell}\n")
    train, test = file_tables(tmp_path)
    assert (train.column("v")[0].as_py(), test.column("v")[0].as_py()) == (DAY, DAY.date())


def test_the_format_of_dates_is_that_of_the_training_files(tmp_path):
    """A text in a test file does not hide it, so that prediction reads dates as training did."""
    for name, cell in (("train", "13.02.2010"), ("test", "unknown day")):
        (tmp_path / f"{name}.csv").write_text(f"v\n{cell}\n")
    train, _ = file_tables(tmp_path)
    assert json.loads(train.schema.metadata[b"dates"]) == {"v": "%d.%m.%Y"}


def test_the_format_of_dates_is_stored_if_a_placeholder_marks_missing_ones(tmp_path):
    (tmp_path / "t.csv").write_text("v\n?\n13.02.2010\n")
    table = read_table_file(tmp_path / "t.csv")
    assert table.column("v").to_pylist() == [None, datetime.datetime(2010, 2, 13)]
    assert json.loads(table.schema.metadata[b"dates"]) == {"v": "%d.%m.%Y"}


def test_json_lines_keep_integers_of_more_than_64_bits(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"v": 89490200001234567890, "w": 1e20}\n{"v": 89490200001234567891, "w": 0.5}\n')
    table = read_table_file(tmp_path / "t.jsonl")
    assert [str(value) for value in table.column("v").to_pylist()] == ["89490200001234567890", "89490200001234567891"]
    assert table.column("w").to_pylist() == [1e20, 0.5]


def test_numbers_in_other_scripts_and_large_thousands_are_explained():
    assert why_text(pa.chunked_array([["\u0661\u0662", "\u0663"]])) is None
    assert "csv.thousands" in why_text(pa.chunked_array([["1,234,567", "1,234", "999"]]))
    assert "points for thousands" in why_text(pa.chunked_array([["1.234,5", "2,5"]]))


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["0.5", None, "-1"], "numbers stored as text; store them as numbers"),
        (
            ["0.5", "1,5", "2"],
            "numbers with different decimal marks, such as 1,5 and 0.5; write them with the same mark",
        ),
        (["1,5", "inf"], "numbers with decimal commas, see csv.decimal"),
    ],
)
def test_text_of_numbers_only_is_explained(tmp_path, cells, reason):
    rows = {"v": cells * 20, "a": np.arange(20 * len(cells)) % 7, "y": np.arange(20 * len(cells)) % 2}
    parquet.write_table(pa.table(rows), tmp_path / "t.parquet")
    options = {"label": "y", "partition": "iid", "clients": 2}
    for more in ({}, {"categories": "auto"}):
        fed = unskew.load_federation(f"table:{tmp_path / 't.parquet'}", **options | more)
        assert fed.columns["v"] == f"left out: {reason}"
    with pytest.raises(DataError, match=re.escape(f"'v' in features is not numeric ({reason})")):
        unskew.load_federation(f"table:{tmp_path / 't.parquet'}", features="v,a", **options)


@pytest.mark.parametrize("values", [["0.0", "1.0"], ["-1", "1"], [f"{k / 2}" for k in range(12)]])
def test_labels_of_strings_are_names_of_classes_also_if_they_are_numbers(tmp_path, values):
    rows = {"a": np.arange(120) / 7, "y": [values[k % len(values)] for k in range(120)]}
    parquet.write_table(pa.table(rows), tmp_path / "t.parquet")
    fed = unskew.load_federation(f"table:{tmp_path / 't.parquet'}", label="y", partition="iid", clients=2)
    assert fed.class_names == tuple(sorted(values))


@pytest.mark.parametrize("missing", [True, [None], {"v": 1}])
def test_missing_must_be_texts(missing):
    with pytest.raises(ConfigError, match="must be a list of texts"):
        CsvSpec(missing=missing)


def test_names_of_more_than_64_bits_are_read_as_text():
    assert kind_of_names(["89490200001234567890"]) == "text"
    assert kind_of_names([str(2**63 - 1)]) == "number"


def test_new_rows_are_read_with_the_date_format_of_training_and_a_given_decimal_mark(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"{'AB'[k % 2]};{k % 28 + 1:02}.{k % 5 + 1:02}.2020;{k % 9},25;{k // 2 % 2}\n" for k in range(80))
    (tmp_path / "t.csv").write_text("site;day;a;y\n" + lines)
    options = ("--label", "y", "--dates", "day", "--partition", "natural:site", "--model", "mlp", "--out", "r")
    run = call(capsys, "run", "--data", "table:t.csv", *options, "--rounds", "1", "--local-steps", "1")
    assert run.code == 0, run.err
    (tmp_path / "one.csv").write_text("site;day;a\nA;03.05.2020;2,045\n")
    assert "csv.decimal" in call(capsys, "predict", "r", "one.csv").err
    read = call(capsys, "predict", "r", "one.csv", "--set", "csv.decimal=comma", "--json")
    assert read.code == 0, read.err
    (tmp_path / "iso.csv").write_text("day,a\n2020-05-03,2.045\n")
    assert call(capsys, "predict", "r", "iso.csv", "--json").json()[0] == read.json()[0]
    (tmp_path / "gaps.csv").write_text("day,a\n03.05.2020,.\n")
    gaps = call(capsys, "predict", "r", "gaps.csv")
    assert "'a' has 1 missing or infinite values" in gaps.err
    assert "only csv.field=value" in call(capsys, "predict", "r", "iso.csv", "--set", "lr=1").err


def write_dates(file, form, n=80):
    """Write rows with dates as text, and return the frame."""
    days = pd.date_range("2020-01-01 10:00", periods=n, freq="41h").strftime(form)
    frame = pd.DataFrame({"day": days, "a": np.arange(n) % 7, "y": np.arange(n) % 2})
    if file.suffix == ".csv":
        frame.to_csv(file, index=False)
    elif file.suffix == ".parquet":
        frame.to_parquet(file)
    else:
        frame.to_json(file, orient="records", lines=True)


DATES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S.000", "%Y-%m-%d %H:%M:%SZ", "%d.%m.%Y", "%m/%d/%Y %H:%M"]


@pytest.mark.parametrize("form", DATES)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_dates_stored_as_text_are_read_as_in_csv_files(tmp_path, kind, form):
    options = {"label": "y", "partition": "iid", "clients": 2}
    for suffix in ("csv", kind):
        write_dates(tmp_path / f"t.{suffix}", form)
    for more in ({"dates": "day"}, {"split_by": "time:day"}, {"dates": "day", "split_by": "time:day"}):
        expected, fed = (unskew.load_federation(f"table:{tmp_path}/t.{s}", **options, **more) for s in ("csv", kind))
        assert (fed.columns, fed.encoders) == (expected.columns, expected.encoders)
        assert torch.equal(fed.test[0], expected.test[0])
    run = {"model": "logistic", "rounds": 1, "engine": "inline", "out": tmp_path / "run", "dates": "day"}
    unskew.run(data=f"table:{tmp_path}/t.{kind}", **options, **run)
    inputs = unskew.load_predictor(tmp_path / "run").inputs
    x, y = (read_rows(tmp_path / f"t.{suffix}", inputs).x for suffix in ("csv", kind))
    assert torch.equal(x, y)
    assert len(x[:, 0].unique()) == 80


def test_ambiguous_dates_of_other_files_need_the_format_of_dates(tmp_path):
    frame = pd.DataFrame(
        {"day": ["01/02/2020", "03/04/2020"] * 20, "a": np.arange(40) % 7, "y": np.arange(40) // 2 % 2}
    )
    frame.to_parquet(tmp_path / "t.parquet")
    options = {"label": "y", "partition": "iid", "clients": 2}
    for more in ({"dates": "day"}, {"split_by": "time:day"}):
        with pytest.raises(DataError, match=r"contains .*'01/02/2020'.* set csv.dates to their format"):
            unskew.load_federation(f"table:{tmp_path}/t.parquet", **options, **more)
    dates = {"csv": {"dates": "%m/%d/%Y"}}
    fed = unskew.load_federation(f"table:{tmp_path}/t.parquet", dates="day", **options, **dates)
    assert fed.test[0][:, 0].unique().tolist() == [18263, 18325]
    unskew.load_federation(f"table:{tmp_path}/t.parquet", split_by="time:day", **options, **dates)


def test_dates_stored_as_text_are_decided_over_all_files_and_explained_if_they_are_not_declared(tmp_path):
    for name, day in (("a.csv", "13.01.2020"), ("b.parquet", "01.02.2020"), ("c.jsonl", "2020-02-03")):
        write_dates(tmp_path / name, day, 20)
    options = {"label": "y", "partition": "natural:file"}
    with pytest.raises(DataError, match="'day' contains"):
        unskew.load_federation(f"table:{tmp_path}", **options)
    fed = unskew.load_federation(f"table:{tmp_path}", dates="day", **options)
    assert fed.test[0][:, 0].unique().tolist() == [18274, 18293, 18295]
    alone = unskew.load_federation(f"table:{tmp_path}/b.parquet", label="y", partition="iid", clients=2)
    assert alone.columns["day"].startswith("left out: dates such as 01.02.2020, whose format is ambiguous")
    write_dates(tmp_path / "d.parquet", "13.02.2020", 20)
    alone = unskew.load_federation(f"table:{tmp_path}/d.parquet", label="y", partition="iid", clients=2)
    assert alone.columns["day"] == "left out: dates stored as text such as 13.02.2020, see dates"


def test_new_rows_of_other_files_have_dates_in_the_format_of_training(tmp_path):
    write_dates(tmp_path / "t.parquet", "%d.%m.%Y")
    options = {"data": f"table:{tmp_path}/t.parquet", "label": "y", "partition": "iid", "clients": 2, "dates": "day"}
    unskew.run(**options, model="logistic", rounds=1, engine="inline", out=tmp_path / "run")
    predictor = unskew.load_predictor(tmp_path / "run")
    for name, cell in (("one", "03.05.2020"), ("iso", "2020-05-03"), ("text", "soon")):
        pd.DataFrame({"day": [cell], "a": [2]}).to_parquet(tmp_path / f"{name}.parquet")
    one, iso = (read_rows(tmp_path / f"{name}.parquet", predictor.inputs) for name in ("one", "iso"))
    assert torch.equal(one.x, iso.x)
    assert one.cells.column("day").to_pylist() == ["03.05.2020"]
    with pytest.raises(DataError, match="'day' contains 'soon' in row 0, not dates"):
        predictor.predict_file(tmp_path / "text.parquet")


def test_the_value_that_is_no_number_is_named(tmp_path):
    lines = "".join(f"{'AB'[k % 2]};{'<5' if k == 3 else f'{k},2'};{k // 2 % 2}\n" for k in range(40))
    (tmp_path / "t.csv").write_text("site;crp;y\n" + lines)
    with pytest.raises(DataError, match=r"crp \(left out: numbers, but '<5' in row 3"):
        unskew.load_federation(f"table:{tmp_path / 't.csv'}", label="y", partition="natural:site")
