"""Recurrent layers: one page that holds a layer's whole state.

A recurrent page is a single cell with the states behind each other, each with a
shape and a dtype of its own, so the cache is one tensor that a layer unpacks when
it is bound. The kinds differ in which states there are and how tensor parallelism
shards them: by heads, or section by section along the rows of a convolution, where
each of `q|k|v` or `x|B|C` is divided by itself and never as one slab.

State dtypes are inputs: engines disagree about them for the same model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvatlas.geometry import Field, Page, Section, Shard, Sharding, flat_field
from kvatlas.specs.base import Spec, bad_spec, check, check_page, plain_dtype


class State(NamedTuple):
    """One state of a layer: its axes in memory order, for the whole model, and its sharding."""

    name: str
    dtype: str
    axes: tuple[tuple[str, int], ...]
    sharding: Sharding


class Recurrent(Spec, frozen=True, kw_only=True):
    """What all recurrent kinds share: states behind each other in one cell."""

    def __post_init__(self) -> None:
        check(self)
        check_page(self)

    @property
    def tokens_per_state(self) -> int | None:
        """None: a block keeps one state, whatever its size."""
        return None

    def layer_states(self) -> tuple[State, ...]:
        """The states of the whole model's layer, in memory order."""
        raise NotImplementedError

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """The page on one rank, the same for every block size.

        >>> page = GatedDeltaNet(
        ...     key_heads=16, value_heads=64, key_dim=128, value_dim=128, ssm_dtype="fp32"
        ... ).page(1, tp=2)
        >>> page.nbytes, [field.name for field in page.fields]
        (2134016, ['conv', 'ssm'])
        """
        self.states(block)
        fields: list[Field] = []
        offset = 0
        for state in self.layer_states():
            sharding = state.sharding
            sharded = {sharding.axis: sharding.size(tp)}
            sizes = [(axis, sharded.get(axis, size)) for axis, size in state.axes]
            shard = Shard(sharding, sharding.ranges(tp, rank))
            field = flat_field(state.name, plain_dtype(state.dtype), sizes, shard, offset=offset)
            fields.append(field)
            offset += field.nbytes
        return Page(1, 1, offset, tuple(fields))


class _WithConv(Recurrent, frozen=True, kw_only=True):
    """A causal convolution's last `kernel - 1` inputs, besides other states."""

    kernel: int = 4
    conv_dtype: str = "bf16"
    conv_order: Literal["TR", "RT"] = "TR"
    """Taps outside rows (vLLM's default, SD), or rows outside taps (DS)."""
    speculative: int = 0
    """Extra taps that speculative decoding keeps."""

    def _conv(self, *sections: Section) -> State:
        if self.kernel < 2:
            problem = "A convolution with a kernel of 1 keeps nothing"
            raise bad_spec(problem, f"kernel {self.kernel}", "Leave out what has no convolution")
        sharding = Sharding.by_sections("R", *sections)
        taps, rows = ("T", self.kernel - 1 + self.speculative), ("R", sharding.rows)
        axes = (taps, rows) if self.conv_order == "TR" else (rows, taps)
        return State("conv", self.conv_dtype, axes, sharding)


class Mamba1(_WithConv, frozen=True, kw_only=True, tag="mamba1"):
    """Mamba: `inner` channels, sharded anywhere."""

    inner: int
    state_size: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """A conv [taps, rows] and ssm [rows, state]."""
        rows = Sharding.by_sections("R", Section(self.inner))
        ssm = State("ssm", self.ssm_dtype, (("R", self.inner), ("S", self.state_size)), rows)
        return self._conv(Section(self.inner)), ssm


class Mamba2(_WithConv, frozen=True, kw_only=True, tag="mamba2"):
    """Mamba-2: heads, and groups of B and C that are repeated past their number.

    Rank 0 of 2 holds half of x, and all of B and C, which are one group:

    >>> Mamba2(heads=128, head_dim=64, groups=1, state_size=128).shard(tp=2, rank=0)["conv"]
    (ShardRange(local=0, start=0, length=4096), ShardRange(local=4096, start=8192, length=256))
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """A conv of x|B|C and ssm [heads, head_dim, state]."""
        group = Section(self.groups, self.state_size, shared=True)
        axes = (("H", self.heads), ("P", self.head_dim), ("S", self.state_size))
        ssm = State("ssm", self.ssm_dtype, axes, Sharding.by_heads(self.heads, shared=False))
        return self._conv(Section(self.heads, self.head_dim), group, group), ssm


class GatedDeltaNet(_WithConv, frozen=True, kw_only=True, tag="gated_delta_net"):
    """Gated delta net: conv of q|k|v, and one matrix for each value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """A conv of q|k|v and ssm [value heads, value_dim, key_dim]."""
        key = Section(self.key_heads, self.key_dim)
        axes = (("H", self.value_heads), ("V", self.value_dim), ("K", self.key_dim))
        ssm = State("ssm", self.ssm_dtype, axes, Sharding.by_heads(self.value_heads, shared=False))
        return self._conv(key, key, Section(self.value_heads, self.value_dim)), ssm


class KimiDelta(_WithConv, frozen=True, kw_only=True, tag="kimi_delta"):
    """Kimi delta attention (KDA): conv of q|k|v, and one square matrix for each head."""

    heads: int
    head_dim: int
    ssm_dtype: str = "fp32"

    def layer_states(self) -> tuple[State, ...]:
        """A conv of q|k|v and ssm [heads, head_dim, head_dim]."""
        section = Section(self.heads, self.head_dim)
        matrix = _matrix(self.heads, self.head_dim, self.ssm_dtype)
        return self._conv(section, section, section), matrix


class LightningAttention(Recurrent, frozen=True, kw_only=True, tag="lightning_attention"):
    """Linear attention: one square matrix for each head, and nothing else."""

    heads: int
    head_dim: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """An ssm [heads, head_dim, head_dim]."""
        return (_matrix(self.heads, self.head_dim, self.ssm_dtype),)


class ShortConv(_WithConv, frozen=True, kw_only=True, tag="short_conv"):
    """A short convolution alone, as in LFM2."""

    width: int
    kernel: int = 3

    def layer_states(self) -> tuple[State, ...]:
        """A conv [taps, rows]."""
        return (self._conv(Section(self.width)),)


class Rwkv7(Recurrent, frozen=True, kw_only=True, tag="rwkv7"):
    """RWKV-7: one square matrix for each head, and the last input of both token shifts.

    The shifts mix whole hidden rows, so every rank keeps all of them.
    """

    heads: int
    head_dim: int
    hidden: int
    ssm_dtype: str = "fp32"
    shift_dtype: str = "fp32"

    def layer_states(self) -> tuple[State, ...]:
        """An ssm [heads, head_dim, head_dim], then the shifts of time and channel mixing."""
        rows = (("R", self.hidden),)
        return (
            _matrix(self.heads, self.head_dim, self.ssm_dtype),
            State("shift_time", self.shift_dtype, rows, Sharding.replicated()),
            State("shift_channel", self.shift_dtype, rows, Sharding.replicated()),
        )


def _matrix(heads: int, dim: int, dtype: str) -> State:
    axes = (("H", heads), ("V", dim), ("K", dim))
    return State("ssm", dtype, axes, Sharding.by_heads(heads, shared=False))
