"""Leave-one-site-out validation: each client once takes no part in training, and the model is evaluated on it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.comparison.compare import compare
from unskew.comparison.comparison_plan import seed_list
from unskew.comparison.comparison_result import Comparison
from unskew.comparison.folder_name import folder_name
from unskew.comparison.references import is_reference
from unskew.comparison.single_run import last
from unskew.comparison.summary_statistics import mean_or_none, usable_values
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.federation import Federation
from unskew.data.spec import Unseen, parse_unseen
from unskew.data.unseen import unseen_mask
from unskew.errors import ConfigError
from unskew.filesystem import parse_path, write_atomic
from unskew.records.recorder import Callback
from unskew.runs.api_arguments import config_from_arguments, method_expression
from unskew.runs.summary import ALL_SAMPLES
from unskew.tasks.intervals import clip_interval, interval95
from unskew.tasks.primary_metric import MetricInfo, metric_info
from unskew.tasks.registry import client_metric

MOST = 50
"""Maximum number of clients that are left out without naming them."""
FOLDER = "leave-one-out"
"""Folder of the runs without a client, and name of the file with the table."""


@dataclass(frozen=True)
class LeaveOneOut:
    """Metrics of models on clients that took no part in their training.

    Attributes:
        comparison: Comparison of the same methods, with all clients in training.
        metric: Metric of the table.
        rows: One row per method and client, means over seeds: ``method``, ``client``, ``samples`` (all of the client's, but
            those of groups (``split_by``) on which other clients train) and ``num_held_out``;
            ``all`` is the metric without the client in training on these samples, with its 95 % interval
            ``all_interval``; ``without`` and ``with`` are those without and with the client in training on its held-out
            samples, of personal models if the method trains one for the unseen client, too; and ``difference`` is the
            first minus the second. None if undefined, as the last three are for a client without held-out samples.
    """

    comparison: Comparison
    metric: MetricInfo
    rows: list[dict[str, Any]]

    def means(self) -> list[dict[str, Any]]:
        """Return the means over clients by method, with Student's 95 % intervals (``_interval``)."""
        table = []
        for name in dict.fromkeys(row["method"] for row in self.rows):
            own = [row for row in self.rows if row["method"] == name]
            entry: dict[str, Any] = {"method": name}
            for key in ("all", "without", "with", "difference"):
                # Of the clients where it is defined with and without them in training, so that the means can be compared.
                values = [row[key] for row in own if row["all" if key == "all" else "difference"] is not None]
                entry |= {
                    key: mean_or_none(values),
                    f"{key}_interval": interval95(values)
                    if key == "difference"
                    else clip_interval(interval95(values), self.metric),
                    f"{key}_clients": len(values),
                }
            table.append(entry)
        return table

    def as_json(self) -> dict[str, Any]:
        """Return the table and the means as plain values."""
        return {"metric": self.metric.name, "clients": self.rows, "means": self.means()}


def leave_one_out(
    federation: Federation | None = None,
    *,
    unseen: float | str | Sequence[str] = 0.0,
    out: str | Path | None = None,
    resume: bool = False,
    callback_factory: Callable[[str, int, Experiment], Sequence[Callback]] | None = None,
    **options: Any,
) -> LeaveOneOut:
    """Compare methods, and train each one again without each client, which is then evaluated as an unseen client.

    Args:
        federation: Data of all clients; if None, they are loaded.
        unseen: Names of the clients to leave out, each in turn; all of them by default.
        out: Folder of the comparison; the runs without a client are in ``leave-one-out/CLIENT``.
        resume: Continue in an existing ``out``.
        callback_factory: Returns the callbacks of a run, see ``unskew.compare``.
        **options: Further arguments of ``unskew.compare``. Estimates of time are those of the comparison with all clients.

    Raises:
        ConfigError: If there are fewer than three clients, more than 50 without a choice of names, or clients that
            differ between the seeds.
    """
    fields = {**next(iter((options.get("overrides") or {}).values()), {}), **options}
    fields = {name: value for name, value in fields.items() if name in Experiment.model_fields}
    fields = config_from_arguments(fields, federation, fields.pop("model", None))
    seeds = seed_list(options.get("seeds", 3))
    data = federation or last.of(experiment({**fields, "seed": seeds[0]}))
    sites = left_out_clients(data, parse_unseen(unseen), federation is None and len(seeds) > 1)
    folder = None if out is None else parse_path(out).absolute()
    complete = compare(federation, out=folder, resume=resume, callback_factory=callback_factory, **options)
    first = complete.ranked[next(iter(complete.ranked))][0]
    name = client_metric(first).name
    by_method: dict[str, list[dict[str, Any]]] = {method: [] for method in complete.ranked}
    named = options.pop("methods")
    methods = [e for e in ([named] if isinstance(named, str) else named) if not is_reference(method_expression(e))]
    own_options = options.pop("overrides", None) or {}
    options["overrides"] = {name: values for name, values in own_options.items() if not is_reference(name)}
    for once in ("references", "budget_minutes", "on_estimate"):
        options.pop(once, None)
    for site, name_of_folder in zip(sites, distinct_folder_names(sites), strict=True):
        own = None if folder is None else folder / FOLDER / name_of_folder

        def run_callbacks(method: str, seed: int, config: Experiment, site: str = site) -> Sequence[Callback]:
            return [] if callback_factory is None else callback_factory(f"{method} without {site}", seed, config)

        without = {"unseen": [site], "references": False, "callback_factory": run_callbacks, **options}
        again = resume and own is not None and own.exists()
        left_out = compare(federation, methods=methods, out=own, resume=again, **without)
        for method, rows in by_method.items():
            rows.append(site_row(method, site, complete.clients[method], left_out.clients[method], name))
    rows = [row for rows in by_method.values() for row in rows]
    result = LeaveOneOut(complete, metric_info(name, first.get("own_metrics")), rows)
    if folder is not None:
        write_atomic(folder / f"{FOLDER}.json", (json.dumps(result.as_json(), indent=2) + "\n").encode())
    return result


def distinct_folder_names(sites: Sequence[str]) -> list[str]:
    """Return a folder name for each client; where those of several are equal on some file system, with a hash.

    Args:
        sites: Names of the clients.

    >>> distinct_folder_names(["north", "<50", ">50"])
    ['north', '-50-92b5e9', '-50-956eee']
    """
    names = [folder_name(site) for site in sites]
    counts = Counter(name.casefold() for name in names)
    return [
        name if counts[name.casefold()] == 1 else f"{name}-{hashlib.sha256(site.encode()).hexdigest()[:6]}"
        for name, site in zip(names, sites, strict=True)
    ]


def left_out_clients(federation: Federation, chosen: Unseen, redrawn: bool) -> list[str]:
    """Return the names of the clients to leave out; numbers if they have no names.

    Args:
        federation: Data of all clients.
        chosen: Names of the clients, or 0 for all.
        redrawn: Whether clients without names may differ between the seeds.

    Raises:
        ConfigError: If the clients cannot be left out one by one.
    """
    known = federation.client_names or tuple(map(str, range(len(federation.clients))))
    if isinstance(chosen, float) and chosen:
        raise ConfigError(
            f"unseen={chosen:g} is a share, but clients are left out one by one. Name some of them, or remove it."
        )
    sites = chosen if isinstance(chosen, tuple) else known
    for name in sites:
        unseen_mask((name,), known, len(known), 0)
    if sites is known and len(known) > MOST:
        raise ConfigError(
            f"Leaving out each of {len(known)} clients repeats every run {len(known)} times. Name a few of them "
            f"(--unseen {known[0]},{known[1]}; unseen)."
        )
    if redrawn and not federation.client_names:
        raise ConfigError(
            f"The clients of the partition {federation.partition} have no names and differ between the seeds. Use one seed "
            "(--seeds 0), or a natural partition."
        )
    return list(sites)


def site_row(
    method: str, site: str, seen: Sequence[list[dict[str, Any]]], unseen: Sequence[list[dict[str, Any]]], metric: str
) -> dict[str, Any]:
    """Return the row of a client that was left out.

    Args:
        method: Method expression.
        site: Name of the client.
        seen: Rows of the clients in the runs with all clients, by seed.
        unseen: The same of the runs without this client, where its row is marked.
        metric: Name of the metric.
    """
    without = [next((row for row in rows if row.get("unseen")), {}) for rows in unseen]
    along = [next((row for row in rows if str(row.get("name", row["client"])) == site), {}) for rows in seen]

    def mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
        values = usable_values(rows, key)
        return mean_or_none(values) if len(values) == len(rows) else None

    personal = f"personal_{metric}"
    served = personal if all(personal in row for row in (*without, *along)) else metric
    # A client without held-out samples may have a metric on the test set, weighted by its classes.
    known = all(row.get("num_held_out") for row in (*without, *along))
    left_out, included = (mean(rows, served) if known else None for rows in (without, along))
    ends = [mean(without, f"{ALL_SAMPLES}{metric}_{end}") for end in ("low", "high")]
    held_out = without[0].get("num_held_out", 0)
    return {
        "method": method,
        "client": site,
        "samples": without[0].get("num_all", 0),
        "num_held_out": held_out,
        "all": mean(without, f"{ALL_SAMPLES}{metric}"),
        "all_interval": None if None in ends else ends,
        "without": left_out,
        "with": included,
        "difference": None if left_out is None or included is None else left_out - included,
    }
