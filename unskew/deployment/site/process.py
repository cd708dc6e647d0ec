"""Process of a site: keeps PyTorch, data and model loaded, and replies to messages."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from unskew.deployment.common.agreement import PROTOCOL, software_versions
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.common.requests import REQUESTS
from unskew.deployment.secagg.protocol import PHASES
from unskew.deployment.site.config import SiteConfig, load_identity, load_site_config
from unskew.deployment.site.evaluation import SiteEvaluation, held_out_scores
from unskew.deployment.site.experiments import SiteExperiments, check_settings
from unskew.deployment.site.ledger import FILE as LEDGER
from unskew.deployment.site.ledger import DataLedger, SumsLedger
from unskew.deployment.site.masking import SecAggClient
from unskew.deployment.site.policy import PREPARED, StatisticsPolicy
from unskew.deployment.site.received import ReceivedData
from unskew.deployment.site.state import OutdatedMessageError, SiteState, SiteStateLostError
from unskew.deployment.site.sums import (
    check_coefficients_request,
    check_needed,
    check_precision,
    check_schema_arguments,
    masked_reply,
    record_fitting,
)
from unskew.deployment.site.trainer import SiteTrainer, size_report
from unskew.deployment.wire.fields import read_integer, read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.sums import decode_requests, encode_sums, requests_key, signed_reply
from unskew.deployment.wire.tensor_codec import InvalidMessageError, check_records, decode_record, encode_record
from unskew.engines.cpu import time_limit
from unskew.errors import ConfigError, UnskewError
from unskew.protocol.data_preparation import ClientPayloads, PreparedData, Workspace
from unskew.sums.base import ClientRows
from unskew.sums.registry import SUMS

SCORED = ("score", "local")
"""Kinds of messages that ask for the metrics of a model after training."""


class SiteTimeoutError(UnskewError):
    """Replying to a message took longer than the site allows."""


def print_line(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class SiteProcess:
    """Replies to messages; trains only the experiments that its administrator has agreed to.

    Args:
        path: Path of the ``site.yaml``.
        log: Called with messages for the site's administrator.
    """

    def __init__(self, path: Path, log: Callable[[str], None] = print_line):
        self.folder = path.parent.absolute()
        self.config: SiteConfig = load_site_config(path)
        self.key = key_fingerprint(self.config.path("key", self.folder).with_suffix(".pub"))
        self.log = log
        self.experiments = SiteExperiments(self.config, self.folder, log)
        self.identity = load_identity(self.config, self.folder, self.experiments.configs.values())
        self.masks = SecAggClient(self.identity)
        self.policy = StatisticsPolicy(self.config, self.folder, log)

    def answer(self, request: Frame) -> Frame:
        """Reply to a message; if this is not possible, reply with the reason."""
        try:
            seconds = self.config.limits.seconds
            reason = f"Replying to this message exceeded the site's limit of {seconds:g} s (limits.seconds)."
            with time_limit(seconds, SiteTimeoutError(reason)):
                return self._reply(request)
        except (SiteStateLostError, OutdatedMessageError) as error:
            return Frame("forgotten" if isinstance(error, SiteStateLostError) else "outdated", {"reason": str(error)})
        except InvalidMessageError as error:
            return Frame("refused", {"reason": f"The message was rejected: {error}."})
        except UnskewError as error:
            return Frame("refused", {"reason": str(error)})
        except Exception as error:  # whatever a message causes, the process must reply to the next one
            self.log(repr(error)[:1000])
            return Frame("refused", {"reason": f"{type(error).__name__} at the site; see its log."})

    def _reply(self, request: Frame) -> Frame:
        config = request.config
        if request.kind not in REQUESTS:
            raise InvalidMessageError(f"unknown request: {request.kind[:40]!r}")
        if read_integer(config, "protocol") != PROTOCOL:
            raise ConfigError(
                f"The server uses version {config['protocol']} of unskew's protocol, but this site uses version {PROTOCOL}; "
                "install the same unskew version on both."
            )
        run, attempt = read_text(config, "run"), read_integer(config, "attempt")
        digest, reference = read_text(config, "digest"), DataSchema.read(config)
        check_settings(reference, self.experiments.config(digest), request.kind)
        self.experiments.check_noise(digest)
        if not reference.settled:
            reply = self._reply_before_schema(request, digest, reference)
            return Frame(reply.kind, {**reply.config, "run": run, "attempt": attempt}, {}, reply.arrays)
        self.experiments.check_schema(digest, reference)
        state = SiteState(self.config.path("state", self.folder), run, self.config.client)
        work = self.experiments.trainer(digest, reference, read_integer(config, "rounds"))
        received = ReceivedData(state.folder, work.method.data).load()
        began = time.perf_counter()
        reply = self._execute(request, work, state, received)
        seconds = time.perf_counter() - began
        self.log(f"run {run[:8]}, {request.kind}{self._round(request)}: {seconds:.2f} s, {reply.size} bytes back")
        return Frame(reply.kind, {**reply.config, "run": run, "attempt": attempt}, reply.metrics, reply.arrays)

    @staticmethod
    def _round(request: Frame) -> str:
        return f" in round {request.config['round'] + 1}" if "round" in request.config else ""

    def _execute(self, request: Frame, work: SiteTrainer, state: SiteState, received: ReceivedData) -> Frame:
        folder, digest = self.config.path("state", self.folder), read_text(request.config, "digest")
        ledger = DataLedger(folder / LEDGER, state.run, self.config.max_runs)
        if self.experiments.limited[digest]:
            ledger.admit()
            masked = work.config.secure_aggregation == "required"
            if request.kind in ("contribute", "evaluate", *SCORED) or (request.kind == "train" and not masked):
                ledger.begin()  # of masked updates, only opened sums count
        if request.kind == "hello":
            reply = work.client_info(work.data)
            return self._with_site_info(request, reply)
        evaluation = SiteEvaluation(self.config.evaluate, folder / "evaluations" / digest, work)
        if request.kind == "sums":
            samples, requests = self.experiments.samples(digest, work.reference), decode_requests(request)
            if any(SUMS[one.kind].scores_model for one in requests):
                ledger.begin()
                evaluation.admit_sum(requests_key(digest, requests))
            rows = replace(samples.rows(), class_counts=work.class_counts, x=work.data.x, y=work.data.y)
            rows = replace(rows, class_names=work.original.names)
            rows = replace(rows, gradient=work.initial_gradient, score=partial(held_out_scores, work))
            check_schema_arguments(requests, work.reference)
            for one in requests:
                if one.kind == "fisher":
                    check_needed([one], work.config)
                    check_coefficients_request(one, work.config, work.original, rows)
            return self._sums(request, digest, work.reference, rows, samples.total)
        if request.kind == "train":
            return work.reply_to_train(request, state, received, self.masks, ledger)
        if request.kind in PHASES:
            return self.masks.reply(state.run, request)
        if request.kind == "evaluate":
            return work.reply_to_evaluate(request, state, received, ledger)
        if request.kind in SCORED:
            return evaluation.reply(request, state)
        index = read_integer(request.config, "rule_index")
        if index >= len(work.method.data):
            raise InvalidMessageError(f"the method has no data rule number {index}")
        if request.kind == "receive":
            check_records(request, ("share", "common"))
            share, common = decode_record(request, "share"), decode_record(request, "common")
            received.take(index, share, common, trained=state.newest() >= 0)
            return work.client_info(received.applied(work.data, index + 1))
        return self.contributed(request, work, state, received, index)

    def contributed(
        self, request: Frame, work: SiteTrainer, state: SiteState, received: ReceivedData, rule_index: int
    ) -> Frame:
        """Create this client's contribution for a data rule, before the first round.

        Args:
            request: Request of the server.
            work: Trainer of the experiment.
            state: State of the run at this site.
            received: Data received before the first round.
            rule_index: Position of the data rule in the method.
        """
        data = received.applied(work.data, rule_index)
        prepared = PreparedData(
            work.with_data(data),
            work.config.training,
            client=self.config.client,
            site_mean=read_integer(request.config, "mean_size"),
        )
        workspace = Workspace(state.folder / f"payload-{rule_index}", False, work.device, warn=self.log)
        rule = work.method.data[rule_index]
        payloads = rule.client_payload(prepared, work.config.seed, workspace)
        if isinstance(payloads, PreparedData):
            if payloads is not prepared:
                raise ConfigError(f"{rule.name} changes data without an exchange, which works only in simulations.")
            payloads = ClientPayloads()
        sent = payloads.sent.get(self.config.client, {})
        metrics = {name: float(payloads.summary[name]) for name in rule.payload_metrics} if sent else {}
        config = {"client": self.config.client, "payload_digest": payloads.digest}
        return Frame("contribution", config, metrics, encode_record("sent", sent))

    def _reply_before_schema(self, request: Frame, digest: str, reference: DataSchema) -> Frame:
        """Reply before global statistics determine the encoding of columns and targets."""
        if self.experiments.noise[digest] is not None:
            raise InvalidMessageError("it asks for sums of columns, which noise at the sites does not protect")
        self.experiments.check_schema(digest, reference)
        samples = self.experiments.samples(digest, reference)
        samples.check_kind(reference)
        if request.kind == "hello":
            config = size_report(self.config, len(samples.train), len(samples.held))
            return self._with_site_info(request, Frame("client_info", config))
        if request.kind == "sums":
            return self._sums(request, digest, reference, samples.rows(), samples.total)
        if request.kind in PHASES:
            return self.masks.reply(read_text(request.config, "run"), request)
        raise InvalidMessageError("the global column statistics are not known yet")

    def _sums(self, request: Frame, digest: str, reference: DataSchema, rows: ClientRows, clients: int) -> Frame:
        """Reply with the summands of this site, or start to mask them."""
        run, requests = read_text(request.config, "run"), decode_requests(request)
        if self.experiments.noise[digest] is not None:
            raise InvalidMessageError("it asks for sums, which noise at the sites does not protect")
        experiment = self.experiments.config(digest)
        masked = experiment.secure_aggregation == "required"
        check_needed(requests, experiment)
        ledger = self.config.path("state", self.folder) / LEDGER
        if self.experiments.limited[digest]:
            DataLedger(ledger, run, self.config.max_runs).admit()
        record_fitting(requests, SumsLedger(ledger, run), digest)
        if masked:
            before = self.masks.again(run, read_text(request.config, "session"))
            if before is not None:
                return before
        values = self.experiments.row_values(digest) if any(SUMS[one.kind].permission for one in requests) else {}
        if any(SUMS[one.kind].permission in PREPARED for one in requests):
            check_precision(reference, rows, self.config.name)
        # Class weights do not change inputs.
        schema = json.dumps(replace(reference, weights=()).config(), sort_keys=True)
        schema = hashlib.sha256(schema.encode()).hexdigest()
        reply = self.policy.reply(digest, run, requests, rows, values, masked, schema)
        if masked:
            for one, own in zip(requests, reply.sums, strict=True):  # the server sees no summands
                if not (SUMS[one.kind].permission or SUMS[one.kind].scores_model):
                    SUMS[one.kind].check(one, own)
            return masked_reply(request, requests, reply.sums, reference, self.masks, ledger, clients)
        hidden, frame = json.dumps(reply.hidden), encode_sums(reply.sums, client=self.config.client)
        config = {**frame.config, "hidden": hidden, "epsilon": float(reply.epsilon)}
        if self.identity is not None:
            config["signature"] = self.identity.sign(signed_reply(run, requests_key(digest, requests), frame))
        return Frame(frame.kind, config, {}, frame.arrays)

    def _with_site_info(self, request: Frame, report: Frame) -> Frame:
        """Add software versions, clock, node key, and a signature that proves the client number, to a report."""
        rounds = self.experiments.config(read_text(request.config, "digest")).rounds
        config = {**report.config, **software_versions(), "clock": time.time(), "key": self.key, "rounds": rounds}
        if self.identity is not None and "challenge" in request.config:
            words = [read_text(request.config, "run"), read_text(request.config, "challenge")]
            config["signature"] = self.identity.sign(["hello", *words, self.config.client])
        return Frame(report.kind, config, {}, report.arrays)


def key_fingerprint(public_key: Path) -> str:
    """Return the fingerprint of a public key as ``ssh-keygen -l`` prints it, empty if the file is missing."""
    try:
        key = base64.b64decode(public_key.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return ""
    return f"SHA256:{base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip('=')}"
