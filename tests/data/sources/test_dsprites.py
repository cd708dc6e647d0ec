"""dSprites drawn from its factors, and read from its file."""

import numpy as np
import pytest
import torch

import unskew
from unskew.data.sources import dsprites as sprites
from unskew.data.sources.dsprites import client_groups, dsprites, factors
from unskew.data.sources.registry import load_source
from unskew.errors import ConfigError, DataError


def test_the_clients_are_shapes_in_quadrants_of_the_papers_size():
    known = factors(np.arange(sprites.TOTAL))
    counts = np.bincount(client_groups(known))
    assert counts.tolist() == [61_440] * 12
    assert counts[0] - round(0.1 * counts[0]) == 55_296
    assert known.max(0).tolist() == [2, 5, 39, 31, 31]
    assert known[1].tolist() == [0, 0, 0, 0, 1]  # the vertical position changes fastest


def test_images_follow_their_factors():
    source = dsprites(None, 1200)
    x, known = source.train.x[:, 0].numpy(), source.train.columns
    assert x.shape == (1080, 64, 64)
    assert set(np.unique(x)) == {0, 255}
    assert not x[:, 0].any()  # nothing touches the frame
    assert not x[:, :, 63].any()
    assert source.train.y.tolist() == known["shape"].tolist()
    rows, columns = np.mgrid[:64, :64]
    white = x / 255
    area = white.sum((1, 2))
    middle = np.stack([(white * columns).sum((1, 2)), (white * rows).sum((1, 2))], 1) / area[:, None]
    known_middle = np.stack([known["x"], known["y"]], 1) + 16
    symmetric = known["shape"] < 2  # the heart's middle is not its center of mass
    assert np.abs(middle - known_middle)[symmetric].max() < 0.3
    assert np.abs(middle - known_middle).max() < 4
    scale = 0.5 + 0.1 * known["scale"]
    for shape, exact in (
        (0, 2),
        (1, np.pi / 2),
    ):  # areas of a square and an ellipse of half the height in a unit circle
        mine = known["shape"] == shape
        np.testing.assert_allclose(area[mine], exact * (15.5 * scale[mine]) ** 2, rtol=0.12)
    ellipse = (known["shape"] == 1) & (known["orientation"] == 0)
    assert (x[ellipse].any(1).sum(1) > 1.7 * x[ellipse].any(2).sum(1)).all()  # it lies when it is not turned


def test_the_test_part_is_a_tenth_of_every_client_and_apart():
    source = dsprites(None, 600)
    for table, each in ((source.train, 45), (source.test, 5)):
        assert np.bincount(table.columns["client"]).tolist() == [each] * 12
    keys = [np.stack([t.columns[c] for c in sprites.COLUMNS], 1) for t in (source.train, source.test)]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 600
    again = dsprites(None, 600)
    assert torch.equal(source.train.x, again.train.x)


def test_a_federation_of_twelve_clients_trains():
    fed = unskew.load_federation("dsprites:480", partition="natural:client", clients=None, holdout=0.0)
    assert fed.class_counts().tolist() == [[36 * (k // 4 == c) for c in range(3)] for k in range(12)]
    assert fed.shape == (1, 64, 64)
    result = unskew.run(fed, model="logistic", rounds=1, local_steps=1, engine="inline")
    assert result.summary["clients"] == 12


def test_the_original_file_is_read_without_its_pickles(tmp_path, monkeypatch):
    monkeypatch.setattr(sprites, "SIZES", (3, 6, 2, 4, 4))
    monkeypatch.setattr(sprites, "TOTAL", 3 * 6 * 2 * 4 * 4)
    known = factors(np.arange(sprites.TOTAL))
    images = (np.random.default_rng(0).random((sprites.TOTAL, 64, 64)) < 0.1).astype(np.uint8)
    latents = np.concatenate([np.zeros((sprites.TOTAL, 1), int), known], 1)
    np.savez(tmp_path / "d.npz", imgs=images, latents_classes=latents, metadata=np.array({"a": 1}, dtype=object))
    source = load_source("dsprites:96", path=tmp_path)
    columns = source.train.columns
    rows = np.ravel_multi_index(tuple(columns[c] for c in sprites.COLUMNS), sprites.SIZES)
    assert np.array_equal(source.train.x[:, 0].numpy(), images[rows] * 255)
    for wrong, words in [
        ({"imgs": images[1:], "latents_classes": latents}, "is not dSprites"),
        ({"imgs": images, "latents_classes": latents[::-1]}, "is not dSprites"),
        ({"imgs": images}, "cannot be read"),
        ({"imgs": images.astype(object), "latents_classes": latents}, "cannot be read"),
    ]:
        np.savez(tmp_path / "d.npz", **wrong)
        with pytest.raises(DataError, match=words):
            dsprites(tmp_path / "d.npz")
    (tmp_path / "d.npz").write_bytes(b"no file")
    with pytest.raises(DataError, match="cannot be read"):
        dsprites(tmp_path / "d.npz")
    (tmp_path / "d.npz").unlink()
    with pytest.raises(DataError, match=r"no \.npz"):
        dsprites(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("dsprites:many", {}, ConfigError, "number of images"),
        ("dsprites:5", {}, DataError, "is not valid"),
        ("dsprites:800000", {}, DataError, "is not valid"),
        ("dsprites", {"label": "x"}, ConfigError, "label of dSprites is the shape"),
    ],
)
def test_dsprites_rejects_invalid_options(name, options, error, words):
    with pytest.raises(error, match=words):
        load_source(name, **options)
