"""Outcomes are found by the identity of a run, also by versions whose configuration has more fields."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from unskew.config.experiment import Experiment, NetworkConfig
from unskew.config.loader import experiment
from unskew.errors import DataError
from unskew.reproduction.outcomes import (
    EARLIER,
    append_outcome,
    experiment_hash,
    identity_hash,
    merge_outcomes,
    read_outcome,
    run_identity,
    store_outcome,
    stored_outcomes,
    write_outcome,
)

RUNS = Path(__file__).parents[2] / "results" / "runs"
SOME = {"data": "cifar10", "method": "feddle:lr=0.01", "network": {"delay": "half-normal:20"}, "seed": 3}


class LaterNetwork(NetworkConfig):
    jitter: float = 0.0


class LaterExperiment(Experiment):
    network: LaterNetwork = LaterNetwork()
    shuffle: bool = True


def test_no_outcome_names_a_path_of_one_machine():
    for key, stored in stored_outcomes(RUNS).items():
        assert not [v for v in stored.outcome["run"].values() if str(v).startswith("/")], key


@pytest.mark.parametrize("kind", [Experiment, LaterExperiment])
def test_every_run_is_found_by_its_configuration_also_when_fields_are_added(kind):
    for key, stored in stored_outcomes(RUNS).items():
        if key.startswith(EARLIER):
            continue
        run = dict(stored.outcome["run"])
        if "study" in run:
            assert key == identity_hash(run)
            continue
        parent = run.pop("begins_with", None)
        before = {"lr": 0.01}  # the default when the first outcomes were stored
        configs = [None if one is None else kind.model_validate({**before, **one}) for one in (run, parent)]
        assert experiment_hash(*configs) == key, (stored.path, stored.line)


def test_a_field_with_its_default_names_nothing_anew():
    for values in ({}, SOME):
        assert experiment_hash(LaterExperiment.model_validate(values)) == experiment_hash(experiment(values))
    other = [{**SOME, "shuffle": False}, {**SOME, "network": {**SOME["network"], "jitter": 0.5}}]
    keys = {experiment_hash(LaterExperiment.model_validate(values)) for values in (SOME, *other)}
    assert len(keys) == 3
    assert run_identity(LaterExperiment.model_validate(other[1]))["network"]["jitter"] == 0.5
    assert run_identity(experiment({"model_options": {"width": None}}))["model_options"] == {"width": None}


def test_an_outcome_is_found_in_any_file_and_the_last_one_of_a_run_counts(tmp_path):
    runs = [run_identity(experiment({**SOME, "seed": seed})) for seed in (3, 4)]
    append_outcome(tmp_path, "paper/table-1", runs[0], {"summary": {"accuracy": 0.5}})
    append_outcome(tmp_path, "paper/table-1", runs[0], {"summary": {"accuracy": 0.6}})
    assert read_outcome(tmp_path, runs[0])["summary"] == {"accuracy": 0.6}
    assert read_outcome(tmp_path, runs[1]) is None
    (tmp_path / "paper" / "table-1.jsonl").rename(tmp_path / "anything.jsonl")
    append_outcome(tmp_path, "table:2", runs[1], {"summary": {}})
    assert [path.name for path in sorted(tmp_path.rglob("*.jsonl"))] == ["anything.jsonl", "table-2.jsonl"]
    assert read_outcome(tmp_path, runs[0])["summary"] == {"accuracy": 0.6}
    assert stored_outcomes(tmp_path)[identity_hash(runs[0])].line == 2
    assert set(read_outcome(tmp_path, runs[1])["made_with"]) == {"torch", "python", "cores"}


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_an_incomplete_last_line_is_ignored_and_replaced(tmp_path, cut):
    runs = [run_identity(experiment({**SOME, "seed": seed})) for seed in (3, 4, 5)]
    for run in runs[:2]:
        append_outcome(tmp_path, "table", run, {"summary": {"seed": run["seed"]}})
    path = tmp_path / "table.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])  # as after a kill
    assert read_outcome(tmp_path, runs[1]) is None
    assert read_outcome(tmp_path, runs[0])["summary"] == {"seed": 3}
    for run in (runs[2], runs[1]):
        append_outcome(tmp_path, "table", run, {"summary": {"seed": run["seed"]}})
    assert [read_outcome(tmp_path, run)["summary"]["seed"] for run in runs] == [3, 4, 5]
    assert len(path.read_text().splitlines()) == 3


def append_many(folder, worker):
    for number in range(20):
        append_outcome(
            folder, "table", {"study": "s", "worker": worker, "number": number}, {"summary": {"text": "x" * 20_000}}
        )


def test_several_processes_append_to_one_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=append_many, args=(tmp_path, worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(stored_outcomes(tmp_path)) == 60
    assert [path.name for path in tmp_path.iterdir()] == ["table.jsonl"]


def write_many(folder, worker):
    for number in range(20):
        write_outcome(
            folder, "table", {"study": "s", "worker": worker, "number": number}, {"summary": {"text": "x" * 20_000}}
        )
        stored_outcomes(folder)  # also while the files of others are moved


@pytest.mark.slow
def test_files_of_single_runs_are_merged_while_several_processes_write_them(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(tmp_path, worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        merge_outcomes(tmp_path, "table", [])
        time.sleep(0.02)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    merge_outcomes(tmp_path, "table", [])
    assert [path.name for path in tmp_path.iterdir()] == ["table.jsonl"]
    assert len((tmp_path / "table.jsonl").read_text().splitlines()) == len(stored_outcomes(tmp_path)) == 60


def test_files_of_single_runs_are_merged_in_the_given_order_and_once(tmp_path):
    runs = [{"study": "s", "number": number} for number in range(4)]
    append_outcome(tmp_path, "table", runs[0], {"summary": {"text": "first"}})
    for table, run in (("table", runs[3]), ("table", runs[1]), ("table", runs[2]), ("table.2", runs[1])):
        write_outcome(tmp_path, table, run, {"summary": {"text": table}})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(stored_outcomes(tmp_path)) == 4
    merge_outcomes(tmp_path, "table", [identity_hash(runs[2]), identity_hash(runs[3]), identity_hash(runs[1])])
    lines = (tmp_path / "table.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"]["number"] for line in lines] == [0, 2, 3, 1]
    assert len(list(tmp_path.iterdir())) == 2  # the file of the other table stays
    for path, content in before.items():
        if path.name != "table.jsonl":
            path.write_bytes(content)  # as if the command had been killed before it removed the files
    merge_outcomes(tmp_path, "table", [])
    assert (tmp_path / "table.jsonl").read_text().splitlines() == lines


def test_a_cut_file_of_a_single_run_damages_no_other_run(tmp_path):
    runs = [{"study": "s", "number": number} for number in range(3)]
    for run in runs:
        write_outcome(tmp_path, "table", run, {"summary": {"text": "x"}})
    cut = tmp_path / f"table.{identity_hash(runs[1])}.jsonl"
    cut.write_bytes(cut.read_bytes()[:-5])
    merge_outcomes(tmp_path, "table", [identity_hash(run) for run in runs])
    append_outcome(tmp_path, "table", runs[1], {"summary": {"text": "again"}})
    assert [path.name for path in tmp_path.iterdir()] == ["table.jsonl"]
    assert [read_outcome(tmp_path, run)["summary"]["text"] for run in runs] == ["x", "again", "x"]


def test_a_corrupted_file_of_a_single_run_is_reported_before_any_is_moved(tmp_path):
    runs = [{"study": "s", "number": number} for number in range(2)]
    for run in runs:
        write_outcome(tmp_path, "table", run, {"summary": {"text": "x"}})
    (tmp_path / f"table.{identity_hash(runs[1])}.jsonl").write_text("{\n")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"Line 1 of .*jsonl is corrupted"):
        merge_outcomes(tmp_path, "table", [])
    assert sorted(tmp_path.iterdir()) == before


def merge_many(folder, start):
    start.wait()
    for _ in range(200):
        merge_outcomes(folder, "table", [])


def test_several_processes_merge_the_files_of_single_runs(tmp_path):
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    workers = [context.Process(target=merge_many, args=(tmp_path, start)) for _ in range(2)]
    for worker in workers:
        worker.start()
    start.wait()
    for number in range(60):
        write_outcome(tmp_path, "table", {"study": "s", "number": number}, {"summary": {"text": "x" * 20_000}})
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    merge_outcomes(tmp_path, "table", [])
    assert [path.name for path in tmp_path.iterdir()] == ["table.jsonl"]
    assert len((tmp_path / "table.jsonl").read_text().splitlines()) == 60


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "3", '{"summary": {}}', '{"run": 3}', '{"run": {}, "x": NaN}', '{"run": {}', '{"run": {}}'),
        *('{"run": {}, "summary": 3}', '{"run": {}, "not_applicable": 3}', '{"run": {}, "objective": "accuracy"}'),
        '{"run": {}, "summary": {}, "curve": {"round": [1, "two"]}}',
        '{"run": {}, "summary": {}, "summaries": [{"accuracy": 0.5, "bytes": 3}]}',
        '{"run": {}, "summary": {}, "summaries": [{"accuracy": "0.5", "bytes": 3, "diverged": false}]}',
        '{"run": {}, "summary": {}, "summaries": []}',
        '{"run": {"seeds": [1, 2]}, "summary": {}, "summaries": [{"bytes": 3, "diverged": false}], "curves": [[]]}',
        '{"run": {}, "summary": {}, "rounds": [1], "bytes": [2.0], "curves": [[0.5, 0.6]]}',
    ],
)
def test_a_corrupted_line_is_an_error_that_names_it(tmp_path, line):
    append_outcome(tmp_path, "table", {"study": "s"}, {"summary": {}})
    path = tmp_path / "table.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"Line 2 of .*table\.jsonl is corrupted \(.+\)\. Remove the line"):
        read_outcome(tmp_path, {"study": "other"})


def test_outcomes_measured_before_a_default_changed_are_marked_and_superseded_by_new_ones(tmp_path):
    from unskew.reproduction import tables
    from unskew.reproduction.preset import load_preset
    from unskew.reproduction.sweep import Sweep

    sweep = Sweep(load_preset("fedssyn/table-1"), "paper", tmp_path / "runs", tmp_path, {})
    (cell,) = (c for c in sweep.cells(0) if (c.row, c.column) == ("FedAvg + Fedssyn", "N=10, C=1, α=0.01"))
    method, traffic = cell.config.method, {"bytes_up": 1, "bytes_down": 1}
    summary = {"accuracy": 0.5, "rounds_to_target": 1, "bytes_to_target": 2, "target": 0.8, **traffic}
    result = {"summary": summary, "curve": {"round": [1], "bytes": [2], "accuracy": [0.5]}}
    for seed in (0, 1):
        run = run_identity(cell.of_seed(seed).config)
        earlier = {**run, "method": f"{method},match_steps=epochs"}
        append_outcome(tmp_path, "table", earlier, {**result, "stands_in_for": method, "difference": "with epochs"})
    store_outcome(tmp_path, "table", cell.of_seed(1).config, None, [{"round": 1, "accuracy": 0.5, **traffic}], summary)
    found = list(sweep.found([0, 1]))
    assert [(c.row, c.config.seed) for c, _ in found] == [("FedAvg + Fedssyn †", 0), ("FedAvg + Fedssyn", 1)]
    assert {e.row: e.published for e in tables.table_entries(sweep.preset, found)} == dict.fromkeys(
        (c.row for c, _ in found), 4
    )
    assert tables.footnotes(found) == ["† Measured with an earlier default: with epochs."]
    assert tables.footnotes(found[1:]) == []
