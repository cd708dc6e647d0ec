"""The generated sites of shapes: their definition, and how they differ."""

import numpy as np
import torch

from unskew.data.sources.registry import load_source
from unskew.data.sources.shape_masks import SITES, TEST, TRAIN


def test_four_sites_of_color_images_with_three_shapes():
    source = load_source("shape-masks")
    assert source.class_names == ("background", "circle", "square", "triangle")
    for part, n in ((source.train, TRAIN), (source.test, TEST)):
        assert (part.x.shape, part.x.dtype) == ((4 * n, 3, 64, 64), torch.uint8)
        assert part.y.shape == (4 * n, 64, 64)
        assert part.columns["site"].tolist() == [site for site in SITES for _ in range(n)]
        assert part.y.unique().tolist() == [0, 1, 2, 3]
        assert float((part.y > 0).flatten(1).sum(1).min()) > 0


def test_sites_differ_in_classes_brightness_and_noise():
    source = load_source("shape-masks")
    sites = {site: source.train.columns["site"] == site for site in SITES}
    main = {site: source.train.columns["main_class"][rows] for site, rows in sites.items()}
    for site, shape in (("north", "circle"), ("east", "square"), ("south", "triangle")):
        assert np.mean(main[site] == shape) > 0.5
    x = source.train.x.double() / 255
    brightness = {site: float(x[torch.from_numpy(rows)].mean()) for site, rows in sites.items()}
    assert brightness["east"] > brightness["north"] > brightness["south"]
    steps = (x[..., 1:] - x[..., :-1]).abs().flatten(1).median(1)[0]  # between neighbors: noise and texture
    roughness = {site: float(steps[torch.from_numpy(rows)].mean()) for site, rows in sites.items()}
    assert roughness["west"] > roughness["south"] > roughness["north"]
