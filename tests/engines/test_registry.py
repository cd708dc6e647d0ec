"""Every method on every engine gives the same vector, with BatchNorm, dropout, unequal clients and participation."""

import warnings
from functools import cache

import pytest
import torch
from support.engine_methods import ALL_METHODS, EARLY, SUMS
from support.federations import SmallBatchNorm, blobs, small_model
from support.slow import slow_but
from support.tolerance import MAGNIFIED, TRAINING, assert_close, near

import unskew
from unskew.engines.vmap_trainer import GroupTrainer, schedule_groups
from unskew.protocol.messages import Broadcast, ClientState
from unskew.protocol.rules import ClientRule
from unskew.testing import assert_engines_agree

SIZES = [5, 19, 8, 13, 21, 11]


def train(method, engine, precision="fp64", **options):
    torch.manual_seed(0)
    method = EARLY.get(method, method) if isinstance(method, str) else method
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "participation": 0.5, "local_epochs": 2, **options}
    return unskew.run(
        blobs(SIZES), model=small_model(method), method=method, engine=engine, precision=precision, workers=2, **given
    )


# One method for each shape of message: state, upload and download; a body that stays; another upload than a model; a
# generator that the server sends; models that remain at the clients; nothing at all.
SHAPES = ["scaffold", "fedals:alpha=2+fedprox", "feddm", "fedgen:beta_s=0.1,labels=all+fedavgm", "fedrep+ft", "center"]


@cache
def reference_of(method):
    return train(method, "inline", local_epochs=1)


def assert_same_run_on(engine, method, **options):
    """With one epoch; more of them are a matter of the budget, below, and not of the method."""
    reference, other = reference_of(method), train(method, engine, local_epochs=1, **options)
    assert_engines_agree(other.vector, reference.vector)
    for name, value in reference.model.state_dict().items():
        assert_close(other.model.state_dict()[name].double(), value.double(), MAGNIFIED)
    for name in ("client_accuracy_mean", "personal_accuracy_mean", "personal_accuracy_std", "clients_evaluated"):
        assert reference.summary.get(name) == other.summary.get(name)
    for mine, theirs in zip(reference.history, other.history, strict=True):
        assert mine["bytes_up"] == theirs["bytes_up"]
        assert mine["bytes_down"] == theirs["bytes_down"]
        nobody = theirs["train_loss"] is None  # took part
        assert mine["train_loss"] == (None if nobody else near(theirs["train_loss"], TRAINING))


# Options that change what a client computes; other sums are those of parts that are tested alone.
ALONE = [
    "fedals:auto,longest=2,budget=0.9",
    "scaffold:option=I",
    "scaffold:variate=mean",
    "fedcog:start_round=1,n=6,g_steps=2,lambda_kd=1,generator=network",
    "vhl:source=style,per_class=9,virtual_batch=10,align_epochs=1+moon",
    "scaffold+ft",
]


@pytest.mark.parametrize("method", slow_but([*ALL_METHODS, *ALONE[:3], *ALONE[4:]], [*ALL_METHODS, *SUMS]))
def test_the_vectorized_engine_gives_the_same_vector(method):
    assert_same_run_on("vectorized", method)


@pytest.mark.parametrize("method", slow_but(SHAPES, [*ALL_METHODS, *SUMS]))
def test_processes_give_the_same_vector(method):
    """They run the trainer of the inline engine behind a transport, so what could differ is what travels."""
    assert_same_run_on("processes", method)


@pytest.fixture
def never_alone(monkeypatch):
    """Clients are trained at once or not at all."""
    monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)


# State and download, a body that stays, learned images; several passes, a second gradient, gradients of the inputs, features.
TOGETHER = ["scaffold", "fedrep+ft", "feddm", "moon", "fedsam", "feddecorr", "fedgen"]


MAPPABLE = [name for name in ALL_METHODS if not any(rule.trains_alone for rule in unskew.method(name).client)]


@pytest.mark.parametrize("method", slow_but(TOGETHER, [*MAPPABLE, *SUMS]))
def test_clients_trained_as_one_network_give_the_same_vector(method, never_alone):
    assert_same_run_on("inline", method, clients_per_group=3)


def test_workers_train_several_clients_as_one_network(never_alone):
    assert_same_run_on("processes", "fedavg", clients_per_group=2)


def test_a_rule_that_cannot_be_mapped_is_trained_client_by_client():
    """Also with ``together``: bit for bit as without, and with one warning that states the reason."""

    class Looks(SecondGradient):
        def loss(self, loss_fn, ctx, carry):
            return lambda v, batch: loss_fn(v, batch) * (2 if batch.x.mean().item() > 0 else 1)

    alone = train(Looks(), "inline").vector
    for engine in ("inline", "processes"):
        with pytest.warns(UserWarning, match=r"one at a time, .* \(vmap: .*item\(\)") as caught:
            together = train(Looks(), engine, clients_per_group=3).vector
        assert torch.equal(together, alone)
        assert len([own for own in caught if "one at a time" in str(own.message)]) == 1


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
@pytest.mark.parametrize(("engine", "group"), [("inline", 1), ("inline", 3), ("processes", 1), ("vectorized", "auto")])
def test_batch_norm_without_momentum_averages_over_the_steps_of_each_client(engine, group, method):
    """Its factor is 1 / steps, from an integer buffer that starts at 0 at each client. In one epoch of equal batches, the
    mean of the batches is that of the client's samples, and the server averages these."""
    federation = blobs([8, 8, 8])
    wide = federation.clients[0].x[0].numel()
    norm = torch.nn.BatchNorm1d(wide, momentum=None, affine=False)
    model = torch.nn.Sequential(torch.nn.Flatten(), norm, torch.nn.Linear(wide, federation.classes))
    given = {"rounds": 1, "local_epochs": 1, "batch_size": 4, "precision": "fp64", "clients_per_group": group}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = unskew.run(federation, model=model, method=method, engine=engine, lr=0.1, **given)
    mean = torch.stack([client.x.double().flatten(1).mean(0) for client in federation.clients]).mean(0)
    assert_close(found.model.state_dict()["1.running_mean"].double(), mean, TRAINING)
    assert found.summary["clients_per_group"] == 1
    said = [str(each.message) for each in caught if "has no effect" in str(each.message)]
    assert bool(said) == (group == 3)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsam"])
@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_the_operators_of_a_model_of_unknown_layers_are_mapped(engine, method, never_alone):
    class Other(SmallBatchNorm):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.PReLU()

        def forward(self, x):
            return super().forward(self.slope(x))

    given = {"method": method, "engine": engine, "rounds": 2, "local_epochs": 2, "lr": 0.1}
    torch.manual_seed(0)
    model = Other()
    one, several = (unskew.run(blobs(SIZES), model=model, clients_per_group=n, **given).vector for n in (1, 3))
    assert_engines_agree(several, one)


def test_no_part_is_more_work_than_its_number_of_clients_on_average():
    def parts(steps, most):
        broadcast = Broadcast(0, 0, torch.zeros(1), torch.zeros(0), {}, ClientState(), 1.0)
        return [[steps[place] for place in part] for part in schedule_groups([broadcast] * len(steps), steps, most)]

    assert parts([5] * 7, 3) == [[5, 5, 5], [5, 5, 5], [5]]
    assert parts([1, 20, 1, 1, 2, 1, 2], 3) == [[20], [2, 2, 1], [1, 1, 1]]
    assert parts([3, 4], 1) == [[4], [3]]


BUDGETS = {
    "steps-momentum": {
        "local_epochs": None,
        "local_steps": 7,
        "momentum": 0.9,
        "weight_decay": 1e-2,
        "nesterov": True,
    },
    "adam-clip": {"optimizer": "adam", "lr": 0.01, "clip_grad_norm": 0.5, "method": "fedrep"},
    "adamw-drop-last": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "drop_last": True},
    "augment-local": {"augment": True, "buffers": "local", "client_weighting": "samples", "method": "scaffold+ft"},
    "reset-drop": {"buffers": "reset", "network": {"drop": 0.3}},
    "rate-steps": {
        "lr_schedule": "warmup:2+cosine:0.1",
        "lr_schedule_per": "step",
        "local_epochs": None,
        "local_steps": 4,
    },
    "rate-rounds": {"lr_schedule": "step:1,0.5", "method": "fedals:alpha=2+scaffold+ditto"},
}


@pytest.mark.parametrize("budget", slow_but(["rate-steps"], BUDGETS))
def test_same_vector_whatever_the_budget(budget):
    options = {"method": "scaffold", **BUDGETS[budget]}
    reference = train(engine="inline", **options)
    for engine in ("processes", "vectorized", "inline"):
        other = train(engine=engine, clients_per_group=3 if engine == "inline" else "auto", **options)
        assert_engines_agree(other.vector, reference.vector)
        assert other.summary.get("personal_accuracy_mean") == reference.summary.get("personal_accuracy_mean")


def test_float32_agrees_to_its_own_precision():
    """Engines add the same numbers in another order: a relative difference of a few 1e-6 after 4 rounds, no more."""
    reference = train("fedprox+scaffold", "inline", precision="fp32").vector
    for engine in ("processes", "vectorized", "inline"):
        other = train(
            "fedprox+scaffold", engine, precision="fp32", clients_per_group=3 if engine == "inline" else "auto"
        ).vector
        assert_engines_agree(other, reference)


def test_bf16_trains_on_every_engine_and_keeps_fp32_weights():
    for engine in ("inline", "processes", "vectorized"):
        result = train("fedavg", engine, precision="bf16")
        assert result.vector.dtype == torch.float32
        assert torch.isfinite(result.vector).all()


@pytest.mark.parametrize("engine", slow_but(["inline", "vectorized"], ["inline", "processes", "vectorized"]))
def test_the_seed_decides_everything(engine):
    first, again = train("scaffold", engine, seed=3), train("scaffold", engine, seed=3)
    assert torch.equal(first.vector, again.vector)
    assert not torch.equal(first.vector, train("scaffold", engine, seed=4).vector)


def test_results_do_not_depend_on_global_random_state():
    first = train("fedavg", "vectorized")
    torch.manual_seed(12345)
    torch.rand(7)
    assert torch.equal(train("fedavg", "vectorized").vector, first.vector)


class SecondGradient(ClientRule):
    """Asks for a second gradient elsewhere and for an untracked pass, and writes state that changes in shape."""

    name = "second"
    summary = "for tests"
    paper = "none"

    def begin(self, ctx):
        seen = ctx.state.get("seen")
        return {"bias": torch.zeros_like(ctx.v_global) if seen is None else 0.01 * seen}

    def loss(self, loss_fn, ctx, carry):
        def penalised(v, batch):
            features = ctx.model(v, batch.x).features
            quiet = ctx.model(v, batch.x * 0.5, track=False).logits
            return loss_fn(v, batch) + 0.1 * features.square().mean() + 0.01 * quiet.square().mean()

        return penalised

    def gradient(self, grad_fn, ctx, carry):
        def perturbed(v, batch):
            g = grad_fn(v, batch)
            eps = 0.1 * g / torch.linalg.vector_norm(g)
            carry["bias"] = carry["bias"] + 1e-3 * g
            return grad_fn(v + eps, batch) + carry["bias"]

        return perturbed

    def end(self, ctx, carry, v):
        ctx.state["seen"] = v - ctx.v_global
        ctx.upload["steps"] = ctx.steps


def test_a_rule_may_ask_for_more_gradients_passes_and_state():
    reference = train(SecondGradient(), "inline")
    plain = train("fedavg", "inline")
    assert not torch.allclose(reference.vector, plain.vector)
    for engine in ("processes", "vectorized"):
        assert_engines_agree(train(SecondGradient(), engine).vector, reference.vector)


def test_statistics_of_an_untracked_pass_do_not_move():
    class Untracked(SecondGradient):
        def loss(self, loss_fn, ctx, carry):
            return lambda v, batch: loss_fn(v, batch) + 0 * ctx.model(v, batch.x + 9, track=False).logits.sum()

        def gradient(self, grad_fn, ctx, carry):
            return grad_fn

    for engine in ("inline", "vectorized"):
        tracked, untracked = train("fedavg", engine), train(Untracked(), engine)
        assert_close(untracked.model.norm.running_mean, tracked.model.norm.running_mean, MAGNIFIED)


def test_a_failure_in_a_worker_reaches_the_user():
    class Broken(SecondGradient):
        def end(self, ctx, carry, v):
            raise ValueError("the rule is broken")

    with pytest.raises(unskew.UnskewError, match="the rule is broken"):
        train(Broken(), "processes")


class Computed(unskew.ClientRule):
    """Evaluates the loss at a vector computed from the parameters, with the same values."""

    name, summary, paper = "computed", "evaluates the loss elsewhere", "none"

    def loss(self, loss_fn, ctx, carry):
        return lambda v, batch: loss_fn(v * 1.0, batch)


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_a_loss_at_computed_parameters_has_the_same_dropout_and_statistics(engine):
    plain, computed = (train(method, engine, rounds=2) for method in ("fedavg", Computed()))
    assert_close(computed.vector, plain.vector, TRAINING)
    for name, value in plain.model.state_dict().items():
        assert_close(computed.model.state_dict()[name].double(), value.double(), TRAINING)
