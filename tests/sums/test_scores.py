"""Sums over held-out samples have the shapes that the request says, and need a model."""

import numpy as np
import pytest
import torch

from unskew.errors import DataError
from unskew.sums.base import ClientRows, HeldOutScores, SumRequest
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.registry import SUMS

MODEL = {"v": torch.zeros(3), "b": torch.zeros(0)}
KIND = SUMS["scores"]


def rows(p, y):
    p, y = np.array(p), np.array(y, dtype=np.int64)
    sums = torch.tensor([len(y), float((p.argmax(1) == y).sum()), 0.5, 7.0], dtype=torch.float64)
    return ClientRows(score=lambda v, b: HeldOutScores(sums, p, y, p.argmax(1)))


def test_sums_of_clients_are_those_of_all_their_rows():
    request = SumRequest("scores", {"classes": 2, "tally": 1}, MODEL)
    one, other = rows([[0.2, 0.8], [0.9, 0.1]], [1, 1]), rows([[0.6, 0.4]], [0])
    (found,) = SimulatedExchange(lambda: [one, other])([request])
    KIND.check(request, found)
    assert found["sums"].tolist() == [3.0, 2.0, 1.0, 14.0]
    assert found["confusion"].tolist() == [[1, 0], [1, 1]]
    assert found["probabilities"][:, 0].tolist() == pytest.approx([1.7, 1.3])
    assert found["probabilities"][1].tolist()[1] == pytest.approx(0.2**2 + 0.9**2 + 0.4**2)
    assert found["cells"].sum(1).tolist() == [[1, 2], [2, 1]]


def test_a_task_without_classes_has_tallies_only():
    request = SumRequest("scores", {"classes": 0, "tally": 1}, MODEL)
    found = KIND.compute(rows([[0.5, 0.5]], [0]), request)
    KIND.check(request, found)
    assert found["cells"].numel() == found["confusion"].numel() == 0
    assert found["sums"][3] == 7


def test_a_request_without_a_model_is_rejected():
    request = SumRequest("scores", {"classes": 2, "tally": 1})
    with pytest.raises(DataError, match="no model"):
        KIND.compute(rows([[0.5, 0.5]], [0]), request)
    with pytest.raises(DataError, match="not known here"):
        KIND.compute(ClientRows(), SumRequest("scores", request.args, MODEL))
