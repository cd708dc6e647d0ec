"""Harmonization of the numeric columns of sites by ComBat: shifts and scales of a site's devices are removed.

Johnson et al. (2007), Fortin et al. (2018); distributed by Chen et al. (2022). For a column ``x`` and covariates ``Z``,
where ``~`` means centered within each site::

    beta = (sum_k Z~_k' Z~_k)^-1 sum_k Z~_k' x~_k,   alpha = mean of x - Z beta
    sigma^2 = sum_k sum_i (x - Z beta - its mean at site k)^2 / n,   s = (x - alpha - Z beta) / sigma
    x* = sigma (s - gamma_k) / delta_k + alpha + Z beta

Only these sums leave a site. Each site estimates its ``gamma_k`` and ``delta_k`` from its own rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from unskew.data.readers.encoders import Encoder, column_rows
from unskew.data.spec import HarmonizeSpec
from unskew.errors import DataError, unknown_name
from unskew.sums.base import SumRequest
from unskew.sums.cross_products import Covariate, columns_and_design, design_names
from unskew.sums.exchange import Exchange

FEW_ROWS = 10
"""Number of rows below which a site's parameters are imprecise."""
NEW_SITE_ROWS = 20
"""Minimum number of rows of a site without training rows."""
TOLERANCE, MOST_STEPS = 1e-4, 1000
"""Relative change at which the iteration of empirical Bayes stops, and its maximum number of steps."""
SINGULAR = 1e-10
"""Smallest eigenvalue of the covariates' correlation matrix within sites."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LOG = logging.getLogger("unskew")


class SiteEffect(BaseModel):
    """Shift ``gamma`` and scale ``delta`` of each column at a site, in standard deviations ``sigma``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gamma: tuple[Finite, ...]
    delta: tuple[Positive, ...]


class Harmonization(BaseModel):
    """Fitted harmonization.

    Attributes:
        model_config: Configuration of pydantic.
        site: Column with the site of each row.
        columns: Columns that are harmonized, ``f``.
        covariates: Covariates, whose effects remain.
        alpha: Mean of each column without the effects of the covariates, ``[f]``.
        beta: Effect of each covariate on each column, ``[p, f]``.
        sigma: Standard deviation of each column within sites, ``[f]``.
        empirical_bayes: Whether a site's parameters are shrunk to their means over the columns.
        mean_only: Whether only shifts are removed.
        sites: Effect of each site, by its name.
        between: Share of the variance of the columns between the training sites, before and after.
        label_distance: Mean distance of the sites' labels from all labels, minus the distance by chance.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    site: str
    columns: tuple[str, ...]
    covariates: tuple[Covariate, ...]
    alpha: tuple[Finite, ...]
    beta: tuple[tuple[Finite, ...], ...]
    sigma: tuple[Positive, ...]
    empirical_bayes: bool
    mean_only: bool
    sites: Mapping[str, SiteEffect] = Field(default_factory=dict)
    between: tuple[Finite, Finite] = (0.0, 0.0)
    label_distance: Finite = 0.0

    def __str__(self) -> str:
        """Describe the effect of the harmonization in a sentence."""
        before, after = self.between
        return (
            f"Harmonization of {len(self.columns)} columns: {before:.1%} of their variance was between sites, {after:.1%} is "
            f"left. Label distance of the sites minus chance: {self.label_distance:.2f}."
        )

    def common(self, z: np.ndarray) -> np.ndarray:
        """Return what all sites have in common, ``alpha + Z beta``, for covariates ``[n, p]``."""
        return np.asarray(np.array(self.alpha) + z @ np.reshape(self.beta, (z.shape[1], len(self.columns))))

    def estimate(self, x: np.ndarray, z: np.ndarray, who: str) -> SiteEffect:
        """Estimate the effect of a site.

        Args:
            x: Columns of its rows, ``[n, f]``.
            z: Covariates of its rows, ``[n, p]``.
            who: Name of the site, for errors.

        Raises:
            DataError: If there is a single row, or a column is constant.
        """
        constant = np.flatnonzero(np.ptp(x, 0) == 0)
        if not self.mean_only and len(constant):
            what = f"the column {self.columns[constant[0]]!r} is constant" if len(x) > 1 else "there is one row"
            raise DataError(
                f"{who}: {what}, so that its variance cannot be harmonized. Leave the column or the site out, or set "
                "harmonize.mean_only."
            )
        if len(x) < FEW_ROWS:
            LOG.warning("%s has %d rows, from which its harmonization is imprecise", who, len(x))
        s = (x - self.common(z)) / np.array(self.sigma)
        gamma, variance = site_effect(s, self.empirical_bayes, self.mean_only)
        return SiteEffect(gamma=tuple(gamma.tolist()), delta=tuple(np.sqrt(variance).tolist()))

    def apply(self, x: np.ndarray, z: np.ndarray, effect: SiteEffect) -> np.ndarray:
        """Return the harmonized columns ``[n, f]`` of rows of a site.

        Args:
            x: Columns, ``[n, f]``.
            z: Covariates, ``[n, p]``.
            effect: Effect of the site.
        """
        common, sigma = self.common(z), np.array(self.sigma)
        s = (x - common) / sigma
        return np.asarray(sigma * (s - np.array(effect.gamma)) / np.array(effect.delta) + common)

    def harmonize(
        self, values: np.ndarray, encoders: Sequence[Encoder], sites: Sequence[str], what: str, new_sites: bool = False
    ) -> np.ndarray:
        """Return all columns of rows with the harmonized ones replaced, as float64.

        Args:
            values: Columns, ``[n, F]``.
            encoders: Encoders with which they were read.
            sites: Site of each row.
            what: Description of the rows, for errors.
            new_sites: Whether the effects of other sites are estimated from these rows.

        Raises:
            DataError: If a site is unknown, or a new site has too few rows.
        """
        x, z = columns_and_design(column_rows(values, encoders), self.columns, self.covariates)
        of_row, result = np.array(sites), np.empty_like(x)
        for name in dict.fromkeys(sites):
            rows, effect = of_row == name, self.sites.get(name)
            if effect is None and not new_sites:
                raise DataError(
                    f"{what}: {unknown_name(self.site, name, self.sites)} The inputs are harmonized for each site. For rows "
                    f"of a new site, use --new-site (new_site=True) with at least {NEW_SITE_ROWS} of its rows."
                )
            if effect is None and rows.sum() < NEW_SITE_ROWS:
                raise DataError(
                    f"{what}: {self.site} {name!r} is not among the training rows and has {rows.sum()} rows, but at least "
                    f"{NEW_SITE_ROWS} are needed to harmonize those of a new site. Add rows, or remove these."
                )
            own = effect or self.estimate(x[rows], z[rows], f"{what}, {self.site} {name!r}")
            result[rows] = self.apply(x[rows], z[rows], own)
        names, harmonized = [encoder.name for encoder in encoders], values.astype(np.float64)
        harmonized[:, [names.index(name) for name in self.columns]] = result
        return harmonized


def site_effect(s: np.ndarray, empirical_bayes: bool, mean_only: bool) -> tuple[np.ndarray, np.ndarray]:
    """Estimate shift and variance of each column at a site, ``[f]`` each.

    With empirical Bayes, their priors are fitted to all columns: normal for shifts, inverse gamma for variances.

    Args:
        s: Standardized columns of the site's rows, ``[n, f]``.
        empirical_bayes: Whether the estimates are shrunk to those of all columns.
        mean_only: Whether variances are 1.
    """
    n, shifts = len(s), s.mean(0)
    variances = np.ones(s.shape[1]) if mean_only else s.var(0, ddof=1)
    if not empirical_bayes:
        return shifts, variances
    center, spread = shifts.mean(), shifts.var(ddof=1)
    if mean_only:  # the published algorithm shrinks as if there were one row
        return (spread * shifts + center) / (spread + 1), variances
    m, v = variances.mean(), variances.var(ddof=1)
    gamma, delta = shifts, variances
    for _ in range(MOST_STEPS):
        before = gamma, delta
        gamma = (spread * n * shifts + delta * center) / (spread * n + delta)
        squares = np.square(s - gamma).sum(0)
        delta = (v * squares / 2 + m * v + m**3) / (v * (n / 2 - 1) + 2 * v + m**2)
        # As in the published code, the change of a shift is relative to the shift with its sign.
        with np.errstate(divide="ignore", invalid="ignore"):
            changes = [np.abs(new - old) / old for new, old in zip((gamma, delta), before, strict=True)]
        if np.nanmax(changes) <= TOLERANCE:
            break
    return gamma, delta


def fit_harmonization(
    exchange: Exchange, site: str, spec: HarmonizeSpec, columns: Sequence[str], covariates: Sequence[Covariate]
) -> Harmonization:
    """Fit what sites have in common, from sums over their training rows.

    Args:
        exchange: Asks all sites for sums.
        site: Column with the site of each row.
        spec: Options of the harmonization.
        columns: Columns to harmonize.
        covariates: Covariates.

    Raises:
        DataError: If covariates are linearly dependent, or they determine a column.
    """
    args = {"columns": [*columns], "covariates": [[name, [*values]] for name, values in covariates]}
    names, beta = design_names(covariates), np.zeros((0, len(columns)))
    if names:
        (products,) = exchange([SumRequest("cross_products", args)])
        a, b = (products[name].numpy() for name in ("covariates", "columns"))
        scale = np.sqrt(a.diagonal())
        constant = np.flatnonzero(scale == 0)
        if len(constant):
            raise DataError(
                f"The covariate {names[constant[0]]} is constant within every site, so that its effect cannot be "
                "distinguished from those of the sites. Remove it from harmonize.covariates."
            )
        correlation = a / np.outer(scale, scale)
        if np.linalg.eigvalsh(correlation)[0] < SINGULAR:
            raise DataError(
                f"The covariates {', '.join(names)} are linearly dependent within the sites: one of them follows from the "
                "others. Remove it from harmonize.covariates."
            )
        beta = np.linalg.solve(correlation, b / scale[:, None]) / scale[:, None]
    (sums,) = exchange([SumRequest("residuals", args, {"beta": torch.from_numpy(beta)})])
    n = int(sums["rows"])
    sigma = np.sqrt(sums["squares"].numpy() / n)
    if (sigma == 0).any():
        name = columns[int(np.argmin(sigma))]
        raise DataError(f"The column {name!r} does not vary within the sites. Leave it out of harmonize.columns.")
    return Harmonization(
        site=site,
        columns=tuple(columns),
        covariates=tuple(covariates),
        alpha=tuple((sums["sums"].numpy() / n).tolist()),
        beta=tuple(map(tuple, beta.tolist())),
        sigma=tuple(sigma.tolist()),
        empirical_bayes=spec.empirical_bayes,
        mean_only=spec.mean_only,
    )
