"""The loop that trains a generator: epochs, averaged weights, and checkpoints from which it goes on bit for bit.

Every step seeds PyTorch's global generator by ``(job.seed, step)``, so noise, times and dropout do not depend on when or how
often training was interrupted; the state from before is put back at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from unskew.errors import CheckpointError, DataError
from unskew.filesystem import write_atomic
from unskew.generators.base import Figures, GeneratorJob
from unskew.seeding import derive, generator

SECONDS = 30.0
"""A half-trained generator is kept when so much time has passed since it last was."""
STATE = "generator.safetensors"
Step = Callable[[Tensor, int], Tensor]
"""One step on the samples of an index ``[B]``, given the step's number; returns the loss."""


class ExponentialAverage:
    """An exponential moving average of a module's weights: ``m <- d m + (1 - d) w``.

    The decay of step ``t`` is ``d = min(decay, (1 + t) / (10 + t))``, so that a short training does not average its
    beginning.

    Args:
        module: Whose weights are averaged.
        decay: The decay after many steps.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.source, self.decay = module, decay
        self.module = deepcopy(module).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step ``step``, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.module.parameters()), list(self.source.parameters()), 1 - decay)
        for own_buffer, other_buffer in zip(self.module.buffers(), self.source.buffers(), strict=True):
            own_buffer.copy_(other_buffer)


class TrainingState:
    """Modules and optimizers by name, which are all that a checkpoint stores.

    Args:
        modules: By name; averages are modules too.
        optimizers: By name.
    """

    def __init__(self, modules: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]):
        self.modules, self.optimizers = modules, optimizers

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name."""
        tensors = {
            f"module/{name}/{key}": t for name, module in self.modules.items() for key, t in module.state_dict().items()
        }
        for name, optimizer in self.optimizers.items():
            for number, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer/{name}/{number}/{key}": torch.as_tensor(t) for key, t in state.items()}
        return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``tensors`` gave."""
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
    examples: int,
    epochs: int,
    batch: int,
    averages: Sequence[ExponentialAverage] = (),
    batches: Callable[[int], list[Tensor]] | None = None,
    epsilon: Callable[[int], float] | None = None,
) -> int:
    """Train for ``epochs`` epochs, going on with what ``job.folder`` holds.

    Args:
        job: Seed, device, folder and listener.
        trained: What changes.
        step: One step.
        examples: Number of samples.
        epochs: Passes over them.
        batch: Samples per step; the last batch of an epoch may be smaller.
        averages: Updated after every step.
        batches: The indices of an epoch's steps, if not those of a shuffled pass; an epoch without any is the last.
        epsilon: The privacy spent after so many steps, for the report.

    Returns:
        The number of steps made.

    Raises:
        DataError: The loss is not finite.
        CheckpointError: The half-trained generator cannot be read.
    """

    def shuffled(epoch: int) -> list[Tensor]:
        order = torch.randperm(examples, generator=generator(job.seed, "generator epoch", epoch))
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
                raise DataError(
                    f"The generator's loss is {mean} in epoch {epoch + 1}; a smaller learning rate may help."
                )
            figures: Figures = {"epoch": epoch + 1, "epochs": epochs}
            # The loss tells of the samples, and no guarantee covers it.
            figures |= {"loss": mean} if epsilon is None else {"epsilon": epsilon(steps)}
            job.report(figures)
            if job.folder is not None and epoch + 1 < epochs and time.monotonic() - saved >= SECONDS:
                _save(job, trained, epoch + 1, steps)
                saved = time.monotonic()
    return steps


def _save(job: GeneratorJob, trained: TrainingState, epochs: int, steps: int) -> None:
    assert job.folder is not None
    progress = json.dumps({"epochs": epochs, "steps": steps})
    write_atomic(job.folder / STATE, save(trained.tensors(), metadata={"progress": progress}))


def _resume(job: GeneratorJob, trained: TrainingState) -> tuple[int, int]:
    """Load what there is; epochs and steps done."""
    path = None if job.folder is None else job.folder / STATE
    if path is None or not path.is_file():
        return 0, 0
    try:
        with safe_open(path, "pt") as file:
            progress = json.loads(file.metadata()["progress"])
            trained.load({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return int(progress["epochs"]), int(progress["steps"])
    except Exception as error:
        raise CheckpointError(
            f"{path} is corrupted ({error}); remove it, and this generator is trained again."
        ) from error
