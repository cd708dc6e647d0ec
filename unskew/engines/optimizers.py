"""Client optimizers on a flat vector: the update rules of ``torch.optim`` as functions that ``vmap`` can map.

All functions modify their arguments in place, elementwise, so they work on one vector ``[d]`` and inside ``vmap``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.errors import ConfigError, short_repr
from unskew.protocol.training_config import Training

State = dict[str, Tensor]


def init_state(training: Training, v: Tensor, freezes: bool = False) -> State:
    """Create the initial optimizer state for the vector ``v``.

    Args:
        training: Optimizer and its options.
        v: Parameters, ``[d]``.
        freezes: Whether some steps update only a part of the parameters.
    """
    if training.optimizer == "sgd":
        return {"momentum": torch.zeros_like(v)} if training.momentum else {}
    moments = {"m": torch.zeros_like(v), "v": torch.zeros_like(v)}
    return {**moments, "steps": torch.zeros_like(v)} if freezes else moments


def optimizer_step(
    training: Training, v: Tensor, g: Tensor, state: State, t: int | Tensor, trainable: Tensor | None = None
) -> tuple[Tensor, State]:
    """Take one step from ``v`` along the gradient ``g``; ``v`` and ``state`` are overwritten.

    Parameters for which ``trainable`` is false are unchanged: no decay and no momentum.

    Args:
        training: Optimizer and its options.
        v: Parameters, ``[d]``; overwritten.
        g: Gradient, ``[d]``.
        state: State of the optimizer; overwritten.
        t: Number of the step, from 0; a tensor in a recorded step.
        trainable: Mask of the parameters to update, boolean ``[d]``; None for all.

    Raises:
        ConfigError: If the gradient has another shape than the vector, for example from a custom rule.
    """
    if not isinstance(g, Tensor) or g.shape != v.shape:
        what = f"one of shape {tuple(g.shape)}" if isinstance(g, Tensor) else short_repr(g)
        raise ConfigError(f"A gradient must be a tensor of the model's shape {tuple(v.shape)}, not {what}.")
    if trainable is None:
        return update_all(training, v, g, state, t)
    before, frozen = v.clone(), {name: tensor.clone() for name, tensor in state.items()}
    v, state = update_all(training, v, torch.where(trainable, g, 0.0), state, t)
    return torch.where(trainable, v, before), {
        name: torch.where(trainable, state[name], frozen[name]) for name in state
    }


def update_all(training: Training, v: Tensor, g: Tensor, state: State, t: int | Tensor) -> tuple[Tensor, State]:
    """Take one step of all parameters.

    Args:
        training: Optimizer and its options.
        v: Parameters, ``[d]``; overwritten.
        g: Gradient, ``[d]``.
        state: State of the optimizer; overwritten.
        t: Number of the step, from 0.
    """
    if training.clip_grad_norm is not None:
        g = g * torch.clamp(training.clip_grad_norm / (torch.linalg.vector_norm(g) + 1e-6), max=1.0)
    if training.optimizer == "sgd":
        return sgd(training, v, g, state)
    return adam(training, v, g, state, t)


def sgd(training: Training, v: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    """Take a step of SGD with momentum, Nesterov momentum and weight decay, as ``torch.optim.SGD``.

    Args:
        training: Options of SGD.
        v: Parameters, ``[d]``; overwritten.
        g: Gradient, ``[d]``.
        state: Momentum buffer; overwritten.
    """
    if training.weight_decay:
        g = g.add(v, alpha=training.weight_decay)
    if training.momentum:
        buffer = state["momentum"].mul_(training.momentum).add_(g)
        g = g.add(buffer, alpha=training.momentum) if training.nesterov else buffer
    rate: float | Tensor = training.lr  # a tensor in a recorded step
    return (v.sub_(g * rate) if isinstance(rate, Tensor) else v.add_(g, alpha=-rate)), state


def adam(training: Training, v: Tensor, g: Tensor, state: State, t: int | Tensor) -> tuple[Tensor, State]:
    """Take a step of Adam (decay in the gradient) or AdamW (decoupled decay), as ``torch.optim``; betas 0.9 and 0.999.

    The bias is corrected with each parameter's own number of steps if ``state`` counts them.

    Args:
        training: Options of Adam.
        v: Parameters, ``[d]``; overwritten.
        g: Gradient, ``[d]``.
        state: Moments, and steps per parameter if some were frozen; overwritten.
        t: Number of the step, from 0.
    """
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    if training.optimizer == "adamw":
        v.mul_(1 - training.lr * training.weight_decay)
    elif training.weight_decay:
        g = g.add(v, alpha=training.weight_decay)
    m = state["m"].mul_(beta1).add_(g, alpha=1 - beta1)
    second = state["v"].mul_(beta2).add_(g * g, alpha=1 - beta2)
    taken = t + 1 if isinstance(t, int) else (t + 1).to(torch.float64)
    taken = state["steps"].add_(1) if "steps" in state else taken
    root = (second / (1 - beta2**taken)).sqrt_().add_(eps)
    return v.sub_(m / root * (training.lr / (1 - beta1**taken))), state
