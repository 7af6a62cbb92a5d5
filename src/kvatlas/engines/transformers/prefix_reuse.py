"""`PrefixReuse`: prefix caching for requests of a transformers model.

A `BlockPool` finds the longest cached prefix from which every layer can continue. Full attention
needs all blocks of the prefix. Sliding windows need its last blocks, and recurrent layers a state.
The model then computes only the rest of the prompt. If a tier stores a longer prefix than the
pool, the prefix is loaded from the tier. Finished requests are stored in the tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvatlas.engines.transformers.cache import AtlasCache
from kvatlas.engines.transformers.tiered_prefixes import TieredPrefixes, tiered_prefixes
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.pool import PrefixIdentity
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.tier_events import EventListener

_ROUNDING = 0.05
"""Largest accepted difference of logits, relative to the largest logit.

bf16 has 8 significant bits, so rounding errors are large.
"""


class PrefixReuse:
    """Prefix caching for requests that run one after the other on one `AtlasCache`.

    `begin` looks up a prompt and computes it up to the last checkpoint that later requests may
    use. `generate` computes the rest. `end` takes the tokens of the finished request and makes
    them available for reuse. The plan must support prefix caching (`prefix_caching=True`) and
    have room for more than one sequence.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, eos_token_id=None, bos_token_id=None,
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> cache = AtlasCache.from_config(config, batch=4, max_len=64, prefix_caching=True)
    >>> reuse = PrefixReuse(model, cache)
    >>> for prompt in (list(range(40)), [*range(30), 3, 3, 3]):
    ...     print(reuse.begin(prompt), "tokens need not be computed")
    ...     ids = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=5)
    ...     reuse.end(ids[0].tolist())
    0 tokens need not be computed
    30 tokens need not be computed

    With a `tier`, other processes and hosts can reuse the prefixes too. Pass an open tier, or an
    address that `kvatlas.tier.open_tier` accepts; `options` are passed to `open_tier`. `identity`
    identifies the model in the tier; by default it is a digest of the model's current weights. When
    the tier stores or evicts prefixes of finished requests, `events` is called with these prefixes,
    like the listener of a `BlockPool`.
    """

    def __init__(
        self,
        model: Any,
        cache: AtlasCache,
        tier: AnyTier | str | Path | None = None,
        *,
        identity: CacheIdentity | None = None,
        events: EventListener | None = None,
        **options: Any,
    ) -> None:
        kinds = {group.kind for group in cache.plan.groups}
        if kinds == {"recurrent"}:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "Prefix reuse requires an attention layer: without one, generate() cannot "
                "determine how many tokens are cached",
                got=f"{type(model).__name__}, which has only recurrent layers",
                hint="Run the model on an AtlasCache without PrefixReuse",
            )
        if "recurrent" in kinds:
            _check_goes_on(model)
        self.model = model
        self.cache = cache
        self.pool = cache.pool
        self._prompt: list[int] | None = None
        """The prompt of the active request; None if there is none."""
        self._reserved = 0
        self._stored_at: list[int] = []
        """Positions of the prompt at which the tier stores windows and states."""
        self._identity: PrefixIdentity | None = None
        self.tiered: TieredPrefixes | None = None
        """The prefixes in the tier; None without a tier."""
        if tier is not None:
            about = {"identity": identity, "events": events, **options}
            self.tiered = tiered_prefixes(tier, model, cache.cache, **about)

    def begin(self, prompt: Sequence[int], identity: PrefixIdentity | None = None) -> int:
        """Begin a request and return how many tokens of its prompt need not be computed.

        If another request is still active, it is discarded.
        """
        self._leave()
        hit = self._admit(prompt, identity)
        self._stored_at = []
        if self.tiered is not None:
            hit, self._stored_at = self._load(self.tiered, hit)
        # `generate` needs at least one token to compute, so the last token is left to it.
        stops = {*self.pool.stops(self, len(prompt) - 1)}
        if self.tiered is not None and self.tiered.recurrent:
            stops.update(self._stored_at)
        for stop in sorted(stops):
            self._compute(stop)
        self._reserve(len(prompt))  # copies stored states before the model updates them
        return hit

    def end(self, tokens: Sequence[int]) -> None:
        """End the active request and keep its blocks for reuse.

        `tokens` are its prompt and the generated tokens, as `generate` returns them.
        """
        if self._prompt is None:
            problem, hint = "There is no active request", "Call begin() first"
            got = "end() without begin()"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=got, hint=hint)
        prompt, seen = self._prompt, self.cache.seen
        if any(table.reserve_blocks != self._reserve for table in self.cache.batch.tables):
            problem = "The cache was reset or used for another request after this request began"
            hint = "Call begin() again, and do not reset the cache before end()"
            raise AtlasError(Code.ENGINE_REFUSES, problem, got=self.cache, hint=hint)
        hint = "Pass all tokens of the request including the prompt, as generate() returns them"
        if list(tokens[: len(prompt)]) != prompt:
            problem = "The tokens must begin with the prompt of the request"
            got = f"{len(tokens)} tokens that differ from the prompt of {len(prompt)} tokens"
            raise AtlasError(Code.BAD_TOKENS, problem, got=got, hint=hint)
        if len(tokens) < seen:
            problem = f"The tokens must include all {seen} tokens that are in the cache"
            raise AtlasError(Code.BAD_TOKENS, problem, got=f"{len(tokens)} tokens", hint=hint)
        self.cache.batch.settle()
        self.pool.computed(self, seen, tokens[len(prompt) :])
        if self.tiered is not None and not self.tiered.recurrent:
            for stop in self._stored_at:
                self._store(tokens, stop)
        self._store(tokens, seen)
        self._leave()

    def close(self) -> None:
        """Discard the active request, and close the tier if this object opened it."""
        self._leave()
        if self.tiered is not None:
            self.tiered.close()

    # -- inside -------------------------------------------------------------------------

    def _admit(self, prompt: Sequence[int], identity: PrefixIdentity | None) -> int:
        """Begin a sequence with the longest prefix of the prompt that the pool stores.

        Return the number of tokens in that prefix.
        """
        hit = self.pool.admit(self, prompt, identity)
        self._prompt, self._identity = list(prompt), identity
        self._go_on_behind(hit)
        return hit

    def _go_on_behind(self, tokens: int) -> None:
        self._reserved = tokens
        self.cache.adopt_from_pool(tokens, self._reserve)
        self._assign()

    def _load(self, tiered: TieredPrefixes, hit: int) -> tuple[int, list[int]]:
        """Load tokens of the prompt from the tier, if the tier stores more than `hit` tokens.

        The pool stores the first `hit` tokens of the prompt.

        Return the number of leading prompt tokens that are cached now, and the positions at which
        to store windows and states in the tier.
        """
        prompt, identity = self._prompt or [], self._identity
        chain = tiered.chain(prompt[:-1], identity)  # the last token is computed anyway
        found = tiered.search(chain)
        if chain is not None and found.tokens > hit:
            hit = self._loaded(tiered, chain, hit, found.tokens)
        until = 0 if chain is None else chain.count + 1
        return hit, tiered.positions(until, hit, found.attention)

    def _loaded(self, tiered: TieredPrefixes, chain: PrefixChain, hit: int, found: int) -> int:
        """Load the first `found` tokens of the prompt from the tier.

        The first `hit` of these tokens are in the pool already and are not loaded.

        Return the number of leading prompt tokens that are cached now.
        """
        prompt, identity = self._prompt or [], self._identity
        try:
            self._reserve(found)
        except AtlasError as refusal:
            if refusal.code is not Code.NO_BLOCKS:
                raise
            return hit
        if tiered.load(chain, self.cache.cache, self.pool.tables(self), hit, found):
            self.pool.loaded(self, found)
            self._go_on_behind(found)
            return found
        self._leave()  # frees the blocks that were only partly filled
        return self._admit(prompt, identity)

    def _store(self, tokens: Sequence[int], stop: int) -> None:
        """Store the first `stop` tokens of the request in the tier, if there is one."""
        if self.tiered is not None:
            chain = self.tiered.chain(list(tokens[:stop]), self._identity)
            self.tiered.store(chain, self.cache.cache, self.pool.tables(self), stop)

    def _compute(self, stop: int) -> None:
        """Run the model on the prompt's first `stop` tokens, except those already cached.

        Afterwards the first `stop` tokens, and the recurrent state after them, can be reused.
        """
        prompt, seen = self._prompt or [], self.cache.seen
        self._reserve(stop)
        ids = torch.tensor([prompt[seen:stop]], device=self.model.device)
        with torch.no_grad():
            self.model(ids, past_key_values=self.cache, use_cache=True)
        self.cache.batch.settle()
        self.pool.computed(self, stop)
        self._reserved = stop
        if self.tiered is not None and self.tiered.recurrent and stop in self._stored_at:
            self._store(prompt, stop)

    def _reserve(self, tokens: int) -> None:
        """Reserve blocks for the request's first `tokens` tokens.

        The method also zeroes and copies blocks, if the pool requires it.
        """
        if tokens <= self._reserved:
            return
        made = self.pool.reserve(self, tokens)
        for group, blocks in made.clear.items():
            self.cache.cache.clear(group, blocks)
        for copy in made.copies:
            self.cache.batch.tables[copy.group].copy(copy.source, copy.destination)
        self._assign()
        self._reserved = tokens

    def _assign(self) -> None:
        for table, blocks in zip(
            self.cache.batch.tables, self.pool.tables(self).values(), strict=True
        ):
            table.assign(blocks)

    def _leave(self) -> None:
        if self._prompt is not None:
            self._prompt = None
            self.cache.reset()
            self.pool.free(self)


def _check_goes_on(model: Any) -> None:
    """Raise an error if a model ignores its stored states when called with several tokens.

    Some models of transformers ignore these states silently (Jamba, Bamba). To detect this, the
    function runs a few tokens in one call and in two calls on transformers' own cache. It then
    compares the logits.
    """
    ids = torch.arange(1, 13, device=model.device).unsqueeze(0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids).logits[0, -1].float()
        model(ids[:, :6], past_key_values=cache, use_cache=True)
        parts = model(ids[:, 6:], past_key_values=cache, use_cache=True).logits[0, -1].float()
    apart = (whole - parts).abs().max() / whole.abs().max()
    if apart > _ROUNDING:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "This model ignores its stored recurrent states when it is called with several tokens",
            got=f"{type(model).__name__}: logits change by {float(apart):.0%} if the same tokens "
            "are passed in two calls instead of one",
            hint="Run the model on an AtlasCache without PrefixReuse",
        )
