"""Configurations of ``unskew init`` for tables of survival times."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from support.running import call

pytest.importorskip("pyarrow")


def patients(event="event", died=(1, 0), time="days"):
    """Write 80 patients of two hospitals with a category; the largest time is 1,022."""
    draws = np.random.default_rng(0)
    lines = [f"hospital,age,sex,{time},{event}"]
    for n in range(80):
        days = 1022 if n == 7 else round(draws.uniform(1, 1000))
        lines.append(f"{'ab'[n % 2]},{draws.normal(60, 9):.1f},{'mf'[n // 2 % 2]},{days},{died[n % 3 == 0]}")
    Path("t.csv").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("event", "died", "commented"),
    [
        ("event", (1, 0), "# survival: {until: 1100}  # without until"),
        ("status", ("Dead", "Alive"), "# survival: {event: Dead, until: 1100}  # without until"),
    ],
)
def test_survival_suggests_a_public_last_time(capsys, tmp_path, monkeypatch, event, died, commented):
    monkeypatch.chdir(tmp_path)
    patients(event, died)
    told = call(capsys, "init", "t.csv", "--out", "e.yaml").out
    text = Path("e.yaml").read_text()
    assert f"\n{commented}" in text
    assert "the label" not in told  # the line on survival names both columns
    assert "categories: [sex]  # each value gets a weight" in text
    values = yaml.safe_load(text.replace("# survival:", "survival:")) if event == "event" else yaml.safe_load(text)
    Path("e.yaml").write_text(yaml.safe_dump(values))
    assert call(capsys, "partition", "e.yaml").code == 0


def test_label_names_columns_whose_names_say_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patients(event="gestorben", time="tage")
    assert call(capsys, "init", "t.csv", "--label", "tage,gestorben", "--out", "e.yaml").code == 0
    values = yaml.safe_load(Path("e.yaml").read_text())
    assert (values["task"], values["label"]) == ("survival", "tage,gestorben")
