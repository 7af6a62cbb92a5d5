"""`Spec`, the base class of all specs, and their validation."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, get_args, get_origin

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Page, ShardRange
from kvatlas.geometry.integers import natural, positive
from kvatlas.specs.visibility import Visibility


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """A description of what one layer caches, for any block size, layout and topology.

    A spec describes the layer of the whole model; `page` returns the shard of one rank.
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    """Sizes that may be 0 although their default is not."""

    @property
    def tokens_per_state(self) -> int | None:
        """Tokens per stored state; None if every block stores exactly one state."""
        raise NotImplementedError

    @property
    def visibility(self) -> Visibility:
        """The cached tokens that a query attends to."""
        source = getattr(self, "source", None)
        return Visibility(
            causal=source is None,
            window=getattr(self, "window", None),
            chunk=getattr(self, "chunk", None),
            sink_tokens=getattr(self, "sink_tokens", 0),
            source=source,
        )

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """Return the page for a block of `block` tokens on rank `rank` of `tp`."""
        raise NotImplementedError

    def states(self, block: int) -> int:
        """Return the number of states in a block of `block` tokens."""
        block = positive(block, "the block size")
        per_state = self.tokens_per_state
        if per_state is None:
            return 1
        if block % per_state:
            problem = "A block must hold a whole number of states"
            got = f"a block of {block} tokens with {per_state} tokens per state"
            hint = f"Use a block size that is a multiple of {per_state}"
            raise AtlasError(Code.NOT_DIVISIBLE, problem, got=got, hint=hint)
        return block // per_state

    def page_bytes(self, block: int, *, tp: int = 1) -> int:
        """Return the size of a page in bytes, which is equal on all ranks."""
        return self.page(block, tp=tp).nbytes

    def replicas(self, tp: int) -> int:
        """Return how many of `tp` ranks hold the same rows.

        If this number differs between fields, return the smallest number.
        """
        page = self._smallest_page(tp=tp)
        return min(field.sharding.replicas(tp) for field in page.fields if not field.padding)

    def shard(self, tp: int, rank: int) -> dict[str, tuple[ShardRange, ...]]:
        """Return the rows of each field that `rank` holds, by field name.

        Rows are counted along the field's sharded axis. An empty tuple means all rows.
        """
        page = self._smallest_page(tp=tp, rank=rank)
        return {field.name: field.ranges for field in page.fields if not field.padding}

    def _smallest_page(self, *, tp: int = 1, rank: int = 0) -> Page:
        return self.page(self.tokens_per_state or 1, tp=tp, rank=rank)


def check(spec: Spec) -> None:
    """Raise an error if a parameter of a spec has an invalid value.

    msgspec validates only the specs that it decodes; Python code can construct any spec.
    Integers must be at least 1, or at least 0 if their default is 0.
    """
    kind = type(spec)
    for name, options, default in _limited_fields(kind):
        value = getattr(spec, name)
        if value is None and None in options:
            continue
        if int in options:
            may_be_zero = default == 0 or name in kind.may_be_zero
            (natural if may_be_zero else positive)(value, f"parameter {name} of {kind.__name__}")
        elif value not in options:
            hint = f"Use one of {', '.join(map(repr, options))}"
            problem = f"Parameter {name} of {kind.__name__} has an unknown value"
            raise bad_spec(problem, repr(value), hint)


def check_page(spec: Spec) -> None:
    """Raise an error if the page of a spec cannot be built."""
    try:
        _check_page(spec)
    except TypeError:  # an unhashable value cannot be cached; building the page rejects it
        spec.page(spec.tokens_per_state or 1)


@lru_cache(maxsize=4096)
def _check_page(spec: Spec) -> None:
    """Build the smallest page of `spec`; cached, because many layers of a plan share a spec."""
    spec.page(spec.tokens_per_state or 1)


def plain_dtype(name: str) -> DType:
    """Return the dtype called `name`; raise an error if it packs elements or needs scales."""
    dtype = DType.of(name)
    if dtype.packed or dtype.scale:
        raise bad_spec(
            "The dtype must have unpacked elements without scales",
            f"dtype {dtype}",
            "Pass a quantised format as cache=... instead of dtype=...",
        )
    return dtype


def bad_spec(problem: str, got: Any, hint: str) -> AtlasError:
    """Return an `AtlasError` with code `bad_spec`."""
    return AtlasError(Code.BAD_SPEC, problem, got=got, hint=hint)


@cache
def _limited_fields(kind: type[Spec]) -> tuple[tuple[str, tuple[Any, ...], Any], ...]:
    """Return (name, allowed values or types, default) of the fields that are ints or literals."""
    limited = []
    for field in msgspec.structs.fields(kind):
        options = tuple(None if word is type(None) else word for word in _options(field.type))
        if any(option is int or isinstance(option, str) for option in options):
            limited.append((field.name, options, field.default))
    return tuple(limited)


def _options(hint: Any) -> list[Any]:
    """Return the options of a type hint: the values of a Literal, or the types of a union."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [option for inner in get_args(hint) for option in _options(inner)] or [hint]
