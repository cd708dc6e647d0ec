import numpy as np
import pytest

import unskew
from unskew.data.federation import Federation

CLASSES = ("<script>alert(1)</script>", "b & c", "100 %")
CLIENTS = ("</script><img src=x onerror=alert(2)>", "St. Mary's", "%{x} <b>", "South")


def federation():
    draws = np.random.default_rng(0)

    def sample(n, most=3):
        y = draws.integers(0, most, n)
        return draws.normal(size=(n, 3)).astype(np.float32) + 2 * np.eye(3, dtype=np.float32)[y], y

    clients = [sample(n, most) for n, most in ((12, 3), (20, 2), (30, 3), (16, 1))]
    names = {"class_names": CLASSES, "client_names": CLIENTS}
    return Federation.from_arrays(clients, test=sample(60), classes=3, holdout=0.25, **names)


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
