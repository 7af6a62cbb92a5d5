"""The rules of vLLM 0.31, checked against `tests/planning/vllm_answers.json`."""

from kvatlas.planning.engine_rules.chips import AMPERE, BLACKWELL, CONSUMER_BLACKWELL, HOPPER
from kvatlas.planning.engine_rules.rule_types import (
    BackendChoice,
    EngineRules,
    MissingKernels,
    PrefillCheckpoint,
)

FLASHKDA = PrefillCheckpoint(
    kernel="FlashKDA",
    states="kimi_delta",
    chips=(*HOPPER, *BLACKWELL, *CONSUMER_BLACKWELL),
    architectures=("KimiK3",),  # the kernel requires a bounded gate, which Kimi-Linear lacks
    key_dim=128,
)
BACKENDS = (
    BackendChoice(
        chips=BLACKWELL,
        instead_of=("FLASH_ATTN", "FLASHINFER"),
        backend="FLASHINFER_SM100",
        head_dims=(64, 128, 256, 512),
    ),
    BackendChoice(
        chips=BLACKWELL, instead_of=("FLASH_ATTN_MLA", "FLASHMLA"), backend="FLASHINFER_MLA"
    ),
    BackendChoice(
        chips=(*AMPERE, *CONSUMER_BLACKWELL),
        instead_of=("FLASH_ATTN_MLA", "FLASHMLA"),
        backend="TRITON_MLA",
    ),
    BackendChoice(  # FlashAttention 2 has no sinks
        chips=AMPERE,
        instead_of=("FLASH_ATTN",),
        backend="TRITON_ATTN",
        architectures=("GptOss",),
    ),
    BackendChoice(  # nor fp8 caches
        chips=AMPERE,
        instead_of=("FLASH_ATTN",),
        backend="FLASHINFER",
        caches=("fp8", "fp8_e4m3"),
    ),
    BackendChoice(
        chips=(*AMPERE, *CONSUMER_BLACKWELL),
        instead_of=("FLASH_ATTN_DIFFKV",),
        backend="TRITON_ATTN_DIFFKV",
    ),
)
SPARSE_MLA = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
BLACKWELL_SPARSE = BackendChoice(
    chips=BLACKWELL, instead_of=SPARSE_MLA, backend="FLASHMLA_SPARSE", caches=("auto",)
)
FEW_HEADS = BackendChoice(  # FLASHMLA_SPARSE would pad the query heads
    chips=BLACKWELL,
    instead_of=SPARSE_MLA,
    backend="FLASHINFER_MLA_SPARSE",
    caches=("auto",),
    most_heads=16,
)
MISSING = (MissingKernels(chips=AMPERE, backends=(*SPARSE_MLA, "FLASHMLA_SPARSE_DSV4")),)
RINGS = MissingKernels(  # models that keep rings came with 0.33
    backends=(
        "QWEN4_EXP_EXP_QSA_STATE", "KPOOL_TAIL", "STEP5_CSA_TAIL_RING", "FLASHMLA_SPARSE_DSV41",
    )
)  # fmt: skip
DSV41 = ("DeepseekV41",)
V41_BACKENDS = (
    BackendChoice(
        instead_of=("FLASHMLA_SPARSE_DSV4",), backend="FLASHMLA_SPARSE_DSV41", architectures=DSV41
    ),
    BackendChoice(
        instead_of=("DEEPSEEK_SPARSE_SWA",),
        backend="DEEPSEEK_SPARSE_SWA_DSV41",
        architectures=DSV41,
    ),
    BackendChoice(
        instead_of=("DEEPSEEK_V4_INDEXER", "DEEPSEEK_V32_INDEXER"),
        backend="DEEPSEEK_V41_INDEXER",
        architectures=DSV41,
    ),
)
"""The backends of DeepSeek-V4.1 on Hopper."""
NVFP4 = MissingKernels(
    chips=(*AMPERE, *HOPPER, *CONSUMER_BLACKWELL), backends=("FLASHINFER",), caches=("nvfp4",)
)
RULES = EngineRules(
    version="0.31",
    checkpoints=(FLASHKDA,),
    backends=(*V41_BACKENDS, *BACKENDS, FEW_HEADS, BLACKWELL_SPARSE),
    missing=(*MISSING, NVFP4, RINGS),
    multiple_of_all_backends=False,
    whole_kernel_blocks=False,
    rounds_each_layer=False,
    any_stride=("FLASH_ATTN_MLA_SPARSE",),
)
