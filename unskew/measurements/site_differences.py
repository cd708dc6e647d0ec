"""Differences between sites: rows, outcome, missing values and shifted columns of each client, next to all clients' data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.data.clients import ArrayClients
from unskew.data.federation import Federation
from unskew.data.readers.column_roles import INPUT, LABEL
from unskew.data.readers.encoders import category_counts
from unskew.measurements.label_skew import share_between
from unskew.sums.base import SumRequest, Sums
from unskew.sums.skew import input_values
from unskew.sums.statistics import Metrics, Statistic

MANY = 10_000
"""Maximum number of clients that are all listed; with more, only the measured ones are."""
WIDEST = 512
"""Maximum number of inputs, one for each category, of the linear model of the label."""
LISTED = 5
"""Number of shifts that a row lists."""


@dataclass(frozen=True)
class SiteDifferences:
    """Differences between the clients of a federation.

    Attributes:
        rows: One row per client: ``client``, ``rows`` (training and held-out samples), ``outcome`` with its ``share`` or
            its ``mean`` and ``std``, ``missing`` (share of the input values), ``missing_columns`` (share by column), and
            ``shifts``: pairs of a column and its difference from all clients, the largest first.
        pooled: Row of all clients together, without shifts.
        between: Share of each target's variance that lies between the clients; classes are targets of 0 and 1.
        label_between: The same for all targets together, without the share expected by chance; None without labels.
        label_unexplained: The same for the residuals of a linear model of the inputs that is fitted to all clients, as a
            share of the targets' variance; None with too many inputs, or without numbers.
        test: Test of the equality of the clients' outcomes, such as the log-rank test, as plain values; None without one.
    """

    rows: list[dict[str, Any]]
    pooled: dict[str, Any]
    between: dict[str, float]
    label_between: float | None
    label_unexplained: float | None
    test: dict[str, Any] | None = None

    def compared(self, found: Mapping[str, Any]) -> SiteDifferences:
        """Return the same with a comparison of the clients' outcomes.

        Args:
            found: Result of ``Task.compare_clients``.
        """
        if not found:
            return self
        rows = [{**row, **own} for row, own in zip(self.rows, found["rows"], strict=True)]
        return replace(self, rows=rows, pooled={**self.pooled, **found["pooled"]}, test=found["test"])


def site_differences(
    federation: Federation, measured: Sequence[int] = (), features: Sequence[str] = ()
) -> SiteDifferences:
    """Compare each client of a federation with all clients together.

    The shift of a number is the mean of the client minus that of all clients, divided by the standard deviation over all
    samples. The shift of categories, and of classes, is their total variation distance. Missing values do not count.

    Args:
        federation: Data of all clients.
        measured: Clients to list if there are too many for a table, or if they are loaded one by one.
        features: Input columns in order, if the user chose them.
    """
    every = isinstance(federation.clients, ArrayClients) and len(federation.clients) <= MANY
    ids = list(range(len(federation.clients)) if every else measured)
    names, counts, center = input_columns(federation, features)
    wide = sum(count or 1 for count in counts) > WIDEST
    skipped = wide and not names
    n, gram = np.zeros(len(ids)), np.zeros(())
    ys, sums, squares = [], [], []  # targets; sums of 1, the inputs and the targets
    for i, k in enumerate(ids):
        client = federation.clients[k]
        ys.append(torch.cat([client.y, client.y_test]))
        t = federation.objective.distribution(ys[-1], federation.classes).numpy()
        x = np.zeros((len(t), 0)) if skipped else input_values(torch.cat([client.x, client.x_test]), counts, center)
        values = np.column_stack([np.ones(len(t)), x, t])
        n[i], inputs = len(t), 1 + x.shape[1]
        sums.append(values.sum(0))
        squares.append(np.square(values).sum(0))
        gram = gram if wide else gram + values.T @ values
    mean, total = np.stack(sums) / n[:, None].clip(1), np.stack(squares)
    absent = np.zeros((len(ids), len(names))) if federation.missing is None else federation.missing[ids]
    rows, everyone = site_rows(federation, ids, names, counts, n, absent, mean, total, inputs)
    found = SiteDifferences(rows, everyone, {}, None, None).compared(federation.objective.compare_clients(ys))
    if inputs == mean.shape[1]:
        return found
    pooled = n @ mean / n.sum()
    scatter = total.sum(0)[inputs:] - n.sum() * pooled[inputs:] ** 2
    between = n @ np.square(mean - pooled)[:, inputs:]
    shares = dict(zip(federation.names, (between / scatter.clip(1e-300)).tolist(), strict=True))
    label = share_between(between.sum(), scatter.sum(), scatter.sum(), n.sum(), len(n))
    if wide:
        return replace(found, between=shares, label_between=label)
    # Residuals of least squares are linear in the values, so that their sums follow from those of the values.
    beta = linear_model(gram[:inputs])
    residual = mean[:, inputs:] - mean[:, :inputs] @ beta
    left = np.trace(gram[inputs:, inputs:]) - (beta * gram[:inputs, inputs:]).sum()
    unexplained = share_between(n @ np.square(residual).sum(1), left, scatter.sum(), n.sum(), len(n), inputs)
    return replace(found, between=shares, label_between=label, label_unexplained=unexplained)


def site_rows(
    federation: Federation,
    ids: Sequence[int],
    names: Sequence[str],
    codes: Sequence[int],
    n: np.ndarray,
    absent: np.ndarray | None,
    mean: np.ndarray,
    squares: np.ndarray,
    inputs: int,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of ``SiteDifferences`` and the row of all clients together.

    Args:
        federation: Data of all clients; only their number, names and kind are used.
        ids: Clients of the rows.
        names: Names of the input columns; empty if they have none.
        codes: Number of codes of each column, 0 for a number; empty if their sums are not known.
        n: Samples of each client, ``[K]``.
        absent: Missing values in each named column, ``[K, f]``; None if they are not known.
        mean: Mean of 1, the inputs and the targets of each client, ``[K, 1 + F + T]``; no targets if they are not known.
        squares: Sums of their squares, ``[K, 1 + F + T]``.
        inputs: ``1 + F``.
    """
    outcomes, moved = _outcomes(federation, n, mean[:, inputs:], squares[:, inputs:])
    there = np.zeros((len(ids), len(names))) if absent is None else absent
    shifts = moved | _input_shifts(names, codes, n, there, mean[:, 1:inputs], squares[:, 1:inputs].sum(0))
    rows = []
    for i, k in enumerate(ids):
        own = [(name, float(of[i])) for name, of in shifts.items() if np.isfinite(of[i])]
        missing = {name: float(count / n[i]) for name, count in zip(names, there[i], strict=True) if count}
        row = {"client": federation.client_label(k), "rows": int(n[i]), **outcomes[i]}
        share = None if absent is None else sum(missing.values()) / max(1, len(names))
        row |= {"missing": share, "missing_columns": missing}
        rows.append({**row, "shifts": sorted(own, key=lambda shift: -abs(shift[1]))[:LISTED]})
    total = None if absent is None else float(there.sum() / max(1.0, n.sum() * len(names)))
    return rows, {"rows": int(n.sum()), **outcomes[-1], "missing": total}


def linear_model(products: np.ndarray) -> np.ndarray:
    """Return the coefficients ``[1 + F, T]`` of least squares of the targets on 1 and the inputs.

    Args:
        products: Products of 1 and the inputs with 1, the inputs and the targets, ``[1 + F, 1 + F + T]``.
    """
    inputs = len(products)
    scale = np.sqrt(np.diag(products[:, :inputs]).clip(1e-300))
    scaled = products[:, :inputs] / np.outer(scale, scale)
    try:
        inverse = np.linalg.pinv(scaled, rcond=1e-9, hermitian=True)
    except np.linalg.LinAlgError:  # sums that no rows can have
        inverse = np.zeros_like(scaled)
    return np.asarray(inverse @ (products[:, inputs:] / scale[:, None]) / scale[:, None])


@dataclass(frozen=True)
class LabelVariance(Statistic):
    """``label_between`` and ``label_unexplained`` of ``SiteDifferences``, from sums over the clients.

    Attributes:
        codes: Number of codes of each input column, 0 for a number; empty if the inputs are not used.
        center: Number to subtract from each column.
        targets: Number of targets, or of classes.
    """

    codes: tuple[int, ...]
    center: np.ndarray
    targets: int

    def first(self) -> list[SumRequest]:
        """Return the request for the products of inputs and targets."""
        return [SumRequest("label_products", *self._constants())]

    def second(self, first: Sequence[Sums]) -> list[SumRequest]:
        """Return the request for distances from the mean and from the linear model."""
        products = first[0]["products"].numpy()
        mean = torch.from_numpy(products[0, len(products) :] / max(1.0, products[0, 0]))
        args, tensors = self._constants()
        model = torch.from_numpy(linear_model(products))
        return [SumRequest("label_scatter", args, {**tensors, "mean": mean, "coefficients": model})]

    def metrics(self, first: Sequence[Sums], second: Sequence[Sums]) -> Metrics:
        """Return both shares."""
        products, squares = first[0]["products"].numpy(), first[0]["squares"].numpy()
        inputs, rows = len(products), float(products[0, 0])
        clients = float(first[0]["clients"])
        if not clients:
            return {"label_between": None, "label_unexplained": None}
        between, residual = second[0]["scatter"].tolist()
        scatter = float((squares - products[0, inputs:] ** 2 / max(1.0, rows)).sum())
        left = float(squares.sum() - (linear_model(products) * products[:, inputs:]).sum())
        return {
            "label_between": share_between(between, scatter, scatter, rows, clients),
            "label_unexplained": share_between(residual, left, scatter, rows, clients, inputs) if self.codes else None,
        }

    def _constants(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"codes": [*self.codes], "targets": self.targets}, {"center": torch.from_numpy(self.center)}


def input_columns(federation: Federation, features: Sequence[str]) -> tuple[list[str], list[int], np.ndarray]:
    """Return the name of each input of a table, its number of codes (0 for a number), and the number to subtract.

    Args:
        federation: Data of all clients; only the kind of the inputs is used.
        features: Input columns in order, if the user chose them.
    """
    shape, encoders = federation.shape, federation.encoders
    if federation.objective.tokens or federation.test[0].dtype == torch.int64:
        return [], [WIDEST + 1], np.zeros(1)
    width = int(np.prod(shape))
    if encoders:
        # Imputed values are the mean in float32. With it subtracted, they do not count in sums.
        center = np.array([encoder.mean for encoder in encoders], np.float32).astype(float)
        return [encoder.name for encoder in encoders], list(category_counts(encoders))[: len(encoders)], center
    chosen = features or [name for name, role in federation.columns.items() if role.startswith(INPUT)]
    named = list(chosen) if len(chosen) == width else [f"input {j}" for j in range(width)]
    known = federation.normalization
    center = np.zeros(width) if len(shape) > 1 or known is None else np.array(known.mean) / known.scale
    return named if len(shape) == 1 else [], [0] * width, center


def _input_shifts(
    names: Sequence[str], counts: Sequence[int], n: np.ndarray, absent: np.ndarray, mean: np.ndarray, total: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the shift of each column at each client, ``[K]``; NaN where a client has no value."""
    shifts, start = {}, 0
    for j, (name, count) in enumerate(zip(names, counts, strict=False)):
        there = n - absent[:, j]
        with np.errstate(divide="ignore", invalid="ignore"):
            if count:  # code 0 marks a missing value
                codes = mean[:, start + 1 : start + count] * n[:, None]
                shifts[name] = 0.5 * np.abs(codes / there[:, None] - codes.sum(0) / there.sum()).sum(1)
            else:
                sums = mean[:, start] * n
                center = sums.sum() / there.sum()
                std = np.sqrt(total[start] / there.sum() - center**2)
                shifts[name] = (sums / there - center) / std
        start += count or 1
    return shifts


def _outcomes(
    federation: Federation, n: np.ndarray, mean: np.ndarray, squares: np.ndarray
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the outcome of each client and of all clients, and the shift of the label at each client, by its name.

    Args:
        federation: Data of all clients.
        n: Samples of each client, ``[K]``.
        mean: Mean targets of each client, ``[K, C]``.
        squares: Sums of their squares, ``[K, C]``.
    """
    task, names = federation.objective, federation.names
    pooled = n @ mean / n.sum()
    title = next((name for name, role in federation.columns.items() if role == LABEL), "label")
    if not mean.shape[1]:
        return [{} for _ in range(len(n) + 1)], {}
    if task.outcome:
        share, everyone = mean.sum(1), float(pooled.sum())
        of_all = [{"outcome": task.outcome, "share": value} for value in (*share.tolist(), everyone)]
        return of_all, {task.outcome: share - everyone}
    if "counts" not in task.provides:
        means, scatter = np.vstack([mean, pooled]), np.vstack([squares, squares.sum(0)])
        stds = np.sqrt((scatter / np.append(n, n.sum())[:, None].clip(1) - means**2).clip(0))
        unit = task.std[0] if task.std else 1.0
        in_units = task.truth(torch.from_numpy(means)).reshape(len(means), -1)[:, 0].tolist()
        outcomes: list[dict[str, Any]] = [
            {"outcome": names[0], "mean": m, "std": float(std * unit)}
            for m, std in zip(in_units, stds[:, 0], strict=True)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            return outcomes, dict(zip(names, ((mean - pooled) / stds[-1]).T, strict=True))
    # Of two classes the rarer one is shown, of several the most frequent one at each client.
    largest = [int(share.argmax()) for share in (*mean, pooled)]
    shown = largest if len(pooled) > 2 else [1 - largest[-1]] * len(largest)
    outcomes = [
        {"outcome": f"{title} = {names[c]}", "share": float(share[c])}
        for c, share in zip(shown, (*mean, pooled), strict=True)
    ]
    return outcomes, {title: np.abs(mean - pooled).sum(1) / (2 if "one_class" in task.provides else len(pooled))}
