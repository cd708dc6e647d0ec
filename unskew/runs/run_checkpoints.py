"""Checkpoints of a run: their content in addition to the server, and the one from which the run starts."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

from unskew.errors import CheckpointError
from unskew.runs.assembly import RunParts
from unskew.runs.early_stopping import BestModelKeeper
from unskew.runs.resume import (
    check_data,
    check_frozen,
    check_never_saved,
    check_same,
    check_target_rounds,
    data_identity,
    stored_content,
    warm_start,
)
from unskew.simulation import checkpoint, restore


class RunCheckpoints:
    """Checkpoints in the folder of a run.

    Args:
        parts: Parts of the run.
        best: Tracker of the best model.

    Attributes:
        saved: Number of rounds of the newest checkpoint.
        before: Number of rounds of the run ``start_from``.
        content: Function that returns the checksum of the training data after the data rules of the method.
    """

    def __init__(self, parts: RunParts, best: BestModelKeeper):
        self.parts = parts
        self.best = best
        self.saved = self.before = 0
        self.content = lru_cache(partial(stored_content, parts.prepared.federation))

    def save(self, done: int) -> bool:
        """Write a checkpoint after ``done`` rounds and return whether it was missing."""
        parts = self.parts
        if parts.folder is None or done == self.saved:
            return False
        parts.recorder.sync()
        extra = {
            "seconds": parts.recorder.seconds,
            "config": parts.config.model_dump(mode="json"),
            "data": data_identity(parts.prepared),
            "content": self.content(),
            "frozen": parts.spec.frozen,
            "delays": parts.network.delays.identity,
            "before": self.before,
            "speeds": "" if parts.network.clock is None else parts.network.clock.identity,
            **self.best.about(),
        }
        checkpoint.save_checkpoint(parts.folder / "checkpoints", done, parts.server, parts.network, extra)
        self.saved = done
        return True

    def start(self, resume: bool) -> int:
        """Load the state from which the run starts, and return its number of finished rounds.

        Args:
            resume: Whether to start from the newest intact checkpoint; otherwise from the end of the run ``start_from``,
                if there is one.

        Raises:
            CheckpointError: If the run was resumed with other data, delays or speeds.
        """
        self.saved = self._restore() if resume else self._branch()
        return self.saved

    def _restore(self) -> int:
        """Load the newest intact checkpoint; returns the number of finished rounds."""
        parts = self.parts
        assert parts.folder is not None
        newest = checkpoint.newest_checkpoint(parts.folder / "checkpoints")
        if newest is None:
            check_never_saved(parts.folder)
            parts.recorder.resume(0, 0.0)
            return self._branch()
        path, manifest, problems = newest
        for problem in problems:
            parts.recorder.warn(f"{problem} Resuming from {path.name} instead.")
        extra, done = manifest["extra"], int(manifest["round"])
        check_same(extra["config"], parts.config)
        check_target_rounds(extra["config"].get("rounds"), done, parts.config)
        check_data(extra, parts.prepared, self.content())
        check_frozen(extra, parts.spec)
        if extra.get("delays", "") != parts.network.delays.identity:
            raise CheckpointError("The delay trace has changed since the run started. Resume it with the same file.")
        clock = parts.network.clock
        if clock is not None and parts.config.network.trace and extra.get("speeds") != clock.identity:
            raise CheckpointError("The trace of client speeds has changed since the run started. Restore the file.")
        restore.restore(path, manifest, parts.server, parts.network)
        self.best.restore(extra)
        self.before = int(extra.get("before", 0))
        parts.recorder.resume(done, extra["seconds"])
        return done

    def _branch(self) -> int:
        """Start from the end of the run ``start_from``, if any; returns its number of rounds, otherwise 0."""
        parts = self.parts
        if parts.config.start_from is None:
            return 0
        parent, data = Path(parts.config.start_from), data_identity(parts.prepared)
        done = self.before = warm_start(parent, parts.config, parts.server, parts.recorder, data)
        if parts.network.clock is not None:
            parts.network.clock.now = parts.recorder.history[-1].get("seconds_simulated", 0.0)
        return done
