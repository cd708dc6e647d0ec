"""Docstrings describe parameters and name exceptions that exist; messages and pages name flags that exist."""

import ast
import builtins
import re

from support.pages import DOCS, ROOT, package_modules

from unskew.cli.app import commands

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def parameters(function):
    names = [part.arg for part in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def base_names(node):
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


def test_public_functions_of_several_parameters_describe_each():
    """Overriding methods are described where they are first defined, commands by their options."""
    defined, bases, public = {}, {}, []
    for path, tree in package_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, set()).update(f.name for f in node.body if isinstance(f, FUNCTIONS))
                bases.setdefault(node.name, set()).update(base_names(node))
            if node is tree or isinstance(node, ast.ClassDef):
                scope = getattr(node, "name", None)
                public += [(path, scope, function) for function in node.body if isinstance(function, FUNCTIONS)]

    def overrides(scope, name):
        return any(
            base in ("Module", "Callback") or name in defined.get(base, ()) or overrides(base, name)
            for base in bases.get(scope, ())
        )

    undescribed = []
    for path, scope, function in public:
        hidden = function.name.startswith("_") or (scope or "").startswith("_") or overrides(scope, function.name)
        if hidden or len(parameters(function)) < 2 or "typer" in ast.unparse(function.args) or "cli" in path.parts:
            continue
        text = ast.get_docstring(function) or ""
        if text and not all(re.search(rf"^ +{name}: ", text, re.M) for name in parameters(function)):
            undescribed.append(f"{path}:{function.lineno} {function.name}")
    assert undescribed == []


def test_docstrings_name_exceptions_that_exist():
    known = set(dir(builtins)) | {"pickle.PicklingError"}
    known |= {node.name for _, tree in package_modules() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    unknown = [
        f"{path}:{node.lineno} {name}"
        for path, tree in package_modules()
        for node in ast.walk(tree)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef))
        for section in re.findall(r"^Raises:\n((?: {4}.*\n?)+)", ast.get_docstring(node) or "", re.M)
        for name in re.findall(r"^ {4}([\w.]+): ", section, re.M)
        if name not in known
    ]
    assert unknown == []


def flags_of(command):
    nested = getattr(command, "commands", {}).values()
    return {flag for part in command.params for flag in [*part.opts, *part.secondary_opts]}.union(
        *map(flags_of, nested)
    )


OF_PROGRAMS = """
--help --version --quiet --verbose --log-json --install-completion --show-completion
--array --block --cpus-per-task --exclude --gres --ip-address --job-name --nodelist --nodes --ntasks
--dependency --ntasks-per-node --num-cpus --overlap --parsable --signal --time --wrap
--address --head --port --host --generate --node-ip-address --object-store-memory
--auth-supernode-private-key --database --disable-runtime-dependency-installation --enable-supernode-auth --node-config
--root-certificates --run-config --ssl-ca-certfile --ssl-certfile --ssl-keyfile --backend-store-uri
--constraint --extra-index-url --no-build-isolation --no-deps --require-hashes --requirement
--fl-bench --pfllib --idle --iterations --minutes --only --pages --quick --setting --size --without-tests
"""
"""Flags of unskew, Slurm, Ray, Flower, MLflow, pip, and of the scripts in ``speed``, ``conformance`` and ``examples``."""


def test_messages_and_pages_name_only_flags_that_exist():
    known = flags_of(commands()) | set(OF_PROGRAMS.split())
    pages = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
    texts = {page: page.read_text() for page in pages}
    for path, tree in package_modules():
        if path.name != "other_names.py":
            strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            texts[path] = " ".join(value for value in strings if isinstance(value, str))
    named = {
        (str(path), flag) for path, text in texts.items() for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", text)
    }
    assert sorted((path, flag) for path, flag in named if flag not in known) == []
