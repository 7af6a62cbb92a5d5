"""`KVAtlasConnector`: vLLM's connector interface, divided between scheduler and workers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
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
    join_stages,
)
from kvatlas.engines.vllm.orders import StepOrders
from kvatlas.engines.vllm.scheduler_side import SchedulerSide
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.supported_versions import check_managers, check_version
from kvatlas.engines.vllm.worker_side import WorkerSide
from kvatlas.errors import AtlasError, Code
from kvatlas.wire import Memory, device_of

log = logging.getLogger("kvatlas.vllm")


@dataclass
class KVAtlasStep(KVConnectorMetadata):
    """What the scheduler's side tells workers with every step."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class KVAtlasEndpoint(KVConnectorHandshakeMetadata):
    """Where one rank answers other engines."""

    endpoint: str


class KVAtlasConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves requests' caches between vLLM engines, whatever their blocks, ranks and orders."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version(vllm.__version__, KVConnectorBase_V1)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = ConnectorSettings.read(extra)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config)

    # -- the scheduler's side ---------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take the endpoints of all ranks."""
        endpoints = {key: one.endpoint for key, one in metadata.items()}
        self._in_scheduler().set_endpoints(endpoints)

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
        """How many tokens another engine has, beyond those that are here."""
        return self._in_scheduler().matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """All groups are read, not only those that can be found by their prefix."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were found for a request."""
        self._in_scheduler().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVAtlasStep:  # noqa: ARG002
        """What workers have to do after this step."""
        return KVAtlasStep(self._in_scheduler().take_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        """What workers have done."""
        self._in_scheduler().received(connector_output.finished_recving)

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
            backends=_backends(config, named),
            kernel_blocks=self._kernel_blocks(named),
        )
        plan = join_stages(_all_stages(stage))
        base = check_tensors(plan, stage, named)
        parallel = config.parallel_config
        rank = get_pp_group().rank_in_group * plan.tp + get_tp_group().rank_in_group
        (pool,) = plan.rank_pools(rank).values()
        tensor = next(iter(named.values()))
        memory = Memory(base, pool.nbytes, self._device(tensor), owner=tensor)
        port = parallel.data_parallel_index * plan.ranks + rank
        self._worker = WorkerSide(plan, rank, memory, self._settings, port=port)
        log.info("%s at %s: %s", self._settings.transport, self._worker.endpoint, plan)

    def get_handshake_metadata(self) -> KVAtlasEndpoint | None:
        """Where this rank answers other engines."""
        return None if self._worker is None else KVAtlasEndpoint(self._worker.endpoint)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin what the scheduler has ordered; nothing is waited for."""
        step = self._get_connector_metadata()
        if self._worker is not None and isinstance(step, KVAtlasStep):
            self._worker.carry_out(step.orders)

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
        if self._worker is None:
            return KVConnectorTransferResults()
        ended = self._worker.take_ended()
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    def get_kv_connector_stats(self) -> KVAtlasStats | None:
        """What was counted since the last step; None where that is nothing."""
        if self._worker is None:
            return None
        stats = KVAtlasStats.of(self._worker.take_counts())
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
        """Close the node and its sessions."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

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
        asked = self._settings.transport_options.get("kind") == "VRAM"
        if tensor.device.type == "cpu" or asked or self._settings.transport == "cuda":
            return device_of(tensor)
        raise AtlasError(
            Code.WRONG_DEVICE,
            "The caches are in a GPU's memory, with which the connector was not run yet",
            got=f"tensors on {tensor.device}",
            hint='Try {"transport": "cuda"}, or nixl with {"kind": "VRAM"} as its options',
        )


def _backends(vllm_config: Any, layers: Any) -> dict[str, str]:
    """The attention backend of each layer, as its module says."""
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layers:
        backend = getattr(modules.get(name), "get_attn_backend", lambda: None)()
        if backend is not None:
            found[name] = backend.get_name()
    return found


def _all_stages(stage: DescribedStage) -> list[DescribedStage]:
    """What every pipeline stage keeps, in their order: each tells the others."""
    group = get_pp_group()
    if group.world_size == 1:
        return [stage]
    stages: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(stages, stage, group=group.cpu_group)
    return stages
