"""The cache groups of vLLM that the connector transfers, and their block tables."""

from __future__ import annotations

from math import lcm
from typing import Any

from kvatlas.engines.vllm.layer_specs import seen_by_group
from kvatlas.engines.vllm.orders import Tables
from kvatlas.geometry.integers import ceil_div
from kvatlas.specs import Visibility

_NULL_BLOCK = 0
"""The block id that vLLM enters for positions that a request does not keep."""


class TransferGroup:
    """A cache group of vLLM whose blocks are transferred."""

    def __init__(self, spec: Any, index: int) -> None:
        specs = list((getattr(spec, "kv_cache_specs", None) or {"": spec}).values())
        kinds = {kind.__name__ for kind in type(specs[0]).__mro__}
        self.index, self.block = index, specs[0].block_size
        self.recurrent = "MambaSpec" in kinds
        self.ring = "CircularBufferSpec" in kinds
        """Whether all tokens of a request share one block; later ones overwrite earlier ones."""
        self.by_position = getattr(specs[0], "mamba_cache_mode", "none") != "none"
        seen = {seen_by_group(one) for one in specs}
        whole = "FullAttentionSpec" in kinds
        self.visibility = Visibility() if whole else seen_by_group(specs[0])
        self.window = self.visibility.window or self.visibility.chunk
        self.windows_kept_whole = {
            one.window or one.chunk or 0: one for one in seen if whole and one != Visibility()
        }
        """The windows and chunks of layers for which vLLM keeps all tokens, by size in tokens."""
        self.partial = self.recurrent or self.ring or self.window is not None

    def table(self, ids: Any, tokens: int) -> tuple[int, ...]:
        """Return the ids of the blocks that store a request's first `tokens` tokens.

        `ids` are all block ids of the request; vLLM's null block becomes -1. For a recurrent
        group, return the blocks that store the state after these tokens. A ring has one block.
        """
        entries = ceil_div(tokens, self.block)
        if self.ring or (self.recurrent and not self.by_position):
            entries = 1
        return tuple(-1 if block == _NULL_BLOCK else block for block in ids[:entries])

    def entries(self, start: int, stop: int) -> slice:
        """Return the table entries of tokens start .. stop - 1, or of the state after them."""
        if self.ring:
            return slice(0, 1)
        first = stop - 1 if self.recurrent else start
        return slice(first // self.block, ceil_div(stop, self.block))

    def incomplete_blocks(self, start: int, stop: int, *, windows_alone: bool = False) -> int:
        """Return how many leading blocks are incomplete after tokens start .. stop - 1 were read.

        Blocks before a window are incomplete, because only the window is read. If `windows_alone`
        is true, this also applies to window layers for which vLLM keeps all tokens.

        >>> sliding = type("SlidingWindowSpec", (), {"block_size": 64, "sliding_window": 64})
        >>> TransferGroup(sliding(), 0).incomplete_blocks(0, 150)
        2
        """
        seen = [self.visibility, *(self.windows_kept_whole.values() if windows_alone else ())]
        first = max(int(one.first(stop)) for one in seen)
        return ceil_div(first, self.block) if first > start else 0


class TransferGroups:
    """All transferred groups of an engine, and vLLM's block manager of each group."""

    def __init__(self, kv_cache_config: Any, *, prefix_caching: bool) -> None:
        self._groups = [
            TransferGroup(group.kv_cache_spec, index)
            for index, group in zip(
                kv_cache_config.transfer_group_ids, kv_cache_config.transfer_groups, strict=True
            )
        ]
        self._prefix_caching = prefix_caching
        self._managers: Any = None
        self.partial = any(group.partial for group in self._groups)
        """Whether some groups keep only a window or the latest state."""
        self.windows_kept_whole = any(group.windows_kept_whole for group in self._groups)
        """Whether some sliding-window layers keep all tokens."""

    def bind_manager(self, kv_cache_manager: Any) -> None:
        """Bind vLLM's block managers, which count the cached blocks of each request."""
        self._managers = kv_cache_manager.coordinator.single_type_managers

    def tables(self, block_ids: Any, tokens: int) -> Tables:
        """Return each group's block table: the blocks that store a request's first `tokens` tokens.

        `block_ids` are the ids of all blocks of the request, by group, as vLLM lists them.
        """
        return tuple(group.table(block_ids[group.index], tokens) for group in self._groups)

    @property
    def state_block(self) -> int | None:
        """The step, in tokens, between positions at which vLLM keeps recurrent states.

        The positions are the multiples of this step. The step is 1 if there are no recurrent
        groups, and None if vLLM keeps only the latest state.
        """
        states = [group for group in self._groups if group.recurrent]
        return lcm(*(one.block for one in states)) if all(s.by_position for s in states) else None

    def hold(self, request_id: str, start: int, stop: int) -> tuple[Tables, list[Any]]:
        """Keep the blocks of a running request's tokens until `release`.

        Return the block tables of the request's first `stop` tokens, and the blocks that hold
        tokens start .. stop - 1.
        """
        blocks = [self._managers[group.index].req_to_blocks[request_id] for group in self._groups]
        held = [
            block
            for group, own in zip(self._groups, blocks, strict=True)
            for block in own[group.entries(start, stop)]
            if not block.is_null
        ]
        self._managers[0].block_pool.touch(held)
        tables = (
            group.table([block.block_id for block in own], stop)
            for group, own in zip(self._groups, blocks, strict=True)
        )
        return tuple(tables), held

    def release(self, blocks: list[Any]) -> None:
        """Release blocks that `hold` has kept, the last first, so that vLLM may reuse them."""
        self._managers[0].block_pool.free_blocks(reversed(blocks))

    def windows(self, *, windows_alone: bool) -> tuple[int, ...]:
        """Return the sizes, in tokens, of windows and chunks before which the engine has no tokens.

        vLLM frees the tokens before the window for some layers, and keeps all tokens for others.
        If `windows_alone` is true, this engine never received the tokens before any window, so the
        sizes of all windows are returned.
        """
        sizes = {group.window for group in self._groups if group.window}
        if windows_alone:
            sizes |= {seen for group in self._groups for seen in group.windows_kept_whole}
        return tuple(sorted(sizes))

    def end_inside_blocks(self, tokens: int) -> bool:
        """Return whether, after `tokens` tokens, the last block of every group has free slots."""
        return all(tokens % group.block for group in self._groups if not group.ring)

    def exclude_from_prefix_cache(
        self, request_id: str, start: int, stop: int, *, windows_alone: bool
    ) -> None:
        """Exclude incomplete blocks of a request from vLLM's prefix cache.

        Tokens start .. stop - 1 are read from another engine or a tier, except those before a
        window, so blocks before a window stay incomplete. A later request with a shorter prefix
        would need these blocks. If `windows_alone` is true, this also applies to window layers for
        which vLLM keeps all tokens.
        """
        if not self._prefix_caching or self._managers is None:
            return
        for group in self._groups:
            first = group.incomplete_blocks(start, stop, windows_alone=windows_alone)
            if first:
                cached = self._managers[group.index].num_cached_block
                cached[request_id] = max(cached.get(request_id, 0), first)
