"""An interpreter for each library, with PyTorch taken from the one that asks, because it is large."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

MINUTES = 30
"""Default time limit per library, and the limit of an installation."""


def constant(module: Path, name: str) -> tuple[str, ...]:
    """What a module sets ``name`` to; it is read, not imported, as the library that it imports is not here."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return tuple(ast.literal_eval(node.value))
    return ()


def environment(folder: Path, module: Path) -> Path:
    """The interpreter in ``folder`` that has what ``module`` names, made if need be.

    Args:
        folder: Of the virtual environment.
        module: Its ``REQUIREMENTS`` are installed, and its ``ALONE`` without what these need.

    Raises:
        subprocess.SubprocessError: Something cannot be installed.
    """
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        folder.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        for options, names in (([], "REQUIREMENTS"), (["--no-deps"], "ALONE")):
            if wanted := constant(module, names):
                command = [python, "-m", "pip", "install", "--quiet", *options, *wanted]
                subprocess.run(command, check=True, timeout=60 * MINUTES)
        (folder / "made").touch()
    return python
