"""Training loop of generators, with averaged weights and checkpoints; resuming is bitwise exact.

Every step seeds PyTorch's global random generator from ``(job.seed, step)``, so noise, times and dropout do not depend on
interruptions. The previous state of the random generator is restored at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from unskew.checked_tensors import encode_checked, load_checked
from unskew.errors import CheckpointError, DataError
from unskew.filesystem import write_atomic
from unskew.generators.base import GeneratorJob, Progress
from unskew.seeding import derive, generator

SECONDS = 30.0
"""Minimum time between two checkpoints in seconds."""
STATE, PROGRESS = "generator.safetensors", "finished epochs and steps"
Step = Callable[[Tensor, int], Tensor]
"""Function that takes a step on the samples of an index ``[B]``, given the step's number, and returns the loss."""


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Take one step on the gradient of a loss, and return the loss.

    Args:
        optimizer: Optimizer of the parameters.
        loss: Loss, a scalar.
    """
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


class ExponentialAverage:
    """Exponential moving average of a module's weights: ``m <- d m + (1 - d) w``.

    The decay of step ``t`` is ``d = min(decay, (1 + t) / (10 + t))``, so that early weights have little influence after a
    short training.

    Args:
        module: Module with the weights.
        decay: Decay after many steps.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.source, self.decay = module, decay
        self.module = deepcopy(module).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after step ``step``, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.module.parameters()), list(self.source.parameters()), 1 - decay)
        for own_buffer, other_buffer in zip(self.module.buffers(), self.source.buffers(), strict=True):
            own_buffer.copy_(other_buffer)


class TrainingState:
    """Modules and optimizers of a training, the content of a checkpoint.

    Args:
        modules: Modules by name, including averages.
        optimizers: Optimizers by name.
    """

    def __init__(self, modules: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]):
        self.modules, self.optimizers = modules, optimizers

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        tensors = {
            f"module/{name}/{key}": t for name, module in self.modules.items() for key, t in module.state_dict().items()
        }
        for name, optimizer in self.optimizers.items():
            for number, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer/{name}/{number}/{key}": torch.as_tensor(t) for key, t in state.items()}
        return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state from the result of ``tensors``."""
        for name, module in self.modules.items():
            head = f"module/{name}/"
            module.load_state_dict({k.removeprefix(head): t for k, t in tensors.items() if k.startswith(head)})
        for name, optimizer in self.optimizers.items():
            states: dict[int, dict[str, Tensor]] = {}
            for key, t in tensors.items():
                kind, owner, *rest = key.split("/")
                if kind == "optimizer" and owner == name:
                    states.setdefault(int(rest[0]), {})[rest[1]] = t
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def train(
    job: GeneratorJob,
    trained: TrainingState,
    step: Step,
    num_samples: int,
    epochs: int,
    batch: int,
    averages: Sequence[ExponentialAverage] = (),
    batches: Callable[[int], list[Tensor]] | None = None,
    epsilon: Callable[[int], float] | None = None,
) -> int:
    """Train for ``epochs`` epochs, from the start or the checkpoint in ``job.folder``.

    Args:
        job: Configuration of the generator.
        trained: State that the steps change.
        step: Function that takes a step.
        num_samples: Number of samples.
        epochs: Number of epochs.
        batch: Batch size; the last batch of an epoch may be smaller.
        averages: Averages to update after every step.
        batches: Returns the batches of an epoch as indices; None: a shuffled pass. Training ends if it returns none.
        epsilon: Returns the privacy spent after a number of steps, for the report.

    Returns:
        The number of steps.

    Raises:
        DataError: If the loss is not finite.
        CheckpointError: If the checkpoint cannot be read.
    """

    def shuffled(epoch: int) -> list[Tensor]:
        order = torch.randperm(num_samples, generator=generator(job.seed, "generator epoch", epoch))
        return list(torch.split(order, batch))

    done, steps = _resume(job, trained)
    saved = time.monotonic()
    devices = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for epoch in range(done, epochs):
            plan = (batches or shuffled)(epoch)
            if not plan:
                break
            total = torch.zeros(())
            for index in plan:
                torch.manual_seed(derive(job.seed, "generator step", steps))
                loss = step(index, steps)
                for average in averages:
                    average.update(steps)
                steps += 1
                total = total + loss.detach().cpu()
            mean = float(total) / len(plan)
            if not mean < float("inf"):
                raise DataError(f"The generator's loss is {mean} in epoch {epoch + 1}. Try a smaller learning rate.")
            progress: Progress = {"epoch": epoch + 1, "epochs": epochs}
            # Private training does not report the loss: it depends on the samples, and the guarantee does not cover it.
            progress |= {"loss": mean} if epsilon is None else {"epsilon": epsilon(steps)}
            job.report(progress)
            if job.folder is not None and epoch + 1 < epochs and time.monotonic() - saved >= SECONDS:
                _save(job, trained, epoch + 1, steps)
                saved = time.monotonic()
    return steps


def _save(job: GeneratorJob, trained: TrainingState, epochs: int, steps: int) -> None:
    assert job.folder is not None
    progress = torch.tensor([epochs, steps])
    write_atomic(job.folder / STATE, encode_checked({**trained.tensors(), PROGRESS: progress}))


def _resume(job: GeneratorJob, trained: TrainingState) -> tuple[int, int]:
    """Load the checkpoint, if any; returns the numbers of finished epochs and steps."""
    path = None if job.folder is None else job.folder / STATE
    if path is None or not path.is_file():
        return 0, 0
    tensors = load_checked(path)
    try:
        epochs, steps = tensors.pop(PROGRESS).tolist()
        trained.load(tensors)
        return epochs, steps
    except Exception as error:
        raise CheckpointError(f"{path} is corrupted ({error}). Remove it to train this generator again.") from error
