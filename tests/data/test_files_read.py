"""Data whose image files lie elsewhere are loaded again in the same process if an image changes."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from unskew.data.load import load_source_for
from unskew.data.sources import registry
from unskew.data.sources.registry import load_source
from unskew.data.spec import DataSpec


def write_images(folder, level):
    folder.mkdir(exist_ok=True)
    for i in range(10):
        pixels = np.full((8, 8), level, np.uint8)
        pixels[i % 8] = i
        Image.fromarray(pixels).save(folder / f"{i}.bmp")
        os.utime(folder / f"{i}.bmp", (10**9, 10**9 + level))


def table_of(tmp_path, *columns):
    rows = [",".join([*(f"../{folder}/{i}.bmp" for folder in columns), str(i % 2)]) for i in range(10)]
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "list.csv").write_text("\n".join([",".join([*columns, "y"]), *rows]))
    return f"table:{tmp_path / 'table' / 'list.csv'}"


def leaf_of(tmp_path):
    (tmp_path / "leaf" / "train").mkdir(parents=True)
    data = {"a": {"x": [f"{i}.bmp" for i in range(10)], "y": [0, 1] * 5}}
    (tmp_path / "leaf/train/all.json").write_text(json.dumps({"users": ["a"], "num_samples": [10], "user_data": data}))
    return f"leaf:{tmp_path / 'leaf'}"


@pytest.mark.parametrize("kind", ["table", "leaf"])
def test_changed_image_files_are_read_again(tmp_path, monkeypatch, kind):
    write_images(tmp_path / "images", 50)
    name = table_of(tmp_path, "images") if kind == "table" else leaf_of(tmp_path)
    options = {"label": "y", "image": "images"} if kind == "table" else {"image": str(tmp_path / "images")}
    loads = []
    load = registry.load_uncached
    monkeypatch.setattr(registry, "load_uncached", lambda request: [loads.append(request), load(request)][1])
    source = load_source(name, **options)
    assert load_source(name, **options) is source
    assert len(loads) == 1
    write_images(tmp_path / "images", 200)
    changed = load_source(name, **options)
    assert (int(source.train.x.max()), int(changed.train.x.max())) == (50, 200)
    assert load_source(name, **options) is changed


def test_changed_mask_files_are_read_again(tmp_path):
    for folder in ("images", "masks"):
        write_images(tmp_path / folder, 10)  # with the gray values 0 to 10
    data = table_of(tmp_path, "images", "masks")
    spec = DataSpec(data=data, image="images", label="masks", task="segmentation", partition="iid")
    assert load_source_for(spec).classes == 11
    write_images(tmp_path / "masks", 9)
    assert load_source_for(spec).classes == 10
