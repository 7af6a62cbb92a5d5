"""vLLM integration: `KVAtlasConnector` moves KV caches between engines of any topology.

Select it with `--kv-transfer-config '{"kv_connector": "KVAtlasConnector",
"kv_connector_module_path": "kvatlas.engines.vllm", "kv_role": "kv_both"}'`. vLLM
is imported only when `KVAtlasConnector` is first accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvatlas.engines.vllm.describe import (
    DescribedStage,
    describe_engine,
    describe_stage,
    join_stages,
)
from kvatlas.engines.vllm.doctor import Diagnosis, diagnose, read_engine
from kvatlas.engines.vllm.engine_arguments import EngineArguments
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.supported_versions import lacking_name

if TYPE_CHECKING:
    from kvatlas.engines.vllm.connector import KVAtlasConnector

__all__ = [
    "ConnectorSettings",
    "DescribedStage",
    "Diagnosis",
    "EngineArguments",
    "KVAtlasConnector",
    "describe_engine",
    "describe_stage",
    "diagnose",
    "join_stages",
    "read_engine",
]


def __getattr__(name: str) -> Any:
    if name == "KVAtlasConnector":
        try:
            from kvatlas.engines.vllm.connector import KVAtlasConnector
        except ImportError as missing:
            raise lacking_name(missing) from missing
        return KVAtlasConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
