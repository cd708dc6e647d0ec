"""What is written about a run is right: evaluation by hand, metrics, best round, tables, statistics of BatchNorm."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.evaluation import evaluator, held_out, one_hot, row, shown, summary_of
from support.federations import SmallBatchNorm, blobs
from support.running import metrics, summary
from support.slow import slow_but
from support.tolerance import FEW, assert_close, near

import unskew
from unskew.cli.comparison_tables import comparison_table, metrics_table
from unskew.cli.tables import partition_table, summary_table
from unskew.comparison.comparison_result import Comparison
from unskew.comparison.folder_name import folder_name
from unskew.comparison.summary_statistics import mean_std
from unskew.errors import CheckpointError, ConfigError
from unskew.models.spec import ModelSpec
from unskew.plots import curves
from unskew.plots.curves import plot_clients_by_class, plot_convergence, plot_signs
from unskew.plots.figure import new_figure, set_round_axis
from unskew.plots.method_plots import METHOD_PLOTS
from unskew.records.recorder import MEASURED, Recorder, best_value_of, first_reaching
from unskew.records.result import read_history
from unskew.simulation.client_scores import ClientScores
from unskew.tasks.formatting import format_megabytes, format_percent
from unskew.tasks.primary_metric import metric_info


@pytest.fixture(autouse=True)
def _seed():
    """Models made here begin the same in every run of the tests."""
    torch.manual_seed(0)


# ---- evaluation -------------------------------------------------------------------------------------------------------


def test_accuracy_per_client_by_hand():
    fed = held_out(([0, 1, 2, 2], [0, 1, 2, 0]), ([0, 1], [1, 0]), ([2], [2]), ([0, 0, 1], [0, 1, 1]))
    judge, v, b = evaluator(fed)
    scores = judge.evaluate_clients(v, b, most=1000, seed=0)
    np.testing.assert_allclose(scores.accuracies, [3 / 4, 0, 1, 2 / 3])
    assert scores.measured_on == "the clients' held-out data"
    metrics = scores.metrics("client", metric_info("accuracy"))
    mean = metrics["client_accuracy_mean"]
    assert mean == pytest.approx((3 / 4 + 0 + 1 + 2 / 3) / 4), "each client counts once, whatever its size"
    assert metrics["client_accuracy_worst"] == 0


def test_worst_decile_by_hand():
    for values, expected in (
        ([0.5, 0.2, 0.9], 0.2),  # of fewer than ten, the worst one
        (list(np.arange(20) / 20), (0 + 1 / 20) / 2),
        (list(np.arange(29)[::-1] / 29), (0 + 1 / 29) / 2),
        (list(np.arange(30) / 30), (0 + 1 / 30 + 2 / 30) / 3),
    ):
        metrics = ClientScores(np.array(values), "").metrics("client", metric_info("accuracy"))
        assert metrics["client_accuracy_worst_decile"] == pytest.approx(expected)
        losses = ClientScores(np.zeros(len(values)), "", -np.array(values)).metrics("client", metric_info("loss"))
        assert losses["client_loss_worst_decile"] == pytest.approx(-expected), (
            "where lower is better, the highest count"
        )
    empty = ClientScores(np.zeros(0), "nothing").metrics("client", metric_info("accuracy"))
    assert set(empty.values()) == {None}


def test_accuracy_and_loss_on_the_test_set_by_hand():
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(1203, 3)).astype(np.float32), draws.integers(0, 3, 1203)  # more than two batches
    judge, v, b = evaluator(held_out(([0], [0]), test=(x, y)))
    score = judge.evaluate_test(v, b)
    assert score.accuracy == near((x.argmax(1) == y).mean())
    wide = x.astype(np.float64)
    loss = np.log(np.exp(wide).sum(1)) - wide[np.arange(len(y)), y]
    assert score.loss == near(loss.mean(), FEW, dtype=torch.float32)


def test_without_held_out_data_the_test_set_is_weighted_by_classes():
    """``sum_c q_kc correct_c / sum_c q_kc total_c`` with the class shares ``q_k`` of the client's training data."""
    draws = np.random.default_rng(1)
    labels = [draws.integers(0, 3, 7), np.array([0, 0, 0]), draws.integers(1, 3, 11)]
    says, y = draws.integers(0, 3, 400), draws.choice(3, 400, p=[0.2, 0.5, 0.3])
    fed = unskew.Federation.from_arrays(
        [(one_hot(k), k) for k in labels], test=(one_hot(says), y), classes=3, holdout=0.0
    )
    judge, v, b = evaluator(fed)
    scores = judge.evaluate_clients(v, b, most=1000, seed=0)
    correct = np.array([(says[y == c] == c).sum() for c in range(3)])
    total = np.array([(y == c).sum() for c in range(3)])
    expected = []
    for mine in labels:
        q = np.array([(mine == c).mean() for c in range(3)])
        expected.append((q * correct).sum() / (q * total).sum())
    assert_close(scores.accuracies, expected)
    assert scores.accuracies[1] == pytest.approx(correct[0] / total[0])
    assert "weighted by the clients' classes" in scores.measured_on


def test_class_that_the_test_set_lacks():
    """A client that only holds such a class cannot be measured."""
    fed = unskew.Federation.from_arrays(
        [(one_hot([2]), np.array([2])), (one_hot([0]), np.array([0]))],
        test=(one_hot([0, 1]), np.array([0, 1])), classes=3, holdout=0.0,
    )  # fmt: skip
    judge, v, b = evaluator(fed)
    accuracies = judge.evaluate_clients(v, b, most=1000, seed=0).accuracies
    assert np.array_equal(accuracies, [np.nan, 1], equal_nan=True)


def test_at_most_so_many_clients_are_evaluated():
    fed = held_out(*[([k % 3], [0]) for k in range(12)])
    judge, v, b = evaluator(fed)
    some = judge.evaluate_clients(v, b, most=5, seed=0)
    assert len(some.accuracies) == 5
    assert some.accuracies.tolist() == judge.evaluate_clients(v, b, most=5, seed=0).accuracies.tolist()
    draws = {tuple(judge.evaluate_clients(v, b, most=5, seed=s).accuracies) for s in range(8)}
    assert len(draws) > 1
    none = judge.evaluate_clients(v, b, most=0, seed=0)
    assert (len(none.accuracies), none.measured_on) == (0, "nothing")


def test_images_of_unequal_clients_are_split_as_they_were_joined():
    draws = np.random.default_rng(2)

    def images(n):
        return draws.normal(size=(n, 2, 6, 6)).astype(np.float32), draws.integers(0, 3, n)

    clients = [(*images(2), *images(n)) for n in (3, 1, 6)]
    fed = unskew.Federation.from_arrays(clients, test=images(5), classes=3)
    judge, v, b = evaluator(fed, SmallBatchNorm())
    own = judge.evaluate_clients(v, b, most=1000, seed=0).accuracies
    module = SmallBatchNorm()
    spec = ModelSpec(module, fed.shape, 3)
    alone = spec.load(v, b)
    for k, (_, _, x, y) in enumerate(clients):
        right = (alone(torch.from_numpy(x)).argmax(1).numpy() == y).mean()
        assert own[k] == pytest.approx(right)


def test_last_and_best_round_are_summarized(tmp_path):
    result = unskew.run(
        blobs([8, 8, 8]), model="logistic", rounds=7, eval_every=3, lr=0.5, engine="inline", out=tmp_path / "run"
    )
    rows = metrics(tmp_path / "run", without=())
    assert [row["round"] for row in rows if row["accuracy"] is not None] == [3, 6, 7]
    assert [row["round"] for row in rows if row["loss"] is not None] == [3, 6, 7]
    accuracies = {row["round"]: row["accuracy"] for row in rows if row["accuracy"] is not None}
    best = max(accuracies.values())
    assert result.summary["accuracy"] == accuracies[7]
    assert result.summary["best_accuracy"] == best
    assert result.summary["best_round"] == min(t for t, a in accuracies.items() if a == best)
    assert result.history == rows == read_history(tmp_path / "run")
    assert result.summary == summary(tmp_path / "run", without=())
    text = shown(summary_table(result.summary))
    assert f"{format_percent(accuracies[7])}%" in text
    assert f"{format_percent(best)}%  (round {result.summary['best_round']})" in text


def test_nobody_is_evaluated():
    result = unskew.run(blobs([8, 8]), model="logistic", rounds=1, eval_clients=0, engine="inline")
    assert result.summary["clients_evaluated"] == 0
    assert result.summary["client_accuracy_mean"] is None
    assert "nothing" in shown(summary_table(result.summary))


# ---- normalization statistics -----------------------------------------------------------------------------------------


def stats(result):
    return torch.cat([result.model.norm.running_mean, result.model.norm.running_var])


@pytest.mark.parametrize("engine", slow_but(["inline", "vectorized"], ["inline", "processes", "vectorized"]))
def test_statistics_averaged_local_or_reset(engine):
    """One round from the same start: all three train alike; they differ in what travels and what comes back."""
    fed, module = blobs([6, 9, 12]), SmallBatchNorm(dropout=0.0)
    found = {}
    for mode in ("average", "local", "reset"):
        options = {"model": module, "lr": 0.1, "engine": engine, "buffers": mode, "local_steps": 2}
        found[mode] = [unskew.run(fed, rounds=rounds, **options) for rounds in (1, 2)]
        assert found[mode][0].summary["buffers"] == mode
    one = {mode: results[0] for mode, results in found.items()}
    two = {mode: results[1] for mode, results in found.items()}
    size = 8 * 4  # four means and four variances
    crossed = {m: (r.summary["buffer_bytes_up"], r.summary["buffer_bytes_down"]) for m, r in one.items()}
    assert crossed == {"average": (3 * size, 3 * size), "local": (0, 0), "reset": (3 * size, 0)}
    assert torch.equal(one["average"].vector, one["reset"].vector)
    assert torch.equal(one["average"].vector, one["local"].vector)
    assert torch.equal(stats(one["average"]), stats(one["reset"])), "the mean of what the clients ended with"
    assert not torch.equal(stats(two["average"]), stats(two["reset"])), "begun anew in the second round"
    # In training mode BatchNorm uses the batch: the parameters do not depend on the statistics.
    torch.testing.assert_close(two["average"].vector, two["reset"].vector)


def test_average_of_statistics_by_hand():
    fed = blobs([6, 9, 12])
    module = SmallBatchNorm(dropout=0.0)
    trained = unskew.run(fed, model=module, rounds=1, lr=0.1, engine="inline", local_steps=1)
    b, sizes = [], []
    for client in fed.clients:
        z = module.conv(client.x).permute(1, 0, 2, 3).flatten(1)
        b.append(torch.cat([0.1 * z.mean(1), 0.9 + 0.1 * z.var(1)]).detach())
        sizes.append(client.num_samples)
    expected = sum(n * each for n, each in zip(sizes, b, strict=True)) / sum(sizes)
    assert_close(stats(trained), expected, FEW)


def test_clients_are_judged_with_their_own_statistics(tmp_path):
    """With ``buffers=local`` a client's held-out data are judged with what this client kept."""
    draws = np.random.default_rng(3)

    def images(n, shift):
        y = draws.integers(0, 3, n)
        return (draws.normal(size=(n, 2, 6, 6)) + shift + y[:, None, None, None]).astype(np.float32), y

    clients = [(*images(20, shift), *images(40, shift)) for shift in (-8.0, 8.0, 3.0)]
    fed = unskew.Federation.from_arrays(clients, test=images(20, 0), classes=3)
    options = {
        "model": SmallBatchNorm(),
        "rounds": 3,
        "lr": 0.1,
        "local_epochs": 4,
        "batch_size": 10,
        "engine": "inline",
    }
    result = unskew.run(fed, **options, buffers="local", out=tmp_path / "run")
    kept = load_file(tmp_path / "run/checkpoints/0000003/clients-0000.safetensors")
    spec = ModelSpec(SmallBatchNorm(), fed.shape, 3)
    rights = []
    for k, (_, _, x, y) in enumerate(clients):
        module = spec.load(result.vector, kept[f"{k}/statistics"])
        rights.append((module(torch.from_numpy(x)).argmax(1).numpy() == y).mean())
    assert len({kept[f"{k}/statistics"].sum().item() for k in range(3)}) == 3
    assert result.summary["client_accuracy_mean"] == pytest.approx(np.mean(rights))
    assert result.summary["client_accuracy_worst"] == pytest.approx(min(rights))
    shared = [(result.model(torch.from_numpy(x)).argmax(1).numpy() == y).mean() for _, _, x, y in clients]
    assert np.mean(shared) != pytest.approx(np.mean(rights)), "the test could not fail otherwise"


# ---- the recorder -----------------------------------------------------------------------------------------------------


def test_lines_are_valid_json_whatever_the_figures(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.round(row(1, loss_x=math.nan, up=math.inf))
    recorder.round(row(2, None))
    recorder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert rows == recorder.history
    assert rows[0]["loss_x"] is None
    assert rows[0]["up"] is None


def test_best_is_the_first_of_equals():
    recorder = Recorder(None)
    assert best_value_of(recorder.history, "accuracy") == (None, 0)
    for t, accuracy in enumerate([0.1, None, 0.7, 0.3, 0.7], start=1):
        recorder.round(row(t, accuracy))
    assert best_value_of(recorder.history, "accuracy") == (0.7, 3)
    assert first_reaching(recorder.history, 0.2) == recorder.history[2]
    assert first_reaching(recorder.history, 0.9) is None


MORE = dict.fromkeys(MEASURED, 0)
"""What a row of a run has beside."""


def test_recorder_goes_back_to_a_round(tmp_path):
    recorder = Recorder(tmp_path)
    for t in range(1, 6):
        recorder.round({**MORE, **row(t)})
    recorder.close()
    again = Recorder(tmp_path)
    again.resume(3, 10.0)
    assert [r["round"] for r in again.history] == [1, 2, 3]
    assert again.seconds >= 10
    again.round({**MORE, **row(4, 0.9)})
    again.close()
    assert [r["accuracy"] for r in read_history(tmp_path)] == [0.5, 0.5, 0.5, 0.9]
    with pytest.raises(CheckpointError, match="does not contain all"):
        Recorder(tmp_path).resume(5, 0.0)
    assert len(read_history(tmp_path)) == 4, "a refused resume changes nothing"


def test_method_figures_are_in_the_metrics(tmp_path):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Counting(unskew.ServerRule):
        name, summary, paper = "counting", "", ""

        def init(self, v, federation_info):
            return {"v": v, "n": torch.zeros(())}

        def step(self, state, updates):
            return {"v": state["v"] + updates.aggregate.delta, "n": state["n"] + len(updates)}

        def metrics(self, state, round, spec):
            return {"seen": float(state["n"])}

    unskew.run(blobs([6, 6]), model="logistic", method=Counting(), rounds=3, engine="inline", out=tmp_path / "run")
    assert [r["seen"] for r in metrics(tmp_path / "run")] == [2, 4, 6]
    fed = blobs([6, 6])
    longer = unskew.resume(tmp_path / "run", federation=fed, method=Counting(), rounds=4)
    assert longer.history[-1]["seen"] == 8
    assert "method: counting" in (tmp_path / "run/config.yaml").read_text()


# ---- results, tables, figures -----------------------------------------------------------------------------------------


def test_result_gives_history_model_and_summary(tmp_path):
    fed = blobs([6, 9])
    result = unskew.run(fed, model=SmallBatchNorm(), rounds=2, engine="inline", method="fedprox:mu=0.1")
    frame = result.to_pandas()
    assert list(frame["round"]) == [1, 2]
    assert frame["accuracy"].tolist() == [r["accuracy"] for r in result.history]
    assert not result.model.training
    flat = torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])
    assert torch.equal(flat, result.vector)
    x, y = fed.test
    assert (result.model(x).argmax(1) == y).double().mean() == result.summary["accuracy"]
    assert "fedprox:mu=0.1" in repr(result)
    drawn = result.plot(tmp_path / "curve.svg").read_text()
    assert drawn.startswith("<?xml")
    assert result.plot(tmp_path / "curve.svg").read_text() == drawn  # neither a date nor random identifiers
    with pytest.raises(ConfigError, match="no known suffix"):
        result.plot(tmp_path / "curve.xyz")
    assert {path.name for path in tmp_path.iterdir()} == {"curve.svg"}


def test_model_file_is_the_result(tmp_path):
    result = unskew.run(blobs([6, 9]), model=SmallBatchNorm(), rounds=2, engine="inline", out=tmp_path / "run")
    saved = load_file(tmp_path / "run/model.safetensors")
    expected = {n: t for n, t in result.model.state_dict().items() if "num_batches" not in n}
    assert set(saved) == set(expected)
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_comparison_rows_by_hand():
    curves = {"a": [[0.1, 0.6], [0.5, 0.7]], "b": [[0.1, 0.2], [0.9, 0.9]]}
    histories = {
        name: [[row(t, accuracy) for t, accuracy in enumerate(h, 1)] for h in both] for name, both in curves.items()
    }
    summaries = {name: [summary_of(h[-1]) for h in both] for name, both in curves.items()}
    one, two = Comparison(histories, summaries, target=0.5, folder=None).rows()
    assert (one["rounds_to_target"], one["seeds_reaching_target"]) == (1.5, 2)
    assert (two["rounds_to_target"], two["seeds_reaching_target"]) == (None, 1)
    assert one["accuracy"] == pytest.approx(0.65)
    assert one["accuracy_std"] == pytest.approx(np.std([0.6, 0.7], ddof=1))
    text = shown(comparison_table([one, two]))
    for words in ("a", "65.0 ± 7.1", "1.5", "1 of 2 seeds", "rounds to 50.0%"):
        assert words in text
    assert mean_std([0.3]) == (0.3, 0.0)
    assert first_reaching([row(1, None), row(2, 0.4)], 0.4) == row(2, 0.4)


@pytest.mark.parametrize(
    ("sizes", "methods", "weights", "told"),
    [
        ((9, 14), ["fedavg", "scaffold", "fedprox"], "auto", True),
        ((9, 14), ["fedavg", "scaffold"], "uniform", False),
        ((9, 14), ["fedavg", "fedprox"], "auto", False),
        ((9, 9), ["fedavg", "scaffold"], "auto", False),
    ],
)
def test_a_comparison_says_where_its_methods_do_not_count_clients_alike(sizes, methods, weights, told):
    given = {"model": "logistic", "rounds": 1, "seeds": 1, "engine": "inline", "client_weighting": weights}
    compared = unskew.compare(blobs(sizes), methods=methods, **given)
    for note in compared.notes():
        assert "fedavg, fedprox by samples, scaffold equally" in note
    assert len(compared.notes()) == told
    named = {row["method"]: row["client_weighting"] for row in compared.rows()}
    assert named["fedavg"] == ("samples" if weights == "auto" else weights)
    assert named.get("scaffold", "uniform") == "uniform"


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_methods_spelling_is_never_broken_inside_a_word(width):
    names = ["fedssyn:generator=gan-small,epochs=1+scaffold", "feddecorr:beta=0.1"]
    runs = {name: [[row(1, 0.5)]] for name in names}
    ends = {name: [summary_of(0.5)] for name in names}
    text = shown(comparison_table(Comparison(runs, ends, target=0.5, folder=None).rows()), width)
    if "────" not in text:  # there is no room for a table, so each row is a few lines
        assert width < 120
        assert [line for line in text.splitlines() if line in names] == names
        return
    lines = [line.split()[0] for line in text.splitlines() if line[:1] == " " and line[1:2].strip(" ─")]
    assert "".join(lines) == "method" + "".join(names)
    assert all(line[-1] in "+,:" or f"{line}." in f"{'. '.join(['method', *names])}." for line in lines)
    assert width < 200 or lines == ["method", *names]


def test_numbers_are_formatted_for_tables():
    assert [format_megabytes(x) for x in (0, 4_520, 999_000, 1e6, 123_456_789, 2e9)] == [
        "0", "0.0045", "1", "1.0", "123.5", "2,000",
    ]  # fmt: skip
    assert format_percent(None) == "-"
    assert folder_name("fedprox:mu=0.1+scaffold") == "fedprox-mu=0.1+scaffold"
    assert "/" not in folder_name("../a/b")


def test_folder_names_are_short_and_distinct():
    long = [folder_name(f"fedprox:mu=0.{'ä' * 400}{digit}{'1' * 400}+scaffold") for digit in "12"]
    assert all(len(f"{name}.yaml".encode()) < 255 for name in long)
    assert len(set(long)) == 2
    assert all(name.startswith("fedprox-mu=0.ä") and name.endswith("1+scaffold") for name in long)


def test_a_class_may_be_called_like_the_spread_of_another():
    """``a_std`` next to ``a``, in rows, table and page."""
    fed = blobs([9, 14, 11], classes=2)
    fed = replace(fed, class_names=("a", "a_std"))
    options = {"model": "logistic", "rounds": 1, "local_steps": 2, "engine": "inline", "metrics": ["recall"]}
    comparison = unskew.compare(fed, methods=["fedavg"], seeds=2, references=False, **options)
    (line,) = comparison.rows()
    for name in ("a", "a_std"):
        values = [summary[f"recall/{name}"] for summary in comparison.summaries["fedavg"]]
        assert line[f"recall/{name}"] == pytest.approx(np.mean(values))
        assert line[f"recall_std/{name}"] == pytest.approx(np.std(values, ddof=1))
    text = " ".join(shown(metrics_table(comparison.rows()), width=200).split())
    assert "recall of a recall of a_std" in text


def test_tables_of_many_clients_and_classes():
    counts = np.arange(50 * 100).reshape(50, 100)
    text = shown(partition_table(counts, [str(c) for c in range(100)]), width=300)
    assert "20 of 50 clients" in text
    assert str(counts[3].sum()) in text


@pytest.mark.slow
def test_convergence_figure_accepts_short_and_unequal_histories(tmp_path):
    histories = {
        "one round": [[row(1, bytes_up=1, bytes_down=1)]],
        "never evaluated": [[row(1, None, bytes_up=1, bytes_down=1)]],
        "unequal": [[row(t, bytes_up=t, bytes_down=t) for t in (1, 2)], [row(1, bytes_up=1, bytes_down=1)]],
    }
    assert plot_convergence(histories, tmp_path / "deep" / "a.png").stat().st_size > 1000
    plot_clients_by_class(np.ones((200, 120), int), [str(c) for c in range(120)], tmp_path / "b.pdf")
    plot_clients_by_class(np.zeros((1, 1), int), ["only"], tmp_path / "c.png")
    assert {path.name for path in tmp_path.iterdir()} == {"deep", "b.pdf", "c.png"}


def test_rounds_are_whole_numbers_also_on_an_axis():
    """Left to itself, matplotlib marks round 2.5 of five."""
    _, ((axis,),) = new_figure(5, 4)
    axis.plot([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert any(tick != int(tick) for tick in axis.get_xticks())
    set_round_axis(axis)
    assert all(tick == int(tick) for tick in axis.get_xticks())


def test_convergence_is_drawn_over_whole_rounds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_or_return", lambda figure, path: drawn.append(figure))
    plot_convergence({"a": [[row(t, bytes_up=t, bytes_down=t) for t in (1, 2, 3)]]}, tmp_path / "a.png")
    left, _ = drawn[0].axes
    assert left.get_xlabel() == "communication round"
    assert all(tick == int(tick) for tick in left.get_xticks())


def test_convergence_averages_the_same_rounds_of_all_seeds(monkeypatch):
    monkeypatch.setattr(curves, "save_or_return", lambda figure, path: figure)
    seeds = [[(1, 0.1), (2, 0.2), (3, 0.3)], [(1, None), (2, 0.4), (3, 0.7)]]
    figure = plot_convergence({"a": [[row(*entry, bytes_up=1, bytes_down=1) for entry in own] for own in seeds]}, None)
    (line,) = figure.axes[0].lines
    assert [*line.get_xdata()] == [2, 3]
    assert line.get_ydata() == pytest.approx([30, 50])


def test_signs_of_coefficients_are_bars_up_and_down(tmp_path):
    _, ((axis,),) = new_figure(4, 3)
    plot_signs(axis, [1, 3, 5], [2, 4, 1], [1, 0, 5])
    assert all(tick == int(tick) for tick in axis.get_xticks())
    assert [bar.get_height() for bar in axis.patches] == [2, 4, 1, -1, 0, -5]
    assert {bar.get_width() for bar in axis.patches} == {2}
    row = {"round": 1, "coefficients/positive": 3, "coefficients/negative": 2}
    METHOD_PLOTS["feddle"]([row, {"round": 2}], tmp_path)
    assert (tmp_path / "coefficients.png").stat().st_size > 0
    (tmp_path / "b").mkdir()
    METHOD_PLOTS["feddle"]([{"round": 1}], tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())
    assert not (tmp_path / "b.png").exists()


class Hooks(unskew.Callback):
    def __init__(self):
        self.called = []

    def loaded(self, federation):
        self.called.append(("loaded", len(federation.clients)))

    def prepare(self, text, done, total):
        self.called.append(("prepare", text))

    def round(self, row):
        self.called.append(("round", row["round"]))


class Listens(Hooks):
    def warn(self, text):
        self.called.append(("warn", text))


def test_a_callback_overrides_the_hooks_that_it_needs():
    options = {"model": "logistic", "rounds": 1, "engine": "inline", "clients": 2, "max_train_samples": 100, "lr": 0.05}
    method = "fedssyn:generator=vae-small,epochs=1,n_syn=2"
    hooks = Hooks()
    unskew.run(data="digits", method=method, callbacks=[hooks], **options)
    assert hooks.called[0] == ("loaded", 2)
    assert hooks.called[-1] == ("round", 1)
    assert {kind for kind, _ in hooks.called[1:-1]} == {"prepare"}
    silent, listens = Hooks(), Listens()
    with pytest.warns(UserWarning, match="never averages"):
        unskew.run(data="digits", method="fedals", callbacks=[silent], **{**options, "model": "mlp"})
    unskew.run(data="digits", method="fedals", callbacks=[silent, listens], **{**options, "model": "mlp"})
    assert any(kind == "warn" and "never averages" in text for kind, text in listens.called)
