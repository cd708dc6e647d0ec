"""The script for a GPU runs, small, on a CPU, so that the first run on a GPU does not fail in it."""

import subprocess
import sys

import pytest
import torch

from speed import gpu


def test_it_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main()
    assert capsys.readouterr().out == "There is no CUDA device here, so nothing was measured.\n"


def test_what_fails_is_a_row():
    table = gpu.Table()
    with table.guarded("name", "A"):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    table.begin -= gpu.LIMIT + 1
    table.measure("late", "B", 1, torch.device("cpu"))
    assert [row[-1] for row in table.rows] == ["OutOfMemoryError: CUDA out of memory.", "not measured: no time left"]


@pytest.mark.slow
def test_it_measures_everything_small():
    command = [sys.executable, "-m", "speed.gpu", "--device", "cpu", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * 7 + 2 + 10 + 2 * 2
    assert "Error" not in done.stdout
