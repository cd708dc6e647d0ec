"""Sums that measure skew: distances of labels, scatter of inputs within classes, and gradients at the initial model.

All are summands of one client, so the skew of a federation follows from two exchanges of sums. Kinds of the first exchange:
``class_counts``, ``class_means``, ``label_products``, ``gradient``. Those of the second use totals of the first.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from unskew.errors import DataError
from unskew.sums.base import MOST_VALUES, Arguments, ClientRows, Shapes, SumKind, SumRequest, Sums
from unskew.sums.columns import sizes_of_columns

SIZES = ("clients", "rows", "rows2")
"""Numbers of ``site_scalars`` on the size of a client: 1, ``n_k``, ``n_k^2``."""
SCALARS = ("clients", "distance", "divergence", "classes", "inverse_root", "between")
"""Numbers of ``site_scalars`` on its labels: 1, total variation distance and Kullback-Leibler divergence from the class
frequencies ``q`` of all clients, exponential of the entropy, ``m_k^-1/2`` with the number ``m_k`` of labels, and
``m_k ||q_k - q||^2``.
"""


class ScalarArguments(Arguments):
    """Number of classes; 0 without classes that can be counted."""

    classes: Annotated[int, Field(ge=0)]


class InputArguments(Arguments):
    """Number of classes and of inputs."""

    classes: Annotated[int, Field(ge=1)]
    inputs: Annotated[int, Field(ge=1)]


class GradientArguments(Arguments):
    """Number of parameters."""

    parameters: Annotated[int, Field(ge=1)]


class LinearArguments(Arguments):
    """Number of codes of each input column, 0 for a number, and number of targets."""

    codes: tuple[Annotated[int, Field(ge=0)], ...]
    targets: Annotated[int, Field(ge=1)]


def label_distances(counts: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare the labels of each client with those of all clients.

    Args:
        counts: Samples per client and class, ``[K, C]``.
        shares: Class frequencies of all clients, ``[C]``.

    Returns:
        Total variation distance, entropy, and Kullback-Leibler divergence, ``[K]`` each.
    """
    own = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log(own, where=own > 0, out=np.zeros_like(own))
    ratios = np.divide(own, shares, where=(own > 0) & (shares > 0), out=np.ones_like(own))
    return 0.5 * np.abs(own - shares).sum(1), -(own * logs).sum(1), (own * np.log(ratios)).sum(1)


class SiteScalars(SumKind):
    """Numbers of a client on its size and its labels, see ``SIZES`` and ``SCALARS``; without classes only the former."""

    name = "site_scalars"
    permission = "counts"
    arguments = ScalarArguments
    constants = ("shares",)
    once = ("shares",)

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        classes = int(request.args["classes"])
        shares = request.tensor("shares", classes).numpy()
        if not (shares >= 0).all() or shares.sum() > 1 + 1e-6:
            raise DataError("The request for site_scalars has class frequencies that do not add up to 1.")
        sums = {"sizes": torch.tensor([1.0, rows.num_rows, rows.num_rows**2], dtype=torch.float64)}
        if classes:
            counts = class_counts(rows).double().numpy()
            labels = max(1.0, counts.sum())
            distance, entropy, divergence = (float(values[0]) for values in label_distances(counts[None], shares))
            between = labels * np.square(counts / labels - shares).sum()
            values = [1.0, distance, divergence, np.exp(entropy), labels**-0.5, between]
            sums["labels"] = torch.tensor(values, dtype=torch.float64)
        return sums

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        sizes: Shapes = {"sizes": (torch.float64, (len(SIZES),))}
        return sizes | ({"labels": (torch.float64, (len(SCALARS),))} if request.args["classes"] else {})

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the number of rows, and of samples of the smallest class, on which the numbers depend."""
        sizes = {"sizes": torch.full((len(SIZES),), rows.num_rows)}
        if request.args["classes"]:
            sizes["labels"] = torch.full((len(SCALARS),), smallest(class_counts(rows)))
        return sizes

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return "number of rows and its square, and distances of the class frequencies from those of all sites"


def class_counts(rows: ClientRows) -> Tensor:
    """Return the number of samples of each class.

    Args:
        rows: Rows of a client.

    Raises:
        DataError: If the data have no classes.
    """
    if rows.class_counts is None:
        raise DataError("These data have no classes that can be counted.")
    return rows.class_counts().cpu()


def smallest(counts: Tensor) -> int:
    """Return the smallest of some counts that are above 0; 0 if none is."""
    return int(counts[counts > 0].min()) if bool((counts > 0).any()) else 0


def class_rows(rows: ClientRows, request: SumRequest) -> list[tuple[int, Tensor]]:
    """Return each class with at least two samples and their inputs, float64 ``[n, d]``.

    Args:
        rows: Rows of the client.
        request: Request with the arguments ``classes`` and ``inputs``.

    Raises:
        DataError: If the inputs are not numbers or have another size, or targets are not one class per sample.
    """
    x, y = rows.x, rows.y
    if x is None or y is None or not has_class_means(x, y):
        raise DataError(f"The request for {request.kind} needs inputs that are numbers, and one class per sample.")
    flat = x.reshape(len(x), -1)
    classes, inputs = int(request.args["classes"]), int(request.args["inputs"])
    found, counts = np.unique(y.cpu().numpy(), return_counts=True)
    if flat.shape[1] != inputs or (len(found) and found[-1] >= classes):
        raise DataError(
            f"The request for {request.kind} is for {inputs} inputs and {classes} classes; these data differ."
        )
    return [(c, flat[y == c].double()) for c, n in zip(found.tolist(), counts.tolist(), strict=True) if n > 1]


def group_counts(rows: ClientRows, request: SumRequest) -> Tensor:
    """Return the number of samples of each class, and of those with the rarest value of a column, ``[C, 2]``.

    The means and the scatter tell it if a column of a table has few distinct values within the class.

    Args:
        rows: Rows of the client.
        request: Request with the arguments ``classes`` and ``inputs``.
    """
    per_class, x, y = class_rows(rows, request), rows.x, rows.y
    assert x is not None
    assert y is not None
    counts = torch.bincount(y.cpu().long(), minlength=int(request.args["classes"]))[:, None].repeat(1, 2)
    for c, inputs in per_class:
        if x.dim() == 2:
            counts[c, 1] = int(sizes_of_columns(inputs.cpu().numpy()).min())
    return counts


def has_class_means(x: Tensor, y: Tensor) -> bool:
    """Return whether inputs are numbers and targets are one class per sample.

    Args:
        x: Inputs, ``[n, ...]``.
        y: Targets, ``[n]`` or ``[n, L]``.
    """
    return x.dtype != torch.int64 and y.dim() == 1 and not y.dtype.is_floating_point


class ClassMeans(SumKind):
    """For each class with at least two samples: number of samples, 1, sum of inputs, and scatter around their mean."""

    name = "class_means"
    permission = "features"
    arguments = InputArguments

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        sums = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in self.shapes(request).items()}
        for c, inputs in class_rows(rows, request):
            mean = inputs.mean(0)
            sums["counts"][c], sums["clients"][c] = len(inputs), 1
            sums["sums"][c] = len(inputs) * mean
            sums["scatter"][c] = (inputs - mean).square().sum()
        return sums

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        classes = int(request.args["classes"])
        per_class = {"counts": (torch.int64, (classes,)), "clients": (torch.int64, (classes,))}
        return {
            **per_class,
            "sums": (torch.float64, (classes, int(request.args["inputs"]))),
            "scatter": (torch.float64, (classes,)),
        }

    def disjoint(self, rows: ClientRows) -> bool:
        """Return whether each row is counted once."""
        return True

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the number of samples of each class, and of those with the rarest value of a column."""
        return dict.fromkeys(self.shapes(request), group_counts(rows, request))

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"for each of {request.args['classes']} classes: mean of each of {request.args['inputs']} inputs, and scatter"


class ClassScatter(SumKind):
    """For each class with at least two samples: ``n ||mean - mean of all clients||^2``."""

    name = "class_scatter"
    permission = "features"
    arguments = InputArguments
    constants = ("means",)

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        classes = int(request.args["classes"])
        means = request.tensor("means", classes, int(request.args["inputs"]))
        scatter = torch.zeros(classes, dtype=torch.float64)
        for c, inputs in class_rows(rows, request):
            scatter[c] = len(inputs) * (inputs.mean(0).cpu() - means[c]).square().sum()
        return {"scatter": scatter}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"scatter": (torch.float64, (int(request.args["classes"]),))}

    def disjoint(self, rows: ClientRows) -> bool:
        """Return whether each row is counted once."""
        return True

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the number of samples of each class."""
        return {"scatter": group_counts(rows, request)}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"for each of {request.args['classes']} classes: squared distance of the mean inputs from those of all sites"


class Gradient(SumKind):
    """Mean gradient ``g_k`` of the rows at the initial model, and 1, ``||g_k||^2`` and the variance of gradients of rows."""

    name = "gradient"
    permission = "gradients"
    arguments = GradientArguments
    of_experiment = True

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        if rows.gradient is None:
            raise DataError("The initial model is not known, so no gradient can be computed.")
        gradient, variance = rows.gradient()
        g = gradient.detach().cpu().double()
        if g.shape != (int(request.args["parameters"]),):
            raise DataError(f"The model has {len(g)} parameters, not {request.args['parameters']}.")
        return {"gradient": g, "norms": torch.tensor([1.0, float(g @ g), variance], dtype=torch.float64)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"gradient": (torch.float64, (int(request.args["parameters"]),)), "norms": (torch.float64, (3,))}

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the number of samples of the smallest class: the gradient of the last layer separates classes."""
        size = rows.num_rows
        if rows.class_counts is not None:
            size = min(size, smallest(class_counts(rows)) or size)
        return {name: torch.full(shape, size) for name, (_, shape) in self.shapes(request).items()}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"mean gradient of {request.args['parameters']} parameters at the initial model, its norm, and its noise"


def input_values(x: Tensor, codes: list[int], center: np.ndarray) -> np.ndarray:
    """Return inputs for a linear model, ``[n, F]``: numbers minus ``center``, and 0 or 1 for each code of a category.

    Args:
        x: Inputs, ``[n, ...]``.
        codes: Number of codes of each column; 0 for a number.
        center: Number to subtract from each column.
    """
    values = x.reshape(len(x), -1).double()
    columns = [
        F.one_hot(values[:, j].long(), count).double() if count else values[:, [j]] - center[j]
        for j, count in enumerate(codes)
    ]
    return torch.cat(columns, 1).numpy() if columns else np.zeros((len(x), 0))


def linear_rows(rows: ClientRows, request: SumRequest) -> np.ndarray:
    """Return 1, the inputs and the targets of a client, ``[n, 1 + F + T]``; classes are targets of 0 and 1.

    Args:
        rows: Rows of the client.
        request: Request with ``LinearArguments`` and the tensor ``center``.

    Raises:
        DataError: If inputs or targets are not those of the request.
    """
    x, y, codes, width = rows.x, rows.y, [*map(int, request.args["codes"])], int(request.args["targets"])
    if x is None or y is None or (codes and x[:1].numel() < len(codes)):
        raise DataError(f"The request for {request.kind} is for other inputs than these data have.")
    center = request.tensor("center", len(codes)).numpy()
    targets = F.one_hot(y.long(), width).double() if y.dim() == 1 and not y.dtype.is_floating_point else y.double()
    if targets.shape[1:] != (width,):
        raise DataError(f"The request for {request.kind} is for {width} targets; these data have others.")
    return np.column_stack([np.ones(len(y)), input_values(x, codes, center), targets.cpu().numpy()])


def num_inputs(request: SumRequest) -> int:
    """Return the number of inputs of a linear model, one for each code of a category."""
    return sum(int(count) or 1 for count in request.args["codes"])


def linear_sizes(values: np.ndarray, request: SumRequest) -> int:
    """Return the size of the smallest group that products of rows could reveal: of a code, a class, or both.

    A number with at most ``MOST_VALUES`` distinct values is like a code.

    It is 1 with at most as many rows as inputs, because products could then reveal single rows.

    Args:
        values: 1, the inputs and the targets, from ``linear_rows``.
        request: The request.
    """
    ends = np.cumsum([1, *(int(count) or 1 for count in request.args["codes"])])
    if len(values) <= ends[-1]:
        return 1
    coded = [j for start, end in pairwise(ends) for j in range(start, end) if end - start > 1]
    found = {j: np.unique(column) for j, column in enumerate(values.T) if j and j not in coded}
    pairs = [
        values[:, j] == value for j, distinct in found.items() if len(distinct) <= MOST_VALUES for value in distinct
    ]
    flags = np.column_stack([values[:, coded], *pairs]).astype(np.float64)
    counts = torch.from_numpy(flags.T @ flags)
    return min(len(values), smallest(counts) or len(values))


class LabelProducts(SumKind):
    """Products of 1 and the inputs with 1, the inputs and the targets, and squares of the targets."""

    name = "label_products"
    permission = "features"
    arguments = LinearArguments
    constants = ("center",)

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        values, width = linear_rows(rows, request), 1 + num_inputs(request)
        squares = np.square(values[:, width:]).sum(0)
        return {
            "clients": torch.ones(1, dtype=torch.int64),
            "products": torch.from_numpy(values[:, :width].T @ values),
            "squares": torch.from_numpy(squares),
        }

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        width, targets = 1 + num_inputs(request), int(request.args["targets"])
        return {
            "clients": (torch.int64, (1,)),
            "products": (torch.float64, (width, width + targets)),
            "squares": (torch.float64, (targets,)),
        }

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the size of the smallest group for each tensor."""
        size = linear_sizes(linear_rows(rows, request), request)
        return {name: torch.full(shape[:1], size) for name, (_, shape) in self.shapes(request).items()}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return f"products of {num_inputs(request)} inputs with each other and with {request.args['targets']} targets"


class LabelScatter(SumKind):
    """``n_k`` times the squared distance of a client's mean targets from all clients', and from a linear model of the inputs.

    Constants: ``mean [T]`` of the targets, and the ``coefficients [1 + F, T]`` of the model.
    """

    name = "label_scatter"
    permission = "features"
    arguments = LinearArguments
    constants = ("center", "mean", "coefficients")
    once = ("mean", "coefficients")

    def compute(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return a client's summands."""
        values, width = linear_rows(rows, request), 1 + num_inputs(request)
        targets = int(request.args["targets"])
        mean = values.sum(0) / max(1, len(values))
        overall = request.tensor("mean", targets).numpy()
        residual = mean[width:] - mean[:width] @ request.tensor("coefficients", width, targets).numpy()
        both = [np.square(mean[width:] - overall).sum(), np.square(residual).sum()]
        return {"scatter": torch.tensor(both, dtype=torch.float64) * len(values)}

    def shapes(self, request: SumRequest) -> Shapes:
        """Return dtype and shape of each tensor."""
        return {"scatter": (torch.float64, (2,))}

    def group_sizes(self, rows: ClientRows, request: SumRequest) -> Sums:
        """Return the size of the smallest group for each tensor."""
        size = linear_sizes(linear_rows(rows, request), request)
        return {name: torch.full(shape[:1], size) for name, (_, shape) in self.shapes(request).items()}

    def describe(self, request: SumRequest) -> str:
        """Describe what is sent."""
        return "squared distance of the mean targets from those of all sites, and from a linear model of the inputs"


def label_distance_by_chance(shares: np.ndarray, spread: float) -> float:
    """Return the mean label distance if clients of these sizes drew their labels from the overall class frequencies.

    A frequency of ``n_k`` draws has the variance ``q (1 - q) (1/n_k - 1/n)`` around that of all ``n`` draws, which contain
    them; by the normal approximation, it deviates by ``sqrt(2/pi)`` standard deviations on average.

    Args:
        shares: Class frequencies ``q [C]`` of all clients together.
        spread: Mean of ``sqrt(1/n_k - 1/n)`` over clients.

    >>> round(label_distance_by_chance(np.full(10, 0.1), (1 / 100 - 1 / 1000) ** 0.5), 3)
    0.114
    """
    return min(1.0, float(np.sqrt(shares * (1 - shares)).sum()) * spread / math.sqrt(2 * math.pi))
