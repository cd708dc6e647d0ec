"""Handshake before the first round: validate the method, and agree with all sites on model and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.partitioned import PartitionedSource
from unskew.data.task_options import apply_task_options
from unskew.deployment.common.agreement import experiment_digest
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.common.requests import check_hazard_ratios
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.data_exchange import federation_of_sites, remote_client, request_all
from unskew.deployment.server.masked_engine import check_maskable
from unskew.deployment.server.membership import check_late_joining
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.server.sum_exchange import SiteExchange, reported_sizes
from unskew.deployment.wire.frames import Frame
from unskew.errors import ConfigError
from unskew.methods.dp_sites import site_noise
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import cohort_size
from unskew.protocol.rules import Method, survey_times
from unskew.runs.build_model import match_model_input_range
from unskew.runs.resolved_run import ResolvedRun
from unskew.runs.validation import resolve_run
from unskew.sums.base import SumRequest
from unskew.sums.exchange import with_remaining


def check_method_over_sites(
    config: Experiment, deployment: Deployment, reference: Federation, method: Method, total: int
) -> ResolvedRun:
    """Resolve a run as ``resolve_run`` does, and validate that the deployment supports it.

    Args:
        config: Configuration of the run.
        deployment: Configuration of the deployment.
        reference: Data as the server sees them.
        method: Method of the run.
        total: Number of clients.

    Raises:
        ConfigError: If the method or the configuration cannot be deployed.
    """
    reference = apply_task_options(reference, config.loss, config.class_weights)
    run = resolve_run(config, reference, None, method)
    both_ways = next((rule.name for rule in method.client if rule.compresses_broadcast), None)
    if both_ways is not None:
        raise ConfigError(
            f"{both_ways}:down=true is available in simulations only; over sites, only uploads are compressed."
        )
    check_hazard_ratios(config, config.coefficients and "counts" not in reference.objective.provides)
    if run.plan.asks_loss:
        raise ConfigError(f"sampling={run.plan.sampling} is available in simulations only. Use sampling=fixed.")
    asking = next((rule.name for rule in method.client if "asked" in survey_times(rule)), None)
    if asking is not None:
        raise ConfigError(f"{asking} needs two exchanges per round and is available in simulations only.")
    simulated = next((rule.simulated_only for rule in method.data if rule.simulated_only is not None), None)
    if simulated is not None:
        raise ConfigError(simulated)
    if deployment.asynchronous:
        delay = config.network.model_copy(update={"delay": "fixed:1"})
        try:
            resolve_run(config.model_copy(update={"network": delay}), reference, None, method)
        except ConfigError as error:
            raise ConfigError(str(error).replace("network.delay", "--asynchronous")) from error
    cohort = cohort_size(total, config.participation)
    sums = DataSchema.of(reference).needs_sums
    if deployment.quorum is not None:
        if deployment.quorum > total:
            raise ConfigError(f"quorum={deployment.quorum} is too large: the experiment has {total} clients.")
        if sums or config.class_weights == "balanced":
            what = "Standardizing columns or targets" if sums else "class_weights: balanced"
            remedy = "" if sums else ", or set class_weights to a list"
            raise ConfigError(
                f"{what} requires statistics of all sites before the first round, so no site can join later. Remove "
                f"--quorum{remedy}."
            )
        if config.secure_aggregation == "required" and deployment.quorum <= cohort // 2:
            raise ConfigError(
                f"With secure_aggregation=required, sites open only sums of more than half of the {cohort} sites of a "
                f"round, so --quorum must be at least {cohort // 2 + 1}."
            )
        cohort = min(cohort, deployment.quorum)
        plan = replace(run.plan, clients=total, cohort=cohort_size(total, config.participation))
        check_late_joining(method, run.spec, replace(FederationInfo.of(reference), weights=run.weights, plan=plan))
    noise = site_noise(method)
    if noise is not None:
        if sums:
            raise ConfigError(
                "The mean and standard deviation of columns and targets are computed from sums over the sites, which "
                "dp:noise_at=sites does not protect. Standardize the data at the sites and remove task, missing, categories "
                "and dates."
            )
        if config.secure_aggregation != "required":
            raise ConfigError(
                "dp:noise_at=sites protects only sums: the noise of a single site is too small. Set "
                "secure_aggregation: required in the experiment."
            )
        if noise.honest is not None and cohort < noise.honest:
            raise ConfigError(
                f"dp:honest={noise.honest} is more than the {cohort} sites with which a round may start. Use a smaller "
                "honest, or a larger --quorum."
            )
    if config.secure_aggregation == "required":
        if config.sampling == "poisson":
            raise ConfigError(
                "A Poisson cohort may have fewer than three sites, whose sum must not be opened. Use sampling=fixed with "
                "secure_aggregation=required, or turn secure aggregation off."
            )
        check_maskable(method, cohort, deployment.asynchronous)
    return run


def run_header(config: Experiment, reference: DataSchema) -> dict[str, Any]:
    """Return the header of every message: the digest of the experiment, the rounds of the run, and the data schema.

    Args:
        config: Configuration of the run.
        reference: Data schema of the run.
    """
    return {"digest": experiment_digest(config), "rounds": config.rounds, **reference.config()}


def initial_header(config: Experiment, federation: Federation) -> dict[str, Any]:
    """Return the header of the messages sent before column statistics are known.

    Args:
        config: Configuration of the run.
        federation: The experiment's data as loaded at the server.
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
    roster: Mapping[int, Any],
) -> tuple[Federation, ModelSpec]:
    """Build the global data schema from the sites' statistics, and the model for it.

    Args:
        config: Configuration of the run.
        deployment: Configuration of the deployment.
        method: Method of the run.
        drawn: The experiment's data as loaded at the server, before any column statistics are applied.
        reference: The same data as a federation.
        spec: Layout of the model for ``reference``.
        frames: First report of each client.
        sites: Connected sites; the header of their messages is updated to the agreed schema.
        roster: Public signing keys, by client.

    Raises:
        ConfigError: If the data of a site do not fit the experiment.
        EngineError: If a site does not reply, or sends an invalid report.
    """
    sums, own = DataSchema.of(reference).needs_sums, deployment.own_data
    if sums:
        exchange = SiteExchange(sites, reported_sizes(frames), config.secure_aggregation == "required", roster)
        known = with_remaining(exchange, lambda asked: drawn.known(asked, sum(asked.num_samples.values())))
        reference, frames = drawn.federation(known), {k: frames[k] for k in exchange.clients}
        assert reference.stats_traffic is not None, "sums have traffic"
        traffic = np.zeros((len(sites.sites), 2), np.int64)
        traffic[exchange.clients] = reference.stats_traffic
        reference = replace(reference, counts_known=callable(method.weights), stats_traffic=traffic)
        spec = check_method_over_sites(config, deployment, reference, method, len(sites.sites)).spec
        reference = match_model_input_range(reference, spec)
        with_loss = apply_task_options(reference, config.loss, None)  # class weights are not known yet
        sites.connection.header = run_header(config, DataSchema.of(with_loss))
        frames = request_all(sites, {k: Frame("hello") for k in frames}, "client_info", lambda client, frame: frame)
    counts = None
    if config.class_weights == "balanced" and not reference.counts_known:
        exchange = SiteExchange(sites, reported_sizes(frames), config.secure_aggregation == "required", roster)
        request = SumRequest("pixels" if reference.objective.pixels else "classes", {"classes": reference.classes})
        counts = with_remaining(exchange, lambda asked: asked([request])[0]["counts"].numpy())
        frames = {k: frames[k] for k in exchange.clients}
    federation = federation_of_sites(reference, frames, [site.site for site in sites.sites], not own, spec)
    federation = apply_task_options(federation, config.loss, config.class_weights, counts)
    if federation.stats_traffic is not None:
        present = np.isin(np.arange(len(sites.sites)), [*frames])
        federation = replace(federation, stats_traffic=federation.stats_traffic * present[:, None])
    schema = DataSchema.of(federation)
    sites.connection.header = run_header(config, schema)
    if sums and own:  # the fingerprint prevents resuming the run after the statistics have changed
        text = json.dumps(schema.config(), sort_keys=True)
        federation = replace(federation, fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16])
    return federation, spec


def changed_budget(config: Experiment, prepared: PreparedData) -> dict[str, int]:
    """Return the budget fields that a data rule has changed, except those that differ between clients.

    Args:
        config: Configuration of the run.
        prepared: Data and local budget after the data rules were applied.
    """
    before, after = config.training.local_epochs, prepared.training.local_epochs
    return {"local_epochs": after} if after is not None and after != before else {}


def report_validator(reference: Federation, spec: ModelSpec) -> Callable[[int, Frame], object]:
    """Return a function that validates a site's first report.

    Args:
        reference: The experiment's data as loaded at the server.
        spec: Layout of the model.
    """
    if DataSchema.of(reference).needs_sums:
        return lambda client, frame: None  # columns and model are known once all sites have reported
    return lambda client, frame: remote_client(client, frame, reference, spec.of_client(client).size)
