"""A federation holds the arrays that it is given, and of files only what a drawn client needs."""

import functools
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import unskew
from unskew.data.clients import RECENT, iterate_batches
from unskew.errors import ConfigError, DataError
from unskew.runs.resume import stored_content

OPTIONS = {"model": "logistic", "rounds": 1, "local_steps": 1, "batch_size": 4, "engine": "inline", "seed": 0}


def given(n=6, clients=3, shape=(5,), dtype="float32", seed=0):
    draws = np.random.default_rng(seed)
    xs = draws.integers(0, 200, (clients, n, *shape)).astype(dtype)
    return [(x, np.arange(n) % 2) for x in xs]


def federation(clients, **options):
    return unskew.Federation.from_arrays(clients, test=clients[0][:2], **options)


def tensors(*parts):
    return [torch.from_numpy(part) for part in parts]


def test_no_array_is_copied():
    """Not when the federation is made; rows that are in order already are not copied when a client is drawn, either."""
    plain, whole = given(shape=(6, 6, 3), dtype="uint8"), given(shape=(6, 6, 3), seed=1)
    fed = federation([*plain, (*whole[0], *whole[1])])
    held = [x.data_ptr() for x in fed.clients.rows.all()]
    assert held == [x.ctypes.data for x in (*(x for x, _ in plain), whole[0][0], whole[1][0])]
    again = federation([(*whole[0], *whole[1])]).clients[0]
    assert (again.x.data_ptr(), again.x_test.data_ptr()) == (whole[0][0].ctypes.data, whole[1][0].ctypes.data)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(5,), (6, 6, 3), (3, 6, 6)])
def test_a_client_has_its_own_rows_in_its_own_order(shape, dtype):
    clients = given(10, shape=shape, dtype=dtype)
    fed = federation(clients, holdout=0.2, seed=3)
    for k, (x, y) in enumerate(clients):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(3 * 1_000_003 + k))
        x, y = tensors(x, y)
        x = x.permute(0, 3, 1, 2) if shape[-1] == 3 else x
        client = fed.clients[k]
        assert client.x.dtype == (torch.uint8 if dtype == "bool" else x.dtype)
        for found, rows in ((client.x, order[:8]), (client.x_test, order[8:])):
            assert torch.equal(found, x[rows].to(found.dtype))
            assert len(shape) == 1 or found.permute(0, 2, 3, 1).is_contiguous()
        assert torch.equal(torch.cat([client.y, client.y_test]), y[order])
    moved = fed.clients.to(torch.device("cpu"))
    assert torch.equal(moved.x, fed.clients.x)
    assert torch.equal(moved[1].x_test, fed.clients[1].x_test)
    changed = replace(fed.clients[1], y=fed.clients[1].y + 1)
    assert torch.equal(changed.x_test, fed.clients[1].x_test)


def test_a_seed_may_be_a_number_of_numpy():
    clients = given(n=10, clients=2)
    splits = [federation(clients, holdout=0.2, seed=seed).clients[1].y for seed in (5, np.int64(5))]
    assert torch.equal(*splits)


def test_a_federation_can_be_copied_to_another_process():
    for fed in (federation(given()), unskew.load_federation("digits", clients=3)):
        fed.clients[1].x  # noqa: B018
        again = pickle.loads(pickle.dumps(fed))
        assert torch.equal(again.clients.x, fed.clients.x)
        assert torch.equal(again.clients[1].x_test, fed.clients[1].x_test)


def test_types_that_differ_become_one():
    fed = federation([*given(dtype="uint8"), *given(dtype="float64")])
    assert {client.x.dtype for client in fed.clients} == {torch.float64}
    assert fed.normalization is None


def test_double_precision_is_kept_where_the_run_has_it():
    """What float32 cannot tell apart makes a difference with fp64, and none with fp32."""
    clients = given(dtype="float64")
    near = [(x + 1e-9, y) for x, y in clients]
    for precision, same in (("fp32", True), ("fp64", False)):
        one, other = (
            unskew.run(federation=federation(c), precision=precision, **OPTIONS).vector for c in (clients, near)
        )
        assert torch.equal(one, other) == same


def test_the_checksum_is_that_of_the_arrays_as_one():
    """So runs from before can go on, also those whose float64 inputs were float32 then."""

    drawn = federation(given(shape=(6, 6, 3), dtype="float64"))
    before = replace(drawn, clients=drawn.clients.to(torch.device("cpu")))
    before.clients.x = before.clients.x.float()
    whole = replace(before, test=(before.test[0].float(), before.test[1]))
    assert stored_content(whole) == stored_content(drawn)


def test_files_are_read_only_where_a_client_is_drawn(tmp_path):
    """Only a drawn client is looked at, and refused where its numbers are not finite."""
    np.save(tmp_path / "x.npy", np.full((4, 8, 5), np.nan, np.float32))
    writable = np.load(tmp_path / "x.npy", mmap_mode="r+")
    writable[2] = 1
    writable.flush()
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    test = (np.ones((4, 5), np.float32), np.arange(4) % 2)
    fed = unskew.Federation.from_arrays([(part, np.arange(8) % 2) for part in x], test=test)
    assert fed.clients.mapped
    assert fed.clients[2].x.eq(1).all()
    assert fed.to(torch.device("meta")).clients is fed.clients
    assert fed.sizes.tolist() == [7] * 4
    with pytest.raises(DataError, match="inputs of client 1 contain NaN or infinite values"):
        fed.clients[1].x  # noqa: B018
    shard = replace(fed, clients=[replace(fed.clients[2], id=k) for k in range(2)])
    assert unskew.run(federation=shard, **OPTIONS).summary["rounds"] == 1


def test_what_was_drawn_last_is_kept_up_to_a_bound():
    n = RECENT // 4 // 3 + 1
    fed = federation(given(n, 4, (1,)))
    first = fed.clients[0]
    assert fed.clients[1] is not first
    assert fed.clients[0] is first
    for k in (1, 2, 3):
        fed.clients[k].x  # noqa: B018
    assert fed.clients[3] is fed.clients[3]
    assert fed.clients[0] is not first


def test_evaluation_takes_the_batches_that_one_array_would_give():
    parts = [torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 9, 2)]
    found, whole = list(iterate_batches(iter(parts), 4)), torch.cat(parts)
    assert [len(batch) for batch in found] == [4, 4, 4, 3]
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize(("event", "column"), [(0, (1, 0)), (2, (1, 2)), (None, (0, 1))])
def test_the_event_of_survival_arrays_may_be_another_value(event, column):
    x, time = np.zeros((40, 2), np.float32), np.arange(1.0, 41)
    died = np.arange(40) % 3 > 0
    y = np.stack([time, np.where(died, column[1], column[0])], 1)
    options = {"until": 40, **({} if event is None else {"event": event})}
    fed = unskew.Federation.from_arrays(
        [(x, y), (x, y, x, y)], test=(x, y), task="survival", options=options, holdout=0.0
    )
    for own in (fed.clients[0].y, fed.clients[1].y_test, fed.test[1]):
        assert torch.equal(own[:, 1], torch.from_numpy(died).double()[own[:, 0].long() - 1])


def test_a_survival_event_that_arrays_do_not_have_is_an_error():
    x, y = np.zeros((40, 2), np.float32), np.stack([np.arange(1.0, 41), np.arange(40) % 2], 1)
    with pytest.raises(DataError, match=r"survival\.event is 'Dead', but the event column .* has the values 0, 1"):
        unskew.Federation.from_arrays([(x, y)], test=(x, y), task="survival", options={"event": "Dead"})


@pytest.mark.parametrize(
    ("options", "levels", "classes", "names"),
    [
        ({"ignore": 2, "classes": ["a", "b", "c", "d"]}, [0, 1, 2, 3], [0, 1, 255, 3], ("a", "b", "c", "d")),
        ({"values": [200, 0], "classes": ["a", "b"]}, [0, 200, 255], [1, 0, 255], ("a", "b")),
        ({"values": [0, 255], "ignore": 7}, [0, 7, 255], [0, 255, 1], ("0", "255")),
    ],
)
def test_options_of_masks_in_arrays_are_used(options, levels, classes, names):
    draws = np.random.default_rng(0)
    x, which = draws.normal(size=(6, 3, 8, 8)).astype(np.float32), draws.integers(0, len(levels), (6, 8, 8))
    y, expected = np.array(levels)[which], np.array(classes, np.uint8)[which]
    fed = unskew.Federation.from_arrays(
        [(x, y, x, y)], test=(x, y.astype(np.uint8)), task="segmentation", options=options, holdout=0.0
    )
    assert (fed.names, fed.objective.names, fed.classes) == (names, names, len(names))
    for own in (fed.clients[0].y, fed.clients[0].y_test, fed.test[1]):
        assert torch.equal(own, torch.from_numpy(expected))


def test_masks_in_arrays_must_have_the_values_and_names_of_the_options():
    x, y = np.zeros((4, 3, 8, 8), np.float32), np.tile([0, 9], (4, 8, 4))
    make = functools.partial(unskew.Federation.from_arrays, [(x, y)], test=(x, y), task="segmentation")
    with pytest.raises(DataError, match=r"client 0 contain 9, but the classes have 0, 7.*segmentation\.ignore"):
        make(options={"values": [0, 7]})
    with pytest.raises(ConfigError, match="options name the classes a, b, but class_names others"):
        make(options={"values": [0, 9], "classes": ["a", "b"]}, class_names=["a", "c"])


@pytest.mark.parametrize("missing", [False, True])
def test_units_do_not_change_the_metrics(missing, tmp_path):
    """A power of two is exact: values of about 1e-8 must be scaled as values of about 1 are."""
    draws, unit = np.random.default_rng(0), 2.0**-27
    x, noise = draws.normal(size=(240, 2)).astype("float32"), draws.normal(size=240)
    y = (x[:, 0] + noise).astype("float32")

    def metrics(scale):
        if missing:
            columns = {"a": x[:, 0] * scale, "b": x[:, 1] * scale, "y": y * scale, "site": np.arange(240) % 2}
            pd.DataFrame(columns).to_parquet(tmp_path / "t.parquet")
            data = {"data": f"table:{tmp_path / 't.parquet'}", "label": "y", "task": "regression", "missing": "mean"}
            data |= {"partition": "natural:site"}
            fed = unskew.load_federation(**data)
        else:
            parts = [(x[k::3] * scale, y[k::3] * scale) for k in range(3)]
            scaling = unskew.Normalization.fit(torch.from_numpy(x * scale))
            fed = unskew.Federation.from_arrays(parts[:2], test=parts[2], task="regression", normalize=scaling)
        summary = unskew.run(fed, model="mlp", rounds=2, local_steps=4, lr=0.1, engine="inline").summary
        return [summary[name] for name in ("r2", "client_r2_mean", "client_r2_worst", "loss")]

    assert metrics(unit) == metrics(1.0)
    assert metrics(1.0)[1] < 0.9


def test_a_constant_target_is_rejected():
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(DataError, match="The target '0' has the same value in all training rows"):
        unskew.Federation.from_arrays([(x, np.full(20, 0.1))] * 2, test=(x, np.arange(20.0)), task="regression")
