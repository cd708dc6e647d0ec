"""The scripts of the page on clusters, with replacements for Slurm's commands."""

import contextlib
import os
import re
import signal
import subprocess

import pytest
from support import slurm_commands
from support.pages import DOCS
from support.ray_nodes import TOKEN
from support.running import metrics
from support.sites import TINY

import unskew
from unskew.config.loader import experiment

pytestmark = pytest.mark.slow
SHOWN = {name: value for name, value in TINY.items() if name != "engine"}


def submitted(name, folder, **variables):
    """Submit a script of the page, as one copies it from there."""
    page = (DOCS / "cluster.md").read_text()
    (script,) = re.findall(rf"<!-- slurm: {name} -->\n```bash\n(.*?)```", page, re.DOTALL)
    (folder / name).write_text(script)
    (folder / "experiment.yaml").write_text(experiment(SHOWN).to_yaml())
    found = slurm_commands.install(folder / "bin")
    job = subprocess.Popen(
        ["sbatch", name], cwd=folder, env={**found, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # what a job leaves behind
    assert job.returncode == 0, output


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
