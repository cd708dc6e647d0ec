"""Feature shift: angles, noise levels and rounding against short NumPy and SciPy-free formulas."""

import numpy as np
import pytest
import torch

import unskew
from unskew.data.shift import rotated, rotated_masks
from unskew.errors import ConfigError, DataError

OPTIONS = {"partition": "iid", "clients": 4, "holdout": 0.2}


def loaded(shift=None, **options):
    return unskew.load_federation("digits", **(OPTIONS | options), shift=shift)


def every(client):
    return torch.cat([client.x, client.x_test])


def test_quarter_turns_are_exact_for_all_samples_of_a_client():
    plain, turned = loaded(), loaded("rotate:270,groups=4")
    for k, (a, b) in enumerate(zip(plain.clients, turned.clients, strict=True)):
        expected = np.rot90(every(a).numpy(), k, (2, 3))
        assert np.array_equal(every(b).numpy(), expected)
        assert b.y.equal(a.y)
        assert every(b).dtype == torch.uint8
    assert turned.test[0].equal(plain.test[0])


@pytest.mark.parametrize("shape", [(9, 9), (7, 12)])
def test_other_angles_are_bilinear_rotations_around_the_center(shape):
    height, width = shape
    image = np.random.default_rng(0).random((height, width))
    angle = np.deg2rad(25.0)
    expected = np.zeros(shape)
    for i in range(height):
        for j in range(width):
            # Right and up from the center; the output point is the input point turned back by the angle.
            right, up = j - (width - 1) / 2, (height - 1) / 2 - i
            a = np.cos(angle) * right + np.sin(angle) * up + (width - 1) / 2
            b = (height - 1) / 2 - (-np.sin(angle) * right + np.cos(angle) * up)
            for r in range(height):
                for c in range(width):
                    expected[i, j] += max(0, 1 - abs(b - r)) * max(0, 1 - abs(a - c)) * image[r, c]
    result = rotated(torch.from_numpy(image.astype(np.float32))[None, None], 25.0)[0, 0].numpy()
    assert result == pytest.approx(expected, abs=1e-5)


def test_noise_grows_with_the_client():
    fed = unskew.load_federation("gaussians", partition="iid", clients=4, shift="noise:2")
    plain = unskew.load_federation("gaussians", partition="iid", clients=4)
    for k in range(4):
        noise = (every(fed.clients[k]) - every(plain.clients[k])).double().numpy()
        sigma, n = 2 * (k + 1) / 4, noise.size
        assert noise.std() == pytest.approx(sigma, abs=5 * sigma / np.sqrt(2 * n))
        assert abs(noise.mean()) < 5 * sigma / np.sqrt(n)
    first = [(every(fed.clients[k]) - every(plain.clients[k]))[0] / (k + 1) for k in (0, 1)]
    assert not torch.allclose(*first)  # independent between clients


def test_noise_on_images_is_rounded_and_limited():
    fed, again, other = loaded("noise:0.2"), loaded("noise:0.2"), loaded("noise:0.2", seed=1)
    assert fed.clients.x.dtype == torch.uint8
    assert fed.clients.x.equal(again.clients.x)
    assert not fed.clients.x.equal(other.clients.x)
    plain = loaded().clients[3].x.double()
    inner = (plain > 100) & (plain < 150)  # rounding adds variance 1/12; hardly anything is limited
    change = (fed.clients[3].x.double() - plain)[inner].numpy()
    assert change.std() == pytest.approx(np.sqrt((0.2 * 255) ** 2 + 1 / 12), rel=5 / np.sqrt(2 * len(change)) + 0.02)


def test_unseen_clients_do_not_change_the_shift_of_the_others():
    shifted, split = loaded("noise:0.3"), loaded("noise:0.3", unseen=0.25)
    all_inputs = [every(client) for client in shifted.clients]
    parts = [every(client) for client in (*split.clients, *split.unseen)]
    assert all(any(x.shape == y.shape and x.equal(y) for y in all_inputs) for x in parts)
    pixels = torch.cat([every(client) for client in split.clients]).double() / 255
    assert split.normalization.mean[0] == pytest.approx(pixels.mean().item(), rel=1e-6)


@pytest.mark.parametrize(
    "text", ["rotate", "noise:0", "noise:1,groups=2", "blur:1", "rotate:30,groups=0", "rotate:30,groups=1", "rotate:a"]
)
def test_invalid_shifts_raise(text):
    with pytest.raises(ConfigError):
        unskew.run(data="digits", shift=text)


def test_inputs_that_cannot_be_shifted_raise():
    with pytest.raises(DataError, match="inputs that are images"):
        unskew.load_federation("gaussians", shift="rotate:30")


def test_a_run_with_shift_can_be_trained():
    options = {"data": "digits", "partition": "iid", "clients": 4, "model": "logistic", "rounds": 1, "lr": 0.05}
    a, b = (unskew.run(**options, shift="rotate:90", engine=engine).vector for engine in ("inline", "vectorized"))
    assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("angle", [90.0, 37.0])
def test_masks_turn_with_their_images(angle):
    """Of a large square in the middle, only pixels at its border may differ between both interpolations."""
    y = torch.zeros(1, 33, 33, dtype=torch.uint8)
    y[:, 9:24, 9:24] = 2
    y[:, 9:16, 9:16] = 1
    turned = rotated_masks(y, angle)
    for c in (1, 2):
        image = rotated((y == c).float()[:, None], angle)[:, 0]
        inside = (image < 0.01) | (image > 0.99)
        assert torch.equal((turned == c)[inside], image[inside] > 0.5)
    outside = rotated(torch.ones(1, 1, 33, 33), angle)[:, 0] < 0.01
    assert ((turned == 255) == outside)[outside].all()
    assert bool((turned == 255).any()) == (angle != 90)


def test_a_federation_is_rotated_with_its_masks():
    options = {"partition": "natural:site", "holdout": 0}
    plain, turned = (
        unskew.load_federation("shape-masks", **options, shift=shift) for shift in (None, "rotate:90,groups=2")
    )
    for k, (one, other) in enumerate(zip(plain.clients, turned.clients, strict=True)):
        assert torch.equal(other.x, torch.rot90(one.x, k % 2, (2, 3)))
        assert torch.equal(other.y, torch.rot90(one.y, k % 2, (1, 2)))


def test_shifted_unseen_clients_hold_out_the_patients_on_whom_nobody_trains(tmp_path):
    draws = np.random.default_rng(1)
    columns = [
        draws.integers(0, 30, 200),
        draws.integers(0, 3, 200),
        np.arange(200) * 7 % 90,
        draws.integers(0, 2, 200),
    ]
    rows = ["patient,site,age,ill", *(",".join(map(str, row)) for row in zip(*columns, strict=True))]
    (tmp_path / "visits.csv").write_text("\n".join(rows))
    options = {"partition": "natural:site", "clients": None, "features": ["age"], "label": "ill", "split_by": "patient"}
    plain, shifted = (
        unskew.load_federation(f"table:{tmp_path / 'visits.csv'}", **options, holdout=0.5, unseen="2", shift=shift)
        for shift in (None, "noise:0.001")
    )
    for part in ("clients", "unseen", "unseen_complete"):
        for a, b in zip(getattr(plain, part), getattr(shifted, part), strict=True):
            assert torch.equal(torch.cat([a.y, a.y_test]), torch.cat([b.y, b.y_test]))
            noise = every(b) - every(a)
            assert 0 < noise.abs().max() < 0.01
    assert (
        0
        < len(shifted.unseen_complete[0].y_test)
        < sum(len(y) for y in (shifted.unseen[0].y, shifted.unseen[0].y_test))
    )
