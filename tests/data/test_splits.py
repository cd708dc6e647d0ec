"""Splits by patients, by time and by a column: no group is on both sides, whatever divides the rows among clients."""

from pathlib import Path

import numpy as np
import pytest

import unskew
from unskew.config_fields import validate_fields
from unskew.data.load import load_partitioned
from unskew.data.spec import DataSpec, Split
from unskew.data.splits import make_units
from unskew.errors import ConfigError, DataError

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def visits(tmp_path_factory):
    """60 patients with one to seven visits; row numbers are an input, so that every row can be found again."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("visits") / "visits.csv"
    lines = ["row,patient_id,visit,ward,side,ill"]
    for patient in rng.permutation(np.repeat(np.arange(60), rng.integers(1, 8, 60))):
        day = np.datetime64("2024-01-01") + int(rng.integers(0, 90)) + int(patient)
        ward, ill = "abc"[rng.integers(0, 3)], rng.integers(0, 2)
        lines.append(f"{len(lines) - 1},p{patient},{day},{ward},{['train', 'Test '][len(lines) % 4 == 0]},{ill}")
    path.write_text("\n".join(lines) + "\n")
    return path


def parts(path, **options):
    """Numbers of the rows that clients train on, that they hold out, and of the test rows."""
    options = {"data": f"table:{path}", "label": "ill", "features": ("row",), "clients": 4, **options}
    whole = load_partitioned(validate_fields(DataSpec, {"partition": "iid", **options}), 0)
    found = [whole.client(k) for k in range(whole.parts.clients)]
    trained, held = (np.concatenate([pair[side].x[:, 0].int().numpy() for pair in found]) for side in (0, 1))
    return trained, held, whole.test.x[:, 0].int().numpy(), whole


def column(path, name):
    header, *rows = (line.split(",") for line in Path(path).read_text().splitlines())
    return np.array([row[header.index(name)] for row in rows])


@pytest.mark.parametrize("partition", ["iid", "natural:ward", "quantity:0.5"])
@pytest.mark.parametrize("split_by", ["patient_id", "patient_id,time:visit"])
def test_no_patient_is_on_both_sides_of_a_split(visits, partition, split_by):
    clients = None if "natural" in partition else 4
    trained, held, test, _ = parts(visits, partition=partition, clients=clients, split_by=split_by, holdout=0.2)
    patients = column(visits, "patient_id")
    sides = [set(patients[rows]) for rows in (trained, held, test)]
    assert all(sides)
    assert not (sides[0] & sides[1])
    assert not (sides[0] & sides[2])
    assert not (sides[1] & sides[2])
    assert sorted([*trained, *held, *test]) == list(range(len(patients)))
    assert 0.15 < len(test) / len(patients) < 0.25
    assert 0.1 < len(held) / len(patients) < 0.5


def newest_count(days, share):
    """Number of rows from a day on that is nearest to the share, by trying every day."""
    counts = [int((days >= day).sum()) for day in np.unique(days)[1:][::-1]]
    return min(counts, key=lambda count: abs(count - share * len(days))) if counts else 0


def test_the_newest_days_are_held_out(visits):
    """No day is divided, although several rows have the same day."""
    trained, held, test, whole = parts(visits, split_by="time:visit", holdout=0.25)
    days = column(visits, "visit").astype("datetime64[D]")
    assert len(np.unique(days)) < len(days)
    assert days[test].min() > days[np.concatenate([trained, held])].max()
    assert len(test) == newest_count(days, 0.2)
    for k in range(4):
        own, kept = (pair.x[:, 0].int().numpy() for pair in whole.client(k))
        assert days[kept].min() > days[own].max()
        assert len(kept) == newest_count(days[np.concatenate([own, kept])], 0.25)


def test_patients_with_the_newest_visits_are_held_out(visits):
    trained, held, test, _ = parts(visits, split_by="patient_id,time:visit", holdout=0)
    patients, days = column(visits, "patient_id"), column(visits, "visit")
    newest = {patient: max(days[patients == patient]) for patient in set(patients)}
    assert not len(held)
    assert min(newest[p] for p in patients[test]) > max(newest[p] for p in patients[trained])


def test_a_column_names_the_test_rows(visits):
    *_, test, _ = parts(visits, split_by="column:side")
    assert sorted(test) == np.flatnonzero(column(visits, "side") == "Test ").tolist()
    assert parts(visits, split_by="column:side")[3].source.columns["side"] == "decides the split"


def test_patients_at_the_server_are_not_evaluated_on(visits):
    patients = column(visits, "patient_id")
    whole = parts(visits, split_by="patient_id", server_data=9)[3]
    server, test = (set(patients[x[:, 0].int().numpy()]) for x in (whole.at_server.x, whole.test.x))
    assert len(whole.at_server.y) == 9
    assert test
    assert not server & test
    assert len(parts(visits, split_by="patient_id", reserve_test_samples=9)[2]) == len(whole.test)


def test_without_an_option_the_split_is_what_it_was(visits):
    """The order that the generator gave before there were groups."""
    *_, whole = parts(visits)
    rng = np.random.default_rng(np.random.SeedSequence([0, 131059765]))
    owner = np.repeat(np.arange(4), whole.parts.sizes)
    expected = whole.parts.order[np.lexsort((rng.random(len(owner)), owner))]
    assert whole.rows.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("split_by", "words"),
    [
        ("patient", "There is no column 'patient'. Did you mean 'patient_id'"),
        ("time:ward", "'ward' of split_by contains strings such as '.'. Write dates as 2024-01-31"),
        ("column:ward", "'ward' of split_by has the value 'a'. Write train or test"),
        ("column:side,patient_id", "column:side cannot be combined"),
        ("patient_id,ward", "is not valid. Write a column such as patient_id"),
        ("when:visit", "is not valid"),
    ],
)
def test_split_rejects_impossible_groups(visits, split_by, words):
    with pytest.raises((ConfigError, DataError), match=words):
        parts(visits, split_by=split_by)


def test_truth_values_have_no_order_in_time():
    with pytest.raises(DataError, match="contains truth values"):
        make_units({"t": np.array([True, False])}, Split(time="t"), 2, np.random.default_rng(0))


def test_groups_in_two_files_clients_of_one_group_and_data_without_columns(tmp_path):
    rows = "".join(f"{k % 6},{k % 5},{k % 2}\n" for k in range(24))
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("patient,age,ill\n" + rows)
    options = {"label": "ill", "partition": "iid", "clients": 2}
    with pytest.raises(DataError, match=r"6 values, such as 0, are in the training and in the test rows"):
        unskew.load_federation(f"table:{tmp_path}", split_by="patient", **options)
    with pytest.raises(ConfigError, match="there is a test file"):
        unskew.load_federation(f"table:{tmp_path}", split_by="column:patient", **options)
    with pytest.raises(ConfigError, match="split_by requires a table"):
        unskew.load_federation("digits", split_by="patient")
    with pytest.raises(ConfigError, match="split_by='a,b' is not valid"):
        unskew.run(data="digits", split_by="a,b")


@pytest.mark.parametrize("count", range(4, 12))
def test_every_class_has_test_groups_if_it_has_two(tmp_path, count):
    patients = {"ill": 2, "well": count}
    rows = [f"{name}{p},{k},{name}" for name, groups in patients.items() for p in range(groups) for k in range(6)]
    (tmp_path / "t.csv").write_text("patient,a,y\n" + "\n".join(rows))
    fed = unskew.load_federation(
        f"table:{tmp_path / 't.csv'}", label="y", partition="iid", clients=2, split_by="patient", exclude="patient"
    )
    counts = np.bincount(fed.test[1], minlength=2)
    assert counts.min() >= 6
    assert not (counts % 6).any()
