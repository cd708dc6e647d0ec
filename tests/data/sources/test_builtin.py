"""Data sets that other packages ship."""

import csv
from importlib.util import find_spec

import numpy as np
import pytest

import unskew
from unskew.config.loader import experiment
from unskew.data.csv_format import CsvSpec
from unskew.data.sources import builtin
from unskew.data.sources.registry import load_source
from unskew.errors import ConfigError, DataError

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("fresh_cache")
COLUMNS = ["inst", "time", "status", "age", "sex", "ph.ecog", "ph.karno", "pat.karno", "meal.cal", "wt.loss"]


def rows_of_lung(events):
    """Rows in the layout of lifelines' file; the last one has no institution."""
    draws = np.random.default_rng(0)
    for n in range(40):
        inst = "" if n == 39 else f"{1 + n % 3}.0"
        weight = "" if n % 5 == 0 else f"{draws.integers(-5, 30)}.0"
        yield [
            inst,
            10 + 7 * n,
            events[n % 2],
            50 + n % 30,
            1 + n % 2,
            "1.0",
            "90.0",
            "80.0",
            f"{900 + n % 10}.0",
            weight,
        ]


@pytest.fixture
def lifelines(tmp_path, monkeypatch):
    """A package lifelines that cannot be imported, with data whose events are coded in a given way."""

    def install(events):
        package = tmp_path / "lifelines"
        (package / "datasets").mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        with (package / "datasets" / "lung.csv").open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows_of_lung(events)])
        found = type("Spec", (), {"origin": str(package / "__init__.py")})
        monkeypatch.setattr(builtin, "find_spec", lambda name: found)

    return install


@pytest.mark.parametrize("events", [(0, 1), (1, 2)], ids=["0 and 1", "1 and 2"])
def test_lung_is_a_survival_task_whose_rows_have_an_institution(events, lifelines):
    lifelines(events)
    source = load_source("lung")
    assert source.task == "survival"
    times = np.concatenate([part.y.numpy() for part in (source.train, source.test)])
    assert sorted(times.tolist()) == [[10 + 7 * n, n % 2] for n in range(39)]
    assert set(source.train.columns["institution"]) == {"1", "2", "3"}


def test_lung_runs_with_its_data_set_name_alone(lifelines):
    lifelines((0, 1))
    settings = {"data": "lung", "partition": "natural:institution", "clients": None, "rounds": 1, "eval_clients": 0}
    assert experiment(settings).model == "table-mlp"
    result = unskew.run(**settings)
    assert 0 <= result.summary["concordance"] <= 1


def test_lung_takes_the_options_of_a_table(lifelines):
    lifelines((0, 1))
    options = {"features": "age,wt.loss", "missing": "indicator"}
    federation = unskew.load_federation("lung", partition="natural:institution", clients=None, **options)
    assert federation.shape == (3,)
    with pytest.raises(ConfigError, match="is built in"):
        load_source("lung", label="days")
    with pytest.raises(ConfigError, match="csv requires a table"):
        load_source("lung", csv=CsvSpec(separator=","))


def test_lung_without_lifelines_is_an_error_with_the_command_that_gets_it(monkeypatch):
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps lifelines"):
        load_source("lung")


@pytest.mark.skipif(find_spec("lifelines") is None, reason="lifelines is not installed")
def test_lung_has_the_published_numbers():
    """R's survival: 228 rows, of which one has no institution; 165 deaths, of which one is that patient's."""
    source = load_source("lung")
    times = np.concatenate([part.y.numpy() for part in (source.train, source.test)])
    institutions = np.concatenate([part.columns["institution"] for part in (source.train, source.test)])
    assert len(times) == 227
    assert times[:, 1].sum() == 164
    assert len(set(institutions)) == 18
    alive = 1.0  # Kaplan-Meier
    for time in np.unique(times[times[:, 1] == 1, 0]):
        alive *= 1 - (times[times[:, 0] == time, 1].sum() / (times[:, 0] >= time).sum())
        if alive <= 0.5:
            break
    assert time == 310
