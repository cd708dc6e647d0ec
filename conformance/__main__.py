"""Run the suite: ``python -m conformance [LIBRARY ...]``, and print the tables."""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import sysconfig
from datetime import date
from pathlib import Path

from conformance.cases import FIRST, TABLE, measured
from conformance.papers import paper

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".venv"
LIBRARIES = ("unskew", "fedlab", "pfl_research", "fedjax", "flower", "pfllib", "fl_bench")
CHECKOUTS = ("pfllib", "fl_bench")
MINUTES = 10


def constant(library: str, name: str) -> tuple[str, ...]:
    """What an adapter sets ``name`` to; it is read, not imported, as the library is not here."""
    for node in ast.parse((HERE / "adapters" / f"{library}.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return tuple(ast.literal_eval(node.value))
    return ()


def environment(library: str) -> Path:
    """The interpreter that has the library, made if need be. PyTorch is that of this interpreter, as it is large."""
    if library == "unskew":
        return Path(sys.executable)
    folder = ENVIRONMENTS / library
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        for options, names in (([], "REQUIREMENTS"), (["--no-deps"], "ALONE")):
            if wanted := constant(library, names):
                command = [python, "-m", "pip", "install", "--quiet", *options, *wanted]
                subprocess.run(command, check=True, timeout=60 * MINUTES)
        (folder / "made").touch()
    return python


def outcome(library: str, checkout: Path | None) -> dict[str, object]:
    """What the worker measured, or why it did not."""
    if library in CHECKOUTS and checkout is None:
        return {"skipped": "needs the path of a checkout"}
    ENVIRONMENTS.mkdir(exist_ok=True)
    out, log = ENVIRONMENTS / f"{library}.json", ENVIRONMENTS / f"{library}.log"
    out.unlink(missing_ok=True)
    path = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    try:
        command = [environment(library), "-m", "conformance.worker", library, out]
        with log.open("w") as file:
            command += [] if checkout is None else [checkout.resolve()]
            subprocess.run(
                command, check=True, env={**os.environ, **path}, stdout=file, stderr=file, timeout=60 * MINUTES
            )
    except (subprocess.SubprocessError, OSError) as error:
        return {"skipped": f"{type(error).__name__}, see {log}"}
    return json.loads(out.read_text())


def cell(numbers: list[float | None] | None, which: int) -> str:
    """One number of a case, or what stands for it."""
    if numbers is None:
        return "-"
    value = numbers[which]
    if value is None or value > 100:
        return "diverges"
    return f"{value:.3f}" if value >= 1e-3 else f"{value:.0e}"


def table(found: dict[str, dict], which: int, titles: list[str]) -> str:
    """A table in Markdown, a row for each library."""
    rows = [["library", *titles], ["---"] * (len(titles) + 1)]
    for library, one in found.items():
        if "skipped" not in one:
            cells = [cell(one["cases"].get(title), which) for title in titles]
            rows.append([f"{library} {one['version']}".strip(), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    for library in CHECKOUTS:
        parser.add_argument(f"--{library.replace('_', '-')}", type=Path, metavar="CHECKOUT")
    given = parser.parse_args()
    if unknown := set(given.libraries) - set(LIBRARIES):
        parser.error(f"no adapter for {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    reference = {title: list(measured(paper, asked, FIRST)) for title, asked in TABLE.items()}
    found: dict[str, dict] = {"the papers": {"version": "", "cases": reference}}
    for library in given.libraries or LIBRARIES:
        print(f"{library} ...", file=sys.stderr, flush=True)
        found[library] = outcome(library, getattr(given, library, None))
    print(f"{date.today()}, Python {platform.python_version()}\n")
    print(f"Largest difference from the paper's model in the first {FIRST} rounds\n\n{table(found, 0, list(TABLE))}\n")
    last = [title for title, asked in TABLE.items() if asked.rounds > FIRST]
    print(f"Distance from the optimum after the last round\n\n{table(found, 1, last)}\n")
    for library, one in found.items():
        if "skipped" in one:
            print(f"{library}: not run, {one['skipped']}.")
        for title, (words, apart) in one.get("causes", {}).items():
            print(f"{library}, {title}: {words}; with this change the paper's first rounds differ by {apart:.0e}.")
        for title, error in one.get("errors", {}).items():
            print(f"{library}, {title}: {error}")


if __name__ == "__main__":
    main()
