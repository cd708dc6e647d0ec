"""Requirements of a deployment are pinned with hashes, and the audit reports nothing as checked that was not looked up."""

import importlib.util
import json
import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from support.pages import ROOT

from unskew.deployment.flower.cli import VERSIONS


def pinned(name):
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if match := re.match(r"([\w.-]+)==([^\s;\\]+)", line):
            found[match[1].lower().replace("_", "-").replace(".", "-")] = match[2]
    return found


def test_what_a_deployment_installs_is_pinned_with_hashes():
    """make lock writes the file: the versions of the constraints, each with its hashes; PyTorch is left out."""
    text = (ROOT / "requirements-deploy.txt").read_text()
    requirements, constraints = pinned("requirements-deploy.txt"), pinned("constraints-deploy.txt")
    different = {n: v for n, v in requirements.items() if n in constraints and constraints[n] != v}
    assert different == {}
    assert constraints.keys() - requirements.keys() == {"torch"}
    blocks = re.split(r"\n(?=\w)", text.strip())
    assert all("--hash=sha256:" in block for block in blocks)
    assert len(blocks) == len(requirements)


def test_the_supported_versions_of_flower_are_the_same_everywhere():
    """The package, its extra and the app that sites receive; the lowest version and the pinned one have a job each."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["flower"] == [f"flwr{VERSIONS}"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    tested = workflow["jobs"]["flower"]["strategy"]["matrix"]["flower"]
    assert tested[-1] == pinned("constraints-deploy.txt")["flwr"]
    assert VERSIONS.startswith(f">={tested[0].removesuffix('.0')},")


def test_the_lowest_versions_are_those_of_the_package():
    """make lock writes the file, without Flower, Weights & Biases and bitsandbytes; `dev` has no user."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [
        project["dependencies"],
        *(extras[name] for name in extras.keys() - {"flower", "wandb", "quantized", "dev"}),
    ]
    constraints = pinned("constraints-lowest.txt")
    for requirement in (Requirement(text) for texts in lists for text in texts):
        (lowest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
        assert Version(constraints[requirement.name]) == Version(lowest), requirement.name


def test_every_supported_python_has_a_job():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    workflows = {
        name: yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        for name in ("test", "release")
    }
    assert workflows["test"]["jobs"]["linux"]["strategy"]["matrix"]["python"] == listed
    assert workflows["release"]["jobs"]["test"]["strategy"]["matrix"]["python"] == listed
    assert project["requires-python"] == f">={listed[0]}"


@pytest.mark.parametrize(
    ("found", "problem", "status", "line"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], None, 0, "no known faults in 1 versions"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}], None, 1, "a 1: CVE-1"),
        ([{"name": "a", "skip_reason": "not found"}], None, 0, "NOT CHECKED"),
        (
            [],
            "requests.exceptions.ConnectionError: Max retries exceeded",
            0,
            "NOT CHECKED, because the network is away",
        ),
        ([], "unrecognized arguments", 2, "pip-audit failed"),
    ],
)
def test_nothing_is_called_checked_that_was_not(found, problem, status, line):
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    got, said = audit.verdict("f.txt", json.dumps({"dependencies": found}), problem)
    assert got == status
    assert line in said
