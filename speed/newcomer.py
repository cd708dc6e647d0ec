"""Newcomer: the path of somebody new, in a fresh clone of what is committed, timed step by step.

``python -m speed.newcomer`` (``make newcomer``) clones the checkout into a temporary folder and runs the README's two
commands there. In the environment that they created, it takes a table from ``unskew init`` to the verdict and to predictions
for new rows, and runs the code of the tutorial on a custom method. It prints the seconds of each step, and ends at the first
step that fails or whose result is missing. It needs git, make and a package index, and no package.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path("docs/tutorials/own-method.md")
COLUMNS = ("visit_id", "clinic", "age", "pressure", "admission", "readmitted")
OWN_VARIABLES = re.compile(r"PYTHON|PYTEST|MAKE|MFLAGS$|ARGS$|VIRTUAL_ENV|UNSKEW|HYPOTHESIS|XDG_CACHE_HOME$")
"""Environment variables of this checkout and of make, which somebody new does not have."""
VERDICT = re.compile(
    r"(?:Federated training helps|Federated training does not help|It is undecided whether federated training helps)[^.]*"
    r"the best of 2 methods, is ahead of training alone at \d+ of 4 clients"
)
LINES = 40
"""Last lines of the output of a failed step that are shown."""

Check = Callable[[str], str | None]
"""Returns what the output of a step lacks, if anything."""


class StepError(Exception):
    """A step failed, or its result is missing."""


def newcomer_environment(variables: dict[str, str], cache: Path) -> dict[str, str]:
    """Return the environment of somebody new: without the variables of this checkout, and with an empty cache."""
    kept = {name: value for name, value in variables.items() if not OWN_VARIABLES.match(name)}
    return {**kept, "XDG_CACHE_HOME": str(cache)}


def write_table(path: Path, rows: int, seed: int, labeled: bool = True) -> None:
    """Write visits of four clinics with a category and missing values as a CSV file."""
    draws = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS if labeled else COLUMNS[:-1])
        for number in range(rows):
            clinic = draws.randrange(4)
            age, pressure = draws.gauss(45 + 8 * clinic, 10), draws.gauss(120, 15)
            admission = draws.choice(("planned", "emergency", "transfer"))
            risk = age + pressure + 10 * (admission == "emergency") + draws.gauss(0, 8)
            shown = "" if number % 25 == 3 else round(pressure, 1)
            row = [9000 + number, ("north", "east", "south", "west")[clinic], round(age, 1), shown, admission]
            writer.writerow([*row, "yes" if risk > 181 else "no"] if labeled else row)


def python_blocks(page: str) -> list[str]:
    """Return the Python code of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def contains(pattern: str | re.Pattern[str], what: str) -> Check:
    """Return a check that the output, as one line, contains ``pattern``, which is described by ``what``."""
    return lambda output: None if re.search(pattern, " ".join(output.split())) else what


def check_experiment(path: Path, output: str) -> str | None:
    """Return what the configuration lacks that `unskew init` wrote, if anything."""
    text = path.read_text() if path.is_file() else ""
    lines = ("label: readmitted", "partition: natural:clinic")
    missing = [line for line in lines if not re.search(rf"^{re.escape(line)}\b", text, re.MULTILINE)]
    if missing:
        return f"the line {missing[0]!r} in {path.name}"
    dropped = re.search(r"^excluded: (?:admission|age|pressure)\b", output, re.MULTILINE)
    return f"the column that it reports as {dropped.group()!r}" if dropped else None


def check_predictions(path: Path, rows: int) -> str | None:
    """Return what the file of predictions lacks, if anything."""
    if not path.is_file():
        return f"the file {path.name}"
    with path.open(newline="") as file:
        predicted = [row.get("predicted_readmitted") for row in csv.DictReader(file)]
    if len(predicted) != rows or not set(predicted) <= {"yes", "no"}:
        return f"a prediction 'yes' or 'no' for each of {rows} rows"
    return None if len(set(predicted)) == 2 else "rows of both predicted classes"


def check_accuracies(accuracies: Iterable[float], chance: float, count: int) -> str | None:
    """Return what a list of accuracies in [0, 1] lacks, if anything.

    Args:
        accuracies: Measured accuracies.
        chance: Accuracy of guessing, which each of them must exceed.
        count: Expected number of accuracies.
    """
    values = list(accuracies)
    if len(values) != count:
        return f"{count} accuracies; it has {len(values)}"
    wrong = [value for value in values if not chance < value <= 1]
    return f"an accuracy above {chance:.0%}; one is {wrong[0]:.1%}" if wrong else None


def summary_accuracies(run: Path) -> list[float]:
    """Return the test accuracy of a run as the only entry of a list, or an empty list if it has none."""
    path = run / "summary.json"
    accuracy = json.loads(path.read_text()).get("accuracy") if path.is_file() else None
    return [] if accuracy is None else [accuracy]


class Walk:
    """Steps that are run one after another, and the seconds of each.

    Args:
        environment: Environment variables of the steps.
        show: Receives one line per step.
    """

    def __init__(self, environment: dict[str, str], show: Callable[[str], None] = print):
        self.environment, self.show = environment, show
        self.seconds: dict[str, float] = {}

    def step(self, title: str, command: list[str], folder: Path, check: Check = lambda output: None) -> None:
        """Run a command and check its output.

        Args:
            title: Name of the step in the table.
            command: Program and arguments.
            folder: Working directory.
            check: Check of the output, standard output and standard error together.

        Raises:
            StepError: If the command fails or the check names something that is missing.
        """
        begin = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        seconds = time.perf_counter() - begin
        missing = f"exit code {done.returncode}" if done.returncode else check(done.stdout)
        if missing:
            problem = missing if done.returncode else f"the result lacks {missing}"
            tail = "\n".join(done.stdout.splitlines()[-LINES:])
            raise StepError(f"The step {title!r} failed: {problem}.\n\n$ {shlex.join(command)}\n{tail}")
        self.seconds[title] = seconds
        self.show(row(title, seconds))


def row(title: str, seconds: float) -> str:
    """Return a line of the table."""
    return f"{title:<44} {seconds:8.1f}"


def walk_the_path(walk: Walk, folder: Path, tests: bool) -> None:
    """Run all steps.

    Args:
        walk: Runs the steps.
        folder: Empty folder for the clone and the files of somebody new.
        tests: Run also ``make test``, which takes longest.
    """
    clone, work = folder / "unskew", folder / "work"
    work.mkdir()
    walk.step("git clone", ["git", "clone", "--quiet", str(ROOT), str(clone)], folder)
    make = ["make", f"PYTHON={sys.executable}"]
    demo = contains(r"Test accuracy in %.* scaffold .*The report is runs/compare-digits/report\.html", "the table")
    walk.step("make demo", [*make, "demo"], clone, demo)
    if tests:
        passed = contains(r"(?<!\d)[1-9]\d{3,} passed", "a number of passed tests above 1,000")
        walk.step("make test", [*make, "test"], clone, passed)

    unskew, new_rows = str(clone / ".venv/bin/unskew"), 50
    write_table(work / "visits.csv", 600, seed=0)
    write_table(work / "new.csv", new_rows, seed=1, labeled=False)
    init = [unskew, "init", "visits.csv"]
    walk.step("unskew init", init, work, lambda output: check_experiment(work / "experiment.yaml", output))
    advice = contains(r"Methods worth comparing with fedavg .*unskew compare fedavg \w+", "the methods worth comparing")
    walk.step("unskew diagnose", [unskew, "diagnose", "experiment.yaml"], work, advice)
    short = ["experiment.yaml", "--rounds", "5", "--out"]
    compare = [unskew, "compare", "fedavg", "scaffold", *short, "runs/both", "--seeds", "0,1"]
    walk.step("unskew compare", compare, work, contains(VERDICT, "the verdict on federated training"))
    predict = [unskew, "predict", "runs/both/fedavg/seed-0", "new.csv", "--out", "predictions.csv"]
    walk.step("unskew predict", predict, work, lambda _: check_predictions(work / "predictions.csv", new_rows))

    blocks = python_blocks((clone / PAGE).read_text())
    (work / "tutorial.py").write_text("\n".join(blocks))
    (work / "my_rules.py").write_text(blocks[0])
    walk.step(
        "custom method: code of the tutorial",
        [str(clone / ".venv/bin/python"), "tutorial.py"],
        work,
        lambda output: check_accuracies((float(n) / 100 for n in re.findall(r" ([\d.]+) %$", output, re.M)), 0.1, 4),
    )
    method, own = "my_rules.TopHalf:share=0.1", work / "runs/own"
    walk.step(
        "custom method: its file, on the table",
        [unskew, "run", *short, "runs/own", "--method", method],
        work,
        lambda _: check_accuracies(summary_accuracies(own), 0.5, 1),
    )


def main() -> None:
    """Walk the path in a temporary folder and print the seconds of each step."""
    parser = argparse.ArgumentParser(description="Time the path of somebody new in a fresh clone.")
    parser.add_argument("--without-tests", action="store_true", help="leave out `make test`, which takes longest")
    arguments = parser.parse_args()
    print(f"{'step':<44} {'seconds':>8}", flush=True)
    with tempfile.TemporaryDirectory(prefix="unskew-newcomer-") as name:
        folder = Path(name)
        walk = Walk(newcomer_environment(dict(os.environ), folder / "cache"), lambda line: print(line, flush=True))
        try:
            walk_the_path(walk, folder, tests=not arguments.without_tests)
        except (StepError, OSError) as error:
            raise SystemExit(str(error)) from None
        print(row("sum", sum(walk.seconds.values())), flush=True)  # removing the folder takes a while


if __name__ == "__main__":
    main()
