"""The pages of results and their index say what the kept outcomes say."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from speed.result_pages import Pages, main
from unskew.benchmark.suite import load_suite
from unskew.reproduction.outcomes import stored_outcomes
from unskew.tasks.primary_metric import metric_info

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tables_and_index_are_those_of_the_kept_outcomes():
    assert not list(Pages(ROOT).stale()), "run: python -m speed.result_pages"


def test_the_index_leads_to_every_outcome():
    links = set(re.findall(r"\]\((runs/[^)]+)\)", (ROOT / "results" / "INDEX.md").read_text(encoding="utf-8")))
    stored = stored_outcomes(ROOT / "results" / "runs").values()
    assert links == {f"{own.path.relative_to(ROOT / 'results').as_posix()}#L{own.line}" for own in stored}


def test_the_index_lists_every_scale_of_a_table_that_a_page_shows():
    index = (ROOT / "results" / "INDEX.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "results").glob("*.md"):
        for name, scale in re.findall(r"<!-- table: (\S+) (\w+) -->\n\n", page.read_text(encoding="utf-8")):
            assert f"`{name}`, scale `{scale}`, shown in [{page.stem}]" in index


def gains_over_fedavg(methods, first, personal, kind=None):
    """Return each method's differences to FedAvg's mean over the seeds of a federation, by federation.

    They are accuracy, R² or errors in points, on the federations on which ``first`` has been run.
    """
    suite, federations = load_suite("skew")
    gains = {name: {} for name in methods}
    for federation in federations:
        path = ROOT / "results" / "benchmark" / f"{federation.name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        own = {}
        for line in sorted(lines, key=lambda line: line["run"]["trials"]):  # the largest budget counts
            if line["run"]["trials"] >= suite.trials and "summaries" in line:
                own[line["run"]["method"]] = line
        if not {"fedavg", first} <= own.keys() or kind not in (None, federation.kind):
            continue
        means = {}
        for name in {"fedavg", *methods} & own.keys():
            outcome = own[name]
            metric = outcome["objective"]
            if personal:
                whose = "personal" if outcome["personal"] else "client"
                metric = f"{whose}_{outcome['client_metric']}_mean"
            values = [summary.get(metric) for summary in outcome["summaries"]]
            diverged = any(summary["diverged"] for summary in outcome["summaries"])
            if None not in values and not diverged:
                info = metric_info(outcome["objective"])
                means[name] = (100 if info.percent else 1) * (-1 if info.lower_is_better else 1) * np.mean(values)
        for name in methods & means.keys():
            gains[name][federation.name] = means[name] - means["fedavg"]
    return gains


@pytest.mark.parametrize(
    ("method", "first", "personal"),
    [("fedlesam-d", "fedacg", False), ("fedamp", "feddbe", True), ("apfl", "feddbe", True)],
)
def test_gains_over_federations_are_those_of_the_outcomes(method, first, personal):
    page = (ROOT / "docs" / "results" / "benchmark.md").read_text(encoding="utf-8")
    found = gains_over_fedavg({method, "ft"}, first, personal)
    gains = [*found[method].values()]
    row = next(line for line in page.splitlines() if line.startswith(f"| `{method}` |")).strip("| ").split(" | ")
    assert [int(row[1]), int(row[2])] == [len(gains), sum(gain > 0 for gain in gains)]
    shown = [float(cell) for cell in row[3:5]]
    assert shown == pytest.approx([np.median(gains), np.mean(gains)], abs=0.0500001)
    if personal:
        above = [gain > found["ft"][name] for name, gain in found[method].items() if name in found["ft"]]
        assert row[7] == f"{sum(above)} of {len(above)}"


@pytest.mark.parametrize(
    ("kind", "view", "method"), [("natural", "global", "feddyn"), ("controlled", "clients", "fedala")]
)
def test_counts_within_sentences_are_those_of_the_outcomes(kind, view, method):
    page = (ROOT / "docs" / "results" / "benchmark.md").read_text(encoding="utf-8")
    gains = [*gains_over_fedavg({method}, "fedavg", view == "clients", kind)[method].values()]
    shown = re.search(rf"<!-- above: skew {kind} {view} {method} -->(\d+) of (\d+) \(median (\S+?)[,)]", page)
    assert [int(shown[1]), int(shown[2])] == [sum(gain > 0 for gain in gains), len(gains)]
    assert float(shown[3]) == pytest.approx(np.median(gains), abs=0.0500001)


def test_a_page_and_the_index_are_written_from_what_is_there(tmp_path, monkeypatch, capsys):
    pages, runs = tmp_path / "docs" / "results", tmp_path / "results" / "runs"
    pages.mkdir(parents=True)
    runs.mkdir(parents=True)
    shutil.copy(ROOT / "results" / "runs" / "fedssyn" / "logistic.jsonl", runs)
    (pages / "one.md").write_text("Words.\n\n<!-- table: fedssyn/logistic cpu -->\nold\n<!-- end -->\n")
    (pages / "none.md").write_text("<!-- table: fedcog/table-1 cpu -->\n<!-- end -->\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("speed.result_pages.preset_names", lambda: ["fedcog/table-1"])
    main()
    assert len(capsys.readouterr().out.splitlines()) == 3
    one = (pages / "one.md").read_text(encoding="utf-8")
    assert one.startswith("Words.")
    assert "| iid, E = 1, noise 0 |" in one
    assert "data digits (paper: mnist)" in one
    assert "old" not in one
    assert "No run of this table" in (pages / "none.md").read_text(encoding="utf-8")
    index = (tmp_path / "results" / "INDEX.md").read_text(encoding="utf-8")
    assert "`fedssyn/logistic`, scale `cpu`, shown in [one](../docs/results/one.md)" in index
    assert "fedcog/table-1" not in index
    main()
    assert capsys.readouterr().out == ""
