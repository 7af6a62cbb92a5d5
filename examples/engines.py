"""Move a cache between engines: SGLang, LMCache, TensorRT-LLM's order, transformers and vLLM.

`python -m examples.engines pools FOLDER` needs SGLang and LMCache: a reference model fills their
pools and chunks, the cache is moved to transformers, and transformers goes on from it. The script
also stores the cache of an SGLang pool in a tier. `python -m examples.engines live FOLDER` needs
vLLM for CPUs: vLLM and transformers go on from each other's caches, and vLLM from SGLang's. Each
table row states whether the tokens and logprobs equal those of an engine that computed all tokens
itself. In `control` rows, the cache of another prompt is used, and the tokens must differ.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from rich.console import Console
from rich.table import Table

from kvatlas.engines.engine_memory import EngineMemory
from kvatlas.engines.request_copy import CopiedRequest, copy_request
from kvatlas.engines.transformers import AtlasCache, PrefixReuse
from kvatlas.models import Model

CLOSE = 1e-3
"""Logprobs in float32 that count as equal: engines sum in different orders."""
LAYERS, HEADS, WIDTH, VOCABULARY = 3, 2, 32, 512
PROMPT, NEW, LONGEST, PAGE = 150, 12, 256, 16


class Answer(NamedTuple):
    """The tokens of a completion, and the logprob of each."""

    tokens: list[int]
    logprobs: list[float]

    def equals(self, other: Answer) -> bool:
        """Return whether tokens and logprobs are equal."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and all(abs(a - b) <= CLOSE for a, b in pairs)


class Row(NamedTuple):
    """A row of the table; a control must not be equal."""

    source: str
    destination: str
    layouts: str
    nbytes: int
    runs: int | None
    equal: bool
    control: bool = False


def prompt(seed: int) -> list[int]:
    """Tokens that do not repeat, so that a cache in the wrong place gives other tokens."""
    return [(seed * 7919 + 31 * i + i * i * (seed + 3)) % VOCABULARY for i in range(PROMPT)]


def model_in(folder: Path) -> Any:
    """Return the tiny Llama of a folder; the weights are random and made once."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    path = folder / "model"
    if not path.exists():
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, head_dim=WIDTH,
            num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS,
            max_position_embeddings=1024, initializer_range=0.08, eos_token_id=None,
            bos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def answer(model: Any, asked: list[int], cache: Any = None) -> Answer:
    """Decode greedily; `cache` may have a prefix of the prompt."""
    ids = torch.tensor([asked])
    out = model.generate(
        ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        attention_mask=torch.ones_like(ids), output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens = out.sequences[0, len(asked) :].tolist()
    steps = zip(out.scores, tokens, strict=True)
    return Answer(tokens, [float(torch.log_softmax(step[0], -1)[one]) for step, one in steps])


def reference(model: Any, asked: list[int]) -> list[tuple[Any, Any]]:
    """Return K and V of each layer, (tokens, heads, elements), on transformers' own cache."""
    with torch.no_grad():
        held = model(torch.tensor([asked]), use_cache=True).past_key_values
    return [(one.keys[0].transpose(0, 1), one.values[0].transpose(0, 1)) for one in held.layers]


# -- memory of engines, filled by their own code where it runs on a CPU ---------------------------

Filled = tuple[EngineMemory, list[int]]
"""An engine's memory, and the blocks of the request in it."""


def sglang(spec: Model, kv: Any, page: int, layout: str) -> Filled:
    from tests.other_engines.imports import sglang as imported

    from kvatlas.engines.sglang import describe_pool

    pools = imported("mem_cache.memory_pool")
    os.environ["SGLANG_USE_HND_KVCACHE"] = str(int(layout == "HND"))
    pool = pools.MHATokenToKVPool(
        size=20 * PAGE, page_size=page, dtype=torch.float32, head_num=HEADS, head_dim=WIDTH,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    count = -(-PROMPT // page)
    blocks = list(range(count, 0, -1))
    slots = torch.tensor([blocks[t // page] * page + t % page for t in range(PROMPT)])
    for layer, (k, v) in enumerate(kv):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, k.clone(), v.clone())
    KEPT.append(pool)
    return describe_pool(spec, pool, max_len=LONGEST), blocks


def lmcache(spec: Model, kv: Any) -> Filled:
    from tests.other_engines.imports import lmcache as imported

    from kvatlas.engines.lmcache import describe_chunks

    memory = imported("v1.memory_management")
    allocator = imported("v1.memory_allocators.host_memory_allocator").HostMemoryAllocator(1 << 20)
    tokens = 2 * PAGE
    count = -(-PROMPT // tokens)
    shape = torch.Size([2, LAYERS, tokens, HEADS * WIDTH])
    form = memory.MemoryFormat.KV_2LTD
    chunks = allocator.batched_allocate(shape, torch.float32, count, form)
    for layer, sides in enumerate(kv):
        for side, rows in enumerate(sides):
            for n, chunk in enumerate(chunks):
                own = rows[n * tokens : (n + 1) * tokens].reshape(-1, HEADS * WIDTH)
                chunk.tensor[side, layer, : len(own)] = own
    KEPT.append(chunks)
    return describe_chunks(spec, chunks, max_len=LONGEST), list(range(count))


def tensorrt(spec: Model, kv: Any) -> Filled:
    """TensorRT-LLM's order; its classes need CUDA, so the rows are written by this function."""
    from kvatlas.engines.tensorrt_llm import describe_pools

    pool = torch.zeros(12, LAYERS, 2, HEADS * PAGE * WIDTH)
    blocks = list(range(10, 0, -1))
    each = pool.view(12, LAYERS, 2, HEADS, PAGE, WIDTH)
    for layer, sides in enumerate(kv):
        for side, rows in enumerate(sides):
            for t, row in enumerate(rows):
                each[blocks[t // PAGE], layer, side, :, t % PAGE] = row
    KEPT.append(pool)
    options: dict[str, Any] = {"tokens_per_block": PAGE, "dtype": "fp32", "max_len": LONGEST}
    return describe_pools(spec, [pool], **options), blocks


KEPT: list[Any] = []
"""The memory of all engines, which must not be freed while it is described by addresses."""
SOURCES: dict[str, Callable[[Model, Any], Filled]] = {
    "SGLang, NHD, page 1": lambda spec, kv: sglang(spec, kv, 1, "NHD"),
    "SGLang, NHD, page 16": lambda spec, kv: sglang(spec, kv, PAGE, "NHD"),
    "SGLang, HND, page 16": lambda spec, kv: sglang(spec, kv, PAGE, "HND"),
    "LMCache, KV_2LTD, chunk 32": lmcache,
    "TensorRT-LLM's order, block 16": tensorrt,
}


# -- the two parts --------------------------------------------------------------------------------


def memory_of(cache: AtlasCache) -> EngineMemory:
    return EngineMemory.of_pools(cache.plan, cache.cache.pools)


def into_transformers(
    model: Any, source: Filled, asked: list[int], layout: str
) -> tuple[CopiedRequest, Answer]:
    """Copy a request into a new cache of transformers, and decode from it."""
    cache = AtlasCache.from_config(model.config, batch=1, max_len=LONGEST, layout=layout)
    (blocks,) = cache.adopt(PROMPT - 1)  # the last token is left to generate()
    copied = copy_request(
        source[0], memory_of(cache), source_blocks=source[1], destination_blocks=blocks,
        tokens=PROMPT - 1,
    )  # fmt: skip
    return copied, answer(model, asked, cache)


def store_for_vllm(folder: Path, model: Any, source: Filled, asked: list[int]) -> None:
    """Store the rows of an SGLang pool in a tier, under the names of the model's identity.

    transformers computes the request and reserves its blocks. All bytes of the pool are cleared
    before the cache is copied into it, so that what the tier stores is SGLang's.
    """
    cache = AtlasCache.from_config(model.config, batch=2, max_len=LONGEST, prefix_caching=True)
    reuse = PrefixReuse(model, cache, f"folder://{folder / 'rows'}")
    reuse.begin(asked)
    answer_of_one = model.generate(
        torch.tensor([asked]), past_key_values=cache, max_new_tokens=1, do_sample=False
    )
    for pool in cache.cache.pools.values():
        pool.zero_()
    copy_request(
        source[0], memory_of(cache), source_blocks=source[1],
        destination_blocks=cache.blocks_of(0), tokens=PROMPT,
    )  # fmt: skip
    reuse.end(answer_of_one[0].tolist())
    reuse.close()


def pools(folder: Path) -> list[Row]:
    """Move caches of SGLang, LMCache and TensorRT-LLM's order to transformers."""
    model = model_in(folder)
    spec = Model.load(model.config, dtype="fp32")
    asked, rows = prompt(1), []
    alone, other = answer(model, asked), reference(model, prompt(2))
    for name, make in SOURCES.items():
        for order in ("LBNHC", "BHLNC"):
            filled = make(spec, reference(model, asked))
            copied, said = into_transformers(model, filled, asked, order)
            layouts = f"{filled[0].plan.layout} -> {order}"
            rows.append(
                Row(name, "transformers", layouts, copied.nbytes, copied.runs, said.equals(alone))
            )
        copied, said = into_transformers(model, make(spec, other), asked, "LBNHC")
        layouts = f"{filled[0].plan.layout} -> LBNHC"
        rows.append(
            Row(
                name,
                "transformers",
                layouts,
                copied.nbytes,
                copied.runs,
                said.equals(alone),
                control=True,
            )
        )
    served = sglang(spec, reference(model, asked), PAGE, "NHD")
    store_for_vllm(folder, model, served, asked)
    (folder / "sglang.json").write_text(json.dumps(alone._asdict()))
    return rows


def live(folder: Path) -> list[Row]:
    """Let vLLM go on from the caches of SGLang and transformers, and transformers from vLLM's."""
    for name, value in VLLM.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    model, rows = model_in(folder), []
    connector = {
        "kv_connector": "KVAtlasConnector",
        "kv_connector_module_path": "kvatlas.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"transport": "none", "tier": f"folder://{folder / 'rows'}"},
    }
    engine = LLM(
        str(folder / "model"), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST,
        enforce_eager=True, enable_prefix_caching=False, num_gpu_blocks_override=64,
        block_size=64, kv_transfer_config=connector,
    )  # fmt: skip

    def ask(asked: list[int]) -> tuple[int, Answer]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=NEW, temperature=0, logprobs=1, ignore_eos=True, detokenize=False
        )
        out = engine.generate({"prompt_token_ids": asked}, params, use_tqdm=False)[0]
        (made,) = out.outputs
        steps = zip(made.logprobs or (), made.token_ids, strict=True)
        logprobs = [float(step[token].logprob) for step, token in steps]
        return out.num_cached_tokens or 0, Answer(list(made.token_ids), logprobs)

    each = 2 * LAYERS * HEADS * WIDTH * 4  # bytes of a token
    if (said := folder / "sglang.json").exists():
        found, got = ask(prompt(1))
        alone = Answer(**json.loads(said.read_text()))
        equal = got.equals(alone) and found > 0
        rows.append(
            Row("SGLang's pool", "vLLM", "NHD -> rows -> vLLM's", found * each, None, equal)
        )
    cache = AtlasCache.from_config(model.config, batch=2, max_len=LONGEST, prefix_caching=True)
    reuse = PrefixReuse(model, cache, f"folder://{folder / 'rows'}")
    reuse.begin(prompt(3))
    first = answer(model, prompt(3), cache)
    reuse.end(prompt(3) + first.tokens)
    found, got = ask(prompt(3))
    equal = got.equals(answer(model, prompt(3))) and found > 0
    rows.append(Row("transformers", "vLLM", "LBNHC -> rows -> vLLM's", found * each, None, equal))
    _, got = ask(prompt(4))
    ask(prompt(5))  # vLLM stores the rows of a request while it serves the next one
    found = reuse.begin(prompt(4))
    after = answer(model, prompt(4), cache)
    reuse.end(prompt(4) + after.tokens)
    reuse.close()
    equal = after.equals(got) and after.equals(answer(model, prompt(4))) and found > 0
    rows.append(Row("vLLM", "transformers", "vLLM's -> rows -> LBNHC", found * each, None, equal))
    return rows


VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def main(part: str, folder: str) -> int:
    """Run a part and print its table. Return 0 if all rows are as expected."""
    rows = {"pools": pools, "live": live}[part](Path(folder))
    table = Table(title="A cache that moves between engines", title_justify="left")
    for column in ("from", "to", "layouts", "bytes", "runs", "tokens equal"):
        table.add_column(column, justify="right" if column in ("bytes", "runs") else "left")
    for row in rows:
        runs = "-" if row.runs is None else f"{row.runs:,}"
        said = ("yes" if row.equal else "no") + (" (control)" if row.control else "")
        table.add_row(row.source, row.destination, row.layouts, f"{row.nbytes:,}", runs, said)
    Console(width=112).print(table)
    return int(any(row.equal is row.control for row in rows))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("pools", "live"):
        raise SystemExit("usage: python -m examples.engines pools|live FOLDER")
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # libraries of the engines print warnings when the interpreter ends
