"""Denoising diffusion model: noise schedule, respacing, loss and sampling.

Ho, Jain, Abbeel, "Denoising Diffusion Probabilistic Models", 2020, arXiv:2006.11239; cosine schedule and respacing: Nichol,
Dhariwal, "Improved Denoising Diffusion Probabilistic Models", 2021, arXiv:2102.09672; DDIM: Song, Meng, Ermon, 2020,
arXiv:2010.02502. ``beta_t`` is the noise of step ``t``, ``alpha_t = 1 - beta_t`` and ``abar_t = prod_s<=t alpha_s``::

    x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps            q(x_t | x_0)
    loss = E ||eps - eps_theta(x_t, t, y)||^2                mean over pixels, times t = 0 .. T-1 uniform
    x_0' = clip((x_t - sqrt(1 - abar_t) eps') / sqrt(abar_t), -1, 1)
    x_{t-1} ~ N( sqrt(abar_{t-1}) beta_t / (1 - abar_t) x_0' + sqrt(alpha_t) (1 - abar_{t-1}) / (1 - abar_t) x_t,
                 (1 - abar_{t-1}) / (1 - abar_t) beta_t )    ancestral sampling, the posterior's variance

Cosine: ``abar(s) = cos^2((s/T + 0.008) / 1.008 pi/2)`` and ``beta_t = min(0.999, 1 - abar(t+1)/abar(t))``. Linear: from 1e-4
to 0.02 for T = 1000, otherwise scaled by ``1000/T``. Respacing to ``S`` steps selects ``S`` of the ``abar_t``, evenly spaced
and including the first and the last, and uses ``beta = 1 - abar_i / abar_{i-1}`` of the selected ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Predict = Callable[[Tensor, Tensor], Tensor]
"""Function that predicts the noise ``[B, ...]`` of ``x_t [B, ...]`` at times ``[B]``."""


def beta_schedule(schedule: Literal["cosine", "linear"], steps: int) -> Tensor:
    """Compute the noise ``beta_t`` of each step, float64 ``[steps]``.

    Args:
        schedule: Name of the schedule.
        steps: Number ``T`` of diffusion steps.
    """
    if schedule == "linear":
        scale = 1000 / steps
        return torch.linspace(scale * 1e-4, scale * 0.02, steps, dtype=torch.float64).clamp_max(0.999)
    s = torch.arange(steps + 1, dtype=torch.float64) / steps
    abar = torch.cos((s + 0.008) / 1.008 * math.pi / 2).square()
    return (1 - abar[1:] / abar[:-1]).clamp_max(0.999)


def spaced_timesteps(steps: int, count: int) -> list[int]:
    """Select ``count`` of ``steps`` times, evenly spaced and ascending, including the first and the last.

    Args:
        steps: Number of diffusion steps.
        count: Number of times to select.

    >>> spaced_timesteps(1000, 5)
    [0, 250, 500, 749, 999]
    >>> spaced_timesteps(10, 1)
    [9]
    """
    if count >= steps:
        return list(range(steps))
    if count == 1:
        return [steps - 1]
    return [int(i * (steps - 1) / (count - 1) + 0.5) for i in range(count)]


class Diffusion:
    """Diffusion process with ``steps`` steps.

    The values ``abar_t`` of all steps are available as ``abar``, float64 ``[steps]``.

    Args:
        schedule: Noise schedule, ``cosine`` or ``linear``.
        steps: Number of diffusion steps.
    """

    def __init__(self, schedule: Literal["cosine", "linear"], steps: int):
        self.steps = steps
        self.abar = torch.cumprod(1 - beta_schedule(schedule, steps), 0)

    def noised(self, x0: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """Compute ``x_t`` from ``x_0``, times and noise.

        Args:
            x0: Images, ``[B, ...]``.
            t: Time of each image, ``[B]``.
            eps: Standard normal noise, ``[B, ...]``.
        """
        abar = self.abar.to(t.device)[t].view(-1, *(1,) * (x0.dim() - 1))
        return abar.sqrt().to(x0.dtype) * x0 + (1 - abar).sqrt().to(x0.dtype) * eps

    def sample(
        self,
        predict: Predict,
        start: Tensor,
        steps: int,
        sampler: Literal["ancestral", "ddim"] = "ancestral",
        generator: torch.Generator | None = None,
        clip: float | None = 1.0,
    ) -> Tensor:
        """Generate samples from noise.

        Args:
            predict: Function that predicts the noise.
            start: Standard normal noise, ``[B, ...]``.
            steps: Number of sampling steps.
            sampler: Sampling method: ``ancestral``, or ``ddim``, which adds no noise in its steps.
            generator: Random generator of the added noise, on the CPU, so that results do not depend on the device.
            clip: Maximum magnitude of the predicted ``x_0``; None does not clip.
        """
        x = start
        times = spaced_timesteps(self.steps, steps)
        for i in reversed(range(len(times))):
            t = torch.full((len(x),), times[i], device=x.device)
            abar = float(self.abar[times[i]])
            before = float(self.abar[times[i - 1]]) if i else 1.0
            beta = 1 - abar / before
            x0 = (x - math.sqrt(1 - abar) * predict(x, t)) / math.sqrt(abar)
            if clip is not None:
                x0 = x0.clamp(-clip, clip)
            if sampler == "ddim":
                eps = (x - math.sqrt(abar) * x0) / math.sqrt(1 - abar)
                x = math.sqrt(before) * x0 + math.sqrt(1 - before) * eps
                continue
            x = math.sqrt(before) * beta / (1 - abar) * x0 + math.sqrt(1 - beta) * (1 - before) / (1 - abar) * x
            if i:
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                x = x + math.sqrt((1 - before) / (1 - abar) * beta) * noise.to(x.device)
        return x
