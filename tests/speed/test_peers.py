"""Comparison with other libraries: common input, models, and the message if a library cannot be installed."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.environments import constant
from speed.peers import __main__ as peers
from speed.peers.work import Work
from speed.peers.workloads import WORKLOADS, normalize, table_rows
from unskew.models.registry import build_model

TINY = {"clients": 4, "per_client": 6, "cohort": 2, "steps": 1, "batch": 3, "lr": 0.1, "seed": 1}


@pytest.fixture
def shared(tmp_path, monkeypatch):
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setitem(WORKLOADS, "A", replace(WORKLOADS["A"], budget=TINY))
    images = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    peers.write_input(folder, "A", images, np.arange(24) % 10, 3)
    return folder


def test_all_libraries_get_the_same_model_clients_and_cohorts(shared):
    work = Work(shared)
    torch.manual_seed(1)
    model = WORKLOADS["A"].model()
    for start, expected in zip(work.start(), model.parameters(), strict=True):
        assert np.array_equal(start, expected.detach().numpy())
    assert [len(set(cohort)) for cohort in work.cohorts] == [2, 2, 2]
    x, y = work.normalized(3)
    assert (x.shape, y.tolist()) == ((6, 3, 32, 32), [8, 9, 0, 1, 2, 3])
    mean, std = (np.float32(v)[:, None, None] for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    np.testing.assert_allclose((x * std + mean) * 255, work.x[18:24].transpose(0, 3, 1, 2), atol=1e-3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_models_of_the_workloads_are_those_of_unskew(name):
    workload = WORKLOADS[name]
    shape = (3, 32, 32) if workload.images else (30,)
    model, other = workload.model(), build_model(workload.unskew_model, shape, 10, **workload.unskew_options)
    assert [p.shape for p in model.parameters()] == [p.shape for p in other.parameters()]
    vector = torch.nn.utils.parameters_to_vector(other.parameters())
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), other(x))


def test_rows_of_the_table_are_repeatable_and_not_changed():
    x, y = table_rows(5)
    again, _ = table_rows(5)
    assert (x.shape, x.dtype, y.shape) == ((5, 30), np.float32, (5,))
    assert np.array_equal(x, again)
    assert np.array_equal(normalize(x), x)
    assert not np.array_equal(table_rows(5, seed=1)[0], x)


def test_every_library_names_its_packages_and_its_configuration():
    for name in peers.LIBRARIES:
        module = peers.HERE / f"{name}.py"
        pinned = [w for part in ("REQUIREMENTS", "ALONE") for w in constant(module, part) if "==" in w]
        assert bool(pinned) == (name != "ours")
        assert "\nSETTING = " in module.read_text()
    assert peers.number(peers.HERE / "pfl_research.py", "TORCHRUN") == 2
    assert peers.number(peers.HERE / "fedlab.py", "TORCHRUN") == 0


def test_the_table_names_a_library_that_cannot_be_installed(shared, tmp_path, monkeypatch):
    def failing(folder: Path, module: Path) -> Path:
        raise subprocess.CalledProcessError(1, ["pip", "install"])

    monkeypatch.setattr(peers, "environment", failing)
    found = peers.measure(["fedlab"], shared, tmp_path, 1, 1)
    line = peers.table(found).splitlines()[-1]
    assert line.startswith("| FedLab (`fedlab==1.3.0`) | not run: CalledProcessError: ")


@pytest.mark.slow
def test_rounds_are_run_in_turn_and_the_last_model_is_returned(shared, tmp_path):
    found = peers.measure(["ours"], shared, tmp_path, 2, 1)["ours"]
    assert "failed" not in found, found
    assert found["rounds_per_s"] > 0
    assert found["peak_mb"] > 50
    assert found["vector"].shape == (62006,)
    assert not np.array_equal(found["vector"], np.load(shared / "start.npy"))
    assert len(json.loads((shared / "work.json").read_text())["cohorts"]) == 3
