"""Pictures of what clients make: the right clients, the right pixels, and a run that does not notice."""

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import an_update, broadcast
from support.running import TINY, call
from support.tolerance import MAGNIFIED, assert_close

import unskew
from unskew.data.federation import Federation
from unskew.data.normalization import Normalization
from unskew.data.pixel_scaling import PixelScaling
from unskew.engines.batches import InputNormalizer
from unskew.errors import ConfigError
from unskew.plots.image_grid import make_image_grid
from unskew.simulation.generated_samples import GeneratedSamplesRecorder

COG = "fedcog:start_round=1,n=6,g_steps=2,lambda_kd=1"


def train(out=None, method=COG, sizes=(12, 17, 9), **options):
    torch.manual_seed(0)
    given = {"rounds": 2, "lr": 0.05, "batch_size": 8, "precision": "fp64", "engine": "inline", "eval_clients": 0}
    return unskew.run(blobs(sizes), model=SmallBatchNorm(), method=method, out=out, **{**given, **options})


def names(folder):
    return sorted(path.name for path in (folder / "samples").iterdir())


@pytest.mark.slow
def test_every_engine_draws_the_same_and_trains_as_without(tmp_path):
    from matplotlib.image import imread

    plain = train()
    drawn = {}
    for engine in ("inline", "processes", "vectorized"):
        folder = tmp_path / engine
        result = train(folder, engine=engine, save_samples=True)
        assert names(folder) == [f"client-{k:04d}.png" for k in range(3)]
        drawn[engine] = [imread(path) for path in sorted((folder / "samples").iterdir())]
        assert_close(result.vector, plain.vector, MAGNIFIED)
        for way in ("bytes_up", "bytes_down"):
            assert result.summary[way] == plain.summary[way]
    assert torch.equal(train(tmp_path / "again", save_samples=True).vector, plain.vector)
    for one, *others in zip(*drawn.values(), strict=True):
        assert one.std() > 0.1
        for other in others:
            np.testing.assert_allclose(other, one, atol=1.5 / 255)


class Toy:
    """An engine whose clients make what they are asked for."""

    name = "toy"

    def train(self, broadcasts):
        for one in broadcasts:
            made = {"x": torch.full((1, 1, 2, 2), 0.5), "y": torch.tensor([0])} if one.carry_of else {}
            yield an_update(one.client, torch.ones(1), one.round, carry=made)


def test_only_the_first_clients_of_the_last_round_are_asked():
    fed = blobs([4])
    rule = unskew.method("fedcog").client
    samples = GeneratedSamplesRecorder(Toy(), rule, fed, round=5, max_clients=3)
    for t in (4, 5):
        broadcasts = [broadcast(t, k) for k in (9, 2, 7, 4)]
        assert [update.client for update in samples.train(broadcasts)] == [9, 2, 7, 4]
        assert set(samples.carries) == (set() if t == 4 else {9, 2, 7})


def test_a_longer_run_draws_its_own_last_round(tmp_path):
    train(tmp_path / "run", participation=0.3, save_samples=True)
    assert len(names(tmp_path / "run")) == 1
    torch.manual_seed(0)
    fed, model = blobs((12, 17, 9)), SmallBatchNorm()
    before = names(tmp_path / "run")
    for rounds in range(3, 8):
        unskew.resume(tmp_path / "run", federation=fed, model=model, rounds=rounds)
        assert len(names(tmp_path / "run")) == 1
        if names(tmp_path / "run") != before:
            return
    raise AssertionError("six rounds with the same single client")


def test_save_samples_warns_if_none_are_generated(tmp_path):
    with pytest.warns(UserWarning, match="no rule of this method generates samples"):
        train(tmp_path / "a", method="fedprox", save_samples=True)
    with pytest.warns(UserWarning, match="no client generated samples in the last round"):
        train(tmp_path / "b", method="fedcog:start_round=2", save_samples=True, base_run=True)
    draws = np.random.default_rng(0)
    table = [(draws.normal(size=(9, 4)).astype("float32"), draws.integers(0, 2, 9)) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"shape \(4,\) are not images"):
        unskew.run(
            Federation.from_arrays(table, test=table[0]), model="logistic", method="fedcog:start_round=0,n=2,g_steps=1",
            rounds=1, engine="inline", save_samples=True, out=tmp_path / "c",
        )  # fmt: skip
    assert not any((tmp_path / name / "samples").exists() for name in "abc")
    with pytest.raises(ConfigError, match="save_samples writes images to the run folder"):
        train(save_samples=True)


def test_pixels_undo_the_normalization_of_the_data():
    raw = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    given = Normalization((0.3, 0.5, 0.6), (0.2, 0.1, 0.4), 1 / 255)
    for known in (given, None):
        fed = unskew.Federation(clients=[], test=(raw, torch.zeros(5)), normalization=known)
        inputs = InputNormalizer(known, (3, 4, 4), torch.float64, torch.device("cpu"))(raw)
        pixels = PixelScaling.of(fed)
        torch.testing.assert_close(pixels.intensities(inputs), raw.double() / 255)
        torch.testing.assert_close(pixels.inputs(raw.double() / 255), inputs)
    floats = unskew.Federation(clients=[], test=(raw.float() / 255, torch.zeros(5)))
    assert torch.equal(PixelScaling.of(floats).inputs(raw / 255), raw / 255)


def test_the_command_line_draws(tmp_path, capsys):
    args = ("--method", "fedcog:start_round=0,n=10,g_steps=1", "--rounds", 1, "--out", tmp_path / "run")
    assert call(capsys, "run", *TINY, *args, "--save-samples").code == 0
    assert names(tmp_path / "run") == [f"client-{k:04d}.png" for k in range(4)]


def test_an_image_with_several_labels_is_in_the_row_of_each():
    images = np.stack([np.full((1, 2, 2), shade) for shade in (0.25, 0.5, 0.75)])
    labels = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 0]])
    grid = make_image_grid(images, labels, classes=3, columns=3)
    assert grid.shape == (9, 9, 3)
    shades = grid[::3, ::3, 0]  # the first pixel of each place
    np.testing.assert_array_equal(shades, [[0.25, 0.75, 1], [1, 1, 1], [0.25, 0.5, 1]])
