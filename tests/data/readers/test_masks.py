"""Folders, tables and arrays of masks: pairs, gray values, sizes and errors."""

import io
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from support.deep_png import deep_png

import unskew
from unskew.config.loader import experiment
from unskew.data.load import load_federation, load_source_for
from unskew.data.readers.masks import classes_of_masks, decode_mask, has_masks, mask_columns, resize_masks
from unskew.data.sources.registry import load_source
from unskew.data.spec import DataSpec
from unskew.errors import ConfigError, DataError
from unskew.tasks.base import OUTSIDE
from unskew.tasks.segmentation import Segmentation


def mask_of(seed, levels=(0, 255), sides=(6, 8)):
    return np.random.default_rng(seed).choice(np.array(levels, np.uint8), sides)


def write(folder, name, mask, ending="", image_ending="", sides=None):
    """Write an image in color, and its mask."""
    for kind, pixels in (
        ("images", np.repeat(np.zeros(sides or mask.shape, np.uint8)[..., None] + len(name), 3, -1)),
        ("masks", mask),
    ):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / kind / f"{name}{ending if kind == 'masks' else image_ending}.png")


def fill(folder, n=6, **options):
    for k in range(n):
        write(folder, f"n{k}", mask_of(k), **options)


def source_of(path, **fields):
    return load_source_for(DataSpec(data=f"masks:{path}", partition="iid", **fields))


def test_sites_with_training_and_test_images(tmp_path):
    for site in ("a", "b"):
        fill(tmp_path / site / "train", 4)
        fill(tmp_path / site / "test", 2)
    source = source_of(tmp_path, segmentation={"classes": "background,vessel"})
    assert (len(source.train), len(source.test), source.class_names) == (8, 4, ("background", "vessel"))
    assert source.train.columns["site"].tolist() == ["a"] * 4 + ["b"] * 4
    assert source.train.columns["name"].tolist() == ["n0", "n1", "n2", "n3"] * 2
    expected = np.stack([mask_of(k) // 255 for k in range(4)])
    assert torch.equal(source.train.y[:4], torch.from_numpy(expected))
    assert source.train.x.shape == (8, 3, 6, 8)
    fed = load_federation(f"masks:{tmp_path}", partition="natural:site")
    assert (fed.client_names, fed.columns["site"]) == (("a", "b"), "decides the partition")


def test_images_without_sites_and_parts_are_split(tmp_path):
    fill(tmp_path, 10)
    source = source_of(tmp_path)
    assert (len(source.train), len(source.test)) == (8, 2)
    assert "site" not in source.train.columns
    assert source.class_names == ("background", "foreground")


@pytest.mark.parametrize(
    ("folders", "sizes", "warning"),
    [
        (("train", "val", "test"), (6, 6), "not read, because neither train nor test: val/images"),
        (("train", "Validation", "test"), (6, 6), "not read, because neither train nor test: Validation/images"),
        (("a/train", "a/val", "a/test"), (6, 6), "not read, because neither train nor test: a/val/images"),
        (("a/train", "a/test", "b", "VAL"), (12, 6), "not read, because neither train nor test: VAL/images"),
        ((".", "val"), (5, 1), "not read, because neither train nor test: val/images"),
        (("train", "train/a"), (5, 1), "not read, because neither SITE/images nor SITE/train/images: train/a/images"),
        (("train", "val/train"), (5, 1), "not read, because neither train nor test: val/train/images"),
    ],
)
def test_other_folders_next_to_train_are_reported(tmp_path, capsys, folders, sizes, warning):
    for folder in folders:
        fill(tmp_path / folder)
    source = source_of(tmp_path)
    assert (len(source.train), len(source.test)) == sizes
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    "folders",
    [("Train", "Test"), ("training", "testing"), ("test", "val"), ("a/TRAIN", "a/test", "b"), ("Train/a", "Test/a")],
)
def test_training_images_in_a_folder_with_another_name_are_rejected(tmp_path, folders):
    for folder in folders:
        fill(tmp_path / folder)
    with pytest.raises(DataError, match=r"has no folder 'train', but .* Rename the folder with the training images"):
        source_of(tmp_path)


@pytest.mark.parametrize("site", [".", "a"])
def test_training_images_of_a_site_in_two_folders_are_rejected(tmp_path, site):
    fill(tmp_path / site)
    fill(tmp_path / site / "train")
    with pytest.raises(DataError, match=r"both have training images\. Move them, with their masks, into one"):
        source_of(tmp_path)


def test_common_endings_are_reported(tmp_path, capsys):
    fill(tmp_path, 4, ending="_manual1", image_ending="_training")
    assert len(source_of(tmp_path).train) == 3
    reported = capsys.readouterr().err
    assert "names of images end in _training, which is left out" in reported
    assert "names of masks end in _manual1" in reported


def test_endings_may_differ_between_parts(tmp_path, capsys):
    """As in DRIVE, whose images are called 21_training and 01_test."""
    fill(tmp_path / "train", 4, ending="_manual1", image_ending="_training")
    fill(tmp_path / "test", 2, ending="_manual1", image_ending="_test")
    source = source_of(tmp_path)
    assert (len(source.train), len(source.test)) == (4, 2)
    assert source.train.columns["name"].tolist() == ["n0", "n1", "n2", "n3"]
    assert capsys.readouterr().err.count("which is left out to pair them") == 3


def test_images_and_masks_are_resized(tmp_path):
    fill(tmp_path, 5)
    write(tmp_path, "large", mask_of(9, sides=(12, 16)))
    with pytest.raises(DataError, match="Set image_size to resize them"):
        source_of(tmp_path)
    source = source_of(tmp_path, image_size=4)
    assert (source.train.x.shape[2:], source.train.y.shape[1:]) == ((4, 4), (4, 4))
    assert set(source.train.y.unique().tolist()) <= {0, 1}


def test_the_nearest_pixel_is_that_of_its_center():
    y = torch.arange(8, dtype=torch.uint8).reshape(1, 2, 4)
    assert resize_masks(y, (2, 2)).tolist() == [[[1, 3], [5, 7]]]
    assert resize_masks(y, (4, 8)).tolist() == y.repeat_interleave(2, 1).repeat_interleave(2, 2).tolist()


def colored(path):
    """Replace a mask by one in color."""
    Image.fromarray(np.random.default_rng(0).integers(0, 9, (6, 8, 3), np.uint8)).save(path / "masks/n1.png")


def encoded(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def test_encodings_of_masks():
    levels = np.array([[0, 1], [2, 1]], np.uint8)
    indexed = Image.fromarray(levels, "P")
    indexed.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
    assert decode_mask(encoded(indexed)).tolist() == levels.tolist()  # as in Pascal VOC
    indexed.putpalette([0, 0, 0, 100, 100, 100, 255, 255, 255])
    assert decode_mask(encoded(indexed)).tolist() == [[0, 100], [255, 100]]
    assert decode_mask(encoded(Image.fromarray(levels == 1))).tolist() == [[0, 255], [0, 255]]
    assert decode_mask(encoded(Image.fromarray(np.repeat(levels[..., None], 3, -1)))).tolist() == levels.tolist()
    assert decode_mask(encoded(Image.fromarray(levels.astype(np.uint16)))).tolist() == levels.tolist()
    with pytest.raises(ValueError, match="it is in color"):
        decode_mask(encoded(Image.fromarray(np.stack([levels, levels, 1 + levels], -1))))
    with pytest.raises(ValueError, match="more than 8 bits"):
        decode_mask(encoded(Image.fromarray(levels.astype(np.uint16) * 999)))


def test_masks_of_sixteen_bits_are_read_exactly_or_rejected():
    levels = np.array([[0, 1], [2, 255]])[..., None]
    assert decode_mask(deep_png(levels)).tolist() == levels[..., 0].tolist()
    opaque = np.full_like(levels, 65535)
    portable = b"P6 2 2 65535\n" + np.repeat(levels, 3, -1).astype(">u2").tobytes()
    for data in (
        deep_png(np.concatenate([levels, opaque], -1)),
        deep_png(np.repeat(levels, 3, -1)),
        deep_png(np.concatenate([levels, levels, levels, opaque], -1)),
        deep_tiff(np.repeat(levels, 3, -1)),
        portable,
    ):
        with pytest.raises(ValueError, match=r"more than 8 bits per channel.*: save it as gray without alpha"):
            decode_mask(data)
    assert decode_mask(b"P6 2 2 255\n" + np.repeat(levels, 3, -1).astype("u1").tobytes()).tolist() == [[0, 1], [2, 255]]


def deep_tiff(pixels):
    """Encode pixels ``[H, W, 3]`` from 0 to 65535 as a TIFF file with 16 bits per channel."""
    height, width, channels = pixels.shape
    entries = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2)]
    entries += [(273, 4, 1, 128), (277, 3, 1, channels), (278, 3, 1, height), (279, 4, 1, 2 * pixels.size)]
    tags = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + tags + struct.pack("<I", 0)
    return head.ljust(122, b"\0") + struct.pack("<3H", 16, 16, 16) + pixels.astype("<u2").tobytes()


def test_the_palette_decides_whether_colors_are_gray_values():
    palette = [0] * 768
    palette[3:6], palette[21:24] = [128, 0, 0], [128, 128, 128]  # as in Pascal VOC
    for levels in ([[0, 7]], [[1, 7]]):
        indexed = Image.fromarray(np.array(levels, np.uint8), "P")
        indexed.putpalette(palette)
        assert decode_mask(encoded(indexed)).tolist() == levels


@pytest.mark.parametrize("value", [0.4, np.nan, np.inf])
def test_masks_of_fractions_are_rejected(value):
    assert decode_mask(encoded(Image.fromarray(np.array([[0, 255]], np.float32)), "TIFF")).tolist() == [[0, 255]]
    with pytest.raises(ValueError, match=r"not whole numbers|more than 8 bits"):
        decode_mask(encoded(Image.fromarray(np.array([[0, value]], np.float32)), "TIFF"))


@pytest.mark.parametrize(
    ("options", "level", "expected"),
    [
        ({"classes": "a,b", "values": [0, 255]}, 0, 0),
        ({"classes": "a,b", "values": [0, 255]}, 255, 1),
        ({"classes": "a,b"}, 255, 1),
        ({"classes": "a,b,c"}, 0, 0),
    ],
)
def test_masks_of_one_class_are_accepted_if_the_classes_are_configured(tmp_path, options, level, expected):
    for k in range(6):
        write(tmp_path / "f", f"n{k}", np.full((6, 8), level, np.uint8))
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 3, 6, 8), np.float32), y=np.full((6, 6, 8), level))
    spec = DataSpec(data=f"npz:{tmp_path / 'a.npz'}", partition="iid", task="segmentation", segmentation=options)
    for source in (source_of(tmp_path / "f", segmentation=options), load_source_for(spec)):
        assert source.train.y.unique().tolist() == [expected]
        assert source.classes == len(options["classes"].split(","))


def test_gray_values_become_classes():
    gray = torch.tensor([[[0, 7], [200, 128]]], dtype=torch.uint8)
    task = Segmentation(class_names=("a", "b", "c"), values=(200, 0, 7), ignore=128)
    (y,), known = classes_of_masks({"x": gray}, task, lambda part, row: f"{row}")
    assert (y.tolist(), known) == ([[[1, 2], [0, OUTSIDE]]], task)
    (y,), known = classes_of_masks({"x": gray}, Segmentation(values=(0, 7, 200, 128)), lambda part, row: f"{row}")
    assert known.class_names == ()
    for levels, names in (({0, 255}, ("background", "foreground")), ({0, 1}, ("0", "1")), ({0, 1, 2}, ("0", "1", "2"))):
        assert Segmentation().described(levels).class_names == names
    assert Segmentation(class_names=("a", "b", "c")).described({0, 2}).values == (0, 1, 2)
    with pytest.raises(DataError, match=r"gray values 0, 128, 255\. Set segmentation.values"):
        Segmentation().described({0, 128, 255})


@pytest.mark.parametrize(
    ("break_it", "options", "reason"),
    [
        (lambda p: (p / "masks/n1.png").unlink(), {}, r"1 images without a mask or masks without an image: images/n1\.png"),
        (lambda p: (p / "images/n1.png").unlink(), {}, r"masks/n1\.png"),
        (lambda p: write(p, "odd", mask_of(1), sides=(6, 9)), {}, "has 6 x 8 pixels, but its image .* has 6 x 9"),
        (lambda p: write(p, "odd", mask_of(1, (0, 255, 9))), {"classes": "a,b"}, "gray value 9, but the classes have 0, 255"),
        (lambda p: write(p, "odd", np.full((6, 8), 9, np.uint8)), {"ignore": 9}, "odd.png has only ignored pixels"),
        (colored, {}, "it is in color"),
        (lambda p: write(p, "odd", mask_of(1)) or (p / "masks/odd.png").write_bytes(b"no"), {}, "odd.png cannot be used"),
        (lambda p: [write(p, f"n{k}", np.zeros((6, 8), np.uint8)) for k in range(6)], {"classes": "a,b"}, "the same class"),
        (lambda p: (p / "masks").rename(p / "labels"), {}, "a folder images, but no folder masks"),
        (lambda p: (p / "images").rename(p / "pictures"), {}, "has no images. Expected"),
        (lambda p: Image.open(p / "images/n1.png").save(p / "images/n1.bmp"), {}, "several files with the name of n1"),
    ],
)  # fmt: skip
def test_wrong_folders_are_rejected(tmp_path, break_it, options, reason):
    fill(tmp_path)
    break_it(tmp_path)
    with pytest.raises(DataError, match=reason):
        source_of(tmp_path, segmentation=options)


def test_only_five_unpaired_files_are_named(tmp_path):
    fill(tmp_path, 9)
    for k in range(8):
        (tmp_path / f"masks/n{k}.png").unlink()
    with pytest.raises(DataError, match=r"8 images without a mask.*n4\.png,? and 3 more"):
        source_of(tmp_path)


def test_a_table_names_images_and_masks(tmp_path):
    fill(tmp_path, 6)
    rows = "".join(f"images/n{k}.png,masks/n{k}.png,s{k % 2}\n" for k in range(6))
    (tmp_path / "list.csv").write_text("picture,truth,site\n" + rows)
    fields = {"data": f"table:{tmp_path}/list.csv", "image": "picture", "label": "truth", "task": "segmentation"}
    fed = load_federation(**fields, partition="natural:site")
    assert (fed.task, len(fed.clients), fed.columns["truth"]) == ("segmentation", 2, "label")
    with pytest.raises(ConfigError, match="Set image to the column with the image files"):
        load_federation(**{**fields, "image": None}, partition="iid", clients=2)


def test_arrays_of_masks(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (10, 6, 8, 3), np.uint8)
    y = np.stack([mask_of(k, (0, 9)) for k in range(10)])
    np.savez(tmp_path / "d.npz", x=x, y=y, site=np.arange(10) % 2)
    source = load_source_for(DataSpec(data=f"npz:{tmp_path}/d.npz", segmentation={"values": "0,9"}, partition="iid"))
    assert (source.task, source.class_names, sorted(source.train.columns)) == (
        "segmentation",
        ("0", "9"),
        ["foreground", "main_class", "site"],
    )
    np.savez(
        tmp_path / "v.npz",
        x=np.zeros((10, 1, 4, 6, 8), "f4"),
        y=np.zeros((10, 4, 6, 8), int) + np.eye(8, dtype=int)[:6],
    )
    assert load_source(f"npz:{tmp_path}/v.npz").train.x.shape == (8, 1, 4, 6, 8)
    np.savez(tmp_path / "odd.npz", x=x, y=y[:, :5])
    with pytest.raises(DataError, match=r"sides \(5, 8\), but their images \(6, 8\)"):
        load_source_for(DataSpec(data=f"npz:{tmp_path}/odd.npz", segmentation={"values": "0,9"}, partition="iid"))
    np.savez(tmp_path / "half.npz", x=x, y=y / 2)
    with pytest.raises(DataError, match="must be whole numbers from 0 to 255"):
        load_source(f"npz:{tmp_path}/half.npz")


def test_columns_of_masks():
    y = torch.tensor([[[0, 0], [0, 0]], [[1, 2], [2, 0]], [[1, 1], [OUTSIDE, 0]]])
    columns = mask_columns(y, ["rest", "a", "b"])
    assert columns["main_class"].tolist() == ["rest", "b", "a"]
    assert columns["foreground"].tolist() == pytest.approx([0, 0.75, 2 / 3])


def test_generated_columns_partition_the_data():
    by_class = load_federation("shape-masks", partition="dirichlet:0.1,by=main_class", clients=4)
    assert by_class.sizes.sum() > 300
    by_share = load_federation("shape-masks", partition="sorted:foreground", clients=4, holdout=0)
    shares = [float((client.y > 0).float().mean()) for client in by_share.clients]
    assert shares == sorted(shares)


def test_options_of_masks_need_masks():
    with pytest.raises(ConfigError, match="The section segmentation requires masks"):
        load_federation("digits", segmentation={"classes": "a,b"})
    with pytest.raises(ConfigError, match="max_classes=2 requires one class per sample"):
        load_federation("shape-masks", max_classes=2)


def test_masks_are_no_classes_of_a_folder_and_need_a_model_of_pixels(tmp_path):
    fill(tmp_path)
    with pytest.raises(DataError, match=r"images and masks, as for a segmentation. Use masks:"):
        load_source_for(DataSpec(data=f"folder:{tmp_path}", partition="iid"))
    assert experiment({"data": f"masks:{tmp_path}", "partition": "iid"}).model == "unet"
    table = {"data": "list.csv", "image": "image", "label": "mask"}
    assert [experiment({**table, **task}).model for task in ({"task": "segmentation"}, {})] == ["unet", "cnn"]
    with pytest.raises(ConfigError, match="needs a model of pixels, such as unet"):
        unskew.run(data=f"masks:{tmp_path}", partition="iid", clients=2, model="logistic", rounds=1)


def test_a_class_may_be_called_masks(tmp_path):
    for name in ("masks", "faces"):
        (tmp_path / name).mkdir()
    assert not has_masks(tmp_path)
    (tmp_path / "images").mkdir()
    assert has_masks(tmp_path)
