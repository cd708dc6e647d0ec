"""Methods, partitions, delays and models as somebody may write them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_names import delays, methods, models, partitions
from support.fuzzing import amounts, fuzz, values

import unskew
from unskew.data.partition.partitioner import make_partition
from unskew.models.registry import resolve_model
from unskew.simulation.delays import Delays

pytestmark = pytest.mark.fuzz

LABELS = np.arange(60) % 6
COLUMNS = {"label": LABELS, "kind": np.array(["a", "b", "c"] * 20), "x0": np.linspace(0, 1, 60)}


@amounts(20, 2500)
def test_methods(box, examples):
    @fuzz(examples)
    @given(methods())
    def check(spelling):
        box.python(lambda: unskew.method(spelling))

    check()


@amounts(20, 2000)
def test_partitions(box, examples):
    @fuzz(examples)
    @given(partitions(), st.sampled_from([None, 1, 3, 10]))
    def check(spelling, clients):
        box.python(lambda: make_partition(spelling, LABELS, clients, 0, classes=6, columns=COLUMNS))

    check()


@amounts(10, 1000)
def test_delays(box, examples):
    @fuzz(examples)
    @given(delays())
    def check(spelling):
        box.python(lambda: Delays(spelling, 0)(3, 0))

    check()


@amounts(10, 500)
def test_models(box, examples):
    options = st.dictionaries(st.sampled_from(["hidden", "dropout", "shortcut", "norm", "x"]), values, max_size=2)

    @fuzz(examples)
    @given(models(), options)
    def check(spelling, options):
        box.python(lambda: resolve_model(spelling, (1, 8, 8), 3, options))

    check()
