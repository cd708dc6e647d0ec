"""Checksums of tensor files that a run writes: personal models, finished images, generators."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.federations import blobs

import unskew
from unskew.checked_tensors import ZEROS, encode_checked, load_checked
from unskew.errors import CheckpointError
from unskew.generators.base import GeneratorJob
from unskew.generators.trained.train_loop import STATE, TrainingState, _resume, _save

pytestmark = pytest.mark.fuzz

TENSORS = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor([1, 2]), "empty": torch.zeros(0)}


def test_a_file_contains_its_tensors_and_what_it_is_about(tmp_path):
    file = tmp_path / "t.safetensors"
    file.write_bytes(encode_checked(TENSORS, {"model": "0" * 64, "frozen": None}))
    for tensors in (load_checked(file), load_file(file)):
        assert tensors.keys() == TENSORS.keys()
        assert all(torch.equal(tensors[name], t) for name, t in TENSORS.items())
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["about"])
    assert about["model"] == "0" * 64
    assert encode_checked(TENSORS) == encode_checked(TENSORS)


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    file = tmp_path / "t.safetensors"
    data = encode_checked({"w": torch.arange(3.0)})
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is corrupted"):
            load_checked(file)
    for size in range(len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="is corrupted"):
            load_checked(file)


ABOUT = {"__metadata__": {"about": json.dumps({"sha256": ZEROS.decode()})}}
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FORGED = {
    "a shape above the memory": {"w": {**ENTRY, "shape": [1 << 31, 1 << 31]}},
    "entries that overlap": {"v": ENTRY, "w": ENTRY},
    "an entry after the end": {"w": {**ENTRY, "data_offsets": [4, 8]}},
    "an entry of negative size": {"w": {**ENTRY, "data_offsets": [4, 0]}},
    "a shape that is not a number": {"w": {**ENTRY, "shape": ["1"]}},
    "an unknown type": {"w": {**ENTRY, "dtype": "O"}},
    "a deep header": {"w": json.loads("[" * 900 + "]" * 900)},
}


@pytest.mark.parametrize("entries", FORGED.values(), ids=FORGED)
def test_a_forged_header_with_a_correct_checksum_is_an_error(entries, tmp_path):
    header = json.dumps(ABOUT | entries).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "t.safetensors").write_bytes(data.replace(ZEROS, hashlib.sha256(data).hexdigest().encode(), 1))
    with pytest.raises(CheckpointError, match=r"is corrupted: (?!.*checksum).*\. Copy it again"):
        load_checked(tmp_path / "t.safetensors")


@pytest.mark.parametrize("size", [90_000_000, 1 << 60, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_an_error(size, tmp_path):
    (tmp_path / "t.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"is corrupted: .*Copy it again"):
        load_checked(tmp_path / "t.safetensors")


def test_a_damaged_personal_model_is_an_error(tmp_path):
    run = tmp_path / "run"
    unskew.run(blobs([9, 14, 11]), model="mlp", method="fedavg+ft", rounds=1, local_steps=1, batch_size=4, out=run)
    (file, *_) = sorted((run / "personal").glob("*.safetensors"))
    client = int(file.stem)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        unskew.load_predictor(run, client_number=client)


def test_a_damaged_generator_is_an_error(tmp_path):
    job = GeneratorJob.__new__(GeneratorJob)
    object.__setattr__(job, "folder", tmp_path)
    trained = TrainingState({"net": torch.nn.Linear(2, 1)}, {})
    _save(job, trained, 3, 17)
    assert _resume(job, trained) == (3, 17)
    data = bytearray((tmp_path / STATE).read_bytes())
    data[-3] ^= 64
    (tmp_path / STATE).write_bytes(data)
    with pytest.raises(CheckpointError, match="remove it"):
        _resume(job, trained)
