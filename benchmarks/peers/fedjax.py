"""FedJAX's federated averaging on JAX's CPU backend."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.tree_map = jax.tree_util.tree_map  # the last FedJAX calls it so; JAX took it away later

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

from benchmarks.peers.work import Ended, Work  # noqa: E402

REQUIREMENTS = ("fedjax==0.0.17", "jax==0.10.2")
SETTING = "one process, XLA's threads, compiled steps"


def logits(w: list, x: jax.Array) -> jax.Array:
    """CNN-A."""
    for kernel, bias in ((w[0], w[1]), (w[2], w[3])):
        x = jax.lax.conv(x, kernel, (1, 1), "VALID") + bias[:, None, None]
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for matrix, bias in ((w[4], w[5]), (w[6], w[7])):
        x = jax.nn.relu(x @ matrix.T + bias)
    return x @ w[8].T + w[9]


def loss(w: list, batch: dict, rng: object) -> jax.Array:
    """Mean cross-entropy of a batch."""
    log_p = jax.nn.log_softmax(logits(w, batch["x"]))
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()


def main(folder: str) -> None:
    """Rounds as long as there are turns."""
    work = Work(folder)
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=None, num_steps=work.steps)
    client, server = fedjax.optimizers.sgd(work.lr), fedjax.optimizers.sgd(1.0)
    algorithm = fed_avg.federated_averaging(jax.grad(loss), client, server, batches)
    state, key, held = algorithm.init([jnp.asarray(part) for part in work.start()]), jax.random.PRNGKey(0), {}
    try:
        for cohort in work.cohorts:
            work.begin()
            for k in cohort:
                if k not in held:
                    held[k] = fedjax.ClientDataset(dict(zip("xy", work.normalized(k), strict=True)))
            state, _ = algorithm.apply(state, [(str(k).encode(), held[k], key) for k in cohort])
            jax.block_until_ready(state.params)
            work.end()
    except Ended:
        pass
    work.finish([np.asarray(part) for part in state.params])


if __name__ == "__main__":
    main(sys.argv[1])
