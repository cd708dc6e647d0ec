"""Long-running process of a site: keeps PyTorch, data and model loaded and replies to the messages of its SuperNode."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from unskew.config.experiment import Experiment
from unskew.deployment.common.agreement import PROTOCOL, software_versions
from unskew.deployment.common.data_schema import DataSchema, read_schema, reference_schema
from unskew.deployment.secagg.protocol import PHASES
from unskew.deployment.site.column_statistics import site_squares, site_sums
from unskew.deployment.site.config import SiteConfig, agreed_experiments, load_identity, load_site_config
from unskew.deployment.site.data import SiteData, load_site_data, own_split
from unskew.deployment.site.ledger import FILE as LEDGER
from unskew.deployment.site.ledger import DataLedger
from unskew.deployment.site.masking import SecAggClient
from unskew.deployment.site.received import ReceivedData
from unskew.deployment.site.state import OutdatedMessageError, SiteState, SiteStateLostError
from unskew.deployment.site.trainer import SiteTrainer, size_report
from unskew.deployment.wire.frames import Frame, FrameError, receive, send
from unskew.deployment.wire.messages import read_integer, read_text
from unskew.deployment.wire.tensor_codec import InvalidMessageError, check_records, decode_record, encode_record
from unskew.engines.cpu import keep_freed_memory
from unskew.errors import ConfigError, UnskewError
from unskew.methods.dp_sites import site_noise
from unskew.methods.registry import method as method_of
from unskew.protocol.data_preparation import ClientPayloads, PreparedData, Workspace
from unskew.protocol.rules import Method

MESSAGE_SECONDS = 10.0
"""Seconds within which a connection must send the header of its message, and, at a minimum rate, the rest."""
IDLE_SECONDS = 60.0
"""Seconds within which a reply must be read."""


class SiteTimeoutError(UnskewError):
    """Replying to a message took longer than the site allows."""


class SiteProcess:
    """Replies to messages; trains only the experiments that its administrator has agreed to.

    Args:
        path: Path of the ``site.yaml``.
    """

    def __init__(self, path: Path):
        self.folder = path.parent.absolute()
        self.config: SiteConfig = load_site_config(path)
        self.experiments = agreed_experiments(self.config, self.folder)
        self.key = key_fingerprint(self.config.path("key", self.folder).with_suffix(".pub"))
        self.identity = load_identity(self.config, self.folder, self.experiments.values())
        self.masks = SecAggClient(self.identity)
        self._work: tuple[tuple[str, str], SiteTrainer] | None = None
        self._holdings: dict[str, SiteData] = {}
        self._schemas: dict[str, DataSchema] = {}
        methods = {digest: method_of(config.method) for digest, config in self.experiments.items()}
        self._noise = {digest: site_noise(method) for digest, method in methods.items()}
        self._limited = {digest: is_limited(self.experiments[digest], method) for digest, method in methods.items()}
        self.log: Callable[[str], None] = lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def answer(self, request: Frame) -> Frame:
        """Reply to a message; if this is not possible, reply with the reason."""
        try:
            with time_limit(self.config.limits.seconds):
                return self._answered(request)
        except (SiteStateLostError, OutdatedMessageError) as error:
            return Frame("forgotten" if isinstance(error, SiteStateLostError) else "outdated", {"reason": str(error)})
        except InvalidMessageError as error:
            return Frame("refused", {"reason": f"The message was rejected: {error}."})
        except UnskewError as error:
            return Frame("refused", {"reason": str(error)})
        except Exception as error:  # whatever a message causes, the process must reply to the next one
            self.log(repr(error)[:1000])
            return Frame("refused", {"reason": f"{type(error).__name__} at the site; see its log."})

    def _answered(self, request: Frame) -> Frame:
        config = request.config
        if request.kind not in ("hello", "squares", "contribute", "receive", "train", "evaluate", *PHASES):
            raise InvalidMessageError(f"unknown request: {request.kind[:40]!r}")
        if read_integer(config, "protocol") != PROTOCOL:
            raise ConfigError(
                f"The server uses version {config['protocol']} of unskew's protocol, but this site uses version {PROTOCOL}; "
                "install the same unskew version on both."
            )
        run, attempt = read_text(config, "run"), read_integer(config, "attempt")
        digest, reference = read_text(config, "digest"), DataSchema.read(config)
        check_settings(reference, self.agreed(digest), request.kind)
        self._check_noise(digest)
        if not reference.settled:
            reply = self._summed(request, digest, reference)
            return Frame(reply.kind, {**reply.config, "run": run, "attempt": attempt}, {}, reply.arrays)
        self._check_schema(digest, reference)
        state = SiteState(self.config.path("state", self.folder), run, self.config.client)
        work = self.work(digest, reference)
        received = ReceivedData(state.folder, work.method.data).load()
        began = time.perf_counter()
        reply = self._carried_out(request, work, state, received)
        seconds = time.perf_counter() - began
        self.log(f"run {run[:8]}, {request.kind}{self._round(request)}: {seconds:.2f} s, {reply.size} bytes back")
        return Frame(reply.kind, {**reply.config, "run": run, "attempt": attempt}, reply.figures, reply.arrays)

    @staticmethod
    def _round(request: Frame) -> str:
        return f" in round {request.config['round'] + 1}" if "round" in request.config else ""

    def _carried_out(self, request: Frame, work: SiteTrainer, state: SiteState, received: ReceivedData) -> Frame:
        folder, digest = self.config.path("state", self.folder), read_text(request.config, "digest")
        ledger = DataLedger(folder / LEDGER, state.run, self.config.max_runs)
        if self._limited[digest]:
            ledger.admit()
            masked = work.config.secure_aggregation == "required"
            if request.kind in ("contribute", "evaluate") or (request.kind == "train" and not masked):
                ledger.begin()  # of masked updates, only opened sums count
        if request.kind == "hello":
            reply = work.facts(work.data)
            return self._introduced(request, reply)
        if request.kind == "train":
            return work.answered(request, state, received, self.masks, ledger)
        if request.kind in PHASES:
            return self.masks.carried_out(state.run, request)
        if request.kind == "evaluate":
            return work.measured(request, state, received, ledger)
        index = read_integer(request.config, "place")
        if index >= len(work.method.data):
            raise InvalidMessageError(f"the method has no data rule number {index}")
        if request.kind == "receive":
            check_records(request, ("share", "common"))
            share, common = decode_record(request, "share"), decode_record(request, "common")
            received.take(index, share, common, trained=state.newest() >= 0)
            return work.facts(received.applied(work.data, index + 1))
        return self.contributed(request, work, state, received, index)

    def contributed(
        self, request: Frame, work: SiteTrainer, state: SiteState, received: ReceivedData, place: int
    ) -> Frame:
        """Create this client's contribution for a data rule, before the first round.

        Args:
            request: Request of the server.
            work: Trainer of the experiment.
            state: State of the run at this site.
            received: Data received before the first round.
            place: Position of the data rule in the method.
        """
        data = received.applied(work.data, place)
        prepared = PreparedData(
            work.with_data(data),
            work.config.training,
            client=self.config.client,
            site_mean=read_integer(request.config, "mean_size"),
        )
        workspace = Workspace(state.folder / f"made-{place}", False, work.device, warn=self.log)
        rule = work.method.data[place]
        payloads = rule.client_payload(prepared, work.config.seed, workspace)
        if isinstance(payloads, PreparedData):
            if payloads is not prepared:
                raise ConfigError(f"{rule.name} changes data without an exchange, which works only in simulations.")
            payloads = ClientPayloads()
        figures = {name: float(v) for name, v in payloads.about.items() if isinstance(v, int | float)}
        texts = {f"about.{name}": v for name, v in payloads.about.items() if isinstance(v, str) and name != "synthetic"}
        sent = encode_record("sent", payloads.sent.get(self.config.client, {}))
        return Frame("contribution", {"client": self.config.client, "made": payloads.digest, **texts}, figures, sent)

    def _summed(self, request: Frame, digest: str, reference: DataSchema) -> Frame:
        """Reply with the site's statistics, before global statistics determine the encoding of columns and targets."""
        holding = self.holding(digest, reference)
        holding.check_kind(reference)
        if request.kind == "squares":
            check_records(request, ("sums",))
            return Frame(
                "squares", {}, {}, site_squares(holding, decode_record(request, "sums").get("mean", torch.zeros(0)))
            )
        if request.kind != "hello":
            raise InvalidMessageError("the global column statistics are not known yet")
        sums, values = site_sums(holding)
        config = size_report(self.config, len(holding.train), len(holding.held))
        return self._introduced(request, Frame("facts", {**config, "values": values}, {}, sums))

    def _introduced(self, request: Frame, report: Frame) -> Frame:
        """Add software versions, clock, node key, and a signature that proves the client number, to a report."""
        rounds = self.agreed(read_text(request.config, "digest")).rounds
        config = {**report.config, **software_versions(), "clock": time.time(), "key": self.key, "rounds": rounds}
        if self.identity is not None and "challenge" in request.config:
            words = [read_text(request.config, "run"), read_text(request.config, "challenge")]
            config["signature"] = self.identity.sign(["hello", *words, self.config.client])
        return Frame(report.kind, config, {}, report.arrays)

    def agreed(self, digest: str) -> Experiment:
        """Return the experiment with a digest.

        Args:
            digest: Digest that the server sent.

        Raises:
            ConfigError: If the site has not agreed to the experiment.
        """
        config = self.experiments.get(digest)
        if config is None:
            raise ConfigError(
                f"The site {self.config.name} has not agreed to this experiment: it differs from "
                f"{Path(self.config.experiments).name} there. Both sides must have the same file."
            )
        return config

    def holding(self, digest: str, reference: DataSchema) -> SiteData:
        """Return the site's samples for an experiment; they are read once.

        Args:
            digest: Digest of the experiment.
            reference: Schema of the data.
        """
        config, holding = self.agreed(digest), self._holdings.get(digest)
        if self.config.data == "split":
            if holding is None:
                holding, full_data = own_split(config, self.config.client, f"The site {self.config.name}")
                self._holdings = {digest: holding}  # keeps one experiment at a time
                if self._limited[digest]:
                    self._schemas[digest] = reference_schema(full_data, config)
            return holding
        columns = [(encoder.name, encoder.kind) for encoder in reference.columns]
        if holding is None or [(encoder.name, encoder.kind) for encoder in holding.source.encoders] != columns:
            holding = self._holdings[digest] = load_site_data(self.config, config, self.folder, reference.columns)
        return holding

    def _check_noise(self, digest: str) -> None:
        """Validate that an experiment with noise at the sites protects this site as it expects."""
        noise, site = self._noise[digest], self.config
        if noise is None:
            return
        if self.experiments[digest].secure_aggregation != "required":
            raise ConfigError(
                "dp:noise_at=sites needs secure_aggregation: required, because the noise of a single site is too small."
            )
        honest, most = noise.honest or 0, site.max_honest
        if most is not None and honest > most:
            raise ConfigError(
                f"The experiment assumes that {honest} sites add their noise (dp:honest), but the site {site.name} accepts "
                f"at most {most} (max_honest in site.yaml)."
            )

    def _check_schema(self, digest: str, reference: DataSchema) -> None:
        """Validate that a data schema is the one that this site knows, if it does not have to learn it from the server.

        Raises:
            InvalidMessageError: If the schema differs.
            ConfigError: If the site adds noise to its updates and has no schema, so that it could be asked for properties
                of its data by offering different ones.
        """
        if self.config.data == "split":
            self.holding(digest, reference)  # with the schema of the experiment's data
        elif digest not in self._schemas:
            installed = read_schema(self.config.path("data_schema", self.folder))
            if installed is not None:
                self._schemas[digest] = installed
            elif self._noise[digest] is not None:
                raise ConfigError(
                    f"The site {self.config.name} needs the data schema of the experiment, "
                    f"{self.config.data_schema} from unskew deploy init, because the experiment adds noise at the sites."
                )
        known = self._schemas.get(digest)
        if known is not None and not known.is_same(reference):
            raise InvalidMessageError(
                "its data schema differs from the one that the administrator of the site installed"
            )

    def work(self, digest: str, reference: DataSchema) -> SiteTrainer:
        """Return the trainer of an experiment, built once.

        Args:
            digest: Digest of the experiment.
            reference: Schema of the data.

        Raises:
            ConfigError: If the experiment cannot run here, without the reason if the site's data must stay private.
            DataError: If the site's data do not fit the experiment.
        """
        key, config = (digest, repr(reference)), self.agreed(digest)
        if self._work is None or self._work[0] != key:
            try:
                self._work = key, SiteTrainer(self.config, config, reference, self.holding(digest, reference))
            except UnskewError as error:
                if self._noise[digest] is None:
                    raise
                self.log(f"{type(error).__name__}: {error}")
                raise ConfigError(f"The site {self.config.name} cannot take part; its log has the reason.") from error
        return self._work[1]

    def warm(self) -> None:
        """Read the data before the first message, because Flower gives up on messages without a reply in half a minute."""
        for digest, config in self.experiments.items():
            if self.config.data == "split":
                holding, full_data = own_split(config, self.config.client, f"The site {self.config.name}")
                self._holdings, schema = {digest: holding}, reference_schema(full_data, config)
                if self._limited[digest]:
                    self._schemas[digest] = schema
                self.work(digest, schema)
            else:
                self._holdings[digest] = load_site_data(self.config, config, self.folder)

    def serve(self) -> None:
        """Reply to messages at the socket, one at a time, until the process is stopped.

        Raises:
            ConfigError: If another process of this site is running.
        """
        path = self.config.path("socket", self.folder)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if path.exists() and probe.connect_ex(str(path)) == 0:
                raise ConfigError(f"Another process of this site is listening at {path}; stop it first.")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        unready = path.with_suffix(".new")  # renamed once it listens, so that no client connects too early
        unready.unlink(missing_ok=True)
        before = os.umask(0o177)  # only the owner can access the socket, from the start
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(unready))
        finally:
            os.umask(before)
        listener.listen(4)
        unready.rename(path)
        self.log(f"The site {self.config.name}, client {self.config.client}, answers at {path}.")
        try:
            with listener:
                while True:
                    try:
                        connection, _ = listener.accept()
                        with connection:
                            connection.settimeout(IDLE_SECONDS)
                            self._serve_one(connection)
                    except Exception as error:  # whatever a message causes, the process must reply to the next one
                        self.log(f"A connection was closed ({error!r:.500}).")
                        time.sleep(0.1)  # for example while there are too many open files
        finally:
            path.unlink(missing_ok=True)

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            request = receive(connection, int(self.config.limits.max_message_mb * 1e6), MESSAGE_SECONDS)
        except FrameError as error:
            reply = Frame("refused", {"reason": str(error)})
        except OSError as error:
            self.log(f"A connection was closed because it did not send a complete message in time ({error}).")
            return
        else:
            reply = self.answer(request)
        if reply.kind in ("refused", "forgotten", "outdated"):
            self.log(f"rejected: {reply.config['reason']!r:.1000}")
        with contextlib.suppress(OSError):
            send(connection, reply)


def is_limited(config: Experiment, method: Method) -> bool:
    """Return whether an experiment promises that little is learned of a site's data, which holds for few runs only.

    Args:
        config: The experiment.
        method: Its method.
    """
    noisy = any(rule.poisson_batches for rule in method.client) or site_noise(method) is not None
    generated = any(getattr(rule, "privacy", None) is not None for rule in method.data)
    return noisy or generated or config.secure_aggregation == "required"


def check_settings(reference: DataSchema, config: Experiment, kind: str) -> None:
    """Validate settings of a message that follow from the experiment, before the site's data are read.

    Args:
        reference: Data schema of the message.
        config: Experiment that the site has agreed to.
        kind: Kind of the message.

    Raises:
        InvalidMessageError: If the message differs from the experiment.
    """
    weights, sent = config.class_weights, reference.weights
    if config.secure_aggregation == "required" and not reference.settled:
        raise InvalidMessageError("it asks for sums of columns, which secure aggregation does not support")
    if not sent and kind in ("hello", "squares"):
        return  # class weights are not known yet
    if weights == "balanced":
        # A balanced weight is N / (C n_c), and no class has more than all N samples.
        good = len(sent) == reference.classes and all(weight * reference.classes > 1 - 1e-6 for weight in sent)
    else:
        good = sent == (() if weights is None else tuple(map(float, weights)))
    if not good:
        raise InvalidMessageError("its class weights differ from those of the experiment")


def key_fingerprint(public_key: Path) -> str:
    """Return the fingerprint of a public key as ``ssh-keygen -l`` prints it, empty if the file is missing."""
    try:
        key = base64.b64decode(public_key.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return ""
    return f"SHA256:{base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip('=')}"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context manager that interrupts the main thread after a number of seconds.

    Args:
        seconds: Time limit in seconds.

    Raises:
        SiteTimeoutError: If the time limit is exceeded.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SiteTimeoutError(f"Replying to this message exceeded the site's limit of {seconds:g} s (limits.seconds).")

    try:
        before = signal.signal(signal.SIGALRM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def serve_site(path: Path) -> None:
    """Run the site's process until SIGTERM."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(0)

    site = SiteProcess(path)
    signal.signal(signal.SIGTERM, end)
    torch.set_num_threads(site.config.threads)
    keep_freed_memory()
    site.warm()
    site.serve()
