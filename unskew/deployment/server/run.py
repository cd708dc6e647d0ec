"""``unskew deploy run``: run a simulated experiment on real sites, with the same kind of run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_config
from unskew.config.trust import TRUST
from unskew.deployment.flower.superlinks import RemoteSuperLink, RunLocation
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.connected_sites import connected_sites, owner_only_files, plan_over_sites
from unskew.deployment.server.data_exchange import run_data_rules
from unskew.deployment.server.handshake import changed_budget
from unskew.deployment.server.membership import Membership
from unskew.deployment.server.site_clients import SiteClients
from unskew.deployment.wire.context import WireContext, shared_buffers
from unskew.engines.registry import pick_device
from unskew.folder_locks import output_folder
from unskew.protocol.data_preparation import PreparedData
from unskew.records.recorder import Callback, notify_warning
from unskew.records.result import Result
from unskew.records.trackers import make_trackers
from unskew.runs.assembly import assemble
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


def _run_over_sites(
    config: Experiment,
    deployment: Deployment,
    folder: Path,
    again: bool,
    callbacks: Sequence[Callback],
    tell: Callable[[str], None],
    location: RunLocation | RemoteSuperLink,
) -> Result:
    device = pick_device(config.device)
    plan = plan_over_sites(config, deployment, location)
    config = plan.run.config
    callbacks = [*callbacks, *make_trackers(config.trackers, folder, None, again, callbacks)]
    notify_loaded(callbacks, plan.reference)
    with connected_sites(plan, folder, again, partial(notify_warning, callbacks), tell, location) as connected:
        sites, run = connected.sites, connected.run
        federation, spec, method = run.federation, run.spec, run.method
        wire_context = WireContext(
            method,
            spec,
            shared_buffers(config.buffers, spec),
            deployment.max_norm,
            int(deployment.max_message_mb * 1e6),
        )
        prepared = run_data_rules(
            method, PreparedData(federation, config.training), config.seed, sites, deployment.max_norm, spec
        )
        # Checkpoint every round, so that a resumed run never needs a state that the sites have already deleted.
        config = config.model_copy(update={"checkpoint_every": 1})
        run = replace(run, config=config, metrics=run_metrics(config, federation))
        parts = assemble(run, prepared, device, folder, callbacks, deployed=True)
        present = None
        if deployment.quorum is not None:
            present = Membership(sites, connected.registry, prepared.federation, deployment.quorum)
        budget = changed_budget(config, prepared)
        clients = SiteClients(parts, sites, wire_context, budget, connected.roster, deployment.asynchronous, present)
        return Session(clients.parts, clients, run.warnings).run(again)
