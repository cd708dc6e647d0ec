"""Mixed tables, numbers to predict, weights of classes: over sites they give the numbers of the simulator."""

import csv
import json

import numpy as np
import pytest
import torch
import yaml
from support.deployed_runs import compare
from support.sites import TINY, LoopPlace, Told, deployed

import unskew
from unskew.config.loader import experiment
from unskew.deployment.common.agreement import PROTOCOL, experiment_digest
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.server import connected_sites
from unskew.deployment.server.config import Deployment
from unskew.deployment.site.check import check_site
from unskew.deployment.site.process import SiteProcess
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import decode_record, encode_record
from unskew.errors import ConfigError, EngineError
from unskew.runs.run import load_federation_for
from unskew.sums.columns import encode_values

pytest.importorskip("pyarrow")
PLAIN = {"max_train_samples": None, "partition": "natural:ward", "clients": None, "local_steps": 2, "holdout": 0.2}
MIXED = {"categories": "auto", "dates": "since", "missing": "indicator", "model": "table-mlp"}
SICK = {"label": "sick", "exclude": "high,low", "class_weights": "balanced", "metrics": "auroc,recall"}
PRESSURE = {"label": "high,low", "task": "regression", "exclude": "sick,since", "loss": "huber:0.5", "missing": "mean"}


def rows_of(ward, count, seed=0):
    """Rows of a ward; gaps in dose, a drug of its own, and nobody of ward a was ever weighed."""
    draws = np.random.default_rng(seed)
    for n in range(count):
        age = 20 + int(draws.integers(60))
        yield {
            "ward": ward,
            "age": age,
            "dose": "" if n % 5 == 0 else f"{draws.normal(1e3, 2):.3f}",
            "weight": "" if ward == "a" else f"{draws.normal(80, 9):.1f}",
            "drug": "" if n % 11 == 0 else f"{ward}{n % 2}",
            "since": "" if n == 7 else f"2024-{1 + n % 12:02}-{1 + n % 28:02}",
            "high": f"{100 + age / 2 + draws.normal():.2f}",
            "low": f"{60 + age / 4 + draws.normal():.2f}",
            "sick": "yes" if age > 50 else "no",
        }


def write(path, rows, left_out=()):
    rows = [{name: value for name, value in row.items() if name not in left_out} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "wards.csv"
    write(path, [row for seed, ward in enumerate("abc") for row in rows_of(ward, 30, seed)])
    return {**PLAIN, "data": f"table:{path}"}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(SICK | MIXED, id="mixed columns, weights, metrics"),
        pytest.param(PRESSURE, id="two numbers", marks=pytest.mark.slow),
    ],
)
def test_a_table_gives_the_numbers_of_the_simulator(asked, table, tmp_path):
    """Bit for bit, the bytes of the sums included; the columns that a run folder keeps are the same, too."""
    values = {**TINY, **table, **asked}
    compare(tmp_path, LoopPlace(tmp_path, values, 3), **{**table, **asked})
    one, other = ((tmp_path / name / "inputs.json").read_text() for name in ("run", "simulated"))
    assert one == other


DRUGS = {"drug": [f"{ward}{n}" for ward in "abc" for n in (0, 1)]}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(SICK | MIXED | {"categories": DRUGS}, id="mixed columns, weights"),
        pytest.param(PRESSURE | {"categories": DRUGS}, id="two numbers", marks=pytest.mark.slow),
    ],
)
def test_masked_sums_settle_the_columns_that_plain_sums_settle(asked, table, tmp_path):
    """Means of masked sums are rounded once, those of plain sums after each site; class counts of one site are not sent."""
    values = {**TINY, **table, **asked}
    place = LoopPlace(tmp_path, {**values, "secure_aggregation": "required"}, 3)
    plain = unskew.run(out=tmp_path / "plain", **values)
    values |= {"secure_aggregation": "required"}
    masked, _ = deployed(tmp_path, place, Deployment(startup_timeout=0.5), **values)
    one, other = (json.loads((tmp_path / name / "inputs.json").read_text()) for name in ("run", "plain"))
    for mine, theirs in zip(one["columns"], other["columns"], strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-13) if isinstance(v, float) else v for k, v in theirs.items()}
    torch.testing.assert_close(masked.vector, plain.vector, rtol=1e-4, atol=1e-5)
    assert not any(frame.arrays for _, frame in place.link.received if frame.kind == "client_info")
    assert not [frame for _, frame in place.link.received if frame.kind == "sums"]


def wards(tmp_path, **asked):
    """A pilot table at the server, three sites with tables of their own, and the experiment."""
    write(tmp_path / "pilot.csv", [row for ward in "bc" for row in rows_of(ward, 20, 9)])
    values = {**TINY, **PLAIN, "partition": "iid", "clients": 3, "data": f"table:{tmp_path / 'pilot.csv'}"}
    values |= {"exclude": "ward,high,low", "label": "sick", **MIXED, **asked}
    place = LoopPlace(tmp_path, values)
    data = {"source": "table:own.csv", "label": values["label"]}
    for client, ward in enumerate("abc"):
        path = tmp_path / "sites" / str(client) / "site.yaml"
        write(path.parent / "own.csv", rows_of(ward, 40, client))
        site = {"name": f"ward-{ward}", "client": client, "data": data, "roster": str(tmp_path / "roster.txt")}
        path.write_text(yaml.safe_dump(site))
        place.sites[client] = SiteProcess(path, log=lambda line: None)
    return place, values


def own(tmp_path, place, values, told=None, **options):
    return deployed(tmp_path, place, Deployment(startup_timeout=0.5, own_data=True, **options), told, **values)


def test_sites_with_tables_of_their_own_settle_columns_by_sums(tmp_path):
    """The server fits encoders to the training rows of all sites, also to categories that its own table lacks."""
    place, values = wards(tmp_path, class_weights="balanced")
    own(tmp_path, place, values)
    columns = {one["name"]: one for one in json.loads((tmp_path / "run" / "inputs.json").read_text())["columns"]}
    trained = [
        site.experiments.samples(digest, site.experiments._trainer[1].reference)
        for site in place.sites
        for digest in site.experiments.configs
    ]
    names = [one.name for one in trained[0].source.encoders]
    for name in ("age", "dose", "weight"):
        pooled = np.concatenate([one.train.x.numpy()[:, names.index(name)] for one in trained]).astype(np.float64)
        assert columns[name]["mean"] == pytest.approx(np.nanmean(pooled))
        assert columns[name]["std"] == pytest.approx(np.nanstd(pooled))
        assert columns[name]["marks"] == bool(np.isnan(pooled).any())
    assert set(columns["drug"]["values"]) == {f"{ward}{n}" for ward in "abc" for n in (0, 1)}
    weights = {site.experiments._trainer[1].original.objective.weights for site in place.sites}
    assert len(weights) == 1
    assert weights != {(1.0, 1.0)}
    kinds = {name.partition("/")[0] for _, frame in place.link.received for name in frame.arrays}
    assert kinds <= {"sum.0", "sum.1", "update", "upload"}


UNMIXED = {"categories": (), "dates": (), "missing": "error", "features": "age", "exclude": ()}


@pytest.mark.parametrize(
    ("asked", "deployment", "words"),
    [
        ({"secure_aggregation": "required"}, {}, "categories: {drug: "),
        ({}, {"quorum": 2}, "no site can join later"),
        pytest.param({**UNMIXED, "class_weights": "balanced"}, {"quorum": 2}, "to a list", marks=pytest.mark.slow),
    ],
)
def test_what_sums_do_not_go_with_is_refused_before_the_start(asked, deployment, words, tmp_path):
    place, values = wards(tmp_path, **asked)
    with pytest.raises(ConfigError, match=words):
        own(tmp_path, place, values, **deployment)
    assert place.link.sent == []


@pytest.mark.parametrize(
    ("asked", "column", "kind", "words"),
    [
        ({"features": "age,dose"}, "weight", "number", "not in features"),
        ({"categories": "auto", "dates": "since"}, "age", "category", "not in categories"),
    ],
)
def test_a_server_cannot_select_other_columns_than_the_experiment(asked, column, kind, words, tmp_path):
    """Values of a category, such as the names of patients, would leave the site."""
    values = {"exclude": "ward,high,low", "missing": "mean", **asked}
    place, values = wards(tmp_path, **values)
    config = experiment({**TINY, **values})
    schema = DataSchema.of(load_federation_for(config, ())).open.config()
    schema["columns"] = json.dumps([{**json.loads(schema["columns"])[0], "name": column, "kind": kind, "values": []}])
    about = {
        "protocol": PROTOCOL,
        "run": "0123456789abcdef",
        "attempt": 0,
        "digest": experiment_digest(config),
        "rounds": config.rounds,
    }
    answer = place.sites[1].answer(Frame("hello", {**about, **schema}))
    assert answer.kind == "refused"
    assert words in answer.config["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("column", ["dose", "sick"])
def test_a_site_that_lacks_a_column_is_refused_in_a_sentence(column, tmp_path):
    place, values = wards(tmp_path)
    write(tmp_path / "sites" / "1" / "own.csv", rows_of("b", 40), [column])
    with pytest.raises(EngineError, match=f"A site rejected the run: .*'{column}'"):
        own(tmp_path, place, values)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def spoilt(name, tensor):
    """The reply with another tensor in it."""
    record, _, short = name.rpartition("/")
    return lambda f: Frame(f.kind, f.config, f.metrics, f.arrays | encode_record(record, {short: tensor}))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("sum.0/counts", spoilt("sum.0/counts", torch.full((4,), 10**6)), "more rows than its"),
        slow("sum.0/counts", spoilt("sum.0/sums", torch.full((4,), float("nan"), dtype=torch.float64)), "not finite"),
        slow("sum.0/counts", spoilt("sum.1/values.0", encode_values(["x", "x"])), "categories"),
        slow(
            "sum.0/squares", spoilt("sum.0/squares", torch.full((4,), -1.0, dtype=torch.float64)), "squares is negative"
        ),
        slow("sum.0/squares", lambda f: Frame("sums", f.config), "have other names than squares"),
        slow("sum.0/counts", spoilt("sum.0/sums", torch.full((4,), 1e300, dtype=torch.float64)), "larger than 1e"),
    ],
)
def test_sums_that_cannot_be_exclude_their_site_and_the_others_have_the_columns_of_a_run_without_it(
    name, change, words, tmp_path
):
    place, values = wards(tmp_path)
    told = Told()
    place.link.spoil = lambda client, asked, answer: change(answer) if client == 1 and name in answer.arrays else answer
    result, _ = own(tmp_path, place, values, told)
    assert words in " ".join(told.warnings)
    assert "ward-b (client 1)" in told.warnings[0]
    assert [row["updates"] for row in result.history] == [2, 2]
    assert result.history[-1]["sites_excluded"] == 1
    columns = {one["name"]: one for one in json.loads((tmp_path / "run" / "inputs.json").read_text())["columns"]}
    trained = [
        place.sites[k].experiments.samples(d, place.sites[k].experiments._trainer[1].reference)
        for k in (0, 2)
        for d in place.sites[k].experiments.configs
    ]
    names = [one.name for one in trained[0].source.encoders]
    pooled = np.concatenate([one.train.x.numpy()[:, names.index("dose")] for one in trained]).astype(np.float64)
    assert columns["dose"]["std"] == pytest.approx(np.nanstd(pooled))


def test_counts_of_classes_that_cannot_be_exclude_their_site_and_weights_are_those_of_the_others(tmp_path):
    place, values = wards(tmp_path, class_weights="balanced")
    told, counts = Told(), {}

    def spoil(client, asked, answer):
        if not any(name.startswith("sum.") and name.endswith("/counts") for name in answer.arrays):
            return answer
        sums = decode_record(answer, "sum.0")
        if sums.keys() != {"counts"} or len(sums["counts"]) != 2:
            return answer  # sums of columns
        counts[client] = sums["counts"]
        return spoilt("sum.0/counts", torch.full((2,), 10**6))(answer) if client == 1 else answer

    place.link.spoil = spoil
    result, _ = own(tmp_path, place, values, told)
    assert "ward-b (client 1)" in told.warnings[0]
    assert [row["updates"] for row in result.history] == [2, 2]
    assert result.history[-1]["sites_excluded"] == 1
    remaining = (counts[0] + counts[2]).double()
    expected = (remaining.sum() / (2 * remaining)).tolist()
    weights = {place.sites[k].experiments._trainer[1].original.objective.weights for k in (0, 2)}
    assert len(weights) == 1
    assert weights.pop() == pytest.approx(expected)


def test_a_site_that_is_excluded_in_the_first_sums_has_no_traffic_of_statistics(tmp_path, monkeypatch):
    place, values = wards(tmp_path, class_weights="balanced")
    traffic, agree = [], connected_sites.agree_on_data_and_model

    def watched(*arguments):
        federation, spec = agree(*arguments)
        traffic.append(federation.stats_traffic)
        return federation, spec

    monkeypatch.setattr(connected_sites, "agree_on_data_and_model", watched)
    change = spoilt("sum.0/counts", torch.full((4,), 10**6))
    place.link.spoil = lambda client, asked, answer: (
        change(answer) if client == 1 and "sum.0/counts" in answer.arrays else answer
    )
    result, _ = own(tmp_path, place, values)
    assert [row["updates"] for row in result.history] == [2, 2]
    assert traffic[0].shape == (3, 2)
    assert traffic[0][1].tolist() == [0, 0]
    assert (traffic[0][[0, 2]] > 0).all()


def test_the_administrator_sees_what_sums_leave(tmp_path):
    wards(tmp_path)
    found = [one.text for one in check_site(tmp_path / "sites" / "1" / "site.yaml") if one.what == "sent once"]
    assert any("age, dose, weight, since" in text and "96 bytes" in text for text in found)
    assert any("category drug: b0, b1" in text for text in found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "flora:ranks=2/1", "fedsa", "fedex", "hetlora:ranks=2/1"])
def test_texts_without_labels_give_the_numbers_of_the_simulator(method, tmp_path):
    """Sites send only their number of texts. With FLoRA and HetLoRA, they send factors of unequal rank."""
    pytest.importorskip("peft")
    from support.tiny import opt_folder, rows, write_jsonl

    for name, some in (("train", rows(36)), ("test", rows(12, seed=1))):
        (tmp_path / "texts").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "texts" / f"{name}.jsonl", some)
    asked = {
        "data": f"text:{tmp_path / 'texts'}",
        "text": {"columns": ["premise", "hypothesis"], "block": 14},
        "model": {"hf": str(opt_folder(tmp_path / "opt"))},
        "method": method,
        "partition": "sorted:genre",
        "max_train_samples": None,
    }
    if method != "fedavg":
        asked["model"]["lora"] = {"r": 2, "targets": ["q_proj", "fc1"]}
    result, place = compare(tmp_path, **asked)
    assert result.summary["perplexity"] > 1
    assert not any(frame.arrays for _, frame in place.link.received if frame.kind == "client_info")


@pytest.mark.slow
def test_several_labels_give_the_numbers_of_the_simulator(tmp_path):
    draws = np.random.default_rng(0).normal(size=(60, 3))
    made = [{"a": a, "b": b, "c": c, "y": "|".join(n for n, v in (("x", a), ("z", b)) if v > 0)} for a, b, c in draws]
    write(tmp_path / "labels.csv", made)
    asked = {"data": f"table:{tmp_path / 'labels.csv'}", "label": "y", "label_separator": "|", "partition": "iid"}
    compare(tmp_path, **asked, max_train_samples=None)
