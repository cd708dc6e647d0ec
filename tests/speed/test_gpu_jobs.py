"""The loops that a GPU job compares train the same models, so that their times can be compared."""

import json
import subprocess
import sys

import numpy as np
import pytest

from speed.gpu_jobs import torch_loops
from speed.gpu_jobs.models import prepare
from speed.gpu_jobs.peers_gpu import SECTIONS, compare_models
from speed.gpu_jobs.rows import time_rounds
from speed.gpu_jobs.settings import CHECKED_ROUNDS, SETTINGS, Prepared


def test_batches_have_each_sample_of_an_epoch_once_and_the_last_one_is_filled_up(tmp_path):
    setting = SETTINGS["A"].checked()
    drawn = prepare(setting, 2)
    drawn.save(tmp_path / "A.npz")
    prepared = Prepared.load(tmp_path / "A.npz", setting)
    assert prepared.padded
    for place, client in enumerate(prepared.cohorts[0]):
        rows = prepared.rows[0, place][prepared.weights[0, place] > 0]
        assert sorted(rows - client * setting.per_client) == list(range(setting.per_client))
    assert prepared.weights.sum(-1).astype(int).tolist() == [[[4, 4, 2]] * 3] * 2


@pytest.mark.parametrize("loop", ["hand", "graph"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_loop_tuned_by_hand_trains_the_model_of_unskew(loop, channels_last):
    setting = SETTINGS["A"].checked()
    prepared = prepare(setting, CHECKED_ROUNDS)
    model, loss = torch_loops.LOOPS[loop](prepared, channels_last).checked()
    ours, our_loss = torch_loops.check_unskew(setting)
    start = np.concatenate([part.ravel() for part in prepared.start])
    assert np.linalg.norm(model - ours) < 1e-2 * np.linalg.norm(ours - start)
    assert loss == pytest.approx(our_loss, abs=1e-5)


def test_models_that_differ_do_not_agree(tmp_path):
    prepare(SETTINGS["A"].checked(), CHECKED_ROUNDS).save(tmp_path / "A-check.npz")
    with np.load(tmp_path / "A-check.npz") as stored:
        start = np.concatenate([stored[f"start{index}"].ravel() for index in range(10)])
    torch_loops.save_check(tmp_path / "A-unskew.npz", (start + 1e-3, 2.0))
    torch_loops.save_check(tmp_path / "A-hand.npz", (start + 1.001e-3, 2.0))
    torch_loops.save_check(tmp_path / "A-graph.npz", (start, 2.0))
    compared = set()
    compare_models(tmp_path, tmp_path, compared)
    compare_models(tmp_path, tmp_path, compared)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["name"]: row["agree"] for row in rows} == {"A graph and unskew": False, "A hand and unskew": True}


def test_a_slow_round_is_its_own_warm_up():
    ran = []
    assert time_rounds(lambda: ran.append(0), seconds=0.0)["rounds"] == 1
    assert len(ran) == 2


def test_every_setting_is_measured_with_every_kind_of_loop():
    loops = {name: {s.loop.partition("-")[0] for s in SECTIONS if name in s.settings} for name in SETTINGS}
    assert all({"unskew", "hand", "graph", "jax"} <= found for found in loops.values())
    assert {"pfl-1", "pfl-5"} <= {s.loop for s in SECTIONS if "pfl" in s.settings}


@pytest.mark.slow
def test_sections_are_processes_and_failures_are_rows(tmp_path):
    command = [sys.executable, "-m", "speed.gpu_jobs.peers_gpu", str(tmp_path), "--quick", "--settings", "B"]
    subprocess.run([*command, "--only", "unskew,hand,graph,pfl-5"], check=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(row["section"] == "peers" and row["ms"] > 0 for row in rows) >= 5
    assert [row["agree"] for row in rows if row["section"] == "agreement"] == [True] * 4
    assert any("pfl-5" in row["name"] for row in rows)
