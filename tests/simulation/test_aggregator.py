"""The aggregator treats an opened sum of updates as it treats the updates themselves."""

from dataclasses import replace

import pytest
import torch
from support.quadratic import Quadratics, problem
from support.tolerance import TRAINING, assert_close

from unskew.protocol.messages import SummedUpdate

SIZES = (2, 1, 3, 2)


def trained(method="scaffold"):
    """A new run, and the updates of its first round."""
    run = Quadratics(*problem(SIZES), method)
    return run, list(run.engine.train(run.server.broadcaster.broadcasts(0, range(len(SIZES)))))


def summed(updates, **fields):
    """The sum of some updates, as secure aggregation opens it."""
    uploads = [update.upload for update in updates]
    made = SummedUpdate(
        origin_round=0,
        clients=tuple(update.client for update in updates),
        unusable=(),
        num_samples=sum(update.num_samples for update in updates),
        weight=sum(update.weight for update in updates),
        delta=sum(update.weight * update.delta for update in updates),
        buffers=sum(update.weight * update.buffers for update in updates),
        upload={
            rule: {name: sum(upload[rule][name] for upload in uploads) for name in tensors}
            for rule, tensors in uploads[0].items()
        },
        metrics={"loss": sum(update.metrics["loss"] for update in updates)},
    )
    return replace(made, **fields)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedadam"])
def test_a_sum_moves_the_model_and_the_rules_as_its_updates_do(method):
    (single, updates), (joint, _) = trained(method), trained(method)
    expected, found = single.server.aggregator.step(0, updates), joint.server.aggregator.step(0, [summed(updates)])
    assert_close(joint.server.state.v, single.server.state.v, TRAINING)
    for name, tensors in single.server.state.rules.items():
        for entry, tensor in tensors.items():
            assert_close(joint.server.state.rules[name][entry], tensor, TRAINING)
    assert found["updates"] == expected["updates"] == len(SIZES)
    assert found["train_loss"] == pytest.approx(expected["train_loss"])
    assert joint.server.clients.last_rounds == single.server.clients.last_rounds
    assert joint.server.traffic.total == single.server.traffic.total  # 8 bytes for a number in float64, and if masked


def test_unusable_clients_are_skipped_and_have_sent_no_uploads():
    (single, updates), (joint, _) = trained(), trained()
    single.server.aggregator.step(0, updates[1:])
    found = joint.server.aggregator.step(0, [summed(updates[1:], unusable=(0,))])
    assert (found["updates"], found["skipped"], joint.server.aggregator.skipped.clients) == (3, 1, [0])
    assert_close(joint.server.state.v, single.server.state.v, TRAINING)
    size = 8 * len(single.server.state.v)
    assert joint.server.traffic.total.up - single.server.traffic.total.up == size


@pytest.mark.parametrize("fields", [{"delta": torch.tensor([torch.nan], dtype=torch.float64)}, {"clients": ()}])
def test_without_a_usable_sum_the_model_does_not_change(fields):
    run, updates = trained()
    before = run.server.state.v.clone()
    found = run.server.aggregator.step(0, [summed(updates, unusable=(0,), **fields)])
    assert torch.equal(run.server.state.v, before)
    assert found["updates"] == 0
    assert run.server.clients.last_rounds == {}
