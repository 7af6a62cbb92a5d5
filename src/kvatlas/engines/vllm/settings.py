"""The keys of `kv_connector_extra_config`, their defaults and their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from kvatlas.engines.vllm.transfer_keys import TRANSFER_KEYS
from kvatlas.errors import AtlasError, Code
from kvatlas.planning.request import quantity
from kvatlas.pool import Checkpoints, checkpoint_policy
from kvatlas.routing.conversion import parse_conversion
from kvatlas.tier.addresses import without_secrets
from kvatlas.tier.opening import is_store
from kvatlas.wire import TRANSPORT_NAMES, How
from kvatlas.wire.client.transfer_request import how_hint

AUTO = "auto"
"""The transport is chosen when the engine registers its caches."""
_NO_TRANSPORT = "none"
_LOOPBACK = ("127.", "localhost", "::1")
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104
_IN_MEMORY = "memory"
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Scale = Annotated[float, Meta(gt=0)]


class StoreOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Options of an object store. A row is one stored block, which is divided into objects.

    `shards` and `stages` must be the same in all engines that share the store.
    """

    shards: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """The number of parts into which a row is divided along its heads.

    It must be a multiple of the tp of every engine that stores rows. The default suits each tp that
    is a power of two.
    """
    stages: Annotated[int, Meta(ge=1, le=4096)] = 1
    """The number of pipeline stages of the engines that store rows."""
    staging: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 << 20
    """Size in bytes of each worker's staging buffer, through which rows are read and written."""
    deadline: Seconds = 5.0
    """Timeout of a worker's calls to the store, in seconds; a timeout counts as a miss."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's settings: how engines reach each other, and the tier for finished requests.

    >>> ConnectorSettings.read({"transport": "shm", "lease_seconds": 60}).lease_seconds
    60.0
    >>> ConnectorSettings.read({"transports": "shm"})
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: kv_connector_extra_config contains an unknown key. Got \
'transports'. Did you mean 'transport'? [bad_config]
    """

    transport: str = AUTO
    """The transport: `nixl`, `tcp`, `shm` (one host only), ...; `none` to use a tier only. `auto`:
    shared memory on one host; between hosts NIXL over RDMA, or `tcp` without RDMA."""
    transport_options: dict[str, Any] = {}
    """Options of the transport, such as `{"device": "mlx5_0:1"}` for nixl."""
    how: How = "auto"
    """`direct`: one descriptor per run. `staged`: gather at the source. `coalesced`: scatter at the
    destination. `auto`: by measured cost."""
    listen: str = "127.0.0.1"
    """The address on which ranks listen for peers."""
    advertise: str | None = None
    """The host that peers connect to, if it differs from `listen`, as in containers."""
    ports: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The first port; rank r listens on `ports + r`. 0 selects free ports."""
    secret_file: str | None = None
    """A file with the secret that all engines share. Without it, they listen on loopback only."""
    unprotected: bool = False
    """Allow other hosts to connect without a secret, or over a transport that authenticates none,
    such as mooncake. For a trusted network."""
    lease_seconds: Seconds = 30.0
    """Seconds for which a prefill engine keeps the blocks of a finished request for peers."""
    pull_seconds: Seconds = 30.0
    """Seconds after which a decode engine's read of a request times out."""
    wait_for_offer: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    """Seconds for which a read waits for a request that is not offered yet."""
    checksums: bool = False
    """Verify the received bytes against checksums from the source."""
    buffers: Annotated[int, Meta(ge=0, le=1024)] = 8
    """Number of staging buffers per rank."""
    piece: Annotated[int, Meta(ge=4096, le=1 << 30)] = 8 << 20
    """Bytes per staging buffer."""
    tier: str | None = None
    """The tier for finished requests: `memory`, a file's path, or the address of a store."""
    tier_memory: str = "4GiB"
    """Size of a new tier in memory or in a file; ignored for an existing file and a store."""
    tier_options: StoreOptions = StoreOptions()
    """Options of a store, such as `{"stages": 2}` for two pipeline stages."""
    tier_checkpoints: str | None = None
    """Positions of a prompt at which windows and states are stored, by the names of
    `kvatlas.pool.checkpoints`. Default: `vllm-default+every-128` with windows, `vllm-default` with
    recurrent states."""
    tenant: str = ""
    """The tenant in a store; tenants cannot find each other's prefixes."""
    convert: str | None = None
    """Conversion of blocks that are read from the tier, such as `bf16->fp8`."""
    # msgspec 0.22 crashes on pairs of bounded numbers; the route checks their values instead.
    convert_scales: Scale | dict[str, float | tuple[float, float]] | None = None
    """Scales of quantised stored blocks: one for all layers, or by layer a number or (K, V)."""
    lookup_seconds: Seconds = 5.0
    """Seconds for which a request waits for its lookup in the tier before it is computed."""
    weights_identity: str | None = None
    """A name for the weights, used instead of a digest of the checkpoint's files."""
    check_identity: bool = True
    """Reject peers with different weights or config; to accept them, set false in both engines."""

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> ConnectorSettings:
        """Parse `kv_connector_extra_config`; errors name the invalid key."""
        given = dict(given or {})
        for key in given:
            if key not in cls.__struct_fields__:
                problem = "kv_connector_extra_config contains an unknown key"
                raise AtlasError(Code.BAD_CONFIG, problem, got=repr(key), hint=_key_hint(str(key)))
        if given.get("how", "auto") not in get_args(How):
            raise _bad(f"how {given['how']!r}", how_hint(given["how"]))
        try:
            settings = msgspec.convert(given, cls)
        except msgspec.ValidationError as wrong:
            hint = "Correct the value of this key, see docs/how-to/vllm.md"
            raise _bad(str(wrong), hint) from None
        if settings.alone and settings.tier is None:
            raise _bad("transport 'none' without a tier", "Set tier, or remove transport")
        known = (AUTO, *TRANSPORT_NAMES, _NO_TRANSPORT)
        if settings.transport not in known:
            hint = f"Choose one of {', '.join(known)}"
            raise _bad(f"transport {settings.transport!r}", hint)
        if settings.transport == AUTO and settings.transport_options:
            got = f"transport_options {settings.transport_options} with transport 'auto'"
            raise _bad(got, "Set transport too, because each transport has its own options")
        if settings.listen in _WILDCARDS and settings.advertise is None:
            raise _bad(
                f"listen {settings.listen!r}", "Set advertise to a host name that peers can reach"
            )
        quantity(settings.tier_memory, "tier_memory")
        settings._check_tier()
        return settings

    def _check_tier(self) -> None:
        """Raise if the tier's address is invalid or does not support the given options."""
        self._check_conversion()
        _ = self.checkpoint_policy
        if self.tier is None:
            return
        shown = without_secrets(self.tier)
        of_one_process = self.tier.startswith("host:")
        if is_store(self.tier) and not of_one_process:
            return
        if "://" in self.tier:
            hint = "Use mooncake://host:port, folder:///path, a file's path, or memory"
            raise _bad(f"tier {shown!r}", hint)
        hint = "Set tier to the address of a store, such as folder:///path, or remove the option"
        if self.tenant:
            raise _bad(f"tenant {self.tenant!r} with tier {shown!r}", hint)
        if self.tier_options != StoreOptions():
            raise _bad(f"tier_options with tier {shown!r}", hint)

    def _check_conversion(self) -> None:
        """Raise an error if `convert` is invalid, or if no other engine can share the tier."""
        if self.convert is None:
            if self.convert_scales is not None:
                hint = 'Set convert, for example to "fp8->bf16"'
                raise _bad("convert_scales without convert", hint)
            return
        if self.tier in (None, _IN_MEMORY):
            raise _bad(
                f"convert {self.convert!r} with tier {self.tier!r}",
                "Set tier to a file or a store that other engines use too",
            )
        if len(parse_conversion(self.convert)) > 1:
            hint = 'Set one pair of formats, such as "bf16->fp8"'
            raise _bad(f"convert {self.convert!r}", hint)

    @property
    def checkpoint_policy(self) -> Checkpoints | None:
        """The policy of `tier_checkpoints`; None for the default."""
        return None if self.tier_checkpoints is None else checkpoint_policy(self.tier_checkpoints)

    @property
    def fleet_tier(self) -> bool:
        """Whether the tier is in a store, which engines on several hosts can share."""
        return self.tier is not None and is_store(self.tier)

    @property
    def own_tier(self) -> str | None:
        """The tier if it is local to this host, in memory or in a file; otherwise None."""
        return None if self.fleet_tier else self.tier

    @property
    def reachable(self) -> str:
        """The host that the engine advertises to its peers."""
        return self.advertise or self.listen

    @property
    def own_address(self) -> str:
        """The address at which the engine listens.

        If the engine listens on all interfaces, this is the address that it advertises.
        """
        return self.reachable if self.listen in _WILDCARDS else self.listen

    @property
    def local(self) -> bool:
        """Whether the engine can be reached from its own host only."""
        return self.reachable.startswith(_LOOPBACK)

    @property
    def alone(self) -> bool:
        """Whether the engine uses a tier only and exchanges no caches with other engines."""
        return self.transport == _NO_TRANSPORT

    def secret(self) -> bytes | None:
        """Read the secret that all engines share, without surrounding whitespace; None if unset."""
        if self.secret_file is None:
            return None
        try:
            return Path(self.secret_file).read_bytes().strip()
        except OSError as problem:
            got = f"secret_file {self.secret_file!r}: {problem.strerror}"
            hint = "Check the path, and that the engine's user can read the file"
            raise _bad(got, hint) from None

    def listen_at(self, rank: int) -> str:
        """Return the endpoint on which a rank listens."""
        port = self.ports + rank if self.ports else 0
        if port > 65535:
            got = f"port {port} for rank {rank}, with ports {self.ports}"
            raise _bad(got, f"Set ports to at most {65535 - rank}")
        return f"tcp://{_host(self.listen)}:{port}"

    def advertised(self, endpoint: str) -> str:
        """Return the endpoint at which peers reach a rank that listens on `endpoint`."""
        port = endpoint.rpartition(":")[2]
        return f"tcp://{_host(self.advertise or self.listen)}:{port}"


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _key_hint(unknown: str) -> str:
    """Return the hint for an unknown key.

    For a key that vLLM reads itself, the hint names the place for the key. For other keys it names
    the setting with the most similar name, or else all settings.
    """
    if unknown in TRANSFER_KEYS:
        return "Put it into kv_transfer_config, as kv_role"
    known = ConnectorSettings.__struct_fields__
    near = get_close_matches(unknown, known, 1)
    return f"Did you mean {near[0]!r}?" if near else f"Valid keys: {', '.join(known)}"


def _bad(got: str, hint: str) -> AtlasError:
    problem = "kv_connector_extra_config is invalid"
    return AtlasError(Code.BAD_CONFIG, problem, got=got, hint=hint)
