"""Beginning a run where another one ended, so that what several runs have in common is trained once."""

from __future__ import annotations

from pathlib import Path

from unskew.config import Experiment
from unskew.errors import ConfigError
from unskew.methods.catalogue import method
from unskew.records.recorder import Recorder
from unskew.records.result import read_history
from unskew.simulation import checkpoint
from unskew.simulation.server import Server


def begin_where(parent: Path, config: Experiment, server: Server, recorder: Recorder, data: str) -> int:
    """Take over the model, traffic and history of the run in ``parent``, and what both methods keep.

    What a client keeps under a rule that both methods have (FedCOG's previous model) stays; rules that only the new method
    has begin as in their first round.

    Args:
        parent: Folder of the other run.
        config: Of the run that begins.
        server: Its server, freshly made.
        recorder: Its recorder.
        data: What identifies its data.

    Returns:
        The number of rounds that the other run had.

    Raises:
        ConfigError: It is no run, or another model, other data, or already as long.
    """
    found = checkpoint.newest(parent / "checkpoints")
    if found is None:
        raise ConfigError(f"start_from={str(parent)!r} is no run folder with a checkpoint.")
    path, manifest, _ = found
    extra, done = manifest["extra"], int(manifest["round"])
    if done >= config.rounds:
        raise ConfigError(
            f"The run in {parent} has {done} rounds; one that starts from it needs more, not {config.rounds}."
        )
    if extra["data"] != data:
        raise ConfigError(f"The run in {parent} was made on other data or another partition.")
    try:
        before = type(method(extra["config"]["method"]).server)
    except ConfigError:  # a method that only Python knew
        before = type(None)
    checkpoint.branch(path, manifest, server, same_rule=before is type(server.method.server))
    recorder.adopt(read_history(parent)[:done], extra["seconds"])
    return done
