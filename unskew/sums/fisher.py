"""Score and information of a logistic regression or of proportional hazards, for coefficients by Newton's method.

Hazards are constant in bins (Friedman 1982, Annals of Statistics 10): the log hazard of row ``i`` in bin ``j`` is
``o_j + b_j + w x_i``, so that the likelihood is that of a Poisson regression with the time in the bin as exposure.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError
from unskew.sums.base import FREE, ClientRows, Shapes, SumKind, SumRequest, Sums
from unskew.sums.skew import input_values

LARGEST_LOG = 700.0
"""Largest log hazard, whose exponential is finite."""


def fisher_sums(x: np.ndarray, y: np.ndarray, beta: np.ndarray) -> dict[str, Tensor]:
    """Compute the sums of a logistic regression over the rows of a client.

    Args:
        x: Columns, the first one of ones, float64 ``[n, p]``.
        y: Whether each row is an event, ``[n]``.
        beta: Coefficients, ``[p]``.
    """
    logits = x @ beta
    p = np.exp(-np.logaddexp(0, -logits))
    weighted = x * (p * np.exp(-np.logaddexp(0, logits)))[:, None]
    return {
        "score": torch.from_numpy(x.T @ (y - p)),
        "information": torch.from_numpy(x.T @ weighted),
        "log_likelihood": torch.tensor(y @ logits - np.logaddexp(0, logits).sum(), dtype=torch.float64),
        "counts": torch.tensor([len(y), y.sum()]),
    }


def hazard_means(
    x: np.ndarray, time: np.ndarray, cuts: np.ndarray, offsets: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log hazards of rows in each bin, and the expected numbers of events, ``[n, J]`` each.

    Args:
        x: Columns, ``[n, p]``.
        time: Times, ``[n]``.
        cuts: Upper ends of the bins, ``[J]``.
        offsets: Offset of the log hazard in each bin, ``[J]``.
        beta: Change of each offset, and coefficients of the columns, ``[J + p]``.
    """
    low = np.append(0, cuts[:-1])
    hazards = np.minimum(offsets + beta[: len(cuts)] + (x @ beta[len(cuts) :])[:, None], LARGEST_LOG)
    return hazards, np.maximum(np.minimum(time[:, None], cuts) - low, 0) * np.exp(hazards)


def hazard_sums(
    x: np.ndarray, time: np.ndarray, event: np.ndarray, cuts: np.ndarray, offsets: np.ndarray, beta: np.ndarray
) -> dict[str, Tensor]:
    """Compute the sums of proportional hazards over the rows of a client.

    Args:
        x: Columns, float64 ``[n, p]``.
        time: Times, ``[n]``.
        event: Whether the event occurred at this time, bool ``[n]``.
        cuts: Upper ends of the bins, ``[J]``; later times are censored at the last one.
        offsets: Offset of the log hazard in each bin, ``[J]``.
        beta: Change of each offset, and coefficients of the columns, ``[J + p]``.
    """
    hazards, means = hazard_means(x, time, cuts, offsets, beta)
    occurred = event & (time <= cuts[-1])
    events = (np.searchsorted(cuts, time)[:, None] == np.arange(len(cuts))) & occurred[:, None]
    residuals, cross = events - means, means.T @ x
    information = np.block([[np.diag(means.sum(0)), cross], [cross.T, x.T @ (x * means.sum(1)[:, None])]])
    return {
        "score": torch.from_numpy(np.concatenate([residuals.sum(0), x.T @ residuals.sum(1)])),
        "information": torch.from_numpy(information),
        "log_likelihood": torch.tensor(hazards[events].sum() - means.sum(), dtype=torch.float64),
        "counts": torch.tensor([len(time), int(occurred.sum())]),
    }


def hazard_rows(rows: ClientRows, request: SumRequest) -> tuple[np.ndarray, ...]:
    """Return the arguments of ``hazard_sums`` for a client (raises ``DataError`` if its inputs are others).

    Args:
        rows: Training rows of the client.
        request: Request of the kind ``fisher`` with cut points.
    """
    cuts = request.tensor("cuts", FREE).numpy()
    x, y, codes = rows.x, rows.y, [*map(int, request.args["codes"])]
    if x is None or y is None or y.dim() != 2 or y.shape[1] != 2 or x[:1].numel() != len(codes):
        raise DataError("The request for coefficients is for other inputs than these data have.")
    kept, center = np.array(request.args["kept"], bool), request.tensor("center", len(codes)).numpy()
    offsets, beta = request.tensor("offsets", len(cuts)).numpy(), request.tensor("beta", len(cuts) + int(kept.sum()))
    time, event = y.cpu().to(torch.float64).numpy().T
    return input_values(x.cpu(), codes, center)[:, kept], time, event > 0, cuts, offsets, beta.numpy()


def design_rows(rows: ClientRows, request: SumRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of ``fisher_sums`` for a client (raises ``DataError`` if its inputs are others).

    Args:
        rows: Training rows of the client.
        request: Request of the kind ``fisher``.
    """
    args, x, y = request.args, rows.x, rows.y
    codes, kept = [*map(int, args["codes"])], np.array([True, *args["kept"]], bool)
    if x is None or y is None or y.dim() != 1 or x[:1].numel() != len(codes):
        raise DataError("The request for coefficients is for other inputs than these data have.")
    center, beta = request.tensor("center", len(codes)).numpy(), request.tensor("beta", int(kept.sum())).numpy()
    columns = np.column_stack([np.ones(len(y)), input_values(x.cpu(), codes, center)])[:, kept]
    return columns, y.cpu().numpy() == int(args["event"]), beta


def effective_rows(rows: ClientRows, request: SumRequest) -> float:
    """Return the effective number ``(sum w)^2 / sum w^2`` of rows in the information.

    ``w`` of a row is ``p (1 - p)``, or the expected number of events.

    Args:
        rows: Training rows of the client.
        request: Request of the kind ``fisher``.
    """
    if "cuts" in request.tensors:
        x, time, _, *bins = hazard_rows(rows, request)
        return fewest_rows(hazard_means(x, time, *bins)[1].sum(1, keepdims=True))
    columns, _, beta = design_rows(rows, request)
    logits = columns @ beta
    return fewest_rows(np.exp(-np.logaddexp(0, -logits) - np.logaddexp(0, logits))[:, None])


def fewest_rows(weights: np.ndarray) -> float:
    """Return the smallest effective number of rows in a column of weights; columns of zeros reveal nothing.

    Args:
        weights: Weights, ``[n, J]``.

    >>> fewest_rows(np.array([[1.0, 0, 1e200], [1.0, 0, 1e200], [0, 0, 1e200]]))
    2.0
    """
    used = weights[:, weights.any(0)]
    used = used / used.max(0, initial=0)  # squares of the largest and smallest weights are not representable
    return float((used.sum(0) ** 2 / np.square(used).sum(0)).min(initial=np.inf))


class Fisher(SumKind):
    """Score, information and log-likelihood at given coefficients, rows and events.

    With the tensor ``cuts``, the model is that of proportional hazards, otherwise a logistic regression.
    """

    name = "fisher"

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        if "cuts" in request.tensors:
            return hazard_sums(*hazard_rows(rows, request))
        return fisher_sums(*design_rows(rows, request))

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        p = num_coefficients(request)
        real = torch.float64
        sums = {"score": (real, (p,)), "information": (real, (p, p)), "log_likelihood": (real, ())}
        return {**sums, "counts": (torch.int64, (2,))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        model = "proportional hazards" if "cuts" in request.tensors else "a logistic regression"
        return f"score and information of {model} with {num_coefficients(request)} coefficients"


def num_coefficients(request: SumRequest) -> int:
    """Return the number of coefficients of a request, including those of the intercept or of the bins."""
    return len(request.tensors.get("cuts", (0,))) + sum(map(bool, request.args["kept"]))
