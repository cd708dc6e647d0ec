"""Losses, bins and predictions of survival analysis, against closed forms and loops in float64."""

import re

import numpy as np
import pytest
import torch
from support.survival_sums import asked, fitted
from support.tolerance import FORMULA, assert_close

from unskew.errors import ConfigError, DataError
from unskew.tasks import survival
from unskew.tasks.metrics import MetricSet
from unskew.tasks.registry import TASKS
from unskew.tasks.survival import Survival

KINDS = ("piecewise", "discrete")


def rows(n=300, seed=0, whole=False):
    """Times and events of which a third is censored, some at time 0, and two inputs; whole times have ties."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, 2))
    died, left = draws.exponential(300 * np.exp(-0.5 * x[:, 0])), draws.uniform(0, 900, n)
    time = np.minimum(died, left)
    time = np.ceil(time) if whole else time
    time[:3] = 0
    return torch.from_numpy(np.stack([time, died <= left], 1)), x


def bin_sums(y, cuts):
    """Events, exposure, and rows at risk less half of those censored inside, in a loop over rows and bins."""
    sums = np.zeros((3, len(cuts)))
    for time, event in y.tolist():
        low = 0.0
        for j, high in enumerate(cuts):
            here = (low < time <= high) or (time == 0 and j == 0)
            sums[0, j] += here and event
            sums[1, j] += min(max(time - low, 0), high - low)
            sums[2, j] += 1.0 if time >= high or (here and event) else 0.5 * here
            low = high
    return sums


@pytest.mark.parametrize("options", [{}, {"bins": 4}, {"until": 500.0}, {"bins": (90.0, 365.0, 500.0)}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_at_the_optimum_of_the_intercepts(kind, options):
    """Which is d/T, or d/(n - c/2): the offsets give them exactly, and the gradient of a constant is 0 there."""
    y, _ = rows(whole=True)
    task = fitted(y, **options).with_loss(kind)
    events, exposure, at_risk = bin_sums(y, task.cuts)
    assert events.all()
    hazards = events / exposure if kind == "piecewise" else events / at_risk
    offsets = np.log(hazards) if kind == "piecewise" else np.log(hazards) - np.log1p(-hazards)
    assert_close(torch.tensor(task.offsets, dtype=torch.float64), offsets, FORMULA)
    logits = torch.zeros(len(y), len(task.cuts), dtype=torch.float64, requires_grad=True)
    task.losses(logits, y).sum().backward()
    assert_close(logits.grad.sum(0), 0.0, FORMULA, size=float(events.max()))
    assert_close(task.constant(y, len(task.cuts)), 0.0, FORMULA)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_negative_log_likelihoods(kind):
    y, _ = rows()
    task = fitted(y, bins=5).with_loss(kind)
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(len(y), 5)))
    z = (logits + torch.tensor(task.offsets, dtype=torch.float64)).numpy()
    expected = []
    for (time, event), own in zip(y.tolist(), z, strict=True):
        low, total = 0.0, 0.0
        for high, o in zip(task.cuts, own, strict=True):
            inside = (low < time <= high) or (time == 0 and low == 0)
            if kind == "piecewise":
                total += np.exp(o) * min(max(time - low, 0), high - low) - o * (inside and event)
            else:
                at_risk = 1 if time >= high or (inside and event) else 0.5 * inside
                chance = 1 / (1 + np.exp(-o))
                total -= np.log(chance) if inside and event else at_risk * np.log(1 - chance)
            low = high
        expected.append(total)
    assert_close(task.losses(logits, y), np.array(expected), FORMULA)
    assert_close(task.loss(logits, y), np.mean(expected), FORMULA)
    single = torch.vmap(lambda o, own: task.losses(o[None], own[None])[0])(logits, y)
    assert_close(single, np.array(expected), FORMULA)
    assert task.losses(logits.float(), y).dtype == torch.float32


def newton(design, exposure, events, steps=30):
    """Coefficients of a Poisson regression with the logarithm of the exposure as offset, by Newton's method."""
    beta = np.zeros(design.shape[1])
    for _ in range(steps):
        mean = exposure * np.exp(design @ beta)
        beta += np.linalg.solve(design.T @ (design * mean[:, None]), design.T @ (events - mean))
    return beta


def test_proportional_hazards_are_a_poisson_regression_of_rows_and_bins():
    y, x = rows()
    task = fitted(y, bins=4)
    design, exposure, events = [], [], []
    for own, (time, event) in zip(x, y.tolist(), strict=True):
        low = 0.0
        for j, high in enumerate(task.cuts):
            if time > low:
                design.append([*own, *np.eye(4)[j]])
                exposure.append(min(time, high) - low)
                events.append(float(event and time <= high))
            low = high
    expected = newton(np.array(design), np.array(exposure), np.array(events))
    kept = y[:, 0] > 0  # a censored row of time 0 has no exposure; none of the others has an event there
    assert not y[~kept, 1].any() or bin_sums(y[~kept], task.cuts)[0].sum() == y[~kept, 1].sum()
    rows_used, inputs = y[kept], torch.from_numpy(x)[kept]
    beta = torch.zeros(6, dtype=torch.float64)

    def loss(beta):
        return task.loss((inputs @ beta[:2])[:, None] + beta[2:], rows_used)

    for _ in range(30):
        beta -= torch.linalg.solve(torch.func.hessian(loss)(beta), torch.func.grad(loss)(beta))
    found = beta.numpy()
    np.testing.assert_allclose(found[:2], expected[:2], atol=1e-6)
    np.testing.assert_allclose(found[2:] + np.array(task.offsets), expected[2:], atol=1e-6)


def test_one_bin_is_exponential_regression():
    y, _ = rows()
    task = fitted(y, bins=1, until=1000.0)
    assert task.rates == pytest.approx((float(y[:, 1].sum() / y[:, 0].sum()),))
    survival = task.outputs(torch.zeros(1, 1, dtype=torch.float64)).numpy()
    for t in (0.0, 10.0, 365.0, 1000.0):
        assert task.survival(survival, [t])[0, 0] == pytest.approx(np.exp(-task.rates[0] * t))
    assert task.decisions(survival, MetricSet()) == pytest.approx([np.log(2) / task.rates[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_survival_follows_from_the_hazards_of_bins(kind):
    y, _ = rows()
    task = fitted(y, bins=3).with_loss(kind)
    logits = torch.tensor([[0.3, -0.2, 0.1], [-4.0, -4.0, -4.0]], dtype=torch.float64)
    z, (first, second, last) = logits[0].numpy() + np.array(task.offsets), task.cuts
    time = second + 0.25 * (last - second)
    if kind == "piecewise":
        expected = np.exp(-np.exp(z) @ np.array([first, second - first, time - second]))
    else:
        expected = np.prod((1 / (1 + np.exp(z))) ** np.array([1, 1, 0.25]))
    outputs = task.outputs(logits).numpy()
    assert task.survival(outputs, [time])[0, 0] == pytest.approx(expected)
    median, never = task.decisions(outputs, MetricSet())
    assert task.survival(outputs[:1], [median])[0, 0] == pytest.approx(0.5)
    assert never is None
    columns = task.predicted_columns(outputs, task.names, None, [time, last], curve=True)
    assert [*columns] == [f"risk({time:g})", f"risk({last:.6g})", "median", *task.names]
    assert columns[f"risk({time:g})"][0] == pytest.approx(1 - expected)
    with pytest.raises(ConfigError, match="--horizons: 5000 is after"):
        task.predicted_columns(outputs, task.names, None, [5000.0])


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
    monkeypatch.setattr(survival.LOG, "warning", lambda text, *values: logged.append(text % values))
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
    monkeypatch.setattr(survival.LOG, "warning", lambda text, *values: logged.append(text % values))
    y, _ = rows()
    fitted(y)
    assert not logged
    y[5] = torch.tensor([1e7, 0.0])
    task = fitted(y)
    assert len(task.cuts) < 10
    assert logged == [
        f"survival.bins: {len(task.cuts)} instead of 10, because the events are in few of the 256 equal cells of time up to "
        f"{survival.number_text(task.cuts[-1])}; if few times are near it, set survival.until to an earlier time"
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


@pytest.mark.parametrize(
    ("event", "value", "warned"),
    [("Dead", "dead", True), ("Dead", "Y", True), ("Dead", "Alive", False), ("2", "1", False), ("1", "0", False),
     ("0", "1", False), ("yes", "No", False), ("2", "0", False), ("Dead", "Dead", False)],
)  # fmt: skip
def test_an_event_that_never_occurs_warns_unless_the_value_means_no_event(monkeypatch, event, value, warned):
    logged = []
    monkeypatch.setattr(survival.LOG, "warning", lambda text, *values: logged.append(text % values))
    coded = Survival(event=event).encode_column(1, "status", [value] * 3, "hospital B")
    assert coded.tolist() == [float(event == value)] * 3
    assert logged == [
        f"hospital B: no row has an event, because the event column 'status' has only the value '{value}', but "
        f"survival.event is '{event}'"
    ] * warned  # fmt: skip


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


@pytest.mark.parametrize(
    ("time", "event", "message"),
    [
        (-1.0, 1.0, r"Row 1 \(from 0\) of a has a negative time"),
        (np.nan, 1.0, r"Row 1 \(from 0\) of a has a time that is missing"),
        (np.inf, 1.0, "missing or infinite"), (1.0, 2.0, r"Row 1 \(from 0\) of a has the event indicator 2"),
        (1.0, np.nan, r"Row 1 \(from 0\) of a has no event indicator"),
    ],
)  # fmt: skip
def test_times_and_events_are_validated(time, event, message):
    with pytest.raises(DataError, match=message):
        TASKS["survival"].read(torch.tensor([[1.0, 0.0], [time, event]]), "a")


def test_swapped_columns_are_rejected():
    y, _ = rows(50)
    with pytest.raises(DataError, match=r"only two values, 0 and 1\. Write the time first"):
        TASKS["survival"].read(y.flip(1), "a")
    with pytest.raises(DataError, match=r"\[n, 2\]"):
        TASKS["survival"].read(y[:, 0], "a")


@pytest.mark.parametrize(
    ("values", "event", "expected"),
    [
        ([0, 1, 1], None, [0, 1, 1]), ([False, True], None, [0, 1]), (["true", "FALSE"], None, [1, 0]),
        ([1, 2], "2", [0, 1]), ([1.0, 2.0], "2", [0, 1]), (["Dead", "Alive "], "Dead", [1, 0]), ([1, 1], None, [1, 1]),
        ([0, 1], "0", [1, 0]),
    ],
)  # fmt: skip
def test_events_may_be_written_in_several_ways(values, event, expected):
    assert Survival(event=event).encode_column(1, "status", values, "a").tolist() == expected


@pytest.mark.parametrize(
    ("values", "event", "message"),
    [
        ([0, 1, 1, 0, 2], None, "more than two values: 0, 1, 2.*Remove or recode.*'2', is first in row 4"),
        ([*range(30)], None, "Write label as the column of times, then the column of events"),
        ([1, 2], None, "has the values 1, 2. Set survival.event"),
        (["a", "b"], "c", "survival.event is 'c', but"),
        ([1, None], None, "1 missing values .first: row 1, counted from 0"),
        ([1.0, float("nan")], None, "1 missing values"),
    ],
)  # fmt: skip
def test_unclear_events_are_rejected(values, event, message):
    with pytest.raises(DataError, match=message):
        Survival(event=event).encode_column(1, "status", values, "a")


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
