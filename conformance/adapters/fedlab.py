"""Adapter of FedLab: its handlers and serial trainers."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from conformance.adapters.absent import stand_in
from conformance.problem import Case, Trace

REQUIREMENTS = ("pynvml", "munch", "tqdm", "pandas")
ALONE = ("fedlab==1.3.0",)
METHODS = ("fedavg", "fedprox", "scaffold", "feddyn")

stand_in("torchvision", "torchvision.datasets", "torchvision.transforms")  # used only for image data sets

import fedlab  # noqa: E402
from fedlab.contrib.algorithm import basic_client, basic_server, feddyn, fedprox, scaffold  # noqa: E402


class _Data:
    """Data set interface that a trainer expects."""

    def __init__(self, case: Case):
        task = case.make()
        self.clients = [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in zip(task.x, task.y, strict=True)]

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        return DataLoader(self.clients[client], batch_size, shuffle=True)


PARTS = {
    "fedavg": (basic_server.SyncServerHandler, basic_client.SGDSerialClientTrainer),
    "fedprox": (fedprox.FedProxServerHandler, fedprox.FedProxSerialClientTrainer),
    "scaffold": (scaffold.ScaffoldServerHandler, scaffold.ScaffoldSerialClientTrainer),
    "feddyn": (feddyn.FedDynServerHandler, feddyn.FedDynSerialClientTrainer),
}


def run(case: Case) -> Trace:
    """Run the steps of the library's own pipeline, with our cohorts."""
    task = case.make()
    model = torch.nn.Linear(task.x[0].shape[1], task.start().shape[0], bias=False).double()
    torch.nn.init.zeros_(model.weight)
    handler_class, trainer_class = PARTS[case.method]
    handler = handler_class(model, case.rounds, case.participation)
    trainer = trainer_class(model, task.clients)
    handler.num_clients = task.clients
    if case.method == "scaffold":
        handler.setup_optim(lr=1.0)
    elif case.method == "feddyn":
        handler.setup_optim(**case.options)
    trainer.setup_dataset(_Data(case))
    trainer.setup_optim(case.steps, max(task.sizes), case.lr, **case.options)
    models = []
    for cohort in case.cohorts:
        trainer.local_process(handler.downlink_package, cohort)
        for pack in trainer.uplink_package:
            handler.load(pack)
        models.append(handler.model_parameters.numpy().reshape(task.start().shape).copy())
    return Trace(models, case.cohorts)


def version() -> str:
    """Return the version of the library."""
    return fedlab.__version__
