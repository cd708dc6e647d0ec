"""Loop written by hand for one model: the remaining potential if CNN-A's forward pass is written out.

This is not a baseline for a simulator of arbitrary models, but an upper bound: the same algorithm and batches as
``speed.baselines.TunedLoop``, with arithmetic for exactly these shapes, and (``HandmadeTogether``) five clients
trained as one network of grouped convolutions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from speed.baselines import CnnA
from speed.settings import MEAN, STD

# Effective optimizations, as the share of CPU time per round that each saves if everything else is unchanged (AMD EPYC
# with AVX-512, two cores, torch 2.13, real CIFAR-10, one thread, medians of interleaved repetitions):
#
#                                                                              A        B
#   input channels-last (both input and weights NCHW otherwise)              15 %     13 %
#   malloc that keeps freed memory                                         3-12 %    0-1 %   depends on the heap
#   autograd.grad + _foreach_add_ instead of torch.optim.SGD                2-3 %   5-10 %   fused=True, foreach=True
#                                                                                            and the default are equal
#   mean and std repeated to the length of an image                           5 %      3 %   a broadcast over the last
#                                                                                            3 channels is 4x slower
#   ReLU after the pooling instead of a relu() before it                      2 %      3 %   1 % if that is in place
#   clients_per_group=5 (2: 14 % and 23 %, 10: 14 % and 39 %)            19 %     37 %   fewer, larger kernels, and
#                                                                                            enough channels for a
#                                                                                            vectorized pooling
#
# `python -m speed.speed` compares two processes of one thread with one process of two threads; the gain is larger with
# smaller batches.
#
# Tested without effect (within 1 to 2 % unless a number is given):
#
#   - weights channels-last: little gain once the input is; kept, since the vector is then in the kernels' order
#   - fc1 with its inputs channels-last, so that flattening is a view: kept for simplicity
#   - normalized float32 images in memory instead of uint8 normalized per batch: same time, four times the memory
#   - gathering, or normalizing, a whole epoch at once instead of batch by batch
#   - torch._fused_sgd_ called directly instead of torch._foreach_add_
#   - gradients as views of one flat buffer and one v.add_(g, alpha=-lr): same time, as the buffer has to be zeroed
#     and accumulated into; concatenating the gradients first: 1 to 4 % slower
#   - torch.set_flush_denormal(True); switching the garbage collector off
#   - fixed halves of the cohort instead of a shared counter: same time on an idle machine; the counter is kept for
#     busy ones. Clients have equal sizes, so there is no "largest first"
#   - two Python threads with a model each instead of two processes: 7 % slower in B (interpreter lock)
#   - torch.compile: 2 % faster in A, 3 % slower in B, 10 to 30 s to compile
#   - torch.func.vmap over five clients: 1.45 (A) and 1.15 (B) times the time of training one client after the other
#   - switching oneDNN off: twice the time
#
# Not used, because it rewrites the arithmetic for exactly these shapes: conv1 computing two neighboring pixels as 12
# channels with stride 2 (6 channels fill 6 of 16 lanes), and a first pooling made of torch.maximum over strided
# views with its own backward pass. Together (with clients_per_group=1) they save 19 % in A and nothing in B.


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks; otherwise every step maps the memory of its activations again. Process-wide."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its upper limit
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def to_vector(model: CnnA) -> torch.Tensor:
    """Return the parameters as one vector, in the memory order that is fastest for the kernels (see ``Stack``)."""
    columns = []
    for name, p in model.named_parameters():
        p = p.detach()
        if p.dim() == 4:
            p = p.permute(0, 2, 3, 1)  # channels last
        elif name == "fc1.weight":
            p = p.view(120, 16, 25).transpose(1, 2)  # also takes channels-last inputs, so that flattening is a view
        columns.append(p.reshape(-1))
    return torch.cat(columns)


class Stack:
    """``k`` copies of CNN-A side by side as one network; for ``k = 1`` plain CNN-A.

    All parameters are views of one buffer: tensor after tensor, each with its ``k`` copies in sequence.
    """

    SHAPES = ((6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,))

    def __init__(self, k: int) -> None:
        self.k = k
        self.sizes = [int(np.prod(shape)) for shape in self.SHAPES]
        self.blocks = [b.view(k, -1) for b in torch.zeros(k * sum(self.sizes)).split([k * s for s in self.sizes])]
        self.views = [self._view(b, shape) for b, shape in zip(self.blocks, self.SHAPES, strict=True)]
        self.parameters = [v.detach().requires_grad_() for v in self.views]

    def _view(self, block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 4:  # convolution: copies are groups
            out, channels, height, width = shape
            return block.view(self.k * out, height, width, channels).permute(0, 3, 1, 2)
        if len(shape) == 1 and shape[0] in (6, 16):
            return block.view(-1)
        if self.k == 1:
            return block.view(shape)
        if len(shape) == 2:
            return block.view(self.k, *shape)
        return block.view(self.k, 1, *shape)

    def load(self, vector: torch.Tensor) -> None:
        for block, piece in zip(self.blocks, vector.split(self.sizes), strict=True):
            block.copy_(piece)

    def add_to(self, vector: torch.Tensor, weight: float) -> None:
        """Add ``weight`` times each copy to ``vector``."""
        for block, piece in zip(self.blocks, vector.split(self.sizes), strict=True):
            piece.add_(block[0] if self.k == 1 else block.sum(0), alpha=weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits [k * batch, 10] from images [batch, 3k, 32, 32], channels last."""
        w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = self.parameters
        k, batch = self.k, len(x)
        x = F.max_pool2d(F.conv2d(x, w1, b1, groups=k), 2).relu_()
        x = F.max_pool2d(F.conv2d(x, w2, b2, groups=k), 2).relu_()
        x = x.permute(0, 2, 3, 1)
        if k == 1:
            x = x.reshape(batch, 400)
            x = F.linear(x, w3, b3).relu_()
            x = F.linear(x, w4, b4).relu_()
            return F.linear(x, w5, b5)
        x = x.reshape(batch, 25, k, 16).permute(2, 0, 1, 3).reshape(k, batch, 400)
        x = torch.baddbmm(b3, x, w3.transpose(1, 2)).relu_()
        x = torch.baddbmm(b4, x, w4.transpose(1, 2)).relu_()
        return torch.baddbmm(b5, x, w5.transpose(1, 2)).view(k * batch, 10)

    def step(self, x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
        """Take one step of SGD on the mean loss of each copy's batch."""
        loss = F.cross_entropy(self.logits(x), y, reduction="sum")
        gradients = torch.autograd.grad(loss, self.parameters)
        torch._foreach_add_(self.views, gradients, alpha=-lr / len(x))


class HandmadeTrainer:
    """Local training of up to ``clients_per_group`` clients at a time, from images stored as uint8.

    Groups are possible because all clients of the benchmark have the same number of samples.
    """

    clients_per_group = 1

    @staticmethod
    def start_vector() -> torch.Tensor:
        return to_vector(CnnA())

    def __init__(self, x: np.ndarray, y: np.ndarray, per_client: int, steps: int, batch: int, lr: float, seed: int):
        keep_freed_memory()
        self.x = torch.from_numpy(x).view(len(x), -1)
        self.y = torch.from_numpy(y)
        self.per_client, self.steps, self.batch, self.lr, self.seed = per_client, steps, batch, lr, seed
        mean, std = torch.tensor(MEAN), torch.tensor(STD)
        self.scale = (1 / (255 * std)).repeat(32 * 32)
        self.shift = (-mean / std).repeat(32 * 32)
        self.stacks: dict[int, Stack] = {}

    def batches(self, clients: list[int], t: int) -> Iterator[torch.Tensor]:
        """Yield the indices [k, batch] of each step: shuffled epochs; the last batch of an epoch may be smaller."""
        generators = [torch.Generator().manual_seed(hash((self.seed, t, c)) & 0x7FFFFFFF) for c in clients]
        done = 0
        while True:
            epoch = torch.stack(
                [
                    torch.randperm(self.per_client, generator=g).add_(c * self.per_client)
                    for c, g in zip(clients, generators, strict=True)
                ]
            )
            for index in epoch.split(self.batch, dim=1):
                if done == self.steps:
                    return
                yield index
                done += 1

    def images(self, index: torch.Tensor) -> torch.Tensor:
        """Return normalized images [batch, 3k, 32, 32], channels last, for indices [k, batch]."""
        k, batch = index.shape
        x = self.x.index_select(0, index.reshape(-1))
        x = torch.addcmul(self.shift, x.float(), self.scale)
        if k > 1:
            x = x.view(k, batch, 32 * 32, 3).permute(1, 2, 0, 3)
        return x.reshape(batch, 32, 32, 3 * k).permute(0, 3, 1, 2)

    def train(self, clients: list[int], t: int, start: torch.Tensor, total: torch.Tensor, weight: float) -> None:
        """Train ``clients`` from ``start`` and add ``weight`` times each resulting vector to ``total``."""
        k = len(clients)
        if k not in self.stacks:
            self.stacks[k] = Stack(k)
        stack = self.stacks[k]
        stack.load(start)
        for index in self.batches(clients, t):
            stack.step(self.images(index), self.y.index_select(0, index.reshape(-1)), self.lr)
        stack.add_to(total, weight)


class HandmadeTogether(HandmadeTrainer):
    """Five clients trained as one network."""

    clients_per_group = 5
