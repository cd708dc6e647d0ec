"""Experiment configuration: validated fields that are read from and written to YAML.

Every field has a type, a range and a default, and unknown keys are errors. ``config.yaml`` in a run folder contains
every field, so it can be used to repeat the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticSerializationError

from unskew import plugins
from unskew.attacks.registry import AnyAttack, attack_values, check_attack_options
from unskew.config.metrics import AUTO, MetricField, ObjectiveField, is_custom_metric, metric_name, metric_reference
from unskew.config.sections import ColumnName, ColumnNames, CsvConfig, NetworkConfig, RayConfig, Section, TextConfig
from unskew.data.shift import parse_shift
from unskew.data.spec import DataSpec, TextSpec, as_text_source, is_table, parse_names, parse_split, parse_unseen
from unskew.engines.names import parse_engine
from unskew.errors import ConfigError, unknown_name
from unskew.methods.registry import method, own_diagnostics
from unskew.models.names import HUB, parse_model
from unskew.option_parsing import LARGEST, all_finite
from unskew.protocol.round_plan import parse_sampling
from unskew.protocol.training_config import Training
from unskew.provenance import Named, with_provenance
from unskew.tasks.primary_metric import KNOWN_METRICS, RECALL, metric_info

Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
DEVICES = r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)$"
LOSSES = r"^(auto|mse|mae|huber(:[0-9.e+-]+)?)$"
DEFAULT_EPOCHS = 5
TRACKERS = ("tensorboard", "mlflow", "wandb")
OWN_TOKENIZERS = {"text-mlp": "words"}
LEAST_RATE = 1e-30
"""Smallest learning rate at the end of a schedule; smaller rates have no effect in float32."""
AT_CLIENTS = ("local_models", "consensus", "generalization", "gradients", "updates")
"""Diagnostics that are computed from the single clients of a round."""
OF_ONE_ROUND = AT_CLIENTS[:-1]
"""Diagnostics that compare clients which started from the same model."""
DIAGNOSES = (*AT_CLIENTS, "server")
"""Diagnostics that are available with every method; some methods provide more."""


class Experiment(Section):
    """Configuration of a run: data, model, method, training budget and execution.

    ``Experiment()`` is the default of the command line.
    """

    data: str = "digits"
    """Data source: a name, ``table:PATH``, ``folder:PATH``, ``leaf:PATH``, or ``arrays`` for data passed in Python."""
    data_path: str | None = None
    """Folder with the source's files, for offline use."""
    label: ColumnName | None = None
    """Label column of a table; if it contains lists, the task is multi-label; several columns with ``task: regression``."""
    label_separator: Annotated[str, Field(min_length=1)] | None = None
    """Separator between the labels of a sample in a string label column."""
    image: ColumnName | None = None
    """Image column of a table; for ``leaf``, the folder of image files."""
    features: ColumnNames = ()
    """Columns of a table that are inputs, in this order; if empty, all numeric columns."""
    exclude: ColumnNames = ()
    """Columns of a table that are not inputs."""
    task: Literal["auto", "regression"] = "auto"
    """``regression`` predicts the numbers of one or more label columns; ``auto`` infers the task from the label column."""
    categories: ColumnNames = ()
    """Categorical columns of a table; ``auto`` means every string column."""
    dates: ColumnNames = ()
    """Date columns of a table."""
    missing: Literal["error", "mean", "indicator"] = "error"
    """Missing numbers of a table: ``error`` (raise an error), ``mean`` (impute), or ``indicator`` (impute and flag)."""
    split_by: str | None = None
    """Column whose values are never divided between training, held-out and test data; ``time:COLUMN`` holds out the newest
    rows, ``column:COLUMN`` uses a predefined split."""
    csv: CsvConfig = CsvConfig()
    """Format of CSV files, if detection fails."""
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Side length in pixels to which all images are resized, including the server's; None leaves them unchanged."""
    max_classes: Annotated[int, Field(ge=2)] | None = None
    """Use only samples of the first classes, up to this number of classes."""
    max_train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of training samples to keep, drawn by the seed; the test set is not reduced."""
    partition: str = "dirichlet:0.1"
    """Data partition: the assignment of training samples to clients."""
    clients: Annotated[int, Field(ge=1, le=100_000_000)] | None = 10
    """Number of clients; None, the default of ``natural`` partitions, means one client per value of the column."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of each client's samples that is held out to evaluate on that client."""
    unseen: float | tuple[str, ...] = 0.0
    """Clients that take no part in training and are evaluated after it: their share, drawn by the seed, or their names."""
    shift: str | None = None
    """Feature shift of the clients' inputs: ``rotate:ANGLE``, ``rotate:ANGLE,groups=G`` or ``noise:SIGMA``."""
    server_data: Annotated[int, Field(ge=0)] | str | None = None
    """Data at the server: a number of test samples (removed from evaluation) or another data source."""
    server_data_path: str | None = None
    """Folder with the files of that other data source."""
    text: TextConfig = TextConfig()
    """Columns and tokenizer of texts; a list of columns is accepted, too."""
    reserve_test_samples: Annotated[int, Field(ge=0)] = 0
    """Exclude at least this many test samples from evaluation, to compare runs with and without server data."""
    augment: bool = False
    """Random crops (padding 4) and horizontal flips of training images."""

    model: Named = "cnn"
    """Name of a model, ``hf:NAME``, ``package.module:factory``, or a mapping of ``hf`` or ``name`` and options."""
    model_options: Annotated[dict[str, Any], AfterValidator(all_finite)] = Field(default_factory=dict)
    """Options of the model."""
    head: str | None = None
    """Module that is the head; by default the last linear layer."""
    buffers: Literal["average", "local", "reset"] = "average"
    """Buffers: ``average`` (like parameters), ``local`` (kept at each client) or ``reset`` (in every round)."""

    method: Named = "fedavg"
    """Method expression, such as ``fedprox:mu=0.1+scaffold``."""
    client_weighting: Literal["auto", "samples", "uniform"] = "auto"
    """Weights of the clients: ``samples``, ``uniform``, or ``auto`` for the method's own (``samples`` unless its paper
    averages uniformly)."""
    rounds: Annotated[int, Field(ge=1, le=10_000_000)] = 50
    """Number of communication rounds."""
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of clients per round; at least one client, unless ``sampling`` is ``poisson``."""
    sampling: str = "fixed"
    """Cohorts of a ``fixed`` size, ``poisson``: each client takes part with probability ``participation``, or
    ``power-of-choice:D``: the clients with the largest losses of ``D`` candidates."""
    local_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Mini-batch steps per client and round; cannot be combined with ``local_epochs``."""
    local_epochs: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Passes over a client's data per round; 5 if neither this nor ``local_steps`` is set."""
    batch_size: Annotated[int, Field(ge=1, le=10_000_000)] = 64
    """Samples per step."""
    drop_last: bool = False
    """Skip the last batch of an epoch if it is smaller."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Client optimizer: ``sgd``, ``adam`` or ``adamw``; created again in every round."""
    lr: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 0.1
    """Client learning rate; the default is 0.1 for sgd and 0.001 for adam and adamw."""
    lr_schedule: str = "constant"
    """Learning-rate schedule: ``constant``, ``step:30,0.1``, ``cosine``, ``inverse:10,100``, ``warmup:5+cosine``."""
    lr_schedule_per: Literal["round", "step"] = "round"
    """Unit of the numbers in ``lr_schedule``: ``round``, or ``step`` for local steps."""
    loss: Annotated[str, Field(pattern=LOSSES)] = "auto"
    """Regression loss: ``mse`` (used for ``auto``), ``mae``, ``huber`` or ``huber:DELTA``."""
    class_weights: Literal["balanced"] | tuple[Positive, ...] | None = None
    """Class weights in the clients' loss: one per class, or ``balanced`` for weights from the global class counts."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of the client's SGD."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Weight decay of the client's optimizer."""
    nesterov: bool = False
    """Nesterov momentum of the client's SGD."""
    clip_grad_norm: Positive | None = None
    """Maximum gradient norm; larger gradients of clients are clipped."""
    precision: Literal["fp32", "tf32", "fp64", "bf16"] = "fp32"
    """``fp32``, ``tf32`` (TensorFloat-32 on CUDA; equal to ``fp32`` elsewhere), ``fp64``, or ``bf16`` (autocast with fp32
    weights)."""
    network: NetworkConfig = NetworkConfig()
    """Simulated network between clients and server."""
    attack: AnyAttack | None = None
    """Clients that attack the run: an expression such as ``signflip:share=0.2``, or a mapping with ``kind``."""

    secure_aggregation: Literal["off", "required"] = "off"
    """``required``: the server sees only the weighted sum of a round's updates; methods that need more are rejected."""
    diagnose: tuple[str, ...] = ()
    """Diagnostics that are measured in evaluated rounds, in addition to the method's metrics."""
    start_from: str | None = None
    """Folder of a finished run on the same data: this run starts from its model and continues its round numbers."""
    base_run: bool = False
    """True if other runs will ``start_from`` this one; its method may then have an effect only in their rounds."""
    synthetic: str | None = None
    """Folder of a run whose synthetic images are reused instead of generating new ones."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed of partition, initial model, cohorts, batches and dropouts."""
    engine: Named = "auto"
    """Engine that trains the clients: ``auto``, ``inline``, ``processes``, ``vectorized``, ``ray``, or a plugin's.
    Results agree up to rounding."""
    workers: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of processes of the engine ``processes``, or of concurrent tasks of ``ray``; None means one per core."""
    clients_per_group: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Number of clients that ``inline``, a worker of ``processes`` or a task of ``ray`` trains as one network. ``auto``
    measures the best number for ``processes`` and is 1 for the others."""
    ray: RayConfig = RayConfig()
    """Cluster of the engine ``ray``."""
    stall_warning_seconds: Positive = 600.0
    """Seconds without a reply from a worker process after which a warning is printed."""
    device: Annotated[str, Field(pattern=DEVICES)] = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``."""
    eval_every: Annotated[int, Field(ge=1)] = 1
    """Number of rounds between evaluations on the test set (the last round is always evaluated)."""
    eval_clients: Annotated[int, Field(ge=0)] = 1000
    """Maximum number of clients to evaluate on their own data at the end of the run; 0 evaluates none."""
    metrics: tuple[MetricField, ...] = ()
    """Additional metrics: auroc, auprc, f1, balanced_accuracy, ece, brier, observed_expected, calibration_slope, recall, or
    functions ``f(y_true, scores)``."""
    positive: str | None = None
    """Positive one of two classes, for metrics of one class and thresholds; None is the second class in sorted order."""
    objective: ObjectiveField = AUTO
    """Metric that judges the run; ``auto`` is the task's primary metric, accuracy or R²."""
    early_stopping: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many consecutive evaluations without a better objective on the clients' held-out samples."""
    keep: Literal["best", "last"] = "last"
    """Model of the run: of the ``last`` round, or of the ``best`` one by the objective on the clients' held-out samples."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Number of rounds between checkpoints (one is always written after the last round)."""
    save_samples: bool = False
    """Plot the inputs that clients generate in the last round into the run folder, for methods that generate inputs."""
    target: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Value of the objective; the run reports the number of rounds needed to reach it."""
    trackers: tuple[Named, ...] = ()
    """Trackers that receive the metrics in addition to the run folder: ``tensorboard``, ``mlflow``, ``wandb``, or plugins."""

    @pydantic.field_validator("metrics", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [with_provenance(name, value) for name in parse_names(value)]
        return (value,) if callable(value) else value

    @pydantic.field_validator("unseen", mode="before")
    @classmethod
    def _unseen(cls, value: Any) -> Any:
        return parse_unseen(value)

    @pydantic.field_validator("positive", mode="before")
    @classmethod
    def _class_name(cls, value: Any) -> Any:
        if isinstance(value, bool):  # YAML reads yes as true
            raise ValueError(f"positive={value}: write the name of the class in quotes, such as 'yes'")
        return str(value) if isinstance(value, int) else value

    @pydantic.field_validator("engine")
    @classmethod
    def _engine_exists(cls, value: str) -> str:
        name, _ = parse_engine(value)
        return name + value[len(name) :]

    @pydantic.field_validator("attack", mode="before")
    @classmethod
    def _attack_options(cls, value: Any) -> Any:
        return attack_values(value)

    @pydantic.field_serializer("metrics", "objective")
    def _paths(self, value: Any) -> Any:
        return [metric_reference(path) for path in value] if isinstance(value, tuple) else metric_reference(value)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        """Fill defaults that depend on other fields, so that ``config.yaml`` is complete."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if isinstance(values.get("model"), Mapping):
            values["model"], options = parse_model(values["model"])
            values["model_options"] = {**options, **(values.get("model_options") or {})}
        if values.get("optimizer", "sgd") != "sgd":
            values.setdefault("lr", 0.001)
        if values.get("local_steps") is None and values.get("local_epochs") is None:
            values["local_epochs"] = DEFAULT_EPOCHS
        if str(values.get("partition", "")).startswith("natural"):
            values.setdefault("clients", None)
        if isinstance(values.get("server_data"), str) and values["server_data"].isdigit():
            values["server_data"] = int(values["server_data"])
        if values.get("device") == "cpu:0":  # PyTorch's other name for cpu
            values["device"] = "cpu"
        if isinstance(values.get("secure_aggregation"), bool):  # YAML reads off as false
            values["secure_aggregation"] = "required" if values["secure_aggregation"] else "off"
        if isinstance(values.get("network"), str):  # short for the delay
            values["network"] = {"delay": values["network"]}
        if isinstance(values.get("text"), str | list | tuple):
            values["text"] = {"columns": values["text"]}
        _fill_for_texts_and_tables(values)
        for name in ("trackers", "diagnose"):
            if isinstance(values.get(name), str):
                values[name] = [values[name]]
        return values

    @pydantic.model_validator(mode="after")
    def _consistent(self, info: pydantic.ValidationInfo) -> Experiment:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs cannot be combined; set only one of them")
        self._check_schedule()
        for parse, text in ((parse_split, self.split_by), (parse_shift, self.shift)):
            try:
                _ = None if text is None else parse(text)
            except ConfigError as error:
                raise ValueError(str(error).rstrip(".")) from error
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov requires momentum above 0")
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(f"momentum requires optimizer=sgd, not {self.optimizer}")
        if self.precision == "fp64" and self.device.startswith("mps"):
            raise ValueError("fp64 is not available on this device")
        if info.context is None or not info.context.get("method_given"):
            method(self.method)
        self._check_metrics()
        if self.attack is not None:
            check_attack_options(self.attack, self.rounds)
        for name in self.diagnose:
            if name not in DIAGNOSES and name not in own_diagnostics():
                raise ValueError(unknown_name("diagnostic", name, [*DIAGNOSES, *own_diagnostics()]).rstrip("."))
        return self

    def _check_metrics(self) -> None:
        """Validate the names of metrics and objective, and the range of the target."""
        own = [metric_name(metric) for metric in self.metrics if is_custom_metric(metric)]
        if len(set(own)) < len(own):
            raise ValueError(f"two metrics are named {max(own, key=own.count)!r}; rename one of them")
        name = metric_name(self.objective)
        known = (AUTO, *KNOWN_METRICS, *own)
        if not is_custom_metric(self.objective) and name not in known and not name.startswith(RECALL):
            raise ValueError(unknown_name("objective", name, known).rstrip("."))
        if self.target is None or is_custom_metric(self.objective) or name in own:
            return
        share = name == AUTO or metric_info(name).percent
        if self.target <= 0 or (share and self.target > 1):
            unit = "above 0 and at most 1, such as 0.9 for 90 %" if share else "above 0, in the unit of the objective"
            raise ValueError(f"target={self.target:g} is not valid: it must be {unit}")

    @field_validator("sampling", "trackers")
    @classmethod
    def _check_names(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        try:
            if info.field_name == "sampling":
                parse_sampling(value)
            else:
                for name in set(value) - {*TRACKERS}:
                    plugins.find_plugin(plugins.TRACKERS, "tracker", name, TRACKERS)
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return value

    def _check_schedule(self) -> None:
        """Validate that the learning-rate schedule fits rounds and local steps."""
        training = self.training
        try:
            schedule = training.schedule
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from error
        if not training.scheduled:
            return
        if self.lr_schedule_per == "step" and self.local_steps is None:
            raise ValueError(
                "lr_schedule_per=step requires local_steps, because epochs differ in steps between clients"
            )
        steps = self.local_steps if self.lr_schedule_per == "step" and self.local_steps else 1
        if schedule.ends and schedule.warmup >= self.rounds * steps:
            raise ValueError(
                f"lr_schedule={self.lr_schedule} warms up for {schedule.warmup} of {self.rounds * steps} "
                f"{self.lr_schedule_per}s; use a shorter warmup, so that some remain for cosine"
            )
        if training.rate(self.rounds - 1, steps - 1) < LEAST_RATE:
            raise ValueError(f"lr_schedule={self.lr_schedule} ends below {LEAST_RATE:g}, which is too small to train")

    @property
    def training(self) -> Training:
        """Local training configuration: budget and optimizer of a client."""
        names = [field.name for field in dataclasses.fields(Training) if field.name in type(self).model_fields]
        return Training(**{name: getattr(self, name) for name in names})

    @property
    def data_spec(self) -> DataSpec:
        """Data specification; texts without a tokenizer get the model's tokenizer."""
        from unskew.data.readers.text import is_text

        own = None
        if is_text(self.data):
            own = self.model.removeprefix(HUB) if self.model.startswith(HUB) else OWN_TOKENIZERS.get(self.model)
        tokenizer = self.text.tokenizer or own
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(DataSpec)}
        text = TextSpec(self.text.columns, tokenizer, self.text.block)
        return DataSpec(**{**values, "text": text, "csv": self.csv.spec})

    def to_yaml(self) -> str:
        """Return the configuration as YAML, with every field in order."""
        try:
            return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        except PydanticSerializationError as error:
            raise ConfigError(
                f"model_options cannot be written to config.yaml ({error}). "
                "Pass a function that builds the model with these options instead."
            ) from error


def _fill_for_texts_and_tables(values: dict[str, Any]) -> None:
    """Convert a table with text columns to a text source, and set the default model of labeled texts and tables."""
    data, text = values.get("data"), values.get("text")
    if not isinstance(data, str):
        return
    columns = text.get("columns") if isinstance(text, Mapping) else getattr(text, "columns", ())
    data = values["data"] = as_text_source(data, columns or ())
    if values.get("model") is None and values.get("label") is not None:
        if data.partition(":")[0] in ("text", "sentences", "multi_nli"):
            values["model"] = "text-mlp"
        elif is_table(data) and values.get("image") is None:
            values["model"] = "table-mlp"
