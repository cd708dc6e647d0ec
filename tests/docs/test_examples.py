"""The examples run as a newcomer would run them."""

import ast
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import unskew
from unskew.config.loader import experiment, load_yaml
from unskew.testing import assert_engines_agree

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(path, cwd):
    # One thread: on a busy machine several threads of a small model only wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, path], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not any(cwd.iterdir()), "an example writes nothing"
    return done.stdout.splitlines()


def code_lines(source):
    """Lines that hold code: not blank, not a comment, not a docstring."""
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0] for t in tokens if t.type not in silent} - strings


def test_a_new_method_takes_less_than_thirty_lines():
    assert 10 < len(code_lines((EXAMPLES / "own_method.py").read_text())) < 30


@pytest.mark.slow
def test_own_method_runs_and_prints_its_result(tmp_path):
    lines = run(EXAMPLES / "own_method.py", tmp_path)
    assert [line.split()[0] for line in lines] == ["fedavg", "humble", "scaffold", "humble+scaffold"]
    accuracies = {line.split()[0]: float(line.split("accuracy ")[1].split("%")[0]) for line in lines}
    assert accuracies["scaffold"] > accuracies["fedavg"] > 70
    assert accuracies["humble"] != accuracies["fedavg"]
    assert accuracies["humble+scaffold"] > 90


@pytest.mark.slow
def test_own_data_and_model_runs_and_prints_its_result(tmp_path):
    lines = run(EXAMPLES / "own_data_and_model.py", tmp_path)
    assert sum(line.startswith("hospital ") for line in lines) == 4
    assert all(float(line.rstrip("%").rsplit(" ", 1)[1]) > 90 for line in lines[4:])


@pytest.mark.slow
def test_the_hospitals_compare_two_outcomes_and_predict(tmp_path):
    command = [sys.executable, EXAMPLES / "hospitals.py", "--out", tmp_path / "out", "--seeds", "1", "--rounds", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"(auroc|r2) (-?\d+\.\d+)", done.stdout))
    assert float(said["auroc"]) > 0.9
    assert float(said["r2"]) > 0.2
    assert re.search(r"Two new patients: \[\d+, \d+\]", done.stdout)


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_own_method_changes_the_model_alike_on_every_engine(engine, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    fed = unskew.load_federation("digits", partition="dirichlet:1", clients=3)
    options = {"model": "logistic", "rounds": 1, "local_steps": 3, "precision": "fp64", "federation": fed}
    sums = "examples.own_method.Humble:beta=0.5+scaffold"
    vector = unskew.run(method=sums, engine=engine, **options).vector
    reference = unskew.run(method=sums, engine="inline", **options).vector
    assert_engines_agree(vector, reference)
    assert (vector - unskew.run(method="scaffold", engine="inline", **options).vector).abs().max() > 1e-6


def test_the_demo_is_a_whole_configuration():
    values = load_yaml(EXAMPLES / "demo.yaml")
    assert experiment(values).data == "digits"
    assert (EXAMPLES / "demo.yaml").read_text() == (ROOT / "unskew" / "cli" / "demo.yaml").read_text()
    assert "unskew demo" in (EXAMPLES / "demo.yaml").read_text()
    assert "$(BIN)/unskew demo\n" in (ROOT / "Makefile").read_text()


def test_the_page_of_lora_methods_shows_the_stored_results():
    stored = json.loads((ROOT / "results" / "lora.json").read_text())
    page = (ROOT / "docs" / "results" / "lora.md").read_text()
    for name, errors in stored["errors"].items():
        assert f"| {name} | " + " | ".join(f"{error:.1e}" for error in errors) + " |" in page
        least, most = (0.1, 0.3) if name.startswith("fedavg") else (0, 1e-6 if name.endswith("fp32") else 1e-14)
        assert all(least < error < most for error in errors)
    for name, outcome in stored["outcomes"].items():
        assert outcome["lr"] == float(min(outcome["tuning"], key=outcome["tuning"].get))
        shown = []
        for metric in ("loss", "perplexity", "exact_match"):
            values = [run[metric] for run in outcome["runs"]]
            shown.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}")
        assert f"| `{name}` | {outcome['lr']} | " + " | ".join(shown) in page


@pytest.mark.slow
def test_lora_writes_errors_and_outcomes(tmp_path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("lora_example", EXAMPLES / "lora.py")
    lora = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lora)
    lora.write(tmp_path)
    lora.train_base(tmp_path)
    errors = lora.exactness(tmp_path, 1)
    assert errors["fedavg, fp64"][0] > 0.05
    assert max(errors[f"{name}, fp64"][0] for name in ("freeze_a", "flora", "fedex")) < 1e-14
    outcome = lora.results_of("fedsa", tmp_path, 0, 0.01, 1)
    assert outcome["perplexity"] > 1
