"""Per-FedAvg: a global model that is good for every client after one gradient step on its data.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning: A Meta-Learning Approach", 2020, arXiv:2002.07948, Algorithm 1.
The batch of a step is split into equal parts ``B1``, ``B2`` and, for ``hf``, ``B3``::

    t  = theta_k - alpha grad f(theta_k; B1);    g = grad f(t; B2)
    fo   theta_k <- theta_k - beta g
    hf   theta_k <- theta_k - beta (g - alpha (grad f(theta_k + delta g; B3) - grad f(theta_k - delta g; B3)) / (2 delta))

``hf`` replaces the product of ``g`` with the Hessian by a difference of gradients. After the last round, a client takes
``steps`` steps of size ``alpha`` from the global model, on whole batches, to get its personal model. Samples that remain
after an equal split are not used. A learning-rate schedule scales ``beta`` as it scales the run's rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.execution import Batch, GradFn
from unskew.protocol.rules import ClientRule, Context, Tensors, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range


@dataclass(frozen=True)
class PerFedAvg(ClientRule):
    """Meta-learning of an initial model for one step of personalization.

    Attributes:
        weights: Client weighting with ``client_weighting=auto``; None if the method does not choose one.
        version: ``fo`` is the first-order method; ``hf`` approximates the product with the Hessian by a difference of
            gradients.
        beta: Learning rate of the global model. A learning-rate schedule scales it like ``lr``.
        alpha: Learning rate of the personal step; none is the run's ``lr``.
        delta: Step of the difference of gradients, for ``hf``.
        steps: Personal steps after the last round.
    """

    name: ClassVar[str] = "perfedavg"
    summary: ClassVar[str] = "a global model that is good after one step at each client"
    paper: ClassVar[str] = "Fallah et al. 2020, arXiv:2002.07948"
    needs = ("final_training",)
    weights: ClassVar[Weights | None] = "uniform"
    # Around the default, up to rates as large as those of FedAvg.
    spaces: ClassVar[Mapping[str, Space]] = {"beta": log_range(1e-4, 0.1)}
    idle_options = (({"version": "fo"}, ("delta",)),)

    version: Literal["fo", "hf"] = "fo"
    beta: Annotated[float, Field(gt=0)] = 0.001
    alpha: Annotated[float, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0)] = 0.001
    steps: Annotated[int, Field(ge=1)] = 1

    @property
    def final_steps(self) -> int:  # type: ignore[override]
        """Number of personal steps."""
        return self.steps

    @property
    def num_parts(self) -> int:  # type: ignore[override]
        """Number of parts into which a batch is split."""
        return 3 if self.version == "hf" else 2

    def acts_before(self, other: ClientRule) -> bool:
        """Return whether the other rule adds a vector to the gradient: each of its gradients would contain it."""
        return other.shifts_gradient

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the optimizer, the number of local steps and the size of the batches.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the optimizer is not plain SGD, a client takes fewer than ``steps`` local steps, or a batch has
                too few samples to be split.
        """
        need_plain_sgd(self.name, run)
        for size, client in {size: client for client, size in enumerate(run.federation.sizes.tolist())}.items():
            if run.training.steps(size, client) < self.steps:
                raise ConfigError(
                    f"perfedavg:steps={self.steps} is more than the local steps of client {client}. Use fewer steps, or more "
                    "local_steps or local_epochs."
                )
            if min(cut.stop - cut.start for cut in run.training.cuts(size)) < self.num_parts:
                raise ConfigError(self.small_batch_reason(run, size, run.federation.client_label(client)))
        return ()

    def small_batch_reason(self, run: PreRunContext, size: int, client: str) -> str:
        """Return the reason why a batch of a client cannot be split, and the remedy.

        Args:
            run: Run to check.
            size: Number of training samples of the client.
            client: Label of the client.
        """
        batch, parts = run.training.batch_size, self.num_parts
        if batch < parts:
            cause = f"batch_size is {batch}. Set batch_size={parts} or more"
        elif size < parts:
            cause = (
                f"{client} has fewer training samples ({size}). Leave it out, or set a larger min in the partition, which "
                "also counts held-out samples (dirichlet:0.3,min=10)"
            )
        else:
            cause = f"the last batch of {client} has fewer samples. Set drop_last, or another batch_size"
        return f"perfedavg splits every batch into {parts} parts, but {cause}."

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Return the meta-gradient, times ``beta / lr``; after the last round, the gradient of the personal steps."""

        def personal(v: Tensor, batch: Batch) -> Tensor:
            g = grad_fn(v, batch)
            return g if self.alpha is None else g * (self.alpha / batch.lr)

        def meta(v: Tensor, batch: Batch) -> Tensor:
            size = len(batch.y) // self.num_parts
            spans = [slice(part * size, (part + 1) * size) for part in range(self.num_parts)]
            parts = [batch._replace(x=batch.x[span], y=batch.y[span]) for span in spans]
            alpha = batch.lr if self.alpha is None else self.alpha
            g = grad_fn(v - alpha * grad_fn(v, parts[0]), parts[1].untracked())
            if self.version == "hf":
                ahead, behind = (grad_fn(v + s * self.delta * g, parts[2].untracked()) for s in (1, -1))
                g = g - alpha * (ahead - behind) / (2 * self.delta)
            return g * (self.beta / ctx.training.lr)

        return personal if ctx.final else meta


def need_plain_sgd(name: str, run: PreRunContext) -> None:
    """Validate that local steps are those of plain SGD.

    Args:
        name: Name of the method, for the error.
        run: Run to check.

    Raises:
        ConfigError: If the optimizer is another one, or has momentum, decay or clipping.
    """
    if not run.training.plain_sgd:
        raise ConfigError(
            f"{name} supports only plain SGD. Use optimizer=sgd with momentum=0 and weight_decay=0, and do not set "
            "clip_grad_norm."
        )
