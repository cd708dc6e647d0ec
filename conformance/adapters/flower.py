"""Adapter of Flower: its server strategies, with local steps in NumPy because Flower leaves training to its user.

The loss of FedProx's clients is exactly the one in the docstring of Flower's strategy.
"""

from __future__ import annotations

from importlib.metadata import version as version_of

import numpy as np
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from conformance.papers import Run
from conformance.problem import Array, Case, Trace

REQUIREMENTS = ("flwr",)
METHODS = ("fedavg", "fedprox", "fedavgm", "fedadagrad", "fedyogi", "fedadam")
STRATEGIES = {
    "fedavg": lambda start: FedAvg(),
    "fedprox": lambda start, mu: FedProx(initial_parameters=start, proximal_mu=mu),
    "fedavgm": lambda start, beta: FedAvgM(initial_parameters=start, server_learning_rate=1.0, server_momentum=beta),
    "fedadagrad": lambda start, **given: FedAdagrad(initial_parameters=start, **given),
    "fedyogi": lambda start, eta, tau, beta2: FedYogi(
        initial_parameters=start, eta=eta, tau=tau, beta_1=0.9, beta_2=beta2
    ),
    "fedadam": lambda start, eta, tau, beta2: FedAdam(
        initial_parameters=start, eta=eta, tau=tau, beta_1=0.9, beta_2=beta2
    ),
}


def _with_term(locally: Run, k: int, x: Array, mu: float) -> Array:
    """Return a client's model after steps by autograd on the loss in the docstring of ``FedProx``."""
    inputs, labels = torch.from_numpy(locally.problem.x[k]), torch.from_numpy(locally.problem.y[k])
    w, w_global = torch.from_numpy(np.array(x)).requires_grad_(), torch.from_numpy(np.array(x))
    for _ in range(locally.steps(k)):
        term = (w - w_global).norm(2)
        loss = torch.nn.functional.cross_entropy(inputs @ w.T, labels) + (mu / 2) * term
        (gradient,) = torch.autograd.grad(loss, w)
        w = (w - locally.lr * gradient).detach().requires_grad_()
    return w.detach().numpy()


def run(case: Case) -> Trace:
    """Pass each round's models to the strategy as fit results."""
    locally = Run(case, case.cohorts)
    x, models = locally.start, []
    strategy = STRATEGIES[case.method](ndarrays_to_parameters([x]), **case.options)
    for number, cohort in enumerate(case.cohorts, 1):
        if case.method == "fedprox":
            trained = {k: _with_term(locally, k, x, **case.options) for k in cohort}
        else:
            trained = {k: locally.local(k, x) for k in cohort}
        done = [(k, ndarrays_to_parameters([y])) for k, y in trained.items()]
        results = [(None, FitRes(Status(Code.OK, ""), p, locally.problem.sizes[k], {})) for k, p in done]
        parameters, _ = strategy.aggregate_fit(number, results, [])
        x = parameters_to_ndarrays(parameters)[0]
        models.append(x)
    return Trace(models, case.cohorts)


def version() -> str:
    """Return the version of the library."""
    return version_of("flwr")
