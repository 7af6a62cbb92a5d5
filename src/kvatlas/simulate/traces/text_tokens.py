"""Tokens of text: with a tokenizer, or estimated at four bytes per token."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from kvatlas.errors import AtlasError, Code, MissingExtraError

BYTES_PER_TOKEN = 4
"""English text and code have about four bytes per token."""


class TextTokens:
    """Converts text into tokens. `tokenizer` is a `tokenizer.json`, its folder or a hub id.

    Without a tokenizer, every four bytes of UTF-8 are one token: equal texts have equal tokens, and
    lengths are estimates.

    >>> TextTokens(None).of("Hello world") == TextTokens(None).of("Hello")
    False
    >>> len(TextTokens(None).of("Hello world"))
    3
    """

    def __init__(self, tokenizer: str | Path | None) -> None:
        self.used = False
        self._name = None if tokenizer is None else str(tokenizer)
        encode = _estimated if tokenizer is None else _encoder(tokenizer)
        self._encode = lru_cache(maxsize=4096)(encode)  # conversations repeat their messages

    def of(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens."""
        self.used = True
        return self._encode(text)

    def remarks(self) -> list[str]:
        """Return a sentence on how lengths were determined, if any text was converted."""
        if not self.used:
            return []
        template = "Chat templates are approximated: each message begins with its role."
        if self._name is not None:
            return [f"Text was tokenised with {self._name}. {template}"]
        return [
            f"Lengths are estimates: {BYTES_PER_TOKEN} bytes of text count as one token. Pass "
            f"--tokenizer for exact lengths. {template}"
        ]


def _estimated(text: str) -> tuple[int, ...]:
    content = text.encode("utf-8", "replace")
    size = BYTES_PER_TOKEN
    return tuple(int.from_bytes(content[at : at + size]) for at in range(0, len(content), size))


def _encoder(tokenizer: str | Path) -> Callable[[str], tuple[int, ...]]:
    """Return the function that encodes text with a tokenizer of Hugging Face."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("tokenizers", "traces") from None
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        if path.is_file():
            loaded = Tokenizer.from_file(str(path))
        else:
            loaded = Tokenizer.from_pretrained(str(tokenizer))
    except Exception as problem:  # the library raises plain exceptions
        hint = "Pass a tokenizer.json, a folder that contains one, or a hub id"
        raise AtlasError(
            Code.UNREADABLE, "The tokenizer cannot be loaded", got=f"{tokenizer}: {problem}",
            hint=hint,
        ) from None  # fmt: skip
    return lambda text: tuple(loaded.encode(text, add_special_tokens=False).ids)
