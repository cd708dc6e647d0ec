"""HetLoRA against a loop over padded factors, against FedAvg, and by hand."""

import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, HIDDEN, OPTIONS, SIZES, run, skewed
from support.lora import RANK, initial, model, train
from support.protocol import an_update, some_updates
from support.running import Stop, StopAfter

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.hetlora import HetLoRA, norm_products
from unskew.models.spec import ModelSpec
from unskew.testing import assert_engines_agree

EXACT = 1e-12
HEAD = CLASSES * (HIDDEN + 1)
pytestmark = pytest.mark.xdist_group("heavy")  # PEFT takes several seconds to import


def tail_norms(a, b, first):
    return a[first:].norm() * b[:, first:].norm()


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    ("ranks", "weighting", "gamma", "lam"),
    [("", "norm", 0.99, 1e-3), ("3/1", "norm", 0.5, 0.3), ("2/1/3", "norm", 0.7, 1.0), ("1/2", "clients", 0.5, 0.3)],
)
def test_a_run_is_the_papers_loop(ranks, weighting, gamma, lam, participation):
    options = f"weighting={weighting},gamma={gamma},lam={lam}" + (f",ranks={ranks}" if ranks else "")
    result, cohorts = run(f"hetlora:{options}", participation, model=model())
    listed = [int(rank) for rank in ranks.split("/")] if ranks else [RANK]
    rank = [listed[k % len(listed)] for k in range(len(SIZES))]
    w, bias, (a, b, *head) = initial()
    for cohort, row in zip(cohorts, result.history, strict=True):
        new_a, new_b, total = torch.zeros_like(a), torch.zeros_like(b), 0.0
        heads = [torch.zeros_like(part) for part in head]
        for k, batches in cohort.items():
            q = max(1, int(gamma * rank[k]))
            start = a[: rank[k]], b[:, : rank[k]]
            own_a, own_b, *own = train(
                w, bias, [*start, *head], batches, lambda a, b, q=q: lam * tail_norms(a, b, q) if len(a) > q else 0.0
            )
            if tail_norms(own_a, own_b, q) < tail_norms(*start, q):
                own_a, own_b, rank[k] = own_a[:q], own_b[:, :q], q
            p = float((own_b @ own_a).norm()) if weighting == "norm" else SIZES[k]
            new_a[: rank[k]] += p * own_a
            new_b[:, : rank[k]] += p * own_b
            total += p
            share = SIZES[k] / sum(SIZES[j] for j in cohort)
            heads = [mean + share * part for mean, part in zip(heads, own, strict=True)]
        most = max(rank[k] for k in cohort)
        a, b, head = a.clone(), b.clone(), heads
        a[:most], b[:, :most] = new_a[:most] / total, new_b[:, :most] / total
        assert row["hetlora_rank"] == sum(rank) / len(rank)
    expected = torch.cat([part.flatten() for part in (a, b, *head)])
    assert float((result.vector - expected).abs().max()) < EXACT
    assert result.summary["client_weighting"] == ("computed" if weighting == "norm" else "samples")
    if lam == 1.0:
        assert result.history[-1]["hetlora_rank"] < 2  # some clients reduced their rank


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_equal_ranks_and_weights_of_the_run_are_fedavg_on_the_factors(participation):
    own, _ = run("hetlora:weighting=clients,gamma=1", participation, model=model())
    plain, _ = run("fedavg", participation, model=model())
    assert float((own.vector - plain.vector).abs().max()) < EXACT


class Scalars(torch.nn.Module):
    """The names of the factors of a layer with one input and one output, of rank 2."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.scaling, self.layer.fan_in_fan_out = {"default": 1.0}, False
        for name, shape in (("lora_A", (2, 1)), ("lora_B", (1, 2))):
            factor = torch.nn.Module()
            factor.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            setattr(self.layer, name, torch.nn.ModuleDict({"default": factor}))
        self.fc = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.fc(x)


def sent(client, delta, pruned=0.0):
    return an_update(client, delta, upload={"hetlora": {"pruned": torch.tensor(pruned, dtype=delta.dtype)}})


@pytest.mark.parametrize(
    ("weighting", "expected"), [("norm", [1.75, 1.5, 2.0, 0.75]), ("clients", [1.5, 1.0, 2.0, 0.5])]
)
def test_the_average_of_two_clients_by_hand(weighting, expected):
    """``A = (2, 2)`` and ``B = (2, 1)`` have the product 6; of rank 1, ``A = 1`` and ``B = 2`` have the product 2."""
    spec = ModelSpec(Scalars(), (1,), 1, "fc", dtype=torch.float64)
    received = torch.tensor([0.5, 3.0, 0.25, 7.0, 0.1, 0.2], dtype=torch.float64)
    trained = torch.tensor([[2.0, 2.0, 2.0, 1.0, 0.3, 0.4], [1.0, 3.0, 2.0, 7.0, 0.5, 0.8]], dtype=torch.float64)
    updates = [sent(k, own - received) for k, own in enumerate(trained)]
    rule, state = HetLoRA(weighting=weighting), {"ranks": torch.tensor([2.0, 1.0], dtype=torch.float64)}
    state, combined = rule.combine(state, some_updates(updates, v=received, spec=spec))
    assert (received + combined.delta).tolist() == pytest.approx([*expected, 0.4, 0.6], abs=EXACT)
    # The first client reduces its rank to 1, so both have the product 4 or 2, and the second component does not change.
    updates[0] = sent(0, trained[0] - received, pruned=1.0)
    state, combined = HetLoRA(gamma=0.5).combine(state, some_updates(updates, v=received, spec=spec))
    assert state["ranks"].tolist() == [1.0, 1.0]
    assert (received + combined.delta).tolist() == pytest.approx([5 / 3, 3.0, 2.0, 7.0, 0.4, 0.6], abs=EXACT)


def test_products_of_zero_are_averaged_with_the_weights_of_the_run():
    spec = ModelSpec(Scalars(), (1,), 1, "fc", dtype=torch.float64)
    received = torch.tensor([0.5, 3.0, 0.0, 0.0, 0.1, 0.2], dtype=torch.float64)
    updates = [sent(k, torch.zeros_like(received)) for k in range(2)]
    state = {"ranks": torch.tensor([2.0, 2.0], dtype=torch.float64)}
    _, combined = HetLoRA().combine(state, some_updates(updates, v=received, spec=spec))
    assert combined.delta.tolist() == pytest.approx([0.0] * 6, abs=EXACT)


def test_the_penalty_has_the_slope_of_its_norms_and_none_at_zero():
    """``||A[1:]|| ||B[:, 1:]||`` is ``|a_1 b_1|`` with one input and one output."""
    spec = ModelSpec(Scalars(), (1,), 1, "fc", dtype=torch.float64)
    tail = torch.tensor([False, True, False, True, False, False])
    penalty, slope = norm_products, torch.func.grad(norm_products, argnums=1)
    v = torch.tensor([5.0, -3.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    assert float(penalty(spec, v, tail)) == pytest.approx(6.0, abs=EXACT)
    assert slope(spec, v, tail).tolist() == pytest.approx([0.0, -2.0, 0.0, 3.0, 0.0, 0.0], abs=EXACT)
    v[3] = 0.0
    assert slope(spec, v, tail).tolist() == [0.0] * 6


def test_traffic_is_that_of_the_components_of_each_rank():
    result, _ = run("hetlora:ranks=3/1,gamma=1", model=model())
    numbers = sum(rank * (FEATURES + HIDDEN) + HEAD for rank in (3, 1, 3, 1))
    assert result.summary["bytes_up"] == OPTIONS["rounds"] * 8 * (numbers + len(SIZES))  # and whether it is reduced
    assert result.summary["bytes_down"] == OPTIONS["rounds"] * 8 * (numbers + len(SIZES))  # and the rank


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("hetlora", {"model": None}, "needs a model with LoRA factors"),
        ("hetlora", {"model": model(freeze_a=True)}, "Remove freeze_a"),
        ("hetlora:ranks=4", {}, "a rank above 3"),
        ("hetlora:ranks=2/0", {}, "positive integers"),
        ("hetlora:gamma=1,lam=0.5", {}, "hetlora:lam has no effect with gamma=1"),
        ("hetlora", {"network": {"delay": "half-normal:2"}}, "all updates of a round in the same round"),
        ("hetlora", {"secure_aggregation": "required"}, "secure_aggregation"),
        (
            "hetlora",
            {"sampling": "power-of-choice:2", "participation": 0.5},
            "clients of hetlora have only a part of it",
        ),
    ],
)
def test_what_does_not_fit_is_rejected(method, options, message):
    with pytest.raises(ConfigError, match=message):
        run(method, **{"model": model(), **options})


@pytest.mark.parametrize(
    "other", ["scaffold", "topk:share=0.5", "ditto", "median", "heterofl", "dpsgd:noise=1", "flora"]
)
def test_compositions_that_need_equal_factors_are_rejected(other):
    with pytest.raises(MethodConflictError):
        unskew.method(f"hetlora+{other}")


def test_a_resumed_run_continues_with_the_reduced_ranks(tmp_path):
    given = {**OPTIONS, "participation": 0.5, "checkpoint_every": 1, "engine": "inline"}
    given["method"] = "hetlora:ranks=3/2,gamma=0.5,lam=1"
    whole = unskew.run(skewed(), model=model(), **given)
    assert whole.history[1]["hetlora_rank"] < 2.5
    with pytest.raises(Stop):
        unskew.run(skewed(), model=model(), out=tmp_path / "run", callbacks=[StopAfter(2)], **given)
    resumed = unskew.resume(tmp_path / "run", federation=skewed(), model=model())
    assert torch.equal(resumed.vector, whole.vector)


@pytest.mark.parametrize("given", [{"engine": "vectorized"}, {"engine": "inline", "clients_per_group": 2}])
def test_engines_agree(given):
    options = {**OPTIONS, "method": "hetlora:ranks=3/1,gamma=0.5,lam=0.3", "precision": "fp64"}
    one = unskew.run(skewed(), model=model(), engine="inline", **options)
    other = unskew.run(skewed(), model=model(), **options, **given)
    assert_engines_agree(other.vector, one.vector)
    assert other.summary["bytes_up"] == one.summary["bytes_up"]
