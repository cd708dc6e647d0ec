"""Tokenizers, which convert texts or pairs of texts to lists of token ids."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unskew.data.readers.hub import UNREACHABLE, hub_or_cache
from unskew.errors import DataError, explain_missing

Text = tuple[str, ...]
MOST = 1 << 30  # number of tokens that is never reached, so that texts are not truncated
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CHAT_DATE = datetime(2024, 7, 26)
"""Date in the chats of all days: that of Llama 3.1's template if it does not know the date."""
TIME_FUNCTION = "strftime_now"
"""Function with which a chat template formats the time."""


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

    def chats(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[AnsweredText]:
        """Return the tokens of each chat, of which those of the assistant count.

        Args:
            chats: Messages of each chat, with the entries ``role`` and ``content``, and any others that the template reads.

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

    def chats(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[AnsweredText]:
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

    def chats(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[AnsweredText]:
        """Return the tokens of each chat, of which those of the assistant count.

        If the chat template has no generation blocks, which mark the assistant's tokens, these are the tokens that follow the
        generation prompt, up to the token that ends the turn. A turn with nothing before this token does not count.

        Args:
            chats: Messages of each chat, with the entries ``role`` and ``content``, and any others that the template reads.

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

    def _marked_chat(self, chat: Sequence[Mapping[str, Any]]) -> AnsweredText:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._render(chat, **options)
        return AnsweredText(encoded["input_ids"], [bool(counted) for counted in encoded["assistant_masks"]])

    def _chat(self, chat: Sequence[Mapping[str, Any]]) -> AnsweredText:
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
            stop = self._turn_end(ids, len(prompt), len(end))
            counts[len(prompt) : stop] = [True] * (stop - len(prompt))
        return AnsweredText(ids, counts)

    def _turn_end(self, ids: Sequence[int], start: int, stop: int) -> int:
        """Return where the tokens of a turn end that a model generates.

        They end after the end token, or after the last special token if only whitespace follows it. The result is ``start``
        if the turn has only special tokens and whitespace.
        """
        if self._is_blank(ids[start:stop]):
            return start
        special = [at for at in range(start, stop) if ids[at] in self._special_ids]
        ends = [at for at in special if ids[at] == self.tokenizer.eos_token_id]
        if ends and not self._is_blank(ids[start : ends[-1]]):
            return ends[-1] + 1
        return special[-1] + 1 if special and self._is_blank(ids[special[-1] : stop]) else stop

    def _is_blank(self, ids: Sequence[int]) -> bool:
        """Return whether tokens are only special ones and whitespace."""
        others = [number for number in ids if number not in self._special_ids]
        return not others or not self.tokenizer.decode(others).strip()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        return frozenset(special - {self.tokenizer.unk_token_id})  # a word that the tokenizer does not know

    @cached_property
    def _dated_template(self) -> dict[str, str]:
        """Option with the chat template, in which the time is that of ``CHAT_DATE``; empty if the template does not use it.

        Data that change from day to day could not be reproduced. ``transformers`` passes no functions to templates, so a
        macro replaces the one that formats the time.
        """
        template = self.tokenizer.get_chat_template()
        if TIME_FUNCTION not in template:
            return {}
        codes = {f"%{code}": CHAT_DATE.strftime(f"%{code}") for code in "aAbBcdDeFHIjmMpSTxXyY"}
        codes |= {f"%-{code}": codes[f"%{code}"].lstrip("0") or "0" for code in "dHIjmMS"}  # not known on Windows
        filters = " | ".join(f'replace("{code}", "{value}")' for code, value in codes.items())
        macro = f"{{% macro {TIME_FUNCTION}(format) %}}{{{{ format | {filters} }}}}{{% endmacro %}}{{{{ '' }}}}"
        return {"chat_template": macro + template}

    def _render(self, chat: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        try:
            dated = self._dated_template
            return self.tokenizer.apply_chat_template([*chat], **{"return_dict": False, **dated, **options})
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
