"""Information that both sides share before a message is sent, and the slices of the model and of rules' tensors in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from unskew.deployment.wire.frames import Blob, Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, check_norm, decode_record, encode_tensor
from unskew.methods.dp_sites import SiteDP, site_noise
from unskew.models.layer_groups import buffer_mask
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import Broadcast, Slices, Tensors, flatten_records, num_bytes, unflatten_records
from unskew.protocol.payload import compresses, gather_slices, scatter_slices, slices_length
from unskew.protocol.round_plan import DEFAULT_PLAN, RoundPlan
from unskew.protocol.rules import Method, Shape, changes_updates
from unskew.protocol.training_config import Buffers
from unskew.simulation.parameter_slices import subtract_slices

SLICED = "-slices"
"""Suffix of the record for full-length tensors of which only the slices of the model are sent."""


@dataclass(frozen=True)
class WireContext:
    """Information that both sides share before a message is sent.

    Attributes:
        method: Method of the run.
        spec: Layout of the model.
        buffers: Sharing of normalization buffers.
        norm: Largest accepted norm of a tensor.
        largest: Maximum number of bytes that rules send in addition to the model.
        plan: Schedule of the run.
    """

    method: Method
    spec: ModelSpec
    buffers: Buffers
    norm: float
    largest: int
    plan: RoundPlan = DEFAULT_PLAN

    def of_client(self, client: int) -> WireContext:
        """Return the wire context with the layout of a client's own model, if clients have different architectures."""
        return replace(self, spec=self.spec.of_client(client)) if self.spec.others else self

    @property
    def sends_model(self) -> bool:
        """Return whether clients send the model back."""
        return all(rule.sends_model for rule in self.method.client)

    @property
    def site_noise(self) -> SiteDP | None:
        """Rule that adds noise at the sites, which then send nothing else that depends on their data; or None."""
        return site_noise(self.method)

    def compresses(self, broadcast: Broadcast) -> bool:
        """Return whether a client replies with encoded streams instead of vectors; surveys are not encoded.

        Args:
            broadcast: Message that the client received.
        """
        return compresses(self.method.client) and not broadcast.closing

    @property
    def names(self) -> set[str]:
        """Names of the rules that may send tensors in addition to the model."""
        return {rule.name for rule in (*self.method.client, *filter(None, [self.method.sync]))}

    def base(self, down: Slices | None, up: Slices | None) -> Slices:
        """Return the slices that are sent back but not sent out; a client sends its values there, and the server subtracts.

        Args:
            down: Slices that are sent out; None: all.
            up: Slices that are sent back; None: all.
        """
        return subtract_slices(up, down, self.spec.size)

    @property
    def needs_base(self) -> bool:
        """Return whether client rules use the difference to the broadcast, so that the base values must be sent."""
        return changes_updates(self.method.client)

    def received(self, down: Slices | None, kind: str) -> Tensor:
        """Return a mask of the normalization buffers that a client receives in a message, ``[m]``.

        Args:
            down: Slices that are sent out; None: all.
            kind: Kind of the message.
        """
        mask = self.buffer_masks(down)
        return mask if self.buffers == "average" or kind == "evaluate" else torch.zeros_like(mask)

    def sent(self, broadcast: Broadcast) -> Tensor:
        """Return a mask of the normalization buffers that a client sends, to be averaged or only evaluated, ``[m]``."""
        mask = self.buffer_masks(broadcast.up)
        return torch.ones_like(mask) if broadcast.report or self.buffers == "local" else mask

    def buffer_masks(self, slices: Slices | None) -> Tensor:
        """Return a mask of the normalization buffers that belong to slices of the model, ``[m]``."""
        size = sum(self.spec.buffer_sizes)
        return torch.ones(size, dtype=torch.bool) if slices is None else buffer_mask(self.spec, slices)

    def check_extras(self, record: str, tensors: Tensors, finite: bool) -> dict[str, Tensors]:
        """Validate the tensors that rules send in addition to the model, by rule.

        Args:
            record: Name of the record.
            tensors: Tensors of the record by name.
            finite: Whether all values must be finite.

        Raises:
            InvalidMessageError: If a tensor belongs to an unknown rule, is too large, or is not finite.
        """
        bytes_there = num_bytes(tensors.values())
        if bytes_there > self.largest:
            raise InvalidMessageError(f"{record} has {bytes_there} bytes, above the limit of {self.largest}")
        for name, tensor in tensors.items():
            if name.partition("/")[0] not in self.names:
                raise InvalidMessageError(
                    f"{record} contains {name[:60]!r}, which belongs to no rule of {self.method.name}"
                )
            check_norm(f"{record}/{name}", tensor, self.norm, finite)
        return unflatten_records(record, {f"{record}/{name}": t for name, t in tensors.items()})

    def check_request(self, broadcast: Broadcast) -> None:
        """Validate at the client that a broadcast asks for nothing that always stays at the client.

        Args:
            broadcast: Broadcast that the client is to train from.

        Raises:
            InvalidMessageError: If it asks for such slices of the model, or for the whole model although the method does not.
        """
        sync, size = self.method.sync, self.spec.size
        local = () if sync is None else sync.local_slices(self.spec)
        shared = subtract_slices(local, broadcast.up, size)
        reports = self.method.needs("mean_model") and not local
        if slices_length(shared, size) != slices_length(local, size) or (broadcast.report and not reports):
            raise InvalidMessageError(
                f"it asks for parameters that {self.method.name} never sends. The server must run the agreed experiment "
                "with the same version"
            )

    @cached_property
    def download_shapes(self) -> dict[str, Mapping[str, Shape]]:
        """Shapes of everything that a client may receive in addition to the model, by rule and name."""
        shapes = {half.name: half.download_shapes(self.spec, self.plan) for half in self.method.halves}
        return {name: entries for name, entries in shapes.items() if entries}

    def check_download(self, tensors: Tensors) -> dict[str, Tensors]:
        """Validate at the client the tensors that the server sent in addition to the model, by rule.

        Args:
            tensors: Tensors by ``RULE/NAME``.

        Raises:
            InvalidMessageError: If they are not those that the method sends, are too large, or are not finite.
        """
        allowed = {f"{rule}/{name}": s for rule, shapes in self.download_shapes.items() for name, s in shapes.items()}
        for name, tensor in tensors.items():
            shape = allowed.get(name)
            if shape is None:
                raise InvalidMessageError(
                    f"download contains {name[:60]!r}, which {self.method.name} never sends to a client. The server must "
                    "run the agreed experiment with the same version; a method of your own lists what it sends in "
                    "download_shapes"
                )
            if tensor.dtype != self.spec.dtype or not has_shape(tensor, shape):
                raise InvalidMessageError(
                    f"download/{name} is {str(tensor.dtype)[6:]} {shape_text(tensor.shape)}, but the agreed experiment "
                    f"sends {str(self.spec.dtype)[6:]} {shape_text(shape)}. The server must run the agreed experiment"
                )
        return self.check_extras("download", tensors, finite=True)


def has_shape(tensor: Tensor, shape: Shape) -> bool:
    """Return whether a tensor has a shape, in which ranges list several sizes.

    Args:
        tensor: Any tensor.
        shape: Size of each dimension.
    """
    return tensor.dim() == len(shape) and all(
        size in part if isinstance(part, range) else size == part
        for size, part in zip(tensor.shape, shape, strict=True)
    )


def shape_text(shape: Shape) -> str:
    """Return a shape as text.

    >>> shape_text((range(1, 6), 650)), shape_text(())
    ('1..5x650', 'one')
    """
    ranges = [size if isinstance(size, range) else range(size, size + 1) for size in shape]
    return "x".join(f"{s[0]}..{s[-1]}" if len(s) > 1 else str(s[0]) for s in ranges) or "one"


def shared_buffers(buffers: Buffers, spec: ModelSpec) -> Buffers:
    """Return the sharing of buffers in messages: those of different architectures stay at the sites, like the parameters.

    Args:
        buffers: Sharing of normalization buffers of the run.
        spec: Layout of the model, or of several.
    """
    return "average" if spec.others else buffers


def encode_rules(record: str, rules: dict[str, Tensors], slices: Slices | None, size: int) -> dict[str, Blob]:
    """Encode tensors of rules as the arrays of one record; of tensors with ``size`` elements only the slices.

    Args:
        record: Name of the record.
        rules: Tensors by rule and name.
        slices: Slices that are sent; None: all.
        size: Number of parameters.
    """
    encoded = {}
    for name, t in flatten_records(record, rules).items():
        if slices is not None and t.shape == (size,):
            encoded[name.replace(record, f"{record}{SLICED}", 1)] = encode_tensor(gather_slices(t, slices))
        else:
            encoded[name] = encode_tensor(t)
    return encoded


def decode_rules(frame: Frame, record: str, slices: Slices | None, size: int) -> Tensors:
    """Decode the arrays of ``encode_rules``; full-length tensors are zero outside the slices.

    Args:
        frame: Message that was received.
        record: Name of the record.
        slices: Slices that are sent; None: all.
        size: Number of parameters.

    Raises:
        InvalidMessageError: If the length of a tensor is not that of the slices.
    """
    tensors = decode_record(frame, record)
    for name, t in decode_record(frame, f"{record}{SLICED}").items():
        if slices is None or tuple(t.shape) != (slices_length(slices, size),) or name in tensors:
            raise InvalidMessageError(
                f"{name[:60]!r} with shape {tuple(t.shape)} does not match the agreed slices of the model"
            )
        tensors[name] = scatter_slices(torch.zeros(size, dtype=t.dtype), slices, t)
    return tensors
