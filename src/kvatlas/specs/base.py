"""What every spec answers: its page for a block size and a rank."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Page, ShardRange, natural, positive
from kvatlas.specs.visibility import Visibility


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What one layer caches, whatever the block size, order or topology.

    A spec describes the whole model's layer; `page` gives the shard of one rank.
    """

    @property
    def tokens_per_state(self) -> int | None:
        """Tokens that one stored state stands for; None where a block keeps a single state."""
        raise NotImplementedError

    @property
    def visibility(self) -> Visibility:
        """Which tokens a query sees of what the layer keeps."""
        source = getattr(self, "source", None)
        return Visibility(
            causal=source is None,
            window=getattr(self, "window", None),
            chunk=getattr(self, "chunk", None),
            sink_tokens=getattr(self, "sink_tokens", 0),
            source=source,
        )

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """The page of a block of `block` tokens on `rank` of `tp`."""
        raise NotImplementedError

    def states(self, block: int) -> int:
        """States that a block of `block` tokens stores."""
        block = positive(block, "the block size")
        per_state = self.tokens_per_state
        if per_state is None:
            return 1
        if block % per_state:
            problem = "The block does not hold whole states"
            got = f"a block of {block} tokens with {per_state} tokens per state"
            hint = f"Use a block size that is a multiple of {per_state}"
            raise AtlasError(Code.NOT_DIVISIBLE, problem, got=got, hint=hint)
        return block // per_state

    def page_bytes(self, block: int, *, tp: int = 1) -> int:
        """Bytes of a page; all ranks' pages are equally large."""
        return self.page(block, tp=tp).nbytes

    def replicas(self, tp: int) -> int:
        """How many ranks of `tp` hold each byte of this layer, at least."""
        page = self._smallest_page(tp=tp)
        return min(field.sharding.replicas(tp) for field in page.fields if not field.padding)

    def shard(self, tp: int, rank: int) -> dict[str, tuple[ShardRange, ...]]:
        """Which rows of each field's sharded axis `rank` holds; empty for all of them."""
        page = self._smallest_page(tp=tp, rank=rank)
        return {field.name: field.ranges for field in page.fields if not field.padding}

    def _smallest_page(self, *, tp: int = 1, rank: int = 0) -> Page:
        return self.page(self.tokens_per_state or 1, tp=tp, rank=rank)


def check(spec: Spec) -> None:
    """Refuse a spec with numbers or words that cannot be.

    msgspec checks what it decodes; this holds for what Python code constructs too. Numbers
    are at least 1, or at least 0 where that is their default.
    """
    kind = type(spec)
    for name, options, default in _limited_fields(kind):
        value = getattr(spec, name)
        if value is None and None in options:
            continue
        if int in options:
            (natural if default == 0 else positive)(value, f"{name} of {kind.__name__}")
        elif value not in options:
            hint = f"Use one of {', '.join(map(str, options))}"
            raise bad_spec(f"{kind.__name__} has no such {name}", repr(value), hint)


def check_page(spec: Spec) -> None:
    """Refuse a spec that no page can be made of."""
    try:
        _check_page(spec)
    except TypeError:  # a value that has no hash is remembered nowhere, and refused by its page
        spec.page(spec.tokens_per_state or 1)


@lru_cache(maxsize=4096)
def _check_page(spec: Spec) -> None:
    """The same, remembered: layers share specs, and plans from outside have many layers."""
    spec.page(spec.tokens_per_state or 1)


def plain_dtype(name: str) -> DType:
    """A dtype whose elements stand for themselves: no packing, no scales."""
    dtype = DType.of(name)
    if dtype.packed or dtype.scale:
        problem = "Elements of this dtype share bytes or scales"
        hint = "Use a cache dtype for quantised content"
        raise bad_spec(problem, f"dtype {dtype}", hint)
    return dtype


def bad_spec(problem: str, got: Any, hint: str) -> AtlasError:
    """The error for numbers or words that a layer's spec cannot have."""
    return AtlasError(Code.BAD_SPEC, problem, got=got, hint=hint)


@cache
def _limited_fields(kind: type[Spec]) -> tuple[tuple[str, tuple[Any, ...], Any], ...]:
    """(name, options, default) of the fields that are numbers or one of a few words."""
    limited = []
    for field in msgspec.structs.fields(kind):
        options = tuple(None if word is type(None) else word for word in _options(field.type))
        if any(option is int or isinstance(option, str) for option in options):
            limited.append((field.name, options, field.default))
    return tuple(limited)


def _options(hint: Any) -> list[Any]:
    """What a type hint allows: the words of a Literal, or types."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [option for inner in get_args(hint) for option in _options(inner)] or [hint]
