"""unskew and its peers on one GPU, in one run: ``python -m speed.gpu_jobs.peers_gpu OUT [--seconds 400] [--quick]``

Each section is a process of its own with a time limit, because a failed capture of a CUDA graph spoils its process. Every
measurement is one line of ``OUT/rows.jsonl``; a section that fails, is late or does not fit into the time is a line, too.
Before a loop is timed, it trains two small rounds of the setting, and its model is compared with that of unskew.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speed.gpu_jobs.rows import add_row
from speed.gpu_jobs.settings import CHECKED_ROUNDS, PREPARED_ROUNDS, SETTINGS, Prepared, setting_of

TOLERANCE = 1e-4
"""Largest difference of two models, relative to the norm of unskew's, and of their training losses."""
CHANGE_TOLERANCE = 1e-2
"""Largest difference of two models, relative to how far unskew's has moved, which allows for a ReLU that flips."""
MEASURED_SECONDS = 2.0
"""Seconds of rounds per measurement."""
PFL_ROUNDS = 10


@dataclass(frozen=True)
class Section:
    """One process.

    Attributes:
        loop: ``unskew``, ``hand``, ``graph``, ``jax-vmap``, ``jax-map`` or ``pfl-N`` with N processes.
        settings: Names of the settings, in order.
        limit: Seconds after which it is ended.
    """

    loop: str
    settings: tuple[str, ...]
    limit: int

    @property
    def name(self) -> str:
        return f"{self.loop} {','.join(self.settings)}"


SECTIONS = (
    *(Section(loop, (name,), 40) for name in ("A", "B", "pfl") for loop in ("unskew", "graph")),
    Section("hand", ("A", "B", "pfl"), 60),
    Section("jax-vmap", ("A", "B", "pfl"), 80),
    Section("jax-map", ("A", "B", "pfl"), 80),
    *(Section(f"pfl-{count}", (name,), 45) for count in (5, 1) for name in ("pfl", "B", "A")),
    Section("unskew", ("pfllib",), 40),
    Section("unskew", ("flsim",), 80),
    Section("graph", ("pfllib",), 40),
    Section("graph", ("flsim",), 60),
    Section("jax-map", ("pfllib", "flsim"), 120),
    Section("hand", ("pfllib", "flsim"), 90),
    Section("jax-vmap", ("pfllib", "flsim"), 120),
    Section("pfl-5", ("pfllib",), 45),
)
"""Sections, most decisive first."""


def run_section(out: Path, folder: Path, section: Section, quick: bool) -> None:
    """Check and time a loop of PyTorch in this process.

    Args:
        out: Folder of the results.
        folder: Folder of initial models and batches.
        section: The section.
        quick: Whether to do next to no work.
    """
    from speed.gpu_jobs import torch_loops as loops

    seconds, card = 0.0 if quick else MEASURED_SECONDS, loops.device_name()
    forms = (False,) if section.loop == "unskew" else (False, True)
    for name in section.settings:
        setting, small = setting_of(name, quick, False), setting_of(name, quick, True)
        for channels_last in forms:
            label = f"{section.loop}{' channels-last' if channels_last else ''}"
            try:
                if section.loop == "unskew":
                    loops.save_check(folder / f"{name}-unskew.npz", loops.check_unskew(small))
                    result = loops.time_unskew(setting, seconds)
                else:
                    prepared = Prepared.load(folder / f"{name}-check.npz", small)
                    checked = loops.LOOPS[section.loop](prepared, channels_last).checked()
                    loops.save_check(folder / f"{name}-{label.replace(' ', '-')}.npz", checked)
                    prepared = Prepared.load(folder / f"{name}.npz", setting)
                    result = loops.time_hand(section.loop, prepared, channels_last, seconds)
                published = {} if setting.published is None else {"published_s": setting.published}
                add_row(out, "peers", f"{name} {label}", card=card, **result, **published)
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {str(error)[:300]}"
                add_row(out, "peers", f"{name} {label}", card=card, error=text)


def command_of(out: Path, folder: Path, section: Section, quick: bool) -> list[str]:
    """Return the command of a section; arguments as in ``run_section``."""
    small, loop = ["--quick"] if quick else [], section.loop
    if loop.startswith("jax-"):
        seconds = "0" if quick else str(MEASURED_SECONDS)
        arguments = [str(out), str(folder), seconds, loop.removeprefix("jax-"), *small, *section.settings]
        return [sys.executable, "-m", "speed.gpu_jobs.jax_loop", *arguments]
    if loop.startswith("pfl-"):
        rounds = "4" if quick else str(PFL_ROUNDS)
        arguments = [str(out), section.settings[0], loop.removeprefix("pfl-"), rounds, *small]
        return [sys.executable, "-m", "speed.gpu_jobs.pfl_loop", *arguments]
    arguments = [str(out), "--folder", str(folder), "--section", loop, "--settings", *section.settings, *small]
    return [sys.executable, "-m", "speed.gpu_jobs.peers_gpu", *arguments]


def run_process(out: Path, section: Section, command: list[str], limit: float) -> None:
    """Run a section in a process group of its own, and report if it fails or is late.

    Args:
        out: Folder of the results.
        section: The section.
        command: Its command.
        limit: Seconds after which all its processes are ended.
    """
    begin, rows = time.monotonic(), out / "rows.jsonl"
    before = rows.stat().st_size
    with (out / "log.txt").open("a") as log:
        log.write(f"== {section.name}\n")
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"ended after {limit:.0f} s"
    print(rows.read_text()[before:], end="", flush=True)
    seconds = time.monotonic() - begin
    add_row(out, "section", section.name, seconds=seconds, **({} if code == 0 else {"failed": code}))


def compare_models(out: Path, folder: Path, compared: set[Path]) -> None:
    """Compare the checked models of all loops with that of unskew, each once.

    Args:
        out: Folder of the results.
        folder: Folder of the models.
        compared: Files that were compared; new ones are added.
    """
    for file in sorted(folder.glob("*-*.npz")):
        name, _, loop = file.stem.partition("-")
        reference = folder / f"{name}-unskew.npz"
        if loop in ("check", "unskew") or file in compared or not reference.is_file():
            continue
        compared.add(file)
        with np.load(folder / f"{name}-check.npz") as drawn, np.load(reference) as ours, np.load(file) as theirs:
            parts = sum(key.startswith("start") for key in drawn.files)
            start = np.concatenate([drawn[f"start{index}"].ravel() for index in range(parts)])
            difference = np.linalg.norm(ours["model"] - theirs["model"])
            model = float(difference / np.linalg.norm(ours["model"]))
            change = float(difference / np.linalg.norm(ours["model"] - start))
            loss = abs(float(ours["loss"]) - float(theirs["loss"]))
        agree = max(model, loss) <= TOLERANCE and change <= CHANGE_TOLERANCE
        add_row(out, "agreement", f"{name} {loop} and unskew", model=model, change=change, loss=loss, agree=agree)


def run_all(out: Path, seconds: float, quick: bool, only: list[str], names: list[str]) -> None:
    """Run the sections that fit into the time.

    Args:
        out: Folder of the results.
        seconds: Time for all of them.
        quick: Whether to do next to no work.
        only: Loops to run; empty for all.
        names: Settings to run; empty for all.
    """
    from speed.gpu_jobs.models import prepare

    begin = time.monotonic()
    sections = [
        Section(section.loop, kept, section.limit)
        for section in SECTIONS
        if (kept := tuple(name for name in section.settings if not names or name in names))
        and (not only or section.loop in only)
    ]
    with tempfile.TemporaryDirectory() as folder_name:
        folder, compared = Path(folder_name), set[Path]()
        for name in dict.fromkeys(name for section in sections for name in section.settings):
            prepare(setting_of(name, quick, False), PREPARED_ROUNDS).save(folder / f"{name}.npz")
            prepare(setting_of(name, quick, True), CHECKED_ROUNDS).save(folder / f"{name}-check.npz")
        add_row(out, "section", "prepared", seconds=time.monotonic() - begin)
        for section in sections:
            left = seconds - (time.monotonic() - begin)
            if left < min(20, section.limit):
                add_row(out, "section", section.name, failed="no time left")
                continue
            limit = (4 if quick else 1) * section.limit
            run_process(out, section, command_of(out, folder, section, quick), min(limit, left))
            compare_models(out, folder, compared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=400, help="time for all sections")
    parser.add_argument("--quick", action="store_true", help="next to no work, as a test of this script")
    parser.add_argument("--only", default="", help="loops to run, separated by commas")
    parser.add_argument("--settings", nargs="+", default=[], choices=list(SETTINGS), help="settings to run")
    parser.add_argument("--section", help="loop to run in this process; used by this script")
    parser.add_argument("--folder", type=Path, help="folder of initial models and batches; used by this script")
    args = parser.parse_args()
    only = [loop for loop in args.only.split(",") if loop]
    if unknown := sorted(set(only) - {section.loop for section in SECTIONS}):
        parser.error(f"--only: there is no loop {unknown[0]!r}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section is not None:
        run_section(args.out, args.folder, Section(args.section, tuple(args.settings), 0), args.quick)
        return
    run_all(args.out, args.seconds, args.quick, only, args.settings)


if __name__ == "__main__":
    main()
