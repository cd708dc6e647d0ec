"""Run folders and data from somebody who means harm: links, import paths, bombs, damaged files.

Whatever they hold, no code runs, nothing outside the folder changes, and a sentence says what is wrong.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.fuzzing import random_draws, scaled
from support.running import call

import unskew
from unskew.config.experiment import Experiment
from unskew.config.loader import read_yaml
from unskew.config.trust import check_trusted
from unskew.data.readers.image_folders import class_folders
from unskew.data.readers.images import decode
from unskew.deployment.server.config import Deployment
from unskew.errors import CheckpointError, ConfigError, DataError, UnskewError
from unskew.filesystem import check_plain, write_atomic
from unskew.folder_locks import is_occupied
from unskew.reporting.run_reader import read_curves
from unskew.simulation.checkpoint import list_checkpoints

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("undrawn")]

TINY = {"data": "digits", "model": "logistic", "clients": 3, "partition": "iid", "rounds": 1, "local_steps": 1}
FINAL = (
    "config.yaml",
    "metrics.jsonl",
    "summary.json",
    "about.json",
    "inputs.json",
    "clients.jsonl",
    "model.safetensors",
)
OTHER = ("engine.json", "convergence.png", "clients.png", "report.html", ".convergence.png.new", ".report.html.new")
JSON = ("summary.json", "inputs.json", "about.json", "clients.jsonl", "metrics.jsonl", "engine.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run, to be copied."""
    folder = tmp_path_factory.mktemp("made") / "run"
    unskew.run(out=folder, engine="inline", **TINY)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with a file that nobody may change and a module that nobody may import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("mine")
    for name in ("evil", "evil\xad", "evil'\"", "table", "text"):
        (tmp_path / f"{name}.py").write_text(
            "from pathlib import Path\nPath('ran').touch()\ndef net(): pass\nclass Rule: pass\n"
        )
    before = set(sys.modules)
    yield tmp_path
    for name in {name for name in set(sys.modules) - before if name.startswith(("evil", "table", "text"))}:
        del sys.modules[name]
    assert not (tmp_path / "ran").exists()
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["victim"]
    assert (tmp_path / "outside" / "victim").read_text() == "mine"


def answered(capsys, *command, codes=(0, 2)):
    """The command ends with a documented code; if it fails, with one sentence."""
    outcome = call(capsys, *command)
    assert outcome.code in codes, outcome
    assert "Traceback" not in outcome.err
    assert outcome.code == 0 or outcome.err.strip()
    return outcome


COMMANDS = (
    ["resume", "{}", "--rounds", 2],
    ["report", "{}"],
    ["export", "{}"],
    ["predict", "{}", "rows.npz", "--out", "{}/p.csv"],
    ["diagnose", "{}", "--no-curvature", "--out", "{}/d.png"],
    ["run", "--out", "{}", *(f"--{name.replace('_', '-')}={value}" for name, value in TINY.items())],
    ["watch", "{}", "--once", "page.html"],
)
"""All that take a run folder."""
OPENING = (
    *COMMANDS[:5],
    ["evaluate", "{}", "rows.npz"],
    ["audit-privacy", "{}"],
    ["diagnose", "{}/checkpoints/1"],
    ["run", *(f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, "rounds": 2}.items())]
    + ["--set", "start_from={}"],
)
"""All that read what a run folder contains; ``watch`` follows no links."""


def use_all(capsys, folder):
    """All commands that take a run folder, one after the other."""
    for command in COMMANDS:
        answered(capsys, *(str(word).format(folder) for word in command))


@pytest.mark.parametrize(
    "name",
    [
        *(".config.yaml.new", ".0123456789abcdef.new", "warnings.txt", ".lock", "checkpoints"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*FINAL, *OTHER, *(f".{name}.new" for name in FINAL))),
    ],
)
@pytest.mark.parametrize("target", ["victim", pytest.param("absent", marks=pytest.mark.slow)])
def test_a_link_in_a_run_folder_leads_nowhere(here, capsys, made, name, target):
    sent = shutil.copytree(made, here / "sent")
    place = sent / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(here / "outside" / target)
    assert "link" in answered(capsys, "resume", sent, "--rounds", 2, codes=(2,)).err
    if target == "absent":
        use_all(capsys, sent)


def test_a_folder_of_a_link_is_not_empty(here, capsys):
    (here / "new").mkdir()
    (here / "new" / ".0123456789abcdef.new").symlink_to(here / "outside" / "victim")
    assert is_occupied(here / "new")
    assert "already exists" in answered(capsys, "run", "--out", "new", codes=(2,)).err
    (here / "new" / ".0123456789abcdef.new").unlink()
    (here / "new" / ".0123456789abcdef.new").write_text("half")
    assert not is_occupied(here / "new")


def test_no_export_and_no_tuning_through_a_link(here, capsys, made):
    sent = shutil.copytree(made, here / "sent")
    (here / "outside" / "victim").unlink()
    (sent / "export-torch").symlink_to(here / "outside")
    assert "is a link" in answered(capsys, "export", sent, "--format", "torch", codes=(2,)).err
    tuned = here / "tuned"
    tuned.mkdir()
    (tuned / "study.db").symlink_to(here / "outside" / "study.db")
    command = ["tune", "fedavg", "--data", "digits", "--trials", 1, "--out", tuned, "--resume"]
    assert "is a link" in answered(capsys, *command, codes=(2,)).err
    (here / "outside" / "victim").write_text("mine")


def test_writing_replaces_a_link_and_never_follows_it(here):
    (here / "p.csv").symlink_to(here / "outside" / "victim")
    write_atomic(here / "p.csv", b"new")
    assert not (here / "p.csv").is_symlink()
    assert (here / "p.csv").read_bytes() == b"new"
    os.mkfifo(here / "pipe")
    with pytest.raises(ConfigError, match="pipe is a link, pipe or device"):
        check_plain(here)


def test_every_command_rejects_a_run_folder_with_a_link(here, capsys, made):
    sent = shutil.copytree(made, here / "sent")
    (sent / "notes.txt").symlink_to(here / "outside" / "victim")
    commands = [[str(word).format(sent) for word in command] for command in OPENING]
    for command in commands:
        assert "notes.txt is a link" in answered(capsys, *command, codes=(2,)).err, command
    (sent / "notes.txt").unlink()
    os.mkfifo(sent / "pipe")
    for command in commands:
        assert "pipe is a link, pipe or device" in answered(capsys, *command, codes=(2,)).err, command


def test_pipes_and_devices_are_not_read(here, capsys, made):
    os.mkfifo(here / "f.yaml")
    os.mkfifo(here / "t.csv")
    os.mkfifo(here / "a.npz")
    for command in (
        ["run", "f.yaml"],
        ["run", "--config", "/dev/zero"],
        ["run", "--data", "table:t.csv", "--label", "y"],
        ["run", "--data", "npz:a.npz"],
    ):
        assert "not a regular file" in answered(capsys, *command, codes=(2,)).err
    sent = shutil.copytree(made, here / "sent")
    for name, command in (("summary.json", "report"), ("inputs.json", "export"), ("metrics.jsonl", "report")):
        (sent / name).unlink()
        os.mkfifo(sent / name)
        answered(capsys, command, sent, codes=(2,))
        (sent / name).unlink()
        shutil.copy(made / name, sent / name)


PATHS = (
    "evil:net",
    "evil.Rule",
    "evil\xad:net",
    "evil'\":net",
    "table:net",
    "text:net",
    "unskew.config.loader:yaml.load",
)
HOLES = (
    "{}",
    "fedprox+{}",
    "fedssyn:generator={}",
    "fedssyn:generator=vae-small,keep={}",
    "hf:{}",
    "table:{}",
    "npz:{}",
)


@pytest.mark.parametrize("examples", [5, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_field_of_a_file_imports_anything(here, capsys, examples):
    """An import path in every field that takes text, alone and inside what its text may be."""
    fields = sorted(Experiment.model_fields)
    cases = [(field, hole.format(path)) for field in fields for hole in HOLES for path in PATHS]
    sure = [("model", path) for path in PATHS] + [("method", hole.format(PATHS[1])) for hole in HOLES[:4]]
    for field, text in [*sure, *random_draws(0).sample(cases, min(scaled(examples), len(cases)))]:
        for value in (text, [text], {"name": text}):
            Path("sent.yaml").write_text(yaml.safe_dump({**TINY, "engine": "inline", field: value}, allow_unicode=True))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "unskew.simulation.round_loop.run_rounds",
                    lambda *args, **kwargs: pytest.fail("it began"),
                    raising=False,
                )
                answered(capsys, "run", "sent.yaml", "--out", "out")
            shutil.rmtree("out", ignore_errors=True)
        assert not Path("ran").exists(), (field, text)


def npz(**arrays):
    """The bytes of a file of arrays."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_arrays_are_a_sentence(here, examples):
    draws = random_draws(1)
    whole = npz(x=np.arange(400.0).reshape(100, 4), y=np.arange(100) % 2)
    for _ in range(scaled(examples)):
        data = bytearray(whole)
        for _ in range(3):
            data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        Path("t.npz").write_bytes(bytes(data[: draws.choice([len(data), draws.randrange(len(data))])]))
        read_npz()


def read_npz():
    with contextlib.suppress(UnskewError):
        unskew.load_federation("npz:t.npz", partition="iid", clients=2)


@pytest.mark.parametrize("method", [1, 6, 9, 93, 97, 99])
def test_arrays_of_other_compressions_are_a_sentence(here, method):
    data = npz(x=np.zeros((9, 2)), y=np.zeros(9, np.int64))
    for head in (b"PK\x03\x04", b"PK\x01\x02"):
        at = data.find(head) + (8 if head[2] == 3 else 10)
        data = data[:at] + bytes([method, 0]) + data[at + 2 :]
    Path("t.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"t\.npz cannot be read as a file of arrays"):
        unskew.load_federation("npz:t.npz", partition="iid", clients=2)


def test_a_member_that_is_not_an_array_is_a_sentence(here):
    with zipfile.ZipFile("t.npz", "w") as file:
        file.writestr("x", "text")
        file.writestr("y", "text")
    with pytest.raises(DataError, match="x is not an array"):
        unskew.load_federation("npz:t.npz", partition="iid", clients=2)


WHOLE = (b"[1]", b'{"info": 1}', b'{"info": {"features": {"y": {"names": 3}}}}')


@pytest.mark.parametrize(
    "metadata",
    [b"{", b"[" * 100_000, *(pytest.param(text, marks=pytest.mark.slow) for text in WHOLE)],
    ids=lambda text: text[:40].decode(),
)
def test_damaged_metadata_of_parquet_is_no_traceback(here, capsys, metadata):
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"a": [i + 0.5 for i in range(40)], "y": [i % 2 for i in range(40)]})
    parquet.write_table(table.replace_schema_metadata({b"huggingface": metadata}), "t.parquet")
    wrong = metadata not in WHOLE
    code = (2,) if wrong else (0,)
    outcome = answered(capsys, "init", "t.parquet", "--label", "y", codes=code)
    assert not wrong or "metadata 'huggingface' of the table is corrupted" in outcome.err


DAMAGES = (
    b"[" * 200_000,
    b"{",
    b"[1]",
    b"null",
    b"\xff",
    b'{"rounds": 1e400}',
    b'{"rounds": 1' + b"0" * 400 + b"}",
    b'{"a": "\\ud800"}',
)


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damaged_json_in_a_run_folder_is_a_sentence(here, capsys, made, name, number):
    np.savez("rows.npz", x=np.zeros((3, 64), np.float32), y=np.zeros(3, np.int64))
    for command in COMMANDS:
        sent = shutil.copytree(made, here / "sent")
        (sent / name).write_bytes(DAMAGES[number])
        answered(capsys, *(str(word).format(sent) for word in command))
        shutil.rmtree(sent)


STRANGE = {
    "summary.json": [("rounds", 1e400), ("seed", 10**400)],
    "inputs.json": [
        ("shape", [2**30] * 3),
        ("kind", "x"),
        ("normalization", {"mean": [0, 0, 0], "std": [1, 1, 1]}),
        ("class_names", ["\ud800", *map(str, range(9))]),
        ("constants", {"class_weights": [1]}),
        ("constants", {"mean": [0], "std": [1]}),
    ],
}


@pytest.mark.parametrize(
    ("command", "name"),
    [(COMMANDS[0], "summary.json"), (COMMANDS[1], "summary.json"), (COMMANDS[2], "inputs.json")],
)
def test_a_value_that_no_run_has_written_is_a_sentence(here, capsys, made, command, name):
    sent = shutil.copytree(made, here / "sent")
    whole = json.loads((sent / name).read_text())
    texts = [json.dumps({**whole, field: value}).replace("Infinity", "1e400") for field, value in STRANGE[name]]
    for text in [*texts, DAMAGES[0].decode()]:
        (sent / name).write_text(text)
        assert "is corrupted" in answered(capsys, *(str(word).format(sent) for word in command), codes=(2,)).err
    assert not list(sent.glob("export*"))


def test_names_are_shown_and_drawn_as_they_are(here, capsys):
    """Neither markup of the terminal nor formulas of figures."""
    name = r"[/b]:cat:$\frac{$"
    lines = [f"{i / 7},{i % 5},{(name, 'no')[i % 2]},{(name, 'b', 'c')[i % 3]}" for i in range(60)]
    Path("t.csv").write_text("\n".join(["a,b,y,site", *lines]))
    data = ["--data", "table:t.csv", "--label", "y", "--exclude", "site", "--partition", "natural:site"]
    short = ["--model", "logistic", "--rounds", 1, "--local-steps", 1, "--engine", "inline", "--out", "run"]
    run = answered(capsys, "run", *data, *short, "--objective", f"recall/{name}", codes=(0,))
    assert f"recall of {name}" in run.out
    shown = answered(capsys, "partition", *data, codes=(0,))
    assert shown.out.count(name) >= 2


CURVES = (
    "[1]",
    "{",
    '{"roc": 1}',
    '{"roc": {"x": [1]}}',
    json.dumps({"pr": {"x": [0] * 100_000, "y": [0] * 100_000}}),
    '{"confusion": {"classes": ["a", "b"], "counts": [[1, 2]]}}',
    '{"confusion": {"classes": ["a"], "counts": [[1, 2]]}}',
)


@pytest.mark.parametrize("text", CURVES, ids=lambda text: text[:40])
def test_curves_that_no_run_has_written_are_a_sentence(here, text):
    Path("curves.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"curves\.json is corrupted"):
        read_curves(Path("curves.json"))
    Path("curves.json").write_text('{"other": [1], "roc": {"x": [0, 1], "y": [0, 1]}}')
    assert read_curves(Path("curves.json")) == {"roc": {"x": [0, 1], "y": [0, 1]}}


def test_damaged_files_of_a_deployed_run_are_a_sentence(here, capsys):
    Path("sent").mkdir()
    os.mkfifo("sent/audit.jsonl")
    assert "not a regular file" in answered(capsys, "deploy", "log", "sent", codes=(2,)).err
    Path("sent/audit.jsonl").unlink()
    Path("sent/audit.jsonl").write_bytes(DAMAGES[0])
    answered(capsys, "deploy", "log", "sent", codes=(2,))
    for text in (DAMAGES[0], b'{"round_policy": {}, "excluded": [], "address": 5}'):
        Path("sent/deployment.json").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"deployment\.json is corrupted"):
            Deployment.read(Path("sent"))


def test_a_file_names_no_cluster_on_another_machine():
    for name in ("10.0.0.1:6379", "[2001:db8::1]:6379", "localhost.example.org:1", "127.0.0.1.example.org:1"):
        values = read_yaml(f"ray: {{address: '{name}'}}")
        with pytest.raises(ConfigError, match=r"sent\.yaml names a Ray cluster, .*trust it"):
            check_trusted(values, Experiment, "sent.yaml", "trust it")
    for name in ("local", "auto", "127.0.0.1:6379", "127.0.0.2:1", "[::1]:6379", "localhost:1"):
        check_trusted(read_yaml(f"ray: {{address: '{name}'}}"), Experiment, "sent.yaml", "trust it")


def test_odd_names_of_folders_are_read_or_ignored(here):
    for name in ("a\\b", "c"):
        (here / "images" / name).mkdir(parents=True)
    assert [folder.name for folder in class_folders(here / "images")[0]] == ["a\\b", "c"]
    (here / "checkpoints" / "\N{SUPERSCRIPT TWO}").mkdir(parents=True)
    assert list_checkpoints(here / "checkpoints") == []


def test_no_program_is_run_for_an_image(here, monkeypatch):
    pytest.importorskip("PIL")
    (here / "gs").write_text(f"#!/bin/sh\ntouch {here}/ran\n")
    (here / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    image = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(OSError, match="cannot identify image"):
        decode(image, color=True, simplejpeg=None)
