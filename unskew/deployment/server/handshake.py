"""Handshake before the first round: agree on method, model and data of all sites."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.partitioned import PartitionedSource
from unskew.data.task_options import apply_task_options
from unskew.deployment.secagg.engine import check_maskable
from unskew.deployment.server.column_statistics import collect_global_stats
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.data_exchange import federation_of_sites, remote_client, request_all
from unskew.deployment.server.membership import check_late_joining
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.data_schema import DataSchema, experiment_digest
from unskew.deployment.wire.frames import Frame
from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import Method
from unskew.runs.build_model import match_model_input_range
from unskew.runs.validation import check_method, resolve_weighting
from unskew.simulation.sampler import Sampler


def check_method_over_sites(
    config: Experiment, deployment: Deployment, reference: Federation, method: Method, total: int
) -> tuple[ModelSpec, list[str]]:
    """Validate a method as ``check_method`` does, and reject what the deployment does not support.

    Args:
        config: Configuration of the run.
        deployment: Options of the deployment.
        reference: Data as the server knows them.
        method: Method of the run.
        total: Number of clients.

    Raises:
        ConfigError: The method or the configuration cannot be deployed.
    """
    reference = apply_task_options(reference, config.loss, config.class_weights)
    spec, warnings = check_method(config, reference, None, method)
    if deployment.asynchronous:
        delay = config.network.model_copy(update={"delay": "fixed:1"})
        try:
            check_method(config.model_copy(update={"network": delay}), reference, None, method)
        except ConfigError as error:
            raise ConfigError(str(error).replace("network.delay", "--asynchronous")) from error
    cohort = Sampler(total, config.participation, config.seed).size
    sums = DataSchema.of(reference).needs_sums
    if deployment.quorum is not None:
        if deployment.quorum > total:
            raise ConfigError(
                f"quorum={deployment.quorum} sites can never be there: the experiment has {total} clients."
            )
        if sums or config.class_weights == "balanced":
            what = "the scale of columns and targets" if sums else "class_weights: balanced"
            remedy = "" if sums else ", or give class_weights as a list"
            raise ConfigError(
                f"{what} needs sums over all sites before the first round, so none can come later. Leave --quorum "
                f"out{remedy}."
            )
        cohort = min(cohort, deployment.quorum)
        check_late_joining(
            method, spec, replace(FederationInfo.of(reference), weights=resolve_weighting(config, method))
        )
    if config.secure_aggregation == "required":
        if sums:
            raise ConfigError(
                "Means and deviations of columns and targets come from each site's own sums, which are not masked, but "
                "secure_aggregation=required lets the server see sums of all sites only. Let the sites bring numbers to one "
                "scale themselves and leave task, missing, categories and dates out, or turn it off."
            )
        check_maskable(method, cohort, deployment.asynchronous)
    return spec, warnings


def run_header(config: Experiment, reference: DataSchema) -> dict[str, Any]:
    """Return the header of every message: the experiment and the data schema.

    Args:
        config: Configuration of the run.
        reference: Schema of the data.
    """
    return {"digest": experiment_digest(config), **reference.config()}


def initial_header(config: Experiment, federation: Federation) -> dict[str, Any]:
    """The same before the sites have told their sums, where these matter.

    Args:
        config: Configuration of the run.
        federation: Data of all clients.
    """
    reference = DataSchema.of(federation)
    return run_header(config, reference.open if reference.needs_sums else reference)


def agree_on_data_and_model(
    config: Experiment,
    deployment: Deployment,
    method: Method,
    drawn: PartitionedSource,
    reference: Federation,
    spec: ModelSpec,
    frames: dict[int, Frame],
    sites: SiteManager,
    total: int,
) -> tuple[Federation, ModelSpec]:
    """Build the global data schema from the sites' sums, and the model for it.

    Args:
        config: The experiment.
        deployment: How it is deployed.
        method: Its method.
        drawn: The experiment's data at the server, before anything is known of them.
        reference: The same data afterwards.
        spec: The model for these.
        frames: What each site said first.
        sites: The sites; from here on every message tells them what is known.
        total: Clients of the experiment.

    Raises:
        ConfigError: The data of a site do not fit the experiment.
        EngineError: A site does not reply, or sends an invalid report.
    """
    sums, own = DataSchema.of(reference).needs_sums, deployment.own_data
    if sums:
        reference = drawn.federation(collect_global_stats(drawn, frames, sites))
        spec, _ = check_method_over_sites(config, deployment, reference, method, total)
        reference = match_model_input_range(reference, spec)
        sites.about = run_header(config, DataSchema.of(reference))
        frames = request_all(sites, {k: Frame("hello") for k in frames}, "facts", lambda client, frame: frame)
    federation = federation_of_sites(reference, frames, sites.names, not own, total, spec.size)
    federation = apply_task_options(federation, config.loss, config.class_weights)
    known = DataSchema.of(federation)
    sites.about = run_header(config, known)
    if sums and own:  # a run is not resumed where the sums have changed
        text = json.dumps(known.config(), sort_keys=True)
        federation = replace(federation, fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16])
    return federation, spec


def changed_budget(config: Experiment, prepared: PreparedData) -> dict[str, int]:
    """Return the budget fields that a data rule has changed, except those that differ between clients.

    Args:
        config: Configuration of the run.
        prepared: Data after the method prepared them.
    """
    before, after = config.training.local_epochs, prepared.training.local_epochs
    return {"local_epochs": after} if after is not None and after != before else {}


def report_validator(reference: Federation, spec: ModelSpec) -> Callable[[int, Frame], object]:
    """Return a function that validates a site's first report of its data.

    Args:
        reference: The data that the experiment names at the server.
        spec: The model for them.
    """
    if DataSchema.of(reference).needs_sums:
        return lambda client, frame: None  # columns and model are known once all sites have reported
    return partial(remote_client, federation=reference, parameters=spec.size)
