"""The last step of every policy: groups, pools and regions as one `Plan`."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.planning.block_size import BlockSize
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.request import Request


def assemble(
    asked: Request,
    *,
    policy: str,
    layout: str,
    orders: tuple[str, ...],
    size: BlockSize,
    groups: Sequence[Group],
    pools: Sequence[Pool],
    regions: Sequence[Region],
    warnings: Sequence[str],
    pack: int = 1,
) -> Plan:
    """The plan that was asked for."""
    return Plan(
        model=asked.model.name,
        policy=policy,
        layout=layout,
        tp=asked.tp,
        pp=asked.pp,
        dcp=asked.dcp,
        memory=asked.memory,
        block_size=size.tokens,
        max_len=asked.max_len,
        in_flight=asked.in_flight,
        groups=tuple(groups),
        pools=tuple(pools),
        regions=tuple(regions),
        backends=tuple(dict.fromkeys(b.name for b in asked.backends.values() if b)),
        accepted_layouts=orders,
        pack=pack,
        prefix_caching=asked.prefix_caching,
        reasons=size.reasons,
        warnings=tuple(dict.fromkeys([*asked.model.warnings, *warnings])),
    )
