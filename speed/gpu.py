"""Measure the engine ``vectorized`` on a CUDA device, in at most ten minutes: ``python -m speed.gpu [--json FILE]``

It runs the engine tests, the settings A and B of ``speed/settings.py`` with 8 to 512 clients at once, the forms of
convolutions, the precisions, ResNet-20, and a profile of one round, and prints one Markdown table. Without a CUDA device
it prints a sentence. ``--device cpu --quick`` runs everything small, as a test of this script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from speed.settings import SETTINGS
from speed.speed import federation_of
from unskew import ModelSpec, method
from unskew.engines.base import EngineConfig
from unskew.engines.device import device_modes
from unskew.engines.inline import InlineEngine
from unskew.engines.recording import Recorder
from unskew.engines.vectorized import VectorizedEngine
from unskew.methods.fedavg import server_rule
from unskew.models.registry import build_model
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.training_config import Training
from unskew.reproduction.tables import markdown
from unskew.simulation.server import Server
from unskew.simulation.server_state import ServerSetup
from unskew.tasks.registry import TASKS

TESTS = ["tests/engines/test_device_gpu.py", "tests/engines/test_device.py", "tests/engines/test_client_inputs.py"]
LIMIT = 570
"""Seconds after which nothing more is started."""
ROUND_LIMIT = 20
"""Seconds after which a measurement ends."""
COLUMNS = ("measurement", "setting", "clients per second", "seconds per round", "peak MiB", "note")


class Rounds:
    """Rounds of FedAvg or another method on noise images, with all data on one device.

    Args:
        setting: Local work, as in ``SETTINGS``.
        cohort: Clients per round.
        device: Device of the model and the data.
        width: Clients mapped at once; None to find it from the memory, 0 for one client after another.
        model: Name of the model.
        precision: Precision; ``bf16`` for mixed precision.
        convolution: Form of convolutions of ``vectorized``.
        spelling: Expression of the method.
        record: Records steps; None for CUDA graphs on a CUDA device.
        shape: Shape of an image, channels last.
    """

    def __init__(
        self,
        setting: dict[str, Any],
        cohort: int,
        device: torch.device,
        width: int | None = None,
        model: str = "cnn",
        precision: str = "fp32",
        convolution: Any = "grouped",
        spelling: str = "fedavg",
        record: Recorder | None = None,
        shape: tuple[int, int, int] = (32, 32, 3),
    ):
        clients, per_client = max(cohort, setting["clients"]), setting["per_client"]
        draws, what = np.random.default_rng(0), method(spelling)
        images = draws.integers(0, 256, (clients * per_client, *shape), dtype=np.uint8)
        federation = federation_of(images, draws.integers(0, 10, len(images)), clients, per_client).to(device)
        torch.manual_seed(setting["seed"])
        module, bf16 = build_model(model, federation.shape, federation.classes), precision == "bf16"
        spec = ModelSpec(module, federation.shape, federation.classes, autocast=bf16).to(device)
        training = Training(
            local_steps=setting["steps"], local_epochs=None, batch_size=setting["batch"], lr=setting["lr"]
        )
        info = replace(FederationInfo.of(federation), weights=what.weights or "samples")
        self.server = Server(ServerSetup(what, server_rule(what), spec, info))
        task, sums = TASKS["classification"], self.server.setup.sums_suffice  # as in a run
        setup = EngineConfig(spec, federation, what.client, task, training, 0, device, sums=sums)
        self.engine: Any = InlineEngine(setup)
        if width != 0:
            self.engine = VectorizedEngine(setup, convolution=convolution, record=record)
        if width:
            self.engine.width = width
        self.cohort, self.device, self.t = cohort, device, 0

    def round(self) -> None:
        broadcasts = self.server.broadcaster.broadcasts(self.t, range(self.cohort))
        self.server.aggregator.step(self.t, self.engine.train(broadcasts))
        self.t += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, most: int) -> tuple[float, float]:
        """Return the median seconds of at most ``most`` rounds after a first one, and the peak memory in MiB."""
        self.round()
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        times: list[float] = []
        while len(times) < most and sum(times) < ROUND_LIMIT:
            begin = time.perf_counter()
            self.round()
            times.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20 if on_cuda else 0.0
        return float(np.median(times)), peak


class Table:
    """Rows of the table; what fails or comes too late is a row, too."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []
        self.begin = time.monotonic()

    def add(self, name: str, setting: str, note: str, *figures: str) -> None:
        self.rows.append((name, setting, *(figures or ("", "", "")), note))
        print(" | ".join(self.rows[-1]), file=sys.stderr, flush=True)

    @contextmanager
    def guarded(self, name: str, setting: str) -> Iterator[None]:
        """Context manager that reports an error as a row."""
        try:
            yield
        except Exception as error:
            self.add(name, setting, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def measure(self, name: str, setting: str, rounds: int, device: torch.device, *args: Any, **options: Any) -> None:
        if time.monotonic() - self.begin > LIMIT:
            self.add(name, setting, "not measured: no time left")
            return
        with self.guarded(name, setting), device_modes(device, options.get("precision", "fp32")):
            loop = Rounds(*args, device=device, **options)
            seconds, peak = loop.measure(rounds)
            note = f"width {loop.engine.width}" if isinstance(loop.engine, VectorizedEngine) else ""
            self.add(
                name, setting, note, f"{loop.cohort / seconds:.1f}", f"{seconds:.4f}", f"{peak:.0f}" if peak else ""
            )


def run_tests(table: Table) -> None:
    """Run the engine tests in another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS]
    with table.guarded("tests", "tests/engines"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[1])
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        table.add("tests", "tests/engines", "passed" if done.returncode == 0 else "; ".join(failed) or "failed")


def add_profile(table: Table, setting: dict[str, Any], cohort: int, device: torch.device) -> None:
    """Add the operators that take the most time of one round."""
    on_cuda = device.type == "cuda"
    with table.guarded("profile", "B"), device_modes(device, "fp32"):
        loop = Rounds(setting, cohort, device)
        loop.round()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        with profile(activities=activities) as profiled:
            loop.round()
        events = profiled.key_averages()
        times = {
            event.key: (event.self_device_time_total if on_cuda else event.self_cpu_time_total, event.count)
            for event in events
        }
        total = sum(seconds for seconds, _ in times.values()) or 1
        for key, (spent, count) in sorted(times.items(), key=lambda entry: -entry[1][0])[:10]:
            table.add(f"profile: {key[:60]}", "B", f"{100 * spent / total:.1f} %, {spent / 1e3:.2f} ms, {count} calls")


def measure_all(device: torch.device, quick: bool) -> list[tuple[str, ...]]:
    """Return all rows of the table.

    Args:
        device: Device to measure.
        quick: Whether to run little work, without the tests.
    """
    table, rounds = Table(), 1 if quick else 5
    settings: dict[str, dict[str, Any]] = {
        name: {**setting, "clients": 4, "per_client": 8, "batch": 4, "steps": 2, "cohort": 4} if quick else setting
        for name, setting in SETTINGS.items()
    }
    widths = (2, 4) if quick else (8, 16, 32, 64, 128, 256, 512)
    if not quick:
        run_tests(table)
    for name, setting in settings.items():
        cohort = setting["cohort"]
        table.measure("one client after another", name, rounds, device, setting, cohort, width=0)
        table.measure("vectorized", name, rounds, device, setting, cohort)
        for spelling in ("scaffold", "fedprox"):
            table.measure(f"vectorized, {spelling}", name, rounds, device, setting, cohort, spelling=spelling)
        table.measure("convolutions: channels_last", name, rounds, device, setting, cohort, convolution="channels_last")
        for precision in ("tf32", "bf16"):
            table.measure(f"precision {precision}", name, rounds, device, setting, cohort, precision=precision)
    resnet = {**settings["A"], "steps": 2 if quick else 8}
    for form in ("grouped", "channels_last"):
        options = {"model": "resnet20", "convolution": form}
        table.measure(f"ResNet-20, {form}", "A", rounds, device, resnet, resnet["cohort"], **options)
    add_profile(table, settings["B"], settings["B"]["cohort"], device)
    for name, setting in settings.items():
        for width in widths:
            many = f"{name}, {max(widths)} clients per round"
            table.measure(f"at most {width} at once", many, min(rounds, 2), device, setting, max(widths), width=width)
    return table.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="little work, without the tests")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was measured.")
        return
    rows = measure_all(device, args.quick)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"Measured on {name}, torch {torch.__version__}.\n")
    print(markdown(COLUMNS, rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"device": name, "columns": COLUMNS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
