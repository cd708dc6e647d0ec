"""What stays at clients: in memory or on disk, the same; and checkpoints keep it whatever happens to it later."""

import errno
import os
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support.federations import SmallBatchNorm, blobs
from support.running import Stop, StopAfter, assert_same_run
from support.slow import slow_but

import unskew
from unskew.errors import CheckpointError
from unskew.filesystem import write_atomic
from unskew.protocol.messages import ClientState, num_bytes
from unskew.runs import assembly
from unskew.simulation.client_store import ClientStore, encode_tensors


def state(value, size=100):
    return {"rules/one/c": torch.full((size,), float(value)), "rules/one/n": torch.tensor(value)}


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])
        assert tensor.dtype == other[name].dtype


def test_absent_is_empty_not_zeros(tmp_path):
    store = ClientStore(tmp_path / "clients")
    assert store.get(3) == {}
    assert len(store) == 0
    store.put(3, {})
    assert len(store) == 0
    assert not (tmp_path / "clients").exists(), "nothing is written before it is needed"


@pytest.mark.parametrize("model", [None, torch.ones(3)])
def test_a_clients_state_and_its_tensors_say_the_same_whatever_rules_are_called(model):
    rules = {
        name: {"x": torch.full((2,), k), "y/z": torch.zeros(())} for k, name in enumerate(("model", "optimizer", "a"))
    }
    state = ClientState(rules, model, None, {"momentum": torch.ones(1)})
    again = ClientState.of(state.tensors())
    same(again.tensors(), state.tensors())
    assert again.rules.keys() == rules.keys()
    assert (again.model is None) == (model is None)
    assert again.buffers is None


def test_spills_beyond_its_limit_and_gives_back_the_same(tmp_path):
    limit = 3 * num_bytes(state(0).values())
    store = ClientStore(tmp_path / "clients", limit)
    for k in range(10):
        store.put(k, state(k))
    assert len(store) == 10
    assert [k for k, _ in store.on_disk()] == list(range(7)), "oldest first"
    assert [k for k, _ in store.in_memory()] == [7, 8, 9]
    for k in range(10):
        same(store.get(k), state(k))
    store.put(2, state(22))
    assert len(store) == 10
    same(store.get(2), state(22))
    assert [k for k, _ in store.in_memory()] == [8, 9, 2]
    for k in range(10):
        same(store.get(k), state(22 if k == 2 else k))


def test_a_single_entry_larger_than_the_limit_stays(tmp_path):
    store = ClientStore(tmp_path / "clients", limit=10)
    store.put(0, state(0))
    same(store.get(0), state(0))
    store.put(1, state(1))
    same(store.get(0), state(0))
    same(store.get(1), state(1))


def test_without_a_folder_nothing_is_spilled():
    store = ClientStore(None, limit=1)
    for k in range(5):
        store.put(k, state(k))
    assert list(store.on_disk()) == []
    same(store.get(0), state(0))


def test_a_file_linked_by_a_checkpoint_survives_later_writes(tmp_path):
    store = ClientStore(tmp_path / "clients", limit=1)
    store.put(0, state(0))
    store.put(1, state(1))
    ((client, path),) = store.on_disk()
    assert client == 0
    link = tmp_path / "checkpoint.safetensors"
    os.link(path, link)
    before = link.read_bytes()
    for value in (5, 6):
        store.put(0, state(value))  # into memory ...
        store.put(1, state(value))  # ... and out again, over the file
    assert 0 in [k for k, _ in store.on_disk()]
    assert link.read_bytes() == before
    same(load_file(link), state(0))
    same(store.get(0), state(6))
    store.close()
    assert not (tmp_path / "clients").exists()
    assert link.read_bytes() == before


def test_files_of_a_killed_session_are_not_taken_for_its_own(tmp_path):
    old = ClientStore(tmp_path / "clients", limit=1)
    for k in range(3):
        old.put(k, state(k))
    fresh = ClientStore(tmp_path / "clients", limit=1)
    assert len(fresh) == 0
    assert fresh.get(0) == {}
    assert not (tmp_path / "clients").exists()


def test_tensors_that_share_memory_are_written(tmp_path):
    whole = torch.arange(6.0)
    store = ClientStore(tmp_path / "clients", limit=1)
    given = {"all": whole, "again": whole, "part": whole[2:4], "across": whole.view(2, 3).T}
    store.put(0, given)
    store.put(1, state(1))
    assert [k for k, _ in store.on_disk()] == [0]
    same(store.get(0), given)
    assert encode_tensors({}) is not None


def test_full_disk_is_a_sentence(tmp_path, monkeypatch):
    store = ClientStore(tmp_path / "clients", limit=1)
    store.put(0, state(0))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="The disk is full"):
        store.put(1, state(1))
    same(store.get(0), state(0))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path, old = tmp_path / "a.json", tmp_path / "old"
    write_atomic(path, b"first")
    os.link(path, old)
    write_atomic(path, b"second")
    assert (path.read_bytes(), old.read_bytes()) == (b"second", b"first"), "never written in place"

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="The disk is full"):
            write_atomic(path, b"third")
    assert path.read_bytes() == b"second"
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "old"}
    with pytest.raises(CheckpointError, match="could not be written"):
        write_atomic(tmp_path / "nowhere" / "a.json", b"")


# ---- in a run ---------------------------------------------------------------------------------------------------------

OPTIONS = {
    "model": SmallBatchNorm(),
    "method": "scaffold",
    "rounds": 6,
    "participation": 0.5,
    "lr": 0.1,
    "buffers": "local",
    "engine": "inline",
    "checkpoint_every": 2,
}


@dataclass(frozen=True)
class HeadOnly(unskew.SyncRule):
    """All of the model travels for a client that was not there in the round before, else its head only."""

    name, summary, paper = "headonly", "", ""

    def exchanged_slices(self, state, round, client, last, spec):
        everything, head = (slice(0, spec.size),), tuple(spec.parts["head"])
        return (everything if last is None or round - last > 1 else head), head


def test_slices_that_stay_at_clients_are_resumed(tmp_path):
    """What a client kept, and when it last took part, is in the checkpoint."""
    fed, options = blobs([6, 9, 12, 7, 8, 10]), {**OPTIONS, "method": HeadOnly(), "checkpoint_every": 1}
    whole = unskew.run(fed, **options, out=tmp_path / "whole")
    everything = unskew.run(fed, **{**options, "method": "fedavg"})
    assert 0 < whole.summary["bytes_down"] < everything.summary["bytes_down"]
    for last in (3, 5):
        run = tmp_path / f"stopped-{last}"
        with pytest.raises(Stop):
            unskew.run(fed, **options, out=run, callbacks=[StopAfter(last)])
        unskew.resume(run, federation=fed, model=OPTIONS["model"], method=HeadOnly())
        assert_same_run(tmp_path / "whole", run)


@pytest.mark.parametrize("links", slow_but([False], [True, False]))
def test_states_on_disk_give_the_numbers_of_memory(tmp_path, monkeypatch, links):
    """Same numbers as in memory, also when resumed from a checkpoint of states on disk, hard links or not."""
    fed = blobs([6, 9, 12, 7, 8, 10, 5, 11])
    unskew.run(fed, **OPTIONS, out=tmp_path / "memory")
    monkeypatch.setattr(assembly, "ClientStore", partial(ClientStore, limit=2000))
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    with pytest.raises(Stop):
        unskew.run(fed, **OPTIONS, out=tmp_path / "disk", callbacks=[StopAfter(5)])
    names = {path.name for path in (tmp_path / "disk/checkpoints/0000004").iterdir()}
    assert "clients-0000.safetensors" in names
    assert len([name for name in names if name.startswith("client-")]) >= 2
    assert list((tmp_path / "disk/clients").iterdir())
    # What the dead session left must not matter.
    for path in (tmp_path / "disk/clients").iterdir():
        path.unlink()
        path.write_bytes(b"nonsense")
    unskew.resume(tmp_path / "disk", federation=fed, model=OPTIONS["model"])
    assert_same_run(tmp_path / "memory", tmp_path / "disk")
    assert not (tmp_path / "disk/clients").exists()


def test_resumed_in_memory_what_was_on_disk(tmp_path, monkeypatch):
    """The limit is the machine's, not the run's."""
    fed = blobs([6, 9, 12, 7, 8, 10, 5, 11])
    unskew.run(fed, **OPTIONS, out=tmp_path / "memory")
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "ClientStore", partial(ClientStore, limit=2000))
        with pytest.raises(Stop):
            unskew.run(fed, **OPTIONS, out=tmp_path / "disk", callbacks=[StopAfter(5)])
    unskew.resume(tmp_path / "disk", federation=fed, model=OPTIONS["model"])
    assert_same_run(tmp_path / "memory", tmp_path / "disk")


@pytest.mark.parametrize("limit", [4 << 30, 100])
def test_rows_of_several_clients_are_stored_as_single_states(tmp_path, limit):
    """Rows are stored in tables, or cloned and spilled if these would not fit."""
    stored = ClientStore(tmp_path / "rows", limit)
    single = ClientStore(tmp_path / "single")
    draws = torch.Generator().manual_seed(0)
    rounds = [([1, 4], ("c",)), ([4, 2], ("c", "n")), ([1, 2, 4], ("c",)), ([0, 1], ("c", "n")), ([4], ("n",))]
    for clients, names in rounds:
        rows = {name: torch.randn(len(clients), 30, generator=draws) for name in names}
        stored.keep_rows(clients, {"one": rows, "none": {}}, num_clients=5)
        for k, client in enumerate(clients):
            single.keep(client, ClientState({"one": {name: t[k].clone() for name, t in rows.items()}}), None)
        for tensors in rows.values():
            tensors.zero_()  # rows are copied
        for client in range(5):
            same(stored.get(client), single.get(client))
    assert stored.bytes == pytest.approx(single.bytes, abs=0 if limit > 100 else 1000)
    stored.put(4, state(7, 30))
    stored.keep_rows([4, 2], {"one": {"c": torch.ones(2, 30)}}, num_clients=5)
    assert stored.get(4)["rules/one/c"].eq(1).all()
    assert "rules/one/n" not in stored.get(4), "a rule writes all of its state"


def test_tables_change_with_the_shape_of_a_tensor(tmp_path):
    store = ClientStore(tmp_path / "clients")
    store.keep_rows([0, 1], {"one": {"c": torch.ones(2, 3)}}, num_clients=3)
    store.keep_rows([1, 2], {"one": {"c": torch.zeros(2, 4, dtype=torch.float64)}}, num_clients=3)
    assert [store.get(k)["rules/one/c"].tolist() for k in range(3)] == [[1.0] * 3, [0.0] * 4, [0.0] * 4]
