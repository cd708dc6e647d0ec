"""Everything from outside is checked here, once, when it enters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError

CHANNELS = (1, 3, 4)
TRANSFORMERS_PADDING = -100  # what the package transformers has in labels where nothing is to be predicted


def validate_client_names(names: Sequence[str], clients: int) -> tuple[str, ...]:
    """The clients' names, none or one for each.

    Args:
        names: Names of the clients, or empty.
        clients: Number of clients.

    Raises:
        DataError: The names are not distinct texts, one per client.
    """
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise DataError("client_names must be a list of texts, one for each client.")
    if len(names) not in (0, clients):
        raise DataError(f"There are {len(names)} client_names for {clients} clients; give one for each, or none.")
    check_printable(names, "client")
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        raise DataError(f"Two clients have the name {twice!r}; client_names must be distinct.")
    return tuple(names)


def check_printable(names: Iterable[str], kind: str) -> None:
    """Check that names can be shown in a terminal and in tables.

    Args:
        names: The names.
        kind: What they name, for the error: ``client`` or ``class``.

    Raises:
        DataError: A name is empty, has several lines, or has control characters.
    """
    odd = next((name for name in names if not name.strip() or not name.isprintable()), None)
    if odd is not None:
        raise DataError(f"The name {odd!r} of a {kind} cannot be printed; {kind} names must be texts of one line.")


def as_tensor(values: object, problem: str) -> Tensor:
    """An array or a tensor as a tensor over the same memory, if it can be; ``problem`` begins the error if it is neither.

    Args:
        values: Array or tensor.
        problem: Start of the error.
    """
    kind = special_kind(values)
    if kind is not None:
        raise DataError(f"{problem}: they are {kind}; give an ordinary array or tensor with all values.")
    try:
        tensor = values if isinstance(values, Tensor) else tensor_from_numpy(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{problem}: {error}.") from error
    if tensor.is_complex():
        raise DataError(f"{problem}: they are complex; give real and imaginary parts, or magnitudes.")
    return tensor.detach().cpu()


def special_kind(values: object) -> str | None:
    """Return the name of a kind of array whose values cannot be read as they are; None for an ordinary one."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        return "masked in places"
    if hasattr(values, "tocsr"):  # as of scipy, which need not be installed
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
    """A tensor over the memory of an array, or over a copy where PyTorch knows no such strides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
        if isinstance(values, np.ndarray) and values.ndim:
            try:
                return torch.from_numpy(values)
            except ValueError:
                pass
        return torch.from_numpy(np.ascontiguousarray(values))


def as_inputs(values: object, who: str, task: str = "classification") -> Tensor:
    """A tensor of inputs: images become ``[n, C, H, W]`` over channels-last memory, tables stay ``[n, f]``.

    Args:
        values: NumPy array or tensor; uint8, integer or floating point, which becomes float32.
        who: Whose data this is, for the error.
        task: Of ``language`` the inputs are token ids.

    Raises:
        DataError: Empty, not numeric, NaN or infinite, or of a shape that is neither images nor a table.
    """
    return to_model_layout(mask_padding(to_float32(normalize_inputs_layout(values, who)), task))


def normalize_inputs_layout(values: object, who: str, checked: bool = True) -> Tensor:
    """Inputs ``[n, C, H, W]`` or ``[n, f]`` over the memory and in the type that they came in; booleans are bytes.

    Args:
        values: As for ``as_inputs``.
        who: Whose data this is, for the error.
        checked: Whether to look at the numbers.

    Raises:
        DataError: As for ``as_inputs``.
    """
    x = as_tensor(values, f"The inputs of {who} are not a numeric array")
    if not 2 <= x.dim() <= 4 or (len(x) and 0 in x.shape):
        raise DataError(f"The inputs of {who} have shape {tuple(x.shape)}; expected [n, features] or images.")
    if len(x) == 0:
        raise DataError(f"The data of {who} is empty; at least one sample is needed.")
    if checked:
        check_finite([x], who)
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    if x.dim() == 3 and x.dtype == torch.uint8:
        x = x.unsqueeze(1)
    return as_channels_first(x) if x.dim() == 4 else x


def check_finite(pieces: Iterable[Tensor], who: str) -> None:
    """Refuse numbers that are not finite, as float32.

    Args:
        pieces: Tensors to check.
        who: Name of the data, for the error.

    Raises:
        DataError: A value is NaN or infinite.
    """
    for x in pieces:
        # A NaN is the least and the largest; to ask for these makes no copy.
        if x.is_floating_point() and x.numel() and not bool(torch.isfinite(to_float32(torch.stack(x.aminmax()))).all()):
            raise DataError(f"The inputs of {who} hold NaN or infinite values; clean them first.")


def to_float32(x: Tensor) -> Tensor:
    """Floats of any precision as float32; other types stay."""
    return x.float() if x.is_floating_point() else x


def mask_padding(x: Tensor, task: str) -> Tensor:
    """Token ids with -1 where the package transformers has its own number; other inputs as they are.

    Args:
        x: Inputs.
        task: Name of the task.
    """
    return torch.where(x == TRANSFORMERS_PADDING, -1, x) if task == "language" and x.dtype == torch.int64 else x


def as_channels_first(x: Tensor) -> Tensor:
    """Images as ``[n, C, H, W]``, over the same memory.

    The channels are the second axis, as in PyTorch, unless the last axis has 1, 3 or 4 entries and the second has not.
    """
    return x.permute(0, 3, 1, 2) if x.shape[-1] in CHANNELS and x.shape[1] not in CHANNELS else x


def to_model_layout(x: Tensor) -> Tensor:
    """Inputs as models take them best: images ``[n, C, H, W]`` over channels-last memory, others contiguous."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if x.dim() == 4 else x.contiguous()


def as_targets(values: object, who: str, task: str = "classification") -> Tensor:
    """Class labels ``[n]`` as int64, or the targets of another task.

    Of ``multilabel`` they are ``[n, L]`` of 0 and 1 as uint8, of ``language`` token ids ``[n, L]``, of ``regression`` numbers
    ``[n, T]`` as float64.

    Args:
        values: Targets as they were passed.
        who: Name of the data, for errors.
        task: Name of the task.

    Raises:
        DataError: Not integers, not one label per sample, or (multi-label) not a matrix of 0 and 1.
    """
    y = as_tensor(values, f"The labels of {who} are not numeric")
    if task == "regression":
        y = y[:, None] if y.dim() == 1 else y
        if y.dim() != 2 or not y.shape[1]:
            raise DataError(f"The targets of {who} have shape {tuple(y.shape)}; regression needs [n] or [n, targets].")
        y = y.to(torch.float64)
        if not bool(torch.isfinite(y).all()):
            raise DataError(f"The targets of {who} hold NaN or infinite values; leave out those samples.")
        return y
    if task == "multilabel":
        if y.dim() != 2 or y.shape[1] < 1:
            raise DataError(f"The labels of {who} have shape {tuple(y.shape)}; multi-label data need [n, labels].")
        if not bool(((y == 0) | (y == 1)).all()):
            raise DataError(f"The labels of {who} must be 0 or 1: whether a sample has the label or not.")
        return y.to(torch.uint8).contiguous()
    if task == "language":
        if y.dim() != 2 or y.is_floating_point():
            raise DataError(f"The targets of {who} must be token ids [n, L] as integers, with -1 where there is none.")
        return torch.where(y == TRANSFORMERS_PADDING, -1, y).to(torch.int64)
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dim() != 1:
        raise DataError(
            f"The labels of {who} have shape {tuple(y.shape)}; expected one class index per sample. "
            'For several labels a sample, set task="multilabel".'
        )
    if y.is_floating_point() and not bool((torch.isfinite(y) & (y == y.round())).all()):
        raise DataError(f"The labels of {who} are not integers; classification needs class indices.")
    return y.to(torch.int64).contiguous()


def check_targets(y: Tensor, classes: int, who: str, task: str = "classification", x: Tensor | None = None) -> None:
    """Labels must lie in ``0 .. classes - 1``; a matrix of labels must have ``classes`` columns; a token may be -1.

    Args:
        y: Targets, ``[n]`` or ``[n, L]``.
        classes: Number of classes.
        who: Name of the data, for errors.
        task: Name of the task.
        x: Token ids of the samples, for a language model.
    """
    if task == "language":
        if x is not None and (x.dtype != torch.int64 or x.shape != y.shape):
            raise DataError(f"The texts of {who} must be token ids (int64) of the shape of their targets.")
        if len(y) and (int(y.min()) < -1 or int(y.max()) >= classes):
            raise DataError(f"The targets of {who} must be -1 or tokens from 0 to {classes - 1}.")
    elif y.dim() == 2:
        if y.shape[1] != classes:
            raise DataError(f"The labels of {who} have {y.shape[1]} columns, but there are {classes} labels.")
    elif len(y) and (int(y.min()) < 0 or int(y.max()) >= classes):
        bad = int(y.min()) if int(y.min()) < 0 else int(y.max())
        raise DataError(f"The labels of {who} hold {bad}; with {classes} classes they must be 0 to {classes - 1}.")


def check_classes(names: Sequence[str], who: str, task: str) -> None:
    """Refuse a data set in which there is nothing to tell apart.

    Args:
        names: Names of the classes.
        who: Name of the data, for the error.
        task: Name of the task.

    Raises:
        DataError: There is a single class, or the name of a class cannot be printed.
    """
    check_printable((name for name in names if name), "class")
    if task == "classification" and len(names) < 2:
        raise DataError(
            f"All samples of {who} have the same label, {', '.join(names)}; a classifier needs two classes."
        )


def check_differ(labels: Sequence[Tensor], task: str) -> None:
    """Refuse labels that are all the same, where they are what the classes are found from.

    Args:
        labels: Labels of each client.
        task: Name of the task.

    Raises:
        DataError: All labels are the same.
    """
    if task == "classification" and all(bool((y == labels[0][0]).all()) for y in labels):
        raise DataError(
            f"All labels are {int(labels[0][0])}, but a classifier needs two classes. If there are more, of which these data "
            "have one, say how many: classes=."
        )


def check_tokens(x: Tensor, tokens: int, who: str) -> None:
    """Token ids ``[n, L]`` must lie in ``0 .. tokens - 1``; -1 is padding and comes at the end.

    Args:
        x: Token ids, ``[n, L]``.
        tokens: Number of token ids.
        who: Name of the data, for the error.

    Raises:
        DataError: A token id is out of range, or padding precedes a token.
    """
    if len(x) and (int(x.min()) < -1 or int(x.max()) >= tokens):
        bad = int(x.min()) if int(x.min()) < -1 else int(x.max())
        raise DataError(
            f"The texts of {who} hold the token {bad}; the model knows 0 to {tokens - 1}, and -1 is padding."
        )
    padding = x == -1
    if bool((padding[:, :-1] & ~padding[:, 1:]).any()):
        raise DataError(f"The texts of {who} have tokens after padding; put the padding (-1) at the end.")
