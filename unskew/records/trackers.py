"""Where figures can be sent beside the run folder. Each tracker is an extra and a callback."""

from __future__ import annotations

import logging
import time
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
        self.open: Callable[..., Any] = SummaryWriter
        self.folder = folder / "tensorboard"

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Note the configuration; points of rounds that are done again are dropped."""
        self.writer = self.open(str(self.folder), purge_step=rounds_done + 1 if rounds_done else None)
        self.writer.add_text("config", "  \n".join(f"{k}: {v}" for k, v in config.items()), rounds_done)

    def round(self, row: Row) -> None:
        """One point per figure."""
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()  # a killed run must not miss points that are before its checkpoint

    def end(self, summary: dict[str, Any]) -> None:
        """Flush."""
        self.writer.close()


class MLflow:
    """Logs to the local store ``mlflow.db`` beside the run folder; a resumed run goes on in its MLflow run."""

    def __init__(self, folder: Path):
        try:
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise ConfigError("The tracker 'mlflow' needs: pip install 'unskew[mlflow]'.") from error
        self.open: Callable[..., Any] = MlflowClient
        self.entities: Any = entities
        self.folder = folder.absolute()

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Find the run of this folder, or make it and note the configuration."""
        logging.getLogger("alembic").setLevel(logging.WARNING)  # the making of the tables interests nobody
        self.client = self.open(f"sqlite:///{self.folder.parent / 'mlflow.db'}")
        ours = self.client.get_experiment_by_name("unskew")
        place = (self.folder.parent / "mlflow-artifacts").as_uri()
        home = ours.experiment_id if ours else self.client.create_experiment("unskew", artifact_location=place)
        tag = {"unskew.folder": str(self.folder)}
        query = f"tags.`unskew.folder` = '{self.folder}'"
        runs = self.client.search_runs([home], filter_string=query, max_results=1) if rounds_done else []
        if not runs:
            runs = [self.client.create_run(home, run_name=f"{config['method']}, seed {config['seed']}", tags=tag)]
            params = [self.entities.Param(k, str(v)) for k, v in config.items()]
            self.client.log_batch(runs[0].info.run_id, params=params)
        self.run_id = runs[0].info.run_id

    def _log(self, figures: dict[str, float], step: int) -> None:
        now = time.time_ns() // 1_000_000
        self.client.log_batch(
            self.run_id, metrics=[self.entities.Metric(name, value, now, step) for name, value in figures.items()]
        )

    def round(self, row: Row) -> None:
        """One point per figure."""
        self._log(_numbers(row), row["round"])

    def end(self, summary: dict[str, Any]) -> None:
        """Note the summary and end."""
        self._log({f"final_{k}": v for k, v in _numbers(summary).items()}, summary["rounds"])
        self.client.set_terminated(self.run_id)


def make_trackers(names: tuple[str, ...], folder: Path | None) -> list[Callback]:
    """The trackers of a run; they write nothing before it starts.

    Raises:
        ConfigError: A tracker is not installed, or there is no run folder.
    """
    if not names:
        return []
    if folder is None:
        raise ConfigError("Trackers need a run folder; give out='runs/NAME'.")
    kinds: dict[str, Callable[[Path], Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
    return [kinds[name](folder) for name in dict.fromkeys(names)]
