"""Experiments that are programs of their own: against loops in NumPy, and how they are run, kept and shown."""

import json

import numpy as np
import pytest
import torch
from support.running import call
from support.tolerance import FEW, TRAINING, assert_close, near, tolerance

from unskew.errors import ConfigError, DataError
from unskew.reproduction import study as studies
from unskew.reproduction.preset import SCALES, preset_names
from unskew.reproduction.studies import logistic, quadratic
from unskew.reproduction.studies.quadratic_figure import QuadraticStudy, error_floor
from unskew.reproduction.study import StudyRuns, load_study, make_study, study_names


def small(shares=(0.0, 0.5, 1.0), sigma2=3.0, m=8, **options):
    return quadratic.make_problem(list(shares), 10.0, sigma2, seed=1, workers=4, d=3, m=m, **options)


# ---- quadratics ---------------------------------------------------------------------------------------------------------


def test_a_round_is_the_loop_over_workers_and_pairs():
    problem, steps = small(), torch.tensor([1e-3, 0.03])
    errors = quadratic.fedavg(problem, steps, rounds=3, seed=5)
    draws = quadratic.generator(5, "quadratic order")
    orders = [torch.argsort(torch.rand(4, 8, generator=draws), dim=1).numpy() for _ in range(3)]
    for p in range(3):
        a, b = problem.a[p].numpy(), problem.b[p].numpy()
        for g, gamma in enumerate(steps.double().tolist()):
            server = np.ones(3)
            for t in range(3):
                ends = []
                for i in range(4):
                    x = server.copy()
                    for j in orders[t][i][::-1]:  # drawn from the last step to the first
                        x -= gamma * a[i, j] * (a[i, j] * x - b[i, j])
                    ends.append(x)
                server = np.mean(ends, 0)
                assert float(errors[t, p, g]) == near(((server - problem.optimum.numpy()) ** 2).sum(), TRAINING)


def test_shuffling_keeps_the_pairs_and_the_optimum():
    problem = small()

    def everything(row):
        pairs = torch.cat([problem.a[row][..., None], problem.b[row]], 2).reshape(-1, 4)
        return sorted(map(tuple, pairs.tolist()))

    assert everything(0) == everything(1) == everything(2)
    for row in range(3):
        a, b = problem.a[row], problem.b[row]
        gradient = (a.square()[..., None] * problem.optimum - a[..., None] * b).mean((0, 1))
        assert float(gradient.abs().max()) < tolerance()
    moved = (problem.a[1] != problem.a[0][:, :1]).sum(1)  # a curvature is its worker's number
    assert (moved <= 4).all()
    assert moved.sum() > 0
    b = problem.b[0].mean(1)
    optimum = (torch.arange(1, 5)[:, None] * b).sum(0) / (1 + 4 + 9 + 16)
    torch.testing.assert_close(problem.optimum, optimum)


def test_the_scales_of_the_papers_problem():
    problem = quadratic.make_problem([0.0, 0.5], 10.0, 0.0, seed=0)
    assert problem.a.shape == (2, 10, 100)
    assert float(problem.smoothness[0]) == 100
    assert float(problem.smoothness[1]) == pytest.approx(0.5 * 100 + 0.5 * 38.5, rel=0.15)
    many = [quadratic.make_problem([0.0], 10.0, 1000.0, seed=s) for s in range(40)]
    gradients = torch.stack([(p.a[0][..., None] * p.b[0]).mean(1) for p in many])  # of f_i at 0, up to the sign
    assert float(gradients.square().sum(2).mean()) == pytest.approx(10 + 1000 / 100, rel=0.1)
    at_optimum = problem.dissimilarity(problem.optimum)
    assert float(at_optimum[1] / at_optimum[0]) == pytest.approx(0.25, abs=0.05)


def test_drift_stops_fedavg_at_the_floor():
    problem = quadratic.make_problem([0.0, 0.3], 10.0, 0.0, seed=0)
    errors = quadratic.fedavg(problem, torch.tensor([2e-5]), 600, seed=0)
    floor = error_floor(problem, 2e-5)
    assert float(errors[-1, 0, 0] / floor[0]) == pytest.approx(1, rel=0.1)
    assert float(errors[-50:, 1, 0].mean() / floor[1]) == pytest.approx(1, rel=0.4)


def test_rounds_are_those_of_the_best_step_size():
    errors = torch.tensor([[[9.0, 5.0]], [[4.0, 4.0]], [[1.0, torch.nan]]])
    rounds, which = quadratic.best_rounds(errors, torch.tensor([5.0, 1.0, 0.5]))
    assert rounds[0, :2].tolist() == [1, 3]
    assert which[0, :2].tolist() == [1, 0]
    assert rounds[0, 2].isnan()


def test_fits_find_the_coefficients():
    accuracies = np.logspace(-6, -4.3, 20)
    rounds = np.stack([3e-3 / np.sqrt(accuracies) + 2, 1e-3 / np.sqrt(accuracies) + 1])
    assert quadratic.fit_rounds(accuracies, rounds[0]) == (pytest.approx(3e-3), pytest.approx(2))
    assert quadratic.fit_rounds_chained(accuracies, rounds) == pytest.approx([3e-3, 1e-3], rel=1e-6)
    assert quadratic.fit_rounds_chained(accuracies, rounds[::-1])[1] <= 1e-3 * (
        1 + 1e-6
    )  # never above the share before
    assert np.isnan(quadratic.fit_rounds(accuracies, np.full(20, np.nan))[0])
    assert quadratic.predicted_ratio(np.array([0.0, 1.0]), 100, 38.5).tolist() == [1, 0]


# ---- logistic regression ------------------------------------------------------------------------------------------------


def data(n=60, classes=3, d=4):
    draws = torch.Generator().manual_seed(0)
    y = torch.arange(n) % classes
    return torch.randn(n, d, generator=draws) + y[:, None], y


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_logistic_rounds_are_the_loop_over_workers(noise):
    x, y = logistic.worker_data(*data(), classes=3, each=6, how="class", seed=2)
    pairs = [logistic.shuffle_shares(x, y, p, 2) for p in (0.0, 0.5)]
    test = data(30)
    steps = torch.tensor([0.1, 1.0])
    stacked = torch.stack([a for a, _ in pairs]).double(), torch.stack([b for _, b in pairs])
    losses = logistic.train(*stacked, (test[0].double(), test[1]), steps, 2, 3, noise, seed=7)
    for p, (a, b) in enumerate(pairs):
        for g, eta in enumerate(steps.tolist()):
            draws = torch.Generator().manual_seed(logistic.derive(7, "logistic noise"))
            server = np.zeros((4, 3))
            for t in range(3):
                local = [server.copy() for _ in range(3)]
                for _ in range(2):
                    s = (
                        torch.randn(3, 4, 1, 3, generator=draws, dtype=torch.float64).numpy()
                        if noise
                        else np.zeros((3, 4, 1, 3))
                    )
                    for i in range(3):
                        z = a[i].double().numpy() @ local[i]
                        q = np.exp(z) / np.exp(z).sum(1, keepdims=True)
                        gradient = a[i].double().numpy().T @ (q - np.eye(3)[b[i]]) / 6 / 3
                        local[i] -= np.float32(eta) * (gradient + np.sqrt(noise / 4) * s[i, :, 0])
                server = np.mean(local, 0)
                z = test[0].double().numpy() @ server
                loss = (np.log(np.exp(z).sum(1)) - z[np.arange(30), test[1]]).mean()
                assert float(losses[t, p, g]) == near(loss, FEW, dtype=torch.float32)


def test_splits_and_shuffles_keep_every_sample():
    x, y = data()
    for how in ("class", "iid"):
        a, b = logistic.worker_data(x, y, 3, 6, how, seed=0)
        assert [len(set(row)) for row in b.tolist()] == [1, 1, 1] if how == "class" else len(set(b[0].tolist())) > 1
        mixed, labels = logistic.shuffle_shares(a, b, 0.5, 3)
        key = lambda x, y: sorted(map(tuple, torch.cat([x.reshape(-1, 4), y.reshape(-1, 1)], 1).tolist()))  # noqa: E731
        assert key(a, b) == key(mixed, labels)
        assert (labels != b.sort(1).values).sum() > 0 if how == "class" else True
    with pytest.raises(DataError, match="needs 21 of each class"):
        logistic.worker_data(x, y, 3, 21, "iid", 0)


def test_with_one_full_step_a_round_the_split_does_not_matter():
    """FedAvg is then gradient descent on all data; the paper's gain can only come from several epochs."""
    test = data(30)
    losses = []
    for p in (0.0, 0.5):
        a, b = logistic.shuffle_shares(*logistic.worker_data(*data(), 3, 20, "class", 0), p, 0)
        losses.append(logistic.train(a[None], b[None], test, torch.tensor([0.5]), 1, 5, 0.0, 0))
    assert_close(*(loss.float() for loss in losses), FEW)  # trained in float32


# ---- how studies are run ------------------------------------------------------------------------------------------------

TINY = {"rounds": 30, "shares": 3, "steps": 26, "accuracies": 5, "pairs": 10, "workers": 4, "dimension": 3}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", study_names())
def test_every_study_is_valid_at_every_scale(name, scale, tmp_path):
    runs = StudyRuns(load_study(name), scale, tmp_path)
    assert runs.parts()
    assert runs.seeds >= 1
    assert name not in preset_names()


@pytest.mark.slow
def test_parts_are_kept_and_not_made_again(tmp_path, monkeypatch):
    preset = load_study("fedssyn/quadratic").model_copy(update={"scales": {}, "settings": TINY})
    runs = StudyRuns(preset, "paper", tmp_path)
    made = list(runs.carry_out([0, 1]))
    assert len(made) == len((tmp_path / "fedssyn" / "quadratic.jsonl").read_text().splitlines()) == 4
    monkeypatch.setattr(QuadraticStudy, "run", None)
    assert list(runs.carry_out([0, 1])) == made
    found = runs.found([0, 1])
    ((title, header, rows),) = runs.study.lines(found)
    assert "seeds 0, 1" in title
    assert [row[0] for row in rows] == ["0.0", "0.5", "1.0"]
    assert all(len(row) == len(header) for row in rows)
    from PIL import Image

    assert Image.open(runs.study.draw(found, tmp_path / "q.png")).width > 1000
    other = StudyRuns(preset.model_copy(update={"settings": {**TINY, "rounds": 31}}), "paper", tmp_path)
    assert other.found([0]) == {}


def test_the_command_runs_shows_and_refuses(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = studies.StudyScale(settings={"per_class": 20, "shares": [0, 1], "rounds": 2, "epochs": [2], "noise": [0.1]})
    tiny.otherwise = {"data": "digits"}
    preset = load_study("fedssyn/logistic").model_copy(update={"scales": {"smoke": tiny}})
    monkeypatch.setattr(studies, "load_study", lambda name: preset)

    def offline(name, path=None):
        if name == "mnist":
            raise DataError("There is no network.")
        return real(name, path=path)

    real = logistic.load_source
    monkeypatch.setattr(logistic, "load_source", offline)
    args = ("reproduce", "fedssyn/logistic", "--seeds", "0,1", "--row", "one class each, E = 2, noise 0.1")
    outcome = call(capsys, *args, "--plot", "figure.png")
    assert outcome.code == 0, outcome.err
    assert "uses digits instead" in outcome.out
    assert "p = 1" in outcome.out
    assert (tmp_path / "figure.png").is_file()
    monkeypatch.setattr(logistic, "load_source", None)
    shown = json.loads(call(capsys, *args, "--show", "--json").out)
    assert [(e["part"], e["seed"]) for e in shown["entries"]] == [
        ("one class each, E = 2, noise 0.1", s) for s in (0, 1)
    ]
    first, last = (shown["entries"][0]["loss"][i] for i in (0, 1))
    assert last < first
    for wrong, words in [
        (["--row", "no"], "has no row"),
        (["--column", "no"], "supports --row, but not --column"),
        (["--scale", "big"], "scale"),
        (["--data-path", "nowhere"], "no file or folder"),
    ]:
        monkeypatch.setattr(logistic, "load_source", real)
        mistake = call(capsys, "reproduce", "fedssyn/logistic", *wrong)
        assert mistake.code == 2
        assert words in mistake.err


def test_study_rejects_invalid_settings():
    for kind, settings, words in [
        ("cubic", {}, "no study"),
        ("quadratic", {"round": 3}, "rounds"),
        ("quadratic", {"rounds": 0}, "not valid"),
        ("logistic", {"_source": []}, "setting"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make_study(kind, settings)
    with pytest.raises(ConfigError, match="no preset"):
        load_study("fedssyn/cubic")
