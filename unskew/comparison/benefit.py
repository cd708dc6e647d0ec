"""Benefit of federated training for each client: compared with training alone, with pooled data and with a constant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

from unskew.comparison.references import is_local, is_reference
from unskew.comparison.significance import Estimate, difference, holm, mean_over_clients
from unskew.comparison.summary_statistics import Summary, final_metrics, interval_of, is_usable_number, rank_means
from unskew.tasks.few_samples import compares_classes, has_few_samples
from unskew.tasks.intervals import clip_interval, interval_fields
from unskew.tasks.primary_metric import MetricInfo, primary_metric_name
from unskew.tasks.registry import client_metric, objective_metric, task_scored_by

PREFIXES = {"personal": "personal_", "constant": "constant_"}
"""Compared models whose metrics have a prefix in the rows of ``clients.jsonl``."""
MODELS = ("federated", "personal", "pooled", "local", "constant")
"""Compared models, in the order of tables."""


@dataclass(frozen=True)
class ClientValues:
    """Metrics of one client.

    Attributes:
        label: Name of the client.
        group: 0 if the clients are the same in all seeds, otherwise the position of the client's seed.
        samples: Number of held-out samples, mean over seeds.
        events: Number of held-out events, or of samples of the class that is rarest over all clients; None without both.
        values: Estimate of each compared model in each seed in which it is defined, by model and position of the seed.
    """

    label: str
    group: int
    samples: float
    events: float | None
    values: Mapping[str, Mapping[int, Estimate]]

    def estimate(self, model: str, base: str | None = None) -> Estimate | None:
        """Return the mean over seeds; None if the metric is undefined in all of them.

        The ends of the intervals are averaged as well, because the seeds share their samples.

        Args:
            model: Compared model.
            base: Model whose values in the same seeds are subtracted, or None.
        """
        models = [self.values.get(name, {}) for name in (model, base) if name is not None]
        seeds = set(models[0]).intersection(*models)
        if not seeds:
            return None
        means = [_mean([values[seed] for seed in seeds]) for values in models]
        return means[0] if base is None else difference(*means)


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of values and of the ends of their intervals; without an interval if a value has none."""
    value = fmean(entry.value for entry in estimates)
    intervals = [entry.interval for entry in estimates if entry.interval]
    if len(intervals) < len(estimates):
        return Estimate(value)
    lows, highs = zip(*intervals, strict=True)
    return Estimate(value, (fmean(lows), fmean(highs)))


@dataclass(frozen=True)
class Benefit:
    """Comparison of the best methods with the references and a constant, client by client.

    Attributes:
        metric: Compared metric.
        scored: Name of the task's primary metric.
        labels: Method of each compared model: ``federated`` (best global model), ``personal`` (best personal models),
            ``pooled``, ``local`` and ``constant`` (its description); without those that were not run or trained.
        candidates: Number of methods from which ``federated`` and ``personal`` were chosen.
        clients: Clients at which the metric is defined, for the federated model and for ``local``.
        undefined: Labels of the other clients.
        seeds: Number of seeds.
        measured_on: Description of the evaluated samples.
        shows_events: Whether tables have the numbers of events: for survival, and for two classes.
    """

    metric: MetricInfo
    scored: str
    labels: Mapping[str, str]
    candidates: Mapping[str, int]
    clients: Sequence[ClientValues]
    undefined: Sequence[str]
    seeds: int
    measured_on: str
    shows_events: bool = False

    @property
    def main(self) -> str:
        """Model that is compared with a constant: ``federated``, or ``personal`` if no global model is trained."""
        return "federated" if "federated" in self.labels else "personal"

    @property
    def same_clients(self) -> bool:
        """Return whether the clients are the same in all seeds."""
        return all(client.group == 0 for client in self.clients)

    @property
    def small(self) -> list[str]:
        """Labels of the clients with few held-out samples, or with few events for a metric of a class."""
        of_classes = compares_classes(self.metric, self.scored)
        return [
            client.label
            for client in self.clients
            if has_few_samples(client.samples, client.events if of_classes else None)
        ]

    @property
    def averaged(self) -> Sequence[ClientValues]:
        """Return the clients over which means are taken: those that are not small, or all if fewer than two are left."""
        small = {*self.small}
        large = [client for client in self.clients if client.label not in small]
        return large if len(large) > 1 else self.clients

    def at_clients(self, model: str, base: str) -> list[Estimate | None]:
        """Return the difference of each client, in order, with p-values corrected by Holm's method over the clients.

        Small clients are not tested: there, intervals rest on approximations that do not hold.

        Args:
            model: Compared model.
            base: Model whose values are subtracted.
        """
        small = {*self.small}
        pairs = [client.estimate(model, base) for client in self.clients]
        for k, client in enumerate(self.clients):
            if (pair := pairs[k]) and client.label in small:
                pairs[k] = replace(pair, p=None)
        corrected = iter(holm([pair.p for pair in pairs if pair and pair.p is not None]))
        return [replace(pair, p=next(corrected)) if pair and pair.p is not None else pair for pair in pairs]

    def decisions(self, model: str, base: str) -> Counter[str]:
        """Count the clients at which a model is a gain, a loss or a tie, and those without a test.

        Args:
            model: Compared model.
            base: Model that it is compared with.
        """
        return Counter(pair.decision(self.metric.lower_is_better) for pair in self.at_clients(model, base) if pair)

    def improves(self, model: str, base: str) -> bool | None:
        """Return whether a model is better than another one; None if that is undecided.

        It is decided if the interval of the mean over clients excludes zero, or if more than half of the clients gain and
        none loses, or the other way round.

        Args:
            model: Compared model.
            base: Model that it is compared with.
        """
        count, mean = self.decisions(model, base), self.over_clients(model, base)
        if mean is not None and mean.interval is not None and not mean.interval[0] <= 0 <= mean.interval[1]:
            return self.metric.rank(mean.value) > 0
        if not min(count["gain"], count["loss"]) and max(count["gain"], count["loss"]) > len(self.clients) / 2:
            return count["gain"] > 0
        return None

    def over_clients(self, model: str, base: str | None = None) -> Estimate | None:
        """Return the mean over clients; None if no client has a value.

        Args:
            model: Compared model.
            base: Model whose values are subtracted, or None.
        """
        groups: dict[int, list[float]] = {}
        for client in self.averaged:
            if (entry := client.estimate(model, base)) is not None:
                groups.setdefault(client.group, []).append(entry.value)
        mean = mean_over_clients(list(groups.values())) if groups else None
        if mean is None or base is not None:
            return mean
        return replace(mean, interval=clip_interval(mean.interval, self.metric))

    def overview(self) -> list[dict[str, Any]]:
        """Return a row for each compared model: its mean over clients, and its difference to training alone.

        The ends of the 95 % intervals have the suffixes ``_low`` and ``_high``.
        """
        rows = []
        for model, label in self.labels.items():
            mean, minus = self.over_clients(model), None if model == "local" else self.over_clients(model, "local")
            row = {"model": model, "method": label, "clients": mean.clients if mean else 0, **_fields("mean", mean)}
            if self.metric.name == "r2":
                row["r2_within_clients"] = self._within_clients(model)
            if "local" in self.labels:
                count = self.decisions(model, "local")
                row |= _fields("minus_local", minus)
                known = minus is not None and {*count} != {"untested"}
                row |= {decision: count[decision] if known else None for decision in ("gain", "tie", "loss")}
            rows.append(row)
        return rows

    def _within_clients(self, model: str) -> float | None:
        """Return R² relative to the clients' own means: 1 minus the ratio of the mean squared errors."""
        pairs = [(client.estimate(model), client.estimate("constant")) for client in self.averaged]
        known = [(1 - own.value, 1 - constant.value) for own, constant in pairs if own and constant]
        against = sum(constant for _, constant in known)
        return 1 - sum(own for own, _ in known) / against if against > 0 else None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each client, those with the largest loss against training alone first.

        ``n`` and ``events`` are numbers of held-out samples, the latter only if ``shows_events``. The ends of the 95 %
        intervals have the suffixes ``_low`` and ``_high``, and p-values, corrected by Holm's method over the clients, the
        suffix ``_p``.
        """
        compared = [model for model in ("federated", "personal") if {model, "local"} <= {*self.labels}]
        pairs = {model: self.at_clients(model, "local") for model in compared}
        rows: list[dict[str, Any]] = []
        for k, client in enumerate(self.clients):
            row = {
                "client": client.label,
                "n": client.samples,
                **({"events": client.events} if self.shows_events else {}),
            }
            for model in self.labels:
                row |= _fields(model, client.estimate(model))
            for model, differences in pairs.items():
                pair = differences[k]
                row |= {**_fields(f"{model}_minus_local", pair), f"{model}_minus_local_p": pair.p if pair else None}
            rows.append(row)
        first = f"{self.main}_minus_local" if pairs else self.main
        return sorted(rows, key=lambda row: self.metric.rank(row[first] or 0.0))


def _fields(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return the fields of an estimate in a row."""
    value, interval = (None, None) if estimate is None else (estimate.value, estimate.interval)
    return {name: value, **interval_fields(name, interval)}


def assess_benefit(
    summaries: Mapping[str, Sequence[Summary]], clients: Mapping[str, Sequence[Sequence[Summary]]]
) -> Benefit | None:
    """Compare the best methods with the references and a constant; None if no client was evaluated.

    The best global model is that of the best method on the test set, which is not used here. The best personal models have
    the best mean over clients. Methods with diverged seeds are chosen only if all have some.

    Args:
        summaries: Summary of each run, by method.
        clients: Rows of the clients of each run, by method, in the same order.
    """
    ranked = [name for name in summaries if not is_reference(name)]
    if not ranked:
        return None
    first = summaries[ranked[0]][0]
    objective, metric, scored = objective_metric(first), client_metric(first), primary_metric_name(first)
    labels, candidates = dict[str, str](), dict[str, int]()
    personal = f"personal_{metric.name}_mean"
    for model, key, info in (("federated", objective.name, objective), ("personal", personal, metric)):
        means = rank_means({name: [*map(final_metrics, summaries[name])] for name in ranked}, info, key)
        if means:
            labels[model] = next(iter(means))
            candidates[model] = len(means)
    if not labels:
        labels, candidates = {"federated": ranked[0]}, {"federated": 1}
    main = next(iter(labels))  # federated if there is a global model
    labels |= {("local" if is_local(name) else "pooled"): name for name in summaries if is_reference(name)}
    constant = "most frequent class" if metric.name == "accuracy" else task_scored_by(scored).constant_name
    labels["constant"] = f"each client's {constant}"
    rows = {  # of each model, in each seed and partition, by client
        model: {
            (summary["seed"], summary["partition_hash"]): {row["client"]: row for row in own if "unseen" not in row}
            for summary, own in zip(summaries[name], clients.get(name, ()), strict=False)
        }
        for model, name in {**labels, "constant": labels[main]}.items()
    }
    seeds = list(rows[main])
    trained = [[row for row in rows[main][seed].values() if "attacker" not in row] for seed in seeds]
    everyone = list(chain.from_iterable(trained))
    named, rarest = all(isinstance(row.get("name"), str) for row in everyone), rarest_class(everyone)
    same = named or len({partition for _, partition in seeds}) == 1
    runs: dict[tuple[int, str], dict[int, dict[str, Summary]]] = {}
    for position, seed in enumerate(seeds):
        for row in (row for row in trained[position] if metric.name in row):
            k = row["client"]
            label = client_label(row) if same else f"client {k} of seed {seed[0]}"
            own = {model: of_seed[seed][k] for model, of_seed in rows.items() if k in of_seed.get(seed, ())}
            runs.setdefault((0 if same else position, label), {})[position] = own
    units = [_client_values(label, group, own, metric.name, rarest) for (group, label), own in runs.items()]
    needed, present = {main, "local"} & {*labels}, {model for unit in units for model in unit.values}
    if not needed <= present:
        return None
    defined = [unit for unit in units if needed <= {*unit.values}]
    undefined = [unit.label for unit in units if not needed <= {*unit.values}]
    models = {model: labels[model] for model in MODELS if model in present}
    where = str(first.get("clients_evaluated_on"))
    classes = {name for row in everyone for name in (*row.get("class_counts", ()), *row.get("support", ()))}
    shows_events = any("events" in row for row in everyone) or (rarest is not None and len(classes) == 2)
    return Benefit(metric, scored, models, candidates, defined, undefined, len(seeds), where, shows_events)


def client_label(row: Summary) -> str:
    """Return the label of a client in sentences and reports: its name, otherwise its number."""
    name = row.get("name")
    return name if isinstance(name, str) else f"client {row['client']}"


def _client_values(
    label: str, group: int, runs: Mapping[int, Mapping[str, Summary]], name: str, rarest: str | None
) -> ClientValues:
    """Return the values of a client.

    Args:
        label: Label of the client.
        group: Group of the client.
        runs: The client's row of each compared model, by position of the seed.
        name: Name of the metric.
        rarest: Number of the class whose held-out samples are counted as events; None without classes.
    """
    values: dict[str, dict[int, Estimate]] = {}
    for position, rows in runs.items():
        for model, row in rows.items():
            key = PREFIXES.get(model, "") + name
            if is_usable_number(row.get(key)):
                values.setdefault(model, {})[position] = Estimate(row[key], interval_of([row], key))
    own = [rows["constant"] for rows in runs.values()]
    events = [count for row in own if (count := num_events(row, rarest)) is not None]
    samples = fmean(row.get("num_held_out", 0) for row in own)
    return ClientValues(label, group, samples, fmean(events) if events else None, values)


def num_events(row: Summary, rarest: str | None) -> float | None:
    """Return the number of held-out events or samples of the rarest class; None if the row does not count them.

    Args:
        row: Row of a client in ``clients.jsonl``.
        rarest: Number of the rarest class, or None.
    """
    if "events" in row:
        return float(row["events"])
    return row["support"].get(rarest, 0) if rarest and "support" in row else None


def rarest_class(rows: Iterable[Summary]) -> str | None:
    """Return the number of the class with the fewest held-out samples over all clients; None without classes."""
    totals: Counter[str] = Counter()
    for row in rows:
        if "support" in row:
            totals.update({**dict.fromkeys(row.get("class_counts", ()), 0), **row["support"]})
    return min(totals, key=lambda name: (totals[name], int(name)), default=None)
