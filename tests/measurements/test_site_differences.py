"""The table of the sites against pandas, the variance between them against NumPy, and the methods that it leads to."""

import numpy as np
import pandas as pd
import pytest
import torch
from support.running import call

import unskew
from unskew.data.federation import Federation
from unskew.measurements.site_differences import LISTED, site_differences


def hospital_rows(n=400):
    """Rows of four sites, with missing values as NaN and in a category; the column ``part`` marks the test rows."""
    draws = np.random.default_rng(3)
    site = draws.choice(list("NESW"), n, p=[0.4, 0.3, 0.2, 0.1])
    ward = np.where(draws.random(n) < 0.3 + 0.3 * (site == "S"), "icu", "general").astype(object)
    frame = pd.DataFrame({"site": site, "ward": ward, "part": np.where(draws.random(n) < 0.2, "test", "train")})
    frame["age"] = draws.normal(60, 9, n) + 6 * (site == "W")
    frame["pressure"] = draws.normal(120, 15, n)
    frame["ill"] = np.where(draws.random(n) < np.where(site == "E", 0.4, 0.15), "yes", "no")
    frame["cost"] = frame["age"] + draws.normal(0, 5, n) + np.where(site == "E", 300.0, 100.0)
    frame.loc[draws.random(n) < np.where(site == "N", 0.3, 0.05), "pressure"] = np.nan
    frame.loc[draws.random(n) < 0.1, "ward"] = None
    return frame


ARGUMENTS = {
    "partition": "natural:site",
    "split_by": "column:part",
    "features": ["age", "pressure", "ward"],
    "categories": ["ward"],
    "missing": "mean",
}


@pytest.mark.parametrize("label", ["ill", "cost"])
def test_the_table_of_the_sites_has_the_numbers_of_pandas(label, tmp_path):
    hospital_rows().to_csv(tmp_path / "h.csv", index=False)
    task = "regression" if label == "cost" else "auto"
    fed = unskew.load_federation(f"table:{tmp_path / 'h.csv'}", label=label, task=task, **ARGUMENTS)
    found = site_differences(fed)
    frame = pd.read_csv(tmp_path / "h.csv")
    frame = frame[frame["part"] == "train"]
    assert found.pooled["rows"] == len(frame)
    inputs = frame[ARGUMENTS["features"]]
    assert found.pooled["missing"] == pytest.approx(inputs.isna().to_numpy().mean())
    assert [row["client"] for row in found.rows] == list(fed.client_names)
    for row in found.rows:
        own = frame[frame["site"] == row["client"]]
        assert row["rows"] == len(own)
        shares = own[ARGUMENTS["features"]].isna().mean()
        assert row["missing"] == pytest.approx(shares.mean())
        assert row["missing_columns"] == pytest.approx({name: share for name, share in shares.items() if share})
        expected = {
            name: (own[name].mean() - frame[name].mean()) / frame[name].std(ddof=0) for name in ("age", "pressure")
        }
        for name in ("ward", "ill"):
            share, total = (rows[name].value_counts(normalize=True) for rows in (own, frame))
            expected[name] = share.sub(total, fill_value=0).abs().sum() / 2
        if label == "cost":
            del expected["ill"]
            expected["cost"] = (own["cost"].mean() - frame["cost"].mean()) / frame["cost"].std(ddof=0)
            assert (row["mean"], row["std"]) == pytest.approx((own["cost"].mean(), own["cost"].std(ddof=0)), rel=1e-5)
        else:
            assert (row["outcome"], row["share"]) == ("ill = yes", pytest.approx((own["ill"] == "yes").mean()))
        assert dict(row["shifts"]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        sizes = [abs(shift) for _, shift in row["shifts"]]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) <= LISTED


@pytest.mark.parametrize("classes", [None, 3])
def test_the_variance_between_sites_is_that_of_an_analysis_of_variance(classes):
    """``omega^2`` of the targets, and of the residuals of least squares, as in a loop over the samples."""
    draws = np.random.default_rng(1)
    clients = []
    for k, size in enumerate((40, 60, 25, 80, 30)):
        x = draws.normal(0.3 * k, 1, (size, 4)).astype("float32")
        y = x[:, 0] + 2.0 * (k % 2) + draws.normal(size=size)
        clients.append((x, y[:, None].astype("float32") if classes is None else np.digitize(y, [0.5, 2.0])))
    task = "regression" if classes is None else "classification"
    found = site_differences(Federation.from_arrays(clients, test=clients[0], task=task))

    x = np.concatenate([np.asarray(x, float) for x, _ in clients])
    y = np.concatenate([np.asarray(y) for _, y in clients])
    t = y.astype(float) if classes is None else np.eye(classes)[y]
    site = np.repeat(np.arange(len(clients)), [len(x) for x, _ in clients])
    total = np.square(t - t.mean(0)).sum()

    def omega2(values, parameters):
        means = np.stack([values[site == k].mean(0) for k in range(len(clients))])
        between = sum((site == k).sum() * np.square(means[k] - values.mean(0)).sum() for k in range(len(clients)))
        within = sum(np.square(values[site == k] - means[k]).sum() for k in range(len(clients)))
        return (between - (len(clients) - 1) * within / (len(values) - len(clients) - parameters)) / total

    design = np.column_stack([np.ones(len(x)), x])
    residuals = t - design @ np.linalg.lstsq(design, t, rcond=None)[0]
    assert found.label_between == pytest.approx(omega2(t, 0), rel=1e-4)
    assert found.label_unexplained == pytest.approx(omega2(residuals, 4), rel=1e-4)


def test_texts_and_large_images_have_rows_without_inputs():
    images = [(np.zeros((6, 40, 40), "uint8"), np.array([0, 1] * 3))] * 2
    found = site_differences(Federation.from_arrays(images, test=images[0]))
    assert found.label_unexplained is None
    assert found.label_between == 0
    texts = [(torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64))] * 2
    found = site_differences(Federation.from_arrays(texts, test=texts[0], task="language", classes=5))
    assert [row["rows"] for row in found.rows] == [3, 3]
    assert found.label_between is None


def stores(effect, seed=0):
    """Sales of twelve stores whose levels differ, for the same inputs."""
    draws = np.random.default_rng(seed)
    clients = []
    for level in draws.normal(0, effect, 12):
        x = draws.normal(size=(60, 3)).astype("float32")
        clients.append((x, (x[:, :1] + level + draws.normal(0, 0.5, (60, 1))).astype("float32")))
    return Federation.from_arrays(clients, test=clients[0], task="regression")


@pytest.mark.parametrize(("effect", "personal"), [(8.0, True), (0.0, False)])
def test_labels_that_differ_between_sites_lead_to_personal_models(effect, personal):
    report = unskew.diagnose(stores(effect), model="logistic", rounds=5, curvature=False, synthetic_fractions=[0])
    advice = report.advice()
    assert ("local" in advice.methods) is personal
    assert bool({"ft", "ditto", "apfl", "fedala", "fedrep", "fedbabu"} & set(advice.methods)) is personal
    assert any("of the label's variance lies between the clients" in note for note in advice.notes) is personal
    share = report.as_json()["label_between"]
    assert share > 0.9 if personal else share < 0.05
    assert f"methods={advice.methods!r}" in advice.command()


def test_diagnose_and_partition_begin_with_a_table_of_the_sites(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = hospital_rows(700).assign(site=lambda f: f["site"] + (f.index % 9).astype(str))
    frame.to_csv("h.csv", index=False)
    table = (
        "--data",
        "table:h.csv",
        "--label",
        "ill",
        "--partition",
        "natural:site",
        "--features",
        "age,pressure,ward",
    )
    table += ("--categories", "ward", "--missing", "mean", "--model", "table-mlp")
    shown = call(capsys, "diagnose", *table, "--rounds", 2, "--no-curvature", "--no-cost").out
    assert "6 others" in shown
    assert "ill = yes" in shown
    assert shown.index("largest shifts") < shown.index("label skew") < shown.index("unskew compare")
    found = call(capsys, "diagnose", *table, "--rounds", 2, "--no-curvature", "--no-cost", "--json").json()
    assert len(found["sites"]) == 36
    assert "largest shifts" in call(capsys, "partition", *table[:-2]).out
