"""Configuration of a site, written by its administrator: ``site.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import AfterValidator, Field

from unskew.config.experiment import Experiment
from unskew.config.loader import experiment, load_config, load_yaml
from unskew.config.paths import with_absolute_paths
from unskew.config.trust import NOT_OF_MODEL
from unskew.config_fields import Section, check_keys
from unskew.data.spec import ColumnName, ColumnNames
from unskew.deployment.common.agreement import LONGEST_SOCKET, NAME, experiment_digest, parse_address
from unskew.deployment.secagg.roster import SigningIdentity
from unskew.errors import ConfigError, plain_message, short_repr
from unskew.sums.registry import PERMISSIONS

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SiteLimits(Section):
    """Limits on what a site accepts from a server and sends to it."""

    max_message_mb: Positive = 2048.0
    """Maximum size of one message, in MB."""
    max_norm: Positive = 1e6
    """Maximum Euclidean norm of a received tensor."""
    seconds: Positive = 3600.0
    """Maximum time to reply to one message, in seconds."""


class OwnData(Section):
    """A site's own data; the fields are those of an experiment."""

    source: str
    """``table:PATH``, ``folder:PATH`` or another data source."""
    data_path: str | None = None
    """Folder that contains the source's files."""
    label: ColumnName | None = None
    """Label column of a table."""
    label_separator: str | None = None
    """Separator between the labels of a sample."""
    image: ColumnName | None = None
    """Image column of a table."""
    image_size: int | None = None
    """Side length in pixels to which images are resized."""
    features: ColumnNames = ()
    """Input columns, in this order."""
    exclude: ColumnNames = ()
    """Columns that are not inputs."""


def known_permission(name: str) -> str:
    """Validate the name of a permission for statistics (raises ``ValueError`` otherwise)."""
    if name not in PERMISSIONS:
        raise ValueError(f"it must be one of {', '.join(PERMISSIONS)}")
    return name


class StatisticsRules(Section):
    """Statistics that a site sends about its training samples; none by default. Training needs no entry here."""

    allow: tuple[Annotated[str, AfterValidator(known_permission)], ...] = ()
    """``counts``, ``missing``, ``histograms``, ``moments``, ``features``, ``gradients`` and ``survival``. ``unskew deploy
    check`` prints what each of them sends."""
    min_count: Annotated[int, Field(ge=1)] = 10
    """Smallest count that is sent: smaller ones are 0, and sums over smaller groups are not sent. If fewer rows of the data
    have changed since an earlier reply, the site sends none. 1 switches these rules off."""
    epsilon: Annotated[float, Field(ge=0.001, le=100)] | None = None
    """Privacy loss of one count, for which discrete Laplace noise is added to it; no noise by default. ``moments``,
    ``features`` and ``gradients`` are not counts and cannot be allowed with it."""
    total_epsilon: Positive | None = None
    """Sum of the privacy losses after which the site sends no new statistics; no limit by default."""
    mask_small: bool = False
    """True to apply ``min_count`` also to counts that secure aggregation masks."""

    @pydantic.model_validator(mode="after")
    def _check_noise(self) -> StatisticsRules:
        exact = [name for name in ("moments", "features", "gradients") if name in self.allow]
        if self.epsilon is not None and exact:
            raise ValueError(
                f"epsilon adds noise to counts only; remove {', '.join(exact)} from statistics.allow, or epsilon"
            )
        if self.epsilon is None and self.total_epsilon is not None:
            raise ValueError("total_epsilon limits privacy losses, which need noise; set statistics.epsilon, too")
        return self


class EvaluationRules(Section):
    """Models that a site evaluates on its held-out samples for ``unskew deploy evaluate``."""

    allow: tuple[Literal["global", "local", "personal", "foreign"], ...] = ("global",)
    """``global``, ``local``, ``personal``, and ``foreign`` for local models of other sites."""
    share_local: bool = False
    """True to send the local model to the server and the other sites."""
    max_models: Annotated[int, Field(ge=0)] = 50
    """Largest number of models per experiment."""


def resolve_path(folder: Path, path: str) -> Path:
    """Return a path, resolved relative to ``folder`` unless it is absolute.

    Args:
        folder: Folder that relative paths start from.
        path: Path to resolve; ``~`` is the home folder.

    Raises:
        ConfigError: If the path starts with the home folder of an unknown user.
    """
    try:
        return folder / Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"The path {path!r} starts with the home folder of an unknown user.") from error


class SiteConfig(Section):
    """Configuration of a site. Relative paths start from the folder of the file."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the site in messages: letters, digits, ``_``, ``.`` and ``-``."""
    client: Annotated[int, Field(ge=0)]
    """Client number of the site in the experiment, from 0."""
    experiments: str = "experiment.yaml"
    """Experiment file that the site has agreed to, or a folder of several. The site trains no other experiment."""
    data: OwnData | Literal["split"] = "split"
    """The site's own data; ``split`` uses the client's part of the experiment's data, for a rehearsal."""
    superlink: Annotated[str, AfterValidator(parse_address)] = "127.0.0.1:8000"
    """Host and port of the SuperLink; only ``unskew deploy check`` uses it."""
    ca: str = "ca.crt"
    """Certificate of the CA that signed the SuperLink's certificate; only ``unskew deploy check`` uses it."""
    key: str = "node.key"
    """The site's node key."""
    signing_key: str = "signing.key"
    """Key with which the site signs its messages of secure aggregation; unlike the node key, only its process reads it."""
    roster: str = "roster.txt"
    """Public signing keys of all clients, as exchanged by the operators; required for secure aggregation."""
    socket: str = "run/site.sock"
    """Unix socket between the SuperNode and the site's process."""
    state: str = "state"
    """Folder of the site's state between rounds, with the record of its masked and private runs."""
    limits: SiteLimits = SiteLimits()
    """Limits on what the site accepts from a server."""
    statistics: StatisticsRules = StatisticsRules()
    """Statistics that the site sends."""
    evaluate: EvaluationRules = EvaluationRules()
    """Models that the site evaluates."""
    checkpoint_minutes: Positive = 10.0
    """Minutes of local training after which a checkpoint is stored in the folder of the state. After a restart, an
    interrupted training continues from it."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of training threads; results are bit-identical to a simulation with the same number."""
    device: str = "cpu"
    """Device on which the site trains."""
    max_honest: Annotated[int, Field(ge=1)] | None = None
    """Largest ``honest`` of ``dp`` with noise at the sites that the site accepts: the number of sites in a sum, itself
    included, that its administrator trusts to add their noise and not to reveal it. By default, that of the experiment."""
    max_runs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Largest number of runs with secure aggregation, noise at the sites, ``dpsgd`` or private generators that use the
    site's data. The difference of sums of two runs can reveal the update of one site, and privacy losses add up."""
    data_schema: str = "schema.json"
    """Schema of the experiment's data, from the server's administrator: shape, classes and normalization. If the file
    exists, the site rejects messages with another schema. Noise at the sites requires it, if the site has its own data."""
    trust_code: bool = False
    """True to run custom code that the experiment names."""

    def path(self, name: str, folder: Path) -> Path:
        """Return the path in a field of the configuration, resolved relative to the configuration's folder.

        Args:
            name: Name of the field.
            folder: Folder of the configuration.
        """
        return resolve_path(folder, getattr(self, name))


def load_site_config(path: Path) -> SiteConfig:
    """Read and validate a ``site.yaml``.

    Args:
        path: YAML file.

    Raises:
        ConfigError: If the configuration is not valid.
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
        raise ConfigError(
            f"{path}: {where}={short_repr(first['input'])} is not valid: {plain_message(first['msg'])}."
        ) from error
    socket = config.path("socket", path.parent).absolute()
    for replaced in (socket, socket.with_suffix(".new")):  # the process removes them when it starts
        if replaced.is_symlink() or (replaced.exists() and not replaced.is_socket()):
            raise ConfigError(
                f"{path}: socket={config.socket}: {replaced} exists and is not a socket. Use another path."
            )
    if len(str(socket)) > LONGEST_SOCKET:
        raise ConfigError(
            f"{path}: the path of the socket, {socket}, is longer than {LONGEST_SOCKET} characters; use a shorter one."
        )
    return config


def agreed_experiments(config: SiteConfig, folder: Path) -> dict[str, Experiment]:
    """Return the experiments that a site has agreed to, by digest.

    Args:
        config: Configuration of the site.
        folder: Folder of the configuration.
    """
    return {experiment_digest(file): file for file in read_experiments(config, folder).values()}


def read_experiments(config: SiteConfig, folder: Path) -> dict[Path, Experiment]:
    """Read the experiments that a site has agreed to, by file.

    Args:
        config: Configuration of the site.
        folder: Folder of the configuration.

    Raises:
        ConfigError: If there is no experiment, or one is not valid or has too few clients.
    """
    folder_path = config.path("experiments", folder)
    files = sorted(folder_path.glob("*.yaml")) if folder_path.is_dir() else [folder_path]
    if not files:
        raise ConfigError(f"The folder {folder_path} contains no experiment (*.yaml) that this site has agreed to.")
    configs = {}
    remedy = None if config.trust_code else "read it, then set trust_code: true in site.yaml"
    for file in files:
        loaded = with_absolute_paths(experiment(load_config(file, remedy, ignored=NOT_OF_MODEL)))
        if loaded.clients is not None and config.client >= loaded.clients:
            raise ConfigError(
                f"{file} has {loaded.clients} clients, numbered from 0, so client {config.client} does not exist."
            )
        configs[file] = loaded
    return configs


def load_identity(site: SiteConfig, folder: Path, experiments: Iterable[Experiment]) -> SigningIdentity | None:
    """Load a site's identity; None if it has no roster and no experiment needs one.

    Args:
        site: Configuration of the site.
        folder: Folder of the configuration.
        experiments: Experiments that the site agreed to.

    Raises:
        ConfigError: If an experiment needs a missing roster, or key and roster are not valid.
    """
    roster = site.path("roster", folder)
    if roster.is_file():
        return SigningIdentity.load(site.client, site.path("signing_key", folder), roster)
    if any(experiment.secure_aggregation == "required" for experiment in experiments):
        raise ConfigError(
            f"Secure aggregation needs {roster}: one line per client with its number and the content of its signing.pub, "
            "which the sites' operators exchange without the server."
        )
    return None
