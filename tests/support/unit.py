"""Marking of unit tests: tests that start no process and no run, neither directly nor through helpers of the tests."""

import inspect
import multiprocessing.process
import os
import subprocess
from functools import cache
from pathlib import Path
from types import CodeType

from unskew.runs import session

TESTS = str(Path(__file__).parents[1])
STARTS = {"run", "run_experiment", "compare", "resume", "tune", "diagnose", "leave_one_out", "audit", "carry_out"}
STARTS |= {"compare_part"}
STARTS |= {"check_unskew"}  # of the GPU jobs
STARTS |= {"check_rule", "check_engine", "check_data", "check_model"}  # of unskew.testing
STARTS |= {"call", "main", "Process", "Popen", "exec"}  # commands, processes, and the code of pages
"""Names of functions that start runs or processes."""
OTHER_FOLDERS = {"docs", "fuzz"}
"""Folders of tests that do not test one module but pages, files of the repository, or whole commands with random inputs."""


def names(code: CodeType) -> set[str]:
    """Return the names that are used in a function and in the functions defined inside it."""
    return set(code.co_names).union(*(names(part) for part in code.co_consts if isinstance(part, CodeType)))


@cache
def used_by(function) -> tuple[set[str], list]:
    """Return the names that a function uses, and the test helpers among them, including the methods of test classes."""
    used = names(function.__code__)
    values = [function.__globals__.get(name) for name in sorted(used)]
    values += [part for value in values if inspect.isclass(value) for part in vars(value).values()]
    return used, functions_of_tests(values)


def functions_of_tests(values) -> list:
    """Return the values that are functions defined in the folder of the tests, except those that mark unit tests."""
    functions = [inspect.unwrap(value) for value in values if callable(value)]
    files = [(one, one.__code__.co_filename) for one in functions if inspect.isfunction(one)]
    own = (__file__, f"{TESTS}/conftest.py")
    return [function for function, file in files if file.startswith(TESTS) and file not in own]


def starts(functions) -> bool:
    """Return whether one of the functions, or a test helper that it reaches, uses a name of ``STARTS``."""
    reached, waiting = set(), list(functions)
    while waiting:
        function = waiting.pop()
        if function not in reached:
            reached.add(function)
            used, further = used_by(function)
            if used & STARTS:
                return True
            waiting += further
    return False


def is_unit(item) -> bool:
    """Return whether a collected test is a unit test."""
    if not hasattr(item, "function"):
        return True  # an example in a docstring
    if OTHER_FOLDERS & {*item.path.parts[len(Path(TESTS).parts) :]}:
        return False
    fixtures = [fixture.func for defined in item._fixtureinfo.name2fixturedefs.values() for fixture in defined]
    return item.get_closest_marker("slow") is None and not starts(functions_of_tests([item.function, *fixtures]))


def forbid_starts(monkeypatch):
    """Let starts of runs, workers and Python programs fail; libraries start other programs when they are imported."""
    popen = subprocess.Popen.__init__

    def start(*args, **options):
        raise AssertionError(
            "The test starts a process or a run: add the name of what it calls to tests/support/unit.py."
        )

    def start_program(self, command, *args, **options):
        if Path(os.fspath(command if isinstance(command, str) else command[0])).name.startswith(("python", "unskew")):
            start()
        popen(self, command, *args, **options)

    monkeypatch.setattr(session, "run_rounds", start)
    monkeypatch.setattr(subprocess.Popen, "__init__", start_program)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
