"""Adapter of pfl-research: its algorithms and its simulated backend."""

from __future__ import annotations

from importlib.metadata import version as version_of

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from conformance.problem import Case, Trace

REQUIREMENTS = ("pfl==0.6.0",)
METHODS = ("fedavg", "fedprox", "scaffold", "scaffold-1")


class _Softmax(torch.nn.Linear):
    """Model with the interface that the library expects."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
        return {}


class _Onlooker(TrainingProcessCallback):
    """Callback that records the model after each round."""

    def __init__(self) -> None:
        self.models = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.models.append(model.pytorch_model.weight.detach().numpy().copy())
        return False, Metrics()


def run(case: Case) -> Trace:
    """Run the library's own loop, with a sampler that returns our cohorts."""
    task = case.make()
    module = _Softmax(task.x[0].shape[1], task.start().shape[0], bias=False).double()
    torch.nn.init.zeros_(module.weight)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    data = [
        PyTorchTensorDataset((torch.tensor(x), torch.tensor(y)), user_id=str(k))
        for k, (x, y) in enumerate(zip(task.x, task.y, strict=True))
    ]
    order = iter([k for cohort in case.cohorts for k in cohort])
    federated = FederatedDataset(data.__getitem__, lambda: next(order))
    budget = {
        "central_num_iterations": case.rounds,
        "evaluation_frequency": 10**9,
        "train_cohort_size": len(case.cohorts[0]),
        "val_cohort_size": None,
    }
    if case.method == "fedprox":
        algorithm, params = FedProx(), FedProxParams(**budget, mu=case.options["mu"])
    elif case.method.startswith("scaffold"):
        option = {"use_gradient_as_control_variate": case.method == "scaffold-1"}
        storage = InMemoryUserStateStorage()
        algorithm = SCAFFOLD()
        params = SCAFFOLDParams(**budget, population=task.clients, user_state_storage=storage, **option)
    else:
        algorithm, params = FederatedAveraging(), NNAlgorithmParams(**budget)
    training = NNTrainHyperParams(local_batch_size=None, local_num_epochs=case.steps, local_learning_rate=case.lr)
    onlooker = _Onlooker()
    algorithm.run(params, SimulatedBackend(federated, federated), model, training, callbacks=[onlooker])
    return Trace(onlooker.models, case.cohorts)


def version() -> str:
    """Return the version of the library."""
    return version_of("pfl")
