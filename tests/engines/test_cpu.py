"""Everything that is imported, and a comparison in a folder, without the modules and functions that only Unix has."""

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, os, pkgutil, sys
from pathlib import Path

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
import unskew

for module in pkgutil.walk_packages(unskew.__path__, "unskew."):
    if ".flower.app" not in module.name and not module.name.endswith("__main__"):  # Flower has its own environment
        importlib.import_module(module.name)
for name in ("fork", "geteuid", "getuid", "mkfifo", "sched_getaffinity", "uname"):
    if hasattr(os, name):
        delattr(os, name)
from unskew.engines import processes

processes.fork_available = lambda: False
options = {"rounds": 2, "local_steps": 1, "clients": 3, "model": "logistic"}
result = unskew.compare(methods=["fedavg", "scaffold"], seeds=1, out=sys.argv[1], **options)
(folder,) = (str(path.parent) for path in Path(sys.argv[1]).rglob("config.yaml") if "fedavg" in str(path))
print(len(result.rows()), unskew.resume(folder, rounds=3).summary["engine"])
"""


@pytest.mark.slow
def test_a_comparison_runs_without_the_modules_of_unix(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "all")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == "4"  # with the two references
    assert done.stdout.split()[1] in ("inline", "vectorized")
