"""``unskew deploy check``: validate a site's configuration and list what it will send, before anything is sent."""

from __future__ import annotations

import http.client
import ssl
import stat
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
from unskew.data.partitioned import target_names
from unskew.data.readers.column_roles import INPUT
from unskew.deployment.common.agreement import SKEW, experiment_digest
from unskew.deployment.common.data_schema import read_schema, reference_schema
from unskew.deployment.site.config import SiteConfig, load_identity, load_site_config, read_experiments
from unskew.deployment.site.data import SiteData, load_site_data, own_split, schema_from_own_data
from unskew.deployment.site.received import ReceivedData
from unskew.deployment.site.state import SiteState
from unskew.deployment.site.sums import describe_sums
from unskew.deployment.site.trainer import SiteTrainer
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import encode_broadcast, encode_update
from unskew.errors import ConfigError, UnskewError
from unskew.methods.dp_sites import site_noise
from unskew.methods.fedavg import server_rule
from unskew.methods.registry import method as method_of
from unskew.protocol.federation_info import FederationInfo
from unskew.runs.round_plan import make_round_plan
from unskew.simulation.server import Server
from unskew.simulation.server_state import ServerSetup
from unskew.simulation.server_trainer import ServerTrainer
from unskew.sums.base import SumRequest
from unskew.sums.registry import SUMS

SOON = 30
"""Number of days before expiry from which a certificate is reported as a failure."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: Name of the check.
        ok: Whether the check passed; None for information only.
        text: Result of the check.
    """

    what: str
    ok: bool | None
    text: str


def check_site(path: Path) -> Iterator[Finding]:
    """Yield the findings on a site; a failed check does not stop the others."""
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
            alike = "" if len(files) == 1 else ", identical for sites"
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
    """Yield the findings on one experiment, and the messages that it sends and receives."""
    compared = ""
    if site.data == "split":
        samples, full_data = own_split(config, site.client, f"The site {site.name}")
        reference, which = reference_schema(full_data, config), "of the experiment's own data"
    else:
        samples = load_site_data(site, config, folder)
        source, installed = samples.source, read_schema(site.path("data_schema", folder))
        compared = f"they fit {site.data_schema}; the site rejects messages with another schema"
        if installed is None:
            if site_noise(method_of(config.method)) is not None:
                raise ConfigError(
                    f"{site.data_schema} is missing; noise at the sites needs it. Get it from the server."
                )
            compared = "inputs and classes are compared with the server's when the run starts"
        reference = schema_from_own_data(samples, config) if installed is None else installed
        shape = "x".join(map(str, reference.shape))
        which = f"inputs {shape}, {', '.join(source.class_names[:10]) or f'{source.classes} classes'}"
    counts = f"{len(samples.train)} training samples and {len(samples.held)} held-out samples"
    yield Finding("data", True, f"{counts}, {which}")
    if compared:
        yield Finding("data", None, compared)
    for line in describe_sums(samples.rows(), config):
        yield Finding("sent once", None, line)
    yield from statistics_findings(site, config, samples)
    work = SiteTrainer(site, config, reference, samples)
    yield Finding("model", True, f"{config.model} with {work.spec.size:,} parameters, method {config.method}")
    requests, responses = zip(*round_messages(work), strict=True)
    ways = {"sent once": (work.client_info(work.data),), "received each round": requests, "sent each round": responses}
    for way, frames in ways.items():
        for name in dict.fromkeys(name for frame in frames for name in frame.arrays):
            blobs = [frame.arrays[name] for frame in frames if name in frame.arrays]
            blob = max(blobs, key=lambda blob: len(blob.data))
            shape = "x".join(map(str, blob.shape)) or "one"
            text = f"{name}: {blob.dtype} {shape}, {len(blob.data):,} bytes"
            every = len(blobs) == len(frames)
            yield Finding(way if every else way.replace("each round", "some rounds"), None, text)
        reported = {k for k in frames[0].config if k in ("name", "num_samples", "held_out", "weight")}.union(
            *(frame.metrics for frame in frames)
        )
        if reported and way.startswith("sent"):
            yield Finding(way, None, f"numbers: {', '.join(sorted(reported))}")
    if work.noise is None:
        scored = work.original.objective.scored
        yield Finding("sent at the end", None, f"{scored} and loss on the held-out samples")
    yield Finding("sent afterwards", None, evaluation_text(work))
    for rule in work.method.data:
        yield Finding(
            "sent once", None, f"before the first round, the data that {rule.name} generates from the samples"
        )
    if callable(work.method.weights):
        yield Finding(
            "privacy", None, f"{config.method} weights sites by the number of samples of each class that they sent"
        )
    at_server = (*work.method.halves, *filter(None, [work.method.server]))
    readers = list(dict.fromkeys(rule.name for rule in at_server if "individual" in rule.needs))
    if config.secure_aggregation == "required":
        yield Finding("privacy", None, "updates leave this site masked: the server sees only the sum over sites")
        if work.noise is not None:
            text = (
                f"noise at the sites: protects this site if {work.noise.honest} sites of every sum add theirs (honest)"
            )
            yield Finding("privacy", None, text)
        return
    reads = f", and {', '.join(readers)} requires it" if readers else f"; {config.method} requires only the sum"
    yield Finding("privacy", None, f"the server sees this site's individual update{reads}")


def statistics_findings(site: SiteConfig, config: Experiment, samples: SiteData) -> Iterator[Finding]:
    """Yield what each statistic that a site allows would send, and how it is protected.

    Args:
        site: Configuration of the site.
        config: An experiment that it has agreed to.
        samples: The site's samples for this experiment.
    """
    rules, source = site.statistics, samples.source
    if not rules.allow:
        yield Finding("statistics", None, "none is allowed (statistics.allow in site.yaml)")
        return
    inputs = [name for name, role in source.columns.items() if role.startswith(INPUT)]
    encoded = {encoder.name for encoder in source.encoders if encoder.kind == "category"}
    numbers = [name for name in inputs if name not in encoded]
    ranges = getattr(config, "ranges", None) or {}
    targets = list(target_names(source))
    for kind in (kind for kind in SUMS.values() if kind.permission in rules.allow):
        columns = inputs if kind.permission == "missing" else numbers
        known = {"columns": columns, "targets": targets, "classes": source.classes}
        choices = [{"column": name, "range": ranges[name]} for name in numbers if name in ranges]
        needed = {*kind.arguments.model_fields}
        for args in choices if "range" in needed else [{}]:
            values = {name: value for name, value in {**known, **args}.items() if name in needed}
            # What only the server knows is not in the description.
            own = {*values} == needed
            text = kind.describe(SumRequest(kind.name, values)) if own else (kind.__doc__ or kind.name).split("\n")[0]
            yield Finding("statistics", None, f"{kind.permission}: {text}")
        if "range" in needed and not choices:
            yield Finding("statistics", None, f"{kind.permission}: none, because the experiment has no ranges")
    noise = "exact"
    if rules.epsilon is not None:
        noise = f"sent with discrete Laplace noise of epsilon={rules.epsilon:g}"
        noise += "" if rules.total_epsilon is None else f", until their sum reaches {rules.total_epsilon:g}"
    small = f"below {rules.min_count} are not sent" + ("" if rules.mask_small else ", unless they are masked")
    yield Finding("statistics", None, f"counts are {noise}; those {small}")


def evaluation_text(work: SiteTrainer) -> str:
    """Describe what ``unskew deploy evaluate`` may learn from this site."""
    policy, masked = work.site.evaluate, work.config.secure_aggregation == "required"
    allowed = [name for name in policy.allow if not masked or name == "global"]
    if not allowed or work.noise is not None:
        return "nothing about models on the held-out samples (evaluate.allow)"
    what = "sums over all sites for the metrics" if masked else "metrics"
    shared = "; the local model, to all sites (evaluate.share_local)" if policy.share_local and not masked else ""
    models = f"{what} of {policy.max_models} models at most on the held-out samples"
    return f"{models}, of these kinds: {', '.join(allowed)} (evaluate.allow){shared}"


def round_messages(work: SiteTrainer) -> list[tuple[Frame, Frame]]:
    """Create the messages of the first round and of a later one in both directions, by training one step in each.

    In the later one, the site receives the largest tensors of each rule that the method may send to it. Nothing is sent.

    Args:
        work: Trainer of the experiment at this site.

    Returns:
        Received and sent message of each round.
    """
    small = work.config.model_copy(update={"local_steps": 1, "local_epochs": None, "lr_schedule": "constant"})
    client = work.site.client
    federation = work.with_data(work.data)
    total = torch.zeros(work.total, work.reference.classes).long().numpy()
    federation_info = replace(
        FederationInfo.of(federation),
        size=lambda k: work.data.num_samples,
        class_counts=lambda: total + 1,
        weights="samples",
        plan=make_round_plan(work.config, work.total, work.method),
    )
    rule = server_rule(work.method)
    trainer = ServerTrainer(work.spec, federation, small.training, work.device)
    setup = ServerSetup(work.method, rule, work.spec, federation_info, small.buffers, small.seed, trainer)
    server = Server(setup)
    later = {
        rule: {
            name: torch.ones([max(s) if isinstance(s, range) else s for s in shape], dtype=work.spec.dtype)
            for name, shape in shapes.items()
        }
        for rule, shapes in work.wire_context.download_shapes.items()
    }
    messages = []
    before, work.config = work.config, small
    try:
        with tempfile.TemporaryDirectory() as scratch:
            received = ReceivedData(Path(scratch), ())  # without the data that is received before the first round
            state = SiteState(Path(scratch), "0" * 16, client)
            for round in range(min(2, work.config.rounds)):
                sent = server.broadcaster.broadcast(round, client)
                if round:
                    sent = replace(
                        sent, download={rule: {**later[rule], **sent.download.get(rule, {})} for rule in later}
                    )
                request = encode_broadcast(sent, work.wire_context, "train", {})
                update, broadcast = work.trained(request, state, received)
                server.clients.last_rounds[client] = round
                if work.noise is not None:
                    update = work.without_data(update.upload, broadcast.round)
                messages.append((request, encode_update(update, broadcast, work.wire_context)))
    finally:
        work.config = before
    return messages


def is_private(path: Path) -> bool:
    """Return whether only its owner can read a file."""
    return not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _key(site: SiteConfig, folder: Path) -> Iterator[Finding]:
    path = site.path("key", folder)
    if not path.is_file():
        yield Finding("node key", False, f"{path} is missing; create it with sh node-key.sh")
        return
    if not is_private(path):
        yield Finding("node key", False, f"others can read {path}; run chmod 600, or replace the key if it was read")
        return
    done = subprocess.run(["ssh-keygen", "-y", "-P", "", "-f", str(path)], capture_output=True, text=True, check=False)
    good = done.returncode == 0 and done.stdout.startswith("ecdsa-sha2-nistp384")
    yield Finding("node key", good, f"{path}, mode 0600" if good else f"{path} is not an ECDSA key on the curve P-384")


def _roster(site: SiteConfig, folder: Path, experiments: Iterable[Experiment]) -> Iterator[Finding]:
    """Check the signing key and the roster, if there is one or an experiment needs it."""
    identity = load_identity(site, folder, experiments)
    if identity is None:
        yield Finding("roster", None, "none; required only for secure aggregation")
        return
    key = site.path("signing_key", folder)
    if not is_private(key):
        yield Finding("roster", False, f"others can read {key}; create a new one, and exchange the roster again")
        return
    yield Finding(
        "roster", True, f"{len(identity.roster)} clients; the key of client {site.client} is {key}, mode 0600"
    )


def _superlink(site: SiteConfig, folder: Path) -> Iterator[Finding]:
    """Check the SuperLink's certificate, whether it can be reached, and its clock."""
    ca = site.path("ca", folder)
    if not ca.is_file():
        yield Finding("certificate", False, f"{ca} is missing; get it from the server's administrator")
        return
    host, _, port = site.superlink.rpartition(":")
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
    began = time.perf_counter()
    try:
        connection.connect()
        peer = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        took = time.perf_counter() - began
        yield Finding("SuperLink", True, f"{site.superlink} replies over TLS after {took * 1000:.0f} ms")
        end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str((peer or {}).get("notAfter"))), UTC)
        days = (end - datetime.now(UTC)).days
        yield Finding("certificate", days >= SOON, f"signed by {ca.name}, valid for {host} and for {days} more days")
        connection.request("GET", "/")
        date = connection.getresponse().getheader("Date")
        if date is None:
            yield Finding("clock", None, "the SuperLink does not report its time")
        else:
            clock_difference = abs((parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds())
            yield Finding("clock", clock_difference < SKEW, f"differs by {clock_difference:.0f} s from the SuperLink's")
    except ssl.SSLCertVerificationError as error:
        yield Finding("certificate", False, f"the SuperLink's certificate is invalid: {error.verify_message}")
    except (ssl.SSLError, OSError, http.client.HTTPException) as error:
        yield Finding("SuperLink", False, f"{site.superlink} cannot be reached over TLS: {error}")
    finally:
        connection.close()
