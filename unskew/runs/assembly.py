"""Assembly of the parts of a run before the first round."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from unskew.attacks.attackers import Attackers
from unskew.config.experiment import AT_CLIENTS, Experiment
from unskew.config.paths import without_data_locations
from unskew.engines.base import EngineConfig
from unskew.engines.local_trainer import check_batch_sizes
from unskew.methods.fedavg import FedAvg, server_rule
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import cohort_size
from unskew.protocol.rules import Method
from unskew.records.recorder import Callback, Recorder
from unskew.runs.metrics import RunMetrics
from unskew.runs.resolved_run import ResolvedRun
from unskew.runs.resume import RESUMABLE, data_identity, stored_content
from unskew.runs.state_stores import make_client_store
from unskew.secret_draws import KEY_FILE, NoiseSource, SecretKey, SystemEntropy, stored_key
from unskew.simulation.client_store import ClientStore
from unskew.simulation.clock import Clock, draw_speeds, parse_quantity, read_speeds
from unskew.simulation.delays import Delays
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.network import Network
from unskew.simulation.sampler import Sampler
from unskew.simulation.samplers.registry import parse_sampling
from unskew.simulation.server import Server
from unskew.simulation.server_state import ServerSetup
from unskew.simulation.server_trainer import ServerTrainer
from unskew.tasks.base import Task


@dataclass(frozen=True)
class RunParts:
    """Parts of a run that is ready to start.

    Attributes:
        config: Configuration of the run.
        prepared: Training data after the data rules of the method.
        spec: Layout and initial parameters of the model, on the run's device.
        method: Method of the run.
        folder: Run folder, or None.
        callbacks: Callbacks of the run.
        task: Loss and scores for evaluation, without class weights.
        metrics: Metrics that the run reports.
        sampler: Draws the cohort of each round.
        server: Stores the global model and aggregates updates.
        network: Delivers updates to the server.
        evaluator: Evaluates models on test data.
        recorder: Writes metrics and warnings.
        setup: Configuration of the engine.
        attackers: Clients that attack, or None.
    """

    config: Experiment
    prepared: PreparedData
    spec: ModelSpec
    method: Method
    folder: Path | None
    callbacks: Sequence[Callback]
    task: Task
    metrics: RunMetrics
    sampler: Sampler
    server: Server
    network: Network
    evaluator: Evaluator
    recorder: Recorder
    setup: EngineConfig
    attackers: Attackers | None = None

    @property
    def attack(self) -> str | None:
        """Kind of the simulated attack, or None."""
        return None if self.config.attack is None else self.config.attack.kind


def assemble(
    run: ResolvedRun,
    prepared: PreparedData,
    device: torch.device,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
    deployed: bool = False,
) -> RunParts:
    """Create the parts of a run, and count the traffic of the data preparation.

    Args:
        run: The run.
        prepared: Training data after the data rules of the method.
        device: Device for computations.
        folder: Run folder; None writes nothing.
        callbacks: Callbacks of the run.
        deployed: Whether clients are real sites, which know the seed: noise and Poisson cohorts are then drawn from the
            system's entropy.

    Raises:
        CheckpointError: If the key of an unfinished private run is missing.
    """
    config, method, original = run.config, run.method, run.federation
    spec = run.spec.to(device)
    if device.type != "cpu":
        moved = prepared.to(device)
        original, prepared = moved.federation if original is prepared.federation else original, moved
    federation = prepared.federation
    task = federation.objective.unweighted
    rule = server_rule(method)
    weights = run.weights
    clients, cache, in_flight = (
        ClientStore(None if folder is None else folder / name) for name in ("clients", "cache", "in-flight")
    )
    store = make_client_store(config, folder, clients)
    clients_trained = len(federation.clients)  # a data rule may pool the clients
    plan = replace(run.plan, clients=clients_trained, cohort=cohort_size(clients_trained, run.plan.participation))
    secret = SystemEntropy() if deployed else secret_key(method, folder, config, prepared, spec)
    info = replace(prepared.federation_info, plan=plan, weights=weights)
    of_all = replace(FederationInfo.of(federation), plan=plan)  # including generated samples
    sampler = Sampler(plan.clients, plan.participation, config.seed, parse_sampling(config.sampling), of_all, secret)
    observed = any(metric.diagnosis in config.diagnose for metric in rule.summary_metrics)
    trainer = ServerTrainer(
        spec, federation, plan.training, device, sampler.size, observed, "samples" if callable(weights) else weights
    )
    noise = NoiseSource(config.seed, secret)
    server = Server(ServerSetup(method, rule, spec, info, config.buffers, config.seed, trainer, noise), store, cache)
    server.observed["sampler"] = sampler.state
    traffic = [] if original.stats_traffic is None else enumerate(original.stats_traffic.tolist())
    for client, (up, down) in (*traffic, *prepared.traffic):
        server.traffic.total.count(client, "up", up, 0)
        server.traffic.total.count(client, "down", down, 0)
    delays = Delays(config.network.delay, config.seed, config.network.delay_per == "client")
    delays.check(len(federation.clients))
    clock = make_clock(run, server) if config.network.timed else None
    recorder = Recorder(folder, callbacks)
    of_clients = plan.reads_reports or bool({*config.diagnose} & {*AT_CLIENTS})
    single = config.attack is not None or clock is not None or not delays.instant or of_clients
    setup = EngineConfig(
        spec=spec,
        federation=federation,
        rules=method.client,
        task=federation.objective,
        training=prepared.training,
        seed=config.seed,
        device=device,
        buffers=config.buffers,
        common=prepared.common,
        stall_warning_seconds=config.stall_warning_seconds,
        warn=recorder.warn,
        retried=recorder.retried,
        waited=recorder.waited,
        plan=plan,
        graphs=config.graphs == "auto",
        sums=server.setup.sums_suffice and not single,
        secret=secret,
    )
    trains_all = config.rounds * config.participation >= 1 and rule.steps_without != "clients"
    if trains_all and not deployed:  # sites validate their own samples
        check_batch_sizes(setup)
    attackers = None
    if config.attack is not None:
        eta = rule.eta if isinstance(rule, FedAvg) else 1.0
        attackers = Attackers(config.attack, len(federation.clients), config.seed, eta)
        server.observed["attack"] = attackers.state
    return RunParts(
        config=config,
        prepared=prepared,
        spec=spec,
        method=method,
        folder=folder,
        callbacks=callbacks,
        task=task,
        metrics=run.metrics,
        sampler=sampler,
        server=server,
        network=Network(config.network.drop, config.seed, delays, in_flight, device, clock),
        evaluator=Evaluator(spec, original, task, device, run.metrics.computed),
        recorder=recorder,
        setup=setup,
        attackers=attackers,
    )


def secret_key(
    method: Method, folder: Path | None, config: Experiment, prepared: PreparedData, spec: ModelSpec
) -> SecretKey | None:
    """Return the key of the secret draws of a simulated run, or None if the run has none.

    The key of an unfinished run is stored in its folder. A finished run that is extended gets another key. The key depends
    on all that determines what a round releases, too: a run without a checkpoint may be started again with other data,
    options or rounds, and noise that is repeated for other inputs or with another scale would cancel in the difference.

    Args:
        method: Method of the run.
        folder: Run folder; None keeps the key in memory.
        config: Configuration of the run.
        prepared: Training data after the data rules of the method.
        spec: Layout and initial parameters of the model.

    Raises:
        CheckpointError: If the key of an unfinished run is missing.
    """
    if not any(rule.draws_secretly for rule in method.rules):
        return None
    fields = without_data_locations(config.model_dump(mode="json", exclude={*RESUMABLE} - {"rounds"}))
    initial = zlib.crc32(spec.flatten().cpu().numpy().tobytes())
    scope = json.dumps([fields, data_identity(prepared), stored_content(prepared.federation), initial], sort_keys=True)
    if folder is None:
        return SecretKey().within(scope)
    path, metrics = folder / KEY_FILE, folder / "metrics.jsonl"
    finished = (folder / "summary.json").exists()
    if finished:
        path.unlink(missing_ok=True)
    begun = any(folder.glob("checkpoints/*")) or (metrics.exists() and metrics.stat().st_size > 0)
    return stored_key(path, begun and not finished).within(scope)


def make_clock(run: ResolvedRun, server: Server) -> Clock:
    """Create the virtual clock of a run.

    Args:
        run: The run.
        server: Server of the run, which has counted the transfers before the first round.

    Raises:
        DataError: If the trace cannot be read or lacks a client.
    """
    network, seed, clients = run.config.network, run.config.seed, server.setup.federation_info.clients
    if network.trace is None:
        speeds = draw_speeds(network.speeds, clients, seed)
    else:
        speeds = read_speeds(Path(network.trace), clients)
    deadline = None if network.deadline is None else parse_quantity(network.deadline, "deadline")
    return Clock(server, speeds, deadline, run.accepts_late)
