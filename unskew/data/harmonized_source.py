"""Harmonization of the sites of a simulation: which columns, whether the label forbids it, and the harmonized samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from unskew.data.harmonize import fit_harmonization
from unskew.data.partition.parsing import parse_partition
from unskew.data.partition.partitioner import get_column
from unskew.data.partitioned import PartitionedSource
from unskew.data.readers.column_roles import LABEL
from unskew.data.readers.encoders import Encoder, column_rows
from unskew.data.readers.tables import Source
from unskew.data.readers.text import is_text
from unskew.data.spec import DataSpec
from unskew.errors import ConfigError, DataError, unknown_name
from unskew.sums.base import SumRequest
from unskew.sums.columns import decode_values
from unskew.sums.cross_products import columns_and_design
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.skew import label_distance_by_chance, label_distances
from unskew.tasks.registry import TASKS

CONFOUNDED, NEARLY_CONFOUNDED = 0.10, 0.05
"""Label distances of the sites, minus the distance by chance, from which harmonization raises an error or warns."""
LOG = logging.getLogger("unskew")


def check_harmonize(spec: DataSpec) -> None:
    """Validate the options of the data for harmonization, before they are loaded.

    Args:
        spec: Data specification.

    Raises:
        ConfigError: If options contradict each other.
    """
    if spec.harmonize.method == "none":
        return
    natural = isinstance(spec.partition, str) and parse_partition(spec.partition)[0] == "natural"
    problems = {
        "requires partition=natural:COLUMN, because every row, also of the test set, needs a site": not natural,
        "requires a table or feature vectors, not texts": is_text(spec.data),
        "cannot be combined with shift, which changes the inputs of clients": spec.shift is not None,
        "cannot be combined with server_data, because rows at the server belong to no site": spec.server_data
        is not None,
    }
    for problem in (text for text, wrong in problems.items() if wrong):
        raise ConfigError(f"harmonize={spec.harmonize.method} {problem}.")


def harmonizable(source: Source, spec: DataSpec) -> Source:
    """Return a source with encoders of its columns; those of arrays are ``input 0``, ``input 1`` and so on.

    Args:
        source: Data source.
        spec: Data specification.

    Raises:
        ConfigError: If the inputs are not numbers.
    """
    x = source.train.x
    if spec.harmonize.method == "none":
        return source
    if x.dim() != 2 or not x.is_floating_point():
        raise ConfigError(
            f"harmonize={spec.harmonize.method} requires a table or feature vectors, but {source.name} has other inputs. For "
            "images, the method fedbn keeps the normalization of each site."
        )
    return (
        source if source.encoders else replace(source, encoders=tuple(Encoder(f"input {j}") for j in range(x.shape[1])))
    )


def harmonized_columns(spec: DataSpec, source: Source) -> tuple[list[str], list[str]]:
    """Return the columns to harmonize and the covariates.

    Args:
        spec: Data specification.
        source: Data source.

    Raises:
        ConfigError: If a column does not exist or is not numeric, a covariate is the label or is not an input, a column is
            both, or there are too few columns for empirical Bayes.
    """
    kinds, chosen = {encoder.name: encoder.kind for encoder in source.encoders}, spec.harmonize
    for name in chosen.covariates:
        if source.columns.get(name) == LABEL:
            raise ConfigError(
                f"harmonize.covariates contains the label {name!r}. The harmonized inputs would contain it, and it is not "
                "known at prediction. Remove it."
            )
        if name not in kinds:
            raise ConfigError(f"harmonize.covariates: {unknown_name('input column', name, kinds)}")
    numeric = [name for name, kind in kinds.items() if kind == "number" and name not in chosen.covariates]
    for name in chosen.columns:
        if name not in numeric:
            raise ConfigError(f"harmonize.columns: {unknown_name('numeric input that is no covariate', name, numeric)}")
    columns = [*(chosen.columns or numeric)]
    if len(columns) < (3 if chosen.empirical_bayes else 1):
        raise ConfigError(
            f"There are {len(columns)} columns to harmonize, but empirical Bayes needs at least 3 to estimate its priors. "
            "Add columns, or set harmonize.empirical_bayes to false."
        )
    return columns, [*chosen.covariates]


def harmonized(drawn: PartitionedSource, training: PartitionedSource | None = None) -> PartitionedSource:
    """Return the data with harmonized columns of all clients and of the test set, if the options ask for it.

    Args:
        drawn: Partitioned samples.
        training: The clients that train, which determine what sites have in common; all by default.

    Raises:
        ConfigError: If the label differs too much between sites, or the columns cannot be harmonized.
        DataError: If values are missing, or a site has too few rows.
    """
    spec, source, parts = drawn.spec, drawn.source, drawn.parts
    if spec.harmonize.method == "none":
        return drawn
    training = training or drawn
    columns, covariates = harmonized_columns(spec, source)
    distance = confounding(training, spec.harmonize.confounded == "allow")
    exchange = SimulatedExchange(training.client_rows)
    kinds = {encoder.name: encoder.kind for encoder in source.encoders}
    levels = {name: tuple(spec.category_values.get(name, ())) for name in covariates}
    coded = [name for name, values in levels.items() if kinds[name] == "category" and not values]
    if coded:
        (found,) = exchange([SumRequest("categories", {"columns": coded})])
        levels |= {name: tuple(decode_values(found[f"values.{j}"])) for j, name in enumerate(coded)}
    site = parse_partition(spec.partition)[1]
    fit = fit_harmonization(exchange, site, spec.harmonize, columns, [*levels.items()])
    encoders, x, rows = source.encoders, drawn.train.x.numpy(), drawn.rows.numpy()
    sites = {}
    for name, start, stop in zip(parts.names, parts.offsets, drawn.splits, strict=False):
        own = columns_and_design(column_rows(x[rows[start:stop]], encoders), columns, fit.covariates)
        sites[name] = fit.estimate(*own, f"The client {name}")
    fit = fit.model_copy(update={"sites": sites})
    names = np.repeat(np.array(parts.names, object), parts.sizes).tolist()
    train = x.astype(np.float64)
    train[rows] = fit.harmonize(x[rows], encoders, names, f"{source.name}, the training rows")
    tested = f"{source.name}, the test rows"
    test = fit.harmonize(drawn.test.x.numpy(), encoders, site_names(drawn.test.columns, site, tested), tested, True)
    chosen = [encoder.name in columns for encoder in encoders]
    before, after = (share_between([values[own][:, chosen] for own in rows_of(training)]) for values in (x, train))
    return replace(
        drawn,
        train=replace(drawn.train, x=torch.from_numpy(train)),
        test=replace(drawn.test, x=torch.from_numpy(test)),
        harmonization=fit.model_copy(update={"between": (before, after), "label_distance": distance}),
        sent=exchange.traffic,
    )


def rows_of(training: PartitionedSource) -> list[np.ndarray]:
    """Return the training rows of each client."""
    order, starts = training.rows.numpy(), training.parts.offsets[:-1]
    return [order[start:stop] for start, stop in zip(starts, training.splits, strict=True)]


def share_between(sites: Sequence[np.ndarray]) -> float:
    """Return the share of the variance that is between sites, mean over columns.

    Args:
        sites: Columns of each site, ``[n_k, f]``.

    >>> share_between([np.array([[0.0], [2.0]]), np.array([[2.0], [4.0]])])
    0.5
    """
    pooled = np.concatenate(sites).astype(np.float64)
    between = sum(len(own) * np.square(own.mean(0, dtype=np.float64) - pooled.mean(0)) for own in sites)
    return float(np.mean(between / np.square(pooled - pooled.mean(0)).sum(0)))


def site_names(columns: Mapping[str, np.ndarray], site: str, what: str) -> list[str]:
    """Return the site of each row as a name.

    Args:
        columns: Columns of the rows by name.
        site: Name of the column.
        what: Description of the rows, for errors.

    Raises:
        DataError: If the column does not exist or has missing values.
    """
    if site not in columns:
        raise DataError(f"{what} need the column {site!r}, because their inputs are harmonized for each site.")
    return [str(value) for value in get_column(columns, site, "harmonize").tolist()]


def confounding(training: PartitionedSource, allowed: bool) -> float:
    """Return the mean label distance of the sites minus the distance by chance; numbers count as above the median or not.

    Args:
        training: Clients that train.
        allowed: Whether a large distance is allowed.

    Raises:
        ConfigError: If it is large and not allowed.
    """
    source, y = training.source, training.train.y
    labels = [y[rows] for rows in rows_of(training)]
    task = TASKS[source.task]
    if "counts" in task.provides:
        counts = [np.array([task.counts(own, source.classes).tolist() for own in labels], float)]
    else:
        median = torch.cat(labels).median(0).values
        above = np.array([(own > median).sum(0).tolist() for own in labels], float).T
        counts = [np.stack([share, [len(own) for own in labels] - share], 1) for share in above]
    distance = -1.0
    for some in counts:
        sizes = some.sum(1).clip(1)
        shares = some.sum(0) / sizes.sum()
        by_chance = label_distance_by_chance(shares, float(np.sqrt((1 / sizes - 1 / sizes.sum()).clip(0)).mean()))
        distance = max(distance, float(label_distances(some, shares)[0].mean()) - by_chance)
    if distance >= NEARLY_CONFOUNDED:
        what = f"The labels of the sites differ: their distance from all labels is {distance:.2f} more than by chance"
        if distance >= CONFOUNDED and not allowed:
            raise ConfigError(
                f"{what} (limit {CONFOUNDED:.2f}). Harmonization would remove a part of the label with the differences of "
                "the sites. Remove harmonize, or set harmonize.confounded to allow."
            )
        LOG.warning("%s. Harmonization may remove a part of the label; compare with a run without it", what)
    return max(0.0, distance)
