"""The store that an engine's setting names: every worker is a client of it, and the scheduler.

Workers know what the model keeps, and so what a row is like; they tell the scheduler, which
only asks what there is. A store that cannot be reached at the start is not used.
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
    settings: ConnectorSettings, own: Plan, identity: bytes, convert: Converting | None = None
) -> StoreTier | None:
    """The tier in the store that settings name, for one worker of an engine of this plan.

    With `convert` rows of engines with another cache dtype are found as well.
    """
    if own.pp > 1 and settings.tier_options.stages % own.pp:
        log.error("requests are read from the store and not kept: set stages in tier_options")
    about = {"max_len": own.max_len, "convert": convert}
    options = about | msgspec.structs.asdict(settings.tier_options)
    try:
        return open_store_tier(settings.tier or "", own, _whose(settings, identity), **options)
    except AtlasError as refusal:
        _check_unreachable(refusal)
        return None


def find_fleet_tier(settings: ConnectorSettings, rows: bytes, identity: bytes) -> StoreTier | None:
    """The same for the scheduler, which moves no rows; `rows` is the plan that workers have."""
    where, options = settings.tier or "", settings.tier_options
    # Memory for the store is given by workers alone.
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
                deadline=settings.lookup_seconds,
                other=None if convert is None else other_rows(own, convert, max_len=own.max_len),
            )
        except AtlasError as refusal:
            _check_unreachable(refusal)
            return None
        on_failure.pop_all()
        return tier


def _check_unreachable(refusal: AtlasError) -> None:
    """Go on without a store that cannot be reached; refuse what is wrong with the settings."""
    if refusal.code not in _UNREACHABLE:
        raise refusal
    log.error("nothing is kept or found again: %s", refusal)


def _whose(settings: ConnectorSettings, identity: bytes) -> CacheIdentity:
    return CacheIdentity(weights=identity.hex(), tenant=settings.tenant)
