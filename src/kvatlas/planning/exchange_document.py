"""`CacheDocument`: a cache in the exchange format, which other programs read and write.

The format is specified in `docs/reference/exchange.md`. A document describes the memory of a cache
on all of its ranks: the fields of every layer with their axes, strides and shards, the groups of
layers that share block tables, and the identity of the model. A document contains no spec and no
layout name, so that engines without kvatlas can write and read documents. A `TablesDocument` has
the blocks of one request.

A document has only one valid encoding, its canonical bytes. Bytes from outside are decoded, encoded
again and compared, so that equal digests mean equal documents.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.planning.exchange_checks import bad_exchange, check_document, check_tables_of
from kvatlas.planning.exchange_parts import MOST, DocumentData, TablesData

VERSION = 1
LARGEST_DOCUMENT = 16 << 20
"""Limit on the bytes of a document; those of real models have at most 400,000."""


class CacheDocument(DocumentData, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A description of a cache in the exchange format: the memory of every rank, as plain data.

    >>> from kvatlas.planning import plan, to_exchange
    >>> document = to_exchange(plan("Qwen3-8B", memory="8GiB"))
    >>> document.layers[0].fields[1].name, document.layers[0].fields[1].axes["H"]
    ('v', ((8, 512),))
    >>> CacheDocument.from_json(document.to_json()) == document
    True
    """

    @classmethod
    def from_json(cls, text: bytes) -> CacheDocument:
        """Read a document from untrusted bytes and validate it.

        >>> CacheDocument.from_json(b'{"format":"kv-exchange","version":2}')
        Traceback (most recent call last):
        kvatlas.errors.AtlasError: The document's version is not supported. Got version 2. \
Ask for a document of version 1, or upgrade kvatlas. [unlike_versions]
        """
        document = _decode(text, cls, "kv-exchange")
        document.validate()
        return document

    def validate(self) -> None:
        """Raise an error if fields overlap, are out of bounds or contradict each other."""
        check_document(self)

    def to_json(self) -> bytes:
        """Return the canonical bytes of the document."""
        return msgspec.json.encode(self, order="sorted")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the canonical bytes, in hexadecimal digits."""
        import hashlib  # slow to import, and only needed for digests

        return hashlib.sha256(self.to_json()).hexdigest()


class TablesDocument(TablesData, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The block tables of one request in the exchange format.

    >>> from kvatlas.planning import plan, to_exchange
    >>> from kvatlas.planning.exchange_parts import GroupTable
    >>> document = to_exchange(plan("Qwen3-8B", memory="8GiB"))
    >>> table = GroupTable(group=0, tokens=(0, 20), blocks=(7, 4))
    >>> tables = TablesDocument(cache=document.digest, tables=(table,))
    >>> TablesDocument.from_json(tables.to_json(), document) == tables
    True
    """

    @classmethod
    def from_json(cls, text: bytes, document: CacheDocument) -> TablesDocument:
        """Read the tables of a request from untrusted bytes, and validate them for `document`."""
        tables = _decode(text, cls, "kv-exchange-tables")
        check_tables_of(document, document.digest, tables)
        return tables

    def to_json(self) -> bytes:
        """Return the canonical bytes of the tables."""
        return msgspec.json.encode(self, order="sorted")


Decoded = TypeVar("Decoded", CacheDocument, TablesDocument)


def _decode(text: bytes, kind: type[Decoded], name: str) -> Decoded:
    """Decode canonical JSON; raise an error if it is of another format, version or structure."""
    value = _json(text)
    if not isinstance(value, dict) or value.get("format") != name:
        got = f"format {value.get('format')!r:.100}" if isinstance(value, dict) else "no object"
        raise bad_exchange(f"The document must be an object of format {name}", got)
    version = value.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= MOST:
        raise bad_exchange("The version must be a positive integer", f"{version!r:.100}")
    if version != VERSION:
        problem = "The document's version is not supported"
        hint = f"Ask for a document of version {VERSION}, or upgrade kvatlas"
        raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=f"version {version}", hint=hint)
    try:
        decoded = msgspec.convert(value, type=kind)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as problem:
        # msgspec encodes unknown keys and tags as UTF-8, which fails for half of a surrogate pair
        raise bad_exchange("The document has the wrong structure", problem) from None
    if decoded.to_json() != text:
        raise AtlasError(
            Code.NOT_CANONICAL,
            got=f"{len(text):,} bytes, whose canonical form has {len(decoded.to_json()):,}",
            hint="Sort the keys, and write no blanks, no repeated keys and no fractions",
        )
    return decoded


def _json(text: bytes) -> Any:
    """Decode JSON. 1.0 becomes 1, and integers that are too large become -1, which is invalid."""
    import json  # slow to import, and only needed for documents

    hint = "Pass the bytes of a document of the exchange format"
    if not isinstance(text, bytes) or len(text) > LARGEST_DOCUMENT:
        got = f"{len(text):,} bytes" if isinstance(text, bytes) else f"a {type(text).__name__}"
        problem = f"A document must have at most {LARGEST_DOCUMENT:,} bytes"
        raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
    try:
        return json.loads(
            text.decode(), parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
    except RecursionError:
        raise bad_exchange("The document is nested too deeply", f"{len(text):,} bytes") from None
    except ValueError as error:
        problem = "The document is not JSON in UTF-8"
        raise AtlasError(Code.UNREADABLE, problem, got=error, hint=hint) from None


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= len(str(MOST)) + 1 else -1


def _float(digits: str) -> float:
    number = float(digits)
    return int(number) if number.is_integer() and abs(number) <= MOST else number


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
