"""The picture of the package is true, no import is circular, and contributors are shown what is there."""

import ast
import graphlib
import re

import pytest
from support.pages import DOCS, ROOT, fences

from unskew.tasks.registry import TASKS


def test_the_line_of_a_method_shown_to_contributors_is_in_the_registry():
    page = ROOT / "CONTRIBUTING.md"
    (line,) = (line for line in fences(page, "text") if "unskew.methods" in line)
    assert line.strip() in (ROOT / "unskew" / "methods" / "registry.py").read_text()


def imports_between_folders(package):
    """Return the other folders that each folder inside a package imports; the modules next to them count as one, ``root``."""
    arrows = {}
    start = ROOT.joinpath(*package.split("."))
    for path in start.rglob("*.py"):
        inside = path.relative_to(start).parts
        if len(inside) == 1 and inside[0] in ("__init__.py", "__main__.py"):
            continue
        names = {
            name.removeprefix(f"{package}.").split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            # ``from package import folder`` names the folder only after ``import``
            for name in (f"{node.module}.{alias.name}" for alias in node.names)
            if name.startswith(f"{package}.")
        }
        arrows.setdefault(inside[0] if len(inside) > 1 else "root", set()).update(
            name if (start / name).is_dir() else "root" for name in names
        )
    return {room: others - {room} for room, others in arrows.items()}


def check_picture(picture, imports):
    """Check that every folder is drawn, every arrow is an import, every import runs along the arrows, and none leads up."""
    arrows = {room: set() for room in re.findall(r'^ +(\w+)\["', picture, re.M)}
    for upper, lower in re.findall(r"^ +(\w+) --> (.*)$", picture, re.M):
        arrows[upper] |= set(lower.split(" & "))
    assert set(arrows) == set(imports)
    below = {}
    for room in reversed(list(arrows)):  # drawn from the top down
        assert arrows[room] <= set(below), f"{room} is drawn below what it imports"
        below[room] = arrows[room].union(*(below[other] for other in arrows[room]))
        assert arrows[room] <= imports[room], f"docs/architecture.md draws an arrow that is no import of {room}"
        assert imports[room] <= below[room], f"docs/architecture.md draws no arrow for an import of {room}"


def test_the_pictures_of_the_packages_are_true():
    package, deployment = fences(DOCS / "architecture.md", "mermaid")
    check_picture(package, imports_between_folders("unskew"))
    check_picture(deployment, imports_between_folders("unskew.deployment"))
    modules = {path.stem for path in (ROOT / "unskew").glob("*.py")} - {"__init__", "__main__"}
    assert set(re.search(r'root\["(.*?)"\]', package)[1].split(", ")) == modules


def test_the_files_of_a_run_define_what_the_steps_name():
    text = (DOCS / "architecture.md").read_text().split("## A run, file by file")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `(.*?)` \| (.*) \|$", text, re.M)
    rows += [(file, f"`{name}`") for name, file in re.findall(r"`(\w+)` in `(\S+\.py)`", text)]
    assert rows
    for file, step in rows:
        code = (ROOT / "unskew" / file).read_text()
        first, *others = (name.split(".")[-1] for name in re.findall(r"`([A-Za-z_.]+)`", step))
        assert re.search(rf"(def|class) {first}\b", code), f"docs/architecture.md: {file} does not define {first}"
        for name in others:
            assert re.search(rf"\b{name}\b", code), f"docs/architecture.md: {file} does not use {name}"


def test_folders_inside_a_package_do_not_import_each_other_in_a_circle():
    packages = {path.parent for path in (ROOT / "unskew").rglob("*/__init__.py")}
    for folder in sorted(packages):
        imports = imports_between_folders(".".join(folder.relative_to(ROOT).parts))
        folders = {room: others - {"root"} for room, others in imports.items() if room != "root"}
        list(graphlib.TopologicalSorter(folders).static_order())  # raises CycleError


def test_every_test_file_mirrors_a_module_of_the_package():
    """``tests/<package>/test_<module>.py`` or, for one subject of a module, ``test_<module>_<topic>.py``."""
    without_module = {"conformance", "docs", "fuzz", "speed", "support"}
    astray = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        place = path.relative_to(ROOT / "tests")
        words = path.stem.split("_")[1:]
        modules = [
            ROOT / "unskew" / place.parent / f"{'_'.join(words[:count])}.py" for count in range(1, len(words) + 1)
        ]
        if place.parts[0] not in without_module and not any(module.is_file() for module in modules):
            astray.append(str(place))
    assert not astray, f"name these after the module that they test: {astray}"


def imported_modules():
    """Every module of the repository's packages and what it imports, also inside functions and for types only."""
    packages = ("unskew", "speed", "conformance")
    paths = {}
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            if ".venv" in path.parts:  # environments of other libraries
                continue
            paths[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    imports = {}
    for module, path in paths.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
                names |= {
                    f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in paths else node.module for a in node.names
                }
            elif isinstance(node, ast.Import):
                names |= {a.name for a in node.names}
        imports[module] = names & set(paths) - {module}
    return imports


def test_no_import_is_circular():
    """Neither between modules nor between packages, also not one hidden in a function or behind ``TYPE_CHECKING``."""
    modules = imported_modules()
    list(graphlib.TopologicalSorter(modules).static_order())  # raises CycleError
    packages = {}
    for module, names in modules.items():
        own = ".".join(module.split(".")[:2])
        packages.setdefault(own, set()).update({".".join(name.split(".")[:2]) for name in names} - {own})
    packages.pop("unskew")  # names of the public API
    for module in [name for name in packages if name.startswith(("speed.", "conformance."))]:
        packages.setdefault(module.split(".")[0], set()).update(packages.pop(module))
    for module, names in packages.items():
        packages[module] = {n.split(".")[0] if not n.startswith("unskew.") else n for n in names} - {module, "unskew"}
    list(graphlib.TopologicalSorter(packages).static_order())


def names_of_tasks_compared(tree):
    """Lines of a module where a name or a class of a task decides: comparisons, ``match`` and ``isinstance``.

    A name is a string that is registered, also in a tuple, list, set or dictionary, or the attribute ``name`` of a class.
    """
    classes = {type(task).__name__ for task in TASKS.values()}

    def named(node):
        if isinstance(node, ast.Attribute):
            return node.attr in {"name", "scored"} and named_class(node.value)
        inner = [*getattr(node, "elts", ()), *filter(None, getattr(node, "keys", ()))]
        return (isinstance(node, ast.Constant) and node.value in TASKS) or any(map(named, inner))

    def named_class(node):
        parts = getattr(node, "elts", [getattr(node, "left", node), getattr(node, "right", node)])
        return any((getattr(part, "id", None) or getattr(part, "attr", None)) in classes for part in parts)

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            asks = any(named(part) or named_class(part) for part in (node.left, *node.comparators))
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "id", None)
            asks = function in {"isinstance", "issubclass"} and named_class(node.args[1])
        elif isinstance(node, ast.MatchValue):
            asks = named(node.value)
        else:
            asks = isinstance(node, ast.MatchClass) and named_class(node.cls)
        if asks:
            yield node.value.lineno if isinstance(node, ast.MatchValue) else node.lineno


def test_only_tasks_know_which_task_they_are():
    """A new task is a class of ``unskew.tasks``: nothing else compares its name or class."""
    outside = [path for path in (ROOT / "unskew").rglob("*.py") if (ROOT / "unskew" / "tasks") not in path.parents]
    asking = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in outside
        for line in names_of_tasks_compared(ast.parse(path.read_text()))
    ]
    assert not asking, f"ask what the task provides instead: {asking}"


@pytest.mark.parametrize(
    "line",
    [
        'task == "regression"',
        '"language" != data.task',
        'task.name in ("multilabel", "language")',
        'task not in {"multilabel": 1}',
        "task == Regression.name",
        "name == regression.Regression.scored",
        "type(task) is MultiLabel",
        "isinstance(task, Regression)",
        "isinstance(task, (Classification, MultiLabel))",
        "isinstance(task, Classification | tasks.MultiLabel)",
        'match task:\n    case "language":\n        pass',
        "match task:\n    case Regression():\n        pass",
    ],
)
def test_a_comparison_with_a_task_is_found(line):
    assert [*names_of_tasks_compared(ast.parse(line))]
    assert not [
        *names_of_tasks_compared(ast.parse('Regression(); x = {"language": 1}; task.tokens == f("regression")'))
    ]
