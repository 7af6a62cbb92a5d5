"""`CacheIdentity`: the weights and settings that a cache was computed with.

Two caches of equal shape are interchangeable only if the same model computed both. Shapes
alone do not show this: a fine-tune has the shapes of its base model. Nodes, tiers and engines
compare identities before they exchange or reuse a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from kvatlas.errors import AtlasError, Code
from kvatlas.models.checkpoint_identity import weights_identity

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST = 1024
_Text = Annotated[str, Meta(max_length=_LONGEST)]

_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "name_or_path",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Config keys that change neither K nor V: names, versions, initialisation, special tokens.

The set also contains dtypes, because plans record the dtype of every cache.
"""


class CacheIdentity(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The weights, settings and owner of a cache. Caches of different identities never mix.

    >>> base = CacheIdentity(weights="sha256:5f1a")
    >>> tuned = CacheIdentity(weights="sha256:77c0")
    >>> base == tuned, base.differences(tuned)
    (False, "weights 'sha256:5f1a' and 'sha256:77c0'")
    >>> base.for_request(adapter="support-bot").adapter
    'support-bot'
    """

    weights: _Text
    """The weights: the result of `weights_identity` for a checkpoint, or a unique name."""
    config: _Text = ""
    """A digest of the config fields that change K and V, from `config_identity`."""
    adapter: _Text = ""
    """The name of the adapter (LoRA) that was active; empty if there was none."""
    salt: _Text = ""
    """A value that differs between requests that must not share a cache, such as two users'."""
    tenant: _Text = ""
    """The owner of the cache in a store that several tenants share."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise AtlasError(
                Code.BAD_CONFIG,
                "A cache identity needs a name for the weights",
                got="an empty name",
                hint="Pass weights=models.weights_identity(folder), or weights= with a unique name",
            )
        for name in self.__struct_fields__:
            _check_text(name, getattr(self, name))

    @classmethod
    def of_checkpoint(
        cls, folder: str | Path, *, weights: str | None = None, **overrides: Any
    ) -> CacheIdentity:
        """Return the identity of a model that is served from a checkpoint folder.

        `overrides` are config values that the engine changed after it read the folder.
        `weights` replaces the digest of the folder's weight files.
        """
        from pathlib import Path  # slow to import, and only needed for folders

        folder = Path(folder)
        named = weights if weights is not None else weights_identity(folder)
        return cls(weights=named, config=config_identity(read_config(folder), **overrides))

    def for_request(self, *, adapter: str = "", salt: str = "") -> CacheIdentity:
        """Return this identity with the adapter and the salt of one request."""
        return msgspec.structs.replace(self, adapter=adapter, salt=salt)

    def differences(self, other: CacheIdentity | None) -> str:
        """Return the fields in which two identities differ, as text; empty if they are equal."""
        if other is None:
            return f"weights {self.weights!r} and no identity"
        names = [name for name in self._names() if getattr(self, name) != getattr(other, name)]
        return ", ".join(
            "salt (not shown)"
            if name == "salt"
            else f"{name} {getattr(self, name)!r} and {getattr(other, name)!r}"
            for name in names
        )

    @property
    def computed_with(self) -> str:
        """All fields as one string; the weights' name alone if the other fields are empty."""
        rest = (self.config, self.adapter, self.salt)
        if not any(rest):
            return self.weights
        return msgspec.json.encode((self.weights, *rest)).decode()

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return cls.__struct_fields__


def config_identity(config: Mapping[str, Any], **overrides: Any) -> str:
    """Return a digest of the config values that change K and V.

    The digest covers every value (RoPE, norms, scales, activations, sizes) that is not known to
    have no effect. Two configs that differ in an unknown key therefore have different digests.

    >>> one = config_identity({"rope_theta": 1e6, "transformers_version": "5.17.0"})
    >>> one == config_identity({"rope_theta": 1000000, "transformers_version": "5.23.0"})
    True
    >>> one == config_identity({"rope_theta": 1e4})
    False
    """
    kept = _normalised({**config, **overrides})
    from hashlib import blake2b  # slow to import, and only needed here

    return blake2b(msgspec.json.encode(kept, order="sorted"), digest_size=16).hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the values in the `config.json` of a checkpoint folder."""
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise AtlasError(
            Code.UNREADABLE,
            "The checkpoint has no readable config.json",
            got=error,
            hint="Pass a checkpoint's folder, or name the weights with CacheIdentity(weights=...)",
        ) from None


def _normalised(value: Any) -> Any:
    """Return a config value in canonical form, for comparison.

    Null values and keys that affect neither K nor V are removed, and 1.0 becomes 1.
    """
    if isinstance(value, Mapping):
        kept = {str(key): _normalised(one) for key, one in value.items()}
        return {
            key: one
            for key, one in kept.items()
            if key not in _WITHOUT_EFFECT and one is not None and one != {}
        }
    if isinstance(value, list | tuple):
        return [_normalised(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _check_text(name: str, text: Any) -> None:
    """Raise an error unless `text` is a string that fits the length limit and encodes as UTF-8."""
    hint = f"Use a UTF-8 string of at most {_LONGEST:,} characters"
    if not isinstance(text, str):
        problem = f"The {name} of a cache identity must be a string"
        raise AtlasError(Code.BAD_CONFIG, problem, got=repr(text)[:100], hint=hint)
    if len(text) > _LONGEST:
        raise AtlasError(
            Code.BAD_CONFIG,
            f"The {name} of a cache identity is too long",
            got=f"{len(text):,} characters",
            hint=hint,
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = f"The {name} of a cache identity cannot be encoded as UTF-8"
        raise AtlasError(Code.BAD_CONFIG, problem, got=ascii(text[:100]), hint=hint) from None


# msgspec crashes if two threads are the first to decode a type, so create the decoder here.
msgspec.msgpack.Decoder(CacheIdentity)
