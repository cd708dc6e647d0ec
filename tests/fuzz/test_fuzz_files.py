"""Files whose bytes are flipped, cut off or added to: tables, images, configurations, and all files of a run."""

import hashlib
import io
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_folder import CSV, JSONL, ROWS, TINY, federation
from support.fuzzing import amounts, fuzz

import unskew
from unskew.records.result import read_history

pytestmark = pytest.mark.fuzz

FED = federation()
PIECES = [
    b"",
    b"\0",
    b"\xff",
    b"\n",
    b",",
    b'"',
    b"{",
    b"}",
    b"[" * 3000,
    b"-",
    b"e999",
    b"9" * 400,
    b"nan",
    b"\xef\xbb\xbf",
]
PIECES += [
    b"NaN",
    b"null",
    b"true",
    b"\r",
    b":",
    b" ",
    b"\xf0\x9f\x98\x80",
    b"\\ud800",
    b"'",
    b"1e5",
    b"'=1",
    b"&a ",
    b"*a",
]


@st.composite
def damaged(draw, length):
    """What is done to a file of some length: from where to where it goes, and what comes in its place."""
    changes = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, length))
        size = draw(st.sampled_from([0, 0, 1, 1, 2, 5, 40, length]))
        changes.append((start, start + size, draw(st.sampled_from(PIECES) | st.binary(max_size=4))))
    return changes


def apply(data, changes):
    for start, stop, piece in changes:
        data = data[:start] + piece + data[stop:]
    return data


@amounts(10, 500)
@pytest.mark.parametrize("name", ["tiny.csv", "tiny.jsonl"])
def test_tables(box, name, examples):
    original = {"tiny.csv": CSV, "tiny.jsonl": JSONL}[name].encode()

    @fuzz(examples)
    @given(damaged(len(original)), st.sampled_from(["iid", "natural:kind", "classes:1,by=kind", "sorted:x0"]))
    def check(changes, partition):
        (box.here / name).write_bytes(apply(original, changes))
        clients = None if partition.startswith("natural") else 3
        box.python(lambda: unskew.load_federation(f"table:{name}", label="label", partition=partition, clients=clients))

    check()


@amounts(10, 500)
def test_parquet_files(box, examples):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"x0": [row["x0"] for row in ROWS], "kind": [row["kind"] for row in ROWS]}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({**columns, "label": [row["label"] for row in ROWS]}), buffer)
    original = buffer.getvalue()

    @fuzz(examples)
    @given(damaged(len(original)))
    def check(changes):
        (box.here / "tiny.parquet").write_bytes(apply(original, changes))
        box.python(lambda: unskew.load_federation("table:tiny.parquet", label="label", partition="iid", clients=3))

    check()


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@amounts(10, 500)
@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"])
def test_images(box, kind, examples):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(buffer, kind)
    original = buffer.getvalue()
    for label in ("a", "b"):
        (box.here / "images" / label).mkdir(parents=True)
        for number in range(4):
            (box.here / "images" / label / f"{number}.{kind}").write_bytes(original)

    @fuzz(examples)
    @given(damaged(len(original)))
    def check(changes):
        (box.here / "images" / "a" / f"0.{kind}").write_bytes(apply(original, changes))
        box.python(lambda: unskew.load_federation("folder:images", partition="iid", clients=2))

    check()


WAYS = {
    "resume": lambda run: unskew.resume(run, federation=FED, rounds=2),
    "diagnose": lambda run: unskew.diagnose(FED, run=run, curvature=False, samples=2, synthetic_fractions=[0.5]),
    "read": read_history,
    "branch": lambda run: unskew.run(
        FED, **{**TINY, "rounds": 2}, method="scaffold+fedavgm", network="fixed:1", start_from=str(run)
    ),
}


@amounts(20, 700)
def test_files_of_a_run(box, finished, examples):
    """Also a manifest that is corrupted and signed again, so that its digest is right."""
    names = sorted(str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file())

    @fuzz(examples)
    @given(st.sampled_from(names), st.data(), st.sampled_from(sorted(WAYS)))
    def check(name, data, way):
        original = (finished / name).read_bytes()
        signed = name.endswith("manifest.json") and data.draw(st.booleans())
        if signed:
            text = apply(json.loads(original)["manifest"].encode(), data.draw(damaged(len(original))))
            text = text.decode(errors="replace")
            changed = json.dumps({"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()
        else:
            changed = apply(original, data.draw(damaged(len(original))))
        shutil.rmtree(box.here / "run", ignore_errors=True)
        shutil.copytree(finished, box.here / "run")
        (box.here / "run" / name).write_bytes(changed)
        box.python(lambda: WAYS[way](box.here / "run"))

    check()
