"""Adapter of PFLlib, from a checkout: its servers and clients, without the evaluation between rounds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from conformance.problem import Case, Trace

REQUIREMENTS = ("h5py", "scikit-learn", "numpy")
CHECKOUT = "https://github.com/TsingZ0/PFLlib"
METHODS = ("fedavg", "fedprox", "scaffold", "feddyn", "pfedme")
SERVERS = {
    "fedavg": "serveravg.FedAvg",
    "fedprox": "serverprox.FedProx",
    "scaffold": "serverscaffold.SCAFFOLD",
    "feddyn": "serverdyn.FedDyn",
    "pfedme": "serverpFedMe.pFedMe",
}
_where: list[Path] = []


def use(checkout: Path) -> None:
    """Make the checkout importable; its code reads data relative to the working directory."""
    _where.append(checkout)
    sys.path.insert(0, str(checkout / "system"))
    folder = Path(tempfile.mkdtemp())
    (folder / "system").mkdir()
    os.chdir(folder / "system")


def run(case: Case) -> Trace:
    """Run the steps of a server's ``train`` in each round, with our cohorts; the library stores inputs as float32."""
    task = case.make()
    for kind in ("train", "test"):
        folder = Path("../dataset/softmax") / kind
        folder.mkdir(parents=True, exist_ok=True)
        for k, (x, y) in enumerate(zip(task.x, task.y, strict=True)):
            np.savez(folder / f"{k}.npz", data=np.array({"x": x, "y": y}, dtype=object))
    model = torch.nn.Linear(task.x[0].shape[1], task.start().shape[0], bias=False)
    torch.nn.init.zeros_(model.weight)
    arguments = {
        "model": model, "device": "cpu", "dataset": "softmax", "num_classes": task.start().shape[0],
        "global_rounds": case.rounds, "local_epochs": case.steps, "batch_size": max(task.sizes),
        "local_learning_rate": case.lr, "num_clients": task.clients, "join_ratio": case.participation,
        "random_join_ratio": False, "few_shot": 0, "algorithm": case.method, "time_select": False, "goal": "",
        "time_threthold": 10_000, "save_folder_name": "", "top_cnt": 100, "auto_break": False, "eval_gap": 1,
        "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 1,
        "batch_num_per_client": 1, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "learning_rate_decay": False,
        "learning_rate_decay_gamma": 1.0, "server_learning_rate": 1.0, "mu": 0.0, "alpha": 0.0,
    }  # fmt: skip
    module, _, name = SERVERS[case.method].partition(".")
    server_class = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    options = {**case.options}
    if case.method == "pfedme":  # the decay of 0.001 is the optimizer's default
        options = {
            "lamda": options["lam"],
            "K": options["K"],
            "p_learning_rate": options["eta_p"],
            "beta": options["beta"],
        }
    server = server_class(SimpleNamespace(**{**arguments, **options}), 0)
    models = []
    for cohort in case.cohorts:
        server.selected_clients = [server.clients[k] for k in cohort]
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.previous_global_model = [p.clone() for p in server.global_model.parameters()]
        server.receive_models()
        if case.method == "feddyn":
            server.update_server_state()
        server.aggregate_parameters()
        if case.method == "pfedme":
            server.beta_aggregate_parameters()
        models.append(next(server.global_model.parameters()).detach().double().numpy().copy())
    return Trace(models, case.cohorts)


def version() -> str:
    """Return the commit of the checkout."""
    done = subprocess.run(["git", "-C", _where[-1], "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "commit not known"
