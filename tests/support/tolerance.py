"""How far two computations of the same numbers may lie apart, from the arithmetic and not from what a CPU was seen to give.

A floating-point operation is off by at most half an eps of its result. Two computations of the same number that
each pass through ``operations`` of them, on numbers no larger than ``size``, therefore differ by at most
``operations * eps * size`` (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). Which of
the right results comes out depends on the CPU: its vectors are longer or shorter, so its sums have another order.
"""

import numpy as np
import pytest
import torch

FEW = 100
"""Roundings of a short formula: a dot product of some dozen numbers, a layer of a tiny network."""
FORMULA = 50 * FEW
"""Roundings of a formula over a data set of a test: exponentials and logarithms in sums over up to some hundred samples."""
TRAINING = 10 * FORMULA
"""Roundings of a run by hand: some rounds of some steps, each with a gradient over a batch."""
MAGNIFIED = 10 * TRAINING
"""Roundings of a run that also divides by small numbers, such as Adam's root of the second moment near zero."""


def tolerance(operations: int = FORMULA, size: float = 1.0, dtype: torch.dtype = torch.float64) -> float:
    """The most by which two results of ``operations`` roundings of numbers up to ``size`` can differ in ``dtype``."""
    return operations * torch.finfo(dtype).eps * size


def near(expected, operations: int = FORMULA, size: float | None = None, dtype: torch.dtype = torch.float64):
    """``pytest.approx`` of a number, a list or a dict with the tolerance of the arithmetic, as in :func:`assert_close`."""
    values = expected.values() if isinstance(expected, dict) else np.ravel(np.asarray(expected, dtype=object))
    size = _size([value for value in values if value is not None]) if size is None else size
    return pytest.approx(expected, abs=tolerance(operations, size, dtype))


def assert_close(actual, expected, operations: int = FORMULA, size: float | None = None, dtype=None, msg=""):
    """The same numbers up to rounding.

    Args:
        actual: A tensor, an array, a number or a list of them.
        expected: The same; a single number stands for all.
        operations: How many roundings a number passes through: one of the counts above.
        size: The largest number on the way; by default the largest of the results, and at least one, since inputs,
            losses and gradients of the tests are of that size even where a result is small.
        dtype: The type that was computed with; by default the coarser one of the two results.
        msg: What is compared.
    """
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, f"{msg}: {actual.dtype} is not {expected.dtype}"
    dtype = dtype or max((_dtype(actual), _dtype(expected)), key=lambda kind: torch.finfo(kind).eps)
    found, wanted = _array(actual), _array(expected)
    assert wanted.ndim == 0 or found.shape == wanted.shape, f"{msg}: {found.shape} is not {wanted.shape}"
    size = max(_size(found), _size(wanted)) if size is None else size
    atol = tolerance(operations, size, dtype)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, equal_nan=False, err_msg=str(msg))


def _array(values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    if isinstance(values, (list, tuple)):
        return np.stack([_array(value) for value in values]) if values else np.zeros(0)
    return np.asarray(values, dtype=np.float64)


def _dtype(values) -> torch.dtype:
    """The floating type of what is given; numbers of Python and integers are exact in float64."""
    if isinstance(values, (list, tuple)):
        return max((_dtype(value) for value in values), key=lambda kind: torch.finfo(kind).eps, default=torch.float64)
    if isinstance(values, torch.Tensor):
        return values.dtype if values.is_floating_point() else torch.float64
    return torch.float32 if getattr(values, "dtype", None) == np.float32 else torch.float64


def _size(values) -> float:
    """The largest finite one, at least 1."""
    values = np.abs(np.asarray(values, dtype=np.float64))
    return max(1.0, float(values[np.isfinite(values)].max(initial=0.0)))
