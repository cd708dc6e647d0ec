"""``unskew deploy evaluate``: metrics of a finished run's models at its sites; predictions stay there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.flower.superlinks import RemoteSuperLink, RunLocation
from unskew.deployment.server.config import Deployment, is_deployed
from unskew.deployment.server.connected_sites import JoinedSites, joined_sites, owner_only_files
from unskew.deployment.server.data_exchange import remote_client
from unskew.deployment.server.handshake import run_header
from unskew.deployment.server.masked_evaluation import masked_rows
from unskew.deployment.server.round_requests import ask_sites
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.server.sum_exchange import SiteExchange, reported_sizes
from unskew.deployment.wire.digests import arrays_digest
from unskew.deployment.wire.fields import read_integer, read_metric
from unskew.deployment.wire.frames import Blob, Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, check_records, encode_record, printable
from unskew.diagnosis.diagnose import final_model
from unskew.errors import ConfigError, unknown_name
from unskew.filesystem import write_atomic
from unskew.folder_locks import folder_lock
from unskew.methods.registry import method as method_of
from unskew.records.result import read_summary
from unskew.serving.load import OpenedRun, empty_federation, open_run
from unskew.simulation.checkpoint import newest_checkpoint

NAME = "evaluation.json"
MODELS = ("global", "local", "personal")
POOLED = "pooled is left out: it needs the data of all sites in one place. Simulate it instead."
MOST_METRICS = 1000
"""Maximum number of metrics in a reply."""
Row = dict[str, Any]


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate.

    Attributes:
        models: Some of ``MODELS``.
        cross: Whether each site also scores the models that the other sites have trained alone.
        metrics: Names of the metrics to return; empty returns all. ``recall`` stands for that of each class.
        level: Level of the intervals.
    """

    models: tuple[str, ...] = ("global",)
    cross: bool = False
    metrics: tuple[str, ...] = ()
    level: float = 0.95

    def check(self, opened: OpenedRun) -> None:
        """Validate that a run can be evaluated in this way.

        Args:
            opened: The finished run.

        Raises:
            ConfigError: If it cannot.
        """
        if unknown := [name for name in self.models if name not in MODELS]:
            raise ConfigError(unknown_name("model", unknown[0], MODELS))
        if not 0.5 <= self.level < 1:
            raise ConfigError(f"level={self.level:g} must be at least 0.5 and below 1, such as 0.95.")
        task = opened.inputs.objective
        known = [task.scored, "loss", *task.extra_metrics, *task.requestable]
        if unknown := [name for name in self.metrics if name not in known]:
            raise ConfigError(unknown_name("metric", unknown[0], known))
        if opened.config.secure_aggregation == "required" and (self.cross or {*self.models} != {"global"}):
            raise ConfigError(
                "With secure aggregation, only sums over all sites are known, so only the global model is evaluated. Remove "
                "--cross, and use --models global."
            )

    def includes(self, metric: str) -> bool:
        """Return whether a metric is requested."""
        return not self.metrics or metric.partition("/")[0] in self.metrics


@dataclass(frozen=True)
class Scored:
    """Reply of a site.

    Attributes:
        num_samples: Number of held-out samples.
        support: Number of samples per class as text; empty where the site withholds it.
        names: Names of the metrics.
        values: Values of metrics and ends of intervals; NaN if undefined.
        model: Model that the site has trained alone, if it shares it.
        reason: Reason why the model was not scored; empty if it was.
        withheld: Reason why the site does not share its model.
    """

    num_samples: int = 0
    support: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    values: Mapping[str, float | None] = ()  # type: ignore[assignment]
    model: Mapping[str, Blob] = ()  # type: ignore[assignment]
    reason: str = ""
    withheld: str = ""

    @staticmethod
    def read(client: int, frame: Frame, classes: int) -> Scored:
        """Read and validate a reply.

        Args:
            client: Number of the client.
            frame: Its reply.
            classes: Number of classes.

        Raises:
            InvalidMessageError: If the reply is not valid.
        """
        config = frame.config
        if frame.kind != "scored" or read_integer(config, "client") != client:
            raise InvalidMessageError("it does not contain the metrics of a model at this site")
        if "reason" in config:
            return Scored(reason=printable(config["reason"]))
        support, names = config.get("support"), config.get("metrics")
        if not isinstance(support, list) or len(support) not in (0, classes):
            raise InvalidMessageError(f"it does not report the samples of {classes} classes")
        if not all(isinstance(count, str) and re.fullmatch(r"<?\d{1,15}|", count) for count in support):
            raise InvalidMessageError("its numbers of samples cannot be read")
        if not isinstance(names, list) or len(names) > MOST_METRICS or not all(isinstance(name, str) for name in names):
            raise InvalidMessageError("its metrics cannot be read")
        keys = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
        values = {key: read_metric(frame.metrics, key) for key in keys}
        check_records(frame, ("model",))
        return Scored(
            read_integer(config, "num_samples"),
            tuple(support),
            tuple(names),
            {key: value if value == value else None for key, value in values.items()},
            frame.arrays,
            withheld=printable(config.get("withheld", "")),
        )


def evaluate_run(
    folder: Path,
    plan: EvaluationPlan,
    location: RunLocation | RemoteSuperLink,
    tell: Callable[[str], None] = print,
    out: Path | None = None,
    trust_code: bool = False,
) -> list[Row]:
    """Evaluate the models of a finished run at its sites, and write the metrics.

    Args:
        folder: Run folder.
        plan: What to evaluate.
        location: Location of the SuperLink and the sites, or the SuperLink itself.
        tell: Called with progress messages and warnings.
        out: File to write; None for ``evaluation.json`` in the run folder.
        trust_code: Whether code that the configuration names may be imported.

    Returns:
        A dictionary per model, site and metric: ``model``, for local models ``trained_at``, ``site``, ``client``,
        ``metric``, ``value``, ``low``, ``high``, ``n`` and ``support``. If a site does not score a model, ``value`` is None
        and ``reason`` says why.

    Raises:
        CheckpointError: If the folder contains no finished run.
        ConfigError: If the run was not deployed, or cannot be evaluated in this way.
        EngineError: If the SuperLink or sites cannot be reached.
    """
    opened = open_run(folder, trust_code=trust_code)
    if not is_deployed(folder):
        raise ConfigError(f"The run in {folder} was simulated. Evaluate it on a file with unskew evaluate.")
    if opened.spec.others:
        raise ConfigError(
            "The sites of this run have models of different architectures, which cannot be evaluated in this way."
        )
    plan.check(opened)
    with owner_only_files(), folder_lock(folder), connected_sites(opened, location, tell) as found:
        if opened.config.secure_aggregation == "required":
            exchange = SiteExchange(found.sites, reported_sizes(found.frames), True, found.roster)
            rows = masked_rows(exchange, *final_model(folder, opened.spec), opened.inputs, plan.level)
            rows = [row for row in rows if plan.includes(row["metric"])]
        else:
            rows = SiteEvaluator(opened, plan, found.sites).rows()
        write_atomic(out or folder / NAME, (json.dumps(rows, indent=1) + "\n").encode())
    reasons = dict.fromkeys(str(row["reason"]) for row in rows if "reason" in row)
    if all("reason" in row for row in rows):
        raise ConfigError(f"No site has scored a model. {' '.join(reasons)}")
    for reason in reasons:
        tell(reason)
    return rows


@contextmanager
def connected_sites(
    opened: OpenedRun, location: RunLocation | RemoteSuperLink, tell: Callable[[str], None]
) -> Iterator[JoinedSites]:
    """Context manager that connects to the sites of a finished run.

    Args:
        opened: The run.
        location: Location of the SuperLink and the sites, or the SuperLink itself.
        tell: Called with progress messages and warnings.

    Yields:
        The sites that have joined.

    Raises:
        ConfigError: If the sites differ from those of the run.
        EngineError: If the SuperLink or sites cannot be reached.
    """
    folder, config, deployment = opened.folder, opened.config, Deployment.read(opened.folder)
    total = int(read_summary(folder)["clients"])
    if isinstance(location, RunLocation) and location.local not in (None, total):
        raise ConfigError(f"--local {location.local} does not match the {total} clients of the run.")
    # The schema of the run, not one of today's data: the model expects its inputs as they were encoded then.
    counts_known = callable(method_of(config.method).weights)
    reference = replace(empty_federation(opened.inputs), trained_for=opened.inputs.objective, counts_known=counts_known)
    # Sites compare the class weights with those of the experiment, and train local models with them.
    header = run_header(config, replace(DataSchema.of(reference), weights=opened.inputs.class_weights))
    superlink = location.superlink(folder, config, True) if isinstance(location, RunLocation) else location
    check = partial(remote_client, federation=reference, parameters=opened.spec.size)
    with joined_sites(superlink, deployment, folder, total, header, check, warn=tell, tell=tell) as joined:
        joined.sites.round = config.rounds
        yield joined


@dataclass(frozen=True)
class SiteEvaluator:
    """Requests the metrics of a run's models from its sites.

    Attributes:
        opened: The run.
        plan: What to evaluate.
        sites: Connected sites.
    """

    opened: OpenedRun
    plan: EvaluationPlan
    sites: SiteManager

    def rows(self) -> list[Row]:
        """Return the metrics of each model at each site."""
        plan, rows, alone = self.plan, list[Row](), dict[int, Scored]()
        model, last = encode_model(*final_model(self.opened.folder, self.opened.spec)), self._last_rounds()
        if "global" in plan.models or plan.cross:
            rows += self._score("global", model, last)
        if "local" in plan.models or plan.cross:
            alone = self._ask("local", self._clients, lambda k: Frame("local", self._fields(share=plan.cross)))
        if "personal" in plan.models:
            rows += self._score("personal", model, last)
        for k, own in alone.items():
            replies = {k: own} | (self._foreign(k, own) if plan.cross else {})
            rows += [row for client in sorted(replies) for row in self._rows("local", client, replies[client], k)]
        return rows

    def _score(self, name: str, model: Mapping[str, Blob], last: Mapping[int, int]) -> list[Row]:
        """Return the metrics of the global model, or of the personal ones, at each site."""
        fields = {k: self._fields(model=name, accepted=last.get(k, -1)) for k in self._clients}
        replies = self._ask(name, self._clients, lambda k: Frame("score", fields[k], {}, dict(model)))
        return [row for k in self._clients for row in self._rows(name, k, replies[k])]

    def _foreign(self, trainer: int, own: Scored) -> dict[int, Scored]:
        """Return the metrics of the model that one site has trained alone, at the other sites."""
        others = [k for k in self._clients if k != trainer]
        if not own.model:
            return dict.fromkeys(others, Scored(reason=own.reason or own.withheld))
        self.sites.log("model shared", trainer, digest=arrays_digest(dict(own.model)))
        request = Frame("score", self._fields(model="foreign"), {}, dict(own.model))
        return self._ask(f"local of {self._name(trainer)}", others, lambda k: request)

    @property
    def _clients(self) -> list[int]:
        return [site.client for site in self.sites.sites]

    def _name(self, client: int) -> str:
        return self.sites.sites[client].site or str(client)

    def _fields(self, **fields: Any) -> dict[str, Any]:
        return {"level": self.plan.level, **fields}

    def _last_rounds(self) -> dict[int, int]:
        """Return the round of the last update of each client that the run has applied."""
        newest = newest_checkpoint(self.opened.folder / "checkpoints")
        return {} if newest is None else {int(client): round for client, round in newest[1]["last"].items()}

    def _ask(self, name: str, clients: Sequence[int], create: Callable[[int], Frame]) -> dict[int, Scored]:
        """Ask sites about a model; a site that was killed is asked again when it is back."""
        known = self.opened.inputs
        classes = known.classes if "counts" in known.objective.provides else 0
        requests = {k: create(k) for k in clients if self.sites.sites[k].node is not None}
        self.sites.log("evaluation requested", model=name)
        replies = ask_sites(
            self.sites,
            requests,
            f"evaluation of {name}",
            partial(Scored.read, classes=classes),
            without="its metrics are missing",
        )
        found = {k: Scored(reason=f"There is no reply from {self._name(k)}.") for k in clients}
        for client, scored in replies:
            self.sites.log("evaluated", client, model=name, reason=scored.reason)
            found[client] = scored
        return found

    def _rows(self, model: str, client: int, scored: Scored, trainer: int | None = None) -> list[Row]:
        """Return a row per metric of a model at a site; one without value if the site has not scored it."""
        inputs, site = self.opened.inputs, self._name(client)
        about: Row = {"model": model, **({} if trainer is None else {"trained_at": self._name(trainer)})}
        about |= {"site": site, "client": client}
        if scored.reason:
            scored_by = {"metric": inputs.objective.scored, "value": None, "low": None, "high": None, "n": None}
            return [{**about, **scored_by, "support": {}, "reason": scored.reason}]
        support = dict(zip(inputs.names, (int(c) if c.isdigit() else c or None for c in scored.support), strict=False))
        return [
            {
                **about,
                "metric": name,
                **{
                    key: scored.values[f"{name}{end}"]
                    for key, end in (("value", ""), ("low", "_low"), ("high", "_high"))
                },
                "n": scored.num_samples,
                "support": support,
            }
            for name in scored.names
            if self.plan.includes(name)
        ]


def encode_model(v: Tensor, b: Tensor) -> dict[str, Blob]:
    """Encode a model and its buffers as the arrays of a message.

    Args:
        v: Parameters, ``[d]``.
        b: Buffers, ``[m]``.
    """
    return encode_record("model", {"v": v, "b": b})
