"""`PrefixReuse`: a model's requests, each of which begins with what earlier ones left.

A `BlockPool` finds the longest prefix that every layer can go on behind: attention all its
blocks, windows their last ones, recurrent layers a state that was kept there. The model then
computes what comes behind it, on pages that it has never seen itself. Where a tier has more of
a prompt than the pool, it is loaded from there; what has finished is stored in it.
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
from kvatlas.tier.prefix_finder import AnyTier
from kvatlas.tier.tier_events import EventListener

_ROUNDING = 0.05
"""How far apart logits may be, as a share of the largest: bf16 has 8 bits."""


class PrefixReuse:
    """Requests on one `AtlasCache`, one after the other, whose prefixes are found again.

    `begin` looks a prompt up, and computes it as far as states are to be kept for later
    requests; `generate` does the rest; `end` says which tokens it was. The plan must be one
    for reuse (`prefix_caching=True`), with room for more than one sequence.

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

    With a `tier`, other processes and hosts find them too: one that is open, or the address of
    one, as `kvatlas.tier.open_tier` takes it. Its prefixes are those of `identity`, or else of the
    weights as they are in the model now; `options` are those of `open_tier`. `events` is called
    with what the tier has of requests that were ended here, as a `BlockPool`'s listener is.
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
                "Without attention nothing counts tokens, so generate would begin at the first one",
                got=f"{type(model).__name__}, which has recurrent layers alone",
                hint="Run it with an AtlasCache alone, without reuse",
            )
        if "recurrent" in kinds:
            _check_goes_on(model)
        self.model = model
        self.cache = cache
        self.pool = cache.pool
        self._prompt: list[int] | None = None
        """Of the request that is under way."""
        self._reserved = 0
        self._identity: PrefixIdentity | None = None
        self.tiered: TieredPrefixes | None = None
        """What goes to the tier, and comes from it."""
        if tier is not None:
            about = {"identity": identity, "events": events, **options}
            self.tiered = tiered_prefixes(tier, model, cache.cache, **about)

    def begin(self, prompt: Sequence[int], identity: PrefixIdentity | None = None) -> int:
        """Begin a request; the tokens of its prompt that need not be computed.

        One that is under way, and was not ended, is given up.
        """
        self._leave()
        hit = self._admit(prompt, identity)
        if self.tiered is not None:
            hit = self._load(self.tiered, hit)
        # The last token is left for `generate`, which begins with what follows it.
        for stop in self.pool.stops(self, len(prompt) - 1):
            self._compute(stop)
        self._reserve(len(prompt))  # states that were kept are copied before they change
        return hit

    def end(self, tokens: Sequence[int]) -> None:
        """End the request: `tokens` are its prompt and what was generated behind it."""
        if self._prompt is None:
            problem = "No request is under way"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got="an end", hint="Begin one first")
        prompt, seen = self._prompt, self.cache.seen
        if any(table.reserve_blocks != self._reserve for table in self.cache.batch.tables):
            problem = "The cache was reset, or used otherwise, since the request began"
            hint = "Begin again, and reset nothing before its end"
            raise AtlasError(Code.ENGINE_REFUSES, problem, got=self.cache, hint=hint)
        if list(tokens[: len(prompt)]) != prompt or len(tokens) < seen:
            problem = "These tokens are not those of the request"
            got = f"{len(tokens)} tokens for a prompt of {len(prompt)}, of which {seen} are kept"
            hint = "Pass all tokens, the prompt included, as generate returns them"
            raise AtlasError(Code.BAD_TOKENS, problem, got=got, hint=hint)
        self.cache.batch.settle()
        self.pool.computed(self, seen, tokens[len(prompt) :])
        self._store(tokens, seen)
        self._leave()

    def close(self) -> None:
        """Give up what is under way, and let go of a tier that was opened here."""
        self._leave()
        if self.tiered is not None:
            self.tiered.close()

    # -- inside -------------------------------------------------------------------------

    def _admit(self, prompt: Sequence[int], identity: PrefixIdentity | None) -> int:
        """Begin with what the pool has of a prompt; how many tokens that are."""
        hit = self.pool.admit(self, prompt, identity)
        self._prompt, self._identity = list(prompt), identity
        self._go_on_behind(hit)
        return hit

    def _go_on_behind(self, tokens: int) -> None:
        self._reserved = tokens
        self.cache.adopt_from_pool(tokens, self._reserve)
        self._assign()

    def _load(self, tiered: TieredPrefixes, hit: int) -> int:
        """Load what a tier has of the prompt beyond a hit; the tokens that are there then."""
        prompt, identity = self._prompt or [], self._identity
        chain = tiered.chain(prompt[:-1], identity)  # the last token is computed anyway
        found = tiered.longest(chain)
        if chain is None or found <= hit:
            return hit
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
        self._leave()  # blocks that were filled in part are nobody's
        return self._admit(prompt, identity)

    def _store(self, tokens: Sequence[int], stop: int) -> None:
        """Have the tier keep the first tokens of the request."""
        if self.tiered is not None:
            chain = self.tiered.chain(list(tokens[:stop]), self._identity)
            self.tiered.store(chain, self.cache.cache, self.pool.tables(self), stop)

    def _compute(self, stop: int) -> None:
        """Run the model up to a checkpoint, and have it kept."""
        prompt, seen = self._prompt or [], self.cache.seen
        self._reserve(stop)
        ids = torch.tensor([prompt[seen:stop]], device=self.model.device)
        with torch.no_grad():
            self.model(ids, past_key_values=self.cache, use_cache=True)
        self.cache.batch.settle()
        self.pool.computed(self, stop)
        self._reserved = stop
        if self.tiered is not None and self.tiered.ends_here(stop):
            self._store(prompt, stop)

    def _reserve(self, tokens: int) -> None:
        """Have blocks for so many tokens: taken, zeroed and copied as the pool says."""
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
    """Refuse a model that forgets its states where several tokens come behind them.

    Some of transformers' do (Jamba, Bamba), and say nothing. So a few tokens are run at once
    and in two parts, on transformers' own cache.
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
            "This model forgets its recurrent states where several tokens come behind them",
            got=f"{type(model).__name__}: logits that are {float(apart):.0%} apart",
            hint="Run it with an AtlasCache alone, without reuse",
        )
