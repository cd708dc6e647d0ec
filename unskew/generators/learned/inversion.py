"""Inputs learned by gradient descent on pixels, with frozen networks.

Everything is a pure function of tensors, so the same code generates data for one client or, with ``torch.func.vmap``, for a
whole cohort.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unskew.data.augment import crop_and_flip, keyed_crop_and_flip
from unskew.models.spec import ModelOutput, ModelSpec

Objective = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Maps the learned tensor and the step to the loss (a scalar) and an additional tensor to store for the best step."""

Maker = tuple[Tensor, Callable[[Tensor], Tensor], tuple[float, float]]
"""Initial value of the learned tensor, its mapping to inputs, and Adam's decay rates."""


def minimize(
    start: Tensor,
    objective: Objective,
    steps: int,
    lr: float,
    betas: tuple[float, float] = (0.5, 0.9),
    eps: float = 1e-8,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Minimize an objective with Adam and return the best point.

    Before each update the loss is compared with the smallest one so far. If it is lower, the point and the additional tensor
    are stored together (FedCOG, step 5 of its synthesis). The point after the last update is not evaluated.

    Args:
        start: Initial point, any shape.
        objective: Function of point and step that returns the loss and an additional tensor.
        steps: Number of updates; 0 returns the initial point.
        lr: Learning rate of Adam.
        betas: Decay rates of Adam.
        eps: Constant in Adam's denominator.
        last: Return the last point instead of the best one, but with the additional tensor of the best one.

    Returns:
        The best point and its additional tensor.
    """
    gradient = torch.func.grad(lambda x, t: _with_loss(objective(x, t)), has_aux=True)
    start = channels_last(start)
    if steps == 0:
        return start, objective(start, 0)[1].detach()
    x = start
    m = torch.zeros_like(start)
    second = torch.zeros_like(start)
    best = None
    best_x = start
    best_extra = None
    for t in range(steps):
        g, (loss, extra) = gradient(x, t)
        if best is None or best_extra is None:
            best = loss
            best_x = x
            best_extra = extra
        else:
            better = loss < best
            best = torch.where(better, loss, best)
            best_x, best_extra = torch.where(better, x, best_x), torch.where(better, extra, best_extra)
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        second = torch.addcmul(second.mul_(betas[1]), g, g, value=1 - betas[1])
        root = (second / (1 - betas[1] ** (t + 1))).sqrt_().add_(eps)
        x = torch.addcdiv(x, m, root, value=-lr / (1 - betas[0] ** (t + 1)))
    assert best_extra is not None
    return (x if last else best_x), best_extra


def channels_last(x: Tensor) -> Tensor:
    """Convert images to channels-last memory, which halves the cost of their gradients on a CPU."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if x.dim() == 4 else x


def random_crop_and_flip(x: Tensor, key: Tensor, black: Tensor, padding: int = 4) -> Tensor:
    """Randomly crop images after black padding, and randomly flip them; differentiable.

    Args:
        x: Inputs, ``[n, C, H, W]``.
        key: Random key.
        black: Black image as an input, ``[1, C, H, W]``.
        padding: Padding in pixels.
    """
    offsets, flips = keyed_crop_and_flip(key, len(x), padding)
    return crop_and_flip(x - black, offsets, flips, padding) + black


def _with_loss(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    loss, extra = pair
    return loss, (loss.detach(), extra.detach())


def statistics_distance(spec: ModelSpec, v: Tensor, b: Tensor, x: Tensor) -> tuple[ModelOutput, Tensor]:
    """Compute the outputs and DeepInversion's regularizer (Yin et al., "Dreaming to Distill", CVPR 2020) in one pass.

    The regularizer is the sum over BatchNorm layers of ``||var_running - var_batch||_2 + ||mean_running - mean_batch||_2``,
    with the biased variance of the layer's input over batch and space. It is 0 for a model without such layers.

    Args:
        spec: Layout of the model.
        v: Parameters of the model, ``[d]``.
        b: Buffers of the model, ``[m]``.
        x: Inputs of the model, ``[B, C, H, W]``.
    """
    terms: list[Tensor] = []
    running = spec.buffers(b)

    def compare(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            dims = [0, *range(2, args[0].dim())]
            mean, var = args[0].mean(dims), args[0].var(dims, correction=0)
            terms.append(torch.linalg.vector_norm(running[f"{name}.running_var"] - var))
            terms.append(torch.linalg.vector_norm(running[f"{name}.running_mean"] - mean))

        return hook

    hooks = [
        module.register_forward_pre_hook(compare(name))
        for name, module in spec.module.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]
    try:
        output = spec.forward(v, b, x)
    finally:
        for hook in hooks:
            hook.remove()
    return output, torch.stack(terms).sum() if terms else output.logits.new_zeros(())
