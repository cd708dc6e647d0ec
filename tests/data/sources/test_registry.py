import io
import os
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from support.tolerance import FEW, near

from unskew.data.load import load_federation
from unskew.data.readers import files, images
from unskew.data.readers.tables import split_rows
from unskew.data.readers.tokenization import HuggingFaceTokenizer
from unskew.data.sources.registry import HUB, SOURCES, load_source
from unskew.errors import ConfigError, DataError, UnskewError

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")
from support.hub_files import encode, write_hub_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_cache")
NAMES = ["airplane", "bird", "cat"]


def pixels(n: int, shape: tuple[int, ...] = (8, 8, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def write_hub(file: Path, blobs: list[bytes], labels: list[int], image: str = "img", names=NAMES, **columns) -> None:
    """Write a file of images, labels, and columns of integers or texts."""
    features = {image: datasets.Image(), "label": datasets.ClassLabel(names=names)}
    features |= {name: datasets.Value("int64" if isinstance(v[0], int) else "string") for name, v in columns.items()}
    write_hub_file(file, features, **{image: blobs, "label": labels, **columns})


def channels_last(x: torch.Tensor) -> bool:
    return x.permute(0, 2, 3, 1).is_contiguous()


def nhwc(x: torch.Tensor) -> np.ndarray:
    return x.permute(0, 2, 3, 1).numpy()


# Built in


def test_digits_have_the_shape_and_range_of_the_files():
    source = load_source("digits")
    assert source.classes == 10
    assert source.class_names == tuple("0123456789")
    assert (len(source.train), len(source.test)) == (1437, 360)
    assert source.train.x.shape[1:] == (1, 8, 8)
    assert source.train.x.dtype == torch.uint8
    assert source.train.x.max() == 240
    counts = np.bincount(source.test.y.numpy())
    assert counts.min() >= 34
    assert counts.max() <= 38
    # What is written down is what scikit-learn gives.
    data = load_digits()
    rows = train_test_split(np.arange(1797), test_size=0.2, stratify=data.target, random_state=0)
    for part, ids in zip((source.train, source.test), rows, strict=True):
        np.testing.assert_array_equal(part.x[:, 0], (data.images[ids] * 15).astype("uint8"))
        np.testing.assert_array_equal(part.y, data.target[ids])
    assert load_source("digits") is source  # decoded once
    with pytest.raises(ConfigError, match="Remove path, label and image"):
        load_source("digits", path=".")


def test_every_source_is_described():
    assert set(HUB) < set(SOURCES)


# The hub's parquet files in a folder


@pytest.mark.parametrize("folder", [".", "plain_text", "data"])
def test_cifar_schema_jpeg_and_png(tmp_path, folder):
    train, test = pixels(6), pixels(3, seed=1)
    blobs = [encode(x, "JPEG" if i % 2 else "PNG") for i, x in enumerate(train)]
    write_hub(tmp_path / folder / "train-00000-of-00002.parquet", blobs[:4], [0, 1, 2, 0])
    write_hub(tmp_path / folder / "train-00001-of-00002.parquet", blobs[4:], [1, 2])
    write_hub(tmp_path / folder / "test-00000-of-00001.parquet", [encode(x) for x in test], [2, 1, 0])
    for name in ("cifar10", "uoft-cs/cifar10"):
        source = load_source(name, path=tmp_path)
        assert source.name == "cifar10"
        assert source.class_names == tuple(NAMES)
        assert source.train.x.shape == (6, 3, 8, 8)
        assert channels_last(source.train.x)
        assert np.array_equal(nhwc(source.train.x), np.stack([by_pillow(b) for b in blobs]))
        assert np.array_equal(nhwc(source.test.x), test)
        assert source.train.y.tolist() == [0, 1, 2, 0, 1, 2]
        assert source.test.y.tolist() == [2, 1, 0]
        assert source.train.columns == {}


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("fallback", [False, True])
def test_grey_images_have_one_channel(tmp_path, form, fallback, monkeypatch):
    if fallback:
        monkeypatch.setattr(images, "optional_simplejpeg", lambda: None)
    blobs = [encode(x, form) for x in pixels(5, (28, 28))]
    write_hub(tmp_path / "mnist" / "train-00000-of-00001.parquet", blobs, [0, 1, 2, 0, 1], image="image")
    write_hub(tmp_path / "mnist" / "test-00000-of-00001.parquet", blobs[:2], [0, 1], image="image")
    source = load_source("mnist", path=str(tmp_path))
    assert source.train.x.shape == (5, 1, 28, 28)
    assert np.array_equal(nhwc(source.train.x)[..., 0], np.stack([by_pillow(b, "L") for b in blobs]))


def test_one_color_image_makes_all_color(tmp_path):
    gray, color = pixels(3, (8, 8)), pixels(2)
    blobs = [encode(gray[0], "JPEG"), encode(gray[1]), encode(color[0], "JPEG"), encode(gray[2], "JPEG")]
    write_hub(tmp_path / "train.parquet", blobs, [0, 1, 2, 0])
    write_hub(tmp_path / "test.parquet", [encode(gray[0])], [0])
    source = load_source("cifar10", path=tmp_path)
    assert np.array_equal(nhwc(source.train.x), np.stack([by_pillow(b) for b in blobs]))
    assert source.test.x.shape == (1, 3, 8, 8)
    assert np.array_equal(nhwc(source.test.x)[0], np.repeat(gray[0][..., None], 3, -1))


@pytest.mark.parametrize("kind", [("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG")])
def test_unusual_encodings_decode_as_pillow_does(tmp_path, kind):
    mode, form = kind
    blobs = [encode(pixels(1, (9, 7, 3), seed)[0], form, mode) for seed in range(3)]
    write_hub(tmp_path / "train.parquet", blobs, [0, 1, 2])
    write_hub(tmp_path / "test.parquet", blobs, [0, 1, 2])
    source = load_source("cifar10", path=tmp_path)
    expected = np.stack([by_pillow(b, "L" if mode == "1" else "RGB") for b in blobs])
    assert np.array_equal(nhwc(source.train.x).squeeze(), expected)


def test_svhn_takes_cropped_digits_and_ignores_extra(tmp_path):
    wide = [encode(x) for x in pixels(2, (4, 20, 3))]
    write_hub(tmp_path / "full_numbers" / "train-00000-of-00001.parquet", wide, [0, 1], image="image")
    write_hub(tmp_path / "full_numbers" / "test-00000-of-00001.parquet", wide, [0, 1], image="image")
    blobs = [encode(x) for x in pixels(3)]
    for split in ("train", "test", "extra"):
        write_hub(tmp_path / "cropped_digits" / f"{split}-00000-of-00001.parquet", blobs, [0, 1, 2], image="image")
    source = load_source("svhn", path=tmp_path)
    assert (len(source.train), len(source.test)) == (3, 3)
    assert source.train.x.shape == (3, 3, 8, 8)


def test_cifar100_keeps_coarse_labels(tmp_path):
    def write(split, n):
        features = datasets.Features(
            {
                "img": datasets.Image(),
                "fine_label": datasets.ClassLabel(names=["a", "b", "c"]),
                "coarse_label": datasets.ClassLabel(names=["x", "y"]),
            }
        )
        rows = [{"bytes": encode(x), "path": None} for x in pixels(n)]
        fine = [i % 3 for i in range(n)]
        data = {"img": rows, "fine_label": fine, "coarse_label": [f // 2 for f in fine]}
        parquet.write_table(pa.table(data, schema=features.arrow_schema), tmp_path / f"{split}.parquet")

    write("train", 6)
    write("test", 3)
    source = load_source("cifar100", path=tmp_path)
    assert source.class_names == ("a", "b", "c")
    assert source.train.columns["coarse_label"].tolist() == [0, 0, 1, 0, 0, 1]
    coarse = load_source("cifar100", path=tmp_path, label="coarse_label")
    assert coarse.class_names == ("x", "y")
    assert coarse.train.y.tolist() == [0, 0, 1, 0, 0, 1]
    federation = load_federation("cifar100", data_path=tmp_path, partition="natural:coarse_label", clients=None)
    assert len(federation.clients) == 2


def test_a_number_after_the_name_draws_that_many_training_images_with_a_fixed_seed(tmp_path):
    train = pixels(30)
    for part, start in (("00000-of-00002", 0), ("00001-of-00002", 15)):  # rows of several files, as of large data sets
        blobs = [encode(x) for x in train[start : start + 15]]
        write_hub(tmp_path / f"train-{part}.parquet", blobs, [i % 3 for i in range(15)], image="image")
    write_hub(tmp_path / "validation-00000-of-00001.parquet", [encode(x) for x in pixels(2)], [0, 1], image="image")
    whole, some = (load_source(name, path=tmp_path) for name in ("imagenet64", "imagenet64:12"))
    chosen = np.sort(np.random.default_rng(0).permutation(30)[:12])
    assert some.name == whole.name == "imagenet64"
    assert np.array_equal(some.train.x, whole.train.x[chosen])
    assert np.array_equal(some.train.y, whole.train.y[chosen])
    assert len(some.test) == 2
    for name, words in (
        ("imagenet64:31", "more than the 30"),
        ("imagenet64:0", "imagenet64:N"),
        ("imagenet64:x", "N with"),
    ):
        with pytest.raises(UnskewError, match=words):
            load_source(name, path=tmp_path)


def test_the_server_has_the_drawn_images_in_the_clients_size_for_every_seed(tmp_path):
    write_hub(tmp_path / "train.parquet", [encode(x) for x in pixels(9, (16, 16, 3))], [0, 1, 2] * 3, image="image")
    write_hub(tmp_path / "validation.parquet", [encode(x) for x in pixels(2, (16, 16, 3))], [0, 1], image="image")
    options = {"partition": "iid", "clients": 2, "server_data": "imagenet64:4", "server_data_path": tmp_path}
    first, second = (load_federation("digits", seed=seed, **options).server for seed in (0, 1))
    assert first.x.shape == (4, 3, 8, 8)
    assert not first.in_domain
    assert np.array_equal(first.x, second.x)


def test_a_changed_file_is_read_again(tmp_path):
    for labels in ([0, 1], [1, 2, 0]):
        blobs = [encode(x) for x in pixels(len(labels))]
        write_hub(tmp_path / "train.parquet", blobs, labels)
        write_hub(tmp_path / "test.parquet", blobs, labels)
        assert load_source("cifar10", path=tmp_path).train.y.tolist() == labels


def test_damaged_images_are_rejected(tmp_path):
    good = encode(pixels(1)[0])
    write_hub(tmp_path / "test.parquet", [good], [0])

    def fails(sentence, blobs, labels=None):
        write_hub(tmp_path / "train.parquet", blobs, labels or [0] * len(blobs))
        with pytest.raises(DataError) as caught:
            load_source("cifar10", path=tmp_path)
        assert sentence in str(caught.value)

    fails(
        "image 2 of cifar10, the training rows has 4 x 6 pixels, those before it have 8 x 8",
        [good, good, encode(pixels(1, (4, 6, 3))[0])],
    )
    fails("Image 1 of cifar10, the training rows cannot be decoded (its format is not known)", [good, b"rubbish"])
    fails("cannot be decoded", [good, encode(pixels(1)[0], "JPEG")[:150]])
    fails("more than 8 bits per channel", [encode(pixels(1, (8, 8))[0].astype(np.uint16) * 256)])
    fails("is missing: it has no bytes", [good, None])
    write_hub(tmp_path / "train.parquet", [encode(x) for x in pixels(2, (4, 4, 3))], [0, 1])
    with pytest.raises(DataError, match=r"training images of cifar10 have shape \(3, 4, 4\), but its test images"):
        load_source("cifar10", path=tmp_path)
    write_hub(tmp_path / "train.parquet", [good, good], [0, -1])
    with pytest.raises(DataError, match="contain -1"):
        load_source("cifar10", path=tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot be read"):
        load_source("cifar10", path=tmp_path)
    (tmp_path / "train.parquet").unlink()
    with pytest.raises(
        DataError, match=r"does not contain cifar10. It must contain train\*.parquet and test\*.parquet"
    ):
        load_source("cifar10", path=tmp_path)


def test_the_hub_out_of_reach_is_a_sentence(monkeypatch):
    asked = []

    class NoNetwork:
        def head(self, url, **_):
            asked.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_session", NoNetwork)
    verbosity, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    with pytest.raises(
        DataError, match=r"not on this machine, and the Hugging Face Hub cannot be reached\. .*--data-path"
    ):
        load_source("cifar10")
    assert len(asked) == 1, "asked once, and not again and again"
    with pytest.raises(DataError, match=r"it is not on this machine, and the Hugging Face Hub cannot be reached\."):
        HuggingFaceTokenizer("no-such/tokenizer")
    assert (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()) == (verbosity, bars)


def test_the_hub_takes_the_same_path_as_local_files(monkeypatch, tmp_path):
    blobs = [encode(x) for x in pixels(3)]
    for split in ("train", "test"):
        write_hub(tmp_path / f"{split}.parquet", blobs, [0, 1, 2], image="image")
    real, asked = datasets.load_dataset, []

    def hub(name, config=None):
        asked.append((name, config))
        return real("parquet", data_files={s: str(tmp_path / f"{s}.parquet") for s in ("train", "test")})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    source = load_source("svhn")
    assert asked == [("ufldl-stanford/svhn", "cropped_digits")]
    assert source.class_names == tuple(NAMES)
    assert np.array_equal(nhwc(source.train.x), pixels(3))


def test_a_missing_package_is_a_sentence(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(files, "import_module", absent)
    with pytest.raises(DataError, match=r"pip install 'unskew\[hub\]'"):
        load_source("cifar10")


# A folder of images


def write_folder(root: Path, classes=("cat", "test_tube"), each=4, shape=(6, 5, 3)) -> None:
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i, x in enumerate(pixels(each, shape, seed=c)):
            (root / name / f"{i}.png").write_bytes(encode(x))
    (root / classes[0] / "notes.txt").write_text("not an image")


def test_folder_with_train_and_test(tmp_path):
    root = tmp_path / "my [set]"
    write_folder(root / "train")
    write_folder(root / "test", each=2)
    for source in (load_source(f"folder:{root}"), load_source("folder", path=root)):
        assert source.class_names == ("cat", "test_tube")
        assert source.train.y.tolist() == [0] * 4 + [1] * 4
        assert source.test.y.tolist() == [0, 0, 1, 1]
        assert np.array_equal(nhwc(source.train.x)[:4], pixels(4, (6, 5, 3), seed=0))
        assert source.name == "my [set]"


def test_folder_without_test_is_split(tmp_path):
    write_folder(tmp_path / "set", each=10)
    source = load_source(f"folder:{tmp_path / 'set'}")
    assert (len(source.train), len(source.test)) == (16, 4)
    assert np.bincount(source.test.y).tolist() == [2, 2]
    everything = np.concatenate([nhwc(source.train.x), nhwc(source.test.x)]).reshape(20, -1)
    assert len(np.unique(everything, axis=0)) == 20


def test_invalid_folders_are_rejected(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder at .*nowhere"):
        load_source(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(ConfigError, match="requires a path"):
        load_source("folder")
    with pytest.raises(ConfigError, match="already contains a path"):
        load_source(f"folder:{tmp_path}", path=tmp_path)
    with pytest.raises(DataError, match=r"at least two. It has none"):
        load_source(f"folder:{tmp_path}")
    with pytest.raises(ConfigError, match="Remove label and image"):
        load_source(f"folder:{tmp_path}", label="y")
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match="no folder 'train'"):
        load_source(f"folder:{tmp_path}")


# Tables


def write_csv(file: Path, n: int = 40, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    lines = ["age,income,kind,user,member"]
    lines += [
        f"{rng.integers(18, 80)},{rng.normal():.4f},{('low', 'high', 'mid')[i % 3]},u{i % 4},{i % 2 == 0}"
        for i in range(n)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def test_csv_with_string_labels_and_a_user_column(tmp_path):
    file = tmp_path / "people.csv"
    write_csv(file)
    source = load_source(f"table:{file}", label="kind")
    assert source.name == "people"
    assert source.class_names == ("high", "low", "mid")
    assert source.train.x.dtype == torch.float32
    assert source.train.x.shape == (32, 3)  # age, income and member
    assert len(source.test) == 8
    assert set(source.train.columns) == {"age", "income", "user", "member"}
    assert set(source.train.columns["user"]) == {"u0", "u1", "u2", "u3"}
    assert np.array_equal(source.train.columns["age"], source.train.x[:, 0].numpy())
    federation = load_federation(str(file), label="kind", partition="natural:user", clients=None)
    assert len(federation.clients) == 4
    assert federation.normalization is not None
    assert len(federation.normalization.mean) == 3
    assert federation.normalization.scale == 1.0
    mean = source.train.x.mean(0).tolist()
    assert federation.normalization.mean == near(mean, FEW, dtype=torch.float32)


def test_a_part_of_the_data_that_is_neither_train_nor_test_is_named(tmp_path, capsys):
    for name in ("train", "validation", "notes"):
        (tmp_path / f"{name}.csv").write_text("a,y\n1,0\n2,1\n3,0\n4,1\n")
    load_source(f"table:{tmp_path / 'train.csv'}", label="y")
    assert "neither train nor test: validation.csv" in capsys.readouterr().err
    load_source(f"table:{tmp_path}", label="y")
    assert "neither train nor test: notes.csv, validation.csv" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_test_file_next_to_train_is_used(tmp_path, suffix):
    from pyarrow import csv

    root = tmp_path / "shop"
    write_csv(root / "train.csv", 30)
    write_csv(root / "test.csv", 6, seed=1)
    if suffix == "parquet":
        for split in ("train", "test"):
            parquet.write_table(csv.read_csv(root / f"{split}.csv"), root / f"{split}.parquet")
            (root / f"{split}.csv").unlink()
    for source in (
        load_source(f"{root}/train.{suffix}", label="kind"),
        load_source("table", path=root, label="kind"),
        load_source(f"train.{suffix}", path=root, label="kind"),
    ):
        assert (source.name, len(source.train), len(source.test)) == ("shop", 30, 6)
        assert source.test.y[:3].tolist() == [1, 0, 2]


def test_a_parquet_table_of_images(tmp_path):
    x = pixels(10)
    rows = [{"bytes": encode(image), "path": None} for image in x]
    data = {"photo": rows, "what": [5, 9] * 5, "writer": ["a", "b", "b", "a", "c"] * 2}
    parquet.write_table(pa.table(data), tmp_path / "photos.parquet")
    source = load_source(f"table:{tmp_path / 'photos.parquet'}", label="what", image="photo")
    assert source.class_names == ("5", "9")
    assert np.bincount(source.test.y).tolist() == [1, 1]
    assert source.train.x.shape == (8, 3, 8, 8)
    assert set(source.train.columns) == {"writer"}
    # Plain binary works too, and class names of the hub's metadata are kept.
    parquet.write_table(pa.table({"photo": [r["bytes"] for r in rows], "what": [0, 1] * 5}), tmp_path / "p.parquet")
    assert load_source(f"{tmp_path}/p.parquet", label="what", image="photo").train.x.shape == (8, 3, 8, 8)
    write_hub(tmp_path / "hub.parquet", [r["bytes"] for r in rows], [0, 2] * 5)
    assert load_source(f"{tmp_path}/hub.parquet", label="label", image="img").class_names == tuple(NAMES)


def test_invalid_tables_are_rejected(tmp_path):
    file = tmp_path / "t.csv"

    def fails(text, sentence, kind=DataError, label="y", image=None):
        file.write_text(text)
        with pytest.raises(kind) as caught:
            load_source(f"table:{file}", label=label, image=image)
        assert sentence in str(caught.value)

    fails("a,b,y\n1,2,0\n1,2,1\n", "label column of t: one of a, b, y.", label=None)
    fails("a,b,y\n1,2,0\n1,2,1\n", "no column 'yy'. Did you mean 'y'? Known: a, b, y.", label="yy")
    fails("a,b,y\n1,2,0\n1,2,1\n", "no column 'img'", image="img")
    fails("a,b,y\n1,2,0\n1,2,1\n", "It must contain encoded images", image="a")
    fails("a,b,y\n1,,0\n1,2,1\n", "column 'b' has 1 missing or infinite values")
    fails("a,b,y\n1,nan,0\n1,2,1\n", "column 'b' has 1 missing or infinite values")
    fails("a,b,y\n1,1e300,0\n1,2,1\n", "column 'b' has 1 missing or infinite values")
    fails("a,b,y\n1,2,\n1,2,x\n", "label column 'y' of t, the training rows has 1 missing")
    fails("a,b,y\n1,2,0.5\n1,2,1\n", "contains fractions or NaN")
    fails("a,b,y\n1,2,yes\n1,2, yes\n", "differ only by spaces")
    fails("a,y\nu,0\nv,1\n", "no numeric input columns besides the label 'y'")
    fails("a,b,y\n", "the training rows are empty")
    fails("a,a,y\n1,2,0\n", "more than one column named 'a'")
    fails("a,b,y\n1,2,0\n1,2\n", "has 2 values, but the header has 3")
    fails("a,b,y\n1,2,0\n1,2,1\n", "every class has a single row")
    with pytest.raises(DataError, match="no file or folder"):
        load_source(f"{tmp_path}/none.csv", label="y")
    with pytest.raises(ConfigError, match=r"no data set 'cifar'. Did you mean 'cifar10'"):
        load_source("cifar")
    (tmp_path / "t.txt").write_text("x")
    with pytest.raises(DataError, match=r"neither a .csv nor a .jsonl nor a .parquet"):
        load_source(f"table:{tmp_path / 't.txt'}", label="y")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"contains no .parquet, .csv or .jsonl file"):
        load_source(f"table:{tmp_path / 'empty'}", label="y")


def test_train_and_test_tables_must_match(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,y\n1,2,0\n1,2,1\n")
    (tmp_path / "test.csv").write_text("a,y\n1,0\n")
    with pytest.raises(DataError, match="the test rows: the column 'b' is missing"):
        load_source(f"{tmp_path}/train.csv", label="y")
    (tmp_path / "test.csv").write_text("a,b,y\n1,x,0\n")
    with pytest.raises(DataError, match="column 'b' contains 'x' in row 0, not numbers"):
        load_source(f"{tmp_path}/train.csv", label="y")


def test_numbers_after_the_first_block_decide_the_type_too(tmp_path):
    rows = ["1,0"] * 300_000 + ["2.5,1"] * 10
    (tmp_path / "long.csv").write_text("a,y\n" + "\n".join(rows) + "\n")
    source = load_source(f"{tmp_path}/long.csv", label="y")
    assert source.train.x.max() == 2.5


def test_split_rows_is_stratified_and_keeps_a_training_row_of_each_class():
    for seed in range(30):
        labels = np.random.default_rng(seed).integers(0, 7, 60 + seed)
        keep, held = split_rows(labels)
        assert np.array_equal(np.sort(np.concatenate([keep, held])), np.arange(len(labels)))
        assert len(held) == round(0.2 * len(labels))
        counts, test = np.bincount(labels, minlength=7), np.bincount(labels[held], minlength=7)
        assert np.abs(test - 0.2 * counts).max() < 1.8
        assert (test < np.maximum(counts, 1)).all()


# Federations


def test_federation_lays_clients_out_as_slices():
    federation = load_federation("digits", partition="dirichlet:0.5", clients=6, seed=3)
    source = load_source("digits")
    clients = federation.clients
    assert len(clients) == 6
    assert federation.name == "digits"
    assert federation.partition == "dirichlet:0.5"
    assert federation.class_names == source.class_names
    assert len(federation.fingerprint) == 16
    assert clients[0] is clients[0], "what was brought together last is kept"
    assert [c.num_samples + len(c.y_test) for c in clients] == np.diff(clients.offsets).tolist()
    assert channels_last(clients[2].x)
    rows = torch.cat([torch.cat([c.x, c.x_test]) for c in clients]).flatten(1)
    labels = torch.cat([torch.cat([c.y, c.y_test]) for c in clients])
    joined = torch.cat([rows, labels[:, None].to(rows.dtype)], 1)
    original = torch.cat([source.train.x.flatten(1), source.train.y[:, None].to(rows.dtype)], 1)
    assert torch.equal(
        torch.unique(joined, dim=0, return_counts=True)[1],
        torch.unique(original, dim=0, return_counts=True)[1],
    )
    for client in clients:
        assert len(client.y_test) == max(1, round(0.1 * (len(client.y) + len(client.y_test))))
    assert federation.normalization is not None
    scaled = source.train.x.double() / 255
    assert federation.normalization.mean[0] == pytest.approx(scaled.mean().item())


def test_the_seed_decides_partition_and_holdout_and_nothing_else():
    a, b, c = (load_federation("digits", clients=4, seed=s) for s in (1, 1, 2))
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert all(
        torch.equal(p.x, q.x) and torch.equal(p.y_test, q.y_test) for p, q in zip(a.clients, b.clients, strict=True)
    )
    sorted_a, sorted_c = (load_federation("digits", partition="sorted", clients=10, seed=s) for s in (1, 2))
    assert sorted_a.fingerprint == sorted_c.fingerprint
    assert not torch.equal(sorted_a.clients[0].x, sorted_c.clients[0].x)  # another part is held out
    assert a.normalization == c.normalization


def test_the_held_out_part_is_random_inside_a_client():
    federation = load_federation("digits", partition="sorted", clients=2, holdout=0.3)
    for client in federation.clients:
        assert set(client.y_test.tolist()) == set(client.y.tolist())


@pytest.mark.parametrize("server", [100, "100"])
def test_server_samples_leave_the_test_set(server):
    source = load_source("digits")
    federation = load_federation("digits", clients=3, server_data=server)
    assert federation.server is not None
    assert federation.server.in_domain
    assert (len(federation.server.y), len(federation.test[1])) == (100, 260)
    both = torch.cat([federation.server.x, federation.test[0]]).flatten(1)
    assert torch.equal(
        torch.unique(both, dim=0, return_counts=True)[1],
        torch.unique(source.test.x.flatten(1), dim=0, return_counts=True)[1],
    )
    labels = torch.cat([federation.server.y, federation.test[1]])
    assert torch.equal(labels.bincount(), source.test.y.bincount())
    other = load_federation("digits", clients=3, server_data=100, seed=1)
    assert not torch.equal(other.server.x, federation.server.x)


def test_server_may_hold_another_data_set(tmp_path):
    gray = pixels(4, (28, 28))
    write_hub(tmp_path / "train.parquet", [encode(x) for x in gray], [0, 1, 2, 0], image="image")
    write_hub(tmp_path / "test.parquet", [encode(x) for x in gray], [0, 1, 2, 0], image="image")
    federation = load_federation("digits", clients=3, server_data="mnist", server_data_path=tmp_path)
    assert federation.server is not None
    assert not federation.server.in_domain
    assert federation.server.x.shape == (4, 1, 8, 8)
    assert federation.server.x.dtype == torch.uint8
    assert len(federation.test[1]) == 360
    write_folder(tmp_path / "color", shape=(28, 28, 3))
    federation = load_federation(f"folder:{tmp_path / 'color'}", clients=2, partition="iid", server_data="digits")
    assert federation.server is not None
    assert federation.server.x.shape == (1437, 3, 28, 28)
    assert channels_last(federation.server.x)
    assert torch.equal(federation.server.x[:, 0], federation.server.x[:, 2])


def test_images_convert_between_gray_and_color():
    x = torch.from_numpy(pixels(5, (6, 6, 3))).permute(0, 3, 1, 2)
    gray = images.convert_channels(x, 1)
    expected = (x.double() * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    assert (gray.double() - expected).abs().max() <= 0.51
    assert torch.equal(images.convert_channels(gray, 3)[:, 1:2], gray)
    assert images.resize_images(x, 6, 6) is x
    flat = torch.full((3, 3, 8, 8), 77, dtype=torch.uint8)
    assert (images.resize_images(flat, 5, 11) == 77).all()


def test_invalid_server_data_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="server_data=-3 is not valid"):
        load_federation("digits", clients=2, server_data=-3)
    for server in (360, 0, "-3", "4000"):
        with pytest.raises(DataError, match="Use a number from 1 to 359"):
            load_federation("digits", clients=2, server_data=server)
    with pytest.raises(ConfigError, match="Remove server_data_path"):
        load_federation("digits", clients=2, server_data=5, server_data_path=tmp_path)
    with pytest.raises(ConfigError, match="requires server_data with the name"):
        load_federation("digits", clients=2, server_data_path=tmp_path)
    with pytest.raises(ConfigError, match=r"no data set 'mnits'. Did you mean 'mnist'"):
        load_federation("digits", clients=2, server_data="mnits")
    write_csv(tmp_path / "t.csv")
    with pytest.raises(DataError, match="must both contain images"):
        load_federation(f"{tmp_path}/t.csv", label="kind", partition="iid", clients=2, server_data="digits")
    with pytest.raises(ConfigError, match=r"holdout=1\.0 is not valid: it must be less than 1"):
        load_federation("digits", clients=2, holdout=1.0)


def test_natural_with_fewer_clients_uses_their_samples_only(tmp_path):
    write_csv(tmp_path / "t.csv")
    federation = load_federation(f"{tmp_path}/t.csv", label="kind", partition="natural:user", clients=2, holdout=0)
    source = load_source(f"{tmp_path}/t.csv", label="kind")
    x = torch.cat([client.x for client in federation.clients])
    assert federation.sizes.sum() == len(x) < len(source.train)
    assert federation.normalization is not None
    assert federation.normalization.mean == near(x.mean(0).tolist(), FEW, dtype=torch.float32)


# The real thing


def real_cifar10() -> Path:
    beside = Path(__file__).resolve().parents[4] / "shared" / "data" / "cifar10"
    return Path(os.environ.get("UNSKEW_CIFAR10") or beside)


@pytest.mark.slow
@pytest.mark.skipif(not real_cifar10().is_dir(), reason="CIFAR-10 is not here; set UNSKEW_CIFAR10 to its folder")
def test_cifar10_files_have_the_published_sizes_and_classes():
    source = load_source("cifar10", path=real_cifar10())
    assert source.train.x.shape == (50_000, 3, 32, 32)
    assert source.test.x.shape == (10_000, 3, 32, 32)
    assert source.train.y.bincount().tolist() == [5000] * 10
    assert source.class_names[:3] == ("airplane", "automobile", "bird")
    federation = load_federation("cifar10", data_path=real_cifar10(), clients=10, server_data=1000)
    assert federation.sizes.sum() == pytest.approx(45_000, abs=10)
    assert federation.normalization is not None
    assert federation.normalization.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=2e-3)
    table = parquet.read_table(real_cifar10() / "test.parquet")
    for i in range(0, 10_000, 997):
        assert np.array_equal(nhwc(source.test.x[i : i + 1])[0], by_pillow(table["img"][i].as_py()["bytes"]))


def test_fewer_samples_are_drawn_by_the_seed():
    def inputs(seed, **options):
        fed = load_federation("digits", partition="iid", clients=3, holdout=0, seed=seed, **options)
        assert len(fed.test[1]) == 360
        return {x.numpy().tobytes() for client in fed.clients for x in client.x}

    first, again, other = (inputs(seed, max_train_samples=300) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first < inputs(0)
    assert len(first) > 290
    for wrong, message in ((0, "greater than or equal to 1"), (1438, "from 1 to 1437")):
        with pytest.raises(ConfigError, match=message):
            load_federation("digits", partition="iid", clients=3, max_train_samples=wrong)
