"""Small conditional DCGAN, used for the GAN that the Fedssyn paper mentions without details.

Radford, Metz, Chintala, "Unsupervised Representation Learning with Deep Convolutional GANs", 2015, arXiv:1511.06434: strided
convolutions of 4x4, BatchNorm in the generator, LeakyReLU 0.2 in the discriminator, weights N(0, 0.02), Adam 2e-4 with betas
(0.5, 0.999), pixels from -1 to 1. The generator gets the class as an embedding concatenated to the noise, the discriminator
as a projection (Miyato and Koyama 2018, arXiv:1802.05637): ``D(x, y) = w h(x) + <e_y, h(x)>``. Losses are non-saturating::

    loss_D = softplus(-D(x, y)) + softplus(D(G(z, y), y)),    loss_G = softplus(-D(G(z, y), y))

Generated batches have the labels of the real batch. The Fedssyn paper does not state settings; 500 epochs are used for its
other generators. There is one layer for each halving of the image down to a side of 4, at most four.
"""

from __future__ import annotations

import itertools
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

SAMPLES = 256


@dataclass(frozen=True)
class GAN:
    """Options of the DCGAN.

    Attributes:
        epochs: Number of training epochs.
        batch: Batch size.
        lr: Learning rate of Adam.
        noise: Dimension of ``z``.
        width: Number of channels of the outermost layer, doubled at each halving.
    """

    epochs: Whole = 500
    batch: Annotated[int, Field(ge=2)] = 128
    lr: Positive = 2e-4
    noise: Whole = 100
    width: Whole = 64

    def __call__(self, job: GeneratorJob) -> GANGenerator:
        """Create the generator of one client."""
        return GANGenerator(self, job)


class DCGANGenerator(nn.Module):
    """Generator network ``G(z, y)`` of images from -1 to 1."""

    def __init__(self, options: GAN, shape: tuple[int, int, int], classes: int, times: int):
        super().__init__()
        widths = [options.width << level for level in range(times)]
        top = (widths[-1] if widths else shape[0], shape[1] >> times, shape[2] >> times)
        self.embed = nn.Embedding(classes, options.noise)
        self.first = nn.Sequential(nn.Linear(2 * options.noise, math.prod(top)), nn.Unflatten(1, top))
        layers: list[nn.Module] = []
        for level in reversed(range(times)):
            layers += [nn.BatchNorm2d(widths[level]), nn.ReLU()]
            layers += [nn.ConvTranspose2d(widths[level], widths[level - 1] if level else shape[0], 4, 2, 1)]
        self.rest = nn.Sequential(*layers, nn.Tanh())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Generate images for noise ``[B, noise]`` and classes ``[B]``."""
        x: Tensor = self.rest(self.first(torch.cat([z, self.embed(y)], 1)))
        return x


class DCGANDiscriminator(nn.Module):
    """Discriminator network ``D(x, y)``."""

    def __init__(self, options: GAN, shape: tuple[int, int, int], classes: int, times: int):
        super().__init__()
        widths = [shape[0], *(options.width << level for level in range(times))]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.2)]
        self.body = nn.Sequential(*layers, nn.Flatten())
        features = widths[-1] * (shape[1] >> times) * (shape[2] >> times)
        self.score, self.embed = nn.Linear(features, 1), nn.Embedding(classes, features)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute logits ``[B]`` of images being real."""
        h = self.body(x)
        logits: Tensor = self.score(h)[:, 0] + (self.embed(y) * h).sum(1)
        return logits


class GANGenerator:
    """DCGAN of one client; see ``unskew.generators.base.ImageGenerator``."""

    def __init__(self, options: GAN, job: GeneratorJob):
        self.options, self.job = options, job
        self.times = num_halvings(job.shape[1:], 4)
        height, width = pad_to_halvings(torch.zeros(1, *job.shape), self.times).shape[2:]
        shape = (job.shape[0], height, width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(job.seed, "generator"))
            maker = DCGANGenerator(options, shape, job.classes, self.times)
            judge = DCGANDiscriminator(options, shape, job.classes, self.times)
            for part in [*maker.modules(), *judge.modules()]:
                if isinstance(part, nn.Conv2d | nn.ConvTranspose2d | nn.Linear | nn.Embedding):
                    nn.init.normal_(part.weight, 0.0, 0.02)
        self.maker, self.judge = maker.to(job.device), judge.to(job.device)

    def fit(self, images: Tensor, labels: Tensor) -> None:
        """Train generator and discriminator.

        Args:
            images: Images, uint8 ``[n, C, H, W]``.
            labels: Class of each image, ``[n]``.
        """
        options = self.options
        job = self.job
        maker = self.maker
        judge = self.judge
        x = pad_to_halvings(images.float().div(127.5).sub(1), self.times).contiguous().to(job.device)
        labels = labels.to(job.device)
        players = {
            name: torch.optim.Adam(module.parameters(), lr=options.lr, betas=(0.5, 0.999))
            for name, module in (("maker", maker), ("judge", judge))
        }
        maker.train()

        def step(index: Tensor, _: int) -> Tensor:
            real, y = x[index.to(job.device)], labels[index.to(job.device)]
            fake = maker(torch.randn(len(y), options.noise).to(job.device), y)
            judged = F.softplus(-judge(real, y)).mean() + F.softplus(judge(fake.detach(), y)).mean()
            descend(players["judge"], judged)
            return judged + descend(players["maker"], F.softplus(-judge(fake, y)).mean())

        trained = TrainingState({"maker": maker, "judge": judge}, dict(players))
        train(job, trained, step, len(labels), options.epochs, options.batch)
        maker.eval()

    @torch.no_grad()
    def sample(self, labels: Tensor) -> Tensor:
        """Generate images in eval mode."""
        draws = generator(self.job.seed, "generator sample")
        images = []
        for part in torch.split(labels.cpu(), SAMPLES):
            z = torch.randn(len(part), self.options.noise, generator=draws)
            x = self.maker(z.to(self.job.device), part.to(self.job.device))
            images.append(to_uint8((x + 1) / 2, self.job.shape))
        return concatenate_inputs(images)
