"""Benefit of federated training for each client: compared with training alone, with pooled data and with a constant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unskew.comparison.benefit_text import FEWEST, Entry, benefit_sentences, client_rows, overview_rows
from unskew.comparison.references import is_local, is_reference
from unskew.comparison.significance import Difference, Estimate, difference, holm, interval_over_clients
from unskew.comparison.summary_statistics import is_usable_number, mean_std
from unskew.tasks.intervals import Interval
from unskew.tasks.primary_metric import (
    MetricInfo,
    client_metric_name,
    metric_info,
    objective_metric,
    primary_metric_name,
)

PREFIXES = {"federated": "", "personal": "personal_", "local": "", "pooled": "", "constant": "constant_"}
"""Compared models, and the prefix of their metrics in the rows of ``clients.jsonl``."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ClientValues:
    """Metrics of one client.

    Attributes:
        label: Name of the client.
        group: 0 if the clients are the same in all seeds, otherwise the position of the client's seed.
        samples: Number of held-out samples, mean over seeds.
        events: Number of held-out samples of the class that is rarest over all clients; None without classes.
        values: Estimate of each compared model in each seed in which it is defined, by model and position of the seed.
    """

    label: str
    group: int
    samples: float
    events: float | None
    values: Mapping[str, Mapping[int, Estimate]]

    def estimate(self, model: str, seeds: Iterable[int] | None = None) -> Estimate | None:
        """Return the mean over seeds; None if the metric is undefined in all of them.

        The ends of the intervals are averaged as well, because the seeds share their samples.

        Args:
            model: Compared model.
            seeds: Positions of the seeds; None means all in which the metric is defined.
        """
        own = self.values.get(model, {})
        chosen = [own[seed] for seed in (own if seeds is None else seeds)]
        if not chosen:
            return None
        value = float(np.mean([entry.value for entry in chosen]))
        ends = [
            [end for end in ends if end is not None] for ends in zip(*((e.low, e.high) for e in chosen), strict=True)
        ]
        if min(map(len, ends)) < len(chosen):
            return Estimate(value)
        return Estimate(value, *(float(np.mean(end)) for end in ends))

    def minus(self, model: str, base: str) -> Difference | None:
        """Return the difference between two models over the seeds in which both are defined; None if there are none."""
        shared = [seed for seed in self.values.get(model, {}) if seed in self.values.get(base, {})]
        a, b = self.estimate(model, shared), self.estimate(base, shared)
        return None if a is None or b is None else difference(a, b)


@dataclass(frozen=True)
class Benefit:
    """Comparison of the best methods with the references and a constant, client by client.

    Attributes:
        metric: Compared metric.
        labels: Method of each compared model: ``federated`` (best global model), ``personal`` (best personal models),
            ``local``, ``pooled`` and ``constant``; without those that were not run.
        candidates: Number of methods from which ``federated`` and ``personal`` were chosen.
        clients: Clients at which the metric is defined, for the federated model and for ``local``.
        undefined: Labels of the other clients.
        seeds: Number of seeds.
        measured_on: Description of the evaluated samples.
        scored: Name of the task's primary metric.
    """

    metric: MetricInfo
    labels: Mapping[str, str]
    candidates: Mapping[str, int]
    clients: Sequence[ClientValues]
    undefined: Sequence[str]
    seeds: int
    measured_on: str
    scored: str

    @property
    def same_clients(self) -> bool:
        """Return whether the clients are the same in all seeds."""
        return all(client.group == 0 for client in self.clients)

    def differences(self, model: str, base: str) -> list[Difference | None]:
        """Return the difference of each client, in order, with p-values corrected by Holm's method over all clients.

        Args:
            model: Compared model.
            base: Model that it is compared with.
        """
        pairs = [client.minus(model, base) for client in self.clients]
        corrected = iter(holm([pair.p for pair in pairs if pair is not None and pair.p is not None]))
        return [pair if pair is None or pair.p is None else replace(pair, p=next(corrected)) for pair in pairs]

    def over_clients(self, model: str, base: str | None = None) -> tuple[float, Interval, int] | None:
        """Return the mean over clients, its 95 % interval and the number of clients; None if no client has a value.

        Args:
            model: Compared model.
            base: Model whose values are subtracted, or None.
        """
        groups: dict[int, list[float]] = {}
        for client in self.clients:
            entry = client.estimate(model) if base is None else client.minus(model, base)
            if entry is not None:
                groups.setdefault(client.group, []).append(entry.value)
        if not groups:
            return None
        mean = float(np.mean([np.mean(values) for values in groups.values()]))
        return mean, interval_over_clients(list(groups.values())), sum(map(len, groups.values()))

    def sentences(self) -> list[str]:
        """Return the answers in words."""
        return benefit_sentences(self)

    def overview(self) -> list[dict[str, Any]]:
        """Return a row for each compared model: its mean over clients, and its difference to training alone."""
        return [_plain(row) for row in overview_rows(self)]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each client, those with the largest loss against training alone first."""
        return [_plain(row) for row in client_rows(self)]

    def as_json(self) -> dict[str, Any]:
        """Return the sentences and both tables."""
        return {"answers": self.sentences(), "models": self.overview(), "clients": self.rows()}

    def is_small(self, client: ClientValues) -> bool:
        """Return whether a client has too few held-out samples, or too few events for a metric of a class."""
        rare = client.events is not None and self.metric.name not in (self.scored, "loss")
        return client.samples < FEWEST or (rare and client.events is not None and client.events < FEWEST)


def assess_benefit(
    summaries: Mapping[str, Sequence[Row]], clients: Mapping[str, Sequence[Sequence[Row]]]
) -> Benefit | None:
    """Compare the best methods with the references and a constant; None if no client was evaluated.

    The best global model is that of the best method on the test set, which is not used here. The best personal models have
    the best mean over clients.

    Args:
        summaries: Summary of each run, by method.
        clients: Rows of the clients of each run, by method, in the same order.
    """
    ranked = [name for name in summaries if not is_reference(name)]
    if not ranked:
        return None
    first = summaries[ranked[0]][0]
    objective, scored = objective_metric(first), primary_metric_name(first)
    metric = metric_info(client_metric_name(objective.name, scored), first.get("own_metrics"))
    labels, candidates = {}, {}
    for model, key, info in (
        ("federated", objective.name, objective),
        ("personal", f"personal_{metric.name}_mean", metric),
    ):
        means = {name: _mean(summaries[name], key) for name in ranked}
        ranks = {name: info.rank(mean) for name, mean in means.items() if mean is not None}
        if ranks:
            labels[model], candidates[model] = max(ranks, key=lambda name: ranks[name]), len(ranks)
    labels.setdefault("federated", ranked[0])
    labels |= {("local" if is_local(name) else "pooled"): name for name in summaries if is_reference(name)}
    labels["constant"] = labels["federated"]
    rows = {
        model: {
            (summary["seed"], summary["partition_hash"]): {row["client"]: row for row in own if "unseen" not in row}
            for summary, own in zip(summaries[name], clients.get(name, ()), strict=False)
        }
        for model, name in labels.items()
    }
    seeds = list(rows["federated"])
    named = all("name" in row for of_seed in rows["federated"].values() for row in of_seed.values())
    same = named or len({partition for _, partition in seeds}) == 1
    collected: dict[tuple[int, Any], list[tuple[int, dict[str, Row]]]] = {}
    for position, seed in enumerate(seeds):
        for client, row in rows["federated"][seed].items():
            own = {model: found for model in labels if (found := rows[model].get(seed, {}).get(client)) is not None}
            if "attacker" not in row and metric.name in row:
                key = (0 if same else position, row["name"] if named else client)
                collected.setdefault(key, []).append((position, own))
    rarest = _rarest_class([row for of_seed in rows["federated"].values() for row in of_seed.values()])
    units = []
    for (group, client), runs in collected.items():
        label = str(client) if named else f"client {client}" if same else f"client {client}, seed {seeds[group][0]}"
        units.append(_client_values(label, group, runs, metric.name, rarest))
    needed = [model for model in ("federated", "local") if model in labels]
    defined = [unit for unit in units if all(unit.values.get(model) for model in needed)]
    present = {model for unit in units for model, values in unit.values.items() if values}
    if not units or "federated" not in present:
        return None
    return Benefit(
        metric,
        {model: name for model, name in labels.items() if model in present},
        candidates,
        defined,
        [unit.label for unit in units if unit not in defined],
        len(seeds),
        str(first.get("clients_evaluated_on")),
        scored,
    )


def _plain(row: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: text if number is None else number for name, (text, number) in row.items()}


def _mean(summaries: Iterable[Row], key: str) -> float | None:
    values = [summary[key] for summary in summaries if is_usable_number(summary.get(key))]
    return mean_std(values)[0] if values else None


def _client_values(
    label: str, group: int, runs: Sequence[tuple[int, Mapping[str, Row]]], name: str, rarest: str | None
) -> ClientValues:
    """Return the values of a client from its rows in all seeds.

    Args:
        label: Label of the client.
        group: Group of the client.
        runs: Position of the seed and the client's row of each compared model.
        name: Name of the metric.
        rarest: Number of the class whose held-out samples are counted as events; None without classes.
    """
    values: dict[str, dict[int, Estimate]] = {}
    for position, rows in runs:
        for model, row in rows.items():
            key = f"{PREFIXES[model]}{name}"
            numbers = [row.get(entry) for entry in (key, f"{key}_low", f"{key}_high")]
            if is_usable_number(numbers[0]):
                ends = [end if is_usable_number(end) else None for end in numbers[1:]]
                values.setdefault(model, {})[position] = Estimate(float(row[key]), *ends)
    counted = [rows["federated"].get("held_out_class_counts") for _, rows in runs]
    events = [counts.get(rarest, 0) for counts in counted if counts is not None]
    samples = [rows["federated"].get("num_held_out", 0) for _, rows in runs]
    mean_events = float(np.mean(events)) if events and rarest is not None else None
    return ClientValues(label, group, float(np.mean(samples)), mean_events, values)


def _rarest_class(rows: Iterable[Row]) -> str | None:
    """Return the number of the class with the fewest held-out samples over all clients; None without classes."""
    totals: dict[str, int] = {}
    for row in rows:
        held_out = row.get("held_out_class_counts", {})
        for name in (*row.get("class_counts", ()), *held_out) if "held_out_class_counts" in row else ():
            totals.setdefault(name, 0)
        for name, count in held_out.items():
            totals[name] += count
    return min(totals, key=lambda name: totals[name], default=None)
