"""Specs of recurrent layers, which store their whole state in one page.

A recurrent page is a single cell. The states in the cell follow each other; each has its own shape
and dtype. The specs differ in their states and in how tensor parallelism shards them: by heads,
or along the rows of a convolution. The rows of a convolution are its channels, concatenated
from sections: queries, keys and values (written `q|k|v`) or the input and the matrices B and
C of Mamba-2 (`x|B|C`). Each section is divided separately.

The dtypes of states are parameters, because engines use different ones for the same model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvatlas.geometry import Field, Page, Section, Shard, Sharding
from kvatlas.geometry.packing import flat_field
from kvatlas.specs.base import Spec, bad_spec, check, check_page, plain_dtype


class State(NamedTuple):
    """One state of a layer, such as `conv` or `ssm`.

    `axes` contains a pair (axis name, size in the whole model) for each axis, outermost first in
    memory.
    """

    name: str
    dtype: str
    axes: tuple[tuple[str, int], ...]
    sharding: Sharding


class Recurrent(Spec, frozen=True, kw_only=True):
    """Base class of recurrent specs: the states follow each other in one cell."""

    def __post_init__(self) -> None:
        check(self)
        check_page(self)

    @property
    def tokens_per_state(self) -> int | None:
        """Always None: a block stores one state, whatever its size."""
        return None

    def layer_states(self) -> tuple[State, ...]:
        """Return the states of the layer in the whole model, in memory order."""
        raise NotImplementedError

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """Return the page of one rank, which is the same for every block size.

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
    """Base class of specs with a causal convolution, which stores its last `kernel - 1` inputs."""

    kernel: int = 4
    conv_dtype: str = "bf16"
    conv_order: Literal["TR", "RT"] = "TR"
    """Memory order of the conv state: `TR` is [taps, rows] (vLLM's default, which it calls SD),
    `RT` is [rows, taps] (DS). A tap is one stored input, a row is one channel."""
    speculative: int = 0
    """Number of additional taps for speculative decoding."""

    def _conv(self, *sections: Section) -> State:
        if self.kernel < 2:
            raise bad_spec(
                "The kernel size of a convolution must be at least 2",
                f"kernel={self.kernel}",
                "Pass the kernel size of the model's config",
            )
        sharding = Sharding.by_sections("R", *sections)
        taps, rows = ("T", self.kernel - 1 + self.speculative), ("R", sharding.rows)
        axes = (taps, rows) if self.conv_order == "TR" else (rows, taps)
        return State("conv", self.conv_dtype, axes, sharding)


class Mamba1(_WithConv, frozen=True, kw_only=True, tag="mamba1"):
    """Mamba: `inner` channels, which are divided evenly over the ranks."""

    inner: int
    state_size: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """Return `conv` (the last inputs of each channel) and `ssm` [channels, state_size]."""
        rows = Sharding.by_sections("R", Section(self.inner))
        ssm = State("ssm", self.ssm_dtype, (("R", self.inner), ("S", self.state_size)), rows)
        return self._conv(Section(self.inner)), ssm


class Mamba2(_WithConv, frozen=True, kw_only=True, tag="mamba2"):
    """Mamba-2: `heads` heads, and `groups` groups of B and C.

    Groups are replicated if there are more ranks than groups. In this example, rank 0 of 2
    holds half of x, and the only group of B and C:

    >>> Mamba2(heads=128, head_dim=64, groups=1, state_size=128).shard(tp=2, rank=0)["conv"]
    (ShardRange(local=0, start=0, length=4096), ShardRange(local=4096, start=8192, length=256))
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """Return `conv` with the channels x|B|C, and `ssm` [heads, head_dim, state_size]."""
        group = Section(self.groups, self.state_size, shared=True)
        axes = (("H", self.heads), ("P", self.head_dim), ("S", self.state_size))
        ssm = State("ssm", self.ssm_dtype, axes, Sharding.by_heads(self.heads, shared=False))
        return self._conv(Section(self.heads, self.head_dim), group, group), ssm


class GatedDeltaNet(_WithConv, frozen=True, kw_only=True, tag="gated_delta_net"):
    """Gated delta net: a convolution of q|k|v, and one matrix for each value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """Return `conv` with the channels q|k|v, and `ssm` [value_heads, value_dim, key_dim]."""
        key = Section(self.key_heads, self.key_dim)
        axes = (("H", self.value_heads), ("V", self.value_dim), ("K", self.key_dim))
        ssm = State("ssm", self.ssm_dtype, axes, Sharding.by_heads(self.value_heads, shared=False))
        return self._conv(key, key, Section(self.value_heads, self.value_dim)), ssm


class KimiDelta(_WithConv, frozen=True, kw_only=True, tag="kimi_delta"):
    """Kimi delta attention (KDA): a convolution of q|k|v, and one square matrix per head."""

    heads: int
    head_dim: int
    ssm_dtype: str = "fp32"

    def layer_states(self) -> tuple[State, ...]:
        """Return `conv` with the channels q|k|v, and `ssm` [heads, head_dim, head_dim]."""
        section = Section(self.heads, self.head_dim)
        matrix = _matrix(self.heads, self.head_dim, self.ssm_dtype)
        return self._conv(section, section, section), matrix


class LightningAttention(Recurrent, frozen=True, kw_only=True, tag="lightning_attention"):
    """Linear attention: one square matrix for each head."""

    heads: int
    head_dim: int
    ssm_dtype: str = "bf16"

    def layer_states(self) -> tuple[State, ...]:
        """Return the only state, `ssm` [heads, head_dim, head_dim]."""
        return (_matrix(self.heads, self.head_dim, self.ssm_dtype),)


class ShortConv(_WithConv, frozen=True, kw_only=True, tag="short_conv"):
    """A short convolution without other states, as in LFM2."""

    width: int
    kernel: int = 3

    def layer_states(self) -> tuple[State, ...]:
        """Return the only state, `conv`: the last inputs of each channel."""
        return (self._conv(Section(self.width)),)


class Rwkv7(Recurrent, frozen=True, kw_only=True, tag="rwkv7"):
    """RWKV-7: one square matrix for each head, and the last input of each of two token shifts.

    Token shifts mix whole hidden rows, so their inputs are replicated on every rank.
    """

    heads: int
    head_dim: int
    hidden: int
    ssm_dtype: str = "fp32"
    shift_dtype: str = "fp32"

    def layer_states(self) -> tuple[State, ...]:
        """Return `ssm` [heads, head_dim, head_dim], and two rows [hidden] for the token shifts."""
        rows = (("R", self.hidden),)
        return (
            _matrix(self.heads, self.head_dim, self.ssm_dtype),
            State("shift_time", self.shift_dtype, rows, Sharding.replicated()),
            State("shift_channel", self.shift_dtype, rows, Sharding.replicated()),
        )


def _matrix(heads: int, dim: int, dtype: str) -> State:
    axes = (("H", heads), ("V", dim), ("K", dim))
    return State("ssm", dtype, axes, Sharding.by_heads(heads, shared=False))
