"""Scripts of the page on clusters, with replacements for Slurm's commands."""

import contextlib
import json
import os
import re
import signal
import subprocess

import pytest
import yaml
from support import slurm_commands
from support.pages import DOCS
from support.ray_nodes import TOKEN
from support.running import TIMES, assert_same_run, metrics
from support.sites import TINY

import unskew
from unskew.config.loader import experiment

pytestmark = pytest.mark.slow
SHOWN = {name: value for name, value in TINY.items() if name != "engine"}


def copied(name, folder):
    """Write a script of the page to a file, as one copies it from there."""
    page = (DOCS / "cluster.md").read_text()
    (script,) = re.findall(rf"<!-- slurm: {name} -->\n```bash\n(.*?)```", page, re.DOTALL)
    (folder / name).write_text(script)


def executed(command, folder, fails=False, **variables):
    """Execute a command where Slurm is installed, and return its output."""
    (folder / "experiment.yaml").write_text(experiment(SHOWN).to_yaml())
    found = slurm_commands.install(folder / "bin")
    job = subprocess.Popen(
        command, cwd=folder, env={**found, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # what a job leaves behind
    assert (job.returncode != 0) == fails, output
    return output


def submitted(name, folder, **variables):
    """Submit a script of the page."""
    copied(name, folder)
    executed(["sbatch", name], folder, **variables)


def rows(file, without):
    """The rows of a JSON or JSON Lines file, without some fields."""
    text = file.read_text()
    content = json.loads(text) if file.suffix == ".json" else list(map(json.loads, text.splitlines()))
    return [{name: value for name, value in row.items() if name not in without} for row in content]


def test_an_array_job_executes_methods_and_seeds(tmp_path):
    submitted("runs.sbatch", tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        f"{method}-{seed}" for method in ("fedavg", "scaffold") for seed in (0, 1)
    }
    unskew.run(out=tmp_path / "alone", method="scaffold", seed=1, **SHOWN)
    assert metrics(tmp_path / "runs" / "scaffold-1") == metrics(tmp_path / "alone")


@pytest.mark.xdist_group("ray")
def test_a_job_with_a_ray_node_on_each_of_its_nodes_trains_on_both(tmp_path):
    """The script starts the run when both nodes are there."""
    submitted("ray.sbatch", tmp_path, **TOKEN)
    unskew.run(out=tmp_path / "alone", engine="inline", **SHOWN)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("runs/ray", "alone"))
    assert one == other


def test_an_array_job_executes_the_parts_of_a_comparison(tmp_path):
    """The node of a task dies; then only this task and the last job are submitted again."""
    for name in ("compare.sbatch", "submit-compare.sh"):
        copied(name, tmp_path)
    output = executed(["bash", "submit-compare.sh"], tmp_path, fails=True, FAKE_DEAD_TASK="3")
    assert "DependencyNeverSatisfied" in output
    study = tmp_path / "runs" / "study"
    assert len(list(study.glob("*/*/summary.json"))) == 9
    assert not (study / "comparison.json").exists()
    script = (tmp_path / "submit-compare.sh").read_text()
    (tmp_path / "again.sh").write_text(script.replace("--parsable", "--parsable --array=3"))
    executed(["bash", "again.sh"], tmp_path)
    assert "Test accuracy" in (tmp_path / "slurm-4.out").read_text()

    alone = tmp_path / "alone"
    unskew.compare(methods=["fedavg", "scaffold"], seeds="0..2", out=alone, references=True, **SHOWN)
    times = [*TIMES, "seconds_mean", "seconds_std"]
    assert rows(study / "comparison.json", times) == rows(alone / "comparison.json", times)
    assert (study / "convergence.png").stat().st_size == (alone / "convergence.png").stat().st_size
    names = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (study, alone)]
    assert {path.name for path in names[0] ^ names[1]} <= {"report.html"}  # which only the command writes
    for run in (path.parent for path in alone.glob("*/*/config.yaml")):
        assert_same_run(study / run.relative_to(alone), run)


def test_an_array_job_executes_the_parts_of_a_benchmark(tmp_path):
    pytest.importorskip("optuna")
    federation = {"title": "Few digits", "kind": "controlled", "source": "scikit-learn"}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump({**federation, "settings": {**SHOWN, "holdout": 0.2}}))
    suite = {
        "title": "Small suite", "trials": 2, "seeds": [1, 2], "federations": ["few.yaml"],
        "methods": ["fedavg", "scaffold", "fedprox"], "untuned": ["fedavg"], "references": ["pooled", "local"],
    }  # fmt: skip
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    for name in ("benchmark.sbatch", "submit-benchmark.sh"):
        copied(name, tmp_path)
    executed(["bash", "submit-benchmark.sh"], tmp_path)
    outputs = "".join((tmp_path / f"slurm-1_{task}.out").read_text() for task in (1, 2, 3, 4))
    assert sorted(re.findall(r"(\d) of \d units are stored", outputs)) == ["1", "1", "1", "3"]
    executed(["unskew", "benchmark", "suite.yaml", "--results", "alone"], tmp_path)
    results = [tmp_path / name / "few.jsonl" for name in ("results", "alone")]
    assert [path.name for path in results[0].parent.iterdir()] == ["few.jsonl"]
    assert len(rows(results[0], ["seconds"])) == 6
    assert rows(results[0], ["seconds"]) == rows(results[1], ["seconds"])
