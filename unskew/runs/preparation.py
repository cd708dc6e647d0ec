"""What happens before the first round: the method's data rules change what the clients hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.generators.synthetic_set import ABOUT, find
from unskew.protocol.training import Training
from unskew.errors import ConfigError
from unskew.files import write_atomic
from unskew.protocol.workspace import Workspace
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback, warn

SYNTHETIC = "synthetic"
"""Folder of what was made, in a run folder or in that of several runs."""


@dataclass(frozen=True)
class Prepared:
    """What training begins with.

    Attributes:
        federation: The data as the clients then hold them.
        training: The budget.
        traffic: Clients, and the bytes up and down that it cost each.
    """

    federation: Federation
    training: Training
    traffic: list[tuple[int, tuple[int, int]]]


def check_given_set(config: Experiment, chosen: Method) -> None:
    """Refuse a synthetic set that nothing would use, or that is not there.

    Raises:
        ConfigError: It is so.
    """
    if config.synthetic is not None and not any(rule.makes for rule in chosen.data):
        raise ConfigError(
            f"synthetic={config.synthetic!r} is given, but {config.method} makes no synthetic data that it could stand for; "
            "add fedssyn, as in fedssyn+fedavg, or leave it out."
        )
    if config.synthetic is not None:
        find(Path(config.synthetic))


def kept_beside(folder: Path) -> Path | None:
    """Where a run of a comparison or a table finds what it and the others made, if it keeps nothing itself."""
    if (folder / SYNTHETIC).exists():
        return None
    above = folder.resolve().parents
    places = [parent / SYNTHETIC for parent in above[:2]]
    return next((p for p in places if any(p.glob("*/work")) or any(p.glob(f"*/{ABOUT}"))), None)


def prepare(
    chosen: Method,
    federation: Federation,
    config: Experiment,
    device: torch.device,
    folder: Path | None,
    shared: Path | None,
    callbacks: Sequence[Callback],
) -> Prepared:
    """Apply the data rules of ``chosen`` in order.

    What they make is kept in ``shared`` if there is one, else in the run folder, which then can be resumed from the start.
    """
    listeners: list[Any] = [callback for callback in callbacks if hasattr(callback, "prepare")]

    def tell(text: str, done: float, total: float) -> None:
        for listener in listeners:
            listener.prepare(text, done, total)

    given = None if config.synthetic is None else Path(config.synthetic)
    where = shared if shared is not None else None if folder is None else folder / SYNTHETIC
    workspace = Workspace(where, shared is not None, device, given, tell, partial(warn, callbacks))
    training, traffic = config.training, list[tuple[int, tuple[int, int]]]()
    for rule in chosen.data:
        if rule.makes and folder is not None:
            write_atomic(folder / "config.yaml", config.to_yaml().encode())
        before = federation
        federation, cost = rule.prepare(before, config.seed, workspace)
        traffic += cost.items()
        if training.local_epochs is not None:
            training = replace(training, local_epochs=rule.local_epochs(training.local_epochs, before, federation))
    return Prepared(federation, training, traffic)
