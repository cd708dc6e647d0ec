"""The time limit of a table: runs that start or stop, and the expected durations of the others."""

import math

import pytest

from unskew.config.loader import experiment
from unskew.errors import ConfigError
from unskew.reproduction.time_limit import RunSpeeds, StopInTime, TableProgress, TimeIsOverError, TimeLimit


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("elapsed", "seconds", "starts"),
    [
        (0, None, True), (0, 60, True), (30, 30, True), (30, 31, False), (59, None, True), (60, None, False),
        (30, 61, True),  # it would not end within a whole call either
        (60, 61, False),
    ],
)  # fmt: skip
def test_a_run_starts_if_it_ends_in_time(elapsed, seconds, starts):
    clock = Clock()
    limit = TimeLimit(1, clock)
    clock.now += elapsed
    assert (limit.remaining, limit.admits(seconds)) == (60 - elapsed, starts)


def test_a_run_that_never_ends_within_a_call_is_started():
    """Loading data takes 20 s of a minute, so a run of 50 s would otherwise wait forever."""
    clock = Clock()
    limit = TimeLimit(1, clock)
    clock.now += 20
    assert not limit.admits(50)
    limit.begin()
    assert limit.admits(50)
    clock.now += 30
    assert (limit.admits(50), limit.admits(40), limit.admits(10)) == (True, False, True)


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf])
def test_a_time_limit_rejects_minutes_that_are_not_positive_and_finite(minutes):
    with pytest.raises(ConfigError, match="is not valid; use a number above 0"):
        TimeLimit(minutes)


def test_a_run_stops_after_a_round_if_the_next_one_would_end_too_late():
    clock = Clock()
    limit = TimeLimit(1, clock)
    stop = StopInTime(limit)
    clock.now += 10  # data are loaded
    stop.prepare("generators", 1, 2)
    stop.start({"rounds": 9}, 4)
    for number in (5, 6):  # 50 s are left: after two rounds of 15 s, 20 s
        clock.now += 15
        stop.round({"round": number})
    clock.now += 15
    with pytest.raises(TimeIsOverError):
        stop.round({"round": 7})


def test_a_run_is_not_stopped_after_its_last_round():
    clock = Clock()
    stop = StopInTime(TimeLimit(1, clock))
    stop.start({"rounds": 2}, 0)
    clock.now += 100
    stop.round({"round": 2})
    with pytest.raises(TimeIsOverError):
        stop.prepare("generators", 1, 2)


def test_the_expected_duration_is_that_of_runs_with_another_seed_or_of_the_method():
    def config(method="fedavg", seed=0, **options):
        return experiment({"method": method, "seed": seed, **options})

    speeds = RunSpeeds()
    speeds.add(config(seed=0), None, 10, 20.0)
    speeds.add(config(seed=1), None, 10, 40.0)
    speeds.add(config(partition="iid"), None, 10, 90.0)
    speeds.add(config("scaffold"), config(rounds=5), 10, 10.0)
    speeds.add(config("fedprox"), None, 0, 0.0)  # nothing is finished
    assert speeds.seconds(config(seed=2), None, 10) == pytest.approx(30)
    assert speeds.seconds(config(partition="classes:2"), None, 10) == pytest.approx((20 + 40 + 90) / 3)
    assert speeds.seconds(config("scaffold", seed=5), config(rounds=5, seed=5), 4) == pytest.approx(4)
    assert speeds.seconds(config("fedprox"), None, 10) is None
    assert speeds.seconds(config("fedprox"), None, 10, guess=True) == pytest.approx((20 + 40 + 90 + 10) / 4)


def test_the_state_of_a_table_is_a_sentence():
    assert str(TableProgress(3, {}, 0, 0)) == "Finished: 3 of 3 runs."
    text = "Finished: 1 of 4 runs. In progress: FedAvg, iid, seed 0 (2 of 9 rounds). Not started: 2. About 10 min left."
    assert str(TableProgress(1, {"FedAvg, iid, seed 0": (2, 9)}, 2, 600)) == text
    assert str(TableProgress(0, {}, 2, None)).endswith("Not started: 2. How long they take is not known yet.")
