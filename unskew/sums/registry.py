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
        columns.ClassCounts(),
        columns.ColumnMoments(),
        columns.ColumnSquares(),
        columns.Missing(),
        columns.Histogram(),
        cross_products.CrossProducts(),
        cross_products.Residuals(),
        fisher.Fisher(),
        skew.SiteScalars(),
        skew.ClassMeans(),
        skew.ClassScatter(),
        skew.Gradient(),
        skew.LabelProducts(),
        skew.LabelScatter(),
        scores.Scores(),
        survival.SurvivalTimes(),
        survival.SurvivalCounts(),
        survival.SurvivalStatistic(),
    )
}
PERMISSIONS = ("counts", "missing", "histograms", "moments", "features", "gradients", "survival")
"""Statistics that a server may ask for, and a site must allow in ``site.yaml``."""
