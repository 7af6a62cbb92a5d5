"""The flags and defaults of a memory budget are those of `vllm serve`."""

from __future__ import annotations

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvatlas.models import Weights, find_gpu
from kvatlas.planning import EngineLoad, Topology, gpu_budget

pytestmark = pytest.mark.each_release


@pytest.mark.parametrize(
    "topology",
    [Topology(), Topology(tp=8, dcp=4), Topology(tp=2, pp=2, dp=2), Topology(tp=2, dp=4, ep=8)],
    ids=str,
)
def test_vllm_parses_the_flags(topology: Topology) -> None:
    budget = gpu_budget(Weights.load("Qwen3-30B-A3B"), find_gpu("H200"), topology)
    flags = [word for flag in budget.flags(block_size=32) for word in flag.split()]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(flags)
    assert parsed.kv_cache_memory_bytes == budget.kv
    assert parsed.max_num_seqs == budget.load.sequences
    assert parsed.max_num_batched_tokens == budget.load.batched_tokens
    assert parsed.block_size == 32
    assert parsed.tensor_parallel_size == topology.tp
    assert parsed.pipeline_parallel_size == topology.pp
    assert parsed.data_parallel_size == topology.dp
    assert parsed.decode_context_parallel_size == topology.dcp
    assert parsed.enable_expert_parallel == (topology.ep > 1)


@pytest.mark.parametrize("name", ["H100", "H200", "A100", "B200", "L40S", "RTX-4090", "H20"])
def test_the_defaults_are_those_of_vllm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = find_gpu(name)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: gpu.memory)
    monkeypatch.setattr(current_platform, "get_device_name", lambda: f"NVIDIA {gpu.name}")
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(world_size=1)
    load = EngineLoad.default(gpu)
    assert load.batched_tokens == tokens[UsageContext.OPENAI_API_SERVER]
    assert load.sequences == sequences[UsageContext.OPENAI_API_SERVER]
