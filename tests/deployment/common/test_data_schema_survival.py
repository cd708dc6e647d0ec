"""Survival over sites: bins and hazards settled by sums give the numbers of the simulator, also under masks."""

import csv
import json

import numpy as np
import pytest
import torch
import yaml
from support.deployed_runs import compare
from support.sites import TINY, LoopPlace, deployed

import unskew
from unskew.deployment.server.config import Deployment
from unskew.deployment.site.process import SiteProcess

pytest.importorskip("pyarrow")
ASKED = {
    "max_train_samples": None,
    "partition": "natural:ward",
    "clients": None,
    "local_steps": 2,
    "holdout": 0.2,
    "task": "survival",
    "label": "days,vital",
    "survival": {"event": "Dead", "bins": 3},
    "model": "proportional",
}


def write(path, wards, seed=0):
    """Rows of wards with exponential times, of which a third is censored."""
    draws = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["ward", "age", "dose", "days", "vital"])
        for ward in wards:
            for _ in range(40):
                age, dose = 20 + int(draws.integers(60)), draws.normal()
                time, censored = draws.exponential(200 - 2 * age), draws.exponential(200)
                vital = "Dead" if time <= censored else "Alive"
                out.writerow([ward, age, f"{dose:.3f}", f"{min(time, censored):.2f}", vital])


@pytest.fixture
def table(tmp_path):
    write(tmp_path / "wards.csv", "abc")
    return {**ASKED, "data": f"table:{tmp_path / 'wards.csv'}"}


def test_survival_over_sites_gives_the_numbers_of_the_simulator(table, tmp_path):
    compare(tmp_path, LoopPlace(tmp_path, {**TINY, **table}, 3), **table)
    one, other = ((tmp_path / name / "inputs.json").read_text() for name in ("run", "simulated"))
    assert one == other


def test_masked_sums_settle_the_bins_that_plain_sums_settle(table, tmp_path):
    values = {**TINY, **table}
    place = LoopPlace(tmp_path, {**values, "secure_aggregation": "required"}, 3)
    plain = unskew.run(out=tmp_path / "plain", **values)
    masked, _ = deployed(tmp_path, place, Deployment(startup_timeout=0.5), **values, secure_aggregation="required")
    one, other = (json.loads((tmp_path / name / "inputs.json").read_text()) for name in ("run", "plain"))
    for name, numbers in other["constants"].items():
        assert one["constants"][name] == pytest.approx(numbers, rel=1e-12)
    torch.testing.assert_close(masked.vector, plain.vector, rtol=1e-4, atol=1e-5)
    assert not [frame for _, frame in place.link.received if frame.kind == "sums"]


def test_sites_with_tables_of_their_own_settle_bins_by_sums(tmp_path):
    write(tmp_path / "pilot.csv", "a", 9)
    values = {**TINY, **ASKED, "partition": "iid", "clients": 3, "data": f"table:{tmp_path / 'pilot.csv'}"}
    values |= {"exclude": "ward"}
    place = LoopPlace(tmp_path, values)
    data = {"source": "table:own.csv", "label": "days,vital"}
    for client, ward in enumerate("abc"):
        path = tmp_path / "sites" / str(client) / "site.yaml"
        write(path.parent / "own.csv", ward, client)
        site = {"name": f"ward-{ward}", "client": client, "data": data, "roster": str(tmp_path / "roster.txt")}
        path.write_text(yaml.safe_dump(site))
        place.sites[client] = SiteProcess(path, log=lambda line: None)
    deployed(tmp_path, place, Deployment(startup_timeout=0.5, own_data=True), **values)
    constants = json.loads((tmp_path / "run" / "inputs.json").read_text())["constants"]
    trained = [
        site.experiments.samples(digest, site.experiments._trainer[1].reference).train.y
        for site in place.sites
        for digest in site.experiments.configs
    ]
    time, event = torch.cat(trained).numpy().T
    low = 0.0
    for cut, rate in zip(constants["cuts"], constants["rates"], strict=True):
        inside = (time > low) & (time <= cut)
        exposure = np.clip(time - low, 0, cut - low).sum()
        assert rate == pytest.approx(event[inside].sum() / exposure)
        low = cut
    assert constants["cuts"][-1] >= time.max()
