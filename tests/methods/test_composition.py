"""Compositions that are rejected."""

import pytest

from unskew.errors import MethodConflictError
from unskew.methods.fednova import FedNova
from unskew.methods.registry import method

REJECTED = {
    "fedamp": "scaffold fedavgm fedrep ditto median topk dp:noise=1 dpsgd:noise=1",
    "fedas": "scaffold fedavgm fedrep ditto ft median fedbn dp:noise=1 dpsgd:noise=1",
    "feddbe": "fedrep fedper fedbn fedals ditto scaffold median dpsgd:noise=1",
    "fedetf": "fedlc fedrs fedrod feddbe knnper fedrep fedpac fedala ccvr dpsgd",
    "moon": "fedamp fedfomo fedproto fedtgp fedgh",
    "fedgh": "scaffold fedavgm fedrep ditto median topk dp:noise=1 dpsgd:noise=1",
    "fedpac": "fedrep fedper fedbn ft ditto scaffold ccvr median dp:noise=1",
    "fedproto": "scaffold fedavgm fedrep ditto median topk dp:noise=1 dpsgd:noise=1",
    "fedrod": "fedlc fedrs ditto ft apfl fedrep fedper fedbn scaffold",
    "fedtgp": "scaffold fedavgm fedrep ditto median topk dp:noise=1 fedproto",
    "fednova": "fedcm fedgen floco",
    "floco": "fedrep feddbe ditto scaffold dp:noise=1 dpsgd:noise=1",
    "gpfl": "fedrep fedper feddbe ditto scaffold dpsgd:noise=1",
    "knnper": "ditto ft fedbabu fedala",
    "qfedavg": "fedcm fedgen floco",
    "smooth": "fedexp feddyn fedsmoo fedcm dense feddf fedasync fedbuff ca2fl feddle fedgen ifca:blocks=true fedals:auto",
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
