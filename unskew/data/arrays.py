"""What ``Federation.from_arrays`` is given, checked piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from unskew.data.checks import as_inputs, as_targets
from unskew.data.normalisation import Normalisation
from unskew.errors import DataError, items, shown

LARGEST = 2**63
"""No whole number from outside is beyond; arrays hold none."""


def whole_number(value: object, name: str, least: int | None = None) -> None:
    """Refuse what is no whole number, or is too small.

    Raises:
        DataError: It is so.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DataError(f"{name} must be a whole number, not {shown(value)}.")
    if least is not None and value < least:
        raise DataError(f"{name} must be at least {least}, not {shown(value)}.")
    if not -LARGEST <= int(value) < LARGEST:
        raise DataError(f"{name} has more than 63 bits; give a smaller number.")


def check_clients(clients: object) -> None:
    """Refuse what is no list of clients, or an empty one.

    Raises:
        DataError: It is so.
    """
    if isinstance(clients, dict):
        raise DataError("clients must be a list with one (x, y) per client, not a dictionary; give its values.")
    if not isinstance(clients, Iterable) or isinstance(clients, str | np.ndarray | Tensor):
        raise DataError(f"clients must be a list with one (x, y) per client, not {type(clients).__name__}.")
    if not clients:
        raise DataError("A federation needs at least one client; 'clients' is empty.")


def given_pair(pair: object, who: str) -> tuple[object, object]:
    """A pair ``(x, y)``, refused if it is none."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{who} must be a pair (x, y), not {type(pair).__name__}.")
    return pair[0], pair[1]


def checked_pair(x: object, y: object, who: str, task: str) -> tuple[Tensor, Tensor]:
    """Inputs and as many labels."""
    inputs, targets = as_inputs(x, who, task), as_targets(y, who, task)
    if len(inputs) != len(targets):
        raise DataError(f"{who[0].upper()}{who[1:]} has {len(inputs)} inputs but {len(targets)} labels.")
    return inputs, targets


def client_samples(k: int, arrays: object, task: str, holdout: float, seed: int) -> tuple[Tensor, Tensor, int]:
    """All samples of client ``k``, and with how many of them, the first ones, it trains.

    Raises:
        DataError: They are not ``(x, y)`` or ``(x, y, x_test, y_test)``, or cannot be used.
    """
    if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
        raise DataError(f"Client {k} must be (x, y) or (x, y, x_test, y_test).")
    x, y = checked_pair(arrays[0], arrays[1], f"client {k}", task)
    if len(arrays) == 2:
        own = seed * 1_000_003 + k
        own = own if -LARGEST <= own < 2 * LARGEST else own % LARGEST  # what PyTorch takes
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(own))
        return x[order], y[order], training_size(len(y), holdout)
    xt, yt = checked_pair(arrays[2], arrays[3], f"client {k} (test)", task)
    if x.shape[1:] != xt.shape[1:]:
        raise DataError(f"Client {k} has inputs of shape {tuple(x.shape[1:])}, but {tuple(xt.shape[1:])} to test on.")
    if y.shape[1:] != yt.shape[1:]:
        raise DataError(f"Client {k} has {y.shape[1]} labels to train on but {yt.shape[1]} to test on.")
    return torch.cat([x, xt]), torch.cat([y, yt]), len(x)


def training_size(n: int, holdout: object) -> int:
    """How many of a client's ``n`` samples it trains on; at least one is held out when there are two or more."""
    if isinstance(holdout, bool) or not isinstance(holdout, Real) or holdout < 0 or not holdout < 1:
        raise DataError(f"holdout must be a share from 0 to below 1, not {shown(holdout)}.")
    if holdout == 0 or n < 2:
        return n
    return n - min(n - 1, max(1, round(n * float(holdout))))


def fitting(normalise: object, x: Tensor) -> Normalisation | None:
    """The normalisation that ``normalise`` asks for: of 8-bit inputs their own, unless it is one, or False.

    Raises:
        DataError: It is neither a truth value nor a normalisation, or one of another number of channels.
    """
    if isinstance(normalise, Normalisation):
        if len(normalise.mean) != x.shape[1]:
            raise DataError(
                f"The normalisation has {len(normalise.mean)} means; the inputs have {x.shape[1]} channels or features."
            )
        return normalise
    if normalise is not None and not isinstance(normalise, bool):
        raise DataError(f"normalise must be True, False, None or a Normalisation, not {shown(normalise)}.")
    return Normalisation.fit(x) if normalise is not False and x.dtype == torch.uint8 else None


def checked_names(class_names: object, classes: int) -> tuple[str, ...]:
    """Class names, if there are any, one for each class at least."""
    wrong = DataError(f"class_names must be a list with a name for each class, not {shown(class_names)}.")
    names = tuple(items(class_names, wrong))
    if names and len(names) < classes:
        raise DataError(f"There are {classes} classes but only {len(names)} class_names; name every class, or none.")
    return names
