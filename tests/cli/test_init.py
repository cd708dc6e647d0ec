"""``unskew init``: it looks at the data, and what it writes runs as it is."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from support.masks import square_folder
from support.running import call

from unskew.config.inference.client_columns import kind_of_client

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_csv(path, n=80, gaps=False):
    draws = np.random.default_rng(0)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["patient_id", "age", "dose", "hospital", "outcome"])
        for i in range(n):
            sick = int(draws.integers(0, 2))
            age = "" if gaps and i % 7 == 0 else round(50 + 20 * sick + draws.normal(), 2)
            rows.writerow([1000 + i, age, round(draws.normal(), 3), "ABCD"[i % 4], ("well", "ill")[sick]])


def runs(capsys, *more):
    outcome = call(capsys, "run", "experiment.yaml", "--rounds", "1", "--engine", "inline", "--json", *more)
    assert outcome.code == 0, outcome.err
    return outcome.json()


def test_a_table_is_looked_at_and_the_file_runs(capsys):
    write_csv("study.csv")
    outcome = call(capsys, "init", "study.csv")
    assert outcome.code == 0, outcome.err
    text = Path("experiment.yaml").read_text()
    values = yaml.safe_load(text)
    assert (values["data"], values["label"], values["partition"]) == ("study.csv", "outcome", "natural:hospital")
    assert values["exclude"] == ["patient_id"]
    assert "# no measurement" not in text
    assert text.startswith("# Written by: unskew init study.csv\n")
    commands = [line.strip() for line in outcome.out.splitlines() if line.startswith("  unskew ")]
    assert [c.split()[1] for c in commands] == ["partition", "diagnose", "run"]
    assert "80 rows" in outcome.out
    assert "4 clients" in outcome.out
    summary = runs(capsys)
    assert (summary["clients"], summary["partition"]) == (4, "natural:hospital")
    again = call(capsys, "init", "study.csv")
    assert (again.code, "already exists" in again.err) == (2, True)
    other = call(capsys, "init", "study.csv", "--label", "hospital", "--out", "other.yaml")
    assert other.code == 0, other.err
    assert yaml.safe_load(Path("other.yaml").read_text())["label"] == "hospital"
    assert call(capsys, "init", "study.csv", "--label", "cost", "--out", "x.yaml").code == 2
    assert call(capsys, "init", "nowhere.csv", "--out", "x.yaml").code == 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_gaps_categories_and_numbers_to_predict_are_seen_and_the_file_runs(capsys, kind):
    write_csv("study.csv", gaps=True)
    rows = Path("study.csv").read_text().splitlines()
    more = [
        f"{line},{'uvw'[i % 3]},{'' if i % 9 == 0 else f'2024-01-{i % 28 + 1:02}'},note {i}"
        for i, line in enumerate(rows[1:])
    ]
    Path("study.csv").write_text("\n".join([rows[0] + ",kind,since,note", *more]) + "\n")
    if kind == "parquet":  # with dates as text
        pd.read_csv("study.csv").to_parquet("study.parquet")
    outcome = call(capsys, "init", f"study.{kind}", "--label", "dose")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["task"], values["missing"], values["model"]) == ("regression", "indicator", "table-mlp")
    assert (values["categories"], values["dates"]) == (["outcome", "kind"], ["since"])
    assert values["exclude"] == ["patient_id", "note"]
    assert "classes" not in outcome.out
    assert runs(capsys)["r2"] <= 1


def test_arrays_name_their_clients(capsys):
    draws = np.random.default_rng(0)
    y = draws.integers(0, 3, 60)
    x = (draws.normal(size=(60, 4)) + y[:, None]).astype("float32")
    np.savez("study.npz", x=x, y=y, client=np.arange(60) % 3)
    assert call(capsys, "init", "study.npz").code == 0
    summary = runs(capsys)
    assert (summary["clients"], summary["partition"]) == (3, "natural:client")
    np.savez("wrong.npz", x=x)
    outcome = call(capsys, "init", "wrong.npz", "--out", "x.yaml")
    assert (outcome.code, "arrays x and y" in outcome.err) == (2, True)
    np.savez("objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1, int))
    assert call(capsys, "init", "objects.npz", "--out", "x.yaml").code == 2


def test_without_data_the_digits_are_taken(capsys):
    assert call(capsys, "init").code == 0
    assert runs(capsys, "--model", "logistic")["data"] == "digits"


@pytest.mark.slow
def test_init_configures_a_folder_of_images(capsys, tmp_path):
    from PIL import Image

    draws = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(30):
            pixels = draws.integers(0, 256, (40, 50 + i % 3, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{i}.png")
    assert call(capsys, "init", "pets").code == 0
    assert runs(capsys)["model"] == "cnn"


def test_what_is_left_out_rare_or_not_utf8_is_told(capsys):
    rows = [["hospital", "dose", "age", "crp", "ill"]]
    rows += [
        ["AB"[i % 2], i % 7 / 2, "see file" if i == 7 else 40 + i / 7, f"{i},5", "no" if i % 12 else "yes"]
        for i in range(96)
    ]
    with open("study.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    outcome = call(capsys, "init", "study.csv", "--label", "ill")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert values["exclude"] == ["age", "crp"]
    assert "excluded: age: numbers, but 'see file' in row 7" in outcome.out
    assert "excluded: crp: numbers with decimal commas" in outcome.out
    assert (values["class_weights"], values["metrics"]) == ("balanced", ["auroc", "auprc", "balanced_accuracy"])
    assert values["objective"] == "auprc"
    assert "the class yes has " in outcome.out
    brief = ("--rounds", 1, "--local-steps", 1, "--model", "logistic", "--set", "engine=inline", "--json")
    trained = call(capsys, "run", "experiment.yaml", *brief)
    assert trained.code == 0, trained.err
    assert json.loads(trained.out)["objective"] == "auprc"
    Path("west.csv").write_text(Path("study.csv").read_text().replace("B,", "Süd,"), encoding="latin-1")
    foreign = call(capsys, "init", "west.csv", "--out", "x.yaml")
    assert (foreign.code, "west.csv: read as ,-separated, decimal point, latin-1" in foreign.err) == (0, True)
    table = call(capsys, "run", "study.csv")
    assert (table.code, "use unskew init study.csv" in table.err) == (2, True)
    counts = ["id,dose,cost", *(f"{i % 5},{i},{3 * i}" for i in range(150))]
    Path("cost.csv").write_text("\n".join(counts) + "\n")
    number = call(capsys, "partition", "table:cost.csv", "--label", "cost", "--clients", "3", "--partition", "iid")
    assert (number.code, "--task regression" in number.err) == (2, True)


def test_visits_of_one_patient_are_kept_together(capsys):
    rows = ["hospital,patient_id,dose,ill", *(f"{'AB'[i % 2]},P{i // 4:03d},{i % 7},{i % 3 % 2}" for i in range(240))]
    Path("visits.csv").write_text("\n".join(rows) + "\n")
    outcome = call(capsys, "init", "visits.csv", "--label", "ill")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["split_by"], values["exclude"]) == ("patient_id", ["patient_id"])
    brief = ("--rounds", 1, "--local-steps", 1, "--model", "logistic", "--set", "engine=inline")
    trained = call(capsys, "run", "experiment.yaml", *brief)
    assert trained.code == 0, trained.err


def test_columns_of_types_that_no_model_takes_are_not_the_end(capsys, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    n = 60
    columns = {
        "lists": pa.array([[1, 2]] * n),
        "structs": pa.array([{"x": 1}] * n),
        "maps": pa.array([[("k", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        "half": pa.array(np.arange(n).astype(np.float16)),
        "large": pa.array([2**60 + k // 2 for k in range(n)], pa.uint64()),
        "number": pa.array([k / 7 for k in range(n)]),
        "label": pa.array([k % 2 for k in range(n)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    outcome = call(capsys, "init", tmp_path / "t.parquet", "--out", tmp_path / "c.yaml")
    assert outcome.code == 0, outcome.err
    assert "label: label" in (tmp_path / "c.yaml").read_text()


def test_suspicious_columns_are_reported_and_constants_excluded(capsys):
    draws = np.random.default_rng(0)
    rows = [["subject", "pain", "score", "almost", "unit", "arm", "total"]]
    for i in range(120):
        total = round(float(draws.normal(30, 9)), 2)
        noise = draws.normal(size=2)
        rows.append(
            [f"S{i % 4}", i % 5, round(noise[0], 2), round(total + 2 * noise[1], 2), "mmHg", "XYZ"[i % 3], total]
        )
    with open("study.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    outcome = call(capsys, "init", "table:study.csv", "--label", "total")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["data"], values["partition"], values["exclude"]) == ("study.csv", "natural:subject", ["unit"])
    assert "excluded: unit: the same value in every row" in outcome.out
    assert "almost predicts total almost alone (R² 9" in outcome.out
    assert "score predicts" not in outcome.out
    assert (
        "integers with few values: pain; add the columns that contain codes, not amounts, to categories: [pain]"
        in outcome.out
    )
    Path("owners.csv").write_text("\n".join(",".join(map(str, row[1:])) for row in rows) + "\n")
    other = call(capsys, "init", "owners.csv", "--label", "total", "--out", "o.yaml")
    assert "may name the clients: arm (3 values); choose one with --clients COLUMN" in other.out


def test_a_table_of_texts_is_proposed_as_texts_and_runs(capsys):
    words = ("that is one awful,bad", "this was a lovely,good", "we saw a lovely,good")
    texts = [words[i % 3].split(",") for i in range(60)]
    rows = [f"shop {'ab'[i % 2]},{text} number {i},{opinion}" for i, (text, opinion) in enumerate(texts)]
    Path("reviews.csv").write_text("source,review,opinion\n" + "\n".join(rows) + "\n")
    outcome = call(capsys, "init", "reviews.csv")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["text"], values["model"], values["partition"]) == ("review", "text-mlp", "natural:source")
    assert runs(capsys)["model"] == "text-mlp"


@pytest.mark.parametrize(("sizes", "side"), [([(12, 12)], None), ([(12, 12), (12, 14)], 32), ([(80, 80)], 32)])
def test_images_in_parquet_as_at_the_hub_keep_a_small_common_size(capsys, sizes, side):
    import io

    from PIL import Image

    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def png(i):
        data = io.BytesIO()
        Image.new("L", sizes[i % len(sizes)], i).save(data, "png")
        return {"bytes": data.getvalue(), "path": None}

    columns = {"image": [png(i) for i in range(60)], "label": [i % 2 for i in range(60)], "domain": list("abc") * 20}
    parquet.write_table(pa.table(columns), "images.parquet")
    outcome = call(capsys, "init", "images.parquet")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["image"], values["partition"], values.get("image_size")) == ("image", "natural:domain", side)
    assert ("all images have 12 x 12 pixels" in outcome.out) == (side is None)


@pytest.mark.parametrize(
    "column", ["COUNTRY", "HOSPNUM", "practice", "Store", "store_nbr", "building_id", "siteId", "Ward"]
)
@pytest.mark.parametrize("number", [int, float, str])
def test_client_columns_are_recognized_in_any_case_and_as_numbers(capsys, column, number):
    draws = np.random.default_rng(0)
    rows = [
        f"{number(k % 12 + 1)},{draws.integers(1, 4)},{draws.normal():.3f},{draws.normal():.3f}" for k in range(240)
    ]
    Path("t.csv").write_text("\n".join([f"{column},size,temperature,sales", *rows]))
    outcome = call(capsys, "init", "t.csv", "--label", "sales")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert values["partition"] == f"natural:{column}"
    assert "12 clients with " in outcome.out


def write_trial(columns, n=1200):
    draws = np.random.default_rng(0)
    known = {
        "COUNTRY": lambda k: f"Land{k % 6}",
        "HOSPNUM": lambda k: 100 + k % 60,
        "PATIENT": lambda k: 5000 + k // 4,
        "SEX": lambda k: "MF"[draws.integers(2)],
        "PAIN": lambda k: "YNU"[draws.integers(3)],
        "SLEEP": lambda k: "YNU"[draws.integers(3)],
        "drug": lambda k: "abcd"[draws.integers(4)],
        "lot_nr": lambda k: int(draws.integers(7)),
        "distance_to_hospital": lambda k: int(draws.integers(9)),
        "SBP": lambda k: int(draws.integers(90, 200)),
        "outcome": lambda k: ("well", "ill")[draws.integers(2)],
    }
    rows = [",".join(str(known[column](k)) for column in columns) for k in range(n)]
    Path("trial.csv").write_text("\n".join([",".join(columns), *rows]))


@pytest.mark.parametrize(
    ("columns", "options", "partition", "others", "excluded"),
    [
        (("COUNTRY", "HOSPNUM", "PATIENT"), (), "natural:COUNTRY", ["HOSPNUM (60 values)"], ["HOSPNUM", "PATIENT"]),
        (("HOSPNUM", "PATIENT"), (), "natural:HOSPNUM", [], ["PATIENT"]),
        (("COUNTRY",), ("--clients", "drug"), "natural:drug", ["COUNTRY (6 values)"], None),
        (
            ("distance_to_hospital", "PAIN", "SLEEP"),
            (),
            "dirichlet:0.3,min=2",
            ["lot_nr (7 values)", "drug (4 values)"],
            None,
        ),
    ],
)
def test_organizations_come_before_persons_and_other_candidates_are_named(
    capsys, columns, options, partition, others, excluded
):
    """Columns with two values or with a common scale, and measurements, are no candidates."""
    write_trial((*columns, "SEX", "drug", "lot_nr", "SBP", "outcome"))
    outcome = call(capsys, "init", "trial.csv", *options)
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["partition"], values.get("exclude")) == (partition, excluded)
    assert values.get("split_by") == ("PATIENT" if "PATIENT" in columns else None)
    also = "also " if partition.startswith("natural") else ""
    lines = [line for line in outcome.out.splitlines() if "name the clients:" in line and not line.startswith("excl")]
    assert lines == (
        [
            f"may {also}name the clients: {', '.join(others)}; choose one with --clients COLUMN, or "
            "partition: natural:COLUMN"
        ]
        if others
        else []
    )


def test_identifiers_of_any_type_and_unreadable_dates_are_reported(capsys):
    import uuid

    draws = np.random.default_rng(0)
    rows = [
        f"{1001 + k}.0,{uuid.UUID(int=k)},{1001 + k if k else 1400},{'05-02-2010' if k % 2 else '17-02-2010'},"
        f"{draws.normal():.3f},{draws.integers(2)}"
        for k in range(300)
    ]
    Path("t.csv").write_text("\n".join(["number,key,nearly,date,bmi,ill", *rows[:-1], rows[1]]))
    outcome = call(capsys, "init", "t.csv", "--label", "ill")
    assert outcome.code == 0, outcome.err
    assert yaml.safe_load(Path("experiment.yaml").read_text())["exclude"] == ["number", "key", "nearly"]
    assert "excluded: number: an identifier, 299 values in 300 rows" in outcome.out
    Path("d.csv").write_text(
        "\n".join(["when,bmi,ill", *(f"{k % 12 + 1:02}-{k // 28 + 1:02}-2010,{k / 7},{k % 2}" for k in range(300))])
    )
    outcome = call(capsys, "init", "d.csv", "--label", "ill", "--out", "d.yaml")
    assert "excluded: when: dates such as 01-01-2010, whose format is ambiguous or mixed; see csv.dates" in outcome.out


@pytest.mark.parametrize("column", [(), ("--image", "photo", "--clients", "owner")])
def test_a_column_with_paths_of_image_files_is_the_input(capsys, tmp_path, column):
    from PIL import Image

    (tmp_path / "data" / "photos").mkdir(parents=True)
    for i in range(40):
        Image.new("L", (9, 9), i).save(tmp_path / "data" / "photos" / f"{i}.png")
    rows = ["photo,owner,smile", *(f"photos/{i}.png,{'ab'[i % 2]},{i // 2 % 2}" for i in range(40))]
    (tmp_path / "data" / "faces.csv").write_text("\n".join(rows))
    outcome = call(capsys, "init", "data/faces.csv", "--label", "smile", *column)
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["image"], values["model"], "image_size" in values) == ("photo", "cnn", False)
    assert values["partition"] == ("natural:owner" if column else "dirichlet:0.3,min=2")
    assert runs(capsys)["model"] == "cnn"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("study.csv", "--clients", "hospitl"), "There is no column 'hospitl'. Did you mean 'hospital'"),
        (("study.csv", "--image", "photo"), "There is no column 'photo'"),
        (("digits", "--clients", "user"), "--clients requires a table or arrays (.npz), but digits is neither"),
        (("digits", "--image", "photo"), "--image requires a table, but digits is not a table"),
    ],
)
def test_columns_that_do_not_exist_are_rejected(capsys, options, words):
    write_csv("study.csv")
    outcome = call(capsys, "init", *options)
    assert (outcome.code, words in outcome.err) == (2, True), outcome.err


def test_columns_with_commas_and_blanks_are_written_so_that_the_file_runs(capsys):
    draws = np.random.default_rng(0)
    rows = [
        f"{'ABC'[k % 3]},P{k // 4},{draws.normal():.3f},{draws.normal():.3f},{draws.integers(2)}" for k in range(240)
    ]
    Path("t.csv").write_text("\n".join(['"site, name","patient, id","a, mean", hb,ill', *rows]))
    outcome = call(capsys, "init", "t.csv", "--clients", " site, name", "--label", "ill ")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (values["partition"], values["exclude"]) == ('natural:"site, name"', ["patient, id"])
    assert values["split_by"] == '"patient, id"'
    assert runs(capsys)["partition"] == 'natural:"site, name"'


def test_a_client_column_with_missing_values_is_named_with_their_number(capsys):
    rows = [f"{'' if k % 60 == 0 else 'ABC'[k % 3]},{k / 7},{k % 2}" for k in range(240)]
    Path("t.csv").write_text("\n".join(["hospital,age,ill", *rows]))
    outcome = call(capsys, "init", "t.csv", "--label", "ill")
    assert "may name the clients: hospital (3 values, 4 rows without one); choose one" in outcome.out
    assert yaml.safe_load(Path("experiment.yaml").read_text())["exclude"] == ["hospital"]
    outcome = call(capsys, "init", "t.csv", "--label", "ill", "--clients", "hospital", "--out", "x.yaml")
    assert (outcome.code, "missing" in outcome.err) == (2, True), outcome.err


@pytest.mark.parametrize("label", [None, "sales"])
def test_each_file_of_a_folder_becomes_a_client(capsys, label):
    for store in ("north", "south"):
        Path(f"{store}.csv").write_text("week,open,sales\n" + "".join(f"{k},{k % 2},{k * 3.5}\n" for k in range(60)))
    outcome = call(capsys, "init", ".", *(() if label is None else ("--label", label)), "--out", "e.yaml")
    assert outcome.code == 0, outcome.err
    values = yaml.safe_load(Path("e.yaml").read_text())
    assert (values["partition"], values["label"]) == ("natural:file", label or "open")
    assert call(capsys, "partition", "e.yaml").code == 0


@pytest.mark.parametrize("name", ["Klinik", "Krankenhaus_Nr", "Standort", "hopital"])
def test_client_columns_have_names_of_other_languages(name):
    assert kind_of_client(name) == 0


@pytest.mark.parametrize("prefix", ["", "masks:"])
def test_folders_of_images_and_masks_are_a_segmentation_of_sites_and_run(capsys, prefix):
    square_folder(Path("scans"), sites=("philips", "siemens"))
    outcome = call(capsys, "init", f"{prefix}scans")
    assert outcome.code == 0, outcome.err
    assert "a segmentation: 32 images with masks of 2 sites: philips, siemens" in outcome.out
    written = yaml.safe_load(Path("experiment.yaml").read_text())
    assert (written["data"], written["partition"], written["model"]) == ("masks:scans", "natural:site", "unet")
    assert written["segmentation"] == {"values": [0, 100, 200]}
    summary = runs(capsys)
    assert summary["clients"] == 2
    assert "dice" in summary


def test_masks_without_several_sites_are_divided_at_random(capsys):
    square_folder(Path("scans"), sites=("",))
    assert call(capsys, "init", "scans", "--out", "random.yaml").code == 0
    written = yaml.safe_load(Path("random.yaml").read_text())
    assert (written["partition"], written["clients"]) == ("iid", 2)


@pytest.mark.parametrize("options", [(), ("--label", "mask")])
def test_a_table_with_a_column_of_masks_is_a_segmentation(capsys, options):
    square_folder(Path("scans"))
    rows = [f"scans/{s}/train/masks/{k:02}.png,scans/{s}/train/images/{k:02}.png,{s}" for s in "ab" for k in range(12)]
    Path("list.csv").write_text("\n".join(["mask,picture,clinic", *rows]) + "\n")
    outcome = call(capsys, "init", "list.csv", *options)
    assert outcome.code == 0, outcome.err
    written = yaml.safe_load(Path("experiment.yaml").read_text())
    expected = {
        "task": "segmentation",
        "label": "mask",
        "image": "picture",
        "partition": "natural:clinic",
        "model": "unet",
    }
    assert {name: written[name] for name in expected} == expected
    assert "partition" in call(capsys, "partition", "experiment.yaml").out
    Path("masks.csv").write_text("mask,clinic\n" + "".join(f"{row.split(',')[0]},{row[-1]}\n" for row in rows))
    error = call(capsys, "init", "masks.csv", "--label", "mask", "--out", "other.yaml").err
    assert "no other column has images. Set --image" in error


def write_hospitals(path, sizes, columns=(), rare=4):
    """Write a table of hospitals with the given numbers of rows; every ``rare``-th row has the outcome yes.

    Args:
        path: File to write.
        sizes: Number of rows of each hospital, by name.
        columns: Functions that return further values of a row, given its hospital and number, by name of the column.
        rare: Number of rows per row with the outcome yes.
    """
    draws = np.random.default_rng(0)
    columns = dict(columns)
    hospitals = [name for name, size in sizes.items() for _ in range(size)]
    lines = [",".join(["patient_id", "hospital", *columns, "admitted", "age", "outcome"])]
    for k, name in enumerate(hospitals):
        further = [str(value(name, k)) for value in columns.values()]
        date = f"2023-{k % 12 + 1:02}-{k % 28 + 1:02}"
        ill = "no" if k % rare else "yes"
        lines.append(",".join([f"P{k:04}", name, *further, date, f"{draws.normal(60, 9):.1f}", ill]))
    Path(path).write_text("\n".join(lines) + "\n")


def wards(name, k):
    return ("icu", "medicine", "surgery")[k // 7 % 3]


def initialized(capsys, *options):
    outcome = call(capsys, "init", *options, "--out", "e.yaml")
    assert outcome.code == 0, outcome.err
    text = Path("e.yaml").read_text()
    Path("e.yaml").unlink()
    return outcome.out, text, yaml.safe_load(text)


def test_holdout_is_large_enough_to_test_the_smaller_clients(capsys):
    write_hospitals("t.csv", {"north": 160, "south": 90, "east": 50})
    out, text, values = initialized(capsys, "t.csv")
    why = "0.1 leaves 2 of 3 clients fewer than 10 held-out samples, too few for a test in compare: east, south"
    assert f"holdout is {values['holdout']}, because {why}" in out
    assert f"holdout: {values['holdout']}  # share for evaluation; {why}" in text
    assert 0.1 < values["holdout"] <= 0.4
    Path("e.yaml").write_text(text)
    brief = ("--rounds", 1, "--local-steps", 1, "--seeds", "0,1", "--engine", "inline", "--no-references")
    outcome = call(capsys, "compare", "fedavg", "e.yaml", *brief, "--out", "c")
    assert outcome.code == 0, outcome.err
    held_out = [
        json.loads(line)["num_held_out"] for path in Path("c").glob("*/*/clients.jsonl") for line in path.open()
    ]
    assert len(held_out) == 6
    assert min(held_out) >= 10
    assert "mostly chance" not in outcome.out


@pytest.mark.parametrize(
    ("sizes", "share", "lines"),
    [
        ({"north": 400, "south": 300}, None, []),
        (dict.fromkeys("abcdefghi", 200) | {"z": 30}, None, ["holdout 0.1 leaves 1 of 10 clients fewer than 10"]),
        ({"north": 160, "south": 90, "tiny": 12}, 0.15, ["holdout 0.15 leaves 1 of 3 clients fewer than 10"]),
        ({"north": 16, "south": 18}, None, ["holdout 0.1 leaves 2 of 2 clients fewer than 10"]),
    ],
)
def test_holdout_is_not_larger_than_useful_and_untested_clients_are_named(capsys, sizes, share, lines):
    write_hospitals("t.csv", sizes)
    out, _, values = initialized(capsys, "t.csv", "--clients", "hospital", "--label", "outcome")
    assert values.get("holdout") == share
    shown = [line for line in out.splitlines() if line.startswith("holdout 0")]
    assert [line.startswith(words) for line, words in zip(shown, lines, strict=True)] == [True] * len(lines)
    if "tiny" in sizes:
        assert shown[0].endswith("too few for a test in compare: tiny; 0.4 is too low for all of these, too")


def test_holdout_of_a_rare_class_counts_its_samples(capsys):
    write_hospitals("t.csv", dict.fromkeys("abc", 500), rare=8)
    out, _, values = initialized(capsys, "t.csv")
    assert values["objective"] == "auprc"
    assert "0.1 leaves 3 of 3 clients fewer than 10 held-out samples or events" in out
    expected = values["holdout"] * 500 * 0.8 / 8
    assert 10 < expected < 20


def test_a_column_of_places_is_a_category_if_another_column_names_the_clients(capsys):
    columns = {
        "ward": wards,
        "department": lambda name, k: k // 5 % 4 + 1,  # codes
        "hospital_name": lambda name, k: f"{name.title()} Hospital",
        "ward_id": lambda name, k: f"{name} {k % 3}",
        "country": lambda name, k: "CH" if name == "east" else "DE",
        "clinic": lambda name, k: "ABC"[k // 11 % 3],
        "doctor": lambda name, k: f"D{k // 3 % 9}",
    }
    write_hospitals("t.csv", {"north": 160, "south": 90, "east": 50}, columns)
    out, _, values = initialized(capsys, "t.csv", "--label", "outcome")
    # hospital_name has the same values as hospital, so that either may name the clients.
    chosen, other = ("hospital", "hospital_name")
    if values["partition"] != "natural:hospital":
        chosen, other = other, chosen
    assert values["partition"] == f"natural:{chosen}"
    assert values["categories"] == ["ward", "department"]
    reasons = {
        "patient_id": "different in every row",
        other: f"each of its values belongs to one value of {chosen}",
        "ward_id": f"each of its values belongs to one value of {chosen}",
        "country": f"the same value in all rows of each {chosen}",
        "clinic": f"may name the clients as well as {chosen}",
        "doctor": "may name persons, which other data do not contain",
    }
    assert {*values["exclude"]} == {*reasons}
    for column, reason in reasons.items():
        assert f"excluded: {column}: {reason}" in out.splitlines()
    assert "names are those of client columns: ward, department; to leave a column out, add it to exclude" in out


def test_two_unequal_classes_get_metrics_and_equal_ones_do_not(capsys):
    write_hospitals("t.csv", {"north": 400, "south": 300}, rare=4)
    out, text, values = initialized(capsys, "t.csv")
    assert (values["metrics"], values["positive"]) == (["auroc", "auprc", "balanced_accuracy"], "yes")
    (share,) = re.findall(r"the class yes has (2\d)% of the samples, so metrics are set for unequal classes", out)
    assert f"# a constant prediction has an accuracy of {100 - int(share)}%" in text
    assert not {"objective", "class_weights"} & {*values}
    assert yaml.safe_load(text.replace("# objective:", "objective:"))["objective"] == "auroc"
    write_hospitals("t.csv", {"north": 400, "south": 300}, rare=2)
    assert not {"metrics", "positive", "objective"} & {*initialized(capsys, "t.csv")[2]}


@pytest.mark.parametrize("grouped", [False, True])
def test_a_date_column_suggests_a_split_by_time(capsys, grouped):
    columns = {"person": lambda name, k: f"Q{k // 4}"} if grouped else {}
    write_hospitals("t.csv", {"north": 160, "south": 140}, columns)
    _, text, values = initialized(capsys, "t.csv")
    group = "person," if grouped else ""
    assert values.get("split_by") == ("person" if grouped else None)
    (line,) = (line for line in text.splitlines() if line.startswith("# split_by:"))
    assert yaml.safe_load(line[2:]) == {"split_by": f"{group}time:admitted"}
    lines = text.splitlines()
    assert ("instead of the line above" in line) == grouped
    if grouped:
        del lines[lines.index(line) - 1]
    Path("e.yaml").write_text("\n".join(lines).replace("# split_by:", "split_by:"))
    assert call(capsys, "partition", "e.yaml").code == 0
    Path("e.yaml").unlink()
    dates = Path("t.csv").read_text()
    Path("t.csv").write_text(dates.replace("2023-05-05", ""))  # a split by time needs a date in every row
    assert "time:" not in initialized(capsys, "t.csv")[1]
