"""What every spec answers: its page for a block size and a rank."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Page, ShardRange, natural, positive
from kvatlas.specs.visibility import Visibility


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What one layer caches, whatever the block size, order or topology.

    A spec describes the whole model's layer; `page` cuts out what one rank holds.
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
            raise AtlasError(
                Code.NOT_DIVISIBLE,
                "A block holds whole states",
                got=f"a block of {block} tokens with {per_state} tokens per state",
                hint=f"Use a block size that is a multiple of {per_state}",
            )
        return block // per_state

    def page_bytes(self, block: int, *, tp: int = 1) -> int:
        """Bytes of a page; all ranks' pages are equally large."""
        return self.page(block, tp=tp).nbytes

    def replicas(self, tp: int) -> int:
        """How many ranks of `tp` hold each byte of this layer, at least."""
        page = self.page(self.tokens_per_state or 1, tp=tp)
        return min(field.sharding.replicas(tp) for field in page.fields if not field.padding)

    def shard(self, tp: int, rank: int) -> dict[str, tuple[ShardRange, ...]]:
        """Which rows of each field's sharded axis `rank` holds; empty for all of them."""
        page = self.page(self.tokens_per_state or 1, tp=tp, rank=rank)
        return {field.name: field.ranges for field in page.fields if not field.padding}


def check(spec: Spec, *, sizes: tuple[str, ...] = (), counts: tuple[str, ...] = ()) -> None:
    """Refuse a spec with numbers or words that cannot be.

    msgspec checks what it decodes; this holds for what Python code constructs too.
    """
    for name in sizes:
        positive(getattr(spec, name), f"{name} of {type(spec).__name__}")
    for name in counts:
        natural(getattr(spec, name), f"{name} of {type(spec).__name__}")
    for name, words in _words(type(spec)).items():
        if getattr(spec, name) not in words:
            raise bad_spec(
                f"{name} of {type(spec).__name__} is one of its words",
                repr(getattr(spec, name)),
                f"Use one of {', '.join(map(str, words))}",
            )


def plain_dtype(name: str) -> DType:
    """A dtype whose elements stand for themselves: no packing, no scales."""
    dtype = DType.of(name)
    if dtype.packed or dtype.scale:
        raise bad_spec(
            "What is kept as it is has whole bytes and no scales",
            f"dtype {dtype}",
            "Use a cache dtype for quantised content",
        )
    return dtype


def bad_spec(rule: str, got: Any, hint: str) -> AtlasError:
    """A refusal of what a spec was given."""
    return AtlasError(Code.BAD_SPEC, rule, got=got, hint=hint)


def _words(kind: type[Spec]) -> dict[str, tuple[Any, ...]]:
    """Fields of a kind that take one of a few words, and those words."""
    found = _WORDS.get(kind)
    if found is None:
        hints = get_type_hints(kind)
        found = {name: words for name, hint in hints.items() if (words := _literals(hint))}
        _WORDS[kind] = found
    return found


def _literals(hint: Any) -> tuple[Any, ...]:
    """The words of a Literal, or of one in a union with None."""
    words = get_args(hint)
    if words and all(word is None or isinstance(word, str) for word in words):
        return words
    inner = [_literals(word) for word in words if word is not type(None)]
    if len(inner) == 1 and inner[0] and type(None) in words:
        return (*inner[0], None)
    return ()


_WORDS: dict[type[Spec], dict[str, tuple[Any, ...]]] = {}
