"""Logistic regression with shuffled data and noisy gradients: Appendix A.3.1 of Fedssyn, as one tensor program.

Li et al. 2023, arXiv:2306.13263. Ten workers hold as many images each, drawn iid or one class each, and minimize
``f_i(x) = -(1/n_i) sum_j (1/C) sum_k b_ijk log softmax(A_i x)_jk`` (the paper leaves out the sign) over ``x`` of shape
``[d, C]``, without bias. A share ``p`` of each worker's images is pooled, permuted and dealt out again; ``n_i`` stays. An
epoch is one step with the whole data set and noise on every entry of the gradient::

    y <- y - eta (grad f_i(y) + s),    s ~ N(0, noise / d)

``E`` epochs make a round. The paper does not give ``eta``, the noise, the shares and the rounds; ``eta`` is tuned here. The
loss on the test set is measured, without the factor ``1/C``. All workers, shares and step sizes take a step together.

With ``E = 1`` the average of the workers' steps is a step on all data together, wherever these are: shuffling cannot matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from unskew.comparison.summary_statistics import mean_std
from unskew.data.readers.tables import Source
from unskew.data.sources.registry import load_source
from unskew.errors import DataError
from unskew.plots.figure import new_figure, save_figure, set_round_axis
from unskew.reproduction.study import ByPart, Line
from unskew.seeding import derive, generator

Whole = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
SPLITS = {"iid": "iid", "class": "one class each"}


def worker_data(x: Tensor, y: Tensor, classes: int, each: int, how: str, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ``each`` samples of every class, and return the workers' inputs ``[C, each, d]`` and labels ``[C, each]``.

    Args:
        x: Inputs, ``[n, d]``.
        y: Labels, ``[n]``.
        classes: Number of classes ``C``, and of workers.
        each: Samples of every class, and of every worker.
        how: ``class``: worker ``c`` holds class ``c``; ``iid``: the samples are shuffled and divided equally.
        seed: Random seed of the drawn samples.

    Raises:
        DataError: If a class has fewer samples.
    """
    draws = generator(seed, "logistic split")
    members = []
    for c in range(classes):
        rows = torch.nonzero(y == c)[:, 0]
        if len(rows) < each:
            raise DataError(f"Class {c} has {len(rows)} training samples; the experiment needs {each} of each class.")
        members.append(rows[torch.randperm(len(rows), generator=draws)[:each]])
    order = torch.cat(members)
    if how == "iid":
        order = order[torch.randperm(len(order), generator=draws)]
    return x[order].view(classes, each, -1), y[order].view(classes, each)


def shuffle_shares(x: Tensor, y: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
    """Shuffle a share ``p`` of each worker's samples among the workers, and return inputs and labels in the same shape.

    Args:
        x: Inputs of each worker, ``[K, n, d]``.
        y: Labels of each worker, ``[K, n]``.
        p: Share of samples that are pooled, permuted and dealt out again.
        seed: Seed of the run.
    """
    draws = generator(seed, "logistic shuffle")
    workers, each = y.shape
    pooled = math.floor(p * each + 1e-9)
    order = torch.argsort(torch.rand(workers, each, generator=draws), dim=1)
    index = order + each * torch.arange(workers)[:, None]
    pool = torch.randperm(workers * pooled, generator=draws)
    index[:, :pooled] = index[:, :pooled].reshape(-1)[pool].view(workers, pooled)
    return x.reshape(-1, x.shape[-1])[index], y.reshape(-1)[index]


def train(
    x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], steps: Tensor, epochs: int, rounds: int, noise: float, seed: int
) -> Tensor:
    """Train with ``P`` shares and ``G`` step sizes at the same time, and return the test losses, ``[rounds, P, G]``.

    Args:
        x: Inputs of each share's workers, ``[P, n, m, d]``.
        y: Labels of the inputs, ``[P, n, m]``.
        test: Inputs ``[t, d]`` and labels ``[t]``.
        steps: Step sizes ``eta``, ``[G]``.
        epochs: Steps per round, ``E``.
        rounds: Communication rounds.
        noise: Variance of the gradient noise, over all inputs of a class.
        seed: Random seed of the noise, which is the same for all shares and step sizes.
    """
    (shares, workers, m, d), G = x.shape, len(steps)
    classes = int(test[1].max()) + 1
    targets = F.one_hot(y, classes).to(x.dtype)[:, :, :, None]
    server = x.new_zeros(shares, d, G, classes)
    eta = steps.to(x.dtype)[:, None]
    draws = torch.Generator().manual_seed(derive(seed, "logistic noise"))
    losses = torch.empty(rounds, shares, G, dtype=torch.float64)
    for t in range(rounds):
        local = server[:, None].expand(-1, workers, -1, -1, -1)
        for _ in range(epochs):
            logits = (x @ local.reshape(shares, workers, d, G * classes)).view(shares, workers, m, G, classes)
            residuals = (torch.softmax(logits, -1) - targets).view(shares, workers, m, G * classes)
            gradient = (x.transpose(2, 3) @ residuals).view(shares, workers, d, G, classes) / (m * classes)
            if noise:
                s = torch.randn(workers, d, 1, classes, generator=draws, dtype=x.dtype) * math.sqrt(noise / d)
                gradient = gradient + s
            local = local - eta * gradient
        server = local.mean(1)
        logits = (test[0] @ server.reshape(shares, d, G * classes)).view(shares, -1, G, classes)
        log_share = torch.log_softmax(logits, -1).gather(3, test[1][None, :, None, None].expand(shares, -1, G, 1))
        losses[t] = -log_share[..., 0].to(torch.float64).mean(1)
    return losses


@dataclass(frozen=True)
class LogisticStudy:
    """Experiment with logistic regression: test losses by share of shuffled samples.

    Attributes:
        data: Data set of images.
        per_class: Training images of every class. There are as many workers as classes, each with this many images.
        shares: Shares ``p`` of each worker's images that are shuffled among the workers.
        epochs: Values of ``E``, the steps per round.
        noise: Variances of the gradient noise, summed over the inputs.
        steps: Step sizes; for each share, the one with the lowest last test loss is reported.
        rounds: Communication rounds.
    """

    data: str = "mnist"
    per_class: Whole = 1024
    shares: tuple[Share, ...] = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
    epochs: tuple[Whole, ...] = (1, 5)
    noise: tuple[Annotated[float, Field(ge=0)], ...] = (0.0, 0.1)
    steps: tuple[Positive, ...] = (0.01, 0.1, 1.0)
    rounds: Whole = 100
    _source: list[Source] = field(default_factory=list, init=False, compare=False)

    def parts(self) -> list[str]:
        """Return the names of the parts: each combination of split, epochs and noise."""
        return [f"{SPLITS[how]}, E = {e}, noise {s:g}" for how in SPLITS for e in self.epochs for s in self.noise]

    def prepare(self, data_path: str | None) -> None:
        """Load the data."""
        self._source[:] = [load_source(self.data, path=data_path)]

    def run(self, part: str, seed: int) -> dict[str, Any]:
        """Run one part and return the test losses of every share with its best step size.

        Args:
            part: Name of the part.
            seed: Seed of the run.
        """
        settings = [(how, e, s) for how in SPLITS for e in self.epochs for s in self.noise]
        how, epochs, noise = settings[self.parts().index(part)]
        source = self._source[0]
        scale = 1 / 255 if source.train.x.dtype == torch.uint8 else 1.0
        x, y = worker_data(source.train.x.flatten(1) * scale, source.train.y, source.classes, self.per_class, how, seed)
        pairs = [shuffle_shares(x, y, p, seed) for p in self.shares]
        stacked = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
        test = source.test.x.flatten(1) * scale, source.test.y
        losses = train(*stacked, test, torch.tensor(self.steps), epochs, self.rounds, noise, seed)
        last = torch.nan_to_num(losses[-1], nan=math.inf)
        best = last.argmin(1)
        return {
            "shares": list(self.shares),
            "step": [self.steps[i] for i in best.tolist()],
            "loss": [round(v, 6) for v in last.min(1).values.tolist()],
            "losses": [[round(v, 5) for v in losses[:, row, i].tolist()] for row, i in enumerate(best.tolist())],
        }

    def lines(self, by_part: ByPart) -> list[Line]:
        """Return a table of the last test loss of every share, with one row per part."""
        rows = []
        for part, outcomes in by_part.items():
            columns = zip(*(o["summary"]["loss"] for o in outcomes.values()), strict=True)
            steps = "; ".join(f"{e:g}" for e in next(iter(outcomes.values()))["summary"]["step"])
            rows.append([part, *(_with_spread(column) for column in columns), steps])
        if not rows:
            return []
        seeds = ", ".join(map(str, next(iter(by_part.values()))))
        title = f"Test loss after {self.rounds} rounds, {self.data}, best step size of each p; seeds {seeds}"
        return [(title, ["", *(f"p = {p:g}" for p in self.shares), f"steps of seed {seeds.split(',')[0]}"], rows)]

    def draw(self, by_part: ByPart, path: Path) -> Path:
        """Draw one panel per part: test loss against rounds, with one line per share.

        Args:
            by_part: Outcomes of each part.
            path: File to write.
        """
        wide = min(4, max(1, len(by_part)))
        high = -(-max(1, len(by_part)) // wide)
        figure, axes = new_figure(4 * wide, 3.3 * high, wide, high)
        for (part, outcomes), axis in zip(by_part.items(), axes.ravel(), strict=False):
            for row, p in enumerate(self.shares):
                curves = np.array([o["summary"]["losses"][row] for o in outcomes.values()])
                axis.plot(range(1, curves.shape[1] + 1), curves.mean(0), color=f"C{row}", label=f"p = {p:g}")
                if len(curves) > 1:
                    low, top = curves.mean(0) - curves.std(0, ddof=1), curves.mean(0) + curves.std(0, ddof=1)
                    axis.fill_between(range(1, curves.shape[1] + 1), low, top, color=f"C{row}", alpha=0.15, linewidth=0)
            axis.set_title(part, fontsize=9)
            set_round_axis(axis)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("test loss")
        axes[0][0].legend(frameon=False, fontsize=7)
        return save_figure(figure, path)


def _with_spread(values: tuple[float, ...]) -> str:
    mean, std = mean_std(list(values))
    return f"{mean:.3f} ± {std:.3f}" if len(values) > 1 else f"{mean:.3f}"
