"""Runs that train their clients together have the numbers of single runs, end separately, and resume."""

import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.federations import blobs
from support.recorded_operators import RecordedOperators
from support.running import metrics
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.data.clients import ArrayClients, DrawnClients, IndexedRows, StackedClients, stack_clients
from unskew.data.load import load_federation
from unskew.data.shared_copies import shared_copy
from unskew.engines.base import EngineConfig
from unskew.engines.registry import make_engine
from unskew.engines.run_threads import run_together
from unskew.engines.stacked import JointEngine, JointTraining, StackedEngine, content_of, make_vectorized
from unskew.engines.vectorized import VectorizedEngine
from unskew.errors import DataError
from unskew.protocol.messages import Broadcast, ClientState, SummedUpdate
from unskew.records.result import read_summary
from unskew.simulation.round_loop import RunInterrupted

pytestmark = pytest.mark.usefixtures("undrawn")

SEEDS = 3
TINY = {
    "data": "digits", "clients": 6, "participation": 0.5, "partition": "dirichlet:0.5", "model": "mlp", "rounds": 3,
    "local_epochs": None, "local_steps": 2, "batch_size": 8, "lr": 0.05, "max_train_samples": None, "device": "cpu",
    "engine": "vectorized", "precision": "fp64", "references": False, "eval_clients": 2, "checkpoint_every": 1,
}  # fmt: skip


def compare(folder, method, parallel, **options):
    options = {**TINY, **options}
    return unskew.compare(methods=[method], seeds=SEEDS, out=folder, parallel=parallel, **options)


def run_folders(folder):
    return sorted(folder.glob("*/seed-*"))


def vector_of(folder):
    [file] = Path(folder).glob("*.safetensors")
    return torch.cat([t.double().flatten() for _, t in sorted(load_file(file).items())])


def assert_same(stacked, separate, dtype=torch.float64):
    """Equal up to rounding; the metrics that are counts are equal."""
    assert len(run_folders(stacked)) == len(run_folders(separate)) == SEEDS
    for one, other in zip(run_folders(stacked), run_folders(separate), strict=True):
        assert_close(vector_of(one), vector_of(other), TRAINING, dtype=dtype, msg=one)
        rows, expected = metrics(one), metrics(other)
        assert [row["round"] for row in rows] == [row["round"] for row in expected]
        for row, wanted in zip(rows, expected, strict=True):
            assert row.keys() == wanted.keys()
            for name in ("cohort", "bytes_up", "bytes_down", "updates", "arrivals", "staleness"):
                assert row.get(name) == wanted.get(name)
            for name in ("loss", "train_loss"):
                if wanted[name] is not None:
                    assert_close(row[name], wanted[name], TRAINING, dtype=dtype)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedprox+scaffold"])
def test_recorded_runs_together_get_a_sum_each(method, tmp_path, joint, monkeypatch):
    """As on a GPU, where steps are recorded and each run needs only the sum of its updates."""
    compare(tmp_path / "separate", method, 1, rounds=5)
    create, init, sums = make_vectorized, VectorizedEngine.__init__, []

    def start(self, setup, memory=None, convolution="grouped", record=None):
        init(self, setup, memory, convolution, RecordedOperators)

    def train_by_index(self, broadcasts, before=VectorizedEngine.train_by_index):
        done = before(self, broadcasts)
        sums.extend(len(update.clients) for update in done.values() if isinstance(update, SummedUpdate))
        return done

    monkeypatch.setattr(VectorizedEngine, "__init__", start)
    monkeypatch.setattr(VectorizedEngine, "train_by_index", train_by_index)
    in_array = lambda setup: create(replace(setup, federation=setup.federation.to(setup.device)))  # noqa: E731
    monkeypatch.setattr("unskew.engines.registry.make_vectorized", in_array)
    compare(tmp_path / "stacked", method, "stacked", rounds=5)
    assert set(joint) == {SEEDS}
    assert len(sums) >= 3 * SEEDS
    assert_same(tmp_path / "stacked", tmp_path / "separate")


METHODS = {
    "fedavg": {},
    "scaffold+fedadam": {"momentum": 0.9},
    "fedprox:mu=0.1": {"model": "cnn", "augment": False},
    "feddyn": {},
    "fedcog:start_round=1,g_steps=2,n=6": {"model": "cnn"},
    "fedrep+ft": {},
    "fedavg+qsgd": {},
    "fedbabu": {"sampling": "power-of-choice:4"},
    "fedgen+fedavg": {},
    "dp:epsilon=8,adaptive=false": {"sampling": "poisson"},
    "dpsgd:noise=1": {"model": "logistic", "rounds": 2},
}


@pytest.mark.parametrize("method", METHODS)
def test_runs_together_have_the_numbers_of_single_runs(method, tmp_path, joint, one_key):
    compare(tmp_path / "separate", method, 1, **METHODS[method])
    assert not joint
    compare(tmp_path / "stacked", method, "stacked", **METHODS[method])
    assert joint
    assert set(joint) <= {2, SEEDS}
    assert_same(tmp_path / "stacked", tmp_path / "separate")


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32", "model": "cnn"},
        {"network": {"delay": "lognormal:1,1"}, "rounds": 4},
        {"network": {"drop": 0.5}},
        {"attack": {"kind": "labelflip", "share": 0.4, "from_round": 2}},
        {"model": "cnn", "augment": True},
        {"early_stopping": 1, "rounds": 6, "lr": 0.5, "holdout": 0.3},
        {"lr_schedule": "cosine", "optimizer": "adam"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_run_keep_their_effect(options, tmp_path, joint):
    compare(tmp_path / "separate", "fedavg", 1, **options)
    compare(tmp_path / "stacked", "fedavg", "stacked", **options)
    assert SEEDS in joint
    assert_same(tmp_path / "stacked", tmp_path / "separate", torch.float32 if "precision" in options else torch.float64)
    if "early_stopping" in options:
        assert len({len(metrics(folder)) for folder in run_folders(tmp_path / "stacked")}) > 1


def test_clients_of_unequal_size_of_several_runs_are_trained_together(joint):
    fed = blobs([5, 19, 8, 13])
    options = {"model": "logistic", "rounds": 2, "engine": "vectorized", "precision": "fp64", "references": False}
    both = [
        unskew.compare(fed, methods=["scaffold"], seeds=[3, 5], parallel=parallel, local_epochs=2, **options)
        for parallel in (1, "stacked")
    ]
    assert joint == [2, 2]
    [separate], [stacked] = (list(result.histories.values()) for result in both)
    for rows, expected in zip(stacked, separate, strict=True):
        for row, wanted in zip(rows, expected, strict=True):
            assert_close(row["loss"], wanted["loss"], TRAINING)


@pytest.mark.parametrize("method", ["knnper", "center", "vhl:per_class=2"])
def test_methods_that_cannot_be_trained_together_are_trained_separately(method, tmp_path, joint):
    options = {"knnper": {}, "center": {"server_data": 50}}.get(method, {"model": "cnn"})
    compare(tmp_path / "separate", method, 1, **options)
    compare(tmp_path / "stacked", method, "stacked", **options)
    assert not joint
    for one, other in zip(run_folders(tmp_path / "stacked"), run_folders(tmp_path / "separate"), strict=True):
        assert metrics(one) == metrics(other)
        assert torch.equal(vector_of(one), vector_of(other))


class Interrupt(unskew.Callback):
    """Does something after a round of one run."""

    def __init__(self, seed, round, action):
        self.seed, self.at, self.action = seed, round, action

    def factory(self, method, seed, config):
        return [self] if seed == self.seed else []

    def round(self, row):
        if row["round"] == self.at:
            self.action()


def fail():
    raise DataError("a bad sample")


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("action", "error"), [(fail, DataError), (press_ctrl_c, RunInterrupted)])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_runs_end_after_the_same_round_and_resume(action, error, seed, tmp_path, joint):
    compare(tmp_path / "whole", "scaffold", "stacked", rounds=4)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        compare(
            tmp_path / "parts", "scaffold", "stacked", rounds=4, checkpoint_every=9,
            callback_factory=Interrupt(seed, 2, action).factory,
        )  # fmt: skip
    assert signal.getsignal(signal.SIGINT) is handler
    done = [len(list(folder.glob("checkpoints/*"))) for folder in run_folders(tmp_path / "parts")]
    assert done == [int(action is press_ctrl_c or number != seed) for number in range(SEEDS)]
    assert [len(metrics(folder)) for folder in run_folders(tmp_path / "parts")] == [2] * SEEDS
    compare(tmp_path / "parts", "scaffold", "stacked", rounds=4, checkpoint_every=9, resume=True)
    assert_same(tmp_path / "parts", tmp_path / "whole")
    if action is press_ctrl_c:
        for one, other in zip(run_folders(tmp_path / "parts"), run_folders(tmp_path / "whole"), strict=True):
            assert torch.equal(vector_of(one), vector_of(other))
            assert metrics(one) == metrics(other)


def test_an_error_of_a_client_ends_its_own_run(tmp_path, monkeypatch, joint):
    plan = EngineConfig.batch_plan

    def broken(self, round, client):
        if self.seed == 1 and round == 1:
            raise DataError(f"Client {client} has a bad sample.")
        return plan(self, round, client)

    with monkeypatch.context() as patch:
        patch.setattr(EngineConfig, "batch_plan", broken)
        with pytest.raises(DataError, match=r"Client [0-5] has a bad sample"):
            compare(tmp_path / "parts", "fedavg", "stacked")
    assert [len(metrics(folder)) for folder in run_folders(tmp_path / "parts")] == [2, 1, 2]
    compare(tmp_path / "parts", "fedavg", "stacked", resume=True)
    compare(tmp_path / "whole", "fedavg", 1)
    assert_same(tmp_path / "parts", tmp_path / "whole")
    assert joint[-1] == SEEDS, "the runs meet again"


def test_a_joint_failure_leaves_the_runs_their_numbers(tmp_path, monkeypatch):
    def fail(self, cohorts):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(JointEngine, "train_cohorts", fail)
    compare(tmp_path / "separate", "fedavg", 1)
    with pytest.warns(UserWarning, match=r"could not be trained together in this round, but one by one: no kernel"):
        compare(tmp_path / "stacked", "fedavg", "stacked")
    for one, other in zip(run_folders(tmp_path / "stacked"), run_folders(tmp_path / "separate"), strict=True):
        assert metrics(one) == metrics(other)


def test_a_second_ctrl_c_ends_all_runs_at_once(joint):
    runs, ended = [], []

    def run(seed):
        try:
            unskew.run(**{k: v for k, v in TINY.items() if k != "references"}, method="fedavg", seed=seed)
        finally:
            ended.append(seed)

    def training(self, cohorts):
        runs.append(len(cohorts))
        raise KeyboardInterrupt

    JointEngine.train_cohorts = training  # restored by the fixture
    with pytest.raises(KeyboardInterrupt):
        run_together([lambda: run(0), lambda: run(1)], [], JointTraining())
    assert (runs, ended) == ([2], [0, 1])


def test_seconds_of_a_run_are_its_share(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    train = JointEngine.train_cohorts

    def slow(self, cohorts):
        clock[0] += 30.0
        return train(self, cohorts)

    monkeypatch.setattr(JointEngine, "train_cohorts", slow)
    compare(tmp_path / "stacked", "fedavg", "stacked", rounds=2)
    assert [read_summary(folder)["seconds"] for folder in run_folders(tmp_path / "stacked")] == [20.0] * SEEDS


def setup_of(**options):
    """Configuration of the engine of a run."""
    found = []

    def make(engine, setup, *_):
        found.append(setup)
        return make_engine("inline", setup)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unskew.runs.simulated_clients.make_engine", make)
        options = {k: v for k, v in {**TINY, "rounds": 1, **options}.items() if k != "references"}
        unskew.run(**{"method": "fedavg", **options})
    return found[0]


def test_content_does_not_depend_on_the_seed_but_on_all_that_is_shared():
    base = content_of(setup_of())
    assert base is not None
    assert content_of(setup_of(seed=1)) == base
    others = [
        {"lr": 0.06}, {"method": "fedprox:mu=0.2"}, {"rounds": 2}, {"precision": "fp32"}, {"clients": 7},
        {"buffers": "local"}, {"model": "cnn"}, {"class_weights": "balanced"}, {"optimizer": "adam"},
    ]  # fmt: skip
    contents = [content_of(setup_of(**options)) for options in others]
    assert base not in contents
    assert len(set(contents)) == len(contents)


def test_content_depends_on_constants_of_the_model_and_on_what_is_sent_before():
    setup = setup_of()
    frozen = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Linear(10, 10))
    frozen[1].requires_grad_(False)
    contents = []
    for value in (0.0, 0.0, 1.0):
        torch.nn.init.constant_(frozen[1].weight, value)
        contents.append(
            content_of(replace(setup, spec=type(setup.spec)(frozen, setup.spec.shape, 10, dtype=torch.float64)))
        )
    assert contents[0] == contents[1] != contents[2]
    common = [content_of(replace(setup, common={"a": {"x": torch.full((2,), value)}})) for value in (0.0, 1.0)]
    assert common[0] != common[1]


def test_runs_that_train_separately_have_no_content(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 3)).astype("float32"))
    x, y = np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(40) % 2
    fed = unskew.Federation.from_arrays([(x, y)] * 2, test=(x, y))
    assert fed.clients.mapped
    assert content_of(replace(setup_of(), federation=fed)) is None
    assert content_of(replace(setup_of(), task=lambda: None)) is None  # cannot be pickled


def test_the_number_of_clients_at_once_counts_those_of_all_runs(tmp_path):
    class Memory:
        def peak_of(self, work):
            work()
            return 8 * 100

        def free(self):
            return 100 * 20

        def release(self):
            pass

    setups = [setup_of(seed=seed, participation=1.0) for seed in (0, 1)]

    class Thread:
        waited = None

    engines = [StackedEngine(setup, Thread()) for setup in setups]
    for number, engine in enumerate(engines):
        engine.memory, engine.width = Memory(), None
        (tmp_path / str(number)).mkdir()
        engine.remember_choices(tmp_path / str(number), False)
    sizes = []
    joint = JointEngine(engines)
    mapped = joint.trainer.mapped
    joint.trainer.mapped = lambda broadcasts: sizes.append(len(broadcasts)) or mapped(broadcasts)
    joint.train_cohorts([cohort_of(setup) for setup in setups])
    assert sizes == [8, 12]  # 16 of them fit: the probe, and the clients of both runs
    assert [engine.width for engine in engines] == [16, 16]
    assert (tmp_path / "0" / "vectorized.json").read_bytes() == (tmp_path / "1" / "vectorized.json").read_bytes()


def cohort_of(setup):
    v, b = setup.spec.flatten(), setup.spec.flatten_buffers()
    return [Broadcast(0, k, v, b, {}, ClientState(), 1.0) for k in range(len(setup.federation.clients))]


def test_runs_share_the_array_of_their_data():
    federations = [load_federation("digits", partition="dirichlet:0.5", clients=4, seed=seed) for seed in (0, 1)]
    device = torch.device("meta")
    assert federations[0].clients.rows.x is federations[1].clients.rows.x
    moved = [federation.to(device) for federation in federations]
    assert moved[0].clients.rows.x is moved[1].clients.rows.x
    assert moved[0].test[0] is moved[1].test[0]
    x = torch.zeros(3)
    copy = shared_copy(x, device)
    assert shared_copy(x, device) is copy
    assert shared_copy(x.clone(), device) is not copy
    assert len(pickle.dumps(moved[0].clients)) < federations[0].test[0].nbytes, "it is sent without the original"


def test_stacked_clients_are_the_clients_without_a_copy():
    parts = [load_federation("digits", partition="dirichlet:0.5", clients=n, seed=n).clients for n in (3, 4)]
    apart = [ArrayClients(c.x, c.y, c.offsets, c.splits) for c in parts]
    for sources, kind in ((parts, DrawnClients), (apart, StackedClients)):
        joined = stack_clients(sources)
        assert type(joined) is kind
        assert len(joined) == 7
        for k in range(7):
            own = sources[int(k > 2)][k - 3 * int(k > 2)]
            for name in ("x", "y", "x_test", "y_test"):
                assert torch.equal(getattr(joined[k], name), getattr(own, name))
    joined = stack_clients(parts)
    assert joined.rows.x is parts[0].rows.x
    rows = torch.tensor([0, joined.bounds(5)[0], joined.bounds(6)[2] - 1])
    assert torch.equal(joined.take(rows), joined.x[rows])
    assert isinstance(stack_clients([parts[0], apart[1]]), StackedClients)


def test_a_small_part_of_an_array_is_moved_without_the_rest():
    whole = load_federation("digits", partition="dirichlet:0.5", clients=4).clients
    rows, n = whole.rows, whole.offsets[1]
    part = DrawnClients(IndexedRows(rows.x, rows.rows[:n], rows.offsets[:2]), whole.like, whole.y[:n],
                        whole.offsets[:2], whole.splits[:1])  # fmt: skip
    assert 2 * n < len(rows.x)
    moved = [clients.to(torch.device("meta")) for clients in (whole, part)]
    assert [type(clients) for clients in moved] == [DrawnClients, ArrayClients]
    assert len(moved[1].x) == n


@pytest.mark.parametrize("method", ["fedavg", "fedcog:start_round=1,g_steps=2,n=6", "dpsgd:noise=1"])
def test_data_in_one_array_give_the_same_numbers(method, tmp_path, monkeypatch, joint, one_key):
    """The form of data on a GPU, here on the CPU."""
    options = {"model": "cnn", "augment": method == "fedavg"}
    compare(tmp_path / "separate", method, 1, **options)
    to = DrawnClients.to

    def assemble(run, prepared, device, *args):
        from unskew.runs.assembly import assemble

        clients = shared_copy_of(prepared.federation.clients)
        return assemble(run, replace(prepared, federation=replace(prepared.federation, clients=clients)), device, *args)

    def shared_copy_of(clients):
        return to(clients, torch.device("cpu"))

    monkeypatch.setattr("unskew.runs.run.assemble", assemble)
    indexed = []
    take = DrawnClients.take
    monkeypatch.setattr(DrawnClients, "take", lambda self, rows: indexed.append(len(self)) or take(self, rows))
    compare(tmp_path / "stacked", method, "stacked", **options)
    assert SEEDS in joint
    assert 6 * SEEDS in indexed
    assert_same(tmp_path / "stacked", tmp_path / "separate")
