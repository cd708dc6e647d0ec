"""Compositions that are rejected, and the order of rules."""

import inspect
import re

import pytest
from support.federations import QUICK

from unskew.errors import MethodConflictError
from unskew.methods.fednova import FedNova
from unskew.methods.registry import METHODS, method

REJECTED = {
    "fedamp": "scaffold fedavgm fedrep ditto median topk dp:noise=1 dpsgd:noise=1",
    "fedas": "scaffold fedavgm fedrep ditto ft median fedbn dp:noise=1 dpsgd:noise=1",
    "feddbe": "fedrep fedper fedbn fedals ditto scaffold median dpsgd:noise=1",
    "mime": "fedlc fedrs fedrod fedetf fedntd moon feddecorr fedcog fedgen vhl heterofl",
    "mimelite": "fedlc fedrs fedrod fedetf fedntd moon feddecorr fedcog fedgen vhl heterofl",
    "scaffold:option=I": "fedlc fedrs fedetf fedntd moon feddecorr fedcog vhl",
    "fedreg": "fedlc fedrod fedntd vhl fedgen gpfl fedrep",
    "fedetf": "fedlc fedrs fedrod feddbe knnper fedrep fedpac fedala ccvr dpsgd",
    "moon": "fedamp fedfomo fedproto fedtgp fedgh",
    "fedgh": "scaffold fedavgm fedrep ditto median topk dp:noise=1 dpsgd:noise=1",
    "fedpac": "fedrep fedper fedbn ft ditto scaffold ccvr median dp:noise=1",
    "fedproto": "scaffold fedavgm fedrep ditto median topk dp:noise=1 dpsgd:noise=1",
    "fedrod": "fedlc fedrs ditto ft apfl fedrep fedper fedbn scaffold",
    "fedtgp": "scaffold fedavgm fedrep ditto median topk dp:noise=1 fedproto",
    "fednova": "fedcm fedgen floco",
    "fedexp": "topk randk qsgd sign powersgd",
    "floco": "fedrep feddbe ditto scaffold dp:noise=1 dpsgd:noise=1",
    "gpfl": "fedrep fedper feddbe ditto scaffold dpsgd:noise=1",
    "knnper": "ditto ft fedbabu fedala",
    "qfedavg": "fedcm fedgen floco",
    "smooth": "fedexp feddyn fedsmoo fedcm dense feddf fedasync fedbuff ca2fl feddle fedgen ifca fedals:auto "
    "fedamp fedfomo fedproto fedtgp fedgh",
    "dense": "fedper fedrep lgfedavg fedbabu fedbn fedals feddbe fedamp",
    "feddf": "fedper fedrep lgfedavg fedbabu fedbn fedals feddbe fedamp",
}
"""Methods by the first one: with another loss, shared part or personal model, or that need other updates."""

ACCEPTED = [
    "smooth+fednova",
    "smooth+mimelite",
    "smooth+fedacg",
    "qfedavg+scaffold",
    "fedasync+fedbn",
    "dense+scaffold",
    "fedexp+int8",
    "fedexp+bf16",
]


@pytest.mark.parametrize("name", REJECTED)
def test_compositions_are_rejected_in_both_orders(name):
    for other in REJECTED[name].split():
        for expression in (f"{name}+{other}", f"{other}+{name}"):
            with pytest.raises(MethodConflictError):
                method(expression)


@pytest.mark.parametrize("expression", ACCEPTED)
def test_compositions_are_accepted_in_both_orders(expression):
    for written in (expression, "+".join(reversed(expression.split("+")))):
        assert {rule.name for rule in method(written).rules} >= set(expression.split("+"))


def test_a_subclass_of_a_rule_that_replaces_updates_is_rejected_like_it():
    class Normalized(FedNova):
        name = "normalized"

    with pytest.raises(MethodConflictError, match=r"fedcm needs updates that are changes of the model, .* normalized"):
        method(["fedcm", Normalized()])


@pytest.mark.parametrize("expression", ["fedlc+scaffold:option=II", "fedrs+fedreg", "moon+fedreg", "fedprox+mime"])
def test_compositions_next_to_them_are_possible(expression):
    assert [rule.name for rule in method(expression).client] == [part.split(":")[0] for part in expression.split("+")]


def test_rules_that_return_another_initial_model_declare_it():
    """Their ``begin`` runs first, so that other rules find the model in any order."""
    rules = [rule for name in METHODS for rule in method(QUICK.get(name, name)).client]
    declared = {rule.name for rule in rules if rule.changes_start}
    sources = {rule.name: inspect.getsource(inspect.unwrap(type(rule).begin)) for rule in rules}
    assert declared == {name for name, source in sources.items() if re.search(r"[\[{]START\b", source)}
    assert {"ifca", "fedala"} <= declared


def test_the_position_of_a_rule_is_declared_or_as_written():
    orders = {
        "fedcog:coefficients=auto+moon+fedlc": "fedlc fedcog moon",
        "scaffold+fedprox+mime": "mime scaffold fedprox",
        "fedprox+mime+scaffold": "fedprox mime scaffold",
        "fedcog+fedlc": "fedcog fedlc",  # which does not scale the loss
        "ifca:blocks=true+smooth+fedprox": "smooth fedprox ifca",
        "fedrs+knnper": "fedrs knnper",
        "knnper+fedrs": "fedrs knnper",
    }
    for expression, order in orders.items():
        assert [rule.name for rule in method(expression).client] == order.split(), expression
