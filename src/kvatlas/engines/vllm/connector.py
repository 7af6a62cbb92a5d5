"""`KVAtlasConnector`: vLLM's connector interface for the scheduler and the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvatlas.engines.vllm.configured_tier import ConfiguredTier
from kvatlas.engines.vllm.connector_messages import KVAtlasEndpoint, KVAtlasStep, KVAtlasStored
from kvatlas.engines.vllm.connector_stats import KVAtlasPromMetrics, KVAtlasStats
from kvatlas.engines.vllm.describe import (
    check_tensors,
    describe_stage,
    described_model,
    join_stages,
)
from kvatlas.engines.vllm.ended_requests import EndedRequests
from kvatlas.engines.vllm.engine_log import join_engine_log
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.published_events import as_vllm_events
from kvatlas.engines.vllm.registered_caches import (
    check_reachable,
    device_for,
    from_all_stages,
    kernel_blocks,
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
from kvatlas.engines.vllm.tier_conversion import keeps_finished
from kvatlas.engines.vllm.tier_worker import TierCounts, TierWorker
from kvatlas.engines.vllm.transport_choice import choose_transport
from kvatlas.engines.vllm.weights_identity import engine_identity
from kvatlas.engines.vllm.worker_side import PullCounts, WorkerSide
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.tier.addresses import without_secrets
from kvatlas.wire import Memory

log = logging.getLogger("kvatlas.vllm")


class KVAtlasConnector(KVConnectorBase_V1, SupportsHMA):
    """Move caches of requests between vLLM engines with any block sizes, ranks and layouts."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        join_engine_log()
        check_version(vllm.__version__, KVConnectorBase_V1)
        check_backend(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = ConnectorSettings.read(extra)
        self._tier = ConfiguredTier(vllm_config, self._settings)
        self._ended = EndedRequests()
        self._idle = False
        """Whether the current step computes no tokens."""
        self._worker: WorkerSide | None = None
        self._start_worker: Callable[[], WorkerSide] | None = None
        """Starts this rank's node, once the caches are known."""
        self._tier_worker: TierWorker | None = None
        self._scheduler: SchedulerSide | None = None
        self._served: CacheIdentity | None = None
        """The identity of this engine's caches; peers must have the same identity."""
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
            self._use_tier(self._tier.find_local())

    # -- scheduler methods ---------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Record the endpoints of all ranks. If the tier is in a store, open the store."""
        for one in metadata.values():
            if not isinstance(
                one, KVAtlasEndpoint
            ):  # MultiConnector passes on its first member's metadata only
                raise AtlasError(
                    Code.ENGINE_REFUSES,
                    "The ranks sent handshake metadata of another connector",
                    got=type(one).__name__,
                    hint="List KVAtlasConnector first in the connectors of MultiConnector",
                )
        endpoints = {key: one.endpoint for key, one in metadata.items() if one.endpoint}
        self._in_scheduler().set_endpoints(endpoints)
        rows = {one.rows for one in metadata.values()}
        if self._settings.fleet_tier and not self._in_scheduler().has_tier:
            self._use_tier(self._tier.find_in_store(rows))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Bind vLLM's cache manager, to exclude incomplete blocks from its prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        check_managers(kv_cache_manager)
        self._in_scheduler().bind_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """Register a new request if its prefill and decode run on different engines."""
        self._in_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return a tuple (number of tokens to load, whether the load is asynchronous).

        The tokens follow the computed tokens, and come from another engine or the tier. The number
        is None while a lookup is running.
        """
        return self._in_scheduler().matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return the number of external tokens by their source, for vLLM's statistics."""
        source = self._cache_hit_source
        if self._in_scheduler().from_tier(request.request_id):
            source = self._tier.hit_source
        return {source: num_external_tokens}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """Return the ids of all groups: the connector also loads groups without prefix caching."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the workers to load external tokens into the blocks that were just allocated."""
        self._in_scheduler().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVAtlasStep:
        """Return the connector's orders to the workers for this step."""
        # Data-parallel ranks step together: a rank computes as long as any other rank does.
        together = getattr(self._vllm_config.parallel_config, "data_parallel_size", 1) > 1
        idle = not (scheduler_output.total_num_scheduled_tokens or together)
        step = KVAtlasStep(self._in_scheduler().take_orders(), idle)
        self._in_scheduler().scheduled(scheduler_output)
        return step

    def reset_cache(self) -> bool | None:
        """Invalidate the tier's content after a weight update; return None without a tier."""
        return self._in_scheduler().reset_tier()

    def update_connector_output(self, connector_output: Any) -> None:
        """Record what workers have received, sent or stored."""
        stored = connector_output.kv_connector_worker_meta
        if isinstance(stored, KVAtlasStored):
            self._in_scheduler().stored(stored.checkpoints)
        self._in_scheduler().received(connector_output.finished_recving)
        self._in_scheduler().sent(connector_output.finished_sending)

    def take_events(self) -> list[Any]:
        """Return vLLM events for blocks that the tier has stored or removed since the last call."""
        return as_vllm_events(self._in_scheduler().take_events())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as `request_finished_all_groups`, for an engine with one group."""
        return self._in_scheduler().finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return a tuple (whether to keep the finished request's blocks, `kv_transfer_params`)."""
        return self._in_scheduler().finished(request, block_ids)

    # -- worker methods ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the caches as a plan, and check the tensors against the plan.

        Then, depending on the settings, listen for peers that read the caches, open the tier, or do
        both.
        """
        config = self._vllm_config
        named = {name: tensor for name, tensor in kv_caches.items() if name in self._layers()}
        stage = describe_stage(
            config,
            self._kv_cache_config,
            backends=layer_backends(config, named),
            kernel_blocks=kernel_blocks(self._kv_cache_config, named),
            seen=seen_by_layers(config, named),
        )
        stages = from_all_stages(stage)
        plan = join_stages(stages)
        base = check_tensors(plan, stage, named)
        rank = get_pp_group().rank_in_group * plan.tp + get_tp_group().rank_in_group
        (pool,) = plan.rank_pools(rank).values()
        tensor = next(iter(named.values()))
        if not self._settings.alone:
            chosen = choose_transport(self._settings, on_gpu=tensor.device.type != "cpu")
            log.info("transport %s: %s", chosen.name, chosen.why)
            self._settings = chosen.applied_to(self._settings)
        memory = Memory(base, pool.nbytes, device_for(self._settings, tensor), owner=tensor)
        if self._settings.tier is not None:
            check_reachable(tensor)
            convert = self._tier.conversion(stage)
            tier = self._tier.open(self._settings.tier, described_model(stages), plan, convert)
            self._tier_worker = TierWorker(tier, plan, rank, memory, self._ended, convert)
            used = tier.plan if tier is not None else "unusable"
            log.info("tier %s: %s", without_secrets(self._settings.tier), used)
        if not self._settings.alone:
            port = config.parallel_config.data_parallel_index * plan.ranks + rank
            about = {"port": port, "identity": self._served, "ended": self._ended}
            self._start_worker = partial(WorkerSide, plan, rank, memory, self._settings, **about)
            self.restore_kv_caches()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Return True: the connector does not use the caches while the engine sleeps."""
        return True

    def unregister_kv_caches(self) -> None:
        """End all uses of the caches, whose memory vLLM is about to unmap; idempotent."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._tier_worker is not None:
            self._tier_worker.finish()

    def restore_kv_caches(self) -> None:
        """Let peers read the caches, at the start and when the engine wakes up; idempotent.

        The endpoint may have changed after sleep. vLLM then asks for the handshake metadata again.
        """
        if self._worker is None and self._start_worker is not None:
            self._worker = self._start_worker()
            listening = (self._settings.transport, self._worker.endpoint, self._worker.node.plan)
            log.info("%s at %s: %s", *listening)

    def get_handshake_metadata(self) -> KVAtlasEndpoint | None:
        """Return this rank's endpoint, and the plan of its tier if the tier is in a store.

        Return None if the rank has neither an endpoint nor such a plan.
        """
        if self._worker is None and not self._settings.fleet_tier:
            return None
        endpoint = None if self._worker is None else self._worker.endpoint
        return KVAtlasEndpoint(endpoint, self._tier.rows)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start the transfers that the scheduler ordered, without waiting for them."""
        step = self._get_connector_metadata()
        if not isinstance(step, KVAtlasStep):
            return
        orders, self._idle = step.orders, step.idle
        offered = {order.request_id for order in orders.offers}
        self._ended.hold_twice(
            offered & {one.request_id for one in orders.stores if not one.checkpoint}
        )
        if self._worker is not None:
            self._worker.carry_out(orders, idle=self._idle)
        if self._tier_worker is not None:
            self._tier_worker.carry_out(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after its load has finished."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: peers read finished requests directly from the cache."""

    def wait_for_save(self) -> None:
        """Do nothing: no save is in flight."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests that were sent or received, or that failed, since the last step."""
        worker, idle = self._worker, self._idle
        ended = self._ended.take() if worker is None else worker.take_ended(idle=idle)
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    def build_connector_worker_meta(self) -> KVAtlasStored | None:
        """Return the checkpoints that this worker has stored since the last step.

        Return None if there are none.
        """
        stored = self._tier_worker.take_checkpoints() if self._tier_worker else []
        return KVAtlasStored(dict.fromkeys(stored, 1)) if stored else None

    def get_kv_connector_stats(self) -> KVAtlasStats | None:
        """Return counts of transfers since the last step; None if all are zero."""
        pulled = self._worker.take_counts() if self._worker else PullCounts()
        kept = self._tier_worker.take_counts() if self._tier_worker else TierCounts()
        stats = KVAtlasStats.of(pulled, kept)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVAtlasStats:
        """Build statistics from a worker's counts."""
        return KVAtlasStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KVAtlasPromMetrics:
        """Build the Prometheus counters."""
        return KVAtlasPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the node, its sessions and, after pending stores have finished, the tier."""
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
                "A scheduler method was called on a worker's connector",
                got="role WORKER",
                hint="Use the connector with role SCHEDULER; if vLLM made this call, report a bug",
            )
        return self._scheduler

    def _use_tier(self, tier: PrefixTier | None) -> None:
        """Look up requests in a tier and store finished ones in it; do nothing if `tier` is None.

        Finished requests are not stored if the tier contains blocks of another dtype.
        """
        if tier is None:
            return
        settings, served = self._settings, self._vllm_config.model_config
        keeps = keeps_finished(settings, served)
        about: dict[str, Any] = {"keeps": keeps, "policy": settings.checkpoint_policy}
        self._in_scheduler().use_tier(tier, settings.lookup_seconds, **about)

    def _layers(self) -> set[str]:
        groups = self._kv_cache_config.transfer_groups
        return {name for group in groups for name in group.layer_names}


# MultiConnector looks up the statistics of its members by their registered names.
if "KVAtlasConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(
        "KVAtlasConnector", "kvatlas.engines.vllm", "KVAtlasConnector"
    )
