"""Patterns for tensor names, as quantisation tools write them into checkpoints.

Each tool uses different patterns for the tensors that it skips: names, globs, regular
expressions, or words in a name. `NamePatterns` matches all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


class NamePatterns:
    """A set of patterns for tensor names: names, globs, `re:` expressions and single words.

    Before matching, wrapper prefixes such as `model.` are removed from the patterns, and module
    names that differ between families are unified (`ffn` becomes `mlp`). If `inside` is
    true, the name of a module also matches all tensors inside the module. `unread` lists the
    patterns that match nothing, because they are invalid or could take long to match.

    >>> patterns = NamePatterns(["lm_head", "model.layers.0.self_attn*", "re:.*experts.*"])
    >>> names = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.experts.0")
    >>> [patterns.match(name) for name in names]
    [True, False, True]
    """

    __slots__ = ("_exact", "_expression", "_inside", "_words", "unread")

    def __init__(self, patterns: Iterable[Any], *, inside: bool = False) -> None:
        self._inside = inside
        texts = [text for text in patterns if isinstance(text, str) and len(text) < 1000]
        plain_names = [text for text in texts if not re.search(_WILD, text)]
        self._exact = frozenset(_level(text) for text in plain_names)
        self._words = frozenset(text for text in plain_names if "." not in text)
        wild = {text: _expression(text) for text in texts if re.search(_WILD, text)}
        parts = [part for part in wild.values() if part]
        self.unread = tuple(text for text, part in wild.items() if not part)
        self._expression = re.compile("|".join(parts)) if parts else None

    def match(self, name: str) -> bool:
        """Return whether any pattern matches a tensor's name, or one of its words.

        If the patterns were created with `inside`, a pattern may also match a module that contains
        the tensor.
        """
        words = name.split(".")
        shortest = 1 if self._inside else len(words)
        if any(".".join(words[:end]) in self._exact for end in range(shortest, len(words) + 1)):
            return True
        if not self._words.isdisjoint(words):
            return True
        if self._expression is None:
            return False
        return any(self._expression.match(f"{prefix}{name}") for prefix in ("", "model."))


_WILD = r"[*?\[]|^re:"
_PREFIX = r"^(?:(?:model|language_model|backbone|language|llm)\.)+"
_CALLED = {
    "ffn": "mlp", "block_sparse_moe": "mlp", "attn": "self_attn", "head": "lm_head",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
# Allows only repetitions of single characters, which match short names quickly.
_SAFE = r"(?:\\d[+*]?|\\.|\.\*|\[[\w-]+\][+*]?|\(\?:\\\.\.\*\)\?|[\w:,/-]|[.^$|()])*"
_SHARED = ("shared_expert", "share_expert", "shared_mlp")


def _level(name: str) -> str:
    words = [_CALLED.get(word, word) for word in re.sub(_PREFIX, "", name).split(".")]
    return ".".join("shared_experts" if word in _SHARED else word for word in words)


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression; empty if it is invalid or could be slow."""
    if pattern.startswith("re:"):
        expression = pattern[3:]
    else:
        end = "" if pattern.endswith("*") else r"(?:\..*)?$"
        level = re.escape(_level(pattern))
        expression = level.replace(r"\*", ".*").replace(r"\?", ".") + end
    if expression.count("*") > 6 or not re.fullmatch(_SAFE, expression):
        return ""
    try:
        re.compile(expression)
    except re.error:
        return ""
    return f"(?:{expression})"
