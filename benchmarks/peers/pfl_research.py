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

from benchmarks.baselines import CnnA
from benchmarks.peers.work import Ended, Work

REQUIREMENTS = ("pfl[pytorch]==0.6.0",)
SETTING = "two processes of one thread each, started by torchrun"
TORCHRUN = 2


class Net(CnnA):
    """The model as the library wants it."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of a batch."""
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
        """None, as they cost time."""
        return {}


class Turns(TrainingProcessCallback):
    """Rounds as long as there are turns; the first process waits, the other one for it."""

    def __init__(self, work: Work, first: bool):
        self.work, self.first = work, first

    def on_train_begin(self, *, model):
        """Before the first round."""
        if self.first:
            self.work.begin()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Between two rounds."""
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
    """The library's own loop."""
    work, rank = Work(folder), int(os.environ.get("RANK", 0))
    torch.set_num_threads(1)
    net = Net()
    with torch.no_grad():
        for parameter, start in zip(net.parameters(), work.start(), strict=True):
            parameter.copy_(torch.from_numpy(start))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    held: dict[int, PyTorchTensorDataset] = {}

    def client(k: int) -> PyTorchTensorDataset:
        if k not in held:
            held[k] = PyTorchTensorDataset(tuple(map(torch.from_numpy, work.normalized(k))), user_id=str(k))
        return held[k]

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
