"""Trackers: callbacks that log metrics to TensorBoard, MLflow or Weights & Biases, in addition to the run folder.

Each needs an extra. Other packages may provide trackers by entry points.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unskew import plugins
from unskew.errors import ConfigError, explain_missing, free_name
from unskew.filesystem import write_atomic
from unskew.records.mlflow_store import NAME, is_complete_database, open_client
from unskew.records.recorder import Callback, Row, callback_hooks, notify_warning

EXPERIMENT = "unskew"
FOLDER = "unskew.folder"
"""Tag of an MLflow run that contains its run folder."""
QUOTES = "'\"`\\"
HOOKS = ("prepare", "loaded", "start", "round", "warn", "end")
"""Methods of ``Callback``."""


def numbers_by_name(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row under names that every tracker accepts, although classes may have any name.

    >>> numbers_by_name({"round": 1, "recall/a|b": 0.5, "recall/a_b": 0.7, "recall/..": 0.1})
    {'round': 1.0, 'recall/a_b': 0.5, 'recall/a_b_2': 0.7, 'recall/_': 0.1}
    """
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            head, slash, tail = name.partition("/")
            # Like TensorBoard, which would show two names with the same result as one curve.
            clean = head + slash + re.sub(r"[^-\w.]|^\.+$", "_", tail)
            numbers[free_name(clean, numbers)] = float(value)
    return numbers


class TensorBoard(Callback):
    """Writes event files to ``<run folder>/tensorboard``."""

    def __init__(self, folder: Path):
        with explain_missing("The tracker 'tensorboard' needs: pip install 'unskew[tensorboard]'."):
            from torch.utils.tensorboard import SummaryWriter
        self.open: Callable[..., Any] = SummaryWriter
        self.folder = folder / "tensorboard"

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Log the configuration; drop points of rounds that are trained again."""
        self.writer = self.open(str(self.folder), purge_step=rounds_done + 1 if rounds_done else None)
        self.writer.add_text("config", "  \n".join(f"{k}: {v}" for k, v in config.items()), rounds_done)

    def round(self, row: Row) -> None:
        """Log one point per metric."""
        for name, value in numbers_by_name(row).items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()  # a killed run must have all points before its checkpoint

    def end(self, summary: dict[str, Any]) -> None:
        """Close the event file."""
        self.writer.close()


class MLflow(Callback):
    """Logs to a local database that several runs share; a resumed run continues its MLflow run.

    Args:
        folder: Run folder.
        store: Folder of the database ``mlflow.db``.
        resumed: Whether the run is resumed.
    """

    def __init__(self, folder: Path, store: Path, resumed: bool = False):
        with explain_missing("The tracker 'mlflow' needs: pip install 'unskew[mlflow]'."):
            from mlflow import entities
        self.entities: Any = entities
        self.folder = folder.absolute()
        self.store = store.absolute()
        self.resumed = resumed

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Find the MLflow run of this folder, or create it and log the configuration."""
        run = self._earlier() if self.resumed else None
        if run is None:
            self.client = open_client(self.store)
            ours = self.client.get_experiment_by_name(EXPERIMENT)
            artifacts = (self.store / "mlflow-artifacts").as_uri()
            home = (
                ours.experiment_id if ours else self.client.create_experiment(EXPERIMENT, artifact_location=artifacts)
            )
            name, tags = f"{config['method']}, seed {config['seed']}", {FOLDER: str(self.folder)}
            run = self.client.create_run(home, run_name=name, tags=tags)
            params = [self.entities.Param(k, str(v)) for k, v in config.items()]
            self.client.log_batch(run.info.run_id, params=params)
        self.run_id = run.info.run_id

    def _earlier(self) -> Any:
        """Return the MLflow run of this folder, or None; a run of a comparison may be resumed separately."""
        for folder in dict.fromkeys([self.store, self.folder.parent, self.folder.parent.parent]):
            if not is_complete_database(folder / NAME):
                continue
            self.client = open_client(folder)
            home = self.client.get_experiment_by_name(EXPERIMENT)
            # A filter cannot contain quotes: match any character there, and compare the full path below.
            like = "".join("_" if c in QUOTES else c for c in str(self.folder))
            query = f"tags.`{FOLDER}` LIKE '{like}'"
            runs = self.client.search_runs([home.experiment_id], filter_string=query) if home else []
            ours = [run for run in runs if run.data.tags[FOLDER] == str(self.folder)]
            if ours:
                return ours[0]  # most recent run
        return None

    def _log(self, metrics: dict[str, float], step: int) -> None:
        now = time.time_ns() // 1_000_000
        self.client.log_batch(
            self.run_id, metrics=[self.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        )

    def round(self, row: Row) -> None:
        """Log one point per metric."""
        self._log(numbers_by_name(row), row["round"])

    def end(self, summary: dict[str, Any]) -> None:
        """Log the summary and end the MLflow run."""
        self._log({f"final_{k}": v for k, v in numbers_by_name(summary).items()}, summary["rounds"])
        self.client.set_terminated(self.run_id)


class WandB(Callback):
    """Logs to the project ``unskew`` of Weights & Biases; a resumed run continues its run there.

    Its own files are in the folder ``wandb`` of the working directory, or in ``WANDB_DIR``; with ``WANDB_MODE=offline`` only
    there.

    Args:
        folder: Run folder.
        resumed: Whether the run is resumed.
    """

    def __init__(self, folder: Path, resumed: bool = False):
        with explain_missing("The tracker 'wandb' needs: pip install 'unskew[wandb]'."):
            import wandb
        self.wandb: Any = wandb
        self.folder = folder
        self.resumed = resumed

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Create the run, or continue the one whose identifier is in the run folder."""
        file = self.folder / "wandb-id.txt"
        known = file.read_text().strip() if self.resumed and file.is_file() else None
        self.run = self.wandb.init(
            project=EXPERIMENT,
            name=f"{config['method']}, seed {config['seed']}",
            config=config,
            id=known,
            resume=None if known is None else "allow",
        )
        write_atomic(file, f"{self.run.id}\n".encode())

    def round(self, row: Row) -> None:
        """Log the metrics of a round as one step."""
        self.run.log(numbers_by_name(row), step=row["round"])

    def end(self, summary: dict[str, Any]) -> None:
        """Log the summary and finish the run."""
        self.run.summary.update({f"final_{name}": value for name, value in numbers_by_name(summary).items()})
        self.run.finish()


class GuardedTracker(Callback):
    """Tracker whose first failure becomes a warning; the run continues without the tracker.

    Args:
        name: Name of the tracker.
        create: Function that creates the tracker.
        followers: Callbacks that receive the warning.

    Raises:
        ConfigError: If the tracker cannot be used as it is configured.
    """

    def __init__(self, name: str, create: Callable[[], Callback], followers: Sequence[Callback]):
        self.name = name
        self.followers = followers
        self.failed = False
        self._do(lambda: self._follow(create()), ConfigError)

    def _follow(self, tracker: Callback) -> None:
        """Forward those hooks that the tracker has, so that warnings without a listener remain Python warnings."""
        for name in HOOKS:
            for hook in callback_hooks([tracker], name):
                setattr(self, name, partial(self._call, hook))

    def _call(self, hook: Callable[..., None], *arguments: Any) -> None:
        self._do(lambda: hook(*arguments))

    def _do(self, step: Callable[[], None], *passed: type[Exception]) -> None:
        if self.failed:
            return
        try:
            step()
        except passed:
            raise
        except Exception as error:
            self.failed = True
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            notify_warning(
                self.followers, f"The tracker {self.name!r} failed, so the run continues without it: {reason[:300]}"
            )


def make_trackers(
    names: tuple[str, ...],
    folder: Path | None,
    store: Path | None = None,
    resumed: bool = False,
    followers: Sequence[Callback] = (),
) -> list[Callback]:
    """Create the trackers of a run; they write nothing before it starts.

    Args:
        names: Names of the trackers.
        folder: Run folder.
        store: Folder of the database that several runs share, such as that of a comparison; None uses the parent folder.
        resumed: Whether the run is resumed.
        followers: Callbacks that receive a warning if a tracker fails.

    Raises:
        ConfigError: If a tracker is not installed, or there is no run folder.
    """
    if not names:
        return []
    if folder is None:
        raise ConfigError("Trackers need a run folder; set out='runs/NAME'.")
    kinds: dict[str, Callable[[], Callback]] = {
        "tensorboard": lambda: TensorBoard(folder),
        "mlflow": lambda: MLflow(folder, folder.absolute().parent if store is None else store, resumed),
        "wandb": lambda: WandB(folder, resumed),
    }
    chosen: list[Callback] = []
    for name in dict.fromkeys(names):
        if name not in kinds:
            create = plugins.find_plugin(plugins.TRACKERS, "tracker", name, kinds).load_callable()
            kinds[name] = partial(create, folder, resumed)
        chosen.append(GuardedTracker(name, kinds[name], followers))
    return chosen
