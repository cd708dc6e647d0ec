"""FedLab's serial trainer and synchronous server, with PyTorch's threads."""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from conformance.adapters.absent import stand_in
from speed.peers.work import Ended, Work

REQUIREMENTS = ("pynvml", "munch", "tqdm", "pandas")
ALONE = ("fedlab==1.3.0",)
SETTING = "one process, PyTorch's threads; data as tensors in memory"

stand_in("torchvision", "torchvision.datasets", "torchvision.transforms")  # for data sets of images alone

from fedlab.contrib.algorithm import basic_client, basic_server  # noqa: E402


class Data:
    """Data set of a trainer; its loaders give as many batches as a round has steps."""

    def __init__(self, work: Work):
        self.work = work
        self.datasets: dict[int, TensorDataset] = {}

    def get_dataloader(self, client: int, batch_size: int) -> list:
        """Return the batches of a client's round."""
        if client not in self.datasets:
            self.datasets[client] = TensorDataset(*map(torch.from_numpy, self.work.normalized(client)))
        batches: list = []
        while len(batches) < self.work.steps:
            batches += list(DataLoader(self.datasets[client], batch_size, shuffle=True))
        return batches[: self.work.steps]


def main(folder: str) -> None:
    """Run rounds as long as there are turns."""
    work = Work(folder)
    torch.set_num_threads(os.cpu_count() or 1)
    model = work.model()
    handler = basic_server.SyncServerHandler(model, len(work.cohorts), len(work.cohorts[0]) / work.clients)
    trainer = basic_client.SGDSerialClientTrainer(model, work.clients)
    handler.num_clients = work.clients
    trainer.setup_dataset(Data(work))
    trainer.setup_optim(1, work.batch, work.lr)
    try:
        for cohort in work.cohorts:
            work.begin()
            trainer.local_process(handler.downlink_package, cohort)
            for pack in trainer.uplink_package:
                handler.load(pack)
            work.end()
    except Ended:
        pass
    work.finish([handler.model_parameters.numpy()])


if __name__ == "__main__":
    main(sys.argv[1])
