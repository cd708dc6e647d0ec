import os

import pytest
from support.pages import ROOT


@pytest.fixture
def flower_is_found(monkeypatch, tmp_path):
    """Flower's programs are those of its own environment; keys and states lie in the test's folder."""
    monkeypatch.setenv("PATH", f"{ROOT / '.venv-deploy' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
