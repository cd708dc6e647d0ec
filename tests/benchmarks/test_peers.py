"""The table of other libraries: what each is given, and that an absent one is named."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.baselines import CnnA
from benchmarks.peers import __main__ as peers
from benchmarks.peers.work import SHAPES, Work
from conformance.environments import constant

TINY = {"clients": 4, "per_client": 6, "cohort": 2, "steps": 1, "batch": 3, "lr": 0.1, "seed": 1}


@pytest.fixture
def shared(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    peers.prepared(folder, images, np.arange(30) % 10, TINY, 3)
    return folder


def test_all_are_given_the_same_model_clients_and_cohorts(shared):
    work = Work(shared)
    torch.manual_seed(1)
    assert [tuple(p.shape) for p in CnnA().parameters()] == SHAPES
    torch.manual_seed(1)
    for given, expected in zip(work.start(), CnnA().parameters(), strict=True):
        assert np.array_equal(given, expected.detach().numpy())
    assert [len(set(cohort)) for cohort in work.cohorts] == [2, 2, 2]
    x, y = work.normalized(3)
    assert (x.shape, y.tolist()) == ((6, 3, 32, 32), [8, 9, 0, 1, 2, 3])
    mean, std = (np.float32(v)[:, None, None] for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    np.testing.assert_allclose((x * std + mean) * 255, work.x[18:24].transpose(0, 3, 1, 2), atol=1e-3)


def test_every_library_says_what_it_needs_and_how_it_runs():
    for name in peers.LIBRARIES:
        module = peers.HERE / f"{name}.py"
        pinned = [w for part in ("REQUIREMENTS", "ALONE") for w in constant(module, part) if "==" in w]
        assert bool(pinned) == (name != "ours")
        assert "\nSETTING = " in module.read_text()
    assert peers.number(peers.HERE / "pfl_research.py", "TORCHRUN") == 2
    assert peers.number(peers.HERE / "fedlab.py", "TORCHRUN") == 0


def test_a_library_that_is_not_there_is_named_with_the_reason(shared, tmp_path, monkeypatch):
    def refused(folder: Path, module: Path) -> Path:
        raise subprocess.CalledProcessError(1, ["pip", "install"])

    monkeypatch.setattr(peers, "environment", refused)
    found = peers.compared(["fedlab"], shared, tmp_path, 1, 1)
    line = peers.table(found).splitlines()[-1]
    assert line.startswith("| FedLab (`fedlab==1.3.0`) | not run: CalledProcessError: ")


@pytest.mark.slow
def test_rounds_are_run_in_turn_and_the_last_model_comes_back(shared, tmp_path):
    found = peers.compared(["ours"], shared, tmp_path, 2, 1)["ours"]
    assert "absent" not in found, found
    assert found["rounds_per_s"] > 0
    assert found["peak_mb"] > 50
    assert found["vector"].shape == (sum(int(np.prod(shape)) for shape in SHAPES),)
    assert not np.array_equal(found["vector"], np.load(shared / "start.npy"))
    assert len(json.loads((shared / "work.json").read_text())["cohorts"]) == 3
