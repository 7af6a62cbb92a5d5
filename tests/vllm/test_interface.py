"""The connector as vLLM finds and asks it, without an engine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)

from kvatlas import AtlasError
from kvatlas.engines.vllm import KVAtlasConnector
from kvatlas.engines.vllm.connector import KVAtlasEndpoint
from kvatlas.engines.vllm.connector_stats import COUNTERS, KVAtlasPromMetrics, KVAtlasStats
from kvatlas.engines.vllm.supported_versions import METHODS, check_version
from kvatlas.engines.vllm.tier_worker import TierCounts
from kvatlas.engines.vllm.transfer_keys import TRANSFER_KEYS
from kvatlas.engines.vllm.worker_side import PullCounts
from tests.vllm.shapes import Config, FullAttentionSpec, Group, vllm_config


def transfer_config(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KVAtlasConnector",
        kv_connector_module_path="kvatlas.engines.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


def test_vllm_finds_the_connector_by_its_flag() -> None:
    found = KVConnectorFactory.get_connector_class(transfer_config())
    assert found is KVAtlasConnector
    assert supports_hma(found)
    check_version(vllm.__version__, KVConnectorBase_V1)
    overridden = {name for name in METHODS if name in vars(KVAtlasConnector)}
    assert set(METHODS) - overridden == {"bind_connector_metadata"}


def test_the_keys_beside_the_role_are_vllms() -> None:
    assert set(TRANSFER_KEYS) == {field.name for field in dataclasses.fields(KVTransferConfig)}


def test_settings_are_read_when_the_engine_starts() -> None:
    config = vllm_config()
    config.model_config.hf_config.to_dict = dict
    config.kv_transfer_config = transfer_config(lease_second=3)
    about = (config, KVConnectorRole.SCHEDULER, Config([Group(FullAttentionSpec(block_size=64))]))
    with pytest.raises(AtlasError, match="lease_seconds"):
        KVAtlasConnector(*about)
    config.kv_transfer_config = transfer_config(lease_seconds=3, weights_identity="tests")
    made = KVAtlasConnector(*about)
    step = made.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))
    assert not step.orders.pulls
    assert step.idle
    assert not made.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=7)).idle
    config.parallel_config.data_parallel_size = 2
    together = made.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))
    assert not together.idle, "others would wait for it"
    config.parallel_config.data_parallel_size = 1
    assert made.get_handshake_metadata() is None
    worker = KVAtlasConnector(config, KVConnectorRole.WORKER, about[2])
    with pytest.raises(AtlasError):
        worker.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))
    assert worker.get_transfer_results(set()).finished_sending == set()
    worker.shutdown()


def test_as_a_member_of_vllms_multi_connector() -> None:
    """Its statistics are found by name, and another member's handshake is not taken for its own."""
    stats = KVAtlasStats.of(PullCounts(pulls=2))
    sent = MultiKVConnectorStats({"KVAtlasConnector": stats}).to_dict()
    built = MultiConnector.build_kv_connector_stats(sent)
    assert built is not None
    assert built.data["KVAtlasConnector"].data["pulls"] == 2
    config = vllm_config()
    config.kv_transfer_config = transfer_config()
    groups = Config([Group(FullAttentionSpec(block_size=64))])
    made = KVAtlasConnector(config, KVConnectorRole.SCHEDULER, groups)
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): KVAtlasEndpoint("tcp://h:1")})
    with pytest.raises(AtlasError, match="first in the connectors of MultiConnector"):
        made.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})


def test_counts_of_ranks_add_up_in_vllms_statistics() -> None:
    kept = TierCounts(tier_loads=2, tier_tokens=640, tier_stores=5)
    one = KVAtlasStats.of(PullCounts(pulls=1, nbytes=2_000_000, seconds=0.5), kept)
    other = KVAtlasStats.of(PullCounts(pulls=3, failures=1, expired=2))
    assert not one.is_empty()
    assert KVAtlasStats().is_empty()
    both = KVAtlasConnector.build_kv_connector_stats(one.to_dict()).aggregate(other)
    said = both.reduce()
    read = {"Requests read": 4, "Failed": 1, "Expired": 2, "MB": 2.0, "Avg ms": 125.0}
    assert said == read | {"From the tier": 2, "Tokens from the tier": 640, "Kept": 5}
    registry = CollectorRegistry()
    kinds = {kind: _in(kind, registry) for kind in (Counter, Gauge, Histogram)}
    config = vllm_config()
    config.kv_transfer_config = transfer_config()
    counters = KVAtlasPromMetrics(config, kinds, ["engine"], {0: ["0"]})
    counters.observe(both.to_dict(), 0)
    for name in COUNTERS:
        value = registry.get_sample_value(f"vllm:kvatlas_{name}_total", {"engine": "0"})
        assert value == both.data[name]


def _in(kind: Any, registry: CollectorRegistry) -> Any:
    return lambda **about: kind(**about, registry=registry)
