"""FedACG against a loop over the paper's formulas, and in its limits."""

import pytest
import torch
from support.batch_loop import initial, local, loss, run

from unskew.errors import MethodConflictError
from unskew.methods.registry import method

EXACT = 1e-12
MU, BETA = 0.3, 0.6
slope = torch.func.grad(loss)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_is_the_papers_loop(participation):
    result, cohorts = run(f"fedacg:mu={MU},beta={BETA}", participation)
    theta = initial()
    m = torch.zeros_like(theta)
    for cohort in cohorts:
        phi = theta + BETA * m

        def direction(v, x, y, phi=phi):
            return slope(v, x, y) + MU * (v - phi)

        theta = torch.stack([local(phi, batches, direction) for batches in cohort.values()]).mean(0)
        m = BETA * m + theta - phi
    assert float((result.vector - theta).abs().max()) < EXACT


def test_the_first_round_is_fedprox_and_later_rounds_are_not():
    fedacg, fedprox = (
        run(name, client_weighting="uniform", rounds=1)[0].vector for name in (f"fedacg:mu={MU}", f"fedprox:mu={MU}")
    )
    assert torch.equal(fedacg, fedprox)
    fedacg, fedprox = (
        run(name, client_weighting="uniform", rounds=2)[0].vector for name in (f"fedacg:mu={MU}", f"fedprox:mu={MU}")
    )
    assert not torch.allclose(fedacg, fedprox)


def test_without_momentum_it_is_fedprox():
    fedacg = run(f"fedacg:mu={MU},beta=0")[0].vector
    fedprox = run(f"fedprox:mu={MU}", client_weighting="uniform")[0].vector
    assert float((fedacg - fedprox).abs().max()) < EXACT


def test_the_broadcast_models_are_those_of_fedprox_and_fedavgm():
    """After the last step of equal momenta, the two differ by ``beta m``, so the losses of training are equal."""
    fedacg = run(f"fedacg:mu={MU},beta={BETA}", 0.5)[0]
    other = run(
        [f"fedprox:mu={MU}", f"fedavgm:beta={BETA},nesterov=true"], 0.5, client_weighting="uniform"
    )[0]  # fmt: skip
    for ours, theirs in zip(fedacg.history, other.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-12)
    assert not torch.allclose(fedacg.vector, other.vector)


def test_it_sends_the_model_only():
    summary = run("fedacg", 0.5)[0].summary
    assert summary["bytes_down"] == summary["bytes_up"] == 4 * 2 * summary["parameters"] * 8


def test_it_combines_with_client_rules_but_not_with_a_second_momentum():
    assert [rule.name for rule in method("fedacg+scaffold").client] == ["fedacg", "scaffold"]
    with pytest.raises(MethodConflictError, match="slot 'server'"):
        method("fedacg+fedavgm")
