"""``unskew doctor``: what is installed and missing, and known problems."""

import importlib.metadata
import os
import shutil
import sys
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from support.pages import ROOT
from support.running import call

from unskew.cli import doctor

Usage = namedtuple("Usage", "total used free")
VERSION = importlib.metadata.version


def without(monkeypatch, package, version=None):
    """Hide an installed package, or give it another version."""

    def other(name):
        if name != package:
            return VERSION(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", other)


def test_every_extra_of_the_project_has_a_feature():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(doctor.FEATURES) == set(project["optional-dependencies"])


def test_the_json_describes_this_machine(capsys):
    outcome = call(capsys, "doctor", "--json")
    report = outcome.json()
    assert (outcome.code, report["usable"]) == (0, True)
    assert report["versions"]["PyTorch"] == torch.__version__
    assert report["versions"]["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert 1 <= report["machine"]["cores"] <= os.cpu_count()
    if Path("/proc/meminfo").is_file():
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        assert report["machine"]["memory"] == pytest.approx(int(meminfo["MemTotal"].split()[0]) * 1024, rel=0.01)
    assert {"report", "tune", "hub"} <= set(report["extras"])


def test_a_hidden_extra_is_missing_with_its_command(capsys, monkeypatch):
    assert call(capsys, "doctor", "--json").json()["extras"]["tune"]["installed"]
    without(monkeypatch, "optuna")
    outcome = call(capsys, "doctor", "--json")
    tune = outcome.json()["extras"]["tune"]
    assert outcome.code == 0
    assert (tune["installed"], tune["missing"]) == (False, ["optuna>=4.5"])
    assert tune["command"] == "pip install 'unskew[tune]'"
    assert "tune (unskew tune): missing optuna>=4.5: pip install 'unskew[tune]'" in call(capsys, "doctor").out


def test_an_old_package_is_named_with_its_version(capsys, monkeypatch):
    without(monkeypatch, "optuna", "3.0")
    (text,) = call(capsys, "doctor", "--json").json()["extras"]["tune"]["missing"]
    assert text == "optuna>=4.5 (3.0 is installed)"


def test_without_a_required_package_the_exit_code_is_1(capsys, monkeypatch):
    without(monkeypatch, "safetensors")
    outcome = call(capsys, "doctor", "--json")
    assert (outcome.code, outcome.json()["usable"]) == (1, False)
    assert any("safetensors>=0.5" in text for text in outcome.json()["problems"])


def test_without_pytorch_the_exit_code_is_1(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = call(capsys, "doctor")
    assert outcome.code == 1
    assert "PyTorch cannot be imported" in outcome.out


@pytest.mark.parametrize(
    ("version", "threads", "words"),
    [("2.7.1", 1, "2.7.1 is not tested"), ("3.0", 1, "not tested"), ("2.9.0+cpu", 8, "8 threads on 4 cores")],
)
def test_doctor_reports_untested_pytorch_and_too_many_threads(version, threads, words):
    (text,) = doctor._torch_problems(version, threads, 4)
    assert words in text
    assert not list(doctor._torch_problems("2.8.0", 4, 4))


def test_small_shared_memory_is_a_problem(capsys, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 0, 1 << 20) if path == "/dev/shm" else usage(path))
    (text,) = (line for line in call(capsys, "doctor", "--json").json()["problems"] if "/dev/shm" in line)
    assert "only 1 MiB free" in text
