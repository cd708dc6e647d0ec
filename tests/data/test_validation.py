"""Data that cannot be used are refused where they enter, in a sentence."""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import unskew
from unskew.data.load import load_federation
from unskew.data.normalization import Normalization
from unskew.data.readers.images import decode_column
from unskew.data.sources import registry as sources
from unskew.data.sources.registry import load_source
from unskew.errors import ConfigError, DataError, UnskewError

X, Y = np.random.default_rng(0).normal(size=(12, 4)).astype("float32"), np.arange(12) % 3
IMAGES = np.zeros((12, 5, 5, 3), np.uint8)
DEEP = np.zeros((12, 1, 2, 3, 4, 5), "float32")
with warnings.catch_warnings(action="ignore"):  # PyTorch says that such tensors are deprecated
    QUANTIZED = torch.quantize_per_tensor(torch.from_numpy(X), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": "3"}, "classes must be an integer, not '3'"),
        ({"classes": True}, "classes must be an integer"),
        ({"classes": 10**5000}, "classes has more than 63 bits"),
        ({"seed": -(10**5000)}, "seed has more than 63 bits"),
        ({"task": 10**5000}, "no task 'an object of type int that cannot be written out'"),
        ({"name": 3}, "name must be a string, not 3"),
        ({"server_in_domain": torch.zeros(2)}, "server_in_domain must be True or False"),
        ({"holdout": 10**400}, "holdout must be at least 0"),
        ({"normalize": 10**5000}, "an object of type int that cannot be written out"),
        ({"client_names": Path("x")}, "client_names must be a list of strings"),
        ({"client_names": ["a\nb"]}, "client name .* cannot be printed. Names must be one line"),
        ({"class_names": np.array(3)}, "class_names must be a list"),
        ({"class_names": ["a", "b", "a"]}, "Two classes have the name 'a'"),
        ({"classes": 0}, "classes must be at least 2"),
        ({"seed": "1"}, "seed must be an integer"),
        ({"holdout": "0.1"}, "holdout must be at least 0"),
        ({"task": ["multilabel"]}, "There is no task"),
        ({"normalize": "yes"}, "normalize must be True, False"),
        ({"class_names": ["a", "b"]}, "3 classes but 2 class_names"),
        ({"class_names": "abc"}, "class_names must be a list"),
        ({"clients": X}, "a list with one .x, y. per client, not ndarray"),
        ({"clients": [(X, Y * 0)], "test": (X, Y * 0)}, "All labels are 0, but a classifier needs two classes"),
        ({"clients": [(X.astype(complex), Y)]}, "inputs of client 0 are not a numeric array: they are complex"),
        ({"clients": [(X, Y.astype(complex))]}, "labels of client 0 are not numeric: they are complex"),
        ({"clients": [(X[:, :0], Y)]}, r"have shape \(12, 0\); expected"),
        ({"clients": [(DEEP, Y)], "test": (DEEP, Y)}, r"have shape \(12, 1, 2, 3, 4, 5\); expected"),
        ({"clients": [([[1], [1, 2]], [0, 1])]}, "not a numeric array"),
        ({"class_names": [1, 2, 3]}, "A class name must be a string, not 1"),
        ({"class_names": ["a", "b\x1b]0;c\x07", "d"]}, "class name .* cannot be printed"),
        ({"clients": ((X, Y) for _ in range(2))}, "must be a list with one .x, y. per client, not generator"),
        ({"clients": [(np.ma.masked_array(X, X > 0), Y)]}, "inputs of client 0 .* masked in places"),
        ({"clients": [(X, np.ma.masked_array(Y, Y > 0))]}, "labels of client 0 .* masked in places"),
        ({"clients": [(torch.from_numpy(X).to_sparse(), Y)]}, "they are sparse"),
        ({"clients": [(torch.empty(12, 4, device="meta"), Y)]}, "they are on the device meta"),
        ({"clients": [(torch.from_numpy(X).to(torch.float8_e4m3fn), Y)]}, "they are 8-bit floating point"),
        ({"clients": [(QUANTIZED, Y)]}, "they are quantized"),
        ({"clients": [(np.broadcast_to(X[0], (10**9, 4)), Y)]}, "Client 0 has 1000000000 inputs but 12 labels"),
        ({"task": "regression", "clients": [(X, Y * 1e300)], "test": (X, Y)}, "targets are too large"),
        ({"clients": [(X, Y, X[:, :2], Y)]}, r"shape \(4,\), but test inputs of \(2,\)"),
        (
            {"clients": [(IMAGES, Y)], "test": (IMAGES, Y), "normalize": Normalization((0.0,), (1.0,))},
            "1 means; the inputs have 3",
        ),
    ],
)
def test_from_arrays_rejects_invalid_arrays(options, words):
    with pytest.raises(DataError, match=words):
        unskew.Federation.from_arrays(**{"clients": [(X, Y)], "test": (X, Y), **options})


def test_a_seed_of_63_bits_is_taken():
    one, other = (unskew.Federation.from_arrays([(X, Y)], test=(X, Y), seed=seed) for seed in (2**63 - 1, 2**62))
    assert not torch.equal(one.clients[0].x, other.clients[0].x)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.jsonl", b'{"x": 1, "la\xffbel": 2}\n'),
        ("a.jsonl", b'{"x": "\xff", "label": 2}\n'),
    ],
)
def test_tables_that_are_not_utf8(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a table"):
        load_federation(f"table:{tmp_path / name}", label="label", clients=2)


def test_one_class_of_several_may_be_all_there_is():
    fed = unskew.Federation.from_arrays([(X, Y * 0)], test=(X, Y * 0), classes=np.int64(2))
    assert fed.class_counts().tolist() == [[11, 0]]
    with pytest.raises(DataError, match="classes must be an integer"):
        unskew.Federation(fed.clients, fed.test, classes="2")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (((0.0, 0.0), (1.0, 0.0)), "std of a normalization must be above 0"),
        (((0.0,), (float("nan"),)), "std of a normalization must be above 0 and finite"),
        (((float("inf"),), (1.0,)), "must be finite"),
        (((0.0, 0.0), (1.0,)), "one std per mean, not 2 means and 1 stds"),
        (("a", "b"), "must be numbers"),
    ],
)
def test_normalization_rejects_invalid_values(values, words):
    with pytest.raises(DataError, match=words):
        Normalization(*values)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda given: unskew.run(given), "not ndarray"),
        (lambda given: unskew.compare(given, methods="fedavg"), "not ndarray"),
        (lambda given: unskew.diagnose(given), "not ndarray"),
        (lambda given: unskew.run("digits"), "not str. Create one with unskew.load_federation"),
    ],
)
def test_functions_reject_arrays_as_federation(call, words):
    with pytest.raises(ConfigError, match=words):
        call(np.zeros((3, 4)))


@pytest.mark.parametrize("made", [None, 3, "ab", {0: [0], 1: [1]}, [[[1], [2, 3]], [4]], [None, [1]]])
def test_partition_functions_that_return_something_else(made):
    def halves(labels, clients, rng):
        return made

    with pytest.raises(DataError, match="The partition halves must"):
        load_federation("digits", partition=halves, clients=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": "x"}, "clients='x' is not valid: it must be a valid integer"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"max_train_samples": 9.5}, "max_train_samples=9.5 is not valid: it must be a valid integer"),
        ({"server_data": 1.5}, "server_data=1.5 is not valid: it must be a valid integer"),
        ({"data": 3}, "data=3 is not valid: it must be a valid string"),
        ({"image": {}}, "image={} is not valid: it must be a valid string"),
        ({"label": True}, "label=True is not valid: must not be a boolean"),
        ({"text": {"tokenizer": 3}}, "text.tokenizer=3 is not valid: it must be a valid string"),
        ({"tokenizer": "bytes"}, "There is no option 'tokenizer'"),
        ({"server_data_path": 1}, "server_data_path=1 is not valid: it must be a valid string"),
        ({"label_separator": 3}, "label_separator=3 is not valid: it must be a valid string"),
        ({"label_separator": ""}, "label_separator='' is not valid"),
        ({"features": 10**5000}, "features=an object of type int that cannot be written out is not valid"),
        (
            {"text": "premise,hypothesis"},
            "text.columns=premise,hypothesis requires texts, but digits contains none",
        ),
        ({"partition": "iid,each=" + "9" * 30}, "must be at most 1,000,000,000,000"),
        ({"partition": "dirichlet:1,draws=" + "9" * 30}, "must be at most 1,000,000,000,000"),
        ({"partition": "dirichlet:inf"}, "must be a positive number"),
    ],
)
def test_load_federation_rejects_invalid_options(options, words):
    with pytest.raises(UnskewError, match=words):
        load_federation(**{"data": "digits", "partition": "iid", "clients": 2, **options})


def test_sources_with_a_single_class(tmp_path):
    (tmp_path / "t.csv").write_text("a,text,y\n" + "1.5,some words,yes\n" * 9)
    with pytest.raises(DataError, match="All samples of t have the same label, yes"):
        load_source(f"table:{tmp_path}/t.csv", label="y")
    with pytest.raises(DataError, match="All samples of t have the same label, yes"):
        load_federation(f"text:{tmp_path}/t.csv", label="y", text={"tokenizer": "bytes"}, partition="iid", clients=2)


def bomb(side):
    """The beginning of a PNG of so many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data, b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_images_that_would_fill_the_memory():
    pa, image = pytest.importorskip("pyarrow"), pytest.importorskip("PIL.Image")
    with pytest.raises(DataError, match=r"Image 0 of me cannot be decoded \(it has too many pixels"):
        decode_column(pa.chunked_array([[bomb(50_000)]]), "me")
    # A JPEG is read by another package, which knows no bound: its header is made to say more than it holds.
    out = io.BytesIO()
    image.fromarray(IMAGES[0]).save(out, "JPEG")
    data = bytearray(out.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(DataError, match="it has too many pixels"):
        decode_column(pa.chunked_array([[bytes(data)]]), "me")


@pytest.mark.parametrize("kind", ["leaf", "table", "folder"])
def test_a_folder_of_something_else_is_refused_before_its_files_are_counted(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "files_stamp", lambda path: pytest.fail("every file was looked at"))
    with pytest.raises(DataError, match=str(tmp_path)):
        load_source(f"{kind}:{tmp_path}")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=str(tmp_path)):
        load_source(f"{kind}:{tmp_path / 'file'}")


def test_a_partition_that_takes_other_arguments_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be called with \(labels, clients, rng\)"):
        unskew.load_federation("digits", partition=len, clients=2)
