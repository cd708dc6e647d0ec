"""Predicted masks as files, metrics of labeled folders, and exported models of masks."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from support.masks import UNET, square_folder
from support.running import call

import unskew
from unskew.errors import DataError
from unskew.tasks.segmentation import Segmentation

SPEC = {"classes": "rest,bright,dark", "values": "0,100,200"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on images of 16 x 12 pixels that are resized to 8 x 8, and their data."""
    folder = tmp_path_factory.mktemp("masks")
    data = {"data": f"masks:{square_folder(folder / 'data')}", "partition": "natural:site", "segmentation": SPEC}
    unskew.run(out=folder / "run", **{**UNET, "rounds": 4}, **data, image_size=8)
    return folder


def test_masks_have_the_size_of_their_images_and_the_gray_values_of_the_classes(folder, tmp_path, capsys):
    images = folder / "data" / "a" / "test" / "images"
    done = call(capsys, "predict", folder / "run", images, "--out", tmp_path / "p.csv")
    assert done.code == 0, done.err
    with (tmp_path / "p.csv").open() as file:
        rows = [*csv.DictReader(file)]
    model = unskew.load_predictor(folder / "run")
    predicted = model.predict_file(images)
    for row, mask in zip(rows, predicted, strict=True):
        assert row["mask"] == f"p-masks/{row['row']}"
        written = np.asarray(Image.open(tmp_path / row["mask"]))
        assert written.shape == (16, 12)
        expected = mask[np.arange(16) // 2][:, (np.arange(12) * 8 + 4) // 12]
        assert np.array_equal(written, expected)
        shares = [float(row[f"share({name})"]) for name in ("rest", "bright", "dark")]
        assert shares == pytest.approx([(mask == level).mean() for level in (0, 100, 200)], abs=1e-5)


def test_columns_of_predictions_are_whole_in_a_narrow_terminal(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = call(capsys, "predict", folder / "run", folder / "data" / "a" / "test" / "images").out
    assert shown.count("share(bright)") == shown.count("share(dark)") == 4  # a table of 40 characters would break them


def test_predictions_without_a_file_are_a_table_of_shares(folder, capsys):
    shown = call(capsys, "predict", folder / "run", folder / "data" / "a" / "test" / "images" / "00.png", "--json")
    (row,) = json.loads(shown.out)
    assert sum(row[f"share({name})"] for name in ("rest", "bright", "dark")) == pytest.approx(1, abs=1e-5)
    assert "mask" not in row


def test_a_labeled_folder_is_evaluated_also_by_site(folder, capsys):
    done = call(capsys, "evaluate", folder / "run", folder / "data", "--by", "site", "--json")
    assert done.code == 0, done.err
    rows = {row["group"]: row for row in json.loads(done.out)}
    assert {name: row["rows"] for name, row in rows.items()} == {"all": 32, "a": 16, "b": 16}
    federation = unskew.load_federation(
        f"masks:{folder / 'data'}", partition="natural:site", segmentation=SPEC, image_size=8, holdout=0
    )
    model, (x, y) = unskew.load_predictor(folder / "run"), (federation.clients[0].x, federation.clients[0].y)
    x, y = torch.cat([x, federation.test[0][:4]]), torch.cat([y, federation.test[1][:4]])
    expected = federation.objective.metrics_of_outputs(y.numpy(), model.outputs(x), model.inputs.metrics)
    for name, value in expected.items():
        assert rows["a"][name] == pytest.approx(value, rel=1e-9), name
    assert rows["a"]["dice_low"] <= rows["a"]["dice"] <= rows["a"]["dice_high"]


@pytest.mark.parametrize("loss", ["ce", "dice", "ce+dice:0.25"])
def test_the_loss_of_a_labeled_folder_is_that_of_the_run(folder, tmp_path, loss):
    data = {"data": f"masks:{folder / 'data'}", "partition": "natural:site", "segmentation": SPEC, "image_size": 8}
    weights = "balanced" if loss == "ce" else None
    options = {**UNET, "rounds": 1, "loss": loss, "class_weights": weights, "out": tmp_path / "run"}
    summary = unskew.run(**options, **data).summary
    shutil.copytree(folder / "data", tmp_path / "data", ignore=lambda path, names: {"train"} & {*names})
    (row,) = unskew.load_predictor(tmp_path / "run").evaluate_file(tmp_path / "data", intervals=False)
    for name in ("loss", "dice"):
        assert row[name] == pytest.approx(summary[name], rel=1e-5)


def test_a_table_of_images_and_masks_is_evaluated(folder, tmp_path):
    part = folder / "data" / "a" / "test"
    lines = "".join(f"{part}/images/0{k}.png,{part}/masks/0{k}.png\n" for k in range(4))
    (tmp_path / "list.csv").write_text("image,mask\n" + lines)
    data = {"data": f"table:{tmp_path}/list.csv", "image": "image", "label": "mask", "task": "segmentation"}
    (tmp_path / "all.csv").write_text("image,mask\n" + lines * 4)
    data = {**data, "data": f"table:{tmp_path}/all.csv", "partition": "iid", "clients": 2, "segmentation": SPEC}
    unskew.run(out=tmp_path / "run", **UNET, **data)
    model = unskew.load_predictor(tmp_path / "run")
    (row,) = model.evaluate_file(tmp_path / "list.csv")
    (same,) = model.evaluate_file(part)
    assert {name: row[name] for name in ("rows", "dice", "loss")} == {
        name: same[name] for name in ("rows", "dice", "loss")
    }


def test_a_folder_without_masks_is_not_evaluated(folder):
    model = unskew.load_predictor(folder / "run")
    with pytest.raises(DataError, match=r"has no masks\. Pass a folder with the folders images and masks"):
        model.evaluate_file(folder / "data" / "a" / "test" / "images")


def test_an_exported_model_returns_probabilities_of_pixels(folder, tmp_path):
    exported = unskew.export(folder / "run", format="torchscript", out=tmp_path / "export")
    x = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    outputs = torch.jit.load(exported.file)(x)
    assert outputs.shape == (3, 3, 8, 8)
    np.testing.assert_allclose(outputs.detach().numpy(), unskew.load_predictor(folder / "run").outputs(x), atol=1e-5)
    assert "rest, bright, dark" in (tmp_path / "export" / "README.md").read_text().replace("`", "")


def test_the_input_specification_has_classes_and_values(folder):
    inputs = json.loads((folder / "run" / "inputs.json").read_text())
    assert inputs["class_names"] == ["rest", "bright", "dark"]
    assert inputs["constants"] == {"values": [0.0, 100.0, 200.0]}
    task = unskew.load_predictor(folder / "run").inputs.objective
    assert task == Segmentation(class_names=("rest", "bright", "dark"), values=(0, 100, 200))
