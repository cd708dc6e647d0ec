"""What a task says of single samples is what it says of batches of one."""

import pytest
import torch
from support.tolerance import FEW, assert_close

from unskew.tasks.registry import TASKS

DRAWS = torch.Generator().manual_seed(0)
CASES = {
    "classification": (torch.randn(7, 4, generator=DRAWS), torch.randint(0, 4, (7,), generator=DRAWS)),
    "multilabel": (torch.randn(7, 4, generator=DRAWS), torch.randint(0, 2, (7, 4), generator=DRAWS)),
    "regression": (torch.randn(7, 2, generator=DRAWS), torch.randn(7, 2, generator=DRAWS)),
    "segmentation": (
        torch.randn(7, 3, 4, 5, generator=DRAWS),
        torch.randint(0, 3, (7, 4, 5), generator=DRAWS).to(torch.uint8),
    ),
    "language": (torch.randn(7, 5, 9, generator=DRAWS), torch.randint(-1, 9, (7, 5), generator=DRAWS)),
}


@pytest.mark.parametrize("name", list(TASKS))
def test_the_loss_of_each_sample_is_that_of_a_batch_of_one(name):
    logits, y = CASES[name]
    logits = logits.double()
    if name == "language":
        y[0] = -1  # a text without any target
    losses = TASKS[name].losses(logits, y)
    assert_close(losses, torch.stack([TASKS[name].loss(logits[i : i + 1], y[i : i + 1]) for i in range(7)]), FEW)
    asked = TASKS[name].predictions(y)
    assert_close((losses * asked).sum() / asked.sum(), TASKS[name].loss(logits, y), FEW)
