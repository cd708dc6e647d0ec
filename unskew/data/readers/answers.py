"""Texts of which only a part counts: the answer to a prompt, or what an assistant says in a chat."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np

from unskew.data.packing import PADDING
from unskew.data.readers.tokenization import AnsweredText, Text, Tokenizer
from unskew.errors import DataError, short_repr
from unskew.tasks.classification import TRUNCATED

LOG = logging.getLogger("unskew")
ROLES = ("system", "user", "assistant", "tool")


def encode_answers(texts: Sequence[Text], tokenizer: Tokenizer, where: str) -> list[AnsweredText]:
    """Tokenize prompts and answers; the tokens of the answer and the end token count.

    A line break separates prompt and answer. They are tokenized separately, so that no token belongs to both.

    Args:
        texts: Pairs of a prompt and an answer.
        tokenizer: Tokenizer.
        where: Name of the data, for errors.

    Raises:
        DataError: If an answer is empty, or the tokenizer has no end token.
    """
    empty = next((row for row, (_, answer) in enumerate(texts) if not answer.strip()), None)
    if empty is not None:
        raise DataError(f"{where}: row {empty} has an empty answer. Add an answer or remove the row.")
    prompts = tokenizer.join([(prompt, "") for prompt, _ in texts])
    answers = tokenizer.answers([answer for _, answer in texts])
    texts_of_both = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(prompt) > 1 and prompt[-1] == answer[-1]:
            prompt = prompt[:-1]  # some tokenizers end every text
        texts_of_both.append(AnsweredText(prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    return texts_of_both


def read_chats(column: Any, name: str, where: str) -> list[list[dict[str, Any]]]:
    """Return the messages of each row with all of their entries, such as ``tool_calls``; entries that are null are left out.

    The content of a message with ``tool_calls`` may be null or missing; it is then empty.

    Args:
        column: Column of lists of messages with the entries ``role`` and ``content``.
        name: Name of the column.
        where: Name of the data, for errors.

    Raises:
        DataError: If a row contains no list of messages, or no message of an assistant.
    """
    chats: list[list[dict[str, Any]]] = []
    for row, messages in enumerate(column.to_pylist()):
        if not isinstance(messages, list) or not messages:
            raise DataError(
                f"{where}: row {row} of the column {name!r} has {type(messages).__name__}, not a list of messages such as "
                '[{"role": "user", "content": "Hello"}].'
            )
        chat = [without_nulls(message) if isinstance(message, Mapping) else {} for message in messages]
        for entries in chat:
            if entries.get("tool_calls"):
                entries.setdefault("content", "")
            day = find_date(entries)
            if day is not None:
                raise DataError(
                    f"{where}: row {row} of the column {name!r} has a message with {day}, which is read as a date, not as "
                    "text. Use a Parquet file, in which it is text."
                )
            wrong = "role" if entries.get("role") not in ROLES else "content"
            if wrong == "role" or not isinstance(entries.get("content"), str):
                raise DataError(
                    f"{where}: row {row} of the column {name!r} has a message with the {wrong} "
                    f"{short_repr(entries.get(wrong))}. A message has a role ({', '.join(ROLES)}) and a content, which is "
                    "text."
                )
        if all(message["role"] != "assistant" for message in chat):
            raise DataError(
                f"{where}: row {row} of the column {name!r} has no message of the assistant, so nothing can be learned from "
                "it. Remove the row."
            )
        chats.append(chat)
    return chats


def without_nulls(value: Any) -> Any:
    """Return a value without entries that are null, at any depth.

    In a column of a table, all messages have the same entries, and those that a message did not have are null.

    >>> without_nulls({"role": "user", "tool_calls": None, "parts": [{"a": 1, "b": None}]})
    {'role': 'user', 'parts': [{'a': 1}]}
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def find_date(value: Any) -> date | None:
    """Return a date or time in an entry of a message, at any depth; None if there is none."""
    if isinstance(value, Mapping | list):
        entries = value.values() if isinstance(value, Mapping) else value
        return next((day for day in map(find_date, entries) if day is not None), None)
    return value if isinstance(value, date) else None


def cut_answered(
    texts: Sequence[AnsweredText], block: int, where: str
) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Return inputs and targets of texts, truncated to ``block`` tokens; texts without any target left are dropped.

    Args:
        texts: Tokenized texts.
        block: Maximum number of tokens per text.
        where: Name of the data, for messages.

    Returns:
        The inputs, the next tokens with -1 for those that do not count, and the index of each row's text. One -2 instead of
        -1 marks a text of which tokens that count are cut off.

    Raises:
        DataError: If no text has a target left.
    """
    inputs: list[list[int]] = []
    targets: list[list[int]] = []
    origin: list[int] = []
    truncated = 0
    for number, (ids, counts) in enumerate(texts):
        cut = any(counts[block:])
        truncated += cut
        if any(counts[1:block]):
            x = ids[:block][:-1]
            y = [token if counted else PADDING for token, counted in zip(ids[1:block], counts[1:block], strict=True)]
            if cut and PADDING not in y:
                x, y = [*x, PADDING], [*y, PADDING]
            if cut:
                y[y.index(PADDING)] = TRUNCATED
            inputs.append(x)
            targets.append(y)
            origin.append(number)
    empty = sum(not any(counts[1:]) for _, counts in texts)
    if empty == len(texts):
        raise DataError(
            f"{where}: the assistant says nothing in any text, so nothing can be learned. Fill in the messages of the "
            "assistant, or check the generation blocks of the chat template."
        )
    if not inputs:
        raise DataError(
            f"{where}: no text has an answer within its first {block} tokens. Set text.block to a larger number."
        )
    if empty:
        LOG.warning(
            "%s: the assistant says nothing in %d of %d texts, which are dropped. Fill in the messages of the assistant, or "
            "remove these texts.",
            where,
            empty,
            len(texts),
        )
    if truncated:
        LOG.warning(
            "%s: %d of %d answers do not end within the first %d tokens and are truncated; %d of them are dropped, because "
            "nothing remains. Set text.block to a larger number.",
            where,
            truncated,
            len(texts),
            block,
            len(texts) - len(inputs) - empty,
        )
    return inputs, targets, np.array(origin)
