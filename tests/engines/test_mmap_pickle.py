"""Arrays that are mapped from files: named by their files where they are packed, and opened there."""

import pickle

import numpy as np
import pytest
import torch

import unskew
from unskew.engines.mmap_pickle import dumps_mmap
from unskew.errors import DataError


def folder_of(place, rows=300):
    place.mkdir()
    numbers = np.random.default_rng(0)
    arrays = {
        "x": numbers.integers(0, 255, size=(rows, 8, 8, 3), dtype=np.uint8),
        "y": np.arange(rows) % 4,
        "site": np.arange(rows) // (rows // 5),
        "x_test": numbers.integers(0, 255, size=(8, 8, 8, 3), dtype=np.uint8),
        "y_test": np.arange(8) % 4,
    }
    for name, values in arrays.items():
        np.save(place / f"{name}.npy", values)
    return arrays


def test_a_folder_of_arrays_stays_in_its_files(tmp_path):
    arrays = folder_of(tmp_path / "arrays")
    np.savez(tmp_path / "arrays.npz", **arrays)
    options = {"partition": "natural:site", "clients": None}
    mapped = unskew.load_federation(f"npy:file://{tmp_path / 'arrays'}", **options)
    held = unskew.load_federation(f"npz:{tmp_path / 'arrays.npz'}", **options)
    assert (mapped.clients.mapped, held.clients.mapped) == (True, False)
    assert (mapped.fingerprint, mapped.normalization) == (held.fingerprint, held.normalization)
    sent = dumps_mmap(mapped.clients)
    assert len(sent) < arrays["x"].nbytes / 4 < len(dumps_mmap(held.clients))
    there = pickle.loads(sent)
    for k in range(5):
        assert torch.equal(there[k].x, held.clients[k].x)
        assert there[k].x.stride() == held.clients[k].x.stride()


def test_files_that_a_node_does_not_see_or_that_are_others(tmp_path):
    arrays = folder_of(tmp_path / "arrays")
    x = np.load(tmp_path / "arrays" / "x.npy", mmap_mode="r")
    clients = [(x[k : k + 50], arrays["y"][k : k + 50]) for k in range(0, 300, 50)]
    given = unskew.Federation.from_arrays(clients, test=(x[:20], arrays["y"][:20]), classes=4)
    sent = dumps_mmap(given.clients)
    assert len(sent) < arrays["x"].nbytes / 4
    assert torch.equal(pickle.loads(sent)[5].x, given.clients[5].x)
    np.save(tmp_path / "arrays" / "x.npy", arrays["x"][:100])
    with pytest.raises(DataError, match="the same file"):
        pickle.loads(sent)
    (tmp_path / "arrays" / "x.npy").unlink()
    with pytest.raises(DataError, match="cannot read"):
        pickle.loads(sent)
    with pytest.raises(DataError, match=r"files x\.npy and y\.npy"):
        unskew.load_federation(f"npy:{tmp_path / 'arrays'}")
