"""A generator of synthetic images that the tests bring themselves, named as ``support.colors:Colors``."""

from typing import ClassVar

import torch


class Colors:
    """A generator of one's own: noise whose first pixel tells the client's seed, the second the class."""

    fitted: ClassVar = []

    def __init__(self, job, level=9):
        self.job, self.level = job, int(level)

    def fit(self, images, labels):
        assert images.dtype == torch.uint8
        assert images.shape[1:] == self.job.shape
        Colors.fitted.append((images, labels))
        self.job.report({"epoch": 1, "epochs": 1, "loss": 0.0})

    def sample(self, labels):
        draws = torch.Generator().manual_seed(self.job.seed % 1000)
        x = torch.randint(0, 255, (len(labels), *self.job.shape), generator=draws, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = self.job.seed % 251, labels.to(torch.uint8) * self.level
        return x
