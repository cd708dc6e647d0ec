"""Tokenizers: texts, or pairs of texts, to lists of token ids."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

from unskew.data.readers.hub import hub_or_cache, unreachable
from unskew.errors import DataError

Text = tuple[str, ...]
MOST = 1 << 30  # tokens, where texts are not to be cut


class Tokenizer(Protocol):
    """Turns texts into ids from 0 to ``size - 1``."""

    size: int

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """The ids of each text; the two of a pair with a line break between them."""

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """The ids of each text or pair as a classifier is used to it, at most so many.

        Args:
            texts: Texts, or pairs of texts.
            most: Largest number of tokens.
        """


class ByteTokenizer:
    """The bytes of a text's UTF-8; 256 stands before a text and between the two of a pair. Needs no download."""

    size = 257

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the ids of a text and its separators."""
        return [[256, *"\n".join(text).encode()] for text in texts]

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return ids of text pairs, truncated at the end to ``most``.

        Args:
            texts: Texts, or pairs of texts.
            most: Largest number of tokens.
        """
        return [[i for part in text for i in (256, *part.encode())][:most] for text in texts]


class WordTokenizer:
    """Words, marks and pairs of neighboring words, hashed to 16,384 ids. Needs no download and no vocabulary.

    The pairs follow the words, so a long text loses its pairs first.
    """

    size = 1 << 14

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Raise an error: ids of pairs of words do not follow one another."""
        raise DataError("The tokenizer words is for texts with labels; to predict the next token, use bytes.")

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return ids of text pairs; the two texts have ids of their own.

        Args:
            texts: Texts, or pairs of texts.
            most: Largest number of tokens.
        """
        return [self._ids(text)[:most] for text in texts]

    def _ids(self, text: Text) -> list[int]:
        words = [[f"{index}{w}" for w in re.findall(r"\w+|[^\w\s]", part.lower())] for index, part in enumerate(text)]
        neighbors = [" ".join(two) for part in words for two in pairwise(part)]
        return [zlib.crc32(word.encode()) % self.size for word in [*chain(*words), *neighbors]]


class HuggingFaceTokenizer:
    """A tokenizer of the package ``transformers``.

    Args:
        name: At the hub, or a folder.

    Raises:
        DataError: The tokenizer cannot be loaded.
    """

    def __init__(self, name: str):
        try:
            transformers: Any = import_module("transformers")
        except ImportError as error:
            raise DataError(
                "A tokenizer needs the package transformers: pip install 'unskew[transformers]'."
            ) from error
        folder = Path(name).expanduser()
        where = str(folder) if folder.is_dir() else name
        with nullcontext(True) if folder.is_dir() else hub_or_cache() as reached:
            try:
                self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
            except Exception as error:  # the hub and the files may fail in any way
                reason = str(error).strip().splitlines()[0].rstrip(".") + ". Or" if reached else unreachable("it")
                raise DataError(
                    f"The tokenizer {name!r} cannot be loaded: {reason} name another with text.tokenizer: a name at the "
                    "hub, a folder, or bytes."
                ) from error
        self.size = len(self.tokenizer)
        if len(self.tokenizer) <= len(self.tokenizer.all_special_ids):
            raise DataError(
                f"{name} has no tokenizer; name another with text.tokenizer: a name at the hub, a folder, or bytes."
            )

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the ids of a text and its separators."""
        return self._ids(["\n".join(text) for text in texts])

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return ids of text pairs, truncating the longer text first.

        Args:
            texts: Texts, or pairs of texts.
            most: Largest number of tokens.
        """
        return self._ids(*map(list, zip(*texts, strict=True)), truncation=True, max_length=most)

    def _ids(self, *columns: list[str], **options: Any) -> list[list[int]]:
        # The length that a model was trained with is no bound here; the model says when its input is too long.
        self.tokenizer.model_max_length = MOST
        ids: list[list[int]] = self.tokenizer(*columns, padding=False, **options)["input_ids"]
        return ids


@lru_cache(maxsize=4)
def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a name: ``bytes``, ``words``, or one of ``transformers``.

    >>> make_tokenizer("bytes").join([("ab", "c")])
    [[256, 97, 98, 10, 99]]
    """
    own: dict[str, type[ByteTokenizer | WordTokenizer]] = {"bytes": ByteTokenizer, "words": WordTokenizer}
    return own[name]() if name in own else HuggingFaceTokenizer(name)
