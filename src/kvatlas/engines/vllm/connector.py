"""`KVAtlasConnector`: vLLM's connector interface, divided between scheduler and workers."""

from __future__ import annotations

import logging
from collections import ChainMap
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvatlas.engines.vllm.connector_stats import KVAtlasPromMetrics, KVAtlasStats
from kvatlas.engines.vllm.describe import (
    DescribedStage,
    check_tensors,
    describe_stage,
    described_model,
    join_stages,
)
from kvatlas.engines.vllm.ended_requests import EndedRequests
from kvatlas.engines.vllm.engine_tier import IN_MEMORY, find_tier, open_tier
from kvatlas.engines.vllm.fleet_tier import find_fleet_tier, open_fleet_tier
from kvatlas.engines.vllm.orders import StepOrders
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.published_events import as_vllm_events
from kvatlas.engines.vllm.registered_caches import (
    check_reachable,
    from_all_stages,
    layer_backends,
    seen_by_layers,
    untouched_config,
)
from kvatlas.engines.vllm.scheduler_side import SchedulerSide
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.supported_versions import (
    check_backend,
    check_managers,
    check_version,
)
from kvatlas.engines.vllm.tier_conversion import (
    keeps_finished,
    layer_scales,
    prefix_identity,
    tier_converting,
)
from kvatlas.engines.vllm.tier_worker import TierCounts, TierWorker
from kvatlas.engines.vllm.weights_identity import engine_identity
from kvatlas.engines.vllm.worker_side import PullCounts, WorkerSide
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity, Model
from kvatlas.planning import Plan
from kvatlas.tier import Converting, StoreTier, TierClient
from kvatlas.tier.tier_events import MEMORY, STORAGE
from kvatlas.wire import Memory
from kvatlas.wire.memory_copy import device_of

log = logging.getLogger("kvatlas.vllm")


@dataclass
class KVAtlasStep(KVConnectorMetadata):
    """What the scheduler's side tells workers with every step."""

    orders: StepOrders = field(default_factory=StepOrders)
    idle: bool = False
    """Whether nothing is computed in it."""


@dataclass
class KVAtlasEndpoint(KVConnectorHandshakeMetadata):
    """Where one rank answers other engines, and what rows of a store look like to it."""

    endpoint: str | None
    rows: bytes | None = None
    """The plan of a fleet's tier, where the rank has opened one."""


class KVAtlasConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves requests' caches between vLLM engines, whatever their blocks, ranks and orders."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version(vllm.__version__, KVConnectorBase_V1)
        check_backend(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = ConnectorSettings.read(extra)
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._ended = EndedRequests()
        self._idle = False
        """Whether nothing is computed in the step that is under way."""
        self._worker: WorkerSide | None = None
        self._tier_worker: TierWorker | None = None
        self._rows: bytes | None = None
        """The plan of a fleet's tier, as a worker has opened it."""
        self._scheduler: SchedulerSide | None = None
        self._served: CacheIdentity | None = None
        """The identity of this engine's caches, which its peers must have as well."""
        if role == KVConnectorRole.WORKER and not self._settings.alone:
            untouched = untouched_config(vllm_config.model_config)
            self._served = engine_identity(vllm_config, self._settings, untouched)
        if role == KVConnectorRole.SCHEDULER:
            settings = self._settings
            self._scheduler = SchedulerSide(
                vllm_config,
                kv_cache_config,
                alone=settings.alone,
                lease_seconds=settings.lease_seconds,
            )
            tier = self._find_tier(settings.own_tier) if settings.own_tier else None
            if tier is not None:
                self._use_tier(tier)

    # -- the scheduler's side ---------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take the endpoints of all ranks."""
        for one in metadata.values():
            if not isinstance(one, KVAtlasEndpoint):  # of MultiConnector's first member alone
                raise AtlasError(
                    Code.ENGINE_REFUSES,
                    "Ranks told the scheduler's side where another connector is",
                    got=type(one).__name__,
                    hint="Name KVAtlasConnector first among MultiConnector's connectors",
                )
        endpoints = {key: one.endpoint for key, one in metadata.items() if one.endpoint}
        self._in_scheduler().set_endpoints(endpoints)
        rows = {one.rows for one in metadata.values()}
        if self._settings.fleet_tier:
            self._use_fleet_tier(rows)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the cache manager, which is told what not to cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        check_managers(kv_cache_manager)
        self._in_scheduler().bind_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self._in_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens another engine or the tier has, beyond those that are here."""
        return self._in_scheduler().matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where those tokens come from, for vLLM's statistics."""
        source = self._cache_hit_source
        if self._in_scheduler().from_tier(request.request_id):
            source = _hit_source(self._settings)
        return {source: num_external_tokens}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """All groups are read, not only those that can be found by their prefix."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were found for a request."""
        self._in_scheduler().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVAtlasStep:
        """What workers have to do after this step."""
        # vLLM says so of ranks that step together: each computes as long as one of them does.
        together = getattr(self._vllm_config.parallel_config, "data_parallel_size", 1) > 1
        idle = not (scheduler_output.total_num_scheduled_tokens or together)
        return KVAtlasStep(self._in_scheduler().take_orders(), idle)

    def reset_cache(self) -> bool | None:
        """Forget what the tier has, as vLLM asks where weights were updated."""
        return self._in_scheduler().reset_tier()

    def update_connector_output(self, connector_output: Any) -> None:
        """What workers have done."""
        self._in_scheduler().received(connector_output.finished_recving)
        self._in_scheduler().sent(connector_output.finished_sending)

    def take_events(self) -> list[Any]:
        """What the tier has since the last call, and what no more, for vLLM to publish."""
        return as_vllm_events(self._in_scheduler().take_events())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request with one group of blocks has finished."""
        return self._in_scheduler().finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished: whether its blocks are kept, and what its response says."""
        return self._in_scheduler().finished(request, block_ids)

    # -- a worker's side ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the caches, hold the tensors against that, and put them on the wire."""
        config = self._vllm_config
        named = {name: tensor for name, tensor in kv_caches.items() if name in self._layers()}
        stage = describe_stage(
            config,
            self._kv_cache_config,
            backends=layer_backends(config, named),
            kernel_blocks=self._kernel_blocks(named),
            seen=seen_by_layers(config, named),
        )
        stages = from_all_stages(stage)
        plan = join_stages(stages)
        base = check_tensors(plan, stage, named)
        rank = get_pp_group().rank_in_group * plan.tp + get_tp_group().rank_in_group
        (pool,) = plan.rank_pools(rank).values()
        tensor = next(iter(named.values()))
        memory = Memory(base, pool.nbytes, self._device(tensor), owner=tensor)
        if self._settings.tier is not None:
            check_reachable(tensor)
            convert = self._converting(stage)
            tier = self._open_tier(self._settings.tier, described_model(stages), plan, convert)
            self._tier_worker = TierWorker(tier, plan, rank, memory, self._ended, convert)
            used = tier.plan if tier is not None else "cannot be used"
            log.info("tier %s: %s", self._settings.tier, used)
        if not self._settings.alone:
            port = config.parallel_config.data_parallel_index * plan.ranks + rank
            about = (plan, rank, memory, self._settings)
            self._worker = WorkerSide(*about, port=port, identity=self._served, ended=self._ended)
            log.info("%s at %s: %s", self._settings.transport, self._worker.endpoint, plan)

    def get_handshake_metadata(self) -> KVAtlasEndpoint | None:
        """Where this rank answers other engines, and the plan of its tier in a store."""
        if self._worker is None and not self._settings.fleet_tier:
            return None
        endpoint = None if self._worker is None else self._worker.endpoint
        return KVAtlasEndpoint(endpoint, self._rows)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin what the scheduler has ordered; nothing is waited for."""
        step = self._get_connector_metadata()
        if not isinstance(step, KVAtlasStep):
            return
        orders, self._idle = step.orders, step.idle
        offered = {order.request_id for order in orders.offers}
        self._ended.hold_twice(offered & {order.request_id for order in orders.stores})
        if self._worker is not None:
            self._worker.carry_out(orders, idle=self._idle)
        if self._tier_worker is not None:
            self._tier_worker.carry_out(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is read while a step runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved: finished requests are read where they lie."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """What has been sent and received since the last step."""
        worker, idle = self._worker, self._idle
        ended = self._ended.take() if worker is None else worker.take_ended(idle=idle)
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    def get_kv_connector_stats(self) -> KVAtlasStats | None:
        """What was counted since the last step; None where that is nothing."""
        pulled = self._worker.take_counts() if self._worker else PullCounts()
        kept = self._tier_worker.take_counts() if self._tier_worker else TierCounts()
        stats = KVAtlasStats.of(pulled, kept)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVAtlasStats:
        """Counts that came from a worker."""
        return KVAtlasStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KVAtlasPromMetrics:
        """The same for Prometheus."""
        return KVAtlasPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the node and its sessions, and the tier once it has what it was given."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._tier_worker is not None:
            self._tier_worker.close()
            self._tier_worker = None
        if self._scheduler is not None:
            self._scheduler.close()

    # -- inside -------------------------------------------------------------------------------

    def _in_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "A worker was asked for what the scheduler's side knows",
                got="a question for the other role",
                hint="Please report it: vLLM asks otherwise than its interface says",
            )
        return self._scheduler

    def _open_tier(
        self, where: str, model: Model, own: Plan, convert: Converting | None
    ) -> TierClient | StoreTier | None:
        """The tier that the settings name, for this worker."""
        if not self._settings.fleet_tier:
            memory = self._settings.tier_memory
            return open_tier(where, memory, model, own, self._engine_id, convert)
        tier = open_fleet_tier(self._settings, own, self._identity(), convert)
        self._rows = None if tier is None else tier.plan.to_json()
        return tier

    def _converting(self, stage: DescribedStage) -> Converting | None:
        """How a tier's blocks become those of this engine, with the scales of all its layers."""
        if self._settings.convert is None:
            return None
        scales = from_all_stages(layer_scales(self._vllm_config, stage))
        return tier_converting(self._settings, dict(ChainMap(*scales)))

    def _find_tier(self, where: str) -> PrefixTier | None:
        """The tier that this engine's workers have opened, to ask what it has."""
        tier = find_tier(where, self._engine_id)
        if tier is None:
            return None
        return self._prefixes(tier, self._identity())

    def _use_fleet_tier(self, rows: set[bytes | None]) -> None:
        """Ask the store that all ranks have opened; one that some have not is never whole."""
        plan = rows.pop() if len(rows) == 1 else None
        if plan is None:
            log.error("nothing is kept or found again: not all ranks have opened the store alike")
            return
        tier = find_fleet_tier(self._settings, plan, self._identity())
        if self._vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning("requests whose tokens the store loses fail: set kv_load_failure_policy")
        if tier is not None:
            self._use_tier(self._prefixes(tier, b""))  # the identity is in the store's names

    def _use_tier(self, tier: PrefixTier) -> None:
        """Ask a tier from now on, and store into it unless it is of another cache dtype."""
        settings, served = self._settings, self._vllm_config.model_config
        keeps = keeps_finished(settings, served)
        self._in_scheduler().use_tier(tier, settings.lookup_seconds, keeps=keeps)

    def _prefixes(self, tier: TierClient | StoreTier, identity: bytes) -> PrefixTier:
        """What a tier has, and where vLLM publishes events, events of it."""
        events, medium = getattr(self._vllm_config, "kv_events_config", None), None
        if events is not None and events.enable_kv_cache_events:
            medium = MEMORY if self._settings.tier == IN_MEMORY else STORAGE
        longest = self._vllm_config.model_config.max_model_len
        return PrefixTier(tier, longest, identity, events_from=medium)

    def _identity(self) -> bytes:
        return prefix_identity(self._settings, self._vllm_config)

    def _layers(self) -> set[str]:
        groups = self._kv_cache_config.transfer_groups
        return {name for group in groups for name in group.layer_names}

    def _kernel_blocks(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        """Tokens of a kernel block by layer, where vLLM divides blocks for its kernels."""
        blocks = {}
        for group in self._kv_cache_config.transfer_groups:
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            for name in group.layer_names:
                spec = specs[name] if specs else group.kv_cache_spec
                if name in tensors:
                    split = max(1, tensors[name].shape[0] // self._kv_cache_config.num_blocks)
                    blocks[name] = spec.block_size // split
        return blocks

    def _device(self, tensor: torch.Tensor) -> str:
        """The device's name; memory of a GPU only where its transport was asked for."""
        settings = self._settings
        asked = settings.transport_options.get("kind") == "VRAM" or settings.transport == "cuda"
        if tensor.device.type == "cpu" or asked or settings.alone:
            return device_of(tensor)
        raise AtlasError(
            Code.WRONG_DEVICE,
            "The caches are in a GPU's memory, with which the connector was not run yet",
            got=f"tensors on {tensor.device}",
            hint='Try {"transport": "cuda"}, or nixl with {"kind": "VRAM"} as its options',
        )


# MultiConnector asks for its members' statistics by name, which only registered ones have.
if "KVAtlasConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(
        "KVAtlasConnector", "kvatlas.engines.vllm", "KVAtlasConnector"
    )


def _hit_source(settings: ConnectorSettings) -> CacheHitSource:
    """What vLLM's statistics call a tier."""
    if settings.fleet_tier:
        return CacheHitSource.EXTERNAL_UNSPECIFIED
    return CacheHitSource.HOST if settings.tier == IN_MEMORY else CacheHitSource.DISK
