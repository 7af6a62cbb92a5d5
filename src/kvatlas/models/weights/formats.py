"""Weight formats: the bits of an element and of its scales.

Quantisation tools record which tensors they skipped, each under a different key and with
different patterns: names, globs, regular expressions, or words in a name. `Quantisation`
returns the `Format` of a tensor, given its name. Embeddings, routers, lm_head, norms and
convolutions are not quantised unless the checkpoint names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvatlas.models.config import Config
from kvatlas.models.weights.tensor import Tensor


class Format(NamedTuple):
    """A weight format: bits per element, shape of the blocks that share a scale, bits per scale.

    >>> FP8_BLOCKS = Format("fp8, blocks of 128 x 128", 8, (128, 128), 32)
    >>> FP8_BLOCKS.bytes_of(Tensor("mlp", "mlp.up_proj", 256, 256))
    65552
    """

    label: str
    bits: int
    block: tuple[int, int] = (0, 0)
    """Rows and columns of the elements that share a scale; 0 means all rows or columns."""
    scale_bits: int = 0

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor, including its scales."""
        elements = tensor.rows * tensor.columns
        rows, columns = self.block[0] or tensor.rows, self.block[1] or tensor.columns
        scales = -(-tensor.rows // rows) * -(-tensor.columns // columns)
        bits = elements * self.bits + scales * self.scale_bits
        return -(-tensor.copies * bits // 8)


def plain(dtype: str) -> Format:
    """Return the format of an unquantised dtype."""
    return Format(dtype, 32 if dtype == "fp32" else 16)


class Quantisation(NamedTuple):
    """The quantisation scheme of a checkpoint: a format for each quantised tensor."""

    label: str
    default: Format | None
    """The format of matrices that match no other rule; None if those are not quantised."""
    chosen: tuple[tuple[NamePatterns, Format], ...] = ()
    ignored: NamePatterns | None = None
    experts: Format | None = None
    """The format of experts, if it differs from `default`."""

    def format_of(self, name: str, tensor: Tensor) -> Format | None:
        """Return the format of a tensor with the full name `name`; None if it is unquantised."""
        if not tensor.linear:
            return None
        for patterns, format_ in self.chosen:
            if patterns.match(name):
                return format_
        if tensor.kind in _KEPT or (self.ignored and self.ignored.match(name)):
            return None
        return (self.experts if tensor.kind == "experts" else None) or self.default


_KEPT = ("embedding", "lm_head", "router", "tower")

_FP8_TENSOR = Format("fp8", 8, (0, 0), 64)  # the scales of the weight and of its input
_NVFP4 = Format("nvfp4, groups of 16", 4, (1, 16), 8)
_MXFP4 = Format("mxfp4, groups of 32", 4, (1, 32), 8)
_MXFP8 = Format("mxfp8, groups of 32", 8, (1, 32), 8)
_ALGORITHMS = {"fp8": _FP8_TENSOR, "nvfp4": _NVFP4, "mxfp4": _MXFP4, "mxfp8": _MXFP8}


def quantisation(root: Config, text: Config, warnings: list[str]) -> Quantisation | None:
    """Return the quantisation scheme of a config; None if it has none or the scheme is unknown.

    >>> section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    >>> quantisation(Config({"quantization_config": section}), Config({}), []).label
    'fp8, blocks of 128 x 128'
    """
    names = ("quantization_config", "compression_config")
    section = root.section(*names) or text.section(*names)
    if section is None:
        return None
    # ModelOpt's separate file nests all settings one level deeper.
    section = section.section("quantization") or section
    method = (section.text("quant_method", "quant_algo") or "").lower()
    ignored = _ignored(section)
    if layers := section.section("quantized_layers"):
        return _mixed(layers, section)
    groups = section.section("config_groups")
    if groups is not None and (made := _grouped(groups, ignored)):
        return made
    default = _method(method, section)
    if default is None:
        warnings.append(f"unknown quantisation {method!r} in the checkpoint: assuming 16 bits")
        return None
    if method == "mxfp4":  # gpt-oss
        experts = NamePatterns(["*.experts.*"])
        return Quantisation(f"experts {default.label}", None, ((experts, default),))
    fp4 = _MXFP4 if text.text("expert_dtype") == "fp4" else None  # DeepSeek-V4
    if algorithm := section.text("moe_quant_algo"):
        # A second pass quantised only the experts; its ignore list applies to that pass, and
        # the tensors in it keep the format of the first pass.
        fp4, ignored = _ALGORITHMS.get(algorithm.lower()), NamePatterns(())
    label = default.label + (f"; experts {fp4.label}" if fp4 else "")
    return Quantisation(label, default, ignored=ignored, experts=fp4)


def _ignored(section: Config) -> NamePatterns:
    """Return patterns that match the tensors that a checkpoint does not quantise."""
    if parts := section.listing("modules_to_not_convert", "ignored_layers"):
        return NamePatterns(parts, inside=True)
    return NamePatterns(section.listing("ignore", "exclude_modules") or ())


def _method(method: str, section: Config) -> Format | None:
    algorithm = (section.text("quant_algo") or method).lower().removeprefix("w4a16_")
    block = section.listing("weight_block_size")
    if (
        method == "fp8"
        and block
        and len(block) == 2
        and all(type(n) is int and n > 0 for n in block)
    ):
        rows, columns = block
        return Format(f"fp8, blocks of {rows} x {columns}", 8, (rows, columns), 32)
    if method in ("awq", "gptq", "auto-round"):
        bits = section.count("bits", "w_bit", default=4)
        group = section.get("group_size", "q_group_size")
        size = group if isinstance(group, int) and group > 0 else 0
        # Each group has a 16-bit scale and a zero point.
        return Format(
            f"{method} {bits} bits, groups of {size or 'a row'}", bits, (1, size), 16 + bits
        )
    if method == "bitsandbytes":
        return (
            Format("nf4", 4, (1, 64), 8)
            if section.flag("load_in_4bit")
            else Format("int8", 8, (1, 0), 32)
        )
    if method == "fbgemm_fp8":
        return Format("fp8, one scale per row", 8, (1, 0), 32)
    return _ALGORITHMS.get(algorithm)


def _mixed(layers: Config, section: Config) -> Quantisation:
    """Return the scheme of ModelOpt's mixed precision, which lists an algorithm per module."""
    named: dict[str, list[str]] = {}
    for name in layers.filled_keys():
        part = layers.section(name)
        algorithm = (part.text("quant_algo") if part else None) or ""
        named.setdefault(algorithm.lower().removeprefix("w4a16_"), []).append(name)
    chosen = tuple(
        (NamePatterns(names, inside=True), _ALGORITHMS[algorithm])
        for algorithm, names in named.items()
        if algorithm in _ALGORITHMS
    )
    label = " and ".join(format_.label for _, format_ in chosen)
    # Modules that are not listed keep the format of the checkpoint that ModelOpt started from.
    method = (section.text("quant_method") or "").lower()
    rest = _method("fp8", section) if method == "fp8" and section.has("weight_block_size") else None
    return Quantisation(label, rest, chosen)


def _grouped(groups: Config, ignored: NamePatterns) -> Quantisation | None:
    """Return the scheme of compressed-tensors' config groups; None if none quantises weights."""
    chosen, default, labels = [], None, []
    for key in groups.filled_keys():
        group = groups.section(key)
        weights = group.section("weights") if group else None
        if group is None or weights is None:
            continue
        format_ = _strategy(weights)
        labels.append(format_.label)
        targets = [name for name in group.listing("targets") or () if isinstance(name, str)]
        if any(name in ("Linear", "MoE", "FusedMoE") for name in targets) or not targets:
            default = format_
        else:
            chosen.append((NamePatterns(targets), format_))
    if not labels:
        return None
    label = " and ".join(dict.fromkeys(labels))
    return Quantisation(label, default, tuple(chosen), ignored)


def _strategy(weights: Config) -> Format:
    bits, kind = weights.count("num_bits", default=8), weights.text("type") or "int"
    group, strategy = weights.size("group_size"), weights.text("strategy")
    name = ("fp" if kind == "float" else "int") + str(bits)
    block = weights.listing("block_structure") or ()
    if len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return Format(f"{name}, blocks of {block[0]} x {block[1]}", bits, (block[0], block[1]), 32)
    if group:
        # 4-bit floats (nvfp4, mxfp4) have 8-bit scales; integers have 16-bit scales.
        scale = 8 if kind == "float" and bits == 4 else 16
        scale += 0 if weights.flag("symmetric", default=True) else bits  # a zero point
        return Format(f"{name}, groups of {group}", bits, (1, group), scale)
    if strategy == "channel":
        return Format(f"{name}, one scale per row", bits, (1, 0), 32)
    return Format(name, bits, (0, 0), 64)


class NamePatterns:
    """A set of patterns for tensor names: names, globs, `re:` expressions and single words.

    Before matching, wrapper prefixes such as `model.` are removed from the patterns, and module
    names that differ between families are unified (`ffn` becomes `mlp`). If `inside` is
    true, the name of a module also matches all tensors inside the module.

    >>> patterns = NamePatterns(["lm_head", "model.layers.0.self_attn*", "re:.*experts.*"])
    >>> names = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.experts.0")
    >>> [patterns.match(name) for name in names]
    [True, False, True]
    """

    __slots__ = ("_exact", "_expression", "_inside", "_words")

    def __init__(self, patterns: Iterable[Any], *, inside: bool = False) -> None:
        self._inside = inside
        texts = [text for text in patterns if isinstance(text, str) and len(text) < 1000]
        plain_names = [text for text in texts if not _WILD.search(text)]
        self._exact = frozenset(_level(text) for text in plain_names)
        self._words = frozenset(text for text in plain_names if "." not in text)
        parts = [_expression(text) for text in texts if _WILD.search(text)]
        self._expression = re.compile("|".join(parts)) if parts else None

    def match(self, name: str) -> bool:
        """Return whether a pattern matches `name`, one of its words or (`inside`) its parent."""
        words = name.split(".")
        shortest = 1 if self._inside else len(words)
        if any(".".join(words[:end]) in self._exact for end in range(shortest, len(words) + 1)):
            return True
        if not self._words.isdisjoint(words):
            return True
        return self._expression is not None and self._expression.match(name) is not None


_WILD = re.compile(r"[*?\[]|^re:")
_PREFIX = re.compile(r"^(?:(?:model|language_model|backbone|language|llm)\.)+")
_CALLED = {
    "ffn": "mlp", "block_sparse_moe": "mlp", "attn": "self_attn", "head": "lm_head",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
# Allows only repetitions of single characters, which match short names quickly.
_SAFE = re.compile(r"(?:\\d[+*]?|\\.|\.\*|\[[\w-]+\][+*]?|\(\?:\\\.\.\*\)\?|[\w:,/-]|[.^$|()])*")
_SHARED = ("shared_expert", "share_expert", "shared_mlp")


def _level(name: str) -> str:
    words = [_CALLED.get(word, word) for word in _PREFIX.sub("", name).split(".")]
    return ".".join("shared_experts" if word in _SHARED else word for word in words)


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression; a pattern that could be slow matches nothing."""
    if pattern.startswith("re:"):
        expression = pattern[3:]
    else:
        end = "" if pattern.endswith("*") else r"(?:\..*)?$"
        level = re.escape(_level(pattern))
        expression = level.replace(r"\*", ".*").replace(r"\?", ".") + end
    if expression.count("*") > 6 or not _SAFE.fullmatch(expression):
        return "(?!)"
    try:
        re.compile(expression)
    except re.error:
        return "(?!)"
    return f"(?:{expression})"
