"""Preparation before the first round: the method's data rules change the clients' data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.errors import ConfigError
from unskew.filesystem import write_atomic
from unskew.generators.synthetic_dataset import ABOUT, find
from unskew.protocol.data_preparation import PreparedData, Workspace
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback, callback_hooks, notify_warning

SYNTHETIC = "synthetic"
"""Folder of what was made, in a run folder or in that of several runs."""


def check_given_set(config: Experiment, method: Method) -> None:
    """Refuse a synthetic set that nothing would use, or that is not there.

    Args:
        config: Configuration of the run.
        method: Method of the run.

    Raises:
        ConfigError: The synthetic set does not exist, or the method does not use it.
    """
    if config.synthetic is not None and not any(rule.generates_data for rule in method.data):
        raise ConfigError(
            f"synthetic={config.synthetic!r} is given, but {config.method} makes no synthetic data that it could stand for; "
            "add fedssyn, as in fedssyn+fedavg, or leave it out."
        )
    if config.synthetic is not None:
        find(Path(config.synthetic))


def find_synthetic_folder(folder: Path) -> Path | None:
    """Return the folder of generated data shared by the runs of a comparison or table, if the run itself keeps none."""
    if (folder / SYNTHETIC).exists():
        return None
    above = folder.resolve().parents
    folders = [parent / SYNTHETIC for parent in above[:2]]
    return next((p for p in folders if any(p.glob("*/work")) or any(p.glob(f"*/{ABOUT}"))), None)


def prepare(
    method: Method,
    federation: Federation,
    config: Experiment,
    device: torch.device,
    folder: Path | None,
    shared: Path | None,
    callbacks: Sequence[Callback],
) -> PreparedData:
    """Apply the data rules of ``method`` in order.

    What they make is kept in ``shared`` if there is one, else in the run folder, which then can be resumed from the start.

    Args:
        method: Method of the run.
        federation: Data of all clients.
        config: Configuration of the run.
        device: Device that computes.
        folder: Run folder, or None.
        shared: Folder of data that several runs share, or None.
        callbacks: Objects that are notified during the run.
    """

    def tell(text: str, done: float, total: float) -> None:
        for hook in callback_hooks(callbacks, "prepare"):
            hook(text, done, total)

    given_folder = None if config.synthetic is None else Path(config.synthetic)
    where = shared if shared is not None else None if folder is None else folder / SYNTHETIC
    workspace = Workspace(where, shared is not None, device, given_folder, tell, partial(notify_warning, callbacks))
    prepared = PreparedData(federation, config.training)
    for rule in method.data:
        if rule.generates_data and folder is not None:
            write_atomic(folder / "config.yaml", config.to_yaml().encode())
        prepared = rule.prepare(prepared, config.seed, workspace)
    return prepared
