"""FedJAX's pattern in JAX: one compiled program per round, with ``lax.scan`` over the batches of a client.

``vmap`` trains all clients of a round at once; ``map`` one after another inside the same program. This process does not
import PyTorch, because both bring their own CUDA libraries. ``peers_gpu.py`` starts it:
``python -m speed.gpu_jobs.jax_loop OUT FOLDER SECONDS SETTING...``
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from speed.gpu_jobs.rows import add_row, time_rounds
from speed.gpu_jobs.settings import CHECKED_ROUNDS, Prepared, Setting, setting_of

jax.config.update("jax_default_matmul_precision", "highest")  # the default rounds products and convolutions to TF32

Array = jax.Array
Model = Callable[[list, Array, "Array | None"], Array]


def conv(x: Array, kernel: Array, stride: int = 1, pad: int = 0) -> Array:
    """Return a convolution of images ``[n, C, H, W]`` with a kernel in PyTorch's layout."""
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad), (pad, pad)])


def max_pool(x: Array, size: int = 2, pad: int = 0) -> Array:
    """Return the largest values of windows of ``size`` x ``size`` pixels, with stride 2."""
    padding = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, size, size), (1, 1, 2, 2), padding)


def biased_conv(x: Array, kernel: Array, bias: Array) -> Array:
    """Return ReLU of a convolution with a bias."""
    return jax.nn.relu(conv(x, kernel) + bias[:, None, None])


def drop(x: Array, share: float, key: Array | None) -> Array:
    """Return ``x`` with dropout; None as key for none."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - share, x.shape), x / (1 - share), 0.0)


def cnn(w: list, x: Array, key: Array | None) -> Array:
    """Return the logits of CNN-A.

    Args:
        w: Parameters in PyTorch's order and layout.
        x: Images ``[n, C, H, W]``.
        key: Key of dropout, or None.
    """
    x = max_pool(biased_conv(x, w[0], w[1]))
    x = max_pool(biased_conv(x, w[2], w[3])).reshape(len(x), -1)
    for matrix, bias in ((w[4], w[5]), (w[6], w[7])):
        x = jax.nn.relu(x @ matrix.T + bias)
    return x @ w[8].T + w[9]


def pfl(w: list, x: Array, key: Array | None) -> Array:
    """Return the logits of pfl-research's CNN; arguments as in ``cnn``."""
    keys = (None, None) if key is None else jax.random.split(key)
    x = max_pool(biased_conv(biased_conv(x, w[0], w[1]), w[2], w[3]))
    x = drop(x, 0.25, keys[0]).reshape(len(x), -1)
    x = drop(jax.nn.relu(x @ w[4].T + w[5]), 0.5, keys[1])
    return x @ w[6].T + w[7]


def pfllib(w: list, x: Array, key: Array | None) -> Array:
    """Return the logits of PFLlib's CNN; arguments as in ``cnn``."""
    x = max_pool(biased_conv(x, w[0], w[1]))
    x = max_pool(biased_conv(x, w[2], w[3])).reshape(len(x), -1)
    return jax.nn.relu(x @ w[4].T + w[5]) @ w[6].T + w[7]


def group_norm(x: Array, scale: Array, shift: Array, groups: int = 2) -> Array:
    """Return group norm of ``x``, ``[n, C, H, W]``."""
    grouped = x.reshape(len(x), groups, -1)
    centered = grouped - grouped.mean(-1, keepdims=True)
    normal = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return normal.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]


def resnet18(w: list, x: Array, key: Array | None) -> Array:
    """Return the logits of FL-Simulator's ResNet-18; arguments as in ``cnn``."""
    parts = iter(w)

    def normalized(x: Array, stride: int = 1) -> Array:
        kernel = next(parts)
        return group_norm(conv(x, kernel, stride, kernel.shape[-1] // 2), next(parts), next(parts))

    x = max_pool(jax.nn.relu(normalized(x, 2)), 3, 1)
    for wider in (False, False, True, False, True, False, True, False):
        stride = 2 if wider else 1
        inner = normalized(jax.nn.relu(normalized(x, stride)))
        x = jax.nn.relu(inner + (normalized(x, stride) if wider else x))
    return x.mean((2, 3)) @ next(parts).T + next(parts)


MODELS: dict[str, Model] = {"cnn": cnn, "pfl": pfl, "pfllib": pfllib, "resnet18": resnet18}
DROPOUT = {"pfl"}


def round_program(setting: Setting, form: str) -> Callable[..., tuple[list, Array]]:
    """Return a compiled round of FedAvg.

    Args:
        setting: The setting.
        form: ``vmap`` or ``map``.
    """
    model, drops = MODELS[setting.model], setting.dropout and setting.model in DROPOUT

    def loss_of(w: list, x: Array, y: Array, weights: Array, key: Array) -> Array:
        losses = -jnp.take_along_axis(jax.nn.log_softmax(model(w, x, key if drops else None)), y[:, None], 1)[:, 0]
        return (losses * weights).sum() / weights.sum()

    def client(start: list, x: Array, y: Array, rows: Array, weights: Array, keys: Array) -> tuple[list, Array]:
        def step(w: list, batch: tuple[Array, Array, Array]) -> tuple[list, Array]:
            chosen, weight, key = batch
            loss, gradients = jax.value_and_grad(loss_of)(w, x[chosen], y[chosen], weight, key)
            return [part - setting.lr * g for part, g in zip(w, gradients, strict=True)], loss

        w, losses = jax.lax.scan(step, start, (rows, weights, keys))
        return w, losses.mean()

    def run_round(start: list, x: Array, y: Array, rows: Array, weights: Array, key: Array) -> tuple[list, Array]:
        keys = jax.random.split(key, rows.shape[:2])
        if form == "vmap":
            models, losses = jax.vmap(client, (None, None, None, 0, 0, 0))(start, x, y, rows, weights, keys)
            return [part.mean(0) for part in models], losses.mean()

        def add(total: list, own: tuple[Array, Array, Array]) -> tuple[list, Array]:
            w, loss = client(start, x, y, *own)
            return [a + b / len(rows) for a, b in zip(total, w, strict=True)], loss

        model, losses = jax.lax.scan(add, [jnp.zeros_like(part) for part in start], (rows, weights, keys))
        return model, losses.mean()

    return jax.jit(run_round)


class JaxLoop:
    """Rounds of one setting.

    Args:
        prepared: Initial model, cohorts and batches.
        form: ``vmap`` or ``map``.
    """

    def __init__(self, prepared: Prepared, form: str):
        x, y = prepared.setting.normalized()
        self.data = jnp.asarray(x), jnp.asarray(y, jnp.int32)
        self.rows, self.weights = jnp.asarray(prepared.rows, jnp.int32), jnp.asarray(prepared.weights)
        self.w = [jnp.asarray(part) for part in prepared.start]
        self.program = round_program(prepared.setting, form)
        self.loss: Array = jnp.zeros(())
        self.t = 0

    def round(self) -> None:
        """Train a round and average the models."""
        t = self.t % len(self.rows)
        key = jax.random.key(self.t)
        self.t += 1
        self.w, self.loss = self.program(self.w, *self.data, self.rows[t], self.weights[t], key)
        jax.block_until_ready(self.w)

    def checked(self) -> tuple[np.ndarray, float]:
        """Return the model after a few rounds, and the mean training loss of the last one."""
        for _ in range(CHECKED_ROUNDS):
            self.round()
        return np.concatenate([np.asarray(part).ravel() for part in self.w]), float(self.loss)


def peak_mib() -> float | None:
    """Return the largest memory on the device since the process started, in MiB; None if JAX does not know it."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats["peak_bytes_in_use"] / 2**20


def main() -> None:
    """Check and time the settings one after another; what fails is a row, too."""
    out, folder, seconds, form, quick = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4], False
    names = sys.argv[5:]
    if names and names[0] == "--quick":
        quick, names = True, names[1:]
    card = jax.devices()[0].device_kind
    for name in names:
        label = f"{name} jax {form}"
        try:
            loop = JaxLoop(Prepared.load(folder / f"{name}.npz", setting_of(name, quick, False)), form)
            result: dict[str, Any] = time_rounds(loop.round, seconds)
            add_row(out, "peers", label, card=card, library=f"jax {jax.__version__}", **result, MiB=peak_mib())
            small = setting_of(name, quick, True)
            jax.config.update("jax_enable_x64", small.precision == "fp64")
            checked = Prepared.load(folder / f"{name}-check.npz", small)
            model, loss = JaxLoop(checked, form).checked()
            np.savez(folder / f"{name}-jax-{form}.npz", model=model, loss=loss)
            jax.config.update("jax_enable_x64", False)
        except Exception as error:
            traceback.print_exc()
            add_row(out, "peers", label, card=card, error=f"{type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    main()
