"""Sums over held-out samples that give the metrics of a model, without predictions or metrics of single clients."""

from __future__ import annotations

import numpy as np
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, Shapes, SumKind, SumRequest, Sums
from unskew.tasks.cells import CELLS, count_cells

TALLIES = 3
"""Number of sums of every task: predictions, correct ones, and losses."""


class Scores(SumKind):
    """Tallies of a model's predictions on held-out rows; of a classifier, also confusions and cells of probability."""

    name = "scores"
    scores_model = True

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands.

        Args:
            rows: Rows of the client.
            request: Request with the arguments ``classes``, 0 for other tasks, and ``tally``, the length of the task's tally;
                if the task has ``held_out_sums``, also their sizes ``table`` and ``further``;
                its tensors are the model ``v [d]`` and the buffers ``b [m]``.

        Raises:
            DataError: If there is no model.
        """
        if rows.score is None or {*request.tensors} != {"v", "b"}:
            raise DataError("The request for scores has no model, or the model is not known here yet.")
        found, classes = rows.score(request.tensors["v"], request.tensors["b"]), int(request.args["classes"])
        y, p = (found.y, found.p) if classes else (np.zeros(0, np.int64), np.zeros((0, 0)))
        pairs = y * classes + found.decided if classes else y
        squares = np.stack([p.sum(0), ((p - np.eye(classes)[y]) ** 2).sum(0)], 1)
        own = {"table": torch.from_numpy(found.table), "further": torch.from_numpy(found.further)}
        return {
            **(own if "table" in request.args else {}),
            "sums": found.sums,
            "cells": torch.from_numpy(count_cells(p, y)),
            "confusion": torch.from_numpy(np.bincount(pairs, minlength=classes**2).reshape(classes, classes)),
            "probabilities": torch.from_numpy(squares.astype(np.float64)),
        }

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        classes, own = int(request.args["classes"]), {}
        if "table" in request.args:
            own = {"table": (torch.int64, tuple(map(int, request.args["table"])))}
            own |= {"further": (torch.float64, (int(request.args["further"]),))}
        return {
            **own,
            "sums": (torch.float64, (TALLIES + int(request.args["tally"]),)),
            "cells": (torch.int64, (classes, CELLS, 2)),
            "confusion": (torch.int64, (classes, classes)),
            "probabilities": (torch.float64, (classes, 2)),
        }

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        if "table" in request.args:
            cells = " x ".join(map(str, request.args["table"]))
            sums = f"{request.args['further']} sums"
            return f"of the model's predictions: tallies, numbers of samples in {cells} cells, and {sums}"
        return (
            f"of the model's predictions: tallies, confusion matrix, numbers of samples in {CELLS} cells of probability"
        )
