"""Training inputs of a client, shared by all engines: initial parameters and the context of its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unskew.data.pixel_scaling import PixelScaling
from unskew.engines import optimizers
from unskew.engines.base import EngineConfig
from unskew.engines.batches import BatchPlan, InputNormalizer
from unskew.errors import ConfigError
from unskew.models.execution import Model
from unskew.models.layer_groups import buffer_mask
from unskew.models.spec import slices_mask
from unskew.protocol.context import Context, ReadOnlyDict
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.messages import Broadcast, ClientState, Slices, Tensors, Update
from unskew.protocol.payload import EncodedUpload, UploadContext, encode_upload
from unskew.protocol.rules import SHIFT, START, ClientRule
from unskew.seeding import derive

REMEMBERED = 128
"""Number of clients whose ``client_info`` is cached."""


def has_frozen_parameters(rules: Sequence[ClientRule]) -> bool:
    """Return whether some rule freezes parameters in some steps."""
    return any(type(rule).trainable_mask is not ClientRule.trainable_mask for rule in rules)


def client_key(seed: int, broadcast: Broadcast) -> Tensor:
    """Return the random key of a client in a round.

    Args:
        seed: Seed of the run.
        broadcast: Message from the server.
    """
    return torch.tensor(derive(seed, "key", broadcast.round, broadcast.client))


def sort_by_name(nested: dict[str, Tensors]) -> dict[str, Tensors]:
    """Sort tensors by rule and name, as stacking requires."""
    # Tensors from a checkpoint are in another order than those that a rule has written since.
    return {rule: dict(sorted(tensors.items())) for rule, tensors in sorted(nested.items())}


def move_to(tree: Any, device: torch.device) -> Any:
    """Move the tensors in nested containers to ``device``; those that are there are not copied.

    Args:
        tree: Nested containers of tensors, some of which may be None.
        device: Device to move to.
    """
    return pytree.tree_map(lambda leaf: None if leaf is None else leaf.to(device), tree)


class ClientInputs:
    """Creates the training inputs of the clients of a run."""

    def __init__(self, setup: EngineConfig):
        self.setup = setup
        federation, spec = setup.federation, setup.spec
        self.normalize = InputNormalizer(federation.normalization, federation.shape, spec.dtype, setup.device)
        self.common = move_to(sort_by_name(setup.common), setup.device)
        self.fixed: dict[str, Any] = {
            "spec": spec,
            "task": setup.task,
            "training": setup.training,
            "plain_sgd": setup.training.plain_sgd and not has_frozen_parameters(setup.rules),
            "inputs": self.normalize,
            "pixels": PixelScaling.of(federation),
        }
        self.client_info = lru_cache(maxsize=REMEMBERED)(self._client_info)
        self._cached_masks = lru_cache(maxsize=8)(self._new_masks)

    def _client_info(self, client: int) -> dict[str, Tensors]:
        """Return the ``client_info`` of each rule for one client."""
        like = torch.empty(0, dtype=self.setup.spec.dtype, device=self.setup.device)
        plan = replace(self.setup.plan, training=self.setup.training)
        data = ClientDataView.of(self.setup.federation, client, self.normalize, like, self.setup.seed, plan)
        return {rule.name: rule.client_info(data) for rule in self.setup.rules}

    def _new_masks(self, edges: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
        slices, spec = tuple(slice(*pair) for pair in edges), self.setup.spec
        return slices_mask(slices, spec.size).to(device), buffer_mask(spec, slices).to(device)

    def _masks(self, slices: Slices, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cached masks of parameters ``[d]`` and buffers ``[m]`` in slices; most clients share them."""
        return self._cached_masks(tuple((span.start, span.stop) for span in slices), device)

    def initial_params(self, broadcast: Broadcast) -> Tensor:
        """Return the initial parameters, not moved yet: the broadcast, except for slices that stayed at the client."""
        own, v = broadcast.state.model, broadcast.v
        if broadcast.down is None or own is None:
            return v
        return torch.where(self._masks(broadcast.down, v.device)[0], v, own.to(v.device))

    def initial_buffers(self, broadcast: Broadcast) -> Tensor:
        """Return the initial buffers, not moved yet: the broadcast, except for those that stayed at the client."""
        b, own = broadcast.b, broadcast.state.buffers
        if own is not None and self.setup.buffers == "local":
            return own
        if own is not None and self.setup.buffers == "average" and broadcast.down is not None:
            return torch.where(self._masks(broadcast.down, b.device)[1], b, own.to(b.device))
        return b

    def optimizer_state(self, broadcast: Broadcast, v: Tensor) -> Tensors:
        """Return the optimizer state at the first step: a new one, or the one that stayed at the client.

        Args:
            broadcast: Message from the server.
            v: Parameters at the first step, ``[d]``.
        """
        if broadcast.keeps_optimizer and broadcast.state.optimizer:
            return {name: tensor.to(v.device).clone() for name, tensor in broadcast.state.optimizer.items()}
        return optimizers.init_state(
            self.setup.training, v, has_frozen_parameters(self.setup.rules) or broadcast.keeps_optimizer
        )

    def of(self, broadcast: Broadcast, plan: BatchPlan, full_gradient: Tensor | None) -> dict[str, Any]:
        """Return the tensors that differ between clients, by rule if they are a rule's, before they are moved to the device.

        Args:
            broadcast: Message from the server.
            plan: Batches of the client.
            full_gradient: Gradient over all samples of the client, ``[d]``, if a rule needs it.
        """
        device, secret = self.setup.device, self.setup.secret
        v = self.initial_params(broadcast)
        trained = self.setup.num_trained(self.setup.federation.num_samples(broadcast.client))
        epoch = len(self.setup.training.cuts(trained))

        def scalar(value: float) -> Tensor:
            return torch.tensor(float(value), dtype=v.dtype)

        def mask(slices: Slices | None) -> Tensor | None:
            return None if slices is None else self._masks(slices, device)[0]

        return {
            "v_global": v,
            "b_global": self.initial_buffers(broadcast),
            "key": client_key(self.setup.seed, broadcast),
            "secret": None if secret is None else secret.subkey("client noise", broadcast.round, broadcast.client),
            "steps": scalar(len(plan.batches)),
            "epoch_steps": scalar(epoch),
            "weight": scalar(broadcast.weight),
            "full_gradient": full_gradient,
            "survey": {},
            "sent": mask(broadcast.up),
            "received": mask(broadcast.down),
            "state": sort_by_name(broadcast.state.rules),
            "download": sort_by_name(broadcast.download),
            "client_info": self.client_info(broadcast.client),
        }

    def contexts(self, inputs: dict[str, Any], model: Model, round: int, ended: bool = False) -> list[Context]:
        """Create one context per rule, with the rule's own state, download, upload, client info and common tensors.

        Contexts of ended training have writable state and upload.

        Args:
            inputs: Result of ``of``.
            model: Model that rules may call.
            round: Number of the round, from 0.
            ended: Whether local training has ended.
        """
        kind = dict if ended else ReadOnlyDict
        shared = {
            name: value for name, value in inputs.items() if name not in ("state", "download", "client_info", "survey")
        }
        return [
            Context(
                round=round,
                model=model,
                state=kind(inputs["state"].get(rule.name, {})),
                download=inputs["download"].get(rule.name, {}),
                upload=kind(),
                client_info=inputs["client_info"][rule.name],
                common=self.common.get(rule.name, {}),
                survey=inputs["survey"].get(rule.name, {}),
                final=round >= self.setup.plan.rounds,
                **shared,
                **self.fixed,
            )
            for rule in self.setup.rules
        ]


def apply_begin_hooks(
    rules: tuple[ClientRule, ...], inputs: dict[str, Any], contexts: Callable[[dict[str, Any]], list[Context]]
) -> tuple[list[Tensors], dict[str, Any], list[Context]]:
    """Run the rules' hooks before the first step.

    Args:
        rules: Client rules in order.
        inputs: Training inputs of the client.
        contexts: Returns the context of each rule for training inputs.

    Returns:
        Carry of each rule, the training inputs with the model that training starts from, and the context of each rule.

    Raises:
        ConfigError: If a rule returns an initial model of another shape or data type.
    """
    ctxs, v_received = contexts(inputs), None
    carries: list[Tensors] = [{} for _ in rules]
    for index in sorted(range(len(rules)), key=lambda index: not rules[index].changes_start):
        rule, ctx = rules[index], ctxs[index]
        carry = rule.begin(ctx if v_received is None else replace(ctx, v_received=v_received))
        v = inputs["v_global"]
        for entry in {START, SHIFT} & carry.keys():
            tensor = carry[entry]
            if tensor.shape != v.shape or tensor.dtype != v.dtype:
                raise ConfigError(
                    f'{rule.name}.begin must return an entry "{entry}" like the model, {v.dtype} {tuple(v.shape)}, not '
                    f"{tensor.dtype} {tuple(tensor.shape)}."
                )
        if (start := carry.get(START)) is not None:
            carry = {name: tensor for name, tensor in carry.items() if name != START}
            v_received = v if v_received is None else v_received
            inputs = {**inputs, "v_global": start}
            ctxs = contexts(inputs)
        carries[index] = carry
    return carries, inputs, ctxs


def apply_end_hooks(
    rules: tuple[ClientRule, ...], ctxs: list[Context], carries: list[Tensors], v: Tensor, delta: Tensor
) -> tuple[list[tuple[Tensors, Tensors]], Tensor]:
    """Run the rules' hooks after the last step.

    Args:
        rules: Client rules in order.
        ctxs: Context of each rule.
        carries: Carry of each rule.
        v: Parameters after local training, ``[d]``.
        delta: Update before the hooks, ``[d]``.

    Returns:
        State and upload of each rule, and the update to send instead of ``delta``.

    Raises:
        ConfigError: If a rule sends an update of another shape or data type.
    """
    for rule, ctx, carry in zip(rules, ctxs, carries, strict=True):
        rule.end(ctx, carry, v)
        if SHIFT in carry:
            delta = delta + carry[SHIFT]
    for rule, ctx, carry in zip(rules, ctxs, carries, strict=True):
        sent = rule.transform_update(ctx, carry, delta)
        if not isinstance(sent, Tensor) or sent.shape != delta.shape or sent.dtype != delta.dtype:
            what = f"{sent.dtype} {tuple(sent.shape)}" if isinstance(sent, Tensor) else type(sent).__name__
            raise ConfigError(
                f"{rule.name}.transform_update must return a tensor like the update, {delta.dtype} {tuple(delta.shape)}, "
                f"not {what}."
            )
        delta = sent
    return [(ctx.state, ctx.upload) for ctx in ctxs], delta


def local_update(sent: Tensor | None, v_sent: Tensor, v_start: Tensor, v: Tensor) -> Tensor:
    """Return the local model minus the broadcast model, ``[d]``; 0 on slices that are not uploaded.

    In a deployment, the client sends its values on slices that it uploads without having received them, and the server
    computes the difference.

    Args:
        sent: Mask of the slices that are uploaded, ``[d]``; None for all.
        v_sent: Broadcast model, ``[d]``.
        v_start: Parameters at the first step, ``[d]``.
        v: Parameters after local training, ``[d]``; or of several clients, ``[k, d]``, as may be the other values.
    """
    if sent is None:
        return v - v_start
    return torch.where(sent, v - v_sent, torch.zeros_like(v))


def pack_update(
    setup: EngineConfig,
    broadcast: Broadcast,
    delta: Tensor,
    v: Tensor,
    b: Tensor,
    written: list[tuple[Tensors, Tensors]],
    metrics: dict[str, float],
    carry: Tensors,
    moments: Tensors,
) -> Update:
    """Create a client's update from its results.

    Args:
        setup: Configuration of the engine.
        broadcast: Message from the server.
        delta: Update, ``[d]``.
        v: Parameters after local training, ``[d]``.
        b: Buffers after local training, ``[m]``.
        written: State and upload of each rule.
        metrics: Metrics of local training.
        carry: Carry of a rule that is plotted, or an empty dictionary.
        moments: State of the optimizer, if it stays at the client.
    """
    rules = {r.name: s for r, (s, _) in zip(setup.rules, written, strict=True) if s}
    upload = {r.name: u for r, (_, u) in zip(setup.rules, written, strict=True) if u}
    sent = EncodedUpload(delta, upload, {}, {}, None)
    codecs = [rule for rule in setup.rules if rule.encodes and not (broadcast.closing and rule.stage == "compress")]
    if codecs:
        ctx = UploadContext(
            broadcast.round,
            broadcast.client,
            setup.seed,
            setup.spec,
            broadcast.up,
            setup.plan,
            secret=setup.secret,
        )
        sent = encode_upload(codecs, delta, upload, rules, broadcast.download, ctx)
        rules |= {name: state for name, state in sent.state.items() if state}
    parted = broadcast.up is not None
    state = ClientState(
        rules,
        v if parted else None,
        b if parted or setup.buffers == "local" else None,
        moments if broadcast.keeps_optimizer else {},
    )
    return Update(
        client=broadcast.client,
        origin_round=broadcast.round,
        num_samples=setup.federation.num_samples(broadcast.client),
        weight=broadcast.weight,
        delta=sent.delta,
        buffers=b,
        upload=sent.upload,
        state=state,
        metrics=metrics,
        report={"v": v} if broadcast.report else {},
        carry=carry,
        sent_bytes=sent.size,
        encoded=sent.encoded if setup.keeps_encoded else {},
    )


def update_to_dict(record: Broadcast | Update) -> dict[str, Any]:
    """Return the fields of a record, not copied, with the client state as flat tensors."""
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.init}
    return {**values, "state": record.state.tensors()}


def update_from_dict(record: type[Broadcast] | type[Update], values: dict[str, Any]) -> Any:
    """Build a record from the output of ``update_to_dict``.

    Args:
        record: Class to create.
        values: Output of ``update_to_dict``.
    """
    return record(**{**values, "state": ClientState.of(values["state"])})
