"""``unskew deploy run``: the experiment that was simulated, over sites; the run folder is that of any run."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.config.paths import anchored
from unskew.config.reading import experiment, load_yaml
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.deployment.agreement import Reference, digest_of
from unskew.deployment.joining import Door, gather
from unskew.deployment.masked_engine import check_maskable
from unskew.deployment.messages import Terms
from unskew.deployment.places import Given, Local
from unskew.deployment.preparing import federation_of_sites, prepare
from unskew.deployment.presence import Present, check_late
from unskew.deployment.session import DeployedSession, check_deployable
from unskew.deployment.sites import Patience, Sites
from unskew.deployment.thin.frames import Frame
from unskew.engines.catalogue import pick_device
from unskew.errors import CheckpointError, ConfigError, EngineError
from unskew.files import new_folder, write_atomic
from unskew.methods.catalogue import method as method_of
from unskew.models.vector import ModelSpec
from unskew.options import untrusted
from unskew.protocol.facts import FederationFacts
from unskew.protocol.rules import Method
from unskew.protocol.workspace import Prepared
from unskew.records.recorder import Callback, warn
from unskew.records.result import Result
from unskew.records.trackers import make_trackers
from unskew.runs.checks import check_method, weights_of
from unskew.runs.model import as_wanted
from unskew.runs.run import check_unfinished, moved, resumed, tell_data, worth_keeping
from unskew.simulation.sampler import Sampler

FILE = "deployment.json"
"""In a run folder: how it was deployed, so that it can be resumed."""


@dataclass(frozen=True)
class Deployment:
    """How a run is carried out over sites.

    Attributes:
        run: Its identity, which ties what sites keep to it.
        local: Sites on this machine; None: there is a SuperLink already.
        folder: Of the deployment, where there is one.
        address: Of its SuperLink.
        own_data: Whether the sites have data of their own.
        gathering: Seconds in which all sites must be there.
        patience: Of a round.
        asynchronous: Whether updates are taken in as they come, in later rounds, too.
        quorum: Sites that must be there for the run, and for each round, to begin; None: all, and who leaves is waited for.
        megabytes: Largest message.
        norm: Largest norm of a tensor that is taken.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    local: int | None = None
    folder: str | None = None
    address: str | None = None
    own_data: bool = False
    gathering: float = 600.0
    patience: Patience = field(default_factory=Patience)
    asynchronous: bool = False
    quorum: int | None = None
    megabytes: float = 2048.0
    norm: float = 1e6

    def place(self, config: Experiment) -> Given:
        """Where its SuperLink and its sites are.

        Raises:
            ConfigError: It does not say where.
        """
        if self.local is not None:
            return Local(self.run, self.local, [config])
        if self.folder is None or self.address is None:
            raise ConfigError(
                "Say where the sites are: --local N starts them here, --folder and --superlink name others."
            )
        return Given(Path(self.folder), self.address)

    def check(self) -> None:
        """Refuse numbers that make no sense.

        Raises:
            ConfigError: There are some.
        """
        patience = self.patience
        for name, value in (
            ("local", self.local),
            ("least", patience.least),
            ("faults", patience.faults),
            ("quorum", self.quorum),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 at least.")
        for name, seconds in (("deadline", patience.deadline), ("gathering", self.gathering)):
            if seconds is not None and not 0 < seconds < 1e9:
                raise ConfigError(f"{name}={seconds} is no number of seconds.")
        for name, most in (("megabytes", self.megabytes), ("norm", self.norm)):
            if not 0 < most < 1e12:
                raise ConfigError(f"{name}={most} must be above 0.")
        if patience.short not in ("wait", "go", "stop"):
            raise ConfigError(f"short={patience.short!r} is none of wait, go and stop.")

    def write(self, folder: Path) -> None:
        """Keep it in a run folder."""
        write_atomic(folder / FILE, json.dumps(asdict(self), indent=2).encode())

    @staticmethod
    def read(folder: Path) -> Deployment:
        """Inverse of ``write``.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            values = json.loads((folder / FILE).read_bytes())
            one = Deployment(**{**values, "patience": Patience(**values["patience"])})
            one.check()
            return one
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be read ({error}), so the run cannot go on.") from error


def is_deployed(folder: Path) -> bool:
    """Whether a run folder is that of a deployed run."""
    return (folder / FILE).is_file()


def run(
    config: Experiment,
    deployment: Deployment,
    out: Path,
    callbacks: Sequence[Callback] = (),
    tell: Callable[[str], None] = print,
    place: Given | None = None,
) -> Result:
    """Carry out an experiment over sites.

    Args:
        config: The experiment.
        deployment: How.
        out: The run folder to write.
        callbacks: Followers of the run.
        tell: Told what is waited for before the first round.
        place: Where the sites are, if not where ``deployment`` says.

    Raises:
        ConfigError: The experiment cannot be deployed.
        EngineError: The SuperLink or sites are missing.
    """
    deployment.check()
    with new_folder(out, False, partial(worth_keeping, out)):
        deployment.write(out)
        return _carried_out(config, deployment, out, False, callbacks, tell, place)


def resume(
    folder: Path,
    callbacks: Sequence[Callback] = (),
    trust_code: bool = False,
    tell: Callable[[str], None] = print,
    place: Given | None = None,
    **changes: Any,
) -> Result:
    """Go on with a deployed run that was interrupted; sites go on from what the server took in last.

    Raises:
        CheckpointError: There is nothing to resume.
    """
    with resumed(folder), ExitStack() as within:
        stored = load_yaml(folder / "config.yaml")
        if not trust_code:
            within.enter_context(untrusted({k: v for k, v in stored.items() if k not in changes}, folder))
        config = experiment(moved(stored, changes))
        check_unfinished(folder, config.rounds)
        return _carried_out(config, Deployment.read(folder), folder, True, callbacks, tell, place)


def _carried_out(
    config: Experiment,
    deployment: Deployment,
    folder: Path,
    again: bool,
    callbacks: Sequence[Callback],
    tell: Callable[[str], None],
    place: Given | None,
) -> Result:
    config = anchored(config)
    check_deployable(config)
    method = method_of(config.method)
    device = pick_device(config.device)
    reference = federation_of(config.data_spec, config.seed)
    tell_data(callbacks, reference)
    total = config.clients if deployment.own_data else len(reference.clients)
    if total is None:
        raise ConfigError("Sites with data of their own are counted by the experiment: set clients.")
    if deployment.local not in (None, total):
        raise ConfigError(f"--local {deployment.local} starts as many sites, but the experiment has {total} clients.")
    spec, warnings = checked(config, deployment, reference, method, total)
    for rule in method.data:
        rule.of_client(0, total, 1)
    reference = as_wanted(reference, spec)
    followers = [*callbacks, *make_trackers(config.trackers, folder, None, again, callbacks)]
    # After every round: so a resumed run never asks a site for a state that it has forgotten.
    config = config.model_copy(update={"checkpoint_every": 1})
    terms = Terms(method, spec, deployment.norm, int(deployment.megabytes * 1e6))
    about = {"digest": digest_of(config), **Reference.of(reference).config()}
    place = deployment.place(config) if place is None else place
    try:
        tell(f"Waiting for {total} sites.")
        link = place.open(int(deployment.megabytes * 1e6), deployment.gathering)
        reopen = partial(place.reopen, deployment.gathering)
        sites = Sites(link, reopen, deployment.run, about, deployment.patience, partial(warn, callbacks))
        door = Door(sites, total, deployment.gathering)
        frames = gather(door, total if deployment.quorum is None else deployment.quorum)
        check_parameters(frames, spec.size, sites)
        federation = federation_of_sites(reference, frames, sites.names, not deployment.own_data, total)
        prepared = prepare(method, Prepared(federation, config.training), config.seed, sites, deployment.norm)
        session = DeployedSession(config, prepared, federation, spec, method, device, folder, followers, warnings)
        session.connect(sites, terms, budget_of(config, prepared), deployment.asynchronous)
        if deployment.quorum is not None:
            session.network.present = Present(sites, door, prepared.federation, spec.size, deployment.quorum)
        session.primitives = place.primitives
        for client, (up, down) in prepared.traffic:
            session.server.traffic.count(client, "up", up, 0)
            session.server.traffic.count(client, "down", down, 0)
        result = session.go(again)
    except EngineError as error:
        why = place.why()
        raise EngineError(f"{error}\n{why}" if why else str(error)) from error
    finally:
        place.close()
    place.forget()
    return result


def checked(
    config: Experiment, deployment: Deployment, reference: Federation, method: Method, total: int
) -> tuple[ModelSpec, list[str]]:
    """See ``check_method``; also refuse what the way of deployment forbids.

    Raises:
        ConfigError: It does.
    """
    spec, warnings = check_method(config, reference, None, method)
    if deployment.asynchronous:
        delay = config.network.model_copy(update={"delay": "fixed:1"})
        try:
            check_method(config.model_copy(update={"network": delay}), reference, None, method)
        except ConfigError as error:
            raise ConfigError(str(error).replace("network.delay", "--asynchronous")) from error
    cohort = Sampler(total, config.participation, config.seed).size
    if deployment.quorum is not None:
        if deployment.quorum > total:
            raise ConfigError(
                f"quorum={deployment.quorum} sites can never be there: the experiment has {total} clients."
            )
        cohort = min(cohort, deployment.quorum)
        check_late(method, spec, replace(FederationFacts.of(reference), weights=weights_of(config, method)))
    if config.secure_aggregation == "required":
        check_maskable(method, cohort, deployment.asynchronous)
    return spec, warnings


def budget_of(config: Experiment, prepared: Prepared) -> dict[str, int]:
    """What a data rule has changed of the clients' budget, beside what differs between clients."""
    before, after = config.training.local_epochs, prepared.training.local_epochs
    return {"local_epochs": after} if after is not None and after != before else {}


def check_parameters(frames: dict[int, Frame], size: int, sites: Sites) -> None:
    """Refuse sites that have built another model.

    Raises:
        ConfigError: There is one.
    """
    for client, frame in frames.items():
        if frame.config.get("parameters") != size:
            raise ConfigError(
                f"{sites.name(client)} has built a model with {frame.config.get('parameters')} parameters, not {size}; "
                "install the same versions everywhere."
            )
