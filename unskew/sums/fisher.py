"""Score and information of a logistic regression, from which Newton's method computes its coefficients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError
from unskew.sums.base import ClientRows, Shapes, SumKind, SumRequest, Sums
from unskew.sums.skew import input_values


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
    """Return the effective number ``(sum w)^2 / sum w^2`` of rows in the information, with ``w = p (1 - p)`` of each row.

    Args:
        rows: Training rows of the client.
        request: Request of the kind ``fisher``.
    """
    columns, _, beta = design_rows(rows, request)
    logits = columns @ beta
    weights = np.exp(-np.logaddexp(0, -logits) - np.logaddexp(0, logits))
    return float(weights.sum() ** 2 / max(np.square(weights).sum(), 1e-300))


class Fisher(SumKind):
    """Score, information and log-likelihood of a logistic regression at given coefficients, rows and events."""

    name = "fisher"

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        return fisher_sums(*design_rows(rows, request))

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        p = 1 + sum(map(bool, request.args["kept"]))
        real = torch.float64
        sums = {"score": (real, (p,)), "information": (real, (p, p)), "log_likelihood": (real, ())}
        return {**sums, "counts": (torch.int64, (2,))}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"score and information of a logistic regression with {1 + sum(request.args['kept'])} coefficients"
