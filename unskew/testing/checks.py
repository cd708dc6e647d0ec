"""Checks of what unskew relies on: reproducible runs, equal engines, valid data, models that are functions of a vector."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskew.data.load import load_federation
from unskew.methods.registry import MethodLike
from unskew.models.spec import ModelSpec
from unskew.records.result import Result
from unskew.runs.build_model import ModelLike
from unskew.runs.run import run
from unskew.testing.small_problems import SmallBatchNorm, small_federation

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference between the vectors of two engines, in float32 relative to the length of the vector."""
METHODS = ("fedavg", "scaffold", "fedprox+fedadam", "ditto", "fedrep")
"""Methods that differ in their messages: none, uploads and downloads, a server rule, personal models, slices."""


def assert_engines_agree(other: Tensor, reference: Tensor) -> None:
    """Assert that the vectors of two engines are equal up to rounding.

    Args:
        other: Parameters from one engine, ``[d]``.
        reference: Parameters from the other, ``[d]``.
    """
    assert other.dtype == reference.dtype, f"the vectors have the types {other.dtype} and {reference.dtype}"
    assert torch.isfinite(reference).all(), "the reference is not finite"
    scale = 1.0 if reference.dtype == torch.float64 else float(torch.norm(reference))
    gap = (other - reference).abs().max() if reference.dtype == torch.float64 else torch.norm(other - reference)
    most = TOLERANCE[reference.dtype] * scale
    assert gap <= most, f"the vectors differ by {float(gap):.3g}, more than {most:.3g}"


def _train(method: MethodLike, engine: str, model: ModelLike | None = None, **options: Any) -> Result:
    """Train on the small federation, by default with BatchNorm and dropout. The global random state is not reset."""
    if model is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = SmallBatchNorm()
    budget: dict[str, Any] = {
        "rounds": 3,
        "lr": 0.05,
        "batch_size": 8,
        "participation": 0.5,
        "local_epochs": 1,
        "precision": "fp64",
    }
    return run(
        options.pop("federation", None) or small_federation(),
        model=model,
        method=method,
        engine=engine,
        **budget | options,
    )


def check_rule(method: MethodLike, **options: Any) -> Result:
    """Check that a method is reproducible, runs on engines that train several clients at once, and can be resumed.

    Args:
        method: Method, in any form that ``unskew.method`` accepts.
        **options: Fields of the run that differ from the defaults of the check, and ``model`` and ``federation``.

    Returns:
        The result of the run on the engine ``inline``.

    Raises:
        AssertionError: If runs differ that must be equal.
        UnskewError: If the method is not valid, or does not support the options.
    """
    reference = _train(method, "inline", **options)
    assert torch.equal(_train(method, "inline", **options).vector, reference.vector), (
        "two runs with the same seed differ: draw random numbers from ctx.key and batch.key with unskew.seeding"
    )
    assert_engines_agree(_train(method, "vectorized", **options).vector, reference.vector)
    rounds = int(options.pop("rounds", 3))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        _train(method, "inline", rounds=1, out=out, **options)
        resumed = _train(method, "inline", rounds=rounds, out=out, resume=True, **options)
    assert torch.equal(resumed.vector, reference.vector), (
        "a resumed run differs from an uninterrupted one: keep what must survive a round in ctx.state or in the state of "
        "the server half"
    )
    return reference


def check_engine(engine: str, methods: Sequence[MethodLike] = METHODS) -> None:
    """Check that an engine gives the numbers and the traffic of the engine ``inline``.

    Args:
        engine: Engine expression, such as ``slurm:partition=short``.
        methods: Methods to train with.

    Raises:
        AssertionError: If the engines differ.
    """
    for method in methods:
        reference, other = _train(method, "inline"), _train(method, engine)
        assert_engines_agree(other.vector, reference.vector)
        for inline_row, row in zip(reference.history, other.history, strict=True):
            for name in ("bytes_up", "bytes_down", "updates"):
                assert row[name] == inline_row[name], f"{method}: {name} is {row[name]} instead of {inline_row[name]}"


def check_data(data: str, **options: Any) -> None:
    """Check that a data source gives the same valid samples each time, and that a model trains on them.

    Args:
        data: Name of the source.
        **options: Further arguments of ``unskew.load_federation``, such as ``partition="natural:hospital"``.

    Raises:
        AssertionError: If the samples differ between two loads, or a part is empty.
        DataError: If the samples are not valid.
    """
    options = {"partition": "iid", "clients": 3, **options}
    first, second = (load_federation(data, **options) for _ in range(2))
    assert len(first.test[1]) > 0, "there are no test samples"
    parts, again = ([(c.x, c.y) for c in fed.clients] + [fed.test] for fed in (first, second))
    for part, other in zip(parts, again, strict=True):
        assert len(part[0]) == len(part[1]) > 0, "a client has no samples, or another number of inputs than of labels"
        for content, values, values_again in zip(("inputs", "labels"), part, other, strict=True):
            assert torch.equal(torch.as_tensor(values), torch.as_tensor(values_again)), (
                f"loading twice gives other {content}"
            )
    run(first, rounds=1, local_steps=1, engine="inline")


def check_model(model: ModelLike, shape: tuple[int, int, int] = (2, 6, 6), classes: int = 3, **options: Any) -> None:
    """Check that a model is a function of its parameters, and can be trained for several clients at once.

    Args:
        model: Registered name, module or factory.
        shape: Shape of the images that the model is tried with: channels, height and width.
        classes: Number of classes.
        **options: Further fields of the run, such as ``model_options``.

    Raises:
        AssertionError: If engines differ, or training does not change the model.
    """
    options = {"federation": small_federation(classes=classes, shape=shape), "model": model, **options}
    reference = _train("fedavg", "inline", **options)
    assert_engines_agree(_train("fedavg", "vectorized", **options).vector, reference.vector)
    module = reference.model
    assert isinstance(module, nn.Module)
    x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = module(x)
    assert logits.shape == (4, classes), f"the logits of four images have the shape {tuple(logits.shape)}"
    spec = ModelSpec(module, shape, classes, dtype=torch.float64)
    again = spec.load(spec.flatten(), spec.flatten_buffers()).eval()
    torch.testing.assert_close(again(x), logits, msg="the model is not a function of its parameters and buffers alone")
    still = _train("fedavg", "inline", **{**options, "lr": 1e-12})
    assert not torch.equal(still.vector, reference.vector), "training does not change the model"
