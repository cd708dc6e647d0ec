"""Constants that outlive the transform in which they are first needed."""

import torch

from unskew.functorch_api import constant, is_mapped


def test_a_constant_of_a_transform_outlives_it():
    values = (1.0, 2.5, 4.0)

    def weighted(x):
        return (constant(values, x) * x).square().sum()

    x = torch.arange(6, dtype=torch.float64).view(2, 3)
    expected = 2 * torch.tensor(values, dtype=torch.float64).square() * x
    for _ in range(2):
        assert torch.equal(torch.func.vmap(torch.func.grad(weighted))(x), expected)
    assert constant(values, x) is constant(values, x)
    assert not is_mapped(constant(values, x))
    leaf = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(weighted(leaf), leaf)[0], expected)


def test_a_constant_has_the_type_of_the_other_tensor():
    assert constant((0.1,), torch.zeros(2)).dtype == torch.float32
    assert constant((0.1,), torch.zeros(2, dtype=torch.float64)).dtype == torch.float64
    with torch.inference_mode():
        constant((0.2,), torch.zeros(1))
    assert not constant((0.2,), torch.zeros(1)).is_inference()
