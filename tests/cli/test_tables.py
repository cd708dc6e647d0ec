"""What a terminal shows: narrow ones, without colors, quiet or verbose, and completion."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console
from support.pages import ROOT
from support.running import TINY, call

from unskew.cli.common import exit_on_signal
from unskew.cli.comparison_tables import comparison_table, reaching_table
from unskew.cli.fit_table import table_of
from unskew.cli.progress import progress_while_waiting
from unskew.cli.tables import partition_table
from unskew.cli.verbosity import LOUDNESS, prepare_streams
from unskew.comparison.cost_to_target import TargetCost
from unskew.progress import report_progress
from unskew.simulation.round_loop import RunInterrupted

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def whole(text, *words):
    """Nothing is cut off or broken, and nothing is wider than the terminal."""
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    flat = text.replace("\N{NO-BREAK SPACE}", " ")
    for word in words:
        assert word in flat, word


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["methods"], ["discard_late=False", "arXiv:1602.05629", "start_round=50"]),
        (["models"], ["arXiv:2404.11754", "convolutions", "resnet-18"]),
        (["reproduce", "--list"], ["fedcog/table-1", "fedssyn/quadratic"]),
    ],
)
def test_listings_are_whole_in_a_narrow_terminal(command, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = call(capsys, *command)
    assert outcome.code == 0
    whole(outcome.out, *words)


def test_long_work_is_shown_with_the_time_left_on_standard_error_of_a_terminal_alone(capsys, monkeypatch):
    monkeypatch.setattr("unskew.cli.progress.PATIENCE", 0.0)

    def shown():
        with progress_while_waiting("report"):
            for done in range(3):
                report_progress("runs read", done, 4)
                time.sleep(0.02)
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert shown() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert re.search(r"report: runs read.*0:00:0", shown())
    monkeypatch.setattr(LOUDNESS, "quiet", True)
    assert shown() == ""


def test_tables_of_a_comparison_are_whole_in_a_narrow_terminal():
    figures = dict.fromkeys(("accuracy", "best_accuracy", "client_accuracy_mean", "client_accuracy_worst"), 0.927)
    row = {**figures, **{f"{name}_std": 0.012 for name in figures}}
    row |= {"seeds": 3, "target": 0.9, "rounds_to_target": 15.7, "bytes_up": 5.8e6, "bytes_down": 5.8e6, "seconds": 0.9}
    names = ("fedavg", "fedssyn:generator=ddpm-small,epochs=100+scaffold")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table([{"method": name, **row} for name in names]))
    shown = console.export_text()
    whole(shown, *names, "92.7 ± 1.2", "15.7")
    counts = [[1234] * 20, [5] * 20]
    import numpy as np

    console.print(partition_table(np.array(counts), [f"class-{i}" for i in range(20)]))
    whole(console.export_text(), "class-19: 1234")
    wide = Console(width=200, record=True, file=console.file)
    wide.print(comparison_table([{"method": name, **row} for name in names]))
    assert "────" in wide.export_text()  # where there is room it is a table


@pytest.mark.parametrize("width", [80, 110, 115, 120, 130, 150, 200])
def test_no_column_is_cut_where_all_words_fit_but_not_all_cells(width):
    metrics = ("c_index", "loss", "uno", "ibs", "risk_gap/365", "risk_gap/730", "risk_gap/1095")
    table = table_of(("site", *metrics), [("siemens-hospital", *["0.1234 (0.0523 to 0.1781)"] * len(metrics))])
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= width
    assert shown.count("0.1234") == shown.count("0.1781)") == len(metrics)
    assert all(word in shown for word in ("siemens-hospital", *metrics))


def test_large_errors_fit_a_terminal_of_120_columns():
    figures = {f"{name}r2": 0.607 for name in ("", "best_")} | {
        f"client_r2_{name}": -0.126 for name in ("mean", "worst")
    }
    figures |= {"mae": 2.7412e6, "rmse": 846552.9}
    row = {**figures, **{f"{name}_std": 0.033 for name in figures}, "mae_std": 130_000, "rmse_std": 18582.67}
    row |= {"seeds": 3, "target": 0.796, "rounds_to_target": None, "seeds_reaching_target": 0}
    row |= {"bytes_up": 3.3e5, "bytes_down": 3.3e5, "seconds": 0.1, "reference": False}
    names = ("fedavg", "fedprox:mu=0.1+scaffold")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(comparison_table([{"method": name, **row} for name in names]))
    shown = console.export_text()
    assert "────" in shown
    for words in (*names, "2.74e+06", "± 1.3e+05", "846553", "± 18583", "-12.6", "0 of 3 seeds"):
        assert words in shown
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_columns_without_any_value_are_not_printed():
    costs = [TargetCost("fedavg", 3.0, 1e6, 10), TargetCost("scaffold", None, None, 10, saving=None)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(reaching_table(costs, 0.9))
    shown = console.export_text()
    whole(shown, "rounds", "MB, all clients", ">10", "3.0")
    assert not {"speed-up", "over", "saving"} & set(shown.split())
    console.print(reaching_table([*costs, TargetCost("fedssyn+fedavg", 1.0, 2e6, 10, "fedavg", 3.0)], 0.9))
    assert {"speed-up", "over"} <= set(console.export_text().split())


def test_quiet_says_the_result_and_verbose_every_round(capsys):
    quiet = call(capsys, "run", *TINY, "--rounds", "2", "--out", "a", "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert "test accuracy, last round" in quiet.out
    assert "━" not in quiet.out
    assert "Results are in" not in quiet.out
    verbose = call(capsys, "--verbose", "run", *TINY, "--rounds", "2", "--out", "b")
    assert re.findall(r"round (\d), accuracy 0\.\d+, loss", verbose.out) == ["1", "2"]
    assert "Results are in" in verbose.out
    plain = call(capsys, "run", *TINY, "--rounds", "2", "--out", "c")  # the one before left nothing behind
    assert "━" in plain.out
    assert "round 1, accuracy" not in plain.out
    wrong = call(capsys, "run", "--method", "fedprix", "--verbose")
    assert (wrong.code, "Traceback" in wrong.err, "There is no method" in wrong.err) == (2, True, True)
    assert call(capsys, "run", "--quiet", "--verbose").code == 2


def test_log_json_prints_events_as_lines_and_the_result_as_usual(capsys):
    outcome = call(capsys, "run", *TINY, "--rounds", "2", "--lr", "1e5", "--out", "a", "--log-json")
    events = [json.loads(line) for line in outcome.err.splitlines()]
    assert [line["event"] for line in events if line["event"] != "warning"] == ["start", "round", "round", "end"]
    assert any("diverged" in line["text"] or "loss" in line["text"] for line in events if line["event"] == "warning")
    rounds = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    logged = [{k: v for k, v in line.items() if k not in ("time", "event", "run")} for line in events]
    assert [line for line in logged if "accuracy" in line] == rounds
    assert "test accuracy, last round" in outcome.out
    wrong = call(capsys, "--log-json", "run", "--method", "fedprix")
    (error,) = [json.loads(line) for line in wrong.err.splitlines()]
    assert (wrong.code, error["event"], "There is no method" in error["text"]) == (2, "error", True)
    assert call(capsys, "run", "--log-json", "--verbose").code == 2


def test_colors_can_be_turned_off(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    colored = r"\x1b\[[\d;]*3[1-7]m"
    assert re.search(colored, call(capsys, "run", "--method", "fedprix").err)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(colored, call(capsys, "run", "--method", "fedprix").err)


def test_the_shell_can_complete(capsys, monkeypatch):
    shown = call(capsys, "--help").out
    assert "--install-completion" in shown
    monkeypatch.setenv("_UNSKEW_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "unskew dia")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert call(capsys).out.split() == ["diagnose"]


@pytest.mark.parametrize(("stop", "words"), [(RunInterrupted, "the run was saved"), (KeyboardInterrupt, "Interrupted")])
def test_interrupted_runs_name_resume_only_if_files_exist(capsys, tmp_path, stop, words):
    """Where no file was written there is nothing to go on with, though the folder may be there."""
    folder = tmp_path / "run" / "checkpoints"
    for begun in (False, True):
        if begun:
            folder.mkdir(parents=True)
            (folder.parent / "config.yaml").touch()
        with pytest.raises(typer.Exit), exit_on_signal(folder.parent, "again"):
            raise stop
        said = capsys.readouterr().err
        assert (words in said, "nothing was written" in said, "again" in said) == (begun, not begun, begun)


def test_names_from_files_cannot_control_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        '{"a\\u001b[31mred\\u202e": 1, "b": 2}\n{"a\\u001b[31mred\\u202e": 2, "b": 3}\n'
    )
    outcome = call(capsys, "run", "--data", "table:rows.jsonl", "--label", "y", "--rounds", "1")
    assert outcome.code == 2
    assert "\x1b[31mred" not in outcome.err
    assert "\u202e" not in outcome.err
    assert r"a\x1b[31mred\u202e" in outcome.err.replace("\n", "")


@pytest.fixture
def names_of_sites(tmp_path):
    """Writes a table whose clients have Polish, German and Chinese names."""
    sites = ("Köln", "上海", "Łódź")
    rows = [f"{sites[k % 3]},{k * 0.37 % 1:.3f},{k // 3 % 2}" for k in range(60)]
    (tmp_path / "sites.csv").write_text("\n".join(["site,age,y", *rows]), encoding="utf-8")
    return ["--data", "table:sites.csv", "--label", "y", "--partition", "natural:site"]


@pytest.mark.parametrize(("encoding", "name"), [("ascii", "K\\xf6ln"), ("latin-1", "Köln"), ("utf-8", "Köln")])
def test_characters_that_a_terminal_cannot_show_are_replaced(encoding, name, names_of_sites, capsys, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    outcome = call(capsys, "partition", *names_of_sites)
    assert outcome.code == 0, outcome.err
    shown = terminal.buffer.getvalue().decode(encoding)
    assert name in shown
    assert ("上海" if encoding == "utf-8" else "\\u4e0a\\u6d77") in shown


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_does_not_stop_a_command(closed, names_of_sites):
    command = f"{shlex.quote(sys.executable)} -m unskew partition {shlex.join(names_of_sites)} {closed}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["bash", "-c", command], env=environment, check=False).returncode == 0


@pytest.mark.parametrize(("columns", "expected"), [("0", None), ("1", None), ("80", "80"), ("wide", "wide")])
def test_an_impossible_number_of_columns_is_ignored(columns, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    prepare_streams()
    assert os.environ.get("COLUMNS") == expected
