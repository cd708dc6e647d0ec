"""Text data sets: each row's text or pair of texts is tokenized, for classification or for next-token prediction."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unskew.data.csv_format import DETECTED, CsvSpec
from unskew.data.loading_warnings import CachedLoader
from unskew.data.packing import PADDING
from unskew.data.readers.answers import cut_answered, encode_answers, read_chats
from unskew.data.readers.arrow import pa
from unskew.data.readers.arrow_io import read_tables
from unskew.data.readers.cell_types import ColumnUses
from unskew.data.readers.class_names import metadata_class_names
from unskew.data.readers.column_roles import is_string
from unskew.data.readers.files import (
    HubDataset,
    absolute_path,
    concatenate_parts,
    file_tables,
    files_stamp,
    hub_tables,
    local_files,
)
from unskew.data.readers.labels import read_labels
from unskew.data.readers.tables import SampleTable, Source, metadata_columns, train_test_tables
from unskew.data.readers.tokenization import Text, Tokenizer, make_tokenizer
from unskew.data.sentences import sentences
from unskew.data.spec import Split, TextSpec
from unskew.data.validation import check_classes
from unskew.errors import ConfigError, DataError, abbreviate, unknown_name
from unskew.progress import report_progress

LOG = logging.getLogger("unskew")
TEXTS = ("multi_nli", "sentences", "text")
PAIR = ("premise", "hypothesis")
MULTI_NLI = HubDataset("nyu-mll/multi_nli", None, "", "label", test="validation_matched")
CHUNK = 10_000


def is_text(name: str) -> bool:
    """Return whether a data source contains texts."""
    return name in (*TEXTS, "nyu-mll/multi_nli") or name.startswith("text:")


def load_texts(
    name: str,
    *,
    path: str | Path | None,
    label: str | None,
    text: TextSpec,
    csv: CsvSpec = DETECTED,
    split: Split | None = None,
    divides: str | None = None,
) -> Source:
    """Load and tokenize a text data set. The two most recent data sets are cached until their files change.

    Without a label the task is ``language``: ``x [n, L]`` are token ids and ``y [n, L]`` the next tokens, both views of
    one array; a text longer than ``block`` tokens is cut into several rows, which no split or partition separates. With a
    label the task is classification of ``x [n, L]``, and longer texts are truncated. Rows are padded at the end with -1 to
    the length of the longest.

    Args:
        name: ``text:PATH``, ``multi_nli`` or ``sentences``.
        path: Local files; for ``text``, a .csv, .jsonl or .parquet file, or a folder with train and test files.
        label: Label column; None for language modeling.
        text: Columns of texts, tokenizer, and maximum number of tokens per row. With prompts and answers, or chats, only the
            answers are targets.
        csv: Format of CSV files.
        split: Columns of the split into training and test rows, or None.
        divides: Column that decides the partition, for a warning if all rows of a value are dropped; or None.

    Raises:
        ConfigError: If an argument is missing, or arguments contradict each other.
        DataError: If the files are not valid.
    """
    if name.startswith("text:"):
        if path is not None:
            raise ConfigError(f"{name!r} already contains a path. Remove path={str(path)!r}, or use the name 'text'.")
        name, path = "text", name.removeprefix("text:")
    name = name.removeprefix("nyu-mll/")
    if name == "text" and not path:
        raise ConfigError(
            "The data set 'text' requires a path: text:PATH with a .csv, .jsonl or .parquet file, or a folder."
        )
    if name == "sentences" and path is not None:
        raise ConfigError("The data set 'sentences' is generated. Remove the path.")
    if text.tokenizer is None:
        raise ConfigError(
            "Texts require a tokenizer. Use the model text-mlp (texts with a label) or hf:NAME, which include one, "
            "or set text.tokenizer (--tokenizer) to words, bytes, a name on the Hugging Face Hub, or a folder."
        )
    if len(text.columns) > 2:
        raise ConfigError(f"text.columns must be one column or a pair, not {', '.join(text.columns)}.")
    if text.answers_only and label is not None:
        raise ConfigError(
            f"label={label} is for the classification of texts, but {' and '.join(text.used_columns)} are for a language "
            "model. Remove one of them."
        )
    if text.pack and label is not None:
        raise ConfigError(
            "text.pack joins texts of a language model, but label is for classification. Remove one of them."
        )
    where, folder = absolute_path(path), Path(text.tokenizer).expanduser()
    tokenizer_stamp = files_stamp(folder) if folder.is_dir() else None
    request = TextRequest(name, where, label, text.model_copy(update={"pack": False}), csv, split)
    source, lost = load_cached(request, files_stamp(where), tokenizer_stamp)
    if divides is not None and lost.get(divides):
        LOG.warning(
            "%s: all texts of %s (column %s) are dropped, because no token that counts remains, so the partition has no data "
            "of them. Set text.block to a larger number, or remove these rows.",
            source.name,
            abbreviate(lost[divides]),
            divides,
        )
    return source


class TextRequest(NamedTuple):
    """Validated arguments of ``load_texts``."""

    kind: str
    path: Path | None
    label: str | None
    text: TextSpec
    csv: CsvSpec
    split: Split | None


def load_and_tokenize(
    request: TextRequest, stamp: tuple[int, int, int], tokenizer_stamp: tuple[int, int, int] | None
) -> tuple[Source, dict[str, list[str]]]:
    """Load and tokenize a text data set; a function for a cache, whose key includes the stamps to detect changes.

    Args:
        request: Arguments of ``load_texts``.
        stamp: Stamp of the data files.
        tokenizer_stamp: Stamp of the tokenizer's folder, or None.

    Returns:
        The data set, and by column the values all of whose training rows were dropped.
    """
    kind, path, label, text, csv, split = request
    columns, block = text.used_columns, text.block
    own: tuple[str, ...] = columns or (("text",) if kind == "text" else PAIR)
    uses = ColumnUses(
        labels=() if label is None else (label,),
        dates=() if split is None or split.time is None else (split.time,),
        kinds=tuple((column, "text") for column in own),
    )
    parts, name = text_tables(kind, path, csv, uses)
    for where, part in parts.items():
        if part.num_rows == 0:
            raise DataError(f"{name}: {where} are empty.")
        for column in (*own, *([] if label is None else [label])):
            if column not in part.column_names:
                hint = "" if columns or column == label else " Set text.columns to the text column."
                raise DataError(f"{name}, {where}: {unknown_name('column', column, part.column_names)}{hint}")
    if tokenizer_stamp is not None:
        make_tokenizer.cache_clear()  # the tokenizer in the folder may have changed
    tokens = make_tokenizer(str(text.tokenizer))
    beside = [metadata_columns(part, {*own, label}) for part in parts.values()]
    names: tuple[str, ...] = ("texts",)
    if text.answers_only:
        cut = [marked_rows(part, text, own, tokens, f"{name}, {where}") for where, part in parts.items()]
        inputs, targets = pad_rows([x for x, _, _ in cut]), pad_rows([y for _, y, _ in cut])
        tables = [
            SampleTable(x, y, {n: values[origin] for n, values in further.items()})
            for x, y, (_, _, origin), further in zip(inputs, targets, cut, beside, strict=True)
        ]
        lost = lost_values(beside[0], cut[0][2])
        return Source(name, *train_test_tables(tables, split), names, tokens.size, "language"), lost
    texts = {where: row_texts(part, own, f"{name}, {where}") for where, part in parts.items()}
    if label is None:
        rows = {where: cut_blocks(some, tokens, block, f"{name}, {where}") for where, some in texts.items()}
        filled = pad_rows([ids for ids, _ in rows.values()])
        tables = [
            SampleTable(
                ids[:, :-1],
                ids[:, 1:],
                {n: values[origin] for n, values in further.items()},
                origin if len(np.unique(origin)) < len(origin) else None,
            )
            for ids, (_, origin), further in zip(filled, rows.values(), beside, strict=True)
        ]
        classes, task = tokens.size, "language"
        lost = lost_values(beside[0], next(iter(rows.values()))[1])
    else:
        labels = read_labels(
            {f"{name}, {where}": part.column(label) for where, part in parts.items()},
            label,
            metadata_class_names(next(iter(parts.values())), label),
        )
        filled = pad_rows([encode_for_classification(some, tokens, block) for some in texts.values()])
        tables = [
            SampleTable(x, torch.from_numpy(np.asarray(y)), further)
            for x, y, further in zip(filled, labels.ys, beside, strict=True)
        ]
        names = labels.names
        classes = len(labels.names)
        task = labels.task
        lost = {}
        check_classes(names, name, task)
        check_class_indices(tables, classes, label, name)
    return Source(name, *train_test_tables(tables, split), names, classes, task), lost


load_cached = CachedLoader(load_and_tokenize, size=2)
"""Loads and tokenizes a text data set, with a cache of the two most recent ones."""


def text_tables(kind: str, path: Path | None, csv: CsvSpec, uses: ColumnUses) -> tuple[dict[str, Any], str]:
    """Return the rows of each part, training part first, and the name of the data set.

    Args:
        kind: Name of the source.
        path: File or folder, or None.
        csv: Format of CSV files.
        uses: Uses of the columns.
    """
    if kind == "sentences":
        parts = [pa.Table.from_pylist(sentences(seed, each)) for seed, each in ((0, 800), (1, 200))]
        return dict(zip(("the training rows", "the test rows"), parts, strict=True)), kind
    if kind == "multi_nli":
        if path is None:
            train, test = hub_tables(MULTI_NLI)
        else:
            files = local_files(kind, MULTI_NLI, path)
            every = [*files["train"], *files["test"]]
            train, test = concatenate_parts(read_tables(every), every, len(files["train"]))
        return {"the training rows": train, "the test rows": test}, kind
    assert path is not None
    train, test = file_tables(path, csv, uses)
    name = path.stem if path.stem != "train" else path.parent.name
    return {"the training rows": train} | ({} if test is None else {"the test rows": test}), name


def row_texts(table: Any, columns: Sequence[str], where: str) -> list[Text]:
    """Return the texts of each row.

    Args:
        table: Rows of the data.
        columns: Names of the text columns.
        where: Name of the data, for errors.

    Raises:
        DataError: If a column does not contain strings, or a text is missing or empty.
    """
    for column in columns:
        if not is_string(table.column(column).type):
            raise DataError(f"{where}: the column {column!r} contains {table.column(column).type}, not text.")
        if table.column(column).null_count:
            raise DataError(f"{where}: the column {column!r} has {table.column(column).null_count} missing texts.")
    texts = list(zip(*(table.column(column).to_pylist() for column in columns), strict=True))
    empty = next((row for row, text in enumerate(texts) if not any(part.strip() for part in text)), None)
    if empty is not None:
        raise DataError(f"{where}: row {empty} has no text in {', '.join(columns)}. Add a text or remove the row.")
    return texts


def cut_blocks(texts: list[Text], tokenizer: Tokenizer, block: int, where: str) -> tuple[list[list[int]], np.ndarray]:
    """Tokenize texts and split them into rows of at most ``block`` token ids.

    Rows with a single token are dropped, because they have no next token to predict.

    Args:
        texts: Texts to tokenize.
        tokenizer: Tokenizer.
        block: Maximum number of tokens per row.
        where: Name of the data, for errors.

    Returns:
        The rows, and the index of each row's text.
    """
    rows: list[list[int]] = []
    origin: list[int] = []
    for first in range(0, len(texts), CHUNK):
        for number, ids in enumerate(tokenizer.join(texts[first : first + CHUNK]), start=first):
            blocks = [ids[at : at + block] for at in range(0, len(ids), block)]
            full_blocks = [ids_block for ids_block in blocks if len(ids_block) > 1]
            rows += full_blocks
            origin += [number] * len(full_blocks)
    if not rows:
        raise DataError(f"{where}: no text has two or more tokens, so there is no next token to predict.")
    return rows, np.array(origin)


def lost_values(columns: Mapping[str, np.ndarray], origin: np.ndarray) -> dict[str, list[str]]:
    """Return the values of each column that no remaining row has; columns without such values are omitted.

    Args:
        columns: Columns of all texts by name.
        origin: Index of each remaining row's text.
    """
    lost = {}
    for name, values in columns.items():
        if len(set(origin.tolist())) < len(values):
            lost[name] = sorted({*map(str, values.tolist())} - {*map(str, values[origin].tolist())})
    return {name: values for name, values in lost.items() if values}


def marked_rows(
    table: Any, text: TextSpec, columns: Sequence[str], tokenizer: Tokenizer, where: str
) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Return inputs, targets, and the index of each row's text, for a language model.

    Args:
        table: Rows of the data.
        text: Columns of prompts and answers, or of chats, and maximum number of tokens per row.
        columns: Columns with texts.
        tokenizer: Tokenizer.
        where: Name of the data, for messages.
    """
    if text.messages is not None:
        encoded = tokenizer.chats(read_chats(table.column(text.messages), text.messages, where))
    else:
        encoded = encode_answers(row_texts(table, columns, where), tokenizer, where)
    return cut_answered(encoded, text.block, where)


def encode_for_classification(texts: list[Text], tokenizer: Tokenizer, block: int) -> list[list[int]]:
    """Tokenize texts for classification, with at most ``block`` token ids per text.

    Args:
        texts: Texts to tokenize.
        tokenizer: Tokenizer.
        block: Maximum number of tokens per text.
    """
    encoded: list[list[int]] = []
    for first in range(0, len(texts), CHUNK):
        report_progress("texts read", first, len(texts))
        encoded += tokenizer.pairs(texts[first : first + CHUNK], block)
    return encoded


def pad_rows(parts: Sequence[Sequence[list[int]]]) -> list[Tensor]:
    """Return the rows of each part as an int64 tensor ``[n, L]``, padded with -1 to the longest row of all parts."""
    longest = max(len(row) for rows in parts for row in rows)
    arrays = []
    for rows in parts:
        lengths = np.array([len(row) for row in rows])
        array = np.full((len(rows), longest), PADDING, np.int64)
        array[np.arange(longest) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
        arrays.append(torch.from_numpy(array))
    return arrays


def check_class_indices(tables: Sequence[SampleTable], classes: int, label: str, name: str) -> None:
    """Validate that class indices are in range; some data sets have -1 for unlabeled rows.

    Args:
        tables: Samples of each part.
        classes: Number of classes.
        label: Name of the label column.
        name: Name of the data, for the error.

    Raises:
        DataError: If a class index is out of range.
    """
    for table in tables:
        if table.y.dim() == 1 and (int(table.y.min()) < 0 or int(table.y.max()) >= classes):
            raise DataError(f"{name}: the label column {label!r} contains numbers outside its {classes} classes.")
