"""Data frames and labels of text in Python: names of columns and classes are kept, and predictions return them."""

import numpy as np
import pytest

import unskew
from unskew.data.sources.registry import source_from_arrays
from unskew.diagnosis.synthetic import validate_images
from unskew.errors import DataError

pandas = pytest.importorskip("pandas")
TINY = {"model": "logistic", "rounds": 1, "local_steps": 3, "lr": 0.5, "engine": "inline"}


def rows(n, seed):
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {"age": rng.normal(size=n), "visits": rng.integers(0, 5, n), "smoker": rng.random(n) > 0.5}
    )
    return frame, pandas.Series(np.where(frame["age"] > 0, "sick", "healthy"))


def test_frames_are_matched_by_column_and_predictions_are_names(tmp_path):
    (x, y), (other, z), test = rows(40, 0), rows(30, 1), rows(20, 2)
    fed = unskew.Federation.from_arrays([(x, y), (other[["smoker", "age", "visits"]], list(z))], test=test, holdout=0)
    assert fed.class_names == ("healthy", "sick")
    assert fed.columns == {"age": "input", "visits": "input", "smoker": "input"}
    for client, (frame, labels) in zip(fed.clients, ((x, y), (other, z)), strict=True):
        order = np.argsort(client.x[:, 0].numpy())
        expected = frame.to_numpy(float)[np.argsort(frame["age"].to_numpy())]
        assert np.allclose(client.x.numpy()[order], expected)
        assert (client.y.numpy()[order] == (labels.to_numpy()[np.argsort(frame["age"].to_numpy())] == "sick")).all()
    result = unskew.run(fed, out=tmp_path / "run", **TINY)
    expected = result.predict(test[0].to_numpy(float))
    assert set(expected) <= {"healthy", "sick"}
    assert result.predict(test[0].assign(extra="x")[["smoker", "extra", "visits", "age"]]) == expected
    assert result.predict(test[0].to_numpy(float)[::-1]) == expected[::-1]
    test[0].assign(extra=1)[["extra", "visits", "age", "smoker"]].to_csv(tmp_path / "new.csv", index=False)
    assert unskew.load_predictor(tmp_path / "run").predict_file(tmp_path / "new.csv") == result.predict(
        test[0].to_numpy(float)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x: x.rename(columns={"age": "years", "visits": "stays"}),
            "on the column 'age' and the column 'visits', which the",
        ),
        (lambda x: x.assign(age="old"), "column 'age' is not numeric"),
        (lambda x: x[["age", "age", "visits", "smoker"]], "more than one column named 'age'"),
    ],
)
def test_frames_without_a_column_of_the_model_are_an_error_in_predict(change, words):
    result = unskew.run(unskew.Federation.from_arrays([rows(10, 0)], test=rows(10, 2)), **TINY)
    with pytest.raises(DataError, match=words):
        result.predict(change(rows(5, 3)[0]))


def test_frames_of_a_model_that_encodes_columns_are_an_error_in_predict(tmp_path):
    frame, y = rows(60, 0)
    frame.assign(sick=y).to_csv(tmp_path / "t.csv", index=False)
    options = {"label": "sick", "partition": "iid", "clients": 2, "categories": "smoker"}
    result = unskew.run(data=f"table:{tmp_path / 't.csv'}", **options, **TINY)
    with pytest.raises(DataError, match="use predict_file, or pass an array of encoded values"):
        result.predict(frame)


def test_names_may_be_given_in_another_order_and_have_more_classes():
    x, y = np.zeros((4, 2), "float32"), ["b", "a", "b", "a"]
    fed = unskew.Federation.from_arrays([(x, y)], test=(x, y), class_names=["c", "b", "a"], classes=3, holdout=0)
    assert sorted(fed.clients[0].y.tolist()) == [1, 1, 2, 2]
    assert fed.class_names == ("c", "b", "a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x, y: (x.rename(columns={"age": "years"}), y),
            "data frames have different columns: age, visits, smoker",
        ),
        (lambda x, y: (x.assign(age="old"), y), "column 'age' is not numeric"),
        (lambda x, y: (x, np.zeros(len(x), int)), "Some labels are strings and some are not"),
    ],
)
def test_frames_and_labels_that_differ_are_sentences(change, words):
    with pytest.raises(DataError, match=words):
        unskew.Federation.from_arrays([rows(10, 0), change(*rows(10, 1))], test=rows(10, 2))


def test_a_label_that_has_no_name_is_a_sentence():
    with pytest.raises(DataError, match="'sick' is not in class_names: healthy, ill"):
        unskew.Federation.from_arrays([rows(10, 0)], test=rows(10, 2), class_names=["healthy", "ill"])


def test_a_natural_partition_needs_no_number_of_clients(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("ward,age,ill\n" + "".join(f"w{k % 3},{k % 7},{k % 2}\n" for k in range(60)))
    assert len(unskew.load_federation(f"table:{path}", label="ill", partition="natural:ward").clients) == 3
    assert len(unskew.load_federation(f"table:{path}", label="ill", partition="iid").clients) == 10


@pytest.mark.parametrize("given", [{"test": [None, [[], None]]}, {"test": [[[0.0]], [[0], [1, 2]]]}])
def test_ragged_labels_are_an_error_of_ours(given):
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1, 0, 1, 0, 1])
    with pytest.raises(DataError, match="test set"):
        unskew.Federation.from_arrays([(x, y)], **given)


VALUES = {
    "from 1": [1, 2, 3],
    "with a gap": [0, 2, 3],
    "large": [17, 1017, 5_000_000_000],
    "negative": [-5, -1, 4],
    "text": ["low", "medium", "top"],
    "whole floats": [1.0, 2.0, 7.0],
    "true and false": [False, True],
    "bytes": [b"x", b"y", b"z"],
}


def labeled(values, n=90):
    draws = np.random.default_rng(0)
    indices = draws.integers(0, len(values), n)
    return (draws.normal(size=(n, 4)) + indices[:, None]).astype("float32"), indices, np.array(values)[indices]


def names_of(values):
    return tuple(str(int(v) if isinstance(v, float) else v.decode() if isinstance(v, bytes) else v) for v in values)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_classes_of_array_files_are_the_values_that_occur(tmp_path, values):
    x, indices, y = labeled(values)
    for name, labels in (("indices", indices), ("values", y)):
        np.savez(tmp_path / f"{name}.npz", x=x[:60], y=labels[:60], x_test=x[60:], y_test=labels[60:])
    plain, fed = (
        unskew.load_federation(f"npz:{tmp_path / name}.npz", partition="dirichlet:1,min=2", clients=3)
        for name in ("indices", "values")
    )
    assert fed.class_names == names_of(values)
    assert (fed.fingerprint, fed.classes) == (plain.fingerprint, len(values))
    assert fed.test[1].tolist() == indices[60:].tolist()
    runs = [unskew.run(each, metrics=["f1", "auroc"], **TINY) for each in (plain, fed)]
    assert bool((runs[0].vector == runs[1].vector).all())
    assert runs[0].summary["auroc"] == runs[1].summary["auroc"] is not None


@pytest.mark.parametrize("values", [v for name, v in VALUES.items() if name != "bytes"])
def test_classes_of_arrays_are_the_values_that_occur_at_any_client(values):
    x, indices, y = labeled(values)
    few = y[:30].copy()
    few[:] = values[1]  # one client and the test set have a part of the classes
    for server in (None, (x[60:], y[60:])):
        fed = unskew.Federation.from_arrays([(x[:30], few), (x[30:60], y[30:60])], (x[:30], few), server, holdout=0)
        assert fed.class_names == names_of(values)
        assert fed.clients[0].y.tolist() == fed.test[1].tolist() == [1] * 30
        assert sorted(fed.clients[1].y.tolist()) == sorted(indices[30:60])
        assert server is None or fed.server.y.tolist() == indices[60:].tolist()


def test_truth_values_are_indices_of_class_names():
    x, _, y = labeled([False, True])
    fed = unskew.Federation.from_arrays([(x, y)], test=(x, y), class_names=["no", "yes"])
    assert (fed.class_names, fed.test[1].tolist()) == (("no", "yes"), y.astype(int).tolist())


@pytest.mark.parametrize("label", [0, 5, "a"])
def test_labels_that_are_all_the_same_are_an_error(tmp_path, label):
    x, y = np.zeros((20, 2), "float32"), np.full(20, label)
    with pytest.raises(DataError, match=f"All labels are {label}, but a classifier needs two classes"):
        unskew.Federation.from_arrays([(x, y)], test=(x, y))
    np.savez(tmp_path / "same.npz", x=x, y=y)
    with pytest.raises(DataError, match=f"All samples of same have the same label, {label}, but a classifier"):
        unskew.load_federation(f"npz:{tmp_path / 'same.npz'}", partition="iid", clients=2)


def test_class_indices_have_no_other_names_and_explicit_classes_are_indices():
    x, indices, _ = labeled([0, 1, 2])
    plain = unskew.Federation.from_arrays([(x, indices)], test=(x, indices))
    assert (plain.classes, plain.class_names) == (3, ())
    two = indices % 2
    assert unskew.Federation.from_arrays([(x, two)], test=(x, two), classes=5).classes == 5
    with pytest.raises(DataError, match="labels of client 0 contain 3, but with 3 classes they must be 0 to 2"):
        unskew.Federation.from_arrays([(x, indices + 1)], test=(x, indices + 1), classes=3)


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ([0, 1], ["a", "b", "c"], [0, 1]),  # indices of the names
        ([1, 2], ["a", "b", "c"], [1, 2]),
        ([1, 2], ["a", "b"], [0, 1]),  # as many values as names
        ([17, 1017], ["a", "b"], [0, 1]),
        ([1, 2, 5], ["a", "b"], "3 classes but 2 class_names"),
        ([1, 5], ["a", "b", "c"], "2 classes but 3 class_names"),
    ],
)
def test_class_names_are_those_of_indices_or_of_all_values(tmp_path, labels, names, expected):
    x, _, y = labeled(labels)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            unskew.Federation.from_arrays([(x, y)], test=(x, y), class_names=names)
        return
    fed = unskew.Federation.from_arrays([(x, y)], test=(x, y), class_names=names)
    assert (fed.classes, fed.class_names) == (len(names), tuple(names))
    assert fed.test[1].tolist() == np.array(expected)[np.searchsorted(labels, y)].tolist()
    unskew.run(fed, out=tmp_path / "run", **TINY)
    assert set(unskew.load_predictor(tmp_path / "run").predict(x)) <= set(names)


@pytest.mark.parametrize("part", ["client 1", "the test set", "the server", "a client's own test set"])
def test_frames_with_another_index_than_their_labels_are_an_error(part):
    pairs = {who: rows(20, seed) for seed, who in enumerate(("client 0", "client 1", "the test set", "the server"))}
    own = rows(10, 9)
    if part in pairs:
        x, y = pairs[part]
        pairs[part] = (x.sort_values("age"), y)
    else:
        own = (own[0], own[1].sample(frac=1, random_state=0))
    clients = [(*pairs["client 0"], *own), pairs["client 1"]]
    who = part if part in pairs else "client 0"
    with pytest.raises(DataError, match=rf"labels of {who} have different pandas indices.*reset_index"):
        unskew.Federation.from_arrays(clients, pairs["the test set"], pairs["the server"])


def test_frames_with_the_index_of_their_labels_or_with_arrays_are_paired_by_position():
    x, y = rows(20, 0)
    x, y = x.sort_values("age"), y.loc[x.sort_values("age").index]
    expected = unskew.Federation.from_arrays([(x.to_numpy(float), list(y))], test=(x.to_numpy(float), list(y)))
    for other in (y, y.to_numpy(), y.to_frame()[0].tolist()):
        fed = unskew.Federation.from_arrays([(x, other)], test=(x, other))
        assert fed.fingerprint == expected.fingerprint
        assert bool((fed.test[1] == expected.test[1]).all())


def test_data_of_packages_and_synthetic_sets_are_paired_by_equal_indices():
    x, y = rows(20, 0)
    numbers, codes = x.astype(float), pandas.Series(np.arange(20) % 2 + 3)
    source = source_from_arrays("own", (numbers, codes), (numbers[:6], codes[:6]))
    assert (source.class_names, source.train.y.tolist()) == (("3", "4"), (codes - 3).tolist())
    turned = numbers.sort_values("age")
    with pytest.raises(DataError, match="labels of the test part of own have different pandas indices"):
        source_from_arrays("own", (numbers, codes), (turned, codes))
    fed = unskew.Federation.from_arrays([(numbers, y)], test=(numbers, y))
    with pytest.raises(DataError, match="labels of the set have different pandas indices"):
        validate_images((turned, codes - 3), fed, "the set")


def test_large_integers_and_labels_with_blanks_are_reported():
    x = 1_700_000_000 + np.arange(40).reshape(20, 2)
    with pytest.warns(UserWarning, match="far from zero compared with their spread"):
        unskew.Federation.from_arrays([(x, np.arange(20) % 2)] * 2, test=(x, np.arange(20) % 2))
    labels = np.array(["yes", "yes ", "no", "no"] * 5)
    with pytest.raises(DataError, match="differ only by spaces"):
        unskew.Federation.from_arrays([(x % 7, labels)] * 2, test=(x % 7, labels))
