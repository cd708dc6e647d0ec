"""Result of a run, and reading of the history from a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field
from torch import Tensor, nn

from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import read_file
from unskew.json_models import JsonModel, read_model
from unskew.records.notebook import to_data_frame
from unskew.records.recorder import parse_rows
from unskew.tasks.html_table import format_mean_std, html_table
from unskew.tasks.registry import objective_metric

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Result:
    """A finished run.

    All arguments are available as attributes.

    Args:
        history: One dictionary per round: round, accuracy, loss, bytes, seconds and the method's own metrics.
        summary: The contents of ``summary.json``.
        model: The final global model as a module in eval mode.
        vector: Its parameters, ``[d]``.
        folder: The run folder, or None.
        draw: Writes figures of the method into a folder, for methods that have any.
        clients: One dictionary per client, as in ``clients.jsonl``.
        predictor: Creates a predictor for new inputs, like ``unskew.load_predictor`` for a run folder; or None.
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
        self.history = history
        self.summary = summary
        self.model = model
        self.vector = vector
        self.folder = folder
        self.draw = draw
        self.clients = list(clients)
        self.predictor = predictor

    def predict(self, x: object) -> list[Any]:
        """Return the name of the most probable class of each input, or the predicted numbers; ``x [n, ...]`` is raw.

        Args:
            x: Inputs as in the training data, ``[n, ...]``.

        Raises:
            ConfigError: If this result does not know the input format of its model, or the method trains no global model.
            DataError: If the inputs have another shape or dtype.
        """
        if self.predictor is None:
            raise ConfigError("This result does not know its model's input format; use unskew.load_predictor(FOLDER).")
        labels: list[Any] = self.predictor().predict(x)
        return labels

    def to_pandas(self) -> pd.DataFrame:
        """Return the history as a data frame, one row per round (requires pandas)."""
        return to_data_frame(self.history)

    def plot(self, path: str | Path | None = None) -> Path | Figure:
        """Plot the objective against rounds and traffic.

        Args:
            path: Image file to write. None returns the figure, which notebooks display.
        """
        from unskew.plots.curves import plot_convergence

        return plot_convergence({self.summary["method"]: [self.history]}, path, objective_metric(self.summary))

    def _shown(self) -> dict[str, Any]:
        judged = objective_metric(self.summary).name
        names = (judged, f"best_{judged}") if self.summary.get("global_model", True) else (f"personal_{judged}_mean",)
        return {name: self.summary[name] for name in ("method", "rounds", *names) if name in self.summary}

    def __repr__(self) -> str:
        return f"Result({', '.join(f'{name}={value!r}' for name, value in self._shown().items())})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        sent = {f"MB {way}": format_mean_std(self.summary[f"bytes_{way}"], factor=1e-6) for way in ("up", "down")}
        return html_table([{**self._shown(), **sent, "seconds": format_mean_std(self.summary["seconds"])}])


class Summary(JsonModel):
    """Fields of ``summary.json`` on which reading and resuming a run depend; others depend on the run."""

    model_config = ConfigDict(extra="allow")

    method: str
    data: str
    partition: str
    rounds: Annotated[int, Field(ge=0, lt=1 << 31)]
    max_rounds: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    bytes_up: int | float
    bytes_down: int | float
    seconds: int | float
    objective: str = ""
    own_metrics: dict[str, Literal["lower", "higher"]] = Field(default_factory=dict)


class About(JsonModel):
    """Content of ``about.json``."""

    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, str | int | None] = Field(default_factory=dict)
    classes: tuple[str, ...] = ()


def read_about(folder: Path) -> dict[str, Any]:
    """Read versions, machine and class names of a run; empty without ``about.json``.

    Args:
        folder: Run folder.

    Raises:
        CheckpointError: If the file is corrupted.
    """
    path = folder / "about.json"
    remedy = "Remove it to write the report without it."
    return read_model(path, About, remedy).model_dump(exclude_unset=True) if path.is_file() else {}


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a finished run.

    Args:
        folder: Run folder.

    Raises:
        CheckpointError: If the file is missing or corrupted.
    """
    summary = read_model(folder / "summary.json", Summary, "Remove it and resume the run.")
    return summary.model_dump(exclude_unset=True)


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Read the history of a run folder.

    Args:
        folder: Run folder.

    Raises:
        CheckpointError: If the file is missing or corrupted.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = read_file(path).splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_rows(lines, path)
