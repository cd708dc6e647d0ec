"""Results of the jobs as JSON Lines: one measurement per line, written as soon as it is known."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_row(out: Path, section: str, name: str, **values: Any) -> None:
    """Append a measurement to ``rows.jsonl`` and print it.

    Args:
        out: Folder of the results.
        section: Job or part of it.
        name: What was measured.
        **values: Results; numbers are rounded to four digits.
    """
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
    line = json.dumps({"section": section, "name": name, **rounded})
    with (out / "rows.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def time_rounds(run_round: Callable[[], None], seconds: float, least: int = 3, most: int = 200) -> dict[str, Any]:
    """Time rounds after two warm-up rounds; ``run_round`` returns when the device is done.

    Args:
        run_round: Trains a round.
        seconds: Time after which no further round starts.
        least: Minimum number of timed rounds, unless they take more than three times ``seconds``.
        most: Maximum number of timed rounds.

    Returns:
        Median, smallest and largest milliseconds of a round, rounds per second, and the time of the first round.
    """
    begin = time.perf_counter()
    run_round()
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    run_round()
    spent = time.perf_counter() - begin
    times = [spent] if spent > seconds else []  # a slow round is its own warm-up
    while (sum(times) < seconds and len(times) < most) or (len(times) < least and sum(times) < 3 * seconds):
        begin = time.perf_counter()
        run_round()
        times.append(time.perf_counter() - begin)
    return {**summary(times), "first_round_s": first}


def summary(times: list[float]) -> dict[str, Any]:
    """Return the median, smallest and largest of the seconds of rounds as milliseconds, and rounds per second."""
    median = statistics.median(times)
    return {
        "ms": 1e3 * median,
        "rounds_per_s": 1 / median,
        "ms_min": 1e3 * min(times),
        "ms_max": 1e3 * max(times),
        "rounds": len(times),
    }
