"""The connector's counters: their names in Prometheus after `vllm:kvatlas_`, and their meaning."""

from __future__ import annotations

COUNTERS = {
    "pulls": "Requests read from another engine, per rank",
    "failures": "Requests that could not be read from another engine, per rank",
    "nbytes": "Bytes read from other engines",
    "seconds": "Total seconds of reads from other engines; concurrent reads add up",
    "expired": "Requests offered to another engine that expired before they were read",
    "tier_loads": "Requests whose prefix was read from the tier",
    "tier_tokens": "Tokens read from the tier",
    "tier_seconds": "Total seconds of reads from the tier; concurrent reads add up",
    "tier_stores": "Requests stored in the tier",
    "tier_failures": "Requests that could not be read from the tier or stored in it",
}
