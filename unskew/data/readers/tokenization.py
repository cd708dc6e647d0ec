"""Tokenizers, which convert texts or pairs of texts to lists of token ids."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unskew.data.readers.hub import UNREACHABLE, hub_or_cache
from unskew.errors import DataError, explain_missing

Text = tuple[str, ...]
MOST = 1 << 30  # number of tokens that is never reached, so that texts are not truncated
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class AnsweredText(NamedTuple):
    """Tokens of a text of which only a part counts.

    Attributes:
        ids: Token ids.
        counts: Whether each token counts in the loss and in metrics.
    """

    ids: list[int]
    counts: list[bool]


class Tokenizer(Protocol):
    """Interface of tokenizers, which convert texts to ids from 0 to ``size - 1``."""

    size: int

    def answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each answer, without tokens for its start and with an end token."""

    def chats(self, chats: Sequence[Sequence[Mapping[str, str]]]) -> list[AnsweredText]:
        """Return the tokens of each chat, of which those of the assistant count.

        Args:
            chats: Messages of each chat, with the entries ``role`` and ``content``.

        Raises:
            DataError: If the tokenizer has no chat template, or the template does not fit the messages.
        """

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the ids of each text; the two texts of a pair are joined by a line break."""

    def pairs(self, texts: Sequence[Text], most: int) -> list[list[int]]:
        """Return the ids of each text or pair for classification, truncated to ``most``.

        Args:
            texts: Texts, or pairs of texts.
            most: Maximum number of tokens.
        """


class OwnTokenizer:
    """Base class of tokenizers that need no download and have no chat template."""

    def chats(self, chats: Sequence[Sequence[Mapping[str, str]]]) -> list[AnsweredText]:
        """Raise ``DataError``, because these tokenizers have no chat template."""
        raise DataError(
            "text.messages requires a tokenizer with a chat template. Set text.tokenizer to that of a chat model, or use "
            "text.prompt and text.answer."
        )


class ByteTokenizer(OwnTokenizer):
    """Tokenizer of UTF-8 bytes, without download; the id 256 marks the start of a text, separates pairs and ends answers."""

    size = 257

    def answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each answer, followed by 256."""
        return [[*text.encode(), 256] for text in texts]

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


class WordTokenizer(OwnTokenizer):
    """Tokenizer of words, punctuation and word bigrams, hashed to 16,384 ids, without download or vocabulary.

    Bigrams follow the words, so truncation removes bigrams first.
    """

    size = 1 << 14

    def join(self, texts: Sequence[Text]) -> list[list[int]]:
        """Raise ``DataError``, because hashed bigrams have no next token."""
        raise DataError("The tokenizer words requires texts with labels. To predict the next token, use bytes.")

    def answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Raise ``DataError``, because hashed bigrams have no next token."""
        return self.join([])

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
        self.name = name
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

    def answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each answer without special tokens, followed by the end token."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"The tokenizer {self.name!r} has no end token (eos_token), by which a model learns where an answer ends. "
                "Use the tokenizer of a causal language model."
            )
        return [[*ids, end] for ids in self._ids([*texts], add_special_tokens=False)]

    def chats(self, chats: Sequence[Sequence[Mapping[str, str]]]) -> list[AnsweredText]:
        """Return the tokens of each chat, of which those of the assistant count.

        If the chat template has no generation blocks, which mark the assistant's tokens, these are the tokens that follow the
        generation prompt.

        Args:
            chats: Messages of each chat, with the entries ``role`` and ``content``.

        Raises:
            DataError: If the tokenizer has no chat template, or the template does not fit the messages.
        """
        if not self.tokenizer.chat_template:
            raise DataError(
                f"The tokenizer {self.name!r} has no chat template, which text.messages requires. Set text.tokenizer to that "
                "of a chat model, or use text.prompt and text.answer."
            )
        marked = GENERATION.search(str(self.tokenizer.chat_template)) is not None
        return [self._marked_chat(chat) if marked else self._chat(chat) for chat in chats]

    def _marked_chat(self, chat: Sequence[Mapping[str, str]]) -> AnsweredText:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._render(chat, **options)
        return AnsweredText(encoded["input_ids"], [bool(counted) for counted in encoded["assistant_masks"]])

    def _chat(self, chat: Sequence[Mapping[str, str]]) -> AnsweredText:
        ids: list[int] = self._render(chat)
        counts = [False] * len(ids)
        for number, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            prompt = self._render(chat[:number], add_generation_prompt=True)
            end = self._render(chat[: number + 1])
            if ids[: len(prompt)] != prompt or ids[: len(end)] != end:
                raise DataError(
                    f"The chat template of {self.name!r} changes a message when others follow it, so the assistant's tokens "
                    "cannot be found. Use a template with generation blocks ({% generation %}), or chats with one answer."
                )
            counts[len(prompt) : len(end)] = [True] * (len(end) - len(prompt))
        return AnsweredText(ids, counts)

    def _render(self, chat: Sequence[Mapping[str, str]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template([*chat], **{"return_dict": False, **options})
        except Exception as error:  # a template may raise any error, such as that roles must alternate
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
            roles = ", ".join(message["role"] for message in chat)
            what = f"a chat with the roles {roles}" if roles else "a chat that starts with the assistant"
            raise DataError(
                f"The chat template of {self.name!r} rejects {what}: {reason}. Change these chats."
            ) from error

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
