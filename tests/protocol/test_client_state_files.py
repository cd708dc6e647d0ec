"""What stays at a client, whatever a rule is called; and that a client reads of a broadcast only what was sent to it."""

from dataclasses import replace

import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import state_at
from support.quadratic import Quadratics, problem
from support.slow import slow_but
from support.tolerance import assert_close

import unskew
from unskew.models.layer_groups import buffer_mask
from unskew.models.spec import slices_mask
from unskew.protocol.rules import ClientRule
from unskew.protocol.training_config import Training
from unskew.simulation.network import Network

NAMES = ("model", "optimizer", "statistics", "buffers")
"""What a rule of one's own may be called, although the core keeps something of that name, or once did."""


class Counting(ClientRule):
    """Each client's gradient is shorter by a tenth for every round that it took part in before."""

    summary, paper = "for tests", "none"
    needs = ("optimizer",)  # so that the core keeps something, too

    def __init__(self, name):
        self.name = name

    def gradient(self, grad_fn, ctx, carry):
        rounds = ctx.state.get("rounds", torch.zeros((), dtype=ctx.v_global.dtype))
        return lambda v, batch: grad_fn(v, batch) * (1 - 0.1 * rounds)

    def end(self, ctx, carry, v):
        ctx.state["rounds"] = ctx.state.get("rounds", torch.zeros((), dtype=v.dtype)) + 1


def run(name, rounds=4, **options):
    torch.manual_seed(1)
    given = {"lr": 0.1, "local_steps": 2, "batch_size": 100, "momentum": 0.5, "participation": 0.7, "engine": "inline"}
    return unskew.run(
        blobs([6, 9, 7]), model=SmallBatchNorm(), method=[Counting(name), "fedals:alpha=2"], rounds=rounds,
        precision="fp64", **{**given, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def under_another_name():
    return run("counting", diagnose="local_models")


def test_the_state_is_there_in_the_next_round():
    A, b = problem()
    for name in NAMES:
        sim = Quadratics(A, b, unskew.method([Counting(name)]), participation=0.5)
        sim.rounds(5)
        parts = [sum(k in sim.sampler.draw(t) for t in range(5)) for k in range(4)]
        assert max(parts) > 1
        for k, rounds in enumerate(parts):
            kept = state_at(sim.server, k)
            assert kept.rules == ({name: {"rounds": torch.tensor(float(rounds))}} if rounds else {})
            assert (kept.model, kept.buffers) == (None, None)


@pytest.mark.parametrize("engine", slow_but(["processes"], ["inline", "processes"]))
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_the_same_whatever_its_rule_is_called(name, engine, under_another_name):
    """Beside models, momentum and statistics that the core keeps, and with local models measured."""
    mine = run(name, engine=engine, workers=2, diagnose="local_models")
    assert torch.equal(mine.vector, under_another_name.vector)
    for row, expected in zip(mine.history, under_another_name.history, strict=True):
        for figure in ("local_distance", "local_accuracy", "bytes_up"):
            assert row[figure] == expected[figure]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_state(name, tmp_path, under_another_name):
    run(name, rounds=2, out=tmp_path / "run")
    method = [Counting(name), "fedals:alpha=2"]
    rest = unskew.resume(tmp_path / "run", federation=blobs([6, 9, 7]), model=SmallBatchNorm, method=method, rounds=4)
    assert torch.equal(rest.vector, under_another_name.vector)


# ---- broadcasts --------------------------------------------------------------------------------------------------------


def two_layers():
    """With statistics, which travel with the layer before them."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 2, bias=False), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1, bias=False)
    )


def sliced(chosen, rounds):
    """A run of methods that send slices, some rounds on, and what each client of the last round knows of the model."""
    A, b = problem()
    training = Training(local_steps=3, batch_size=100, lr=0.03, momentum=0.8, precision="fp64")
    sim = Quadratics(A, b, chosen, training, participation=0.5, module=two_layers())
    sim.rounds(rounds)
    return sim


def beyond(broadcast, spec, off):
    """The broadcast as its client knows it: what is sent, ``initial`` from the seed, and ``off`` by all in the rest."""
    places = slices_mask(broadcast.down, spec.size), buffer_mask(spec, broadcast.down)
    sent = (torch.where(mask, t, t + off) for mask, t in zip(places, (broadcast.v, broadcast.b), strict=True))
    first = slices_mask(broadcast.initial, spec.size), buffer_mask(spec, broadcast.initial)
    starts = spec.flatten(), spec.flatten_buffers()
    v, b = (torch.where(mask, start, t) for mask, start, t in zip(first, starts, sent, strict=True))
    return replace(broadcast, v=v, b=b)


@pytest.mark.parametrize("newcomer", [True, False])
@pytest.mark.parametrize("chosen", ["fedrep", "fedals:alpha=4"])
def test_a_client_reads_of_a_broadcast_only_what_is_sent_and_what_all_know_from_the_beginning(chosen, newcomer):
    sim = sliced(chosen, 1)
    client = next(k for k in range(4) if (k not in sim.server.clients.last_rounds) is newcomer)
    broadcast = sim.server.broadcaster.broadcast(1, client)
    assert bool(broadcast.initial) is (newcomer and chosen == "fedrep")
    poisoned = beyond(broadcast, sim.spec, float("nan"))
    assert bool(poisoned.v.isnan().any()) is not newcomer, "a newcomer knows all of the model"
    # In FedRep statistics belong to the body, which is sent.
    assert bool(poisoned.b.isnan().any()) is (not newcomer and chosen != "fedrep")
    ((plain,), (mine,)) = (list(sim.engine.train([one])) for one in (broadcast, poisoned))
    for name, tensor in plain.tensors().items():
        assert torch.equal(mine.tensors()[name], tensor), name
    assert mine.metrics["loss"] == plain.metrics["loss"]


def test_of_slices_that_a_client_sends_but_was_not_sent_its_own_values_matter():
    """The body is due, but the client has its own: what the update stands for is the client's model, ``delta + v``."""
    sim = sliced("fedals:alpha=3", 2)
    client = next(k for k, last in sim.server.clients.last_rounds.items() if last == 1)
    broadcast = sim.server.broadcaster.broadcast(2, client)
    assert broadcast.up != broadcast.down
    poisoned = beyond(broadcast, sim.spec, 1000.0)
    ((plain,), (mine,)) = (list(sim.engine.train([one])) for one in (broadcast, poisoned))
    assert torch.equal(mine.state.model, plain.state.model)
    assert torch.equal(mine.buffers, plain.buffers)
    assert_close(mine.delta + poisoned.v, plain.delta + broadcast.v, size=1000.0)


def test_accepted_is_the_round_of_the_last_update_that_was_taken_in():
    A, b = problem()
    sim = Quadratics(A, b, "scaffold")

    def accepted(round):
        return [sim.server.broadcaster.broadcast(round, k).accepted for k in range(4)]

    assert accepted(0) == [None] * 4
    sim.rounds(1)
    assert accepted(1) == [0] * 4
    # Dropped: what was sent out in this round never comes back.
    sim.network = Network(0.5, 0)
    lost = [sim.network.drops(1, k) for k in range(4)]
    assert 0 < sum(lost) < 4
    sim.rounds(1)
    assert accepted(2) == [0 if gone else 1 for gone in lost]
    # Not finite: left out, and so is what stays at the client.
    before = state_at(sim.server, 2).rules["scaffold"]
    updates = list(sim.engine.train([sim.server.broadcaster.broadcast(2, k) for k in range(4)]))
    updates[2] = replace(updates[2], delta=updates[2].delta * float("nan"))
    sim.server.aggregator.step(2, updates)
    assert accepted(3) == [2, 2, 0 if lost[2] else 1, 2]
    after = state_at(sim.server, 2).rules["scaffold"]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
