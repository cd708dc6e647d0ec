"""Configuration of a site by its administrator: ``site.yaml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import AfterValidator, Field

from unskew.config.experiment import Experiment
from unskew.config.paths import with_absolute_paths
from unskew.config.loader import check_keys, experiment, load_yaml
from unskew.config.sections import Section
from unskew.deployment.wire.data_schema import experiment_digest
from unskew.errors import ConfigError, plain_message, short_repr

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NAME = r"^[\w.-]{1,64}$"
"""Pattern of a site's name."""
LONGEST_SOCKET = 100
"""Characters of a socket's path; systems take about so many."""


def parse_address(value: str) -> str:
    """A host and a port.

    Raises:
        ValueError: The text is not an address.

    >>> parse_address("superlink.example.org:8000")
    'superlink.example.org:8000'
    """
    host, _, port = value.rpartition(":")
    if not re.fullmatch(r"[\w.-]+", host) or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError("write HOST:PORT, such as superlink.example.org:8000")
    return value


class SiteLimits(Section):
    """Limits on what a site accepts from a server and sends to it."""

    max_message_mb: Positive = 2048.0
    """Size of one message."""
    max_norm: Positive = 1e6
    """Euclidean norm of a tensor that is received."""
    seconds: Positive = 3600.0
    """Time of one local training."""


class OwnData(Section):
    """Data of a site; the fields are those of an experiment."""

    source: str
    """``table:PATH``, ``folder:PATH`` or another data source."""
    data_path: str | None = None
    """Folder that holds the source's files."""
    label: str | None = None
    """Label column of a table."""
    label_separator: str | None = None
    """Separator between the labels of a sample."""
    image: str | None = None
    """Image column of a table."""
    image_size: int | None = None
    """Side in pixels to which images are brought."""
    features: tuple[str, ...] = ()
    """Columns that are inputs, in this order."""
    exclude: tuple[str, ...] = ()
    """Columns that are no inputs."""


def resolve_path(folder: Path, path: str) -> Path:
    """A path from a folder.

    Args:
        folder: Folder of relative paths.
        path: The path.

    Raises:
        ConfigError: The path begins with the home folder of an unknown user.
    """
    try:
        return folder / Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"The path {path!r} begins with the home of a user who is not here.") from error


class SiteConfig(Section):
    """A site. Paths are relative to the file."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the site in messages."""
    client: Annotated[int, Field(ge=0)]
    """Its number among the experiment's clients, from 0."""
    experiments: str = "experiment.yaml"
    """The experiment that the site has agreed to, or a folder of several. It trains nothing else."""
    data: OwnData | Literal["split"] = "split"
    """The site's own samples; ``split`` takes the client's part of the experiment's data, for a rehearsal."""
    superlink: Annotated[str, AfterValidator(parse_address)] = "127.0.0.1:8000"
    """Host and port of the SuperLink."""
    ca: str = "ca.crt"
    """Certificate of the CA that signed the SuperLink's."""
    key: str = "node.key"
    """The site's node key."""
    signing_key: str = "signing.key"
    """Key that the site signs its part in masked sums with; other than the node key, only the site's process reads it."""
    roster: str = "roster.txt"
    """Public signing keys of all clients, as the operators have exchanged them; needed for secure aggregation."""
    socket: str = "run/site.sock"
    """Unix socket between the SuperNode and the site's process."""
    state: str = "state"
    """Folder of what stays at the site between rounds."""
    limits: SiteLimits = SiteLimits()
    """Limits on what is accepted from a server."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of the training; the numbers are the simulator's, bit for bit, where it used as many."""
    device: str = "cpu"
    """Device on which the site trains."""
    trust_code: bool = False
    """Whether the experiment may name code of its own, which is then run."""

    def path(self, name: str, folder: Path) -> Path:
        """A path of the configuration, from the folder that it lies in.

        Args:
            name: Name of the field.
            folder: Folder of the configuration.
        """
        return resolve_path(folder, getattr(self, name))


def load_site_config(path: Path) -> SiteConfig:
    """A checked ``site.yaml``.

    Raises:
        ConfigError: The configuration is not valid.
    """
    values = load_yaml(path)
    check_keys(values, SiteConfig)
    if isinstance(values.get("data"), dict):
        check_keys(values["data"], OwnData, "data.")
    try:
        config = SiteConfig.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if str(part).isidentifier() and part != "OwnData")
        raise ConfigError(f"{path}: {where}={short_repr(first['input'])} is not valid: {plain_message(first['msg'])}.") from error
    socket = config.path("socket", path.parent).absolute()
    if len(str(socket)) > LONGEST_SOCKET:
        raise ConfigError(
            f"{path}: the path of the socket, {socket}, is longer than {LONGEST_SOCKET} characters; give a shorter one."
        )
    return config


def agreed_experiments(config: SiteConfig, folder: Path) -> dict[str, Experiment]:
    """The experiments that a site has agreed to, by their digests.

    Args:
        config: Configuration of the site.
        folder: Folder of the configuration.
    """
    return {experiment_digest(file): file for file in read_experiments(config, folder).values()}


def read_experiments(config: SiteConfig, folder: Path) -> dict[Path, Experiment]:
    """Read the experiments that a site has agreed to, by their files.

    Args:
        config: Configuration of the site.
        folder: Folder of the configuration.

    Raises:
        ConfigError: There is none, or one is not valid, or has too few clients.
    """
    folder_path = config.path("experiments", folder)
    files = sorted(folder_path.glob("*.yaml")) if folder_path.is_dir() else [folder_path]
    if not files:
        raise ConfigError(f"The folder {folder_path} holds no experiment that this site has agreed to.")
    configs = {}
    remedy = None if config.trust_code else "read it, then set trust_code: true in site.yaml"
    for file in files:
        loaded = with_absolute_paths(experiment(load_yaml(file, remedy)))
        if loaded.clients is not None and config.client >= loaded.clients:
            raise ConfigError(
                f"{file} has {loaded.clients} clients, numbered from 0; there is none with number {config.client}."
            )
        configs[file] = loaded
    return configs
