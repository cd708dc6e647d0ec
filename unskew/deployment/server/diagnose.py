"""``unskew deploy diagnose``: statistics of all sites, their skew and advice, from two exchanges of sums. Trains nothing."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.readers.encoders import numeric_columns
from unskew.deployment.flower.superlinks import RemoteSuperLink, RunLocation
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.connected_sites import connected_sites, owner_only_files, plan_over_sites
from unskew.deployment.server.sum_exchange import SiteExchange
from unskew.diagnosis.diagnose import mean_local_steps
from unskew.diagnosis.features import AdviceContext
from unskew.diagnosis.report import DiagnosisReport
from unskew.errors import ConfigError
from unskew.filesystem import write_atomic
from unskew.folder_locks import output_folder
from unskew.measurements.column_summary import ColumnSummary
from unskew.measurements.feature_skew import FeatureSkew
from unskew.measurements.heterogeneity import METRICS, GradientSkew, HeterogeneityMeasurement
from unskew.measurements.label_skew import LabelSkew
from unskew.measurements.site_differences import WIDEST, LabelVariance, SiteDifferences, input_columns, site_rows
from unskew.measurements.survival_tables import SurvivalTables
from unskew.runs.resolved_run import ResolvedRun
from unskew.sums.base import ClientRows, SumRequest, Sums
from unskew.sums.exchange import SimulatedExchange, with_remaining
from unskew.sums.registry import PERMISSIONS
from unskew.sums.skew import has_class_means
from unskew.sums.statistics import Statistic, collect
from unskew.tasks.registry import TASKS

SHOWN_AS = {
    "histogram": "quartiles",
    "missing": "missing values",
    "column_moments": "means",
    "class_means": "feature skew",
    "label_products": "differences of labels",
    "gradient": "gradients",
    "survival_table": "survival times",
}
"""Results that are computed from the sums of each kind, except class counts, which have a note of their own."""
LEAST_COUNT = 10
"""With masks, sites send exact counts, so that those of all sites below this number are not shown."""
LARGEST = 10_000
"""Largest number of values of a tensor in ``statistics.json``; of larger ones, it has the digest."""


@dataclass(frozen=True)
class SitesDiagnosis:
    """Result of a diagnosis over sites.

    Attributes:
        report: Skew, and what the advice uses.
        columns: Summary of each column of a table.
        classes: Number of samples of each class, by its name; None if it is hidden. Empty if they were not counted.
        notes: What was not measured, and why.
    """

    report: DiagnosisReport
    columns: list[dict[str, Any]]
    classes: dict[str, int | None]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return {
            "summary": self.report.summary(),
            **self.report.as_json(),
            "columns": self.columns,
            "class_counts": self.classes,
            "notes": self.notes,
        }


@dataclass
class RecordedExchange:
    """Exchange over sites whose requests, sums and replies are recorded.

    Attributes:
        exchange: Exchange over the sites.
        hidden: Clients that have not sent some counts or sums because few rows are behind them, by kind.
        record: For each exchange: requests, sums, and the summands of each client, by its number.
    """

    exchange: SiteExchange
    record: list[tuple[Sequence[SumRequest], list[Sums], Mapping[int, list[Sums]]]] = field(default_factory=list)
    hidden: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.traffic = self.exchange.traffic

    @property
    def clients(self) -> list[int]:
        """Clients that take part, in order."""
        return self.exchange.clients

    def __call__(self, requests: Sequence[SumRequest]) -> list[Sums]:
        """Return the sums over all sites for each request.

        Without masks, the numbers of ``site_scalars`` follow from what the sites have sent, so they are not asked for.
        """
        known = [request.kind == "site_scalars" and not self.exchange.masked for request in requests]
        asked = [request for request, here in zip(requests, known, strict=True) if not here]
        sums = iter(self._ask(asked) if asked else [])
        return [self._scalars(request) if here else next(sums) for request, here in zip(requests, known, strict=True)]

    def _ask(self, requests: Sequence[SumRequest]) -> list[Sums]:
        sums = self.exchange(requests)
        self.traffic = self.exchange.traffic
        self.record.append((requests, sums, dict(self.exchange.replies)))
        for client, of_requests in self.exchange.hidden.items():
            for request, positions in zip(requests, of_requests, strict=True):
                if positions:
                    self.hidden[request.kind].add(client)
        return sums

    def _scalars(self, request: SumRequest) -> Sums:
        counts = {k: own["counts"].clamp(min=0) for k, own in self.of_clients("class_counts").items()}
        sizes = self.exchange.num_samples.items()
        rows = [ClientRows(y=torch.zeros(n), class_counts=partial(counts.__getitem__, k)) for k, n in sizes]
        return SimulatedExchange(lambda: rows)([request])[0]

    def of_clients(self, kind: str) -> dict[int, Sums]:
        """Return the summands of each client for a kind; empty if it was not requested, or with masks."""
        return {
            client: own
            for requests, _, replies in self.record
            for client, each in replies.items()
            for request, own in zip(requests, each, strict=True)
            if request.kind == kind
        }

    def as_json(self, name: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return the record as plain values.

        Args:
            name: Returns the name of a client.
        """
        return [
            {
                "requests": [{"kind": r.kind, "args": dict(r.args), "constants": _plain(r.tensors)} for r in requests],
                "sums": [_plain(some) for some in sums],
                "sites": {name(client): [_plain(some) for some in own] for client, own in replies.items()},
            }
            for requests, sums, replies in self.record
        ]


def write_diagnosis(out: Path, diagnosis: Mapping[str, Any]) -> None:
    """Write ``diagnosis.json``, which only its owner can read.

    Args:
        out: Folder of the diagnosis.
        diagnosis: Diagnosis and advice as plain values.
    """
    with owner_only_files():
        _write_json(out / "diagnosis.json", diagnosis)


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False).encode())


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, tensor in tensors.items():
        data = tensor.contiguous()
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest() if data.numel() > LARGEST else ""
        plain[name] = {"shape": [*data.shape], "sha256": digest} if digest else data.tolist()
    return plain


def diagnose_sites(
    config: Experiment,
    deployment: Deployment,
    out: Path,
    statistics: Collection[str],
    warn: Callable[[str], None],
    tell: Callable[[str], None],
    location: RunLocation | RemoteSuperLink,
) -> SitesDiagnosis:
    """Diagnose the data of sites, and write what was requested and received to a folder.

    Args:
        config: Experiment that the sites have agreed to.
        deployment: Configuration of the deployment.
        out: Folder to create.
        statistics: Names of the statistics to ask for; empty for all that the experiment can use.
        warn: Called with warnings.
        tell: Called with progress messages.
        location: Location of the SuperLink and the sites, or the SuperLink itself.

    Raises:
        ConfigError: If the experiment cannot be deployed, or cannot use a statistic.
        EngineError: If sites cannot be reached, or do not allow a statistic.
    """
    with owner_only_files(), output_folder(out, False, lambda: False):
        plan = plan_over_sites(config, deployment, location)
        if plan.run.spec.others:
            raise ConfigError("The diagnosis measures one model. Choose one of those of the clients.")
        chosen = choose_statistics(statistics, plan.run.config, plan.reference)
        deployment.write(out)
        write_atomic(out / "config.yaml", plan.run.config.to_yaml().encode())
        with connected_sites(plan, out, False, warn, tell, location) as connected:
            exchange = connected.exchange()
            recorded, diagnosis = with_remaining(
                exchange, lambda asked: _diagnose(RecordedExchange(asked), connected.run, chosen)
            )
            record = recorded.as_json(connected.run.federation.client_label)
        _write_json(out / "statistics.json", {"statistics": [*chosen], "exchanges": record})
        return diagnosis


def choose_statistics(names: Collection[str], config: Experiment, reference: Federation) -> tuple[str, ...]:
    """Return the statistics to ask for.

    Args:
        names: Names of statistics; empty for all that the experiment can use.
        config: Configuration of the experiment.
        reference: The experiment's data as loaded at the server.

    Raises:
        ConfigError: If a name is not known, or the experiment cannot use a statistic.
    """
    encoders, regression = reference.encoders, reference.objective.standardized
    numbers = [encoders[j].name for j in numeric_columns(encoders)]
    wrong = next((name for name in config.ranges if name not in numbers), None)
    if wrong is not None:
        raise ConfigError(
            f"ranges names {wrong!r}, which is not a numeric column of a table with mixed columns: "
            f"{', '.join(numbers[:20]) or 'there is none'}. Correct ranges in the experiment."
        )
    table = "the data are not a table with mixed columns (docs/tables.md)"
    reasons = {
        "missing": "" if encoders else table,
        "moments": "" if numbers or regression else table,
        "histograms": ""
        if config.ranges
        else "the experiment has no ranges. Add the ends of the histograms to it, such as ranges: {age: [0, 120]}",
        "features": "the inputs are texts"
        if reference.test[0].dtype == torch.int64
        else "it compares means of targets, but times are censored"
        if reference.objective.outcome
        else "",
    }
    own = {name for task in TASKS.values() for name in task.statistics}.difference(reference.objective.statistics)
    reasons |= dict.fromkeys(own, f"the task {reference.task} has no such statistic")
    for name in names:
        if name not in PERMISSIONS:
            raise ConfigError(f"{name!r} is not a statistic. Choose from {', '.join(PERMISSIONS)}.")
        if reasons.get(name):
            raise ConfigError(f"The statistic {name} is not available: {reasons[name]}.")
    return tuple(name for name in PERMISSIONS if (name in names if names else not reasons.get(name)))


def chosen_statistics(run: ResolvedRun, chosen: Collection[str], masked: bool) -> dict[str, Statistic]:
    """Return the statistics of the permissions, by name.

    Args:
        run: Data and model that the sites have agreed on.
        chosen: Permissions.
        masked: Whether only sums over the sites are known.
    """
    fed, config = run.federation, run.config
    x, y = fed.test
    known = fed.encoders
    statistics: dict[str, Statistic] = {}
    if {"missing", "moments", "histograms"} & {*chosen}:
        numbers = tuple(known[j].name for j in numeric_columns(known))
        targets = fed.names if fed.objective.standardized else ()
        names = tuple(encoder.name for encoder in known)
        statistics["columns"] = ColumnSummary(names, numbers, targets, config.ranges, chosen)
    if "counts" in chosen:
        classes = fed.classes if "counts" in fed.objective.provides else 0
        statistics["labels"] = LabelSkew(classes, y.dim() == 1)
    if "features" in chosen:
        if has_class_means(x, y):
            statistics["features"] = FeatureSkew(fed.classes, x[:1].numel())
        codes, center = input_columns(fed, config.features)[1:]
        if "vector" in fed.objective.provides:
            wide = sum(count or 1 for count in codes) > WIDEST
            used = () if wide else tuple(codes)
            statistics["label variance"] = LabelVariance(used, center[: len(used)], fed.classes)
    if {*fed.objective.statistics} & {*chosen}:
        constants = fed.objective.constants
        statistics["times"] = SurvivalTables(constants["cuts"][-1], constants["horizons"], masked)
    if "gradients" in chosen:
        statistics["gradients"] = GradientSkew(run.spec.size)
    return statistics


def _diagnose(
    exchange: RecordedExchange, run: ResolvedRun, chosen: Collection[str]
) -> tuple[RecordedExchange, SitesDiagnosis]:
    """Ask for statistics, and compute the diagnosis."""
    fed, config = run.federation, run.config
    statistics = chosen_statistics(run, chosen, exchange.exchange.masked)
    sums = collect(exchange, statistics)
    labels = dict.fromkeys(
        (
            *(f"label_{name}" for name in ("distance_mean", "distance_max", "distance_chance", "entropy_gap")),
            *("effective_clients", "effective_classes", "feature_skew", "label_between", "label_unexplained"),
        )
    )
    metrics = dict.fromkeys(METRICS)
    for name, statistic in statistics.items():
        measured = {key: value for key, value in statistic.metrics(*sums[name]).items() if value is not None}
        (metrics if name == "gradients" else labels).update(measured)
    classes: dict[str, int | None] = {}
    if sums.get("labels", ([], []))[0]:
        counts = sums["labels"][0][0]["counts"].tolist()
        hidden = exchange.exchange.masked
        shown = [None if hidden and 0 < count < LEAST_COUNT else count for count in counts]
        classes = dict(zip(fed.names, shown, strict=True))
    sites, compared = _site_table(exchange, run), statistics.get("times")
    if isinstance(compared, SurvivalTables):
        replies = {k: own["counts"].numpy() for k, own in exchange.of_clients("survival_table").items()}
        sites = sites.compared(compared.comparison(*sums["times"], replies, exchange.exchange.num_samples))
    summary = statistics.get("columns")
    columns = summary.rows(*sums["columns"]) if isinstance(summary, ColumnSummary) else []
    details = {
        "data": fed.name,
        "partition": fed.partition,
        "clients": len(fed.clients),
        "clients_measured": len(fed.clients),
        "model": config.model,
        "parameters": run.spec.size,
        "synthetic": None,
        "leaks": [],
        "samples": None,
        "curvature": False,
        "tau": mean_local_steps(config, fed.sizes),
        "batch": config.batch_size,
        "seed": config.seed,
    }
    asked = ("counts", "gradients") if "counts" in fed.objective.provides else ("gradients",)
    report = DiagnosisReport(
        details,
        labels,
        [HeterogeneityMeasurement("initial model", metrics)],
        sites,
        AdviceContext(config, fed, None, run.spec, False),
        tuple(name for name in asked if name not in chosen),
    )
    return exchange, SitesDiagnosis(report, columns, classes, [*hidden_counts(exchange, run), *_notes(chosen)])


def _site_table(exchange: RecordedExchange, run: ResolvedRun) -> SiteDifferences:
    """Return the table of the sites; with masks it has no rows."""
    fed, K = run.federation, len(run.federation.clients)
    products, counts, missing = map(exchange.of_clients, ("label_products", "class_counts", "missing"))
    ids = [k for k in range(K) if any(k in replies for _, _, replies in exchange.record)]
    if not ids:
        return SiteDifferences([], {}, {}, None, None)
    names, codes, _ = input_columns(fed, run.config.features)
    n, width = fed.sizes[ids].astype(float), 1
    sums = squares = n[:, None]
    if products and all(bool(products[k]["clients"]) for k in ids):  # else some left them out
        width = len(products[ids[0]]["products"])
        sums = np.stack([products[k]["products"][0].numpy() for k in ids])
        inputs = [products[k]["products"].diagonal().numpy() for k in ids]
        squares = np.hstack([np.stack(inputs), np.stack([products[k]["squares"].numpy() for k in ids])])
    elif counts:  # a square of 0 or 1 is the same number
        sums = squares = np.hstack([sums, np.stack([counts[k]["counts"].double().numpy() for k in ids])])
    absent = None if fed.encoders and not missing else np.zeros((len(ids), len(names)))
    if missing:
        absent = np.stack([missing[k]["counts"].numpy() for k in ids])
    used = codes if width > 1 else []
    rows, pooled = site_rows(fed, ids, names, used, n, absent, sums / n[:, None].clip(1), squares, width)
    return SiteDifferences(rows, pooled, {}, None, None)


def hidden_counts(exchange: RecordedExchange, run: ResolvedRun) -> list[str]:
    """Return notes if sites have left out small counts, so that quartiles, missing values or label skew are not exact.

    Args:
        exchange: Exchange that has asked for class counts.
        run: Data that the sites have agreed on.
    """
    notes = []
    if few := [f"{name} ({len(exchange.hidden[kind])})" for kind, name in SHOWN_AS.items() if exchange.hidden[kind]]:
        notes.append(
            f"Sites hide some counts or sums (number of sites): {', '.join(few)}. Few rows are behind them (min_count in "
            "site.yaml); what is shown describes the other rows only."
        )
    counts = exchange.of_clients("class_counts")
    rows = sum(exchange.exchange.num_samples[k] for k in counts)
    counted = sum(int(own["counts"].sum()) for own in counts.values())
    if run.federation.test[1].dim() != 1 or counted == rows:
        return notes
    return [
        *notes,
        f"The class counts add up to {counted:,} of {rows:,} samples, because sites hide small counts or add noise "
        "(statistics in site.yaml). The label skew is therefore not exact.",
    ]


def _notes(chosen: Collection[str]) -> list[str]:
    """Return what was not measured."""
    notes = ["Largest distances of single sites and the curvature are not sums over sites, so they are not measured."]
    lost = {"counts": "label skew", "features": "feature skew", "gradients": "differences of gradients"}
    absent = [name for name in lost if name not in chosen]
    if absent:
        text = ", ".join(f"{lost[name]} ({name})" for name in absent)
        notes.append(f"Not requested: {text}. The advice compares the other features only.")
    return notes
