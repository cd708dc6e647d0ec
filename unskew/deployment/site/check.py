"""``unskew deploy check``: at a site, before anything is sent, whether all is right and what will be sent."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import torch

from unskew.config.experiment import Experiment
from unskew.deployment.wire.data_schema import experiment_digest
from unskew.deployment.flower.project_files import is_private
from unskew.deployment.site.data import load_site_data, schema_from_own_data, reference_schema, own_split
from unskew.deployment.server.joining import SKEW
from unskew.deployment.wire.messages import encode_broadcast, encode_update
from unskew.deployment.site.received import ReceivedData
from unskew.deployment.secagg.roster import load_identity
from unskew.deployment.server.column_statistics import describe_sums
from unskew.deployment.site.config import SiteConfig, load_site_config, read_experiments
from unskew.deployment.site.state import SiteState
from unskew.deployment.wire.frames import Frame
from unskew.deployment.site.trainer import SiteTrainer
from unskew.errors import UnskewError
from unskew.methods.fedavg import server_rule
from unskew.protocol.federation_info import FederationInfo
from unskew.simulation.server import Server
from unskew.simulation.server_trainer import ServerTrainer

SOON = 30
"""Days before its end from which a certificate is reported."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: What was looked at.
        ok: Whether it is right; None: it is only told.
        text: What was found.
    """

    what: str
    ok: bool | None
    text: str


def check_site(path: Path) -> Iterator[Finding]:
    """Return the findings on a site line by line; a failed check does not end the list."""
    try:
        site = load_site_config(path)
        folder = path.parent.absolute()
        experiments = read_experiments(site, folder)
    except UnskewError as error:
        yield Finding("configuration", False, str(error))
        return
    yield Finding("configuration", True, f"{site.name}, client {site.client}, {len(experiments)} experiment(s)")
    same: dict[str, list[Path]] = {}
    for file, named_experiment in experiments.items():
        same.setdefault(experiment_digest(named_experiment), []).append(file)
    for files in same.values():
        experiment = experiments[files[0]]
        if len(experiments) > 1:
            alike = "" if len(files) == 1 else ", alike for sites"
            yield Finding("experiment", None, ", ".join(file.name for file in files) + alike)
        yield from _guarded("data", lambda named_experiment=experiment: _experiment(site, folder, named_experiment))  # type: ignore[misc]
    yield from _guarded("node key", lambda: _key(site, folder))
    yield from _guarded("roster", lambda: _roster(site, folder, experiments.values()))
    yield from _guarded("SuperLink", lambda: _superlink(site, folder))


def _guarded(what: str, findings: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from findings()
    except (UnskewError, OSError) as error:
        yield Finding(what, False, str(error))


def _experiment(site: SiteConfig, folder: Path, config: Experiment) -> Iterator[Finding]:
    """Return the findings on one experiment, and the messages of a round."""
    if site.data == "split":
        holding, full_data = own_split(config, site.client, f"The site {site.name}")
        reference, which = reference_schema(full_data, config), "of the experiment's own data"
    else:
        holding = load_site_data(site, config, folder)
        source, reference = holding.source, schema_from_own_data(holding, config)
        shape = "x".join(map(str, reference.shape))
        which = f"inputs {shape}, {', '.join(source.class_names[:10]) or f'{source.classes} classes'}"
    counts = f"{len(holding.train)} samples to train on and {len(holding.held)} held out"
    yield Finding("data", True, f"{counts}, {which}")
    if site.data != "split":
        yield Finding(
            "data", None, "whether inputs and classes are those of the server is compared when the run begins"
        )
    for line in describe_sums(holding):
        yield Finding("sent once", None, line)
    work = SiteTrainer(site, config, reference, holding)
    yield Finding("model", True, f"{config.model} with {work.spec.size:,} parameters, method {config.method}")
    request, answered = first_round_messages(work)
    frames = {"sent once": work.facts(work.data), "received each round": request, "sent each round": answered}
    for way, frame in frames.items():
        for name, blob in frame.arrays.items():
            shape = "x".join(map(str, blob.shape)) or "one"
            yield Finding(way, None, f"{name}: {blob.dtype} {shape}, {len(blob.data):,} bytes")
        reported = {*frame.figures, *(k for k in frame.config if k in ("name", "examples", "held_out", "weight"))}
        if reported and way.startswith("sent"):
            yield Finding(way, None, f"figures: {', '.join(sorted(reported))}")
    scored = work.original.objective.scored
    yield Finding("sent at the end", None, f"{scored} and loss on what is held out")
    for rule in work.method.data:
        yield Finding("sent once", None, f"before the first round, what {rule.name} makes of the samples")
    readers = [
        rule.name for rule in (*work.method.client, *filter(None, [work.method.server])) if "individual" in rule.needs
    ]
    if config.secure_aggregation == "required":
        yield Finding(
            "privacy", None, "what is sent each round leaves this site masked: the server sees the sum of the sites"
        )
        return
    reads = f", and {', '.join(readers)} reads it" if readers else f"; {config.method} needs only the sum"
    yield Finding("privacy", None, f"the server sees this site's update by itself{reads}")


def first_round_messages(work: SiteTrainer) -> tuple[Frame, Frame]:
    """Return the messages of the first round in both directions. One step is trained to create them, and nothing is sent."""
    small = work.config.model_copy(update={"local_steps": 1, "local_epochs": None, "lr_schedule": "constant"})
    client = work.site.client
    federation = work.with_data(work.data)
    total = torch.zeros(work.total, work.reference.classes).long().numpy()
    facts = replace(FederationInfo.of(federation), size=lambda k: work.data.examples, class_counts=lambda: total + 1)
    rule = server_rule(work.method)
    trainer = ServerTrainer(work.spec, federation, small.training, work.device)
    server = Server(work.method, rule, work.spec, facts, "samples", small.buffers, seed=small.seed, at_server=trainer)
    request = encode_broadcast(server.broadcast(0, client), work.terms, "train", {})
    before, work.config = work.config, small
    try:
        with tempfile.TemporaryDirectory() as scratch:
            received = ReceivedData(Path(scratch), ())  # as if nothing had come before the first round
            update, broadcast = work.trained(request, SiteState(Path(scratch), "0" * 16, client), received)
            answered = encode_update(update, broadcast, work.terms, {})
    finally:
        work.config = before
    return request, answered


def _key(site: SiteConfig, folder: Path) -> Iterator[Finding]:
    path = site.path("key", folder)
    if not path.is_file():
        yield Finding("node key", False, f"{path} is missing; sh node-key.sh makes it")
        return
    if not is_private(path):
        yield Finding("node key", False, f"others may read {path}; chmod 600 it, and make a new one if somebody did")
        return
    done = subprocess.run(["ssh-keygen", "-y", "-P", "", "-f", str(path)], capture_output=True, text=True, check=False)
    good = done.returncode == 0 and done.stdout.startswith("ecdsa-sha2-nistp384")
    yield Finding("node key", good, f"{path}, mode 0600" if good else f"{path} is not an ECDSA key on the curve P-384")


def _roster(site: SiteConfig, folder: Path, experiments: Iterable[Experiment]) -> Iterator[Finding]:
    """Check the signing key and the roster, if there is one or an experiment needs it."""
    identity = load_identity(site, folder, experiments)
    if identity is None:
        yield Finding("roster", None, "none; it is needed for secure aggregation only")
        return
    key = site.path("signing_key", folder)
    if not is_private(key):
        yield Finding("roster", False, f"others may read {key}; make a new one, and exchange the roster again")
        return
    yield Finding("roster", True, f"{len(identity.roster)} clients; that of {site.client} has the key {key}, mode 0600")


def _superlink(site: SiteConfig, folder: Path) -> Iterator[Finding]:
    """Its certificate, whether it is reached, and whether the clocks agree."""
    ca = site.path("ca", folder)
    if not ca.is_file():
        yield Finding("certificate", False, f"{ca} is missing; the server's administrator has it")
        return
    host, _, port = site.superlink.rpartition(":")
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
    began = time.perf_counter()
    try:
        connection.connect()
        peer = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        took = time.perf_counter() - began
        yield Finding("SuperLink", True, f"{site.superlink} answers over TLS after {took * 1000:.0f} ms")
        end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str((peer or {}).get("notAfter"))), UTC)
        days = (end - datetime.now(UTC)).days
        yield Finding("certificate", days >= SOON, f"signed by {ca.name}, good for {host} and for {days} days more")
        connection.request("GET", "/")
        date = connection.getresponse().getheader("Date")
        if date is None:
            yield Finding("clock", None, "the SuperLink does not tell its time")
        else:
            apart = abs((parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds())
            yield Finding("clock", apart < SKEW, f"{apart:.0f} s apart from the SuperLink's")
    except ssl.SSLCertVerificationError as error:
        yield Finding("certificate", False, f"the SuperLink's is refused: {error.verify_message}")
    except (ssl.SSLError, OSError, http.client.HTTPException) as error:
        yield Finding("SuperLink", False, f"{site.superlink} cannot be reached over TLS: {error}")
    finally:
        connection.close()
