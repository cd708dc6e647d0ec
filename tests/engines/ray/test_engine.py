"""The engine ``ray``, in a process of its own: one that has loaded Ray should not fork workers of ours any more."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("cases", ["ray_cases.py", "ray_runs.py"])
def test_clients_and_runs_on_a_cluster_of_two_nodes(cases):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-v",
        Path(__file__).with_name(cases),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]
