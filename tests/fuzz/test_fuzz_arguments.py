"""What may be given in Python: any value instead of any argument."""

import inspect
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_folder import TINY, X, Y, federation
from support.fuzz_names import FIELDS, methods, models, near, of_field, partitions
from support.fuzzing import amounts, fuzz, numbers, values

import unskew
from unskew.data.spec import DataSpec

pytestmark = pytest.mark.fuzz

FED = federation()
TOP = [name for name in FIELDS if "." not in name]


def arguments(function, **known):
    """One to three arguments of a function, each with a value that it may have or with any."""
    names = [name for name in inspect.signature(function).parameters if name not in ("options", "changes")]
    one = st.sampled_from([*names, *known]).flatmap(
        lambda name: st.tuples(st.just(name), known.get(name, of_field(name)) | values)
    )
    return st.lists(one, min_size=1, max_size=3).map(dict)


options = st.sampled_from(TOP).flatmap(lambda name: st.tuples(st.just(name), of_field(name) | values))


@pytest.mark.usefixtures("unstarted")
@amounts(25, 1200)
def test_run(box, examples):
    @fuzz(examples)
    @given(
        arguments(unskew.run, method=methods() | st.lists(methods(), max_size=2), model=models()),
        st.lists(options, max_size=1),
    )
    def check(given, more):
        box.python(lambda: unskew.run(**{"federation": FED, **TINY, "out": "new/run", **dict(more), **given}))

    check()


@pytest.mark.usefixtures("unstarted", "undrawn")
@amounts(10, 500)
def test_compare(box, examples):
    several = methods() | st.lists(methods() | values, max_size=2)
    seeds = st.lists(values, max_size=2)
    no_function = values.filter(lambda value: not callable(value))  # errors of a user's own are the user's to see

    @fuzz(examples)
    @given(arguments(unskew.compare, methods=several, seeds=seeds, follow=no_function), st.lists(options, max_size=1))
    def check(given, more):
        base = {"federation": FED, **TINY, "methods": ["fedavg", "moon"], "seeds": 1}
        box.python(lambda: unskew.compare(**{**base, **dict(more), **given}))

    check()


@pytest.mark.usefixtures("unstarted")
@amounts(10, 500)
def test_resume(box, finished, examples):
    shutil.copytree(finished, "run")
    folders = st.sampled_from(["run", "nowhere", "tiny.csv", "run/checkpoints", "\0"])

    @fuzz(examples)
    @given(arguments(unskew.resume, folder=folders, method=methods(), model=models()), st.lists(options, max_size=2))
    def check(given, changes):
        base = {"folder": "run", "federation": FED, "rounds": 2}
        box.python(lambda: unskew.resume(**{**base, **dict(changes), **given}))

    check()


@amounts(5, 200)
def test_diagnose(box, finished, examples):
    shutil.copytree(finished, "run")
    runs = st.sampled_from(["run", "nowhere", "tiny.csv"])
    amount = st.sampled_from([0, 1, None, -1, 10**30])
    known = {"run": runs, "sample_clients": amount, "samples": amount, "curvature": st.booleans(), "model": models()}
    known |= dict.fromkeys(("epsilon", "mu"), numbers)

    @fuzz(examples)
    @given(arguments(unskew.diagnose, shares=st.lists(values, max_size=2), **known), st.lists(options, max_size=1))
    def check(given, more):
        base = {"federation": FED, "model": "logistic", "samples": 2, "curvature": False, "shares": [0.5]}
        box.python(lambda: unskew.diagnose(**{**base, **dict(more), **given}))

    check()


@amounts(15, 800)
def test_load_federation(box, examples):
    known = {"partition": partitions(), "data": of_field("data"), "text": of_field("columns")}
    fields = st.lists(options.filter(lambda option: option[0] in DataSpec.model_fields), max_size=2)

    @fuzz(examples)
    @given(st.fixed_dictionaries({}, optional=known), fields, arguments(unskew.load_federation))
    def check(given, more, others):
        base = {"data": "table:tiny.csv", "label": "label", "partition": "iid", "clients": 3}
        box.python(lambda: unskew.load_federation(**{**base, **others, **dict(more), **given}))

    check()


@amounts(15, 1000)
def test_method(box, examples):
    one = near("fedprox", "scaffold", "feddle", "fedssyn", "fedcog", "fedals", "dense")
    names = near("mu", "option", "eta_g", "lr", "epochs", "generator", "weight", "steps", "start_round", "auto")

    @fuzz(examples)
    @given(
        one | methods() | values | st.lists(methods() | values, max_size=3), st.dictionaries(names, values, max_size=2)
    )
    def check(spec, options):
        box.python(lambda: unskew.method(spec, **{name: value for name, value in options.items() if name != "spec"}))

    check()


@st.composite
def arrays(draw):
    """A pair of inputs and labels, perhaps of odd shapes, types and values."""
    x, y = X[:6].copy(), Y[:6].copy()
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(
            st.sampled_from(["x type", "y type", "x shape", "y shape", "x value", "y value", "y", "x", "tensor"])
        )
        types = st.sampled_from(
            ["uint8", "int64", "uint64", "float64", "float16", "bool", "complex64", "U3", "O", "M8[s]", "V4"]
        )
        shapes = st.sampled_from([(), (0,), (6,), (6, 0), (6, 1), (1, 6), (3, 2), (6, 1, 1), (2, 3, 1, 1), (1,) * 7])
        try:
            if kind == "x type":
                x = np.asarray(x).astype(draw(types))
            elif kind == "y type":
                y = np.asarray(y).astype(draw(types))
            elif kind == "x shape":
                x = np.resize(x, draw(shapes))
            elif kind == "y shape":
                y = np.resize(y, draw(shapes))
            elif kind == "x value":
                x.flat[0] = draw(st.floats(width=32))
            elif kind == "y value":
                y.flat[0] = draw(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-1, 3, 2**31, 2**63 - 1, 10**9]))
            elif kind == "tensor":
                x, y = torch.as_tensor(x), torch.as_tensor(y)
            elif kind == "x":
                x = draw(values)
            else:
                y = draw(values)
        except (TypeError, ValueError, OverflowError, AttributeError, IndexError, RuntimeError):  # not to be had so
            continue
    return draw(st.sampled_from([(x, y), (x, y), (x, y), [x, y], (x, y, x, y), (x,)]))


@amounts(25, 1500)
def test_from_arrays(box, examples):
    known = {
        "clients": st.lists(arrays() | values, max_size=3),
        **dict.fromkeys(("test", "server"), arrays()),
        "task": near("classification", "multilabel", "language"),
        "classes": st.sampled_from([1, 2, 3, 10**9, 2**63, np.int64(3)]),
    }

    @fuzz(examples)
    @given(arguments(unskew.Federation.from_arrays, **known))
    def check(given):
        base = {"clients": [(X[:6], Y[:6]), (X[6:], Y[6:])], "test": (X, Y)}
        box.python(lambda: repr(unskew.Federation.from_arrays(**{**base, **given})))

    check()


CHEAP = """
fedavg fedavgm fedadam fedbuff fedasync ca2fl fedprox scaffold moon fedsam fedexp fednova feddyn fedpvr ditto fedrep
fedbn ft feddecorr fedntd fedals
"""
RANGES = {
    "method": st.lists(st.sampled_from(CHEAP.split()), min_size=1, max_size=3, unique=True).map("+".join),
    "lr": st.sampled_from([1e-30, 0.1, 1e6]),
    "batch_size": st.sampled_from([1, 5, 10_000_000]),
    "participation": st.sampled_from([1e-300, 0.5, 1.0]),
    "optimizer": st.sampled_from(["sgd", "adam", "adamw"]),
    "weights": st.sampled_from(["auto", "samples", "uniform"]),
    "buffers": st.sampled_from(["average", "local", "reset"]),
    "precision": st.sampled_from(["fp32", "fp64", "bf16"]),
    "network": st.sampled_from(["none", "fixed:1", "half-normal:1e6", "lognormal:1e6,1e6", {"drop": 0.99}]),
    "engine": st.sampled_from(["inline", "vectorized"]),
    "weight_decay": st.sampled_from([0.0, 1e3]),
    "momentum": st.sampled_from([0.0, 0.999]),
    "nesterov": st.booleans(),
    "clip_grad_norm": st.sampled_from([None, 1e-300, 1e300]),
    "diagnose": st.sampled_from([[], ["gradients"], ["consensus"], ["local_models", "generalization", "server"]]),
    "seed": st.sampled_from([0, 2**63 - 1]),
    "secure_aggregation": st.sampled_from(["off", "required"]),
    "eval_clients": st.sampled_from([0, 1, 10**30]),
    "eval_every": st.sampled_from([1, 10**30]),
    "checkpoint_every": st.sampled_from([1, 10**30]),
    "target": st.sampled_from([None, 1e-300, 1.0]),
    "drop_last": st.booleans(),
}


@pytest.mark.filterwarnings("ignore")
@amounts(10, 300)
def test_runs_at_the_edges(box, examples):
    """Real runs, with values that may be had."""

    @fuzz(examples)
    @given(st.fixed_dictionaries({}, optional=RANGES), st.booleans())
    def check(given, kept):
        box.python(lambda: unskew.run(FED, **{**TINY, **given}, **({"out": "new/run"} if kept else {})))

    check()
