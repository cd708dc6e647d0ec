"""FedSOL against a loop over the paper's formula, and in its limits."""

from functools import partial

import pytest
import torch
from support import batch_loop
from support.batch_loop import CLASSES, FEATURES, average, initial, local, logits, loss, skewed, two_layers
from torch import nn

from unskew.errors import MethodConflictError
from unskew.methods.fedsol import column_numbers, normalized_over_rows
from unskew.methods.registry import method
from unskew.models.spec import ModelSpec

EXACT = 1e-12
RHO, TAU = 0.8, 2.0
slope = torch.func.grad(loss)
run = partial(batch_loop.run, outermost=True)
"""The recorder sees the batches of steps, not those of second gradients."""


def by_columns(change):
    """``|change|`` of the linear classifier, normalized over the classes: a column of weights, and the biases."""
    w, b = change[: CLASSES * FEATURES].view(CLASSES, FEATURES).abs(), change[CLASSES * FEATURES :].abs()
    columns = [w[:, j] / max(float(w[:, j].norm()), 1e-12) for j in range(FEATURES)]
    return torch.cat([torch.stack(columns, 1).flatten(), b / max(float(b.norm()), 1e-12)])


def perturbed(v, start, x, y, form):
    """The gradient of a step; the gradient of the divergence of a linear model is written out."""
    if torch.equal(v, start):
        return slope(v, x, y)
    apart = ((logits(v, x) / TAU).softmax(1) - (logits(start, x) / TAU).softmax(1)) / (TAU * len(x))
    r = torch.cat([(apart.T @ x).flatten(), apart.sum(0)])
    e = RHO * r / r.norm()
    return slope(v + (e * by_columns(v - start) if form == "adaptive" else e), x, y)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("form", ["adaptive", "fixed"])
def test_a_run_is_the_papers_loop(form, participation):
    result, cohorts = run(f"fedsol:rho={RHO},tau={TAU},form={form}", participation)
    v, fed = initial(), skewed()
    for cohort in cohorts:
        ends = {k: local(v, batches, lambda u, x, y, v=v: perturbed(u, v, x, y, form)) for k, batches in cohort.items()}
        v = average(fed, ends)
    assert float((result.vector - v).abs().max()) < EXACT


def test_without_radius_and_in_the_first_step_it_is_fedavg():
    assert torch.equal(run("fedsol:rho=0")[0].vector, run("fedavg")[0].vector)
    for form in ("adaptive", "fixed"):
        one, other = (
            run(m, rounds=1, local_epochs=None, local_steps=1, batch_size=100, model=two_layers())[0].vector
            for m in (f"fedsol:form={form}", "fedavg")
        )
        assert torch.equal(one, other)
    assert not torch.allclose(run("fedsol")[0].vector, run("fedavg")[0].vector)


def test_the_perturbation_raises_the_divergence_from_the_received_model():
    torch.manual_seed(0)
    start = initial()
    v = start + 0.3 * torch.randn_like(start)
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    p, q = ((logits(u, x) / TAU).softmax(1) for u in (start, v))
    apart = (q - p) / (TAU * len(x))
    r = torch.cat([(apart.T @ x).flatten(), apart.sum(0)])
    e = 0.1 * by_columns(v - start) * r / r.norm()

    def divergence(u):
        return float((p * (p.log() - (logits(u, x) / TAU).log_softmax(1))).sum(1).mean())

    assert divergence(v + e) > divergence(v) > 0


def test_changes_are_normalized_over_the_first_axis_of_every_parameter():
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4))
    spec = ModelSpec(module, (2, 2, 2), 4, dtype=torch.float64)
    change = torch.randn(spec.size, dtype=torch.float64)
    found = spec.parameters(normalized_over_rows(change, *column_numbers(spec)))
    for name, part in spec.parameters(change).items():
        assert torch.allclose(found[name], nn.functional.normalize(part.abs(), dim=0), rtol=1e-14, atol=0)
    assert not normalized_over_rows(torch.zeros_like(change), *column_numbers(spec)).any()


def test_it_sends_the_model_only():
    summary = run("fedsol", 0.5)[0].summary
    assert summary["bytes_down"] == summary["bytes_up"] == 4 * 2 * len(initial()) * 8


def test_sample_privacy_is_rejected():
    with pytest.raises(MethodConflictError, match="fedsol may use a batch for more than one gradient"):
        method("fedsol+dpsgd:noise=1")
