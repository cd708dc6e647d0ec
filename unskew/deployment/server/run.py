"""``unskew deploy run``: run a simulated experiment on real sites, with the same kind of run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_config
from unskew.config.paths import with_absolute_paths
from unskew.config.trust import TRUST
from unskew.data.load import load_partitioned
from unskew.deployment.flower.superlinks import RemoteSuperLink, RunLocation
from unskew.deployment.secagg.roster import FILE
from unskew.deployment.server.audit_log import AuditLog
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.connection import SiteConnection
from unskew.deployment.server.control import ControlSocket
from unskew.deployment.server.data_exchange import run_data_rules
from unskew.deployment.server.handshake import (
    agree_on_data_and_model,
    changed_budget,
    check_method_over_sites,
    initial_header,
    report_validator,
)
from unskew.deployment.server.joining import SiteRegistry, wait_for_sites
from unskew.deployment.server.membership import Membership
from unskew.deployment.server.site_clients import SiteClients, check_deployable
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.context import WireContext
from unskew.engines.registry import pick_device
from unskew.errors import ConfigError, EngineError
from unskew.folder_locks import output_folder
from unskew.methods.registry import method as method_of
from unskew.protocol.data_preparation import PreparedData
from unskew.records.recorder import Callback, notify_warning
from unskew.records.result import Result
from unskew.records.trackers import make_trackers
from unskew.runs.assembly import assemble
from unskew.runs.build_model import match_model_input_range
from unskew.runs.metrics import run_metrics
from unskew.runs.run import check_unfinished, keep_on_error, notify_loaded, override_paths, resumed_folder
from unskew.runs.session import Session


def run(
    config: Experiment,
    deployment: Deployment,
    out: Path,
    callbacks: Sequence[Callback],
    tell: Callable[[str], None],
    location: RunLocation | RemoteSuperLink,
) -> Result:
    """Run an experiment over sites.

    Args:
        config: Configuration of the run.
        deployment: Configuration of the deployment.
        out: Run folder to create.
        callbacks: Objects that are notified during the run.
        tell: Called with progress messages before the first round.
        location: Location of the SuperLink and the sites, or the SuperLink itself.

    Raises:
        ConfigError: If the experiment cannot be deployed.
        EngineError: If the SuperLink or sites cannot be reached.
    """
    with owner_only_files(), output_folder(out, False, partial(keep_on_error, out)):
        deployment.write(out)
        return _run_over_sites(config, deployment, out, False, callbacks, tell, location)


def resume(
    folder: Path,
    callbacks: Sequence[Callback] = (),
    trust_code: bool = False,
    tell: Callable[[str], None] = print,
    *,
    location: RunLocation | RemoteSuperLink,
    **changes: Any,
) -> Result:
    """Resume a deployed run; sites continue from the last updates that the server accepted.

    Args:
        folder: Run folder.
        callbacks: Objects that are notified during the run.
        trust_code: Whether code that the configuration names may be imported.
        tell: Called with progress messages before the first round.
        location: Location of the SuperLink and the sites, or the SuperLink itself; the run folder does not name it.
        **changes: Fields of the configuration to change.

    Raises:
        CheckpointError: If there is nothing to resume.
    """
    with owner_only_files(), resumed_folder(folder):
        stored = load_config(folder / "config.yaml", None if trust_code else TRUST, changes)
        config = experiment(override_paths(stored, changes))
        check_unfinished(folder, config.rounds)
        return _run_over_sites(config, Deployment.read(folder), folder, True, callbacks, tell, location)


@contextmanager
def owner_only_files() -> Iterator[None]:
    """Context manager that makes this process create files and folders that only their owner can access."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _run_over_sites(
    config: Experiment,
    deployment: Deployment,
    folder: Path,
    again: bool,
    callbacks: Sequence[Callback],
    tell: Callable[[str], None],
    location: RunLocation | RemoteSuperLink,
) -> Result:
    config = with_absolute_paths(config)
    check_deployable(config)
    method = method_of(config.method)
    device = pick_device(config.device)
    drawn = load_partitioned(config.data_spec, config.seed)
    counts_known = config.secure_aggregation != "required"  # else sites send class counts only in sums
    reference = replace(drawn.federation(drawn.known()), counts_known=counts_known)
    notify_loaded(callbacks, reference)
    total = config.clients if deployment.own_data else len(reference.clients)
    if total is None:
        raise ConfigError("If the sites have their own data, the experiment must set clients, the number of sites.")
    local = location.local if isinstance(location, RunLocation) else None
    if local not in (None, total):
        raise ConfigError(f"--local {local} does not match the {total} clients of the experiment.")
    run = check_method_over_sites(config, deployment, reference, method, total)
    spec = run.spec
    reference = match_model_input_range(reference, spec)
    callbacks = [*callbacks, *make_trackers(config.trackers, folder, None, again, callbacks)]
    # Checkpoint every round, so that a resumed run never needs a state that the sites have already deleted.
    config = config.model_copy(update={"checkpoint_every": 1})
    header = initial_header(config, reference)
    superlink = location.superlink(folder, config, again) if isinstance(location, RunLocation) else location
    folder.chmod(0o700)  # the folder contains metrics of single sites
    within = ExitStack()
    try:
        tell(f"Waiting for {total} sites; to see which are connected, run unskew deploy status {folder}.")
        link = superlink.open(int(deployment.max_message_mb * 1e6), deployment.startup_timeout)
        reopen = partial(superlink.reopen, deployment.startup_timeout)
        sites = SiteManager(
            SiteConnection(link, reopen, deployment.run, header),
            total,
            deployment.round_policy,
            partial(notify_warning, callbacks),
            within.enter_context(closing(AuditLog(folder))),
            deployment.excluded,
        )
        within.enter_context(closing(ControlSocket(folder, sites, partial(deployment.write_excluded, folder))))
        roster = superlink.roster()
        if config.secure_aggregation == "required" and not {*range(total)} <= {*roster}:
            raise ConfigError(
                f"secure_aggregation=required needs {FILE} in the deployment's folder, with the signing keys of all {total} "
                "clients: the file that the sites' operators have exchanged (docs/deployment.md)."
            )
        registry = SiteRegistry(
            sites,
            config.rounds,
            deployment.startup_timeout,
            report_validator(reference, spec),
            deployment.exact,
            tell,
            roster,
        )
        frames = wait_for_sites(registry, total if deployment.quorum is None else deployment.quorum)
        federation, spec = agree_on_data_and_model(
            config, deployment, method, drawn, reference, spec, frames, sites, roster
        )
        wire_context = WireContext(
            method, spec, config.buffers, deployment.max_norm, int(deployment.max_message_mb * 1e6)
        )
        prepared = run_data_rules(
            method, PreparedData(federation, config.training), config.seed, sites, deployment.max_norm, spec
        )
        metrics = run_metrics(config, federation)
        run = replace(run, config=config, federation=federation, spec=spec, metrics=metrics)
        parts = assemble(run, prepared, device, folder, callbacks, deployed=True)
        present = None
        if deployment.quorum is not None:
            present = Membership(sites, registry, prepared.federation, deployment.quorum)
        budget = changed_budget(config, prepared)
        clients = SiteClients(parts, sites, wire_context, budget, roster, deployment.asynchronous, present)
        result = Session(clients.parts, clients, run.warnings).run(again)
    except EngineError as error:
        why = superlink.why()
        raise EngineError(f"{error}\n{why}" if why else str(error)) from error
    finally:
        within.close()
        superlink.close()
    superlink.forget()
    return result
