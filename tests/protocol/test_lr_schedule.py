"""Learning rates that change: their numbers, and what methods that read the rate make of them, against NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import state_at
from support.quadratic import STEPS, Quadratics, gradient, problem
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close, near

import unskew
from unskew.errors import CheckpointError, ConfigError
from unskew.methods.fednova import FedNova
from unskew.protocol.training_config import Training

LR = 0.05


def budget(schedule, per="round", rounds=6, **options):
    options = {"local_steps": STEPS, "batch_size": 100, "lr": LR, "precision": "fp64", **options}
    return Training(lr_schedule=schedule, lr_schedule_per=per, rounds=rounds, **options)


def rates(training, rounds):
    """Of each local step of the run, by the formulas of torch's own schedulers."""
    every_step = training.lr_schedule_per == "step"
    total = rounds * (STEPS if every_step else 1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=training.lr)
    lr, of = torch.optim.lr_scheduler, []
    scheduler = {
        "step:2,0.5": lambda: lr.StepLR(optimizer, 2, 0.5),
        "cosine": lambda: lr.CosineAnnealingLR(optimizer, total),
        "cosine:0.1": lambda: lr.CosineAnnealingLR(optimizer, total, eta_min=0.1 * training.lr),
        "inverse:10,100": lambda: lr.LambdaLR(optimizer, lambda t: 1 / (10 + t / 100)),
        "warmup:3": lambda: lr.LinearLR(optimizer, 1 / 3, 1.0, 2),
        "warmup:2+cosine": lambda: lr.SequentialLR(
            optimizer,
            [lr.LinearLR(optimizer, 0.5, 1.0, 1), lr.CosineAnnealingLR(optimizer, total - 2)],
            milestones=[2],
        ),
    }[training.lr_schedule]()
    for _ in range(total):
        of.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(of).reshape(rounds, -1) * np.ones((rounds, STEPS))


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("per", ["round", "step"])
@pytest.mark.parametrize(
    "schedule", ["step:2,0.5", "cosine", "cosine:0.1", "inverse:10,100", "warmup:3", "warmup:2+cosine"]
)
def test_the_rates_are_those_of_pytorchs_schedulers(schedule, per):
    training = budget(schedule, per)
    found = [[training.rate(t, s) for s in range(STEPS)] for t in range(6)]
    assert_close(np.array(found), rates(training, 6), TRAINING)
    assert [training.rate(t) for t in range(6)] == [near(np.mean(row), TRAINING) for row in found]
    assert training.rate(6) == training.rate(5), "what is trained after the end is trained as in the last round"


def test_the_rate_of_fedals_released_code():
    training = budget("inverse:10,100", "step", rounds=4000, local_steps=5, lr=0.5)
    for t in (0, 7, 100, 19_999):
        assert training.rate(t // 5, t % 5) == near(0.5 / (10 + t / 100), TRAINING)


def test_a_warm_up_rises_to_the_rate_that_follows():
    training = budget("warmup:4+inverse:10,2", rounds=8, lr=1.0)
    assert [training.rate(t) for t in range(6)] == [near(r, TRAINING) for r in (0.025, 0.05, 0.075, 0.1, 0.1, 1 / 10.5)]


def scaffold(A, b, etas, cohort):
    """Algorithm 1 of the paper, option II: the quotient by the sum of the rates ``etas [rounds, steps]``."""
    K, d = len(A), A[0].shape[1]
    x, c, c_k, path = np.zeros(d), np.zeros(d), np.zeros((K, d)), []
    for t, row in enumerate(etas):
        moves, changes = [], []
        for k in cohort(t):
            y, seen = x.copy(), np.zeros(d)
            for eta in row:
                g = gradient(A[k], b[k], y)
                seen += eta * g  # the weighted mean of the gradients, summed on the way
                y -= eta * (g - c_k[k] + c)
            new = seen / row.sum()
            moves.append(y - x)
            changes.append(new - c_k[k])
            c_k[k] = new
        x = x + np.mean(moves, axis=0)
        c = c + np.sum(changes, axis=0) / K
        path.append(x)
    return path, c


@pytest.mark.parametrize("engine", slow_but(["inline"], ["inline", "vectorized"]))
@pytest.mark.parametrize("schedule", [("cosine", "round"), ("cosine:0.1", "step"), ("step:2,0.5", "step")])
def test_scaffold_with_a_rate_that_changes_equals_numpy(schedule, engine):
    A, b = problem()
    training = budget(*schedule)
    run = Quadratics(A, b, "scaffold", training, participation=0.5, engine=engine)
    path, c = scaffold(A, b, rates(training, 6), run.sampler.draw)
    assert_close(run.rounds(6), path, TRAINING)
    assert_close(run.server.state.rules["scaffold"]["c"], c, TRAINING)


@pytest.mark.parametrize("schedule", [("cosine", "round"), ("step:2,0.5", "step")])
def test_scaffolds_interval_of_several_rounds_sums_their_rates(schedule):
    """Averaged after every second round, it is SCAFFOLD with twice the steps, at the rates of both rounds."""
    A, b = problem()
    training = budget(*schedule)
    path, _ = scaffold(A, b, rates(training, 6).reshape(3, -1), lambda t: range(4))
    module = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False))
    torch.nn.init.zeros_(module[0].weight)
    run = Quadratics(A, b, "fedals:periods=head:2+scaffold", training, module=module)
    assert_close(run.rounds(6)[1::2], path, TRAINING)


@pytest.mark.parametrize("rho", [0.0, 0.8])
@pytest.mark.parametrize("per", ["round", "step"])
def test_fednovas_length_is_how_far_unit_gradients_go(rho, per):
    training = budget("cosine", per, momentum=rho)
    for t, row in enumerate(rates(training, 6)):
        moment = moved = 0.0
        for eta in row:
            moment = rho * moment + 1.0
            moved += eta / LR * moment
        ctx = SimpleNamespace(
            training=training, steps=torch.tensor(float(STEPS)).double(), round=t, lr=training.rate(t)
        )
        assert float(FedNova().length(ctx)) == near(moved, TRAINING)


def test_fednova_with_equal_steps_is_fedavg_at_any_rate():
    A, b = problem()
    pair = [Quadratics(A, b, m, budget("cosine", "step")).rounds(4) for m in ("fednova", "fedavg")]
    assert_close(*pair, TRAINING)


@pytest.mark.parametrize("schedule", [("cosine", "round"), ("cosine", "step")])
def test_dittos_personal_models_take_steps_of_the_same_rate(schedule):
    A, b = problem()
    training, lam = budget(*schedule), 0.4
    run = Quadratics(A, b, f"ditto:lam={lam}", training)
    xs = [np.zeros(3), *run.rounds(3)]
    for k in range(4):
        v = np.zeros(3)
        for t, row in enumerate(rates(training, 6)[:3]):
            for eta in row:
                v = v - eta * (gradient(A[k], b[k], v) + lam * (v - xs[t]))
        assert_close(state_at(run.server, k).rules["ditto"]["personal"], v, TRAINING)


def train(**options):
    torch.manual_seed(0)
    given = {"rounds": 4, "lr": 0.1, "batch_size": 8, "local_steps": 3, "engine": "inline", "method": "scaffold"}
    return unskew.run(blobs([12, 23, 17]), model=SmallBatchNorm(), **{**given, **options})


class Looks(unskew.ClientRule):
    """Notes the rates that a rule is told."""

    name, summary, paper = "looks", "-", "-"

    def __init__(self):
        self.seen = []

    def gradient(self, grad_fn, ctx, carry):
        def looked(v, batch):
            self.seen.append((batch.lr, ctx.lr))
            return grad_fn(v, batch)

        return looked


def test_a_rule_is_told_the_rate_of_the_step_and_the_mean_of_the_round():
    rule, halves = Looks(), [0.2, 0.1, 0.05]
    train(method=rule, lr=0.2, lr_schedule="step:1,0.5", lr_schedule_per="step", rounds=1)
    assert rule.seen[:3] == [(near(rate, TRAINING), near(np.mean(halves), TRAINING)) for rate in halves]


def test_the_rate_is_a_figure_of_each_round_where_it_changes():
    rows = train(lr_schedule="step:2,0.1").history
    assert [row["lr"] for row in rows] == [near(r, TRAINING) for r in (0.1, 0.1, 0.01, 0.01)]
    assert all("lr" not in row for row in train(rounds=1).history)


@pytest.mark.parametrize("method", ["hfcl", "hfcl:lr=0.1"])
def test_training_at_the_server_follows_unless_it_has_a_rate_of_its_own(tmp_path, method):
    """Two rounds of which the second has half the rate are a run of one round, and one that starts there at half the rate."""
    fed = unskew.load_federation("digits", partition="iid", clients=2, max_train_samples=100, server_data=50)
    given = {"model": "logistic", "local_steps": 2, "batch_size": 10, "engine": "inline", "precision": "fp64"}
    given |= {"method": method, "eval_clients": 0}
    both = unskew.run(fed, lr=0.2, lr_schedule="step:1,0.5", rounds=2, **given)
    unskew.run(fed, lr=0.2, rounds=1, out=tmp_path / "first", **given)
    second = unskew.run(fed, lr=0.1, rounds=2, start_from=str(tmp_path / "first"), **given)
    assert_close(both.vector, second.vector, TRAINING)


class Stops:
    """Fails after the second round, as a machine may."""

    def start(self, config, rounds_done):
        pass

    def round(self, row):
        if row["round"] == 3:
            raise RuntimeError("out of power")

    def end(self, summary):
        pass


@pytest.mark.parametrize("per", ["round", "step"])
def test_a_resumed_run_goes_on_with_the_same_rates(tmp_path, per):
    given = {"lr_schedule": "warmup:2+cosine", "lr_schedule_per": per, "checkpoint_every": 1}
    given |= {
        "method": "fedals:alpha=2+scaffold",
        "model": "mlp",
        "data": "digits",
        "max_train_samples": 60,
        "clients": 2,
    }
    given |= {"rounds": 4, "local_steps": 2, "batch_size": 8, "engine": "inline", "eval_clients": 0, "partition": "iid"}
    straight = unskew.run(**given)
    with pytest.raises(RuntimeError):
        unskew.run(**given, out=tmp_path / "run", callbacks=[Stops()])
    with pytest.raises(CheckpointError, match="Resume with rounds=4"):
        unskew.resume(tmp_path / "run", rounds=6)
    resumed = unskew.resume(tmp_path / "run")
    assert torch.equal(resumed.vector, straight.vector)
    assert [row["lr"] for row in resumed.history] == [row["lr"] for row in straight.history]
    with pytest.raises(CheckpointError, match="a new run"):
        unskew.resume(tmp_path / "run", rounds=6)


def test_a_run_whose_rates_do_not_depend_on_its_end_may_be_made_longer(tmp_path):
    given = {
        "model": "logistic",
        "max_train_samples": 60,
        "clients": 2,
        "partition": "iid",
        "lr_schedule": "step:1,0.5",
    }
    given |= {"local_steps": 2, "engine": "inline", "eval_clients": 0}
    straight = unskew.run(rounds=3, **given)
    unskew.run(rounds=2, out=tmp_path / "run", **given)
    assert torch.equal(unskew.resume(tmp_path / "run", rounds=3).vector, straight.vector)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"lr_schedule": "step:30"}, "step takes 2 numbers. Example: step:30,0.1"),
        ({"lr_schedule": "step:2.5,0.1"}, "must be an integer of at least 1"),
        ({"lr_schedule": "step:2,1.5"}, "at most 1"),
        ({"lr_schedule": "cosine:2"}, "must be from 0 to 1"),
        ({"lr_schedule": "inverse:0,1"}, "above 0"),
        ({"lr_schedule": "warmup:x"}, "warmup takes 1 number."),
        ({"lr_schedule": "warmup:nan"}, "warmup takes 1 number."),
        ({"lr_schedule": "cosine+step:2,0.1"}, "combines too many kinds"),
        ({"lr_schedule": "warmup:50+cosine", "rounds": 50}, "warms up for 50 of 50 rounds"),
        ({"lr_schedule": "step:1,1e-20", "rounds": 5}, "too small to train"),
        ({"lr_schedule": "cosine", "lr_schedule_per": "step"}, "requires local_steps"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        unskew.run(**options)
    assert words in str(caught.value)


def test_training_after_a_run_that_ended_early_has_the_rate_of_its_last_round():
    training = Training(lr=1.0, lr_schedule="step:2,0.1", rounds=40)
    assert training.rate(training.final_round(3)) == training.rate(2) == pytest.approx(0.1)
    assert training.rate(training.final_round(40)) == training.rate(39)
    assert training.final_round(40) == 40
    assert Training(rounds=40).final_round(3) == 40  # the number decides about batches
    assert training.rate(training.final_round(0)) == 1.0
