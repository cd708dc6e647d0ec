"""Every method over four real SuperNodes gives the numbers of the simulator, bit for bit.

``UNSKEW_METHODS`` names some of them in the place of all, with commas.
"""

import os

import pytest
import torch
from support.sites import TINY
from test_equal import BODY, QUICK, SERVER_DATA
from test_flower import real

import unskew
from unskew.config.reading import experiment
from unskew.deployment.places import Given, Local
from unskew.deployment.run import Deployment, run
from unskew.methods.catalogue import CATALOGUE

pytestmark = [pytest.mark.slow, *real]


def values_of(name):
    more = {"server": 60} if name in SERVER_DATA else {"model": "mlp"} if name in BODY else {}
    return {**TINY, "clients": 4, "method": QUICK.get(name, name), **more}


class Kept(Local):
    """Sites that stay from run to run; they have agreed to all experiments."""

    def close(self):
        Given.close(self)

    def forget(self):
        pass


@pytest.mark.usefixtures("flower_is_found")
def test_every_method_over_four_supernodes(tmp_path):
    """One SuperLink and four SuperNodes for all, as most of the time is their start."""
    asked = os.environ.get("UNSKEW_METHODS")
    experiments = {name: experiment(values_of(name)) for name in (asked.split(",") if asked else sorted(CATALOGUE))}
    place, differ = Kept("matrix", 4, list(experiments.values())), []
    try:
        for name, config in experiments.items():
            result = run(config, Deployment(), tmp_path / name, [], lambda text: None, place)
            if not torch.equal(result.vector, unskew.run(**values_of(name)).vector):
                differ.append(name)
    finally:
        Local.close(place)
    assert differ == []
