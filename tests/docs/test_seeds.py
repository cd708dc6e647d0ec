"""The purposes from which random draws are seeded never change: a changed word changes the numbers of every run."""

import ast

from support.pages import package_modules

PURPOSES = """
attack noise; attackers; augment; backdoor images; batches; bootstrap; broadcast compression; canary; client speed;
client's generator;
cohort; compression; delay; diagnosed clients; diagnosed images; diagnosed samples; dpsgd client; drop; evaluated clients;
exemplars; export; feddm client; fedetf classifier; fedgen client; generator; generator epoch; generator noise;
 generator sample; generator step; generator subset; holdout;
 ifca models; initial model; keep_samples; key; logistic noise; logistic shuffle;
 logistic split; model draws; power iteration; quadratic order; quadratic problem;
 quadratic shuffle; server; server draws; server noise; shift noise; site noise;
 synthetic shuffle; tune {self.number}; unseen clients; validation samples; vhl client; virtual set
"""
FUNCTIONS = {"derive", "generator", "numpy_generator", "purpose_generator"}


def called(node):
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def test_the_purposes_of_random_draws_are_frozen():
    used = set()
    for _, tree in package_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node) in FUNCTIONS and len(node.args) > 1:
                used.add(ast.unparse(node.args[1]).removeprefix("f").strip("'\""))
    frozen = {name.strip() for name in PURPOSES.replace("\n", " ").split(";")}
    assert used - {"purpose"} == frozen  # "purpose" is the parameter that seeding.py itself passes on
