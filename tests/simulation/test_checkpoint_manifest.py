"""Files of a run that are damaged, or forged and signed again, end in a sentence: on resuming, branching and diagnosing."""

import contextlib
import copy
import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.federations import blobs
from support.running import call
from support.slow import slow_but

import unskew
from unskew.errors import CheckpointError, UnskewError
from unskew.simulation.checkpoint import list_checkpoints, read_manifest

pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore:.*were in flight at the end of the run")]

SIZES = [9, 12, 7, 8]
OPTIONS = {"model": "logistic", "local_steps": 1, "engine": "inline", "seed": 1}
METHOD, NETWORK = "fedbuff:buffer_size=3+scaffold", {"delay": "fixed:1"}
"""With updates on their way, updates that wait, and what clients keep: every part of a manifest is there."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged") / "run"
    options = {**OPTIONS, "method": METHOD, "network": NETWORK, "participation": 0.5}
    unskew.run(blobs(SIZES), rounds=2, checkpoint_every=2, out=folder, **options)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def last(run):
    return list_checkpoints(run / "checkpoints")[0]


def sign(run, manifest):
    """Write a manifest with a right digest."""
    text = json.dumps(manifest)
    outer = {"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (last(run) / "manifest.json").write_text(json.dumps(outer))


def resume(run):
    return unskew.resume(run, federation=blobs(SIZES), rounds=4)


def branch(run):
    options = {**OPTIONS, "method": METHOD, "network": NETWORK, "participation": 0.5}
    return unskew.run(blobs(SIZES), rounds=4, start_from=str(run), **options)


def diagnose(run):
    return unskew.diagnose(blobs(SIZES), run=run, curvature=False, samples=3, synthetic_fractions=[0.5])


WAYS = [resume, branch, diagnose]

# ---- the manifest -----------------------------------------------------------------------------------------------------

REMOVED = object()
VALUES = [REMOVED, None, "text", -1, 0, 2**40, 10**30, 1.5, float("nan"), float("inf"), True, [], {}, [[1]], [1, 2, 3]]
VALUES += [{"0": 1}, {"0": [1]}, {"-1": [0, 0]}, {"99": [0, 0]}, {"x": {}}, {"0": None}, "a" * 10_000]
PLACES = [
    *((key,) for key in ("format", "round", "rules", "skipped", "last", "version", "sent", "traffic", "waiting")),
    *((key,) for key in ("in_flight", "clock", "extra", "files")),
    *(("traffic", key) for key in ("up", "reports", "clients")),
    *(("waiting", key) for key in ("count", "weight", "num_samples", "updates")),
    *(("extra", key) for key in ("config", "data", "seconds", "frozen", "delays")),
    *(("extra", "config", key) for key in ("method", "lr", "network", "rounds", "text")),
    *(("in_flight", 0, key) for key in ("client", "origin_round", "weight", "metrics", "arrived", "version")),
    ("in_flight", 0),
    ("files", "server.safetensors"),
]


def changed(manifest, place, value):
    manifest = copy.deepcopy(manifest)
    part = manifest
    for key in place[:-1]:
        part = part[key]
    if value is REMOVED:
        del part[place[-1]]
    else:
        part[place[-1]] = value
    return manifest


def test_there_is_something_of_everything_to_forge(finished):
    manifest = read_manifest(last(finished))
    assert all(manifest[key] for key in ("rules", "last", "sent", "in_flight", "files"))
    assert manifest["waiting"]["count"] > 0
    assert {place[0] for place in PLACES} == set(manifest)


def refused(run, manifest, way):
    """Whether it is, in a sentence. It may also be one that a run may have; but nothing else comes out."""
    again = run.with_name("again")
    shutil.copytree(run, again)
    sign(again, manifest)
    try:
        way(again)
    except UnskewError:
        return True
    finally:
        shutil.rmtree(again)
    return False


NAMED = {".".join(map(str, place)): place for place in PLACES}


@pytest.mark.parametrize("name", slow_but([*NAMED][::3], NAMED))
def test_a_forged_manifest_is_refused_in_a_sentence(run, name):
    """The first one that is, and all that are read without complaint, so that the run goes on with them, or refuses them."""
    manifest, bad, place = read_manifest(last(run)), [], NAMED[name]
    for value in VALUES:
        forged = changed(manifest, place, value)
        sign(run, forged)
        try:
            read_manifest(last(run))
        except CheckpointError:
            bad.append(forged)
        else:
            if value == {} or place[:2] != ("extra", "config"):
                refused(run, forged, resume)
    assert not bad or refused(run, bad[0], resume)
    assert bad or place[0] == "extra"


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_every_forged_manifest_value_is_rejected(run, place, way):
    manifest = read_manifest(last(run))
    for value in VALUES:
        refused(run, changed(manifest, place, value), way)


FORGED = {
    "a client beyond all": lambda m: m["last"].update({"99": 0}),
    "a round to come": lambda m: m["last"].update({"0": 7}),
    "two updates of a client": lambda m: m["in_flight"].append(m["in_flight"][0]),
    "an update without tensors": lambda m: m["in_flight"][0].update(client=next(iter({0, 1, 2, 3} - flying(m)))),
    "another method": lambda m: m.update(rules=["ditto"]),
    "no mapping": lambda m: m.clear(),
}


def flying(manifest):
    return {update["client"] for update in manifest["in_flight"]}


@pytest.mark.parametrize("forge", FORGED)
def test_a_manifest_that_does_not_fit_the_run(run, forge):
    manifest = read_manifest(last(run))
    FORGED[forge](manifest)
    sign(run, manifest)
    with pytest.raises(CheckpointError):
        resume(run)


NO_MANIFEST = ["[]", "3", "null", "[" * 100_000, '{"format": 5}', "not json"]


@pytest.mark.parametrize("text", slow_but(["[]", "[" * 100_000], NO_MANIFEST))
def test_a_signed_text_that_is_no_manifest(run, text):
    outer = {"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    for written in (json.dumps(outer), json.dumps([outer]), text, json.dumps({"manifest": 3, "sha256": 3})):
        (last(run) / "manifest.json").write_text(written)
        for way in WAYS:
            with pytest.raises(CheckpointError):
                way(run)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", [3, 99, "4", None])
def test_another_version_is_said(run, way, format):
    sign(run, {**read_manifest(last(run)), "format": format, "version": "of another kind"})
    with pytest.raises(CheckpointError, match="another version"):
        way(run)


# ---- tensors ----------------------------------------------------------------------------------------------------------


def reshape(run, file, name, change):
    """Change a tensor, or remove it, and sign the file again."""
    manifest, path = read_manifest(last(run)), last(run) / file
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file({n: t for n, t in tensors.items() if t is not None}, path)
    manifest["files"][file] = hashlib.sha256(path.read_bytes()).hexdigest()
    sign(run, manifest)


@pytest.mark.parametrize("change", [lambda t: None, lambda t: t[:-1].clone(), lambda t: t[None].clone()])
@pytest.mark.parametrize("way", WAYS)
def test_resume_rejects_a_model_of_another_shape(run, change, way):
    reshape(run, "server.safetensors", "state/v", change)
    with pytest.raises(CheckpointError, match=r"another model|is missing"):
        way(run)


def test_resume_rejects_state_tensors_of_other_shapes(finished, tmp_path):
    found = 0
    for file in ("server.safetensors", "flyings-0000.safetensors"):
        for number, name in enumerate(load_file(last(finished) / file)):
            if not name.endswith(("delta", "buffers", "/v")) and not name.startswith(("b", "sent")):
                continue
            run = shutil.copytree(finished, tmp_path / f"{file}-{number}")
            reshape(run, file, name, lambda t: torch.cat([t, torch.zeros(1, dtype=t.dtype)]))
            with pytest.raises(CheckpointError, match=r"shape|another model"):
                resume(run)
            found += 1
    assert found > 5


def test_resume_rejects_another_precision(run):
    reshape(run, "server.safetensors", "state/v", lambda t: t.double())
    with pytest.raises(CheckpointError, match="another model"):
        resume(run)


# ---- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_truncated_final_model_and_summary(run, size):
    os.truncate(run / "model.safetensors", size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupted"):
        diagnose(run)
    os.truncate(run / "summary.json", size)
    for way in (resume, diagnose):
        with pytest.raises(CheckpointError, match=r"summary\.json is corrupted"):
            way(run)
    with contextlib.suppress(UnskewError):
        branch(run)
    with pytest.raises(UnskewError, match=r"summary\.json is corrupted"):
        unskew.run(data="digits", method="fedssyn", synthetic=str(run), rounds=1, clients=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"round": 1, "accuracy": 0.5, "loss": 1}\n{"round": 2}\n',
        "[]\n{}\n",
        '{"round": 1}\n',
        '{"round": 1, "acc',
        "\xff\n",
        '{"round": 1, "accuracy": "x"}\n{"round": 2}\n',
    ],
)
def test_resume_rejects_damaged_metrics(run, text):
    (run / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    for way in (resume, branch):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
            way(run)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        branch(run)


# ---- unskew diagnose --out --------------------------------------------------------------------------------------------

ARGS = ("diagnose", "--clients", "2", "--model", "logistic", "--samples", "5", "--no-curvature")


@pytest.mark.parametrize("place", ["file/a.png", "folder.png", "a.xyz"])
def test_a_figure_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch, place):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr("unskew.diagnosis.diagnose.diagnose", lambda **_: pytest.fail("it was measured"))
    before = sorted(tmp_path.rglob("*"))
    outcome = call(capsys, *ARGS, "--out", tmp_path / place)
    assert outcome.code == 2
    assert place.split("/")[0] in outcome.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_what_was_measured_is_shown_even_if_the_figure_fails(tmp_path, capsys, monkeypatch, more):
    from unskew.diagnosis.report import DiagnosisReport

    def full(*_):
        raise CheckpointError("The disk is full.")

    monkeypatch.setattr(DiagnosisReport, "plot", full)
    outcome = call(capsys, *ARGS, *more, "--out", tmp_path / "new" / "a.png")
    assert outcome.code == 2
    assert "The disk is full" in outcome.err
    assert "zeta2" in outcome.out if more else "label skew" in outcome.out
    assert not (tmp_path / "new").exists()
