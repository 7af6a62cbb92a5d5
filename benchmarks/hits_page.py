"""What `docs/reference/data/hits.md` says around its table."""

from __future__ import annotations

HEAD = """\
# Hit rates: vLLM's plans beside atlas's, and what checkpoints are worth

The share of prompt tokens that need not be computed, over whole traces, one request after the
other. vLLM 0.32 keeps checkpoints of states and windows in one of two ways, and both are here:
*dense*, at the end of every block (`prefix_cache_retention_interval=None`), and its *default* (0),
at the ends of prompts and where a prompt leaves one that is cached. *best* is the best, for each
row and known only afterwards, of: {choices}.
Each under vLLM's plan, and under atlas's or, for hybrids, its packs of 2, 4 and 8: the best of
these plans with the first policy is then tried with every policy, so another pair may be better
still. The better of the two plans with its best policy is **bold**, and *chosen* is which that is: what
`kvatlas plan --trace` looks for. vLLM's own plan and policy are among what it tries, so it is never
below them. *over dense* and *over default* are what is chosen over vLLM's plan with each of vLLM's
ways. *optimal* is the chosen plan with an eviction that knows the future (Belady) and checkpoints
at branch points: what a better eviction could hope for. It is no strict bound where entries are
unlike in size, or where a state is passed and not taken up; where it finds less than what is
chosen, that stands there.

vLLM's plan with vLLM's ways is replayed as vLLM serves it: prompts in steps of 8,192 tokens, block
tables that only grow, group after group. `make test-vllm` holds every request's hit to that of
vLLM's own KVCacheManager, made from the same plan. All else is let go of as `BlockPool` does.

The memory is a part of what would hold every block of the trace under vLLM's plan with dense
checkpoints. Traces: two of Mooncake's (FAST'25), and 40 conversations of coding agents
(kv-cache-tester), read at the granularity of their ids: 512 and 64 tokens. So vLLM's default is
given the last place of a prompt that the trace can know another to come past: its exact end is in
a block of the trace that the next turn has another id for, which live traffic would share.
Llama-3.1-70B stands for Llama-3.3-70B, whose cache is the same. All at tp 1.

This page is made by a command, from traces that are not part of the repository:

```sh
make hits TRACES=folder JOBS=16
```

| trace | model | memory | blocks | vLLM: dense | default | best | atlas: dense | default | best | chosen | over dense | over default | optimal |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|
"""  # noqa: E501

CONCLUSION = """
Over dense checkpoints, hybrids find at least 1.5 times as much in {dense} of {asked} rows at 1/8
to 1/2 of the memory, and in {dense_short} of {hybrids} with 1/{short}. Over vLLM's default they do
in {default} of {hybrids}. Of the {asked} rows from 1/8 on, {possible} leave room for that: in the
others even a memory without bounds finds less than 1.5 times as much. The most over the default is
{most:.2f} times. What is chosen is at least {least:.2f} times what vLLM's plan finds with either of
its ways, in all {rows} rows.

What the plan alone is worth: atlas's with its best policy finds more than vLLM's with its best in
{above} of {rows} rows and less in {below}, {lowest:.2f} to {highest:.2f} times as much. With vLLM's
default checkpoints under both it finds more in {default_above} rows and less in {default_below},
{default_lowest:.2f} to {default_highest:.2f} times as much. Most plans of atlas here are vLLM's own
(equal blocks in the fourth column). Where they are not, small blocks find up to a block more of
each prompt, but prompts then end at more places, and each place that is kept takes a state; where
memory is short and prompts branch much, fewer and coarser places are better. Dense checkpoints are
the worst of it: a state for every small block leaves no room for anything else.

What bounds it: half of a memory that is counted by dense checkpoints comes near what any memory
finds. With 1/{short} there is more to be had, as the last column says, but by an eviction that
knows what comes: no policy here gets near it. Dense models keep every block under every policy.
"""
