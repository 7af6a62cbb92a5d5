"""Quantisation schemes: the weight format of each tensor of a checkpoint.

Each tool describes its scheme in a different way. `quantisation()` reads the section
`quantization_config` of a config, and returns a `Quantisation`, which maps tensor names to
formats. Embeddings, routers, lm_head, norms and convolutions are not quantised unless the
checkpoint names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kvatlas.models.config import Config
from kvatlas.models.weights.formats import (
    FP8,
    FP8_BLOCKS,
    GGUF_BLOCKS,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    Format,
    blocks_of,
    format_in_name,
    groups_of,
    named_format,
    rows_of,
)
from kvatlas.models.weights.integer_groups import PACKED_IN_GROUPS, hqq, mlx, packed
from kvatlas.models.weights.name_patterns import NamePatterns
from kvatlas.models.weights.scheme import Quantisation, ignored, labels
from kvatlas.models.weights.torchao import torchao_formats

_ALGORITHMS = {
    "fp8": FP8, "fp8_per_channel_per_token": rows_of("fp8", 8), "fp8_pb_wo": FP8_BLOCKS,
    "fp8_block_scales": FP8_BLOCKS, "nvfp4": NVFP4, "w4a16_nvfp4": NVFP4, "nvfp4_awq": NVFP4,
    "w4a8_nvfp4_fp8": NVFP4, "mxfp4": MXFP4, "w4a8_mxfp4_fp8": MXFP4, "mxfp8": MXFP8,
    "int4_awq": INT4, "w4a16_awq": INT4, "w4a8_awq": INT4, "w8a8_sq_per_channel": INT8,
}  # fmt: skip
"""The format of each algorithm of ModelOpt, by name."""


def quantisation(root: Config, text: Config, warnings: list[str]) -> Quantisation | None:
    """Return the quantisation scheme of a config; None if it has no scheme of a known kind.

    >>> section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    >>> quantisation(Config({"quantization_config": section}), Config({}), []).label
    'fp8, blocks of 128 x 128'
    """
    section = root.section(*_SECTIONS) or text.section(*_SECTIONS)
    if section is None:
        warnings += _unknown_sections(root) or _unknown_sections(text)
        return None
    # ModelOpt's separate file nests all settings one level deeper.
    section = section.section("quantization") or section
    method = (section.text("quant_method", "quant_algo") or "").lower()
    if layers := section.section("quantized_layers"):
        return _mixed(layers, section, warnings)
    if method in _SCHEMES:
        made = _SCHEMES[method](section)
    elif method in PACKED_IN_GROUPS:
        made = packed(method, section, warnings)
    elif not method and section.has("bits", "mode"):
        made = mlx(section)
    elif groups := section.section("config_groups"):
        made = _grouped(groups, section, warnings) or _uniform(method, section, text)
    else:
        made = _uniform(method, section, text)
    if made is None:
        warnings.append(
            f"unknown quantisation {method!r} in the checkpoint: assuming 16 bits; "
            "pass weights_dtype to select a format"
        )
    elif made.ignored and made.ignored.unread:
        unread = made.ignored.unread
        warnings.append(
            f"{len(unread)} patterns of unquantised tensors cannot be read, such as "
            f"{unread[0][:60]!r}: assuming that those tensors are quantised"
        )
    return made


_SECTIONS = ("quantization_config", "compression_config", "quantization")
"""Keys of the section; the last one is that of MLX."""


def _unknown_sections(config: Config) -> list[str]:
    """Return a warning for each section that seems to describe a quantisation."""
    return [
        f"the section {key} may describe a quantisation, and was not read: assuming 16 bits; "
        "pass weights_dtype to select a format"
        for key in config.filled_keys()
        if "quant" in key and isinstance(config.get(key), Mapping)
    ]


def _uniform(method: str, section: Config, text: Config) -> Quantisation | None:
    """Return the scheme of `method` if it quantises matrices in one format; else None."""
    default, kept = _method(method, section), ignored(section)
    if default is None:
        return None
    if method == "mxfp4":  # gpt-oss
        experts = NamePatterns(["*.experts.*"])
        return Quantisation(f"experts {default.label}", None, ((experts, default),))
    named = section.text("expert_dtype") or text.text("expert_dtype")  # DeepSeek-V4 and V4.1
    fp4 = MXFP4 if named == "fp4" else None
    if algorithm := section.text("moe_quant_algo"):
        # A second pass quantised only the experts; its ignore list applies to that pass, and
        # the tensors in it keep the format of the first pass.
        fp4, kept = _ALGORITHMS.get(algorithm.lower()), NamePatterns(())
    label = default.label + (f"; experts {fp4.label}" if fp4 else "")
    return Quantisation(label, default, ignored=kept, experts=fp4)


def _method(method: str, section: Config) -> Format | None:
    algorithm = (section.text("quant_algo") or method).lower()
    block = section.listing("weight_block_size") or ()
    if method == "fp8" and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return blocks_of(block[0], block[1])
    if method == "bitsandbytes":
        if section.flag("load_in_4bit"):
            return NF4
        return INT8 if section.flag("load_in_8bit") else None
    if method == "quanto":
        return _QUANTO.get(section.text("weights") or "")
    if method == "fp_quant":
        stored = section.flag("store_master_weights")
        return None if stored else _ALGORITHMS.get(section.text("forward_dtype") or "nvfp4")
    fixed = {"fbgemm_fp8": rows_of("fp8", 8), "ptpc_fp8": rows_of("fp8", 8), "eetq": INT8,
             "bitnet": Format("ternary, 2 bits", 2, (0, 0), 16)}  # fmt: skip
    return fixed.get(method) or _ALGORITHMS.get(algorithm)


_QUANTO = {
    "int8": INT8, "float8": rows_of("fp8", 8),
    "int4": groups_of(128, "int4", 4, 32), "int2": groups_of(128, "int2", 2, 32),
}  # fmt: skip
"""Formats of quanto; groups have a 16-bit scale and a 16-bit shift."""


def _mixed(layers: Config, section: Config, warnings: list[str]) -> Quantisation:
    """Return the scheme of ModelOpt's mixed precision, which lists an algorithm per module."""
    named: dict[str, list[str]] = {}
    for name in layers.filled_keys():
        part = layers.section(name)
        algorithm = (part.text("quant_algo") if part else None) or ""
        named.setdefault(algorithm.lower(), []).append(name)
    chosen = tuple(
        (NamePatterns(names, inside=True), _ALGORITHMS[algorithm])
        for algorithm, names in named.items()
        if algorithm in _ALGORITHMS
    )
    warnings += [
        f"unknown quantisation {algorithm!r} of {len(names)} modules: assuming 16 bits"
        for algorithm, names in named.items()
        if algorithm not in _ALGORITHMS
    ]
    label = labels(format_ for _, format_ in chosen) or "16 bits"
    # Modules that are not listed keep the format of the checkpoint that ModelOpt started from.
    method = (section.text("quant_method") or "").lower()
    rest = _method("fp8", section) if method == "fp8" and section.has("weight_block_size") else None
    return Quantisation(label, rest, chosen)


def _grouped(groups: Config, section: Config, warnings: list[str]) -> Quantisation | None:
    """Return the scheme of the config groups of compressed-tensors.

    Returns None if no group quantises weights.
    """
    chosen: list[tuple[NamePatterns, Format | None]] = []
    found, default = list[Format](), None
    if (section.section("sparsity_config") or Config({})).text("format") not in (None, "dense"):
        warnings.append("sparse weights in the checkpoint: counted as dense")
    for key in groups.filled_keys():
        group = groups.section(key) or Config({})
        weights, format_ = group.section("weights"), None
        if weights is not None:
            format_ = _strategy(weights, group.text("format") or section.text("format") or "")
            found.append(format_)
        targets = [name for name in group.listing("targets") or () if isinstance(name, str)]
        if any(name in ("Linear", "MoE", "FusedMoE") for name in targets) or not targets:
            default = format_ or default
            continue
        chosen.append((NamePatterns(targets), format_))
        warnings += [
            f"the group {key} quantises modules of class {name}, which were not identified: "
            "assuming 16 bits"
            for name in targets
            if format_ and _CLASS_NAME.fullmatch(name)
        ]
    if not found:
        return None
    return Quantisation(labels(found), default, tuple(chosen), ignored(section))


_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9]+")


def _strategy(weights: Config, packing: str) -> Format:
    """Return the weight format that a config group of compressed-tensors specifies."""
    bits, kind = weights.count("num_bits", default=8), weights.text("type") or "int"
    group, strategy = weights.size("group_size"), weights.text("strategy")
    name = ("fp" if kind == "float" else "int") + str(bits)
    if packing == "dense":
        return Format(f"{name} rounded, stored in 16 bits", 16)
    if packing in ("int-quantized", "naive-quantized"):  # these do not pack elements
        bits = max(bits, 8)
    block = weights.listing("block_structure") or ()
    if len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return blocks_of(block[0], block[1], name, bits)
    if group:
        # Groups of floats (nvfp4, mxfp4, mxfp8) have 8-bit scales; integers have 16-bit scales.
        scale = 8 if kind == "float" else 16
        scale += 0 if weights.flag("symmetric", default=True) else bits  # a zero point
        return groups_of(group, name, bits, scale)
    if strategy == "channel":
        return rows_of(name, bits)
    return Format(name, bits, (0, 0), 64)


def _torchao(section: Config) -> Quantisation | None:
    found = torchao_formats(section)
    if found is None:
        return None
    default, named = found
    label = labels([default, *(format_ for _, format_ in named)])
    chosen = tuple((NamePatterns([name], inside=True), format_) for name, format_ in named)
    whole = section.flag("include_input_output_embeddings")
    return Quantisation(label, default, chosen, ignored(section), vocabulary=whole)


def _quark(section: Config) -> Quantisation | None:
    """Return the scheme of AMD's Quark: a default format, formats of named layers, exclusions."""
    kinds = section.section("layer_type_quant_config") or Config({})
    linear = next((kinds.section(key) for key in kinds.filled_keys() if "Linear" in key), None)
    default = _quark_format(linear or section.section("global_quant_config"))
    named = section.section("layer_quant_config") or Config({})
    formats = {name: _quark_format(named.section(name)) for name in named.all_keys()}
    label = labels([default, *formats.values()])
    if not label:
        return None
    chosen = tuple((NamePatterns([name], inside=True), one) for name, one in formats.items())
    return Quantisation(label, default, chosen, ignored(section))


def _quark_format(layer: Config | None) -> Format | None:
    weight = layer.get("weight") if layer else None
    if isinstance(weight, list):  # scales of several levels; the first has the elements' dtype
        weight = weight[0] if weight else None
    if not isinstance(weight, dict):
        return None
    tensor = Config(weight)
    dtype = tensor.text("dtype") or ""
    if dtype == "mx":
        dtype = tensor.text("mx_element_dtype") or ""
    bits = next((int(letter) for letter in dtype if letter.isdigit()), 0)
    if bits == 1:  # bfloat16, float16
        return None
    name = ("fp" if dtype.startswith(("fp", "float")) else "int") + str(bits)
    scheme, size = tensor.text("qscheme") or "per_tensor", tensor.size("group_size")
    block = tensor.listing("block_size") or ()
    if not bits:
        return None
    if len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return blocks_of(block[0], block[1], name, bits)
    if scheme == "per_group" or size:
        scale = 8 if name.startswith("fp") else 16
        scale += 0 if tensor.flag("symmetric", default=True) else bits
        return groups_of(size or 32, name, bits, scale)
    return rows_of(name, bits) if scheme == "per_channel" else Format(name, bits, (0, 0), 64)


def _gguf(section: Config) -> Quantisation | None:
    """Return the scheme of a GGUF file whose name contains its type, such as Q4_K_M."""
    found = format_in_name(section.text("gguf_file", "quant_type") or "")
    if not found or named_format(found) not in GGUF_BLOCKS.values():
        return None
    format_ = named_format(found)
    return Quantisation(format_.label, format_, vocabulary=True)


_SCHEMES: dict[str, Callable[[Config], Quantisation | None]] = {
    "torchao": _torchao,
    "quark": _quark,
    "hqq": hqq,
    "gguf": _gguf,
}
"""Functions that read the sections of methods with their own form, by name of the method."""
