"""Requirements of a deployment are pinned with hashes, and the audit reports nothing as checked that was not looked up."""

import importlib.util
import json
import os
import re
import subprocess
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


def image_jobs():
    workflows = [
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text()) for name in ("image", "release")
    ]
    return workflows[0]["jobs"]["image"], workflows[1]["jobs"]


def test_the_image_of_a_release_is_tested_as_in_pull_requests():
    in_pull_requests, release = image_jobs()
    commands, released = (
        [step["run"] for step in job["steps"] if "run" in step] for job in (in_pull_requests, release["image"])
    )
    assert (
        released[: len(commands)]
        == commands
        == ["docker build --tag unskew .", "docker run --rm unskew run --rounds 2 --local-steps 1"]
    )
    assert "image" in release["pypi"]["needs"]
    assert release["ghcr"]["needs"] == "pypi"
    assert release["ghcr"]["permissions"] == {"packages": "write"}
    assert [name for name, job in release.items() if "packages" in job.get("permissions", {})] == ["ghcr"]
    workflow = (ROOT / ".github" / "workflows" / "image.yml").read_text()
    copied = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.M)
    assert {"pyproject.toml", "constraints.txt"} <= {*copied}
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt"):
        assert (ROOT / name).is_file()
        assert name in re.search(r"paths: \[(.*)\]", workflow)[1].split(", ")


def test_a_release_pushes_the_tested_image_with_its_version(tmp_path):
    """The script of the workflow, with a docker that writes down what it is called with."""
    _, release = image_jobs()
    saved = release["image"]["steps"][-2]["run"]
    pushed = release["ghcr"]["steps"][-1]
    (tmp_path / "docker").write_text('#!/bin/bash\necho "$@" >> called\nif [ "$1" = login ]; then cat >> called; fi\n')
    (tmp_path / "docker").chmod(0o755)
    given = {"ACTOR": "someone", "REPOSITORY": "Unskew/unskew", "TAG": "v1.2.3", "TOKEN": "a-token"}
    assert set(pushed["env"]) == set(given)
    environment = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for script in (saved, pushed["run"]):
        subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "called").read_text().splitlines() == [
        "save unskew",
        "load --input image.tar.gz",
        "tag unskew ghcr.io/unskew/unskew:1.2.3",
        "login ghcr.io --username someone --password-stdin",
        "a-token",
        "push ghcr.io/unskew/unskew:1.2.3",
        "logout ghcr.io",
    ]


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
