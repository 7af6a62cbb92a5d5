"""An engine whose core is a process of its own, as `vllm serve` has it, asked from a file.

Run as `python -m tests.vllm.llm_process FILE`: the file has a model, a connector, options and
prompts as JSON, and is replaced by the answers: tokens, and how many were not computed. Each
prompt is asked twice, the second time until something of it is found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
SECONDS = 60.0


def main(path: Path) -> None:
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.loads(path.read_text())
    engine = LLM(
        model=asked["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        num_gpu_blocks_override=256,
        kv_transfer_config=asked["connector"],
        **asked["options"],
    )
    about = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        (answer,) = engine.generate([{"prompt_token_ids": prompt}], about, use_tqdm=False)
        return list(answer.outputs[0].token_ids), answer.num_cached_tokens or 0

    answers = []
    for prompt in asked["prompts"]:
        first, again = ask(prompt), ask(prompt)
        until = time.monotonic() + SECONDS
        while not again[1] and time.monotonic() < until:
            again = ask(prompt)
        answers.append([first, again])
    path.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
