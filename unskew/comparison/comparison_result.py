"""Result of a comparison: table, answers, notes, differences between methods and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, permutations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from unskew.attacks.registry import divergence_remedy
from unskew.comparison.benefit import Benefit, assess_benefit
from unskew.comparison.benefit_text import benefit_sentences, sampling_error_text
from unskew.comparison.references import is_reference
from unskew.comparison.significance import are_equal
from unskew.comparison.summary_statistics import (
    Summary,
    averaged_keys,
    final_metrics,
    mean_or_none,
    mean_std,
    metric_keys,
    paired_differences,
    rank_means,
    seeds_text,
    std_key,
    usable_values,
)
from unskew.errors import ConfigError, unknown_name
from unskew.plots.curves import plot_convergence
from unskew.privacy.composition import composition_note
from unskew.records.notebook import NotebookTable, to_data_frame
from unskew.records.recorder import first_reaching, with_closing
from unskew.tasks.formatting import value_text
from unskew.tasks.html_table import format_mean_std
from unskew.tasks.intervals import interval95
from unskew.tasks.primary_metric import MetricInfo
from unskew.tasks.registry import client_metric, objective_metric

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison(NotebookTable):
    """Results of a comparison.

    Attributes:
        histories: History of each seed, by method.
        summaries: Summary of each seed, by method.
        target: Value of the objective for which rounds are counted: the requested one, or that of ``default_target``.
        folder: Folder of the runs, the plots and ``comparison.json``, or None.
        unequal: Whether clients train on different numbers of samples.
        left_out: A note for each reference that does not fit.
        clients: Rows of the evaluated clients of each seed, as in ``clients.jsonl``, by method.

    Reference rows (``pooled``, ``local``) come after the methods.
    """

    histories: dict[str, list[list[dict[str, Any]]]]
    summaries: dict[str, list[dict[str, Any]]]
    target: float
    folder: Path | None
    unequal: bool = False
    left_out: tuple[str, ...] = ()
    clients: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)

    @property
    def ranked(self) -> dict[str, list[dict[str, Any]]]:
        """Summaries of the methods, without the reference rows."""
        return {name: group for name, group in self.summaries.items() if not is_reference(name)}

    @property
    def ranked_final(self) -> dict[str, list[Summary]]:
        """Summaries of the methods, with the metrics of the model that a run with ``keep: best`` keeps."""
        return {name: [final_metrics(summary) for summary in group] for name, group in self.ranked.items()}

    @cached_property
    def closed_histories(self) -> dict[str, list[list[dict[str, Any]]]]:
        """Histories, in which the model after a method's closing step is a further row."""
        return {
            name: [[*with_closing(*run)] for run in zip(self.histories[name], summaries, strict=True)]
            for name, summaries in self.summaries.items()
        }

    @property
    def objective(self) -> MetricInfo:
        """Metric by which the runs are compared."""
        return objective_metric(next(iter(self.summaries.values()))[0])

    def has_global_model(self, name: str) -> bool:
        """Return whether a method has metrics of a global model; False if it only trains clients' own models.

        Args:
            name: Name of a method.
        """
        return all(own.get("global_model", True) for own in self.summaries[name])

    @cached_property
    def benefit(self) -> Benefit | None:
        """Comparison with training alone and with a constant, client by client; None if no client was evaluated."""
        return assess_benefit(self.summaries, self.clients)

    def answers(self) -> list[str]:
        """Return sentences that answer whether federated training and personal models help the clients.

        The last one compares the best global model with a constant on the test set, and states the sampling error of that
        set.
        """
        if self.benefit is None:
            return []
        lines, best = benefit_sentences(self.benefit), self.benefit.labels.get("federated")
        if best is None:
            return lines
        summaries = self.ranked_final[best]
        values = usable_values(summaries, self.objective.name)
        sampling = sampling_error_text(summaries, self.objective)
        if values and sampling:
            over = seeds_text(len(values), len(summaries))
            value = value_text(self.objective, fmean(values), sign=" %")
            lines.append(f"Test set: {best} scores {value}{over}{sampling}.")
        return lines

    def _sentences(self) -> list[str]:
        return self.answers()

    def notes(self) -> list[str]:
        """Return notes on the table: different numbers of rounds or weightings of clients, diverged runs."""
        notes = [*self.left_out, *rounds_notes(self)]
        if own := [name for name in self.ranked if not self.has_global_model(name)]:
            notes.append(f"No global model is trained by {', '.join(own)}: personal models are compared instead.")
        notes += weighting_notes(self)
        lost = [(row["method"], row["diverged"], row["seeds"]) for row in self.rows() if row["diverged"]]
        if lost:
            which = ", ".join(f"{name} ({count} of {seeds} seeds)" for name, count, seeds in lost)
            attack = next((summaries[0].get("attack") for summaries in self.ranked.values()), None)
            remedy = divergence_remedy(attack)
            notes.append(f"Diverged, so the metrics do not describe the method: {which}. {remedy}")
        together = composition_note(chain.from_iterable(self.summaries.values()))
        return notes if together is None else [*notes, together]

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per method: means and standard deviations over seeds, as in the printed tables.

        Only seeds in which a metric is defined count; ``seeds_defined`` is their number for the objective. The standard
        deviation of a single value is None.

        ``personal`` metrics are None for methods without personal models. In the rows of references, ``reference`` is
        true, traffic is None, and metrics of the global model are None for ``local``, whose ``client`` metrics are
        those of the clients' own models.
        """
        table = []
        for name, summaries in self.summaries.items():
            histories = self.closed_histories[name]
            reached = (first_reaching(history, self.target, self.objective) for history in histories)
            rounds = [first["round"] for first in reached if first is not None]
            row: dict[str, Any] = {"method": name, "seeds": len(summaries)}
            row |= {"client_weighting": summaries[0].get("client_weighting"), "reference": is_reference(name)}
            row["global_model"] = self.has_global_model(name)
            row["diverged"] = sum(bool(s.get("diverged")) for s in summaries)
            row["seeds_defined"] = len(usable_values(summaries, self.objective.name))
            row |= {key: summaries[0][key] for key in ("objective", "own_metrics", "positive") if key in summaries[0]}
            metrics = metric_keys(summaries[0])
            for key in (*averaged_keys(summaries[0]), *metrics):
                values = [s[key] for s in summaries if s.get(key) is not None]
                row[key], row[std_key(key)] = mean_or_none(values), mean_std(values)[1] if len(values) > 1 else None
            for key in ("epsilon", "epsilon_if_secret", "epsilon_replaced"):
                if key in summaries[0]:
                    spent = [summary[key] for summary in summaries]
                    row[key] = None if None in spent else max(spent)
            constants = usable_values(summaries, f"constant_{self.objective.name}")
            row |= {f"constant_{self.objective.name}": fmean(constants)} if constants else {}
            row |= {
                "target": self.target,
                "rounds_to_target": mean_std(rounds)[0] if len(rounds) == len(histories) else None,
                "seeds_reaching_target": len(rounds),
            }
            for key in ("bytes_up", "bytes_down", "seconds", "seconds_simulated"):
                costs = [s[key] for s in summaries if key in s]
                row |= {key: fmean(costs)} if costs else {}
            table.append({**row, "bytes_up": None, "bytes_down": None} if row["reference"] else row)
        return table

    def to_pandas(self) -> pd.DataFrame:
        """Return ``rows`` as a data frame (needs pandas)."""
        return to_data_frame(self.rows())

    def _shown(self) -> list[dict[str, str]]:
        """Return the table rows for notebooks."""
        table = []
        for row in self.rows():
            judged = objective_metric(row).name
            shown = dict.fromkeys([judged, f"best_{judged}", "loss", f"client_{client_metric(row).name}_mean"])
            means = {name: format_mean_std(row[name], row[std_key(name)]) for name in shown}
            sent = {f"MB {way}": format_mean_std(row[f"bytes_{way}"], factor=1e-6) for way in ("up", "down")}
            reached = {f"rounds to {self.target:g}": format_mean_std(row["rounds_to_target"])}
            table.append({"method": row["method"], "seeds": str(row["seeds"]), **means, **reached, **sent})
        return table

    def __repr__(self) -> str:
        lines = [
            f"Comparison(target={self.target:g}, folder={None if self.folder is None else str(self.folder)!r})",
            *self.answers(),
        ]
        for row in self._shown():
            known = [f"{name} {text}" for name, text in row.items() if text != "–"]  # local has no global model
            lines.append("  " + ", ".join(known[:3]))
        return "\n".join(lines)

    def differences(self, metric: str | None = None) -> list[dict[str, Any]]:
        """Return the differences of a metric between all pairs of methods and references, paired by seed.

        Args:
            metric: Key of ``summaries``, such as ``client_accuracy_mean``; None means the objective, with ``keep=best`` that
                of the kept model.

        Returns:
            Rows with ``method``, ``minus``, ``seeds``, ``difference``, and ``low`` and ``high`` of its 95 % interval by
            Student's t, which needs two seeds with different differences.

        Raises:
            ConfigError: If no summary has the key.
        """
        key, rows = metric or self.objective.name, []
        groups = {name: group if metric else [*map(final_metrics, group)] for name, group in self.summaries.items()}
        known = {name for group in groups.values() for summary in group for name in summary}
        if key not in known:
            raise ConfigError(unknown_name("metric", key, known))
        for base, name in permutations(groups, 2):
            values = paired_differences(groups[name], groups[base], key)
            if values:
                low, high = (not are_equal(values) and interval95(values)) or (None, None)
                row = {"method": name, "minus": base, "seeds": len(values), "difference": mean_std(values)[0]}
                rows.append({**row, "low": low, "high": high})
        return rows

    def plot(self, path: str | Path | None = None) -> Path | Figure:
        """Plot the convergence of all methods, mean and standard deviation over seeds; references have no traffic.

        Args:
            path: Image file to write. None returns the figure, which notebooks display.
        """
        curves = {name: runs for name, runs in self.histories.items() if self.has_global_model(name)}
        return plot_convergence(curves, path, self.objective, list(filter(is_reference, curves)))


def rounds_notes(comparison: Comparison) -> list[str]:
    """Return a note if methods were trained for different numbers of rounds in a seed, as after early stopping."""
    rounds = {name: {run["seed"]: run["rounds"] for run in runs} for name, runs in comparison.ranked.items()}
    by_seed: dict[int, set[int]] = {}
    for seed, count in chain.from_iterable(own.items() for own in rounds.values()):
        by_seed.setdefault(seed, set()).add(count)
    counts = {name: sorted({*own.values()}) for name, own in rounds.items()}
    if len({*map(tuple, counts.values())}) == 1 and all(len(different) == 1 for different in by_seed.values()):
        return []
    each = ", ".join(
        f"{name} {' to '.join(map(str, dict.fromkeys([own[0], own[-1]])))}" for name, own in counts.items()
    )
    return [f"The methods were trained for different numbers of rounds: {each}."]


WEIGHTINGS = {"samples": "by samples", "uniform": "equally", "computed": "with computed weights"}
"""Weightings of clients in an average, with their descriptions."""


def weighting_notes(comparison: Comparison) -> list[str]:
    """Return a note if methods weight clients of different sizes differently; those without an average are left out."""
    groups = {
        weighting: [name for name, own in comparison.ranked.items() if own[0].get("client_weighting") == weighting]
        for weighting in WEIGHTINGS
    }
    known = {weighting: names for weighting, names in groups.items() if names}
    if not comparison.unequal or len(known) < 2:
        return []
    each = ", ".join(f"{', '.join(names)} {WEIGHTINGS[weighting]}" for weighting, names in known.items())
    note = f"Clients differ in size and the methods weight them differently: {each}. They therefore optimize different "
    note += "averages."
    if {"samples", "uniform"} <= {*known}:
        whose = "all" if len(known) == 2 else "those without computed weights"
        note += f" Pass --client-weighting samples (or uniform) to use one weighting for {whose}."
    return [note]


def default_target(summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> float:
    """Return the default target for counting rounds: 90 % of the best method's mean best value.

    If a constant prediction reaches this, it is 90 % of the way from the constant to the best value. If no method trains a
    global model, the best value is that of the references.

    Args:
        summaries: Summaries over seeds, by method, with references.
    """
    objective = objective_metric(next(iter(summaries.values()))[0])
    for references in (False, True):
        groups = {name: group for name, group in summaries.items() if is_reference(name) is references}
        means = rank_means(groups, objective, f"best_{objective.name}")
        if means:
            constants = usable_values(chain.from_iterable(groups.values()), f"constant_{objective.name}")
            return objective.default_target(next(iter(means.values())), mean_or_none(constants))
    return 0.0
