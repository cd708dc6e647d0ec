"""Tables whose rows have several labels: lists, separated text, images in files, users; and what is refused."""

import io
import json

import numpy as np
import pytest
import torch
from support.running import call

import unskew
from unskew.data.load import load_federation
from unskew.data.partition.partitioner import make_partition
from unskew.data.sources import registry as sources
from unskew.data.sources.registry import load_source
from unskew.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

NAMES = ("animal", "food", "plant", "structure")
# The test rows know a label that no training row has, some rows have no label, and one names a label twice.
TRAIN = [["plant", "animal"], [], ["food"], ["plant"], ["animal", "animal"], ["food", "plant"], [], ["plant"]] * 3
TEST = [["structure", "plant"], [], ["animal"], ["food"]]


@pytest.fixture(autouse=True)
def fresh_cache():
    sources.load_cached.cache_clear()
    yield
    sources.load_cached.cache_clear()


def picture(number, size=6):
    return np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)


def png(image):
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def matrix(rows, names=NAMES):
    return [[int(name in row) for name in names] for row in rows]


def pixels(source):
    return source.train.x.permute(0, 2, 3, 1).numpy()


def users(n):
    return [f"u{i % 3}" for i in range(n)]


def write(root, kind, train=TRAIN, test=TEST):
    """A folder with train and test tables; images in files beside them, named relative to the folder."""
    (root / "img").mkdir(parents=True)
    for split, rows in (("train", train), ("test", test)):
        files = [f"img/{split}{i}.png" for i in range(len(rows))]
        for i, file in enumerate(files):
            (root / file).write_bytes(png(picture(i)))
        if kind == "csv":
            lines = [f"{f},{u},{'; '.join(r)}" for f, u, r in zip(files, users(len(rows)), rows, strict=True)]
            (root / f"{split}.csv").write_text("\n".join(["image,user_id,labels", *lines]) + "\n")
        elif kind == "jsonl":
            records = [
                {"image": f, "user_id": u, "labels": r} for f, u, r in zip(files, users(len(rows)), rows, strict=True)
            ]
            (root / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        else:
            inside = [{"bytes": png(picture(i)), "path": None} for i in range(len(rows))]
            outside = [{"bytes": None, "path": f} for f in files]
            data = {"image": inside[::2] + outside[1::2], "user_id": users(len(rows)), "labels": rows[::2] + rows[1::2]}
            parquet.write_table(pa.table(data), root / f"{split}.parquet")
    return root


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_lists_of_labels_in_every_kind_of_table(tmp_path, kind):
    root = write(tmp_path / "flair", kind)
    separator = ";" if kind == "csv" else None
    source = load_source(f"table:{root}", label="labels", image="image", label_separator=separator)
    assert (source.name, source.task, source.class_names, source.classes) == ("flair", "multilabel", NAMES, 4)
    order = [*range(0, 24, 2), *range(1, 24, 2)] if kind == "parquet" else list(range(24))
    assert source.train.y.dtype == torch.uint8
    assert source.train.y.tolist() == matrix([TRAIN[i] for i in order])
    there = [0, 2, 1, 3] if kind == "parquet" else [0, 1, 2, 3]
    assert source.test.y.tolist() == matrix([TEST[i] for i in there])
    assert source.train.columns["user_id"].tolist() == users(24)
    np.testing.assert_array_equal(pixels(source), [picture(i) for i in order])


def test_a_user_is_a_client_and_counts_are_those_of_labels(tmp_path):
    root = write(tmp_path / "flair", "jsonl")
    given = {"label": "labels", "image": "image", "partition": "natural:user_id", "clients": None}
    fed = load_federation(f"table:{root}", **given, holdout=0.0)
    assert (fed.task, fed.classes, fed.sizes.tolist()) == ("multilabel", 4, [8, 8, 8])
    for k, counts in enumerate(fed.class_counts()):
        mine = np.array(matrix(TRAIN))[np.array(users(24)) == f"u{k}"]
        assert counts.tolist() == mine.sum(0).tolist()
        assert sorted(fed.clients[k].y.tolist()) == sorted(mine.tolist())
    assert fed.class_counts()[:, 3].tolist() == [0, 0, 0]
    assert load_federation(f"table:{root}", **given).fingerprint == fed.fingerprint


def test_without_test_rows_a_random_fifth_is_split_off_always_the_same(tmp_path):
    rows = [[NAMES[i % 4]] * (i % 5 > 0) for i in range(50)]
    data = {"value": np.arange(50.0) / 2, "labels": rows}
    parquet.write_table(pa.table(data), tmp_path / "t.parquet")
    source, again = (load_source(f"{tmp_path}/t.parquet", label="labels") for _ in range(2))
    assert (len(source.train), len(source.test)) == (40, 10)
    assert sorted([*source.train.x[:, 0].tolist(), *source.test.x[:, 0].tolist()]) == [k / 2 for k in range(50)]
    assert torch.equal(source.test.x, again.test.x)
    for part in (source.train, source.test):
        assert part.y.tolist() == matrix([rows[int(2 * i)] for i in part.x[:, 0]])


def test_names_of_the_hub_and_whole_numbers(tmp_path):
    features = datasets.Features(
        {"value": datasets.Value("float32"), "labels": datasets.List(datasets.ClassLabel(names=["b", "a", "c"]))}
    )
    data = {"value": [1.0, 2.0, 3.0], "labels": [[0, 2], [], [1]]}
    parquet.write_table(pa.table(data, schema=features.arrow_schema), tmp_path / "train.parquet")
    parquet.write_table(pa.table(data, schema=features.arrow_schema), tmp_path / "test.parquet")
    source = load_source(f"{tmp_path}/train.parquet", label="labels")
    assert source.class_names == ("b", "a", "c")
    assert source.train.y.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    plain = pa.table({"value": [1.0, 2.0, 3.0], "labels": [[10, 9], [100], []]})
    parquet.write_table(plain, tmp_path / "plain.parquet")
    source = load_source(f"{tmp_path}/plain.parquet", label="labels")
    assert source.class_names == ("9", "10", "100")  # as numbers, not as text
    wrong = {"value": [1.0], "labels": [[3]]}
    parquet.write_table(pa.table(wrong, schema=features.arrow_schema), tmp_path / "test.parquet")
    with pytest.raises(DataError, match="the test rows contains a number outside its 3 labels"):
        load_source(f"{tmp_path}/train.parquet", label="labels")


def test_test_rows_without_any_label(tmp_path):
    """Such a file knows no type of label; empty lists are still lists."""
    root = write(tmp_path / "t", "jsonl", test=[[], []])
    source = load_source(f"table:{root}", label="labels", image="image")
    assert source.class_names == ("animal", "food", "plant")
    assert source.test.y.tolist() == [[0, 0, 0]] * 2


def test_separators(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,y\n1,x | y|\n2,\n3,y\n4,|x\n")
    source = load_source(str(file), label="y", label_separator="|")
    assert source.class_names == ("x", "y")
    rows = {int(x): y for part in (source.train, source.test) for x, y in zip(part.x, part.y.tolist(), strict=True)}
    assert rows == {1: [1, 1], 2: [0, 0], 3: [0, 1], 4: [1, 0]}
    # Without a separator each text is one class.
    file.write_text("a,y\n1,x|y\n2,x\n3,x|y\n4,x\n")
    assert load_source(str(file), label="y").class_names == ("x", "x|y")
    # Where every row has one number, the column is read as numbers.
    file.write_text("a,y\n1,7\n2,\n3,8\n")
    assert load_source(str(file), label="y", label_separator=";").class_names == ("7", "8")


def test_what_is_refused(tmp_path):
    def fails(data, sentence, kind=DataError, test=None, **options):
        parquet.write_table(pa.table(data), tmp_path / "train.parquet")
        (tmp_path / "test.parquet").unlink(missing_ok=True)
        if test is not None:
            parquet.write_table(pa.table(test), tmp_path / "test.parquet")
        with pytest.raises(kind, match=sentence):
            load_source(f"{tmp_path}/train.parquet", label="y", **options)

    a = [1.0, 2.0]
    fails({"a": a, "y": [["x"], None]}, "has 1 missing values. Use an empty list for a row without labels")
    fails({"a": a, "y": [["x"], ["x", None]]}, "has 1 missing values in its lists")
    fails({"a": a, "y": [[0.5], [1.0]]}, "lists of double, but labels must be strings or integers")
    fails({"a": a, "y": [[["x"]], []]}, "lists of list")
    fails({"a": a, "y": pa.array([[], []], pa.list_(pa.string()))}, "No row has a label in the label column 'y'")
    fails({"a": a, "y": [["x"], []]}, "label_separator requires a string column", ConfigError, label_separator=";")
    fails({"a": a, "y": [{"b": 1}, {"b": 2}]}, "It must contain one class or a list of labels per row")
    fails({"a": a, "y": [{"b": 1}, {"b": 2}]}, "a separator requires strings", label_separator=";")
    fails({"a": a, "y": [0.0, 2.0**63]}, "the number 9223372036854775808, but numbers of classes must be below")
    words = "has lists in .*, the training rows but not in .*, the test rows"
    fails({"a": a, "y": [["x"], []]}, words, test={"a": a, "y": ["x", "x"]})
    fails({"a": a, "y": [["x"], []], "i": ["no.png", "no.png"]}, "it has no bytes and no file .*no.png", image="i")
    with pytest.raises(ConfigError, match="label_separator requires a table"):
        load_source("digits", label_separator=";")


@pytest.mark.parametrize("spec", ["dirichlet:0.1", "classes:2", "sorted"])
def test_partitions_by_the_label_are_refused(spec):
    y = np.array(matrix(TRAIN))
    with pytest.raises(
        ConfigError, match=r"requires one label per sample, but here a sample may have several labels. Use"
    ):
        make_partition(spec, y, 3, 0, classes=4)


@pytest.mark.parametrize("spec", ["iid", "quantity:1", "sorted:user", "natural:user"])
def test_other_partitions_use_every_sample_once(spec):
    y = np.array(matrix(TRAIN))
    parts = make_partition(spec, y, 3, 0, classes=4, columns={"user": np.array(users(24))})
    assert sorted(parts.order.tolist()) == list(range(24))
    with pytest.raises(DataError, match="integer label per sample"):
        make_partition(spec, y, 3, 0, classes=5, columns={"user": np.array(users(24))})


@pytest.mark.slow
def test_command_line_trains_on_lists_of_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "flair", "csv")
    data = ["--data", "table:flair", "--partition", "natural:user_id", "--set", "label=labels", "--set", "image=image"]
    data += ["--set", "label_separator=;"]
    options = ["--model", "logistic", "--rounds", "2", "--local-steps", "2", "--engine", "inline"]
    done = call(
        capsys, "run", *data, *options, "--method", "fedcog:start_round=1,n=8,g_steps=2+moon", "--out", "r", "--json"
    )
    assert done.code == 0, done.err
    summary = done.json()
    assert summary["clients"] == 3
    row = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["macro_f1"] == summary["macro_f1"]
    assert (summary["clients_evaluated"], summary["clients_evaluated_on"]) == (3, "the clients' held-out data")
    again = unskew.resume(tmp_path / "r", rounds=3)
    assert len(again.history) == 3

    shown = call(capsys, "run", *data, *options, "--set", "holdout=0")
    assert shown.code == 0, shown.err
    assert "test F1, last round" in shown.out
    assert "on nothing, because no client holds out any samples" in shown.out

    refused = call(capsys, "run", *data, *options, "--method", "fedreg")
    assert refused.code == 2
    assert "fedreg does not support the task 'multilabel', because" in refused.err
    refused = call(capsys, "run", *data[:2], *data[4:], *options)
    assert refused.code == 2
    assert "here a sample may have several labels. Use iid" in " ".join(refused.err.split())

    words = ["--partition", "natural:user_id", "--label", "labels", "--image", "image", "--label-separator", ";"]
    counted = call(capsys, "partition", "table:flair", *words, "--json").json()
    assert (counted["smallest"], counted["largest"], counted["class_names"]) == (8, 8, list(NAMES))
    assert np.array(counted["counts"]).sum(0).tolist() == np.array(matrix(TRAIN)).sum(0).tolist()

    table = call(capsys, "compare", "fedavg", "scaffold", *data, *options, "--seeds", "1", "--out", "c")
    assert table.code == 0, table.err
    assert "O-F1" in table.out
