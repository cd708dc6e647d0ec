"""Bins, hazards and horizons of survival analysis, and the constants that a site accepts."""

import re

import numpy as np
import pytest
import torch
from support.survival_sums import asked, bin_sums, fitted, rows
from support.tolerance import FORMULA, assert_close

from unskew.errors import ConfigError, DataError
from unskew.tasks import survival_bins
from unskew.tasks.metrics import MetricSet
from unskew.tasks.registry import TASKS
from unskew.tasks.survival import Survival

KINDS = ("piecewise", "discrete")


def test_bins_have_about_equal_numbers_of_events():
    y, _ = rows(2000)
    task = fitted(y, bins=8)
    events = bin_sums(y, task.cuts)[0]
    cell = y[:, 1].sum() / 8
    assert np.abs(events - float(cell)).max() < 0.2 * cell
    assert task.cuts[-1] >= y[:, 0].max()
    assert task.cuts[-1] <= y[:, 0].max() * 2 ** (1 / 16)


def test_the_default_has_ten_events_per_bin():
    y, _ = rows(60)
    assert len(fitted(y).cuts) == int(y[:, 1].sum()) // 10
    assert len(fitted(rows(2000)[0]).cuts) == 10


def test_sums_do_not_depend_on_the_division_among_clients():
    y, _ = rows()
    one, other = Survival(bins=5).fit(asked([y])), Survival(bins=5).fit(asked([*torch.split(y, 7)]))
    assert one.cuts == other.cuts
    assert_close(one.rates, other.rates, FORMULA)
    assert one.censoring == other.censoring


@pytest.mark.parametrize("kind", KINDS)
def test_constants_restore_the_task(kind):
    y, _ = rows()
    task = fitted(y, bins=3, event="Dead").with_loss(kind)
    again = TASKS["survival"].with_constants(task.constants, 3)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(len(y), 3)))
    assert torch.equal(again.losses(logits, y), task.losses(logits, y))
    assert (again.event, again.horizons, again.names) == ("Dead", task.horizons, task.names)


@pytest.mark.parametrize(
    "changed",
    [
        {"cuts": (3.0, 2.0, 4.0)}, {"rates": (0.1, -1.0, 0.1)}, {"shares": (0.1, 1.0, 0.1)}, {"horizons": (1e9,)},
        {"censoring": (1.0,)}, {"discrete": (2.0,)}, {"more": (1.0,)}, {"event": (-1.0,)}, {"event": (1e9,)}, {"cuts": ()},
    ],
)  # fmt: skip
def test_other_constants_are_rejected(changed):
    constants = fitted(rows()[0], bins=3).constants
    with pytest.raises(ValueError, match="constants"):
        TASKS["survival"].with_constants({**constants, **changed}, 3)


def test_a_model_has_at_most_100_horizons():
    constants = fitted(rows()[0], bins=3).constants
    times = np.linspace(1e-3, 1, 101) * constants["cuts"][-1]
    assert len(TASKS["survival"].with_constants({**constants, "horizons": times[1:]}, 3).horizons) == 100
    with pytest.raises(ValueError, match="at most 100"):
        TASKS["survival"].with_constants({**constants, "horizons": times}, 3)


GRID = np.arange(1, 257) * (512.0 / 256)
ACCEPTED = {
    "cuts": (2.0, 100.0, 512.0), "rates": (0.1,) * 3, "shares": (0.1,) * 3, "horizons": (100.0,),
    "censoring": (1.0,) * 257, "discrete": (0.0,), "event": (),
}  # fmt: skip
CONFIGURED = {"bins": (2.0, 100.0, 512.0), "cuts": (2.0, 100.0, 512.0), "rates": (0.1,) * 3}


@pytest.mark.parametrize(
    ("options", "changed", "reason"),
    [
        ({}, {}, ""),
        ({"until": 512.0, "bins": 3}, {}, ""),
        ({"until": 512.0, "bins": 2}, {}, "at most 2 of the public cells"),
        ({"until": 512.0}, {"cuts": (*GRID[:9], 512.0), "horizons": (2.0,)}, ""),
        ({"until": 512.0}, {"cuts": (*GRID[:10], 512.0)}, "at most 10 of the public cells"),
        ({"until": 512.0}, {"cuts": (2.0, 101.0, 512.0)}, "public cells"),
        ({"until": 512.0}, {"cuts": (2.0, 100.0)}, "public cells"),
        ({"until": 512.0}, {"cuts": ()}, "public cells"),
        ({}, {"cuts": (100.0, 500.0)}, "public cells"),  # the last one is not in the public grid of times
        ({}, {"cuts": ()}, "public cells"),
        ({"bins": (2.0, 100.0, 512.0)}, {}, ""),
        ({"bins": (2.0, 102.0, 512.0)}, {}, "survival.bins"),
        ({"horizons": (100.0,)}, {}, ""),
        ({"horizons": (102.0,)}, {}, "survival.horizons"),
        ({"horizons": (2.0, 100.0)}, {}, "survival.horizons"),
        ({}, {"horizons": (99.0,)}, "1 to 3 of the cut points"),
        ({}, {"horizons": ()}, "1 to 3 of the cut points"),
        ({}, {"cuts": (2.0, 4.0, 6.0, 512.0), "horizons": (2.0, 4.0, 6.0, 512.0)}, "1 to 3 of the cut points"),
        ({}, {"censoring": ()}, "curve of censoring"),
        (CONFIGURED, {"censoring": ()}, ""),
        (CONFIGURED, {}, "curve of censoring"),
        (CONFIGURED, {"rates": (0.1, 0.1, 0.2), "censoring": ()}, "survival.rates"),
        ({}, {"discrete": (1.0,)}, "loss"),
        ({"kind": "discrete"}, {}, "loss"),
        ({"event": "2"}, {}, "value that means the event"),
    ],
)  # fmt: skip
def test_only_constants_that_fit_the_configuration_are_accepted(options, changed, reason):
    found = Survival(**options).accepts({**ACCEPTED, **changed})
    assert reason in found if reason else not found


def test_fitted_constants_are_accepted():
    y, _ = rows()
    for options in ({}, {"bins": 5}, {"until": 400.0}, {"bins": (50.0, 400.0)}, {"horizons": (17.0, 30.0)}):
        task = Survival(**options)
        assert not task.accepts(task.fit(asked([y])).constants)


def test_other_tasks_accept_constants_that_they_can_have():
    assert "no constants" in TASKS["classification"].accepts({"mean": (0.0,)})
    assert not TASKS["classification"].accepts({})
    assert not TASKS["regression"].accepts({"mean": (7.0,), "std": (2.0,)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bins": 100}, ConfigError, r"survival.bins=100 leaves a bin without an event.*at most \d"),
        ({"bins": (1e-6, 500.0)}, ConfigError, "no training row has an event after 0 and until 1e-06"),
        ({"horizons": (5000.0,)}, ConfigError, "5000 is after"),
        ({"until": 1e-9}, DataError, "No training row has an event until 1e-09"),
    ],
)
def test_bins_and_horizons_must_fit_the_events(options, error, message):
    y, _ = rows(200)
    y = y[y[:, 0] > 0]
    with pytest.raises(error, match=message):
        fitted(y, **options)


def test_the_number_of_bins_that_fit_fits():
    y, _ = rows(30)
    with pytest.raises(ConfigError) as problem:
        fitted(y, bins=200)
    most = int(re.search(r"at most (\d+)", str(problem.value))[1])
    task = fitted(y, bins=most)
    assert bin_sums(y, task.cuts)[0].all()


def test_few_events_and_clients_without_events_warn(monkeypatch):
    logged = []
    monkeypatch.setattr(survival_bins.LOG, "warning", lambda text, *values: logged.append(text % values))
    y, _ = rows(60)
    fitted(y, bins=5)
    censored = y.clone()
    censored[:, 1] = 0
    Survival().fit(asked([y, censored]))
    assert "fewer than 10 per bin" in logged[0]
    assert re.fullmatch("clients without an event until .*: 1", logged[1])
    assert len(logged) == 2


def test_an_outlier_in_time_that_leaves_few_bins_warns(monkeypatch):
    logged = []
    monkeypatch.setattr(survival_bins.LOG, "warning", lambda text, *values: logged.append(text % values))
    y, _ = rows()
    fitted(y)
    assert not logged
    y[5] = torch.tensor([1e7, 0.0])
    task = fitted(y)
    assert len(task.cuts) < 10
    assert logged == [
        f"survival.bins: {len(task.cuts)} instead of 10, because the events are in few of the 256 equal cells of time up to "
        f"{survival_bins.number_text(task.cuts[-1])}; if few times are near it, set survival.until to an earlier time"
    ]
    logged.clear()
    assert len(fitted(y, until=900.0).cuts) == 10
    assert not logged


def test_times_below_the_public_grid_need_another_unit():
    y, _ = rows()
    y[:, 0] *= 1e-12
    with pytest.raises(DataError, match=r"at most 9.5e-07, .*Use a smaller unit.* survival\.until"):
        fitted(y)
    assert len(fitted(y, until=9e-10).cuts) == 10


def test_horizons_have_distinct_names():
    y, _ = rows()
    task = fitted(y, until=900.0, bins=2, horizons=(100.0001, 100.0002))
    expected = ("100.0001", "100.0002")
    assert task.metric_names(MetricSet(("brier",))) == tuple(f"brier/{time}" for time in expected)
    outputs = task.outputs(torch.zeros(len(y), 2, dtype=torch.float64)).numpy()
    assert {f"risk({time})" for time in expected} < {*task.predicted_columns(outputs, task.names, None)}
    found = task.metrics_of_outputs(y.numpy(), outputs, MetricSet(("brier",)))
    assert all(np.isfinite(found[f"brier/{time}"]) for time in expected)


def test_a_single_site_may_have_no_event():
    y, _ = rows(20)
    y[:, 1] = 0
    task = Survival(bins=(100.0, 900.0), horizons=(5.0,)).of_one_site.fit(asked([y]))
    assert bool(task.losses(torch.zeros(20, 2), y).isfinite().all())


def test_only_the_sums_of_the_configuration_may_be_asked_for():
    given, until, free = Survival(bins=(100.0, 500.0)), Survival(until=500.0), Survival()
    assert given.asks("survival", {"until": 500.0, "cuts": [100.0, 500.0]})
    assert not given.asks("survival", {"until": 500.0, "cuts": [100.0, 101.0, 500.0]})
    assert not given.asks("survival_times", {})
    assert until.asks("survival", {"until": 500.0, "cuts": []})
    assert not until.asks("survival", {"until": 50.0, "cuts": []})
    assert free.asks("survival_times", {})
    assert free.asks("survival", {"until": 1024.0, "cuts": []})
    assert not free.asks("survival", {"until": 1000.0, "cuts": []})  # not an edge of the public grid
