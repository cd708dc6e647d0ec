"""What a run gives back, and the same read from a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unskew.errors import CheckpointError, ConfigError
from unskew.records.recorder import parsed

if TYPE_CHECKING:
    import pandas as pd


class Result:
    """A finished run.

    Attributes:
        history: One dictionary per round: round, accuracy, loss, bytes, seconds and the method's own figures.
        summary: The contents of ``summary.json``.
        vector: The final global model, ``[d]``; ``model``: the same as a module in eval mode.
        folder: The run folder, or None.
        draw: Writes pictures of what the method did into a folder, for methods that have any.
        clients: One dictionary per client, as in ``clients.jsonl``.
    """

    def __init__(
        self,
        history: list[dict[str, Any]],
        summary: dict[str, Any],
        model: nn.Module,
        vector: Tensor,
        folder: Path | None,
        draw: Callable[[Path], None] = lambda folder: None,
        clients: Sequence[dict[str, Any]] = (),
    ):
        self.history, self.summary, self.model, self.vector, self.folder = history, summary, model, vector, folder
        self.draw, self.clients = draw, list(clients)

    def to_pandas(self) -> pd.DataFrame:
        """The history as a table, one row per round (needs pandas)."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("to_pandas needs: pip install 'unskew[pandas]'.") from error
        return pd.DataFrame(self.history)

    def plot(self, path: str | Path) -> Path:
        """Draw accuracy (of a language model, the loss) against rounds into an image file."""
        from unskew.plots.curves import convergence

        return convergence({self.summary["method"]: [self.history]}, Path(path))

    def __repr__(self) -> str:
        figures = ("loss", "best_loss") if "best_loss" in self.summary else ("accuracy", "best_accuracy")
        shown = {name: self.summary[name] for name in ("method", "rounds", *figures)}
        return f"Result({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run folder.

    Raises:
        CheckpointError: They are missing or damaged.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parsed(lines, path)
