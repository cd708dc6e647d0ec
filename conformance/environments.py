"""Virtual environment of each library, which shares the calling interpreter's PyTorch because it is large."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

MINUTES = 30
"""Default time limit per library, and the limit of an installation."""


def constant(module: Path, name: str) -> tuple[str, ...]:
    """Return the constant ``name`` of a module without importing it, because its library is not installed here."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return tuple(ast.literal_eval(node.value))
    return ()


def environment(folder: Path, module: Path) -> Path:
    """Return the interpreter in ``folder`` with the requirements of ``module``; create it if necessary.

    Args:
        folder: Folder of the virtual environment.
        module: Module whose ``REQUIREMENTS`` are installed, and whose ``ALONE`` are installed without dependencies.

    Raises:
        subprocess.SubprocessError: If a package cannot be installed.
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
