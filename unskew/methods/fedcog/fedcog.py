"""FedCOG: clients generate data that the global model knows but their previous model does not, and distill from it.

Ye, Du, Ni, Chen, Wang, "Fake It Till Make It: Federated Learning with Consensus-Oriented Generation", 2023,
arXiv:2312.05966 (ICLR 2024). In rounds ``t >= start_round`` each client

1. learns ``N`` inputs ``x`` (Adam from Gaussian noise, both models frozen) that minimize
   ``lambda_ce CE(G(x), y) + lambda_dis L_dis(x) + lambda_bn L_bn(x)``. ``G`` is the global model, ``P`` the client's model
   after its last training, and ``L_dis = 1 - JS(softmax(G(x)/T_js), softmax(P(x)/T_js))`` makes the two disagree;
2. trains on ``w_real CE(real batch) + w_kd T^2 KL(softmax(z/T) || softmax(theta(x)/T))`` with the teacher's stored logits
   ``z = G(x)``. The synthetic batch has the size of the real one. The inputs are shuffled, as in the authors' code, and used
   in turn, so that their numbers of uses differ by at most one.

No additional data are communicated, and the server needs only sums.

For multi-label tasks, ``CE`` is the binary cross-entropy, and ``KL`` and ``JS`` are those of one Bernoulli variable per
label, all averaged over labels. The paper and its code do not define them; these definitions are ours. ``y`` is one-hot. With
``cooccurrence`` other labels are added, each with the share of the client's samples with label ``y`` that also have it.

With ``generator="network"`` a network that generates the inputs is trained instead (``unskew.generators.learned.decoder``).

If paper and authors' code differ, this module follows the paper; ``fedcog-authors`` has the settings of the code. The paper
does not state the optimizer of the inputs, so it is that of the code. A client that never trained learns its inputs without
the disagreement. The synthetic pass does not change the normalization buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.generators.labels import LabelList, allocate_counts, draw_cooccurring, labels_from_counts, repeat_labels
from unskew.generators.learned import decoder
from unskew.generators.learned.inversion import Maker, minimize, random_crop_and_flip, statistics_distance
from unskew.generators.learned.model_pair import paired_logits
from unskew.models.execution import Batch, LossFn
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.rules import ClientRule, Context, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import fold, normal, uniform
from unskew.tasks.base import Task

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class FedCOG(ClientRule):
    """Consensus-oriented generation.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        tasks_reason: Reason why other tasks are not supported: a clause that follows "because".
        n: Number of generated inputs.
        g_steps: Optimization steps on the inputs.
        g_batch: Number of inputs optimized at a time, if ``n`` do not fit into memory; each batch keeps its own best
            step. 0: all at once.
        start_round: First round with generation, as in the paper; earlier rounds train without it. A shorter run raises
            an error, so lower it for 50 rounds or fewer.
        g_lr: Learning rate of Adam on the inputs.
        lambda_ce: Weight of the cross-entropy in the generation.
        lambda_dis: Weight of the disagreement.
        lambda_bn: Weight of the distance between the batch's statistics and the global model's.
        coefficients: ``w_real = 1`` and ``w_kd = lambda_kd``. ``auto`` computes them from the client's number of real
            samples and its class deficits; they then sum to 1.
        lambda_kd: Weight of the distillation, for ``fixed``.
        t_js: Temperature of the divergence.
        t: Temperature of the distillation.
        labels: Target labels: ``uniform``, ``complementary`` to the client's labels, or ``explicit``.
        explicit: For ``labels=explicit``, a list of labels, repeated until there are ``n``. Write ``explicit=0;1;2`` in
            an expression (quoted in a shell), ``explicit=(0, 1, 2)`` in Python.
        source: ``both`` models generate the data. ``global`` leaves the disagreement out; ``noise`` keeps the initial
            noise.
        supervision: Distill the logits. ``hard`` uses the target labels.
        js: The paper's divergence, or ``reversed_clamped`` as in the authors' code.
        alias: Keep the last inputs with the best step's logits, as the authors' code does by mistake.
        max_prev_age: Ignore a client's own model that is older than this number of rounds; 0 allows any age.
        cycle: Shuffle the inputs once per round and use them in turn, as in the authors' code. ``by_step`` keeps the
            order of classes and computes each batch's position as if all real batches were equally large; otherwise
            some inputs are never used.
        double: Generate new inputs for the second half of local training.
        cooccurrence: For multi-label tasks only. A target also gets each other label, with the fraction of the client's
            samples of its first label that have it.
        generator: Optimize the inputs themselves, or with ``network`` a network that generates images.
        augment: Crop and flip the images at random in every generation step; images only.
    """

    name: ClassVar[str] = "fedcog"
    summary: ClassVar[str] = "distills from generated data that the global model knows and the local model does not"
    paper: ClassVar[str] = "Ye et al. 2023, arXiv:2312.05966"
    # The paper's grids.
    spaces: ClassVar[Mapping[str, Space]] = {"lambda_dis": log_range(0.01, 10.0), "lambda_kd": log_range(1e-3, 1.0)}
    needs = ("counts",)
    tasks_reason: ClassVar[str] = "it learns inputs for given labels"
    idle_options = (
        ({"coefficients": "auto"}, ("lambda_kd",)),
        ({"supervision": "hard"}, ("t",)),
        ({"lambda_dis": 0}, ("t_js", "js", "max_prev_age")),
        ({"source": "global"}, ("lambda_dis", "t_js", "js", "max_prev_age")),
        ({"source": "noise"}, ("g_lr", "lambda_ce", "lambda_dis", "lambda_bn", "t_js", "js", "max_prev_age")),
    )

    n: Annotated[int, Field(ge=1)] = 256
    g_steps: Annotated[int, Field(ge=0)] = 100
    g_batch: Annotated[int, Field(ge=0)] = 0
    start_round: Annotated[int, Field(ge=0)] = 50
    g_lr: Positive = 0.01
    lambda_ce: NonNegative = 1.0
    lambda_dis: NonNegative = 0.1
    lambda_bn: NonNegative = 0.0
    coefficients: Literal["fixed", "auto"] = "fixed"
    lambda_kd: NonNegative = 0.01
    t_js: Positive = 1.0
    t: Positive = 1.0
    labels: Literal["uniform", "complementary", "explicit"] = "uniform"
    explicit: LabelList = ()
    source: Literal["both", "global", "noise"] = "both"
    supervision: Literal["soft", "hard"] = "soft"
    js: Literal["paper", "reversed_clamped"] = "paper"
    alias: bool = False
    max_prev_age: Annotated[int, Field(ge=0)] = 0
    cycle: Literal["shuffled", "by_step"] = "shuffled"
    double: bool = False
    cooccurrence: bool = False
    generator: Literal["pixels", "network"] = "pixels"
    augment: bool = False

    @property
    def scales_loss(self) -> bool:  # type: ignore[override]
        """True if ``w_real`` may differ from 1."""
        return self.coefficients == "auto"

    def __post_init__(self) -> None:
        """Validate that ``explicit`` is set if and only if ``labels`` is ``explicit``."""
        if (self.labels == "explicit") != bool(self.explicit):
            raise ConfigError(
                "fedcog:labels=explicit needs a list such as explicit=0;1;2, and vice versa. Set both or none."
            )

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate options and data.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If an option does not fit the data, or the run ends before the first round with generation.
        """
        federation = run.federation
        run.need_numbers(self.name)
        if self.source == "noise" and (self.generator == "network" or self.augment):
            raise ConfigError(
                "fedcog:source=noise does not learn inputs, so generator=network and augment=true have no effect. Remove "
                "them."
            )
        if self.generator == "network" and self.g_batch:
            raise ConfigError("fedcog:generator=network trains one network for all inputs. Remove g_batch.")
        if self.cooccurrence and "one_class" in federation.objective.provides:
            raise ConfigError("fedcog:cooccurrence=true needs a multi-label task, but here each sample has one class.")
        if self.explicit and max(self.explicit) >= federation.classes:
            wrong, last = max(self.explicit), federation.classes - 1
            raise ConfigError(
                f"fedcog:explicit contains the label {wrong}, but the classes of the data are 0 to {last}."
            )
        wanted = {"generator=network": self.generator == "network", "augment=true": self.augment}
        for option in (name for name, expected in wanted.items() if expected and len(federation.shape) != 3):
            raise ConfigError(
                f"fedcog:{option} needs images, but the inputs of {federation.name} have shape {federation.shape}. "
                "Remove the option."
            )
        run.need_rounds_after(self.name, "start_round", self.start_round)
        return ()

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the client's number of samples: total, per label ``[C]``, and with ``cooccurrence`` per pair ``[C, C]``."""
        counts = data.class_counts()
        statistics = {"counts": counts, "samples": counts.new_tensor(data.client.num_samples)}
        return {**statistics, "pairs": data.label_pairs()} if self.cooccurrence else statistics

    def begin(self, ctx: Context) -> Tensors:
        """Generate inputs ``x [N, ...]`` with the teacher's logits ``z [N, C]``, and compute the two coefficients."""
        if ctx.round < self.start_round:
            return {}
        counts = ctx.client_info["counts"]
        y = self.labeled(ctx, self.targets(counts))
        x, z = self.in_batches(ctx, y, ctx.key)
        if self.double:
            second = self.in_batches(ctx, y, fold(ctx.key, 7))
            x = torch.cat([x, second[0]])
            z = torch.cat([z, second[1]])
            y = torch.cat([y, y])
        w_real, w_kd = self.weights_of(counts)
        carry = {"x": x, "z": z, "y": y, "w_real": w_real, "w_kd": w_kd}
        if self.cycle == "shuffled":
            carry["order"] = torch.argsort(uniform(fold(ctx.key, 9), (self.n,)), stable=True)
        return carry

    def targets(self, counts: Tensor) -> Tensor:
        """Return exactly ``N`` target labels for a client with ``counts [C]``, rounded by largest remainders."""
        if self.labels == "explicit":
            return repeat_labels(self.explicit, self.n).to(counts.device)
        deficit = counts.max() - counts
        even = torch.ones_like(counts)
        shares = even if self.labels == "uniform" else torch.where(deficit.sum() == 0, even, deficit)
        return labels_from_counts(allocate_counts(shares, self.n), self.n)

    def labeled(self, ctx: Context, primary: Tensor) -> Tensor:
        """Convert one label per input, ``primary [N]``, to targets of the task; ``[N, L]`` for multi-label tasks.

        Args:
            ctx: Context of the client in this round.
            primary: One label per input, ``[N]``.
        """
        counts = ctx.client_info["counts"]
        y = ctx.task.targets(primary, len(counts))
        if not self.cooccurrence:
            return y
        further = draw_cooccurring(fold(ctx.key, 8), primary, ctx.client_info["pairs"], counts)
        return torch.maximum(y, further.to(y.dtype))

    def weights_of(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``w_real`` and ``w_kd``; with ``auto``, in proportion to real samples and class deficits, summing to 1."""
        if self.coefficients == "fixed":
            return torch.ones_like(counts[0]), torch.full_like(counts[0], self.lambda_kd)
        real, missing = counts.sum(), (counts.max() - counts).sum()
        w_kd = missing / (real + missing).clamp_min(1)  # 0 for a client without any labels
        return 1 - w_kd, w_kd

    def in_batches(self, ctx: Context, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Learn inputs for the labels ``y`` in separate batches of ``g_batch``, each with its own best step.

        Args:
            ctx: Context of the client in this round.
            y: Targets of the inputs, ``[N]`` or ``[N, L]``.
            key: Random key.
        """
        if not 0 < self.g_batch < len(y):
            return self.synthesize(ctx, y, key)
        parts = [
            self.synthesize(ctx, part, fold(fold(key, 11), i)) for i, part in enumerate(torch.split(y, self.g_batch))
        ]
        x, z = zip(*parts, strict=True)
        return torch.cat(x), torch.cat(z)

    def synthesize(self, ctx: Context, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Learn inputs for the labels ``y``; returns them with the teacher's logits.

        Args:
            ctx: Context of the client in this round.
            y: Targets of the inputs, ``[n]`` or ``[n, L]``.
            key: Random key.
        """
        start, make, betas = self.maker(ctx, key, len(y))
        disagree = self.source == "both" and "v" in ctx.state
        weight = torch.as_tensor(self.lambda_dis if disagree else 0.0)
        teachers = (ctx.v_global, ctx.b_global)
        both = (
            paired_logits(ctx.spec, teachers, (ctx.state["v"], ctx.state["b"]))
            if disagree and not self.lambda_bn
            else None
        )
        if self.max_prev_age and "round" in ctx.state:
            weight = torch.where(ctx.round - ctx.state["round"] <= self.max_prev_age, weight, torch.zeros_like(weight))

        def objective(point: Tensor, t: int) -> tuple[Tensor, Tensor]:
            x = make(point)
            if self.augment:
                x = random_crop_and_flip(x, fold(fold(key, 3), t), ctx.pixels.inputs(torch.zeros_like(x[:1])))
            if self.lambda_bn:
                output, distance = statistics_distance(ctx.spec, ctx.v_global, ctx.b_global, x)
                teacher = output.logits
            elif both is None:
                teacher = ctx.spec.forward(ctx.v_global, ctx.b_global, x).logits
            else:
                teacher, student = both(x)
            loss = self.lambda_ce * ctx.task.loss(teacher, y)
            if disagree:
                if self.lambda_bn:
                    student = ctx.spec.forward(ctx.state["v"], ctx.state["b"], x).logits
                loss = loss + weight * self.disagreement(ctx.task, teacher, student)
            return loss + self.lambda_bn * distance if self.lambda_bn else loss, teacher

        steps = 0 if self.source == "noise" else self.g_steps
        point, z = minimize(start, objective, steps, self.g_lr, betas, last=self.alias)
        x = make(point)
        if self.augment and not self.alias:
            # The stored images are not cropped, so the logits of their crops do not belong to them.
            z = ctx.spec.forward(ctx.v_global, ctx.b_global, x).logits
        return x, z

    def maker(self, ctx: Context, key: Tensor, count: int) -> Maker:
        """Return the initial variables, the function that converts them to ``count`` inputs, and Adam's decay rates.

        Args:
            ctx: Context of the client in this round.
            key: Random key.
            count: Number of inputs.
        """
        if self.generator == "network":
            return decoder.make_decoder(key, count, ctx.spec.shape, ctx.v_global.dtype, ctx.pixels)
        return normal(key, (count, *ctx.spec.shape)).to(ctx.v_global.dtype), lambda point: point, (0.5, 0.9)

    def disagreement(self, task: Task, teacher: Tensor, student: Tensor) -> Tensor:
        """Compute ``L_dis = 1 - JS``, which is 1 if the models agree, and at least ``1 - ln 2``.

        Args:
            task: Task of the data.
            teacher: Logits of the global model, ``[n, C]``.
            student: Logits of the client's model, ``[n, C]``.
        """
        if self.js == "paper":
            return task.disagreement(teacher, student, self.t_js)
        p, q = (task.beliefs(logits / self.t_js).exp() for logits in (teacher, student))
        p, q, mean = (d.clamp(0.01, 0.99) for d in (p, q, (p + q) / 2))
        return 1 - (0.5 * (kl(mean, q) + kl(mean, p))).clamp(0, 1)

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """Return ``w_real loss + w_kd (distillation on a synthetic batch)``."""
        if not carry:
            return loss_fn

        def distilled(v: Tensor, batch: Batch) -> Tensor:
            at = self.step_indices(ctx, batch.step, len(batch.x), carry)
            if self.double:
                at = at + torch.where(batch.step * 2 >= ctx.steps, self.n, 0)
            logits = ctx.model(v, carry["x"][at], False).logits
            if self.supervision == "hard":
                term = ctx.task.loss(logits, carry["y"][at])
            else:
                term = self.t**2 * ctx.task.divergence(carry["z"][at], logits, self.t)
            return carry["w_real"] * loss_fn(v, batch) + carry["w_kd"] * term

        return distilled

    def step_indices(self, ctx: Context, step: Tensor, size: int, carry: Tensors) -> Tensor:
        """Return the indices of a step's ``size`` inputs; a cycle continues where the previous batch ended.

        Args:
            ctx: Context of the client in this round.
            step: Index of the local step.
            size: Number of inputs of a step.
            carry: Values from ``begin``.
        """
        indices = torch.arange(size, device=carry["z"].device)
        if self.cycle == "by_step":
            return (step * size + indices) % self.n
        batch, an_epoch = ctx.training.batch_size, ctx.client_info["samples"].to(torch.int64)
        if ctx.training.drop_last:
            an_epoch = torch.where(an_epoch < batch, an_epoch, an_epoch // batch * batch)
        steps = ctx.epoch_steps.to(torch.int64)
        begin = step // steps * an_epoch + step % steps * batch
        return carry["order"][(begin + indices) % self.n]

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Store the trained model, with which the next generation disagrees."""
        ctx.state["v"], ctx.state["b"] = v.clone(), ctx.model.b.clone()
        ctx.state["round"] = torch.full_like(ctx.steps, float(ctx.round))


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute the mean of ``sum p log(p / q)`` over all axes but the last, for positive ``p`` and ``q``.

    Args:
        p: Positive values; the last axis sums to 1.
        q: Positive values of the same shape.
    """
    return (p * (p / q).log()).sum(-1).mean()
