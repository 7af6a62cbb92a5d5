"""`open_tier`: open a tier by its address, in process memory, in a file or in an object store."""

from __future__ import annotations

from contextlib import suppress
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
from kvatlas.tier.addresses import without_secrets
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.canonical_rows import canonical_rows, layers_of
from kvatlas.tier.converting import Converting, check_converting
from kvatlas.tier.served.client import TierClient
from kvatlas.tier.served.sharing import share_file
from kvatlas.tier.store_tier import StoreTier
from kvatlas.tier.stored_rows import OtherRows
from kvatlas.tier.stores import (
    BucketStore,
    EncryptedStore,
    FolderStore,
    HostStore,
    KeyFolder,
    MooncakeStore,
    ObjectStore,
    RedisStore,
    objects,
    redis,
)
from kvatlas.tier.tier import Tier

IN_MEMORY = "memory"
BLOCK = 64
"""Default number of tokens per row, if the model's layers support it."""
_SIZES = ("segment", "buffer", "capacity", "quota")
_NUMBERS = ("replicas", "timeout")
_OF_BACKENDS = ("planes", "tiled_planes", "transposed")
"""Packings that depend on the attention backend and not on the dtype."""
_SCHEMES = ("mooncake", "folder", "host", *objects.SCHEMES, *redis.SCHEMES)


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
    """Open the tier at an address, for a model or for the model of a plan.

    - `"memory"`: host memory of this process, `memory` bytes.
    - a path: a file. A new file takes `memory` bytes; an existing file keeps its plan. Only this
      process may open it; with `shared`, any number of processes on this host may open it.
    - `"mooncake://host:port?metrics=host:9003&segment=4GiB"`: Mooncake Store.
    - `"s3://bucket/prefix?region=eu-west-1"`, `gs://`, `az://`: a bucket.
    - `"redis://host:6379/0"`: Redis or Valkey.
    - `"folder:///path?capacity=100GiB"`: a folder.
    - `"host://?capacity=1GiB"`: an object store in host memory of this process.
    - `"folder:///path?keys=/etc/kvatlas/keys"`: a folder of encrypted objects (see `KeyFolder`).

    An object store requires an `identity`. `options` are passed to `open_store_tier`.

    >>> from kvatlas.models import Model
    >>> with open_tier("memory", "Qwen3-8B", memory="256MiB", max_len=1024) as tier:
    ...     tier.plan.groups[0].block
    64
    >>> ours = CacheIdentity(weights="a digest of the checkpoint")
    >>> with open_tier("host://", "Qwen3-8B", ours, max_len=1024, staging=32 << 20) as fleet:
    ...     fleet.match([b"a key"], 64), dict(fleet.misses)
    (0, {'other_tenant': 1})
    """
    if not is_store(where):
        if options:
            hint = "Omit these options, or use the address of a store, such as folder:///path"
            problem = "A tier in memory or in a file does not support options of object stores"
            got = f"options {', '.join(sorted(options))} for {without_secrets(where)!r}"
            raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
        if "://" in str(where):
            raise _unknown_kind(where)
        made = rows_of(_known(model), block_size, max_len, memory)
        return Tier(made) if str(where) == IN_MEMORY else _open_file(Path(where), made, shared)
    if identity is None:
        hint = "Pass identity=CacheIdentity(weights=models.weights_identity(folder))"
        problem = "A tier in an object store requires an identity"
        got = f"no identity for {without_secrets(where)!r}"
        raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
    about: dict[str, Any] = {"block_size": block_size, "max_len": max_len, **options}
    return open_store_tier(str(where), model, identity, **about)


def open_store_tier(
    where: str,
    model: Model | Plan | str,
    identity: CacheIdentity,
    *,
    block_size: int = BLOCK,
    max_len: int | None = None,
    convert: Converting | None = None,
    **options: Any,
) -> StoreTier:
    """Open the tier in the object store at an address. `options` are passed to `StoreTier`.

    With `convert` ("bf16->fp8" for a model that is cached in fp8), lookups also find rows that
    engines with the other cache dtype have stored. They are converted when they are fetched.
    """
    rows = canonical_rows(model, span=block_size, max_len=max_len)
    if convert is not None:
        options["other"] = other_rows(model, convert, block_size=block_size, max_len=max_len)
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
    """Describe the rows that engines with the source dtype of `convert` store.

    >>> rows = other_rows("Qwen3-8B", Converting("fp8->bf16", source_scales=1.0), max_len=64)
    >>> rows.plan.regions[0].layers[0].spec.cache
    'fp8'
    """
    stored = stored_as(_known(model), convert)
    return OtherRows(canonical_rows(stored, span=block_size, max_len=max_len), convert)


def stored_as(model: Model, convert: Converting) -> Model:
    """Return a copy of `model` whose cache dtype is the source dtype of `convert`."""
    check_converting(convert)
    pairs = parse_conversion(convert.name)
    if len(pairs) > 1:
        problem = "The conversion of a tier must be one pair of formats"
        hint = "Pass one pair. For rows of a second dtype, pass other=OtherRows(plan, convert)"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=repr(convert.name), hint=hint)
    ((source, _),) = pairs
    stored = model.with_cache(source)
    layers = map(_packed_alike, stored.layers, model.layers)
    return msgspec.structs.replace(stored, layers=tuple(layers))


def _packed_alike(stored: Layer, own: Layer) -> Layer:
    """Return layer `stored` with the `packing` (order of heads, tokens and fields) of `own`.

    Return `stored` unchanged if its dtype determines the packing, or does not support that of
    `own`.
    """
    packing = getattr(own.spec, "packing", None)
    if packing not in _OF_BACKENDS:
        return stored
    try:
        spec = msgspec.structs.replace(stored.spec, packing=packing)
    except AtlasError:  # the packing does not support this dtype's scales
        return stored
    return msgspec.structs.replace(stored, spec=spec)


def _known(model: Model | Plan | str) -> Model:
    """Return a `Model`, given a model, its name or a plan.

    The model of a plan consists of the plan's layers, without its topology.
    """
    if isinstance(model, Plan):
        layers = tuple(sorted(layers_of(model), key=lambda layer: (layer.index, layer.name)))
        about: dict[str, Any] = {"name": model.model, "architecture": "", "attention_heads": 0}
        return Model(layers=layers, depth=layers[-1].index + 1, max_len=model.max_len, **about)
    return model if isinstance(model, Model) else Model.load(model)


def _open_file(path: Path, made: Plan, shared: bool) -> Tier | TierClient:
    """Open the tier in a file, or create the file with this plan if it does not exist."""
    new = None if path.exists() else made
    tier = share_file(path, new, durable=False) if shared else Tier.open(path, new)
    if fingerprint(tier.plan) != fingerprint(made):
        tier.close()
        problem = "The tier's file was created for another model or cache dtype"
        hint = "Use another path, or open the tier for the model and dtype of the file"
        raise AtlasError(Code.UNLIKE_MODELS, problem, got=f"{path}: {tier.plan}", hint=hint)
    return tier


def is_store(where: str | Path) -> bool:
    """Return whether an address names an object store.

    Object names in a store include the identity of the model's weights, so keys need not include
    it.

    >>> is_store("mooncake://10.0.0.1:50051"), is_store("/var/cache/prefixes.tier")
    (True, False)
    """
    return urlsplit(str(where)).scheme in _SCHEMES


def open_store(where: str, *, create: bool = True, **instead: Any) -> ObjectStore:
    """Open the object store at an address. Options in `instead` override options in the address.

    A missing folder is created, unless `create` is false.
    """
    if not isinstance(where, str) or "\0" in where:
        raise _unknown_kind(where)
    address = urlsplit(where)
    about = _about(address) | instead
    if "keys" in about:
        return _encrypted(where, create, about)
    if "replicas" in about and address.scheme != "mooncake":
        problem = "This store does not support replicas="
        hint = "Use mooncake://, or configure replication in the store itself"
        got = f"replicas={about['replicas']} for {without_secrets(where)!r}"
        raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
    try:
        match address.scheme:
            case "mooncake":
                return MooncakeStore(address.netloc, **about)
            case "folder" if address.netloc + address.path:
                return FolderStore(address.netloc + address.path, create=create, **about)
            case "host":
                return HostStore(**about)
            case scheme if scheme in objects.SCHEMES and address.netloc:
                return BucketStore(where.partition("?")[0], **about)
            case scheme if scheme in redis.SCHEMES and address.netloc:
                return RedisStore(where.partition("?")[0], **about)
    except TypeError as fault:
        problem = "The address of the store contains an unknown option"
        option = str(fault).rpartition("argument ")[2]
        hint = "See docs/how-to/tiers.md for the options of each store"
        raise AtlasError(Code.BAD_CONFIG, problem, got=option, hint=hint) from None
    raise _unknown_kind(where)


def _encrypted(where: str, create: bool, about: dict[str, Any]) -> ObjectStore:
    """Open a store and encrypt its objects with the keys in the folder `about["keys"]`."""
    if where.startswith("mooncake:"):
        problem = "Mooncake Store reads registered memory, so its objects cannot be encrypted"
        hint = "Remove keys=, or use folder:///path"
        got = repr(without_secrets(where))
        raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
    keys = KeyFolder(about.pop("keys"))
    plain = open_store(where.partition("?")[0], create=create, **about)
    try:
        return EncryptedStore(plain, keys)
    except BaseException:
        plain.close()
        raise


def _unknown_kind(where: str | Path) -> AtlasError:
    hint = "Use mooncake://host:port, s3://bucket/prefix, redis://host:port or folder:///path"
    problem = "The address of the store is not valid"
    return AtlasError(Code.BAD_CONFIG, problem, got=repr(without_secrets(where)), hint=hint)


def rows_of(model: Model, block_size: int, max_len: int | None, memory: str | int) -> Plan:
    """Return the plan of a tier in memory or in a file, with heads outermost if possible."""
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
    """Return the query options of an address, with sizes converted to bytes."""
    said: dict[str, Any] = dict(parse_qsl(address.query))
    for name, value in said.items():
        if name in _SIZES:
            said[name] = quantity(value, name)
        elif name in _NUMBERS:
            with suppress(ValueError):  # the store raises an error for a text and names the option
                said[name] = float(value) if name == "timeout" else int(value)
    return said
