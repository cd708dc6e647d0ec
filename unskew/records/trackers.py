"""Where figures can be sent beside the run folder. Each tracker is an extra and a callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unskew.errors import ConfigError
from unskew.records.recorder import Callback, Row


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}


class TensorBoard:
    """Writes event files into ``<run folder>/tensorboard``."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("The tracker 'tensorboard' needs: pip install 'unskew[tensorboard]'.") from error
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Note the configuration."""
        self.writer.add_text("config", "  \n".join(f"{k}: {v}" for k, v in config.items()), rounds_done)

    def round(self, row: Row) -> None:
        """One point per figure."""
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])

    def end(self, summary: dict[str, Any]) -> None:
        """Flush."""
        self.writer.close()


class MLflow:
    """Logs to the local store ``mlflow.db`` beside the run folder."""

    def __init__(self, folder: Path):
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError("The tracker 'mlflow' needs: pip install 'unskew[mlflow]'.") from error
        self.mlflow: Any = mlflow
        mlflow.set_tracking_uri(f"sqlite:///{(folder.parent / 'mlflow.db').absolute()}")
        mlflow.set_experiment("unskew")
        self.run: Any = mlflow.start_run(run_name=folder.name)

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Note the configuration."""
        self.mlflow.log_params({k: str(v) for k, v in config.items()})

    def round(self, row: Row) -> None:
        """One point per figure."""
        self.mlflow.log_metrics(_numbers(row), step=row["round"])

    def end(self, summary: dict[str, Any]) -> None:
        """Note the summary and end."""
        self.mlflow.log_metrics({f"final_{k}": v for k, v in _numbers(summary).items()})
        self.mlflow.end_run()


def make_trackers(names: tuple[str, ...], folder: Path | None) -> list[Callback]:
    """The trackers of a run.

    Raises:
        ConfigError: A tracker is not installed, or there is no run folder.
    """
    if names and folder is None:
        raise ConfigError("Trackers need a run folder; give out='runs/NAME'.")
    kinds: dict[str, Callable[[Path], Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
    return [kinds[name](folder) for name in names if folder is not None]
