"""Drawn images of textured shapes."""

import numpy as np
import pytest
import torch
from support.tolerance import MAGNIFIED, assert_close

import unskew
from unskew.data.sources.shapes import SIDE, draw_shapes, points_inside, random_fields, shapes


def test_images_are_decided_by_the_generator():
    first, again, other = (draw_shapes(np.arange(200) % 20, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first.shape == (200, 3, SIDE, SIDE)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.slow
def test_the_images_are_always_the_same_and_the_classes_balanced():
    source, again = shapes(), shapes()
    assert source.train.x.shape == (10_000, 3, SIDE, SIDE)
    assert source.train.x.dtype == torch.uint8
    assert torch.equal(source.train.x, again.train.x)
    assert torch.bincount(source.train.y).tolist() == [500] * 20
    assert torch.bincount(source.test.y).tolist() == [100] * 20
    assert source.class_names[:5] == ("plain disc", "striped disc", "chequered disc", "grainy disc", "plain square")


def test_shapes_have_their_areas():
    u, v = np.meshgrid(*[np.linspace(-1.2, 1.2, 1201)] * 2)
    exact = {
        "disc": np.pi,
        "square": 1.6**2,
        "triangle": 3 * np.sqrt(3) / 4,
        "ring": np.pi * (1 - 0.55**2),
        "cross": 2 * 2 * 0.6 - 0.6**2,
    }
    for name, area in exact.items():
        inside = points_inside(name, u, v)
        np.testing.assert_allclose(inside.sum() * (2.4 / 1200) ** 2, area, rtol=0.01)
        assert np.hypot(u, v)[inside].max() < 1.2


def test_clouds_fall_with_the_frequency_as_said():
    fields = random_fields(2000, 1, 1.5, np.random.default_rng(1))[:, 0]
    assert_close(fields.mean((1, 2)), 0, MAGNIFIED)
    np.testing.assert_allclose(fields.std((1, 2)), 1)
    power = (abs(np.fft.fft2(fields)) ** 2).mean(0)
    np.testing.assert_allclose(power[0, 1] / power[0, 4], 4**3, rtol=0.15)


def test_a_texture_changes_the_shape_and_not_the_background():
    images = draw_shapes(np.arange(400) % 20, np.random.default_rng(0)).astype(float)
    roughness = abs(np.diff(images, axis=3)).mean((1, 2, 3)).reshape(-1, 5, 4).mean((0, 1))
    assert roughness[0] < roughness[1:].min()  # plain is smoothest
    assert roughness[1] < roughness[2]  # checks have more edges than stripes


@pytest.mark.slow
def test_shapes_are_server_data_for_another_task():
    settings = {"clients": 4, "partition": "iid", "rounds": 2, "model": "cnn", "local_steps": 1}
    run = unskew.run(
        data="digits", image_size=16, server_data="shapes", method="feddle:epochs=1,max_steps=2", **settings
    )
    assert run.history[-1]["coefficients/moved"] > 0
