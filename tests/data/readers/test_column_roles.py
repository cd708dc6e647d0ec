"""Columns of a table: what is done to each, what the user chooses, and what is refused."""

import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

import unskew
from unskew.cli.tables import columns_table
from unskew.config.loader import experiment
from unskew.data.load import federation_of, load_federation
from unskew.data.partition.parsing import partition_column
from unskew.data.readers.column_roles import SHOWN, ColumnSelection, describe_roles, is_identifier, select_inputs
from unskew.data.readers.encoders import Encoder, read_columns
from unskew.data.sources import registry as sources
from unskew.data.sources.registry import load_source
from unskew.data.spec import Split, parse_split
from unskew.errors import CheckpointError, ConfigError, DataError, UnskewError
from unskew.expressions import quote
from unskew.runs.input_spec import InputSpec
from unskew.serving.input_files import rows_of_table

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def fresh_cache():
    yield
    sources.load_cached.cache_clear()


def write(file, n=30, **more):
    """Rows with an identifier, two measurements, decimal commas, text, a numbered ward and a label."""
    rng = np.random.default_rng(0)
    columns = {
        "patient_id": np.arange(100, 100 + n),
        "age": rng.integers(20, 30, n),
        "bmi": rng.normal(25, 3, n).round(2),
        "dose": [f'"{i},5"' for i in range(n)],
        "name": [f"n{i}" for i in range(n)],
        "ward": np.arange(n) % 3,
        "outcome": np.arange(n) % 2,
    } | more
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    file.write_text("\n".join(lines) + "\n")
    return f"table:{file}"


@pytest.fixture
def patients(tmp_path):
    return write(tmp_path / "patients.csv")


def load(name, partition="iid", clients=2, **options):
    return load_federation(name, **{"label": "outcome", "partition": partition, "clients": clients, **options})


def test_what_is_done_to_each_column_is_told(patients):
    fed = load(patients, "natural:ward", clients=None, exclude=["patient_id"])
    assert fed.columns == {
        "patient_id": "left out: excluded",
        "age": "input",
        "bmi": "input",
        "dose": "left out: numbers with decimal commas, see csv.decimal",
        "name": "left out: text",
        "ward": "decides the partition",
        "outcome": "label",
    }
    assert fed.shape == (2,)
    assert [line.strip() for line in str(fed).splitlines()] == [
        repr(fed),
        *(f"{name}: {done}" for name, done in fed.columns.items()),
    ]
    assert "\n" not in str(load_federation("digits", partition="iid", clients=2))


@pytest.mark.parametrize(
    ("partition", "inputs"),
    [
        ("iid", ("age", "bmi", "ward")),
        ("natural:ward", ("age", "bmi")),
        ("sorted:age", ("bmi", "ward")),
        ("dirichlet:1,by=ward,min=1", ("age", "bmi")),
    ],
)
def test_what_decides_the_partition_is_no_input(patients, partition, inputs):
    fed = load(patients, partition, exclude=["patient_id"])
    assert tuple(name for name, done in fed.columns.items() if done == "input") == inputs
    assert fed.shape == (len(inputs),)


def test_features_are_taken_in_the_order_they_are_named_in(patients):
    source = load_source(patients, label="outcome", choice=sources.ColumnSelection(("bmi", "age")))
    other = load_source(patients, label="outcome", choice=sources.ColumnSelection(exclude=("patient_id", "ward")))
    assert torch.equal(source.train.x, other.train.x[:, [1, 0]])
    # Named by hand, the column of the partition and one that looks like an identifier are inputs.
    fed = load(patients, "natural:ward", clients=None, features="ward, patient_id")
    assert (fed.shape, fed.columns["ward"]) == ((2,), "input, and decides the partition")
    assert fed.columns["patient_id"] == "input"
    assert fed.columns["age"] == "left out: not among the features"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "the column 'patient_id' looks like an identifier.*--exclude patient_id.*features"),
        ({"features": ["agee"]}, "features: There is no column 'agee'. Did you mean 'age'"),
        ({"exclude": ["patient"]}, "exclude: There is no column 'patient'. Did you mean 'patient_id'"),
        ({"features": ["age", "bmi"], "exclude": ["bmi"]}, "'bmi' is both in features and in exclude"),
        ({"features": ["age", "age"]}, "contains the column 'age' twice"),
        ({"features": ["name"]}, r"'name' in features is not numeric \(text\)"),
        ({"features": ["dose"]}, r"'dose' in features is not numeric \(numbers with decimal commas, see csv.decimal\)"),
        ({"features": ["outcome"]}, "'outcome' is the label"),
        ({"features": 3}, "features=3 is not valid"),
        ({"exclude": ["patient_id", "age", "bmi", "ward"]}, r"no numeric input columns .*age \(left out: excluded\)"),
    ],
)
def test_choices_that_do_not_fit_are_refused(patients, options, words):
    with pytest.raises(UnskewError, match=words):
        load(patients, **options)


@pytest.mark.parametrize(
    ("n", "values", "refused"),
    [
        (20, lambda n: np.arange(n), True),
        (19, lambda n: np.arange(n), False),  # too few rows to tell
        (20, lambda n: np.arange(n) // 2, False),
        (20, lambda n: np.arange(n) + 0.5, False),  # a measurement
    ],
)
def test_identifiers_are_whole_numbers_that_all_differ(tmp_path, n, values, refused):
    """Half of them are enough where the name says so: a patient may come twice."""
    name = write(tmp_path / "t.csv", n, visit=values(n), visitId=values(n), paid=values(n) // 3)
    if refused:
        with pytest.raises(DataError, match="'visit' and the column 'visitId' looks like an identifier"):
            load(name, exclude=["patient_id"])
    else:
        columns = load(name, exclude=["patient_id"], features=["visit", "visitId", "paid"]).columns
        assert (columns["visit"], columns["paid"]) == ("input", "input")
    twice = write(tmp_path / "twice.csv", 24, visit_id=np.arange(24) // 2, paid=np.arange(24) // 2)
    with pytest.raises(DataError, match="column 'visit_id' looks like an identifier"):
        load(twice, exclude=["patient_id"])


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ([float(k) for k in range(1001, 1301)], "number", True),
        ([None, *map(float, range(1001, 1300))], "number", True),  # a missing value makes pandas write 1001.0
        ([float("nan"), *map(float, range(1001, 1300))], "number", True),
        ([k + 0.5 for k in range(300)], "id", False),  # fractions are measurements
        ([float("inf"), *map(float, range(299))], "number", False),
        ([str(uuid.UUID(int=k)) for k in range(300)], "key", True),
        (["M", "F"] * 150, "sex", False),
        ([*range(1001, 1299), 1001, 1002], "number", True),  # two rows occur twice
        (np.random.default_rng(0).integers(0, 10**6, 3000).tolist(), "price", False),  # few repetitions, as by chance
        (np.random.default_rng(0).normal(3000, 500, 300).round().tolist(), "weight", False),
        ([k // 2 for k in range(300)], "visit_id", True),
        ([k // 2 for k in range(300)], "visit", False),
        ([2**60 + k for k in range(300)], "number", True),
    ],
)
def test_strings_and_whole_numbers_of_any_type_are_identifiers_if_they_hardly_repeat(values, name, expected):
    assert is_identifier(pa.chunked_array([pa.array(values)]), name) == expected


def test_an_identifier_stored_as_a_fraction_is_reported_like_an_integer(tmp_path):
    name = write(tmp_path / "t.csv", number=[f"{1001 + k}.0" for k in range(30)])
    with pytest.raises(DataError, match="'patient_id' and the column 'number' looks like an identifier: whole numbers"):
        load(name)
    assert load(name, exclude=["patient_id", "number"]).columns["number"] == "left out: excluded"


def test_row_numbers_that_pandas_stores_are_left_out(tmp_path):
    text = "\n".join([",age,outcome", *(f"{i},{i % 5},{i % 2}" for i in range(30))])
    (tmp_path / "t.csv").write_text(text)
    fed = load(f"table:{tmp_path}/t.csv")
    assert (fed.columns[""], fed.shape) == ("left out: numbers of rows", (1,))
    assert describe_roles(fed.columns)[0] == ("(no name)", "left out: numbers of rows")
    half = [i / 2 for i in range(30)]
    table = pa.table(
        {"age": half, "outcome": [0, 1] * 15, "__index_level_0__": half, "when": [[1]] * 30, "no": [None] * 30}
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    columns = load(f"table:{tmp_path}/t.parquet").columns
    assert columns["__index_level_0__"] == "left out: numbers of rows"
    assert (columns["no"], columns["when"].split(":")[0]) == ("left out: empty", "left out")


def test_only_tables_of_numbers_have_features(tmp_path):
    for name, options in (("digits", {}), ("sentences", {"text": {"tokenizer": "bytes"}})):
        for field in ("features", "exclude"):
            with pytest.raises(ConfigError, match="features and exclude require a table"):
                load_federation(name, partition="iid", **options, **{field: "a"})
    assert load_federation("digits", partition="iid", clients=2).columns == {}
    image = pytest.importorskip("PIL.Image")
    for i in range(4):
        image.fromarray(np.full((2, 2), i, np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "t.csv").write_text("\n".join(["photo,who,outcome", *(f"{i}.png,{i % 2},{i % 2}" for i in range(4))]))
    given = {"label": "outcome", "image": "photo", "clients": None}
    fed = load_federation(f"table:{tmp_path}/t.csv", partition="natural:who", **given)
    assert fed.columns == {"photo": "input", "who": "decides the partition", "outcome": "label"}
    with pytest.raises(ConfigError, match="are the images in its column 'photo'"):
        load_federation(f"table:{tmp_path}/t.csv", partition="natural:who", exclude="who", **given)


def test_a_wide_table_is_told_in_a_few_lines():
    columns = {f"gene{i}": "input" for i in range(SHOWN)} | {"[who]": "label"}
    assert describe_roles(columns) == [("gene0, gene1, gene2, gene3, gene4 and 35 more", "input"), ("[who]", "label")]
    assert columns_table(columns).row_count == 2


def test_the_column_of_a_partition():
    class Partitioner:
        _partition_by = "user"

    assert [partition_column(p) for p in ("natural:user,min=3", Partitioner(), len)] == ["user", "user", None]


def test_a_run_goes_on_with_the_same_features_only(patients, tmp_path):
    options = {"data": patients, "label": "outcome", "partition": "iid", "clients": 2, "model": "logistic"}
    unskew.run(**options, features="age,bmi", rounds=1, engine="inline", out=tmp_path / "run")
    with pytest.raises(
        CheckpointError, match="features=\\['age', 'bmi'\\] and cannot be resumed with features=\\['bmi', 'age'\\]"
    ):
        unskew.run(**options, features=["bmi", "age"], rounds=2, engine="inline", out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("train", ["T.CSV", "train.CSV"])
def test_capital_suffixes_are_read(tmp_path, train):
    write(tmp_path / train, 18)
    write(tmp_path / "test.csv", 6)
    for name in (f"table:{tmp_path}/{train}", f"{tmp_path}/{train}", *([f"table:{tmp_path}"] * (train != "T.CSV"))):
        source = load_source(name, label="outcome")
        assert (len(source.train), len(source.test)) == ((14, 4) if train == "T.CSV" else (18, 6))


class Counting:
    """A table that counts how often the list of its columns is made, which takes as long as there are columns."""

    def __init__(self, table):
        self.table, self.asked = table, 0

    def __getattr__(self, name):
        return getattr(self.table, name)

    @property
    def column_names(self):
        self.asked += 1
        return self.table.column_names


def test_the_work_on_a_wide_table_is_not_that_of_all_columns_for_each_of_them():
    names = tuple(f"g{number}" for number in range(300))
    counting = Counting(pa.table({**{name: [1.0, 2.0] for name in names}, "y": [0, 1]}))
    read = read_columns(counting, [Encoder(name) for name in names], "a table")
    assert read.tolist() == [[1.0] * 300, [2.0] * 300]
    select_inputs(counting, ("y",), ColumnSelection(features=names), "a table")
    inputs = InputSpec(task="classification", shape=(300,), kind="float", classes=2, features=names)
    assert torch.equal(rows_of_table(counting, Path("t.csv"), inputs, new_site=False), torch.from_numpy(read))
    assert counting.asked < 20


QUOTED = {
    "site, name": np.arange(30) % 3,
    "a, mean": np.arange(30) / 7,
    " hb": np.arange(30) / 9,
    "when: day": np.arange(30),
}


def write_quoted(file):
    columns = QUOTED | {"y ": np.arange(30) // 3 % 2}
    lines = [
        ",".join(f'"{name}"' for name in columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    file.write_text("\n".join(lines))
    return f"table:{file}"


@pytest.mark.parametrize("listed", ['"a, mean", hb', ["a, mean", " hb"], ' " hb" ,"a, mean" '])
def test_names_with_commas_are_quoted_and_blanks_at_their_ends_do_not_matter(tmp_path, listed):
    options = {"label": "y", "partition": 'natural:"site, name"', "clients": None}
    fed = unskew.load_federation(write_quoted(tmp_path / "t.csv"), features=listed, **options)
    inputs = [name for name, done in fed.columns.items() if done == "input"]
    assert (inputs, len(fed.clients), fed.columns["site, name"]) == (["a, mean", "hb"], 3, "decides the partition")
    config = experiment({"data": write_quoted(tmp_path / "t.csv"), **options, "label": " y", "features": listed})
    assert federation_of(config.data_spec, 0).columns == fed.columns


@pytest.mark.parametrize(
    ("partition", "column"),
    [
        ('natural:"site, name"', "site, name"),
        ('natural: " site, name " ,min=2', "site, name"),
        ('sorted:"when: day"', "when: day"),
        ('dirichlet:0.1,by="site, name",min=2', "site, name"),
        ('classes:2,by="a=b"', "a=b"),
        ('natural:"5"" pipe"', '5" pipe'),
        ('natural:5" pipe', '5" pipe'),
    ],
)
def test_a_quoted_column_of_a_partition_may_contain_separators(partition, column):
    assert partition_column(partition) == column
    assert partition_column(f"natural:{quote(column)}") == column


def test_a_comma_in_an_unquoted_column_of_a_partition_is_explained():
    with pytest.raises(ConfigError, match='Write a column name with commas in double quotes: natural:"site, name"'):
        partition_column("natural:site, name")


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ('"visit, date"', Split("visit, date")),
        ('time:"visit, date"', Split(None, "visit, date")),
        ('"patient: id" , time:"visit, date"', Split("patient: id", "visit, date")),
    ],
)
def test_quoted_columns_of_a_split_may_contain_separators(text, split):
    assert parse_split(text) == split


def test_columns_that_differ_only_by_blanks_are_rejected(tmp_path):
    (tmp_path / "t.csv").write_text("hb, hb,y\n" + "1,2,0\n3,4,1\n" * 10)
    with pytest.raises(DataError, match="more than one column named 'hb'"):
        load(f"table:{tmp_path}/t.csv", label="y")


def test_a_model_of_columns_with_blanks_predicts_for_the_same_file(tmp_path):
    data = write_quoted(tmp_path / "t.csv")
    options = {"data": data, "label": "y", "partition": "iid", "clients": 2, "features": " hb"}
    unskew.run(**options, model="logistic", rounds=1, engine="inline", out=tmp_path / "run")
    assert len(unskew.load_predictor(tmp_path / "run").predict_file(tmp_path / "t.csv")) == 30
