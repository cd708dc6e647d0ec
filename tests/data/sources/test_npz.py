"""Arrays in one file: the layout of MedMNIST, and several labels per sample."""

import numpy as np
import pytest
import torch
from support.running import call

import unskew
from unskew.data.sources.registry import load_source
from unskew.errors import DataError

SIZES = {"train": 30, "val": 10, "test": 20}


def medmnist(folder, shape=(8, 8), labels=1, **changes):
    """A file in the layout of MedMNIST, and its arrays."""
    draws = np.random.default_rng(0)
    arrays = {}
    for part, n in SIZES.items():
        arrays[f"{part}_images"] = draws.integers(0, 256, (n, *shape), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.resize(np.arange(3 if labels == 1 else 2), (n, labels)).astype(np.uint8)
    arrays |= changes
    np.savez(folder / "mnist.npz", **{name: values for name, values in arrays.items() if values is not None})
    return f"npz:{folder / 'mnist.npz'}", arrays


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3), (6, 8, 8)], ids=["gray", "color", "volume"])
def test_validation_images_of_medmnist_join_the_training_images(shape, tmp_path):
    name, arrays = medmnist(tmp_path, shape)
    source = load_source(name)
    images = np.concatenate([arrays["train_images"], arrays["val_images"]])
    expected = images.transpose(0, 3, 1, 2) if shape == (8, 8, 3) else images.reshape(40, -1, 8, 8)
    assert np.array_equal(source.train.x.numpy(), expected)
    assert source.train.x.dtype == torch.uint8
    assert source.train.y.tolist() == np.concatenate([arrays["train_labels"], arrays["val_labels"]])[:, 0].tolist()
    assert source.test.y.tolist() == arrays["test_labels"][:, 0].tolist()
    assert (source.task, source.classes, source.train.columns) == ("classification", 3, {})


def test_several_labels_of_medmnist_are_a_multi_label_task(tmp_path):
    name, arrays = medmnist(tmp_path, labels=4)
    source = load_source(name)
    assert (source.task, source.classes) == ("multilabel", 4)
    assert np.array_equal(source.train.y[30:].numpy(), arrays["val_labels"])
    assert np.array_equal(source.test.y.numpy(), arrays["test_labels"])
    assert "micro_f1" in unskew.run(data=name, partition="iid", clients=2, model="logistic", rounds=1).summary


def test_arrays_with_a_value_per_training_row_are_columns(tmp_path):
    sites = {"train_site": np.arange(30) % 2, "val_site": np.arange(10) % 2, "test_site": np.zeros(20, int)}
    name, _ = medmnist(tmp_path, **sites)
    federation = unskew.load_federation(name, partition="natural:site", clients=None)
    assert federation.client_names == ("0", "1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"val_labels": None}, "must contain val_labels, in the shape"),
        ({"train_labels": None}, "must contain train_labels"),
        ({"val_images": np.zeros((10, 9, 9), np.uint8)}, "must contain val_images, in the shape"),
        ({"test_labels": np.zeros((20, 2), np.uint8)}, "must contain test_labels, in the shape"),
        ({"val_images": np.zeros((9, 8, 8), np.uint8)}, "same number of rows"),
    ],
)
def test_parts_of_medmnist_that_do_not_fit_are_an_error(changes, words, tmp_path):
    name, _ = medmnist(tmp_path, **changes)
    with pytest.raises(DataError, match=words):
        load_source(name)


def test_labels_other_than_0_and_1_in_several_columns_are_an_error(tmp_path):
    name, _ = medmnist(tmp_path, labels=2, train_labels=np.full((30, 2), 3, np.uint8))
    with pytest.raises(DataError, match="must be 0 or 1"):
        load_source(name)


@pytest.mark.parametrize(("labels", "partition"), [(1, "dirichlet"), (3, "iid")])
def test_init_writes_a_partition_that_the_labels_allow(labels, partition, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    medmnist(tmp_path, labels=labels)
    assert call(capsys, "init", "mnist.npz", "--out", "study.yaml").code == 0
    assert f"partition: {partition}" in (tmp_path / "study.yaml").read_text()
    assert call(capsys, "partition", "study.yaml").code == 0
