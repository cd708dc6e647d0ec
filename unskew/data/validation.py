"""Validation and conversion of inputs, targets and names when they enter the library."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError
from unskew.tasks.classification import TRANSFORMERS_PADDING
from unskew.tasks.registry import TASKS

CHANNELS = (1, 3, 4)
OFFSET_RATIO = 2.0**13
"""Ratio of mean to standard deviation above which float32, with 24 bits, has less than 11 bits for the differences."""


def validate_client_names(names: Sequence[str], clients: int) -> tuple[str, ...]:
    """Return the client names after validation: none, or one per client.

    Args:
        names: Names of the clients, or empty.
        clients: Number of clients.

    Raises:
        DataError: If the names are not distinct printable strings, one per client.
    """
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise DataError("client_names must be a list of strings, one per client.")
    if len(names) not in (0, clients):
        raise DataError(f"There are {len(names)} client_names for {clients} clients. Pass one per client, or none.")
    check_printable(names, "client")
    check_distinct(names, "clients", "client_names")
    return tuple(names)


def check_distinct(names: Iterable[object], kind: str, option: str) -> None:
    """Validate that names are distinct.

    Args:
        names: Names to check.
        kind: Kind of names for the error: ``clients`` or ``classes``.
        option: Name of the argument.

    Raises:
        DataError: If a name occurs twice.
    """
    twice = next((name for name, times in Counter(map(str, names)).items() if times > 1), None)
    if twice is not None:
        raise DataError(f"Two {kind} have the name {twice!r}; {option} must be distinct.")


def check_printable(names: Iterable[str], kind: str) -> None:
    """Validate that names can be shown in a terminal and in tables.

    Args:
        names: Names to check.
        kind: Kind of name for the error: ``client`` or ``class``.

    Raises:
        DataError: If a name is empty, or contains line breaks or control characters.
    """
    odd = next((name for name in names if not name.strip() or not name.isprintable()), None)
    if odd is not None:
        raise DataError(f"The {kind} name {odd!r} cannot be printed. Names must be one line of printable characters.")


def as_tensor(values: object, problem: str) -> Tensor:
    """Convert an array or a tensor to a CPU tensor, which shares its memory if possible.

    Args:
        values: Array or tensor.
        problem: Start of the error message.

    Raises:
        DataError: If the values are not a numeric array or tensor of an ordinary kind.
    """
    kind = special_kind(values)
    if kind is not None:
        raise DataError(f"{problem}: they are {kind}. Pass an ordinary dense array or tensor.")
    try:
        tensor = values if isinstance(values, Tensor) else tensor_from_numpy(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{problem}: {error}.") from error
    if tensor.is_complex():
        raise DataError(f"{problem}: they are complex. Pass real and imaginary parts, or magnitudes.")
    return tensor.detach().cpu() if isinstance(values, Tensor) else tensor


def special_kind(values: object) -> str | None:
    """Return a description of arrays that are not supported, such as sparse ones; None for ordinary arrays."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        return "masked in places"
    if hasattr(values, "tocsr"):  # SciPy, which need not be installed
        return "sparse"
    if not isinstance(values, Tensor):
        return None
    kinds = {
        "nested": values.is_nested,
        "sparse": values.layout != torch.strided,
        "quantized": values.is_quantized,
        "on the device meta, without values": values.is_meta,
        "8-bit floating point": values.is_floating_point() and values.element_size() == 1,
    }
    return next((kind for kind, description in kinds.items() if description), None)


def tensor_from_numpy(values: object) -> Tensor:
    """Convert an array to a tensor over the same memory, or over a copy if PyTorch does not support its strides."""
    if isinstance(values, np.ndarray) and values.flags.writeable:  # the usual case, which needs no filter of warnings
        return _tensor_from_numpy(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the memory is read-only; nothing writes to it
        return _tensor_from_numpy(values)


def _tensor_from_numpy(values: object) -> Tensor:
    if isinstance(values, np.ndarray) and values.ndim:
        try:
            return torch.from_numpy(values)
        except ValueError:
            pass
    return torch.from_numpy(np.ascontiguousarray(values))


def as_inputs(values: object, who: str) -> Tensor:
    """Convert inputs to a tensor: images to ``[n, C, H, W]`` in channels-last memory format, tables to ``[n, f]``.

    Args:
        values: NumPy array or tensor of integers or floats; floats become float32.
        who: Name of the data, for the error.

    Raises:
        DataError: If the inputs are empty, not numeric, not finite, or have the shape of neither images nor a table.
    """
    return to_model_layout(to_float32(normalize_inputs_layout(values, who)))


def normalize_inputs_layout(values: object, who: str, checked: bool = True) -> Tensor:
    """Convert inputs to ``[n, C, H, W]`` or ``[n, f]`` without copying; dtypes are kept, but booleans become uint8.

    Args:
        values: NumPy array or tensor.
        who: Name of the data, for the error.
        checked: Whether to validate that all values are finite.

    Raises:
        DataError: If the inputs are empty, not numeric, not finite, or have the shape of neither images nor a table.
    """
    x = as_tensor(values, f"The inputs of {who} are not a numeric array")
    shape = x.shape
    if not 2 <= len(shape) <= 5 or (shape[0] and 0 in shape):
        raise DataError(f"The inputs of {who} have shape {tuple(shape)}; expected [n, features], images, or volumes.")
    if shape[0] == 0:
        raise DataError(f"The data of {who} is empty. At least one sample is needed.")
    if checked:
        check_finite([x], who)
        large = x.dtype in (torch.int32, torch.int64) and bool(torch.stack(x.aminmax()).abs().max() > 2**24)
        if x.dim() == 2 and (x.dtype == torch.float64 or large):
            warn_of_lost_digits(x.double())
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    if x.dim() == 3 and x.dtype == torch.uint8:
        x = x.unsqueeze(1)
    return as_channels_first(x) if x.dim() == 4 else x


def warn_of_lost_digits(x: Tensor) -> None:
    """Warn of columns ``[n, f]`` that are so far from zero that float32 loses digits of their differences."""
    spread = x.std(0, correction=0)
    lost = torch.nonzero((x.mean(0).abs() > OFFSET_RATIO * spread) & (spread > 0))[:, 0]
    if len(lost):
        warnings.warn(
            f"Input {int(lost[0])} has values such as {float(x[0, lost[0]])}, far from zero compared with their spread, and "
            "float32 loses their last digits. Subtract their mean or minimum before you pass them.",
            stacklevel=2,
        )


def check_finite(pieces: Iterable[Tensor], who: str) -> None:
    """Validate that all values are finite when converted to float32.

    Args:
        pieces: Tensors to check.
        who: Name of the data, for the error.

    Raises:
        DataError: If a value is NaN or infinite.
    """
    for x in pieces:
        # If a value is NaN, minimum and maximum are NaN; computing them makes no copy.
        if x.is_floating_point() and x.numel() and not bool(torch.isfinite(to_float32(torch.stack(x.aminmax()))).all()):
            raise DataError(f"The inputs of {who} contain NaN or infinite values. Replace or remove them.")


def to_float32(x: Tensor) -> Tensor:
    """Convert floats of any precision to float32; other dtypes stay unchanged."""
    return x.float() if x.is_floating_point() else x


def mask_padding(x: Tensor, task: str) -> Tensor:
    """Replace the padding label -100 of the package transformers by -1 in token ids; other inputs stay unchanged.

    Args:
        x: Inputs.
        task: Name of the task.
    """
    return torch.where(x == TRANSFORMERS_PADDING, -1, x) if TASKS[task].tokens and x.dtype == torch.int64 else x


def as_channels_first(x: Tensor) -> Tensor:
    """Return images as ``[n, C, H, W]`` without copying.

    The second axis has the channels, as in PyTorch, unless the last axis has 1, 3 or 4 entries and the second does not.
    """
    return x.permute(0, 3, 1, 2) if x.shape[-1] in CHANNELS and x.shape[1] not in CHANNELS else x


def to_model_layout(x: Tensor) -> Tensor:
    """Return inputs in the fastest memory format: channels-last for images ``[n, C, H, W]``, otherwise contiguous."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if x.dim() == 4 else x.contiguous()


def as_targets(values: object, who: str, task: str = "classification") -> Tensor:
    """Convert targets to a tensor.

    Args:
        values: Array or tensor of targets.
        who: Name of the data, for errors.
        task: Name of the task.

    Raises:
        DataError: If shape or values do not match the task.
    """
    return TASKS[task].read(as_tensor(values, f"The labels of {who} are not numeric"), who)


def check_classes(names: Sequence[str], who: str, task: str) -> None:
    """Validate that there are two or more classes with printable names.

    Args:
        names: Names of the classes.
        who: Name of the data, for the error.
        task: Name of the task.

    Raises:
        DataError: If there is only one class, or a class name cannot be printed.
    """
    check_printable((name for name in names if name), "class")
    if "one_class" in TASKS[task].provides and len(names) < 2:
        raise DataError(
            f"All samples of {who} have the same label, {', '.join(names)}, but a classifier needs two classes."
        )


def check_tokens(x: Tensor, tokens: int, who: str, packed: bool = False) -> None:
    """Validate that token ids are in ``0 .. tokens - 1``, and padding (-1) is at the end.

    Args:
        x: Token ids, ``[n, L]``.
        tokens: Number of token ids.
        who: Name of the data, for the error.
        packed: Whether the model separates texts at the token -2.

    Raises:
        DataError: If a token id is out of range, or padding precedes a token.
    """
    least = -2 if packed else -1
    if len(x) and (int(x.min()) < least or int(x.max()) >= tokens):
        bad = int(x.min()) if int(x.min()) < least else int(x.max())
        raise DataError(
            f"The texts of {who} contain the token {bad}, but the model knows 0 to {tokens - 1}, and -1 for padding."
        )
    padding = x == -1
    if bool((padding[:, :-1] & ~padding[:, 1:]).any()):
        raise DataError(f"The texts of {who} have tokens after padding. Put the padding (-1) at the end.")
