"""Estimated times of local steps, from multiplications that are counted by hand."""

import pytest
from torch import nn

from unskew.engines import costs
from unskew.models.spec import ModelSpec


def test_the_work_of_layers_is_counted():
    """A convolution of 2 to 32 channels over 6 x 6 outputs, twice, and a linear layer; a ReLU has only values."""
    conv, relu, linear = 36 * 32 * 2 * 9, 36 * 32, 36 * 32 * 5
    module = nn.Sequential(nn.Conv2d(2, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36 * 32, 5))
    spec = ModelSpec(module, (2, 8, 8), 5)
    more = costs.step_seconds(spec, 11) - costs.step_seconds(spec, 1)
    assert more == pytest.approx(10 * ((conv + linear) * costs.PRODUCT + 2 * relu * costs.VALUE))


def test_a_group_starts_its_operations_once():
    spec = ModelSpec(nn.Linear(3, 2), (3,), 2)
    eight, twenty = (costs.step_seconds(spec, 4, k) for k in (8, 20))
    assert eight < twenty < 1.01 * eight
    assert eight == pytest.approx(costs.TOGETHER * costs.step_seconds(spec, 4), rel=0.01)


@pytest.mark.parametrize(("workers", "group", "turns"), [(0, 1, 10), (2, 1, 5), (4, 1, 3), (2, 5, 1), (2, 3, 2)])
def test_a_round_takes_as_many_turns_as_the_busiest_worker(workers, group, turns):
    messages = 10 * costs.MESSAGE if workers else 0.0
    expected = turns * (7 * 0.5 + group * costs.STEP) + messages
    assert costs.round_seconds(workers, group, 10, 7, 0.5) == pytest.approx(expected)


def test_several_threads_are_not_faster_than_one_for_short_steps():
    assert costs.threads_of(costs.ONE_THREAD / 2, 8) == 1
    assert costs.threads_of(2 * costs.ONE_THREAD, 8) == 8
    assert costs.speedup(costs.FEW_THREADS / 2, 8) == 1.0
    assert costs.speedup(1.0, 1) == 1.0
