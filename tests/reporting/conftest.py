import pytest
from support.named import federation

import unskew


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """Three methods over two seeds, with names that look like mark-up, and personal models."""
    folder = tmp_path_factory.mktemp("reports") / "compared"
    options = {"model": "logistic", "rounds": 3, "local_steps": 2, "lr": 0.1, "engine": "inline", "batch_size": 8}
    result = unskew.compare(
        federation(), methods=["fedprox:mu=0.5", "fedavg", "fedexp+ft"], seeds=2, out=folder, target=0.5, **options
    )
    return folder, result


@pytest.fixture
def light(monkeypatch):
    """The library that draws is five megabytes; most tests look at the rest of the page."""
    for module in ("page", "report"):
        monkeypatch.setattr(f"unskew.reporting.{module}.plotly_script", lambda: 'var drawn = "</script>";\r\n')
