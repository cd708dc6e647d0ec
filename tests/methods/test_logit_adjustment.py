"""FedLC and FedRS against a loop over the papers' formulas, by hand, and in their limits."""

import math
import warnings
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, initial, local, logits, run, skewed
from support.tolerance import TRAINING, assert_close
from torch import nn
from torch.nn.functional import cross_entropy

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.fedcog.fedcog import FedCOG
from unskew.methods.fedetf import FedETF
from unskew.methods.fedlc import FedLC
from unskew.methods.fedrod import FedRoD
from unskew.methods.fedrs import FedRS
from unskew.methods.logit_adjustment import num_single_class

EXACT = 1e-12


def fedlc(z, n, tau=0.7):
    present = n > 0
    return torch.where(present, z - tau * n.clamp_min(1) ** -0.25, torch.tensor(-1e9, dtype=z.dtype))


def fedrs(z, n, alpha=0.3):
    return z * torch.where(n > 0, torch.ones_like(n), alpha)


def fedrs_authors(z, n, alpha=0.3):
    return z * (alpha + (1 - alpha) * n / n.max())


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    ("method", "adjust"),
    [("fedlc:tau=0.7", fedlc), ("fedrs:alpha=0.3", fedrs), ("fedrs:alpha=0.3,form=authors", fedrs_authors)],
)
def test_a_run_is_the_papers_loop(method, adjust, participation):
    fed = skewed()
    result, cohorts = run(method, participation, fed)
    x = initial()[: len(result.vector)]
    for cohort in cohorts:
        ends = {}
        for k, batches in cohort.items():
            counts = torch.bincount(fed.clients[k].y, minlength=CLASSES).double()

            def slope(v, inputs, y, counts=counts):
                return torch.func.grad(lambda v: cross_entropy(adjust(logits(v, inputs), counts), y))(v)

            ends[k] = local(x, batches, slope)
        sizes = {k: fed.clients[k].num_samples for k in ends}
        x = sum(sizes[k] * end for k, end in ends.items()) / sum(sizes.values())
    assert float((result.vector - x).abs().max()) < EXACT


@pytest.mark.parametrize("method", ["fedlc:tau=0", "fedrs:alpha=1"])
def test_neutral_options_are_fedavg_bit_for_bit(method):
    plain, same = run("fedavg")[0], run(method)[0]
    assert torch.equal(same.vector, plain.vector)
    assert [same.summary[key] for key in ("bytes_up", "bytes_down")] == [
        plain.summary[key] for key in ("bytes_up", "bytes_down")
    ]


@pytest.mark.parametrize("method", ["fedlc:tau=2", "fedrs:alpha=0.2"])
def test_equal_counts_of_all_classes_are_fedavg(method):
    fed = skewed((CLASSES, CLASSES), present=CLASSES)
    assert_close(run(method, fed=fed)[0].vector, run("fedavg", fed=fed)[0].vector, TRAINING)
    assert not torch.allclose(run(method)[0].vector, run("fedavg")[0].vector)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (FedLC(tau=2.0), [1 - 2 / 2, 3 - 2, -math.inf]),  # 16 and 1 samples: 16^(-1/4) = 1/2
        (FedRS(alpha=0.25), [1.0, 3.0, 0.5]),
        (FedRS(alpha=0.25, form="authors"), [1.0, 3 * (0.25 + 0.75 / 16), 0.5]),
    ],
)
def test_three_classes_by_hand(rule, expected):
    z, counts = torch.tensor([[1.0, 3.0, 2.0]]).double(), torch.tensor([16.0, 1.0, 0.0]).double()
    assert rule.adjust(z, counts).tolist() == [pytest.approx(expected, rel=1e-15)]


@pytest.mark.parametrize(("rule", "factor"), [(FedLC(), 0.0), (FedRS(alpha=0.4), 0.4)])
def test_the_gradient_of_an_absent_class(rule, factor):
    """None, or ``alpha`` times that of the cross-entropy at the logits of the loss."""
    z = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    counts, y = torch.tensor([3.0, 5.0, 0.0]).double(), torch.tensor([1])
    (slope,) = torch.autograd.grad(cross_entropy(rule.adjust(z, counts), y), z)
    usual = rule.adjust(z, counts).detach().softmax(1)[0, 2]
    assert float(slope[0, 2]) == pytest.approx(factor * float(usual), rel=1e-15, abs=0)


def test_the_authors_form_has_no_bias_in_the_head():
    paper, authors = (run(f"fedrs:form={form}", rounds=1)[0].summary["parameters"] for form in ("paper", "authors"))
    assert paper - authors == CLASSES


def test_the_authors_form_removes_the_bias_of_the_head_that_another_rule_replaces():
    memory = run("fedrs+knnper:capacity=10", rounds=1)[0].summary["parameters"]
    for expression in ("fedrs:form=authors+knnper:capacity=10", "knnper:capacity=10+fedrs:form=authors"):
        assert run(expression, rounds=1)[0].summary["parameters"] == memory - CLASSES


def test_the_authors_form_needs_a_linear_head():
    head = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, CLASSES))
    model = nn.Sequential(OrderedDict(body=nn.Linear(FEATURES, 4), head=head))
    with pytest.raises(ConfigError, match="Use form=paper"):
        FedRS(form="authors").adapt(model, "head")


@pytest.mark.parametrize("rule", [FedLC(tau=2.0), FedRS(alpha=0.2), FedRoD(), FedETF()])
def test_fedcog_scales_the_whole_loss_in_any_order(rule):
    """``w_real`` below 1 leaves no share of the cross-entropy that the rule replaces, which would be negative."""
    cog = FedCOG(start_round=0, n=4, g_steps=1, coefficients="auto")
    for parts in ([rule, cog], [cog, rule]):
        assert unskew.method(parts).client == (rule, cog)


def test_fedcog_and_masked_logits_of_sub_models_are_rejected():
    unskew.method("fedcog+heterofl")
    unskew.method("fedcog:coefficients=auto+heterofl:mask_labels=false")
    with pytest.raises(MethodConflictError, match="coefficients=fixed"):
        unskew.method("fedcog:coefficients=auto+heterofl")


def test_a_loss_with_a_scaled_cross_entropy_is_the_formula_in_any_order():
    """One step of one client: ``w_real CE(adjusted) + w_kd CE(generated)``, with the generated inputs of the rule."""
    fed = skewed(sizes=(9,))
    counts = torch.bincount(fed.clients[0].y, minlength=CLASSES).double()
    cog = "fedcog:start_round=0,n=4,g_steps=0,coefficients=auto,supervision=hard,cycle=by_step"
    w_kd = float((counts.max() - counts).sum() / (counts.max() - counts + counts).sum())
    budget = {"fed": fed, "rounds": 1, "local_steps": 1, "local_epochs": None}
    ends = [run(m, **budget)[0].vector for m in (f"{cog}+fedlc:tau=0.7", f"fedlc:tau=0.7+{cog}")]
    assert torch.equal(*ends)
    plain, cohorts = run(cog, **budget)
    ((x, y),), start = cohorts[0][0], initial()

    def step(adjust):
        return local(start, [(x, y)], torch.func.grad(lambda v, x, y: cross_entropy(adjust(logits(v, x), counts), y)))

    expected = plain.vector + (1 - w_kd) * (step(fedlc) - step(lambda z, n: z))
    assert float((ends[0] - expected).abs().max()) < EXACT


def test_other_rules_that_correct_for_classes_are_refused():
    with pytest.raises(MethodConflictError, match="both change the logits"):
        run("fedlc+fedrs")


@pytest.mark.parametrize("method", ["fedlc", "fedgen", "ccvr", "knnper", "fedgh", "vhl"])
def test_class_weights_are_refused_if_a_rule_trains_the_classifier_without_them(method):
    """Dividing by the weights would make the probabilities wrong."""
    with pytest.raises(ConfigError, match=f"{method} and class_weights cannot be combined"):
        run(method, class_weights="balanced")


@pytest.mark.filterwarnings("ignore:The model did not change")
def test_clients_with_one_class_learn_nothing_and_a_warning_names_their_number():
    """The softmax over the client's only class is 1, so its loss is 0 for any model."""
    single = skewed(present=1)
    with pytest.warns(
        UserWarning, match="4 of 4 clients have samples of one class only, where fedlc's loss is constant"
    ):
        still = run("fedlc", fed=single, momentum=0.0, weight_decay=0.0)[0]
    assert torch.equal(still.vector, initial())
    draws = torch.Generator().manual_seed(1)
    labels = [[0, 0, 0], [0, 1, 1], [2], [3, 3]]
    arrays = [(torch.randn(len(y), FEATURES, generator=draws), torch.tensor(y)) for y in labels]
    mixed = unskew.Federation.from_arrays(arrays, test=arrays[0], classes=CLASSES, holdout=0)
    assert num_single_class(mixed) == num_single_class(replace(mixed, clients=list(mixed.clients))) == 3
    for fed, method in ((skewed(), "fedlc"), (single, "fedlc:tau=0"), (single, "fedrs")):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "[0-9]+ of")
            run(method, fed=fed, rounds=1)
