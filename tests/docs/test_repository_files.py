"""Files around the package: workflows, citation, version and licenses."""

import importlib.util
import re
import tomllib

import pytest
import yaml
from support.pages import ROOT

import unskew

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_only_read_by_default_and_pin_their_actions(file):
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            for target in re.findall(r"\bmake ([\w./-]+)", step.get("run", "")):
                assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M), target
            for path in re.findall(r"\btests/[\w/.]+", step.get("run", "")):
                assert (ROOT / path).exists(), path
    for line in file.read_text().splitlines():  # dependabot reads the version in the comment
        if "uses:" in line:
            assert re.search(r"# v\d+\.\d+\.\d+$", line), line


def test_every_target_that_tests_something_runs_in_a_workflow():
    """Except targets that only combine others or run a part of another one."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(test[\w-]*|coverage|audit|conformance|fuzz|newcomer):", makefile, re.MULTILINE))
    jobs = [job for file in WORKFLOWS for job in yaml.safe_load(file.read_text())["jobs"].values()]
    run = {target for job in jobs for target in job.get("strategy", {}).get("matrix", {}).get("target", [])}
    assert all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in run)
    run |= {
        target for job in jobs for step in job["steps"] for target in re.findall(r"make ([\w-]+)", step.get("run", ""))
    }
    assert targets - run == {"test-all", "test-unit", "test-methods"}


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "unskew.version.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == unskew.__version__
    assert f"## [{unskew.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_papers_of_the_four_methods_are_cited():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    cited = {entry["identifiers"][0]["value"] for entry in citation["references"]}
    assert cited == {"arXiv:2312.05966", "arXiv:2306.13263", "arXiv:2404.11754", "arXiv:2503.20138"}


def test_issue_forms_have_unique_fields():
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        if file.stem != "config":
            ids = [field["id"] for field in form["body"]]
            assert len(ids) == len(set(ids))
    assert "about.json" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()


def test_the_readme_on_pypi_has_absolute_links_to_files_that_exist():
    spec = importlib.util.spec_from_file_location("absolute_links", ROOT / ".github" / "absolute_links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    text = module.with_absolute_links(readme, "v1.2.3")
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("#")]
    assert all(target.startswith("https://") for target in targets)
    links = [target.split("/v1.2.3/")[1] for target in targets if "/v1.2.3/" in target]
    assert len(links) > 20
    assert all((ROOT / link.split("#")[0]).exists() for link in links)
    assert all(("raw." in target) == target.endswith(".png") for target in targets if "/v1.2.3/" in target)
    assert re.sub(r"https://[^)]*/v1\.2\.3/", "", text) == readme
