"""Compositions that are rejected."""

import pytest

from unskew.errors import MethodConflictError
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
    "floco": "fedrep feddbe ditto scaffold dp:noise=1 dpsgd:noise=1",
    "gpfl": "fedrep fedper feddbe ditto scaffold dpsgd:noise=1",
    "knnper": "ditto ft fedbabu fedala",
}
"""Methods by the first one: with another loss, shared part or personal model, or that need other updates."""


@pytest.mark.parametrize("name", REJECTED)
def test_compositions_are_rejected_in_both_orders(name):
    for other in REJECTED[name].split():
        for expression in (f"{name}+{other}", f"{other}+{name}"):
            with pytest.raises(MethodConflictError):
                method(expression)
