"""``unskew doctor``: versions, machine, optional features and known problems, as text for a bug report."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from unskew.cli.common import AsJson, print_json
from unskew.version import __version__

FEATURES = {
    "hub": "data sets of the Hugging Face Hub, image folders, tables in files",
    "pandas": "result.to_pandas()",
    "transformers": "language models, pretrained models, LoRA, texts",
    "quantized": "frozen weights of language models in 4 bits",
    "diffusion": "the diffusion model of fedssyn",
    "privacy": "privacy accounting with Poisson cohorts, generators with differential privacy",
    "flower": "deployment on real sites, in an environment of its own",
    "report": "the HTML report",
    "tune": "unskew tune",
    "export": "unskew export to ONNX",
    "tensorboard": "the tracker tensorboard",
    "mlflow": "the tracker mlflow",
    "wandb": "the tracker wandb",
    "ray": "runs on a Ray cluster",
    "cloud": "data at s3://, gs:// and other URLs",
    "docs": "building the documentation",
    "dev": "tests and development",
}
"""Extras of ``pyproject.toml`` and the feature that each enables."""
COMMANDS = {"flower": "pip install --constraint constraints-deploy.txt 'unskew[flower,hub]'"}
"""Commands of extras that ``pip install 'unskew[EXTRA]'`` does not install."""
TESTED_TORCH = ((2, 8), (2, 15))
"""Lowest and highest tested version of PyTorch."""
MIN_FREE = 256 << 20
"""Bytes that should be free for temporary files and for shared memory."""


def doctor(as_json: AsJson = False) -> None:
    """Print versions, machine, optional features and known problems, for a bug report."""
    report = describe_environment()
    if as_json:
        print_json(report)
    else:
        print("\n".join(_report_lines(report)))
    if not report["usable"]:
        raise typer.Exit(1)


def describe_environment() -> dict[str, Any]:
    """Describe this installation and this machine.

    Returns:
        A dictionary for JSON: ``usable`` (False if a required package is missing, too old or broken), ``versions``,
        ``machine`` (sizes in bytes), ``extras``, ``engine`` and ``problems``, a list of sentences.
    """
    requirements, problems = _requirements()
    missing = [text for _, text in requirements.pop("", {}).items() if text]
    problems += [f"A required package is missing: {text}. Reinstall unskew." for text in missing]
    try:
        import torch
    except (ImportError, OSError) as error:
        problems.append(f"PyTorch cannot be imported: {error}. Reinstall it, see https://pytorch.org/get-started.")
        torch = None  # type: ignore[assignment]
    versions = {"unskew": __version__, "Python": platform.python_version(), "PyTorch": None, "numpy": _version("numpy")}
    machine: dict[str, Any] = {"system": platform.platform(), "processor": platform.machine(), **_sizes()}
    engine = None
    if torch is not None:
        versions |= {"PyTorch": torch.__version__, "CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        machine |= {"accelerators": _accelerators(torch), "threads": torch.get_num_threads()}
        problems += _torch_problems(torch.__version__, torch.get_num_threads(), machine["cores"])
        engine = None if missing else _engine(machine["cores"])
    extras = {}
    for name, packages in requirements.items():
        versions |= {package: _version(package) for package in packages if _version(package)}
        extras[name] = {
            "installed": not any(packages.values()),
            "missing": [text for text in packages.values() if text],
            "feature": FEATURES.get(name, ""),
            "command": COMMANDS.get(name, f"pip install 'unskew[{name}]'"),
        }
    return {
        "usable": torch is not None and not missing,
        "versions": versions,
        "machine": machine,
        "extras": extras,
        "engine": engine,
        "problems": [*problems, *_space_problems()],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return what is missing by extra and package (empty if it is installed; "" has required packages), and problems."""
    try:
        from packaging.requirements import Requirement

        lines = metadata.requires("unskew") or []
        extras = metadata.metadata("unskew").get_all("Provides-Extra") or []
    except (ImportError, metadata.PackageNotFoundError) as error:
        return {}, [f"The requirements of unskew cannot be read ({error}). Install it with pip to list its extras."]
    missing: dict[str, dict[str, str]] = {name: {} for name in ["", *extras]}
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "unskew":  # dev lists other extras
            continue
        for name, packages in missing.items():
            marker = requirement.marker
            if not (name == "" if marker is None else marker.evaluate({"extra": name})):
                continue
            version = _version(requirement.name)
            text = f"{requirement.name}{requirement.specifier}"
            if version is not None:
                suitable = requirement.specifier.contains(version, prereleases=True)
                text = "" if suitable else f"{text} ({version} is installed)"
            packages[requirement.name] = text
    return missing, []


def _sizes() -> dict[str, Any]:
    """Return usable cores, and bytes of memory and of free disk space; None if unknown."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {"cores": cores, "memory": memory, "free_disk": shutil.disk_usage(Path.cwd()).free}


def _accelerators(torch: Any) -> list[dict[str, Any]]:
    """Return name and memory in bytes of each accelerator."""
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found_devices = [{"name": device.name, "memory": device.total_memory} for device in devices]
    if torch.backends.mps.is_available():
        found_devices.append({"name": "Apple MPS", "memory": torch.mps.recommended_max_memory()})
    return found_devices


def _engine(cores: int) -> dict[str, Any]:
    """Return the choice of ``auto`` without a measurement, and the stored calibration."""
    from unskew.engines.auto_select import engine_by_rule
    from unskew.engines.calibration import calibration_file, read_entries
    from unskew.engines.registry import pick_device

    device = pick_device("auto").type
    stored = {"calibration": str(calibration_file()), "measurements": len(read_entries())}
    return {"device": device, "auto": engine_by_rule(device, cores), **stored}


def _torch_problems(version: str, threads: int, cores: int) -> Iterator[str]:
    """Yield problems of PyTorch's version and threads."""
    low, high = TESTED_TORCH
    if not low <= tuple(int(part) for part in version.split(".")[:2]) <= high:
        tested = " to ".join(".".join(map(str, edge)) for edge in TESTED_TORCH)
        yield f"PyTorch {version} is not tested; the tested versions are {tested}."
    if threads > cores:
        yield f"PyTorch uses {threads} threads on {cores} cores, which is slow. Set OMP_NUM_THREADS={cores} or less."


def _space_problems() -> Iterator[str]:
    """Yield folders for temporary files and shared memory that are too small."""
    try:
        folders = {tempfile.gettempdir(): "Set TMPDIR to a larger folder"}
    except FileNotFoundError:
        folders = {}
        yield "There is no writable temporary folder. Set TMPDIR to one."
    folders["/dev/shm"] = "Enlarge it, in Docker by the option shm-size=2g"  # nosec B108
    for folder, remedy in folders.items():
        if Path(folder).is_dir() and (free := shutil.disk_usage(folder).free) < MIN_FREE:
            yield f"{folder} has only {free >> 20} MiB free, so worker processes may fail. {remedy}."


def _report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""

    def size(number: int | None) -> str:
        return "unknown" if number is None else f"{number / (1 << 30):.1f} GiB"

    machine = report["machine"]
    yield "Versions: " + ", ".join(f"{name} {version or '-'}" for name, version in report["versions"].items())
    yield f"Executable: {sys.executable}"
    yield f"System: {machine['system']}, {machine['processor']}"
    yield f"Cores: {machine['cores']}, memory {size(machine['memory'])}, free disk space {size(machine['free_disk'])}"
    devices = [f"{device['name']} ({size(device['memory'])})" for device in machine.get("accelerators", [])]
    yield f"Accelerators: {', '.join(devices) or 'none'}"
    if engine := report["engine"]:
        yield f"Engine: auto chooses {engine['auto']} on {engine['device']} before any measurement"
        yield f"Calibration: {engine['measurements']} stored measurements in {engine['calibration']}"
    yield "Extras:"
    for name, extra in report["extras"].items():
        state = "installed" if extra["installed"] else f"missing {', '.join(extra['missing'])}: {extra['command']}"
        yield f"  {name} ({extra['feature']}): {state}"
    yield "Problems:" if report["problems"] else "Problems: none known"
    for problem in report["problems"]:
        yield f"  {problem}"
