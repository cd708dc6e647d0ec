"""Output of ``unskew partition``."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.running import call

pytest.importorskip("pyarrow")


def test_partition_and_diagnose_have_the_same_default_horizons(capsys, tmp_path, monkeypatch):
    """With 10 bins, the first quartile is between two cut points, and the held-out rows decide which one is nearer."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    lines = ["hospital,age,days,event"]
    for n in range(600):
        died, left = draws.exponential(900), draws.uniform(0, 2000)
        lines.append(f"{'abc'[n % 3]},{draws.normal(60, 9):.1f},{round(min(died, left))},{int(died <= left)}")
    Path("t.csv").write_text("\n".join(lines))
    given = ("--data", "table:t.csv", "--task", "survival", "--label", "days,event", "--partition", "natural:hospital")
    tables = [
        json.loads(call(capsys, *command, *given, "--json").out)["sites"]
        for command in (("partition",), ("diagnose", "--model", "proportional", "--no-curvature", "--no-cost"))
    ]
    assert [row["survival"] for row in tables[0]] == [row["survival"] for row in tables[1]]
    assert [row["events"] for row in tables[0]] == [row["events"] for row in tables[1]]
