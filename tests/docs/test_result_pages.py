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


def stored_lines(suite_name, federation):
    """Return the line of each method that ran on a federation, with its largest budget."""
    trials = load_suite(suite_name)[0].trials
    lines = (ROOT / "results" / "benchmark" / f"{federation}.jsonl").read_text().splitlines()
    ordered = sorted(map(json.loads, lines), key=lambda line: line["run"]["trials"])
    return {o["run"]["method"]: o for o in ordered if o["run"]["trials"] >= trials and "summaries" in o}


def mean_metrics(lines, personal):
    """Return each method's mean metric over seeds in points, higher is better, if no seed diverged and all have a value."""
    means = {}
    for name, line in lines.items():
        metric = line["objective"]
        if personal:
            metric = f"{'personal' if line['personal'] else 'client'}_{line['client_metric']}_mean"
        values = [summary.get(metric) for summary in line["summaries"]]
        if None not in values and not any(summary["diverged"] for summary in line["summaries"]):
            info = metric_info(line["objective"])
            means[name] = (100 if info.percent else 1) * (-1 if info.lower_is_better else 1) * np.mean(values)
    return means


def gains_over_fedavg(methods, first, personal, kind=None):
    """Return each method's differences to FedAvg's mean over the seeds of a federation, by federation.

    They are those of the suite ``skew``, on the federations on which ``first`` has been run.
    """
    gains = {name: {} for name in methods}
    for federation in load_suite("skew")[1]:
        lines = stored_lines("skew", federation.name)
        if {"fedavg", first} <= lines.keys() and kind in (None, federation.kind):
            means = mean_metrics(lines, personal)
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


def test_differences_on_single_federations_are_those_of_the_outcomes():
    page = (ROOT / "docs" / "results" / "benchmark.md").read_text(encoding="utf-8")
    marks = re.findall(r"<!-- difference: (.+?) -->(.+?)<!-- end -->", page)
    for words, shown in marks:
        suite, view, federation, method, other = [*words.split(), "fedavg"][:5]
        means = mean_metrics(stored_lines(suite, federation), view == "clients")
        assert float(shown) == pytest.approx(means[method] - means[other], abs=0.0500001), words
    assert len(marks) > 10


def test_differences_on_the_page_of_the_benchmark_are_written_from_outcomes():
    """Except the two medians with options whose outcomes are not kept."""
    page = (ROOT / "docs" / "results" / "benchmark.md").read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- \w+: .+? -->(?:(?!<!--).)*<!-- end -->", "", page, flags=re.S)
    assert re.findall(r"[-+−]\d+\.\d", by_hand) == ["−0.3", "+1.5"]


@pytest.mark.parametrize(("suite", "view"), [("cifar10", "global"), ("survival", "clients")])
def test_tables_of_differences_are_those_of_the_outcomes(suite, view):
    page = (ROOT / "docs" / "results" / "benchmark.md").read_text(encoding="utf-8")
    table = re.search(rf"<!-- differences: {suite} {view} .+? -->\n\n(.+?)\n\n<!-- end -->", page, re.S)[1]
    header, _, *body = [[cell.strip(" `*") for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    compared = 0
    for column, federation in list(enumerate(header))[1:]:
        means = mean_metrics(stored_lines(suite, federation), view == "clients")
        for name, *cells in body:
            if name in means:
                assert float(cells[column - 1]) == pytest.approx(means[name] - means["fedavg"], abs=0.0500001)
                compared += 1
            elif not name.startswith(("tuned", "gain")):
                assert cells[column - 1] in ("", "diverged")
    assert compared > 15


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
