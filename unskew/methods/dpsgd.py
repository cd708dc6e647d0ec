"""Sample-level differential privacy at each client: every local step is a step of DP-SGD.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep Learning with Differential Privacy", 2016, arXiv:1607.00133,
Algorithm 1. Each sample of client ``k`` is in the batch of a step with probability ``q_k = B / n_k``, independently of the
others (Poisson batches). ``B`` is ``batch_size``, or ``n_k`` if the client has fewer samples::

    g = ( sum_i g_i min(1, C / ||g_i||) + N(0, (sigma C)^2 I) ) / B

``B`` is the expected size of a batch, so the divisor does not depend on the samples. An empty batch gives noise alone. A
gradient that is not finite contributes 0.

The guarantee holds for each client, for one sample added or removed, against the server and all other clients, because the
noise is added at the client. A client that took part in ``R`` rounds of ``tau`` steps has run ``R tau`` steps of a
Poisson-subsampled Gaussian mechanism with rate ``q_k`` and noise ``sigma``. ``R`` counts all updates that arrived, including
those that the server discarded. The training loss is not private, so it does not leave the client.

Only the gradient of the loss sees samples. ``dpsgd`` computes it, so it acts before all other client rules, wherever it
stands in the expression. What they add (FedProx's term, control variates) is a function of private values and costs nothing
further, but must be added after clipping. So only rules are supported that use the gradient once per step and see the data
in no other way.

Batches differ in size. ``unskew.engines.batches.draw_poisson_batch`` fills them up with rows of weight 0 to few different
sizes, so that clients can be trained together. No batch is truncated or drawn again, so sampling is exact. The gradients of
the rows are masked before they are summed, and layers may not mix samples (BatchNorm is not supported), so these rows do
not change the result. Dropout has a separate key for each row.

Batches, noise, and what depends on the row of a sample in its batch (dropout, augmentation) are drawn from a secret key
(``unskew.secret_draws``), or from the seed with ``reproducible``. At real sites they always come from the system's entropy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.methods.clipped_sum import ClippedSum, round_down
from unskew.models.execution import Batch, GradFn
from unskew.models.spec import ModelSpec
from unskew.privacy.accounting import GaussianRounds, default_delta, epsilon, noise_for
from unskew.protocol.federation_info import ClientDataView, FederationInfo
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Context, Method, Report, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.secret_draws import is_seeded, secret_normal, secret_words, seeded_report, seeded_warnings
from unskew.seeding import derive, fold, normal
from unskew.tasks.base import Task

PURPOSE = derive(0, "dpsgd client")
AT_ONCE = 1 << 26
"""Largest number of values in the gradients of single samples that are in memory at once, per client."""
ALLOWED: Mapping[str, Collection[str]] = {
    # One gradient per step, to which they add other terms, or at a point that depends on received models only.
    "gradient": ("fedprox", "fedacg", "scaffold", "feddyn", "fedpvr", "fedlesam"),
    "trainable_mask": ("fedrep", "fedbabu"),
}
"""Rules that may override a hook that sees batches."""
DATA_HOOKS = {
    "client_info": "reads the clients' data before training",
    "survey": "sums values over all data of a client",
    "loss": "changes the loss of a batch",
    "gradient": "may use a batch for more than one gradient",
    "trainable_mask": "chooses parameters by the batch",
}
"""Hooks that see data, with what a rule does that overrides them."""


@dataclass(frozen=True)
class DPSGD(ClientRule):
    """Differentially private local steps, for one sample of a client added or removed.

    Attributes:
        noise: Noise multiplier ``σ``, the same at all clients. Set ``noise``, ``epsilon`` or both.
        epsilon: Privacy budget of each client. Without ``noise``, each client computes its own noise from it, for its
            ``q_k`` and the steps of all rounds; with ``noise``, unskew raises an error if the budget does not suffice
            for all rounds.
        delta: Probability that the guarantee does not hold; none for ``n_k^-1.1``. It must be below ``1/n_k`` at every
            client.
        clip: Clipping norm ``C`` of the gradient of one sample.
        accountant: ``rdp`` or ``prv``; ``prv`` is slower and gives a smaller ``epsilon``.
        reveal: Record the training loss, and allow ``diagnose``, which the guarantee does not cover.
        reproducible: Compute noise and batches from the seed, so that the run can be repeated. There is then no
            guarantee. With ``dp``, set it for both or none.
    """

    name: ClassVar[str] = "dpsgd"
    summary: ClassVar[str] = "differential privacy of samples: clipped gradients and noise in every local step"
    paper: ClassVar[str] = "Abadi et al. 2016, arXiv:1607.00133"
    poisson_batches: ClassVar[bool] = True
    continued: ClassVar[tuple[str, ...]] = ("spent",)
    planned: ClassVar[tuple[str, ...]] = ("sizes",)
    spaces: ClassVar[Mapping[str, Space]] = {"clip": log_range(0.1, 10.0)}
    idle_options = (({"noise": 0}, ("epsilon",)),)

    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    accountant: Literal["rdp", "prv"] = "rdp"
    reveal: bool = False
    reproducible: bool = False

    @property
    def draws_secretly(self) -> bool:  # type: ignore[override]
        """Return whether noise and batches are drawn from a secret key."""
        return self.noise != 0 and not self.reproducible

    @property
    def hidden_metrics(self) -> Collection[str]:  # type: ignore[override]
        """The clients' training loss, unless it is revealed."""
        return () if self.reveal else ("train_loss",)

    # ---- before the run -------------------------------------------------------------------------------------------------

    def conflict_with(self, method: Method) -> str | None:
        """Name rules that use samples other than through one gradient per step.

        Args:
            method: The composition.
        """
        other = method.aggregate
        if isinstance(other, ClippedSum) and other.reproducible != self.reproducible:
            return "dpsgd and dp of one run draw from the same key or seed. Set reproducible=true for both or none."
        if method.data:
            return (
                f"{method.data[0].name} changes the clients' data, and dpsgd does not protect how. Remove one of them."
            )
        if callable(method.weights):
            return f"{method.name} weights clients by their data, which dpsgd does not protect. Remove one of the two rules."
        for rule in method.client:
            if rule is self:
                continue
            if "full_gradient" in rule.needs:
                hint = " Use option II." if rule.name == "scaffold" else ""
                return f"{rule.name} needs a gradient over all data of a client, which dpsgd does not protect.{hint}"
            for hook, what in DATA_HOOKS.items():
                if getattr(type(rule), hook) is not getattr(ClientRule, hook) and rule.name not in ALLOWED.get(
                    hook, ()
                ):
                    return (
                        f"{rule.name} {what}, but dpsgd protects samples only if one gradient per step is all that depends "
                        f"on them. Use {', '.join(ALLOWED['gradient'])}, or a method that changes only the server."
                    )
        if method.server is not None and method.server.steps_without == "clients":
            return f"{method.server.name} trains without clients, so dpsgd has nothing to protect."
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the options, and that nothing else reveals samples.

        Args:
            run: Configuration, federation and model of the run.

        Returns:
            Warnings for the user.

        Raises:
            ConfigError: If the options are incomplete or contradictory, or samples would not be protected.
        """
        if self.noise is None and self.epsilon is None:
            raise ConfigError("dpsgd needs noise or epsilon, such as dpsgd:epsilon=8.")
        mixing = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in run.spec.module.modules())
        if mixing or run.spec.buffer_sizes or run.spec.counts:
            raise ConfigError(
                "dpsgd needs a model that treats each sample separately, but this one has BatchNorm or other buffers. Use a "
                "model with GroupNorm or without normalization."
            )
        if getattr(run.spec.module, "quantized", False):
            raise ConfigError(
                "dpsgd maps gradients of single samples, which 4-bit weights do not support. Use base_dtype: bfloat16."
            )
        if any(getattr(spec.module, "packed", False) for spec in run.spec.architectures):
            raise ConfigError(
                "dpsgd protects single rows, but with text.pack one text decides in which rows others are, so no text would "
                "be protected. Set text.pack to false."
            )
        if run.spec.draws_globally:
            raise ConfigError(
                "dpsgd draws the random numbers of each sample from a secret key. This model draws others than those of "
                "nn.Dropout. Replace such layers by nn.Dropout, or remove them."
            )
        run.need_no_reports(self.name)
        run.need_no_statistics(self.name)
        if run.diagnose and not self.reveal:
            raise ConfigError(
                f"diagnose={run.diagnose[0]} shows values that dpsgd does not protect. Remove it, or set dpsgd:reveal=true."
            )
        sizes = sorted({int(size) for size in run.federation.sizes})
        for size in sizes:
            self.delta_of(size)
        if self.noise == 0:
            return ("dpsgd:noise=0 clips gradients but adds no noise: there is no privacy.",)
        warnings = seeded_warnings(self.name, self.reproducible)
        # With epsilon, this finds the noise of the clients; with both, it validates that the noise suffices.
        counts = {size: run.training.steps(size, 0) * run.rounds for size in (sizes if self.epsilon else sizes[:1])}
        for size, steps in counts.items():
            noise = self.noise_of(size, steps, run.training.batch_size)
            if self.noise is None or self.epsilon is None:
                continue
            spent = _epsilon(
                ((noise, rate_of(size, run.training.batch_size), steps),), self.delta_of(size), self.accountant
            )
            if spent > self.epsilon:
                raise ConfigError(
                    f"With dpsgd:noise={self.noise:g}, a client of {size} samples that takes part in all {run.rounds} rounds "
                    f"spends epsilon={spent:.4g}, above {self.epsilon:g}. Use more noise, fewer rounds, or only epsilon."
                )
        if self.accountant == "prv" and run.training.batch_size >= sizes[-1]:
            warnings.append(
                "dpsgd:accountant=prv has no effect, because every batch contains all samples of a client. Use a smaller "
                "batch_size."
            )
        return warnings

    @property
    def noise_for_rounds(self) -> bool:  # type: ignore[override]
        """True if ``noise`` is not set; it is then computed from epsilon for the number of rounds."""
        return self.noise is None

    def delta_of(self, samples: int) -> float:
        """Return delta of a client, by default ``n_k^-1.1``.

        Args:
            samples: Number of samples of the client.

        Raises:
            ConfigError: If it is not below ``1/n_k``.
        """
        delta = default_delta(samples) if self.delta is None else self.delta
        if not delta < 1 / samples:
            raise ConfigError(
                f"dpsgd:delta={delta:g} must be below 1/{samples}, the reciprocal of a client's number of samples. Use a "
                "smaller delta, or clients with more samples."
            )
        return delta

    def noise_of(self, samples: int, steps: int, batch_size: int) -> float:
        """Return the noise multiplier of a client.

        Args:
            samples: Number of samples of the client.
            steps: Number of local steps of a client that takes part in all rounds.
            batch_size: Expected number of samples in a batch.
        """
        if self.noise is not None:
            return self.noise
        assert self.epsilon is not None
        rate = rate_of(samples, batch_size)
        return noise_for(self.epsilon, self.delta_of(samples), rate, steps, self.accountant)

    # ---- at the clients -------------------------------------------------------------------------------------------------

    def client_info(self, data: ClientDataView) -> Tensors:
        """Compute the client's noise and its expected batch size, which depend on its number of samples only.

        Args:
            data: View of the client's data.
        """
        samples, plan = data.client.num_samples, data.plan
        steps = plan.training.steps(samples, data.client.id) * plan.rounds
        noise = self.noise_of(samples, steps, plan.training.batch_size)
        values = {"noise": noise, "size": float(min(plan.training.batch_size, samples))}
        return {
            name: torch.tensor(value, dtype=torch.float64, device=data.like.device) for name, value in values.items()
        }

    def gradient(self, grad_fn: GradFn, ctx: Context, carry: Tensors) -> GradFn:
        """Compute the private gradient of the loss instead of ``grad_fn``, which is the plain one.

        Args:
            grad_fn: Gradient of the loss.
            ctx: Context of the client.
            carry: Carry of local training; unused.
        """
        info = ctx.client_info

        def private(v: Tensor, batch: Batch) -> Tensor:
            masks = batch.key
            if ctx.secret is None:
                noise = normal(fold(fold(ctx.key, PURPOSE), batch.step), (len(v),))
            else:
                noise = secret_normal(ctx.secret, 2 * batch.step, len(v))
                masks = secret_words(ctx.secret, 2 * batch.step + 1, 1)[0]
            total, loss = clipped_sum(ctx.spec, ctx.task, v, batch._replace(key=masks), self.clip)
            # The loss is not private: without `reveal` it does not leave the client.
            ctx.model.loss = loss if self.reveal else torch.zeros_like(loss)
            return ((total.to(torch.float64) + noise * (info["noise"] * self.clip)) / info["size"]).to(v.dtype)

        return private

    # ---- at the server --------------------------------------------------------------------------------------------------

    def server_init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize the record of private steps: rows of client, noise multiplier, sampling rate and number of steps.

        The noise multiplier is negative if the noise was computed from the seed.

        Args:
            v: Initial model, ``[d]``.
            federation_info: Server's information about the federation.
        """
        sizes = torch.as_tensor(federation_info.sizes(), dtype=torch.float64)
        return {"sizes": sizes, "spent": torch.zeros(0, 4, dtype=torch.float64)}

    def record_clients(self, state: Tensors, clients: Sequence[int], plan: RoundPlan) -> Tensors:
        """Count the steps of the clients whose updates arrived.

        Args:
            state: State of the server half.
            clients: Client numbers.
            plan: Schedule of the run.
        """
        counts = {(client, noise, rate): steps for client, noise, rate, steps in state["spent"].tolist()}
        for client in clients:
            samples, training = int(state["sizes"][client]), plan.training
            steps = training.steps(samples, client)
            noise = self.noise_of(samples, steps * plan.rounds, training.batch_size)
            row = float(client), -noise if self.reproducible else noise, rate_of(samples, training.batch_size)
            counts[row] = counts.get(row, 0.0) + steps
        rows = [[*row, steps] for row, steps in counts.items()]
        return {**state, "spent": torch.tensor(rows, dtype=torch.float64, device=state["spent"].device)}

    def report(self, state: Tensors, plan: RoundPlan) -> Report:
        """Return the privacy that each client has spent, and the weakest guarantee of any client."""
        spent = self.spent(state)
        worst = max(
            spent.values(),
            key=lambda fields: (fields["epsilon"], fields["delta"]),
            default={"epsilon": 0.0, "delta": 0.0},
        )
        if math.isinf(worst["epsilon"]):
            text = "None: gradients of samples were clipped, but some steps had no noise."
            return Report({"epsilon": None, "delta": worst["delta"], "privacy": text}, spent)
        if is_seeded(state["spent"]):
            rows = {client: {"epsilon_if_secret": fields["epsilon"]} for client, fields in spent.items()}
            return Report(seeded_report(worst), rows)
        exact = all(rate == 1 for _, _, rate, _ in state["spent"].tolist())
        accountant = "exact Gaussian" if exact else f"{self.accountant.upper()} (opacus)"
        text = (
            f"(epsilon={worst['epsilon']:.4g}, delta={worst['delta']:.3g}) or better for one sample of one client, added or "
            "removed, against the server and all other clients, who see only noisy gradients; Poisson batches, "
            f"{accountant} accountant. clients.jsonl has the values of each client. Released: a client's updates of all "
            "rounds, and all models. Not covered: numbers of samples, class counts and metrics on the clients' own samples "
            "(clients.jsonl; client_*, constant_*, personal_* and validation_* in summary.json and metrics.jsonl); other "
            "samples of the same client that resemble one sample; choices made with the same data, such as tuning and early "
            "stopping; further runs on the same data"
            f"{'; training losses and diagnostics (reveal=true)' if self.reveal else ''}."
        )
        return Report({**worst, "privacy": text}, spent)

    def spent(self, state: Tensors) -> dict[int, dict[str, Any]]:
        """Return ``epsilon`` and ``delta`` that each client has spent, by client number.

        Args:
            state: State of the server half.
        """
        histories: dict[int, list[tuple[float, float, int]]] = {}
        for client, noise, rate, steps in state["spent"].tolist():
            histories.setdefault(int(client), []).append((abs(noise), rate, int(steps)))
        deltas = {client: self.delta_of(int(state["sizes"][client])) for client in histories}
        return {
            client: {"epsilon": _epsilon(tuple(sorted(rows)), deltas[client], self.accountant), "delta": deltas[client]}
            for client, rows in histories.items()
        }


def rate_of(samples: int, batch_size: int) -> float:
    """Return the probability with which a sample is in a batch.

    Args:
        samples: Number of samples of the client.
        batch_size: Expected number of samples in a batch.
    """
    return min(1.0, batch_size / samples)


@lru_cache(maxsize=4096)
def _epsilon(history: tuple[tuple[float, float, int], ...], delta: float, accountant: Literal["rdp", "prv"]) -> float:
    return epsilon([GaussianRounds(*row) for row in history], delta, accountant)


def clipped_sum(spec: ModelSpec, task: Task, v: Tensor, batch: Batch, clip: float) -> tuple[Tensor, Tensor]:
    """Compute the sum of the gradients of single samples, each clipped to a norm of at most ``clip``.

    Args:
        spec: Layout of the model, which has no buffers.
        task: Task that defines the loss.
        v: Parameters, ``[d]``.
        batch: Mini-batch; rows of weight 0 and frozen parameters are left out.
        clip: Clipping norm.

    Returns:
        The sum, ``[d]``, and the mean loss of the samples, 0 without samples.
    """

    def sample_loss(v: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        if spec.stream is not None:
            spec.stream.start(key)
        return task.loss(spec.forward(v, {}, x[None], train=True).logits, y[None])

    count = len(batch.x)
    weights = torch.ones(count, device=v.device) if batch.weight is None else batch.weight
    keys = fold(batch.key, torch.arange(count, device=v.device))
    differentiate = torch.func.vmap(torch.func.grad_and_value(sample_loss), in_dims=(None, 0, 0, 0))
    total, loss = torch.zeros_like(v), torch.zeros_like(v[0])
    portion = max(1, AT_ONCE // len(v))
    for first in range(0, count, portion):
        rows = slice(first, first + portion)
        gradients, losses = differentiate(v, batch.x[rows], batch.y[rows], keys[rows])
        if batch.trainable is not None:  # else frozen parameters would leave less of the norm to the others
            gradients = torch.where(batch.trainable, gradients, 0.0)
        norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        counts = weights[rows] > 0
        used = counts & norms.isfinite()
        factors = round_down((clip / norms).clamp(max=1.0), gradients)[:, None]
        total = total + torch.where(used[:, None], gradients * factors, 0.0).sum(0)
        loss = loss + torch.where(counts, losses, 0.0).sum()
    if spec.stream is not None:
        spec.stream.start(None)
    return total, loss / weights.sum().clamp_min(1.0)
