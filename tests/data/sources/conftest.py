import pytest

from unskew.data.sources import registry


@pytest.fixture
def fresh_cache(tmp_path_factory, monkeypatch):
    """Let a test decode images itself, and let ``datasets`` keep its copies in a temporary folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    registry.load_cached.cache_clear()
    yield
    registry.load_cached.cache_clear()
