"""The picture of the package is true, and contributors are shown what is there."""

import ast
import re

from support.pages import DOCS, ROOT, fences, first_names, section


def test_the_method_shown_to_contributors_is_the_one_in_the_package():
    page = ROOT / "CONTRIBUTING.md"
    assert fences(page, "python") == [(ROOT / "unskew" / "methods" / "fedprox.py").read_text()]
    (line,) = (line for line in fences(page, "text") if "unskew.methods" in line)
    assert line.strip() in (ROOT / "unskew" / "methods" / "registry.py").read_text()


def test_contributors_are_told_every_folder():
    listed = {
        name.rstrip("/") for name in first_names(section((ROOT / "CONTRIBUTING.md").read_text(), "Where things are"))
    }
    assert listed == {path.name for path in (ROOT / "unskew").iterdir() if path.is_dir()} - {"__pycache__"}


def imports_between_folders():
    """Which folder of the package imports which; the modules beside them count as one, called root."""
    arrows = {}
    for path in (ROOT / "unskew").rglob("*.py"):
        inside = path.relative_to(ROOT / "unskew").parts
        if inside in (("__init__.py",), ("__main__.py",)):
            continue
        arrows.setdefault(inside[0] if len(inside) > 1 else "root", set()).update(
            name.split(".")[1] if (ROOT / "unskew" / name.split(".")[1]).is_dir() else "root"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (name := node.module or "").startswith("unskew.")
        )
    return {room: others - {room} for room, others in arrows.items()}


def test_the_picture_of_the_package_is_true():
    """Every folder is drawn, every arrow is an import, every import runs along the arrows, and none leads up."""
    (picture,) = fences(DOCS / "concepts.md", "mermaid")
    arrows = {room: set() for room in re.findall(r'^ +(\w+)\["', picture, re.M)}
    for upper, lower in re.findall(r"^ +(\w+) --> (.*)$", picture, re.M):
        arrows[upper] |= set(lower.split(" & "))
    imports = imports_between_folders()
    assert set(arrows) == set(imports)
    below = {}
    for room in reversed(list(arrows)):  # drawn from the top down
        assert arrows[room] <= set(below), f"{room} is drawn below what it imports"
        below[room] = arrows[room].union(*(below[other] for other in arrows[room]))
        assert arrows[room] <= imports[room], f"docs/concepts.md draws an arrow that is no import of {room}"
        assert imports[room] <= below[room], f"docs/concepts.md draws no arrow for an import of {room}"
    modules = {path.stem for path in (ROOT / "unskew").glob("*.py")} - {"__init__", "__main__"}
    assert set(re.search(r'root\["(.*?)"\]', picture)[1].split(", ")) == modules
