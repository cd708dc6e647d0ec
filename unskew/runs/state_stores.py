"""Storage location of client state between rounds."""

from __future__ import annotations

from pathlib import Path

from unskew.config.experiment import Experiment
from unskew.errors import ConfigError
from unskew.simulation.client_store import ClientStore, SharedStore


def make_client_store(config: Experiment, folder: Path | None, here: ClientStore) -> ClientStore:
    """The store of a run's clients.

    Args:
        config: The run.
        folder: Its folder, or None.
        here: That of this machine, which it is but for ``ray.state=nodes``.

    Raises:
        ConfigError: Nodes shall keep states, but there is no place for them, or updates wait on their way.
    """
    named = config.engine == "auto" and config.ray.address is not None
    if config.ray.state == "driver" or not (config.engine == "ray" or named):
        return here
    if folder is None:
        raise ConfigError(
            "ray.state=nodes keeps what clients keep in the run folder: name one with out, which nodes see."
        )
    if config.network.delay != "none":
        raise ConfigError(
            "ray.state=nodes is for runs without delays: with them, updates wait here with what clients keep."
        )
    return SharedStore(folder / "clients")
