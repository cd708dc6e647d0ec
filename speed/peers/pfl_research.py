"""pfl-research with two processes, which torchrun starts."""

from __future__ import annotations

import os
import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from speed.peers.work import Ended, Work

REQUIREMENTS = ("pfl[pytorch]==0.6.0",)
SETTING = "two single-threaded processes, started by torchrun"
TORCHRUN = 2


class Net(torch.nn.Module):
    """Model with the methods that the library needs."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of a batch."""
        return torch.nn.functional.cross_entropy(self.model(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
        """Return no metrics, because they cost time."""
        return {}


class Turns(TrainingProcessCallback):
    """Rounds as long as there are turns; the first process waits for them, the other one for the first."""

    def __init__(self, work: Work, first: bool):
        self.work, self.first = work, first

    def on_train_begin(self, *, model):
        """Wait for the first turn."""
        if self.first:
            self.work.begin()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Report the end of a round and wait for the next turn."""
        ended = torch.zeros(1)
        if self.first:
            self.work.end()
            try:
                self.work.begin()
            except Ended:
                ended += 1
        torch.distributed.broadcast(ended, 0)
        return bool(ended), Metrics()


def main(folder: str) -> None:
    """Run the library's own loop."""
    work, rank = Work(folder), int(os.environ.get("RANK", 0))
    torch.set_num_threads(1)
    net = Net(work.model())
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    datasets: dict[int, PyTorchTensorDataset] = {}

    def client(k: int) -> PyTorchTensorDataset:
        if k not in datasets:
            datasets[k] = PyTorchTensorDataset(tuple(map(torch.from_numpy, work.normalized(k))), user_id=str(k))
        return datasets[k]

    order = iter([k for cohort in work.cohorts for k in cohort])
    federated = FederatedDataset(client, lambda: next(order))
    params = NNAlgorithmParams(
        central_num_iterations=len(work.cohorts) + 1,
        evaluation_frequency=10**9,
        train_cohort_size=len(work.cohorts[0]),
        val_cohort_size=None,
    )
    training = NNTrainHyperParams(
        local_batch_size=work.batch, local_num_epochs=None, local_num_steps=work.steps, local_learning_rate=work.lr
    )
    backend = SimulatedBackend(federated, federated)
    FederatedAveraging().run(params, backend, model, training, callbacks=[Turns(work, rank == 0)])
    if rank == 0:
        work.finish([p.detach().numpy() for p in net.parameters()])


if __name__ == "__main__":
    main(sys.argv[1])
