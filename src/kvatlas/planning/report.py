"""Reports on a plan: figures as JSON, and explanations as sentences."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.geometry.byte_sizes import size
from kvatlas.planning.plan_data import DECODING, PlanData
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.runnable import obstacles
from kvatlas.planning.sized_layers import FULL_KINDS, page_of


class Padding(msgspec.Struct, frozen=True):
    """The bytes of blocks that a request takes, and how many of these bytes are padding."""

    claimed: int
    """Bytes of all blocks of the request."""
    pages: int
    """Bytes of padding at the end of pages, which gives all pages the same size."""
    empty: int
    """Bytes of the request's blocks outside all pages of the group that uses the block."""

    @property
    def share(self) -> float:
        """Padding as a fraction of all bytes that the request takes."""
        return (self.pages + self.empty) / self.claimed if self.claimed else 0.0


def padding(plan: PlanData, length: int | None = None) -> Padding:
    """Return the bytes that a request of `length` tokens takes, and its padding, on all stages.

    The bytes are counted for one tensor-parallel rank of each stage. `length` defaults to
    `max_len`.
    """
    tokens = plan.max_len if length is None else length
    blocks = [g.blocks(tokens, in_flight=plan.in_flight, dcp=plan.dcp) for g in plan.groups]
    # A block id is allocated on every stage, even on stages without layers of its group.
    claimed = sum(
        count * pool.block_bytes
        for pool in plan.pools
        for count, group in zip(blocks, plan.groups, strict=True)
        if group.pool == pool.index
    )
    pages = used = 0
    for region in plan.regions:
        count, nbytes = blocks[region.group], region.page_bytes * len(region.layers)
        used += count * nbytes
        if region.apart:
            continue  # there is no padding between fields
        page = page_of(region.layers[0].spec, region.block, plan.tp)  # of a whole, unsplit state
        pages += count * (nbytes - page.unpadded * len(region.layers) // region.splits)
    return Padding(claimed, pages, claimed - used)


def bytes_per_request(plan: PlanData, index: int) -> tuple[int, float]:
    """Return (fixed bytes, bytes per token) that a request takes per rank for group `index`."""
    group = plan.groups[index]
    width = max(pool.block_bytes for pool in plan.pools if pool.index == group.pool)
    if group.kind in FULL_KINDS:
        return 0, width / (group.block * plan.dcp)
    return group.blocks(plan.max_len, in_flight=plan.in_flight) * width, 0.0


def summary(plan: PlanData) -> dict[str, Any]:
    """Return the main figures of a plan as one JSON object."""
    plainly = (
        "tp", "pp", "dcp", "pack", "memory", "max_len", "in_flight", "block_size", "num_blocks",
    )  # fmt: skip
    return {
        "model": plan.model,
        "answer": capacity_sentence(plan),
        "policy": plan.policy,
        "layout": plan.layout,
        "accepted_layouts": list(plan.accepted_layouts),
        "backends": list(plan.backends),
        **{name: getattr(plan, name) for name in plainly},
        "bytes_per_block": plan.bytes_per_block,
        "tokens": plan.tokens,
        "requests_at_max_len": round(plan.requests(), 4),
        "requests_decoding": round(plan.requests(in_flight=DECODING), 4),
        "padding_share": round(padding(plan).share, 6),
        "pools": [_pool(plan, pool) for pool in plan.pools],
        "groups": [_group(plan, index) for index in range(len(plan.groups))],
        "not_runnable": list(obstacles(plan)),
        "warnings": list(plan.warnings),
    }


def _pool(plan: PlanData, pool: Pool) -> dict[str, Any]:
    """Return the figures of a pool, including the number of requests that fit in it."""
    prefilling, decoding = (
        pool.blocks / taken if (taken := plan.blocks_per_request(in_flight=n)[pool.index]) else None
        for n in (plan.in_flight, DECODING)
    )
    return {
        **msgspec.to_builtins(pool),
        "bytes": pool.nbytes,
        "requests_at_max_len": prefilling and round(prefilling, 4),
        "requests_decoding": decoding and round(decoding, 4),
    }


def _group(plan: PlanData, index: int) -> dict[str, Any]:
    group = plan.groups[index]
    regions = [region for region in plan.regions if region.group == index]
    members = [_member(plan, group, region) for region in regions]
    layers = [layer for region in regions for layer in region.layers]
    layers.sort(key=lambda layer: layer.index)  # stable: caches of a layer stay in order
    fixed, each = bytes_per_request(plan, index)
    whole = {
        "num_layers": len({layer.name for layer in layers}),
        "first_layer": layers[0].name,
        "last_layer": layers[-1].name,
        "pool": group.pool,
        "window": group.window,
        "fixed_bytes_per_request": fixed,
        "bytes_per_token": each,
    }
    if not group.mixed and len({member["page_bytes"] for member in members}) == 1:
        return {**members[0], **whole}
    sums = ("page_bytes", "unpadded_page_bytes")
    return {
        "kind": group.kind,
        "block_size": group.block,
        **{name: sum(member[name] * member["pages"] for member in members) for name in sums},
        **dict.fromkeys(("heads", "states", "content_bytes")),
        "members": members,
        **whole,
    }


def _member(plan: PlanData, group: Group, region: Region) -> dict[str, Any]:
    page = page_of(region.layers[0].spec, region.block, plan.tp * region.splits)
    return {
        "kind": group.kind,
        "num_layers": len({layer.name for layer in region.layers}),
        "pages": len(region.layers),
        "splits": region.splits,
        "first_layer": region.layers[0].name,
        "last_layer": region.layers[-1].name,
        "block_size": region.block,
        "kernel_block": region.kernel_block,
        "page_bytes": region.page_bytes,
        "unpadded_page_bytes": region.page_bytes if region.apart else page.unpadded,
        "heads": page.heads,
        "states": page.states,
        "content_bytes": page.content,
        "offset": region.offset,
        "page_stride": region.page_stride,
        "block_stride": region.block_stride,
    }


def capacity_sentence(plan: PlanData) -> str:
    """Return a sentence that reports how many requests fit.

    >>> from kvatlas.planning import plan
    >>> fits = capacity_sentence(plan("gpt-oss-20b", memory="40GiB"))
    >>> print(fits)  # doctest: +NORMALIZE_WHITESPACE
    Fits 35.5 requests of 32,768 tokens while they prefill (16,384 tokens in flight),
    53.1 while they decode.
    """
    prefilling, decoding = plan.requests(), plan.requests(in_flight=DECODING)
    length = f"requests of {plan.max_len:,} tokens"
    if round(prefilling, 1) == round(decoding, 1):
        return f"Fits {prefilling:,.1f} {length}, while they prefill and while they decode."
    return (
        f"Fits {prefilling:,.1f} {length} while they prefill ({plan.in_flight:,} tokens in "
        f"flight), {decoding:,.1f} while they decode."
    )


def explain(plan: PlanData) -> str:
    """Explain the block size, the capacity and all unused bytes, in sentences."""
    ranks = f"tp {plan.tp}" + (f", pp {plan.pp}" if plan.pp > 1 else "")
    where = "over all pipeline stages" if plan.pp > 1 else "on each rank"
    waste = padding(plan)
    claim = f"A request of {plan.max_len:,} tokens takes {size(waste.claimed)} {where}"
    lines = [
        f"{plan.model} at {ranks}, policy {plan.policy}, layout {plan.layout}: blocks of "
        f"{plan.block_size} tokens.",
        capacity_sentence(plan),
        *plan.reasons,
        *_group_lines(plan),
        f"{claim}, of which {waste.share:.2%} is padding" + (":" if waste.share else "."),
    ]
    if waste.pages:
        lines.append(f"  {size(waste.pages)} at the end of pages, to make them the same size.")
    if waste.empty:
        lines.append(f"  {size(waste.empty)} in blocks that the pages of their group do not fill.")
    for stage in range(plan.pp):
        idle = plan.memory - sum(pool.nbytes for pool in plan.pools if pool.stage == stage)
        name = f" on stage {stage}" if plan.pp > 1 else ""
        lines.append(
            f"Memory left over after whole blocks{name}: {size(idle)} ({idle / plan.memory:.2%})."
        )
    if reasons := obstacles(plan):
        lines.append(
            f"No engine can run this plan: {'; '.join(reasons)}. runs_on='vllm' (--runs-on vllm) "
            "avoids it."
        )
    return "\n".join([*lines, *(f"Note: {warning}" for warning in plan.warnings)])


def _group_lines(plan: PlanData) -> list[str]:
    """Return a sentence for each group; groups with the same sentence share a line."""
    by_text: dict[str, list[int]] = {}
    for index, group in enumerate(plan.groups):
        fixed, each = bytes_per_request(plan, index)
        regions = [region for region in plan.regions if region.group == index]
        pages = sum(len(region.layers) for region in regions)
        layers = len({layer.index for region in regions for layer in region.layers})
        what, having = f"{layers} {group.kind} layers", list[str]()
        if any(region.splits > 1 for region in regions):
            what = f"{pages} parts of {group.kind} layers"
        elif pages > layers:
            having.append(f"{pages} caches")
        if group.kind == "ring":
            having.append(f"the last, incomplete group of {group.window} tokens")
        elif group.window:
            having.append(f"a window of {group.window:,} tokens")
        if having:
            what += f" with {' and '.join(having)}"
        takes = f"{size(each)} per token" if each else f"{size(fixed)} at most"
        if group.kind == "ring":
            takes = f"{size(fixed)}, one block per request"
        elif group.window and not each:
            takes += f" with {plan.in_flight:,} tokens in flight"
        text = f"{what}, blocks of {group.block} tokens; a request takes {takes}."
        by_text.setdefault(text, []).append(index)
    lines = []
    for text, indices in by_text.items():
        first, last = indices[0], indices[-1]
        names = f"{first} to {last}" if len(indices) == last - first + 1 else str(indices)[1:-1]
        lines.append(f"Group {first}: {text}" if first == last else f"Groups {names}, each: {text}")
    return lines
