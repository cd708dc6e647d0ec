"""Personal models: trained once more at the end, what they are worth to their clients, and how that is shown."""

import json

import numpy as np
import pytest
import torch
from support.evaluation import evaluator, held_out, one_hot, row, shown, summary_of
from support.federations import SmallBatchNorm, blobs
from support.quadratic import Quadratics, problem
from support.running import Stop, StopAfter
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close, near

import unskew
from unskew.cli.comparison_tables import clients_table, comparison_table
from unskew.cli.tables import summary_table
from unskew.comparison.comparison_result import Comparison
from unskew.engines.batches import BatchPlan
from unskew.errors import MethodConflictError
from unskew.methods.registry import method
from unskew.protocol.training_config import Training
from unskew.serving.load import open_run
from unskew.simulation import personal_models
from unskew.tasks.intervals import interval95
from unskew.tasks.primary_metric import metric_info

LR, STEPS, MOMENTUM, DECAY = 0.05, 5, 0.9, 0.1
COG = "fedcog:start_round=1,n=6,g_steps=2"
METHODS = ["fedavg", "fedprox:mu=0.5", "scaffold", "fedexp", "moon", COG]


def images(draws, n, classes):
    y = draws.choice(classes, n)
    return (draws.normal(size=(n, 2, 6, 6)) + 0.7 * y[:, None, None, None]).astype(np.float32), y


def federation():
    """Five clients of two classes each; the fourth holds nothing out."""
    draws = np.random.default_rng(5)
    pairs = [[k % 3, (k + 1) % 3] for k in range(5)]
    clients = [(*images(draws, 11 + 4 * k, p), *images(draws, 25, p)) for k, p in enumerate(pairs)]
    clients[3] = clients[3][:2]
    return unskew.Federation.from_arrays(clients, test=images(draws, 40, [0, 1, 2]), classes=3, holdout=0.0)


def train(chosen, fed=None, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "participation": 0.6, "engine": "inline"}
    given |= {"momentum": 0.5, "weight_decay": 0.01, "local_epochs": 2}
    return unskew.run(fed or federation(), model=SmallBatchNorm(dropout=0.0), method=chosen, **{**given, **options})


def untimed(line):
    return {k: v for k, v in line.items() if not k.endswith("seconds")}


def figures(result):
    return {k: v for k, v in result.summary.items() if k.startswith("personal")}


# ---- what is trained ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
@pytest.mark.parametrize("chosen", ["fedavg", "fedprox:mu=0.7", "scaffold:variate=mean"])
def test_the_last_training_equals_a_loop_in_numpy(chosen, engine):
    A, b = problem()
    training = Training(
        local_steps=STEPS, batch_size=100, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, precision="fp64"
    )
    run = Quadratics(A, b, f"{chosen}+ft", training, participation=0.5, engine=engine)
    x = run.rounds(3)[-1]
    state = {k: dict(run.server.clients.store.get(k)) for k in range(4)}
    clients = [3, 0, 2, 1]
    found = list(personal_models.fine_tuned_models(run.server, run.engine, 3, 3, clients))
    for k, (v, _) in zip(clients, found, strict=True):
        y, m = x.copy(), np.zeros(3)
        correction = np.zeros(3)
        if "scaffold" in chosen:
            correction = run.server.state.rules["scaffold"]["c"].numpy() - np.asarray(
                state[k].get("rules/scaffold/c", 0.0)
            )
        for _ in range(STEPS):
            g = A[k].T @ (A[k] @ y - b[k]) / len(b[k]) + correction
            g += 0.7 * (y - x) if "fedprox" in chosen else 0.0
            m = MOMENTUM * m + g + DECAY * y
            y = y - LR * m
        assert_close(v, y, TRAINING)
    assert np.array_equal(run.server.state.v, x)
    for k in range(4):
        after = run.server.clients.store.get(k)
        assert after.keys() == state[k].keys()
        assert all(torch.equal(t, state[k][name]) for name, t in after.items())


@pytest.mark.parametrize("buffers", ["average", "reset"])
def test_personal_accuracy_equals_a_plain_torch_loop(buffers):
    fed, options = federation(), {"rounds": 3, "seed": 4, "buffers": buffers}
    result = train("fedavg+ft", fed, **options)
    training = Training(local_epochs=2, batch_size=8)
    rights = []
    for k in (0, 1, 2, 4):
        client, module = fed.clients[k], SmallBatchNorm(dropout=0.0).double()
        module.load_state_dict(result.model.state_dict())
        if buffers == "reset":
            module.norm.reset_running_stats()
        optimizer = torch.optim.SGD(module.train().parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)
        for index in BatchPlan(training, client.num_samples, 4, 3, k).batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(client.x[index].double()), client.y[index]).backward()
            optimizer.step()
        says = module.eval()(client.x_test.double()).argmax(1)
        rights.append((says == client.y_test).double().mean().item())
    assert result.summary["clients_evaluated"] == 4
    ends = interval95(rights)
    assert figures(result) == pytest.approx(
        {
            "personal_accuracy_mean_low": ends[0],
            "personal_accuracy_mean_high": min(1.0, ends[1]),
            "personal_accuracy_mean": np.mean(rights),
            "personal_accuracy_std": np.std(rights),
            "personal_accuracy_worst": min(rights),
            "personal_accuracy_worst_decile": min(rights),
        }
    )
    assert np.mean(rights) > result.summary["client_accuracy_mean"]


@pytest.mark.parametrize("buffers", ["average", "reset"])
@pytest.mark.parametrize("chosen", ["fedpac", "fedala", "knnper:capacity=30", "ifca"])
def test_a_client_that_is_served_without_training_has_the_buffers_of_the_final_model(chosen, buffers, tmp_path):
    result = train(chosen, out=tmp_path / "run", buffers=buffers)
    buffers = result.model.state_dict()
    for client in (0, 1, 2, 4):
        module = open_run(tmp_path / "run", client_number=client, model=SmallBatchNorm(dropout=0.0)).module
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.equal(module.state_dict()[name], buffers[name])


def test_only_personal_steps_change_the_buffers_of_perfedavg(tmp_path):
    fed = federation()
    options = {"momentum": 0.0, "weight_decay": 0.0, "drop_last": True}
    result = train("perfedavg", fed, out=tmp_path / "run", **options)
    training = Training(local_epochs=2, batch_size=8, drop_last=True)
    for client in (0, 1, 2, 4):
        module = SmallBatchNorm(dropout=0.0).double()
        module.load_state_dict(result.model.state_dict())
        data = fed.clients[client]
        rows = BatchPlan(training, data.num_samples, 0, 3, client).batches[0]
        module.train()(data.x[rows].double())
        served = open_run(tmp_path / "run", client_number=client, model=SmallBatchNorm(dropout=0.0)).module
        for name in ("running_mean", "running_var"):
            assert_close(getattr(served.norm, name), getattr(module.norm, name).numpy(), TRAINING)


@pytest.mark.parametrize("chosen", slow_but(["scaffold", "moon"], METHODS))
def test_nothing_but_the_personal_figures_differs(chosen):
    plain, tuned = train(chosen), train(f"{chosen}+ft")
    assert torch.equal(plain.vector, tuned.vector)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, tuned.model.state_dict()[name])
    assert [untimed(line) for line in plain.history] == [untimed(line) for line in tuned.history]
    others = {k: v for k, v in untimed(tuned.summary).items() if not k.startswith("personal")}
    assert {**others, "method": chosen} == untimed(plain.summary)
    assert len(figures(tuned)) == 6
    assert not figures(plain)


CASES = [
    (chosen, engine)
    for chosen in ("fedprox+ft", "scaffold+ft", f"{COG}+ft", "fedrep+ft", "fedrep", "ditto")
    for engine in ("processes", "vectorized")
]
QUICK = [("ditto", "vectorized")]


@pytest.mark.parametrize(("chosen", "engine"), slow_but(QUICK, CASES))
def test_every_engine_gives_the_same_personal_figures(chosen, engine):
    assert figures(train(chosen, engine=engine, workers=2)) == near(figures(train(chosen)))


def test_only_clients_that_are_evaluated_train(monkeypatch):
    seen = []
    tuned = personal_models.fine_tuned_models

    def watched(*args):
        seen.append(args[-1])
        return tuned(*args)

    monkeypatch.setattr(personal_models, "fine_tuned_models", watched)
    train("fedavg+ft", eval_clients=5)
    some = train("fedavg+ft", eval_clients=2)
    none = train("fedavg+ft", eval_clients=0)
    assert seen[0] == [0, 1, 2, 4]
    assert set(seen[1]) <= {0, 1, 2, 4}
    assert some.summary["clients_evaluated"] == len(seen[1]) <= 2
    assert len(seen) == 2
    assert set(figures(none).values()) == {None}


def test_a_client_whose_last_training_fails_is_served_by_the_global_model():
    A, b = problem()
    run = Quadratics(A, b, "ft")
    x = run.rounds(1)[-1]
    run.engine.trainer.setup.federation.clients.x[3:10] = torch.nan
    found = [v.numpy() for v, _ in personal_models.fine_tuned_models(run.server, run.engine, 1, 4, range(4))]
    assert np.array_equal(found[1], x)
    assert all(np.isfinite(v).all() and not np.array_equal(v, x) for k, v in enumerate(found) if k != 1)


@pytest.mark.slow
def test_an_interrupted_run_has_the_same_personal_figures(tmp_path):
    straight = train(f"{COG}+ft", rounds=4, out=tmp_path / "straight")
    folder = tmp_path / "stopped"
    with pytest.raises(Stop):
        train(f"{COG}+ft", rounds=4, out=folder, checkpoint_every=1, callbacks=[StopAfter(2)])
    given = {"federation": federation(), "model": SmallBatchNorm(dropout=0.0)}
    assert figures(unskew.resume(folder, **given)) == figures(straight)
    # Stopped in its very last act: all rounds are there, the summary is not.
    wanted = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    torch.manual_seed(0)
    unskew.resume(folder, **given)
    assert untimed(json.loads((folder / "summary.json").read_text())) == untimed(wanted)


def test_a_client_has_one_personal_model():
    with pytest.raises(MethodConflictError, match="ditto and ft both define a client's personal model"):
        method("ditto+ft")
    assert [rule.name for rule in method("fedrep+ft").client] == ["fedrep", "ft"]


# ---- what it is worth --------------------------------------------------------------------------------------------------


def test_without_held_out_data_a_personal_model_is_weighed_by_its_clients_classes():
    """``sum_c q_kc correct_c / sum_c q_kc total_c``, with ``q_k`` the class shares of the client's training data."""
    draws = np.random.default_rng(1)
    labels = [draws.integers(0, 3, 7), np.array([0, 0, 0]), draws.integers(1, 3, 11)]
    x, y = draws.normal(size=(400, 3)).astype(np.float32), draws.choice(3, 400, p=[0.2, 0.5, 0.3])
    clients = [(one_hot(k), k) for k in labels]
    fed = unskew.Federation.from_arrays(clients, test=(x, y), classes=3, holdout=0.0)
    judge, v, b = evaluator(fed, torch.nn.Linear(3, 3))
    own = [v + 0.5 * torch.randn(len(v), generator=torch.Generator().manual_seed(k)) for k in range(3)]
    scores = judge.evaluate_clients(v, b, 1000, 0, lambda ids: ((own[k], b) for k in ids))
    for k, found in enumerate(scores.accuracies):
        weight, bias = own[k].numpy()[:9].reshape(3, 3), own[k].numpy()[9:]
        right = (x @ weight.T + bias).argmax(1) == y
        q = np.bincount(labels[k], minlength=3) / len(labels[k])
        correct, total = (np.array([n[y == c].sum() for c in range(3)]) for n in (right, np.ones(400)))
        assert found == near((q * correct).sum() / (q * total).sum())
    assert len(set(scores.accuracies)) == 3
    assert scores.measured_on == "the test set, weighted by the clients' classes"
    std = scores.metrics("personal", metric_info("accuracy"))["personal_accuracy_std"]
    assert std == pytest.approx(np.sqrt(np.mean((scores.accuracies - np.mean(scores.accuracies)) ** 2)))


def test_with_held_out_data_only_these_count():
    judge, v, b = evaluator(held_out(([0, 1, 2, 2], [0, 1, 2, 0]), ([2, 1], [2, 2])))
    scores = judge.evaluate_clients(v, b, 1000, 0, lambda ids: ((v, b) for _ in ids))
    assert scores.accuracies.tolist() == [0.75, 0.5]
    assert scores.metrics("personal", metric_info("accuracy"))["personal_accuracy_std"] == pytest.approx(0.125)
    assert judge.evaluate_clients(v, b, 0, 0).metrics("client", metric_info("accuracy"))["client_accuracy_std"] is None


# ---- how it is shown ---------------------------------------------------------------------------------------------------


def test_tables_show_personal_figures_where_there_are_some():
    names = ("mean", "std", "worst", "worst_decile")
    globals_ = {f"client_accuracy_{n}": v for n, v in zip(names, (0.5, 0.2, 0.1, 0.15), strict=True)}
    mine = {f"personal_accuracy_{n}": v for n, v in zip(names, (0.812, 0.055, 0.61, 0.633), strict=True)}
    histories = {name: [[row(1)], [row(1)]] for name in ("scaffold:variate=mean", "fedprox:mu=0.1+ft")}
    plain = [summary_of(0.5, **globals_), summary_of(0.5, **globals_)]
    tuned = [{**s, **{k: v + d for k, v in mine.items()}} for s, d in zip(plain, (0.0, 0.01), strict=True)]
    rows = Comparison(histories, dict(zip(histories, (plain, tuned), strict=True)), 0.5, None).rows()
    assert rows[0]["personal_accuracy_mean"] is None
    assert rows[1]["personal_accuracy_mean"] == pytest.approx(0.817)
    assert rows[1]["personal_accuracy_worst_std"] == pytest.approx(0.01 / np.sqrt(2))
    assert clients_table(rows[:1]) is None
    lines = shown(clients_table(rows), width=120).splitlines()
    cells = [line.split() for line in lines if "scaffold" in line or "fedprox" in line]
    assert [c[:2] for c in cells] == [
        ["scaffold:variate=mean", "global"],
        ["fedprox:mu=0.1+ft", "global"],
        ["fedprox:mu=0.1+ft", "personal"],
    ]
    assert " ".join(cells[2][2:]) == "81.7 ± 0.7 6.0 ± 0.7 63.8 ± 0.7 61.5 ± 0.7"
    assert " ".join(cells[0][2:]) == "50.0 ± 0.0 20.0 ± 0.0 15.0 ± 0.0 10.0 ± 0.0"
    assert max(map(len, lines)) <= 120
    assert "personal" not in shown(comparison_table(rows), width=120)


def test_the_summary_shows_both():
    text = shown(summary_table(train("fedavg+ft").summary), width=120)
    assert text.count("worst decile") == 2
    assert "personal models, on" in text
    assert "personal models" not in shown(summary_table(train("fedavg").summary), width=120)


def test_a_comparison_has_personal_figures_in_its_rows():
    given = {"rounds": 2, "model": "logistic", "clients": 4, "local_steps": 3, "engine": "inline", "seeds": 2}
    plain, tuned = unskew.compare(methods=["fedavg", "fedavg+ft"], **given).rows()
    assert plain["client_accuracy_mean"] == tuned["client_accuracy_mean"]
    assert tuned["personal_accuracy_mean"] > plain["client_accuracy_mean"]
    assert tuned["client_accuracy_std"] > 0
    assert tuned["accuracy"] == plain["accuracy"]


def test_ft_helps_clients_with_few_classes():
    fed = blobs([40, 40, 40])
    given = {"rounds": 5, "lr": 0.05, "local_epochs": 5}
    result = train("ft", fed, **given)
    assert result.summary["personal_accuracy_mean"] > result.summary["client_accuracy_mean"] + 0.05
