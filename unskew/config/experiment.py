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
from unskew.config.sections import NetworkConfig, RayConfig
from unskew.config.trust import ENGINE, METHOD, METRIC, MODEL, TRACKER
from unskew.config_fields import EVALUATION, MACHINE, TRAINING, as_value_error
from unskew.data.spec import DataSpec, as_text_source, is_table, text_columns
from unskew.engines.names import parse_engine
from unskew.errors import ConfigError, unknown_name
from unskew.expressions import parse_names
from unskew.methods.registry import method
from unskew.models.names import HUB, parse_model, parse_models, split_models
from unskew.option_parsing import LARGEST, all_finite
from unskew.protocol.training_config import Training
from unskew.simulation.samplers.registry import parse_sampling
from unskew.tasks.primary_metric import KNOWN_METRICS, METRIC_PREFIXES

Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
DEVICES = r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)$"
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


Finite = Annotated[float, Field(allow_inf_nan=False)]


def known_loss(loss: str) -> str:
    """Validate that ``loss`` is ``auto`` or a loss of a task (raises ``ValueError`` otherwise)."""
    if loss == "auto":
        return loss
    from unskew.tasks.registry import TASKS, has_loss

    if not any(has_loss(task, loss) for task in TASKS.values()):
        options = ["auto", *(option for task in TASKS.values() for option in task.loss_options)]
        raise ValueError(f"it must be {', '.join(options[:-1])} or {options[-1]}")
    return loss


class Experiment(DataSpec):
    """Configuration of a run: data, model, method, training budget and execution.

    ``Experiment()`` is the default of the command line.
    """

    augment: bool = False
    """Random crops (padding 4) and horizontal flips of training images."""

    model: Annotated[str, MODEL, TRAINING] = "cnn"
    """Model: logistic, mlp, table-mlp, cnn, resnet20, ... (``unskew models``), ``hf:NAME``, ``package.module:factory``, or in
    a file a mapping of ``hf`` or ``name`` and options. If clients have different models: names separated by commas, or a
    list."""
    model_options: Annotated[dict[str, Any] | tuple[dict[str, Any], ...], AfterValidator(all_finite)] = Field(
        default_factory=dict
    )
    """Options of the model, or of each of several models; a list has one mapping per model."""
    head: str | None = None
    """Module that is the head; by default the last linear layer."""
    buffers: Literal["average", "local", "reset"] = "average"
    """Buffers: ``average`` (like parameters), ``local`` (kept at each client) or ``reset`` (in every round)."""

    method: Annotated[str, METHOD, TRAINING] = "fedavg"
    """Method expression, such as ``fedprox:mu=0.1+scaffold``."""
    client_weighting: Annotated[Literal["auto", "samples", "uniform"], TRAINING] = "auto"
    """Weights of the clients: ``samples``, ``uniform``, or ``auto`` for the method's own (``samples`` unless its paper
    averages uniformly)."""
    rounds: Annotated[int, Field(ge=1, le=10_000_000), TRAINING] = 50
    """Number of communication rounds."""
    participation: Annotated[float, Field(gt=0, le=1), TRAINING] = 1.0
    """Share of clients per round; at least one client, unless ``sampling`` is ``poisson``."""
    sampling: Annotated[str, TRAINING] = "fixed"
    """Cohorts of a ``fixed`` size, ``poisson``: each client takes part with probability ``participation``,
    ``power-of-choice:D``: the clients with the largest losses of ``D`` candidates, ``oort``: clients with large losses and
    short times, or a sampler of a plugin with its options."""
    local_steps: Annotated[Annotated[int, Field(ge=1, le=1_000_000)] | None, TRAINING] = None
    """Mini-batch steps per client and round; cannot be combined with ``local_epochs``."""
    local_epochs: Annotated[Annotated[int, Field(ge=1, le=10_000)] | None, TRAINING] = None
    """Passes over a client's data per round; 5 if neither this nor ``local_steps`` is set."""
    batch_size: Annotated[int, Field(ge=1, le=10_000_000), TRAINING] = 64
    """Samples per step."""
    drop_last: bool = False
    """Skip the last batch of an epoch if it is smaller."""
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], TRAINING] = "sgd"
    """Client optimizer: ``sgd``, ``adam`` or ``adamw``; created again in every round."""
    lr: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False), TRAINING] = 0.1
    """Client learning rate; the default is 0.1 for sgd and 0.001 for adam and adamw."""
    lr_schedule: Annotated[str, TRAINING] = "constant"
    """Learning-rate schedule: ``constant``, ``step:30,0.1``, ``cosine``, ``inverse:10,100``, ``warmup:5+cosine``."""
    lr_schedule_per: Literal["round", "step"] = "round"
    """Unit of the numbers in ``lr_schedule``: ``round``, or ``step`` for local steps."""
    loss: Annotated[str, AfterValidator(known_loss), TRAINING] = "auto"
    """Regression loss: ``mse`` (used for ``auto``), ``mae``, ``huber`` or ``huber:DELTA``."""
    class_weights: Annotated[Literal["balanced"] | tuple[Positive, ...] | None, TRAINING] = None
    """Class weights in the clients' loss: one per class, or ``balanced`` for weights from the global class counts."""
    momentum: Annotated[float, Field(ge=0, lt=1), TRAINING] = 0.0
    """Momentum of the client's SGD."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3), TRAINING] = 0.0
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
    attack: Annotated[AnyAttack | None, MACHINE] = None
    """Clients that attack the run: an expression such as ``signflip:share=0.2``, or a mapping with ``kind``."""

    secure_aggregation: Literal["off", "required"] = "off"
    """``required``: the server sees only the weighted sum of a round's updates; methods that need more are rejected."""
    diagnose: tuple[str, ...] = ()
    """Diagnostics that are measured in evaluated rounds, in addition to the method's metrics."""
    ranges: Mapping[str, tuple[Finite, Finite]] = {}
    """Ends of the histograms of ``unskew deploy diagnose``, by column: ``{age: [0, 120]}``."""
    start_from: str | None = None
    """Folder of a finished run on the same data: this run starts from its model and continues its round numbers."""
    base_run: bool = False
    """True if other runs will ``start_from`` this one; its method may then have an effect only in their rounds."""
    synthetic: Annotated[str | None, EVALUATION] = None
    """Folder of a run whose synthetic images are reused instead of generating new ones (fedssyn)."""
    seed: Annotated[int, Field(ge=0, lt=2**63), TRAINING] = 0
    """Random seed of partition, initial model, cohorts, batches and dropouts."""
    engine: Annotated[str, ENGINE, MACHINE] = "auto"
    """Engine that trains the clients: ``auto``, ``inline``, ``processes``, ``vectorized``, ``ray``, or a plugin's.
    Results agree up to rounding."""
    workers: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of processes of the engine ``processes``, or of concurrent tasks of ``ray``; None means one per core."""
    clients_per_group: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Number of clients that ``inline``, a worker of ``processes`` or a task of ``ray`` trains at once. ``auto``
    measures the best number for ``processes`` and is 1 for the others."""
    graphs: Literal["auto", "never"] = "auto"
    """Recording of local steps by ``vectorized`` as CUDA graphs: ``auto`` (on CUDA, if possible) or ``never``."""
    ray: RayConfig = RayConfig()
    """Cluster of the engine ``ray``."""
    stall_warning_seconds: Positive = 600.0
    """Seconds without a reply from a worker process after which a warning is printed."""
    device: Annotated[str, Field(pattern=DEVICES), MACHINE] = "auto"
    """Device: ``cpu``, ``cuda``, ``cuda:1``, or ``auto``."""
    eval_every: Annotated[int, Field(ge=1), EVALUATION] = 1
    """Number of rounds between evaluations on the test set (the last round is always evaluated)."""
    eval_clients: Annotated[int, Field(ge=0)] = 1000
    """Maximum number of clients to evaluate on their own data at the end of the run; 0 evaluates none."""
    metrics: Annotated[tuple[MetricField, ...], METRIC, EVALUATION] = ()
    """Additional metrics, such as auroc, f1, brier, recall, or for survival uno, ibs, or functions ``f(y_true, scores)``."""
    positive: Annotated[str | None, EVALUATION] = None
    """Positive one of two classes, for metrics of one class and thresholds; None is the second class in sorted order."""
    objective: Annotated[ObjectiveField, METRIC, EVALUATION] = AUTO
    """Metric that judges the run; ``auto`` is the primary metric such as accuracy or R², or the loss of a language model."""
    early_stopping: Annotated[Annotated[int, Field(ge=1)] | None, EVALUATION] = None
    """Stop after this many consecutive evaluations without a better objective on the clients' held-out samples."""
    keep: Annotated[Literal["best", "last"], EVALUATION] = "last"
    """Model of the run: of the ``last`` round, or of the ``best`` one by the objective on the clients' held-out samples."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Number of rounds between checkpoints (one is always written after the last round)."""
    save_samples: Annotated[bool, EVALUATION] = False
    """Plot the inputs that clients generate in the last round into the run folder, for methods that generate inputs."""
    coefficients: Annotated[bool, EVALUATION] = False
    """After the last round, compute the coefficients of a logistic regression, or of proportional hazards for survival, over
    all training rows, with 95 % intervals and odds or hazard ratios (``coefficients.json``)."""
    target: Annotated[Annotated[float, Field(allow_inf_nan=False)] | None, EVALUATION] = None
    """Value of the objective; the run reports the number of rounds needed to reach it."""
    trackers: Annotated[tuple[str, ...], TRACKER] = ()
    """Trackers that receive the metrics in addition to the run folder: ``tensorboard``, ``mlflow``, ``wandb``, or plugins."""

    @pydantic.field_validator("metrics", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if isinstance(value, str):
            return parse_names(value)
        return (value,) if callable(value) else value

    @pydantic.field_validator("ranges")
    @classmethod
    def _ordered(cls, value: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for column, (low, high) in value.items():
            if low >= high:
                raise ValueError(f"the range of {column} is from {low:g} to {high:g}; the smaller number is the first")
        return value

    @pydantic.field_validator("positive", mode="before")
    @classmethod
    def _class_name(cls, value: Any) -> Any:
        if isinstance(value, bool):  # YAML reads yes as true
            raise ValueError(f"positive={value}: write the name of the class in quotes, such as 'yes'")
        return str(value) if isinstance(value, int) else value

    @classmethod
    def allowed_values(cls, field: str) -> str | None:
        """Return what is allowed for a field, for errors, if its annotation does not explain it."""
        if field == "device":
            from unskew.engines.registry import available_devices

            return f"the devices of this machine are {', '.join(available_devices())}"
        return None

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
        if isinstance(values.get("model"), list | tuple):
            values["model"], each = parse_models(values["model"])
            if any(each) and values.get("model_options"):
                raise ValueError("write options of a list of models either in the list, or in model_options")
            if any(each):
                values["model_options"] = each
        listed = values.get("model_options")
        if isinstance(listed, list | tuple) and len(listed) == 1 and "," not in str(values.get("model")):
            values["model_options"] = listed[0]
        if values.get("optimizer", "sgd") != "sgd":
            values.setdefault("lr", 0.001)
        if values.get("local_steps") is None and values.get("local_epochs") is None:
            values["local_epochs"] = DEFAULT_EPOCHS
        if values.get("device") == "cpu:0":  # PyTorch's other name for cpu
            values["device"] = "cpu"
        weights = values.get("class_weights")
        if isinstance(weights, str) and weights != "balanced":
            try:
                values["class_weights"] = [float(part) for part in weights.split(",")]
            except ValueError:
                raise ValueError(f"class_weights={weights!r} is neither balanced nor numbers such as 1,5") from None
        if isinstance(values.get("secure_aggregation"), bool):  # YAML reads off as false
            values["secure_aggregation"] = "required" if values["secure_aggregation"] else "off"
        if isinstance(values.get("network"), str):  # short for the delay
            values["network"] = {"delay": values["network"]}
        _set_default_model(values)
        for name in ("trackers", "diagnose"):
            if isinstance(values.get(name), str):
                values[name] = [values[name]]
        return values

    @pydantic.model_validator(mode="after")
    def _consistent(self, info: pydantic.ValidationInfo) -> Experiment:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs cannot be combined; set only one of them")
        self._check_schedule()
        models = split_models(self.model)
        if not isinstance(self.model_options, dict) and len(self.model_options) != len(models):
            raise ValueError(f"model_options is a list of {len(self.model_options)} for {len(models)} models")
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
        self._check_diagnoses()
        return self

    def _check_diagnoses(self) -> None:
        if not {*self.diagnose} <= {*DIAGNOSES}:
            from unskew.methods.descriptions import own_diagnostics

            known = [*DIAGNOSES, *own_diagnostics()]
            unknown = [name for name in self.diagnose if name not in known]
            if unknown:
                raise ValueError(unknown_name("diagnostic", unknown[0], known).rstrip("."))

    def _check_metrics(self) -> None:
        """Validate the names of metrics and objective, and that the target is positive."""
        own = [metric_name(metric) for metric in self.metrics if is_custom_metric(metric)]
        if len(set(own)) < len(own):
            raise ValueError(f"two metrics are named {max(own, key=own.count)!r}; rename one of them")
        name = metric_name(self.objective)
        known = (AUTO, *KNOWN_METRICS, *own)
        if not is_custom_metric(self.objective) and name not in known and not name.startswith(METRIC_PREFIXES):
            raise ValueError(unknown_name("objective", name, known).rstrip("."))
        if self.target is None or is_custom_metric(self.objective) or name in own:
            return
        if self.target <= 0:
            raise ValueError(f"target={self.target:g} is not valid: it must be above 0, in the unit of the objective")

    @field_validator("sampling", "trackers")
    @classmethod
    def _check_names(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        with as_value_error():
            if info.field_name == "sampling":
                parse_sampling(value)
            else:
                for name in set(value) - {*TRACKERS}:
                    plugins.find_plugin(plugins.TRACKERS, "tracker", name, TRACKERS)
        return value

    def _check_schedule(self) -> None:
        """Validate that the learning-rate schedule fits rounds and local steps."""
        training = self.training
        with as_value_error():
            schedule = training.schedule
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
            names = split_models(self.model)
            known = {n.removeprefix(HUB) if n.startswith(HUB) else OWN_TOKENIZERS.get(n) for n in names}
            own = known.pop() if len(known) == 1 else None
        text = self.text if own is None or self.text.tokenizer else self.text.model_copy(update={"tokenizer": own})
        return DataSpec.model_construct(
            **{name: getattr(self, name) for name in DataSpec.model_fields} | {"text": text}
        )

    def to_yaml(self) -> str:
        """Return the configuration as YAML, with every field in order."""
        try:
            return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        except PydanticSerializationError as error:
            raise ConfigError(
                f"model_options cannot be written to config.yaml ({error}). "
                "Pass a function that builds the model with these options instead."
            ) from error


def _set_default_model(values: dict[str, Any]) -> None:
    """Set the default model of masks, and of labeled texts and tables."""
    from unskew.tasks.registry import TASKS

    data, task = values.get("data"), TASKS.get(str(values.get("task")))
    labeled = values.get("label") is not None or data == "lung"
    if not isinstance(data, str) or values.get("model") is not None:
        return
    if data.partition(":")[0] in ("masks", "shape-masks") or (task is not None and task.pixels):
        values["model"] = "unet"
        return
    if not labeled:
        return
    data = as_text_source(data, text_columns(values.get("text")))
    if data.partition(":")[0] in ("text", "sentences", "multi_nli"):
        values["model"] = "text-mlp"
    elif is_table(data) and values.get("image") is None:
        values["model"] = "table-mlp"
