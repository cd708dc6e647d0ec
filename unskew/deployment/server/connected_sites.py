"""Connection to the sites of an experiment, up to their agreement on data and model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from unskew.config.experiment import Experiment
from unskew.config.paths import with_absolute_paths
from unskew.data.federation import Federation
from unskew.data.load import load_partitioned
from unskew.data.partitioned import PartitionedSource
from unskew.deployment.common.audit_log import AuditLog
from unskew.deployment.flower.superlinks import RemoteSuperLink, RunLocation
from unskew.deployment.secagg.roster import FILE
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.connection import SiteConnection
from unskew.deployment.server.control import ControlSocket
from unskew.deployment.server.handshake import (
    agree_on_data_and_model,
    check_method_over_sites,
    initial_header,
    report_validator,
)
from unskew.deployment.server.joining import SiteRegistry, wait_for_sites
from unskew.deployment.server.site_clients import check_deployable
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.server.sum_exchange import SiteExchange, reported_sizes
from unskew.deployment.wire.frames import Frame
from unskew.errors import ConfigError, EngineError
from unskew.methods.registry import method as method_of
from unskew.runs.build_model import match_model_input_range
from unskew.runs.resolved_run import ResolvedRun


@dataclass(frozen=True)
class SitesPlan:
    """Validated experiment over sites, before any of them is connected.

    Attributes:
        deployment: Configuration of the deployment.
        drawn: The experiment's data as loaded at the server, before any column statistics are applied.
        reference: The same data as a federation.
        run: Configuration, method and model for these data.
        total: Number of clients.
    """

    deployment: Deployment
    drawn: PartitionedSource
    reference: Federation
    run: ResolvedRun
    total: int


@dataclass(frozen=True)
class ConnectedSites:
    """Sites that have agreed on data and model.

    Attributes:
        sites: The sites.
        registry: Admits sites.
        roster: Public signing keys of the clients.
        run: Configuration and method, with the federation and the model that the sites have agreed on.
        frames: First report of each client.
    """

    sites: SiteManager
    registry: SiteRegistry
    roster: Mapping[int, Any]
    run: ResolvedRun
    frames: Mapping[int, Frame]

    def exchange(self) -> SiteExchange:
        """Return an exchange of sums over the sites that take part."""
        masked = self.run.config.secure_aggregation == "required"
        there = {k: frame for k, frame in self.frames.items() if k not in self.sites.excluded}
        return SiteExchange(self.sites, reported_sizes(there), masked, self.roster)


@contextmanager
def owner_only_files() -> Iterator[None]:
    """Context manager that makes this process create files and folders that only their owner can access."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def plan_over_sites(config: Experiment, deployment: Deployment, location: RunLocation | RemoteSuperLink) -> SitesPlan:
    """Load the experiment's data and validate that it can be deployed.

    Args:
        config: Configuration of the run.
        deployment: Configuration of the deployment.
        location: Location of the SuperLink and the sites, or the SuperLink itself.

    Raises:
        ConfigError: If the experiment cannot be deployed.
    """
    config = with_absolute_paths(config)
    check_deployable(config)
    method = method_of(config.method)
    drawn = load_partitioned(config.data_spec, config.seed)
    # Sites send class counts only in sums, unless the method's weights need those of each site.
    reference = replace(drawn.federation(drawn.known()), counts_known=callable(method.weights))
    total = config.clients if deployment.own_data else len(reference.clients)
    if total is None:
        raise ConfigError("If the sites have their own data, the experiment must set clients, the number of sites.")
    local = location.local if isinstance(location, RunLocation) else None
    if local not in (None, total):
        raise ConfigError(f"--local {local} does not match the {total} clients of the experiment.")
    run = check_method_over_sites(config, deployment, reference, method, total)
    return SitesPlan(deployment, drawn, match_model_input_range(reference, run.spec), run, total)


class JoinedSites(NamedTuple):
    """Sites that have joined: their manager and registry, the signing keys by client, and the first report of each."""

    sites: SiteManager
    registry: SiteRegistry
    roster: Mapping[int, Any]
    frames: dict[int, Frame]


@contextmanager
def joined_sites(
    superlink: RemoteSuperLink,
    deployment: Deployment,
    folder: Path,
    total: int,
    header: dict[str, Any],
    check: Callable[[int, Frame], object],
    rounds: int = 0,
    masked: bool = False,
    warn: Callable[[str], None] = print,
    tell: Callable[[str], None] = print,
) -> Iterator[JoinedSites]:
    """Context manager that opens the SuperLink and waits for the sites.

    Args:
        superlink: The SuperLink.
        deployment: Configuration of the deployment.
        folder: Folder of the run, for its audit log and its commands.
        total: Number of clients.
        header: Header of each message.
        check: Validates a site's first report.
        rounds: Number of rounds to which the sites must have agreed.
        masked: Whether each site needs a signing key in the roster.
        warn: Called with warnings.
        tell: Called with progress messages.

    Yields:
        The sites that have joined.

    Raises:
        ConfigError: If keys are missing.
        EngineError: If the SuperLink or sites cannot be reached.
    """
    within = ExitStack()
    try:
        tell(f"Waiting for {total} sites; to see which are connected, run unskew deploy status {folder}.")
        link = superlink.open(int(deployment.max_message_mb * 1e6), deployment.startup_timeout)
        connection = SiteConnection(link, partial(superlink.reopen, deployment.startup_timeout), deployment.run, header)
        audit = within.enter_context(closing(AuditLog(folder)))
        sites = SiteManager(connection, total, deployment.round_policy, warn, audit, deployment.excluded)
        within.enter_context(closing(ControlSocket(folder, sites, partial(deployment.write_excluded, folder))))
        roster = superlink.roster()
        if masked and not {*range(total)} <= {*roster}:
            raise ConfigError(
                f"secure_aggregation=required needs {FILE} in the deployment's folder, with the signing keys of all {total} "
                "clients: the file that the sites' operators have exchanged (docs/deployment.md)."
            )
        registry = SiteRegistry(sites, rounds, deployment.startup_timeout, check, deployment.exact, tell, roster)
        frames = wait_for_sites(registry, total if deployment.quorum is None else deployment.quorum)
        yield JoinedSites(sites, registry, roster, frames)
    except EngineError as error:
        why = superlink.why()
        raise EngineError(f"{error}\n{why}" if why else str(error)) from error
    finally:
        within.close()
        superlink.close()
    superlink.forget()


@contextmanager
def connected_sites(
    plan: SitesPlan,
    folder: Path,
    again: bool,
    warn: Callable[[str], None],
    tell: Callable[[str], None],
    location: RunLocation | RemoteSuperLink,
) -> Iterator[ConnectedSites]:
    """Context manager that waits for the sites and agrees with them on data and model.

    Args:
        plan: Validated experiment.
        folder: Folder of the run, for its audit log and its commands.
        again: Whether the run is resumed.
        warn: Called with warnings.
        tell: Called with progress messages.
        location: Location of the SuperLink and the sites, or the SuperLink itself.

    Yields:
        The connected sites, and the data and model on which they agreed.

    Raises:
        ConfigError: If keys are missing, or the data of a site do not fit the experiment.
        EngineError: If the SuperLink or sites cannot be reached.
    """
    reference, config, method, spec = plan.reference, plan.run.config, plan.run.method, plan.run.spec
    superlink = location.superlink(folder, config, again) if isinstance(location, RunLocation) else location
    folder.chmod(0o700)  # the folder contains metrics of single sites
    masked, header = config.secure_aggregation == "required", initial_header(config, reference)
    check, about = report_validator(reference, spec), (config.rounds, masked, warn, tell)
    with joined_sites(superlink, plan.deployment, folder, plan.total, header, check, *about) as joined:
        sites, registry, roster, frames = joined
        federation, spec = agree_on_data_and_model(
            config, plan.deployment, method, plan.drawn, reference, spec, frames, sites, roster
        )
        yield ConnectedSites(sites, registry, roster, replace(plan.run, federation=federation, spec=spec), frames)
