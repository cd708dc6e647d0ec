"""Class-conditional diffusion model that Fedssyn's clients train, with a network from diffusers.

Ho et al. 2020, arXiv:2006.11239, with the network and the settings of Nichol and Dhariwal 2021, arXiv:2102.09672, which the
authors of Fedssyn cite: pixels from -1 to 1, a U-Net with the class added to the time embedding, AdamW, averaged weights. The
defaults are the paper's. Each batch of samples starts from new noise. The variance is that of the posterior and not learned.

The U-Net has one level for each halving down to a side of 4, at most four levels, so an 8x8 image gets two. Other sides are
padded by repeating the edge, and the padding is removed after sampling. ``batch`` is 256 in the paper; in private training it
is the expected batch size.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.data.federation import concatenate_inputs
from unskew.errors import explain_missing
from unskew.generators.base import GeneratorJob, num_halvings, pad_to_halvings, to_uint8
from unskew.generators.trained.diffusion import Diffusion
from unskew.generators.trained.train_loop import ExponentialAverage, TrainingState, descend, train
from unskew.option_parsing import Fraction, Positive, Whole
from unskew.seeding import derive, generator

Wholes = Annotated[tuple[Whole, ...], BeforeValidator(lambda v: v.split("/") if isinstance(v, str) else v)]
"""Integers as an option; separated by slashes in an expression."""
PIXELS = 1 << 18  # number of pixels that are sampled at once: 256 images of 32x32


@dataclass(frozen=True)
class DDPM:
    """Options of the diffusion model.

    Attributes:
        private: Whether generators can be trained with differential privacy.
        epochs: Number of training epochs.
        batch: Batch size.
        lr: Learning rate of AdamW.
        steps: Number ``T`` of diffusion steps.
        sampling_steps: Number of steps in sampling.
        schedule: Noise schedule.
        sampler: Sampling method, ``ancestral`` or ``ddim``.
        ema: Decay of the averaged weights, which are used for sampling.
        width: Number of channels of the first level.
        multipliers: Number of channels of each level, as multiples of ``width``.
        blocks: Number of residual blocks per level.
        attention: Image sides with attention layers.
        heads: Number of channels per attention head.
        dropout: Dropout probability in residual blocks.
    """

    private = True

    epochs: Whole = 500
    batch: Whole = 256
    lr: Positive = 1e-4
    steps: Annotated[int, Field(ge=2)] = 1000
    sampling_steps: Whole = 250
    schedule: Literal["cosine", "linear"] = "cosine"
    sampler: Literal["ancestral", "ddim"] = "ancestral"
    ema: Fraction = 0.9995
    width: Annotated[int, Field(ge=8, multiple_of=8)] = 64
    multipliers: Wholes = (1, 2, 2, 2)
    blocks: Whole = 3
    attention: Wholes = (32, 16, 8)
    heads: Whole = 64
    dropout: Fraction = 0.1

    def __call__(self, job: GeneratorJob) -> DDPMGenerator:
        """Create the generator of one client."""
        return DDPMGenerator(self, job)

    def ready(self) -> None:
        """Validate that diffusers is installed (raises ``ConfigError`` otherwise)."""
        _unet_class()


def _unet_class() -> Any:
    with explain_missing("The generator ddpm needs diffusers: pip install 'unskew[diffusion]'."):
        from diffusers import UNet2DModel
    return UNet2DModel


def build_unet(options: DDPM, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Create the network ``(x [B, C, H, W], t [B], y [B]) -> eps [B, C, H, W]``.

    Args:
        options: Options of the generator.
        shape: Shape of an image, ``(C, H, W)``; its sides must be divisible by the network's halvings.
        classes: Number of classes.

    Raises:
        ConfigError: If diffusers is not installed.
    """
    levels = num_halvings(shape[1:], len(options.multipliers) - 1) + 1
    at = [max(shape[1:]) >> level in options.attention for level in range(levels)]
    channels = tuple(options.width * m for m in options.multipliers[:levels])
    groups = 32 if options.width % 32 == 0 and options.width > 32 else 8
    module: nn.Module = _unet_class()(
        sample_size=shape[1:],
        in_channels=shape[0],
        out_channels=shape[0],
        block_out_channels=channels,
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in at),
        up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(at)),
        layers_per_block=options.blocks,
        attention_head_dim=min(options.heads, channels[0]),
        norm_num_groups=groups,
        attn_norm_num_groups=groups,
        resnet_time_scale_shift="scale_shift",
        dropout=options.dropout,
        num_class_embeds=classes,
    )
    return module


class ConditionalUNet(nn.Module):
    """Wrapper of the U-Net that takes the class as an input and returns a tensor."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict the noise."""
        # Channels-last inputs result in wrong per-sample gradients in opacus.
        out: Tensor = self.net(x.contiguous(), t, class_labels=y, return_dict=False)[0]
        return out


class DDPMGenerator:
    """Diffusion model of one client; see ``unskew.generators.base.ImageGenerator``."""

    def __init__(self, options: DDPM, job: GeneratorJob):
        self.options, self.job = options, job
        self.diffusion = Diffusion(options.schedule, options.steps)
        self.times = num_halvings(job.shape[1:], len(options.multipliers) - 1)
        channels = job.shape[0]
        height, width = pad_to_halvings(torch.zeros(1, *job.shape), self.times).shape[2:]
        self.padded = (channels, height, width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(job.seed, "generator"))
            net = ConditionalUNet(build_unet(options, self.padded, job.classes))
        self.net = net.to(job.device)
        self.average = ExponentialAverage(self.net, options.ema)
        self.epsilon: float | None = None

    def loss(self, x0: Tensor, y: Tensor, net: nn.Module | None = None) -> Tensor:
        """Compute ``mean ||eps - eps_theta(x_t, t, y)||^2`` of a batch, with new random times and noise.

        Args:
            x0: Images in [-1, 1], ``[B, C, H, W]``.
            y: Class of each image, ``[B]``.
            net: Network to evaluate; None: the trained one.
        """
        # Drawn on the CPU, so that results do not depend on the device.
        t = torch.randint(0, self.diffusion.steps, (len(x0),)).to(x0.device)
        eps = torch.randn(x0.shape).to(x0.device)
        predicted: Tensor = (net or self.net)(self.diffusion.noised(x0, t, eps), t, y)
        return (predicted - eps).square().mean()

    def fit(self, images: Tensor, labels: Tensor) -> None:
        """Train the network and average its weights.

        Args:
            images: Images, uint8 ``[n, C, H, W]``.
            labels: Class of each image, ``[n]``.
        """
        options, job = self.options, self.job
        x = pad_to_halvings(images.float().div(127.5).sub(1), self.times).contiguous().to(job.device)
        y = labels.to(job.device)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=options.lr)
        trained = TrainingState({"net": self.net, "average": self.average.module}, {"adamw": optimizer})
        self.net.train()
        common: dict[str, Any] = {"num_samples": len(y), "epochs": options.epochs, "batch": options.batch}
        if job.privacy is None:

            def step(index: Tensor, _: int) -> Tensor:
                index = index.to(job.device)
                return descend(optimizer, self.loss(x[index], y[index]))

            train(job, trained, step, averages=[self.average], **common)
        else:
            from unskew.generators.trained.dp_sgd import PrivateTraining

            private = PrivateTraining(job.privacy, self.net, optimizer, job.seed, job.secret, **common)
            try:

                def private_step(index: Tensor, number: int) -> Tensor:
                    index = index.to(job.device)
                    return private.step(index, number, lambda part: self.loss(x[part], y[part], private.module))

                steps = train(
                    job,
                    trained,
                    private_step,
                    averages=[self.average],
                    batches=private.batches,
                    epsilon=private.epsilon,
                    **common,
                )
            finally:
                private.close()
            self.epsilon = private.epsilon(steps)
        self.net.eval()

    @torch.no_grad()
    def sample(self, labels: Tensor) -> Tensor:
        """Sample images with the averaged weights."""
        net, options = self.average.module, self.options
        _, height, width = self.padded
        size = max(1, min(1024, PIXELS // (height * width)))
        images, parts = [], torch.split(labels, size)
        passes, steps = 0, len(parts) * min(options.sampling_steps, options.steps)
        for number, part in enumerate(parts):
            draws = generator(self.job.seed, "generator sample", number)
            y = part.to(self.job.device)
            start = torch.randn(len(part), *self.padded, generator=draws).to(self.job.device)

            def predict(x: Tensor, t: Tensor, y: Tensor = y) -> Tensor:
                nonlocal passes
                eps: Tensor = net(x, t, y)
                passes += 1
                self.job.sampled(passes / steps)
                return eps

            x = self.diffusion.sample(predict, start, options.sampling_steps, options.sampler, draws)
            images.append(to_uint8((x + 1) / 2, self.job.shape))
        return concatenate_inputs(images)
