"""What a task says of single samples is what it says of batches of one."""

import pytest
import torch
from support.survival_sums import fitted
from support.tolerance import FEW, assert_close

from unskew.tasks.registry import TASKS

DRAWS = torch.Generator().manual_seed(0)
CASES = {
    "classification": (torch.randn(7, 4, generator=DRAWS), torch.randint(0, 4, (7,), generator=DRAWS)),
    "multilabel": (torch.randn(7, 4, generator=DRAWS), torch.randint(0, 2, (7, 4), generator=DRAWS)),
    "regression": (torch.randn(7, 2, generator=DRAWS), torch.randn(7, 2, generator=DRAWS)),
    "language": (torch.randn(7, 5, 9, generator=DRAWS), torch.randint(-1, 9, (7, 5), generator=DRAWS)),
    "survival": (
        torch.randn(7, 3, generator=DRAWS),
        torch.tensor([[1.0, 1], [2, 0], [3, 1], [4, 1], [5, 0], [6, 1], [7, 1]]),
    ),
}
FITTED = {"survival": fitted(CASES["survival"][1], bins=3)}


@pytest.mark.parametrize("name", list(TASKS))
def test_the_loss_of_each_sample_is_that_of_a_batch_of_one(name):
    logits, y = CASES[name]
    task = FITTED.get(name, TASKS[name])
    logits = logits.double()
    if name == "language":
        y[0] = -1  # a text without any target
    losses = task.losses(logits, y)
    assert_close(losses, torch.stack([task.loss(logits[i : i + 1], y[i : i + 1]) for i in range(7)]), FEW)
    asked = task.predictions(y)
    assert_close((losses * asked).sum() / asked.sum(), task.loss(logits, y), FEW)
