"""Batch plans: sample indices of a client in each step, and the conversion of samples to model inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskew.data.augment import crop_and_flip_samples, draw_crop_and_flip
from unskew.data.normalization import Normalization
from unskew.errors import DataError
from unskew.protocol.training_config import Training
from unskew.secret_draws import SecretKey, secret_uniform, secret_words
from unskew.seeding import generator

PADDING = 4


class BatchPlan:
    """Mini-batches of one client in one round, drawn once: one index tensor per step.

    Epochs are reshuffled and the last batch of an epoch may be smaller, as with a PyTorch ``DataLoader``. With
    ``local_steps``, a new epoch starts whenever the data are used up.

    Args:
        training: Budget of the client.
        num_samples: Number of samples of the client.
        seed: Seed of the run.
        round: Number of the round, from 0.
        client: Client number.
        poisson: Draw Poisson batches with the same number of steps, see ``draw_poisson_batch``.
        secret: Secret key to draw from instead of the seed.

    Attributes:
        batches: Sample indices of each step.
        weights: Weights of the rows of Poisson batches in each step; None for other batches.
        augmentation: Generator of crops and flips; None without augmentation.
    """

    def __init__(
        self,
        training: Training,
        num_samples: int,
        seed: int,
        round: int,
        client: int,
        poisson: bool = False,
        secret: SecretKey | None = None,
    ):
        if not num_samples:
            raise DataError(f"Client {client} has no samples to train on. Remove it from the federation.")
        draws = generator(seed, "batches", round, client)
        flips = generator(seed, "augment", round, client) if training.augment else None
        cuts, steps = training.cuts(num_samples), training.steps(num_samples, client)
        self.batches: list[Tensor] = []
        self.weights: list[Tensor] | None = None
        if poisson:
            if secret is None:
                uniform = [torch.rand(num_samples, generator=draws, dtype=torch.float64) for _ in range(steps)]
            else:
                key = secret.subkey("batches", round, client)
                uniform = [secret_uniform(key, step, num_samples) for step in range(steps)]
                if flips is not None:  # those of a sample depend on its row, so they must not show the batch
                    flips.manual_seed(int(secret_words(key, steps, 1)))
            drawn = [draw_poisson_batch(numbers, training.batch_size) for numbers in uniform]
            self.batches, self.weights = [index for index, _ in drawn], [weight for _, weight in drawn]
        while len(self.batches) < steps:
            order = torch.randperm(num_samples, generator=draws)
            self.batches += [order[cut] for cut in cuts[: steps - len(self.batches)]]
        self.augmentation = flips

    def to(self, device: torch.device) -> BatchPlan:
        """Move the index tensors to ``device``, in one transfer for all steps."""
        if self.batches and device != self.batches[0].device:
            sizes = [len(batch) for batch in self.batches]
            self.batches = list(torch.split(torch.cat(self.batches).to(device), sizes))
        return self

    def draw_augmentation(self) -> list[tuple[Tensor, Tensor]]:
        """Return the crop offsets ``[B, 2]`` and flips ``[B]`` of every step, the same that ``augment`` would draw."""
        assert self.augmentation is not None, "this plan does not augment images"
        return [draw_crop_and_flip(len(batch), PADDING, self.augmentation) for batch in self.batches]

    def augment(self, x: Tensor, y: Tensor, pixels: bool) -> tuple[Tensor, Tensor]:
        """Crop and flip the images of the next step; must be called once per step, in order.

        Args:
            x: Inputs of the step, ``[B, ...]``; others than images stay unchanged.
            y: Targets of the step.
            pixels: Whether targets are masks, which move with their images.
        """
        if self.augmentation is None or x.dim() != 4:
            return x, y
        return crop_and_flip_samples(x, y, *draw_crop_and_flip(len(x), PADDING, self.augmentation), PADDING, pixels)


def draw_poisson_batch(uniform: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Draw a batch that contains each of ``n`` samples with probability ``size / n``, independently.

    The batch is filled up with rows of weight 0 to a multiple of ``2 ceil(sqrt(size))``, which is about two standard
    deviations of its size, so that few different sizes occur. It has at least one row, and no row is ever left out.

    Args:
        uniform: Random numbers in [0, 1), float64 ``[n]``.
        size: Expected number of samples in the batch.

    Returns:
        Sample indices in ascending order, and weights, 1 or 0, of the rows.
    """
    num_samples = len(uniform)
    chosen = torch.nonzero(uniform < size / num_samples).flatten()
    multiple = 2 * math.ceil(math.sqrt(size))
    rows = min(num_samples, max(1, math.ceil(len(chosen) / multiple)) * multiple)
    index = torch.cat([chosen, chosen.new_zeros(rows - len(chosen))])
    return index, (torch.arange(rows) < len(chosen)).to(torch.float32)


class InputNormalizer:
    """Converts stored inputs to model inputs, one batch at a time: data type, device and standardization.

    Args:
        normalization: Mean and standard deviation per channel or feature; None for no standardization.
        shape: Shape of one input, channels first.
        dtype: Data type of the model.
        device: Device of the model.
    """

    def __init__(
        self,
        normalization: Normalization | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.dtype, self.device = dtype, device
        self.factor: Tensor | None = None
        if normalization is not None:
            mean = torch.tensor(normalization.mean, dtype=torch.float64)
            std = torch.tensor(normalization.std, dtype=torch.float64)
            factor, offset = (normalization.scale / std).to(dtype), (-mean / std).to(dtype)
            # Repeated over the pixels of an image, because broadcasting over three trailing channels is four times slower.
            pixels = math.prod(shape[1:])
            self.factor, self.offset = factor.repeat(pixels).to(device), offset.repeat(pixels).to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return normalized ``x`` on the device; token ids (int64) are only moved to the device."""
        if x.dtype == torch.int64:
            return x.to(self.device, non_blocking=True)
        x = x.to(self.device, non_blocking=True).to(self.dtype)
        if self.factor is None:
            return x
        flat = x.movedim(1, -1).reshape(len(x), -1)
        normal = torch.addcmul(self.offset, flat, self.factor)
        return normal.view(len(x), *x.shape[2:], x.shape[1]).movedim(-1, 1)
