import pytest
from support.fuzz_folder import CSV, JSONL, TINY, federation
from support.fuzzing import Sandbox, accepted

import unskew
from unskew.cli.info import described


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A sandbox with a few files that one may name."""
    box = Sandbox(tmp_path)
    (box.here / "tiny.csv").write_text(CSV)
    (box.here / "tiny.jsonl").write_text(JSONL)
    (box.here / "bad.csv").write_bytes(b'x0,label\n1,"a\n\xff\x00\n')
    (box.here / "trace.csv").write_text("client,delay\n0,1\n,2\n")
    (box.here / "config.yaml").write_text("data: table:tiny.csv\nlabel: label\nclients: 3\nmodel: logistic\n")
    monkeypatch.chdir(box.here)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return box


@pytest.fixture
def unstarted(monkeypatch):
    """All is checked, nothing is trained."""
    monkeypatch.setattr("unskew.runs.run.prepare", accepted)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run folder with something of everything in its checkpoint."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = {**TINY, "checkpoint_every": 1, "method": "scaffold+fedavgm", "network": "fixed:1"}
    unskew.run(federation(), **options, out=folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def known_methods(cache):
    """The list of methods is in the cache already: a case may write nothing outside its folder."""
    described()


@pytest.fixture
def light(monkeypatch):
    """Pages without the library that draws, which has five megabytes."""
    for module in ("page", "report"):
        monkeypatch.setattr(f"unskew.reporting.{module}.plotly_script", lambda: "var drawn = 1;")
