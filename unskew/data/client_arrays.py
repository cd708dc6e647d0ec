"""Reading of the clients' arrays for ``Federation.from_arrays``, of which many small ones are checked at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unskew.data.clients import concatenate_inputs, take_rows
from unskew.data.from_arrays import LARGEST, num_training_samples, read_tensors
from unskew.data.memory_map import mapped_array
from unskew.data.validation import (
    as_targets,
    as_tensor,
    check_finite,
    mask_padding,
    normalize_inputs_layout,
    to_model_layout,
)
from unskew.errors import DataError
from unskew.tasks.registry import TASKS

Array = TypeVar("Array", bound=np.ndarray | Tensor)

BLOCK = 1 << 20
"""Number of entries that are joined from small arrays, to check and convert them at once."""


class InputLocator:
    """Callable that reads ranges of a client's inputs, in the client's order, from the arrays that were passed.

    Args:
        parts: Arrays of each client: ``(x,)``, of which some rows are held out, or ``(x, x_test)``.
        order: Order of the samples of each client among all of its arrays, in one tensor, ``[N]``.
        offsets: Start of each client's samples in ``order``, ``[K + 1]``.
        mapped: Whether some arrays are memory-mapped from files; these are validated when they are read.
        task: Name of the task.

    Attributes:
        like: One input, ``[1, ...]``, in the common dtype of all inputs.
    """

    def __init__(
        self, parts: Sequence[tuple[Tensor, ...]], order: Tensor, offsets: np.ndarray, mapped: bool, task: str
    ):
        self.parts = parts
        self.order = order
        self.offsets = offsets
        self.mapped = mapped
        self.task = task
        self.dtype = reduce(torch.promote_types, dict.fromkeys(x.dtype for x in self.all()))
        self.like = parts[0][0][:1].to(self.dtype)

    def all(self) -> Iterator[Tensor]:
        """Iterate over all arrays."""
        return (x for arrays in self.parts for x in arrays)

    def told(self, k: int, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return placeholder inputs of client ``k`` that match its targets ``y`` in shape, without reading its inputs.

        Args:
            k: Client index.
            y: Targets of the client, ``[n]``.
        """
        x = self.parts[k][0]
        return x[:1].expand(len(y), *x.shape[1:]), y

    def __call__(self, k: int, start: int, stop: int) -> Tensor:
        """Return the inputs ``start:stop`` of client ``k``; training samples precede held-out samples.

        Args:
            k: Client index.
            start: First sample of the client to return.
            stop: End of the range, exclusive.

        Raises:
            DataError: If inputs read from a file are not finite.
        """
        x, *test = self.parts[k]
        if not test:
            first = int(self.offsets[k])
            chunks = [read_rows(x, self.order[first + start : first + stop])]
        else:
            cuts = (slice(start, min(stop, len(x))), slice(max(0, start - len(x)), max(0, stop - len(x))))
            chunks = [part[cut] for part, cut in zip((x, *test), cuts, strict=True) if cut.start < cut.stop]
        if self.mapped:
            check_finite(chunks, f"client {k}")
        tensors = [self._converted(chunk) for chunk in chunks or [x[:0]]]
        return tensors[0] if len(tensors) == 1 else concatenate_inputs(tensors)

    def several(self, first: int, last: int) -> Tensor:
        """Return all inputs of the clients ``first:last``, which are small and in memory, in one new array.

        Args:
            first: First client.
            last: End of the range, exclusive.
        """
        arrays = [x if x.dtype == self.dtype else x.to(self.dtype) for own in self.parts[first:last] for x in own]
        return self._converted(take_rows(concatenate_inputs(arrays), self.positions(first, last)))

    def positions(self, first: int, last: int) -> Tensor:
        """Return the position of each sample of the clients ``first:last`` in their arrays, joined in order.

        Args:
            first: First client.
            last: End of the range, exclusive.
        """
        bounds = torch.from_numpy(self.offsets[first : last + 1])
        begins = (bounds[:-1] - bounds[0]).repeat_interleave(bounds.diff())
        return self.order[int(bounds[0]) : int(bounds[-1])] + begins

    def _converted(self, x: Tensor) -> Tensor:
        return to_model_layout(mask_padding(x, self.task).to(self.dtype))


def read_clients(
    clients: Collection[object], task: str, holdout: float, seed: int
) -> tuple[InputLocator, list[Tensor], np.ndarray]:
    """Validate the data of all clients and split off their held-out samples.

    Args:
        clients: Inputs and targets of each client.
        task: Name of the task.
        holdout: Share of held-out samples.
        seed: Random seed of the split.

    Returns:
        Locator of the inputs; targets of all clients in one tensor, each client's training samples first, or one tensor
        per client if their shapes do not match; and numbers of training samples.

    Raises:
        DataError: If a client's data are not ``(x, y)`` or ``(x, y, x_test, y_test)``, or are not valid.
    """
    try:
        return _read_together(clients, task, holdout, seed)
    except DataError:  # client by client, to describe the first problem and name its client
        for k, arrays in enumerate(clients):
            check_client(arrays, k, task, holdout)
        raise


def _read_together(
    clients: Collection[object], task: str, holdout: float, seed: int
) -> tuple[InputLocator, list[Tensor], np.ndarray]:
    """Read all clients as ``read_clients`` does, but check the values of many clients at once."""
    parts: list[tuple[Tensor, ...]] = []
    targets: list[Any] = []
    unchecked: list[Tensor] = []
    sizes = []
    splits = []
    orders = []
    num_training: dict[int, int] = {}
    generator = torch.Generator()
    mapped = False
    for k, arrays in enumerate(clients):
        x, y, *test = client_arrays(arrays, k)
        in_file = mapped_array(x) is not None
        inputs = normalize_inputs_layout(x, "a client", checked=False)
        n = add_targets(targets, inputs, y)
        if not test:
            if n not in num_training:
                num_training[n] = num_training_samples(n, holdout)
            parts.append((inputs,))
            splits.append(num_training[n])
            orders.append(holdout_order(n, seed, k, generator))
        else:
            in_file = mapped_array(test[0]) is not None or in_file
            test_inputs = normalize_inputs_layout(test[0], "a client", checked=False)
            if inputs.shape[1:] != test_inputs.shape[1:]:
                raise DataError("A client has training and test inputs of different shapes.")
            parts.append((inputs, test_inputs))
            splits.append(n)
            n += add_targets(targets, test_inputs, test[1])
            orders.append(torch.arange(n))
        sizes.append(n)
        mapped = mapped or in_file
        if not in_file and inputs.is_floating_point():
            unchecked += parts[-1]
    check_finite(joined(unchecked), "the clients")
    converted = [as_targets(together, "the clients", task) for together in joined(targets)]
    offsets = np.cumsum([0, *sizes])
    readers = InputLocator(parts, torch.cat(orders), offsets, mapped, task)
    if any(y.shape[1:] != converted[0].shape[1:] for y in converted):
        # No task allows this: a client contradicts itself, or check_client_targets reports which one differs.
        each = iter([as_targets(y, "a client", task) for y in targets])
        own = [[next(each) for _ in inputs] for inputs in parts]
        if any(ys[0].shape[1:] != ys[-1].shape[1:] for ys in own):
            raise DataError("A client has training and test data with different numbers of labels.")
        return readers, [torch.cat(ys) for ys in own], np.array(splits)
    return readers, [torch.cat(converted).index_select(0, readers.positions(0, len(parts)))], np.array(splits)


def add_targets(targets: list[Any], inputs: Tensor, y: object) -> int:
    """Append targets to a list, as an array that other targets can be joined to, and return their number.

    Args:
        targets: List of targets.
        inputs: Inputs, of which there must be as many.
        y: Targets.

    Raises:
        DataError: If the targets are not a numeric array, or not as many as the inputs.
    """
    plain = type(y) is np.ndarray and y.dtype.kind in "biuf" and y.dtype.isnative
    added: Any = y if plain else as_tensor(y, "The labels of a client are not numeric")
    if not added.ndim or inputs.shape[0] != added.shape[0]:
        raise DataError("A client has another number of labels than of inputs.")
    targets.append(added)
    return inputs.shape[0]


def client_arrays(arrays: object, k: int) -> Sequence[object]:
    """Return the two or four arrays of a client.

    Args:
        arrays: Value that should be ``(x, y)`` or ``(x, y, x_test, y_test)``.
        k: Client index, for the error.

    Raises:
        DataError: If the value has another form.
    """
    if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
        raise DataError(f"Client {k} must be (x, y) or (x, y, x_test, y_test).")
    return arrays


def check_client(arrays: object, k: int, task: str, holdout: float) -> None:
    """Validate the data of one client.

    Args:
        arrays: Inputs and targets of the client.
        k: Client index, for errors.
        task: Name of the task.
        holdout: Share of held-out samples.

    Raises:
        DataError: If the data are not ``(x, y)`` or ``(x, y, x_test, y_test)``, or are not valid.
    """
    values = client_arrays(arrays, k)
    in_file = any(mapped_array(x) is not None for x in values[::2])
    x, y = read_tensors(values[0], values[1], f"client {k}", task, in_file)
    if len(values) == 2:
        num_training_samples(len(y), holdout)
        return
    xt, yt = read_tensors(values[2], values[3], f"client {k} (test)", task, in_file)
    if x.shape[1:] != xt.shape[1:]:
        raise DataError(
            f"Client {k} has training inputs of shape {tuple(x.shape[1:])}, but test inputs of {tuple(xt.shape[1:])}."
        )
    if y.shape[1:] != yt.shape[1:]:
        raise DataError(f"Client {k} has {y.shape[1]} labels in its training data, but {yt.shape[1]} in its test data.")


def joined(arrays: Iterable[Array]) -> Iterator[Array]:
    """Join consecutive small arrays or tensors of the same kind and shape per sample; large ones are not copied.

    Args:
        arrays: Arrays and tensors of at least one dimension.

    Yields:
        The joined arrays, in order.
    """
    block: list[Any] = []
    kind: object = None
    entries = 0
    for x in arrays:
        own = type(x), x.dtype, x.shape[1:]
        size = x.size if isinstance(x, np.ndarray) else x.numel()
        if block and (own != kind or entries + size > BLOCK):
            yield _join(block)
            block, entries = [], 0
        kind = own
        entries += size
        block.append(x)
    if block:
        yield _join(block)


def _join(block: list[Any]) -> Any:
    if len(block) == 1:
        return block[0]
    return torch.cat(block) if isinstance(block[0], Tensor) else np.concatenate(block)


def check_shapes(readers: InputLocator, others: Mapping[str, Tensor]) -> None:
    """Validate that all inputs have the shape of those of client 0.

    Args:
        readers: Locator of the clients' inputs.
        others: Inputs of the test set and of the server, by name.

    Raises:
        DataError: If a shape differs.
    """
    shape = readers.parts[0][0].shape[1:]
    odd: dict[str, Tensor] = {f"client {k}": x for k, (x, *_) in enumerate(readers.parts) if x.shape[1:] != shape}
    for who, x in {**odd, **others}.items():
        if x.shape[1:] != shape:
            raise DataError(f"{who} has inputs of shape {tuple(x.shape[1:])}, but client 0 has shape {tuple(shape)}.")


def check_client_targets(readers: InputLocator, ys: Sequence[Tensor], classes: int, task: str) -> None:
    """Validate that the targets of all clients match the number of classes.

    Args:
        readers: Locator of the inputs.
        ys: Targets from ``read_clients``.
        classes: Number of classes.
        task: Name of the task.

    Raises:
        DataError: If the targets of a client do not match.
    """
    try:
        if len(ys) > 1 or (TASKS[task].tokens and len({x.dtype for x in readers.all()}) > 1):
            raise DataError("The targets of the clients have different shapes, or the texts different dtypes.")
        TASKS[task].check(ys[0], classes, "the clients", readers.told(0, ys[0])[0])
    except DataError:  # client by client, to name the client
        own = ys if len(ys) > 1 else torch.split(ys[0], np.diff(readers.offsets).tolist())
        for k, y in enumerate(own):
            TASKS[task].check(y, classes, f"client {k}", readers.told(k, y)[0])


def holdout_order(n: int, seed: int, k: int, generator: torch.Generator) -> Tensor:
    """Return the random order of a client's samples, of which the last ones are held out.

    Args:
        n: Number of samples.
        seed: Random seed of the split.
        k: Client index.
        generator: Any generator; it is seeded anew.
    """
    own = seed * 1_000_003 + k
    own = own if -LARGEST <= own < 2 * LARGEST else own % LARGEST  # the range that PyTorch accepts as a seed
    return torch.randperm(n, generator=generator.manual_seed(own))


def read_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return some rows, read along their memory layout.

    Args:
        x: Inputs, ``[n, ...]``.
        rows: Indices of the rows to read, ``[B]``.
    """
    return take_rows(x, rows) if x.dim() == 4 and x.permute(0, 2, 3, 1).is_contiguous() else x.index_select(0, rows)
