"""Power-of-choice against a loop in NumPy, its traffic and simulated time by formula, and its limits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import unskew
from conformance.problem import CLASSES, problem
from unskew.errors import ConfigError
from unskew.protocol.round_plan import RoundPlan, cohort_size
from unskew.seeding import numpy_generator
from unskew.simulation.sampler import Sampler
from unskew.simulation.samplers.power_of_choice import PowerOfChoice
from unskew.simulation.server import Server

SIZES = (10, 90, 20, 80, 30, 70, 40, 60)
ROUNDS, STEPS, LR = 5, 3, 0.5
START = np.float32(np.random.default_rng(0).normal(size=problem().start().shape))  # at zero, all losses would be log 4


def run(sampling, rounds=ROUNDS, engine="inline", participation=0.25, **options):
    clients = problem(SIZES)
    pairs = list(zip(clients.x, clients.y, strict=True))
    fed = unskew.Federation.from_arrays(pairs, test=pairs[0], classes=CLASSES, holdout=0)
    linear = nn.Linear(clients.x[0].shape[1], CLASSES, bias=False)
    linear.weight.data.copy_(torch.from_numpy(START))
    settings = {
        "model": nn.Sequential(linear), "rounds": rounds, "local_steps": STEPS, "batch_size": max(SIZES), "lr": LR,
        "participation": participation, "precision": "fp64", "engine": engine, "client_weighting": "uniform",
    }  # fmt: skip
    return unskew.run(fed, sampling=sampling, **(settings | options))


def loop(candidates, cohort):
    clients = problem(SIZES)
    w = np.float64(START)
    shares = np.array(SIZES) / sum(SIZES)
    for t in range(ROUNDS):
        drawn = numpy_generator(0, "cohort", t).choice(len(SIZES), size=candidates, replace=False, p=shares)
        by_loss = sorted(sorted(drawn), key=lambda k: -clients.loss(k, w))
        ends = []
        for k in by_loss[:cohort]:
            end = w
            for _ in range(STEPS):
                end = end - LR * clients.gradient(k, end)
            ends.append(end)
        w = np.mean(ends, axis=0)
    return w


@pytest.mark.filterwarnings("ignore:With power-of-choice")
@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
def test_a_run_is_the_papers_loop(engine):
    w = run("power-of-choice:5", engine=engine).vector.numpy().reshape(CLASSES, -1)
    assert np.abs(w - loop(5, 2)).max() < 1e-12


@pytest.mark.filterwarnings("ignore:With power-of-choice")
def test_all_clients_as_candidates_and_cohort_are_full_participation():
    chosen, full = run("power-of-choice:8", participation=1.0), run("fixed", participation=1.0)
    assert np.array_equal(chosen.vector.numpy(), full.vector.numpy())


@pytest.mark.filterwarnings("ignore:With power-of-choice")
def test_candidates_receive_the_model_and_send_a_number():
    chosen, fixed = run("power-of-choice:5"), run("fixed")
    model = 8 * chosen.vector.numel()
    # The two clients of the round do not receive the model again.
    assert chosen.summary["bytes_down"] == fixed.summary["bytes_down"] + ROUNDS * (5 - 2) * model
    assert chosen.summary["bytes_up"] == fixed.summary["bytes_up"] + ROUNDS * 5 * 8


@pytest.mark.filterwarnings("ignore:With power-of-choice")
@pytest.mark.parametrize(("sampling", "models"), [("fixed", 6), ("power-of-choice:2", 6), ("power-of-choice:4", 8)])
def test_clients_that_a_method_asks_receive_the_model_once(sampling, models):
    """MIME sends the model, the momentum and the mean gradient to each of the two clients."""
    result = run(sampling, rounds=1, method="mime", lr=0.1, network={"downlink": "1kB/s"})
    size = 8 * result.vector.numel()
    assert result.summary["bytes_down"] == models * size
    assert result.summary["seconds_simulated"] == pytest.approx(3 * size / 1000)


@pytest.mark.filterwarnings("ignore:With power-of-choice")
def test_the_virtual_clock_counts_the_exchange():
    network = {"uplink": "1kB/s", "downlink": "1kB/s"}
    chosen, fixed = (run(sampling, network=network) for sampling in ("power-of-choice:5", "fixed"))
    # Candidates receive the model before the round instead of in it, and send one number more.
    difference = chosen.summary["seconds_simulated"] - fixed.summary["seconds_simulated"]
    assert difference == pytest.approx(ROUNDS * 8 / 1000, rel=1e-9)


@pytest.mark.filterwarnings("ignore:With power-of-choice")
def test_heterofl_with_full_models_supports_power_of_choice():
    full = run("power-of-choice:5", method="heterofl:rates=1,mask_labels=false", rounds=2)
    assert torch.equal(full.vector, run("power-of-choice:5", rounds=2).vector)


@pytest.mark.filterwarnings("ignore:With power-of-choice")
def test_the_loss_of_texts_is_the_mean_over_tokens(monkeypatch):
    x = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, 1)
    y[:3, 1:] = -1  # one token instead of four
    fed = unskew.Federation.from_arrays(
        [(x[:4], y[:4]), (x[2:], y[2:])], test=(x, y), task="language", classes=5, holdout=0
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    reported = []
    ask = Server.losses
    monkeypatch.setattr(Server, "losses", lambda *args: reported.append(ask(*args)) or reported[-1])
    expected = [
        float(nn.functional.cross_entropy(model(x[rows]).detach().transpose(1, 2), y[rows], ignore_index=-1))
        for rows in (slice(4), slice(2, 6))
    ]
    options = {"rounds": 1, "local_steps": 1, "lr": 0.1, "participation": 0.5, "engine": "inline"}
    unskew.run(fed, model=model, sampling="power-of-choice:2", **options)
    assert reported[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:With power-of-choice")
def test_a_resumed_run_selects_the_same_clients(tmp_path):
    whole = run("power-of-choice:5")
    run("power-of-choice:5", rounds=2, out=tmp_path / "run")
    resumed = run("power-of-choice:5", out=tmp_path / "run", resume=True)
    assert np.array_equal(whole.vector.numpy(), resumed.vector.numpy())


def sampler_of(sizes, candidates, participation):
    """A sampler of clients with these numbers of samples."""
    clients = len(sizes)
    plan = RoundPlan(clients=clients, participation=participation, cohort=cohort_size(clients, participation))
    info = SimpleNamespace(sizes=lambda: np.array(sizes), plan=plan)
    return Sampler(clients, participation, 0, PowerOfChoice(candidates), info)


def test_candidates_are_drawn_by_size():
    sampler = sampler_of([1, 1, 8], 1, 0.3)
    counts = np.bincount([sampler.draw(t)[0] for t in range(2000)], minlength=3)
    assert np.abs(counts / 2000 - [0.1, 0.1, 0.8]).max() < 5 * np.sqrt(0.2 * 0.8 / 2000)


def test_clients_in_flight_are_no_candidates():
    assert sampler_of([1, 1, 1, 1], 3, 0.5).draw(0, in_flight=[0, 1]) == [2, 3]


def test_nobody_is_drawn_if_no_client_is_idle():
    assert sampler_of([1, 1, 1, 1], 4, 1.0).draw(0, in_flight=range(4)) == []


def test_a_loss_that_is_not_a_number_counts_as_smallest():
    sampler = sampler_of([1, 1, 1, 1], 3, 0.5)
    assert sampler.select([0, 1, 2], [float("nan"), -1.0, float("inf")]) == [1, 2]
    assert sampler.select([0, 2, 3], [0.1, 0.5, 0.3]) == [2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "power-of-choice"}, "number of candidates"),
        ({"sampling": "power-of-choice:0"}, "number of candidates"),
        ({"sampling": "power-of-choice:1"}, r"clients per round \(2\)"),
        ({"sampling": "power-of-choice:9"}, r"at most all clients \(8\)"),
        ({"sampling": "poisson:3"}, "has no options; write sampling=poisson"),
        ({"sampling": "power"}, "power-of-choice"),
        ({"sampling": "power-of-choice:5", "secure_aggregation": "required"}, "secure_aggregation=required does not"),
        ({"sampling": "power-of-choice:5", "method": "dp:epsilon=8,delta=0.1"}, "dp does not"),
        ({"sampling": "power-of-choice:5", "method": "heterofl"}, "clients of heterofl have only a part of it"),
        (
            {"sampling": "power-of-choice:5", "method": "fedrolex:rates=0.5"},
            "clients of fedrolex have only a part of it",
        ),
    ],
)
def test_power_of_choice_rejects_invalid_values(options, message):
    with pytest.raises(ConfigError, match=message):
        run(**options)
