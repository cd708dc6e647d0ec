"""A plan validates the runs of a comparison before the first one is trained."""

import json
import shutil

import pytest

import unskew
from unskew.comparison.compare_part import compare_part
from unskew.errors import ConfigError
from unskew.runs.parts import Part

TABLE = {"label": "y", "task": "regression", "partition": "natural:site", "holdout": 0.2}
RUN = {"model": "logistic", "rounds": 1, "local_steps": 1, "lr": 0.05, "engine": "inline", "references": False}


def write_table(path, shift=0.0):
    """Write twelve rows of two sites; ``shift`` changes one outcome."""
    rows = [f"{k % 5},{k % 3},{k + (shift if k == 7 else 0)},{'ab'[k % 2]}" for k in range(24)]
    path.write_text("\n".join(["u,v,y,site", *rows]) + "\n")


def test_finished_runs_are_reused_only_with_the_same_data(tmp_path):
    """One outcome changes, so neither the partition nor any number of samples does."""
    table, out = tmp_path / "t.csv", tmp_path / "study"
    fields = {"data": f"table:{table}", "out": out, "seeds": [0, 1], **TABLE, **RUN}
    write_table(table)
    unskew.compare(methods=["fedavg"], **fields)
    again = unskew.compare(methods=["fedavgm", "fedavg"], resume=True, **fields)
    (checksum,) = {own[0]["data_checksum"] for own in again.summaries.values()}
    write_table(table, shift=0.5)
    plots = (out / "clients.png").stat().st_mtime_ns
    for resume in (
        lambda: unskew.compare(methods=["scaffold", "fedavg"], resume=True, **fields),
        lambda: compare_part(Part(1, 1), methods=["scaffold", "fedavg"], **fields),
    ):
        with pytest.raises(ConfigError, match=f"seed-0 cannot be reused. The data differ .* instead of .*{checksum}"):
            resume()
    assert not (out / "scaffold").exists()
    assert (out / "clients.png").stat().st_mtime_ns == plots
    shutil.rmtree(out / "fedavg" / "seed-0")
    with pytest.raises(ConfigError, match="seed-1 cannot be reused"):
        unskew.compare(methods=["fedavg"], resume=True, **fields)
    write_table(table)
    unskew.compare(methods=["fedavg"], resume=True, **fields)


def test_the_checksum_is_of_the_data_before_the_method_changes_them(tmp_path):
    fields = {"data": "digits", "max_train_samples": 60, "clients": 2, **RUN, "references": True, "seeds": 1}
    found = unskew.compare(methods=["fedavg"], out=tmp_path / "study", **fields)  # pooled joins the clients
    assert len({own[0]["data_checksum"] for own in found.summaries.values()}) == 1
    assert json.loads((tmp_path / "study/pooled/seed-0/summary.json").read_text())["data_checksum"]
    unskew.compare(methods=["fedavg"], out=tmp_path / "study", resume=True, **fields)
