"""Test images with their masks in the report, read from the data of the run."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from support.masks import UNET, square_folder

import unskew
from unskew.tasks.segmentation import pixel_shares

COLORS = [(0, 0, 0), (0, 0x72, 0xB2), (0xD5, 0x5E, 0)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    options = {"data": f"masks:{square_folder(folder / 'data')}", "partition": "natural:site"}
    options |= {"segmentation": {"classes": "rest,bright,dark", "values": "0,100,200"}}
    unskew.run(out=folder / "run", **UNET, **options)
    return folder


def pictures(page):
    table = re.search(r'<table data-name="masks">.*?</table>', page, re.DOTALL)[0]
    rows = re.findall(r"<tr><td>(\w+)</td><td>([\d.]+)</td>(.*?)</tr>", table, re.DOTALL)
    address = r'src="data:image/png;base64,([^"]+)"'
    return {
        name: (
            float(dice),
            [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in re.findall(address, cells)],
        )
        for name, dice, cells in rows
    }


def test_the_report_shows_the_best_the_median_and_the_worst_image(run):
    page = unskew.report(run / "run").read_text()
    shown = pictures(page)
    assert [*shown] == ["best", "median", "worst"]
    assert shown["best"][0] >= shown["median"][0] >= shown["worst"][0]
    model = unskew.load_predictor(run / "run")
    federation = unskew.load_federation(
        f"masks:{run / 'data'}",
        partition="natural:site",
        segmentation={"classes": "rest,bright,dark", "values": "0,100,200"},
    )
    x, y = federation.test
    predicted = model.outputs(x).argmax(1)
    for _, (image, truth, guess) in shown.values():
        (row,) = [k for k in range(len(x)) if np.array_equal(x[k, 0].numpy(), image)]
        for mask, classes in ((truth, y[row].numpy()), (guess, predicted[row])):
            assert np.array_equal(mask, np.array(COLORS, np.uint8)[classes])
    assert pixel_shares(y, 3).shape == (8, 3)


def test_real_images_can_be_omitted_and_are_never_in_the_run_folder(run):
    assert 'data-name="masks"' not in unskew.report(run / "run", run / "other.html", images=False).read_text()
    assert not [file for file in (run / "run").rglob("*") if file.suffix in (".png", ".npy", ".npz")]


def test_without_the_data_there_is_no_table(run):
    (run / "data").rename(run / "moved")
    assert 'data-name="masks"' not in unskew.report(run / "run", run / "without.html").read_text()
    (run / "moved").rename(run / "data")
