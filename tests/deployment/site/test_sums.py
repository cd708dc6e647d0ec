"""Sums that a site rejects from a lying server: few rows in a bin, second requests of a kind, and several last times."""

import numpy as np
import pytest
import torch
from support.sites import TINY, LoopPlace, deployed
from support.survival_rows import survival_experiment, survival_table

from unskew.config.loader import experiment
from unskew.deployment.common.agreement import PROTOCOL, experiment_digest
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.site import sums
from unskew.deployment.site.ledger import SumsLedger
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.sums import encode_requests
from unskew.deployment.wire.tensor_codec import decode_record
from unskew.errors import ConfigError
from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.fisher import effective_rows
from unskew.sums.registry import SUMS
from unskew.tasks.survival_table import time_edges

AGE, LAST = 74.0, 431.0
"""The only patient of the first clinic who is at risk after day 100, and dies."""


def values_of(folder, **options):
    path = folder / "patients.csv"
    survival_table(path)
    return {**TINY, **survival_experiment(path), "max_train_samples": None, **options}


def with_a_lonely_patient(folder, **options):
    values, path = values_of(folder, coefficients=True, **options), folder / "patients.csv"
    head, *lines = path.read_text().splitlines()
    rows = [[*map(float, line.split(","))] for line in lines]
    for clinic, row in ((row[0], row) for row in rows):
        if clinic == 0 and row[2] > 100:
            row[2:] = 100, 0
    next(row for row in rows if row[0] == 0)[1:] = AGE, LAST, 1
    path.write_text("\n".join([head, *(",".join(f"{value:g}" for value in row) for row in rows)]))
    return values


def coefficient_sums(place):
    asked = [one for k, one in place.link.sent if k == 0 and one.kind == "sums" and "fisher" in one.config["requests"]]
    got = [one for k, one in place.link.received if k == 0 and any("information" in name for name in one.arrays)]
    refused = [one.config["reason"] for k, one in place.link.received if k == 0 and one.kind == "refused"]
    return asked, got, refused


def test_hazard_ratios_over_sites_need_masks(tmp_path):
    with pytest.raises(ConfigError, match="Hazard ratios over sites require secure_aggregation: required"):
        deployed(tmp_path, **with_a_lonely_patient(tmp_path))


@pytest.mark.filterwarnings("ignore:Coefficients have no intervals")
def test_a_site_refuses_sums_of_hazards_without_masks(tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.deployment.server.handshake.check_hazard_ratios", lambda *_: None)
    values = with_a_lonely_patient(tmp_path)
    place = LoopPlace(tmp_path, {**TINY, **values})
    result, _ = deployed(tmp_path, place, **values)
    assert "require secure_aggregation: required" in result.summary["coefficients_omitted"]
    _, got, refused = coefficient_sums(place)
    assert not got
    assert "Hazard ratios over sites require secure_aggregation: required" in refused[0]


def test_without_the_check_the_server_reads_this_patient(tmp_path, monkeypatch):
    for side in ("server.handshake", "site.sums"):
        monkeypatch.setattr(f"unskew.deployment.{side}.check_hazard_ratios", lambda *_: None)
    values = with_a_lonely_patient(tmp_path)
    _, place = deployed(tmp_path, **values)
    asked, got, _ = coefficient_sums(place)
    schema = DataSchema.read(asked[0].config)
    cuts, rates, mean = schema.constants["cuts"], schema.constants["rates"], schema.columns[0].mean
    found, beta = decode_record(got[0], "sum.0"), decode_record(asked[0], "args.0")["beta"].numpy()
    last, information = len(cuts) - 1, found["information"].numpy()
    centered = information[last, len(cuts)] / information[last, last]
    time = information[last, last] / (rates[last] * np.exp(beta[last] + beta[len(cuts)] * centered))
    assert centered + mean == pytest.approx(AGE)
    assert cuts[-2] + time == pytest.approx(LAST)
    assert float(found["score"][last]) + information[last, last] == pytest.approx(1)


def test_masked_coefficients_do_not_need_rows_in_each_bin_of_each_site(tmp_path):
    values = with_a_lonely_patient(tmp_path, secure_aggregation="required")
    deployed(tmp_path, **values)
    assert (tmp_path / "run" / "coefficients.json").exists()


def test_the_effective_number_of_rows_is_that_of_all_bins_and_finite():
    """The second bin has 10 of 40 rows at risk."""
    time = torch.cat([torch.full((30,), 1.0), torch.full((10,), 2.0)]).double()
    rows = ClientRows(x=torch.ones(40, 1), y=torch.stack([time, torch.ones(40).double()], 1))
    tensors = {
        "cuts": torch.tensor([1.0, 2.0]).double(),
        "center": torch.zeros(1).double(),
        "beta": torch.zeros(3, dtype=torch.float64),
    }
    for offset in (0.0, 400.0):  # squares of the weights of the second are infinite
        offsets = torch.full((2,), offset).double()
        request = SumRequest("fisher", {"codes": (0,), "kept": [True], "event": 1}, {**tensors, "offsets": offsets})
        assert effective_rows(rows, request) == pytest.approx((30 + 20) ** 2 / (30 + 40))


def asked(process, agreed, schema, requests, **more):
    message = encode_requests(requests)
    about = {
        "digest": experiment_digest(agreed),
        "rounds": agreed.rounds,
        "protocol": PROTOCOL,
        "run": "a" * 16,
        "attempt": 0,
    }
    return process.answer(Frame("sums", {**schema.config(), **about, **message.config, **more}, {}, message.arrays))


def first_schema(place):
    return DataSchema.read(next(one for _, one in place.link.sent if one.kind == "sums").config)


def survival(until, cuts=()):
    return SumRequest("survival", {"until": until, "cuts": [*cuts]})


@pytest.mark.parametrize("bad", [survival(500.0, [56.5, 57.5]), survival(57.0)])
@pytest.mark.parametrize("order", [1, -1])
def test_each_request_of_a_message_is_checked(bad, order, tmp_path):
    values = values_of(tmp_path)
    _, place = deployed(tmp_path, **values)
    answer = asked(place.sites[0], experiment(values), first_schema(place), [bad, survival(500.0)][::order])
    assert answer.kind == "refused"
    assert "does not need the sums survival" in answer.config["reason"]


def test_two_different_requests_of_a_kind_are_refused(tmp_path):
    config = experiment(values_of(tmp_path, survival={}))
    with pytest.raises(ConfigError, match="two different requests for the sums survival"):
        sums.check_needed([survival(1024.0), survival(2048.0)], config)
    sums.check_needed([survival(1024.0), survival(1024.0)], config)


def bracket(place, agreed, schema):
    """Bracket of the largest time of the first site by bisection over refusals, with one session per question."""
    edges, low, high = time_edges(), 0, len(time_edges()) - 1
    answers = []
    while low < high:
        middle = (low + high) // 2
        session = f"s{len(answers)}".ljust(16, "0")
        answer = asked(place.sites[0], agreed, schema, [survival(float(edges[middle]))], session=session)
        answers.append(answer)
        low, high = (middle + 1, high) if answer.kind == "refused" else (low, middle)
    return float(edges[low]), answers


def test_refusals_do_not_depend_on_the_largest_time_of_a_site(tmp_path):
    found = []
    for number, largest in enumerate((832.0, 100.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        values = values_of(folder, survival={}, secure_aggregation="required")
        path = folder / "patients.csv"
        head, *lines = path.read_text().splitlines()
        cells = [line.split(",") for line in lines]
        path.write_text("\n".join([head, *(f"{c},{a},{min(float(t), largest):g},{e}" for c, a, t, e in cells)]))
        place, agreed = LoopPlace(folder, values), experiment(values)
        _, honest = deployed(folder / "h", **values)
        end, answers = bracket(place, agreed, first_schema(honest))
        kinds = [answer.kind for answer in answers]
        found.append((end, kinds, [answer.config.get("reason") for answer in answers]))
        assert kinds.count("ready") == 1  # the site counts up to one time
        assert "already counted its times for this experiment" in answers[1].config["reason"]
    assert found[0] == found[1]


def test_the_last_time_is_kept_until_the_administrator_forgets_it(tmp_path):
    ledger = SumsLedger(tmp_path / "ledger.json", "a" * 16)
    sums.record_fitting([survival(512.0)], ledger, "d" * 64)
    again = SumsLedger(tmp_path / "ledger.json", "b" * 16)  # another run
    sums.record_fitting([survival(512.0)], again, "d" * 64)
    sums.record_fitting([survival(1024.0)], again, "e" * 64)  # another experiment
    with pytest.raises(ConfigError, match="up to another time"):
        sums.record_fitting([survival(1024.0)], again, "d" * 64)
    again.forget()
    sums.record_fitting([survival(1024.0)], again, "d" * 64)


def test_times_after_the_last_one_are_censored_there():
    y = torch.tensor([[100.0, 1.0], [900.0, 1.0]], dtype=torch.float64)
    own = SUMS["survival"].compute(ClientRows(y=y), survival(512.0))
    assert own["events"].sum() == 1
    assert own["ended"][-1] == own["censored"][-1] == 1
    assert own["exposure"].sum() == 612


@pytest.mark.parametrize(
    ("model", "words"), [("proportional", "proportional hazards"), ("logistic", "a logistic regression")]
)
def test_an_administrator_reads_which_regression_needs_sums(model, words, tmp_path):
    values = values_of(tmp_path, coefficients=True)
    if model == "logistic":
        values = {**values, "task": "auto", "label": "dead", "model": model, "survival": {}}
    config = experiment(values)
    lines = sums.describe_sums(ClientRows(), config)
    assert words in lines[-1]
