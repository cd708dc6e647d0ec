"""Leave-one-site-out: models are those of federations that never had the site, and metrics those of scikit-learn."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from sklearn.metrics import roc_auc_score
from support.running import call

import unskew
from unskew.comparison.leave_one_out import LeaveOneOut, leave_one_out, site_row
from unskew.config.loader import experiment
from unskew.data.load import load_partitioned
from unskew.errors import ConfigError
from unskew.tasks.primary_metric import metric_info

RUN = {"model": "logistic", "rounds": 3, "local_steps": 4, "batch_size": 16, "lr": 0.1, "engine": "inline"}
DATA = {"label": "ill", "partition": "natural:site", "split_by": "column:part", "exclude": ["row"], "holdout": 0.3}


def ward_rows(n=420):
    """Rows of three sites, named by numbers that are not their positions."""
    draws = np.random.default_rng(5)
    frame = pd.DataFrame({"site": draws.choice([2, 3, 1], n), "part": np.where(draws.random(n) < 0.2, "test", "train")})
    frame["age"], frame["pressure"] = draws.normal(60, 9, n), draws.normal(120, 15, n)
    risk = 1 / (1 + np.exp(1 - 0.1 * (frame["age"] - 60)))
    frame["ill"] = np.where(draws.random(n) < risk, "yes", "no")
    return frame.assign(row=np.arange(n))


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ward_rows().to_csv("h.csv", index=False)
    return "table:h.csv"


def test_models_and_metrics_are_those_of_a_federation_without_the_site(table):
    options = {**RUN, "metrics": ["auroc"], "objective": "auroc"}
    result = leave_one_out(methods=["fedavg"], seeds=[0, 4], out="out", data=table, **DATA, **options)
    frame = ward_rows()
    spec = experiment({"data": table, **DATA}).data_spec
    for row in result.rows:
        own = frame[(frame["site"] == int(row["client"])) & (frame["part"] == "train")]
        others = frame[(frame["site"] != int(row["client"])) & (frame["part"] == "train")]
        assert row["samples"] == len(own)
        areas = []
        for seed in (0, 4):
            folder = Path("out/leave-one-out") / row["client"] / f"fedavg/seed-{seed}"
            drawn = load_partitioned(spec, seed)
            parts = [drawn.client(k) for k, name in enumerate(drawn.parts.names) if name != row["client"]]
            arrays = [(first.x, first.y, last.x, last.y) for first, last in parts]
            scaling = unskew.Normalization.fit(torch.cat([x for pair in arrays for x in pair[::2]]))
            test = (drawn.test.x, drawn.test.y)
            never = unskew.run(
                unskew.Federation.from_arrays(arrays, test=test, normalize=scaling), seed=seed, **options
            )
            stored = load_file(folder / "model.safetensors")
            assert torch.equal(torch.cat([stored["head.weight"].flatten(), stored["head.bias"]]), never.vector)
            inputs = others[["age", "pressure"]].to_numpy()
            x = (own[["age", "pressure"]].to_numpy() - inputs.mean(0)) / inputs.std(0)
            logits = x @ stored["head.weight"].double().numpy().T
            areas.append(roc_auc_score(own["ill"] == "yes", logits[:, 1] - logits[:, 0]))
            rows = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
            assert rows[-1]["unseen"] is True
        assert row["all"] == pytest.approx(np.mean(areas), abs=1e-6)
        assert row["all_interval"][0] < row["all"] < row["all_interval"][1]
        seen = [
            next(r["auroc"] for r in rows if r["name"] == row["client"]) for rows in result.comparison.clients["fedavg"]
        ]
        assert row["with"] == pytest.approx(np.mean(seen))
        assert row["difference"] == pytest.approx(row["without"] - row["with"])
    (mean,) = result.means()
    values = [row["all"] for row in result.rows]
    half = stats.t.ppf(0.975, 2) * stats.sem(values)
    assert (mean["all"], mean["all_clients"]) == (pytest.approx(np.mean(values)), 3)
    assert mean["all_interval"] == pytest.approx((np.mean(values) - half, np.mean(values) + half), rel=1e-6)
    assert json.loads(Path("out/leave-one-out.json").read_text())["clients"][0]["client"] == result.rows[0]["client"]


def test_the_command_prints_a_table_and_resumes_what_is_missing(table, capsys):
    words = ["compare", "fedavg", "ft", "--data", table, "--label", "ill", "--partition", "natural:site"]
    words += ["--exclude", "row,part", "--model", "logistic", "--rounds", "2", "--local-steps", "2", "--seeds", "0"]
    words += ["--no-references", "--leave-one-out", "--unseen", "3,1", "--out", "out", "--set", "engine=inline"]
    first = call(capsys, *words)
    assert first.code == 0, first.err
    assert "mean" in first.out
    assert first.out.count("2 clients") == 4
    folders = sorted(path.parent for path in Path("out/leave-one-out").rglob("summary.json"))
    assert [folder.relative_to("out/leave-one-out").as_posix() for folder in folders] == [
        f"{site}/{name}/seed-0" for site in "13" for name in ("fedavg", "ft")
    ]
    before = {folder: (folder / "summary.json").stat().st_mtime_ns for folder in folders}
    (folders[0] / "summary.json").unlink()
    again = call(capsys, *words, "--resume", "--json").json()
    changed = [folder for folder in folders if (folder / "summary.json").stat().st_mtime_ns != before[folder]]
    assert changed == folders[:1]
    assert [row["client"] for row in again["leave_one_out"]["clients"]] == ["3", "1"] * 2


def test_clients_with_similar_names_and_references_with_own_options(tmp_path, monkeypatch):
    """``<50`` and ``>50`` get different folders; options of references, which are not repeated, raise no error."""
    monkeypatch.chdir(tmp_path)
    frame = ward_rows(120)
    frame.assign(site=frame["site"].map({1: "<50", 2: ">50", 3: "all"})).to_csv("h.csv", index=False)
    options = {"data": "table:h.csv", **DATA, **RUN, "references": True, "overrides": {"local": {"lr": 0.2}}}
    result = leave_one_out(methods=["fedavg", "local"], seeds=1, out="out", **options)
    assert {row["client"] for row in result.rows} == {"<50", ">50", "all"}
    names = sorted(path.name for path in Path("out/leave-one-out").iterdir())
    assert (len(names), names[-1]) == (3, "all")


def test_named_clients_are_unseen(table):
    federation = unskew.load_federation(table, unseen="3", **DATA)
    assert federation.unseen_names == ("3",)
    assert set(federation.client_names) == {"1", "2"}
    whole = unskew.load_federation(table, **DATA)
    a = unskew.run(federation, **RUN)
    b = unskew.run(data=table, unseen=[3], **DATA, **RUN)
    assert a.vector.equal(b.vector)
    passed = unskew.run(whole, unseen=["3"], **RUN)
    assert [row["name"] for row in passed.clients if row.get("unseen")] == ["3"]
    assert unskew.load_federation("digits", clients=4, unseen=[0, 2]).sizes.shape == (2,)


def test_a_client_without_held_out_samples_has_no_metric_on_them():
    """Its rows have the accuracy on the test set, weighted by its classes."""
    here = {"name": "a", "client": 0, "samples": 9, "num_held_out": 0, "accuracy": 0.7, "personal_accuracy": 0.8}
    left_out = {**here, "unseen": True, "num_all": 7, "all_accuracy": 0.6}
    row = site_row("fedavg", "a", [[here]], [[left_out]], "accuracy")
    assert row["samples"] == 7
    assert (row["all"], row["without"], row["with"], row["difference"]) == (0.6, None, None, None)
    tested = site_row("ft", "a", [[{**here, "num_held_out": 5}]], [[{**left_out, "num_held_out": 5}]], "accuracy")
    assert (tested["without"], tested["with"], tested["difference"]) == (0.8, 0.8, 0)


def test_intervals_of_means_over_clients_stay_within_the_range_of_the_metric():
    rows = [{"method": "a", "all": v, "without": v, "with": 0.1, "difference": v - 0.1} for v in (0.0, 0.2)]
    half = stats.t.ppf(0.975, 1) * stats.sem([0.0, 0.2])
    for name, low in (("accuracy", 0), ("r2", 0.1 - half)):
        (mean,) = LeaveOneOut(None, metric_info(name), rows).means()
        assert mean["all_interval"] == pytest.approx((low, 1), abs=1e-6)
        assert mean["difference_interval"] == pytest.approx((-half, half), abs=1e-6)
    (mean,) = LeaveOneOut(None, metric_info("loss"), rows).means()
    assert mean["all_interval"] == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unseen": "4"}, "no client '4'"),
        ({"unseen": 0.3}, "a share"),
        ({"data": "digits", "clients": 2}, "Without 0, 1 clients train"),
        ({"data": "digits", "clients": 60, "partition": "iid"}, "--unseen 0,1"),
        ({"data": "digits", "clients": 4, "seeds": 2}, "--seeds 0"),
        ({"unseen": ["1", "3"], "single": True}, "Without 1, 3, 1 clients train"),
        ({"unseen": ["nowhere"], "single": True}, "no client 'nowhere'"),
        ({"unseen": 1.5, "single": True}, "at least 0 and below 1"),
    ],
)
def test_clients_that_cannot_be_left_out_raise(table, options, words):
    options = dict(options)
    run = options.pop("single", False)
    data = {**DATA, "data": table} if "data" not in options else {}
    with pytest.raises(ConfigError, match=words):
        unskew.run(**data, **options, **RUN) if run else leave_one_out(
            methods=["fedavg"], **{"seeds": 1, **data, **options, **RUN}
        )
