"""Storage of client state between rounds."""

from __future__ import annotations

from pathlib import Path

from unskew.config.experiment import Experiment
from unskew.errors import ConfigError
from unskew.simulation.client_store import ClientStore, SharedStore


def make_client_store(config: Experiment, folder: Path | None, here: ClientStore) -> ClientStore:
    """Return the store of client state: ``here``, or a shared one with ``ray.state=nodes``.

    Args:
        config: Configuration of the run.
        folder: Run folder, or None.
        here: Store on this machine.

    Raises:
        ConfigError: If nodes should store client state, but there is no run folder, or updates are delayed.
    """
    named = config.engine == "auto" and config.ray.address is not None
    if config.ray.state == "driver" or not (config.engine == "ray" or named):
        return here
    if folder is None:
        raise ConfigError(
            "ray.state=nodes stores client state in the run folder. Set out to a folder that all nodes share."
        )
    if config.network.delay != "none" or config.network.deadline is not None:
        raise ConfigError(
            "ray.state=nodes does not support delays, because delayed updates and their client state wait on this "
            "machine. Use ray.state=driver, or remove network.delay and network.deadline."
        )
    return SharedStore(folder / "clients")
