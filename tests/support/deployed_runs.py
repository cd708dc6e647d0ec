"""Runs over sites compared with the simulator, value by value and byte by byte, and the methods that are compared."""

import json

import pytest
import torch

import unskew
from support.federations import QUICK as KNOWN
from support.sites import TINY, deployed
from unskew.tasks.registry import TASKS

QUICK = {
    **KNOWN,
    "fedcog": "fedcog:start_round=1",
    "fedcog-authors": "fedcog-authors:start_round=1",
    "fedssyn": "fedssyn:generator=vae-small,epochs=1,n_syn=10",
    "dp": "dp:noise=0,clip=0.05",  # the noise of a deployed run is not that of the simulator
    "dpsgd": "dpsgd:noise=0,clip=0.5",  # nor are its Poisson batches, unless all samples are in them
}

FULL_BATCHES = {"dpsgd": {"batch_size": 200}}

BODY = {"fedals", "fedpac", "fedrep", "fedper", "lgfedavg", "fedbabu", "fedas", "heterofl", "fedrolex"}
"""Methods that need a model with a body."""
SERVER_DATA = {"feddle", "feddf", "fedft", "hfcl", "center", "fltrust"}

SUMS = {
    "fedprox:mu=0.1+scaffold": {},
    "fedals+feddyn": {"rounds": 3, "model": "mlp"},
    "median:bucket=2+fedavgm": {},
    "scaffold+dp:noise=0,clip=0.05+fedadam": {},
    "scaffold+topk:share=0.1": {},
    "fedals+powersgd": {"rounds": 3, "model": "mlp"},
    "scaffold+ccvr": {"model": "mlp"},
    "fedrep+ft": {"participation": 0.7, "rounds": 3, "model": "mlp"},
}

SLOW_SUMS = {
    "fedcog:start_round=1,g_steps=2+scaffold+fedals": {"model": "mlp"},
    "vhl:per_class=4+fedssyn:generator=vae-small,epochs=1,n_syn=2": {
        "local_steps": None,
        "local_epochs": 1,
        "rounds": 1,
    },
    "fedavg": {"model": "resnet20", "buffers": "local", "holdout": 0.2, "rounds": 1},
    "fedgen:gen_steps=5+fedbn": {"model": "resnet20", "rounds": 1},
}


def compare(tmp_path, place=None, **options):
    """The simulator's model, records, summary and bytes, over sites."""
    if "fedals" in str(options.get("method")):  # over sites it is evaluated when the whole model is known
        options["eval_every"] = options.get("rounds", TINY["rounds"])
    values = {**TINY, **options}
    simulated = unskew.run(out=tmp_path / "simulated", **values)
    result, place = deployed(tmp_path, place, **options)
    assert torch.equal(result.vector, simulated.vector)
    for mine, theirs in zip(result.history, simulated.history, strict=True):
        for name in theirs:
            if "seconds" not in name and theirs[name] == theirs[name]:
                assert mine[name] == theirs[name], name
    for name, value in simulated.summary.items():
        if name == "report_bytes_up" and name not in result.summary:  # updates alone tell the models that are evaluated
            assert sends_whole_model(place, values["rounds"] - 1, len(result.vector))
        # The server of real sites does not know their data, so it has no checksum of them and compares with no constant.
        elif (
            "seconds" not in name
            and name not in ("engine", "data_checksum")
            and not name.startswith(("synthetic", "constant_"))
        ):
            rounding = (
                2.0**-20 if "loss" in name else 1e-12
            )  # a site evaluates its samples in other batches, in float32
            assert result.summary[name] == pytest.approx(value, abs=rounding) or value is None, name
    sent, sums, counted = bytes_sent(place), bytes_of_sums(place), result.summary
    assert sent["down"] + sums["down"] == counted["bytes_down"]
    assert sent["up"] + sums["up"] == counted["bytes_up"] + counted.get("report_bytes_up", 0)
    return result, place


def sends_whole_model(place, round, size):
    """Return whether all sites send all parameters of the model in a round."""
    frames = [frame for _, frame in place.link.received if frame.kind == "update" and frame.config["round"] == round]
    return all(frame.arrays["update/delta"].shape == (size,) for frame in frames)


def bytes_of_sums(place):
    """Bytes by which tables and balanced weights are settled before round 1: sums, categories, and what follows from them.

    Numbers in JSON count as 8 bytes each and categories as compact JSON.
    """
    config = next(iter(place.sites[0].experiments.configs.values()))
    balanced = config.class_weights == "balanced"
    up, settled = 0, {}
    for _, frame in place.link.received:
        if frame.kind == "sums":
            up += sum(len(blob.data) for blob in frame.arrays.values())
    down = sum(len(b.data) for _, frame in place.link.sent if frame.kind == "sums" for b in frame.arrays.values())
    for client, frame in place.link.received:
        if balanced and "client_info/class_counts" in frame.arrays and client not in settled:
            up += len(frame.arrays["client_info/class_counts"].data)
            settled[client] = 0
    for client, frame in place.link.sent:
        if frame.kind == "train":
            columns, constants, weights = (
                json.loads(frame.config[name]) for name in ("columns", "constants", "weights")
            )
            task = TASKS[frame.config["task"]]
            constants = constants if task.standardized or task.fits else {}  # others come from the configuration
            sizes = [compact(one["values"]) if one["kind"] == "category" else 16 for one in columns]
            settled[client] = sum(sizes) + 8 * len(weights) * balanced + 8 * sum(map(len, constants.values()))
    return {"up": up, "down": down + sum(settled.values())}


def compact(values):
    """Bytes of a list as JSON without spaces."""
    return len(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode())


def bytes_sent(place):
    """Bytes of arrays in the messages that make up the method, as they crossed the link."""
    ways = {"down": (place.link.sent, ("train", "receive")), "up": (place.link.received, ("update", "contribution"))}
    return {
        way: sum(len(blob.data) for _, frame in messages if frame.kind in kinds for blob in frame.arrays.values())
        for way, (messages, kinds) in ways.items()
    }
