"""Results in notebooks: sentences with a table, data frames, and progress as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unskew.errors import explain_missing
from unskew.progress import PATIENCE
from unskew.records.recorder import Callback, Row
from unskew.tasks.formatting import value_text
from unskew.tasks.html_table import cell_text, html_page
from unskew.tasks.primary_metric import metric_info

if TYPE_CHECKING:
    import pandas as pd


class NotebookTable:
    """Base class of results that are displayed as sentences and a table in notebooks, and printed as lines."""

    def _sentences(self) -> Sequence[str]:
        return ()

    def _shown(self) -> Sequence[Mapping[str, object]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        lines = []
        for row in self._shown():
            (_, title), *rest = row.items()
            cells = ", ".join(f"{name} {cell_text(value)}" for name, value in rest if cell_text(value))
            lines.append(f"{title}: {cells}")
        return "\n  ".join([f"{type(self).__name__}:", *self._sentences(), *lines])

    def _repr_html_(self) -> str:
        """Return sentences and a table for notebooks."""
        return html_page(self._sentences(), self._shown())


class NotebookProgress(Callback):
    """Prints the progress of a run as lines, which executed notebooks store: at most nine, and one in two seconds."""

    printed = 0.0
    """Time of the last line of any run."""

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """Store the title and the objective of the run."""
        self.title, self.rounds = f"{config['method']}, seed {config['seed']}", config["rounds"]
        self.judge = metric_info(config["objective"])
        self.tenths = 10 * rounds_done // self.rounds
        NotebookProgress.printed = NotebookProgress.printed or time.monotonic()

    def round(self, row: Row) -> None:
        """Print a line after each tenth of the rounds, except at the end, which the result shows."""
        tenths = 10 * row["round"] // self.rounds
        if tenths in (self.tenths, 10) or time.monotonic() - NotebookProgress.printed < PATIENCE:
            return
        self.tenths, NotebookProgress.printed = tenths, time.monotonic()
        judge = self.judge
        value = "" if row.get(judge.name) is None else f", test {judge.title} {value_text(judge, row[judge.name])}"
        print(f"{self.title}: round {row['round']} of {self.rounds}{value}, {row['seconds']:.0f} s", flush=True)


def notebook_progress() -> list[Callback]:
    """Return a callback that prints the progress of a run in a notebook; none in other programs."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return [] if getattr(shell, "kernel", None) is None else [NotebookProgress()]


def to_data_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a data frame.

    Args:
        rows: Rows as dictionaries.

    Raises:
        ConfigError: If pandas is not installed.
    """
    with explain_missing("to_pandas needs: pip install 'unskew[pandas]'."):
        import pandas as pd
    return pd.DataFrame(rows)
