"""What `kv_connector_extra_config` may say: every key, its default, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from kvatlas.errors import AtlasError, Code
from kvatlas.planning.request import quantity
from kvatlas.routing.conversion import parse_conversion
from kvatlas.tier.opening import is_store
from kvatlas.wire import TRANSPORT_NAMES, How
from kvatlas.wire.client.transfer_request import how_hint

_NO_TRANSPORT = "none"
_IN_MEMORY = "memory"
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Scale = Annotated[float, Meta(gt=0)]


class StoreOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How engines use a store; `shards` and `stages` must be the same in the whole fleet."""

    shards: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Parts of a row: a multiple of every tp that stores; else what suits powers of two."""
    stages: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Pipeline stages of the engines that store."""
    staging: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 << 20
    """Bytes of each worker for rows on their way."""
    deadline: Seconds = 5.0
    """Seconds after which a store that does not answer a worker is a miss."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How engines reach each other, and where they keep what has finished.

    >>> ConnectorSettings.read({"transport": "shm", "lease_seconds": 60}).lease_seconds
    60.0
    >>> ConnectorSettings.read({"transports": "shm"})
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: kv_connector_extra_config has a key that the connector does not \
know. Got 'transports'. Did you mean 'transport'? [bad_config]
    """

    transport: str = "nixl"
    """How bytes move: nixl, mooncake, or shm between processes of one host; `none` not at all."""
    transport_options: dict[str, Any] = {}
    """Options of the transport's class: `{"device": "eth0"}` for nixl, say."""
    how: How = "auto"
    """One by one (`direct`), gathered (`staged`), scattered here (`coalesced`), or as measured."""
    listen: str = "127.0.0.1"
    """The address on which ranks answer their peers."""
    advertise: str | None = None
    """The host that peers are told, where it is another (containers); else `listen`."""
    ports: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The first port; rank r takes the r-th from there. 0 for any that are free."""
    secret_file: str | None = None
    """A file with the secret that all engines share. Without one they listen on loopback."""
    unprotected: bool = False
    """Listen on other addresses without a secret: in a network that is itself closed."""
    lease_seconds: Seconds = 30.0
    """How long a prefill engine keeps the blocks of a finished request to be read."""
    pull_seconds: Seconds = 30.0
    """How long a decode engine tries to read a request before it has failed."""
    wait_for_offer: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    """How long a request that is not offered yet may take to be so."""
    checksums: bool = False
    """Compare what has arrived with what the source has, byte by byte."""
    buffers: Annotated[int, Meta(ge=0, le=1024)] = 8
    """Staging buffers of each rank."""
    piece: Annotated[int, Meta(ge=4096, le=1 << 30)] = 8 << 20
    """Bytes of each."""
    tier: str | None = None
    """Where finished requests are kept: `memory`, a file's path, or the address of a store."""
    tier_memory: str = "4GiB"
    """Bytes of a tier; a file that is there stays as large as it is, a store is not asked."""
    tier_options: StoreOptions = StoreOptions()
    """How a store is used: `{"stages": 2}` for pipelines, say."""
    tenant: str = ""
    """Whose prefixes these are in a store: tenants find nothing of each other's."""
    convert: str | None = None
    """What is read from the tier becomes: `bf16->fp8`, where engines with bf16 have stored it."""
    # msgspec 0.22 crashes on pairs of numbers that are bounded; routes look at those in them.
    convert_scales: Scale | dict[str, float | tuple[float, float]] | None = None
    """What those engines quantise with, where they do: for all layers, or by layer (K, V)."""
    lookup_seconds: Seconds = 5.0
    """How long a request waits for what the tier has of it, before it is computed."""
    weights_identity: str | None = None
    """A name for the weights, used instead of a digest of the checkpoint's files."""
    check_identity: bool = True
    """Refuse peers whose weights or config differ; to accept them, both ends set it to false."""

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> ConnectorSettings:
        """Settings from vLLM's extra config, or a refusal that names the key."""
        given = dict(given or {})
        for key in given:
            if key not in cls.__struct_fields__:
                near = get_close_matches(str(key), cls.__struct_fields__, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Keys are {', '.join(_keys())}"
                problem = "kv_connector_extra_config has a key that the connector does not know"
                raise AtlasError(Code.BAD_CONFIG, problem, got=repr(key), hint=hint)
        if given.get("how", "auto") not in get_args(How):
            raise _bad(f"how {given['how']!r}", how_hint(given["how"]))
        try:
            settings = msgspec.convert(given, cls)
        except msgspec.ValidationError as wrong:
            raise _bad(str(wrong), "See docs/how-to/vllm.md for each key") from None
        if settings.alone and settings.tier is None:
            raise _bad("neither a transport nor a tier", "Leave transport out, or name a tier")
        if settings.transport not in (*TRANSPORT_NAMES, _NO_TRANSPORT):
            known = ", ".join((*TRANSPORT_NAMES, _NO_TRANSPORT))
            raise _bad(f"transport {settings.transport!r}", f"Choose one of {known}")
        if settings.listen in ("0.0.0.0", "::") and settings.advertise is None:  # noqa: S104
            raise _bad(f"listen {settings.listen!r}", "Say in advertise how peers reach this host")
        quantity(settings.tier_memory, "tier_memory")
        settings._check_tier()
        return settings

    def _check_tier(self) -> None:
        """Refuse a tier that no engine can open, and options that it cannot have."""
        self._check_conversion()
        if self.tier is None:
            return
        of_one_process = self.tier.startswith("host:")
        if is_store(self.tier) and not of_one_process:
            return
        if "://" in self.tier:
            hint = "Write mooncake://host:port, folder:///path, a file's path, or memory"
            raise _bad(f"tier {self.tier!r}", hint)
        if self.tenant or self.tier_options != StoreOptions():
            raise _bad(f"tenant or tier_options for tier {self.tier!r}", "Name a store as the tier")

    def _check_conversion(self) -> None:
        """Refuse a conversion of blocks that only this engine can have stored."""
        if self.convert is None:
            if self.convert_scales is not None:
                raise _bad("convert_scales alone", 'Say what is converted: "convert": "fp8->bf16"')
            return
        if self.tier in (None, _IN_MEMORY):
            raise _bad(
                f"convert {self.convert!r} with tier {self.tier!r}",
                "Name a file or a store that other engines keep their requests in",
            )
        if len(parse_conversion(self.convert)) > 1:
            raise _bad(f"convert {self.convert!r}", "Name one pair of formats: bf16->fp8")

    @property
    def fleet_tier(self) -> bool:
        """Whether the tier is in a store, which engines of many hosts share."""
        return self.tier is not None and is_store(self.tier)

    @property
    def own_tier(self) -> str | None:
        """The tier that is this host's: in memory, or in a file."""
        return None if self.fleet_tier else self.tier

    @property
    def alone(self) -> bool:
        """Whether an engine has a tier, and speaks to no other."""
        return self.transport == _NO_TRANSPORT

    def secret(self) -> bytes | None:
        """The shared secret, without the line's end."""
        if self.secret_file is None:
            return None
        try:
            return Path(self.secret_file).read_bytes().strip()
        except OSError as problem:
            got = f"secret_file {self.secret_file!r}: {problem.strerror}"
            raise _bad(got, "Let the engine's user read it") from None

    def listen_at(self, rank: int) -> str:
        """Where a rank listens."""
        port = self.ports + rank if self.ports else 0
        if port > 65535:
            raise _bad(f"ports from {self.ports} for rank {rank}", "Begin at a lower port")
        return f"tcp://{_host(self.listen)}:{port}"

    def advertised(self, endpoint: str) -> str:
        """An endpoint as peers are told it."""
        port = endpoint.rpartition(":")[2]
        return f"tcp://{_host(self.advertise or self.listen)}:{port}"


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _keys() -> tuple[str, ...]:
    return ConnectorSettings.__struct_fields__


def _bad(got: str, hint: str) -> AtlasError:
    problem = "kv_connector_extra_config cannot be used"
    return AtlasError(Code.BAD_CONFIG, problem, got=got, hint=hint)
