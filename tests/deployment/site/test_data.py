"""Sites with samples of their own: their classes get the server's numbers, and what does not fit is said."""

import csv

import numpy as np
import pytest
import yaml
from support.sites import TINY, LoopPlace, deployed

from unskew.deployment.server.config import Deployment
from unskew.deployment.site.process import SiteProcess
from unskew.errors import EngineError

NAMES = ("mild", "none", "severe")
DRAWS = np.random.default_rng(0)
RULE = DRAWS.normal(size=(4, 3))


def table(path, rows, names=NAMES, columns=("age", "weight", "pulse", "dose")):
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*columns, "outcome"])
        for x in DRAWS.normal(size=(rows, 4)):
            name = NAMES[int((x @ RULE).argmax())]
            if name in names:
                out.writerow([*x[: len(columns)], name])


def clinics(tmp_path, own):
    """A reference at the server, three sites, and for each site its table and what differs of its configuration."""
    table(tmp_path / "reference.csv", 120)
    values = {k: v for k, v in TINY.items() if k != "max_train_samples"}
    values |= {"data": f"table:{tmp_path / 'reference.csv'}", "label": "outcome", "partition": "iid"}
    values |= {"rounds": 6, "lr": 0.5, "local_steps": 20}
    place = LoopPlace(tmp_path, values)
    for client, options in enumerate(own):
        path = tmp_path / "sites" / str(client) / "site.yaml"
        table(path.parent / "own.csv", 150, **options)
        data = {"source": "table:own.csv", "label": "outcome"}
        path.write_text(yaml.safe_dump({"name": f"clinic-{client}", "client": client, "data": data}))
        place.sites[client] = SiteProcess(path, log=lambda line: None)
    return place, values


def test_sites_train_on_tables_of_their_own(tmp_path):
    """One of them lacks a class, so its own numbering differs from that of the server."""
    place, values = clinics(tmp_path, [{"names": ("none", "severe")}, {}, {"names": ("mild", "severe")}])
    result, _ = deployed(
        tmp_path, place, Deployment(startup_timeout=0.5, own_data=True), **{"max_train_samples": None, **values}
    )
    assert result.summary["accuracy"] > 0.7
    assert [row["name"] for row in result.clients] == ["clinic-0", "clinic-1", "clinic-2"]
    held = [row["samples"] + row["num_held_out"] for row in result.clients]
    assert held == [len((tmp_path / "sites" / str(k) / "own.csv").read_text().splitlines()) - 1 for k in range(3)]
    assert not any(name.startswith(("share", "sent")) for _, frame in place.link.received for name in frame.arrays)


def test_a_site_with_other_columns_is_refused(tmp_path):
    place, values = clinics(tmp_path, [{}, {"columns": ("age", "weight")}, {}])
    with pytest.raises(EngineError, match=r"clinic-1 has data with shape \(2,\), but the server's have \(4,\)"):
        deployed(
            tmp_path, place, Deployment(startup_timeout=0.5, own_data=True), **{"max_train_samples": None, **values}
        )


def test_a_site_with_a_class_that_the_server_does_not_know_is_refused(tmp_path):
    place, values = clinics(tmp_path, [{}, {}, {}])
    own = tmp_path / "sites" / "1" / "own.csv"
    own.write_text(own.read_text().replace("severe", "fatal"))
    with pytest.raises(EngineError, match="clinic-1 has samples of class 'fatal', which the server does not know"):
        deployed(
            tmp_path, place, Deployment(startup_timeout=0.5, own_data=True), **{"max_train_samples": None, **values}
        )


def test_texts_of_sites_may_be_longer_than_those_of_the_server(tmp_path):
    """All are at most ``text.block`` tokens long, which both sides have agreed to."""

    def texts(path, more):
        rows = [f"{'good' if k % 2 else 'bad'} day{' indeed' * more},{k % 2}\n" for k in range(60)]
        path.write_text("text,label\n" + "".join(rows))

    texts(tmp_path / "pilot.csv", 1)
    values = {name: value for name, value in TINY.items() if name != "max_train_samples"}
    values |= {"data": f"text:{tmp_path / 'pilot.csv'}", "label": "label", "partition": "iid", "model": "text-mlp"}
    values |= {"text": {"tokenizer": "bytes", "block": 40}, "rounds": 3, "local_steps": 20, "lr": 1.0}
    place = LoopPlace(tmp_path, values)
    for client in range(3):
        path = tmp_path / "sites" / str(client) / "site.yaml"
        texts(path.parent / "own.csv", client)
        data = {"source": "text:own.csv", "label": "label"}
        path.write_text(yaml.safe_dump({"name": f"clinic-{client}", "client": client, "data": data}))
        place.sites[client] = SiteProcess(path, log=lambda line: None)
    result, _ = deployed(
        tmp_path, place, Deployment(startup_timeout=0.5, own_data=True), **{"max_train_samples": None, **values}
    )
    assert [row["updates"] for row in result.history] == [3, 3, 3]
    assert result.summary["client_accuracy_worst"] == 1
