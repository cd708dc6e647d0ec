"""Images of generated samples: requested from clients in the last round and written to the run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unskew.data.federation import Federation
from unskew.data.pixel_scaling import PixelScaling
from unskew.engines.base import Engine
from unskew.filesystem import make_folder
from unskew.plots.image_grid import save_images_by_class
from unskew.protocol.messages import Broadcast, Tensors, Update
from unskew.protocol.rules import ClientRule


def _labeled_inputs(carry: Tensors) -> tuple[Tensor, Tensor]:
    return carry["x"], carry["y"]


def _inputs_of_each_class(carry: Tensors) -> tuple[Tensor, Tensor]:
    classes, images = carry["x"].shape[:2]
    return carry["x"].flatten(0, 1), torch.arange(classes).repeat_interleave(images)


GENERATED: dict[str, Callable[[Tensors], tuple[Tensor, Tensor]]] = {
    "fedcog": _labeled_inputs,
    "feddm": _inputs_of_each_class,
}
"""Inputs ``[n, ...]`` and targets ``[n]`` that a client rule generated, read from its carry, by name of the rule."""


class GeneratedSamplesRecorder:
    """Engine wrapper that stores the samples that some clients generate in one round; results are unchanged.

    Args:
        engine: Engine that trains the clients.
        rules: Client rules of the run.
        federation: Data of the run.
        round: Number of the round to show, from 0: the last one.
        max_clients: Number of clients to show: the first ones of the round's cohort.

    Attributes:
        problem: Reason why no images can be written; None if there may be some.
    """

    problem: str | None

    def __init__(
        self, engine: Engine, rules: Sequence[ClientRule], federation: Federation, round: int, max_clients: int = 10
    ):
        self.name = engine.name
        self.engine = engine
        self.federation = federation
        self.last = round
        self.max_clients = max_clients
        self.carries: dict[int, Tensors] = {}
        self.problem = None
        self.rule = next((rule.name for rule in rules if rule.name in GENERATED), "")
        if not self.rule:
            self.problem = "save_samples has no effect: no rule of this method generates samples."
        elif len(federation.shape) != 3:
            self.problem = f"save_samples has no effect: inputs of shape {federation.shape} are not images."

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and store its generated samples."""
        if self.problem is None:
            broadcasts = [
                dataclasses.replace(broadcast, carry_of=self.rule)
                if index < self.max_clients and broadcast.round == self.last
                else broadcast
                for index, broadcast in enumerate(broadcasts)
            ]
        for update in self.engine.train(broadcasts):
            if update.carry:
                self.carries[update.client] = update.carry
            yield update

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def draw(self, folder: Path) -> str | None:
        """Write one image per client, ``client-0003.png``; return a message if there is nothing to draw."""
        if self.problem is None and not self.carries:
            return "save_samples: no client generated samples in the last round, so no images were written."
        if self.carries:
            make_folder(folder)
        for old in folder.glob("client-*.png"):
            old.unlink()
        pixels = PixelScaling.of(self.federation)
        for client, carry in self.carries.items():
            x, y = GENERATED[self.rule](carry)
            images = pixels.intensities(x.cpu()).clamp(0, 1)
            save_images_by_class(
                images.numpy(), y.cpu().numpy(), self.federation.classes, self.federation.class_names,
                folder / f"client-{client:04d}.png", title=f"{self.federation.client_label(client)}, round {self.last + 1}",
            )  # fmt: skip
        return None
