"""Tasks and memory of the engine ``processes``: small clients are bundled, and outboxes do not grow with the cohort."""

from collections import deque

import pytest
import torch
from support.federations import blobs

import unskew
from unskew.engines.processes import AHEAD, ProcessesEngine, RoundWork


def tasks_of(steps, workers=2, max_bundle=16):
    work = RoundWork(deque([index] for index in range(len(steps))), steps, workers, max_bundle)
    return [[index for group in task for index in group] for task in iter(work.next_task, [])]


def test_many_small_clients_are_bundled_and_bundles_shrink_towards_the_end():
    sizes = [len(task) for task in tasks_of([2] * 1000)]
    assert sum(sizes) == 1000
    assert sizes[:10] == [16] * 10
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-8:] == [1] * 8


def test_few_clients_and_clients_that_dominate_a_round_are_tasks_of_their_own():
    assert tasks_of([8] * 8) == [[index] for index in range(8)]
    assert tasks_of([900, 1, 1, 1])[0] == [0]
    assert tasks_of([1] * 40, max_bundle=1) == [[index] for index in range(40)]


@pytest.mark.parametrize("method", ["scaffold", "fedavg"])
def test_bundles_change_no_bit_and_outboxes_hold_a_few_tasks_only(method, monkeypatch):
    used = []
    close = ProcessesEngine.close

    def recorded(self):
        used.append([len(outboxes) for outboxes in self.outboxes])
        close(self)

    monkeypatch.setattr(ProcessesEngine, "close", recorded)
    options = {"rounds": 2, "lr": 0.05, "batch_size": 4, "local_steps": 1, "model": "mlp", "workers": 2}
    vectors = []
    for bundle in (1, 16):
        monkeypatch.setattr("unskew.engines.processes.MAX_BUNDLE", bundle)
        torch.manual_seed(0)
        vectors.append(unskew.run(blobs([5] * 60), method=method, engine="processes", **options).vector)
    assert torch.equal(*vectors)
    assert used == [[AHEAD + 1] * 2] * 2


@pytest.mark.parametrize("options", [{"LARGE_BYTES": 0}, {"AHEAD": 1}])
def test_a_large_model_has_fewer_outboxes_and_the_same_bits(options, monkeypatch):
    given = {
        "rounds": 2,
        "lr": 0.05,
        "batch_size": 4,
        "local_steps": 1,
        "model": "mlp",
        "workers": 2,
        "engine": "processes",
    }
    torch.manual_seed(0)
    expected = unskew.run(blobs([5, 9, 7, 8, 6]), **given).vector
    for name, value in options.items():
        monkeypatch.setattr(f"unskew.engines.processes.{name}", value)
    torch.manual_seed(0)
    assert torch.equal(unskew.run(blobs([5, 9, 7, 8, 6]), **given).vector, expected)
