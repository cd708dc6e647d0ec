"""Flower's programs in the environment of their own, and the mark of tests that need it."""

import os
import subprocess
from pathlib import Path

import pytest

from support.pages import ROOT

FLOWER = ROOT / ".venv-deploy" / "bin"

real = [
    pytest.mark.skipif(
        not (FLOWER.parent / "installed").exists(),
        reason="Flower has an environment of its own: make .venv-deploy/installed",
    ),
    pytest.mark.xdist_group("flower"),
]


def environment(tmp_path, **more):
    """Variables of a process that runs this code, with its cache in the test's folder."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    return {**kept, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", **more}


def command(tmp_path, *arguments, seconds=600, **more):
    """The command line in Flower's environment."""
    return subprocess.run(
        [str(FLOWER / "unskew"), *map(str, arguments)],
        capture_output=True, text=True, timeout=seconds, env=environment(tmp_path, **more), check=False,
    )  # fmt: skip


def processes_of(tmp_path):
    """Processes that belong to a test: their command lines name its folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(tmp_path) in line and int(place.name) != os.getpid():
            found.append(line)
    return found
