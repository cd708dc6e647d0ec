"""Tokenizers, which convert texts or pairs of texts to lists of token ids."""

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

from unskew.data.readers.hub import UNREACHABLE, hub_or_cache
from unskew.errors import DataError, explain_missing

Text = tuple[str, ...]
MOST = 1 << 30  # number of tokens that is never reached, so that texts are not truncated


class Tokenizer(Protocol):
    """Interface of tokenizers, which convert texts to ids from 0 to ``size - 1``."""

    size: int

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the ids of each text; the two texts of a pair are joined by a line break."""

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return the ids of each text or pair for classification, truncated to ``most``.

        Args:
            texts: Texts, or pairs of texts.
            most: Maximum number of tokens.
        """


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, without download; the id 256 marks the start of a text and separates pairs."""

    size = 257

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the ids of each text, preceded by 256; the two texts of a pair are joined by a line break."""
        return [[256, *"\n".join(text).encode()] for text in texts]

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return the ids of each text or pair, truncated at the end to ``most``.

        Args:
            texts: Texts, or pairs of texts.
            most: Maximum number of tokens.
        """
        return [[i for part in text for i in (256, *part.encode())][:most] for text in texts]


class WordTokenizer:
    """Tokenizer of words, punctuation and word bigrams, hashed to 16,384 ids, without download or vocabulary.

    Bigrams follow the words, so truncation removes bigrams first.
    """

    size = 1 << 14

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Raise ``DataError``, because hashed bigrams have no next token."""
        raise DataError("The tokenizer words requires texts with labels. To predict the next token, use bytes.")

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return the ids of each text or pair, truncated to ``most``; the same word has different ids in the two texts.

        Args:
            texts: Texts, or pairs of texts.
            most: Maximum number of tokens.
        """
        return [self._ids(text)[:most] for text in texts]

    def _ids(self, text: Text) -> list[int]:
        words = [[f"{index}{w}" for w in re.findall(r"\w+|[^\w\s]", part.lower())] for index, part in enumerate(text)]
        neighbors = [" ".join(two) for part in words for two in pairwise(part)]
        return [zlib.crc32(word.encode()) % self.size for word in [*chain(*words), *neighbors]]


class HuggingFaceTokenizer:
    """Tokenizer of the package ``transformers``.

    Args:
        name: Name on the Hugging Face Hub, or a folder.

    Raises:
        DataError: If the tokenizer cannot be loaded.
    """

    def __init__(self, name: str):
        with explain_missing(
            "A tokenizer requires the package transformers: pip install 'unskew[transformers]'.", DataError
        ):
            transformers: Any = import_module("transformers")
        folder = Path(name).expanduser()
        where = str(folder) if folder.is_dir() else name
        with nullcontext(True) if folder.is_dir() else hub_or_cache() as reached:
            try:
                self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
            except Exception as error:  # the network and corrupted files raise many types
                reason = str(error).strip().splitlines()[0].rstrip(".") + ". Or" if reached else UNREACHABLE
                raise DataError(
                    f"The tokenizer {name!r} cannot be loaded: {reason} set text.tokenizer to another name on the "
                    "Hub, a folder, or bytes."
                ) from error
        self.size = len(self.tokenizer)
        if len(self.tokenizer) <= len(self.tokenizer.all_special_ids):
            raise DataError(f"{name} has no tokenizer. Set text.tokenizer to a name on the Hub, a folder, or bytes.")

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the ids of each text; the two texts of a pair are joined by a line break."""
        return self._ids(["\n".join(text) for text in texts])

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return the ids of each text or pair, truncated to ``most``, the longer text of a pair first.

        Args:
            texts: Texts, or pairs of texts.
            most: Maximum number of tokens.
        """
        return self._ids(*map(list, zip(*texts, strict=True)), truncation=True, max_length=most)

    def _ids(self, *columns: list[str], **options: Any) -> list[list[int]]:
        # Do not warn about the model's length limit here; the model itself reports inputs that are too long.
        self.tokenizer.model_max_length = MOST
        ids: list[list[int]] = self.tokenizer(*columns, padding=False, **options)["input_ids"]
        return ids


@lru_cache(maxsize=4)
def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer with a name: ``bytes``, ``words``, or a tokenizer of ``transformers``.

    >>> make_tokenizer("bytes").join([("ab", "c")])
    [[256, 97, 98, 10, 99]]
    """
    own: dict[str, type[ByteTokenizer | WordTokenizer]] = {"bytes": ByteTokenizer, "words": WordTokenizer}
    return own[name]() if name in own else HuggingFaceTokenizer(name)
