"""Data by user: FEMNIST and CelebA in the hub's layout, LEAF's JSON files, coarse labels, and other data at the server."""

import json
import string
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.running import call
from support.tolerance import FEW, assert_close

from unskew.data.load import load_federation
from unskew.data.partition.partitioner import make_partition
from unskew.data.sources import registry as sources
from unskew.data.sources.registry import load_source
from unskew.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")
from support.hub_files import encode, write_hub_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_cache")
CHARACTERS = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
draws = np.random.default_rng(0)


def pixels(n, *shape):
    return draws.integers(0, 256, (n, *shape), dtype=np.uint8)


# ---- the hub's layout -------------------------------------------------------------------------------------------------


@pytest.fixture
def femnist(tmp_path):
    """One training file only, as on the hub: 8 writers, each with two samples of every class from 38 to 43 and 0."""
    writers = [f"f{k:04d}_14" for k in range(8) for _ in range(14)]
    labels = [c for _ in range(8) for c in [38, 39, 40, 41, 42, 43, 0] * 2]
    images = pixels(len(labels), 28, 28)
    features = {"image": datasets.Image(), "writer_id": datasets.Value("string"), "hsf_id": datasets.Value("int64"),
                "character": datasets.ClassLabel(names=CHARACTERS)}  # fmt: skip
    write_hub_file(
        tmp_path / "femnist" / "data" / "train-00000-of-00001.parquet", features,
        image=[encode(x) for x in images], writer_id=writers, hsf_id=[0] * len(labels), character=labels,
    )  # fmt: skip
    return tmp_path / "femnist", images


def test_femnist_by_writer_and_its_first_40_classes(femnist):
    path, images = femnist
    whole = load_source("flwrlabs/femnist", path=path)
    assert whole.classes == 62
    assert whole.train.x.shape[1:] == (1, 28, 28)
    assert len(whole.train) + len(whole.test) == len(images), "without a test part a fifth is split off"
    fed = load_federation("femnist", data_path=path, partition="natural:writer_id", clients=None, max_classes=40)
    assert (fed.classes, fed.class_names[-1], fed.class_names[10]) == (40, "d", "A")
    assert len(fed.clients) == 8
    assert set(fed.test[1].tolist()) | set(fed.clients[0].y.tolist()) == {0, 38, 39}
    some = load_federation("femnist", data_path=path, partition="natural:writer_id", clients=3, seed=1, max_classes=40)
    assert len(some.clients) == 3
    assert some.sizes.sum() < fed.sizes.sum(), "the samples of writers that are not drawn belong to nobody"
    assert len(some.test[1]) == len(fed.test[1])


def test_the_first_classes_of_other_data():
    fed = load_federation("digits", partition="iid", clients=3, max_classes=4)
    assert fed.classes == 4
    assert fed.class_counts().shape == (3, 4)
    assert int(fed.test[1].max()) == 3
    for wrong, words in ((11, "from 2 to 10, the number of classes"), (1, "max_classes=1 is not valid")):
        with pytest.raises(ConfigError, match=words):
            load_federation("digits", partition="iid", clients=3, max_classes=wrong)


@pytest.fixture
def celeba(tmp_path):
    """Train, valid and test files with booleans for attributes; images are not square."""
    features = {"image": datasets.Image(), "celeb_id": datasets.Value("int64"), "Male": datasets.Value("bool"),
                "Smiling": datasets.Value("bool")}  # fmt: skip
    for split, people in (("train", [7, 7, 7, 2, 2, 9, 9, 9, 9]), ("valid", [1]), ("test", [3, 3, 4])):
        n = len(people)
        write_hub_file(
            tmp_path / "celeba" / "data" / f"{split}-00000-of-00001.parquet", features,
            image=[encode(x, "JPEG") for x in pixels(n, 22, 18, 3)], celeb_id=people,
            Male=[p % 2 == 0 for p in people], Smiling=[i % 3 == 0 for i in range(n)],
        )  # fmt: skip
    return tmp_path / "celeba"


def test_celeba_by_person_with_a_truth_value_as_label(celeba):
    fed = load_federation("celeba", data_path=celeba, partition="natural:celeb_id", clients=None, holdout=0)
    assert (fed.class_names, fed.shape) == (("False", "True"), (3, 22, 18))
    assert fed.sizes.tolist() == [2, 3, 4]
    assert sorted(fed.clients[1].y.tolist()) == [0, 0, 1]
    assert len(fed.test[1]) == 3
    male = load_federation(
        "celeba", data_path=celeba, label="Male", partition="natural:celeb_id", clients=None, holdout=0
    )
    assert [set(c.y.tolist()) for c in male.clients] == [{1}, {0}, {0}]
    small = load_federation("celeba", data_path=celeba, partition="natural:celeb_id", clients=2, image_size=8)
    assert small.shape == (3, 8, 8)
    assert small.test[0].dtype == torch.uint8


def test_images_are_brought_to_a_size_one_by_one_as_all_at_once(celeba):
    from unskew.data.readers.images import resize_images

    large, small = (load_source("celeba", path=celeba, size=size) for size in (None, 8))
    assert torch.equal(resize_images(large.train.x, 8, 8), small.train.x)
    assert load_source("digits", size=16).train.x.shape[1:] == (1, 16, 16)
    with pytest.raises(ConfigError, match="image_size=8 requires images"):
        load_federation("gaussians", clients=2, partition="iid", image_size=8)


@pytest.fixture
def cifar100(tmp_path):
    """Fine classes 0 to 5, two of each coarse class, as on the hub."""
    features = {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=[f"fine{i}" for i in range(6)]),
                "coarse_label": datasets.ClassLabel(names=["a", "b", "c"])}  # fmt: skip
    for split, n in (("train", 120), ("test", 30)):
        fine = [i % 6 for i in range(n)]
        write_hub_file(
            tmp_path / "cifar100" / f"{split}.parquet", features, img=[encode(x) for x in pixels(n, 8, 8, 3)],
            fine_label=fine, coarse_label=[f // 2 for f in fine],
        )  # fmt: skip
    return tmp_path / "cifar100"


def test_coarse_labels_are_learnt_and_fine_ones_divide(cifar100):
    """The partition is that of the fine labels, to the sample, and the targets are the coarse ones."""
    options = {"data_path": cifar100, "clients": 4, "holdout": 0, "seed": 3}
    fine = load_federation("cifar100", partition="dirichlet:0.2,min=3", **options)
    coarse = load_federation("cifar100", label="coarse_label", partition="dirichlet:0.2,min=3,by=fine_label", **options)
    assert (coarse.classes, coarse.class_names) == (3, ("a", "b", "c"))
    assert coarse.fingerprint == fine.fingerprint
    for mine, theirs in zip(coarse.clients, fine.clients, strict=True):
        assert torch.equal(mine.x, theirs.x)
        assert torch.equal(mine.y, theirs.y // 2)
    own = load_federation("cifar100", label="coarse_label", partition="dirichlet:0.2,min=3", **options)
    assert own.fingerprint != fine.fingerprint


def test_partition_by_a_column_separates_its_values():
    labels, color = np.zeros(12, int), np.array(["red", "green", "blue"] * 4)
    parts = make_partition("classes:1,by=color", labels, 3, 0, classes=1, columns={"color": color})
    assert [set(color[parts.indices(k)]) for k in range(3)] == [{"blue"}, {"green"}, {"red"}]
    several = np.zeros((12, 2), int)
    assert make_partition("dirichlet:1,min=1,by=color", several, 3, 0, classes=2, columns={"color": color}).clients == 3
    with pytest.raises(DataError, match=r"no column 'colour'.*'color'"):
        make_partition("dirichlet:1,by=colour", labels, 3, 0, classes=1, columns={"color": color})
    with pytest.raises(DataError, match="no columns besides"):
        make_partition("dirichlet:1,by=color", labels, 3, 0, classes=1)
    with pytest.raises(ConfigError, match=r"partition dirichlet has no option 'bye'.*Did you mean 'by'"):
        make_partition("dirichlet:1,bye=color", labels, 3, 0, classes=1)


# ---- LEAF -------------------------------------------------------------------------------------------------------------


def leaf(folder, split, held, file="all_data_0.json", **changes):
    """A file as LEAF's scripts write it: ``held`` is {name: (x, y)}."""
    content = {
        "users": list(held),
        "num_samples": [len(y) for _, y in held.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in held.items()},
    }
    (folder / split).mkdir(parents=True, exist_ok=True)
    (folder / split / file).write_text(json.dumps(content | changes))


def gray(n):
    """Flat images as FEMNIST's in LEAF: 784 numbers from 0 to 1, 255ths."""
    images = pixels(n, 28, 28)
    return images, [[float(p) / 255 for p in image.ravel()] for image in images]


def test_leaf_reads_pixels_and_users(tmp_path):
    (a, x_a), (b, x_b), (c, x_c), (t, x_t) = gray(4), gray(2), gray(3), gray(2)
    leaf(tmp_path, "train", {"f1": (x_a, [0, 1, 61, 40]), "f2": (x_b, [5, 1])})
    leaf(tmp_path, "train", {"f3": (x_c, [3, 40, 0])}, "all_data_1.json")
    leaf(tmp_path, "test", {"f1": (x_t[:1], [61]), "f2": (x_t[1:], [0])})
    fed = load_federation(f"leaf:{tmp_path}", partition="natural:user", clients=None, holdout=0)
    assert fed.shape == (1, 28, 28)
    assert fed.test[0].dtype == torch.uint8
    assert fed.class_names == ("0", "1", "3", "5", "40", "61")
    assert fed.sizes.tolist() == [4, 2, 3]
    for client, images in zip(fed.clients, (a, b, c), strict=True):
        found = sorted(x.numpy().tobytes() for x in client.x[:, 0])
        assert found == sorted(image.tobytes() for image in images), "the pixels are exactly those of the images"
    assert torch.equal(fed.test[0][:, 0], torch.from_numpy(t))
    drawn = load_federation(f"leaf:{tmp_path}", partition="natural:user", clients=2, holdout=0, max_classes=4)
    assert (len(drawn.clients), drawn.classes) == (2, 4)


def test_leaf_with_names_of_files_and_without_a_test_part(tmp_path):
    """CelebA: ``data/train`` and the images beside, of one size or brought to one."""
    images = tmp_path / "data" / "raw" / "img_align_celeba"
    images.mkdir(parents=True)
    for i in range(12):
        Image.fromarray(pixels(1, 12 + i % 2, 10, 3)[0]).save(images / f"{i:06d}.jpg")
    names = [f"{i:06d}.jpg" for i in range(12)]
    leaf(tmp_path / "data", "train", {"7": (names[:6], [0, 1] * 3), "12": (names[6:], [1, 0] * 3)})
    with pytest.raises(DataError, match=r"differ in size.*image_size"):
        load_source(f"leaf:{tmp_path}")
    fed = load_federation(f"leaf:{tmp_path}", partition="natural:user", clients=None, image_size=8)
    assert (fed.shape, len(fed.clients), fed.classes) == ((3, 8, 8), 2, 2)
    assert len(fed.test[1]) == 2
    images.rename(tmp_path / "elsewhere")
    sources.load_cached.cache_clear()  # the files under the path are as many and as old as before
    with pytest.raises(DataError, match="is missing"):
        load_source(f"leaf:{tmp_path}", size=8)
    assert len(load_source(f"leaf:{tmp_path}", image=str(tmp_path / "elsewhere"), size=8).train) == 10


def test_leaf_with_features_and_labels_in_words(tmp_path):
    x = draws.normal(size=(6, 60)).tolist()
    leaf(tmp_path, "train", {"a": (x[:3], ["yes", "no", "no"]), "b": (x[3:], ["no", "yes", "no"])})
    leaf(tmp_path, "test", {"a": (x[:1], ["yes"])})
    source = load_source(f"leaf:{tmp_path}")
    assert source.class_names == ("no", "yes")
    assert_close(source.train.x.numpy(), np.array(x), FEW)
    assert source.train.columns["user"].tolist() == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize(
    ("users", "changes", "words"),
    [
        ({"a": ([[1.0], [2.0]], [0])}, {}, "2 inputs, 1 labels"),
        ({"a": ([[1.0], [2.0]], [0, 1])}, {"num_samples": [3]}, "num_samples 3"),
        ({"a": ([[1.0], [2.0, 3.0]], [0, 1])}, {}, "lists of numbers with equal lengths"),
        ({"a": ([[1.0], ["x"]], [0, 1])}, {}, "x contains texts; LEAF's texts are not supported"),
        ({"a": (["to be or not", "to be"], [0, 1])}, {}, "x contains texts; LEAF's texts are not supported"),
        ({"a": (["1.png", "and then."], [0, 1])}, {}, "x contains texts"),
        ({"a": ([["id", "a tweet"], ["id", "another"]], [0, 1])}, {}, "x contains texts.* use text:PATH"),
        ({"a": ([[1.0]], [0]), "b": ([[1.0, 2.0]], [0])}, {}, "differ in type or length"),
        ({"a": ([[1.0]], [0])}, {"users": ["b"]}, "user 'b' has no lists"),
        ({"a": ([[1.0]], [0])}, {"users": "a"}, "lists of equal length"),
        ({"a": ([[1.0]], [0])}, {"user_data": []}, "lists of equal length"),
        ({"a": ([[1.0]], [0])}, {"num_samples": 1}, "lists of equal length"),
        ({"a": ([[1.0]], [0])}, {"users": [["a"]]}, "has no lists"),
        ({"a": ([[1.0], [2.0]], [0, "x"])}, {}, "must be all numbers or all strings"),
        ({"a": ([[1.0], [2.0]], [0, 0.5])}, {}, "fractions"),
        ({"a": ([[float("nan")]], [0])}, {}, "NaN"),
        ({"a": ([], [])}, {}, "contains no .json file with samples"),
    ],
)
def test_files_that_are_not_leafs_are_refused(tmp_path, users, changes, words):
    leaf(tmp_path, "train", users, **changes)
    with pytest.raises(DataError, match=words):
        load_source(f"leaf:{tmp_path}")


def test_folders_that_are_not_leafs_are_refused(capsys, tmp_path):
    with pytest.raises(DataError, match="has a folder 'train'"):
        load_source(f"leaf:{tmp_path}")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"contains no .json file"):
        load_source(f"leaf:{tmp_path}")
    for text, words in (("{", "not a JSON file"), ("[1]", "not in LEAF's layout"), ('{"users": []}', "not in LEAF's")):
        (tmp_path / "train" / "a.json").write_text(text)
        with pytest.raises(DataError, match=words):
            load_source(f"leaf:{tmp_path}")
    with pytest.raises(ConfigError, match="requires a path"):
        load_source("leaf")
    with pytest.raises(ConfigError, match=r"LEAF's layout are y. Remove label"):
        load_source(f"leaf:{tmp_path}", label="y")
    outcome = call(capsys, "run", "--data", f"leaf:{tmp_path}/none", "--partition", "natural:user")
    assert outcome.code == 2
    assert "There is no file or folder" in outcome.err


# ---- data at the server -----------------------------------------------------------------------------------------------


def test_samples_at_the_server_are_never_evaluated_on(cifar100):
    """In domain: so many test images, removed from the test set, which nobody else has."""
    whole = load_source("cifar100", path=cifar100, label="coarse_label")
    fed = load_federation(
        "cifar100", data_path=cifar100, label="coarse_label", partition="iid", clients=3, server_data=12, seed=1
    )
    assert fed.server.in_domain
    held, left = ({x.numpy().tobytes() for x in part} for part in (fed.server.x, fed.test[0]))
    assert (len(held), len(left), held & left) == (12, 18, set())
    assert held | left == {x.numpy().tobytes() for x in whole.test.x}
    other = load_federation("cifar100", data_path=cifar100, partition="iid", clients=3, server_data=12, seed=2)
    assert {x.numpy().tobytes() for x in other.server.x} != held


def test_another_data_set_at_the_server_in_the_clients_size_and_channels(cifar100, femnist, celeba):
    """Grey images are repeated, images of any size brought to the clients', and labels are their own."""
    options = {"data_path": cifar100, "partition": "iid", "clients": 3}
    fed = load_federation("cifar100", **options, server_data="femnist", server_data_path=femnist[0])
    assert not fed.server.in_domain
    assert fed.server.x.shape[1:] == (3, 8, 8)
    assert torch.equal(fed.server.x[:, 0], fed.server.x[:, 2])
    assert fed.server.classes == 44
    assert fed.classes == 6
    assert len(fed.test[1]) == 30, "the test set stays whole"
    faces = load_federation("cifar100", **options, server_data="celeba", server_data_path=celeba, image_size=16)
    assert faces.server.x.shape == (9, 3, 16, 16)
    gray = load_federation("digits", partition="iid", clients=3, server_data="celeba", server_data_path=celeba)
    assert gray.server.x.shape == (9, 3, 8, 8), "its colors stay"
    assert not torch.equal(gray.server.x[:, 0], gray.server.x[:, 2])
    alone = load_federation("digits", partition="iid", clients=3)
    for x, one in ((gray.clients[1].x, alone.clients[1].x), (gray.test[0], alone.test[0])):
        assert torch.equal(x, one.expand(-1, 3, -1, -1))
    assert gray.shape == (3, 8, 8)
    assert gray.normalization == replace(
        alone.normalization, mean=alone.normalization.mean * 3, std=alone.normalization.std * 3
    )
    with pytest.raises(DataError, match="must both contain images"):
        load_federation("digits", partition="iid", clients=3, server_data="gaussians")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            np.array(["2020-01-02T10", "2020-01-01T10"] * 20, "datetime64[ns]"),
            ("2020-01-01 10:00:00", "2020-01-02 10:00:00"),
        ),
        (np.array(["2020-01-02", "2020-01-01"] * 20, "datetime64[ns]"), ("2020-01-01", "2020-01-02")),
        ([b"Z\xfcrich", b"Bern"] * 20, "contains binary"),
        ([["a"], ["b"]] * 20, "contains list"),
    ],
)
def test_client_columns_of_parquet_files_have_readable_names(tmp_path, values, expected):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"c": pa.array(values), "x": np.arange(40) / 7, "y": [0, 1, 1, 0] * 10})
    parquet.write_table(table, tmp_path / "t.parquet")
    load = {"label": "y", "partition": "natural:c", "clients": None}
    if isinstance(expected, tuple):
        assert load_federation(f"table:{tmp_path}/t.parquet", **load).client_names == expected
    else:
        with pytest.raises(DataError, match=expected):
            load_federation(f"table:{tmp_path}/t.parquet", **load)
