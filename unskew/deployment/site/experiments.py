"""Experiments that a site has agreed to, with the site's data, model and limits for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unskew.config.experiment import Experiment
from unskew.data.readers.cell_types import may_be_number
from unskew.data.readers.column_roles import AUTO
from unskew.deployment.common.data_schema import DataSchema, read_schema, reference_schema
from unskew.deployment.secagg.protocol import PHASES
from unskew.deployment.site.config import SiteConfig, agreed_experiments
from unskew.deployment.site.data import SiteData, load_site_data, own_split
from unskew.deployment.site.row_hashes import RowValues, row_values
from unskew.deployment.site.trainer import SiteTrainer
from unskew.deployment.wire.tensor_codec import InvalidMessageError
from unskew.errors import ConfigError, UnskewError
from unskew.methods.dp_sites import site_noise
from unskew.methods.registry import method as method_of
from unskew.protocol.rules import Method
from unskew.tasks.base import Task
from unskew.tasks.registry import TASKS, has_loss


class SiteExperiments:
    """Experiments of a site, by digest.

    Args:
        site: Configuration of the site.
        folder: Folder of the configuration.
        log: Called with messages for the site's administrator.
    """

    def __init__(self, site: SiteConfig, folder: Path, log: Callable[[str], None]):
        self.site = site
        self.folder = folder
        self.log = log
        self.configs = agreed_experiments(site, folder)
        methods = {digest: method_of(config.method) for digest, config in self.configs.items()}
        self.noise = {digest: site_noise(method) for digest, method in methods.items()}
        self.limited = {digest: is_limited(self.configs[digest], method) for digest, method in methods.items()}
        self._samples: dict[str, SiteData] = {}
        self._values: tuple[SiteData, RowValues] | None = None
        self._schemas: dict[str, DataSchema] = {}
        self._trainer: tuple[tuple[str, str, int], SiteTrainer] | None = None

    def config(self, digest: str) -> Experiment:
        """Return the experiment with a digest.

        Args:
            digest: Digest that the server sent.

        Raises:
            ConfigError: If the site has not agreed to the experiment.
        """
        config = self.configs.get(digest)
        if config is None:
            raise ConfigError(
                f"The site {self.site.name} has not agreed to this experiment: it differs from "
                f"{Path(self.site.experiments).name} there. Both sides must have the same file."
            )
        return config

    def samples(self, digest: str, reference: DataSchema) -> SiteData:
        """Return the site's samples for an experiment; they are read once.

        Args:
            digest: Digest of the experiment.
            reference: Schema of the data.
        """
        config, samples = self.config(digest), self._samples.get(digest)
        if self.site.data == "split":
            if samples is None:
                self._load_split(digest)
            return self._samples[digest]
        columns = [(encoder.name, encoder.kind) for encoder in reference.columns]
        if samples is None or [(encoder.name, encoder.kind) for encoder in samples.source.encoders] != columns:
            samples = load_site_data(self.site, config, self.folder, reference.columns)
            check_columns(samples, config, self.site)
            self._samples[digest] = samples
        return samples

    def row_values(self, digest: str) -> RowValues:
        """Return the values of all rows of the loaded samples of an experiment, by column."""
        if self._values is None or self._values[0] is not self._samples[digest]:
            self._values = self._samples[digest], row_values(self._samples[digest])
        return self._values[1]

    def _load_split(self, digest: str) -> DataSchema:
        """Load the site's part of an experiment's data, instead of that of another one, and return their schema."""
        config = self.configs[digest]
        samples, full_data = own_split(config, self.site.client, f"The site {self.site.name}")
        self._samples, schema = {digest: samples}, reference_schema(full_data, config)
        if self.limited[digest]:
            self._schemas[digest] = schema
        return schema

    def check_noise(self, digest: str) -> None:
        """Validate that an experiment with noise at the sites protects this site as it expects."""
        noise, site = self.noise[digest], self.site
        if noise is None:
            return
        if self.configs[digest].secure_aggregation != "required":
            raise ConfigError(
                "dp:noise_at=sites needs secure_aggregation: required, because the noise of a single site is too small."
            )
        honest, most = noise.honest or 0, site.max_honest
        if most is not None and honest > most:
            raise ConfigError(
                f"The experiment assumes that {honest} sites add their noise (dp:honest), but the site {site.name} accepts "
                f"at most {most} (max_honest in site.yaml)."
            )

    def check_schema(self, digest: str, reference: DataSchema) -> None:
        """Validate that a data schema fits the experiment, and is the one that this site knows, if it knows one.

        Args:
            digest: Digest of the experiment.
            reference: Schema that the server sent.

        Raises:
            InvalidMessageError: If the schema differs, or its constants cannot be those of the experiment's task.
            ConfigError: If the site adds noise to its updates and has no schema, so that it could be asked for properties
                of its data by offering different ones.
        """
        if self.site.data == "split":
            self.samples(digest, reference)  # with the schema of the experiment's data
        elif digest not in self._schemas:
            installed = read_schema(self.site.path("data_schema", self.folder))
            if installed is not None:
                self._schemas[digest] = installed
            elif self.noise[digest] is not None:
                raise ConfigError(
                    f"The site {self.site.name} needs the data schema of the experiment, "
                    f"{self.site.data_schema} from unskew deploy init, because the experiment adds noise at the sites."
                )
        known = self._schemas.get(digest)
        if known is not None and not known.is_same(reference):
            raise InvalidMessageError(
                "its data schema differs from the one that the administrator of the site installed"
            )
        if reference.settled and (reason := agreed_task(self.configs[digest], reference).accepts(reference.constants)):
            raise InvalidMessageError(f"{reason}, so it differs from the experiment that this site has agreed to")

    def trainer(self, digest: str, reference: DataSchema, rounds: int | None = None) -> SiteTrainer:
        """Return the trainer of an experiment, built once.

        Args:
            digest: Digest of the experiment.
            reference: Schema of the data.
            rounds: Rounds of the run; more than the site has agreed to, or None, are those that it has agreed to.

        Raises:
            ConfigError: If the experiment cannot run here, without the reason if the site's data must stay private.
            DataError: If the site's data do not fit the experiment.
        """
        config = self.config(digest)
        if rounds is not None:  # the model that a run ends with depends on them
            config = config.model_copy(update={"rounds": max(1, min(rounds, config.rounds))})
        key = digest, repr(reference), config.rounds
        if self._trainer is None or self._trainer[0] != key:
            try:
                self._trainer = key, SiteTrainer(self.site, config, reference, self.samples(digest, reference))
            except UnskewError as error:
                if self.noise[digest] is None:
                    raise
                self.log(f"{type(error).__name__}: {error}")
                raise ConfigError(f"The site {self.site.name} cannot take part; its log has the reason.") from error
        return self._trainer[1]

    def warm(self) -> None:
        """Read the data before the first message, because Flower gives up on messages without a reply in half a minute."""
        for digest, config in self.configs.items():
            if self.site.data == "split":
                self.trainer(digest, self._load_split(digest))
            else:
                self._samples[digest] = load_site_data(self.site, config, self.folder)


def check_columns(samples: SiteData, config: Experiment, site: SiteConfig) -> None:
    """Validate columns that the server has selected, because their values or statistics leave the site.

    Args:
        samples: The site's samples with these columns.
        config: Experiment that the site has agreed to.
        site: Configuration of the site.

    Raises:
        ConfigError: If the experiment does not select a column, or not as a category or a date.
    """
    data = site.data
    features = (() if data == "split" else data.features) or config.features
    rows = len(samples.train)
    for encoder in samples.source.encoders:
        what = f"The server asks for the column {encoder.name} of {site.name}"
        if features and encoder.name not in features:
            raise ConfigError(f"{what}, which is not in features of the experiment.")
        if encoder.kind == "date" and encoder.name not in config.dates:
            raise ConfigError(f"{what} as a date, but it is not in dates of the experiment.")
        if encoder.kind == "category" and encoder.name not in config.categories:
            # As the selection of auto: no numbers, and no names or identifiers.
            texts = any(not may_be_number(value) for value in encoder.values) or not encoder.values
            if config.categories != AUTO or not texts or (rows >= 20 and len(encoder.values) > rows / 2):
                raise ConfigError(f"{what} as a category, but it is not in categories of the experiment.")


def is_limited(config: Experiment, method: Method) -> bool:
    """Return whether an experiment promises that little is learned of a site's data, which holds for few runs only.

    Args:
        config: The experiment.
        method: Its method.
    """
    noisy = any(rule.poisson_batches for rule in method.client) or site_noise(method) is not None
    generated = any(getattr(rule, "privacy", None) is not None for rule in method.data)
    return noisy or generated or config.secure_aggregation == "required"


def agreed_task(config: Experiment, reference: DataSchema) -> Task:
    """Return the task of a data schema with the options and the loss of an experiment, before it is fitted.

    Args:
        config: Experiment that the site has agreed to.
        reference: Data schema.
    """
    task = TASKS[reference.task]
    task = task.configured(getattr(config.data_spec, task.section)) if task.section else task
    return task.with_loss(config.loss) if config.loss != "auto" and has_loss(task, config.loss) else task


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
    if not sent and kind in ("hello", "sums", *PHASES):
        return  # class weights are not known yet
    if weights == "balanced":
        # A balanced weight is N / (C n_c), and no class has more than all N samples.
        good = len(sent) == reference.classes and all(weight * reference.classes > 1 - 1e-6 for weight in sent)
    else:
        good = sent == (() if weights is None else tuple(map(float, weights)))
    if not good:
        raise InvalidMessageError("its class weights differ from those of the experiment")
