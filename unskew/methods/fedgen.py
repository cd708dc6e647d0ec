"""FedGen: the server trains a generator of features on the clients' classifiers, and clients train on its features too.

Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", 2021, arXiv:2105.10056,
Algorithm 1. After each round the server trains a generator ``G(y, eps)`` of features on the clients' models, where
``alpha_k(y)`` is client ``k``'s share of the cohort's samples of class ``y``::

    mean_{y, eps} [ sum_k alpha_k(y) CE(head_k(G), y) - beta_s KL(teacher || head_global(G)) ] + eta_div diversity(eps, G)
    teacher = softmax(sum_k alpha_k(y) head_k(G))

The model itself is averaged as without this rule. In later rounds a client adds two terms to its loss, with labels ``y~``
drawn uniformly and a factor of ``decay`` per round::

    a decay^t CE(head(G(y~, eps)), y~) + b decay^t KL(head(G(y, eps')) || f(x))

``head(G(y, eps'))`` is a teacher without gradient. The labels ``y~`` are drawn from the classes of all clients
(``labels="all"``), as in the authors' code (``available_labels`` in ``FLAlgorithms/servers/serverpFedGen.py`` of
zhuangdizhu/FedGen); the server sends the classes that clients have reported so far with the generator. ``labels="own"``
draws from the client's own classes. In the first round clients train without these terms, as in the
authors' code; the generator is created after that round.

Differences from the authors' code: noise is Gaussian, as in the paper, instead of uniform; the generator has no BatchNorm,
weight decay or learning rate decay; both batches of generated features have the same size; the terms are used in every local
epoch. As there, Adam's moments are kept between rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError
from unskew.generators.latent import LatentGenerator, diversity, draw_labels
from unskew.models.execution import Batch, LossFn
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Context, Shape, Tensors, Updates
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import derive, fold, normal
from unskew.tasks.classification import cross_entropy

NonNegative = Annotated[float, Field(ge=0)]
Whole = Annotated[int, Field(ge=1)]
PURPOSE = derive(0, "fedgen client")


@dataclass(frozen=True)
class FedGen(ClientRule):
    """Data-free distillation through a generator of features.

    Attributes:
        tasks_reason: Reason why other tasks are not supported: a clause that follows "because".
        needs: Requirements of the rule, see ``unskew.protocol.requirements``.
        a: Weight of the cross-entropy on generated features. ``a=0,b=0`` is FedAvg.
        b: Weight of the distillation.
        decay: Factor of ``a`` and ``b`` per round.
        labels: The label ``ỹ`` of a generated feature is drawn uniformly from the classes of all clients, as in the
            authors' code, or from the client's ``own``. The server collects the classes from the clients' counts and
            sends them with the generator.
        gen_steps: Generator steps after each round, as in the authors' code.
        gen_lr: Learning rate of Adam on the generator.
        batch: Generated features per step.
        beta_s: Weight of the server's adversarial term.
        eta_div: Weight of the diversity term.
        hidden: Units of the generator's single hidden layer, with ReLU.
        noise: Dimension of the generator's noise ``ε``. The authors use these defaults of ``hidden`` and ``noise`` for
            MNIST, and 512 and 64 for CIFAR.
    """

    name: ClassVar[str] = "fedgen"
    summary: ClassVar[str] = "learns from features that the clients' classifiers agree on"
    paper: ClassVar[str] = "Zhu et al. 2021, arXiv:2105.10056"
    class_targets: ClassVar[bool] = True
    supports_delays: ClassVar[bool] = False
    uploads: ClassVar[bool] = True
    upload_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"counts": (0.0, 1e38)}
    # One decade on each side of the original's 10.
    spaces: ClassVar[Mapping[str, Space]] = {"a": log_range(1.0, 100.0), "b": log_range(1.0, 100.0)}
    tasks_reason: ClassVar[str] = "each feature that it generates has one class"
    needs = ("one_class", "unweighted", "individual", "logits_of_head")
    idle_options = (({"gen_steps": 0}, ("gen_lr", "beta_s", "eta_div")),)

    a: NonNegative = 10.0
    b: NonNegative = 10.0
    decay: Annotated[float, Field(gt=0, le=1)] = 0.98
    labels: Literal["own", "all"] = "all"
    gen_steps: Annotated[int, Field(ge=0)] = 40
    gen_lr: Annotated[float, Field(gt=0)] = 3e-4
    batch: Annotated[int, Field(ge=2)] = 32
    beta_s: NonNegative = 0.0
    eta_div: NonNegative = 1.0
    hidden: Whole = 256
    noise: Whole = 32

    def generator(self, spec: ModelSpec) -> LatentGenerator:
        """Create the generator for a model.

        Args:
            spec: Layout of the model.

        Raises:
            ConfigError: If the model's features are not vectors, or its head is frozen.
        """
        if not spec.head_trains:
            raise ConfigError(f"fedgen learns from the clients' heads, but {spec.head_name!r} is frozen. Unfreeze it.")
        if len(spec.feature_shape) != 1:
            raise ConfigError(
                f"fedgen generates vectors, but the head {spec.head_name!r} takes inputs of shape {spec.feature_shape}. "
                "Choose another head."
            )
        return LatentGenerator(spec.classes, self.noise, self.hidden, spec.feature_shape[0])

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate the model.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the head is frozen or its inputs are not vectors.
        """
        self.generator(run.spec)
        return ()

    def client_info(self, data: ClientDataView) -> Tensors:
        """Return the client's number of samples per class, ``[C]``."""
        return {"counts": data.class_counts()}

    def begin(self, ctx: Context) -> Tensors:
        """Return the mask ``[C]`` of classes from which ``y~`` is drawn."""
        held_classes = (ctx.client_info["counts"] > 0).to(ctx.v_global.dtype)
        return {"present": ctx.download.get("labels", held_classes)}

    def loss(self, loss_fn: LossFn, ctx: Context, carry: Tensors) -> LossFn:
        """``loss + a decay^t CE + b decay^t KL``."""
        if "g" not in ctx.download or not (self.a or self.b):
            return loss_fn
        G = self.generator(ctx.spec)
        g = ctx.download["g"]
        spec = ctx.spec
        fade = self.decay**ctx.round

        def distilled(v: Tensor, batch: Batch) -> Tensor:
            loss = loss_fn(v, batch)
            key = fold(fold(ctx.key, PURPOSE), batch.step)
            y = draw_labels(fold(key, 1), carry["present"], self.batch)
            features = G(g, y, normal(fold(key, 2), (self.batch, self.noise)).to(v.dtype))
            loss = loss + self.a * fade * cross_entropy(spec.head(v, features), y)
            same = G(g, batch.y, normal(fold(key, 3), (len(batch.y), self.noise)).to(v.dtype))
            teacher = spec.head(v, same).detach()
            student = ctx.model(v, batch.x, batch.track).logits
            return loss + self.b * fade * divergence(teacher, student)

        return distilled

    def end(self, ctx: Context, carry: Tensors, v: Tensor) -> None:
        """Upload the class counts, with which the server weights clients."""
        ctx.upload["counts"] = ctx.client_info["counts"]

    def download_shapes(self, spec: ModelSpec, plan: RoundPlan) -> Mapping[str, Shape]:
        """Return the shapes of the generator and of the mask of classes."""
        labels: Mapping[str, Shape] = {"labels": (spec.classes,)} if self.labels == "all" else {}
        return {"g": (self.generator(spec).size,), **labels}

    def download(self, state: Tensors, client: int) -> Tensors:
        """Send the generator, if it exists yet, and the classes of all clients."""
        return {name: state[name] for name in ("g", "labels") if name in state}

    def server_update(self, state: Tensors, updates: Updates) -> Tensors:
        """Train the generator.

        The state contains ``g``, Adam's moments ``m`` and ``s``, and its number of steps ``t``. With ``labels="all"`` it also
        contains a mask of the classes reported so far, ``labels [C]``.
        """
        v = updates.v_global
        spec = updates.spec
        key = updates.key
        G, student = self.generator(spec), spec.head_of(v)
        heads = torch.stack([spec.head_of(v + update.delta) for update in updates])
        counts = torch.stack([update.upload[self.name]["counts"] for update in updates])
        total = counts.sum(0)
        alpha = counts / total.clamp_min(1)
        present = (total > 0).to(v.dtype)
        if not state:
            g = G.init(fold(key, 0)).to(v.dtype)
            state = {"g": g, "m": torch.zeros_like(g), "s": torch.zeros_like(g), "t": g.new_zeros(())}
        known = {"labels": torch.maximum(present, state.get("labels", present))} if self.labels == "all" else {}
        g, m, s, t = (state[name] for name in ("g", "m", "s", "t"))
        for i in range(self.gen_steps):
            now = fold(fold(key, 1), i)
            y = draw_labels(fold(now, 1), present, self.batch)
            eps = normal(fold(now, 2), (self.batch, self.noise)).to(v.dtype)
            leaf = g.detach().requires_grad_()
            value = self.server_objective(spec, G(leaf, y, eps), y, eps, heads, student, alpha)
            (slope,) = torch.autograd.grad(value, leaf)
            t = t + 1
            m = 0.9 * m + 0.1 * slope
            s = 0.999 * s + 0.001 * slope.square()
            g = g - self.gen_lr * m / (1 - 0.9**t) / ((s / (1 - 0.999**t)).sqrt() + 1e-8)
        return {"g": g, "m": m, "s": s, "t": t, **known}

    def server_objective(
        self, spec: ModelSpec, z: Tensor, y: Tensor, eps: Tensor, heads: Tensor, student: Tensor, alpha: Tensor
    ) -> Tensor:
        """Compute the generator's objective at the server.

        Args:
            spec: Layout of the model.
            z: Generated features, ``[B, f]``.
            y: Labels of the features, ``[B]``.
            eps: Noise of the features, ``[B, k]``.
            heads: Heads of the clients, ``[K, d_h]``.
            student: Head of the broadcast model, ``[d_h]``.
            alpha: Weights ``[K, C]``; each class sums to 1, or to 0 if no client has it.
        """
        logits = torch.func.vmap(spec.head, in_dims=(0, None))(heads, z)
        weight = alpha[:, y]
        losses = -F.log_softmax(logits, dim=-1)[:, torch.arange(len(y), device=y.device), y]
        value = (weight * losses).sum(0).mean() + self.eta_div * diversity(eps, z)
        if self.beta_s:
            teacher = (weight[:, :, None] * logits).sum(0)
            value = value - self.beta_s * divergence(teacher, spec.head(student, z))
        return value


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the mean over the batch of ``KL(softmax(teacher) || softmax(student))`` for logits ``[B, C]``.

    Args:
        teacher: Logits of the teacher, ``[B, C]``.
        student: Logits of the student, ``[B, C]``.
    """
    log_p, log_q = F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
