"""pfl-research 0.6 on one GPU, with all data on the device, the best case for it.

``peers_gpu.py`` starts it: ``python -m speed.gpu_jobs.pfl_loop OUT SETTING PROCESSES ROUNDS [--quick]``
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

PORT = 29611
OUT, NAME, PROCESSES, ROUNDS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
QUICK = "--quick" in sys.argv
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
RANK = int(os.environ.get("PFL_WORKER_RANK", 0))

workers: list[subprocess.Popen] = []
os.environ["PFL_PYTORCH_DEVICE"] = DEVICE
if PROCESSES > 1 and "PFL_WORKER_RANK" not in os.environ:
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{PORT + i}" for i in range(PROCESSES))
    command = [sys.executable, "-m", "speed.gpu_jobs.pfl_loop", *sys.argv[1:]]
    for rank in range(1, PROCESSES):
        env = {**os.environ, "PFL_WORKER_RANK": str(rank)}
        workers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env))
    os.environ["PFL_WORKER_RANK"] = "0"

start_group = torch.distributed.init_process_group


def with_gloo(backend: str | None = None, **options: object) -> None:
    """Start the process group with gloo, because NCCL refuses several processes on one GPU."""
    start_group(backend="gloo", **options)


torch.distributed.init_process_group = with_gloo

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.hyperparam.base import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402

from speed.gpu_jobs.models import build, prepare  # noqa: E402
from speed.gpu_jobs.rows import add_row, summary  # noqa: E402
from speed.gpu_jobs.settings import PREPARED_ROUNDS, setting_of  # noqa: E402
from speed.gpu_jobs.torch_loops import device_name, peak_mib, synchronize  # noqa: E402


class Net(nn.Module):
    """Model with the methods that the library needs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of a batch."""
        self.train()
        return F.cross_entropy(self.model(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
        """Return no metrics, because they cost time."""
        return {}


class Clock(TrainingProcessCallback):
    """Times the rounds."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Store the time at which a round has ended."""
        synchronize()
        self.marks.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Run the library's own loop."""
    torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    setting = setting_of(NAME, QUICK, False)
    x, y = (torch.from_numpy(part).to(DEVICE) for part in setting.normalized())

    def client(k: int) -> PyTorchTensorDataset:
        rows = torch.randperm(setting.per_client, device=DEVICE) + k * setting.per_client
        return PyTorchTensorDataset((x[rows], y[rows]), user_id=str(k))

    cohorts = prepare(setting, min(ROUNDS + 2, PREPARED_ROUNDS)).cohorts
    order = iter([int(k) for t in range(ROUNDS + 2) for k in cohorts[t % len(cohorts)]])
    net = Net(build(setting))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    federated, clock = FederatedDataset(client, lambda: next(order)), Clock()
    params = NNAlgorithmParams(
        central_num_iterations=ROUNDS,
        evaluation_frequency=10**9,
        train_cohort_size=setting.cohort,
        val_cohort_size=None,
    )
    training = NNTrainHyperParams(
        local_batch_size=setting.batch,
        local_num_epochs=None,
        local_num_steps=setting.steps,
        local_learning_rate=setting.lr,
    )
    FederatedAveraging().run(params, SimulatedBackend(federated, federated), model, training, callbacks=[clock])
    for worker in workers:
        worker.wait()
    if RANK == 0:
        times = [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]
        result = {**summary(times[2:] or times[1:]), "first_round_s": times[0]}
        label = f"{NAME} pfl-research, {PROCESSES} process{'es' if PROCESSES > 1 else ''}"
        add_row(OUT, "peers", label, card=device_name(), library="pfl 0.6.0", **result, MiB=peak_mib())


if __name__ == "__main__":
    main()
