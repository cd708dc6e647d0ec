"""Generated color images of textured shapes on cloudy backgrounds.

They serve as server data for servers without data of the clients' task (Feddle out of domain). Like photographs, the
images have color, edges, textures, and backgrounds whose amplitudes fall with frequency. Each of the 20 classes is one
of five shapes in one of four textures. Size, position, angle and colors are random and independent of the class.
"""

from __future__ import annotations

import numpy as np
import torch

from unskew.data.readers.tables import SampleTable, Source

SHAPES = ("disc", "square", "triangle", "ring", "cross")
TEXTURES = ("plain", "striped", "chequered", "grainy")
SIDE = 32
TRAIN, TEST = 10_000, 2_000
CHUNK = 1_000  # images drawn at a time


def shapes() -> Source:
    """Generate 10,000 training and 2,000 test images ``[3, 32, 32]`` with balanced classes and a fixed seed."""
    draws = np.random.default_rng(0)

    def table(n: int) -> SampleTable:
        labels = np.arange(n) % (len(SHAPES) * len(TEXTURES))
        images = np.concatenate([draw_shapes(labels[first : first + CHUNK], draws) for first in range(0, n, CHUNK)])
        return SampleTable(torch.from_numpy(images), torch.from_numpy(labels), {})

    names = tuple(f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES)
    return Source("shapes", table(TRAIN), table(TEST), names, len(names))


def draw_shapes(labels: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Generate one image per class index ``4 shape + texture``: uint8 ``[n, 3, 32, 32]``.

    Args:
        labels: Class of each image, ``[n]``.
        draws: Random number generator.
    """
    n = len(labels)
    shape, texture = np.divmod(labels, len(TEXTURES))

    def between(low: float, high: float, *each: int) -> np.ndarray:
        return draws.uniform(low, high, (n, *each))

    # Pixel coordinates u, v relative to the rotated shape, which fills the unit circle around 0.
    axis = np.arange(SIDE) - (SIDE - 1) / 2
    x, y = axis[None, None, :] - between(-6, 6, 1, 1), axis[None, :, None] - between(-6, 6, 1, 1)
    angle, radius = between(0, 2 * np.pi, 1, 1), between(7, 13, 1, 1)
    u, v = (x * np.cos(angle) + y * np.sin(angle)) / radius, (-x * np.sin(angle) + y * np.cos(angle)) / radius

    inside, waves = np.zeros((n, SIDE, SIDE), bool), between(1.8, 3.3, 1, 1)
    pattern = np.zeros((n, SIDE, SIDE))
    for number, name in enumerate(SHAPES):
        mask = shape == number
        inside[mask] = points_inside(name, u[mask], v[mask])
    stripes = np.sin(2 * np.pi * waves * u)
    for name, values in (
        ("striped", np.sign(stripes)),
        ("chequered", np.sign(stripes * np.sin(2 * np.pi * waves * v))),
        ("grainy", random_fields(n, 1, 0.3, draws)[:, 0]),
    ):
        mask = texture == TEXTURES.index(name)
        pattern[mask] = values[mask]

    back = between(40, 215, 3, 1, 1) + between(10, 45, 1, 1, 1) * random_fields(n, 3, 1.5, draws)
    front = between(40, 215, 3, 1, 1) + between(-60, 60, 3, 1, 1) * pattern[:, None]
    noise = 4 * draws.normal(size=(n, 3, SIDE, SIDE))
    return (np.where(inside[:, None], front, back) + noise).clip(0, 255).astype(np.uint8)


def points_inside(shape: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return which points are inside the shape.

    Args:
        shape: Name of the shape.
        u: Horizontal coordinates.
        v: Vertical coordinates.
    """
    away, wide = np.hypot(u, v), np.maximum(abs(u), abs(v))
    side = np.sqrt(0.75)
    of = {
        "disc": away <= 1,
        "square": wide <= 0.8,
        "triangle": np.maximum(-v, side * abs(u) + 0.5 * v) <= 0.5,  # its corners are on the unit circle
        "ring": (away >= 0.55) & (away <= 1),
        "cross": (np.minimum(abs(u), abs(v)) <= 0.3) & (wide <= 1),
    }
    return np.asarray(of[shape])


def random_fields(n: int, channels: int, fall: float, draws: np.random.Generator, side: int = SIDE) -> np.ndarray:
    """Generate random fields ``[n, channels, side, side]`` with unit variance and amplitudes ``frequency^-fall``.

    Args:
        n: Number of fields.
        channels: Number of channels.
        fall: Exponent by which amplitudes fall with frequency.
        draws: Random number generator.
        side: Number of pixels per side.
    """
    axis = np.fft.fftfreq(side)
    frequency = np.hypot(axis[:, None], axis[None])
    frequency[0, 0] = np.inf
    white = np.fft.fft2(draws.normal(size=(n, channels, side, side)))
    fields = np.fft.ifft2(white / frequency**fall).real
    return np.asarray(fields / fields.std((2, 3), keepdims=True))
