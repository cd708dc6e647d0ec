"""Composition: the guarantee of several private runs on the same data, if the results of all of them are released.

By basic composition, epsilon and delta of all runs are the sums of those of the runs. Runs that are Gaussian mechanisms
without amplification compose exactly to one with ``mu = sqrt(sum of mu^2)``, which gives a smaller epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from unskew.privacy.accounting import exact_epsilon


def composition_note(summaries: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the guarantee of all private runs together, or None if fewer than two runs have one.

    Args:
        summaries: Summaries of the runs, or mappings with their ``epsilon``, ``delta`` and, for a Gaussian mechanism,
            ``gaussian_mu``. Runs with the same ``synthetic`` set share one release, which counts once.

    >>> print(composition_note([{"epsilon": 1.0, "delta": 0.01}, {"epsilon": 2.0, "delta": 0.01}]))
    2 private runs on the same data: together epsilon <= 3 (sum of 2; sum of delta 0.02) if all results are released.
    """
    releases = {summary.get("synthetic") or number: summary for number, summary in enumerate(summaries)}
    private = [summary for summary in releases.values() if summary.get("epsilon") is not None]
    count, deltas = len(private), [summary["delta"] for summary in private]
    if count < 2:
        return None
    mu, exact = math.hypot(*(summary.get("gaussian_mu", math.nan) for summary in private)), ""
    if not math.isnan(mu):
        spent = exact_epsilon(mu, max(deltas))
        exact = f"; as Gaussian mechanisms, exactly {spent:.4g} for delta {max(deltas):.3g}"
    total = math.fsum(summary["epsilon"] for summary in private)
    return (
        f"{count} private runs on the same data: together epsilon <= {total:.4g} (sum of {count}; sum of delta "
        f"{math.fsum(deltas):.3g}{exact}) if all results are released."
    )
