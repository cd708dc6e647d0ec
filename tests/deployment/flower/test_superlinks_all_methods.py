"""Every method of the catalogue, and sums, over four real SuperNodes give the numbers of the simulator, bit for bit.

``UNSKEW_PART=2/5`` takes the second of five parts instead of all.
"""

import os

import pytest
import torch
from support.deployed_runs import BODY, FULL_BATCHES, QUICK, SERVER_DATA, SLOW_SUMS, SUMS
from support.federations import LORA
from support.flower_processes import real
from support.sites import TINY

import unskew
from unskew.config.loader import experiment
from unskew.deployment.flower.superlinks import LocalSuperLink, RemoteSuperLink
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.run import run
from unskew.errors import UnskewError
from unskew.methods.registry import METHODS

pytestmark = [pytest.mark.slow, *real]


def values_of(name):
    sums = {**SUMS, **SLOW_SUMS, **FULL_BATCHES, "perfedavg": {"drop_last": True}}
    more = {"server_data": 60} if name in SERVER_DATA else {"model": "mlp"} if name in BODY else sums.get(name, {})
    return {**TINY, "clients": 4, "method": QUICK.get(name, name), **more}


def asked():
    """Names of this part; sums first, as they take longest."""
    part, _, parts = os.environ.get("UNSKEW_PART", "1/1").partition("/")
    names = [*SUMS, *SLOW_SUMS, *sorted(set(METHODS) - {"mime", *LORA})]
    return list(dict.fromkeys(names))[int(part) - 1 :: int(parts)]


class Kept(LocalSuperLink):
    """Sites that stay from run to run; they have agreed to all experiments."""

    def close(self):
        RemoteSuperLink.close(self)

    def forget(self):
        pass


@pytest.mark.usefixtures("flower_is_found")
def test_every_method_over_four_supernodes(tmp_path):
    """One SuperLink and four SuperNodes for all, as most of the time is their start."""
    experiments = {name: experiment(values_of(name)) for name in asked()}
    place, differ = Kept("matrix", 4, list(experiments.values())), {}
    try:
        for number, (name, config) in enumerate(experiments.items()):
            try:
                result = run(config, Deployment(), tmp_path / str(number), [], lambda text: None, place)
                if not torch.equal(result.vector, unskew.run(**values_of(name)).vector):
                    differ[name] = "another model"
            except UnskewError as error:
                differ[name] = str(error)
            print(f"{name}: {differ.get(name, 'equal')}", flush=True)
    finally:
        LocalSuperLink.close(place)
    assert differ == {}
    assert len(experiments) > 0
