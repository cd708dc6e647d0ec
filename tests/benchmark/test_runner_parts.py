"""Parts of a suite: each unit is in one part, and the merged outcomes are those of one command."""

import json

import pytest
import yaml
from support.running import call

from unskew.benchmark.runner import SuiteRuns, run_unit
from unskew.benchmark.suite import load_suite
from unskew.comparison.references import is_reference
from unskew.runs.parts import Part

SETTINGS = {
    "data": "digits",
    "clients": 3,
    "model": "logistic",
    "holdout": 0.2,
    "max_train_samples": 200,
    "rounds": 2,
    "local_steps": 2,
    "engine": "inline",
}


@pytest.fixture
def suite_file(tmp_path):
    federation = {"title": "Few digits", "kind": "controlled", "source": "scikit-learn"}
    for name, partition in (("iid", "iid"), ("skewed", "dirichlet:0.5")):
        content = {**federation, "settings": {**SETTINGS, "partition": partition}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    suite = {
        "title": "Small suite",
        "trials": 2,
        "seeds": [1, 2],
        "federations": ["iid.yaml", "skewed.yaml"],
        "methods": ["fedavg", "fedprox"],
        "untuned": ["fedavg"],
        "references": ["pooled", "local"],
        "space": {"fedprox.mu": [0.1, 1.0]},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(suite))
    return tmp_path / "small.yaml"


@pytest.mark.parametrize("total", [1, 2, 3, 6, 9])
def test_each_unit_is_in_one_part_and_references_are_in_that_of_the_baseline(suite_file, tmp_path, total):
    runs = SuiteRuns(*load_suite(str(suite_file)), tmp_path / "results")
    units = runs.units()
    parts = [runs.units_of_part(units, Part(number, total)) for number in range(1, total + 1)]
    assert sorted(map(str, units)) == sorted(str(unit) for part in parts for unit in part)
    for part in parts:
        for reference in filter(lambda unit: is_reference(unit.method), part):
            baseline = runs.tuned_unit(reference.federation, "fedavg")
            assert part.index(baseline) < part.index(reference)
    num_runs = [sum(2 if is_reference(unit.method) else 2 + unit.trials for unit in part) for part in parts]
    assert max(num_runs) - min(num_runs) <= 8  # those of the baseline and its references
    chosen = runs.units(["iid"], ["local", "fedprox"])
    assert [runs.units_of_part(chosen, Part(k, 2)) for k in (1, 2)] == [[chosen[0]], [chosen[1]]]


def without_times(results):
    lines = {file.name: list(map(json.loads, file.read_text().splitlines())) for file in results.iterdir()}
    return {name: [{k: v for k, v in line.items() if k != "seconds"} for line in own] for name, own in lines.items()}


def test_parts_give_the_files_and_tables_of_one_command(suite_file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setenv("COLUMNS", "200")
    executed = []

    def counted(runs, unit, in_parts, callbacks):
        executed.append(unit)
        return run_unit(runs, unit, in_parts, callbacks)

    monkeypatch.setattr("unskew.benchmark.runner.run_unit", counted)
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    outputs = [
        call(capsys, "benchmark", suite_file, "--results", shared, "--part", f"{number}/3") for number in (3, 1, 2)
    ]
    assert [output.code for output in outputs] == [0, 0, 0]
    assert len(executed) == len(set(executed)) == 10
    assert "Part 3/3: 3 of 3 units are stored" in " ".join(outputs[0].out.split())
    files = sorted(shared.iterdir())
    assert len(files) == 10  # one per unit, so that no two parts write to the same file
    again = call(capsys, "benchmark", suite_file, "--results", shared, "--part", "3/3", "--json")
    assert (json.loads(again.out)["part"], len(json.loads(again.out)["units"])) == ("3/3", 3)
    shown = call(capsys, "benchmark", suite_file, "--results", shared, "--show")
    assert sorted(shared.iterdir()) == files  # reading moves nothing
    complete = call(capsys, "benchmark", suite_file, "--results", shared)
    assert complete.out == shown.out
    assert len(executed) == 10
    assert sorted(path.name for path in shared.iterdir()) == ["iid.jsonl", "skewed.jsonl"]
    assert call(capsys, "benchmark", suite_file, "--results", alone).code == 0
    assert without_times(shared) == without_times(alone)
    assert call(capsys, "benchmark", suite_file, "--results", alone).out == complete.out


@pytest.mark.parametrize("flags", [["--list"], ["--show"], ["--pages", "pages"]])
def test_a_part_prints_no_tables(suite_file, capsys, flags):
    outcome = call(capsys, "benchmark", suite_file, "--part", "1/2", *flags)
    assert outcome.code == 2
    assert f"Run {flags[0]} without --part" in outcome.err


def test_the_estimate_of_a_part_counts_its_units(suite_file, tmp_path, capsys):
    pytest.importorskip("optuna")
    outcome = call(capsys, "benchmark", suite_file, "--part", "1/3", "--estimate", "--results", tmp_path / "results")
    assert "3 of 3 units to run" in " ".join(outcome.out.split())
    assert not (tmp_path / "results").exists()
