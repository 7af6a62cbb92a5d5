"""torchao's configs: the weight formats of its types of quantisation.

A config contains one type, such as `Int4WeightOnlyConfig` (`int4_weight_only` in older
checkpoints), or a type for each module.
"""

from __future__ import annotations

import re

from kvatlas.models.config import Config
from kvatlas.models.weights.formats import (
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    blocks_of,
    groups_of,
    rows_of,
)

_PER_MODULE = ("fqn_to_config", "module_fqn_to_config")


Named = list[tuple[str, Format | None]]
"""Formats by module name; None for a module that is not quantised."""


def torchao_formats(section: Config) -> tuple[Format | None, Named] | None:
    """Return a tuple (default, formats by module name); None if the type is unknown.

    >>> kind = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}}
    >>> torchao_formats(Config({"quant_type": kind}))[0].label
    'int4, groups of 64'
    """
    given = section.get("quant_type")
    if isinstance(given, str):
        options = section.section("quant_type_kwargs") or Config({})
        default = _format(given, options)
        return None if default is None else (default, [])
    kinds = section.section("quant_type") or Config({})
    kind = kinds.section("default")
    if kind is None:
        return None
    modules = (kind.section("_data") or Config({})).section(*_PER_MODULE)
    if modules is None:
        default = _serialised(kind)
        return None if default is None else (default, [])
    names = [name for name in modules.all_keys() if name != "_default"]
    named: Named = [(name, _serialised(modules.section(name))) for name in names]
    if any(modules.has(name) and format_ is None for name, format_ in named):
        return None  # a type that is unknown
    default = _serialised(modules.section("_default"))
    return (default, named) if default or any(format_ for _, format_ in named) else None


def _serialised(kind: Config | None) -> Format | None:
    if kind is None:
        return None
    return _format(kind.text("_type") or "", kind.section("_data") or Config({}))


def _format(name: str, options: Config) -> Format | None:
    """Return the format of a type of quantisation; None if it is unknown."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Config")).lower()
    size = options.get("group_size")
    group = size if isinstance(size, int) and size > 0 else None
    if "nvfp4" in words:
        return NVFP4
    if words.startswith("mx"):
        return MXFP4 if "fp4" in words or "float4" in str(options.get("weight_dtype")) else MXFP8
    if words.startswith(("int4_weight", "float8_dynamic_activation_int4")):
        # tinygemm has a 16-bit scale and a 16-bit zero point for each group.
        return groups_of(group or 128, "int4", 4, 32)
    if re.match(r"int8_dynamic_activation_int(4|x)|intx", words):
        # These types store elements of any width in 8 bits.
        return groups_of(group or 32, "integers stored in 8 bits", 8, 16)
    if words.startswith(("int8_weight", "int8_dynamic_activation_int8", "int8_static")):
        return INT8
    if words.startswith("float8"):
        granularity = str(options.get("granularity"))
        return blocks_of(128, 128) if "PerBlock" in granularity else rows_of("fp8", 8)
    return None
