"""Class names of parquet files: the same number means the same class in all files of a data set."""

import unicodedata

import pytest

from unskew.data.load import load_federation
from unskew.data.readers.class_names import metadata_class_names
from unskew.data.readers.files import file_tables
from unskew.data.sources import registry as sources
from unskew.data.sources.registry import load_source
from unskew.errors import DataError

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CAT, DOG, OWL = -5.0, 5.0, 20.0
"""Input of each class, so that the label of each row is known."""
VALUES = {"cat": CAT, "dog": DOG, "owl": OWL}


@pytest.fixture(autouse=True)
def fresh_cache():
    sources.load_cached.cache_clear()


def write(file, names, rows, feature=None, **columns):
    """Write rows of classes by their names, as their numbers in the order ``names`` of this file."""
    label = feature or datasets.ClassLabel(names=names)
    first = rows[0] if isinstance(rows[0], str) else None
    inputs = {"value": [VALUES[row] if first else float(k) for k, row in enumerate(rows)]} | columns
    numbers = [names.index(row) if first else [names.index(name) for name in row] for row in rows]
    kinds = {name: datasets.Value("string" if isinstance(v[0], str) else "float64") for name, v in inputs.items()}
    schema = datasets.Features({**kinds, "y": label}).arrow_schema
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({**inputs, "y": numbers}, schema=schema), file)


def without_names(file):
    parquet.write_table(parquet.read_table(file).replace_schema_metadata(None), file)


def rows_of(*names, each=6):
    return [name for _ in range(each) for name in names]


def named_values(part, names):
    """The input of each row by the name of its class."""
    return {(names[y], x) for x, y in zip(part.x[:, 0].tolist(), part.y.tolist(), strict=True)}


def test_files_of_sites_may_order_and_name_their_classes_differently(tmp_path):
    write(tmp_path / "a.parquet", ["cat", "dog"], rows_of("cat", "dog"))
    write(tmp_path / "b.parquet", ["dog", "cat"], rows_of("cat", "dog"))
    write(tmp_path / "c.parquet", ["owl", "dog"], rows_of("owl", "dog", "owl"))
    fed = load_federation(f"table:{tmp_path}", label="y", partition="natural:file", holdout=0)
    assert (fed.class_names, fed.client_names) == (("cat", "dog", "owl"), ("a", "b", "c"))
    source = load_source(f"table:{tmp_path}", label="y")
    for part in (source.train, source.test):
        assert named_values(part, source.class_names) <= {*VALUES.items()}
    assert [set(client.y.tolist()) for client in fed.clients] == [{0, 1}, {0, 1}, {1, 2}]


def test_training_and_test_files_have_the_same_classes(tmp_path):
    write(tmp_path / "train-0.parquet", ["cat", "dog"], rows_of("cat", "dog"))
    write(tmp_path / "train-1.parquet", ["dog", "cat"], rows_of("dog", "cat", "cat"))
    write(tmp_path / "test.parquet", ["owl", "dog", "cat"], rows_of("owl", "cat", "dog"))
    source = load_source(f"table:{tmp_path}", label="y")
    assert source.class_names == ("cat", "dog", "owl")
    assert named_values(source.train, source.class_names) == {("cat", CAT), ("dog", DOG)}
    assert named_values(source.test, source.class_names) == {*VALUES.items()}
    assert (len(source.train), len(source.test)) == (30, 18)


def test_missing_classes_stay_missing_and_metadata_have_the_common_names(tmp_path):
    for name, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        write(tmp_path / f"{name}.parquet", names, rows_of("cat", "dog"))
    table = parquet.read_table(tmp_path / "test.parquet")
    numbers = pa.array([-1, None, *table["y"].to_pylist()[2:]], pa.int64())
    parquet.write_table(table.set_column(1, table.schema.field("y"), numbers), tmp_path / "test.parquet")
    train, test = file_tables(tmp_path)
    assert test["y"].to_pylist() == [-1, None, *[0, 1] * 5]
    assert metadata_class_names(train, "y") == metadata_class_names(test, "y") == ("cat", "dog")
    assert test["value"].to_pylist() == [CAT, DOG] * 6


def test_lists_of_labels_are_renumbered(tmp_path):
    feature = {
        names: datasets.List(datasets.ClassLabel(names=list(names))) for names in (("sky", "tree"), ("tree", "sky"))
    }
    rows = [["sky"], ["tree", "sky"], [], ["tree"]]
    for file, names in (("train", ("sky", "tree")), ("test", ("tree", "sky"))):
        write(tmp_path / f"{file}.parquet", names, rows, feature[names])
    source = load_source(f"table:{tmp_path}", label="y")
    assert source.class_names == ("sky", "tree")
    assert source.train.y.tolist() == source.test.y.tolist() == [[1, 0], [1, 1], [0, 0], [0, 1]]


def test_labels_of_texts_are_renumbered(tmp_path):
    for file, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        write(tmp_path / f"{file}.parquet", names, rows_of("cat", "dog"), text=["meows", "barks"] * 6)
    options = {"text": {"columns": ["text"], "tokenizer": "bytes"}, "label": "y"}
    fed = load_federation(f"text:{tmp_path}", partition="iid", clients=2, **options)
    x, y = fed.test
    assert fed.class_names == ("cat", "dog")
    assert {(chr(row[1]), int(label)) for row, label in zip(x, y, strict=True)} == {("m", 0), ("b", 1)}


def test_names_in_only_some_files_are_an_error(tmp_path):
    for file in ("train", "test"):
        write(tmp_path / f"{file}.parquet", ["cat", "dog"], rows_of("cat", "dog"))
    without_names(tmp_path / "test.parquet")
    expected = (
        r"train\.parquet names \(cat, dog\), but .*test\.parquet does not\. Store the names in the metadata of each"
    )
    with pytest.raises(DataError, match=expected):
        load_source(f"table:{tmp_path}", label="y")
    without_names(tmp_path / "train.parquet")
    assert load_source(f"table:{tmp_path}", label="y").class_names == ("0", "1")


def test_a_number_without_a_name_does_not_become_a_class_of_another_file(tmp_path):
    write(tmp_path / "train.parquet", ["cat", "dog", "owl"], rows_of("cat", "dog", "owl"))
    write(tmp_path / "test.parquet", ["dog", "cat"], rows_of("cat", "dog"))
    table = parquet.read_table(tmp_path / "test.parquet")
    odd = table.set_column(1, table.schema.field("y"), pa.chunked_array([pa.array([2] * 12, pa.int64())]))
    parquet.write_table(odd, tmp_path / "test.parquet")
    with pytest.raises(
        DataError, match=r"test\.parquet contains the number 2, but has names for the classes 0 to 1 only"
    ):
        load_source(f"table:{tmp_path}", label="y")


def test_names_that_differ_by_their_accents_are_an_error(tmp_path):
    for file, form in (("train", "NFC"), ("test", "NFD")):
        name = unicodedata.normalize(form, "caf\u00e9")
        write(tmp_path / f"{file}.parquet", [name, "cat"], rows_of("cat"))
    with pytest.raises(DataError, match="differ only by spaces or by the encoding of their accents"):
        load_source(f"table:{tmp_path}", label="y")


def test_data_sets_of_the_hub_require_the_same_names_in_all_files(tmp_path):
    images = [{"bytes": b"", "path": None}] * 2
    for file, names in (("train", ["a", "b"]), ("test", ["b", "a"])):
        features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        table = pa.table({"img": images, "label": [0, 1]}, schema=features.arrow_schema)
        parquet.write_table(table, tmp_path / f"{file}.parquet")
    with pytest.raises(DataError, match=r"has the classes a, b in .*train\.parquet, but b, a in .*test\.parquet\."):
        load_source("cifar10", path=tmp_path)
