"""DENSE: clients upload once, and the server distills their ensemble on images that it generates.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: Data-Free One-Shot Federated Learning", 2021, arXiv:2112.12371.
``E(x) = mean_k f(x; theta_k)`` is the mean of the clients' logits and ``S`` the student. In each of ``epochs`` epochs:

1. a new generator and its noise are trained for ``g_steps`` steps, with labels ``y`` drawn uniformly, on
   ``CE(E(x), y) + lambda_bn mean_k BN_k(x) - lambda_adv mean_x [argmax E != argmax S] KL(E(x) || S(x))``;
   ``BN_k`` is DeepInversion's distance of batch statistics from client ``k``'s running statistics;
2. the images of its best step and their ``E(x)`` are added to a pool;
3. the student is trained for one pass over the pool on ``T^2 KL(softmax(E/T) || softmax(S/T))``. Images are randomly flipped,
   and randomly cropped after black padding of 4 pixels; ``E`` and ``S`` both use the augmented images.

Clients train to convergence and upload once, so a run has one round with many local epochs. Fedssyn's comparison has ten
communication rounds first: ``start_round=9`` and ten rounds. Rounds before ``start_round`` are FedAvg rounds.

As in the authors' code (``heter_fl.py`` and ``helpers/synthesizers.py`` of zj-jayzhang/DENSE), the student has one optimizer
for all epochs, so its momentum is kept, and its images are augmented. Their code crops only CIFAR images; other images are
only flipped. Earlier versions here used a new optimizer for each pass and no augmentation, so each ``E(x)`` was computed only
once, which is much cheaper: ``dense:keep_optimizer=false,augment=false``.

Choices that text and code leave open: the student starts from the average of the clients' models; the whole pool is kept, as
inputs that are not rounded to pixels; without BatchNorm its term is zero.
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
"""Parameters ``[d]`` and buffers ``[m]`` of each client's model."""


@dataclass(frozen=True)
class Dense(ServerRule):
    """Data-free one-shot distillation.

    Attributes:
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        tasks_reason: Reason why other tasks are not supported: a clause that follows "because".
        start_round: First round, from 0, that ends with distillation; all later ones do too. Earlier rounds are FedAvg.
            A shorter run raises an error.
        epochs: Number of generators, and of passes of the student.
        g_steps: Training steps of a generator.
        g_lr: Learning rate of Adam on a generator.
        batch: Images per generator, and per step of the student.
        lambda_bn: Weight of ``BN_k``, the generator's BatchNorm term.
        lambda_adv: Weight of the term that favors images on which student and ensemble differ.
        t: Temperature ``T`` of the distillation.
        lr: Learning rate of the student's SGD.
        momentum: Momentum of the student's SGD.
        keep_optimizer: Keep the student's momentum from epoch to epoch. ``false`` creates a new optimizer per pass.
        augment: In every pass, pad the images with 4 black pixels, crop and flip them at random. Ensemble and student
            see the same images.
    """

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = "one upload; the ensemble is distilled on generated images"
    paper: ClassVar[str] = "Zhang et al. 2021, arXiv:2112.12371"
    supports_delays: ClassVar[bool] = False
    # lambda_adv: 0.5 to 1 in the authors' code; the others: one decade on each side of the authors' values.
    spaces: ClassVar[Mapping[str, Space]] = {
        "lr": log_range(1e-3, 0.1),
        "lambda_bn": log_range(0.1, 10.0),
        "lambda_adv": log_range(0.5, 1.0),
    }
    needs = ("one_class", "individual", "whole_updates", "model_changes")
    tasks_reason: ClassVar[str] = "each image that it generates has one class"
    idle_options = (
        ({"epochs": 1}, ("keep_optimizer",)),
        ({"momentum": 0}, ("keep_optimizer",)),
    )

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
        """Validate data and rounds.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the data are not images, or the run ends before the first distillation.
        """
        run.need_rounds_after(self.name, "start_round", self.start_round)
        spec = run.spec
        if len(spec.shape) != 3 or spec.integers:
            raise ConfigError(f"dense generates images, but the inputs have shape {spec.shape}. Use another method.")
        return ()

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Average the updates; from ``start_round`` on, also distill the ensemble."""
        v, b = state["v"] + updates.aggregate.delta, updates.aggregate.buffers
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
        """Compute ``T^2 mean KL(softmax(teacher / T) || softmax(student / T))`` of logits ``[B, C]``.

        Args:
            student: Logits of the student, ``[B, C]``.
            teacher: Logits of the teacher, ``[B, C]``.
        """
        return self.t**2 * divergence(teacher / self.t, student / self.t).mean()

    def generate(
        self, spec: ModelSpec, models: Models, student: tuple[Tensor, Tensor], key: Tensor, pixels: PixelScaling
    ) -> Tensor:
        """Generate images ``[batch, C, H, W]``, as inputs of the model.

        Args:
            spec: Layout of the model.
            models: Parameters and buffers of the clients' models.
            student: Parameters and buffers of the student.
            key: Random key of the generator's initialization and the labels.
            pixels: Conversion of intensities to inputs.
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
            disagree = (ensemble.argmax(1) != alone.argmax(1)).to(loss.dtype)
            loss = loss - self.lambda_adv * (disagree * divergence(ensemble, alone)).mean()
        return loss


def ensemble_logits(spec: ModelSpec, models: Models, x: Tensor) -> Tensor:
    """Compute the mean of the models' logits ``[B, C]``, in eval mode.

    Args:
        spec: Layout of the model.
        models: Parameters and buffers of the clients' models.
        x: Inputs, ``[B, ...]``.
    """
    return torch.stack([spec.forward(v, b, x).logits for v, b in models]).mean(0)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute ``KL(softmax(teacher) || softmax(student))`` of each sample, ``[B]``, from logits ``[B, C]``.

    Args:
        teacher: Logits of the teacher, ``[B, C]``.
        student: Logits of the student, ``[B, C]``.
    """
    log_p, log_q = F.log_softmax(teacher, dim=1), F.log_softmax(student, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)
