"""Runs side by side: what they give, whom they tell, how they fail, how they are stopped."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from support.federations import blobs
from support.running import Process, assert_same_run, call, metrics
from support.sweeps import small_table

import unskew
from unskew.config.loader import experiment
from unskew.data.federation import ArrayClients
from unskew.engines import auto_select
from unskew.engines.cpu import num_cores
from unskew.engines.mmap_pickle import dump_mmap, load_mmap
from unskew.errors import ConfigError, EngineError
from unskew.runs.parallel import (
    SMALL,
    TOGETHER,
    num_parallel_jobs,
    num_parallel_runs,
    num_runs_per_card,
    read_parallel,
    run_jobs,
    run_jobs_here,
    run_stacked,
    stacks_runs,
)
from unskew.runs.process_pool import Job
from unskew.simulation.checkpoint import list_checkpoints
from unskew.simulation.round_loop import RunInterrupted, interruptible

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = (
    "--clients",
    4,
    "--model",
    "logistic",
    "--rounds",
    3,
    "--local-steps",
    2,
    "--engine",
    "inline",
    "--seeds",
    "0,1",
)


def test_what_lies_in_a_file_is_what_was_laid_there(tmp_path):
    images = torch.rand(3, 4, 4, 2).permute(0, 3, 1, 2)
    model, federation = torch.nn.Linear(2, 3), blobs([5, 4])
    dump_mmap({"images": images, "model": model, "federation": federation, "none": torch.empty(0)}, tmp_path / "file")
    found = load_mmap(tmp_path / "file")
    assert torch.equal(found["images"], images)
    assert found["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found["model"].weight, model.weight)
    assert torch.equal(found["federation"].clients[1].x, federation.clients[1].x)
    with torch.no_grad():
        found["model"].weight.zero_()  # a copy of this process's own: the file stays
    assert torch.equal(load_mmap(tmp_path / "file")["model"].weight, model.weight)


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "257", "9" * 5000, "8@local", "0@auto", "2@somewhere"])
def test_parallel_rejects_what_is_no_number_of_runs(text):
    with pytest.raises(ConfigError, match="is not a number of parallel runs"):
        read_parallel(text)


def test_how_many_runs_are_made_at_a_time(monkeypatch):
    monkeypatch.setattr("unskew.engines.cpu._share", 4)
    assert num_cores() == 4

    def at_once(parallel, runs=8, size=100, **options):
        return num_parallel_runs(parallel, [experiment({"device": "cpu", **options})] * runs, size)

    assert [at_once("auto"), at_once("auto", 3), at_once("auto", 1), at_once("auto", size=SMALL + 1)] == [4, 3, 1, 1]
    assert [at_once("auto", workers=2), at_once("auto", engine="ray"), at_once(6), at_once(6, 2)] == [1, 1, 6, 2]
    assert at_once("auto", engine="ray", ray={"address": "10.0.0.1:6379"}) == 4
    with pytest.raises(ConfigError, match="their own Ray cluster"):
        at_once(2, engine="ray")
    there = [at_once(read_parallel(text)) for text in ("3@10.0.0.1:6379", "auto@auto")]
    assert [(at, at.address, at.auto, at.small) for at in there] == [
        (3, "10.0.0.1:6379", False, True),
        (8, "auto", True, True),
    ]
    assert at_once("1@auto", ray={"deadline": 5}).deadline == 5
    with pytest.raises(ConfigError, match="each run is one task"):
        at_once("2@auto", engine="ray")


class CardMemory:
    """Memory of a card with a number of free bytes."""

    def __init__(self, free):
        self.bytes = free

    def free(self):
        return self.bytes


GIB = 1 << 30


@pytest.mark.parametrize(("free", "runs"), [(0, 1), (4 * GIB - 1, 1), (12 * GIB, 3), (79 * GIB, 16), (500 * GIB, 16)])
def test_a_card_takes_one_small_run_per_core_and_four_gibibytes(monkeypatch, free, runs):
    monkeypatch.setattr("unskew.engines.cpu._share", 16)
    assert num_runs_per_card(CardMemory(free)) == runs


def test_auto_shares_a_card_only_among_small_models(monkeypatch):
    monkeypatch.setattr("unskew.engines.cpu._share", 16)
    monkeypatch.setattr("unskew.runs.parallel.pick_device", torch.device)
    monkeypatch.setattr("unskew.runs.parallel.DeviceMemory", lambda device: CardMemory(20 * GIB))

    def at_once(*devices, size=SMALL, **options):
        return num_parallel_runs("auto", [experiment({"device": name, **options}) for name in devices], size)

    card = ["cuda"] * 8
    assert [at_once(*card), at_once(*card, engine="vectorized"), at_once("cuda", "cuda")] == [5, 5, 2]
    assert [at_once(*card, size=SMALL + 1), at_once(*card, workers=2), at_once("cuda:0", "cuda:1")] == [1, 1, 1]
    assert at_once("cpu", "cpu", engine="vectorized") == 1


def test_which_runs_are_trained_together(monkeypatch):
    def together(parallel, **options):
        return stacks_runs(parallel, [experiment({"device": "cpu", **options})] * 2)

    on_cpu = {parallel: together(parallel, engine="vectorized") for parallel in (None, "auto", "stacked", 1, 2)}
    assert on_cpu == {None: False, "auto": False, "stacked": True, 1: False, 2: False}
    for engine in ("auto", "inline"):
        with pytest.raises(ConfigError, match="Set engine=vectorized"):
            together("stacked", engine=engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not together(None, engine="vectorized")
    on_gpu = [
        together(parallel, engine=engine, device="cuda") for parallel in (None, 1) for engine in ("auto", "inline")
    ]
    assert on_gpu == [True, False, False, False]
    assert [num_parallel_runs(parallel, [experiment({})] * 2, 100) for parallel in (1, None)] == [1, TOGETHER]
    assert not together(None, device="cuda", ray={"address": "10.0.0.1:6379"})


def test_jobs_that_train_several_runs_are_not_stacked():
    assert [num_parallel_jobs(parallel, 3) for parallel in (None, 1, 2)] == [1, 1, 2]
    with pytest.raises(ConfigError, match="parallel=stacked is not possible here"):
        num_parallel_jobs("stacked", 3)


def test_a_table_of_seeds_trained_together_is_the_table(tmp_path, joint):
    alone, told = small_table(tmp_path / "alone", 1, [0, 1], "mlp", "vectorized")
    assert not joint
    assert small_table(tmp_path / "together", "stacked", [0, 1], "mlp", "vectorized") == (alone, told)
    assert set(joint) == {2}


def test_stacked_needs_the_engine_vectorized_before_anything_is_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = call(capsys, "compare", "fedavg", *TINY, "--out", "a", "--parallel", "stacked")
    assert (outcome.code, "Set engine=vectorized" in outcome.err, Path("a").exists()) == (2, True, False)
    options = (*TINY, "--engine", "vectorized", "--no-references", "--out", "b")
    assert call(capsys, "compare", "fedavg", *options, "--parallel", "stacked").code == 0
    assert [len(metrics(folder)) for folder in Path("b").glob("*/seed-*")] == [3, 3]


def echo(given, number, callbacks):
    """Warn, and return the number, the threads, whether the data are in one array, and the planned runs."""
    callbacks[0].warn(f"{number} of {given}")
    if number == 3:
        raise ConfigError("client 3 has bad data")
    return number, torch.get_num_threads(), isinstance(given.clients, ArrayClients), auto_select._planned


class Listener:
    def __init__(self):
        self.told = []

    def warn(self, text):
        self.told.append(text)


@pytest.mark.slow
def test_a_work_is_told_of_here_and_its_error_is_raised_here():
    federation, listener = blobs([5, 4]), Listener()
    works = [Job(n, echo, (n,), lambda: [listener], (n - 1,) if n > 1 else ()) for n in (1, 2, 3, 4)]
    found = []
    with pytest.raises(ConfigError, match="client 3 has bad data"):
        found.extend(run_jobs(works, 1, federation))
    assert found == [(1, (1, num_cores(), True, 4)), (2, (2, num_cores(), True, 4))]
    assert listener.told == [f"{n} of {federation!r}" for n in (1, 2, 3)]


def test_what_has_no_name_elsewhere_cannot_be_sent():
    with pytest.raises(ConfigError, match=r"cannot be pickled.*lambda.* Define classes and functions at module level"):
        list(run_jobs([], 1, lambda: None))


def die(given, callbacks):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_dies_is_told():
    with pytest.raises(EngineError, match=r"died \(exit code -9, one\)"):
        list(run_jobs([Job("one", die), Job("two", die, after=("one",))], 2))


@pytest.mark.slow
def test_a_comparison_side_by_side_is_the_comparison(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods = ("fedavg", "scaffold", "fedprox:mu=0.1")
    assert call(capsys, "compare", *methods, *TINY, "--out", "a").code == 0
    outcome = call(capsys, "compare", *methods, *TINY, "--out", "b", "--parallel", 2)
    assert outcome.code == 0, outcome.err
    folders = [Path(name, f"seed-{seed}") for name in ("fedavg", "scaffold", "fedprox-mu=0.1") for seed in (0, 1)]
    for folder in folders:
        assert_same_run("a" / folder, "b" / folder)
    again = call(capsys, "compare", *methods, *TINY, "--rounds", 4, "--out", "b", "--resume", "--parallel", "auto")
    assert again.code == 0, again.err
    assert all(len(metrics("b" / folder)) == 4 for folder in folders)
    wrong = call(capsys, "compare", "fedavg", "fedals", *TINY, "--delay", "fixed:1", "--out", "c", "--parallel", 2)
    assert (wrong.code, Path("c").exists()) == (2, False)


@pytest.mark.slow
def test_a_table_side_by_side_is_the_table_with_its_common_rounds_made_once(tmp_path):
    alone = small_table(tmp_path / "alone", 1, [0, 1], "mlp")
    assert small_table(tmp_path / "there", 2, [0, 1], "mlp") == alone


@pytest.mark.slow
def test_images_that_several_runs_need_are_made_once(tmp_path):
    options = dict(  # noqa: C408
        seeds=1, model="logistic", rounds=1, local_steps=1, clients=3, engine="inline", parallel=2, out=tmp_path / "c",
        methods=["fedssyn:generator=vae-small,epochs=1,n_syn=5", "fedssyn:generator=vae-small,epochs=1,n_syn=5+scaffold"],
    )  # fmt: skip
    done = unskew.compare(**options)
    assert len({summaries[0]["synthetic"] for summaries in done.summaries.values()}) == 1
    assert len(list((tmp_path / "c" / "synthetic").glob("*/synthetic.json"))) == 1


@pytest.mark.slow
def test_ctrl_c_saves_every_run_and_leaves_no_process(tmp_path, capsys):
    methods, rounds, out = ("fedavg", "scaffold"), 10_000, tmp_path / "c"
    options = (*TINY, "--rounds", rounds, "--set", f"checkpoint_every={rounds}", "--parallel", 2, "--no-references")
    command = ("compare", *methods, *options, "--out", out)
    process = Process(tmp_path, *command)
    begun = [out / name / "seed-0" / "metrics.jsonl" for name in methods]
    assert process.wait_until(lambda: all(path.is_file() and path.read_bytes().count(b"\n") > 4 for path in begun))
    process.signal(signal.SIGINT)
    outcome = process.wait()
    assert outcome.code == 130
    assert "Stopped; the run was saved. To resume, run: " in outcome.err
    assert outcome.err.count("Finishing this round") == 1
    assert not process.alive()
    for path in begun:
        saved = list_checkpoints(path.parent / "checkpoints")
        assert int(saved[-1].name) == len(metrics(path.parent))
    # What it says goes on with all of them.
    rest = call(capsys, *command, "--rounds", 4, "--resume")
    assert "cannot be shortened to 4" in rest.err


def finish_job(given, name, callbacks):
    given.append(name)


def test_jobs_that_are_not_ready_are_passed_over_with_those_after_them():
    done = []
    works = [
        Job("late", finish_job, ("late",), ready=lambda: False),
        Job("after late", finish_job, ("after late",), after=("late",)),
        Job("first", finish_job, ("first",)),
        Job("then", finish_job, ("then",), after=("first",), ready=lambda: "first" in done),
    ]
    assert [name for name, _ in run_jobs_here(works, done)] == done == ["first", "then"]


def interrupt(given, name, callbacks):
    given.append(name)
    handler = signal.getsignal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    while signal.getsignal(signal.SIGINT) is handler:  # until the main thread has noticed it
        time.sleep(0.001)


def interrupt_in_a_round(given, name, callbacks):
    with interruptible():
        interrupt(given, name, callbacks)


def test_ctrl_c_in_the_last_round_of_a_run_starts_no_other_run():
    done = []
    works = [Job(name, interrupt_in_a_round, (name,)) for name in ("fedavg", "scaffold")]
    jobs = run_jobs_here(works, done)
    assert next(jobs)[0] == "fedavg"
    with pytest.raises(RunInterrupted):
        next(jobs)
    assert done == ["fedavg"]
    assert [name for name, _ in run_jobs_here(works[1:], done)] == ["scaffold"], "the last run ends regularly"
    others = [Job(name, finish_job, (name,)) for name in ("moon", "feddyn")]
    assert [name for name, _ in run_jobs_here(others, done)] == ["moon", "feddyn"], "an earlier Ctrl-C is over"


def test_ctrl_c_in_the_last_round_of_runs_together_starts_no_other_runs():
    done = []
    configs = [experiment({"method": name, "device": "cpu"}) for name in ("fedavg", "scaffold")]
    works = [Job(name, interrupt, (name,)) for name in ("fedavg", "scaffold")]
    with pytest.raises(RunInterrupted):
        list(run_stacked(works, done, configs))
    assert done == ["fedavg"]
