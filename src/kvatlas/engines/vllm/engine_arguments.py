"""The arguments of `vllm serve` that affect an engine's caches and connector."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvatlas.errors import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.planning.request import length
from kvatlas.specs import Attention

_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "layout": "kv_cache_layout",
    "backend": "attention_backend",
    "prefix_caching": "enable_prefix_caching",
    "max_len": "max_model_len",
    "memory": "kv_cache_memory_bytes",
    "kv_dtype": "kv_cache_dtype",
}
"""Short names of arguments, in vLLM or in kvatlas."""
_LAYOUT_VARIABLE = "VLLM_KV_CACHE_LAYOUT"
_CPU_VARIABLES = "VLLM_CPU_"
CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""The variable with the size of the cache of an engine on a CPU, in GiB."""
CPU_BACKEND = "CPU_ATTN"
"""The attention backend that vLLM uses on a CPU."""
_CPU_BLOCK = 128
"""The default block size on a CPU, in tokens."""
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_MEMORY = "1TiB"
"""Default memory per rank; the number of blocks does not matter for a diagnosis."""

Ranks = Annotated[int, Meta(ge=1, le=1 << 16)]


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of one engine, under vLLM's names.

    >>> command = "VLLM_KV_CACHE_LAYOUT=HND vllm serve Qwen3-8B -tp 2 --block-size=32 --port 8000"
    >>> made = EngineArguments.of_command(command)
    >>> made.model, made.tensor_parallel_size, made.block_size, made.kv_cache_layout
    ('Qwen3-8B', 2, 32, 'HND')
    >>> EngineArguments.of_changes("Qwen3-8B", "tp=2,layout=HND").kv_cache_layout
    'HND'
    """

    model: str
    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    data_parallel_size: Ranks = 1
    decode_context_parallel_size: Ranks = 1
    block_size: Annotated[int, Meta(ge=1)] | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool | None = None
    attention_backend: str | None = None
    kv_cache_layout: str | None = None
    """The value of VLLM_KV_CACHE_LAYOUT."""
    max_model_len: int | str | None = None
    kv_cache_memory_bytes: int | str | None = None
    disable_hybrid_kv_cache_manager: bool = False
    hf_overrides: dict[str, Any] | None = None
    quantization: str | None = None
    load_format: str = "auto"
    device: str | None = None
    """The device, if given; `cpu` if a `VLLM_CPU_` variable is set."""
    speculative_config: dict[str, Any] | None = None
    kv_transfer_config: dict[str, Any] | None = None
    """The connector's config; None if unknown, empty if the engine has no connector."""

    @classmethod
    def of_command(cls, text: str) -> EngineArguments:
        """Parse a `vllm serve` command line; ignore options that do not affect caches."""
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as problem:
            raise _unreadable(str(problem)) from None
        given: dict[str, Any] = {"kv_transfer_config": {}}
        while words and (variable := _VARIABLE.fullmatch(words[0])):
            if variable[1] == _LAYOUT_VARIABLE:
                given["kv_cache_layout"] = variable[2]
            if variable[1].startswith(_CPU_VARIABLES):
                given["device"] = "cpu"
            del words[0]
        if "serve" in words[:8]:
            del words[: words.index("serve") + 1]
        return cls.of_values(given | dict(_options(words)))

    @classmethod
    def of_changes(cls, model: str, text: str) -> EngineArguments:
        """Parse comma-separated `name=value` arguments for an engine of a model."""
        given: dict[str, Any] = {"model": model}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            name = _long(name)
            if name not in cls.__struct_fields__ or not equals:
                known = (*_SHORT, "block_size", "dtype", "kv_cache_dtype")
                near = get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]}?" if near else f"Write name=value: {_words(known)}"
                raise _unreadable(repr(part), hint)
            given[name] = value.strip()
        return cls.of_values(given)

    @classmethod
    def of_values(cls, given: dict[str, Any]) -> EngineArguments:
        """Return the arguments in `given`, by vLLM's names or by short names such as tp."""
        values = {_long(str(name)): value for name, value in given.items()}
        for name in ("hf_overrides", "speculative_config", "kv_transfer_config"):
            if isinstance(values.get(name), str):
                values[name] = _object(name, values[name])
        known = {name: value for name, value in values.items() if name in cls.__struct_fields__}
        try:
            return msgspec.convert(known, cls, strict=False)
        except msgspec.ValidationError as wrong:
            raise _unreadable(str(wrong)) from None

    def plan(self) -> Plan:
        """Return the plan that vLLM makes from these arguments."""
        dtype = None if self.dtype == "auto" else self.dtype
        model = Model.load(self.model, dtype=dtype)
        on_cpu = self.device == "cpu" and any(
            isinstance(one.spec, Attention) for one in model.layers
        )
        return plan(
            model,
            memory=self.kv_cache_memory_bytes or _MEMORY,
            tp=self.tensor_parallel_size,
            pp=self.pipeline_parallel_size,
            dcp=self.decode_context_parallel_size,
            layout=self.kv_cache_layout,
            backend=self.attention_backend or (CPU_BACKEND if on_cpu else None),
            block_size=self.block_size or (_CPU_BLOCK if on_cpu else None),
            kv_dtype=None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            policy="uniform" if self.disable_hybrid_kv_cache_manager else "vllm",
            max_len=None if self.max_model_len is None else length(self.max_model_len),
            prefix_caching=self.enable_prefix_caching is not False,
        )


def _options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each option of a command line; a flag without a value is True."""
    if words and not words[0].startswith("-"):
        yield "model", words.pop(0)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("-"):
            continue
        name = _long(name)
        if equals:
            yield name, value
        elif words and not re.match(r"-+[a-zA-Z]", words[0]):
            yield name, words.pop(0)
        elif name.startswith("no_"):
            yield name.removeprefix("no_"), False
        else:
            yield name, True


def _long(name: str) -> str:
    """Return an argument's full name: `--tp` becomes `tensor_parallel_size`."""
    name = name.strip().lstrip("-").lower().replace("-", "_")
    return _SHORT.get(name, name)


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise _unreadable(f"{name}: {problem}") from None
    if not isinstance(found, dict):
        raise _unreadable(f"{name} {text[:60]!r}, expected a JSON object")
    return found


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(name.replace("_", "-") for name in names)


def _unreadable(got: str, hint: str = "Use the syntax of vllm serve") -> AtlasError:
    problem = "The engine's arguments cannot be parsed"
    return AtlasError(Code.BAD_CONFIG, problem, got=got[:300], hint=hint)
