"""FedJAX's federated averaging on JAX's CPU backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

jax.tree_map = jax.tree_util.tree_map  # the last FedJAX uses this name, which newer versions of JAX have removed

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

from speed.peers.work import Ended, Work  # noqa: E402
from speed.peers.workloads import ResNet20  # noqa: E402

REQUIREMENTS = ("fedjax==0.0.17", "jax==0.10.2")
SETTING = "one process, XLA's threads, compiled steps"


Model = Callable[[list, jax.Array], jax.Array]


def cnn(w: list, x: jax.Array) -> jax.Array:
    """Return the logits of CNN-A.

    Args:
        w: Parameters in PyTorch's order and layout.
        x: Images ``[n, 3, 32, 32]``.
    """
    for kernel, bias in ((w[0], w[1]), (w[2], w[3])):
        x = jax.lax.conv(x, kernel, (1, 1), "VALID") + bias[:, None, None]
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for matrix, bias in ((w[4], w[5]), (w[6], w[7])):
        x = jax.nn.relu(x @ matrix.T + bias)
    return x @ w[8].T + w[9]


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Return a convolution that pads by half the kernel's size."""
    pad = kernel.shape[-1] // 2
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad), (pad, pad)])


def group_norm(x: jax.Array, scale: jax.Array, shift: jax.Array, groups: int = 8) -> jax.Array:
    """Return group norm of ``x [n, channels, height, width]``."""
    n, channels, height, width = x.shape
    grouped = x.reshape(n, groups, -1)
    centered = grouped - grouped.mean(-1, keepdims=True)
    normal = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return normal.reshape(n, channels, height, width) * scale[:, None, None] + shift[:, None, None]


def resnet20(w: list, x: jax.Array) -> jax.Array:
    """Return the logits of ResNet-20 with group norm; arguments as in ``cnn``."""
    parts = iter(w)
    x = jax.nn.relu(group_norm(conv(x, next(parts)), next(parts), next(parts)))
    for inputs, outputs in pairwise(ResNet20.WIDTHS):
        stride = 1 if inputs == outputs else 2
        inner = jax.nn.relu(group_norm(conv(x, next(parts), stride), next(parts), next(parts)))
        inner = group_norm(conv(inner, next(parts)), next(parts), next(parts))
        if inputs != outputs:
            x = group_norm(conv(x, next(parts), stride), next(parts), next(parts))
        x = jax.nn.relu(inner + x)
    return x.mean((2, 3)) @ next(parts).T + next(parts)


def mlp(w: list, x: jax.Array) -> jax.Array:
    """Return the logits of the MLP; arguments as in ``cnn``, with ``x [n, features]``."""
    for layer in range(0, len(w) - 2, 2):
        x = jax.nn.relu(x @ w[layer].T + w[layer + 1])
    return x @ w[-2].T + w[-1]


MODELS: dict[str, Model] = {"A": cnn, "B": cnn, "resnet": resnet20, "table": mlp}


def loss_of(model: Model) -> Callable:
    """Return the mean cross-entropy of a batch as FedJAX calls it."""

    def loss(w: list, batch: dict, rng: object) -> jax.Array:
        log_p = jax.nn.log_softmax(model(w, batch["x"]))
        return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()

    return loss


def main(folder: str) -> None:
    """Run rounds as long as there are turns."""
    work = Work(folder)
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=None, num_steps=work.steps)
    client, server = fedjax.optimizers.sgd(work.lr), fedjax.optimizers.sgd(1.0)
    algorithm = fed_avg.federated_averaging(jax.grad(loss_of(MODELS[work.name])), client, server, batches)
    state = algorithm.init([jnp.asarray(part) for part in work.start()])
    key, datasets = jax.random.PRNGKey(0), {}
    try:
        for cohort in work.cohorts:
            work.begin()
            for k in cohort:
                if k not in datasets:
                    datasets[k] = fedjax.ClientDataset(dict(zip("xy", work.normalized(k), strict=True)))
            state, _ = algorithm.apply(state, [(str(k).encode(), datasets[k], key) for k in cohort])
            jax.block_until_ready(state.params)
            work.end()
    except Ended:
        pass
    work.finish([np.asarray(part) for part in state.params])


if __name__ == "__main__":
    main(sys.argv[1])
