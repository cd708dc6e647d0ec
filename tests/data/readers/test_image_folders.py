"""Folders of images: classes, splits, hidden files and links are the same for training, inference and evaluation."""

import os
import unicodedata

import numpy as np
import pytest
from support.running import call

import unskew
from unskew.data.readers.image_folders import visible_files
from unskew.data.sources import registry as sources
from unskew.data.sources.registry import load_source
from unskew.errors import DataError

pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")
TINY = {"partition": "iid", "clients": 2, "model": "mlp", "rounds": 1, "local_steps": 2, "engine": "inline"}


@pytest.fixture(autouse=True)
def fresh_cache():
    sources.load_cached.cache_clear()


def write(file, level=0, seed=0):
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 60, (8, 8), dtype=np.uint8) + np.uint8(level)
    Image.fromarray(pixels).save(file, "PNG")


def classes(root, names=("a", "b"), each=6):
    for c, name in enumerate(names):
        for k in range(each):
            write(root / name / f"{k}.png", min(120 * c, 190), seed=10 * c + k)
    return root


def patients(root, number=5):
    for c, name in enumerate(("benign", "malignant")):
        for p in range(number):
            for k in range(3):
                write(root / name / f"patient{p}" / f"{k}.png", 120 * c, seed=100 * c + 10 * p + k)
    return root


def test_classes_are_the_first_level_and_folders_below_are_a_column(tmp_path, capsys):
    source = load_source(f"folder:{patients(tmp_path)}")
    assert source.class_names == ("benign", "malignant")
    for part in (source.train, source.test):
        assert ((part.x.float().mean((1, 2, 3)) > 100) == (part.y == 1)).all()
    assert set(source.train.columns["folder"]) == {f"patient{p}" for p in range(5)}
    assert "split_by: folder" in capsys.readouterr().err
    federation = unskew.load_federation(f"folder:{tmp_path}", partition="natural:folder", clients=None)
    assert federation.client_names == tuple(f"patient{p}" for p in range(5))


def test_the_images_of_a_folder_are_on_one_side_of_a_split(tmp_path, capsys):
    data = f"folder:{patients(tmp_path)}"
    federation = unskew.load_federation(data, split_by="folder", partition="iid", clients=2)
    assert federation.columns == {"image": "input", "label": "label", "folder": "decides the split"}
    train, test = (part.columns["folder"] for part in split_parts(data))
    assert set(train) | set(test) == {f"patient{p}" for p in range(5)}
    assert not set(train) & set(test)
    assert "split_by" not in capsys.readouterr().err
    with pytest.raises(DataError, match="no column 'patient'"):
        unskew.load_federation(data, split_by="patient", partition="iid", clients=2)


def split_parts(data):
    from unskew.data.readers.column_roles import ColumnSelection

    source = load_source(data, choice=ColumnSelection(split=("folder", None, None)))
    return source.train, source.test


def test_rows_are_in_the_order_of_their_paths(tmp_path):
    names = ("a", "a b", "a-b", "B", "10", "2")
    root = classes(tmp_path / "train", names, 3)
    classes(tmp_path / "test", names, 1)
    source = load_source(f"folder:{tmp_path}")
    assert source.class_names == tuple(sorted(names))
    paths = sorted((root / name / f"{k}.png" for name in names for k in range(3)), key=str)
    expected = np.stack([np.asarray(Image.open(path)) for path in paths])
    assert np.array_equal(source.train.x[:, 0].numpy(), expected)
    assert [source.class_names[y] for y in source.train.y] == [path.parent.name for path in paths]


def test_hidden_files_are_skipped_by_training_inference_and_init(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clean, noisy = classes(tmp_path / "clean"), classes(tmp_path / "noisy")
    for folder in (".ipynb_checkpoints", "__MACOSX", "a/@eaDir", "a/.thumbs"):
        write(noisy / folder / "x.png", 250)
    for name in ("._3.png", ".DS_Store", "Thumbs.db", "desktop.ini"):
        (noisy / "a" / name).write_bytes(b"\0\5\x16\7 not an image")
    (noisy / ".loose.png").write_bytes(b"broken")
    runs = {
        name: unskew.run(data=f"folder:{name}", out=tmp_path / f"run-{name}", **TINY) for name in ("clean", "noisy")
    }
    assert bool((runs["clean"].vector == runs["noisy"].vector).all())
    model = unskew.load_predictor(tmp_path / "run-clean")
    assert model.predict_file(noisy) == model.predict_file(clean)
    assert model.evaluate_file(noisy) == model.evaluate_file(clean)
    configurations = [call(capsys, "init", name, "--out", f"{name}.yaml") for name in ("clean", "noisy")]
    assert [outcome.code for outcome in configurations] == [0, 0]
    written = [(tmp_path / f"{name}.yaml").read_text().replace(name, "set") for name in ("clean", "noisy")]
    assert written[0] == written[1]


def test_init_describes_the_folders_of_patients(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patients(tmp_path / "scans", 10)
    assert call(capsys, "init", "scans").code == 0
    assert "if these are patients, set split_by: folder" in (tmp_path / "experiment.yaml").read_text()


def test_hidden_files_are_skipped_between_tables_and_arrays(tmp_path):
    x, y = np.arange(80.0).reshape(40, 2), np.arange(40) % 2
    for name, values in (("x", x), ("y", y)):
        np.save(tmp_path / f"{name}.npy", values)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "rows.csv").write_text("a,y\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(40)))
    for name in ("._x.npy", "._z.npy", "train/._rows.csv"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7 not data")
    assert unskew.load_federation(f"npy:{tmp_path}", partition="iid", clients=2).shape == (2,)
    assert unskew.load_federation(f"table:{tmp_path}", label="y", partition="iid", clients=2).shape == (1,)


def test_other_folders_next_to_train_are_reported(tmp_path, capsys):
    for name in ("train", "val"):
        classes(tmp_path / name)
    source = load_source(f"folder:{tmp_path}")
    assert len(source.train) + len(source.test) == 12
    assert "not read, because neither train nor test: val" in capsys.readouterr().err


@pytest.mark.parametrize("names", [("training", "validation"), ("Train", "Test"), ("test", "val"), ("TRAIN",)])
def test_folders_that_look_like_parts_are_no_classes(tmp_path, names):
    for name in names:
        classes(tmp_path / name)
    with pytest.raises(DataError, match=r"has no folder 'train', but .* Rename the folder with the training images"):
        load_source(f"folder:{tmp_path}")


def test_classes_of_train_and_test_are_aligned_by_name(tmp_path):
    classes(tmp_path / "train", ("b", "c", "d"))
    classes(tmp_path / "test", ("c", "d"))
    source = load_source(f"folder:{tmp_path}")
    assert source.class_names == ("b", "c", "d")
    assert source.test.y.tolist() == [1] * 6 + [2] * 6


def test_files_without_a_class_and_classes_without_files_are_reported(tmp_path, capsys):
    classes(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.heic").write_bytes(b"photo")
    assert load_source(f"folder:{tmp_path}").class_names == ("a", "b")
    reported = capsys.readouterr().err
    assert "not read, because no image: c/x.heic" in reported
    assert "not read, because without images: c" in reported
    write(tmp_path / "loose.png")
    with pytest.raises(DataError, match=r"loose\.png is in no folder of a class"):
        load_source(f"folder:{tmp_path}")


def test_links_to_folders_are_followed_once(tmp_path):
    classes(tmp_path / "store", ("a", "b"))
    for name in "ab":
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / name).symlink_to(tmp_path / "store" / name)
    (tmp_path / "store" / "a" / "again").symlink_to(tmp_path / "store" / "a")
    source = load_source(f"folder:{tmp_path / 'set'}")
    assert len(source.train) + len(source.test) == 12
    assert len(visible_files(tmp_path / "set")) == 12


@pytest.mark.parametrize("content", [b"", b"broken", b"\xff\xd8 not a JPEG"])
def test_undecodable_image_is_named_by_its_file(tmp_path, content):
    classes(tmp_path)
    (tmp_path / "b" / "scan-2.png").write_bytes(content)
    with pytest.raises(DataError, match=r"Image .*/b/scan-2\.png cannot be decoded"):
        load_source(f"folder:{tmp_path}")


@pytest.mark.skipif(os.name == "nt", reason="file names are UTF-16")
def test_file_names_in_another_encoding_are_an_error(tmp_path):
    classes(tmp_path)
    write(tmp_path / "a" / "1.png")
    try:
        os.rename(tmp_path / "a" / "1.png", os.fsencode(tmp_path / "a") + b"/gr\xfcn.png")
    except OSError:
        pytest.skip("the file system allows UTF-8 only")
    with pytest.raises(DataError, match="is not encoded in UTF-8"):
        load_source(f"folder:{tmp_path}")


def test_one_folder_and_parts_of_the_data_are_evaluated_by_their_names(tmp_path):
    for part in ("train", "test"):
        classes(tmp_path / "set" / part)
    unskew.run(data=f"folder:{tmp_path / 'set'}", out=tmp_path / "run", **TINY)
    model = unskew.load_predictor(tmp_path / "run")
    whole = model.evaluate_file(tmp_path / "set" / "test")[0]
    parts = [model.evaluate_file(tmp_path / "set" / "test" / name)[0] for name in "ab"]
    assert [part["rows"] for part in parts] == [6, 6]
    assert whole["accuracy"] == pytest.approx(np.mean([part["accuracy"] for part in parts]))
    with pytest.raises(DataError, match=r"Evaluate one of its parts, such as .*/set/test"):
        model.evaluate_file(tmp_path / "set")


def test_folders_are_evaluated_by_the_clean_form_of_their_names(tmp_path):
    root = classes(tmp_path / "set", (unicodedata.normalize("NFD", "Orl\u00e9ans"), "Paris"))
    unskew.run(data=f"folder:{root}", out=tmp_path / "run", **TINY)
    model = unskew.load_predictor(tmp_path / "run")
    assert model.class_names == ["Orl\u00e9ans", "Paris"]
    (metrics,) = model.evaluate_file(root, intervals=False)
    assert [metrics[f"support/{name}"] for name in model.class_names] == [6, 6]
    (metrics,) = model.evaluate_file(root / unicodedata.normalize("NFD", "Orl\u00e9ans"), intervals=False)
    assert [metrics[f"support/{name}"] for name in model.class_names] == [6, 0]
