"""The report shows the metrics that sites have sent, with intervals, and the matrix of local models."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.sites import TINY

import unskew
from unskew.errors import CheckpointError
from unskew.reporting.run_groups import group_runs
from unskew.reporting.run_reader import read_runs
from unskew.reporting.site_evaluation import evaluation_charts, evaluation_table

pytest.importorskip("plotly", reason="plotly is not installed")
SCRIPT = Path(unskew.__file__).parent / "reporting" / "templates" / "report.js"


def row(model, site, value, low=None, high=None, **more):
    about = {"model": model, "site": site, "client": 0, "metric": "accuracy", "value": value, "low": low, "high": high}
    return {**about, "n": None if value is None else 20, "support": {"0": "<10", "1": 12, "2": None}, **more}


ROWS = [
    row("global", "a", 0.75, 0.5, 0.9),
    row("global", "<b>", 0.5, 0.25, 0.75),
    row("local", "a", 1.0, trained_at="a"),
    row("local", "<b>", None, trained_at="a", reason="The site <b> does not score foreign models."),
    {**row("global", "a", 0.3, 0.2, 0.4), "metric": "loss"},
]


@pytest.fixture
def folder(tmp_path):
    unskew.run(**{**TINY, "rounds": 1}, out=tmp_path / "run")
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(ROWS))
    return tmp_path / "run"


def group(folder):
    (part,), _ = group_runs(read_runs([folder])[0])
    return part


def test_values_and_intervals_of_each_site_are_in_chart_and_table(folder):
    (chart,) = evaluation_charts(group(folder))
    assert chart["sites"] == ["a", "<b>"]
    assert chart["metrics"] == {"accuracy": "accuracy on held-out samples (%)", "loss": "loss on held-out samples"}
    assert chart["points"]["accuracy"] == {
        "global": [[0, 75, 50, 90, 20], [1, 50, 25, 75, 20]],
        "local": [[0, 100, 100, 100, 20]],
    }
    assert chart["points"]["loss"] == {"global": [[0, 0.3, 0.2, 0.4, 20]]}
    matrix = chart["matrix"]["accuracy"]
    assert matrix["rows"] == ["global", "local of a", "local of <b>"]
    assert matrix["cells"] == [[75, 50], [100, None], [None, None]]
    assert matrix["reasons"][1] == ["", "The site <b> does not score foreign models."]
    table = evaluation_table(group(folder))
    texts = [[cell.text for cell in line] for line in table.rows]
    assert texts[0] == [
        "global",
        "a",
        "20",
        "0 <10, 1 12, 2 withheld",
        "75.0 (50.0 to 90.0)",
        "0.3000 (0.2000 to 0.4000)",
    ]
    assert [cell.value for cell in table.rows[0][4:]] == [75, 0.3]  # copies are in percent, as the title says
    assert texts[2][:2] == ["local", "a"]
    assert len(texts) == 3
    assert table.groups == []


def test_the_page_has_the_section_and_its_names_are_text(folder, light):
    page = unskew.report(folder).read_text()
    assert "<h3>Evaluation at the sites</h3>" in page
    assert "The site &lt;b&gt; does not score foreign models." in page
    assert "<b> does not" not in page
    (folder / "evaluation.json").unlink()
    assert "Evaluation at the sites" not in unskew.report(folder).read_text()


def test_a_damaged_file_does_not_cost_the_other_sections(folder, light):
    (folder / "evaluation.json").write_text('[{"model": "global", "site": "a", "metric": "loss", "value": "NaN"}]')
    with pytest.raises(CheckpointError, match="Remove it and evaluate the run again"):
        evaluation_charts(group(folder))
    with pytest.warns(RuntimeWarning, match="'Evaluation at the sites' of the report is missing"):
        page = unskew.report(folder).read_text()
    assert "<h3>Run it again</h3>" in page


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_script_draws_intervals_and_the_matrix(folder):
    source = SCRIPT.read_text(encoding="utf-8")
    body = source[source.index("    evaluation() {") : source.index("    boxes() {")]
    names = source[source.index("  const plain = ") : source.index("  const faint = ")]
    program = f"""
    {names}
    const color = (name) => name, shown = {{}};
    class Part {{
      constructor(content) {{ this.content = content; }}
      find() {{ return {{ style: {{ setProperty() {{}} }} }}; }}
      chosen(name) {{ return name === "score" ? "accuracy" : undefined; }}
      show(role, traces, more, text) {{ shown[role] = {{ traces, text }}; }}
    {body}
    }}
    new Part({{ evaluations: {json.dumps(evaluation_charts(group(folder)))} }}).evaluation();
    process.stdout.write(JSON.stringify(shown));
    """
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    first, second = shown["sites"]["traces"]
    assert first["x"] == [75, 50]
    assert first["error_x"]["array"] == [15, 25]
    assert first["error_x"]["arrayminus"] == [25, 25]
    assert [round(y, 2) for y in (*first["y"], *second["y"])] == [-0.1, 0.9, 0.1]
    (heat,) = shown["matrix"]["traces"]
    assert heat["z"] == [[75, 50], [100, None], [None, None]]
    assert "does not score foreign models" in heat["customdata"][1][1]
    assert "<b>&#60;b&#62;</b>" in first["customdata"][1]
