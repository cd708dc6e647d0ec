"""Noise at real sites: the same numbers as in a simulation, and nothing else that depends on a site's data leaves it."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.site_faults import with_patience
from support.sites import TINY, LoopPlace, Told, deployed

import unskew
from unskew.config.loader import experiment
from unskew.deployment.server.config import Deployment
from unskew.deployment.site.check import check_site, statistics_findings
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.data import load_site_data
from unskew.deployment.wire.frames import Frame
from unskew.engines import optimizers
from unskew.errors import ConfigError
from unskew.methods import dp_sites
from unskew.seeding import numpy_generator
from unskew.sums.base import Arguments, SumKind
from unskew.sums.registry import SUMS

PRIVATE = {
    "method": "dp:noise=0.01,clip=0.1,adaptive=false,noise_at=sites,honest=3",
    "secure_aggregation": "required",
    "clients": 4,
}
RANDOM = {"keys", "signature", "sealed", "commitments", "shares", "session", "clock", "model", "key"}
"""Fields of random keys, their signatures and shares, of the clock, and of the digest of the model."""


pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture
def from_seed(monkeypatch):
    monkeypatch.setattr(
        dp_sites, "uniform_source", lambda ctx: numpy_generator(ctx.seed, "site noise", ctx.round, ctx.client).random
    )


@pytest.mark.parametrize("method", [PRIVATE["method"], f"scaffold+{PRIVATE['method']}", f"fedrep+{PRIVATE['method']}"])
def test_sites_with_the_noise_of_a_simulation_give_its_model(from_seed, method, tmp_path):
    values = {**PRIVATE, "method": method, "model": "mlp" if "fedrep" in method else "logistic"}
    result, _ = deployed(tmp_path, **values)
    simulated = unskew.run(**{**TINY, **values})
    assert torch.equal(result.vector, simulated.vector)
    assert [row["epsilon"] for row in result.history] == [row["epsilon"] for row in simulated.history]
    assert result.summary["privacy"] == simulated.summary["privacy"]
    assert result.summary["bytes_up"] == simulated.summary["bytes_up"]


def test_noise_of_sites_is_not_that_of_the_seed(tmp_path):
    strong = {**PRIVATE, "method": PRIVATE["method"].replace("noise=0.01", "noise=1"), "rounds": 1}
    result, _ = deployed(tmp_path / "a", **strong)
    again, _ = deployed(tmp_path / "b", **strong)
    assert float((result.vector - again.vector).abs().max()) > 0.01
    simulated = unskew.run(**{**TINY, **strong})
    start = unskew.run(**{**TINY, "clients": 4, "rounds": 1, "lr": 1e-30}).vector
    deviations = [float((vector - start).std()) for vector in (result.vector, again.vector, simulated.vector)]
    size = len(start)  # the noise is much larger than the updates
    assert deviations == pytest.approx([0.1 * (4 / 3) ** 0.5 / 4] * 3, rel=6 / (2 * size) ** 0.5)


def messages(place):
    """All that a site sends without a mask, without what is random anyway."""
    sent = []
    for client, frame in place.link.received:
        config = {name: value for name, value in frame.config.items() if name not in RANDOM}
        arrays = {n: blob.data for n, blob in frame.arrays.items() if frame.kind != "masked"}
        sent.append((client, frame.kind, config, dict(frame.metrics), arrays))
    return sorted(sent, key=lambda message: (message[0], message[1], json.dumps(message[2], sort_keys=True)))


def test_unmasked_messages_do_not_depend_on_the_data(tmp_path):
    """Other partitions give the sites other samples, numbers of samples, classes and held-out samples."""
    places = []
    for number, partition in enumerate(("dirichlet:0.5", "iid")):
        values = {**PRIVATE, "partition": partition}
        result, place = deployed(tmp_path / str(number), **values)
        assert len(result.history) == 2
        places.append(place)
    one, other = map(messages, places)
    assert one == other
    kinds = {kind for _, kind, *_ in one}
    assert kinds == {"client_info", "ready", "shares", "masked", "agreed", "opened"}  # no scores
    assert {len(arrays) for _, kind, *_, arrays in one if kind == "client_info"} == {0}
    ready = [config for _, kind, config, *_ in one if kind == "ready"]
    assert {config["num_samples"] for config in ready} == {1}
    assert {config["parts"] for config in ready} == {
        json.dumps([["buffers", "float32", [0]], ["upload/dp/0", "int32", [650]]])
    }


def test_the_same_check_finds_what_plain_masked_sums_reveal(tmp_path):
    plain = {"secure_aggregation": "required", "clients": 4, "method": "fedavg", "rounds": 1}
    one, other = (messages(deployed(tmp_path / p[:3], partition=p, **plain)[1]) for p in ("dirichlet:0.5", "iid"))
    assert one != other


def test_an_update_that_is_not_finite_counts_as_zero_and_looks_like_any_other(monkeypatch, tmp_path):
    values, step, calls = {**PRIVATE, "method": f"scaffold+{PRIVATE['method']}"}, optimizers.optimizer_step, []

    def broken(*args):
        calls.append(args)
        v, moments = step(*args)
        return v * (torch.nan if 3 < len(calls) <= 6 else 1), moments  # the second client, in the first round

    monkeypatch.setattr(optimizers, "optimizer_step", broken)
    result, place = deployed(tmp_path, **values)
    assert len(calls) == 2 * 4 * 3 + 1  # and one of the placeholder client at the server
    assert bool(torch.isfinite(result.vector).all())
    assert [row["updates"] for row in result.history] == [4, 4]
    assert not any(frame.kind == "unusable" for _, frame in place.link.received)


def test_a_repeated_round_has_the_same_noise(tmp_path):
    """A sum that stays masked is started again; with other noise, two sums of one round would reveal more than one."""
    place, failed, contributions = LoopPlace(tmp_path, {**TINY, **PRIVATE}), [], {}

    def fails_once(client, asked, answer):
        path = next((tmp_path / "sites" / str(client) / "state").rglob("noisy.safetensors"), None)
        if path is not None:
            contributions.setdefault((client, asked.config.get("round")), set()).add(path.read_bytes())
        if asked.kind == "mask" and len(failed) < 2:
            failed.append(client)
            return Frame("forgotten", {"reason": "it was restarted"})
        return answer

    place.link.spoil = fails_once
    result, _ = deployed(tmp_path, place, **PRIVATE)
    assert [row["updates"] for row in result.history] == [4, 4]
    trained = [frame for _, frame in place.link.sent if frame.kind == "train"]
    assert len(trained) == 12  # the first round twice
    assert all(len(contents) == 1 for (_, round), contents in contributions.items() if round is not None)


def test_a_site_adds_noise_in_one_run_also_if_it_has_opened_no_sum(tmp_path):
    """The other sites may have opened the sum with its update."""
    place = LoopPlace(tmp_path, {**TINY, **PRIVATE})
    place.link.spoil = lambda client, asked, answer: None if asked.kind == "share" else answer
    deployed(tmp_path, place, with_patience(round_timeout=0.05, on_timeout="continue"), **PRIVATE)
    place.link.spoil = lambda client, asked, answer: answer
    with pytest.raises(ConfigError, match="To allow another run, set max_runs: 2"):
        deployed(tmp_path / "b", place, Deployment(run="fedcba9876543210", startup_timeout=0.5), **PRIVATE)


def test_a_site_opens_no_sum_of_fewer_sites_and_trains_no_further_round(tmp_path):
    place = LoopPlace(tmp_path, {**TINY, **PRIVATE, "method": PRIVATE["method"].replace("honest=3", "honest=4")})
    seen = {}

    def asks(client, asked, answer):
        def ask(kind, **changes):
            reply = place.sites[client].answer(Frame(kind, {**asked.config, **changes}, {}, asked.arrays))
            seen.setdefault(kind, reply.config["reason"])

        if asked.kind == "mask":
            ask("agree", alive=json.dumps(sorted({0, 1, 2, 3} - {(client + 1) % 4})))
        if asked.kind == "train":
            ask("train", round=2, session="another")
            ask("evaluate", own=False)
        return answer

    place.link.spoil = asks
    values = {**PRIVATE, "method": PRIVATE["method"].replace("honest=3", "honest=4")}
    deployed(tmp_path, place, **values)
    assert "too few sites" in seen["agree"]
    assert "round 3 is beyond the 2 rounds" in seen["train"]
    assert "metrics on held-out samples have no noise" in seen["evaluate"]


def test_too_few_sites_leave_the_model_unchanged(tmp_path):
    values = {**PRIVATE, "method": PRIVATE["method"].replace("honest=3", "honest=4"), "rounds": 1}
    place, told = LoopPlace(tmp_path, {**TINY, **values}), Told()
    place.link.spoil = lambda client, asked, answer: None if asked.kind == "mask" and client == 2 else answer
    result, _ = deployed(tmp_path, place, with_patience(round_timeout=0.05, on_timeout="continue"), told, **values)
    assert result.history[0]["updates"] == 0
    assert result.history[0]["epsilon"] == 0
    assert "fewer than 4 of 4 sites remain" in " ".join(told.warnings)


@pytest.mark.parametrize(
    ("options", "deployment", "why"),
    [
        ({"secure_aggregation": "off"}, {}, "Set secure_aggregation: required"),
        ({}, {"quorum": 3}, "with which a round may start"),
        ({}, {"asynchronous": True}, "--asynchronous"),
    ],
)
def test_what_would_not_protect_is_rejected_before_anything_is_sent(options, deployment, why, tmp_path):
    values = {**PRIVATE, "method": PRIVATE["method"].replace("honest=3", "honest=4"), **options}
    place = LoopPlace(tmp_path, {**TINY, **PRIVATE})
    with pytest.raises(ConfigError, match=why):
        deployed(tmp_path, place, Deployment(run="0123456789abcdef", startup_timeout=0.5, **deployment), **values)
    assert place.link.sent == []


def test_a_site_rejects_more_honest_sites_than_it_believes_in(tmp_path):
    place = LoopPlace(tmp_path, {**TINY, **PRIVATE}, max_honest=2)
    with pytest.raises(ConfigError, match="accepts at most 2"):
        deployed(tmp_path, place, **PRIVATE)
    kinds = {frame.kind for _, frame in place.link.received}
    assert kinds == {"refused"}


def test_the_check_of_a_site_lists_what_it_sends(tmp_path):
    LoopPlace(tmp_path, {**TINY, **PRIVATE})
    findings = [(f.what, f.text) for f in check_site(tmp_path / "sites" / "0" / "site.yaml")]
    assert ("privacy", "noise at the sites: protects this site if 3 sites of every sum add theirs (honest)") in findings
    assert ("sent each round", "upload/dp/0: int32 650, 2,600 bytes") in findings
    assert not any("delta" in text or "loss" in text for what, text in findings if what.startswith("sent"))


class Unknown(SumKind):
    """Number of samples that the server asks about."""

    name, permission = "unknown", "features"

    class arguments(Arguments):
        classes: int
        wish: str


def test_the_check_of_a_site_says_what_each_allowed_statistic_sends(monkeypatch, tmp_path):
    monkeypatch.setitem(SUMS, "unknown", Unknown())
    table = "age,ward,outcome\n" + "".join(
        f"{30 + k % 20},{'ab'[k % 2]},{'yes' if k % 3 else 'no'}\n" for k in range(60)
    )
    (tmp_path / "data.csv").write_text(table)
    values = {"name": "a", "client": 0, "data": {"source": "table:data.csv", "label": "outcome"}}
    agreed = experiment({**TINY, "categories": ["ward"], "missing": "mean"})
    wanted = SimpleNamespace(ranges={"age": (0, 120)})

    def lines(config, **rules):
        site = SiteConfig.model_validate({**values, "statistics": rules})
        found = statistics_findings(site, config, load_site_data(site, agreed, tmp_path))
        return [finding.text for finding in found if finding.what == "statistics"]

    assert lines(wanted) == ["none is allowed (statistics.allow in site.yaml)"]
    assert lines(wanted, allow=["counts", "missing", "histograms", "moments"]) == [
        "counts: number of samples of each of 2 classes",
        "counts: number of rows and its square, and distances of the class frequencies from those of all sites",
        "missing: number of missing values of each of age, ward",
        "histograms: number of values of age in 64 equal cells from 0 to 120, below and above",
        "moments: for each of age: number of values and their sum",
        "moments: for each of age: sum of squared deviations from the mean of all sites",
        "counts are exact; those below 10 are not sent, unless they are masked",
    ]
    assert lines(wanted, allow=["features"])[-2] == "features: Number of samples that the server asks about."
    assert lines(agreed, allow=["histograms"], epsilon=0.5, total_epsilon=2, min_count=5, mask_small=True) == [
        "histograms: none, because the experiment has no ranges",
        "counts are sent with discrete Laplace noise of epsilon=0.5, until their sum reaches 2; those below 5 are not sent",
    ]
