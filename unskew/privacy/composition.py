"""Composition: the guarantee of several private runs on the same data, if the results of all of them are released.

By basic composition, epsilon and delta of all runs are the sums of those of the runs. Runs that are Gaussian mechanisms
without amplification compose exactly to one with ``mu = sqrt(sum of mu^2)``, which gives a smaller epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from unskew.privacy.accounting import exact_epsilon


def compose_runs(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the guarantee of all private runs together, or None if fewer than two runs have one.

    Args:
        summaries: Summaries of the runs, or mappings with their ``epsilon`` and ``delta``. Runs with the same ``synthetic``
            set share one release, which counts once.

    Returns:
        ``runs``, and the sums ``epsilon`` and ``delta``; if all are Gaussian mechanisms, also ``exact_epsilon`` for
        ``exact_delta``, the largest of their deltas.
    """
    shared: dict[Any, Mapping[str, Any]] = {}
    for number, summary in enumerate(summaries):
        if isinstance(summary.get("epsilon"), float | int):
            shared[summary.get("synthetic") or number] = summary
    private = list(shared.values())
    if len(private) < 2:
        return None
    deltas, mus = [float(one["delta"]) for one in private], [one.get("gaussian_mu") for one in private]
    total = {"runs": len(private), "epsilon": math.fsum(one["epsilon"] for one in private), "delta": math.fsum(deltas)}
    if None in mus:
        return total
    return {**total, "exact_epsilon": exact_epsilon(math.hypot(*mus), max(deltas)), "exact_delta": max(deltas)}


def composition_note(total: Mapping[str, Any] | None) -> str | None:
    """Return a sentence on the guarantee of several runs, or None.

    Args:
        total: Result of ``compose_runs``.

    >>> print(composition_note({"runs": 2, "epsilon": 3.0, "delta": 0.02}))
    2 private runs on the same data: together epsilon <= 3 (sum of 2; sum of delta 0.02) if all results are released.
    """
    if total is None:
        return None
    exact = ""
    if "exact_epsilon" in total:
        exact = f"; as Gaussian mechanisms, exactly {total['exact_epsilon']:.4g} for delta {total['exact_delta']:.3g}"
    return (
        f"{total['runs']} private runs on the same data: together epsilon <= {total['epsilon']:.4g} (sum of {total['runs']}; "
        f"sum of delta {total['delta']:.3g}{exact}) if all results are released."
    )
