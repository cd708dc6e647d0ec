"""Updates that come rounds later, and sites that join late and leave."""

import pytest
import torch
from support.site_faults import trained
from support.sites import TINY, LoopPlace, Told, deployed

import unskew
from unskew.deployment.server import connection, round_requests
from unskew.deployment.server import engine as engine_module
from unskew.deployment.server.config import Deployment, RoundPolicy
from unskew.errors import ConfigError, EngineError

LATE = {"rounds": 5, "eval_clients": 0}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(round_requests, "POLL", 0.01)
    monkeypatch.setattr(connection, "NODES", 0.0)


def deployment(**options):
    patience = RoundPolicy(
        **{k: options.pop(k) for k in ("min_updates", "round_timeout", "on_timeout") if k in options}
    )
    return Deployment(run="0123456789abcdef", startup_timeout=0.5, round_policy=patience, **options)


def two_rounds_late(place, slow=2):
    """The slow site's answer is there when others are asked for the second time after it."""
    waits = {}

    def spoil(client, asked, answer):
        if not trained(asked):
            return answer
        if client == slow:
            waits[asked.config["round"] + 2] = f"m{len(place.link.sent)}", answer
            return None
        if asked.config["round"] in waits:
            identity, late = waits.pop(asked.config["round"])
            place.link.answers[identity] = late
        return answer

    place.link.spoil = spoil


@pytest.mark.parametrize(
    "method",
    [
        "fedasync+fedprox",
        *(
            pytest.param(m, marks=pytest.mark.slow)
            for m in ("fedbuff:buffer_size=2", "ca2fl:buffer_size=3", "scaffold")
        ),
    ],
)
def test_updates_are_taken_as_they_come_with_their_real_delay(method, tmp_path):
    """The numbers are those of a simulation in which the slow client's updates take two rounds."""
    values = {**TINY, **LATE, "method": method}
    place = LoopPlace(tmp_path, values)
    two_rounds_late(place)
    result, _ = deployed(tmp_path, place, deployment(asynchronous=True, min_updates=2), **{**LATE, "method": method})
    trace = tmp_path / "trace.csv"
    trace.write_text("client,delay\n0,0\n1,0\n2,2\n")
    simulated = unskew.run(**values, network={"delay": f"trace:{trace}"})
    assert torch.equal(result.vector, simulated.vector)
    for mine, theirs in zip(result.history, simulated.history, strict=True):
        names = ("updates", "arrivals", "in_flight", "staleness", "staleness_counts", "accuracy")
        assert [mine[name] for name in names] == [theirs[name] for name in names]


@pytest.mark.parametrize(
    ("options", "method", "why"),
    [
        ({"asynchronous": True}, "fedrep", "in the same round and cannot be combined with --asynchronous"),
        ({"quorum": 4}, "fedavg", "the experiment has 3 clients"),
        (
            {"quorum": 2, "client_weighting": "samples"},
            "scaffold",
            "scaffold requires information on all sites' data before the first round",
        ),
        ({"quorum": 2}, "vhl:per_class=2", "vhl requires information on all"),
    ],
)
def test_methods_that_need_all_in_time_are_refused(options, method, why, tmp_path):
    place = LoopPlace(tmp_path, {**TINY, "model": "mlp"})
    values = {"method": method, "model": "mlp", "client_weighting": options.pop("client_weighting", "auto")}
    with pytest.raises(ConfigError, match=why):
        deployed(tmp_path, place, deployment(**options), **values)
    assert place.link.sent == []


def test_sites_join_late_and_leave_between_rounds(tmp_path):
    place, told = LoopPlace(tmp_path, {**TINY, "rounds": 4}), Told()
    place.link.away = {2}

    def comes_and_goes(client, asked, answer):
        if trained(asked):
            place.link.away = {0: {2}, 1: set(), 2: {0}, 3: {0}}[asked.config["round"]]
        return answer

    place.link.spoil = comes_and_goes
    result, _ = deployed(tmp_path, place, deployment(quorum=2), told, rounds=4)
    assert [(row["cohort"], row["updates"]) for row in result.history] == [(2, 2), (2, 2), (3, 3), (2, 2)]
    assert [row["sites_present"] for row in result.history] == [2, 2, 3, 2]
    assert "site-2 (client 2) has joined the run." in told.warnings
    weights = {frame.config["weight"] for client, frame in place.link.sent if trained(frame) and client == 2}
    assert weights == {float(place.sites[2].experiments._trainer[1].data.num_samples)}


def test_a_round_waits_until_enough_sites_are_there(tmp_path):
    place = LoopPlace(tmp_path, TINY)
    place.link.away = {1, 2}
    with pytest.raises(EngineError, match="1 of 2 sites are connected"):
        deployed(tmp_path, place, Deployment(startup_timeout=0.05, quorum=2))


def test_updates_that_come_too_early_wait_in_files(tmp_path, monkeypatch):
    """The server's memory does not grow with the number of sites, and they are added up in the same order."""
    monkeypatch.setattr(engine_module, "HELD", 3000)
    values = {**TINY, "clients": 4}
    place, late = LoopPlace(tmp_path, values), {}

    def last(client, asked, answer):
        if trained(asked) and client == 0:
            late[f"m{len(place.link.sent)}"] = answer
            return None
        return answer

    pull = place.link.pull
    seen = []

    def pulled(identities):
        found = pull(identities)
        seen.append(len(list((tmp_path / "run").glob("arrived/*.safetensors"))))
        if not found:
            place.link.answers.update(late)
        return found

    place.link.spoil, place.link.pull = last, pulled
    result, _ = deployed(tmp_path, place, clients=4)
    assert max(seen) == 2  # of three that wait, one is in memory
    assert torch.equal(result.vector, unskew.run(**values).vector)
    assert not (tmp_path / "run" / "arrived").exists()
