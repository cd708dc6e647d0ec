"""Simulated seconds in the tables of a comparison and in the report."""

import pytest
from support.running import call

pytest.importorskip("plotly", reason="plotly is not installed")


def test_comparisons_and_reports_show_simulated_seconds(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    args = ("--model", "logistic", "--rounds", "3", "--clients", "4", "--partition", "iid", "--engine", "inline")
    network = ("--set", "network.uplink=lognormal:median=50kB/s,sigma=0.5", "--set", "network.latency=50ms")
    out = tmp_path / "c"
    target = ("--target", "0.3")
    shown = call(capsys, "compare", "fedavg", "fedbuff", *args, *network, *target, "--out", str(out))
    assert shown.code == 0
    columns = " ".join(shown.out.split())
    assert "simulated s" in columns
    assert "seconds to target" in columns
    plain = call(capsys, "compare", "fedavg", "fedbuff", *args, *target, "--out", str(tmp_path / "d"))
    assert "simulated" not in plain.out
    for folder, timed in (("c", True), ("d", False)):
        page = (tmp_path / folder / "report.html").read_text()
        assert ('value="simulated"' in page) == timed
