"""Open a tier in an object store for an engine's workers and its scheduler.

A row is one stored block. The workers derive the format of rows from the model's layers, and send
the format to the scheduler, which only looks up keys. If the store cannot be reached at startup,
the engine runs without the store.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import msgspec

from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.tier_conversion import searching
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.tier import Converting, StoreTier, open_store
from kvatlas.tier.opening import open_store_tier, other_rows

log = logging.getLogger("kvatlas.vllm")

_UNREACHABLE = (Code.WIRE_FAILED, Code.UNREADABLE, Code.DEADLINE)


def open_fleet_tier(
    settings: ConnectorSettings,
    own: Plan,
    identity: CacheIdentity,
    convert: Converting | None = None,
) -> StoreTier | None:
    """Open the tier in the configured store for one worker; None if it cannot be reached.

    If `convert` is given, lookups also find blocks that engines with another cache dtype stored.
    """
    if own.pp > 1 and settings.tier_options.stages % own.pp:
        log.error(
            "requests are read from the store but not stored: stages in tier_options must be a "
            "multiple of the %d pipeline stages, but is %d",
            own.pp,
            settings.tier_options.stages,
        )
    about = {"max_len": own.max_len, "convert": convert}
    options = about | msgspec.structs.asdict(settings.tier_options)
    options["timeout"] = options.pop("deadline")  # the name of the setting
    try:
        return open_store_tier(settings.tier or "", own, _whose(settings, identity), **options)
    except AtlasError as refusal:
        _check_unreachable(refusal)
        return None


def find_fleet_tier(
    settings: ConnectorSettings, rows: bytes, identity: CacheIdentity
) -> StoreTier | None:
    """Open the tier in the configured store for the scheduler, which only looks up prefixes.

    `rows` is the tier's plan as JSON, from the workers. Return None if the store cannot be reached.
    """
    where, options = settings.tier or "", settings.tier_options
    # Only workers contribute memory to the store.
    none: dict[str, Any] = {"segment": 0} if where.startswith("mooncake:") else {}
    with ExitStack() as on_failure:
        try:
            store = open_store(where, **none)
            on_failure.callback(store.close)
            own = Plan.from_json(rows)
            convert = searching(settings)
            tier = StoreTier(
                store,
                own,
                _whose(settings, identity),
                shards=options.shards,
                stages=options.stages,
                staging=0,
                timeout=settings.lookup_seconds,
                other=None if convert is None else other_rows(own, convert, max_len=own.max_len),
            )
        except AtlasError as refusal:
            _check_unreachable(refusal)
            return None
        on_failure.pop_all()
        return tier


def _check_unreachable(refusal: AtlasError) -> None:
    """Log `refusal` if its code means that the store is unreachable; otherwise raise it."""
    if refusal.code not in _UNREACHABLE:
        raise refusal
    log.error("tier disabled: %s", refusal)


def _whose(settings: ConnectorSettings, identity: CacheIdentity) -> CacheIdentity:
    return msgspec.structs.replace(identity, tenant=settings.tenant)
