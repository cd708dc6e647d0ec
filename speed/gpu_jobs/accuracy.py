"""Accuracy of pfl-research's CIFAR-10 benchmark: ``python -m speed.gpu_jobs.accuracy OUT --data-path FOLDER``

FedAvg with 50 of 1,000 clients of 50 IID samples, 1 epoch of batch 10, rate 0.1, uniform weights, 1,500 rounds, evaluated
every 10 rounds (``benchmarks/image_classification/configs/baseline.yaml`` of pfl-research). Each evaluation is one line of
``OUT/rows.jsonl``. The same command continues a run that was interrupted. ``--data digits`` runs on a CPU without a file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import unskew
from speed.gpu_jobs.models import pfl_cnn
from speed.gpu_jobs.rows import add_row
from speed.gpu_jobs.settings import SEED
from speed.gpu_jobs.torch_loops import device_name, peak_mib
from unskew import Callback

TARGET = 0.70
"""Accuracy whose time is reported: about that of pfl-research's paper (arXiv:2404.06430) for IID clients without privacy.
The images of other sources may be encoded again, so compare with a run of pfl-research on the same files."""
SHAPES = {"cifar10": (3, 32, 32), "digits": (1, 8, 8)}


class AccuracyRows(Callback):
    """Writes each evaluation with the seconds of the run so far, those before an interruption included.

    Args:
        out: Folder of the results.
        label: Name of the run.
    """

    def __init__(self, out: Path, label: str):
        self.out, self.label = out, label

    def round(self, row: dict[str, Any]) -> None:
        if row["accuracy"] is not None:
            values = {name: row.get(name) for name in ("round", "accuracy", "loss", "train_loss", "seconds")}
            add_row(self.out, "accuracy", self.label, **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--data", default="cifar10", choices=list(SHAPES), help="data")
    parser.add_argument("--data-path", help="folder with the files of CIFAR-10")
    parser.add_argument("--run", type=Path, help="run folder; OUT/run if omitted")
    parser.add_argument("--rounds", type=int, default=1500, help="number of rounds")
    parser.add_argument("--eval-every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--precision", default="fp32", help="precision of the run, such as tf32")
    parser.add_argument("--target", type=float, default=TARGET, help="accuracy whose time is reported")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.run or args.out / "run"
    torch.manual_seed(SEED + 1)
    model = pfl_cnn(SHAPES[args.data], dropout=True)
    label = f"pfl-research's benchmark on {args.data}, {args.precision}"
    clients = 1000 if args.data == "cifar10" else 20
    cohort = 50 if args.data == "cifar10" else 10
    options: dict[str, Any] = {
        "data": args.data, "data_path": args.data_path, "partition": "iid", "clients": clients,
        "participation": cohort / clients, "rounds": args.rounds, "eval_every": args.eval_every, "eval_clients": 0,
        "checkpoint_every": 50,
        "local_epochs": 1, "batch_size": 10, "lr": 0.1, "client_weighting": "uniform", "seed": SEED, "method": "fedavg",
        "engine": "vectorized", "device": "cuda" if torch.cuda.is_available() else "cpu", "precision": args.precision,
    }  # fmt: skip
    rows, resume = AccuracyRows(args.out, label), (folder / "config.yaml").is_file()
    result = unskew.run(model=model, out=folder, resume=resume, callbacks=[rows], **options)
    reached = next((row for row in result.history if (row["accuracy"] or 0) >= args.target), None)
    to_target = {} if reached is None else {"rounds_to_target": reached["round"], "s_to_target": reached["seconds"]}
    rounds, seconds = len(result.history), result.history[-1]["seconds"]
    speed = (rounds - 1) / (seconds - result.history[0]["seconds"]) if rounds > 1 else None
    add_row(
        args.out, "final", label, card=device_name(), rounds=rounds, accuracy=result.summary["accuracy"],
        target=args.target, **to_target, seconds=seconds, rounds_per_s=speed, MiB=peak_mib(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
