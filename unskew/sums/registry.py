"""Registry of the kinds of federated sums."""

from __future__ import annotations

from unskew.sums import columns, cross_products, fisher, scores, skew, survival
from unskew.sums.base import SumKind

SUMS: dict[str, SumKind] = {
    kind.name: kind
    for kind in (
        columns.Moments(),
        columns.Squares(),
        columns.Categories(),
        columns.Classes(),
        cross_products.CrossProducts(),
        cross_products.Residuals(),
        fisher.Fisher(),
        scores.Scores(),
        survival.SurvivalTimes(),
        survival.SurvivalCounts(),
        columns.Classes("class_counts", "counts"),
        skew.SiteScalars(),
        columns.Missing(),
        columns.Histogram(),
        columns.Moments("column_moments", "moments"),
        columns.Squares("column_squares", "moments"),
        skew.ClassMeans(),
        skew.ClassScatter(),
        skew.LabelProducts(),
        skew.LabelScatter(),
        skew.Gradient(),
        survival.SurvivalStatistic(),
        survival.LogRankTerm(),
    )
}
"""Kinds by name: first those that an experiment needs, then those that a site must allow."""
PERMISSIONS = tuple(dict.fromkeys(kind.permission for kind in SUMS.values() if kind.permission))
"""Statistics that a server may ask for, and a site must allow in ``site.yaml``."""
