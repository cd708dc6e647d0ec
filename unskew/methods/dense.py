"""DENSE: clients upload once, and the server distils their ensemble on images that it generates itself.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: Data-Free One-Shot Federated Learning", 2021, arXiv:2112.12371. With
``E(x) = mean_k f(x; theta_k)`` the mean of the clients' logits and ``S`` the student, in each of ``epochs``:

1. a new generator and its noise are learned for ``g_steps`` steps, with labels ``y`` drawn evenly, by
   ``CE(E(x), y) + lambda_bn mean_k BN_k(x) - lambda_adv mean_x [argmax E != argmax S] KL(E(x) || S(x))``;
   ``BN_k`` is DeepInversion's distance of batch statistics from client ``k``'s running ones;
2. the images of its best step join a pool with their ``E(x)``;
3. the student takes a pass over the pool with ``T^2 KL(softmax(E/T) || softmax(S/T))``; images are cropped at random from a
   black frame of 4 pixels and mirrored at random, and both ``E`` and ``S`` see them so.

Clients train to convergence and upload once: a run has one round, with as many local epochs as that takes. Fedssyn's
comparison has ten communication rounds first: ``start_round=9`` and ten rounds. Rounds before ``start_round`` are FedAvg's.

As in the authors' code (``heter_fl.py`` and ``helpers/synthesizers.py`` of zj-jayzhang/DENSE) one optimizer of the student
serves all epochs, so its momentum goes on, and the student augments. There crops are for CIFAR only; other data are
mirrored. Before, each pass here had a new optimizer and images as they are, with ``E(x)`` of each computed once, which is
much less work for the ensemble: ``dense:keep_optimizer=false,augment=false``.

Choices where text and code leave room: the student begins at the average of the clients' models; all of the pool is kept, as
inputs and not rounded to pixels; without BatchNorm its term is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.data.pixel_scaling import PixelScaling
from unskew.errors import ConfigError
from unskew.generators.learned import decoder
from unskew.generators.learned.inversion import minimize, random_crop_and_flip, statistics_distance
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import ServerRule, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import fold, uniform

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Whole = Annotated[int, Field(ge=1)]
Models = Sequence[tuple[Tensor, Tensor]]
"""Each client's model ``[d]`` and statistics ``[m]``."""


@dataclass(frozen=True)
class Dense(ServerRule):
    """Data-free one-shot distillation.

    Attributes:
        start_round: First round, from 0, that ends with distillation.
        epochs: Times that images are generated and the student takes a pass.
        g_steps, g_lr: Steps of a generator, and Adam's rate.
        batch: Images per generator, and per step of the student.
        lambda_bn, lambda_adv: Weights of the generator's terms.
        t: Temperature of the distillation; 20 is the authors' example.
        lr, momentum: Of the student's SGD.
        keep_optimizer: Whether its momentum goes on from epoch to epoch.
        augment: Whether the student and its teachers see images cropped and mirrored at random.
    """

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = "one upload; the ensemble is distilled on generated images"
    paper: ClassVar[str] = "Zhang et al. 2021, arXiv:2112.12371"
    # lambda_adv: 0.5 to 1 in the authors' code; a decade to each side of the others' values there.
    spaces: ClassVar[Mapping[str, Space]] = {
        "lr": log_range(1e-3, 0.1),
        "lambda_bn": log_range(0.1, 10.0),
        "lambda_adv": log_range(0.5, 1.0),
    }
    needs = ("individual",)
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    tasks_reason: ClassVar[str] = "its generator makes images of one class each"

    start_round: Annotated[int, Field(ge=0)] = 0
    epochs: Whole = 200
    g_steps: Whole = 30
    g_lr: Positive = 1e-3
    batch: Annotated[int, Field(ge=2)] = 256
    lambda_bn: NonNegative = 1.0
    lambda_adv: NonNegative = 1.0
    t: Positive = 20.0
    lr: Positive = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    keep_optimizer: bool = True
    augment: bool = True

    def check(self, run: PreRunContext) -> Sequence[str]:
        """The generator makes images, and all models of a round are of that round.

        Raises:
            ConfigError: The data are not images, updates are delayed, or the run ends before the first distillation.
        """
        run.need_no_delays(self.name)
        run.need_rounds_after(self.name, "start_round", self.start_round)
        spec = run.spec
        if len(spec.shape) != 3 or spec.integers:
            raise ConfigError(f"dense generates images, but an input here has the shape {spec.shape}.")
        return ()

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """The average; from ``start_round`` on, the student that was distilled from it."""
        v, b = updates.v_global + updates.aggregate.delta, updates.aggregate.buffers
        if updates.round < self.start_round:
            return {"v": v}
        models = [(updates.v_global + update.delta, update.buffers) for update in updates]
        at_server, spec = updates.at_server, updates.spec
        pool: list[Tensor] = []
        wanted: list[Tensor] = []
        moments: list[Tensor] = []
        for epoch in range(self.epochs):
            key = fold(updates.key, epoch)
            x = self.generate(spec, models, (v, b), fold(key, 0), at_server.pixels)
            pool.append(x)
            seen = torch.cat(pool)
            with torch.no_grad():
                if self.augment:
                    seen = random_crop_and_flip(seen, fold(key, 2), at_server.pixels.inputs(torch.zeros_like(x[:1])))
                    wanted = [ensemble_logits(spec, models, part) for part in torch.split(seen, self.batch)]
                else:
                    wanted.append(ensemble_logits(spec, models, x))
            trained = at_server.train(
                v,
                b,
                fold(key, 1),
                x=seen,
                y=torch.cat(wanted),
                moments=moments if self.keep_optimizer else None,
                loss=self.distillation,
                ready=True,
                local_epochs=1,
                batch_size=self.batch,
                drop_last=False,
                optimizer="sgd",
                lr=self.lr,
                momentum=self.momentum,
                nesterov=False,
                weight_decay=0.0,
                clip_grad_norm=None,
                augment=False,
            )
            v, b = trained.v, trained.b
        return {"v": v, "b": b}

    def distillation(self, student: Tensor, teacher: Tensor) -> Tensor:
        """``T^2 mean KL(softmax(teacher / T) || softmax(student / T))`` of logits ``[B, C]``.

        Args:
            student: Logits of the student, ``[B, C]``.
            teacher: Logits of the teacher, ``[B, C]``.
        """
        return self.t**2 * divergence(teacher / self.t, student / self.t).mean()

    def generate(
        self, spec: ModelSpec, models: Models, student: tuple[Tensor, Tensor], key: Tensor, pixels: PixelScaling
    ) -> Tensor:
        """New images ``[batch, C, H, W]``, as inputs of the model.

        Args:
            spec: The model's layout.
            models: The clients'.
            student: Its model and statistics.
            key: Decides the generator's start and the labels.
            pixels: How intensities become inputs.
        """
        classes = spec.classes
        y = (uniform(fold(key, 0), (self.batch,)) * classes).to(torch.int64).clamp_max(classes - 1)
        start, make, betas = decoder.make_decoder(fold(key, 1), self.batch, spec.shape, student[0].dtype, pixels)

        def objective(vector: Tensor, step: int) -> tuple[Tensor, Tensor]:
            x = make(vector)
            return self.generator_loss(spec, models, student, x, y), x

        return minimize(start, objective, self.g_steps, self.g_lr, betas)[1]

    def generator_loss(
        self, spec: ModelSpec, models: Models, student: tuple[Tensor, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        """Compute the generator's objective for images ``x`` and labels ``y``.

        Args:
            spec: Layout of the model.
            models: Parameters and buffers of the clients' models.
            student: Parameters and buffers of the global model.
            x: Generated images, ``[B, C, H, W]``.
            y: Their labels, ``[B]``.
        """
        outputs, distances = zip(*(statistics_distance(spec, v, b, x) for v, b in models), strict=True)
        ensemble = torch.stack([output.logits for output in outputs]).mean(0)
        loss = F.cross_entropy(ensemble, y) + self.lambda_bn * torch.stack(distances).mean()
        if self.lambda_adv:
            alone = spec.forward(*student, x).logits
            apart = (ensemble.argmax(1) != alone.argmax(1)).to(loss.dtype)
            loss = loss - self.lambda_adv * (apart * divergence(ensemble, alone)).mean()
        return loss


def ensemble_logits(spec: ModelSpec, models: Models, x: Tensor) -> Tensor:
    """The mean of the models' logits ``[B, C]``, in eval mode.

    Args:
        spec: Layout of the model.
        models: Parameters and buffers of the clients' models.
        x: Inputs, ``[B, ...]``.
    """
    return torch.stack([spec.forward(v, b, x).logits for v, b in models]).mean(0)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """``KL(softmax(teacher) || softmax(student))`` of each sample, ``[B]``, from logits ``[B, C]``.

    Args:
        teacher: Logits of the teacher, ``[B, C]``.
        student: Logits of the student, ``[B, C]``.
    """
    log_p, log_q = F.log_softmax(teacher, dim=1), F.log_softmax(student, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)
