"""Federated sums at a site: computes its summands, and sends them in plain or under masks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.load import task_of_spec
from unskew.data.readers.encoders import category_counts
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.common.requests import check_hazard_ratios
from unskew.deployment.secagg import exact_sums
from unskew.deployment.secagg.protocol import min_sites
from unskew.deployment.site.ledger import SumsLedger
from unskew.deployment.site.masking import SecAggClient
from unskew.deployment.wire.digests import BroadcastDigest
from unskew.deployment.wire.fields import read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.sums import requests_key
from unskew.errors import ConfigError, abbreviate
from unskew.runs.coefficients import Design
from unskew.runs.metrics import run_metrics
from unskew.sums.base import ClientRows, SumRequest, Sums
from unskew.sums.exchange import num_bytes, own_sums
from unskew.sums.fisher import effective_rows
from unskew.sums.registry import SUMS

FEWEST = 5.0
"""Smallest effective number of rows in the sums for coefficients."""


FITTING = ("survival_times", "survival")
"""Kinds of sums for which only a task asks."""


def check_needed(requests: Sequence[SumRequest], config: Experiment) -> None:
    """Validate that an experiment needs the sums that no permission of the site covers.

    Args:
        requests: Requests of one message.
        config: Experiment that the site has agreed to.

    Raises:
        ConfigError: If it does not need one of them, or needs one of them once but there are two.
    """
    balanced, task = config.class_weights == "balanced", task_of_spec(config.data_spec)
    needed = {"classes": balanced, "pixels": balanced, "fisher": config.coefficients}
    needed |= dict.fromkeys(("cross_products", "residuals"), False)  # harmonization is available in simulations only
    digests: dict[str, str] = {}
    for one in requests:
        fitted = task is not None and task.asks(one.kind, one.args)
        if not (fitted if one.kind in FITTING else needed.get(one.kind, True)):
            raise ConfigError(f"The experiment that this site has agreed to does not need the sums {one.kind}.")
        kind = SUMS.get(one.kind)
        if kind is not None and not kind.permission and digests.setdefault(one.kind, one.digest) != one.digest:
            raise ConfigError(
                f"A message has two different requests for the sums {one.kind}, but the experiment needs one of them."
            )
    if sum(SUMS[one.kind].scores_model for one in requests) > 1:
        raise ConfigError("A message asks for the scores of one model only.")


def record_fitting(requests: Sequence[SumRequest], ledger: SumsLedger, experiment: str) -> None:
    """Validate that a task is fitted with one sum of each kind in all runs of an experiment, and store it.

    Two tables of the same rows on different cells would reveal finer cells.

    Args:
        requests: Requests of one message, which the experiment needs.
        ledger: Record of opened sums.
        experiment: Digest of the experiment.

    Raises:
        ConfigError: If a sum has other arguments than before.
    """
    for one in requests:
        if one.kind in FITTING:
            ledger.fit_once(f"{experiment} {one.kind}", one.digest)


def check_schema_arguments(requests: Sequence[SumRequest], reference: DataSchema) -> None:
    """Validate arguments of requests that follow from the data schema, before anything of their size is computed.

    Args:
        requests: Requests of one message.
        reference: Data schema of the run.

    Raises:
        ConfigError: If they differ.
    """
    codes = [*category_counts(reference.columns)] or [0] * math.prod(reference.shape)
    for one in requests:
        given = one.args.get("codes", []), one.args.get("classes", reference.classes)
        if [*given[0]] not in ([], codes) or given[1] not in (0, reference.classes):
            raise ConfigError(f"The columns or classes of a request for {one.kind} are not those of the data schema.")


def check_coefficients_request(
    request: SumRequest, config: Experiment, federation: Federation, rows: ClientRows
) -> None:
    """Validate a request for the sums of a regression, of which the server may choose the coefficients only.

    Args:
        request: Request of the kind ``fisher``.
        config: Experiment that the site has agreed to.
        federation: Data of this site, encoded.
        rows: Training rows of this site.

    Raises:
        ConfigError: If columns or event are not those of the experiment, few rows determine the sums, or those of hazards
            are not masked.
    """
    event = run_metrics(config, federation).computed.positive
    expected = Design(federation).request(event, np.zeros(1))
    same = json.dumps(dict(request.args), sort_keys=True) == json.dumps(dict(expected.args), sort_keys=True)
    constants = {name: tensor for name, tensor in expected.tensors.items() if name != "beta"}
    same = same and {*request.tensors} == {*expected.tensors}
    if not same or not all(torch.equal(request.tensors[name], tensor) for name, tensor in constants.items()):
        raise ConfigError("The columns or the event of a request for coefficients are not those of the experiment.")
    if effective_rows(rows, request) < FEWEST:
        raise ConfigError(
            f"Fewer than {FEWEST:g} rows of this site would determine the sums for coefficients, which could reveal them."
        )
    check_hazard_ratios(config, "cuts" in request.tensors)


def check_precision(reference: DataSchema, rows: ClientRows, site: str) -> None:
    """Validate that means of the server leave the site's values distinguishable in float32.

    Differences to a mean that is far larger are rounded, so that only the values above some threshold would differ from the
    others. Only the order of magnitude of the site's values decides, so replies do not reveal the largest one.

    Args:
        reference: Data schema that the server sent.
        rows: Training rows of the site.
        site: Name of the site.

    Raises:
        ConfigError: If a mean is more than 1000 times larger than all values of its column or target.
    """
    means = {encoder.name: encoder.mean for encoder in reference.columns if encoder.kind != "category"}
    means |= dict(zip(rows.target_names, reference.constants.get("mean", ()), strict=False))
    values = dict(zip((*rows.columns, *rows.target_names), (*rows.numbers.T, *rows.targets.T), strict=True))
    for name, mean in means.items():
        largest = float(np.nanmax(np.abs(values[name]), initial=0.0)) if name in values else 0.0
        if abs(mean) > 10.0 ** (3 + math.floor(math.log10(largest + 1))):
            raise ConfigError(
                f"The site {site} sends no sums of inputs with the mean {mean:g} of {name}, because its values are so much "
                "smaller that the mean would round them. Check the units of this column at all sites."
            )


def masked_reply(
    request: Frame,
    requests: Sequence[SumRequest],
    own: Sequence[Sums],
    reference: DataSchema,
    masks: SecAggClient,
    ledger: Path,
    clients: int,
) -> Frame:
    """Start to take part in the masked sum of what the server has requested.

    Args:
        request: Message of the server.
        requests: Its requests.
        own: Summands of this site.
        reference: Data schema of the message, which all sites must have received.
        masks: Secure aggregation of this site.
        ledger: File of the record of opened sums.
        clients: Number of clients of the experiment.

    Raises:
        ConfigError: If masks cannot hide the summands.
    """
    if any(one.kind == "categories" for one in requests):
        raise ConfigError(
            "The values of categorical columns are a union, which masks cannot hide. List them in the experiment "
            "(categories: {column: [value, ...]})."
        )
    run, session = read_text(request.config, "run"), read_text(request.config, "session")
    key = requests_key(read_text(request.config, "digest"), requests)
    signed = hashlib.sha256(json.dumps([key, reference.config()], sort_keys=True).encode()).hexdigest()
    summands = [("sums", exact_sums.encode(requests, own), 1.0)]
    opened = SumsLedger(ledger, run)
    return masks.start(
        session, -1, summands, BroadcastDigest(signed, key, {}), opened, min_sites=min_sites(clients, None)
    )


def described(request: SumRequest, rows: ClientRows, lines: list[str]) -> Sums:
    """Return the summands of a site, and add their description to the lines for its administrator.

    Args:
        request: Request for the sums.
        rows: Training rows of the site.
        lines: Lines to extend.
    """
    ((own,), kind) = own_sums(rows, [request]), SUMS[request.kind]
    lines.append(f"{kind.describe(request)}; {num_bytes(own)} bytes")
    return own


def describe_sums(rows: ClientRows, config: Experiment) -> list[str]:
    """Describe, for the administrator of a site, the statistics that the experiment itself needs from the site.

    Args:
        rows: Training rows of the site, as read.
        config: The experiment.
    """
    args, lines = {"columns": [*rows.columns], "targets": [*rows.target_names]}, []
    if rows.columns or rows.target_names:
        requests = [SumRequest(kind, args) for kind in ("moments", "squares")]
        size = sum(num_bytes(own) for own in own_sums(rows, requests[:1])) * 3 // 2
        lines.append("; ".join(SUMS[request.kind].describe(request) for request in requests) + f"; {size} bytes")
    for name in (name for name in rows.values if name not in config.category_values):
        values = rows.values[name]
        size = len(json.dumps([*values], ensure_ascii=False, separators=(",", ":")).encode())
        lines.append(f"the values of the category {name}: {abbreviate(values, 20) or 'none'}; {size} bytes")
    if config.class_weights == "balanced":
        lines.append("number of samples, or of pixels in masks, of each class")
    task = task_of_spec(config.data_spec)
    if rows.y is not None and task is not None:
        task.of_one_site.fit(lambda kind, args, tensors: described(SumRequest(kind, args, tensors), rows, lines))
    if config.coefficients:
        hazards = task is not None and task.ratio == "hazard"
        model = "proportional hazards, for each bin of time and column" if hazards else "a logistic regression"
        lines.append(f"up to 22 times, after the last round: score and information of {model}")
    return lines
