"""Beta-VAE that Fedssyn's clients train on dSprites.

Burgess et al., "Understanding disentangling in beta-VAE", 2018, arXiv:1804.03599; Kingma and Welling 2013, arXiv:1312.6114.
With pixels ``x`` from 0 to 1, code ``z ~ N(mu(x), diag s^2(x))`` and a Bernoulli decoder, the loss is the negative ELBO::

    -sum_pixels log Bernoulli(x; decode(z)) + beta KL(N(mu, s^2) || N(0, I)),    KL = 1/2 sum (mu^2 + s^2 - 1 - log s^2)

It is the mean over the batch. Fedssyn samples class ``c`` by decoding ``z ~ N(mu_c, I)``, where ``mu_c`` is the mean of
``mu(x)`` over the class; the decoded intensities are the image. The layers are those of Burgess et al. for 64x64 images: four
4x4 convolutions with stride 2 and 32 channels, and two linear layers of 256. Smaller images get one convolution for each
halving down to a side of 4. The Fedssyn paper does not state beta, learning rate or a capacity schedule; this implementation
uses beta=4 and 5e-4 without a schedule.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.data.federation import concatenate_inputs
from unskew.generators.base import GeneratorJob, num_halvings, pad_to_halvings, to_uint8
from unskew.generators.trained.train_loop import TrainingState, descend, train
from unskew.option_parsing import Positive, Whole
from unskew.seeding import derive, generator

SAMPLES = 1024  # number of images that are encoded or decoded at once


@dataclass(frozen=True)
class VAE:
    """Options of the beta-VAE.

    Attributes:
        epochs: Number of training epochs.
        batch: Batch size.
        lr: Learning rate of Adam.
        beta: Weight of the KL term.
        latent: Dimension of the code.
        channels: Number of channels of the convolutions.
        hidden: Width of the linear layers.
    """

    epochs: Whole = 360
    batch: Whole = 256
    lr: Positive = 5e-4
    beta: Annotated[float, Field(ge=0)] = 4.0
    latent: Whole = 10
    channels: Whole = 32
    hidden: Whole = 256

    def __call__(self, job: GeneratorJob) -> VAEGenerator:
        """Create the generator of one client."""
        return VAEGenerator(self, job)


class ConvVAE(nn.Module):
    """Encoder and decoder for images with sides that can be halved ``times`` times."""

    def __init__(self, options: VAE, shape: tuple[int, int, int], times: int):
        super().__init__()
        c = shape[0]
        k = options.channels
        h = options.hidden
        self.small = (k if times else c, shape[1] >> times, shape[2] >> times)
        flat = math.prod(self.small)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        for level in range(times):
            down += [nn.Conv2d(k if level else c, k, 4, 2, 1), nn.ReLU()]
        for level in reversed(range(times)):  # mirrored; the last layer gives logits
            up += [nn.ConvTranspose2d(k, k if level else c, 4, 2, 1), *([nn.ReLU()] if level else [])]
        ends = [nn.Linear(flat, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU()]
        self.encoder = nn.Sequential(*down, nn.Flatten(), *ends, nn.Linear(h, 2 * options.latent))
        begins = [nn.Linear(options.latent, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, flat)]
        self.decoder = nn.Sequential(*begins, *([nn.ReLU()] if times else []), nn.Unflatten(1, self.small), *up)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute ``mu`` and ``log s^2``, each ``[B, latent]``."""
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        return mu, logvar

    def decode(self, z: Tensor) -> Tensor:
        """Compute the logits of the pixels."""
        logits: Tensor = self.decoder(z)
        return logits


def kl_divergence(mu: Tensor, logvar: Tensor) -> Tensor:
    """Compute ``KL(N(mu, e^logvar) || N(0, I))`` of each row, ``[B]``.

    Args:
        mu: Means, ``[B, k]``.
        logvar: Logarithms of the variances, ``[B, k]``.
    """
    return 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(1)


def negative_elbo(logits: Tensor, x: Tensor, mu: Tensor, logvar: Tensor, beta: float) -> Tensor:
    """Compute the loss: reconstruction summed over pixels plus ``beta`` KL, mean over the batch.

    Args:
        logits: Outputs of the decoder, ``[B, C, H, W]``.
        x: Images with intensities from 0 to 1, ``[B, C, H, W]``.
        mu: Means of the codes, ``[B, k]``.
        logvar: Logarithms of the variances of the codes, ``[B, k]``.
        beta: Weight of the KL divergence.
    """
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").flatten(1).sum(1)
    return (reconstruction + beta * kl_divergence(mu, logvar)).mean()


class VAEGenerator:
    """Beta-VAE of one client; see ``unskew.generators.base.ImageGenerator``."""

    def __init__(self, options: VAE, job: GeneratorJob):
        self.options, self.job = options, job
        self.times = num_halvings(job.shape[1:], 4)
        height, width = pad_to_halvings(torch.zeros(1, *job.shape), self.times).shape[2:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(job.seed, "generator"))
            net = ConvVAE(options, (job.shape[0], height, width), self.times)
        self.net = net.to(job.device)
        self.means: Tensor | None = None

    def fit(self, images: Tensor, labels: Tensor) -> None:
        """Train the network, and compute the mean code of each class.

        Args:
            images: Images, uint8 ``[n, C, H, W]``.
            labels: Class of each image, ``[n]``.
        """
        options = self.options
        job = self.job
        net = self.net
        x = pad_to_halvings(images.float().div(255), self.times).contiguous().to(job.device)
        optimizer = torch.optim.Adam(net.parameters(), lr=options.lr)

        def step(index: Tensor, _: int) -> Tensor:
            part = x[index.to(job.device)]
            mu, logvar = net.encode(part)
            z = mu + (logvar / 2).exp() * torch.randn(mu.shape).to(job.device)
            return descend(optimizer, negative_elbo(net.decode(z), part, mu, logvar, options.beta))

        train(job, TrainingState({"net": net}, {"adam": optimizer}), step, len(labels), options.epochs, options.batch)
        with torch.no_grad():
            codes = torch.cat([net.encode(part)[0] for part in torch.split(x, SAMPLES)]).cpu()
        counts = torch.bincount(labels, minlength=job.classes).clamp_min(1)
        sums = torch.zeros(job.classes, options.latent).index_add_(0, labels.cpu(), codes)
        self.means = sums / counts[:, None]

    @torch.no_grad()
    def sample(self, labels: Tensor) -> Tensor:
        """Generate images by decoding codes near the class means."""
        assert self.means is not None, "fit comes first"
        draws = generator(self.job.seed, "generator sample")
        images = []
        for part in torch.split(labels.cpu(), SAMPLES):
            z = self.means[part] + torch.randn(len(part), self.options.latent, generator=draws)
            x = torch.sigmoid(self.net.decode(z.to(self.job.device)))
            images.append(to_uint8(x, self.job.shape))
        return concatenate_inputs(images)
