"""Inputs that are learned: gradient descent on the pixels, with the networks frozen.

Everything is a pure function of tensors, so that one call makes the data of one client and, mapped by ``torch.func.vmap``,
those of a whole cohort.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unskew.data.augment import crop_and_flip, keyed_crop_and_flip
from unskew.models.spec import ModelOutput, ModelSpec

Objective = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From what is learned and the step to the loss to minimize (a scalar) and what shall be kept of the best step."""

Maker = tuple[Tensor, Callable[[Tensor], Tensor], tuple[float, float]]
"""Initial values of the learned inputs, their construction, and Adam's decay rates."""


def minimize(
    start: Tensor,
    objective: Objective,
    steps: int,
    lr: float,
    betas: tuple[float, float] = (0.5, 0.9),
    eps: float = 1e-8,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Minimize an objective with Adam and keep the best point seen.

    Before each update the current loss is compared with the smallest so far; where it is lower, the point and what the
    objective returned beside the loss are stored as copies, so the pair belongs together (FedCOG, step 5 of its synthesis;
    the point reached by the last update is not looked at).

    Args:
        start: First point, any shape.
        objective: Loss and what to keep.
        steps: Updates; with 0 the start itself is kept.
        lr: Adam's step.
        betas: Adam's decay rates.
        eps: Adam's floor.
        last: Return the last point instead of the best one (with what was kept at the best).

    Returns:
        The best point and what the objective kept there.
    """
    gradient = torch.func.grad(lambda x, t: _with_loss(objective(x, t)), has_aux=True)
    start = channels_last(start)
    if steps == 0:
        return start, objective(start, 0)[1].detach()
    x, m, second = start, torch.zeros_like(start), torch.zeros_like(start)
    best, best_x, best_extra = None, start, None
    for t in range(steps):
        g, (loss, extra) = gradient(x, t)
        if best is None or best_extra is None:
            best, best_x, best_extra = loss, x, extra
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
    """Images with their channels last in memory, the shape unchanged: on a CPU, their gradients cost half as much."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if x.dim() == 4 else x


def random_crop_and_flip(x: Tensor, key: Tensor, black: Tensor, padding: int = 4) -> Tensor:
    """Images cropped at random from a black frame around them and mirrored at random; differentiable.

    Args:
        x: Inputs ``[n, C, H, W]``.
        key: Decides the crops and which images are mirrored.
        black: What a black image is as an input, ``[1, C, H, W]``.
        padding: Width of the frame.
    """
    offsets, flips = keyed_crop_and_flip(key, len(x), padding)
    return crop_and_flip(x - black, offsets, flips, padding) + black


def _with_loss(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    loss, extra = pair
    return loss, (loss.detach(), extra.detach())


def statistics_distance(spec: ModelSpec, v: Tensor, b: Tensor, x: Tensor) -> tuple[ModelOutput, Tensor]:
    """DeepInversion's term (Yin et al., "Dreaming to Distill", CVPR 2020), and the outputs of the same pass.

    The sum over BatchNorm layers of ``||var_running - var_batch||_2 + ||mean_running - mean_batch||_2``, with the biased
    variance over batch and space of the layer's input. Zero for a model without such layers.

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
