"""Parts of a comparison: together they execute each run once, and the comparison of their runs is that of one command."""

import json
import multiprocessing
import time

import pytest
import torch
from support.running import assert_same_run, call
from support.sites import TINY

import unskew
from unskew.comparison.compare_part import compare_part
from unskew.errors import ConfigError
from unskew.folder_locks import folder_lock
from unskew.runs.parts import Part

pytestmark = pytest.mark.usefixtures("undrawn")
FIELDS = {**TINY, "rounds": 3}
COMPARISON = {"methods": ["fedavg", "scaffold"], "seeds": [0, 3, 5], "references": True, **FIELDS}


def without_seconds(path):
    rows = json.loads(path.read_text())
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def assert_same_comparison(folder, other):
    assert without_seconds(folder / "comparison.json") == without_seconds(other / "comparison.json")
    assert {path.relative_to(folder) for path in folder.rglob("*")} == {
        path.relative_to(other) for path in other.rglob("*")
    }
    runs = sorted(path.parent for path in folder.glob("*/*/config.yaml"))
    assert len(runs) == 12
    for run in runs:
        assert_same_run(run, other / run.relative_to(folder))


def test_parts_together_give_the_comparison_of_one_command(tmp_path):
    started = []

    def follow(name, seed, config):
        started.append((name, seed))
        return []

    folder = tmp_path / "parts"
    finished = [
        compare_part(Part(number, 5), out=folder, callback_factory=follow, **COMPARISON) for number in (4, 2, 5, 1, 3)
    ]
    assert [part.finished for part in finished] == [2, 5, 7, 10, 12]
    assert {part.total for part in finished} == {12}
    assert len(started) == len(set(started)) == 12
    assert sorted(started) == sorted(run for part in finished for run in part.runs)
    assert not [path for path in folder.iterdir() if path.is_file()]  # parts write only the folders of runs
    assembled = unskew.compare(out=folder, resume=True, **COMPARISON)
    alone = unskew.compare(out=tmp_path / "alone", **COMPARISON)
    assert [note for note in assembled.notes() if "second" not in note] == [
        note for note in alone.notes() if "second" not in note
    ]
    assert_same_comparison(folder, tmp_path / "alone")


def test_the_seeds_of_each_method_are_distributed_evenly(tmp_path):
    finished = [
        compare_part(Part(number, 3), out=tmp_path, **{**COMPARISON, "references": False}) for number in (1, 2, 3)
    ]
    assert [part.runs for part in finished] == [[(name, seed) for name in ("fedavg", "scaffold")] for seed in (0, 3, 5)]


def test_an_interrupted_part_continues_its_run(tmp_path):
    class Kill(unskew.Callback):
        def round(self, row):
            if row["round"] == 2:
                raise OSError("the node is gone")

    fields = {**COMPARISON, "methods": ["scaffold"], "references": False, "checkpoint_every": 1}
    folder = tmp_path / "parts"
    with pytest.raises(OSError, match="the node is gone"):
        compare_part(Part(1, 3), out=folder, callback_factory=lambda *_: [Kill()], **fields)
    trained = []

    class Count(unskew.Callback):
        def round(self, row):
            trained.append(row["round"])

    part = compare_part(Part(1, 3), out=folder, callback_factory=lambda *_: [Count()], **fields)
    assert trained[-1] == 3
    assert 1 not in trained
    assert (part.runs, part.finished) == ([("scaffold", 0)], 1)
    unskew.run(method="scaffold", seed=0, out=tmp_path / "alone", **FIELDS, checkpoint_every=1)
    assert_same_run(folder / "scaffold" / "seed-0", tmp_path / "alone")


def execute_part(part, folder, begin, threads):
    torch.set_num_threads(threads)  # another number would round otherwise
    time.sleep(max(0.0, begin - time.time()))  # all at the same time
    compare_part(part, out=folder, **COMPARISON)


@pytest.mark.slow
def test_parts_in_several_processes_at_once(tmp_path):
    context, folder, begin = multiprocessing.get_context("spawn"), tmp_path / "parts", time.time() + 10
    threads = torch.get_num_threads()
    workers = [context.Process(target=execute_part, args=(Part(k, 3), folder, begin, threads)) for k in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    unskew.compare(out=folder, resume=True, **COMPARISON)
    unskew.compare(out=tmp_path / "alone", **COMPARISON)
    assert_same_comparison(folder, tmp_path / "alone")


def test_a_part_without_runs_has_nothing_to_do(tmp_path):
    fields = {**COMPARISON, "seeds": [0], "references": False}
    part = compare_part(Part(3, 3), out=tmp_path / "parts", parallel="auto", budget_minutes=1.0, **fields)
    assert (part.runs, part.finished, part.total) == ([], 0, 2)


def test_a_part_rejects_a_run_that_another_process_executes_and_other_settings(tmp_path):
    fields = {**COMPARISON, "methods": ["fedavg"], "seeds": [0, 1], "references": False}
    compare_part(Part(1, 2), out=tmp_path, **fields)
    (tmp_path / "fedavg" / "seed-1").mkdir()
    with folder_lock(tmp_path / "fedavg" / "seed-1"), pytest.raises(ConfigError, match="Another process is working"):
        compare_part(Part(2, 2), out=tmp_path, **fields)
    with pytest.raises(ConfigError, match=r"lr=0\.05 and cannot be resumed with lr=0\.5"):
        compare_part(Part(2, 2), out=tmp_path, **{**fields, "lr": 0.5})


def test_a_part_writes_through_no_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "fedavg").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        compare_part(Part(1, 2), out=tmp_path / "parts", **COMPARISON)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_command_prints_what_is_finished(tmp_path, capsys):
    flags = ["--rounds", 1, "--model", "logistic", "--engine", "inline", "--seeds", "0", "--no-references"]
    arguments = ("compare", "fedavg", "scaffold", *flags, "--out", tmp_path / "study")
    first = call(capsys, *arguments, "--part", "2/2")
    assert first.code == 0, first.err
    expected = (
        f"Part 2/2: 1 run finished. In {tmp_path / 'study'}, 1 of 2 are. When all are, replace --part 2/2 by --resume"
    )
    assert expected in " ".join(first.out.split())
    second = json.loads(call(capsys, *arguments, "--part", "1/2", "--json").out)
    assert second == {
        "folder": str(tmp_path / "study"),
        "part": "1/2",
        "runs": [["fedavg", 0]],
        "finished": 2,
        "total": 2,
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--part", "1/2"], "--part requires --out"),
        (["--part", "0/2", "--out", "study"], "parts are numbered from 1"),
        (["--part", "1/2", "--out", "study", "--leave-one-out"], "does not divide the runs of --leave-one-out"),
        (["--part", "1/2", "--out", "study", "--parallel", "2@auto"], "both distribute the work"),
    ],
)
def test_the_command_rejects_options_that_contradict_a_part(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    outcome = call(capsys, "compare", "fedavg", "scaffold", *flags)
    assert outcome.code == 2
    assert message in outcome.err
    assert not list(tmp_path.iterdir())
