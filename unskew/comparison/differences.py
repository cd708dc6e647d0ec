"""Differences between methods, paired by seed on the same partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unskew.comparison.intervals import interval95
from unskew.comparison.summary_statistics import is_usable_number, mean_std


def paired_differences(summaries: Mapping[str, Sequence[Mapping[str, Any]]], metric: str) -> list[dict[str, Any]]:
    """Return a row for each method minus each other one, with the 95 % interval of Student's t.

    ``seeds`` counts the pairs in which both values exist. Without any, the difference is None; the interval needs two.

    Args:
        summaries: Summaries of each method over seeds.
        metric: Key of the summaries.
    """
    rows = []
    for base, others in summaries.items():
        for name, runs in summaries.items():
            pairs = [(run, other) for run in runs for other in others if can_be_paired(run, other)]
            if name == base or not pairs:
                continue
            values = [
                run[metric] - other[metric]
                for run, other in pairs
                if is_usable_number(run.get(metric)) and is_usable_number(other.get(metric))
            ]
            low, high = interval95(values) or (None, None)
            difference = mean_std(values)[0] if values else None
            ends = {"low": low, "high": high}
            rows.append({"method": name, "minus": base, "seeds": len(values), "difference": difference, **ends})
    return rows


def can_be_paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two runs have the same seed and partition, so that they can be paired.

    Args:
        a: Summary of a run.
        b: Summary of another run.
    """
    return all(a[name] == b[name] for name in ("seed", "partition_hash"))
