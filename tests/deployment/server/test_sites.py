"""Sites that are slow, lose what they kept, send nonsense or answer twice; a server that is killed."""

import threading
from dataclasses import replace

import pytest
import torch
from support.running import Stop, StopAfter
from support.site_faults import SCAFFOLD, trained, with_patience
from support.sites import TINY, LoopPlace, Told, deployed

import unskew
from unskew.config.loader import experiment
from unskew.deployment.server import connection, round_requests
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.run import resume, run
from unskew.deployment.wire.frames import Blob, Frame
from unskew.deployment.wire.tensor_codec import decode_tensor
from unskew.errors import ConfigError, EngineError
from unskew.simulation.network import Network

pytestmark = pytest.mark.usefixtures("short_waits")


def test_an_update_that_never_arrived_is_forgotten_as_one_that_is_dropped(tmp_path):
    """Else SCAFFOLD's variate at the server would drift from the mean of those at the sites."""
    values = {**TINY, **SCAFFOLD}
    drops = Network(0.3, seed=0)
    gone = {(t, k) for t in range(4) for k in range(3) if drops.drops(t, k)}
    assert gone
    place = LoopPlace(tmp_path, values)
    place.link.spoil = lambda client, asked, answer: (
        None if trained(asked) and (asked.config["round"], client) in gone else answer
    )
    result, _ = deployed(tmp_path, place, with_patience(round_timeout=0.05, on_timeout="continue"), **SCAFFOLD)
    simulated = unskew.run(**values, network={"drop": 0.3})
    assert torch.equal(result.vector, simulated.vector)
    assert [row["updates"] for row in result.history] == [row["updates"] for row in simulated.history]
    assert result.history[-1]["sites_late"] == len(gone)


class Trainings:
    """Counts how often each site trains."""

    def __init__(self, place):
        self.counts = [0] * len(place.sites)
        for client, site in enumerate(place.sites):
            site.experiments.trainer = self.counted(client, site.experiments.trainer)

    def counted(self, client, work):
        def counting(*arguments):
            loaded = work(*arguments)
            if not hasattr(loaded, "is_counted"):
                loaded.is_counted, trained_by = True, loaded.trained

                def count(*arguments):
                    self.counts[client] += 1
                    return trained_by(*arguments)

                loaded.trained = count
            return loaded

        return counting


@pytest.mark.parametrize("lost", ["offline", "silent", "late"])
def test_a_message_that_a_supernode_lost_is_sent_again_and_trained_once(lost, tmp_path, monkeypatch):
    """A SuperNode that dies with a message never gets it again from Flower; without a deadline the run waited forever."""
    monkeypatch.setattr(round_requests, "SELDOM", 0.0)
    monkeypatch.setattr(connection, "NODES", 0.0)
    monkeypatch.setattr(round_requests, "NO_REPLY", 1e9 if lost == "offline" else 0.05)
    values = {**TINY, **SCAFFOLD}
    place, first, looks = LoopPlace(tmp_path, values), {}, []
    trainings = Trainings(place)

    def nodes():
        looks.append(1 in place.link.away)
        if looks[-3:] == [True] * 3:
            place.link.away.clear()
        return [100 + k for k in range(3) if k not in place.link.away]

    place.link.nodes = nodes

    def loses(client, asked, answer):
        if not trained(asked) or client != 1:
            return answer
        if asked.config["round"] not in first:
            first[asked.config["round"]] = f"m{len(place.link.sent)}", answer
            if lost == "offline":
                place.link.away.add(1)
            return None
        if lost == "late":  # the reply to the first copy comes, too
            identity, late = first[asked.config["round"]]
            place.link.answers[identity] = late
        return answer

    place.link.spoil = loses
    result, _ = deployed(tmp_path, place, with_patience(round_timeout=120, on_timeout="abort"), **SCAFFOLD)
    assert torch.equal(result.vector, unskew.run(**values).vector)
    assert [row["updates"] for row in result.history] == [3] * 4
    assert result.history[-1]["bytes_up"] == unskew.run(**values).history[-1]["bytes_up"]
    assert trainings.counts == [4, 4, 4]
    assert sum(client == 1 and trained(frame) for client, frame in place.link.sent) == 8


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (lambda f: replace(f, arrays={}), "has no update/delta"),
        (lambda f: replace(f, kind="scores"), "instead of 'update'"),
        (lambda f: replace(f, config={**f.config, "round": 7}), "its round is 7"),
        (lambda f: replace(f, config={**f.config, "attempt": 99}), "belongs to another request"),
        (lambda f: replace(f, config={**f.config, "num_samples": 10**9}), "num_samples"),
        (lambda f: replace(f, config={**f.config, "weight": 1e9}), "weight"),
        (lambda f: with_delta(f, torch.ones(3)), "not float32 (650,)"),
        (lambda f: with_delta(f, torch.ones(650, dtype=torch.float64)), "is float64"),
        (lambda f: with_delta(f, torch.full((650,), 1e30)), "has the norm"),
        (lambda f: replace(f, arrays={**f.arrays, "extra/x": Blob("uint8", (1,), b"a")}), "was not requested"),
        (lambda f: replace(f, arrays={**f.arrays, "upload/moon/x": Blob("uint8", (1,), b"a")}), "no rule of"),
        (lambda f: Frame("refused", {"reason": "there is no disk left."}), "there is no disk left"),
    ],
)
def test_nonsense_is_refused_named_and_counted(spoilt, reason, tmp_path):
    """The round goes on without that site, and after so many times the whole run does."""
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **SCAFFOLD, "rounds": 3})
    place.link.spoil = lambda client, asked, answer: spoilt(answer) if trained(asked) and client == 1 else answer
    options = {**SCAFFOLD, "rounds": 3}
    result, _ = deployed(tmp_path, place, with_patience(max_invalid_replies=2), told, **options)
    assert [row["updates"] for row in result.history] == [2, 2, 2]
    assert [row.get("sites_refused") for row in result.history] == [1, 2, 2]
    assert result.history[-1]["sites_excluded"] == 1
    assert sum(client == 1 and trained(frame) for client, frame in place.link.sent) == 2
    texts = [text for text in told.warnings if "site-1 (client 1)" in text]
    assert len(texts) == 2
    assert all(reason in text for text in texts)
    assert "excluded from the run" in texts[1]


@pytest.mark.parametrize(
    ("liars", "least", "on_timeout", "updates"),
    [
        ({2}, 3, "abort", None),  # the third of three required updates
        ({2}, 3, "wait", None),  # no further reply will come
        ({2}, 3, "continue", [2, 2, 2]),
        ({2}, 2, "abort", [2, 2, 2]),
        ({0, 1, 2}, 1, "wait", None),  # the run would end with its initial model
    ],
)
def test_a_round_has_as_many_valid_updates_as_it_requires(liars, least, on_timeout, updates, tmp_path):
    place = LoopPlace(tmp_path, {**TINY, "rounds": 3})
    place.link.spoil = lambda client, asked, answer: (
        replace(answer, arrays={}) if trained(asked) and client in liars else answer
    )
    policy = with_patience(round_timeout=5.0, min_updates=least, on_timeout=on_timeout)
    if updates is None:
        with pytest.raises(EngineError, match=f"of at least {least} updates remain, and the run stops"):
            deployed(tmp_path, place, policy, rounds=3)
    else:
        result, _ = deployed(tmp_path, place, policy, rounds=3)
        assert [row["updates"] for row in result.history] == updates


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"clock": "noon"}, "clock is 'noon' instead of a number"),
        ({"client": True}, "client is 'True' instead of an integer"),
        ({"client": -1}, "client is '-1' instead of an integer"),
        ({"client": 7}, "client 7, but the experiment has 3"),
        ({"client": 0}, "Two sites report to be client 0"),
        ({"name": "\x1b[2Jx"}, "its name contains characters other than"),
        ({"name": "<b>x</b>"}, "its name contains characters other than"),
        ({"name": "x" * 1000}, "or is longer than 64"),
        ({"num_samples": 0}, "a site must have 1 to"),
        ({"num_samples": 10**12}, "a site must have 1 to"),
        ({"parameters": 7}, "its model has 7 parameters, not 650"),
    ],
)
def test_a_site_with_an_invalid_report_is_not_admitted_and_the_run_continues_without_it(said, reason, tmp_path):
    told, place = Told(), LoopPlace(tmp_path, TINY)
    place.link.spoil = lambda client, asked, answer: (
        replace(answer, config={**answer.config, **said}) if client == 1 else answer
    )
    result, _ = deployed(tmp_path, place, replace(with_patience(), quorum=2), told, rounds=1)
    assert reason in " ".join(told.warnings)
    assert result.history[0]["updates"] == 2


def test_without_a_quorum_a_run_needs_the_site_whose_report_is_invalid(tmp_path):
    place = LoopPlace(tmp_path, TINY)
    place.link.spoil = lambda client, asked, answer: (
        replace(answer, config={**answer.config, "num_samples": 0}) if client == 1 else answer
    )
    with pytest.raises(EngineError, match="Missing clients: 1"):
        deployed(tmp_path, place, replace(with_patience(), startup_timeout=0.05), Told())


@pytest.mark.parametrize("name", ["unskew", "torch", "cpu"])
def test_other_versions_are_reported_and_with_exact_rejected(name, tmp_path):
    told, place = Told(), LoopPlace(tmp_path, TINY)
    place.link.spoil = lambda client, asked, answer: (
        replace(answer, config={**answer.config, name: "9.9"}) if client == 1 and asked.kind == "hello" else answer
    )
    deployed(tmp_path, place, told=told, rounds=1)
    assert f"site-1 has {name} 9.9 (here" in " ".join(told.warnings)
    with pytest.raises(EngineError, match="remove --exact"):
        deployed(tmp_path / "exact", place, replace(with_patience(), startup_timeout=0.05, exact=True))


def test_a_replayed_training_neither_removes_a_state_nor_is_trained(tmp_path):
    """In each round, the messages of earlier rounds come once more; if they counted, SCAFFOLD's variates would be lost."""
    values, replies = {**TINY, **SCAFFOLD}, []
    place = LoopPlace(tmp_path, values)

    def replays(client, asked, answer):
        for _, old in [sent for sent in place.link.sent if sent[0] == client and trained(sent[1])]:
            if trained(asked) and old.config["round"] < asked.config["round"]:
                replies.append(place.sites[client].answer(old).kind)
        return answer

    place.link.spoil = replays
    result, _ = deployed(tmp_path, place, **SCAFFOLD)
    assert torch.equal(result.vector, unskew.run(**values).vector)
    assert set(replies) == {"outdated"}
    assert len(replies) == 18


def test_an_older_copy_of_a_run_folder_is_not_resumed(tmp_path):
    """The sites have trained later rounds, so their states are not those of the older rounds."""
    import shutil

    place, values = LoopPlace(tmp_path, {**TINY, **SCAFFOLD}), {**TINY, **SCAFFOLD}
    with pytest.raises(Stop):
        run(experiment(values), with_patience(), tmp_path / "run", [StopAfter(1)], lambda text: None, place)
    shutil.copytree(tmp_path / "run", tmp_path / "later")
    with pytest.raises(Stop):
        resume(tmp_path / "later", [StopAfter(2)], tell=lambda text: None, location=place)
    with pytest.raises(EngineError, match="an old copy: resume the newest one"):
        resume(tmp_path / "run", tell=lambda text: None, location=place)


def test_whatever_a_message_causes_the_site_answers_the_next(tmp_path):
    place = LoopPlace(tmp_path, {**TINY, "method": "scaffold"})
    place.sites[0].experiments.trainer = lambda digest, reference, rounds: {}[digest]
    with pytest.raises(EngineError, match="KeyError at the site; see its log"):
        deployed(tmp_path, place, method="scaffold")


def with_delta(frame, tensor):
    from unskew.deployment.wire.tensor_codec import encode_tensor

    return replace(frame, arrays={**frame.arrays, "update/delta": encode_tensor(tensor)})


def test_uploads_that_could_not_be_added_up_are_refused(tmp_path):
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **SCAFFOLD})

    def shorter(client, asked, answer):
        if not trained(asked) or client != 2:
            return answer
        return replace(answer, arrays={**answer.arrays, "upload/scaffold/change": Blob("float32", (1,), b"\0" * 4)})

    place.link.spoil = shorter
    result, _ = deployed(tmp_path, place, with_patience(max_invalid_replies=9), told, **SCAFFOLD)
    assert all(row["updates"] == 2 for row in result.history)
    assert "differ in name, dtype or shape from those of the method" in told.warnings[0]


def test_numbers_that_are_not_finite_are_left_out_as_in_a_simulation(tmp_path):
    """A training that diverged is no fault of the site."""
    place = LoopPlace(tmp_path, {**TINY, "eval_clients": 0})
    place.link.spoil = lambda client, asked, answer: (
        with_delta(answer, torch.full((650,), torch.nan)) if trained(asked) and client == 0 else answer
    )
    result, _ = deployed(tmp_path, place, eval_clients=0)
    assert [(row["updates"], row["skipped"]) for row in result.history] == [(2, 1), (2, 1)]
    assert "sites_refused" not in result.history[-1]


def test_an_update_far_above_the_others_is_left_out_and_named(tmp_path):
    """Its norm is far below ``--norm``."""
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **SCAFFOLD})

    def grown(client, asked, answer):
        if not trained(asked) or client != 1:
            return answer
        return with_delta(answer, 1e4 * decode_tensor(answer.arrays["update/delta"]))

    place.link.spoil = grown
    result, _ = deployed(tmp_path, place, with_patience(max_invalid_replies=2), told, **SCAFFOLD)
    assert [row["updates"] for row in result.history] == [2, 2, 2, 2]
    assert float(result.vector.norm()) < 10
    assert "site-1 (client 1): its update is discarded because delta has the norm" in told.warnings[0]
    assert "30 times the median of the other sites" in told.warnings[0]
    assert result.history[-1]["sites_excluded"] == 1


def test_one_site_of_two_cannot_push_out_the_other_by_zeros(tmp_path):
    options = {"clients": 2, "eval_clients": 0}
    place = LoopPlace(tmp_path, {**TINY, **options})
    place.link.spoil = lambda client, asked, answer: (
        with_delta(answer, torch.zeros(650)) if trained(asked) and client == 0 else answer
    )
    result, _ = deployed(tmp_path, place, **options)
    assert [row["updates"] for row in result.history] == [2, 2]


def test_too_few_updates_stop_the_run_if_that_is_asked_for(tmp_path):
    place = LoopPlace(tmp_path, {**TINY, **SCAFFOLD})
    place.link.spoil = lambda client, asked, answer: None if trained(asked) and client else answer
    with pytest.raises(EngineError, match="1 of at least 2 updates arrived"):
        deployed(tmp_path, place, with_patience(round_timeout=0.05, min_updates=2, on_timeout="abort"), **SCAFFOLD)


def test_who_is_waited_for_is_told(tmp_path, monkeypatch):
    """Without a deadline a round waits as long as it takes."""
    monkeypatch.setattr(round_requests, "SILENCE", 0.1)
    told, place, late = Told(), LoopPlace(tmp_path, {**TINY, **SCAFFOLD}), []

    def slow(client, asked, answer):
        if trained(asked) and client == 2 and asked.config["round"] == 1:
            late.append(answer)
            threading.Timer(0.4, lambda: place.link.answers.update({f"m{number}": answer})).start()
            number = len(place.link.sent)
            return None
        return answer

    place.link.spoil = slow
    result, _ = deployed(tmp_path, place, told=told, **SCAFFOLD)
    assert [row["updates"] for row in result.history] == [3, 3, 3, 3]
    assert any("Waiting for site-2 (client 2), connected" in text for text in told.warnings)
    assert len(late) == 1


def test_a_message_that_flower_could_not_deliver_is_sent_again(tmp_path):
    """It is trained once more from the same state, so nothing is counted twice."""
    values, failed = {**TINY, **SCAFFOLD}, set()
    place = LoopPlace(tmp_path, values)

    def fails_once(client, asked, answer):
        key = (client, asked.config.get("round"))
        if not trained(asked) or key in failed:
            return answer
        failed.add(key)
        return Frame("failed", {"reason": "Flower's error 5"})

    place.link.spoil = fails_once
    result, _ = deployed(tmp_path, place, **SCAFFOLD)
    assert torch.equal(result.vector, unskew.run(**values).vector)
    assert result.history[-1]["sites_resent"] == 12


def test_sites_that_are_restarted_go_on_from_their_files(tmp_path):
    values = {**TINY, **SCAFFOLD}
    place = LoopPlace(tmp_path, values)

    def restarted(client, asked, answer):
        place.sites[client] = LoopPlace(tmp_path, values).sites[client]
        return answer

    place.link.spoil = restarted
    result, _ = deployed(tmp_path, place, **SCAFFOLD)
    assert torch.equal(result.vector, unskew.run(**values).vector)
    kept = sorted(path.name for path in (tmp_path / "sites" / "0" / "state").rglob("round-*"))
    assert kept == ["round-0000002.safetensors", "round-0000003.safetensors"]  # the last accepted, and the last trained


def test_a_site_that_lost_its_disk_goes_on_as_a_newcomer(tmp_path):
    import shutil

    told, place = Told(), LoopPlace(tmp_path, {**TINY, **SCAFFOLD})

    def loses(client, asked, answer):
        if trained(asked) and client == 1 and asked.config["round"] == 1:
            shutil.rmtree(tmp_path / "sites" / "1" / "state")
        return answer

    place.link.spoil = loses
    result, _ = deployed(tmp_path, place, told=told, **SCAFFOLD)
    assert [row["updates"] for row in result.history] == [3, 3, 2, 3]
    assert "has lost its state of earlier rounds" in told.warnings[0]


def test_a_run_whose_server_was_killed_is_resumed_with_the_same_numbers(tmp_path):
    """Updates accepted after the last checkpoint were never announced to a site, which therefore has both generations."""
    values = {**TINY, **SCAFFOLD}
    place = LoopPlace(tmp_path, values)
    with pytest.raises(Stop):
        run(experiment(values), with_patience(), tmp_path / "run", [StopAfter(2)], lambda text: None, place)
    result = resume(tmp_path / "run", tell=lambda text: None, location=place)
    assert torch.equal(result.vector, unskew.run(**values).vector)
    assert len({frame.config["run"] for _, frame in place.link.sent}) == 1


def test_a_site_trains_nothing_that_it_has_not_agreed_to(tmp_path):
    place = LoopPlace(tmp_path, TINY)
    with pytest.raises(ConfigError, match="has not agreed to this experiment"):
        deployed(tmp_path, place, lr=0.5)
    assert place.link.sent
    assert not any(trained(frame) for _, frame in place.link.sent)


def test_two_sites_that_say_they_are_the_same_client_are_refused(tmp_path):
    place = LoopPlace(tmp_path, TINY)
    place.sites[2] = place.sites[1]
    with pytest.raises(EngineError, match="Two sites report to be client 1"):
        deployed(tmp_path, place)


def test_sites_that_do_not_come_are_named(tmp_path):
    place = LoopPlace(tmp_path, TINY)
    place.link.sites = place.sites[:2]
    with pytest.raises(
        EngineError, match=r"2 of 3 sites are connected after 0\.05 s\. Connected: .* Missing clients: 2"
    ):
        deployed(tmp_path, place, Deployment(startup_timeout=0.05))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"network": {"drop": 0.1}}, "network.drop simulate"),
        ({"network": {"delay": "fixed:1"}, "method": "fedbuff"}, "network.delay"),
        ({"network": {"uplink": "5MB/s"}}, "slow clients"),
        ({"diagnose": ["consensus"]}, "diagnose=consensus"),
        ({"save_samples": True}, "save_samples"),
        ({"method": "fedssyn:data=local,generator=vae-small"}, "is only for simulations"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused_before_anything_is_sent(options, why, tmp_path):
    place = LoopPlace(tmp_path, TINY)
    with pytest.raises(ConfigError, match=why):
        deployed(tmp_path, place, **options)
    assert place.link.sent == []
    assert not (tmp_path / "run").exists()
