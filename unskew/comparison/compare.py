"""Comparison of methods with the same data, partition, cohorts and initial model for each seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, permutations
from numbers import Integral
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from unskew.attacks.registry import divergence_remedy
from unskew.comparison import references as reference_rows
from unskew.comparison.benefit import Benefit, assess_benefit
from unskew.comparison.benefit_text import benefit_sentences, sampling_error_text
from unskew.comparison.overrides import check_same_data, check_same_objective, overrides_by_method
from unskew.comparison.references import (
    applicable_references,
    is_local,
    is_reference,
    reference_config,
    without_global_model,
)
from unskew.comparison.same_settings import check_same_settings
from unskew.comparison.single_run import Given, last, run_or_resume
from unskew.comparison.summary_statistics import (
    averaged_keys,
    is_metric,
    mean_std,
    paired_differences,
    std_key,
    usable_values,
)
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.federation import Federation
from unskew.errors import ConfigError, list_items, short_repr
from unskew.expressions import MOST_SEEDS, parse_seed_list
from unskew.filesystem import output_folder, parse_path, write_atomic
from unskew.generators.synthetic_dataset import SYNTHETIC
from unskew.methods.registry import MethodLike, method
from unskew.plots.curves import plot_clients_by_class, plot_convergence
from unskew.privacy.composition import composition_note
from unskew.records.notebook import NotebookTable, format_mean_std, notebook_progress, to_data_frame
from unskew.records.recorder import Callback, first_reaching, with_closing
from unskew.runs.api_arguments import config_from_arguments, method_expression, model_object
from unskew.runs.build_model import ModelLike
from unskew.runs.cost import WORTH, check_budget, check_within, estimate
from unskew.runs.parallel import check_parallel, num_parallel_runs, run_in_pool, run_jobs
from unskew.runs.preparation import check_given_set
from unskew.runs.process_pool import Job
from unskew.runs.run import finished_rounds
from unskew.runs.validation import check_method
from unskew.tasks.formatting import value_text
from unskew.tasks.intervals import interval95
from unskew.tasks.primary_metric import MetricInfo, client_metric_name, objective_metric, primary_metric_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison(NotebookTable):
    """Results of a comparison.

    Attributes:
        histories: History of each seed, by method.
        summaries: Summary of each seed, by method.
        target: Value of the objective for which rounds are counted: the requested one, or 90% of the best mean reached.
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
    def objective(self) -> MetricInfo:
        """Metric by which the runs are compared."""
        return objective_metric(next(iter(self.summaries.values()))[0])

    @cached_property
    def benefit(self) -> Benefit | None:
        """Comparison with training alone and with a constant, client by client; None if no client was evaluated."""
        return assess_benefit(self.summaries, self.clients)

    def answers(self) -> list[str]:
        """Return sentences that answer whether federated training and personal models help the clients.

        The last one compares the best method with a constant on the test set, and states the sampling error of that set.
        """
        if self.benefit is None:
            return []
        best = self.benefit.labels["federated"]
        values = usable_values(self.summaries[best], self.objective.name)
        lines, sampling = benefit_sentences(self.benefit), sampling_error_text(self.summaries[best], self.objective)
        if values and sampling:
            lines.append(f"Test set: {best} scores {value_text(self.objective, fmean(values), sign=' %')}{sampling}.")
        return lines

    _sentences = answers

    def notes(self) -> list[str]:
        """Return notes on the table: different numbers of rounds or weightings of clients, diverged runs."""
        rounds = {name: summaries[0]["rounds"] for name, summaries in self.ranked.items()}
        notes = list(self.left_out)
        if len(set(rounds.values())) > 1:
            each = ", ".join(f"{name} {count}" for name, count in rounds.items())
            notes.append(f"The methods were trained for different numbers of rounds: {each}.")
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

        ``personal`` metrics are None for methods without personal models. In the rows of references, ``reference`` is
        true, traffic is None, and metrics of the global model are None for ``local``, whose ``client`` metrics are
        those of the clients' own models.
        """
        table = []
        for name, summaries in self.summaries.items():
            histories = self.histories[name]
            reached = (
                first_reaching(with_closing(history, summary), self.target, self.objective)
                for history, summary in zip(histories, summaries, strict=True)
            )
            rounds = [first["round"] for first in reached if first is not None]
            row: dict[str, Any] = {"method": name, "seeds": len(summaries)}
            row |= {"client_weighting": summaries[0].get("client_weighting"), "reference": is_reference(name)}
            row["diverged"] = sum(bool(s.get("diverged")) for s in summaries)
            row |= {key: summaries[0][key] for key in ("objective", "own_metrics", "positive") if key in summaries[0]}
            figures = [key for key in summaries[0] if is_metric(key)]
            for key in (*averaged_keys(summaries[0]), *figures):
                values = [s[key] for s in summaries if s.get(key) is not None]
                row[key], row[std_key(key)] = mean_std(values) if values else (None, None)
            for key in ("epsilon", "epsilon_if_secret", "epsilon_replaced"):
                if key in summaries[0]:
                    spent = [summary[key] for summary in summaries]
                    row[key] = None if None in spent else max(spent)
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
            own = client_metric_name(judged, primary_metric_name(row))
            shown = dict.fromkeys([judged, f"best_{judged}", "loss", f"client_{own}_mean"])
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
            metric: Key of ``summaries``, such as ``client_accuracy_mean``; None means the objective.

        Returns:
            Rows with ``method``, ``minus``, ``seeds``, ``difference``, and ``low`` and ``high`` of its 95 % interval by
            Student's t, which needs two seeds.
        """
        key, rows = metric or self.objective.name, []
        for base, name in permutations(self.summaries, 2):
            values = paired_differences(self.summaries[name], self.summaries[base], key)
            if values:
                low, high = interval95(values) or (None, None)
                row = {"method": name, "minus": base, "seeds": len(values), "difference": mean_std(values)[0]}
                rows.append({**row, "low": low, "high": high})
        return rows

    def plot(self, path: str | Path | None = None) -> Path | Figure:
        """Plot the convergence of all methods, mean and standard deviation over seeds; references have no traffic.

        Args:
            path: Image file to write. None returns the figure, which notebooks display.
        """
        curves = {name: runs for name, runs in self.histories.items() if not is_local(name)}
        return plot_convergence(curves, path, self.objective, list(filter(is_reference, curves)))


def weighting_notes(comparison: Comparison) -> list[str]:
    """Return a note if methods weight clients of different sizes differently."""
    weights = {name: own[0].get("client_weighting") for name, own in comparison.ranked.items()}
    by_samples, alike = ([name for name in weights if weights[name] == which] for which in ("samples", "uniform"))
    if not (comparison.unequal and by_samples and alike):
        return []
    return [
        f"Clients differ in size and the methods weight them differently: {', '.join(by_samples)} by samples, "
        f"{', '.join(alike)} equally. They therefore optimize different averages. Pass "
        "--client-weighting samples (or uniform) to use one weighting for all."
    ]


LONGEST_NAME = 200
"""Longest name of a folder in bytes; file systems allow 255, and files get a suffix."""


def folder_name(spelling: str) -> str:
    """Convert a method expression to a folder name, which is short enough for file systems.

    >>> folder_name("fedprox:mu=0.1+scaffold"), folder_name(f"digits-fedprox:mu=0.{'1' * 300}-seed0")
    ('fedprox-mu=0.1+scaffold', 'digits-fedprox-mu=0.111...111-seed0')
    """
    name = "".join(c if c.isalnum() or c in "+=.,_-" else "-" for c in spelling)
    data = name.encode()
    start, end = (part.decode(errors="ignore") for part in (data[: LONGEST_NAME // 2], data[-LONGEST_NAME // 2 :]))
    digest = hashlib.sha256(spelling.encode()).hexdigest()[:8]
    return name if len(data) <= LONGEST_NAME else f"{start}-{digest}-{end}"


def compare(
    federation: Federation | None = None,
    *,
    methods: Sequence[MethodLike],
    seeds: int | str | Sequence[int] = 3,
    model: ModelLike | Mapping[str, Any] | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callback_factory: Callable[[str, int, Experiment], Sequence[Callback]] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    parallel: int | str = 1,
    references: bool | None = None,
    budget_minutes: float | None = None,
    on_estimate: Callable[[str], None] | None = None,
    **options: Any,
) -> Comparison:
    """Run several methods on the same data, cohorts and initial models.

    Args:
        federation: Data for all seeds; if None, data are loaded and partitioned for each seed.
        methods: Methods as ``unskew.method`` accepts them.
        seeds: Seeds as a list or a string (``"0..4"``, ``"0,1,7"``); an integer n means the seeds 0 to n - 1.
        model: Model, see ``unskew.run``.
        target: Value of the objective for which rounds are counted; 90% of the best mean if None.
        out: Folder for all runs, plots and ``comparison.json``.
        resume: Continue in an existing ``out``: finished runs are reused, interrupted ones are resumed.
        callback_factory: Returns the callbacks of a run for its method, seed and configuration.
        overrides: Fields that differ for single methods, by method expression: ``{"fedavg": {"lr": 0.1}}``; no data
            fields.
        parallel: Number of concurrent runs, each in its own process; ``auto`` chooses it from cores and model size. On
            a Ray cluster ``"8@HOST:PORT"``, with an ``out`` that all nodes can access.
        references: Whether to add the unranked rows ``pooled`` (centralized training on the data of all clients) and
            ``local`` (each client alone); those that do not fit are omitted with a note. None means True.
        budget_minutes: Maximum estimated time; a longer comparison raises ``ConfigError``.
        on_estimate: Called with the estimated time as text, unless it is short or unknown.
        **options: Fields of ``unskew.Experiment``.

    Raises:
        ConfigError: If an option is not valid, a method is named twice, ``out`` already exists or has runs with other
            settings, or the estimate is above ``budget_minutes``.
    """
    if budget_minutes is not None:
        check_budget(budget_minutes)
    if isinstance(methods, str):
        methods = [methods]
    if not isinstance(methods, Sequence):
        raise ConfigError(f"methods must be a list such as ['fedavg', 'scaffold'], not {short_repr(methods)}.")
    if callback_factory is not None and not callable(callback_factory):
        raise ConfigError(
            "callback_factory must be a function of a method, a seed and a configuration, not "
            f"{short_repr(callback_factory)}."
        )
    check_parallel(parallel)
    names = [method_expression(m) for m in methods]
    if all(map(is_reference, names)):
        raise ConfigError("Name at least one method. pooled and local are only references to compare it with.")
    folders = [folder_name(name).casefold() for name in names]  # some file systems do not distinguish case
    twice = ", ".join(sorted({name for name, own in zip(names, folders, strict=True) if folders.count(own) > 1}))
    if twice:
        raise ConfigError(f"Name each method only once: {twice} is listed twice.")
    by_name = dict(zip(names, map(method, methods), strict=True))
    names.sort(key=is_reference)  # stable: references come last
    which = seed_list(seeds)
    folder = None if out is None else parse_path(out).absolute()
    if not {"method", "seed"}.isdisjoint(options):
        raise ConfigError("A comparison takes methods=[...] and seeds=... instead of method and seed.")
    experiment({**options, "target": target})  # validate the options, including the target
    values, own_model = config_from_arguments(options, federation, model), model_object(model)
    # Given synthetic images are used only by methods that would otherwise generate some.
    makers = {name for name, m in by_name.items() if any(rule.generates_data for rule in m.data)}
    others = {name: {"synthetic": None} for name in names if makers and name not in makers}
    own = overrides_by_method(overrides, names)

    def config_of(name: str, seed: int) -> Experiment:
        fields = {**values, **others.get(name, {}), **own[name], "seed": seed, "method": name}
        return experiment(reference_config(fields, name) if is_reference(name) else fields, by_name[name])

    configs = {(name, seed): config_of(name, seed) for seed in which for name in names}
    check_same_data(configs[name, which[0]] for name in names)
    check_same_objective(configs[name, which[0]] for name in names)
    result, unequal = Comparison({name: [] for name in names}, {name: [] for name in names}, 0.0, folder), False

    def begun() -> bool:
        """Return whether a run was started or shared data were generated."""
        return folder is not None and (any(folder.glob("*/*/config.yaml")) or (folder / SYNTHETIC).exists())

    shared_inputs: Given = (federation, own_model, by_name)

    def data_of(seed: int) -> Federation:
        return federation or last.of(configs[names[0], seed])

    def arguments(name: str, seed: int) -> tuple[str, Experiment, Path | None, Path | None]:
        folder_path = None if folder is None else folder / folder_name(name) / f"seed-{seed}"
        return name, configs[name, seed], folder_path, None if folder is None else folder / SYNTHETIC

    def followers(name: str, seed: int) -> Sequence[Callback]:
        return list(callback_factory(name, seed, configs[name, seed])) if callback_factory else []

    def pool_followers(name: str, seed: int) -> Sequence[Callback]:
        return [*followers(name, seed), *notebook_progress()]

    with output_folder(folder, resume, begun):
        if folder is not None:
            check_same_settings(folder, configs, by_name)
        size, data = 0, data_of(which[0])
        for name, m in by_name.items():  # validate all methods before training the first
            spec, _ = check_method(configs[name, which[0]], data, own_model, m)
            check_given_set(configs[name, which[0]], m)
            size = max(size, spec.size)
        if reference_rows.BY_DEFAULT if references is None else references:
            base = "fedavg" if "fedavg" in names else names[0]
            more, left_out = applicable_references(configs[base, which[0]], data, own_model, names)
            by_name |= more
            own |= dict.fromkeys(more, own[base])
            names += more
            result = replace(result, left_out=tuple(left_out))
            configs |= {(name, seed): config_of(name, seed) for seed in which for name in more}
        if folder is not None:
            title, image = f"{data.name}, {data.partition}, seed {which[0]}", folder / "clients.png"
            plot = partial(plot_clients_by_class, client_names=data.client_names, exclusive=data.task != "multilabel")
            plot(*data.label_distribution(), image, title)
        at_once = num_parallel_runs(parallel, list(configs.values()), size)
        if budget_minutes is not None or on_estimate is not None:
            finished_ones = {config for config in configs if is_finished(arguments(*config)[2], configs[config])}
            left = {name: [seed for seed in which if (name, seed) not in finished_ones] for name in names}
            todo = {name: (configs[name, which[0]], by_name[name], len(todo)) for name, todo in left.items() if todo}
            known = None
            if todo and not (isinstance(parallel, str) and "@" in parallel):
                known = estimate(todo, data, own_model, at_once, WORTH if budget_minutes is None else 0)
            if budget_minutes is not None and todo:
                check_within(known, budget_minutes)
            if on_estimate is not None and known is not None:
                on_estimate(str(known))
        works = [Job(config, run_or_resume, arguments(*config), partial(pool_followers, *config)) for config in configs]
        finished = dict(run_jobs(works, at_once, shared_inputs)) if run_in_pool(at_once) else {}
        for seed in which:
            for name in names:
                run = finished.get((name, seed))
                if run is None:
                    run = run_or_resume(shared_inputs, *arguments(name, seed), followers(name, seed))
                history, summary, rows = run
                if is_local(name):
                    own_metrics = summary.get("own_metrics", ())
                    history, rows = ([without_global_model(row, own_metrics) for row in t] for t in (history, rows))
                    summary = without_global_model(summary, own_metrics)
                result.histories.setdefault(name, []).append(history)
                result.summaries.setdefault(name, []).append(summary)
                result.clients.setdefault(name, []).append(rows)
            if len({group[0]["client_weighting"] for group in result.ranked.values()}) > 1:
                unequal = unequal or len(set(data_of(seed).sizes.tolist())) > 1
        if target is None:
            target = default_target(result.ranked.values())
        result = replace(result, target=target, unequal=unequal)
        if folder is not None:
            result.plot(folder / "convergence.png")
            write_atomic(folder / "comparison.json", (json.dumps(result.rows(), indent=2) + "\n").encode())
    return result


def is_finished(folder: Path | None, config: Experiment) -> bool:
    """Return whether a run folder contains all rounds of a run.

    Args:
        folder: Run folder, or None.
        config: Configuration of the run.
    """
    return folder is not None and folder.exists() and finished_rounds(folder) == config.rounds


def default_target(groups: Iterable[Sequence[Mapping[str, Any]]]) -> float:
    """Return the default target for counting rounds: 90 % of the best method's mean best value.

    Args:
        groups: Summaries over seeds, for each method.
    """
    groups = list(groups)
    objective = objective_metric(groups[0][0])
    means = [fmean(values) for group in groups if (values := usable_values(group, f"best_{objective.name}"))]
    return objective.default_target(max(means, key=objective.rank)) if means else 0.0


def seed_list(seeds: int | str | Sequence[int]) -> list[int]:
    """Return the seeds as a list; an integer n means 0 to n - 1.

    Args:
        seeds: Number of seeds, a list of seeds, or an expression such as ``0..2,7``.

    Raises:
        ConfigError: If there are no seeds, duplicates or too many seeds.
    """
    if isinstance(seeds, str):
        return parse_seed_list(seeds)
    if isinstance(seeds, int) and not 1 <= seeds <= MOST_SEEDS:
        raise ConfigError(
            f"seeds={short_repr(seeds)} is not valid: the number of seeds must be from 1 to {MOST_SEEDS}."
        )
    wrong = ConfigError(
        f"seeds must be a number of seeds or a list of seeds such as [0, 1, 7], not {short_repr(seeds)}."
    )
    which = list(range(seeds)) if isinstance(seeds, int) else list_items(seeds, wrong)
    for seed in which:
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
            raise ConfigError(f"A seed must be an integer from 0 and below 2**63, not {short_repr(seed)}.")
    if not which or len(set(which)) < len(which):
        raise ConfigError("Name at least one seed, and each only once.")
    return which
