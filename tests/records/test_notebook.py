"""Results in notebooks: tables, figures, progress and differences."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support.html_cells import Cells

import unskew
from unskew.comparison.comparison_result import Comparison
from unskew.errors import ConfigError
from unskew.records import notebook
from unskew.records.result import Result

QUICK = {"model": "logistic", "rounds": 2, "local_steps": 2, "engine": "inline", "lr": 0.2}


def test_notebooks_show_tables_with_text_escaped_and_print_no_histories():
    def summary(accuracy, sent):
        figures = {"accuracy": accuracy, "best_accuracy": accuracy, "loss": 1.0, "bytes_up": sent, "bytes_down": sent}
        return {"method": "<b>fedavg", "rounds": 2, "client_weighting": "samples", "seconds": 1.0, **figures}

    history = [{"round": t, "accuracy": 0.1 * t, "bytes_up": 1, "bytes_down": 1} for t in range(1, 500)]
    runs = {"<b>fedavg": [summary(0.5, 2_000_000), summary(0.7, 2_000_000)]}
    comparison = Comparison({"<b>fedavg": [history, history]}, runs, 0.4, None)
    shown = comparison._repr_html_()
    assert "<td>&lt;b&gt;fedavg</td><td>2</td><td>0.6 ± 0.14</td>" in shown
    assert "<b>" not in shown
    assert "<th>MB up</th>" in shown
    assert "<td>2</td>" in shown
    assert repr(comparison).splitlines() == [
        "Comparison(target=0.4, folder=None)",
        "  method <b>fedavg, seeds 2, accuracy 0.6 ± 0.14",
    ]
    frame = comparison.to_pandas()
    assert frame["accuracy"].tolist() == pytest.approx([0.6])
    assert frame["method"].tolist() == ["<b>fedavg"]
    result = Result(history, summary(0.5, 2_000_000), torch.nn.Linear(1, 1), torch.zeros(2), None)
    assert "<td>&lt;b&gt;fedavg</td><td>2</td><td>0.5</td>" in result._repr_html_()
    assert len(repr(result)) < 200


@pytest.fixture(scope="module")
def fed():
    return unskew.load_federation("digits", partition="dirichlet:0.5", clients=3)


def test_the_row_of_local_has_the_mean_over_clients(fed):
    comparison = unskew.compare(fed, methods=["fedavg"], seeds=2, references=True, **QUICK)
    head, *rows = Cells(comparison._repr_html_()).rows
    (local,) = (dict(zip(head, row, strict=True)) for row in rows if row[0] == "local")
    mean = sum(summary["client_accuracy_mean"] for summary in comparison.summaries["local"]) / 2
    assert float(local["client_accuracy_mean"].split(" ±")[0]) == pytest.approx(mean, rel=1e-3)
    assert "method local, seeds 2, client_accuracy_mean" in repr(comparison)


def test_differences_are_paired_by_seed(fed):
    stats = pytest.importorskip("scipy.stats")
    comparison = unskew.compare(fed, methods=["fedavg", "fedprox:mu=5"], seeds=4, references=True, **QUICK)
    for metric in ("client_accuracy_mean", None):
        rows = {(row["method"], row["minus"]): row for row in comparison.differences(metric)}
        name = metric or "accuracy"
        a, b = ([s[name] for s in comparison.summaries[method]] for method in ("fedavg", "fedprox:mu=5"))
        row, back = rows["fedavg", "fedprox:mu=5"], rows["fedprox:mu=5", "fedavg"]
        assert (row["seeds"], row["difference"]) == (4, pytest.approx(sum(a) / 4 - sum(b) / 4))
        interval = stats.ttest_rel(a, b).confidence_interval(0.95)
        assert (row["low"], row["high"]) == pytest.approx(tuple(interval), abs=1e-6)
        assert (back["low"], back["high"]) == pytest.approx((-row["high"], -row["low"]))
        assert (("local", "fedavg") in rows) == (metric is not None)  # each client alone has no global model
    with pytest.raises(ConfigError, match=r"no metric 'acuracy'\. Did you mean 'accuracy'"):
        comparison.differences("acuracy")


def test_plots_without_a_path_are_figures_that_notebooks_display(fed, tmp_path):
    report = unskew.diagnose(fed, model="logistic", samples=20, curvature=False)
    for result in (unskew.run(fed, **QUICK), unskew.compare(fed, methods=["fedavg"], seeds=1, **QUICK), report):
        figure = result.plot()
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert result.plot(tmp_path / "a.png") == tmp_path / "a.png"
        assert (tmp_path / "a.png").read_bytes() == figure._repr_png_()


def test_every_result_is_displayed_and_printed_briefly(fed):
    report = unskew.diagnose(fed, model="logistic", samples=20, curvature=False)
    tuned = unskew.tune(fed, methods=["fedavg"], trials=1, seeds=1, **QUICK)
    page = Cells(report._repr_html_())
    assert page.paragraphs == [report.summary()]
    measured = dict(row for row in page.rows if len(row) == 2)
    assert float(measured["label_distance_mean"]) == pytest.approx(report.labels["label_distance_mean"], rel=1e-3)
    advice = report.advice()
    page = Cells(advice._repr_html_())
    assert page.paragraphs[0] == f"Compare {', '.join(advice.methods)}."
    assert [row[1] for row in page.rows if row[0] == "one global model"] == [s.method for s in advice.suggestions]
    head, row, *_ = Cells(tuned._repr_html_()).rows
    best = tuned.tuned["fedavg"]
    assert float(row[head.index(best.judged_by)]) == pytest.approx(best.value, rel=1e-3)
    for result, size in ((report, 2000), (advice, 9000), (tuned, 500)):
        assert repr(result).startswith(f"{type(result).__name__}:\n  ")
        assert len(repr(result)) < size
        assert "Experiment(" not in repr(result)


def test_a_notebook_prints_progress_as_lines_and_other_programs_none(fed, capsys, monkeypatch):
    run = {**QUICK, "rounds": 40}
    monkeypatch.setattr(notebook, "PATIENCE", 0)
    unskew.run(fed, **run)
    assert not capsys.readouterr().out
    for kernel, lines in ((None, 0), (object(), 9)):
        shell = SimpleNamespace(kernel=kernel)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        unskew.run(fed, **run)
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == lines
    assert printed[0].startswith("fedavg, seed 0: round 4 of 40, test accuracy ")
    assert "\r" not in "".join(printed)
    monkeypatch.setattr(notebook, "PATIENCE", 1e9)
    unskew.run(fed, **run)
    assert not capsys.readouterr().out
