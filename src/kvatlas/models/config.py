"""An untrusted config whose values are checked as they are read.

Model families use different keys for the same setting, so each getter takes all keys of a
setting. A getter returns a checked value or raises an error that names the bad key. The given
mapping is never modified.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvatlas.errors import AtlasError, Code

MOST_LAYERS = 4096
"""Limit on decoder layers, well above any real model."""

QUERY_HEADS = (
    "decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "n_head",
    "n_heads", "attention_heads",
)  # fmt: skip
"""Config keys for the number of query heads."""

DEPTH = (
    "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers",
    "num_layers",
)  # fmt: skip
"""Config keys for the number of decoder layers."""

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
"""Config keys for the hidden size."""

KEY_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num",
    "num_attention_groups",
)  # fmt: skip
"""Config keys for the number of KV heads."""

HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head", "dim_head")
"""Config keys for the head size."""

_LARGEST = 2**40


class Config:
    """A mapping with typed, checked getters.

    >>> config = Config({"n_head": 12, "layer_types": ["full_attention"] * 2})
    >>> config.count("num_attention_heads", "n_head")
    12
    >>> config.per_layer("layer_types", 2)
    ['full_attention', 'full_attention']
    """

    __slots__ = ("_read", "_values")

    def __init__(self, values: Mapping[str, Any], read: dict[str, bool] | None = None) -> None:
        self._values = values
        # True for a key that was read, False for a key that was only passed to `settled`.
        self._read: dict[str, bool] = {} if read is None else read

    def under(self, defaults: Mapping[str, Any]) -> Config:
        """Return the config with `defaults` filled in for missing and null values."""
        given = {key: value for key, value in self._values.items() if value is not None}
        return Config({**defaults, **given}, self._read)

    def completed(self, defaults: Mapping[str, Any]) -> Config:
        """Return the config with `defaults` filled in for missing keys; null values remain."""
        return Config({**defaults, **self._values}, self._read)

    def contains(self, *names: str) -> bool:
        """Return whether any key in `names` is present, even if its value is null."""
        return any(name in self._values for name in names)

    def was_read(self, name: str) -> bool:
        """Return whether a getter was called for key `name`."""
        return self._read.get(name, False)

    def settled(self, *names: str) -> None:
        """Record that no reader needs the keys `names`, because other keys determine the caches."""
        for name in names:
            self._read.setdefault(name, False)

    def unread_keys(self) -> list[str]:
        """Return the `filled_keys` that no getter has read and that are not `settled`."""
        return [key for key in self.filled_keys() if key not in self._read]

    def _value(self, name: str) -> Any:
        self._read[name] = True
        return self._values.get(name)

    def all_keys(self) -> list[str]:
        """Return all keys, including keys whose value is null."""
        return [str(key) for key in self._values]

    def with_text_keys(self) -> Config:
        """Return the config with all keys converted to strings, as JSON does."""
        return Config({str(key): value for key, value in self._values.items()})

    def filled_keys(self) -> list[str]:
        """Return the keys whose values are neither null, false, zero nor empty."""
        return [str(key) for key, value in self._values.items() if value not in _NOTHING]

    def get(self, *names: str) -> Any:
        """Return the value of the first key in `names` that is present and not null, or None."""
        for name in names:
            value = self._value(name)
            if value is not None:
                return value
        return None

    def has(self, *names: str) -> bool:
        """Return whether any key in `names` is present and not null."""
        return self.get(*names) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the value of the first key in `names` that is present, or `default`.

        Raises an error if the value is not an integer of at least 1, or if there is neither a
        value nor a default.
        """
        number = self.maybe(*names) or default
        if number is None:
            raise missing(*names)
        return number

    def maybe(self, *names: str) -> int | None:
        """Return the value of the first key in `names` that is present; None if there is none.

        Raises an error if the value is not an integer of at least 1.
        """
        for name in names:
            value = self._value(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                problem = f"{name} must be an integer"
                hint = f"Write {name} without quotes or a decimal point"
                raise bad(problem, repr(value), hint)
            if not 1 <= value <= _LARGEST:
                raise bad(
                    f"{name} must be between 1 and 2**40",
                    str(value),
                    f"Correct {name} in the config",
                )
            return value
        return None

    def size(self, name: str) -> int | None:
        """Return the integer under key `name`; None if it is missing, null or 0."""
        return None if self._value(name) in (None, 0) else self.count(name)

    def natural(self, name: str, *, default: int = 0) -> int:
        """Return the integer under key `name`, which must not be negative; `default` if missing."""
        value = self._value(name)
        return value if value == 0 and type(value) is int else self.count(name, default=default)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return the boolean under key `name`; `default` if it is missing."""
        value = self._typed((name,), bool, "true or false, without quotes")
        return default if value is None else bool(value)

    def text(self, *names: str) -> str | None:
        """Return the string under the first key in `names` that is present; otherwise None."""
        value: str | None = self._typed(names, str, "a string in quotes")
        return value

    def section(self, *names: str) -> Config | None:
        """Return the nested config under the first key in `names` that is present, or None."""
        value = self._typed(names, Mapping, "an object in braces")
        return None if value is None else Config(value)

    def listing(self, *names: str) -> list[Any] | None:
        """Return the list under the first key in `names` that is present; otherwise None."""
        value = self._typed(names, (list, tuple), "a list in brackets")
        return None if value is None else list(value)

    def _typed(self, names: tuple[str, ...], kind: type | tuple[type, ...], what: str) -> Any:
        value = self.get(*names)
        if value is not None and not isinstance(value, kind):
            raise bad(
                f"{names[0]} must be {what}", repr(value), f"Correct {names[0]} in the config"
            )
        return value

    def _required_listing(self, name: str) -> list[Any]:
        entries = self.listing(name)
        if entries is None:
            raise missing(name)
        return entries

    def per_layer(self, name: str, depth: int, *, extra: int = 0) -> list[Any]:
        """Return the list under key `name`, which must have one entry for each of `depth` layers.

        The list may have up to `extra` more entries, for multi-token-prediction (MTP)
        layers. These entries are dropped, because MTP layers are not part of the served model.
        """
        entries = self._required_listing(name)
        if not depth <= len(entries) <= depth + extra:
            raise bad(
                f"{name} must have one entry per layer",
                f"{len(entries)} entries for {depth} layers",
            )
        return entries[:depth]

    def indices(self, name: str, depth: int, *, first: int = 0) -> set[int]:
        """Return the layers in the list under key `name`, as 0-based indices.

        The list numbers the `depth` layers from `first`.
        """
        chosen = set()
        for value in self._required_listing(name):
            known = isinstance(value, int) and not isinstance(value, bool)
            if not known or not first <= value < first + depth:
                last = first + depth - 1
                problem = f"{name} must contain only layer numbers from {first} to {last}"
                raise bad(problem, repr(value))
            chosen.add(value - first)
        return chosen

    def depth(self) -> int:
        """Return the number of decoder layers, without MTP layers."""
        # Whisper's num_hidden_layers counts encoder layers, so decoder_layers comes first.
        depth = self.maybe(*DEPTH)
        if depth is None:
            # Nemotron-3 has no such key; count the entries of its layer pattern.
            blocks = self.get("layers_block_type", "hybrid_override_pattern")
            depth = len(blocks) if isinstance(blocks, list | str) else None
        if not depth:
            raise missing("num_hidden_layers")
        if depth > MOST_LAYERS:
            raise bad(
                f"A config can have at most {MOST_LAYERS} layers",
                f"{depth} layers",
                "Correct num_hidden_layers in the config",
            )
        return depth

    def predictors(self) -> int:
        """Return the number of MTP layers, which per-layer lists may include."""
        names = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
        return max(self.size(name) or 0 for name in names)

    def query_heads(self) -> int:
        """Return the number of query heads, which is divided over tensor-parallel ranks."""
        return self.count(*QUERY_HEADS)

    def hidden(self) -> int:
        """Return the hidden size."""
        return self.count(*HIDDEN)

    def key_heads(self) -> int:
        """Return the number of KV heads; defaults to the number of query heads."""
        return self._first_of(KEY_HEADS) or self.query_heads()

    def head_dim(self) -> int:
        """Return the head size; defaults to hidden size / query heads."""
        own = self._first_of(HEAD_DIM)
        return own or self.quotient(self.hidden(), self.query_heads(), "head_dim")

    def _first_of(self, synonyms: tuple[str, ...]) -> int | None:
        """Return the value of the first synonym that is present.

        Other synonyms with the same value become `settled`; those with another value stay unread.
        """
        own = self.maybe(*synonyms)
        self.settled(*(name for name in synonyms if self._values.get(name) == own))
        return own

    @staticmethod
    def quotient(width: int, parts: int, name: str) -> int:
        """Return `width / parts`; raise an error that names key `name` if there is a remainder."""
        if width % parts:
            raise bad(
                f"{name} is not in the config and cannot be computed from other sizes",
                f"{width} / {parts}, which is not an integer",
                f"Add or correct {name} in the config",
            )
        return width // parts


_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {}, ())


def bad(problem: str, got: str, hint: str = "Correct this key or num_hidden_layers") -> AtlasError:
    """Return an `AtlasError` with code `bad_config`; callers quote config values in `got`."""
    return AtlasError(Code.BAD_CONFIG, problem, got=got[:200], hint=hint)


def missing(*names: str) -> AtlasError:
    """Return the error for a config that has none of the keys `names`."""
    got = f"a config without {' or '.join(names)}"
    return AtlasError(Code.MISSING_KEY, got=got, hint=f"Add {names[0]} to the config")
