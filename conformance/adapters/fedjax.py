"""Adapter of FedJAX: its federated algorithms, in float64."""

from __future__ import annotations

from importlib.metadata import version as version_of

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
jax.tree_map = jax.tree_util.tree_map  # the last FedJAX uses this name, which JAX removed later

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg, fed_prox, mime  # noqa: E402

from conformance.problem import Case, Trace  # noqa: E402

REQUIREMENTS = ("fedjax==0.0.17", "jax==0.10.2")
METHODS = ("fedavg", "fedprox", "mime", "fedavgm")


def _losses(w: jax.Array, batch: dict[str, jax.Array], rng: object = None) -> jax.Array:
    log_p = jax.nn.log_softmax(batch["x"] @ w.T)
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1)[:, 0]


def run(case: Case) -> Trace:
    """Pass the clients to the algorithm round by round."""
    task = case.make()
    client = fedjax.optimizers.sgd(case.lr)
    server = fedjax.optimizers.sgd(1.0, momentum=case.options.get("beta", 0.0) or None)
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=max(task.sizes), num_epochs=case.steps)
    if case.method == "fedprox":
        algorithm = fed_prox.fed_prox(_losses, client, server, batches, proximal_weight=case.options["mu"])
    elif case.method == "mime":
        full_batch = fedjax.PaddedBatchHParams(batch_size=max(task.sizes))
        algorithm = mime.mime(_losses, client, batches, full_batch, server_learning_rate=1.0)
    else:
        grad = jax.grad(lambda w, batch, rng: _losses(w, batch).mean())
        algorithm = fed_avg.federated_averaging(grad, client, server, batches)
    data = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(task.x, task.y, strict=True)]
    state, models, key = algorithm.init(jnp.asarray(task.start())), [], jax.random.PRNGKey(0)
    for cohort in case.cohorts:
        state, _ = algorithm.apply(state, [(str(k).encode(), data[k], key) for k in cohort])
        models.append(np.asarray(state.params))
    return Trace(models, case.cohorts)


def version() -> str:
    """Return the version of the library."""
    return version_of("fedjax")
