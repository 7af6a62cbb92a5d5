"""How tests configure engines and sample requests, and what an answer says of an output."""

from __future__ import annotations

import os
from typing import Any


def engine_config(model: str, connector: Any, options: dict[str, Any]) -> Any:
    """What vLLM makes of an engine's arguments, in its own process."""
    from vllm import EngineArgs
    from vllm.config import KVEventsConfig

    given: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "num_gpu_blocks_override": 256,
        "kv_transfer_config": connector,
    }
    if "kv_cache_memory_bytes" in options:
        del os.environ["VLLM_CPU_KVCACHE_SPACE"]  # which is whole GiB, and would win
    if "kv_events_config" in options:
        options = options | {"kv_events_config": KVEventsConfig(**options["kv_events_config"])}
    config = EngineArgs(model=model, **given | options).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # ranks too have imported all they need
    return config


def sampling(tokens: int, params: Any, samples: int = 1) -> Any:
    """How a request is sampled, with its kv_transfer_params: greedily, or seeded if several."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    several: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 11,
        "n": samples,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(
        max_tokens=tokens,
        logprobs=1,
        ignore_eos=True,
        detokenize=False,
        extra_args=None if params is None else {"kv_transfer_params": params},
        **(several if samples > 1 else {"temperature": 0}),
    )


def answer_of(output: Any) -> dict[str, Any]:
    """What an `Answer` says of a request that vLLM has finished."""
    made = output.outputs[0]
    chosen = [
        step[token].logprob
        for step, token in zip(made.logprobs or (), made.token_ids, strict=False)
    ]
    return {
        "tokens": list(made.token_ids),
        "logprobs": chosen,
        "params": output.kv_transfer_params,
        "reason": str(made.finish_reason),
        "cached": output.num_cached_tokens or 0,
        "samples": [list(one.token_ids) for one in output.outputs],
        "reasons": [str(one.finish_reason) for one in output.outputs],
    }
