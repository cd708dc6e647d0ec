"""A first configuration for somebody's own data, written after looking at them: ``unskew init``."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from unskew.config.loader import experiment
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.data.readers.column_roles import has_decimal_commas, is_date, is_identifier, is_numeric, is_string
from unskew.data.readers.encoders import first_mismatch
from unskew.data.readers.files import class_folders, concatenate_tables, table_files
from unskew.data.readers.images import image_bytes, is_image
from unskew.data.readers.labels import is_list_type, metadata_class_names
from unskew.data.sources.registry import SOURCES
from unskew.data.spec import TABLES
from unskew.errors import ConfigError, DataError, unknown_name

LABELS = r"(label|labels|class|target|y|outcome|diagnosis|species|category|result|survived|type)"
GROUPS = r"(.*[_ .-])?(id|key|code|patient|subject)|[a-z]+Id|[a-z]+ID"
"""Names of columns that tell which rows belong to one person or thing."""
OWNERS = (
    r"(client|site|hospital|clinic|ward|user|patient|writer|device|cent(er|re)|institution|station|plant|machine|branch|"
    r"shop|school|region|subject|speaker|source|domain|district|airline|product|drawer|author|person|participant|role)"
)
MOST_CLASSES, MOST_VALUES = 100, 50
"""A number with more values is predicted as a number; a text with more of them is not a category."""
RARE = 0.4
"""A class is rare that has less than this share of what each would have if all had as many."""
SIDE, KEPT_SIDE = 32, 64
"""Images are brought to the first side, unless all have one size and no side is above the second: models are small."""
CODES, WORDS, NEARLY = 12, 3, 0.9
"""Integers of this many values may be codes; texts have this many words on average; a label has a near-duplicate from this
correlation on."""


@dataclass
class InferredConfig:
    """Inferred configuration and the observations behind it.

    Attributes:
        values: Fields of the experiment with their values.
        why: A comment for some of them.
        seen: Lines on what the data hold.
    """

    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, why: str = "") -> None:
        """Add a field.

        Args:
            name: Name of the field.
            value: Value of the field.
            why: Reason that is printed.
        """
        self.values[name] = value
        self.why[name] = why

    def text(self, command: str) -> str:
        """The file."""
        lines = [
            f"# Written by: {command}",
            "# Every field that is not named here has its default; unskew run prints all of them into config.yaml of its",
            "# folder, and the page on the command line explains them.",
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
    """A configuration that runs as it is.

    Args:
        data: A file of a table (.csv, .jsonl, .parquet), of arrays (.npz), a folder of images or of tables, or the name of a
            data source; the digits if None.
        label: The label column of a table, where the guess would be wrong.
        seed: Of the partition that is tried out.

    Raises:
        ConfigError: There is no such data, or its label cannot be guessed.
        DataError: The data cannot be used.
    """
    inferred = InferredConfig()
    data = data if data is None else data.removeprefix("table:")
    path = Path(data).expanduser() if data else Path("digits")
    if data is not None and path.exists():
        _look(inferred, path, data, label)
    elif data is None or data.partition(":")[0] in SOURCES:
        inferred.set("data", data or "digits", "a data source that unskew knows")
        _images(inferred)
    else:
        raise ConfigError(
            f"There is no file or folder {data}, and as a name: {unknown_name('data set', data, SOURCES)}"
        )
    if label is not None and "label" not in inferred.values:
        raise ConfigError(f"--label names a column of a table, but {data or 'digits'} is none.")
    _budget(inferred)
    fed = federation_of(experiment(inferred.values).data_spec, seed)  # it runs as it is, or says why not
    sizes, names = fed.sizes, fed.label_distribution()[1]
    classes = f", of {len(names)} classes: {', '.join(map(str, names[:8]))}{', ...' if len(names) > 8 else ''}"
    inferred.seen.append(
        f"{len(fed.clients)} clients hold {_from_to(int(sizes.min()), int(sizes.max()))} training samples each"
        f"{classes if fed.objective.labeled else ''}"
    )
    if fed.task == "classification":
        _imbalance(inferred, fed)
    return inferred


def _imbalance(made: InferredConfig, fed: Federation) -> None:
    """Further figures where a class is so rare that the accuracy says little."""
    counts = np.asarray(fed.label_distribution()[0]).sum(0)
    least = int(counts.argmin())
    share = counts[least] / counts.sum()
    if share * len(counts) >= RARE or len(counts) > MOST_VALUES:
        return
    made.set("objective", "auprc", "judges tuning, stopping and comparison; of rare classes the accuracy says little")
    made.set("metrics", ["auroc", "auprc", "balanced_accuracy"], "further metrics")
    made.set(
        "class_weights", "balanced", "rare classes count more in the loss; leave it out for probabilities as they are"
    )
    made.seen.append(
        f"the class {fed.label_distribution()[1][least]} has {share:.0%} of the samples: objective, metrics and "
        "class_weights are set for that"
    )


def _look(made: InferredConfig, path: Path, data: str, label: str | None) -> None:
    """Fields for data that lie somewhere."""
    if path.is_file() and path.suffix.lower() == ".npz":
        made.set("data", f"npz:{data}", "arrays x and y, and x_test and y_test if they are there")
        _arrays(made, path)
    elif path.is_file() and path.suffix.lower() in TABLES:
        _table(made, path, data, label)
    elif path.is_dir() and _is_table_folder(path):
        _table(made, path, f"table:{data}", label)
    elif path.is_dir():
        parts = class_folders(path)  # says what such a folder needs
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
    """Set partition and model for images whose owners are unknown."""
    made.set("partition", "dirichlet:0.3,min=2", "label skew; iid, classes:2 or natural:COLUMN are others")
    made.set("clients", max(2, min(10, images // 20)))
    texts = made.values["data"] in ("sentences", "multi_nli") or str(made.values["data"]).startswith("text")
    if texts:
        raise ConfigError(
            "init looks at files, not at names of texts: write data, text, label and model: text-mlp or hf:NAME yourself."
        )
    flat = made.values["data"] == "gaussians"
    made.set("model", "mlp" if flat else "cnn", "unskew models lists others")


def _arrays(made: InferredConfig, path: Path) -> None:
    """Fields for a file of arrays."""
    from unskew.data.sources.npz import load_arrays

    arrays = load_arrays(path)
    n = len(arrays["y"])
    made.seen.append(f"x {arrays['x'].shape}, y {arrays['y'].shape}")
    owner = next((k for k in arrays if re.fullmatch(OWNERS + r"(_?id)?", k, re.I) and len(arrays[k]) == n), None)
    if owner is not None:
        made.set("partition", f"natural:{owner}", f"a client for each value of {owner}")
    else:
        made.set("partition", "dirichlet:0.3,min=2", "label skew; the file has no array that names clients")
        made.set("clients", max(2, min(10, n // 20)))
    made.set("model", "cnn" if arrays["x"].ndim > 2 else "mlp", "unskew models lists others")


def _table(made: InferredConfig, path: Path, data: str, label: str | None) -> None:
    """Fields for a table, after a look at its columns."""
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
            f"{path}: no column without gaps looks like a label, few values that repeat; name it with --label: "
            f"{', '.join(columns)}."
        )
    if table.column(label).null_count:
        raise DataError(
            f"{path}: {table.column(label).null_count} of {n} rows have no value of the label {label}; leave them out, or "
            "name another column with --label."
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
    guess = ", taken because of its name or its few values; name another with --label" if guessed else ""
    gaps = [
        c for c in columns if guessed and table.column(c).null_count and distinct[c] <= 1 + min(MOST_CLASSES, n // 4)
    ]
    made.seen.append(f"{n} rows, {len(columns)} columns; the label {label} has {distinct[label]} values{guess}")
    if gaps:
        made.seen.append(f"columns with gaps were not thought of as the label: {', '.join(gaps)}")
    made.set("data", data)
    made.set("label", label, f"{distinct[label]} values; another one with --label")
    if (
        label not in named
        and is_numeric(table.column(label).type)
        and (distinct[label] > MOST_CLASSES or _has_fractions(table.column(label)))
    ):
        made.set("task", "regression", "a number is predicted, not a class")
    if images:
        made.set("image", images[0], "the inputs are these images")
        _image_size(made, [io.BytesIO(blob) for blob in image_bytes(table.column(images[0]), str(path), path.parent)])
        _owner(made, owner, distinct, table, label)
        made.set("model", "cnn", "unskew models lists others")
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
        made.set("text", text, "each text becomes words and pairs of words")
        _owner(made, owner, distinct, table, label)
        made.set("model", "text-mlp", "needs no download; hf:NAME is a pretrained one")
        made.set("optimizer", "adam")
        return
    left_out = [*constant, *identifiers, *infinite, *(c for c in texts if c not in categories)]
    if left_out:
        made.set("exclude", left_out, "left out, for the reasons above")
        reasons = dict.fromkeys(identifiers, "another number in every row") | dict.fromkeys(infinite, "infinite values")
        reasons |= dict.fromkeys(constant, "the same value in every row")
        made.seen += [f"left out: {c}: {reasons.get(c) or _why_text(table.column(c))}" for c in left_out]
    group = next((c for c in left_out if re.fullmatch(GROUPS, c, re.I) and 1 < distinct[c] < n), None)
    if group is not None:
        made.set(
            "split_by", group, f"{n} rows of {distinct[group]} values: rows of one value stay on one side of a split"
        )
    if categories:
        made.set("categories", categories, "each value gets an embedding")
    if dates:
        made.set("dates", dates, "days since 1970")
    if any(table.column(c).null_count for c in [*numbers, *dates] if c not in identifiers):
        made.set("missing", "indicator", "numbers are missing: the mean is filled in, and a further input says so")
    _owner(made, owner, distinct, table, label)
    made.set("model", "table-mlp" if categories else "mlp", "unskew models lists others")


def _owner(made: InferredConfig, owner: str | None, distinct: dict[str, int], table: Any, label: str) -> None:
    """Set the partition: by the column that names clients, or else by label."""
    n = table.num_rows
    if owner is not None:
        made.set("partition", f"natural:{owner}", f"a client for each of the {distinct[owner]} values of {owner}")
        return
    kind = "iid" if "task" in made.values else "dirichlet:0.3,min=2"
    skew = "" if "task" in made.values else "label skew; "
    made.set("partition", kind, f"{skew}no column looks as if it named clients")
    made.set("clients", max(2, min(10, n // 40)))
    may = [c for c in distinct if c != label and is_string(table.column(c).type) and 2 <= distinct[c] <= n // 10]
    if may:
        made.seen.append(
            f"if one of these columns names the clients, write partition: natural:COLUMN: {', '.join(may)}"
        )


def _suspects(made: InferredConfig, table: Any, label: str, numbers: list[str]) -> None:
    """Report integers that may be codes of categories, and columns that are nearly the label."""
    y, coded = table.column(label), []
    known = y.cast("float64", safe=False).to_numpy() if is_numeric(y.type) else None
    if known is None and len(y.unique()) == 2:
        known = np.unique(y.to_numpy().astype(str), return_inverse=True)[1].reshape(-1).astype(float)
    for column in numbers:
        values = table.column(column).cast("float64", safe=False).to_numpy()
        there = np.isfinite(values)
        codes = np.unique(values[there])
        if 3 <= len(codes) <= CODES and not (codes % 1).any():
            coded.append(column)
        if known is not None and len(codes) > 1 and np.ptp(known[there]) > 0:
            correlation = abs(np.corrcoef(values[there], known[there])[0, 1])
            if correlation >= NEARLY:
                made.seen.append(
                    f"{column} is nearly the label (correlation {correlation:.2f}): exclude it if it is not known "
                    "beforehand"
                )
    if coded:
        made.seen.append(
            f"integers of few values: {', '.join(coded)}; those that are codes, not amounts, belong in categories: "
            f"[{', '.join(coded)}]"
        )


def _words(table: Any, column: str) -> float:
    """Return the mean number of words in a column of text."""
    values = table.column(column).drop_null().to_pylist()
    return sum(len(value.split()) for value in values) / max(1, len(values))


def _image_size(made: InferredConfig, images: Sequence[Path | io.BytesIO]) -> None:
    """Set the size of images, unless all have one that small models take."""
    from PIL import Image, UnidentifiedImageError

    sizes = set()
    for image in images:
        try:
            with Image.open(image) as opened:
                sizes.add(opened.size)
        except UnidentifiedImageError:  # such as a list of files next to the images
            continue
    if len(sizes) == 1 and max(width_height := sizes.pop()) <= KEPT_SIDE:
        made.seen.append("all images have {} x {} pixels, so no image_size is set".format(*width_height))
    else:
        made.set("image_size", SIDE, "images are brought to this side; larger ones take longer")


def _distinct(column: Any) -> int:
    """Return the number of different values, or of all for a type such as a list, whose values are not compared."""
    import pyarrow as pa

    try:
        return len(column.unique())
    except pa.ArrowNotImplementedError:
        return len(column)


def _from_to(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _why_text(column: Any) -> str:
    """Why a column of text is neither numbers nor categories."""
    import pyarrow as pa

    if has_decimal_commas(column):
        return "numbers with decimal commas; see csv.decimal"
    bad, many = first_mismatch(column, pa.float64()), "too many different texts"
    numbers = sum(_is_number(value) for value in column.drop_null().to_pylist())
    return f"numbers, but {bad}; empty it or mend it" if 2 * numbers > len(column) else many


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
    """The column that is most likely predicted: by its name, or else the last one with few values."""
    few = [c for c in columns if 2 <= distinct[c] <= max(2, min(MOST_CLASSES, n // 4))]
    named = [c for c in few if re.fullmatch(LABELS, c, re.I)]
    rest = [c for c in few if distinct[c] <= 20 and not re.fullmatch(OWNERS + r"(_?(id|name|no))?", c, re.I)]
    return named[0] if named else rest[-1] if rest else None


def _budget(made: InferredConfig) -> None:
    """Fields of the training."""
    made.set("method", "fedavg", "unskew methods lists all; sums such as fedprox:mu=0.1+scaffold are methods, too")
    made.set("rounds", 20)
    made.set("local_epochs", 1, "passes over a client's data in each round; or local_steps")
    made.set("batch_size", 16)
    made.set(
        "lr", 0.003 if "optimizer" in made.values else 0.05, "too large if the loss grows, too small if nothing happens"
    )
    made.set("seed", 0, "decides every random draw")
