import gc
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from support.running import blank, end_all
from support.unit import forbid_starts, is_unit

settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
settings.register_profile("fuzz", settings.get_profile("suite"), max_examples=1000, derandomize=False, print_blob=True)
settings.load_profile("suite")  # `make fuzz` asks for the other: ten times as many cases, and others in each run


class Uncollected:
    """No collection in doctests: they walk through ``linecache``, where SQLAlchemy removes lines of collected classes."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if isinstance(item, pytest.DoctestItem):
            gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()


def pytest_configure(config):
    """Handle Ctrl-C also where a shell has started the tests in the background, which makes it ignored."""
    config.pluginmanager.register(Uncollected())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items):
    """Mark unit tests, which are recognized by the names that they use."""
    for item in items:
        if is_unit(item):
            item.add_marker(pytest.mark.unit)


FONTS = Path(__file__).parents[1] / ".pytest_cache" / "matplotlib"
"""Folder that keeps Matplotlib's list of fonts between runs of the tests, because it takes seconds to create."""


def pytest_collection_finish(session):
    """What was imported and collected lives as long as the tests do: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup():
    """Remove the handlers that imported libraries and commands have added, which would receive messages of later tests."""
    for name in (None, "unskew"):
        logging.getLogger(name).handlers.clear()


@pytest.fixture(autouse=True, scope="session")
def threads():
    """One thread, as two on a shared machine get in each other's way; ``UNSKEW_TEST_THREADS`` asks for another number."""
    torch.set_num_threads(int(os.environ.get("UNSKEW_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _alone(request, monkeypatch):
    """Let a unit test fail if it starts a process or a run."""
    if request.node.get_closest_marker("unit") is not None:
        forbid_starts(monkeypatch)


@pytest.fixture(autouse=True)
def _ended():
    """End the processes that a failed test left running."""
    yield
    end_all()


@pytest.fixture
def undrawn(request, monkeypatch):
    """For files that run the command line; a test that looks at figures is marked with ``draws``."""
    if request.node.get_closest_marker("draws") is None:
        from matplotlib.figure import Figure

        monkeypatch.setattr(Figure, "savefig", blank)
        monkeypatch.setattr("unskew.cli.report.find_spec", lambda name: None)  # nor is a report made


@pytest.fixture
def joint(monkeypatch):
    """Number of runs of each joint training."""
    from unskew.engines.stacked import JointEngine

    counts, train = [], JointEngine.train_cohorts

    def counted(self, cohorts):
        counts.append(len(cohorts))
        return train(self, cohorts)

    monkeypatch.setattr(JointEngine, "train_cohorts", counted)
    return counts


@pytest.fixture
def one_key(monkeypatch):
    """All private runs draw their noise from the same secret key, so that they can be compared."""
    monkeypatch.setattr("unskew.secret_draws.new_key", lambda: bytes(range(32)))


@pytest.fixture(autouse=True, scope="session")
def unreferenced():
    """Reference rows double the time of a small comparison; tests that are about them ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unskew.comparison.references.BY_DEFAULT", False)
        yield


@pytest.fixture(autouse=True, scope="session")
def unsynced():
    """What a test writes need not outlive a power cut; nothing else than one could tell the difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Nothing is left in the user's own cache, and the width of the user's terminal does not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MPLCONFIGDIR", str(FONTS))
        yield
