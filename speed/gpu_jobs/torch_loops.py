"""Loops in PyTorch: unskew as its users run it, and a loop tuned by hand, plain and with CUDA graphs."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import unskew
from speed.gpu_jobs.models import build
from speed.gpu_jobs.rows import summary, time_rounds
from speed.gpu_jobs.settings import CHECKED_ROUNDS, SEED, Prepared, Setting
from speed.settings import MEAN, STD
from unskew import Callback, Federation, Normalization
from unskew.data.federation import ArrayClients


def device_name() -> str:
    """Return the name of the card, or ``cpu``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_mib() -> float:
    """Return the largest memory of PyTorch's tensors on the device since it was reset, in MiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0


class EnoughRoundsError(Exception):
    """A run has been timed for long enough."""


class RoundClock(Callback):
    """Times the rounds of a run and ends it.

    Args:
        seconds: Time after which the run ends.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.marks: list[float] = []
        self.began = time.perf_counter()

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        self.marks.append(time.perf_counter())

    def round(self, row: dict[str, Any]) -> None:
        synchronize()
        self.marks.append(time.perf_counter())
        if len(self.marks) == 3 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        times = self.times()
        if sum(times) > self.seconds and (len(times) >= 3 or sum(times) > 3 * self.seconds):
            raise EnoughRoundsError

    def times(self) -> list[float]:
        """Return the seconds of the rounds after the second one, or of the second one if it is slow."""
        gaps = np.diff(self.marks).tolist()
        return gaps[1:] if len(gaps) > 1 and gaps[1] > self.seconds else gaps[2:]

    def row(self) -> dict[str, Any]:
        """Return the result of the measurement."""
        return {**summary(self.times()), "first_round_s": self.marks[1] - self.marks[0], "MiB": peak_mib()}


def federation_of(setting: Setting) -> Federation:
    """Return the data of a setting: 8-bit images that are normalized batch by batch, as in any run."""
    images, labels = map(torch.from_numpy, setting.images())
    offsets, channels = np.arange(setting.clients + 1) * setting.per_client, setting.shape[0]
    return Federation(
        ArrayClients(images, labels, offsets, offsets[1:]),
        test=(images[:100], labels[:100]),
        classes=10,
        normalization=Normalization(MEAN[:channels], STD[:channels], 1 / 255),
    )


def run_unskew(setting: Setting, rounds: int, clock: Callback, **options: Any) -> unskew.Result:
    """Run FedAvg with unskew's public interface and the engine ``vectorized``, evaluating only at the end.

    Args:
        setting: The setting.
        rounds: Number of rounds.
        clock: Callback of the run.
        **options: Further options, such as ``method`` and ``out``.
    """
    values: dict[str, Any] = {
        "engine": "vectorized", "device": "cuda" if torch.cuda.is_available() else "cpu", "rounds": rounds,
        "eval_every": rounds, "eval_clients": 0, "local_steps": setting.steps, "batch_size": setting.batch,
        "lr": setting.lr, "participation": setting.cohort / setting.clients, "seed": SEED, "client_weighting": "uniform",
        "precision": setting.precision,
    }  # fmt: skip
    return unskew.run(federation_of(setting), model=build(setting), callbacks=[clock], **{**values, **options})


def time_unskew(setting: Setting, seconds: float) -> dict[str, Any]:
    """Return the speed of whole rounds of a run."""
    clock = RoundClock(seconds)
    with suppress(EnoughRoundsError):
        run_unskew(setting, 10**6, clock)
    return clock.row()


def check_unskew(setting: Setting) -> tuple[np.ndarray, float]:
    """Return the model after a few rounds, and the mean training loss of the last one."""
    result = run_unskew(setting, CHECKED_ROUNDS, Callback())
    return result.vector.numpy(), result.history[-1]["train_loss"]


class HandLoop:
    """FedAvg tuned by hand: one client after another, all data normalized on the device, batches drawn before.

    The parameters are views of one vector, so that a client starts and ends with one kernel each.

    Args:
        prepared: Initial model, cohorts and batches.
        channels_last: Whether images and kernels are stored channels-last.
    """

    def __init__(self, prepared: Prepared, channels_last: bool):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = True
        setting = self.setting = prepared.setting
        self.padded = prepared.padded
        x, y = map(torch.from_numpy, setting.normalized())
        self.x = x.to(self.device)
        if channels_last:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = y.to(self.device)
        self.rows = torch.from_numpy(prepared.rows).to(self.device)
        self.weights = torch.from_numpy(prepared.weights).to(self.x)
        self.model = build(setting).to(self.device).train()
        self.parameters = [*self.model.parameters()]
        self.v = self.x.new_empty(sum(p.numel() for p in self.parameters))
        place = 0
        for parameter in self.parameters:
            part = self.v[place : place + parameter.numel()]
            place += parameter.numel()
            view = part.view(parameter.shape)
            if channels_last and parameter.dim() == 4:
                outputs, inputs, height, width = parameter.shape
                view = part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
            view.copy_(parameter.data)
            parameter.data = view
        self.start, self.total = self.v.clone(), torch.zeros_like(self.v)
        self.loss = self.x.new_zeros(())
        self.t = 0

    def batch_loss(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the mean loss of a batch.

        Args:
            rows: Samples, ``[B]``.
            weights: Their weights, 1 or 0.
        """
        logits = self.model(self.x.index_select(0, rows))
        targets = self.y.index_select(0, rows)
        if not self.padded:
            return F.cross_entropy(logits, targets)
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()

    def step(self, rows: Tensor, weights: Tensor) -> None:
        """Take a step of SGD with the fused operators over all parameters."""
        loss = self.batch_loss(rows, weights)
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-self.setting.lr)
            self.loss += loss

    def train_client(self, t: int, place: int) -> None:
        """Take all steps of one client."""
        for rows, weights in zip(self.rows[t, place], self.weights[t, place], strict=True):
            self.step(rows, weights)

    def round(self) -> None:
        """Train a round and average the models."""
        t = self.t % len(self.rows)
        self.t += 1
        with torch.no_grad():
            self.total.zero_()
            self.loss.zero_()
        for place in range(self.setting.cohort):
            self.v.copy_(self.start)
            self.train_client(t, place)
            self.total.add_(self.v, alpha=1 / self.setting.cohort)
        self.start.copy_(self.total)
        synchronize()

    def checked(self) -> tuple[np.ndarray, float]:
        """Return the model after a few rounds, and the mean training loss of the last one."""
        for _ in range(CHECKED_ROUNDS):
            self.round()
        self.v.copy_(self.start)
        model = torch.cat([p.detach().contiguous().flatten() for p in self.parameters])
        return model.cpu().numpy(), float(self.loss) / (self.setting.cohort * self.setting.steps)


class GraphLoop(HandLoop):
    """The same loop with its step recorded in a CUDA graph: a counter on the device selects the batch.

    On a CPU, the step is repeated without a graph.
    """

    def __init__(self, prepared: Prepared, channels_last: bool):
        super().__init__(prepared, channels_last)
        steps = self.setting.cohort * self.setting.steps
        self.table = torch.zeros(steps, self.setting.batch, dtype=torch.int64, device=self.device)
        self.table_weights = self.x.new_ones(steps, self.setting.batch)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.recorded_step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.recorded_step()

    def recorded_step(self) -> None:
        """Take the step that the counter selects, and advance the counter."""
        rows = self.table.index_select(0, self.counter).view(-1)
        weights = self.table_weights.index_select(0, self.counter).view(-1)
        self.step(rows, weights)
        self.counter.add_(1)

    def train_client(self, t: int, place: int) -> None:
        if place == 0:
            self.table.copy_(self.rows[t].flatten(0, 1))
            self.table_weights.copy_(self.weights[t].flatten(0, 1))
            self.counter.zero_()
        for _ in range(self.setting.steps):
            if self.graph is None:
                self.recorded_step()
            else:
                self.graph.replay()


LOOPS = {"hand": HandLoop, "graph": GraphLoop}


def time_hand(kind: str, prepared: Prepared, channels_last: bool, seconds: float) -> dict[str, Any]:
    """Return the speed of a loop that was tuned by hand.

    Args:
        kind: ``hand`` or ``graph``.
        prepared: Initial model, cohorts and batches.
        channels_last: Whether images and kernels are stored channels-last.
        seconds: Time after which no further round starts.
    """
    loop = LOOPS[kind](prepared, channels_last)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return {**time_rounds(loop.round, seconds), "MiB": peak_mib()}


def save_check(file: Path, checked: tuple[np.ndarray, float]) -> None:
    """Write a model and its training loss to a file."""
    np.savez(file, model=checked[0], loss=checked[1])
