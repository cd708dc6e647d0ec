"""Each attack against its formula, written with NumPy."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from support.federations import blobs

from unskew.attacks import data_attacks, update_attacks
from unskew.attacks.registry import Backdoor, LabelFlip
from unskew.data.clients import DrawnClients


def points_of(n, d=6, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def test_inner_product_manipulation_and_a_little_is_enough():
    honest = points_of(7)
    array = honest.numpy()
    mean, spread = array.mean(0), array.std(0, ddof=1)
    assert np.allclose(update_attacks.ipm(honest, 0.3).numpy(), -0.3 * mean, rtol=1e-12, atol=0)
    assert np.allclose(update_attacks.alie(honest, 1.5).numpy(), mean - 1.5 * spread, rtol=1e-12, atol=1e-15)
    assert torch.equal(update_attacks.alie(honest[:1], 1.5), honest[0])


@pytest.mark.parametrize(("n", "a", "z"), [(25, 5, 0.25335), (50, 12, 0.33604), (20, 4, 0.15731), (10, 2, 0.0)])
def test_z_of_a_little_is_enough(n, a, z):
    supporters = n // 2 + 1 - a
    assert update_attacks.alie_z(n, a) == pytest.approx(z, abs=5e-6)
    assert update_attacks.alie_z(n, a) == pytest.approx(NormalDist().inv_cdf((n - a - supporters) / (n - a)), abs=1e-12)


def test_z_is_finite_for_few_clients_and_for_a_majority_of_attackers():
    for n in range(2, 9):
        for a in range(1, n):
            assert 0 <= update_attacks.alie_z(n, a) < 3


def test_mimic_copies_the_farthest_along_the_direction_of_largest_variance():
    honest = points_of(7) * torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    centered = honest.numpy() - honest.numpy().mean(0)
    _, singular, directions = np.linalg.svd(centered)
    direction = update_attacks.principal_direction(honest)
    assert float(direction.norm()) == pytest.approx(singular[0], rel=1e-9)
    assert abs(direction.numpy() @ directions[0]) == pytest.approx(singular[0], rel=1e-9)
    farthest = int(np.abs(centered @ directions[0]).argmax())
    assert torch.equal(update_attacks.mimic(honest, direction), honest[farthest])
    later = points_of(5, seed=1)
    rows = np.concatenate([direction.numpy()[None], later.numpy() - later.numpy().mean(0)])
    combined = update_attacks.principal_direction(later, direction)
    assert float(combined.norm()) == pytest.approx(np.linalg.svd(rows)[1][0], rel=1e-9)


def test_gaussian_noise_has_the_standard_deviation_and_its_own_draws():
    like = torch.zeros(20_000, dtype=torch.float64)
    noise = update_attacks.gaussian(like, 2.0, 0, 3, 1)
    assert float(noise.std()) == pytest.approx(2.0, rel=0.02)
    assert torch.equal(noise, update_attacks.gaussian(like, 2.0, 0, 3, 1))
    assert not torch.equal(noise, update_attacks.gaussian(like, 2.0, 0, 4, 1))


def test_labels_are_mirrored_or_one_class_becomes_another():
    y = torch.tensor([0, 1, 2, 3, 3])
    assert data_attacks.flipped_labels(y, 4, LabelFlip()).tolist() == [3, 2, 1, 0, 0]
    assert data_attacks.flipped_labels(y, 4, LabelFlip(from_class=3, to_class=1)).tolist() == [0, 1, 2, 1, 1]


def test_only_training_labels_of_attackers_are_flipped():
    fed = blobs([9, 14, 11, 8])
    assert isinstance(fed.clients, DrawnClients)
    flipped = data_attacks.with_flipped_labels(fed, [1, 3], LabelFlip())
    for before, after in zip(fed.clients, flipped.clients, strict=True):
        attacks = before.id in (1, 3)
        assert torch.equal(after.y, 2 - before.y if attacks else before.y)
        assert torch.equal(after.x, before.x)
        assert torch.equal(after.y_test, before.y_test)
    assert flipped.test is fed.test


def test_a_backdoor_adds_images_with_the_patch():
    fed = blobs([9, 14, 11, 8])
    attack = Backdoor(target=2, patch=2, share_of_batch=0.75)
    poisoned = data_attacks.with_backdoor(fed, [1], attack, 0)
    assert [len(client.y) for client in poisoned.clients] == [9, 14 + 42, 11, 8]
    assert torch.equal(poisoned.clients[2].x, fed.clients[2].x)
    before, after = fed.clients[1], poisoned.clients[1]
    assert torch.equal(after.x[:14], before.x)
    assert torch.equal(after.y[:14], before.y)
    assert (after.y[14:] == 2).all()
    intensity = fed.test[0].max()
    assert (after.x[14:, :, -2:, -2:] == intensity).all()
    # Every image was copied three times and is unchanged outside the patch.
    rest = after.x[14:, :, :-2].flatten(1)
    same = (rest[:, None] == before.x[None, :, :, :-2].flatten(2)).all(2)
    assert same.sum(0).tolist() == [3] * 14


def test_attack_success_of_a_model_that_looks_at_one_pixel():
    fed = blobs([9, 14])
    attack = Backdoor(target=1, patch=1)
    x, y = fed.test

    def predict(images):
        return torch.where(images[:, 0, -1, -1] == x.max(), 1, 0)

    assert data_attacks.backdoor_success(predict, fed, attack) == 1.0
    assert data_attacks.backdoor_success(lambda images: torch.zeros(len(images)), fed, attack) == 0.0
    seen = []
    data_attacks.backdoor_success(lambda images: seen.append(images) or torch.zeros(len(images)), fed, attack)
    assert len(seen[0]) == int((y != 1).sum())
    only_target = replace(fed, test=(x[y == 1], y[y == 1]))
    assert np.isnan(data_attacks.backdoor_success(predict, only_target, attack))
