"""The types of engine rules: one `EngineRules` per release, made of data only."""

from __future__ import annotations

import msgspec

from kvatlas.models import Model
from kvatlas.specs import Recurrent, Spec


class PrefillCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill kernel that saves a recurrent state in the middle of a prefill.

    A request then holds one more block in each recurrent group.
    """

    kernel: str
    """The kernel's name."""
    states: str
    """The tag of the specs to which the rule applies, such as `gated_delta_net`."""
    chips: tuple[str, ...] = ()
    """Chips on which the engine selects the kernel by default; empty for every chip."""
    architectures: tuple[str, ...] = ()
    """Architectures whose names start with one of these words; empty for all."""
    key_dim: int | None = None
    """The only head size that the kernel supports; None for any."""
    alignment: int = 1
    """The block size of the model must be a multiple of this number of tokens."""

    def fits(self, model: Model, spec: Spec) -> bool:
        """Return whether the kernel supports the states of a spec, on any chip."""
        if not isinstance(spec, Recurrent) or spec.__struct_config__.tag != self.states:
            return False
        sizes = {getattr(spec, name, self.key_dim) for name in ("key_dim", "head_dim")}
        if self.key_dim is not None and sizes != {self.key_dim}:
            return False
        return not self.architectures or model.architecture.startswith(self.architectures)

    def on(self, chip: str | None) -> bool:
        """Return whether the engine selects the kernel on a chip; None is an unknown chip."""
        return not self.chips or chip in self.chips


class BackendChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A backend that the engine selects on some chips or for some models.

    The backends in `instead_of` are those that it would select on Hopper by default.
    """

    chips: tuple[str, ...] = ()
    """Chips on which the engine selects it; empty for every chip."""
    instead_of: tuple[str, ...]
    """Names of the backends that it replaces."""
    backend: str
    head_dims: tuple[int, ...] = ()
    """Head sizes that the backend supports; empty for all."""
    architectures: tuple[str, ...] = ()
    """Architectures whose names start with one of these words; empty for all."""
    caches: tuple[str, ...] = ()
    """Cache dtypes for which the engine selects it; empty for all."""
    most_heads: int | None = None
    """The largest number of query heads per rank for which the engine selects it; None for any."""

    def fits(self, name: str, chip: str | None, model: Model, spec: Spec, tp: int) -> bool:
        """Return whether the backend replaces the backend `name` in a layer of a model."""
        if (self.chips and chip not in self.chips) or name not in self.instead_of:
            return False
        if self.head_dims and getattr(spec, "head_dim", None) not in self.head_dims:
            return False
        if self.caches and getattr(spec, "cache", "auto") not in self.caches:
            return False
        if self.most_heads is not None and model.attention_heads // tp > self.most_heads:
            return False
        return not self.architectures or model.architecture.startswith(self.architectures)


class MissingKernels(msgspec.Struct, frozen=True, kw_only=True):
    """Backends that lack kernels on some chips. The engine then refuses the model."""

    chips: tuple[str, ...] = ()
    """Empty for every chip: the release does not have the backends."""
    backends: tuple[str, ...]
    head_dims: tuple[int, ...] = ()
    """Head sizes without a kernel; empty for all."""
    caches: tuple[str, ...] = ()
    """Cache dtypes without a kernel; empty for all."""

    def concerns(self, backend: str, chip: str | None, spec: Spec) -> bool:
        """Return whether a layer's kernels are missing on a chip."""
        if backend not in self.backends or (self.chips and chip not in self.chips):
            return False
        if self.head_dims and getattr(spec, "head_dim", None) not in self.head_dims:
            return False
        return not self.caches or getattr(spec, "cache", "auto") in self.caches


class EngineRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one release of vLLM that differ from other releases or between chips."""

    version: str
    checkpoints: tuple[PrefillCheckpoint, ...]
    backends: tuple[BackendChoice, ...] = ()
    missing: tuple[MissingKernels, ...] = ()
    multiple_of_all_backends: bool = True
    """Whether a hybrid's block is a multiple of the smallest kernel block of every backend. If
    false, only the first backend counts."""
    whole_kernel_blocks: bool = True
    """Whether the block stride must be a multiple of the kernel block, for backends whose kernels
    read only fixed block sizes."""
    rounds_each_layer: bool = True
    """How block strides are rounded up in layouts where layers are outermost: the stride of each
    layer if true, the sum of all layers if false."""
    any_stride: tuple[str, ...] = ()
    """Backends that accept any block stride in this release, although not in newer ones."""

    def checkpoint(self, model: Model, spec: Spec, chip: str | None) -> PrefillCheckpoint | None:
        """Return the checkpoint rule for the states of a spec on a chip; None if there is none."""
        found = (rule for rule in self.checkpoints if rule.on(chip) and rule.fits(model, spec))
        return next(found, None)

    def backend(self, name: str, chip: str | None, model: Model, spec: Spec, tp: int) -> str:
        """Return the backend that the engine selects on a chip; `name` is its choice on Hopper."""
        found = (one for one in self.backends if one.fits(name, chip, model, spec, tp))
        choice = next(found, None)
        return choice.backend if choice else name

    def lacking(self, backend: str, chip: str | None, spec: Spec) -> MissingKernels | None:
        """Return the rule by which the engine refuses a layer; None if the engine supports it.

        `backend` is the backend of the layer.
        """
        return next((one for one in self.missing if one.concerns(backend, chip, spec)), None)
