import os

import pytest
from support.pages import ROOT

from unskew.deployment.server import round_requests


@pytest.fixture
def flower_is_found(monkeypatch, tmp_path):
    """Flower's programs are those of its own environment; keys and states lie in the test's folder."""
    monkeypatch.setenv("PATH", f"{ROOT / '.venv-deploy' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def short_waits(monkeypatch):
    """The server polls for replies, and sends failed messages again, after a hundredth of a second."""
    monkeypatch.setattr(round_requests, "POLL", 0.01)
    monkeypatch.setattr(round_requests, "PAUSE", 0.01)
