"""Several labels a sample: loss, divergences and figures against NumPy and scikit-learn, and every method on every engine."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from support.evaluation import shown
from support.fedcog import context
from support.federations import LORA, SMALL_COHORT, small_budget, small_model
from support.multilabel import federation, sample
from support.slow import slow_but
from support.tolerance import FEW, TRAINING, assert_close, near
from torch import nn
from torch.nn import functional as F

import unskew
from unskew.cli.comparison_tables import comparison_table
from unskew.cli.tables import partition_table, summary_table
from unskew.comparison.compare import compare
from unskew.errors import ConfigError, DataError
from unskew.methods.descriptions import describe_method
from unskew.methods.fedcog.fedcog import FedCOG
from unskew.methods.registry import METHODS, rule_class
from unskew.models.spec import ModelSpec
from unskew.protocol.rules import ClientRule
from unskew.simulation.evaluate import Evaluator
from unskew.tasks.classification import NOTHING, Classification, MultiLabel, cross_entropy
from unskew.tasks.registry import TASKS
from unskew.testing import assert_engines_agree

TASK = MultiLabel()
FEDCOG = "fedcog:start_round=1,n=11,g_steps=3,lambda_kd=1,lambda_dis=5"


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def train(method, engine="inline", fed=None, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "participation": 0.5, "precision": "fp64", **options}
    model = small_model(method)
    method = SMALL_COHORT.get(method, method) if isinstance(method, str) else method
    return unskew.run(
        fed or federation(), model=model, method=method, engine=engine, workers=2, **small_budget(method), **given
    )


# ---- the task ---------------------------------------------------------------------------------------------------------


def test_one_step_is_the_gradient_of_the_binary_cross_entropy():
    draws = np.random.default_rng(1)
    x, y = draws.normal(size=(7, 4)), (draws.random((7, 3)) < 0.5).astype(float)
    fed = unskew.Federation.from_arrays([(x, y)], test=(x, y), task="multilabel", holdout=0.0)
    model = nn.Linear(4, 3)
    W, b = (p.detach().numpy().astype(np.float64) for p in (model.weight, model.bias))
    run = unskew.run(fed, model=model, rounds=1, local_steps=1, batch_size=7, lr=0.5, precision="fp64", engine="inline")
    error = (sigmoid(x @ W.T + b) - y) / y.size  # mean over samples and labels
    expected = np.concatenate([(W - 0.5 * error.T @ x).ravel(), b - 0.5 * error.sum(0)])
    assert_close(run.vector.numpy(), expected, TRAINING)
    p = sigmoid(x @ expected[:12].reshape(3, 4).T + expected[12:])
    assert run.summary["loss"] == near(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())
    assert run.summary["accuracy"] == near(((p > 0.5) == y).mean())


def test_divergence_and_disagreement_are_means_over_labels_of_those_of_bernoulli_variables():
    draws = np.random.default_rng(0)
    for t in (1.0, 0.5, 3.0):
        a, b = draws.normal(size=(2, 6, 4)) * 3
        p, q = sigmoid(a / t), sigmoid(b / t)
        m = (p + q) / 2

        def kl(p, q):
            return (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()

        js = 0.5 * kl(p, m) + 0.5 * kl(q, m)
        a, b = torch.tensor(a), torch.tensor(b)
        assert float(TASK.divergence(a, b, t)) == near(kl(p, q))
        assert float(TASK.disagreement(a, b, t)) == near(1 - js)
        assert float(TASK.divergence(a, a, t)) == 0.0
        assert float(TASK.disagreement(a, a, t)) == 1.0


def test_one_label_is_two_classes():
    """Yes or no is a choice between two classes with logits ``z`` and 0."""
    a, b = torch.randn(2, 9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    y = (torch.arange(9) % 2)[:, None]
    two, other = (torch.cat([z, torch.zeros_like(z)], 1) for z in (a, b))
    one_of_two = Classification()
    for name in ("divergence", "disagreement"):
        ours, theirs = (getattr(task, name)(*pair) for task, pair in ((TASK, (a, b)), (one_of_two, (two, other))))
        assert_close(ours, theirs)
    assert_close(TASK.loss(a, y), one_of_two.loss(two, 1 - y[:, 0]))
    assert_close(TASK.probabilities(a)[:, 0], one_of_two.probabilities(two)[:, 0])
    assert torch.equal(TASK.correct(a, y), one_of_two.correct(two, 1 - y[:, 0]))


@pytest.mark.parametrize(
    "task", [TASKS[name] for name in ("classification", "multilabel", "language")], ids=lambda t: t.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_models_have_finite_divergences_and_gradients(task, dtype):
    far = 3000 * torch.eye(4, dtype=dtype) - 1500
    for function in (task.divergence, task.disagreement):
        for other in (far, far.roll(1, 0), -far, torch.zeros_like(far)):
            g, value = torch.func.grad_and_value(lambda z, f=function, o=other: f(o, z))(far)
            assert bool(torch.isfinite(g).all())
            assert math.isfinite(float(value))
    opposite = task.disagreement(far, far.roll(1, 0)) if task.name == "classification" else task.disagreement(far, -far)
    assert float(opposite) == near(1 - math.log(2), FEW, dtype=dtype)


def test_counts_pairs_and_targets():
    y = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.uint8)
    assert TASK.counts(y, 3).tolist() == [3, 2, 1]
    assert TASK.pairs(y, 3).tolist() == [[3, 2, 1], [2, 2, 1], [1, 1, 1]]
    assert TASK.targets(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    one = Classification()
    assert one.pairs(torch.tensor([2, 0, 2]), 3).tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 2]]
    # More samples than a byte can count.
    many = torch.ones(300, 2, dtype=torch.uint8)
    assert TASK.counts(many, 2).tolist() == [300, 300]
    assert TASK.pairs(many, 2).tolist() == [[300, 300], [300, 300]]


# ---- figures ----------------------------------------------------------------------------------------------------------


class Copy(nn.Module):
    """A model whose logits are its inputs: what it predicts is in the data."""

    def __init__(self, labels):
        super().__init__()
        self.fc = nn.Linear(labels, labels, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(labels))

    def forward(self, x):
        return self.fc(x)


def score(x, y, clients=None):
    fed = unskew.Federation.from_arrays(clients or [(x, y)], test=(x, y), task="multilabel", holdout=0.0)
    spec = ModelSpec(Copy(y.shape[1]), fed.shape, fed.classes)
    judge = Evaluator(spec, fed, TASK, torch.device("cpu"))
    return judge, judge.evaluate_test(spec.flatten(), spec.flatten_buffers()), (spec.flatten(), spec.flatten_buffers())


@pytest.mark.parametrize("n", [3, 40, 1203])
def test_figures_equal_those_of_scikit_learn(n):
    from sklearn.metrics import precision_recall_fscore_support

    draws = np.random.default_rng(n)
    y = (draws.random((n, 6)) < [0.9, 0.5, 0.2, 0.05, 0.5, 0.0]).astype(np.uint8)  # the last label is never there
    x = draws.normal(size=(n, 6)).astype(np.float32)
    x[:, 4] = -1  # never predicted
    found = score(x, y)[1]
    predicted = (x > 0).astype(int)
    for average in ("macro", "micro"):
        expected = precision_recall_fscore_support(y, predicted, average=average, zero_division=0)
        names = [f"{average}_{name}" for name in ("precision", "recall", "f1")]
        assert [found.metrics[name] for name in names] == near(expected[:3])
    by_sample = precision_recall_fscore_support(y, predicted, average="samples", zero_division=0)
    assert found.metrics["samples_f1"] == near(by_sample[2])
    assert set(found.metrics) == set(TASK.extra_metrics)
    assert found.accuracy == near((predicted == y).mean())


def test_nothing_predicted_and_nothing_there_is_zero():
    x, y = -np.ones((4, 2), np.float32), np.zeros((4, 2))
    found = score(x, y)[1]
    assert found.metrics == dict.fromkeys(TASK.extra_metrics, 0.0)
    assert found.accuracy == 1.0


def test_clients_are_measured_on_what_they_hold_out_or_not_at_all():
    x, y = np.array([[1.0, -1], [1, 1]], np.float32), np.array([[1, 0], [0, 0]])
    clients = [(x, y, x, y), (x, y, -x, y), (x, y, x[:1], y[:1])]
    judge, _, vector = score(x, y, clients)
    np.testing.assert_allclose(judge.evaluate_clients(*vector, most=10, seed=0).accuracies, [0.5, 0.5, 1.0])
    own = judge.evaluate_clients(*vector, most=10, seed=0, personal_models=lambda clients: [vector] * len(clients))
    np.testing.assert_allclose(own.accuracies, [0.5, 0.5, 1.0])
    judge, _, vector = score(x, y, [(x, y)])
    for given in (None, lambda clients: [vector] * len(clients)):
        none = judge.evaluate_clients(*vector, most=10, seed=0, personal_models=given)
        assert len(none.accuracies) == 0
        assert none.measured_on == "nothing, because no client holds out any samples"


def test_figures_stand_in_rows_summary_and_tables(tmp_path):
    fed = federation(holdout=0.2)
    result = train("fedavg", fed=fed, rounds=4, eval_every=2, out=tmp_path / "run")
    rows, summary = result.history, result.summary
    for name in TASK.extra_metrics:
        assert rows[0][name] is None
        assert rows[3][name] == summary[name]
        assert 0 < summary[name] <= 1
    assert summary["best_micro_f1"] == max(rows[1]["micro_f1"], rows[3]["micro_f1"])
    assert summary["best_macro_f1"] == max(rows[1]["macro_f1"], rows[3]["macro_f1"])
    text = shown(summary_table(summary))
    assert f"C-F1 {100 * summary['macro_f1']:.1f}%, O-F1 {100 * summary['micro_f1']:.1f}%" in text
    both = compare(fed, methods=["fedavg", "ditto"], seeds=2, model="logistic", rounds=1, engine="inline")
    row = both.rows()[0]
    assert row["micro_f1"] == pytest.approx(np.mean([s["micro_f1"] for s in both.summaries["fedavg"]]))
    text = shown(comparison_table(both.rows()))
    assert "O-F1" in text
    assert f"{100 * row['micro_f1']:.1f} ± {100 * row['micro_f1_std']:.1f}" in text


def test_one_class_per_sample_has_no_such_figures():
    result = unskew.run(model="logistic", rounds=1, clients=3, engine="inline")
    assert not {*TASK.extra_metrics, "best_micro_f1"} & {*result.history[0], *result.summary}
    assert "F1" not in shown(summary_table(result.summary))


def test_a_partition_shows_samples_not_labels():
    fed = federation(sizes=(4, 3))
    counts = fed.class_counts()
    expected = [c.y.numpy().sum(0).tolist() for c in fed.clients]
    assert counts.tolist() == expected
    lines = shown(partition_table(counts, ["a", "b", "c"], sizes=fed.sizes)).splitlines()
    assert [line.split()[1:4:2] for line in lines if line.startswith("│")] == [["0", "4"], ["1", "3"]]


# ---- methods ----------------------------------------------------------------------------------------------------------


FITTING = [name for name in METHODS if "multilabel" in describe_method(name)["tasks"]]
AUTHORS = "fedcog-authors:start_round=1,n=11,g_steps=3"
ALL = [*(name for name in FITTING if not name.startswith("fedcog") and name not in LORA), AUTHORS]
BOTH = f"{FEDCOG},cooccurrence=true,double=true+scaffold"


@pytest.mark.parametrize("name", [name for name in METHODS if name not in FITTING])
def test_a_method_for_another_task_refuses(name):
    rule = rule_class(name)
    with pytest.raises(ConfigError, match=f"{rule.name} does not support the task 'multilabel', because "):
        train(name)


@cache
def reference_of(method):
    return train(method, local_epochs=1)


def assert_same_on(engine, method):
    """With one epoch; more of them are a matter of the budget, and not of the task."""
    reference, other = reference_of(method), train(method, engine, local_epochs=1)
    assert_engines_agree(other.vector, reference.vector)
    for mine, theirs in zip(reference.history, other.history, strict=True):
        assert mine["micro_f1"] == near(theirs["micro_f1"])
        assert mine["train_loss"] == near(theirs["train_loss"], TRAINING)


@pytest.mark.parametrize("method", slow_but(["feddf"], [*ALL, FEDCOG, BOTH]))
def test_the_vectorized_engine_gives_the_same_vector(method):
    """By default the methods that ask the task for something: a loss, a divergence, labels, predictions."""
    assert_same_on("vectorized", method)


@pytest.mark.parametrize("method", slow_but(["scaffold"], [*ALL, FEDCOG, BOTH]))
def test_processes_give_the_same_vector(method):
    assert_same_on("processes", method)


def test_refusals_name_the_part_and_come_before_any_training(tmp_path):
    @dataclass(frozen=True)
    class Softmax(ClientRule):
        name, summary, paper = "softmax", "for tests", "none"
        needs, tasks_reason = ("one_class",), "it divides by a softmax"

    sentence = (
        "softmax does not support the task 'multilabel', because it divides by a softmax. Supported tasks: classif"
    )
    with pytest.raises(ConfigError, match=sentence):
        train([Softmax(), "fedavgm"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    trained = []
    with pytest.raises(ConfigError, match="fedreg does not support"):
        compare(
            federation(), methods=["fedavg", "fedreg+fedavgm"], model="logistic", rounds=1,
            callback_factory=lambda *run: trained.append(run) or [],
        )  # fmt: skip
    assert trained == []


@pytest.mark.slow
def test_labels_learned_together_beat_chance():
    result = train("scaffold", fed=federation((60, 60, 60, 60), holdout=0.1), rounds=8, participation=1.0, lr=0.1)
    assert result.summary["macro_f1"] > 0.75
    assert result.summary["macro_f1"] > result.history[0]["macro_f1"] + 0.1


# ---- FedCOG -----------------------------------------------------------------------------------------------------------


def fedcog_context(rule, pairs, key=11):
    torch.manual_seed(0)
    spec = unskew.ModelSpec(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), (2, 6, 6), 3, dtype=torch.float64)
    pairs = torch.tensor(pairs, dtype=torch.float64)
    ctx = context(rule, spec, counts=pairs.diagonal().tolist())
    return replace(ctx, task=TASK, client_info={**ctx.client_info, "pairs": pairs}, key=torch.tensor(key))


def test_targets_are_one_hot_by_default():
    rule = FedCOG(n=9, g_steps=1, labels="complementary")
    y = rule.begin(fedcog_context(rule, [[9, 2, 0], [2, 6, 0], [0, 0, 3]]))["y"]
    # The deficits are 0, 3 and 6.
    assert y.tolist() == [[0, 1, 0]] * 3 + [[0, 0, 1]] * 6


def test_further_labels_come_with_the_rates_of_the_client():
    rule = FedCOG(n=3000, g_steps=0, cooccurrence=True)
    # Label 0 always comes with 1, 1 with 0 in half of its samples; 2 has no sample here.
    y = rule.begin(fedcog_context(rule, [[4, 4, 0], [4, 8, 0], [0, 0, 0]]))["y"].double()
    assert y[:1000].mean(0).tolist() == [1, 1, 0]
    assert y[1000:2000].mean(0)[1:].tolist() == [1, 0]
    assert float(y[1000:2000, 0].mean()) == pytest.approx(0.5, abs=0.05)
    assert y[2000:].mean(0).tolist() == [0, 0, 1]
    again, other = (rule.begin(fedcog_context(rule, [[4, 4, 0], [4, 8, 0], [0, 0, 0]], key=k))["y"] for k in (11, 12))
    assert torch.equal(again, y.to(again.dtype))
    assert not torch.equal(again, other)


def test_synthesis_and_supervision_follow_the_labels():
    soft = FedCOG(n=30, g_steps=150, g_lr=0.1)
    ctx = fedcog_context(soft, [[5, 1, 0], [1, 5, 0], [0, 0, 5]])
    made = soft.begin(ctx)
    predicted = ctx.spec.forward(ctx.v_global, ctx.b_global, made["x"]).logits > 0
    assert torch.equal(predicted, made["y"] > 0)
    batch = unskew.Batch(torch.zeros(30, 2, 6, 6, dtype=torch.float64), None, ctx.key, torch.tensor(0))
    v = ctx.v_global + 0.1
    logits = ctx.spec.forward(v, ctx.b_global, made["x"]).logits.numpy()
    q, y = sigmoid(logits), made["y"].numpy()
    hard = FedCOG(n=30, supervision="hard", lambda_kd=1.0).loss(lambda v, batch: v.sum() * 0, ctx, made | {"w_kd": 1.0})
    expected = -(y * np.log(q) + (1 - y) * np.log(1 - q)).mean()
    assert float(hard(v, batch)) == near(expected, TRAINING)
    p, q = sigmoid(made["z"].numpy() / 2), sigmoid(logits / 2)
    expected = 4 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    soft = FedCOG(n=30, t=2.0).loss(lambda v, batch: v.sum() * 0, ctx, made | {"w_kd": 1.0})
    assert float(soft(v, batch)) == near(expected, TRAINING)


def test_the_authors_divergence_for_bernoulli_variables():
    rule = FedCOG(js="reversed_clamped", t_js=2.0)
    a, b = np.random.default_rng(0).normal(size=(2, 5, 3)) * 6
    p, q = ([np.stack([sigmoid(z / 2), sigmoid(-z / 2)])] for z in (a, b))
    p, q, m = (np.clip(d, 0.01, 0.99) for d in (p[0], q[0], (p[0] + q[0]) / 2))
    js = 0.5 * ((m * np.log(m / q)).sum(0).mean() + (m * np.log(m / p)).sum(0).mean())
    found = float(rule.disagreement(TASK, torch.tensor(a), torch.tensor(b)))
    assert found == near(1 - np.clip(js, 0, 1))


def test_a_client_without_any_label_trains_as_usual():
    w_real, w_kd = FedCOG(coefficients="auto").weights_of(torch.zeros(3))
    assert (float(w_real), float(w_kd)) == (1.0, 0.0)
    draws = np.random.default_rng(0)
    x, y = sample(12, draws)
    fed = unskew.Federation.from_arrays([(x, y), (x, 0 * y)], test=(x, y), task="multilabel", holdout=0.0)
    method = "fedcog:start_round=0,n=6,g_steps=2,coefficients=auto,labels=complementary,cooccurrence=true"
    assert torch.isfinite(train(method, fed=fed, participation=1.0).vector).all()


def test_cooccurrence_needs_several_labels():
    with pytest.raises(ConfigError, match="here each sample has one class"):
        unskew.run(method="fedcog:cooccurrence=true", model="logistic", rounds=1, clients=2, engine="inline")


# ---- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int64, np.float32, np.float64])
def test_labels_may_be_of_any_type(kind):
    x, y = sample(9, np.random.default_rng(0))
    fed = unskew.Federation.from_arrays([(x, y.astype(kind))], test=(x, y.astype(kind)), task="multilabel", holdout=0.0)
    assert fed.classes == 3
    assert fed.clients[0].y.dtype == torch.uint8
    np.testing.assert_array_equal(np.sort(fed.clients[0].y.numpy(), 0), np.sort(y, 0))


def test_arrays_that_do_not_fit_the_task():
    x, y = sample(6, np.random.default_rng(0))

    def refused(clients, sentence, test=(x, y), **options):
        with pytest.raises(DataError, match=sentence):
            unskew.Federation.from_arrays(clients, test=test, **{"task": "multilabel", **options})

    refused([(x, y[:, 0])], r"client 0 have shape \(6,\). Multi-label data require \[n, labels\]")
    refused([(x, y * 2)], "client 0 must be 0 or 1")
    refused([(x, np.where(y > 0, np.nan, 0))], "client 0 must be 0 or 1")
    refused([(x, y), (x, y[:, :2])], "client 1 have 2 columns, but there are 3 labels")
    refused([(x, y)], "the test set have 2 columns, but there are 3 labels", test=(x, y[:, :2]))
    refused([(x, y)], "client 0 have 3 columns, but there are 4 labels", classes=4)
    refused([(x, y, x, y[:, :2])], "Client 0 has 3 labels in its training data, but 2 in its test data")
    refused(
        [(x, y)],
        r"expected one class index per sample. For several labels per sample, set task=",
        task="classification",
    )
    refused([(x, y)], "no task 'multi'. Did you mean 'multilabel'", task="multi")


@pytest.mark.parametrize(
    ("reduction", "weights"), [("mean", None), ("sum", None), ("none", None), ("none", (0.5, 2.0, 1.0))]
)
def test_the_mapped_cross_entropy_and_its_gradient_are_those_of_pytorch_for_each_client(reduction, weights):
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 3, generator=draws, dtype=torch.float64)
    y = torch.randint(0, 3, (4, 6), generator=draws)
    ignored = {}
    if reduction == "sum":
        y[0, 1], ignored = NOTHING, {"ignore_index": NOTHING}
    w = None if weights is None else torch.tensor(weights, dtype=torch.float64)

    def mapped(logits, y):
        return cross_entropy(logits, y, w, reduction).sum()

    def alone(logits, y):
        return F.cross_entropy(logits, y, w, reduction=reduction, **ignored).sum()

    slopes, losses = torch.func.vmap(torch.func.grad_and_value(mapped))(logits, y)
    for k in range(4):
        slope, loss = torch.func.grad_and_value(alone)(logits[k], y[k])
        assert_close(losses[k], loss, FEW)
        assert_close(slopes[k], slope, FEW)
