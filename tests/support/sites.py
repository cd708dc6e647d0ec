"""Sites in this process, behind a link that loses, delays or forges messages as a test says; no Flower."""

from collections.abc import Callable
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from unskew.config.loader import experiment
from unskew.deployment.secagg.roster import read_roster
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.run import run
from unskew.deployment.site.process import SiteProcess
from unskew.deployment.wire.frames import EncodedFrame, Frame

TINY = {
    "data": "digits",
    "max_train_samples": 200,
    "partition": "dirichlet:0.5",
    "clients": 3,
    "model": "logistic",
    "rounds": 2,
    "local_steps": 3,
    "batch_size": 8,
    "lr": 0.05,
    "engine": "inline",
    "device": "cpu",
}
"""An experiment that costs next to nothing."""


def crossed(frame: Frame) -> Frame:
    """A message after it was written and read."""
    return EncodedFrame.of(frame).decode()


class LoopLink:
    """Answers at once; ``spoil(client, frame, answer)`` may give another answer, or None for none at all."""

    def __init__(self, sites: list[SiteProcess]):
        self.sites, self.answers, self.away = sites, {}, set()
        self.sent: list[tuple[int, Frame]] = []
        self.received: list[tuple[int, Frame]] = []
        self.spoil: Callable[[int, Frame, Frame], Frame | None] = lambda client, frame, answer: answer

    def nodes(self) -> list[int]:
        return [100 + k for k in range(len(self.sites)) if k not in self.away]

    def push(self, node: int, frame: Frame, round: str, seconds: float) -> str:
        client = node - 100
        self.sent.append((client, frame))
        answer = self.spoil(client, frame, crossed(self.sites[client].answer(crossed(frame))))
        identity = f"m{len(self.sent)}"
        if answer is not None:
            self.answers[identity] = answer
            self.received.append((client, answer))
        return identity

    def pull(self, identities: list[str]) -> list[tuple[str, Frame]]:
        return [(one, self.answers.pop(one)) for one in identities if one in self.answers]


def new_key():
    """A signing key as ``ssh-keygen`` writes it, private and public."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return key.private_bytes(*form), public.decode()


class LoopPlace:
    """Folder of such sites; a masked experiment has signing keys and a roster."""

    def __init__(self, folder: Path, config: dict, count: int | None = None, **site: object):
        self.folder, self.sites, count = folder, [], config["clients"] if count is None else count
        masked = config.get("secure_aggregation") == "required"
        keys = [new_key() for _ in range(count)] if masked and not (folder / "roster.txt").exists() else []
        if keys:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "roster.txt").write_text("".join(f"{k} {public}\n" for k, (_, public) in enumerate(keys)))
        agreed = experiment(config).to_yaml()
        for client in range(count):
            place = folder / "sites" / str(client)
            place.mkdir(parents=True, exist_ok=True)
            if keys:
                (place / "signing.key").write_bytes(keys[client][0])
            if masked:
                site = {"roster": str(folder / "roster.txt"), **site}
            (place / "experiment.yaml").write_text(agreed)
            # Sites have few samples.
            values = {"name": f"site-{client}", "client": client, "statistics": {"min_count": 1}, **site}
            (place / "site.yaml").write_text(yaml.safe_dump(values))
            self.sites.append(SiteProcess(place / "site.yaml", log=lambda line: None))
        self.link = LoopLink(self.sites)

    def roster(self):
        path = self.folder / "roster.txt"
        return read_roster(path) if path.exists() else {}

    def open(self, largest: int, seconds: float) -> LoopLink:
        return self.link

    def reopen(self, seconds: float) -> None:
        pass

    def why(self) -> str:
        return ""

    def close(self) -> None:
        pass

    forget = close


class Told:
    """A callback that remembers what it is warned of."""

    def __init__(self):
        self.warnings = []

    def start(self, config, rounds_done):
        pass

    def round(self, row):
        pass

    def end(self, summary):
        pass

    def warn(self, text):
        self.warnings.append(text)


def deployed(folder: Path, place: LoopPlace | None = None, deployment: Deployment | None = None, told=None, **options):
    """A run over such sites, and where they are."""
    values = {**TINY, **options}
    place = place or LoopPlace(folder, values)
    result = run(
        experiment(values), deployment or Deployment(run="0123456789abcdef", startup_timeout=0.5), folder / "run",
        [told] if told else [], lambda text: None, place,
    )  # fmt: skip
    return result, place
