"""`open_tier`: a tier by its address, whether it is of one process, a file, or a fleet's store."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity, Layer, Model
from kvatlas.planning import Plan, plan
from kvatlas.planning.request import quantity
from kvatlas.routing import fingerprint
from kvatlas.routing.conversion import parse_conversion
from kvatlas.tier.converting import Converting, check_converting
from kvatlas.tier.prefix_finder import AnyTier
from kvatlas.tier.served.client import TierClient
from kvatlas.tier.served.sharing import share_file
from kvatlas.tier.store_tier import StoreTier
from kvatlas.tier.stored_rows import OtherRows
from kvatlas.tier.stores import FolderStore, HostStore, MooncakeStore, ObjectStore
from kvatlas.tier.tier import Tier

IN_MEMORY = "memory"
BLOCK = 64
"""Tokens of a row, where the model's layers allow it."""
_ANY_MEMORY = "1TiB"
"""Rows of a store are planned for: how many there are is the store's."""
_SIZES = ("segment", "buffer", "capacity", "quota")
_OF_BACKENDS = ("planes", "tiled_planes", "transposed")
"""Packings that a backend has for every dtype: engines that share a store have mostly one."""
_SCHEMES = ("mooncake", "folder", "host")


def open_tier(
    where: str | Path,
    model: Model | Plan | str,
    identity: CacheIdentity | None = None,
    *,
    memory: str | int = "1GiB",
    block_size: int = BLOCK,
    max_len: int | None = None,
    shared: bool = False,
    **options: Any,
) -> AnyTier:
    """The tier at an address, for one model, or for the model that a plan is of.

    - `"memory"`: host memory of this process, so many bytes of `memory`.
    - a path: a file; a new one takes `memory` bytes, one that is there keeps its plan. This
      process alone has it open, or any number of this host's where it is `shared`.
    - `"mooncake://host:port?metrics=host:9003&segment=4GiB"`: a fleet's Mooncake Store.
    - `"folder:///path?capacity=100GiB"`: a folder that hosts share; `"host://?capacity=1GiB"`.

    A store's tier needs an `identity`; `options` are those of `open_store_tier`.

    >>> from kvatlas.models import Model
    >>> with open_tier("memory", "Qwen3-8B", memory="256MiB", max_len=1024) as tier:
    ...     tier.plan.groups[0].block
    64
    >>> ours = CacheIdentity(weights="a digest of the checkpoint")
    >>> with open_tier("host://", "Qwen3-8B", ours, max_len=1024, staging=32 << 20) as fleet:
    ...     fleet.match([b"a key"], 64), dict(fleet.misses)
    (0, {'other_tenant': 1})
    """
    known = _known(model)
    if not is_store(where):
        if options:
            hint = f"Leave them out, or name a store: {', '.join(_SCHEMES)}"
            problem = "Only the tier of a store takes these options"
            raise AtlasError(Code.CONTRADICTORY, problem, got=sorted(options), hint=hint)
        if "://" in str(where):
            raise _unknown_kind(where)
        made = rows_of(known, block_size, max_len, memory)
        return Tier(made) if str(where) == IN_MEMORY else _open_file(Path(where), made, shared)
    if identity is None:
        hint = "Pass CacheIdentity(weights=models.weights_identity(folder))"
        problem = "A store that others write to is of no use without an identity"
        raise AtlasError(Code.CONTRADICTORY, problem, got=str(where), hint=hint)
    about: dict[str, Any] = {"block_size": block_size, "max_len": max_len, **options}
    return open_store_tier(str(where), known, identity, **about)


def open_store_tier(
    where: str,
    model: Model | Plan,
    identity: CacheIdentity,
    *,
    block_size: int = BLOCK,
    max_len: int | None = None,
    convert: Converting | None = None,
    **options: Any,
) -> StoreTier:
    """The tier in the store at an address; `options` are those of `StoreTier`.

    With `convert` ("bf16->fp8" for a model that is cached in fp8), what engines with the other
    cache dtype have stored is found as well, and converted as it is fetched.
    """
    known = _known(model)
    rows = rows_of(known, block_size, max_len, _ANY_MEMORY)
    if convert is not None:
        options["other"] = other_rows(known, convert, block_size=block_size, max_len=max_len)
    store = open_store(where)
    try:
        return StoreTier(store, rows, identity, **options)
    except BaseException:
        store.close()
        raise


def other_rows(
    model: Model | Plan | str,
    convert: Converting,
    *,
    block_size: int = BLOCK,
    max_len: int | None = None,
) -> OtherRows:
    """Rows that engines with the cache dtype which a conversion is from have in a store.

    >>> rows = other_rows("Qwen3-8B", Converting("fp8->bf16", src_scales=1.0), max_len=64)
    >>> rows.plan.regions[0].layers[0].spec.cache
    'fp8'
    """
    stored = stored_as(_known(model), convert)
    return OtherRows(rows_of(stored, block_size, max_len, _ANY_MEMORY), convert)


def stored_as(model: Model, convert: Converting) -> Model:
    """The model with the cache dtype that a conversion is from."""
    check_converting(convert)
    pairs = parse_conversion(convert.name)
    if len(pairs) > 1:
        problem = "Several formats change, and one cache dtype does not say all of them"
        hint = "Plan the rows of the other engines, and pass other=OtherRows(plan, convert)"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=convert.name, hint=hint)
    ((source, _),) = pairs
    stored = model.with_cache(source)
    layers = map(_packed_alike, stored.layers, model.layers)
    return msgspec.structs.replace(stored, layers=tuple(layers))


def _packed_alike(stored: Layer, own: Layer) -> Layer:
    """A layer packed as one's own is, where its backend says so and not its dtype."""
    packing = getattr(own.spec, "packing", None)
    if packing not in _OF_BACKENDS:
        return stored
    try:
        spec = msgspec.structs.replace(stored.spec, packing=packing)
    except AtlasError:  # which has no place for the scales of its rows
        return stored
    return msgspec.structs.replace(stored, spec=spec)


def _known(model: Model | Plan | str) -> Model:
    """A model; of a plan what it keeps, the same whatever the topology and the order are."""
    if isinstance(model, Plan):
        kept = {layer.name: layer for region in model.regions for layer in region.layers}
        layers = tuple(sorted(kept.values(), key=lambda layer: (layer.index, layer.name)))
        about: dict[str, Any] = {"name": model.model, "architecture": "", "attention_heads": 0}
        return Model(layers=layers, depth=layers[-1].index + 1, max_len=model.max_len, **about)
    return model if isinstance(model, Model) else Model.load(model)


def _open_file(path: Path, made: Plan, shared: bool) -> Tier | TierClient:
    """The tier in a file, a new one of this plan where there is none."""
    new = None if path.exists() else made
    tier = share_file(path, new, durable=False) if shared else Tier.open(path, new)
    if fingerprint(tier.plan) != fingerprint(made):
        tier.close()
        problem, hint = "The file is the tier of another model", "Name another file"
        raise AtlasError(Code.UNLIKE_MODELS, problem, got=f"{path}: {tier.plan}", hint=hint)
    return tier


def is_store(where: str | Path) -> bool:
    """Whether an address is that of a store, which needs an identity.

    >>> is_store("mooncake://10.0.0.1:50051"), is_store("/var/cache/prefixes.tier")
    (True, False)
    """
    return urlsplit(str(where)).scheme in _SCHEMES


def open_store(where: str, *, create: bool = True, **instead: Any) -> ObjectStore:
    """The store at an address; `instead` are options that replace those of the address.

    A folder that is not there is made, unless `create` is false.
    """
    if not isinstance(where, str) or "\0" in where:
        raise _unknown_kind(where)
    address = urlsplit(where)
    about = _about(address) | instead
    try:
        match address.scheme:
            case "mooncake":
                return MooncakeStore(address.netloc, **about)
            case "folder" if address.netloc + address.path:
                return FolderStore(address.netloc + address.path, create=create, **about)
            case "host":
                return HostStore(**about)
    except TypeError as problem:
        hint = "See docs/fleet.md for what an address takes"
        problem_text = "The address of a store says something that the store does not know"
        raise AtlasError(Code.BAD_CONFIG, problem_text, got=str(problem), hint=hint) from None
    raise _unknown_kind(where)


def _unknown_kind(where: str | Path) -> AtlasError:
    hint = "Write mooncake://host:port, folder:///path or host://"
    problem = "There is no such kind of store"
    return AtlasError(Code.BAD_CONFIG, problem, got=repr(str(where)), hint=hint)


def rows_of(model: Model, block_size: int, max_len: int | None, memory: str | int) -> Plan:
    """The plan of a model's rows: heads outermost where they can be, states whole."""
    about: dict[str, Any] = {"memory": memory, "in_flight": 0, "states": "apart"}
    if max_len is not None:
        about["max_len"] = max_len
    refusal = None
    for layout in ("BHLNC", "BLHNC"):
        for block in (block_size, 4 * block_size):
            try:
                return plan(model, layout=layout, block_size=block, **about)
            except AtlasError as problem:
                if problem.code not in (Code.LAYOUT_REFUSED, Code.NOT_DIVISIBLE):
                    raise
                refusal = refusal or problem
    assert refusal is not None  # noqa: S101
    raise refusal


def _about(address: SplitResult) -> dict[str, Any]:
    """What an address says behind its question mark; sizes with their units."""
    said = dict(parse_qsl(address.query))
    return {
        name: quantity(value, name) if name in _SIZES else value for name, value in said.items()
    }
