"""Formats of tools that store integers in groups: GPTQ, AWQ, AutoRound, HQQ and MLX.

The quantisation section of a config contains the format of most matrices, and often the formats of
single modules. GPTQModel lists these modules in `dynamic`, AutoRound in `extra_config`, and MLX
next to the other keys.
"""

from __future__ import annotations

from kvatlas.models.config import Config
from kvatlas.models.weights.formats import MXFP4, MXFP8, NVFP4, Format, groups_of
from kvatlas.models.weights.name_patterns import NamePatterns
from kvatlas.models.weights.scheme import Quantisation, ignored, labels

PACKED_IN_GROUPS = ("awq", "gptq", "auto-round", "awq_marlin", "gptq_marlin", "gptqmodel", "gar")
"""Methods whose groups have a 16-bit scale and a packed zero point."""

_FLOATS = {"mx_fp4": MXFP4, "mx_fp8": MXFP8, "nv_fp4": NVFP4, "fp4_v2": NVFP4}
_MLX_MODES = {"mxfp4": MXFP4, "mxfp8": MXFP8, "nvfp4": NVFP4}


def packed(method: str, section: Config, warnings: list[str]) -> Quantisation:
    """Return the scheme of GPTQ, AWQ or AutoRound.

    >>> section = Config({"bits": 4, "group_size": 128, "dynamic": {"-:.*mlp.*": {}}})
    >>> packed("gptq", section, []).label
    'gptq 4 bits, groups of 128'
    """
    default = _packed_format(method, section, section)
    chosen: list[tuple[NamePatterns, Format | None]] = []
    for key, own in _sections(section, "dynamic"):  # regular expressions; "-:" skips a module
        skips = key.startswith("-:")
        patterns = NamePatterns([f"re:{key.removeprefix('-:').removeprefix('+:')}"])
        chosen.append((patterns, None if skips else _packed_format(method, own, section)))
    for key, own in _sections(section, "extra_config"):
        chosen.append((NamePatterns([key], inside=True), _packed_format(method, own, section)))
    if section.get("lm_head") is True:
        chosen.append((NamePatterns(["lm_head"]), default))
    unread = [text for patterns, _ in chosen for text in patterns.unread]
    if unread:
        warnings.append(
            f"{len(unread)} patterns of modules with their own format cannot be read, such as "
            f"{unread[0][:60]!r}: assuming the format of the other modules"
        )
    label = default.label if default else f"{method} 16 bits"
    modules = section.listing("modules_in_block_to_quantize")
    if modules:
        flat = [name for part in modules for name in (part if isinstance(part, list) else [part])]
        only = NamePatterns([f"*.{name}" for name in flat if isinstance(name, str)])
        return Quantisation(label, None, (*chosen, (only, default)), ignored(section))
    blocks = section.get("block_name_to_quantize", "to_quant_block_names")
    if blocks and not str(blocks).rstrip("'\"]").endswith(("layers", "blocks", "h")):
        warnings.append(
            f"block_name_to_quantize was not read ({str(blocks)[:60]}): assuming that all matrices "
            "are quantised"
        )
    return Quantisation(label, default, tuple(chosen), ignored(section))


def _sections(section: Config, name: str) -> list[tuple[str, Config]]:
    parts = section.section(name) or Config({})
    return [(key, parts.section(key) or Config({})) for key in parts.all_keys()]


def _packed_format(method: str, own: Config, whole: Config) -> Format | None:
    """Return the format of a module; `own` overrides the keys of `whole`. None for 16 bits."""

    def number(*names: str, default: int) -> int:
        value = own.get(*names)
        value = whole.get(*names) if value is None else value
        return value if isinstance(value, int) and value > 0 else default

    bits = own.maybe("bits", "w_bit") or whole.count("bits", "w_bit", default=4)
    kind = own.text("data_type") or whole.text("data_type") or ""
    if bits >= 16:
        return None
    for start, format_ in _FLOATS.items():
        if kind.startswith(start) or f"{kind}{bits}" == start:
            return format_
    group = number("group_size", "q_group_size", default=0)
    return groups_of(group, f"{method} {bits} bits", bits, 16 + bits)


def mlx(section: Config) -> Quantisation | None:
    """Return the scheme of MLX, which also quantises the embedding.

    >>> mlx(Config({"bits": 4, "group_size": 64})).label
    'mlx 4 bits, groups of 64'
    """
    default = _mlx_format(section)
    if default is None:
        return None
    parts = {name: section.get(name) for name in section.all_keys()}
    named = {
        name: _mlx_format(Config(part)) if isinstance(part, dict) else None
        for name, part in parts.items()
        if part is False or isinstance(part, dict)
    }
    chosen = tuple((NamePatterns([name], inside=True), one) for name, one in named.items())
    label = labels([default, *named.values()])
    return Quantisation(label, default, chosen, ignored(section), vocabulary=True)


def _mlx_format(section: Config) -> Format | None:
    mode = section.text("mode") or "affine"
    if mode in _MLX_MODES:
        return _MLX_MODES[mode]
    bits, group = section.maybe("bits"), section.size("group_size")
    if mode != "affine" or bits is None or group is None:
        return None
    # Each group has a 16-bit scale and a 16-bit bias.
    return groups_of(group, f"mlx {bits} bits", bits, 32)


def hqq(section: Config) -> Quantisation | None:
    """Return the scheme of HQQ, which has one format for all modules or one per kind of module."""
    settings = section.section("quant_config")
    if settings is None:
        return None
    if settings.has("weight_quant_params"):
        default = _hqq_format(settings)
        return Quantisation(default.label, default, ignored=ignored(section))
    parts = {name: settings.section(name) for name in settings.filled_keys()}
    formats = {name: _hqq_format(part) for name, part in parts.items() if part}
    chosen = tuple(
        (NamePatterns([f"*.{name}"], inside=True), format_) for name, format_ in formats.items()
    )
    label = labels(formats.values())
    return Quantisation(label, None, chosen, ignored(section)) if formats else None


def _hqq_format(settings: Config) -> Format:
    inner = settings.section("weight_quant_params") or settings
    bits, size = inner.count("nbits", default=4), inner.size("group_size") or 0
    # Each group has a 16-bit scale and a 16-bit zero point. Ten elements of 3 bits take 32 bits.
    packing = size // 5 if bits == 3 else 0
    return groups_of(size, f"hqq {bits} bits", bits, 32 + packing)
