"""Attacks of a server that lies, and of sites that lie, on masked sums: how near to one site's update can they come?

The measure is the cosine between a site's update and what the server can compute of it: 1 if it has the update, and within
chance of 0 if it has not. Each attack is also run with its defense switched off, where it must succeed.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.running import Stop, StopAfter
from support.site_faults import FOUR, close, lost, with_patience
from support.sites import TINY, LoopPlace, Told, deployed, new_key

import unskew
from unskew.config.loader import experiment
from unskew.deployment.secagg import crypto
from unskew.deployment.secagg.fixed_point import dequantize
from unskew.deployment.secagg.roster import SigningIdentity, read_roster
from unskew.deployment.server.run import resume, run
from unskew.deployment.site import masking as secagg_client
from unskew.deployment.site.ledger import DataLedger
from unskew.deployment.site.masking import SecAggClient
from unskew.deployment.wire.digests import BroadcastDigest
from unskew.deployment.wire.frames import Frame
from unskew.errors import EngineError, UnskewError
from unskew.protocol.messages import ClientState, Update

RUN, SIZE, CHANCE = "0123456789abcdef", 400, 0.25  # five standard deviations of the cosine of two random vectors
SWITCHES = {
    "threshold": lambda patch: patch.setattr(secagg_client, "threshold", lambda sites: sites // 2 + 1),
    "signatures": lambda patch: patch.setattr(secagg_client, "is_signed", lambda *_: True),
    "ledger": lambda patch: patch.setattr(DataLedger, "_check", lambda *_: None),
}


pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("short_waits")]


class World:
    """Sites with updates of their own, and what a server that may lie gets of them."""

    def __init__(self, count, folder):
        pairs = [new_key() for _ in range(count)]
        folder.mkdir(exist_ok=True)
        (folder / "roster.txt").write_text("".join(f"{k} {public}\n" for k, (_, public) in enumerate(pairs)))
        self.masks, self.updates, self.folder, self.who = [], [], folder, range(count)
        for k, (private, _) in enumerate(pairs):
            (folder / f"{k}.key").write_bytes(private)
            self.masks.append(SecAggClient(SigningIdentity.load(k, folder / f"{k}.key", folder / "roster.txt")))
            self.updates.append(torch.randn(SIZE, generator=torch.Generator().manual_seed(k)))

    def begin(self, session, who=None, model="m", models=None):
        self.session, self.parts, self.ready = session, "", {}
        for k in self.who if who is None else who:
            delta = self.updates[k]
            empty = torch.zeros(0)
            update = Update(k, 0, 10, 1.0, delta, empty, {}, ClientState(), {}, {})
            ledger = DataLedger(self.folder / f"ledger-{k}.json", RUN)
            signed = (models or {}).get(k, model)
            config = self.masks[k].begin(session, update, delta, BroadcastDigest(signed, signed, {}), ledger).config
            self.ready[str(k)] = [json.loads(config["keys"]), config["signature"]]
            self.parts = config["parts"]

    def say(self, k, kind, **config):
        """The site's reply, None if it rejects the message."""
        written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in config.items()}
        try:
            return self.masks[k].reply(RUN, Frame(kind, {"session": self.session, **written}))
        except UnskewError:
            return None

    def share(self, ready=None):
        replies = {int(k): self.say(int(k), "share", ready=ready or self.ready, parts=self.parts) for k in self.ready}
        self.sealed = {k: json.loads(one.config["sealed"]) for k, one in replies.items() if one}
        self.commitments = {str(k): json.loads(one.config["commitments"]) for k, one in replies.items() if one}

    def mask(self, k, others):
        sealed = {str(j): self.sealed[j][str(k)] for j in others if j != k}
        reply = self.say(k, "mask", sealed=sealed, commitments=self.commitments)
        return None if reply is None or reply.kind != "masked" else numbers(reply)

    def opened(self, lists):
        """Have each site sign the list of sites that it is told, and collect the shares: ``{owner: {place: share}}``."""
        signatures, found = {}, {True: {}, False: {}}
        for k, alive in lists.items():
            reply = self.say(k, "agree", alive=alive)
            if reply:
                signatures[str(k)] = reply.config["signature"]
        places = {k: place for place, k in enumerate(sorted(map(int, self.ready)), 1)}
        for k, alive in lists.items():
            reply = self.say(k, "unmask", signatures=signatures)
            for owner, share in json.loads(reply.config["shares"]).items() if reply else ():
                found[int(owner) in alive].setdefault(int(owner), {})[places[k]] = int(share, 16)
        return found[True], found[False]

    def total(self, alive):
        """The sum of an honest exchange over these sites; still masked if they do not open it."""
        self.share()
        total = sum(self.mask(k, alive) for k in alive)
        seeds, _ = self.opened({k: list(alive) for k in alive})
        for k in alive:
            crypto.apply_mask(total, crypto.mask_stream(secret_of(seeds.get(k, {})), len(total)), add=False)
        return self.delta(total)

    def delta(self, total):
        rows = json.loads(self.parts)
        parts = [secagg_client.SumPart(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]
        return dequantize(total, parts, len(self.ready))["delta"]


def numbers(frame):
    return np.frombuffer(frame.arrays["masked/x"].data, np.uint64).copy()


def secret_of(shares):
    """The secret that these shares determine, or something else if there are too few."""
    return crypto.combine_shares(shares) or 1


def cosine(one, other):
    return abs(float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0)))


@pytest.mark.parametrize("off", [("threshold", "signatures"), ("threshold",), ("signatures",), ()])
@pytest.mark.parametrize("count", [5, pytest.param(7, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_different_lists_of_survivors_do_not_open_one_update(count, off, tmp_path, monkeypatch):
    """One site masks with few others only; to the rest these are said to be gone, and their keys are asked for."""
    world = World(count, tmp_path)
    world.begin("s")
    for name in off:
        SWITCHES[name](monkeypatch)
    world.share()
    most = secagg_client.threshold(count)
    victim, few = count - 1, [*range(most - 1)]  # as few partners as the victim accepts
    total = world.mask(victim, few)
    for k in range(count - 1):
        world.mask(k, world.sealed)
    lists = {victim: [*few, victim]}
    for k in range(count - 1):  # each site is told of as many as it accepts that they are gone, in turn
        others = [j for j in (*few[k % len(few) :], *few[: k % len(few)]) if j != k]
        lists[k] = sorted({*range(count)} - {*others[: count - most]})
    seeds, keys = world.opened(lists)
    recovered = torch.zeros(SIZE)
    if total is not None:
        crypto.apply_mask(total, crypto.mask_stream(secret_of(seeds.get(victim, {})), len(total)), add=False)
        own = bytes.fromhex(world.ready[str(victim)][0][0])
        for k in few:
            key = crypto.shared_key(secret_of(keys.get(k, {})), own)
            crypto.apply_mask(total, crypto.mask_stream(key, len(total)), add=False)
        recovered = world.delta(total)
    if len(off) == 2:
        assert cosine(recovered, world.updates[victim]) > 0.999999
    else:
        assert cosine(recovered, world.updates[victim]) < CHANCE


@pytest.mark.parametrize("off", [("ledger",), ()])
@pytest.mark.parametrize("count", [4, 5])
def test_two_sums_of_one_round_are_not_opened(count, off, tmp_path, monkeypatch):
    """All sites, then all but one: the difference is its update."""
    for name in off:
        SWITCHES[name](monkeypatch)
    world = World(count, tmp_path)
    world.begin("one")
    every = world.total(range(count))
    close(every, sum(world.updates).double())  # an honest sum is right
    world.begin("two")
    difference = every - world.total(range(count - 1))
    assert cosine(difference, world.updates[-1]) > 0.999999 if off else cosine(difference, world.updates[-1]) < CHANCE


def test_runs_at_the_same_time_do_not_open_two_sums(tmp_path):
    """Both are asked to sign before either is opened."""
    one, two = (DataLedger(tmp_path / "ledger.json", run) for run in ("a" * 8, "b" * 8))
    for ledger in (one, two):
        ledger.check(0, (0, 1, 2), "initial")
    one.record(0, (0, 1, 2), "initial")
    with pytest.raises(UnskewError, match=r"set max_runs: 2 in site\.yaml"):
        two.record(0, (0, 1), "initial")
    with pytest.raises(UnskewError, match="has already opened the sum of clients 0, 1, 2 in round 1"):
        one.record(0, (0, 1), "another")
    one.record(1, (0, 1), "another")
    with pytest.raises(UnskewError, match="or from the same model"):
        one.record(2, (0, 1), "initial")
    allowed = replace(two, max_runs=2)
    with pytest.raises(UnskewError, match="or from the same model"):
        allowed.record(0, (0, 1), "initial")
    allowed.record(0, (0, 1, 2), "initial")
    assert (one.num_opened(), two.num_opened()) == (2, 1)


def test_the_same_sum_of_one_round_may_be_opened_again(tmp_path):
    """As when the server was killed before it had stored the model."""
    world = World(4, tmp_path)
    sums = []
    for session in ("one", "two"):
        world.begin(session)
        sums.append(world.total(range(3)))
    close(sums[1], sum(world.updates[:3]).double())
    assert torch.equal(*sums)


@pytest.mark.parametrize("off", [("signatures",), ()])
def test_keys_of_the_server_in_place_of_the_sites_are_rejected(off, tmp_path, monkeypatch):
    """With them the server would be all of a site's partners, and could take their masks off its update."""
    for name in off:
        SWITCHES[name](monkeypatch)
    world, secret, ready = World(4, tmp_path), [crypto.random_secret() for _ in range(3)], {}
    world.begin("s")
    seals = [crypto.random_secret() for _ in range(3)]
    for k in range(3):
        keys = [crypto.public_key(secret[k]).hex(), crypto.public_key(seals[k]).hex()]
        ready[str(k)] = [keys, world.ready[str(k)][1]]
    ready["3"] = world.ready["3"]
    reply = world.say(3, "share", ready=ready, parts=world.parts)
    if not off:
        assert reply is None
        return
    sealed, own = json.loads(reply.config["sealed"]), [bytes.fromhex(key) for key in ready["3"][0]]
    view = secagg_client.view_digest(RUN, 0, "s", ready, world.parts)
    seeds, back, commitments = {}, {}, {"3": json.loads(reply.config["commitments"])}
    for k in range(3):
        common = crypto.shared_key(seals[k], own[1])
        seeds[k + 1] = int(json.loads(crypto.unseal(common, bytes.fromhex(sealed[str(k)])))[3], 16)
        dealt = [crypto.share_secret(one, 3, 4) for one in (crypto.random_secret(), secret[k])]
        plain = json.dumps([view, k, 3, *(f"{shares[3]:x}" for shares, _ in dealt)]).encode()
        back[str(k)] = crypto.seal(common, plain).hex()
        commitments[str(k)] = [*([point.hex() for point in points] for _, points in dealt), ""]
    total = numbers(world.say(3, "mask", sealed=back, commitments=commitments))
    crypto.apply_mask(total, crypto.mask_stream(crypto.combine_shares(seeds), len(total)), add=False)
    for k in range(3):
        crypto.apply_mask(total, crypto.mask_stream(crypto.shared_key(secret[k], own[0]), len(total)), add=False)
    assert cosine(world.delta(total), world.updates[3]) > 0.999999


def test_sums_of_two_sites_and_over_different_models_are_rejected(tmp_path):
    """The second: sites that got a model without gradients add nothing to the update of the one that did not."""
    world = World(4, tmp_path)
    world.begin("two", who=(0, 1))
    world.share()
    assert world.sealed == {}
    world.begin("models", models={3: "other"})
    world.share()
    assert world.sealed == {}
    world.begin("good")
    world.share()
    assert len(world.sealed) == 4


def test_honest_servers_see_no_update_in_what_they_receive(tmp_path):
    world = World(5, tmp_path)
    world.begin("s")
    world.share()
    for k in range(5):
        seen = torch.from_numpy(world.mask(k, world.sealed).view(np.int64)[:SIZE].astype(float))
        assert cosine(seen, world.updates[k]) < CHANCE


def garbage(site, answer):
    return {"sealed": json.dumps({k: b"garbage".hex() for k in json.loads(answer.config["sealed"])})}


def other_commitment(site, answer):
    """Another polynomial of the seed's shares, signed by the site."""
    one = site.masks._open[RUN]
    _, key, _ = json.loads(answer.config["commitments"])
    points = [point.hex() for point in crypto.share_secret(crypto.random_secret(), 3, 4)[1]]
    signature = site.identity.sign(["shares", one.view, one.client, [points, key]])
    return {"commitments": json.dumps([points, key, signature])}


def unsigned(site, answer):
    seed, key, _ = json.loads(answer.config["commitments"])
    return {"commitments": json.dumps([seed, key, "00"])}


def wrong_shares(site, answer):
    return {"shares": json.dumps(dict.fromkeys(json.loads(answer.config["shares"]), "7"))}


def odd_signature(site, answer):
    return {"signature": site.identity.sign(["survivors", "another view", [0], [0]])}


def accuses_all(site, answer):
    return {"wrong": "[0, 1, 2]"}


def only_site_3_is_blamed(told, why):
    blamed = [text for text in told.warnings if "of 3, then it is excluded" in text]
    assert len(blamed) == 1
    assert blamed[0].startswith("site-3 (client 3): ")
    assert why in blamed[0]


@pytest.mark.parametrize(
    ("kind", "lie", "updates", "why"),
    [
        ("shares", garbage, 3, "its shares are wrong, as 3 sites report"),
        ("shares", other_commitment, 3, "its shares are wrong, as 3 sites report"),
        ("shares", unsigned, 3, "not signed by the key in the roster"),
        ("masked", accuses_all, 3, "it reports wrong shares of 3 other sites"),
        ("agreed", odd_signature, 4, "it has signed another list"),
        ("opened", wrong_shares, 4, "does not match that site's commitments"),
    ],
)
def test_a_site_that_lies_is_named_and_the_sum_is_opened_from_the_rest(kind, lie, updates, why, tmp_path):
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **FOUR})

    def lies(client, asked, answer):
        if client != 3 or answer.kind != kind:
            return answer
        return Frame(
            "accused" if lie is accuses_all else kind,
            {**answer.config, **lie(place.sites[3], answer)},
            answer.metrics,
            answer.arrays,
        )

    place.link.spoil = lies
    result, _ = deployed(tmp_path, place, told=told, **FOUR)
    only_site_3_is_blamed(told, why)
    assert result.history[0]["updates"] == updates
    options = {"clients": 4, "rounds": 1, "eval_clients": 0}
    plain = LoopPlace(tmp_path / "plain", {**TINY, **options})
    plain.link.spoil = lost("train", {3} if updates == 3 else set())
    expected, _ = deployed(
        tmp_path / "plain", plain, with_patience(round_timeout=0.05, on_timeout="continue"), **options
    )
    close(result.vector, expected.vector)


def another_session(site, config, keys):
    return site.identity.sign(secagg_client.ready_message(RUN, 0, "ff" * 16, 3, keys, config["model"]))


def equal_keys(site, config, keys):
    keys[1] = keys[0]
    return site.identity.sign(secagg_client.ready_message(RUN, 0, config["session"], 3, keys, config["model"]))


@pytest.mark.parametrize(
    ("lie", "why"), [(another_session, "not signed by the key in the roster"), (equal_keys, "keys are not different")]
)
def test_keys_that_all_other_sites_would_reject_are_the_fault_of_their_site(lie, why, tmp_path):
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **FOUR})

    def lies(client, asked, answer):
        if client != 3 or answer.kind != "ready":
            return answer
        keys = json.loads(answer.config["keys"])
        signature = lie(place.sites[3], answer.config, keys)
        return replace(answer, config={**answer.config, "keys": json.dumps(keys), "signature": signature})

    place.link.spoil = lies
    result, _ = deployed(tmp_path, place, told=told, **FOUR)
    only_site_3_is_blamed(told, why)
    assert result.history[0]["updates"] == 3


def test_a_mean_above_the_norm_is_not_used(tmp_path):
    """Masks hide which site sent wrong numbers."""
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **FOUR})
    masks = place.sites[3].masks
    begin = masks.begin
    masks.begin = lambda session, update, delta, *others: begin(session, update, delta + 1e7, *others)
    result, _ = deployed(tmp_path, place, told=told, **FOUR)
    assert result.history[0]["updates"] == 0
    assert "at least one of these sites sent wrong numbers" in " ".join(told.warnings)


@pytest.mark.parametrize("wrong", ["[1]", "[1, 1, 1.0, true]"])
def test_of_two_sites_that_contradict_each_other_neither_is_blamed(wrong, tmp_path):
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **FOUR})
    lies = iter([Frame("accused", {"wrong": wrong})])

    def accuses_once(client, asked, answer):
        lie = next(lies, None) if client == 3 and answer.kind == "masked" else None
        return answer if lie is None else replace(lie, config={**answer.config, **lie.config})

    place.link.spoil = accuses_once
    result, _ = deployed(tmp_path, place, told=told, **FOUR)
    assert "site-1 (client 1) is left out of this sum: site-3 (client 3) reports" in " ".join(told.warnings)
    assert not any("excluded" in text for text in told.warnings)
    assert result.history[0]["updates"] == 3


def test_a_weight_or_budget_that_would_single_out_a_site_is_rejected(tmp_path):
    """Weights of nearly 0 for all other sites would leave one update in the sum."""
    place, seen = LoopPlace(tmp_path, {**TINY, **FOUR}), []

    def asks(client, asked, answer):
        if asked.kind == "train":
            for odd in ({"weight": 1e-9}, {"local_epochs": 1}, {"counted": 1, "weight": 1.0}):
                message = replace(asked, config={**asked.config, **odd, "session": "ff" * 16})
                seen.append(place.sites[client].answer(message).config["reason"])
        return answer

    place.link.spoil = asks
    deployed(tmp_path, place, **FOUR)
    assert len(seen) == 12
    assert all("the weight" in reason for reason in seen)


def test_a_site_with_synthetic_data_has_the_weight_of_its_own_samples_only(tmp_path):
    """With two weights, the difference of two sums would be a multiple of one site's update."""
    options = {**FOUR, "method": "fedssyn:generator=vae-small,epochs=1,n_syn=8", "client_weighting": "samples"}
    place, seen = LoopPlace(tmp_path, {**TINY, **options}), []

    def asks(client, asked, answer):
        if answer.kind == "ready":
            other = {"weight": float(answer.config["num_samples"]), "session": "ff" * 16}
            seen.append(place.sites[client].answer(replace(asked, config={**asked.config, **other})).kind)
        return answer

    place.link.spoil = asks
    result, _ = deployed(tmp_path, place, with_patience(round_timeout=5.0, on_timeout="continue"), **options)
    assert result.history[0]["updates"] == 4
    assert seen == ["refused"] * 4


def test_a_client_number_belongs_to_the_key_that_the_roster_names(tmp_path):
    told, place = Told(), LoopPlace(tmp_path, {**TINY, **FOUR})
    place.link.spoil = lambda client, asked, answer: (
        replace(answer, config={**answer.config, "client": 0}) if client == 1 and asked.kind == "hello" else answer
    )
    with pytest.raises(EngineError, match="issing clients: 1"):
        deployed(tmp_path, place, replace(with_patience(), startup_timeout=0.05), told, **FOUR)
    assert "does not match the roster's key" in " ".join(told.warnings)


@pytest.mark.parametrize("away", [False, True])
def test_a_round_that_was_opened_before_the_server_was_killed_is_repeated_over_the_same_sites_or_skipped(
    away, tmp_path
):
    values = {**TINY, **FOUR, "rounds": 2}
    told, place, asked_for = Told(), LoopPlace(tmp_path, values), []

    def killed(client, asked, answer):
        asked_for.append(asked.kind)
        if asked_for.count("unmask") == 8:  # the last of the second round
            raise Stop
        return answer

    place.link.spoil = killed
    with pytest.raises(Stop):
        run(experiment(values), with_patience(), tmp_path / "run", [StopAfter(9)], lambda text: None, place)
    place.link.spoil = lost("train", {2} if away else set())
    with_patience(round_timeout=0.05, on_timeout="continue").write(tmp_path / "run")
    result = resume(tmp_path / "run", [told], tell=lambda text: None, location=place)
    assert result.history[1]["updates"] == (0 if away else 4)
    if away:
        assert "was opened before the server was interrupted" in " ".join(told.warnings)
    else:
        close(result.vector, unskew.run(**values).vector)


def test_a_second_run_of_a_masked_experiment_needs_the_sites_consent(tmp_path):
    """Else the sums of two runs with different sites could be subtracted."""
    place = LoopPlace(tmp_path, {**TINY, **FOUR})
    deployed(tmp_path, place, **FOUR)
    again = replace(with_patience(), run="f" * 16)
    with pytest.raises(UnskewError, match="To allow another run, set max_runs: 2"):
        deployed(tmp_path / "again", place, again, **FOUR)
    for site in place.sites:
        site.config = site.config.model_copy(update={"max_runs": 2})
    deployed(tmp_path / "allowed", place, again, **FOUR)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0 ssh-rsa AAAA", "line 1: expected a client number"),
        ("{0}\n{0}", "each client needs a different number"),
        ("{0}\n1 {1}", "each client needs a different number"),
        ("x {1}", "line 1: expected a client number"),
        ("-1 {1}", "different number from 0"),
    ],
)
def test_a_mistake_in_a_roster_is_a_sentence(text, why, tmp_path):
    public = new_key()[1]
    (tmp_path / "roster.txt").write_text(text.format(f"0 {public}", public))
    with pytest.raises(UnskewError, match=why):
        read_roster(tmp_path / "roster.txt")
    (tmp_path / "roster.txt").write_text(f"# who\n\n3 {public} a comment\n")
    assert [*read_roster(tmp_path / "roster.txt")] == [3]
