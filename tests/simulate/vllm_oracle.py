"""vLLM's prefix cache, block by block, written to be read and not to be fast.

`tests/vllm/test_hit_rates.py` compares the simulation with vLLM's own manager. This is the same in
plain Python, for random groups and pools: a block is an object, its content a prefix of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvatlas.pool.checkpoints import Checkpoints, EveryBlock, Prompt
from kvatlas.simulate.prefill_steps import PrefillSteps
from tests.pool.oracle import OracleClass, Tokens

Name = tuple[int, Tokens]
"""A group, and the prefix that ends with the block."""


@dataclass(eq=False)
class Block:
    name: Name | None = None


@dataclass
class Pool:
    empty: int
    unused: dict[Block, None] = field(default_factory=dict)
    """Blocks with content that no request uses, the least recently used first."""


@dataclass
class VllmOracle:
    """`serve` returns the number of tokens that were found, or None if blocks do not suffice."""

    block: int
    groups: list[OracleClass]
    sizes: tuple[int, ...]
    checkpoints: Checkpoints
    tokens: int
    """Maximum number of tokens per step."""

    def __post_init__(self) -> None:
        self.pools = [Pool(size) for size in self.sizes]
        self.copies: dict[Name, list[Block]] = {}
        """The blocks with each content, the oldest first."""
        self.evictions = 0
        self.dense = isinstance(self.checkpoints, EveryBlock)
        sparse = not self.dense and any(group.needs == "state" for group in self.groups)
        everything = all(group.needs == "all" for group in self.groups)
        self.steps = PrefillSteps(10**9 if everything else self.tokens, self.block, sparse)

    def serve(self, prompt: Tokens, named: int, known: int) -> int | None:
        """`named` tokens have ids in the trace; `known` are those in its whole blocks."""
        most = min(named, max(len(prompt) - 1, 0)) // self.block
        ends = [n * self.block for n in range(most + 1)]
        kinds = {group.needs for group in self.groups}
        hit = max(end for end in ends if self._serves(kinds, prompt, end))
        attention = hit
        if "all" in kinds:
            attention = max(end for end in ends if self._serves({"all"}, prompt, end))
        asked = Prompt(
            self.block, hit // self.block, 0, known // self.block, named // self.block,
            attention // self.block, most,
        )  # fmt: skip
        kept = [int(end) * self.block for end in self.checkpoints.positions(asked)]
        tables: list[dict[int, Block]] = [{} for _ in self.groups]
        lengths = [hit // self.block] * len(self.groups)
        for number, group in enumerate(self.groups):
            for entry in self._needed(group, hit):
                block = self.copies[number, prompt[: (entry + 1) * self.block]][0]
                self.pools[group.pool].unused.pop(block, None)
                tables[number][entry] = block
        for start, stop in self.steps.between(hit, len(prompt), kept):
            for number, group in enumerate(self.groups):
                first = self._needed(group, start).start
                self._free(group, tables[number], [n for n in tables[number] if n < first])
            if not self._take(tables, lengths, stop):
                return None
            for number, group in enumerate(self.groups):
                for entry, block in tables[number].items():
                    end = (entry + 1) * self.block
                    whole = not block.name and end <= min(stop, named)
                    if whole and (group.needs == "all" or self._is_needed(group, entry, kept)):
                        block.name = number, prompt[:end]
                        self.copies.setdefault(block.name, []).append(block)
        for number, group in enumerate(self.groups):
            self._free(group, tables[number], list(tables[number]))
        return hit

    def _is_needed(self, group: OracleClass, entry: int, kept: list[int]) -> bool:
        return any(entry in self._needed(group, end) for end in kept)

    def _needed(self, group: OracleClass, tokens: int) -> range:
        """The blocks that a group needs to continue after `tokens` tokens."""
        if group.needs == "state":
            return range(max(tokens - 1, 0) // self.block, -(-tokens // self.block))
        first = min(group.sees_from(tokens), tokens)
        return range(first // self.block, -(-tokens // self.block))

    def _serves(self, needs: set[str], prompt: Tokens, tokens: int) -> bool:
        return all(
            (number, prompt[: (entry + 1) * self.block]) in self.copies
            for number, group in enumerate(self.groups)
            if group.needs in needs
            for entry in self._needed(group, tokens)
        )

    def _take(self, tables: list[dict[int, Block]], lengths: list[int], stop: int) -> bool:
        """Add the blocks of a step. Few states: only the block that the step ends in."""
        end, new = -(-stop // self.block), []
        for group, length in zip(self.groups, lengths, strict=True):
            sparse = group.needs == "state" and not self.dense
            new.append(range(max(length, end - 1) if sparse else length, end))
        for number, pool in enumerate(self.pools):
            needs = sum(len(n) for n, g in zip(new, self.groups, strict=True) if g.pool == number)
            if needs > pool.empty + len(pool.unused):
                return False
        for group, table, entries in zip(self.groups, tables, new, strict=True):
            pool = self.pools[group.pool]
            for entry in entries:
                if pool.empty:
                    pool.empty -= 1
                else:
                    self._evict(pool)
                table[entry] = Block()
        lengths[:] = [max(length, end) for length in lengths]
        return True

    def _evict(self, pool: Pool) -> None:
        victim = next(iter(pool.unused))
        del pool.unused[victim]
        assert victim.name
        self.copies[victim.name].remove(victim)
        if not self.copies[victim.name]:
            del self.copies[victim.name]
        self.evictions += 1

    def _free(self, group: OracleClass, table: dict[int, Block], entries: list[int]) -> None:
        """Free blocks, the last one first."""
        pool = self.pools[group.pool]
        for entry in sorted(entries, reverse=True):
            block = table.pop(entry)
            if block.name:
                pool.unused[block] = None
            else:
                pool.empty += 1


def alone(classes: list[OracleClass]) -> Iterator[OracleClass]:
    """Yield each group of some classes as an object of its own."""
    for one in classes:
        for _ in range(one.size):
            yield OracleClass(one.needs, one.pool, 1, one.window, one.chunk)
