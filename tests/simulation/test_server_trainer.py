"""What a server rule can do at the server: train there, with or without clients, on data of its own or of another task."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs, with_server
from support.running import Stop, StopAfter, call
from support.tolerance import MAGNIFIED, TRAINING, assert_close

import unskew
from unskew.data.federation import Federation
from unskew.errors import ConfigError, DataError
from unskew.protocol.rules import ServerRule

SEEN = []


@dataclass(frozen=True)
class Center(ServerRule):
    """Trains at the server only."""

    name: ClassVar[str] = "in-the-middle"
    summary: ClassVar[str] = "data at the server only"
    paper: ClassVar[str] = "none"
    steps_without = "clients"

    epochs: int = 2
    optimizer: str = "adam"
    soft: bool = False

    def check(self, run):
        """Labels of the clients' task."""
        run.need_own_task(self.name)
        return ()

    def step(self, state, updates):
        """A few epochs."""
        at = updates.at_server
        y = torch.nn.functional.one_hot(at.data.y, 3).double() if self.soft else None
        v, b, loss = at.train(
            state["v"], updates.b_global, updates.key, y=y, local_epochs=self.epochs, optimizer=self.optimizer
        )
        SEEN.append((state["v"].clone(), v, b, loss))
        return {"v": v, "b": b}


@dataclass(frozen=True)
class Tuned(Center):
    """The mean of the clients, then the server's samples."""

    name: ClassVar[str] = "tuned"
    steps_without = None

    def step(self, state, updates):
        """FedAvg, then train."""
        moved = super().step({"v": state["v"] + updates.aggregate.delta}, updates)
        return {**moved, "stale": torch.ones(updates.round + 1)}

    def init(self, v, federation_info):
        """A state that grows."""
        return {"v": v, "stale": torch.ones(0)}


def train(rule, fed=None, model=None, rounds=3, **options):
    torch.manual_seed(0)
    SEEN.clear()
    given = {"lr": 0.05, "batch_size": 100, "local_epochs": 1, "precision": "fp64", "engine": "inline", **options}
    return unskew.run(fed or with_server(), model=model or SmallBatchNorm(), method=rule, rounds=rounds, **given)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_training_at_the_server_is_that_of_torch(optimizer):
    """Full batches; statistics included."""
    torch.manual_seed(0)
    module = SmallBatchNorm(dropout=0.0).double().train()
    result = train(Center(epochs=4, optimizer=optimizer), model=copy.deepcopy(module), rounds=1)
    fed = with_server()
    steps = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer](module.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(module(fed.server.x.double()), fed.server.y)
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    for (name, mine), (_, theirs) in zip(result.model.named_parameters(), module.named_parameters(), strict=True):
        assert_close(mine, theirs, MAGNIFIED, msg=name)
    buffers = dict(result.model.named_buffers())
    for name, theirs in module.named_buffers():
        if theirs.is_floating_point():
            assert_close(buffers[name], theirs, MAGNIFIED, msg=name)
    assert SEEN[0][3] == pytest.approx(np.mean(losses))


def test_no_client_takes_part_and_nothing_crosses_the_network():
    result = train(Center(), rounds=3, batch_size=4)
    assert [row["cohort"] for row in result.history] == [0, 0, 0]
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 0
    assert not torch.equal(SEEN[0][1], SEEN[2][1])
    assert torch.equal(SEEN[1][0], SEEN[0][1])


def test_soft_targets_of_one_class_are_labels():
    hard, soft = train(Center()), train(Center(soft=True))
    assert_close(hard.vector, soft.vector, TRAINING)


def test_after_the_clients_and_resumed_bit_for_bit(tmp_path):
    """Order of the batches, statistics and a state that grows are as in an uninterrupted run."""
    options = {"batch_size": 4, "network": {"delay": "half-normal:2"}, "participation": 0.5}
    whole = train(Tuned(optimizer="sgd"), rounds=6, **options)
    with pytest.raises(Stop):
        train(
            Tuned(optimizer="sgd"), rounds=6, out=tmp_path / "a", checkpoint_every=1, callbacks=[StopAfter(4)],
            **options,
        )  # fmt: skip
    torch.manual_seed(0)
    rest = unskew.resume(
        tmp_path / "a", federation=with_server(), model=SmallBatchNorm(), method=Tuned(optimizer="sgd")
    )
    assert torch.equal(rest.vector, whole.vector)
    assert rest.history[-1]["accuracy"] == whole.history[-1]["accuracy"]


def test_the_servers_statistics_are_the_models():
    result = train(Tuned(), rounds=2)
    found = torch.cat([b.flatten() for b in result.model.buffers() if b.is_floating_point()])
    torch.testing.assert_close(found, SEEN[-1][2])


@pytest.mark.parametrize("rule", [Center(), Tuned()])
def test_without_data_of_its_task_a_rule_is_refused_before_anything_is_trained(rule):
    with pytest.raises(ConfigError, match="needs data at the server: give --server-data 1000"):
        train(rule, blobs([9, 8], server=False))
    with pytest.raises(ConfigError, match="another data set"):
        train(rule, with_server(in_domain=False))
    assert not SEEN


def test_data_of_another_task_has_classes_of_its_own():
    fed = with_server(in_domain=False)
    assert fed.server.classes == 7
    assert fed.classes == 3
    clients = [(c.x, c.y) for c in fed.clients]
    with pytest.raises(DataError, match="contain 6, but with 3 classes"):
        Federation.from_arrays(clients, fed.test, (fed.server.x, fed.server.y), classes=3)
    with pytest.raises(DataError, match="the server is empty"):
        Federation.from_arrays(clients, fed.test, (fed.server.x[:0], fed.server.y[:0]))


def test_a_batch_of_one_sample_is_a_sentence():
    layers = torch.nn.Flatten(), torch.nn.Linear(72, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    with pytest.raises(DataError, match="server trains on a batch of one sample"):
        train(Center(), with_server(n=5), torch.nn.Sequential(*layers), batch_size=4)


def test_the_command_line_takes_samples_for_the_server(capsys, tmp_path):
    told = ["run", "--data", "digits", "--clients", "3", "--model", "logistic", "--local-steps", "1", "--rounds", "1"]
    done = call(capsys, *told, "--server-data", "100", "--out", tmp_path / "a", "--engine", "inline")
    assert done.code == 0
    assert "server_data: 100\n" in (tmp_path / "a" / "config.yaml").read_text()
    wrong = call(capsys, *told, "--server-data", "digitz", "--out", tmp_path / "b")
    assert wrong.code == 2
    assert "digitz" in wrong.err


def test_the_bench_learns_in_eval_mode_without_moving_statistics():
    """The gradient in eval mode is autograd's at the vector, and outputs are those of the whole set at once."""
    from unskew.models.spec import ModelSpec
    from unskew.protocol.training_config import Training
    from unskew.simulation.server_trainer import ServerTrainer

    torch.manual_seed(0)
    fed = with_server()
    spec = ModelSpec(SmallBatchNorm(), (2, 6, 6), 3, dtype=torch.float64)
    bench = ServerTrainer(spec, fed, Training(batch_size=4, local_epochs=1), torch.device("cpu"))
    v, b = spec.flatten(), spec.flatten_buffers() + 0.3
    plan = bench.plan(torch.tensor(4), len(fed.server.y), local_epochs=2)
    assert [len(index) for index in plan] == [4] * 8
    assert torch.equal(torch.cat(plan[:4]).sort().values, torch.arange(16))
    batch = bench.batch(plan[0], 0)
    found = bench.gradient(None, b, train=False)(v, batch)
    leaf = v.clone().requires_grad_()
    x, y = fed.server.x[plan[0]].double(), fed.server.y[plan[0]]
    loss = torch.nn.functional.cross_entropy(spec.forward(leaf, b, x).logits, y)
    torch.testing.assert_close(found, torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(bench.model.b, b)
    torch.testing.assert_close(
        bench.outputs(v, b, fed.server.x).logits, spec.forward(v, b, fed.server.x.double()).logits
    )


def test_methods_with_and_without_the_servers_samples_are_evaluated_on_the_same_ones():
    """Whether the server holds them, fewer of them, another data set or nothing."""
    from unskew.data.load import load_federation

    def tested(**options):
        return load_federation("digits", partition="iid", clients=3, **options)

    held = tested(server_data=100)
    for options in ({}, {"server_data": 30}, {"server_data": "digits"}):
        other = tested(reserve_test_samples=100, **options)
        assert torch.equal(other.test[0], held.test[0])
        assert torch.equal(other.test[1], held.test[1])
    assert len(tested(server_data=30, reserve_test_samples=100).server.y) == 30
    assert len(tested(server_data=100, reserve_test_samples=30).test[1]) == 260
    with pytest.raises(DataError, match="reserve_test_samples=360 leaves none of the 360"):
        tested(reserve_test_samples=360)
