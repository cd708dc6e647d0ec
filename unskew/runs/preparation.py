"""Data preparation before the first round: the method's data rules are applied to the clients' data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from unskew.config.experiment import Experiment
from unskew.errors import ConfigError
from unskew.filesystem import check_no_link, write_atomic
from unskew.generators.synthetic_dataset import SYNTHETIC, find
from unskew.protocol.data_preparation import PreparedData, Workspace
from unskew.protocol.data_rule import apply_data_rule
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback, callback_hooks, notify_warning
from unskew.runs.resolved_run import ResolvedRun


def check_given_set(config: Experiment, method: Method) -> None:
    """Validate that the synthetic set named by ``synthetic`` exists and that the method uses it.

    Args:
        config: Configuration of the run.
        method: Method of the run.

    Raises:
        ConfigError: If the synthetic set does not exist, or the method does not generate data.
    """
    if config.synthetic is not None and not any(rule.generates_data for rule in method.data):
        raise ConfigError(
            f"synthetic={config.synthetic!r} has no effect: {config.method} does not use synthetic data. Add fedssyn, as in "
            "fedssyn+fedavg, or remove synthetic."
        )
    if config.synthetic is not None:
        find(Path(config.synthetic))


def prepare(
    run: ResolvedRun,
    device: torch.device,
    folder: Path | None,
    shared: Path | None,
    callbacks: Sequence[Callback],
    resume: bool = False,
) -> PreparedData:
    """Apply the data rules of a run's method in order.

    Generated data are stored in ``shared`` or, if it is None, in the run folder, so that the run can be resumed.

    Args:
        run: The run.
        device: Device for computations.
        folder: Run folder, or None.
        shared: Folder of generated data that several runs share, or None.
        callbacks: Callbacks of the run.
        resume: Whether the run is resumed: it then reads finished data that a comparison shares, and never writes there.
    """

    def tell(text: str, done: float, total: float) -> None:
        for hook in callback_hooks(callbacks, "prepare"):
            hook(text, done, total)

    config = run.config
    given_folder = None if config.synthetic is None else Path(config.synthetic)
    where = shared if shared is not None else None if folder is None else folder / SYNTHETIC
    if shared is not None:
        check_no_link(shared)
    above = folder if resume and shared is None else None
    warn = partial(notify_warning, callbacks)
    workspace = Workspace(where, shared is not None, device, given_folder, above, tell, warn)
    prepared = PreparedData(run.federation, run.plan.training)
    for rule in run.method.data:
        if rule.generates_data and folder is not None:
            write_atomic(folder / "config.yaml", config.to_yaml().encode())
        prepared = apply_data_rule(rule, prepared, config.seed, workspace)
    return prepared
