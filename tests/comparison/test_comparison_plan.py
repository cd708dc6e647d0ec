"""A plan validates the runs of a comparison before the first one is trained."""

import json
import shutil
from functools import partial

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


@pytest.mark.parametrize(
    ("fields", "first", "second", "words"),
    [
        (
            {"objective": "loss"},
            {"loss": "mse"},
            {"loss": "huber:0.1"},
            "same loss, not mse and huber:0.1. Use one loss",
        ),
        ({"objective": "loss"}, {}, {"loss": "mse"}, None),
        ({}, {}, {"loss": "mae"}, None),
        (
            {"objective": "auprc"},
            {},
            {"positive": "0"},
            "same positive class, on which auprc depends, not 1 and 0. Set",
        ),
        ({"metrics": ["f1"]}, {"positive": "1"}, {"positive": "0"}, "same positive class, on which f1 depends"),
        ({"objective": "auroc"}, {"positive": "1"}, {"positive": "0"}, None),
        ({"objective": "auprc"}, {}, {"positive": "1"}, None),
    ],
)
def test_one_name_of_a_metric_has_one_definition(tmp_path, fields, first, second, words):
    """The positive class is the second one unless it is set, and ``auto`` is the mean squared error."""
    classes = "loss" not in {*first, *second}
    write_table(tmp_path / "t.csv")
    data = "digits" if classes else f"table:{tmp_path / 't.csv'}"
    table = {"max_classes": 2, "clients": 2, "max_train_samples": 60} if classes else TABLE
    run = {"data": data, "seeds": 1, **table, **RUN, **fields}
    compare = partial(unskew.compare, methods=["fedavg", "scaffold"], overrides={"fedavg": first, "scaffold": second})
    if words is None:
        assert len(compare(**run).rows()) == 2
        return
    with pytest.raises(ConfigError, match=words):
        compare(**run)
