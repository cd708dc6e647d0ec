"""Recorded steps give the bits of steps that are executed from Python, and each method's steps can be recorded.

``RecordedOperators`` stands in for CUDA graphs on the CPU: what a graph would repeat with an outdated value differs here.
"""

from dataclasses import replace

import pytest
import torch
from support.federations import LORA, QUICK, blobs, small_budget, small_model
from support.meta_device import COUNTED, NOT_HERE, TRAINED_ALONE, Cohort, Counts
from support.recorded_operators import RecordedOperators
from support.tolerance import assert_close

import unskew
from unskew.engines.vectorized import VectorizedEngine
from unskew.methods.registry import METHODS
from unskew.protocol.messages import START

ALONE = {
    **dict.fromkeys(LORA, "needs a model with LoRA factors"),
    **dict.fromkeys(TRAINED_ALONE, "trains clients one at a time"),
    "center": "pools the clients",
    "fedssyn": "shares images",
}
"""Methods whose clients are not mapped in this federation."""
SPELLED = {
    **QUICK,
    "fedcog": "fedcog:start_round=2,g_steps=2,n=8",
    "fedcog-authors": "fedcog-authors:start_round=2,g_steps=2,n=8",
    "vhl": "vhl:per_class=4",
}
FEW = ("fedavg", "scaffold", "fedcog", "perfedavg", "dpsgd")


@pytest.fixture
def trained(monkeypatch):
    """Return a function that runs a method with steps from Python or recorded, and returns the model and the engines."""

    def run(name, recorded, sizes=(12, 12, 12, 10, 10), sums=False, form="grouped", **options):
        engines = []

        def create(setup):
            setup = replace(setup, federation=setup.federation.to(setup.device), sums=sums and setup.sums)
            engines.append(VectorizedEngine(setup, None, form, RecordedOperators if recorded else None))
            return engines[-1]

        monkeypatch.setattr("unskew.engines.registry.make_vectorized", create)
        torch.manual_seed(0)
        given = {"rounds": 5, "local_steps": 4, "batch_size": 4, "lr": 0.05, "precision": "fp64", **small_budget(name)}
        federation = blobs(list(sizes))
        result = unskew.run(
            federation, model=small_model(name), method=name, engine="vectorized", **{**given, **options}
        )
        return result.vector, engines

    return run


def recordings(engines):
    return [kind.step for engine in engines for c in engine.trainer._recorded.values() for kind in c._kinds.values()]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in sorted(set(METHODS) - set(ALONE))],
)
def test_recorded_steps_give_the_bits_of_steps_from_python(name, trained):
    spelled = SPELLED.get(name, name)
    reference, _ = trained(spelled, False)
    vector, engines = trained(spelled, True)
    assert torch.equal(vector, reference)
    assert_close(trained(spelled, True, sums=True)[0], reference)
    steps = recordings(engines)
    assert any(step._graph is not None for step in steps)
    assert [step.reasons for step in steps if step.reasons] == []
    assert all(engine.trainer.record is not None for engine in engines)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True, "clip_grad_norm": 1.0, "weight_decay": 0.01},
        {"augment": True},
        {"local_steps": None, "local_epochs": 2, "sizes": (5, 23, 8, 17, 8)},
        {"form": "channels_last"},
        {"class_weights": (1.0, 2.0, 0.5)},
    ],
)
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_budgets_and_forms_give_the_same_bits(name, options, trained):
    reference, _ = trained(name, False, **options)
    vector, engines = trained(name, True, **options)
    assert torch.equal(vector, reference)
    assert any(step._graph is not None for step in recordings(engines))


@pytest.mark.parametrize(
    "options",
    [
        {"lr_schedule": "cosine"},
        {"lr_schedule": "cosine", "lr_schedule_per": "step"},
        {"optimizer": "adam", "lr": 0.01},
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    ],
)
def test_numbers_of_a_step_are_tensors_of_the_recorded_one(options, trained):
    """Python and PyTorch round powers and products of scalars differently."""
    reference, _ = trained("scaffold", False, **options)
    vector, engines = trained("scaffold", True, **options)
    assert_close(vector, reference)
    assert any(step._graph is not None for step in recordings(engines))


def test_steps_that_cannot_be_recorded_are_executed_from_python_with_a_warning(trained, monkeypatch):
    def refuse(work, restore):
        raise RuntimeError("out of registers")

    reference, _ = trained("fedavg", False)
    monkeypatch.setitem(globals(), "RecordedOperators", refuse)
    with pytest.warns(UserWarning, match="not recorded as a CUDA graph.*out of registers"):
        vector, _ = trained("fedavg", True)
    assert torch.equal(vector, reference)


class Starting(unskew.ClientRule):
    """A rule that replaces the initial model in some rounds, and then also pulls towards it."""

    name, summary, paper = "starting", "replaces", "none"

    def __init__(self, first, last):
        self.first, self.last = first, last

    def begin(self, ctx):
        return {START: ctx.v_global * 0.9} if self.first <= ctx.round < self.last else {}

    def gradient(self, grad_fn, ctx, carry):
        return lambda v, batch: grad_fn(v, batch) + 0.1 * (v - ctx.v_global)


@pytest.mark.parametrize(("first", "last"), [(0, 99), (4, 99), (0, 4), (3, 6)])
def test_initial_models_may_be_replaced_in_some_rounds(first, last, trained):
    reference, _ = trained([Starting(first, last)], False, rounds=9)
    vector, engines = trained([Starting(first, last)], True, rounds=9)
    assert torch.equal(vector, reference)
    assert any(step._graph is not None for step in recordings(engines))


def test_sums_and_single_updates_may_alternate(trained, monkeypatch):
    """Each kind of result has its own memory, which a replayed graph writes."""
    reference, _ = trained("scaffold", False, rounds=12)
    train = VectorizedEngine.train_by_index

    def alternate(self, broadcasts):
        self.trainer.setup = replace(self.trainer.setup, sums=broadcasts[0].round // 3 % 2 == 1)
        return train(self, broadcasts)

    monkeypatch.setattr(VectorizedEngine, "train_by_index", alternate)
    vector, _ = trained("scaffold", True, rounds=12)
    assert_close(vector, reference)


class Counting(unskew.ClientRule):
    """A rule that stores a tensor in an attribute."""

    name, summary, paper = "counting", "keeps", "none"

    def begin(self, ctx):
        self.start = ctx.v_global * 1.0
        return {}

    def gradient(self, grad_fn, ctx, carry):
        return lambda v, batch: grad_fn(v, batch) + 0.1 * (v - self.start)


def test_a_rule_that_stores_tensors_in_attributes_is_not_recorded(trained):
    reference, _ = trained([Counting()], False)
    with pytest.warns(UserWarning, match="a hook changes an attribute of its rule"):
        vector, _ = trained([Counting()], True, sums=True)
    assert_close(vector, reference)


class Reading(unskew.ClientRule):
    """A rule whose steps read the device."""

    name, summary, paper = "reading", "reads", "none"

    def gradient(self, grad_fn, ctx, carry):
        def own(v, batch):
            return grad_fn(v, batch) * (1 + int(batch.step))

        return own


def test_a_step_that_reads_the_device_is_not_recorded(trained):
    reference, _ = trained([Reading()], False)
    with pytest.warns(UserWarning, match="not recorded as a CUDA graph.*_local_scalar_dense reads the device"):
        vector, engines = trained([Reading()], True)
    assert torch.equal(vector, reference)
    assert all(step._graph is None for step in recordings(engines))


class FromPython:
    """Work that is recorded as itself."""

    def __init__(self, work, restore):
        self.replay = work


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.slow)
        for name in sorted(set(METHODS) - set(NOT_HERE) - set(COUNTED))
    ],
)
def test_no_step_waits_for_the_device_or_copies_from_the_host(name, monkeypatch):
    cohort = Cohort(name, True, 6, record=FromPython)
    with Counts(monkeypatch):
        cohort.train(0)
        cohort.train(1)
    assert cohort.engine.trainer.record is not None
    assert any(step._graph is not None for step in recordings([cohort.engine]))
    assert [step.reasons for step in recordings([cohort.engine]) if step.reasons] == []
