"""What a server holds from round to round, counted in vectors of the model's size."""

import gc
import warnings

import pytest
import torch
from support.federations import blobs

import unskew
from unskew.runs import assembly
from unskew.simulation.client_store import ClientStore
from unskew.simulation.server import Server

SIZES = [4] * 24
M = 6  # clients per round
MODELS = 6  # held by every run: the model's layout, the engine's and the evaluator's models; one to learn at the server has 2


def vectors(size):
    """Vectors ``[size]`` that are alive, rows of matrices included; memory that is shared counts once."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and thing.dim() in (1, 2) and thing.shape[-1] == size:
                memory = thing.untyped_storage()
                found[memory.data_ptr()] = memory.nbytes() // (size * thing.element_size())
    return sum(found.values())


class Count:
    """After each round: vectors in memory, and those that are on their way."""

    def __init__(self, server):
        self.server, self.held = server, []

    def start(self, config, rounds_done):
        pass

    def round(self, row):
        if row["round"] < 4:
            return
        gc.collect()
        starts = {sent.v.data_ptr() for sent in self.server().clients.sent.values() if sent.v is not None}
        self.held.append((vectors(self.server().setup.spec.size), row.get("in_flight", 0), len(starts)))

    def end(self, summary):
        pass


RULES = {
    "fedavg": 1,
    "fedbuff:buffer_size=4": 1,
    "fedasync": 1,
    "ca2fl:buffer_size=4": 2,
    "fedft:epochs=1": 1,
    "feddf:epochs=1": 1,
    "feddle:epochs=1": 1 + 2 * M,
}


WAITING = {"fedbuff:buffer_size=4": 1, "ca2fl:buffer_size=4": 1 + 3 * 2}
"""While a buffer waits: the sum of its updates, and of three of them, where they are needed, each and the one before it."""

CASES = [(method, delay) for method in RULES for delay in ("none", "half-normal:3")]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "delay"), CASES)
def test_the_server_holds_the_model_its_rule_and_what_was_sent(tmp_path, monkeypatch, method, delay):
    """Updates on their way and CA2FL's cache are on disk; whoever remembers what was sent holds each version of it once."""
    made, real = [], Server.__init__
    monkeypatch.setattr(assembly, "ClientStore", lambda folder: ClientStore(folder, 0))
    monkeypatch.setattr(Server, "__init__", lambda self, *args: (made.append(self), real(self, *args))[1])
    count = Count(lambda: made[-1])
    torch.manual_seed(0)
    result = unskew.run(
        blobs(SIZES, shape=(2, 17, 17)), model="logistic", method=method, rounds=6, participation=M / len(SIZES),
        lr=0.01, local_steps=1, engine="inline", network={"delay": delay}, eval_clients=0, callbacks=[count],
        out=tmp_path / "a",
    )  # fmt: skip
    size = result.summary["parameters"]
    learns = method.split(":")[0] in ("fedft", "feddf", "feddle")
    # Of a store without room for anything, the last entry stays in memory.
    fixed = MODELS + RULES[method] + 2 * learns + method.startswith("ca2fl")
    for held, flying, starts in count.held:
        assert held <= fixed + min(flying, 1) + starts + WAITING.get(method, 0), (method, count.held)
    if delay == "none":
        assert count.held[-1] == (fixed, 0, 0)
    else:
        assert max(flying for _, flying, _ in count.held) > M
    assert size == 3 * 2 * 17 * 17 + 3
    if method.startswith("ca2fl"):
        files = list((tmp_path / "a" / "checkpoints").glob("*/cached-*.safetensors"))
        assert len(files) >= len(SIZES) // 2
