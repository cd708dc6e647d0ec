"""Inference of a first configuration from the user's data, for ``unskew init``."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from unskew.config.loader import experiment
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.data.readers.column_roles import has_decimal_commas, is_date, is_identifier, is_numeric, is_string
from unskew.data.readers.encoders import first_mismatch
from unskew.data.readers.files import class_folders, concatenate_tables, table_files
from unskew.data.readers.images import image_bytes, is_image, open_image
from unskew.data.readers.labels import is_list_type, metadata_class_names
from unskew.data.sources.registry import SOURCES
from unskew.data.spec import TABLES
from unskew.errors import LONGEST_LIST, ConfigError, DataError, unknown_name
from unskew.tasks.metrics import missing_classes

LABELS = r"(label|labels|class|target|y|outcome|diagnosis|species|category|result|survived|type)"
GROUPS = r"(.*[_ .-])?(id|key|code|patient|subject)|[a-z]+Id|[a-z]+ID"
"""Names of columns that may identify a person or object with several rows."""
OWNERS = (
    r"(client|site|hospital|clinic|ward|user|patient|writer|device|cent(er|re)|institution|station|plant|machine|branch|"
    r"shop|school|region|subject|speaker|source|domain|district|airline|product|drawer|author|person|participant|role)"
)
MOST_CLASSES, MOST_VALUES = 100, 50
"""Maximum numbers of distinct values of a numeric class label, and of a categorical string column."""
RARE = 0.4
"""A class is rare if it has less than this share of the samples that it would have with balanced classes."""
SIDE, KEPT_SIDE = 32, 64
"""Images are resized to the first side length, unless all have the same size of at most the second."""
CODES = 12
"""Integer columns with at most this many distinct values may be category codes."""
WORDS = 3
"""Minimum mean number of words per row of a text column."""
NEARLY = 0.9
"""Minimum correlation with the label at which a column is reported."""


@dataclass
class InferredConfig:
    """Inferred configuration and the observations behind it.

    Attributes:
        values: Fields of the experiment with their values.
        why: Comment of each field; may be empty.
        seen: Lines that describe the data.
    """

    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, why: str = "") -> None:
        """Add a field.

        Args:
            name: Name of the field.
            value: Value of the field.
            why: Comment that explains the value.
        """
        self.values[name] = value
        self.why[name] = why

    def text(self, command: str) -> str:
        """Return the content of the configuration file."""
        lines = [
            f"# Written by: {command}",
            "# Other fields have their defaults. unskew run writes all fields to config.yaml in the run folder;",
            "# the configuration reference explains them.",
            *(f"# {line}" for line in self.seen),
            "",
        ]
        for name, value in self.values.items():
            if name in ("model", "rounds", "target"):
                lines.append("")
            flow = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
            written = f"{name}: {flow.strip().removesuffix('...').strip()}"
            lines.append(f"{written}  # {self.why[name]}" if self.why[name] else written)
        return "\n".join(lines) + "\n"


def infer_config(data: str | None, label: str | None = None, seed: int = 0) -> InferredConfig:
    """Infer a configuration that runs without changes.

    Args:
        data: A table (.csv, .jsonl, .parquet), arrays (.npz), a folder of images or of tables, or the name of a data
            source; None means the digits.
        label: Label column of a table; None means that it is inferred.
        seed: Random seed of the partition that is described.

    Raises:
        ConfigError: If the data do not exist, or the label cannot be inferred.
        DataError: If the data are not valid.
    """
    inferred = InferredConfig()
    data = data if data is None else data.removeprefix("table:")
    path = Path(data).expanduser() if data else Path("digits")
    if data is not None and path.exists():
        _look(inferred, path, data, label)
    elif data is None or data.partition(":")[0] in SOURCES:
        inferred.set("data", data or "digits", "a built-in data source")
        _images(inferred)
    else:
        raise ConfigError(
            f"There is no file or folder at {data}, and it is not a data source: "
            f"{unknown_name('data set', data, SOURCES)}"
        )
    if label is not None and "label" not in inferred.values:
        raise ConfigError(f"--label requires a table, but {data or 'digits'} is not a table.")
    _budget(inferred)
    fed = federation_of(experiment(inferred.values).data_spec, seed)  # validates the configuration and the data
    sizes, names = fed.sizes, fed.label_distribution()[1]
    classes = f", of {len(names)} classes: {', '.join(map(str, names[:8]))}{', ...' if len(names) > 8 else ''}"
    inferred.seen.append(
        f"{len(fed.clients)} clients with {_from_to(int(sizes.min()), int(sizes.max()))} training samples each"
        f"{classes if fed.objective.labeled else ''}"
    )
    if fed.task == "classification":
        _imbalance(inferred, fed)
    return inferred


def _imbalance(made: InferredConfig, fed: Federation) -> None:
    """Set objective, metrics and class weights if a class is rare, because accuracy is then misleading."""
    counts = np.asarray(fed.label_distribution()[0]).sum(0)
    least = int(counts.argmin())
    share = counts[least] / counts.sum()
    if share * len(counts) >= RARE or len(counts) > MOST_VALUES:
        return
    test, held_out = fed.test[1], [client.y_test for client in fed.clients if len(client.y_test)]
    parts = [test, *([torch.cat(held_out)] if held_out else [])]
    missing = {name: 0 for y in parts for name in missing_classes("auprc", y.numpy(), fed.names)}
    if missing:
        why = f"AUPRC is undefined: no test or held-out sample of {', '.join(missing)}"
        made.set("objective", "balanced_accuracy", why)
        made.set("metrics", ["balanced_accuracy"], "additional metrics")
    else:
        made.set("objective", "auprc", "for tuning, stopping and comparison; accuracy is misleading for rare classes")
        made.set("metrics", ["auroc", "auprc", "balanced_accuracy"], "additional metrics")
    if len(counts) == 2:
        made.set("positive", fed.names[least], "the rare class; AUPRC is that of this class")
    made.set("class_weights", "balanced", "rare classes count more in the loss; probabilities are corrected for it")
    made.seen.append(
        f"the class {fed.label_distribution()[1][least]} has {share:.0%} of the samples, so objective, metrics and "
        "class_weights are set for rare classes"
    )


def _look(made: InferredConfig, path: Path, data: str, label: str | None) -> None:
    """Set fields for data in a file or folder."""
    if path.is_file() and path.suffix.lower() == ".npz":
        made.set("data", f"npz:{data}", "arrays x and y, and optionally x_test and y_test")
        _arrays(made, path)
    elif path.is_file() and path.suffix.lower() in TABLES:
        _table(made, path, data, label)
    elif path.is_dir() and _is_table_folder(path):
        _table(made, path, f"table:{data}", label)
    elif path.is_dir():
        parts = class_folders(path)  # raises an error that describes the required layout
        files = [file for file in parts["train"].rglob("*") if file.is_file()]
        made.set("data", f"folder:{data}", "one folder of images per class")
        _image_size(made, files)
        _images(made, len(files))
    else:
        raise DataError(
            f"{data} is neither a table (.csv, .jsonl, .parquet), nor arrays (.npz), nor a folder of images."
        )


def _is_table_folder(path: Path) -> bool:
    try:
        table_files(path)
    except DataError:
        return False
    return True


def _images(made: InferredConfig, images: int = 1000) -> None:
    """Set partition and model for images without client information."""
    made.set("partition", "dirichlet:0.3,min=2", "label skew; others are iid, classes:2 or natural:COLUMN")
    made.set("clients", max(2, min(10, images // 20)))
    texts = made.values["data"] in ("sentences", "multi_nli") or str(made.values["data"]).startswith("text")
    if texts:
        raise ConfigError(
            "init does not support built-in text data sets. Write data, text, label and model (text-mlp or hf:NAME) "
            "yourself."
        )
    flat = made.values["data"] == "gaussians"
    made.set("model", "mlp" if flat else "cnn", "unskew models lists all models")


def _arrays(made: InferredConfig, path: Path) -> None:
    """Set fields for a file of arrays."""
    from unskew.data.sources.npz import load_arrays

    arrays = load_arrays(path)
    n = len(arrays["y"])
    made.seen.append(f"x {arrays['x'].shape}, y {arrays['y'].shape}")
    owner = next((k for k in arrays if re.fullmatch(OWNERS + r"(_?id)?", k, re.I) and len(arrays[k]) == n), None)
    if owner is not None:
        made.set("partition", f"natural:{owner}", f"one client per value of {owner}")
    else:
        made.set("partition", "dirichlet:0.3,min=2", "label skew; no array with client names was found")
        made.set("clients", max(2, min(10, n // 20)))
    made.set("model", "cnn" if arrays["x"].ndim > 2 else "mlp", "unskew models lists all models")


def _table(made: InferredConfig, path: Path, data: str, label: str | None) -> None:
    """Set fields for a table from the contents of its columns."""
    table = concatenate_tables(table_files(path)[0])
    n, columns = table.num_rows, list(table.column_names)
    images = [c for c in columns if is_image(table.column(c).type)]
    nested = [c for c in columns if c in images or is_list_type(table.column(c).type)]
    distinct = {c: n if c in images else _distinct(table.column(c)) for c in columns}
    named = [c for c in columns if metadata_class_names(table, c)]
    if label is not None and label not in columns:
        raise ConfigError(unknown_name("column", label, columns))
    guessed = (
        None
        if label
        else next(iter(named), None)
        or _label([c for c in columns if not table.column(c).null_count and c not in nested], distinct, n)
    )
    label = label or guessed
    if label is None:
        raise ConfigError(
            f"{path}: no column without missing values looks like a label (a few values that repeat). Set --label to "
            f"one of {', '.join(columns[:LONGEST_LIST])}{' ...' if len(columns) > LONGEST_LIST else '.'}"
        )
    if table.column(label).null_count:
        raise DataError(
            f"{path}: {table.column(label).null_count} of {n} rows have no value in the label column {label}. Remove "
            "these rows, or set --label to another column."
        )
    owner = next(
        (
            c
            for c in columns
            if c not in (label, *nested)
            and re.fullmatch(OWNERS + r"(_?(id|name|no))?", c, re.I)
            and 2 <= distinct[c] <= n // 10
        ),
        None,
    )
    guess = ", chosen by its name or its few values; --label sets another" if guessed else ""
    gaps = [
        c for c in columns if guessed and table.column(c).null_count and distinct[c] <= 1 + min(MOST_CLASSES, n // 4)
    ]
    made.seen.append(f"{n} rows, {len(columns)} columns; the label {label} has {distinct[label]} values{guess}")
    if gaps:
        made.seen.append(f"not considered as labels because of missing values: {', '.join(gaps)}")
    made.set("data", data)
    made.set("label", label, f"{distinct[label]} values; --label sets another column")
    if (
        label not in named
        and is_numeric(table.column(label).type)
        and (distinct[label] > MOST_CLASSES or _has_fractions(table.column(label)))
    ):
        made.set("task", "regression", "predict a number, not a class")
    if images:
        made.set("image", images[0], "the inputs are the images in this column")
        _image_size(made, [io.BytesIO(blob) for blob in image_bytes(table.column(images[0]), str(path), path.parent)])
        _owner(made, owner, distinct, table, label)
        made.set("model", "cnn", "unskew models lists all models")
        return
    rest = [c for c in columns if c not in (label, owner)]
    constant = [c for c in rest if c not in nested and _distinct(table.column(c).drop_null()) <= 1]
    rest = [c for c in rest if c not in constant]
    numbers = [c for c in rest if is_numeric(table.column(c).type)]
    texts = [c for c in rest if is_string(table.column(c).type)]
    categories = [c for c in texts if distinct[c] <= min(MOST_VALUES, n // 4)]
    dates = [c for c in rest if is_date(table.column(c).type)]
    identifiers = [c for c in numbers if is_identifier(table.column(c), c)]
    infinite = [c for c in numbers if c not in identifiers and _is_infinite(table.column(c))]
    _suspects(made, table, label, [c for c in numbers if c not in (*identifiers, *infinite)])
    text = max(texts, key=partial(_words, table), default=None)
    alone = len(rest) == len(texts) and not categories and "task" not in made.values
    if text is not None and alone and _words(table, text) >= WORDS:
        made.set("text", text, "each text is tokenized into words and word bigrams")
        _owner(made, owner, distinct, table, label)
        made.set("model", "text-mlp", "without download; hf:NAME is a pretrained model")
        made.set("optimizer", "adam")
        return
    left_out = [*constant, *identifiers, *infinite, *(c for c in texts if c not in categories)]
    if left_out:
        made.set("exclude", left_out, "for the reasons above")
        reasons = dict.fromkeys(identifiers, "a different number in every row")
        reasons |= dict.fromkeys(infinite, "infinite values")
        reasons |= dict.fromkeys(constant, "the same value in every row")
        made.seen += [f"excluded: {c}: {reasons.get(c) or _why_text(table.column(c))}" for c in left_out]
    group = next((c for c in left_out if re.fullmatch(GROUPS, c, re.I) and 1 < distinct[c] < n), None)
    if group is not None:
        made.set("split_by", group, f"{n} rows with {distinct[group]} values; rows with the same value are never split")
    if categories:
        made.set("categories", categories, "each value gets an embedding")
    if dates:
        made.set("dates", dates, "days since 1970")
    if any(table.column(c).null_count for c in [*numbers, *dates] if c not in identifiers):
        made.set("missing", "indicator", "missing numbers are replaced by the mean and marked by an additional input")
    _owner(made, owner, distinct, table, label)
    made.set("model", "table-mlp" if categories else "mlp", "unskew models lists all models")


def _owner(made: InferredConfig, owner: str | None, distinct: dict[str, int], table: Any, label: str) -> None:
    """Set the partition: by the column that names clients if there is one, otherwise by label or iid."""
    n = table.num_rows
    if owner is not None:
        made.set("partition", f"natural:{owner}", f"one client for each of the {distinct[owner]} values of {owner}")
        return
    kind = "iid" if "task" in made.values else "dirichlet:0.3,min=2"
    skew = "" if "task" in made.values else "label skew; "
    made.set("partition", kind, f"{skew}no column with client names was found")
    made.set("clients", max(2, min(10, n // 40)))
    may = [c for c in distinct if c != label and is_string(table.column(c).type) and 2 <= distinct[c] <= n // 10]
    if may:
        made.seen.append(
            f"if one of these columns names the clients, set partition: natural:COLUMN to it: {', '.join(may)}"
        )


def _suspects(made: InferredConfig, table: Any, label: str, numbers: list[str]) -> None:
    """Report integer columns that may be category codes, and columns that are highly correlated with the label."""
    y, coded = table.column(label), []
    known = y.cast("float64", safe=False).to_numpy() if is_numeric(y.type) else None
    if known is None and len(y.unique()) == 2:
        known = np.unique(y.to_numpy().astype(str), return_inverse=True)[1].reshape(-1).astype(float)
    for column in numbers:
        values = table.column(column).cast("float64", safe=False).to_numpy()
        finite = np.isfinite(values)
        codes = np.unique(values[finite])
        if 3 <= len(codes) <= CODES and not (codes % 1).any():
            coded.append(column)
        if known is not None and len(codes) > 1 and np.ptp(known[finite]) > 0:
            correlation = abs(np.corrcoef(values[finite], known[finite])[0, 1])
            if correlation >= NEARLY:
                made.seen.append(
                    f"{column} is nearly the label (correlation {correlation:.2f}); exclude it if its value is not "
                    "known at prediction time"
                )
    if coded:
        made.seen.append(
            f"integers with few values: {', '.join(coded)}; add the columns that contain codes, not amounts, to "
            f"categories: [{', '.join(coded)}]"
        )


def _words(table: Any, column: str) -> float:
    """Return the mean number of words in a string column."""
    values = table.column(column).drop_null().to_pylist()
    return sum(len(value.split()) for value in values) / max(1, len(values))


def _image_size(made: InferredConfig, images: Sequence[Path | io.BytesIO]) -> None:
    """Set the image size, unless all images have the same small size."""
    from PIL import UnidentifiedImageError

    sizes = set()
    for image in images:
        try:
            with open_image(image) as opened:
                sizes.add(opened.size)
        except UnidentifiedImageError:  # other files next to the images
            continue
        except (OSError, ValueError, SyntaxError) as error:
            name = f"The image {image}" if isinstance(image, Path) else "An image of the table"
            raise DataError(f"{name} cannot be read ({error}). Repair or remove it.") from error
    if len(sizes) == 1 and max(width_height := sizes.pop()) <= KEPT_SIDE:
        made.seen.append("all images have {} x {} pixels, so image_size is not set".format(*width_height))
    else:
        made.set("image_size", SIDE, "images are resized to this side length; larger images take longer")


def _distinct(column: Any) -> int:
    """Return the number of distinct values; for types that cannot be compared, such as lists, the number of rows."""
    import pyarrow as pa

    try:
        return len(column.unique())
    except pa.ArrowNotImplementedError:
        return len(column)


def _from_to(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _why_text(column: Any) -> str:
    """Return the reason why a string column is neither numeric nor categorical."""
    import pyarrow as pa

    if has_decimal_commas(column):
        return "numbers with decimal commas; see csv.decimal"
    bad, many = first_mismatch(column, pa.float64()), "too many different strings"
    numbers = sum(_is_number(value) for value in column.drop_null().to_pylist())
    return f"numbers, but {bad}; correct this value or leave it empty" if 2 * numbers > len(column) else many


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_infinite(column: Any) -> bool:
    return bool(np.isinf(column.cast("float64", safe=False).drop_null().to_numpy()).any())


def _has_fractions(column: Any) -> bool:
    values = column.cast("float64", safe=False).drop_null().to_numpy()
    return bool((values % 1 != 0).any())


def _label(columns: list[str], distinct: dict[str, int], n: int) -> str | None:
    """Return the most likely label column: the first with a typical name, or else the last with few values."""
    few = [c for c in columns if 2 <= distinct[c] <= max(2, min(MOST_CLASSES, n // 4))]
    named = [c for c in few if re.fullmatch(LABELS, c, re.I)]
    rest = [c for c in few if distinct[c] <= 20 and not re.fullmatch(OWNERS + r"(_?(id|name|no))?", c, re.I)]
    return named[0] if named else rest[-1] if rest else None


def _budget(made: InferredConfig) -> None:
    """Set the fields of training."""
    made.set("method", "fedavg", "unskew methods lists all; compositions such as fedprox:mu=0.1+scaffold are allowed")
    made.set("rounds", 20)
    made.set("local_epochs", 1, "passes over a client's data in each round; or local_steps")
    made.set("batch_size", 16)
    made.set(
        "lr",
        0.003 if "optimizer" in made.values else 0.05,
        "decrease it if the loss grows, increase it if it stagnates",
    )
    made.set("seed", 0, "random seed")
