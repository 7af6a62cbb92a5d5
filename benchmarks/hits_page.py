"""The text of `docs/reference/data/hits.md` before and after its table."""

from __future__ import annotations

HEAD = """\
# Hit rates of plans and policies

The table lists the share of prompt tokens that need no computation, over whole traces, for vLLM's
plan and for the plan of policy `atlas`. [Read the table of hit
rates](../../how-to/simulation.md#read-the-table-of-hit-rates) explains the columns.

- **Policies.** *best* is the best of: {choices}.
- **Plans.** For hybrids, `atlas` also tries packs of 2, 4 and 8. The best plan with the first policy
  is then replayed with every policy, so another combination may be better still. vLLM's own plan
  and policies are among the candidates, so the chosen one is never below them.
- **Replay.** vLLM's plan with vLLM's policies is replayed step by step: prompts in steps of 8,192
  tokens, block tables that only grow, one group after another. `make test-vllm` compares the hit of
  every request with vLLM's own KVCacheManager. Other combinations are replayed as `BlockPool`
  serves them.
- **Traces.** Two of Mooncake's (FAST'25), with ids of 512 tokens, and 40 conversations of coding
  agents (kv-cache-tester), with ids of 64 tokens. vLLM's default keeps the last position of a prompt
  that the trace can resolve; live traffic would share the exact end.
- Llama-3.1-70B has the same cache as Llama-3.3-70B. All plans have tp 1. Where *optimal* would be
  lower than the chosen rate, the table repeats the chosen rate.

A command generates this page from traces that are not part of the repository:

```sh
make hits TRACES=folder JOBS=16
```

| trace | model | memory | blocks | vLLM: dense | default | best | atlas: dense | default | best | chosen | over dense | over default | optimal |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|
"""  # noqa: E501

CONCLUSION = """
## Summary

- **Compared with dense checkpoints**, hybrids find at least 1.5 times as much in {dense} of {asked} rows at
  1/8 to 1/2 of the memory, and in {dense_short} of {hybrids} rows if 1/{short} is included.
- **Compared with vLLM's default**, they do so in {default} of {hybrids} rows; the largest factor is {most:.2f}.
  In {possible} of the {asked} rows from 1/8 on, unlimited memory would find 1.5 times as much.
- **The chosen plan and policy** find at least {least:.2f} times as much as vLLM's plan with either of its
  policies, in all {rows} rows.
- **The plan alone**: with the best policy for each, the plan of `atlas` finds more than vLLM's in {above} of
  {rows} rows and less in {below}, {lowest:.2f} to {highest:.2f} times as much. With vLLM's default checkpoints
  for both, it finds more in {default_above} rows and less in {default_below}, {default_lowest:.2f} to {default_highest:.2f} times as
  much. Most plans of `atlas` here equal vLLM's (equal block sizes in the fourth column).
- **Small blocks** find up to one block more of each prompt, but prompts then end at more positions,
  and each kept position takes a state. With little memory and many branches, fewer positions are
  better. Dense checkpoints with small blocks leave no memory for attention.
- **Bounds.** Half of the memory is close to what unlimited memory finds. At 1/{short}, only an eviction
  that knows the future finds more. Dense models keep every block under every policy.
"""  # noqa: E501
