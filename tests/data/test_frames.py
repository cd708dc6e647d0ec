"""Data frames and labels of text in Python: names of columns and classes are kept, and predictions return them."""

import numpy as np
import pytest

import unskew
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
    assert set(result.predict(test[0].to_numpy(float))) <= {"healthy", "sick"}
    test[0].assign(extra=1)[["extra", "visits", "age", "smoker"]].to_csv(tmp_path / "new.csv", index=False)
    assert unskew.load_predictor(tmp_path / "run").predict_file(tmp_path / "new.csv") == result.predict(
        test[0].to_numpy(float)
    )


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
