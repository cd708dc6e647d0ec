"""The slots: what later methods are built on. Toy methods fill each of them, on every engine."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import an_update, state_at
from support.quadratic import Quadratics, gradient, problem
from support.running import Stop, StopAfter
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.descriptions import describe_all
from unskew.methods.registry import method
from unskew.protocol.data_preparation import ClientPayloads, ServerPayload
from unskew.protocol.rules import DataRule, ServerRule, SyncRule
from unskew.protocol.updates import Aggregate
from unskew.testing import assert_engines_agree


class HeadOften(SyncRule):
    """The head travels in every round, the body every ``period`` rounds."""

    name, summary, paper = "headoften", "for tests", "none"

    def __init__(self, period):
        self.period = period

    def exchanged_slices(self, state, round, client, last, spec):
        head = tuple(spec.parts["head"])
        everything = (slice(0, spec.size),)
        missed = last is None or last // self.period < round // self.period
        return (everything if missed else head), (everything if (round + 1) % self.period == 0 else head)


def run(chosen, engine="inline", **options):
    torch.manual_seed(1)
    given = {"rounds": 4, "lr": 0.1, "precision": "fp64", "batch_size": 100, **options}
    return unskew.run(
        blobs([6, 9, 7]), model="mlp", model_options={"hidden": [5]}, method=chosen, engine=engine, **given
    )


def test_a_body_that_stays_at_the_client_is_not_averaged_and_not_paid_for():
    result = run(HeadOften(2))
    spec = unskew.ModelSpec(result.model, (2, 6, 6), 3)
    head = sum(s.stop - s.start for s in spec.parts["head"])
    body = spec.size - head
    up = np.diff([0, *(row["bytes_up"] for row in result.history)])
    down = np.diff([0, *(row["bytes_down"] for row in result.history)])
    assert up.tolist() == [3 * 8 * n for n in (head, head + body, head, head + body)]
    assert down.tolist() == [3 * 8 * n for n in (head + body, head, head + body, head)]
    # One client alone trains the same whether or not its body visits the server in between.
    alone = blobs([6])
    both = [
        unskew.run(alone, model="mlp", method=m, rounds=4, lr=0.1, precision="fp64", engine="inline")
        for m in (HeadOften(2), "fedavg")
    ]
    assert_close(both[0].vector, both[1].vector, TRAINING)


def test_a_sync_rule_that_sends_everything_is_the_host_method():
    assert torch.equal(run(HeadOften(1)).vector, run("fedavg").vector)
    assert torch.equal(run([HeadOften(1), "scaffold"]).vector, run("scaffold").vector)


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_sync_rules_agree_on_every_engine(engine):
    chosen = [HeadOften(2), "scaffold"]
    reference = run(chosen, participation=0.7)
    assert not torch.allclose(reference.vector, run("scaffold", participation=0.7).vector)
    assert_engines_agree(run(chosen, engine, participation=0.7).vector, reference.vector)


class Doubled(DataRule):
    """Every client gets its own samples twice, at a cost of 10 bytes up and 20 down."""

    name, summary, paper = "doubled", "for tests", "none"

    def client_payload(self, prepared, seed, workspace):
        return ClientPayloads({c.id: {"x": torch.zeros(10, dtype=torch.uint8)} for c in prepared.federation.clients})

    def server_payload(self, sent, federation_info, seed):
        return ServerPayload({k: {"x": torch.zeros(20, dtype=torch.uint8)} for k in sent})

    def apply_payload(self, client, share):
        return dataclasses.replace(client, x=torch.cat([client.x, client.x]), y=torch.cat([client.y, client.y]))


def test_a_data_rule_changes_what_clients_hold_and_is_paid_for():
    plain, doubled = run("fedavg"), run([Doubled(), "fedavg"])
    # A full batch of everything twice has the same mean gradient.
    assert_close(doubled.vector, plain.vector, TRAINING)
    assert doubled.history[-1]["bytes_up"] == plain.history[-1]["bytes_up"] + 30
    assert doubled.history[-1]["bytes_down"] == plain.history[-1]["bytes_down"] + 60


@dataclasses.dataclass(frozen=True)
class EvenOdd(SyncRule):
    """Even clients send the first two thirds of the model, odd ones the last two."""

    name, summary, paper = "evenodd", "for tests", "none"

    def exchanged_slices(self, state, round, client, last, spec):
        third = spec.size // 3
        sent = (slice(0, 2 * third),) if client % 2 == 0 else (slice(third, spec.size),)
        return (slice(0, spec.size),), sent


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_an_entry_is_averaged_over_the_clients_that_send_it(weights):
    A, b = problem(sizes=(6, 9, 4, 11))
    shares = np.array([len(a) for a in A] if weights == "samples" else [1.0] * 4)
    for chosen in ("", "fedbuff:buffer_size=4") if weights == "uniform" else ("",):
        sim = Quadratics(A, b, method(EvenOdd()) if not chosen else combined(EvenOdd(), chosen), weights=weights)
        v = np.zeros(3)
        for x in sim.rounds(2):
            local = []
            for a, y in zip(A, b, strict=True):
                own = v.copy()
                for _ in range(5):
                    own -= 0.05 * gradient(a, y, own)
                local.append(own)
            local = np.stack(local)
            even, every, odd = ([0, 2], [0, 1, 2, 3], [1, 3])
            v = np.array([np.average(local[k, i], weights=shares[k]) for i, k in enumerate((even, every, odd))])
            assert_close(x, v)


def combined(rule, text):
    return dataclasses.replace(method(text), sync=rule)


def test_statistics_of_a_layer_are_averaged_over_the_clients_that_send_the_layer():
    fed, module = blobs([6, 9, 7]), SmallBatchNorm(dropout=0.0)
    options = {"model": module, "rounds": 1, "lr": 0.1, "engine": "inline", "precision": "fp64"}

    class Norm(SyncRule):
        """Client 1 alone sends the layer with BatchNorm; the others send the head."""

        name, summary, paper = "norm", "for tests", "none"

        def exchanged_slices(self, state, round, client, last, spec):
            head = spec.size - spec.sizes[-1] - spec.sizes[-2]
            return (slice(0, spec.size),), ((slice(0, head),) if client == 1 else (slice(head, spec.size),))

    seen = {}

    class Seen(unskew.ClientRule):
        name, summary, paper = "seen", "for tests", "none"

        def end(self, ctx, carry, v):
            seen[len(seen)] = v, ctx.model.b.clone()

    whole = unskew.run(fed, method=unskew.protocol.rules.Method("both", (), (Seen(),), Norm(), None), **options)
    (v0, _), (v1, b1), (v2, _) = seen.values()
    norm = len(v0) - 51
    assert_close(whole.vector[:norm], v1[:norm])
    assert_close(whole.vector[norm:], (6 * v0[norm:] + 7 * v2[norm:]) / 13)
    assert_close(torch.cat([t.flatten() for n, t in whole.model.named_buffers() if "running" in n]), b1)


def test_statistics_that_are_sent_without_the_model_are_counted():
    class Compressed(unskew.ClientRule):
        """Uploads two numbers instead of an update."""

        name, summary, paper, sends_model = "compressed", "for tests", "none", False

        def end(self, ctx, carry, v):
            ctx.upload["two"] = v[:2].clone()

    options = {"model": SmallBatchNorm(), "rounds": 2, "engine": "inline", "lr": 0.1}
    summary = {
        b: unskew.run(blobs([6, 9]), method=Compressed(), buffers=b, **options).summary for b in ("average", "local")
    }
    assert summary["average"]["buffer_bytes_up"] == 2 * 2 * 4 * 8 == summary["local"]["report_bytes_up"]
    assert summary["average"]["bytes_up"] - 2 * 2 * 4 * 8 == 2 * 2 * 4 * 2 == summary["local"]["bytes_up"]


@pytest.mark.parametrize(("secure", "size"), [("off", 4), ("required", 8)])
def test_statistics_that_are_sent_for_evaluation_alone_are_reports(secure, size):
    """8 of them by 3 clients in 2 rounds; a masked number has 8 bytes."""
    given = {"model": SmallBatchNorm(), "rounds": 2, "engine": "inline", "secure_aggregation": secure}
    fed, numbers = blobs([6, 9, 7]), 2 * 3 * 8
    average, local = (unskew.run(fed, buffers=b, **given).summary for b in ("average", "local"))
    assert average["buffer_bytes_up"] == size * numbers == local["report_bytes_up"]
    assert "report_bytes_up" not in average
    assert local["buffer_bytes_up"] == 0
    assert average["bytes_up"] - local["bytes_up"] == size * numbers


def test_rules_that_read_single_updates_reject_different_slices():
    with pytest.raises(
        ConfigError, match=r"evenodd.exchanged_slices gives clients different slices .* reads single updates"
    ):
        run(dataclasses.replace(method(Median()), sync=EvenOdd()))


@dataclasses.dataclass(frozen=True)
class Alternate(EvenOdd):
    """All clients of a round send the same slices, others than in the round before."""

    def exchanged_slices(self, state, round, client, last, spec):
        return super().exchanged_slices(state, round, round, last, spec)


def test_updates_of_several_rounds_that_wait_together_are_averaged_by_entry_and_resumed(tmp_path):
    """A buffer of 4 with 3 clients per round contains updates of two rounds."""
    options = {"model": SmallBatchNorm(dropout=0.0), "method": combined(Alternate(), "fedbuff:buffer_size=4")}
    options |= {"rounds": 5, "lr": 0.1, "engine": "inline", "checkpoint_every": 1}
    fed = blobs([6, 9, 7])
    whole = unskew.run(fed, out=tmp_path / "whole", **options)
    for last in (2, 3):
        with pytest.raises(Stop):
            unskew.run(fed, **options, out=tmp_path / f"{last}", callbacks=[StopAfter(last)])
        again = unskew.resume(tmp_path / f"{last}", federation=fed, model=options["model"], method=options["method"])
        assert torch.equal(again.vector, whole.vector)


def test_a_buffer_averages_each_entry_over_the_updates_that_contain_it():
    """The fourth update of a buffer is that of the first client in the next round."""
    sums, masks = Aggregate(), torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    none = torch.zeros(0, dtype=torch.bool)
    for weight, delta, mask in zip((2.0, 3.0, 5.0), ([1.0, 2, 0], [3.0, 4, 0], [0.0, 6, 7]), masks, strict=True):
        sums.add(an_update(delta=delta, weight=weight, buffers=torch.zeros(0)), (mask, none))
    assert_close(sums.delta, [(2 + 9) / 5, (4 + 12 + 30) / 10, 7])
    assert sums.sent[0].all()


class Median(ServerRule):
    """Coordinate-wise median of the updates: needs each of them."""

    name, summary, paper, needs = "coordinate-median", "for tests", "none", ("individual",)

    def step(self, state, updates):
        deltas = torch.stack([u.delta for u in updates])
        assert [u.client for u in updates] == sorted(u.client for u in updates)
        return {"v": state["v"] + deltas.median(0).values}


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
def test_a_server_rule_may_need_individual_updates(engine):
    A, b = problem()
    sim = Quadratics(A, b, method(Median()))
    x = sim.rounds(1)[0]
    moves = []
    for a, y in zip(A, b, strict=True):
        v = np.zeros(3)
        for _ in range(5):
            v -= 0.05 * a.T @ (a @ v - y) / len(a)
        moves.append(v)
    assert_close(x, np.sort(moves, axis=0)[1])  # torch takes the lower of two middles
    assert_engines_agree(run(Median(), engine).vector, run(Median()).vector)


def test_a_server_rule_that_asks_for_sums_gets_only_sums():
    class Curious(Median):
        needs = ()

    with pytest.raises(ConfigError, match="single updates"):
        run(Curious())


def test_two_servers_conflict_and_the_message_names_both_and_the_slot():
    with pytest.raises(MethodConflictError, match=r"fedavgm and fedadam both fill the slot 'server'"):
        method("fedavgm+fedadam")
    with pytest.raises(MethodConflictError, match="server"):
        method("scaffold:eta_g=0.5+fedavgm")
    with pytest.raises(MethodConflictError, match="fedprox appears twice"):
        method("fedprox+fedprox:mu=1")
    assert method("fedavg+fedavg").server == method("fedavg").server


def test_the_order_of_client_rules_is_the_order_written():
    assert [r.name for r in method("scaffold+fedprox").client] == ["scaffold", "fedprox"]
    assert method("fedavgm+scaffold").weights == "uniform"


def test_a_method_of_ones_own_is_found_by_its_path():
    found = method("unskew.methods.fedprox.FedProx:mu=0.5+scaffold")
    assert found.client[0].mu == 0.5
    with pytest.raises(ConfigError, match="is not a method"):
        method("unskew.config.experiment.Experiment")
    with pytest.raises(ConfigError, match="cannot be imported"):
        method("nowhere.at.All")


def test_every_method_of_the_catalogue_says_what_it_is():
    for row in describe_all():
        assert row["slots"], row
        assert re.search("arXiv|ICLR|KDD|CVPR|NeurIPS", row["paper"]), row
        assert row["summary"]


def test_a_client_that_never_took_part_has_no_state():
    A, b = problem()
    sim = Quadratics(A, b, "scaffold", participation=0.25)
    sim.rounds(1)
    (took_part,) = sim.sampler.draw(0)
    for k in range(4):
        assert ("scaffold" in state_at(sim.server, k).rules) == (k == took_part)


def test_clients_of_any_sequence_can_be_registered_by_the_million():
    class Lazy:
        """Client k holds the samples k, k + 1, k + 2 (modulo 50); nothing is stored per client."""

        def __init__(self, x, y, count):
            self.x, self.y, self.count, self.loaded = x, y, count, 0

        def __len__(self):
            return self.count

        def __getitem__(self, k):
            self.loaded += 1
            rows = torch.tensor([k % 50, (k + 1) % 50, (k + 2) % 50])
            empty = torch.zeros(0, dtype=torch.long)
            return unskew.ClientData(k, self.x[rows], self.y[rows], self.x[empty], self.y[empty])

    base = blobs([50])
    clients = Lazy(base.clients.x, base.clients.y, 1_000_000)
    fed = unskew.Federation(clients=clients, test=base.test, classes=3)
    result = unskew.run(fed, model="logistic", rounds=2, participation=1e-5, engine="inline", eval_clients=20)
    assert result.summary["clients"] == 1_000_000
    assert clients.loaded < 200
