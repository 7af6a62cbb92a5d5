"""A config from outside: each value is read by name and checked when it is read.

Configs are written by strangers and spelled by families, so a question names all
spellings of a thing, and the answer is a number that can be used or a refusal that
says which key was wrong. Nothing is written back into what was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvatlas.errors import AtlasError, Code

MOST_LAYERS = 4096
"""More than any model has; a config that asks for more is a mistake or an attack."""

QUERY_HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads")
"""The spellings of the number of query heads."""

_LARGEST = 2**40


class Config:
    """A mapping whose values are read by type and checked.

    >>> config = Config({"n_head": 12, "layer_types": ["full_attention"] * 2})
    >>> config.count("num_attention_heads", "n_head")
    12
    >>> config.per_layer("layer_types", 2)
    ['full_attention', 'full_attention']
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def under(self, defaults: Mapping[str, Any]) -> Config:
        """The same config with `defaults` where it says nothing."""
        given = {key: value for key, value in self._values.items() if value is not None}
        return Config({**defaults, **given})

    def filled_keys(self) -> list[str]:
        """The keys that say something: neither null, nor off, nor empty."""
        return [str(key) for key, value in self._values.items() if value not in _NOTHING]

    def get(self, *names: str) -> Any:
        """The first of `names` that is there and not null."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return value
        return None

    def has(self, *names: str) -> bool:
        """Whether one of `names` is there and not null."""
        return self.get(*names) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """A number of things, at least 1."""
        number = self.maybe(*names) or default
        if number is None:
            raise missing(*names)
        return number

    def maybe(self, *names: str) -> int | None:
        """A number of things where the config gives one."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                problem = f"{name} is not a whole number"
                raise bad(problem, value, "Write it without quotes or a dot")
            if not 1 <= value <= _LARGEST:
                raise bad(f"{name} is not between 1 and 2^40", value, "Check the config")
            return value
        return None

    def size(self, name: str) -> int | None:
        """A number of tokens or layers in which 0 and null mean none; never negative."""
        return None if self._values.get(name) in (None, 0) else self.count(name)

    def natural(self, name: str, *, default: int = 0) -> int:
        """A number in which 0 is a number."""
        value = self._values.get(name)
        return value if value == 0 and type(value) is int else self.count(name, default=default)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A switch."""
        value = self._typed((name,), bool, "true or false, without quotes")
        return default if value is None else bool(value)

    def text(self, *names: str) -> str | None:
        """A word where the config gives one."""
        value: str | None = self._typed(names, str, "a word in quotes")
        return value

    def section(self, *names: str) -> Config | None:
        """A nested mapping where the config gives one."""
        value = self._typed(names, Mapping, "an object in braces")
        return None if value is None else Config(value)

    def listing(self, *names: str) -> list[Any] | None:
        """A list where the config gives one."""
        value = self._typed(names, (list, tuple), "a list in brackets")
        return None if value is None else list(value)

    def _typed(self, names: tuple[str, ...], kind: type | tuple[type, ...], what: str) -> Any:
        value = self.get(*names)
        if value is not None and not isinstance(value, kind):
            raise bad(f"{names[0]} is not {what}", value, f"Write {what}")
        return value

    def _required_listing(self, name: str) -> list[Any]:
        entries = self.listing(name)
        if entries is None:
            raise missing(name)
        return entries

    def per_layer(self, name: str, depth: int, *, extra: int = 0) -> list[Any]:
        """A list with one entry for each layer.

        Layers that predict further tokens may bring up to `extra` more entries,
        which are dropped: they are no part of the model that is served.
        """
        entries = self._required_listing(name)
        if not depth <= len(entries) <= depth + extra:
            got = f"{len(entries)} entries for {depth} layers"
            raise bad(f"{name} does not have one entry for each layer", got)
        return entries[:depth]

    def indices(self, name: str, depth: int, *, first: int = 0) -> set[int]:
        """Layers that a list names, counted from 0 whatever `first` it counts from."""
        chosen = set()
        for value in self._required_listing(name):
            known = isinstance(value, int) and not isinstance(value, bool)
            if not known or not first <= value < first + depth:
                raise bad(f"{name} names layers outside {first} to {first + depth - 1}", value)
            chosen.add(value - first)
        return chosen

    def depth(self) -> int:
        """Decoder layers, those that predict further tokens not included."""
        # Whisper's num_hidden_layers are the encoder's, so its own word goes first.
        names = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        depth = self.maybe(*names)
        if depth is None:
            # Nemotron-3 leaves the number out: its list of layers has the length.
            blocks = self.get("layers_block_type", "hybrid_override_pattern")
            depth = len(blocks) if isinstance(blocks, list | str) else None
        if not depth:
            raise missing("num_hidden_layers")
        if depth > MOST_LAYERS:
            raise bad(f"More than {MOST_LAYERS} layers are not read", depth, "Check the config")
        return depth

    def predictors(self) -> int:
        """Layers that predict further tokens (MTP), which the lists of layers may include."""
        names = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
        return max(self.size(name) or 0 for name in names)

    def query_heads(self) -> int:
        """Query heads, which tensor parallelism divides."""
        return self.count(*QUERY_HEADS)

    def hidden(self) -> int:
        """Elements of a hidden row."""
        return self.count("hidden_size", "n_embd", "d_model", "dim")

    def key_heads(self) -> int:
        """Heads that are cached: as many as query heads where nothing else is said."""
        names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
        return self.maybe(*names, "num_attention_groups") or self.query_heads()

    def head_dim(self) -> int:
        """Elements of a cached row: often not hidden size / heads, so that comes last."""
        names = ("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head")
        return self.maybe(*names) or self.quotient(self.hidden(), self.query_heads(), "head_dim")

    @staticmethod
    def quotient(width: int, parts: int, name: str) -> int:
        """`width` (of a row, or in heads) divided into `parts`; `name` is the key to check."""
        if width % parts:
            got = f"{width} divided by {parts}"
            raise bad("Heads do not divide evenly", got, f"Check {name} in the config")
        return width // parts


_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {}, ())


def bad(problem: str, got: object, hint: str = "Check it against num_hidden_layers") -> AtlasError:
    """The error for a value that a config gives."""
    shown = got if isinstance(got, str) else repr(got)
    return AtlasError(Code.BAD_CONFIG, problem, got=shown[:200], hint=hint)


def missing(*names: str) -> AtlasError:
    """The error for a config that leaves out what its family needs."""
    got = f"a config without {' or '.join(names)}"
    return AtlasError(Code.MISSING_KEY, got=got, hint=f"Add {names[0]}")
