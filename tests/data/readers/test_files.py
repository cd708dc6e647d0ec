"""Small files that would need far more memory or stack than they should: an error with the cause instead of a crash."""

import gzip
import io
import json
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from support.running import call
from support.table_files import read_table_file

import unskew
from unskew.data.readers import arrow_io
from unskew.data.readers.arrow_io import check_nesting
from unskew.errors import DataError

pytestmark = pytest.mark.fuzz

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

DEEP = 100_000


def png(width, height, *chunks):
    """A black PNG of one bit per pixel, with further chunks after its header."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(width // 8 + 2)) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    further = b"".join(chunk(*one) for one in chunks)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + further + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def image_folder(folder, data, suffix="png"):
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            (folder / name / f"{number}.{suffix}").write_bytes(data)
    return folder


NESTED = {
    "lists": '{"a": ' + "[" * DEEP + "]" * DEEP + ', "y": 1}',
    "objects": '{"a": ' * DEEP + "1" + "}" * DEEP,
    "without an end": "[" * DEEP,
    "over lines": "[\n" * DEEP + "]\n" * DEEP,
    "after brackets in strings": '{"a": "]}", "b": [' * DEEP,
    "hidden behind a quote": '{"a": "\\\\", "b": ' + "[" * DEEP + '"\\"'[:0] + "]" * DEEP + "}",
    "flat lines first": '{"a": 1, "y": 2}\n' * 3 + '{"a": ' + "[" * DEEP + "]" * DEEP + "}",
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_deeply_nested_json_lines_are_an_error_with_their_line(tmp_path, text):
    file = tmp_path / "deep.jsonl"
    file.write_text(text + "\n")
    line = 65 if "\n[" in text else 4 if text.startswith('{"a": 1') else 1
    with pytest.raises(DataError, match=rf"Line {line} of .*deep\.jsonl is nested more than 64 levels deep\. Remove"):
        read_table_file(file)


ODD_LINES = {
    "zeros": (b"\0" * 100_000, "Line 2 of .* has 1 values, but the header has 2"),
    "a long value": (b"1" * 10_000_000 + b",c", "have the same label, c"),
    "a long text": (b"'" * 10_000_000 + b",c", "have the same label, c"),
    "a quote without an end": (
        b'"1,c\n' + b"1,c\n" * 10_000,
        "Line 2 of .* A quotation mark in it is not closed before line 10003",
    ),
}


@pytest.mark.parametrize(("line", "reason"), ODD_LINES.values(), ids=ODD_LINES)
def test_odd_lines_of_a_csv_file_are_an_error_that_is_short(line, reason, tmp_path):
    (tmp_path / "t.csv").write_bytes(b"a,y\n" + line + b"\n")
    with pytest.raises(DataError, match=reason) as error:
        unskew.load_federation(f"table:{tmp_path / 't.csv'}", label="y", clients=2, partition="iid")
    assert len(str(error.value)) < 1000


def test_usual_json_lines_are_read_as_before(tmp_path):
    rows = [
        {"a": 1.5, "text": "{[{[" * 100, "image": [[1, 2], [3, 4]], "y": "b"},
        {"a": 2.5, "text": 'quotes \\" " and \\\\', "image": [[5, 6], [7, 8]], "y": "}"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_table_file(file).to_pylist() == rows
    file.write_text("".join(json.dumps(row, indent=1) + "\n" for row in rows))
    check_nesting(file)


def test_init_and_run_report_nested_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.jsonl").write_text(NESTED["lists"])
    for command in (("init", "deep.jsonl"), ("run", "--data", "table:deep.jsonl", "--label", "y", "--rounds", "1")):
        outcome = call(capsys, *command)
        assert outcome.code == 2
        assert "nested more than 64 levels" in outcome.err


def test_a_parquet_file_of_many_equal_rows_is_an_error_before_it_is_read(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    table = pa.table({"a": np.zeros(1_000_000), "y": pa.array(np.zeros(1_000_000, np.int64))})
    parquet.write_table(table, file, compression="zstd")
    assert file.stat().st_size < 10_000
    assert read_table_file(file).equals(table)
    monkeypatch.setattr(arrow_io, "MOST_BYTES", 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(parquet.ParquetFile, "iter_batches", None)
        with pytest.raises(
            DataError, match=r"\(1,000,000 rows and 2 columns\) would need 0\.0 GB .* use a part of them"
        ):
            read_table_file(file)
    monkeypatch.setattr(arrow_io, "MOST_EXPANSION", 1 << 20)
    assert read_table_file(file).num_rows == 1_000_000


def test_a_parquet_file_of_long_equal_texts_is_an_error_while_it_is_read(tmp_path, monkeypatch):
    file = tmp_path / "texts.parquet"
    parquet.write_table(pa.table({"text": ["x" * 20_000] * 5_000}), file, compression="zstd")
    monkeypatch.setattr(arrow_io, "MOST_BYTES", 1 << 24)
    with pytest.raises(DataError, match=r"would need 0\.[0-9] GB of memory or more"):
        read_table_file(file)


def test_a_parquet_table_keeps_its_types_but_dictionaries_and_its_schema(tmp_path):
    table = pa.table(
        {
            "n": pa.array([1, None, 3], pa.int16()),
            "c": pa.array(["a", "b", None]).dictionary_encode(),
            "l": pa.array([[1.0], [], None]),
            "d": pa.array([0, 1, 2], pa.timestamp("ms")),
        }
    ).replace_schema_metadata({"huggingface": "{}"})
    folder = tmp_path / "part=1"
    folder.mkdir()
    for rows in (table, table.slice(0, 0)):
        parquet.write_table(rows, folder / "t.parquet")
        read = read_table_file(folder / "t.parquet")
        stored = parquet.read_table(folder / "t.parquet", partitioning=None)
        expected = stored.set_column(1, "c", stored.column("c").cast(pa.string()))
        assert read.equals(expected)
        assert read.schema.equals(expected.schema, check_metadata=True)
        assert read.to_pylist() == rows.to_pylist()


def gif(width, height):
    out = io.BytesIO()
    Image.new("1", (8, 8)).save(out, "gif")
    data = bytearray(out.getvalue())
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def tiff(side):
    out = io.BytesIO()
    Image.new("1", (side, side)).save(out, "tiff", compression="group4")
    return out.getvalue()


BOMBS = {
    "png": lambda: png(20_000, 20_000),
    "little above the limit": lambda: png(10_000, 9_000),
    "gif": lambda: gif(60_000, 60_000),
    "tiff": lambda: tiff(20_000),
    "text chunk": lambda: png(8, 8, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26), 9))),
    "color profile": lambda: png(8, 8, (b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 26), 9))),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_images_that_would_fill_the_memory_are_an_error_or_read_without_what_is_large(
    tmp_path, capsys, kind, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    image = BOMBS[kind]()
    image_folder(tmp_path / "images", image, "tif" if kind == "tiff" else "gif" if kind == "gif" else "png")
    outcome = call(capsys, "init", "images")
    if outcome.code:
        assert "cannot be read" in outcome.err
    pytest.importorskip("datasets")
    data = pa.chunked_array([pa.array([image])])
    if kind == "color profile":
        assert outcome.code in (0, 2)
    else:
        with pytest.raises(DataError, match=r"Image 0 of x cannot be decoded .* Repair or remove it"):
            unskew.data.readers.images.decode_column(data, "x")


def test_many_images_that_are_each_allowed_are_counted_together(monkeypatch):
    from unskew.data.readers.images import decode_column

    column = pa.chunked_array([pa.array([png(1000, 1000)] * 50)])
    assert decode_column(column, "x", size=8).shape == (50, 1, 8, 8)
    monkeypatch.setattr(arrow_io, "MOST_BYTES", 1 << 24)
    assert decode_column(column, "x", size=8).shape == (50, 1, 8, 8)
    with pytest.raises(DataError, match=r"x would need 0\.1 GB"):
        decode_column(column, "x")


def archive(kind):
    out = io.BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=out, mode="w") as packed:
            packed.addfile(tarfile.TarInfo("a/0.png"))
    elif kind == "zip":
        with zipfile.ZipFile(out, "w") as packed:
            packed.writestr("a/0.png", b"")
    else:
        out.write(gzip.compress(b"\0" * 1000))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["metadata.jsonl", "zip", "tar", "gz"])
def test_files_between_images_are_neither_parsed_nor_unpacked(tmp_path, kind, capsys):
    out = io.BytesIO()
    Image.new("L", (8, 8)).save(out, "png")
    folder = image_folder(tmp_path / "images", out.getvalue())
    if kind == "metadata.jsonl":
        (folder / "train" / "a" / kind).write_text('{"file_name": "0.png", "x": ' + "[" * DEEP + "]" * DEEP + "}\n")
    else:
        (folder / "train" / "a" / "more.bin").write_bytes(archive(kind))
    federation = unskew.load_federation(f"folder:{folder}", clients=2, partition="iid")
    assert (federation.classes, federation.sizes.sum() + len(federation.test[1])) == (2, 10)
    assert "not read, because no image: train/a/m" in capsys.readouterr().err


def test_an_npz_file_of_zeros_is_an_error_before_it_is_read(tmp_path, monkeypatch):
    file = tmp_path / "zeros.npz"
    np.savez_compressed(file, x=np.zeros((1000, 2000)), y=np.arange(1000) % 2)
    monkeypatch.setattr(arrow_io, "MOST_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"zeros\.npz would need 0\.0 GB of memory"):
        unskew.load_federation(f"npz:{file}", clients=2)
    (tmp_path / "text.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="cannot be read"):
        unskew.load_federation(f"npz:{tmp_path / 'text.npz'}", clients=2)
    with zipfile.ZipFile(file) as archive:
        assert {member.filename for member in archive.infolist()} == {"x.npy", "y.npy"}


def test_long_lists_of_columns_are_cut_in_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"c{number}" for number in range(3000)]
    (tmp_path / "wide.csv").write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    outcome = call(capsys, "init", "wide.csv")
    assert outcome.code == 2
    assert len(outcome.err) < 1000
