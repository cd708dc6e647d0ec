"""Validation of the arguments of ``Federation.from_arrays``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from unskew.data.clients import concatenate_inputs, take_rows
from unskew.data.memory_map import mapped_array
from unskew.data.normalization import Normalization
from unskew.data.validation import (
    as_targets,
    check_finite,
    check_printable,
    mask_padding,
    normalize_inputs_layout,
    to_model_layout,
)
from unskew.errors import DataError, list_items, short_repr

LARGEST = 2**63
"""Largest magnitude of an integer from outside; arrays cannot hold more."""


def check_integer(value: object, name: str, least: int | None = None) -> None:
    """Refuse what is not an integer, or is too small.

    Args:
        value: Value to check.
        name: Name of the argument, for the error.
        least: Smallest allowed value; None: any.

    Raises:
        DataError: The value is not an integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DataError(f"{name} must be an integer, not {short_repr(value)}.")
    if least is not None and value < least:
        raise DataError(f"{name} must be at least {least}, not {short_repr(value)}.")
    if not -LARGEST <= int(value) < LARGEST:
        raise DataError(f"{name} has more than 63 bits; give a smaller number.")


def check_client_list(clients: object) -> None:
    """Refuse what is not a list of clients, or an empty one.

    Raises:
        DataError: The clients are not a list, or the list is empty.
    """
    if isinstance(clients, dict):
        raise DataError("clients must be a list with one (x, y) per client, not a dictionary; give its values.")
    if not isinstance(clients, Collection) or isinstance(clients, str | np.ndarray | Tensor):
        raise DataError(f"clients must be a list with one (x, y) per client, not {type(clients).__name__}.")
    if not clients:
        raise DataError("A federation needs at least one client; 'clients' is empty.")


def unpack_pair(pair: object, who: str) -> tuple[object, object]:
    """A pair ``(x, y)``, refused if it is none.

    Args:
        pair: Value that should be ``(x, y)``.
        who: Name of the data, for the error.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{who} must be a pair (x, y), not {type(pair).__name__}.")
    return pair[0], pair[1]


def validate_pair(x: object, y: object, who: str, task: str) -> tuple[Tensor, Tensor]:
    """Inputs, laid out as models take them, and as many labels.

    Args:
        x: Inputs.
        y: Targets.
        who: Name of the data, for errors.
        task: Name of the task.
    """
    inputs, targets = read_tensors(x, y, who, task)
    return to_model_layout(mask_padding(inputs, task)), targets


class InputLocator:
    """The inputs of each client where they were given: finds ranges of them, in the client's own order.

    Attributes:
        parts: Of each client, the array ``(x,)``, of which some rows are held out, or ``(x, x_test)``.
        mapped: Whether some of them lie in files; these are checked when they are read.
        like: One of them, ``[1, ...]``, in the type of all.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, ...]], mapped: bool, task: str, seed: int):
        self.parts, self.mapped, self.task, self.seed = parts, mapped, task, seed
        self.dtype = reduce(torch.promote_types, (x.dtype for arrays in parts for x in arrays))
        self.like = parts[0][0][:1].to(self.dtype)

    def all(self) -> Iterator[Tensor]:
        """Every array."""
        return (x for arrays in self.parts for x in arrays)

    def told(self, k: int, y: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of client ``k`` that have the shape of all of its targets ``y``, without a look at them.

        Args:
            k: Number of the client.
            y: Targets of the client, ``[n]``.
        """
        x = self.parts[k][0]
        return x[:1].expand(len(y), *x.shape[1:]), y

    def __call__(self, k: int, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of client ``k``, first those that it trains on.

        Raises:
            DataError: Inputs in a file are not finite.
        """
        x, *test = self.parts[k]
        if not test:
            chunks = [read_rows(x, holdout_order(len(x), self.seed, k)[start:stop])]
        else:
            cuts = (slice(start, min(stop, len(x))), slice(max(0, start - len(x)), max(0, stop - len(x))))
            chunks = [part[cut] for part, cut in zip((x, *test), cuts, strict=True) if cut.start < cut.stop]
        if self.mapped:
            check_finite(chunks, f"client {k}")
        tensors = [to_model_layout(mask_padding(chunk, self.task).to(self.dtype)) for chunk in chunks or [x[:0]]]
        return tensors[0] if len(tensors) == 1 else concatenate_inputs(tensors)


def read_clients(
    clients: Iterable[object], task: str, holdout: float, seed: int
) -> tuple[InputLocator, list[Tensor], list[int]]:
    """Locate the inputs of all clients, their labels, and their numbers of training samples, which come first.

    Args:
        clients: Inputs and targets of each client.
        task: Name of the task.
        holdout: Share of held-out samples.
        seed: Seed of the run.

    Raises:
        DataError: A client's data are not ``(x, y)`` or ``(x, y, x_test, y_test)``, or cannot be used.
    """
    parts: list[tuple[Tensor, ...]] = []
    ys, splits, mapped = [], [], False
    for k, arrays in enumerate(clients):
        if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
            raise DataError(f"Client {k} must be (x, y) or (x, y, x_test, y_test).")
        in_file = any(mapped_array(x) is not None for x in arrays[::2])
        mapped = mapped or in_file
        x, y = read_tensors(arrays[0], arrays[1], f"client {k}", task, in_file)
        if len(arrays) == 2:
            parts.append((x,))
            ys.append(y[holdout_order(len(y), seed, k)])
            splits.append(num_training_samples(len(y), holdout))
            continue
        xt, yt = read_tensors(arrays[2], arrays[3], f"client {k} (test)", task, in_file)
        if x.shape[1:] != xt.shape[1:]:
            raise DataError(
                f"Client {k} has inputs of shape {tuple(x.shape[1:])}, but {tuple(xt.shape[1:])} to test on."
            )
        if y.shape[1:] != yt.shape[1:]:
            raise DataError(f"Client {k} has {y.shape[1]} labels to train on but {yt.shape[1]} to test on.")
        parts.append((x, xt))
        ys.append(torch.cat([y, yt]))
        splits.append(len(x))
    return InputLocator(parts, mapped, task, seed), ys, splits


def read_tensors(x: object, y: object, who: str, task: str, mapped: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs as they were given and as many labels; inputs in files are not read.

    Args:
        x: Inputs.
        y: Targets.
        who: Name of the data, for errors.
        task: Name of the task.
        mapped: Whether inputs may stay in a mapped file.
    """
    shapes: list[tuple[int, ...]] = [getattr(values, "shape", ()) for values in (x, y)]
    if all(shapes):  # before any value is looked at
        check_lengths(shapes[0][0], shapes[1][0], who)
    inputs, targets = normalize_inputs_layout(x, who, checked=not mapped), as_targets(y, who, task)
    check_lengths(len(inputs), len(targets), who)
    return inputs, targets


def check_lengths(inputs: int, targets: int, who: str) -> None:
    """Check that there is a label for every input.

    Args:
        inputs: Number of inputs.
        targets: Number of targets.
        who: Name of the data, for the error.

    Raises:
        DataError: The numbers differ.
    """
    if inputs != targets:
        raise DataError(f"{who[0].upper()}{who[1:]} has {inputs} inputs but {targets} labels.")


def holdout_order(n: int, seed: int, k: int) -> Tensor:
    """The order of client ``k``'s ``n`` samples, of which the last ones are held out.

    Args:
        n: Number of samples.
        seed: Seed of the run.
        k: Number of the client.
    """
    own = seed * 1_000_003 + k
    own = own if -LARGEST <= own < 2 * LARGEST else own % LARGEST  # what PyTorch takes
    return torch.randperm(n, generator=torch.Generator().manual_seed(own))


def read_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows, read in the order in which they lie in memory.

    Args:
        x: Inputs, ``[n, ...]``.
        rows: Rows to read, ``[B]``.
    """
    return take_rows(x, rows) if x.dim() == 4 and x.permute(0, 2, 3, 1).is_contiguous() else x.index_select(0, rows)


def num_training_samples(n: int, holdout: object) -> int:
    """Return the number of training samples of ``n``; at least one sample is held out if there are two or more.

    Args:
        n: Number of samples.
        holdout: Share of held-out samples.
    """
    if isinstance(holdout, bool) or not isinstance(holdout, Real) or holdout < 0 or not holdout < 1:
        raise DataError(f"holdout must be a share from 0 to below 1, not {short_repr(holdout)}.")
    if holdout == 0 or n < 2:
        return n
    return n - min(n - 1, max(1, round(n * float(holdout))))


def fit_normalization(normalize: object, x: Tensor, inputs: Iterable[Tensor]) -> Normalization | None:
    """The normalization that ``normalize`` asks for: of 8-bit inputs their own, unless it is one, or False.

    Args:
        normalize: What was asked for.
        x: Some inputs, in the type of all.
        inputs: All of them.

    Raises:
        DataError: The value is neither a boolean nor a normalization, or has another number of channels.
    """
    if isinstance(normalize, Normalization):
        if len(normalize.mean) != x.shape[1]:
            raise DataError(
                f"The normalization has {len(normalize.mean)} means; the inputs have {x.shape[1]} channels or features."
            )
        return normalize
    if normalize is not None and not isinstance(normalize, bool):
        raise DataError(f"normalize must be True, False, None or a Normalization, not {short_repr(normalize)}.")
    return Normalization.fit(x[:0], inputs) if normalize is not False and x.dtype == torch.uint8 else None


def validate_class_names(class_names: object, classes: int) -> tuple[str, ...]:
    """Class names, if there are any, one for each class at least.

    Args:
        class_names: Names, or None.
        classes: Number of classes.
    """
    wrong = DataError(f"class_names must be a list with a name for each class, not {short_repr(class_names)}.")
    names = tuple(list_items(class_names, wrong))
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise DataError(f"A class name must be a text, not {short_repr(odd)}.")
    check_printable(names, "class")
    if names and len(names) < classes:
        raise DataError(f"There are {classes} classes but only {len(names)} class_names; name every class, or none.")
    twice = next((name for name, times in Counter(map(str, names)).items() if times > 1), None)
    if twice is not None:
        raise DataError(f"Two classes have the name {twice!r}; class_names must be distinct.")
    return names
