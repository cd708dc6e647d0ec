"""Sums of a regression of columns on covariates with one intercept per client, for the harmonization of columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, Shapes, SumKind, SumRequest, Sums
from unskew.sums.columns import as_tensor

Covariate = tuple[str, tuple[str, ...]]
"""Name of a column and, if it is categorical, its categories; the first one is the reference."""


def design_names(covariates: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the name of each column of a design matrix.

    >>> design_names([("age", ()), ("sex", ("female", "male"))])
    ['age', 'sex=male']
    """
    return [text for name, values in covariates for text in ([f"{name}={v}" for v in values[1:]] if values else [name])]


def columns_and_design(
    rows: ClientRows, columns: Sequence[str], covariates: Sequence[tuple[str, Sequence[str]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return columns ``[n, f]`` and the design matrix ``[n, p]`` of their regression, without intercepts, as float64.

    Args:
        rows: Rows of a client.
        columns: Names of the columns.
        covariates: Covariates; each category but the first is a column of 0 and 1.

    Raises:
        DataError: If a column does not exist, a value is missing, or a category is unknown.
    """
    numbers = dict(zip(rows.columns, rows.numbers.T, strict=True))
    selected = {name: numbers.get(name) for name in columns}
    design: dict[str, np.ndarray | None] = {}
    for name, values in covariates:
        own = rows.texts.get(name)
        if values and own is not None:
            known = np.isin(own, np.array(values, object))
            design |= {f"{name}={value}": np.where(known, own == value, np.nan) for value in values[1:]}
        else:
            design[name] = None if values else numbers.get(name)
    for name, value in {**selected, **design}.items():
        absent = None if value is None else int(np.isnan(value).sum())
        if absent != 0:
            what = "does not exist" if absent is None else f"has no known value in {absent} of {len(rows.numbers)} rows"
            raise DataError(
                f"The column {name!r} of the harmonization {what}. Fill missing values, remove these rows, or list other "
                "columns in harmonize.columns and harmonize.covariates."
            )
    x, z = (
        np.array([*part.values()], np.float64).reshape(len(part), len(rows.numbers)).T for part in (selected, design)
    )
    return x, z


def centered(values: np.ndarray) -> np.ndarray:
    """Subtract the mean of each column ``[n, p]``; constant columns become exactly 0."""
    return np.where(np.ptp(values, 0) > 0, values - values.mean(0), 0.0)


class CrossProducts(SumKind):
    """Products of covariates with each other and with the columns, centered within each client."""

    name = "cross_products"

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        x, z = map(centered, columns_and_design(rows, **request.args))
        return {"covariates": as_tensor(z.T @ z), "columns": as_tensor(z.T @ x)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        p = len(design_names(request.args["covariates"]))
        return {"covariates": (torch.float64, (p, p)), "columns": (torch.float64, (p, len(request.args["columns"])))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        names, columns = design_names(request.args["covariates"]), request.args["columns"]
        return f"sums of products of {', '.join(names)}, minus their means at the site, with {', '.join([*names, *columns])}"


class Residuals(SumKind):
    """Rows, sums of the residuals of a regression, and of their squared deviations from the client's mean residuals."""

    name = "residuals"

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        x, z = columns_and_design(rows, **request.args)
        residuals = x - z @ request.tensor("beta", z.shape[1], x.shape[1]).numpy()
        squares = np.square(centered(residuals)).sum(0)
        return {"rows": torch.tensor([len(x)]), "sums": as_tensor(residuals.sum(0)), "squares": as_tensor(squares)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        size = (len(request.args["columns"]),)
        return {"rows": (torch.int64, (1,)), "sums": (torch.float64, size), "squares": (torch.float64, size)}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        names, columns = design_names(request.args["covariates"]), ", ".join(request.args["columns"])
        sums = "number of rows, and sums and squared deviations"
        return f"{sums} of {columns}" + (f" without the part that {', '.join(names)} explain" if names else "")
