"""Methods need nothing from survival analysis: what a task provides decides which of them run."""

import numpy as np
import pytest
import torch
from support.engine_methods import EARLY
from support.federations import LORA
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError
from unskew.methods.registry import METHODS, method
from unskew.tasks.base import PROVIDED
from unskew.tasks.registry import TASKS

OPTIONS = {
    **EARLY, "dp": "dp:noise=0,clip=1", "dpsgd": "dpsgd:noise=0,clip=1",
}  # fmt: skip
QUICK = ["fedavg", "scaffold", "fedbabu", "ditto", "dpsgd", "qfedavg", "krum", "fltrust", "fedproto", "feddf"]


def survival_clients(options=None, sizes=(8, 24, 13, 30, 16, 11)):
    """Clients with exponential times; the first input multiplies the hazard."""
    draws = np.random.default_rng(0)

    def client(n):
        x = draws.normal(size=(n, 4)).astype("float32")
        died, left = draws.exponential(100 * np.exp(-x[:, 0])), draws.exponential(150, n)
        return x, np.stack([np.minimum(died, left), died <= left], 1)

    return unskew.Federation.from_arrays(
        [client(n) for n in sizes], test=client(40), server=client(20), task="survival", holdout=0.25,
        options={"bins": 3} if options is None else options,
    )  # fmt: skip


def run(name, federation, **more):
    expression = OPTIONS.get(name, name)
    given = {"rounds": 2, "batch_size": 8, "lr": 0.05, "precision": "fp64", "model": "mlp", **more}
    return unskew.run(federation, method=expression, **given)


@pytest.mark.parametrize("name", slow_but(QUICK, METHODS))
def test_each_method_trains_survival_or_says_what_it_needs(name):
    provided = TASKS["survival"].provides
    needed = method(OPTIONS.get(name, name)).needs
    needs = {need for need in PROVIDED if needed(need)}
    given = {"bins": (40.0, 100.0, 500.0), "rates": (0.01, 0.01, 0.01)} if name in ("dp", "dpsgd") else None
    federation = survival_clients(given)
    if not needs <= provided:
        with pytest.raises(ConfigError, match="does not support the task 'survival'"):
            run(name, federation)
        return
    if name in LORA:
        with pytest.raises(ConfigError, match="LoRA"):
            run(name, federation)
        return
    result = run(name, federation)
    assert torch.isfinite(result.vector).all()
    assert 0 <= result.summary["concordance"] <= 1


@pytest.mark.parametrize("loss", ["auto", "discrete"])
@pytest.mark.parametrize("model", ["proportional", "mlp"])
@pytest.mark.parametrize("name", ["scaffold", "dpsgd"])
def test_every_engine_trains_survival_alike(name, model, loss):
    given = {"bins": (40.0, 100.0, 500.0), "rates": (0.01, 0.01, 0.01)} if name in ("dp", "dpsgd") else None
    federation = survival_clients(given)
    for precision, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
        one, other = (
            run(name, federation, model=model, loss=loss, engine=engine, precision=precision).vector
            for engine in ("inline", "vectorized")
        )
        assert_close(other, one, TRAINING, dtype=dtype)
