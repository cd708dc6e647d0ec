"""One client's local training, the reference that every engine must equal."""

from __future__ import annotations

import time
from functools import reduce

import torch
from torch import Tensor

from unskew.data.federation import ClientData, take
from unskew.data.pixels import Pixels
from unskew.engines import optimizers
from unskew.engines.base import Setup
from unskew.engines.batches import Normaliser, Plan
from unskew.errors import DataError
from unskew.models.trainable import Batch, BoundModel, LossFn, Model
from unskew.models.vector import mask_of
from unskew.protocol.rules import Broadcast, ClientRule, Context, Slices, Tensors, Update
from unskew.protocol.training import Training
from unskew.seeding import derive, fold, generator
from unskew.tasks import Task


def base_loss(model: Model, task: Task) -> LossFn:
    """The task's loss of a batch, which rules wrap."""

    def loss_fn(v: Tensor, batch: Batch) -> Tensor:
        return task.loss(model(v, batch.x, batch.track).logits, batch.y)

    return loss_fn


def starting_model(cast: Broadcast) -> Tensor:
    """Where local training starts: the broadcast, but for slices that stayed at the client."""
    kept = cast.state.get("model", {}).get("v")
    if cast.down is None or kept is None:
        return cast.v
    return torch.where(mask_of(cast.down, len(kept)).to(cast.v.device), cast.v, kept.to(cast.v.device))


def sent_mask(slices: Slices | None, v: Tensor, device: torch.device) -> Tensor | None:
    """The parameters that travel, boolean ``[d]``; None for all."""
    return None if slices is None else mask_of(slices, len(v)).to(device)


def moments_of(training: Training, cast: Broadcast, v: Tensor, freezes: bool) -> Tensors:
    """The optimizer's state at the first step: fresh, or what stayed at the client."""
    kept = cast.state.get("optimizer") if cast.keeps else None
    if kept is not None:
        return {name: tensor.to(v.device).clone() for name, tensor in kept.items()}
    return optimizers.init(training, v, freezes or cast.keeps)


def on_device(nested: dict[str, Tensors], device: torch.device) -> dict[str, Tensors]:
    """The same tensors on ``device``, by name in order, as stacking needs it; on the CPU they are not copied."""
    # What comes from a checkpoint is in another order than what a rule has written since.
    return {
        rule: {name: t.to(device) for name, t in sorted(tensors.items())} for rule, tensors in sorted(nested.items())
    }


def one_sample_error(client: int) -> DataError:
    """What a batch of one sample means to BatchNorm, as a sentence."""
    return DataError(
        f"Client {client} trains on a batch of one sample, which BatchNorm cannot normalise: give it more samples, "
        "set drop_last if it is the rest of an epoch, or take a model with GroupNorm."
    )


def client_key(seed: int, cast: Broadcast) -> Tensor:
    """The random key of a client in a round."""
    return torch.tensor(derive(seed, "key", cast.round, cast.client))


def contexts(
    rules: tuple[ClientRule, ...],
    shared: dict[str, object],
    state: dict[str, Tensors],
    download: dict[str, Tensors],
    common: dict[str, Tensors],
) -> list[Context]:
    """One context per rule: its own state, download, upload and common tensors, all else shared."""
    return [
        Context(
            state=dict(state.get(rule.name, {})),
            download=download.get(rule.name, {}),
            upload={},
            common=common.get(rule.name, {}),
            **shared,  # type: ignore[arg-type]
        )
        for rule in rules
    ]


def freezes(rules: tuple[ClientRule, ...]) -> bool:
    """Whether some rule lets only a part of the parameters move in some steps."""
    return any(type(rule).moves is not ClientRule.moves for rule in rules)


def movable_mask(
    rules: tuple[ClientRule, ...], ctxs: list[Context], carries: list[Tensors], batch: Batch
) -> Tensor | None:
    """The parameters that every rule lets move in this step, boolean ``[d]``; None if that is all of them."""
    masks = [rule.moves(ctx, carry, batch) for rule, ctx, carry in zip(rules, ctxs, carries, strict=True)]
    known = [mask for mask in masks if mask is not None]
    return reduce(torch.logical_and, known) if known else None


def inputs_made(rules: tuple[ClientRule, ...], carries: list[Tensors]) -> Tensors:
    """The inputs ``x`` and targets ``y`` that a client's rules made: the last rule's that made any, else nothing."""
    found = [made for rule, carry in zip(rules, carries, strict=True) if (made := rule.samples(carry)) is not None]
    return {"x": found[-1][0], "y": found[-1][1]} if found else {}


def finish(
    setup: Setup,
    cast: Broadcast,
    examples: int,
    v_start: Tensor,
    v: Tensor,
    b: Tensor,
    ctxs: list[tuple[Tensors, Tensors]],
    metrics: dict[str, float],
    made: Tensors,
    moments: Tensors,
) -> Update:
    """Pack what a client sends (``ctxs``: per rule, its state and its upload) and what stays with it."""
    state = {r.name: s for r, (s, _) in zip(setup.rules, ctxs, strict=True) if s}
    delta = v - v_start
    if cast.up is not None:
        state["model"] = {"v": v, "b": b}
        delta = torch.where(mask_of(cast.up, len(v)).to(v.device), v - cast.v, torch.zeros_like(v))
    if cast.keeps:
        state["optimizer"] = moments
    upload = {r.name: r.packed(u) for r, (_, u) in zip(setup.rules, ctxs, strict=True) if u}
    return Update(cast.client, cast.round, examples, cast.weight, delta, b, upload, state, metrics, made=made)


class LocalTrainer:
    """Trains one client at a time on one reused model."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.model = BoundModel(setup.spec, setup.device)
        federation, spec = setup.federation, setup.spec
        self.normalise = Normaliser(federation.normalisation, federation.shape, spec.dtype, setup.device)
        self.pixels = Pixels.of(federation)
        self.common = on_device(federation.common, setup.device)
        self.needs_full_gradient = any(rule.needs_full_gradient for rule in setup.rules)
        self.needs_class_counts = any(rule.needs_class_counts for rule in setup.rules)
        self.needs_label_pairs = any(rule.needs_label_pairs for rule in setup.rules)
        self.needs_exemplars = max((rule.needs_exemplars for rule in setup.rules), default=0)

    def class_counts(self, client: ClientData) -> Tensor:
        """The client's samples per class or label, ``[C]``, in the model's precision."""
        counts = self.setup.task.counts(client.y, self.setup.federation.classes)
        return counts.to(self.setup.spec.dtype).to(self.setup.device)

    def label_pairs(self, client: ClientData) -> Tensor:
        """The client's samples with both of two labels, ``[C, C]``, in the model's precision."""
        pairs = self.setup.task.pairs(client.y, self.setup.federation.classes)
        return pairs.to(self.setup.spec.dtype).to(self.setup.device)

    def exemplars(self, client: ClientData) -> Tensor:
        """Random inputs of each class, ``[C, needs_exemplars, ...]``, normalised; the same in every round."""
        y, count = client.y.cpu(), self.needs_exemplars
        order = torch.randperm(len(y), generator=generator(self.setup.seed, "exemplars", 0, client.id))
        found = []
        for c in range(self.setup.federation.classes):
            rows = order[y[order] == c]
            if len(rows):
                found.append(
                    self.normalise(take(client.x, rows.repeat(-(-count // len(rows)))[:count].to(client.x.device)))
                )
            else:
                found.append(self.normalise(client.x[:1]).new_zeros(count, *client.x.shape[1:]))
        return torch.stack(found)

    def full_gradient(self, cast: Broadcast, v: Tensor) -> Tensor:
        """Gradient of the client's mean loss over all its samples at ``v``, batch by batch; statistics stay."""
        client = self.setup.federation.clients[cast.client]
        self.model.start(cast.b)
        grad_fn = self.model.gradient(base_loss(self.model, self.setup.task))
        total = torch.zeros_like(v)
        for cut in torch.split(torch.arange(client.examples), self.setup.training.batch_size):
            index = cut.to(client.y.device)
            x = self.normalise(take(client.x, index))
            key = client_key(self.setup.seed, cast).to(x.device)
            batch = Batch(x, client.y[index].to(x.device), key, torch.tensor(0))
            total.add_(grad_fn(v, batch), alpha=len(cut) / client.examples)
        return total

    def train(self, cast: Broadcast) -> Update:
        """Local training of one client from its broadcast."""
        setup, training, device = self.setup, self.setup.training, self.setup.device
        client = setup.federation.clients[cast.client]
        plan = Plan(training, client.examples, setup.seed, cast.round, cast.client)
        v_start = starting_model(cast).to(device)
        key = client_key(setup.seed, cast).to(device)
        shared: dict[str, object] = {
            "round": cast.round,
            "v_global": v_start,
            "v_start": v_start,
            "b_global": cast.b.to(device),
            "spec": setup.spec,
            "model": self.model,
            "task": setup.task,
            "key": key,
            "lr": training.lr,
            "plain_sgd": training.plain_sgd and not freezes(setup.rules),
            "steps": torch.tensor(float(len(plan.batches)), dtype=v_start.dtype, device=device),
            "weight": torch.tensor(cast.weight, dtype=v_start.dtype, device=device),
            "full_gradient": self.full_gradient(cast, v_start) if self.needs_full_gradient else None,
            "class_counts": self.class_counts(client) if self.needs_class_counts else None,
            "pixels": self.pixels,
            "epoch_steps": torch.tensor(float(len(training.cuts(client.examples))), dtype=v_start.dtype, device=device),
            "label_pairs": self.label_pairs(client) if self.needs_label_pairs else None,
            "exemplars": self.exemplars(client) if self.needs_exemplars else None,
            "sent": sent_mask(cast.up, cast.v, device),
            "received": sent_mask(cast.down, cast.v, device),
        }
        state, download = on_device(cast.state, device), on_device(cast.download, device)
        ctxs = contexts(setup.rules, shared, state, download, self.common)
        pairs = list(zip(setup.rules, ctxs, strict=True))
        self.model.start(cast.b)
        began = time.perf_counter()
        carries = [rule.begin(ctx) for rule, ctx in pairs]
        ready = time.perf_counter()
        made = inputs_made(setup.rules, carries) if cast.show else {}
        loss_fn = base_loss(self.model, setup.task)
        for (rule, ctx), carry in zip(pairs, carries, strict=True):
            loss_fn = rule.loss(loss_fn, ctx, carry)
        grad_fn = self.model.gradient(loss_fn)
        for (rule, ctx), carry in zip(pairs, carries, strict=True):
            grad_fn = rule.gradient(grad_fn, ctx, carry)

        v = v_start.clone()
        moments = moments_of(training, cast, v, freezes(setup.rules))
        total = torch.zeros((), dtype=v.dtype, device=device)
        for step, cpu_index in enumerate(plan.batches):
            index = cpu_index.to(client.y.device)
            x = self.normalise(plan.augment(take(client.x, index)))
            at = torch.tensor(step)
            batch = Batch(
                x, client.y.index_select(0, index).to(device), fold(key, at) if self.model.stream else key, at
            )
            moves = movable_mask(setup.rules, ctxs, carries, batch)
            try:
                g = grad_fn(v, batch)
            except ValueError as error:
                if "more than 1 value per channel" in str(error):
                    raise one_sample_error(cast.client) from error
                raise
            v, moments = optimizers.step(training, v, g, moments, step, moves)
            total += self.model.loss

        for (rule, ctx), carry in zip(pairs, carries, strict=True):
            rule.end(ctx, carry, v)
        metrics = {
            "loss": float(total) / max(1, len(plan.batches)),
            "steps": float(len(plan.batches)),
            "begin_seconds": ready - began,
            "train_seconds": time.perf_counter() - ready,
        }
        written = [(ctx.state, ctx.upload) for ctx in ctxs]
        return finish(setup, cast, client.examples, v_start, v, self.model.b.clone(), written, metrics, made, moments)
