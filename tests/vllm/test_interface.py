"""The connector as vLLM finds and asks it, without an engine."""

from __future__ import annotations

import dataclasses
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVQuantMode

from kvatlas import AtlasError
from kvatlas.engines.vllm import ConnectorSettings, KVAtlasConnector, describe_engine
from kvatlas.engines.vllm.connector_messages import KVAtlasEndpoint, KVAtlasStep
from kvatlas.engines.vllm.connector_stats import KVAtlasPromMetrics, KVAtlasStats
from kvatlas.engines.vllm.exported_counters import COUNTERS
from kvatlas.engines.vllm.layer_specs import READ_CLASSES, cache_dtype
from kvatlas.engines.vllm.orders import OfferOrder, StepOrders
from kvatlas.engines.vllm.supported_versions import METHODS, check_version
from kvatlas.engines.vllm.tier_worker import TierCounts
from kvatlas.engines.vllm.transfer_keys import TRANSFER_KEYS
from kvatlas.engines.vllm.worker_side import PullCounts, WorkerSide
from kvatlas.specs import ATTENTION_CACHES
from kvatlas.wire import Memory
from tests.identities import OURS
from tests.vllm.recorded_interface import (
    FOLDER,
    OVERRIDDEN,
    READ,
    REFUSED,
    bases,
    differences,
    interface_of,
    recorded,
)
from tests.vllm.shapes import Config, FullAttentionSpec, Group, vllm_config

pytestmark = pytest.mark.each_release

RELEASE = ".".join(vllm.__version__.split(".")[:2])


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


def test_every_method_and_field_of_vllm_is_one_that_we_decided_about() -> None:
    found = interface_of(bases(), kv_cache_interface)
    assert differences(RELEASE, found) == []
    known = recorded(RELEASE)
    assert known is not None
    own = {name for name in known["methods"] if name in vars(KVAtlasConnector)}
    assert own == {name for name, what in known["methods"].items() if what == OVERRIDDEN}
    layers = {
        name: one["decision"]
        for name, one in known["classes"].items()
        if name.endswith("Spec")
        and name not in ("KVCacheSpec", "AttentionSpec", "KVCacheGroupSpec")
    }
    assert {name for name, what in layers.items() if what == READ} == set(READ_CLASSES)
    assert set(layers.values()) == {READ, REFUSED}


def test_a_later_release_fails_by_the_names_of_what_is_new() -> None:
    """A simulated 0.34: a method more, a field with another name, a cache mode more."""

    class Next(KVConnectorBase_V1):  # type: ignore[misc]
        def prepare_for_sleep(self) -> None: ...

    found = interface_of([*bases(), Next], kv_cache_interface)
    fields = found["classes"]["MambaSpec"]
    fields[fields.index("mamba_cache_mode")] = "state_cache_mode"
    found["modes"].append("FP3")
    told = differences("0.34", found)
    newest = max(path.stem for path in FOLDER.glob("*.json"))
    assert f"vLLM 0.34 has no recorded interface; it was compared with {newest}" in told
    decide = "decide what the connector does with it, and record the decision"
    assert {
        f"new method prepare_for_sleep in vLLM 0.34: {decide}",
        f"new field of MambaSpec: state_cache_mode in vLLM 0.34: {decide}",
        f"missing field of MambaSpec: mamba_cache_mode in vLLM 0.34: {decide}",
        f"new cache mode FP3 in vLLM 0.34: {decide}",
    } <= set(told)


@pytest.mark.parametrize("mode", list(KVQuantMode.__members__))
def test_cache_modes_are_known_or_refused_by_name(mode: str) -> None:
    """Also those under a second name, as CUSTOM is in 0.33."""
    spec = SimpleNamespace(kv_quant_mode=KVQuantMode[mode])
    served: Any = SimpleNamespace(cache="auto")
    try:
        found = cache_dtype("l.0.attn", spec, served)
    except AtlasError as refusal:
        assert repr(KVQuantMode[mode].name.lower()) in str(refusal)
        assert "l.0.attn" in str(refusal)
    else:
        assert found in ATTENTION_CACHES
    new = SimpleNamespace(kv_quant_mode=SimpleNamespace(name="FP3"))
    with pytest.raises(AtlasError, match="'fp3' for l"):
        cache_dtype("l.0.attn", new, served)


def test_sleep_ends_registrations_and_waking_up_makes_them_again() -> None:
    """Without a GPU: a rank's node is closed, offers end, and another node has the same caches."""
    config = vllm_config()
    config.model_config.hf_config.to_dict = dict
    config.kv_transfer_config = transfer_config(transport="shm", weights_identity="tests")
    groups = Config([Group(FullAttentionSpec(block_size=64), ["a.0.attn"])])
    assert KVAtlasConnector.supports_sleep_mode(config.kv_transfer_config)
    made = KVAtlasConnector(config, KVConnectorRole.WORKER, groups)
    made.unregister_kv_caches()
    made.restore_kv_caches()
    assert made.get_handshake_metadata() is None, "there is nothing to restore yet"
    plan = describe_engine(config, groups)
    (pool,) = plan.rank_pools(0).values()
    cache = np.zeros(pool.nbytes, np.uint8)
    memory = Memory(cache.ctypes.data, cache.nbytes, owner=cache)
    settings = ConnectorSettings.read({"transport": "shm"})
    about: dict[str, Any] = {"port": 0, "identity": OURS, "ended": made._ended}
    made._start_worker = partial(WorkerSide, plan, 0, memory, settings, **about)
    endpoints = []
    for _ in range(3):
        made.restore_kv_caches()
        made.restore_kv_caches()
        metadata = made.get_handshake_metadata()
        assert metadata is not None
        assert metadata.endpoint is not None
        endpoints.append(metadata.endpoint)
        orders = StepOrders(offers=[OfferOrder("r", "r/1", ((1, 2),), 100)])
        made.bind_connector_metadata(KVAtlasStep(orders))
        made.start_load_kv(None)
        made.unregister_kv_caches()
        made.unregister_kv_caches()
        assert made.get_handshake_metadata() is None
        assert made.get_transfer_results(set()).finished_sending == {"r"}, "no block stays pinned"
        host, _, port = metadata.endpoint.rpartition("//")[2].rpartition(":")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(port)), timeout=5)
    made.shutdown()


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
