"""Unit tests: those that start no process and no run, neither themselves nor in what they call of these folders."""

import inspect
import multiprocessing.process
import os
import subprocess
from functools import cache
from pathlib import Path
from types import CodeType

from unskew.runs import session

TESTS = str(Path(__file__).parents[1])
STARTS = {
    "run",
    "run_experiment",
    "compare",
    "resume",
    "tune",
    "diagnose",
    "leave_one_out",
    "audit",
    "carry_out",
}  # runs
STARTS |= {"check_rule", "check_engine", "check_data", "check_model"}  # of unskew.testing
STARTS |= {"call", "main", "Process", "Popen", "exec"}  # programs and pages
"""Names of what starts runs and processes."""
OTHER_FOLDERS = {"docs", "fuzz"}
"""Folders of tests that do not test one module: pages and repository files, and random inputs of whole commands."""


def names(code: CodeType) -> set[str]:
    """Every name that is used in a function and in those that are defined in it."""
    return set(code.co_names).union(*(names(part) for part in code.co_consts if isinstance(part, CodeType)))


@cache
def used_by(function) -> tuple[set[str], list]:
    """Names that a function uses, and the functions of the tests among them, with those of classes."""
    used = names(function.__code__)
    values = [function.__globals__.get(name) for name in sorted(used)]
    values += [part for value in values if inspect.isclass(value) for part in vars(value).values()]
    return used, ours(values)


def ours(values) -> list:
    """Those values that are functions of the tests."""
    functions = [inspect.unwrap(value) for value in values if callable(value)]
    return [one for one in functions if inspect.isfunction(one) and in_tests(one.__code__.co_filename)]


def in_tests(file: str) -> bool:
    """Whether a file is one of the tests, other than those that mark unit tests."""
    return file.startswith(TESTS) and file not in (__file__, f"{TESTS}/conftest.py")


def starts(functions) -> bool:
    """Whether one of the functions, or a function of the tests that they reach, uses one of the names."""
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
    """Whether a collected test is a unit test."""
    if not hasattr(item, "function"):
        return True  # an example in a docstring
    if OTHER_FOLDERS & {*item.path.parts[len(Path(TESTS).parts) :]} or item.get_closest_marker("imports_much"):
        return False
    fixtures = [one.func for defined in item._fixtureinfo.name2fixturedefs.values() for one in defined]
    return item.get_closest_marker("slow") is None and not starts(ours([item.function, *fixtures]))


def forbid_starts(monkeypatch):
    """Let every start of a run, a worker or a program in Python fail; libraries may call programs when they are imported."""
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
