"""FedCOG: what it makes, whom it distils from, and the identities of its specification."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from support.fedcog import context, other_vector, small_net, train
from support.federations import LORA, QUICK, SmallBatchNorm
from support.slow import slow_but
from support.tolerance import FEW, MAGNIFIED, TRAINING, assert_close, near, tolerance
from torch import nn

import unskew
from unskew.generators.labels import allocate_counts, labels_from_counts
from unskew.generators.learned.inversion import minimize, statistics_distance
from unskew.methods.fedcog.fedcog import FedCOG, kl
from unskew.methods.own_models import OwnModels
from unskew.methods.registry import METHODS, rule_class
from unskew.protocol.method import class_slots
from unskew.seeding import fold
from unskew.tasks.classification import Classification
from unskew.testing import assert_engines_agree


@pytest.fixture
def spec():
    return unskew.ModelSpec(small_net(0), (2, 6, 6), 3, dtype=torch.float64)


def test_complementary_allocation_of_the_papers_example():
    counts = torch.tensor([500.0, 0.0, 400.0, 200.0, 400.0])
    assert allocate_counts(counts.max() - counts, 1000).tolist() == [0, 500, 100, 300, 100]
    rule = FedCOG(n=1000, labels="complementary")
    assert torch.bincount(rule.targets(counts), minlength=5).tolist() == [0, 500, 100, 300, 100]
    assert torch.bincount(FedCOG(n=256).targets(torch.ones(10)), minlength=10).tolist() == [26] * 6 + [25] * 4
    balanced = FedCOG(n=10, labels="complementary").targets(torch.full((5,), 7.0))
    assert torch.bincount(balanced).tolist() == [2] * 5


def test_allocation_always_sums_to_the_total():
    draws = np.random.default_rng(0)
    for _ in range(200):
        shares = torch.tensor(draws.integers(0, 50, size=draws.integers(1, 12)).astype(float))
        if shares.sum() == 0:
            continue
        total = int(draws.integers(1, 500))
        counts = allocate_counts(shares, total)
        assert int(counts.sum()) == total
        assert bool((counts - total * shares / shares.sum()).abs().max() < 1)
        assert torch.equal(torch.bincount(labels_from_counts(counts, total), minlength=len(shares)), counts)


def test_auto_coefficients_follow_the_class_counts():
    counts = torch.zeros(10)
    counts[:2] = 30
    w_real, w_kd = FedCOG(coefficients="auto").weights_of(counts)
    assert (float(w_real), float(w_kd)) == pytest.approx((0.2, 0.8))
    assert FedCOG(coefficients="auto").weights_of(torch.full((4,), 5.0)) == (1.0, 0.0)
    assert [float(w) for w in FedCOG().weights_of(counts)] == pytest.approx([1.0, 0.01])


def test_the_divergence_is_bounded_and_one_where_the_models_coincide():
    draws = np.random.default_rng(0)
    task = Classification()
    logits = torch.tensor(draws.normal(size=(8, 5)) * 3)
    assert float(task.disagreement(logits, logits)) == 1.0
    far = torch.eye(5, dtype=torch.float64) * 2000
    assert float(task.disagreement(far, far.roll(1, 0))) == near(1 - math.log(2))
    for _ in range(20):
        p, q = (torch.softmax(torch.tensor(draws.normal(size=(6, 4)) * 4), -1) for _ in range(2))
        value = float(FedCOG().disagreement(task, p.log(), q.log()))
        a, b = p.numpy(), q.numpy()
        m = (a + b) / 2
        js = 0.5 * (a * np.log(a / m)).sum(1).mean() + 0.5 * (b * np.log(b / m)).sum(1).mean()
        assert value == near(1 - js)
        assert 1 - math.log(2) <= value <= 1
        assert float(kl(p, q)) == near((a * np.log(a / b)).sum(1).mean())
        assert float(task.divergence(p.log(), q.log())) == near(float(kl(p, q)))


def test_adam_on_inputs_equals_torch_and_the_best_pair_belongs_together():
    target = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def objective(x, t):
        # It worsens at the end, so the best step is not the last.
        loss = (x - target).square().sum() * (1 if t < 30 else 50)
        return loss, 3 * x

    start = torch.zeros(3, dtype=torch.float64)
    best, kept = minimize(start, objective, 40, 0.05)
    theirs = nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([theirs], 0.05, (0.5, 0.9))
    losses, points = [], []
    for t in range(40):
        points.append(theirs.detach().clone())
        loss = objective(theirs, t)[0]
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_close(best, points[int(np.argmin(losses))], MAGNIFIED)
    assert_close(kept, 3 * best)
    last, _ = minimize(start, objective, 40, 0.05, last=True)
    assert_close(last, theirs.detach(), MAGNIFIED)
    same, there = minimize(start, objective, 0, 0.05)
    assert torch.equal(same, start)
    assert torch.equal(there, 3 * start)


def test_synthesis_satisfies_the_global_model_and_disagrees_with_the_previous_one(spec):
    rule = FedCOG(n=30, g_steps=200, lambda_dis=1.0)
    previous = other_vector(spec)
    made = rule.begin(context(rule, spec, previous=previous))
    teacher = spec.forward(spec.flatten(), spec.flatten_buffers(), made["x"]).logits
    student = spec.forward(previous, spec.flatten_buffers(), made["x"]).logits
    assert_close(made["z"], teacher)
    assert bool((teacher.argmax(1) == made["y"]).double().mean() > 0.95)
    alone = FedCOG(n=30, g_steps=200, lambda_dis=1.0, source="global")
    without = alone.begin(context(alone, spec, previous=previous))
    there = spec.forward(previous, spec.flatten_buffers(), without["x"]).logits
    both, one = Classification().disagreement(teacher, student), Classification().disagreement(without["z"], there)
    assert float(both) < float(one) - 0.05


def test_batches_of_inputs_are_learned_by_themselves(spec):
    """Each as a generation of its own with its labels; of one batch that holds all, the same bits as without."""
    labels = torch.arange(10) % 3
    rule = FedCOG(n=10, g_steps=3, g_batch=4)
    ctx = context(rule, spec, previous=other_vector(spec))
    x, z = rule.in_batches(ctx, labels, ctx.key)
    for i, part in enumerate(labels.split(4)):
        alone = FedCOG(n=len(part), g_steps=3).synthesize(ctx, part, fold(fold(ctx.key, 11), i))
        assert torch.equal(x[4 * i : 4 * i + 4], alone[0])
        assert torch.equal(z[4 * i : 4 * i + 4], alone[1])
    whole = FedCOG(n=10, g_steps=3).synthesize(ctx, labels, ctx.key)
    for size in (0, 10, 99):
        assert torch.equal(FedCOG(n=10, g_steps=3, g_batch=size).in_batches(ctx, labels, ctx.key)[0], whole[0])


def test_a_client_that_never_trained_learns_without_disagreement(spec):
    rule, alone = FedCOG(n=12, g_steps=5), FedCOG(n=12, g_steps=5, lambda_dis=0.0)
    never = rule.begin(context(rule, spec))
    torch.testing.assert_close(never["x"], alone.begin(context(alone, spec, previous=other_vector(spec)))["x"])
    stale = FedCOG(n=12, g_steps=5, max_prev_age=3)
    old = context(stale, spec, previous=other_vector(spec))
    old.state["round"] = torch.tensor(10.0)
    torch.testing.assert_close(stale.begin(old)["x"], never["x"])
    fresh = stale.begin(context(stale, spec, previous=other_vector(spec)))["x"]
    assert not torch.allclose(fresh, never["x"])


def test_noise_source_and_hard_labels(spec):
    noise = FedCOG(n=9, source="noise").begin(context(FedCOG(), spec, previous=other_vector(spec)))
    assert abs(float(noise["x"].mean())) < 0.1
    assert abs(float(noise["x"].std()) - 1) < 0.1
    rule = FedCOG(n=9, g_steps=2, supervision="hard", lambda_kd=1.0)
    ctx = context(rule, spec)
    carry = rule.begin(ctx)
    batch = unskew.Batch(torch.zeros(9, 2, 6, 6, dtype=torch.float64), None, ctx.key, torch.tensor(0))
    v = other_vector(spec)
    value = rule.loss(lambda u, batch: u.sum() * 0, ctx, carry)(v, batch)
    expected = nn.functional.cross_entropy(spec.forward(v, ctx.b_global, carry["x"]).logits, carry["y"])
    assert float(value) == near(float(expected))


def test_distillation_is_zero_at_the_teacher_and_pulls_towards_it_elsewhere(spec):
    rule = FedCOG(n=10, g_steps=3, lambda_kd=1.0, cycle="by_step")
    ctx = context(rule, spec)
    carry = rule.begin(ctx)
    loss_fn = rule.loss(lambda u, batch: u.sum() * 0, ctx, carry)
    batch = unskew.Batch(torch.zeros(4, 2, 6, 6, dtype=torch.float64), None, ctx.key, torch.tensor(2))
    g, value = torch.func.grad_and_value(loss_fn)(ctx.v_global, batch)
    assert abs(float(value)) < tolerance(FEW)
    assert float(g.abs().max()) < tolerance(FEW)
    away = other_vector(spec)
    g, value = torch.func.grad_and_value(loss_fn)(away, batch)
    assert float(loss_fn(away - 0.1 * g, batch)) < float(value)
    # Batches of 4 from 10 inputs, step 2: rows 8, 9, 0, 1.
    rows = [8, 9, 0, 1]
    student = spec.forward(away, ctx.b_global, carry["x"][rows]).logits
    assert float(value) == near(float(Classification().divergence(carry["z"][rows], student)))


def test_statistics_distance_equals_the_formula():
    torch.manual_seed(0)
    module = SmallBatchNorm(dropout=0.0)
    module.norm.running_mean.normal_()
    module.norm.running_var.uniform_(0.5, 2)
    spec = unskew.ModelSpec(module, (2, 6, 6), 3, dtype=torch.float64)
    x = torch.randn(7, 2, 6, 6, dtype=torch.float64)
    output, found = statistics_distance(spec, spec.flatten(), spec.flatten_buffers(), x)
    inner = spec.load(spec.flatten(), spec.flatten_buffers()).conv(x).detach().numpy()
    mean, var = inner.mean((0, 2, 3)), inner.var((0, 2, 3))
    stored = spec.buffers(spec.flatten_buffers())
    expected = np.linalg.norm(stored["norm.running_mean"] - mean) + np.linalg.norm(stored["norm.running_var"] - var)
    assert float(found) == near(expected, TRAINING)
    assert not spec.module.norm._forward_pre_hooks
    torch.testing.assert_close(output.logits, spec.forward(spec.flatten(), spec.flatten_buffers(), x).logits)


# FedDM's clients train no model that generated inputs could teach, Center has no clients, dpsgd does not protect what FedCOG
# reads, and the full gradient of Mime lacks FedCOG's term.
HOSTS = [
    name
    for name in METHODS
    # The server of methods that exchange no model has the initial one, and others need one with LoRA factors.
    if rule_class(name).name not in ("fedcog", "center", "feddm", "dpsgd", "mime", "mimelite", *LORA)
    and not issubclass(rule_class(name), OwnModels)
    and class_slots(rule_class(name)) != ["data"]
]
CHEAPER = {
    **QUICK,
    "fedbuff": "fedbuff:buffer_size=2",
    "ca2fl": "ca2fl:buffer_size=2",
    "fedreg": "fedreg:iterations=1",
}
BYTES = ("bytes_up", "bytes_down", "buffer_bytes_up", "buffer_bytes_down")


SHORT = {"local_epochs": 1, "eval_clients": 0}


@cache
def reference_of(host):
    """Return the run of FedCOG with a host on the inline engine."""
    return train(f"fedcog:start_round=0,n=8,g_steps=2,lambda_kd=1+{CHEAPER.get(host, host)}", **SHORT)


@pytest.mark.parametrize("host", slow_but(["scaffold", "fedbuff"], HOSTS))
def test_fedcog_is_its_host_before_the_start_round(host):
    """Before its first round it is the host exactly; after, the wire carries the host's bytes."""
    reference = reference_of(host)
    host, short = CHEAPER.get(host, host), SHORT
    plain, never = train(host, **short), train(f"fedcog:start_round=99+{host}", **short, base_run=True)
    assert torch.equal(never.vector, plain.vector)
    assert not torch.allclose(reference.vector, plain.vector)
    for name in BYTES:
        assert plain.summary[name] == never.summary[name] == reference.summary[name], name
    for before, after in zip(plain.history, reference.history, strict=True):
        assert (before["bytes_up"], before["bytes_down"]) == (after["bytes_up"], after["bytes_down"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "vectorized"])
@pytest.mark.parametrize("host", HOSTS)
def test_with_every_host_all_engines_agree(host, engine):
    method = f"fedcog:start_round=0,n=8,g_steps=2,lambda_kd=1+{CHEAPER.get(host, host)}"
    reference, other = reference_of(host), train(method, engine=engine, **SHORT)
    assert_engines_agree(other.vector, reference.vector)
    assert [other.summary[name] for name in BYTES] == [reference.summary[name] for name in BYTES]


@pytest.mark.slow
def test_variants_run_and_differ():
    variants = ["labels=complementary", "coefficients=auto", "js=reversed_clamped", "alias=true", "double=true", "t=3",
                "t_js=2", "lambda_bn=1", "source=global", "source=noise", "supervision=hard"]  # fmt: skip
    base = "fedcog:start_round=1,n=12,g_steps=3,lambda_kd=1,lambda_dis=5"
    short = {"rounds": 2, "eval_clients": 0, "local_epochs": 1}
    idle = {"coefficients=auto": ",lambda_kd=1", "source=global": ",lambda_dis=5", "source=noise": ",lambda_dis=5"}
    vectors = {o: train(f"{base.replace(idle.get(o, ' '), '')}{o and ','}{o}", **short).vector for o in ["", *variants]}
    for one in vectors:
        for other in vectors:
            assert one == other or not torch.equal(vectors[one], vectors[other]), (one, other)


def test_defaults_are_those_of_the_paper():
    rule = FedCOG()
    assert (rule.n, rule.g_steps, rule.start_round, rule.lambda_ce, rule.lambda_dis) == (256, 100, 50, 1.0, 0.1)
    assert (rule.lambda_kd, rule.labels, rule.coefficients, rule.g_lr) == (0.01, "uniform", "fixed", 0.01)
