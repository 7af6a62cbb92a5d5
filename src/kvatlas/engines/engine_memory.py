"""`EngineMemory`: the plan of another engine's memory, with the addresses of its allocations.

The packages of engines (`sglang`, `lmcache`, `tensorrt_llm`) read an engine's own objects and list
its tables. A table contains layers that share one numbering of blocks, with the placement of each
field. All packages call `describe_tables`, which checks dtypes and passes the placements to
`foreign()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.memory_copy import memory_of
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Field, Placement
from kvatlas.geometry.allocations import Allocations, PlacedAllocation
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, PoolSegment, foreign
from kvatlas.specs import Spec


@dataclass
class Table:
    """Layers of an engine that share one numbering of blocks, with their fields' placements."""

    block: int
    """Tokens per block. For recurrent layers, which have one state per block, it is not used."""
    allocations: Allocations = field(default_factory=Allocations)
    layers: dict[str, dict[str, Placement]] = field(default_factory=dict)
    keeps_all: bool = True
    """Whether blocks of all tokens are kept, even if some layers see a window only."""

    def place(self, tensor: Any, axes: str, *, own_start: bool = False) -> Placement:
        """Return the placement of a tensor; see `Allocations.place`."""
        return self.allocations.place(tensor, axes, own_start=own_start)


class EngineMemory(NamedTuple):
    """The plan of an engine's memory on one rank, and the allocations of each pool."""

    plan: Plan
    allocations: tuple[tuple[PlacedAllocation, ...], ...]
    """The allocations of each pool, in the order of the pool's segments."""

    @classmethod
    def of_pools(cls, plan: Plan, pools: Mapping[int, Any]) -> EngineMemory:
        """Return the memory of a plan that is stored in contiguous arrays or tensors.

        `pools` contains one array or tensor for each pool, by index. The caller keeps them alive.

        >>> from kvatlas.planning import plan
        >>> made = plan("Qwen3-8B", memory="8MiB", max_len=32)
        >>> own = np.zeros(made.pools[0].nbytes, np.uint8)
        >>> EngineMemory.of_pools(made, {0: own}).addresses(0, [64])[0] == own.ctypes.data + 64
        np.True_
        """
        held = memory_of(pools)
        parts = (held[index] for index in range(len(plan.pools)))
        return cls(
            plan,
            tuple((PlacedAllocation(0, one.nbytes, one.address, one.device),) for one in parts),
        )

    def addresses(self, pool: int, offsets: Any) -> NDArray[np.uint64]:
        """Return the addresses of offsets in a pool, such as the runs of a bound route.

        >>> import numpy as np
        >>> from kvatlas.engines.tensorrt_llm import describe_pools
        >>> kv = np.zeros((5, 36, 2, 8 * 32 * 128), np.float16)
        >>> seen = describe_pools("Qwen3-8B", [kv], tokens_per_block=32, dtype="bf16")
        >>> int(seen.addresses(0, [0])[0]) == kv.ctypes.data
        True
        """
        held = self.allocations[pool]
        index, within = self.plan.pools[pool].locate(offsets)
        starts = np.array([one.address for one in held], dtype=np.uint64)
        return starts[index] + within.astype(np.uint64)


def describe_tables(
    model: Model, tables: Sequence[Table], *, tp: int, max_len: int | None
) -> EngineMemory:
    """Return the plan of these tables. Each table becomes one group with a separate pool."""
    held = [table for table in tables if table.layers]
    placed = {name: fields for table in held for name, fields in table.layers.items()}
    recurrent = [_is_recurrent(model, table) for table in held]
    plan = foreign(
        model,
        placed,
        tp=tp,
        max_len=max_len,
        groups=[list(table.layers) for table in held],
        blocks={
            name: table.block
            for table, fixed in zip(held, recurrent, strict=True)
            for name in table.layers
            if not fixed
        },
        pools=list(range(len(held))),
        full=[
            name
            for table, fixed in zip(held, recurrent, strict=True)
            if table.keeps_all and not fixed
            for name in table.layers
        ],
    )
    segments = tuple(table.allocations.segments for table in held)
    pools = tuple(
        msgspec.structs.replace(pool, segments=_parts(own, pool.nbytes))
        for pool, own in zip(plan.pools, segments, strict=True)
    )
    return EngineMemory(msgspec.structs.replace(plan, pools=pools), segments)


def _is_recurrent(model: Model, table: Table) -> bool:
    return all(
        layer.spec.tokens_per_state is None for layer in model.layers if layer.name in table.layers
    )


def _parts(
    segments: Sequence[PlacedAllocation], end: int
) -> tuple[PoolSegment, ...] | msgspec.UnsetType:
    """Return the segments of a pool that ends at offset `end`; unset for one allocation."""
    if len(segments) == 1:
        return msgspec.UNSET
    return tuple(
        PoolSegment(offset=one.offset, nbytes=min(one.nbytes, end - one.offset)) for one in segments
    )


def model_for(engine: Any, model: Any) -> Model:
    """Return the model with the dtypes of states that `engine` uses; a `Model` is unchanged."""
    return model if isinstance(model, Model) else Model.load(model, engine=engine)


def layers_at(
    model: Model, index: int, kind: type[Spec], what: str, *, optional: bool = False
) -> list[Layer]:
    """Return the caches of decoder layer `index` whose specs are of class `kind`.

    `what` names the engine's object in the error message. If `optional` is true, the
    result may be empty.
    """
    found = [one for one in model.layers if one.index == index and isinstance(one.spec, kind)]
    if not found and not optional:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            f"The model has no cache for a layer of {what}",
            got=f"layer {index}, which needs {kind.__name__}, of {model.name}",
            hint="Pass the config of the model that the engine serves",
        )
    return found


def check_dtype(layer: Layer, one: Field, stored: Any) -> None:
    """Raise an error if an engine stores elements of another dtype than the field has.

    Two 16-bit dtypes have the same layout, so a check of sizes would not detect the difference.
    """
    given = DType.of(stored)
    if given.name == one.dtype.name or (one.dtype.packed and given.bits == 8):
        return
    raise AtlasError(
        Code.BAD_TENSOR,
        f"The dtype of {layer.name} differs from the model's",
        got=f"elements of {given.name} for field {one.name} in {one.dtype.name}",
        hint="Load the model with the engine's dtype: Model.load(config, dtype=...)",
    )


def check_known_version(package: str, known: Iterable[str], given: str | None = None) -> str:
    """Return the version of `package`: `given`, or the installed one. It must be in `known`.

    >>> check_known_version("sglang", ["0.5.23"], "0.4.0")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: This version of sglang was not tested with kvatlas. \
Got sglang 0.4.0. Use one of 0.5.23. [engine_refuses]
    """
    try:
        version = installed_version(package) if given is None else given
    except PackageNotFoundError:
        version = "of an unknown version"
    if version not in known:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            f"This version of {package} was not tested with kvatlas",
            got=f"{package} {version}",
            hint=f"Use one of {', '.join(known)}",
        )
    return version


def unknown_object(engine: str, given: object, known: Mapping[str, object]) -> AtlasError:
    """Return the error for an object of an engine that kvatlas does not know."""
    return AtlasError(
        Code.ENGINE_REFUSES,
        f"kvatlas cannot describe this object of {engine}",
        got=type(given).__name__,
        hint=f"Pass one of {', '.join(known)}",
    )
