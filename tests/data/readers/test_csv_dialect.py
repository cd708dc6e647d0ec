"""CSV files with other separators, decimal marks and encodings than the usual ones."""

import csv
from pathlib import Path

import numpy as np
import pytest
from support.running import call
from support.table_files import read_table_file

import unskew
from unskew.data.csv_format import CsvSpec
from unskew.data.readers.csv_dialect import LOG
from unskew.errors import ConfigError, DataError

pytest.importorskip("pyarrow")
ROWS = [(["Köln", "Ulm"][k % 2], f"{k % 7}.{k % 10}", str(k // 2), "yes" if k % 3 else "no") for k in range(40)]


def write(path, separator=",", decimal=".", encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        rows = csv.writer(file, delimiter=separator)
        rows.writerow(["Straße", "dose", "age", "ill"])
        rows.writerows((site, dose.replace(".", decimal), age, ill) for site, dose, age, ill in ROWS)
    return path


@pytest.mark.parametrize(
    ("separator", "decimal", "encoding", "notice"),
    [
        (",", ".", "utf-8", None),
        (",", ".", "utf-8-sig", None),
        (";", ",", "latin-1", "read as ;-separated, decimal comma, latin-1"),
        (";", ".", "utf-8", "read as ;-separated, decimal point, utf-8"),
        ("\t", ",", "utf-8-sig", "read as tab-separated, decimal comma, utf-8"),
        ("|", ".", "utf-16", "read as pipe-separated, decimal point, utf-16"),
    ],
)
def test_every_common_format_gives_the_same_table_and_is_named(
    tmp_path, monkeypatch, separator, decimal, encoding, notice
):
    expected = read_table_file(write(tmp_path / "usual.csv"))
    said = []
    monkeypatch.setattr(LOG, "info", lambda text, *values: said.append(text % values))
    assert read_table_file(write(tmp_path / "other.csv", separator, decimal, encoding)).equals(expected)
    assert said == ([] if notice is None else [f"other.csv: {notice}"])


def test_a_file_of_windows_is_read_with_its_dashes_and_signs(tmp_path):
    (tmp_path / "w.csv").write_bytes("site;dose\nA – B;1,5\n5 €;2\n".encode("cp1252"))
    assert read_table_file(tmp_path / "w.csv").to_pydict() == {"site": ["A – B", "5 €"], "dose": [1.5, 2.0]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b;c\n1,2;3\n", "several separators: , and ;"),
        (b"a;b\n1,5;2.5\n", "decimal commas in 'a', but points in 'b'"),
        (b"a;b\n1,234;2\n", "1,234 in 'a', whose comma may be a decimal or a thousands mark"),
        ("é,ü\nä,ö\nß,ñ\n".encode() + b"\xff,1\n", "contains bytes that are not UTF-8"),
        (b"a,b\n\x01\xff,2\n", "neither UTF-8 nor latin-1"),
    ],
)
def test_ambiguous_files_raise_an_error_that_names_the_option(tmp_path, content, words):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"csv\.(separator|decimal|encoding)") as error:
        read_table_file(tmp_path / "x.csv")
    assert words in str(error.value)


def test_options_decide_what_is_ambiguous(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"a;b\n1,234;2\n")
    assert read_table_file(tmp_path / "x.csv", CsvSpec(decimal="comma")).column("a").to_pylist() == [1.234]
    assert read_table_file(tmp_path / "x.csv", CsvSpec(decimal="point")).column("a").to_pylist() == ["1,234"]


@pytest.mark.parametrize(
    ("thousands", "cells", "numbers"),
    [
        ("space", ["1 234,5", "12\u202f345,25", "7"], [1234.5, 12345.25, 7.0]),
        ("space", ["1 234,567", "1,234"], [1234.567, 1.234]),
        ("space", ["1 234.5", "7"], [1234.5, 7.0]),
        ("apostrophe", ["1'234.5", "1\u2019234"], [1234.5, 1234.0]),
        ("apostrophe", ["1'234,5", "2"], [1234.5, 2.0]),
        ("point", ["1.234", "2"], [1234, 2]),
        ("point", ["1.234,5", "2"], [1234.5, 2.0]),
        ("comma", ["1,234", "2"], [1234, 2]),
        ("comma", ["1,234.5", "2"], [1234.5, 2.0]),
    ],
)
def test_the_decimal_mark_is_detected_without_the_thousands_marks(tmp_path, thousands, cells, numbers):
    (tmp_path / "x.csv").write_text("\n".join(["a;b", *(f"{cell};x" for cell in cells)]), encoding="utf-8")
    assert read_table_file(tmp_path / "x.csv", CsvSpec(thousands=thousands)).column("a").to_pylist() == numbers


@pytest.mark.parametrize("options", [{"separator": ";;"}, {"decimal": "!"}, {"encoding": "klingon"}, {"mark": ","}])
def test_options_that_mean_nothing_are_rejected(tmp_path, options):
    write(tmp_path / "x.csv")
    with pytest.raises(ConfigError, match=r"csv"):
        unskew.load_federation(f"table:{tmp_path / 'x.csv'}", label="ill", partition="iid", clients=2, csv=options)
    with pytest.raises(ConfigError, match="csv"):
        unskew.run(data=f"table:{tmp_path / 'x.csv'}", label="ill", csv=options)


def test_a_model_is_trained_on_and_predicts_for_files_of_another_format(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("semi.csv"), ";", ",", "latin-1")
    write(Path("usual.csv"))
    options = ["--label", "ill", "--partition", "natural:Straße", "--model", "logistic", "--rounds", "1"]
    run = call(capsys, "run", "--data", "table:semi.csv", *options, "--set", "csv.separator=;", "--out", "r", "--json")
    assert run.code == 0, run.err
    assert "semi.csv: read as ;-separated, decimal comma, latin-1" in run.err
    assert unskew.load_predictor("r").inputs.csv.separator == ";"
    rows = np.array([[float(dose), float(age)] for _, dose, age, _ in ROWS], "float32")
    assert unskew.load_predictor("r").predict_file("semi.csv") == unskew.load_predictor("r").predict(rows)


CELLS = "site,x,y\n" + "".join(f"{'AB'[k % 2]},{k / 8},{k % 3 % 2}\n" for k in range(24))


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (CELLS.encode("utf-16-le"), {}),
        (CELLS.encode("utf-16-be"), {}),
        (CELLS.encode("utf-32"), {}),
        (CELLS.encode("utf-16"), {"encoding": "utf-16-le"}),
        (CELLS.encode("utf-8-sig"), {"encoding": "UTF8"}),
        (CELLS.encode(), {"names": ["site", "x", "y"]}),
        (("# page 1\x0c of 2\n" + CELLS).encode(), {}),
        (CELLS.replace("\nB", "\n  \nB", 1).encode(), {}),
    ],
)
def test_byte_order_marks_repeated_names_and_blank_lines_are_no_data(tmp_path, content, options):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    table = read_table_file(path, CsvSpec(**options))
    assert table.column_names == ["site", "x", "y"]
    assert table.column("x").to_pylist() == [k / 8 for k in range(24)]


def test_an_encoding_that_contradicts_the_file_and_long_cells(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(CELLS)
    with pytest.raises(DataError, match="does not start with BOM"):
        read_table_file(path, CsvSpec(encoding="utf-16"))
    path.write_text("v,w\n1," + 200_000 * "z" + "\n")
    assert len(read_table_file(path).column("w")[0].as_py()) == 200_000
    assert csv.field_size_limit() == 131072


def test_points_that_may_separate_thousands_are_reported(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(LOG, "info", lambda text, *values: said.append(text % values))
    (tmp_path / "t.csv").write_text("v;w\n1.234;a\n12;b\n")
    read_table_file(tmp_path / "t.csv")
    assert any("1.234 in the column v is read with a decimal point" in text for text in said)
    said.clear()
    (tmp_path / "t.csv").write_text("v;w\n1.234;0.5\n12;2\n")
    read_table_file(tmp_path / "t.csv")
    assert not any("decimal point;" in text for text in said)


def test_names_of_training_and_test_files_ignore_case(tmp_path):
    for name in ("Train", "Test"):
        (tmp_path / f"{name}.csv").write_text(CELLS)
    fed = unskew.load_federation(f"table:{tmp_path}", label="y", partition="natural:site", clients=None, holdout=0)
    assert (sum(len(client.y) for client in fed.clients), len(fed.test[1])) == (24, 24)
