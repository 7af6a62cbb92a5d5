"""The rules of vLLM 0.32, checked against `tests/planning/vllm_answers.json`."""

from kvatlas.planning.engine_rules.chips import AMPERE, BLACKWELL, CONSUMER_BLACKWELL, HOPPER
from kvatlas.planning.engine_rules.rule_types import BackendChoice, EngineRules, PrefillCheckpoint

MAMBA2 = PrefillCheckpoint(kernel="Mamba-2's scan", states="mamba2")
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
)
RULES = EngineRules(version="0.32", checkpoints=(MAMBA2, FLASHKDA), backends=BACKENDS)
