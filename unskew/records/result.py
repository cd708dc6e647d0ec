"""Result of a run, and reading it from a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import read_file
from unskew.records.notebook import format_mean_std, html_table, to_data_frame
from unskew.records.recorder import parse_rows
from unskew.tasks.primary_metric import objective_metric

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
        predictor: Makes what predicts for new inputs, as ``unskew.load_predictor`` does for a run folder.
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
        predictor: Callable[[], Any] | None = None,
    ):
        self.history, self.summary, self.model, self.vector, self.folder = history, summary, model, vector, folder
        self.draw, self.clients, self.predictor = draw, list(clients), predictor

    def predict(self, x: object) -> list[Any]:
        """The most probable class of each input by its name; ``x [n, ...]`` as they were before normalization.

        Raises:
            ConfigError: This result has no data, so it is not known what the model expects.
            DataError: The inputs are of another shape or type.
        """
        if self.predictor is None:
            raise ConfigError("This result does not know what its model expects; use unskew.load_predictor(FOLDER).")
        labels: list[Any] = self.predictor().predict(x)
        return labels

    def to_pandas(self) -> pd.DataFrame:
        """The history as a table, one row per round (needs pandas)."""
        return to_data_frame(self.history)

    def plot(self, path: str | Path) -> Path:
        """Draw the objective (of a language model, the loss) against rounds into an image file."""
        from unskew.plots.curves import plot_convergence

        return plot_convergence({self.summary["method"]: [self.history]}, Path(path), objective_metric(self.summary))

    def _shown(self) -> dict[str, Any]:
        judged = objective_metric(self.summary).name
        figures = ("loss", "best_loss") if "best_perplexity" in self.summary else (judged, f"best_{judged}")
        return {name: self.summary[name] for name in ("method", "rounds", *figures)}

    def __repr__(self) -> str:
        return f"Result({', '.join(f'{name}={value!r}' for name, value in self._shown().items())})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        row = {name: format_mean_std(v) if isinstance(v, float) else v for name, v in self._shown().items()}
        sent = {f"MB {way}": format_mean_std(self.summary[f"bytes_{way}"], factor=1e-6) for way in ("up", "down")}
        return html_table([{**row, **sent, "seconds": format_mean_std(self.summary["seconds"])}])


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run folder.

    Raises:
        CheckpointError: The files are missing or damaged.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = read_file(path).splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_rows(lines, path)
