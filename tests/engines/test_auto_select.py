"""``auto`` decides by estimates in short runs and by a trial in long ones; the trial changes nothing and is stored."""

import json

import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.running import Stop, StopAfter, assert_same_run

import unskew
from unskew.comparison import comparison_plan
from unskew.engines import auto_select, calibration, costs, timing
from unskew.engines.auto_select import EngineChoice, EngineRequest, choose_engine
from unskew.json_models import write_model

SIZES = [16, 16, 16, 24]
GIVEN = {"rounds": 4, "lr": 0.05, "batch_size": 8, "local_epochs": 1, "checkpoint_every": 1}


def train(out=None, **options):
    torch.manual_seed(0)
    return unskew.run(blobs(SIZES), model=SmallBatchNorm(), out=out, **{**GIVEN, **options})


@pytest.fixture
def forbid(monkeypatch):
    """No trial from when it is called."""
    begun = []
    yield lambda: monkeypatch.setattr(timing, "steps_workload", lambda *args: begun.append(args))
    assert not begun


@pytest.fixture
def measured(monkeypatch):
    """A long run on one core; the given seconds are those of one step alone and of each group size, also in later runs."""
    monkeypatch.setattr(auto_select, "SHARE", 1e9)
    monkeypatch.setattr(auto_select, "LONG_STEP", float("inf"))
    monkeypatch.setattr(auto_select, "num_cores", lambda: 1)
    monkeypatch.setattr(auto_select.calibration, "read_entries", dict)
    monkeypatch.setattr(auto_select.calibration, "save_measurement", lambda key, measurement: None)
    monkeypatch.setattr(auto_select, "GROUP_SECONDS", 1e9)
    seconds = {}

    def seconds_of(workloads, clock):
        for workload in workloads.values():
            workload()
        return {k: seconds[k] for k in workloads}

    monkeypatch.setattr(auto_select.timing, "min_seconds", seconds_of)
    return lambda alone, several: seconds.update({1: alone, 4: several})


def test_a_short_run_is_decided_without_a_trial(forbid, tmp_path):
    forbid()
    result = train(tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "engine.json").read_text())
    assert (kept["decided"], kept["clients_per_group"], kept["trial"]) == ("rule", 1, {})
    assert (result.summary["engine"], result.summary["clients_per_group"]) == (kept["engine"], 1)


def test_what_was_measured_is_kept_for_the_resumed_run(measured, forbid, tmp_path):
    measured(1.0, 2.0)
    whole = train(tmp_path / "whole")
    kept = json.loads((tmp_path / "whole" / "engine.json").read_text())
    assert (kept["engine"], kept["clients_per_group"], kept["decided"]) == ("inline", 4, "measured")
    assert len(kept["trial"]) == 2
    assert whole.summary["clients_per_group"] == 4
    measured(1.0, 2.0)
    with pytest.raises(Stop):
        train(tmp_path / "run", callbacks=[StopAfter(2)])
    forbid()
    unskew.resume(tmp_path / "run", federation=blobs(SIZES), model=SmallBatchNorm())
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_several_clients_must_be_faster_by_more_than_noise(measured):
    measured(1.0, 3.9)
    assert train().summary["clients_per_group"] == 1


@pytest.mark.parametrize(("taken", "workers"), [(0.45, 2), (0.6, 4)])
def test_fewer_workers_are_taken_where_they_are_faster(measured, monkeypatch, tmp_path, taken, workers):
    """Half of them have two parts each, so a part must take less than half of the time."""
    monkeypatch.setattr(auto_select, "num_cores", lambda: 4)
    monkeypatch.setattr(auto_select.processes, "fork_available", lambda: True)
    seconds = {4: 1.0, 2: taken}
    looked = []

    def in_processes(setup, form, groups, steps, count):
        looked.append(count)
        return {k: k * seconds[count] for k in groups}

    monkeypatch.setattr(auto_select.timing, "time_in_processes", in_processes)
    measured(100.0, 100.0)
    found = []
    choose = auto_select.choose_engine
    monkeypatch.setattr(
        "unskew.runs.simulated_clients.choose_engine",
        lambda *args: found.append(choose(*args)) or auto_select.EngineChoice("inline", 1),
    )
    unskew.run(blobs([9, 9, 9, 9]), model=SmallBatchNorm(), **GIVEN)
    assert looked == [4, 2]
    assert (found[0].engine, found[0].workers) == ("processes", workers)
    assert found[0].trial["processes, 2 workers"] == pytest.approx(2 * taken * found[0].trial["processes"], rel=0.01)


def test_a_trial_changes_nothing(measured):
    """The same model bit for bit as where the same was asked for."""
    measured(1.0, 2.0)
    found = train()
    after = torch.get_rng_state()
    asked = train(engine="inline", clients_per_group=4)
    assert found.summary["clients_per_group"] == 4
    assert torch.equal(asked.vector, found.vector)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_failed_measurement_is_logged_and_the_default_is_used(measured, monkeypatch):
    def fail(*args):
        raise RuntimeError("no memory")

    messages = []
    monkeypatch.setattr(auto_select, "_measure", fail)
    monkeypatch.setattr(auto_select.LOG, "info", lambda text, *values: messages.append(text % values))
    train()
    assert len(messages) == 1
    assert messages[0].startswith("Engines could not be compared (no memory")


def test_on_resuming_nothing_is_measured_and_the_user_may_decide(measured, forbid, tmp_path):
    measured(1.0, 2.0)
    with pytest.raises(Stop):
        train(tmp_path / "run", callbacks=[StopAfter(2)])
    forbid()
    given = {"federation": blobs(SIZES), "model": SmallBatchNorm()}
    own = unskew.resume(tmp_path / "run", engine="inline", clients_per_group=2, **given)
    assert own.summary["clients_per_group"] == 2
    (tmp_path / "run" / "engine.json").write_text("damaged")
    assert (
        unskew.resume(tmp_path / "run", rounds=5, engine="auto", clients_per_group="auto", **given).summary[
            "clients_per_group"
        ]
        == 1
    )


def test_a_trial_in_processes_measures_every_number_of_clients(monkeypatch):
    found = {}

    def look(setup):
        found.update(timing.time_in_processes(setup, setup.group_form(), [1, 2], 1, 2))

    setup_of(monkeypatch, look)
    train(rounds=1)
    assert set(found) == {1, 2}
    assert all(seconds > 0 for seconds in found.values())


def setup_of(monkeypatch, look):
    def looked(asked, setup, *args):
        look(setup)
        return EngineChoice("inline", 1)

    monkeypatch.setattr("unskew.runs.simulated_clients.choose_engine", looked)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (EngineRequest("inline", None, "auto"), ("inline", 1)),
        (EngineRequest("inline", None, 3), ("inline", 3)),
        (EngineRequest("processes", 2, 9), ("processes", 4)),
        (EngineRequest("vectorized", None, "auto"), ("vectorized", 1)),
    ],
)
def test_what_the_user_asks_for_is_honoured(asked, expected, monkeypatch, forbid):
    forbid()

    def look(setup):
        found = choose_engine(asked, setup, 4, 1000, None, False)
        assert (found.engine, found.clients_per_group) == expected
        assert (found.decided, found.threads) == ("given" if "auto" not in asked.identity[2:] else "rule", None)

    setup_of(monkeypatch, look)
    train(rounds=1, clients_per_group=1)


def test_vectorized_takes_no_number_of_clients():
    with pytest.raises(unskew.UnskewError, match="clients_per_group applies to inline and processes"):
        train(engine="vectorized", clients_per_group=2)


def test_bits_do_not_depend_on_the_worker_that_trains_a_part():
    one, two = (train(engine="processes", workers=n, clients_per_group=2, rounds=2).vector for n in (1, 2))
    assert torch.equal(one, two)


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A long run on one core with a calibration file of its own; returns how often a workload was timed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto_select, "SHARE", 1e9)
    monkeypatch.setattr(auto_select.processes, "fork_available", lambda: True)
    monkeypatch.setattr(auto_select, "num_cores", lambda: 2)
    timed = []
    monkeypatch.setattr(
        timing, "min_seconds", lambda workloads, clock: timed.append(1) or dict.fromkeys(workloads, 1.0)
    )
    monkeypatch.setattr(
        timing, "time_in_processes", lambda setup, form, groups, *rest: timed.append(1) or dict.fromkeys(groups, 1.0)
    )
    return timed


def test_a_second_run_uses_the_calibration_file_and_decides_the_same(counted):
    first = train(engine="processes", clients_per_group="auto", workers=2).summary
    assert counted
    counted.clear()
    second = train(engine="processes", clients_per_group="auto", workers=2).summary
    assert not counted
    assert first["clients_per_group"] == second["clients_per_group"] == 2


@pytest.fixture
def share_of(monkeypatch):
    """Make a trial of one client and of two together as expensive as the given share of this many runs of 36 local steps."""

    def set_share(runs):
        monkeypatch.setattr(costs, "START", 0.0)
        monkeypatch.setattr(costs, "MESSAGE", 0.0)
        monkeypatch.setattr(costs, "STEP", 0.0)
        monkeypatch.setattr(costs, "step_seconds", lambda spec, batch_size, clients=1: 1e-3 * clients)
        # Four rounds, in each of which two workers train two clients with 2.25 steps on average.
        trial, run = auto_select.REPEATED * 3 * 1e-3, 4 * 2 * 2.25 * 1e-3
        monkeypatch.setattr(auto_select, "SHARE", trial / (runs * run))

    return set_share


def sizes_timed(monkeypatch):
    sizes = []

    def time_groups(setup, form, groups, *rest):
        sizes.append(groups)
        return dict.fromkeys(groups, 0.001)

    monkeypatch.setattr(timing, "time_in_processes", time_groups)
    return sizes


OPTIONS = {"engine": "processes", "clients_per_group": "auto", "workers": 2}


def test_many_short_runs_lead_to_one_trial(counted, share_of, monkeypatch):
    """Three runs together are long enough, of which two and a half would be."""
    share_of(2.5)
    sizes = sizes_timed(monkeypatch)
    found = [train(**OPTIONS).summary["clients_per_group"] for _ in range(4)]
    assert sizes == [[1, 2]]
    assert found == [1, 1, 2, 2]


@pytest.mark.parametrize(("runs", "expected"), [(2, 1), (3, 2)])
def test_a_command_of_several_runs_measures_in_the_first(counted, share_of, monkeypatch, runs, expected):
    share_of(2.5)
    sizes_timed(monkeypatch)
    with auto_select.planned_runs(runs):
        assert train(**OPTIONS).summary["clients_per_group"] == expected


def test_a_comparison_plans_all_its_runs(monkeypatch):
    seen, run = [], comparison_plan.run_or_resume
    monkeypatch.setattr(
        comparison_plan,
        "run_or_resume",
        lambda *args, **options: seen.append(auto_select._planned) or run(*args, **options),
    )
    options = {"methods": ["fedavg", "fedprox"], "seeds": 2, "references": False, "engine": "inline"}
    unskew.compare(blobs(SIZES), model=SmallBatchNorm(), **{**GIVEN, "rounds": 1, **options})
    assert seen == [4] * 4
    assert auto_select._planned == 1


def test_other_group_sizes_are_added_to_the_stored_ones(counted, monkeypatch):
    """With another cohort, only the missing times are measured, and the stored ones are kept for the first cohort."""
    sizes = sizes_timed(monkeypatch)
    for sizes_of_clients in (SIZES, [16] * 6, SIZES, [16] * 6):
        torch.manual_seed(0)
        budget = {"local_epochs": None, "local_steps": 2}
        unskew.run(blobs(sizes_of_clients), model=SmallBatchNorm(), **{**GIVEN, **OPTIONS, **budget})
    assert sizes == [[1, 2], [1, 3]]


def test_a_tiny_run_trains_in_the_main_process_with_one_thread(monkeypatch, tmp_path):
    """Starting workers takes longer than its two steps, and a step is too short for several threads."""
    monkeypatch.setattr(auto_select, "num_cores", lambda: 4)
    monkeypatch.setattr(auto_select.processes, "fork_available", lambda: True)
    before, threads = torch.get_num_threads(), []

    class Threads(unskew.Callback):
        def round(self, row):
            threads.append(torch.get_num_threads())

    result = train(tmp_path / "run", rounds=1, callbacks=[Threads()])
    kept = json.loads((tmp_path / "run" / "engine.json").read_text())
    assert (kept["engine"], kept["threads"], kept["decided"]) == ("inline", 1, "rule")
    assert result.summary["engine"] == "inline"
    assert threads == [1]
    assert torch.get_num_threads() == before


def test_another_model_or_budget_is_measured_again(counted):
    for options in ({}, {"batch_size": 4}, {"momentum": 0.9}, {"precision": "fp64"}):
        counted.clear()
        train(engine="processes", clients_per_group="auto", workers=2, **options)
        assert counted, options


class Unknown(SmallBatchNorm):
    """With a layer that cannot be grouped; with ``reads``, its operators cannot be mapped either."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.last = reads, torch.nn.PReLU()

    def forward(self, x):
        return super().forward(x) * (self.last(x).mean().item() if self.reads else self.last(x).mean())


@pytest.mark.parametrize("reads", [False, True])
def test_operators_are_mapped_if_a_trial_has_shown_that_this_is_faster(counted, monkeypatch, reads):
    """Two steps together take as long as one; what cannot be mapped is tried once."""
    sizes = sizes_timed(monkeypatch)
    torch.manual_seed(0)
    model = Unknown(reads)
    together = []
    for seed in (0, 1):
        summary = unskew.run(blobs(SIZES), model=model, seed=seed, **{**GIVEN, **OPTIONS}).summary
        together.append(summary["clients_per_group"])
    assert together == ([1, 1] if reads else [2, 2])
    assert sizes == ([[1]] if reads else [[1, 2]])
    monkeypatch.setattr(auto_select, "SHARE", 0.0)
    calibration.calibration_file().unlink()
    short = unskew.run(blobs(SIZES), model=model, **{**GIVEN, **OPTIONS}).summary
    assert short["clients_per_group"] == 1  # an estimate does not suffice


def test_a_given_group_that_cannot_be_mapped_takes_as_long_as_its_clients_one_after_another(
    counted, monkeypatch, tmp_path
):
    monkeypatch.setattr(auto_select, "num_cores", lambda: 4)
    sizes = sizes_timed(monkeypatch)
    choices = []
    choose = auto_select.choose_engine
    monkeypatch.setattr(
        "unskew.runs.simulated_clients.choose_engine",
        lambda *args: choices.append(choose(*args)) or EngineChoice("inline", 1),
    )
    for clients_per_group in (1, 3):
        options = {**GIVEN, "engine": "auto", "clients_per_group": clients_per_group}
        unskew.run(blobs([9] * 12), model=Unknown(reads=True), **options)
    single, group = choices
    assert (single.clients_per_group, group.clients_per_group) == (1, 3)
    assert sizes[-1] == [1]
    rounds = [max(choice.trial.values(), default=0) for choice in choices]
    assert rounds[1] < 2 * rounds[0]


def test_a_damaged_calibration_file_is_replaced(counted):
    train(engine="processes", clients_per_group="auto", workers=2)
    path = calibration.calibration_file()
    (key,) = json.loads(path.read_text())
    for content in ("damaged", "[]", '{"KEY": {"steps": {"2x1": -1}}}', '{"KEY": 3}'):
        path.write_text(content.replace("KEY", key))
        counted.clear()
        train(engine="processes", clients_per_group="auto", workers=2)
        assert counted, content
        assert json.loads(path.read_text())[key]["steps"].keys() == {"2x1", "2x2"}


def test_the_smallest_of_interleaved_times_counts(monkeypatch):
    clock = iter(range(1000))
    order = []
    times = timing.min_seconds({1: lambda: order.append(1), 2: lambda: order.append(2)}, lambda: next(clock))
    assert times == {1: 1, 2: 1}
    assert order == [1, 2, 1, 2, 1, 2]  # untimed once, then in turn until the time suffices


def test_a_stored_choice_starts_no_more_workers_and_threads_than_the_request_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_select, "num_cores", lambda: 8)
    monkeypatch.setattr(auto_select.processes, "fork_available", lambda: True)
    for stored, cohort, workers in ((4096, 100, 8), (4096, 3, 3), (2, 100, 2)):
        asked = EngineRequest("auto", None, "auto")
        write_model(tmp_path / "engine.json", EngineChoice("processes", stored, asked=asked.identity))
        assert choose_engine(asked, None, cohort, 1, tmp_path, resume=True).workers == workers
    for stored, threads in ((None, None), (1, 1), (4096, 8)):
        write_model(tmp_path / "engine.json", EngineChoice("inline", 1, threads=stored, asked=asked.identity))
        assert choose_engine(asked, None, 4, 1, tmp_path, resume=True).threads == threads
