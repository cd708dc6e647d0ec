"""Secure aggregation: what the server may see, and who is refused."""

import pytest
import torch
from support.federations import Spy, blobs
from support.tolerance import near

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.descriptions import describe_all
from unskew.protocol.rules import ClientRule, ServerRule

SIZES = [12, 20, 16]


def train(method, **options):
    return unskew.run(blobs(SIZES), model="logistic", method=method, rounds=2, engine="inline", lr=0.05, **options)


class Curious(ServerRule):
    """Averages, but looks at every single update."""

    name, summary, paper = "curious", "looks", "none"
    needs = ("individual",)

    def step(self, state, updates):
        single = torch.stack([u.delta for u in updates])
        return {"v": state["v"] + single.mean(0)}


class CuriousClient(ClientRule):
    name, summary, paper = "curious-client", "its server half looks", "none"
    needs = ("individual",)


class Liar(ServerRule):
    """Says that sums are enough, and looks all the same."""

    name, summary, paper = "liar", "looks", "none"

    def step(self, state, updates):
        return {"v": state["v"] + next(iter(updates)).delta}


def test_methods_that_need_sums_give_the_same_numbers():
    for name in ("fedavg", "fedcog:start_round=0,n=8,g_steps=2", "scaffold", "fedadam", "fedexp", "feddyn"):
        free, bound = train(name), train(name, secure_aggregation="required")
        assert torch.equal(free.vector, bound.vector)


@pytest.mark.parametrize("part", [Curious(), CuriousClient()], ids=["server", "client"])
def test_methods_that_read_single_updates_are_refused_with_the_reason(part):
    train(part)
    with pytest.raises(MethodConflictError, match=rf"{part.name} reads the update of each individual client"):
        train(part, secure_aggregation="required")


def test_a_rule_that_looks_without_saying_so_is_stopped():
    with pytest.raises(ConfigError, match="does not need them"):
        train(Liar())


def test_a_diagnosis_of_single_models_is_refused():
    with pytest.raises(ConfigError, match="individual updates"):
        train("fedavg", secure_aggregation="required", diagnose="local_models")


def test_the_catalogue_says_what_each_method_needs():
    needs = {row["name"]: row["needs"] for row in describe_all()}
    assert set(needs.values()) <= {"sum", "individual"}
    assert all(needs[name] == "sum" for name in ("fedavg", "fedcog", "scaffold", "moon", "fedexp", "feddyn", "ditto"))


def test_local_models_are_measured_as_by_hand():
    """One round of FedAvg, repeated with a callback-free loop over single-client federations."""
    fed = blobs(SIZES)
    result = unskew.run(
        fed, model="logistic", rounds=1, engine="inline", lr=0.05, diagnose="local_models", precision="fp64", seed=4
    )
    row = result.history[0]
    spy = Spy()
    again = unskew.run(fed, model="logistic", method=spy, rounds=1, engine="inline", lr=0.05, precision="fp64", seed=4)
    locals_ = [local for local, _ in spy.seen]
    distances = [float((local - again.vector).norm()) for local in locals_]
    assert row["local_distance"] == near(sum(distances) / len(distances))
    x, y = fed.test
    right = []
    for local in locals_:
        module = result.model
        start = 0
        state = {}
        for n, p in module.named_parameters():
            state[n] = local[start : start + p.numel()].view_as(p)
            start += p.numel()
        right.append(float((torch.func.functional_call(module, state, (x.double(),)).argmax(1) == y).double().mean()))
    assert row["local_accuracy"] == near(sum(right) / len(right))
    assert 0 <= row["local_personal_accuracy"] <= 1
    assert result.summary["local_distance"] == row["local_distance"]
