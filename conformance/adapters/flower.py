"""Flower's strategies at the server; local steps are NumPy's, as the library leaves training to its user."""

from __future__ import annotations

from importlib.metadata import version as version_of

from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

from conformance.papers import Run
from conformance.problem import Case, Trace

REQUIREMENTS = ("flwr",)
METHODS = ("fedavg", "fedavgm", "fedadagrad", "fedyogi", "fedadam")
STRATEGIES = {
    "fedavg": lambda start: FedAvg(),
    "fedavgm": lambda start, beta: FedAvgM(initial_parameters=start, server_learning_rate=1.0, server_momentum=beta),
    "fedadagrad": lambda start, **given: FedAdagrad(initial_parameters=start, **given),
    "fedyogi": lambda start, eta, tau, beta2: FedYogi(
        initial_parameters=start, eta=eta, tau=tau, beta_1=0.9, beta_2=beta2
    ),
    "fedadam": lambda start, eta, tau, beta2: FedAdam(
        initial_parameters=start, eta=eta, tau=tau, beta_1=0.9, beta_2=beta2
    ),
}


def run(case: Case) -> Trace:
    """Each round's models are given to the strategy as fit results."""
    locally = Run(case, case.cohorts)
    x, models = locally.start, []
    strategy = STRATEGIES[case.method](ndarrays_to_parameters([x]), **case.options)
    for number, cohort in enumerate(case.cohorts, 1):
        done = [(k, ndarrays_to_parameters([locally.local(k, x)])) for k in cohort]
        results = [(None, FitRes(Status(Code.OK, ""), p, locally.problem.sizes[k], {})) for k, p in done]
        parameters, _ = strategy.aggregate_fit(number, results, [])
        x = parameters_to_ndarrays(parameters)[0]
        models.append(x)
    return Trace(models, case.cohorts)


def version() -> str:
    """Of the library."""
    return version_of("flwr")
