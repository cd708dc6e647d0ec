"""Adapter of FL-bench, from a checkout: its servers and clients, without its data loading and evaluation."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace as Of

import torch
from torch.utils.data import TensorDataset

from conformance.adapters.absent import stand_in
from conformance.problem import Case, Trace

REQUIREMENTS = ("omegaconf", "hydra-core", "rich", "pandas", "pillow", "scikit-learn", "pynvml")
CHECKOUT = "https://github.com/KarhouTam/FL-bench"
METHODS = ("fedavg", "fedprox", "scaffold", "feddyn", "pfedme")
SERVERS = {
    "fedavg": "fedavg.FedAvgServer",
    "fedprox": "fedprox.FedProxServer",
    "scaffold": "scaffold.SCAFFOLDServer",
    "feddyn": "feddyn.FedDynServer",
    "pfedme": "pfedme.pFedMeServer",
}
_where: list[Path] = []


def use(checkout: Path) -> None:
    """Make the checkout importable."""
    _where.append(checkout)
    sys.path.insert(0, str(checkout))
    stand_in("ray", "ray.actor")
    stand_in("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.io", "torchvision.io.image")


class _Samples(TensorDataset):
    """All samples, with the two modes that the library's data sets have."""

    def train(self) -> None:
        """Do nothing, because there is no augmentation."""

    def eval(self) -> None:
        """Do nothing, because there is no augmentation."""


def _begin(server: object, args: Of) -> None:
    """Set the fields that a round needs, instead of the base server's ``__init__``, which reads files."""
    server.args, server.model, server.device = args, args.net, torch.device("cpu")
    server.client_num = args.clients
    server.train_clients = list(range(args.clients))
    server.public_model_params = OrderedDict((name, p.data.clone()) for name, p in args.net.named_parameters())
    server.public_model_param_names = list(server.public_model_params)
    server.clients_personal_model_params = {k: {} for k in server.train_clients}
    server.client_optimizer_states = {k: {} for k in server.train_clients}
    server.client_lr_scheduler_states = {k: {} for k in server.train_clients}
    server.client_local_epoches = [args.common.local_epoch] * args.clients
    server.testing = False


def _pfedme(options: dict[str, float]) -> dict[str, float]:
    """Return the options of pFedMe under the library's names."""
    names = {"beta": "beta", "lamda": "lam", "pers_lr": "eta_p", "mu": "decay", "k": "K"}
    return {name: options[ours] for name, ours in names.items()}


def run(case: Case) -> Trace:
    """Run each round: packages to the clients, their training, the server's aggregation."""
    task = case.make()
    importlib.import_module("src.server.fedavg").FedAvgServer.__init__ = _begin
    net = torch.nn.Linear(task.x[0].shape[1], task.start().shape[0], bias=False).double()
    torch.nn.init.zeros_(net.weight)
    silent = Of(train=False, val=False, test=False, finetune_epoch=0)
    common = Of(
        use_cuda=False, buffers="global", batch_size=max(task.sizes), local_epoch=case.steps,
        reset_optimizer_on_global_epoch=True, client_side_evaluation=False, test=Of(client=silent, server=silent),
    )  # fmt: skip
    args = Of(
        net=net, clients=task.clients, common=common, optimizer=Of(lr=case.lr), scaffold=Of(global_lr=1.0),
        fedprox=Of(mu=case.options.get("mu")), feddyn=Of(alpha=case.options.get("alpha"), max_grad_norm=1e9),
        pfedme=Of(**_pfedme(case.options)) if case.method == "pfedme" else None,
    )  # fmt: skip
    module, _, name = SERVERS[case.method].partition(".")
    server = getattr(importlib.import_module(f"src.server.{module}"), name)(args)
    edges = torch.tensor((0, *task.sizes)).cumsum(0).tolist()
    indices = [{"train": list(range(a, b)), "val": [], "test": []} for a, b in pairwise(edges)]
    data = _Samples(torch.cat([torch.tensor(x) for x in task.x]), torch.cat([torch.tensor(y) for y in task.y]))
    sgd = partial(torch.optim.SGD, lr=case.lr, weight_decay=case.options.get("weight_decay", 0.0))
    client = server.client_cls(
        model=net, optimizer_cls=sgd, lr_scheduler_cls=None, args=args, dataset=data, data_indices=indices,
        device=server.device, return_diff=server.return_diff,
    )  # fmt: skip
    models = []
    for cohort in case.cohorts:
        packages = OrderedDict((k, client.train(server.package(k))) for k in cohort)
        server.aggregate_client_updates(packages)
        models.append(next(iter(server.public_model_params.values())).numpy().copy())
    return Trace(models, case.cohorts)


def version() -> str:
    """Return the commit of the checkout."""
    done = subprocess.run(["git", "-C", _where[-1], "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "commit not known"
