"""Tasks and memory of the engine ``processes``: small clients are bundled, and outboxes do not grow with the cohort."""

import multiprocessing
from collections import deque

import pytest
import torch
from support.federations import SmallBatchNorm, blobs

import unskew
from unskew.engines import cpu
from unskew.engines.processes import AHEAD, ProcessesEngine, RoundWork
from unskew.errors import EngineError


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


def _train_in_pool(engine):
    try:
        return train_small(engine).vector.tolist()
    except EngineError as error:
        return str(error)


def train_small(engine, **options):
    torch.manual_seed(0)
    return unskew.run(blobs([9, 9]), model=SmallBatchNorm(), rounds=1, local_steps=1, engine=engine, **options)


def test_in_a_worker_of_a_process_pool_auto_trains_inline_and_processes_names_the_remedy():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_train_in_pool, ("auto",)) == train_small("inline").vector.tolist()
        assert "Use engine='inline' there" in pool.apply(_train_in_pool, ("processes",))


def _compare_in_pool(parallel):
    options = {"model": "logistic", "rounds": 1, "local_steps": 1, "references": False, "seeds": [0]}
    try:
        return len(unskew.compare(blobs([9, 9]), methods=["fedavg", "fedprox"], parallel=parallel, **options).histories)
    except EngineError as error:
        return str(error)


def test_in_a_worker_of_a_process_pool_parallel_auto_means_one_run_after_another():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_compare_in_pool, ("auto",)) == 2
        assert "without parallel" in pool.apply(_compare_in_pool, (2,))


@pytest.mark.parametrize(
    ("limit", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("3200000 100000", 8), ("", 8)]
)
def test_no_more_cores_than_the_limit_of_a_container(limit, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(cpu, "CONTAINER_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda process: range(8))
    assert cpu.num_cores() == cores
