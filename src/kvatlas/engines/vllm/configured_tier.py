"""Open the tier that the connector's settings name, in a worker or in the scheduler.

Workers open the tier, load from it and store in it. The scheduler connects to the tier that the
workers opened, and only looks up prefixes.
"""

from __future__ import annotations

import logging
from collections import ChainMap
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvatlas.engines.vllm.describe import DescribedStage
from kvatlas.engines.vllm.engine_tier import IN_MEMORY, find_tier, open_tier
from kvatlas.engines.vllm.fleet_tier import find_fleet_tier, open_fleet_tier
from kvatlas.engines.vllm.layer_specs import dtype_name
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.registered_caches import from_all_stages, untouched_config
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.tier_conversion import (
    layer_scales,
    prefix_identity,
    stored_dtype,
    tier_converting,
)
from kvatlas.engines.vllm.weights_identity import stored_identity
from kvatlas.models import CacheIdentity, Model
from kvatlas.planning import Plan
from kvatlas.tier import Converting, StoreTier, TierClient
from kvatlas.tier.tier_events import MEMORY, STORAGE

log = logging.getLogger("kvatlas.vllm")


class ConfiguredTier:
    """The tier that the settings name: in memory, in a file, or in a store."""

    def __init__(self, vllm_config: Any, settings: ConnectorSettings) -> None:
        self._vllm_config, self._settings = vllm_config, settings
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self.rows: bytes | None = None
        """The plan of the store's tier that this worker opened, as JSON."""

    @property
    def hit_source(self) -> CacheHitSource:
        """The label under which vLLM's statistics count tokens from this tier."""
        if self._settings.fleet_tier:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST if self._settings.tier == IN_MEMORY else CacheHitSource.DISK

    # -- workers ------------------------------------------------------------------------------

    def open(
        self, where: str, model: Model, own: Plan, convert: Converting | None
    ) -> TierClient | StoreTier | None:
        """Open the tier at `where` for this worker; None if it cannot be used.

        `own` is the plan of this engine's caches.
        """
        if not self._settings.fleet_tier:
            memory = self._settings.tier_memory
            return open_tier(where, memory, model, own, self._engine_id, convert)
        tier = open_fleet_tier(self._settings, own, self._fleet_identity(), convert)
        self.rows = None if tier is None else tier.plan.to_json()
        return tier

    def conversion(self, stage: DescribedStage) -> Converting | None:
        """Return how to convert the tier's blocks to this engine's cache dtype.

        The result contains scales for all layers, including those of other pipeline stages. The
        result is None if the settings specify no conversion.
        """
        if self._settings.convert is None:
            return None
        scales = from_all_stages(layer_scales(self._vllm_config, stage))
        return tier_converting(self._settings, dict(ChainMap(*scales)))

    # -- scheduler ----------------------------------------------------------------------------

    def find_local(self) -> PrefixTier | None:
        """Connect to the tier on this host that the workers opened; None if there is none."""
        where = self._settings.own_tier
        tier = find_tier(where, self._engine_id) if where else None
        return None if tier is None else self._prefixes(tier, self._identity())

    def find_in_store(self, rows: set[bytes | None]) -> PrefixTier | None:
        """Open the store for lookups; None if it cannot be used.

        Each rank has reported its plan of the tier. `rows` contains the different plans, as JSON;
        None stands for ranks without a tier. If there are several, the store is not used, because
        no block would be stored completely.
        """
        plan = rows.pop() if len(rows) == 1 else None
        if plan is None:
            log.error("tier disabled: the ranks did not all open the store with the same plan")
            return None
        tier = find_fleet_tier(self._settings, plan, self._fleet_identity())
        if self._vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning(
                "a request fails if the store evicts its tokens before they are loaded: "
                'set kv_load_failure_policy to "recompute"'
            )
        # The store's object names contain the identity already.
        return None if tier is None else self._prefixes(tier, b"")

    def _prefixes(self, tier: TierClient | StoreTier, identity: bytes) -> PrefixTier:
        """Return an object that looks up prefixes in a tier.

        If vLLM publishes KV cache events, the object also reports events for the tier's blocks.
        """
        events, medium = getattr(self._vllm_config, "kv_events_config", None), None
        if events is not None and events.enable_kv_cache_events:
            medium = MEMORY if self._settings.tier == IN_MEMORY else STORAGE
        longest = self._vllm_config.model_config.max_model_len
        return PrefixTier(tier, longest, identity, events_from=medium)

    def _identity(self) -> bytes:
        return prefix_identity(self._settings, self._vllm_config)

    def _fleet_identity(self) -> CacheIdentity:
        """Return the identity under which this engine stores blocks in an object store.

        Other engines, including engines other than vLLM, find these blocks if they serve the same
        model and store the elements of K in the same order.
        """
        served = self._vllm_config.model_config
        dtype = dtype_name(stored_dtype(self._settings, served))
        untouched = untouched_config(served)
        return stored_identity(self._vllm_config, self._settings, untouched, dtype)
