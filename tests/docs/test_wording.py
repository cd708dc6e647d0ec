"""The code is written in the words of the field: names that say what they hold, plain docstrings."""

import ast
import re

from support.pages import ROOT

VAGUE = {"one", "found", "made", "told", "asked", "held", "given", "kept", "mine", "theirs", "cast", "casts"}
VAGUE |= {"gone", "whole", "piece", "pieces", "place", "places"}
RELATIVE = re.compile(r"(What|Whether|Of|That|Those|Where|How|As|See|Within|Which|Who)\b")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def modules():
    for path in sorted((ROOT / "unskew").rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_local_variables_have_names_that_say_what_they_are():
    vague = [
        f"{path}:{name.lineno} {name.id}"
        for path, tree in modules()
        for function in ast.walk(tree)
        if isinstance(function, FUNCTIONS)
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in VAGUE
    ]
    assert vague == []


def test_docstrings_of_functions_and_classes_begin_with_a_verb_or_a_noun():
    relative = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and RELATIVE.match(ast.get_docstring(node) or "")
    ]
    assert relative == []
