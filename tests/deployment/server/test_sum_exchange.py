"""Federated sums over sites, in plain and under masks, and the attack that their ledger stops."""

import json
import re

import numpy as np
import pytest
import torch
from support.sites import TINY, LoopPlace, Told, deployed

import unskew
from unskew.config.loader import experiment
from unskew.deployment.common.agreement import PROTOCOL, experiment_digest
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.server.config import RoundPolicy
from unskew.deployment.server.connection import SiteConnection
from unskew.deployment.server.masked_sum import MaskedSum
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.server.sum_exchange import SiteExchange, reported_sizes
from unskew.deployment.site.ledger import SumsLedger
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.sums import encode_requests
from unskew.deployment.wire.tensor_codec import encode_record
from unskew.errors import EngineError
from unskew.runs.coefficients import Design
from unskew.runs.run import load_federation_for
from unskew.sums.base import SumRequest

RUNS = ("0123456789abcdef", "fedcba9876543210")


def exchange_over(folder, clients, masked=True, run=RUNS[0], place=None):
    """An exchange over some of four sites, as a server opens it, and where they are."""
    values = {**TINY, "clients": 4, "class_weights": "balanced", "secure_aggregation": "required" if masked else "off"}
    place, config = place or LoopPlace(folder, values), experiment(values)
    federation = load_federation_for(config, ())
    header = {"digest": experiment_digest(config), "rounds": config.rounds, **DataSchema.of(federation).config()}
    sites = SiteManager(SiteConnection(place.link, None, run, header), 4, RoundPolicy(), lambda text: None)
    for client in clients:
        sites.admit(client, 100 + client, f"site-{client}", "", "")
    frames = {k: Frame("client_info", {"num_samples": federation.num_samples(k)}) for k in clients}
    return SiteExchange(sites, reported_sizes(frames), masked, place.roster()), place, federation


CLASSES = [SumRequest("classes", {"classes": 10})]


@pytest.mark.parametrize("masked", [True, False])
def test_sums_over_sites_are_those_of_all_rows(masked, tmp_path):
    exchange, place, federation = exchange_over(tmp_path, range(4), masked)
    expected = torch.bincount(torch.cat([client.y for client in federation.clients]), minlength=10)
    assert exchange(CLASSES)[0]["counts"].tolist() == expected.tolist()
    assert exchange.traffic.tolist() == [[80, 0]] * 4
    plain = [frame for _, frame in place.link.received if frame.kind == "sums"]
    assert len(plain) == (0 if masked else 4)


def opened(exchange):
    return exchange(CLASSES)[0]["counts"]


def difference(folder, run, again=CLASSES):
    """What a server learns of site 3 from the masked sums with it and without it, in the same run or in two."""
    everyone, place, federation = exchange_over(folder, range(4))
    total = opened(everyone)
    rest, _, _ = exchange_over(folder, range(3), run=run, place=place)
    return total - rest(again)[0]["counts"], torch.bincount(federation.clients[3].y, minlength=10)


def test_sums_that_were_opened_with_clients_of_another_experiment_are_named(tmp_path):
    exchange, place, _ = exchange_over(tmp_path, range(4))
    for site in place.sites:
        SumsLedger(site.folder / "state" / "ledger.json", RUNS[1]).record(-1, (0, 1, 2, 3, 5), "")
    with pytest.raises(EngineError, match=r"site-3 \(client 3\), client 5, of which .* run unskew deploy forget"):
        exchange(CLASSES)


@pytest.mark.parametrize("masked", [True, False])
def test_sums_that_are_too_large_are_not_added(masked, tmp_path):
    """Under masks, they could not be told from others."""
    values = clinics(tmp_path, secure_aggregation="required" if masked else "off")
    rows = (tmp_path / "rows.csv").read_text().replace("\n40,", "\n1e30,", 1)
    (tmp_path / "rows.csv").write_text(rows)
    place, told = LoopPlace(tmp_path, values, 3), Told()
    if masked:
        with pytest.raises(EngineError, match=r"a sum is larger than 1e\+15; divide the column by a power of ten"):
            deployed(tmp_path, place, told=told, **values)
        return
    deployed(tmp_path, place, told=told, **values)
    assert "divide the column by a power of ten" in " ".join(told.warnings)


@pytest.mark.parametrize("run", RUNS)
def test_the_same_sums_without_one_site_are_not_opened(run, tmp_path, monkeypatch):
    with pytest.raises(EngineError, match="opened before over site-0"):
        difference(tmp_path / "kept", run)
    monkeypatch.setattr(MaskedSum, "_as_before", lambda self, ready: ready)  # a server that does not care
    for number, again in enumerate((CLASSES, CLASSES * 2)):  # the same statistic in another list
        with pytest.raises(EngineError, match="could not be opened"):
            difference(tmp_path / str(number), run, again)
    monkeypatch.setattr(SumsLedger, "check", lambda self, round, clients, model: None)
    monkeypatch.setattr(SumsLedger, "opened", lambda self, round: ())
    learned, own = difference(tmp_path / "off", run)
    assert learned.tolist() == own.tolist()


def test_sums_of_fewer_than_three_sites_are_not_masked(tmp_path):
    exchange, _, _ = exchange_over(tmp_path, range(2))
    with pytest.raises(EngineError, match="at least 3"):
        exchange(CLASSES)


def test_a_site_that_sends_its_sums_in_plain_is_left_out_of_masks(tmp_path):
    exchange, place, _ = exchange_over(tmp_path, range(4))
    place.link.spoil = lambda client, asked, answer: Frame("sums", answer.config) if client == 1 else answer
    with pytest.raises(EngineError, match="could not be opened"):
        exchange(CLASSES)


def clinics(folder, **options):
    """Values of an experiment with a table of three wards."""
    rows = [f"{40 + 7 * k % 30},{k % 4},{'abc'[k % 3]},{'yes' if (7 * k * k) % 11 < 5 else 'no'}" for k in range(120)]
    (folder / "rows.csv").write_text("\n".join(["age,dose,ward,outcome", *rows]))
    about = {"data": f"table:{folder / 'rows.csv'}", "label": "outcome", "partition": "natural:ward", "clients": None}
    return {**TINY, **about, "max_train_samples": None, "missing": "mean", **options}


def asked_at_a_site(folder, request, **options):
    """Reply of a site to one request for sums, with the schema of the experiment."""
    values = clinics(folder, **options)
    place, config = LoopPlace(folder, values, 3), experiment(values)
    schema = DataSchema.of(load_federation_for(config, ())).config()
    about = {
        "protocol": PROTOCOL,
        "run": RUNS[0],
        "attempt": 0,
        "digest": experiment_digest(config),
        "rounds": config.rounds,
        **schema,
    }
    message = encode_requests([request])
    return place.sites[0].answer(Frame("sums", {**message.config, **about}, {}, message.arrays))


def coefficients_request(beta=(0.0, 0.0, 0.0), event=1, codes=(0, 0)):
    tensors = {"center": torch.zeros(2, dtype=torch.float64), "beta": torch.tensor(beta, dtype=torch.float64)}
    return SumRequest("fisher", {"codes": codes, "kept": [True, True], "event": event}, tensors)


@pytest.mark.parametrize(
    ("request_", "options", "words"),
    [
        (coefficients_request(event=0), {"coefficients": True}, "columns or the event"),
        (coefficients_request(codes=(2, 0)), {"coefficients": True}, "not those of the data schema"),
        (coefficients_request(), {"coefficients": True}, "columns or the event"),  # other means
        (coefficients_request(), {}, "does not need the sums fisher"),
        (SumRequest("classes", {"classes": 2}), {}, "does not need the sums classes"),
        (SumRequest("classes", {"classes": 10**9}), {"class_weights": "balanced"}, "not those of the data schema"),
        (SumRequest("residuals", {}), {}, "does not need the sums residuals"),
        (SumRequest("class_counts", {"classes": 2}), {}, "sets allow: \\[counts\\]"),
    ],
)
def test_a_site_computes_only_sums_of_its_experiment(request_, options, words, tmp_path):
    answer = asked_at_a_site(tmp_path, request_, **options)
    assert answer.kind == "refused"
    assert re.search(words, answer.config["reason"])


def test_coefficients_that_single_out_a_row_are_refused(tmp_path):
    values = clinics(tmp_path, coefficients=True)
    config = experiment(values)
    federation = load_federation_for(config, ())
    beta = np.array([300.0, 30.0, 0.0])  # only a row of one age has a weight
    for number, (steep, kind) in enumerate(((0.0, "sums"), (1.0, "refused"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        request = Design(federation).request(1, steep * beta)
        assert asked_at_a_site(folder, request, coefficients=True).kind == kind


@pytest.mark.parametrize("masked", [True, False])
def test_a_run_ends_without_the_coefficients_that_a_site_refuses(masked, tmp_path):
    """The age separates the outcomes, so few rows determine the sums, but no site has sent anything wrong."""
    values = clinics(tmp_path, coefficients=True, secure_aggregation="required" if masked else "off")
    rows = [f"{40 + (37 * k % 97) / 3:.2f},{k % 4},{'abc'[k % 3]}" for k in range(120)]
    rows = [f"{row},{'yes' if float(row.split(',')[0]) > 56 else 'no'}" for row in rows]
    (tmp_path / "rows.csv").write_text("\n".join(["age,dose,ward,outcome", *rows]))
    told = Told()
    result, _ = deployed(tmp_path, LoopPlace(tmp_path, values, 3), told=told, **values)
    assert "Fewer than 5 rows of this site" in result.summary["coefficients_omitted"]
    assert not (tmp_path / "run" / "coefficients.json").exists()
    assert "excluded" not in " ".join(told.warnings)


@pytest.mark.parametrize("masked", ["off", "required"])
def test_coefficients_over_sites_are_those_of_the_simulation(masked, tmp_path):
    values = clinics(tmp_path, coefficients=True, secure_aggregation=masked)
    deployed(tmp_path, LoopPlace(tmp_path, values, 3), **values)
    unskew.run(out=tmp_path / "simulated", **values)
    sites, simulated = (json.loads((tmp_path / n / "coefficients.json").read_text()) for n in ("run", "simulated"))
    for one, other in zip(sites.pop("coefficients"), simulated.pop("coefficients"), strict=True):
        assert one == {k: pytest.approx(v, rel=1e-9) if isinstance(v, float) else v for k, v in other.items()}
    assert sites.pop("log_likelihood") == pytest.approx(simulated.pop("log_likelihood"), rel=1e-12)
    assert sites == simulated


def test_coefficients_are_those_of_the_remaining_sites_if_one_sends_invalid_sums(tmp_path):
    values = clinics(tmp_path, coefficients=True)
    place, told = LoopPlace(tmp_path, values, 3), Told()
    asked_before = []

    def spoil(client, asked, answer):
        if client != 1 or "sum.0/information" not in answer.arrays:
            return answer
        asked_before.append(client)
        if len(asked_before) < 3:
            return answer
        wrong = encode_record("sum.0", {"information": torch.full((3, 3), float("nan"), dtype=torch.float64)})
        return Frame(answer.kind, answer.config, answer.metrics, answer.arrays | wrong)

    place.link.spoil = spoil
    deployed(tmp_path, place, told=told, **values)
    assert any("site-1 (client 1)" in text for text in told.warnings)
    found = json.loads((tmp_path / "run" / "coefficients.json").read_text())
    remaining = [load_federation_for(experiment(values), ()).clients[k] for k in (0, 2)]
    x, y = (torch.cat([getattr(client, name) for client in remaining]).double().numpy() for name in "xy")
    assert found["rows"] == len(x)
    design = np.column_stack([np.ones(len(x)), x])
    beta = np.zeros(3)
    for _ in range(25):
        p = 1 / (1 + np.exp(-design @ beta))
        beta += np.linalg.solve(design.T * (p * (1 - p)) @ design, design.T @ (y - p))
    assert [row["coefficient"] for row in found["coefficients"]] == pytest.approx(beta.tolist(), rel=1e-6)
