"""Plans whose fields are stored apart, drawn at random from a plan of the same model."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

from kvatlas import Placement
from kvatlas.geometry import Field
from kvatlas.models import Model
from kvatlas.planning import Plan, foreign


def model_of(made: Plan) -> Model:
    """The model of a plan, with its layers in order."""
    layers = {layer.name: layer for region in made.regions for layer in region.layers}
    found = sorted(layers.values(), key=lambda layer: (layer.index, layer.name))
    depth = max(layer.index for layer in found) + 1
    return Model(
        name=made.model,
        architecture="Drawn",
        layers=tuple(found),
        depth=depth,
        attention_heads=24,
        max_len=made.max_len,
    )


def apart(made: Plan, seed: int, *, pages: float = 0.2) -> Plan:
    """A plan of the same groups and blocks whose fields are anywhere: tiled, in gaps, interleaved.

    The tensors of a share `pages` of the layers contain whole pages.
    """
    rng = np.random.default_rng(seed)
    homes = {layer: made.region_of(layer)[0] for layer in made.layers}
    groups: dict[int, list[str]] = defaultdict(list)
    for layer, region in homes.items():
        groups[region.group].append(layer)
    stages: list[dict[str, Any]] = [{} for _ in range(made.pp)]
    for members in groups.values():
        for stage in range(made.pp):
            names = [name for name in members if homes[name].stage == stage]
            blocks = made.pool_of(names[0]).blocks if names else 0
            stages[stage] |= _tensors(made, names, blocks, rng, pages)
    seen = foreign(
        model_of(made),
        stages,
        tp=made.tp,
        max_len=made.max_len,
        groups=list(groups.values()),
        blocks={name: region.block for name, region in homes.items()},
        pools=list(range(len(groups))),
    )
    return msgspec.structs.replace(seen, dcp=made.dcp)


def _tensors(
    made: Plan, names: list[str], blocks: int, rng: np.random.Generator, pages: float
) -> dict[str, Any]:
    """The tensors of layers in one pool: equal fields may share a tensor, with an axis for each."""
    found: dict[str, Any] = {name: {} for name in names}
    wanted: dict[Any, list[tuple[str, Field]]] = defaultdict(list)
    end = 0
    for name in names:
        page = made.region_of(name)[0].layers[0].spec
        whole = made.page(name)
        if rng.random() < pages and made.parts(name) == 1 and not whole.padding:
            placed = whole.place("LBHNC", pages=1, blocks=blocks, offset=-(-end // 64) * 64)
            if made.region_of(name)[0].kernel_block == made.region_of(name)[0].block:
                found[name] = placed.select("L", 0)
                end = placed.stop
                continue
        region, _ = made.region_of(name)
        own = made.spec(name).page(region.block if page.tokens_per_state else 1, tp=made.tp)
        for field in own.fields:
            if not field.padding:
                share = int(rng.integers(3))
                key = (share, field.dtype, tuple(sorted(field.sizes.items())))
                wanted[key].append((name, field))
    for key, members in wanted.items():
        # K and V, or several layers, may be an axis of one tensor.
        fields = [members] if key[0] else [[one] for one in members]
        for some in fields:
            placed = _tensor(some[0][1], len(some), blocks, end, rng)
            end = placed.stop
            for index, (name, field) in enumerate(some):
                found[name][field.name] = placed.select("which", index)
    return found


def _tensor(field: Field, count: int, blocks: int, end: int, rng: np.random.Generator) -> Placement:
    """A tensor of `count` fields: axes in any order, with gaps, in tiles, from byte `end` on."""
    item = field.dtype.item
    axes = [("which", count), ("B", blocks)]
    for name, size in field.sizes.items():
        inner = {"C": "c", "N": "k"}.get(name)
        if inner is None or field.sharding.axis == name or rng.random() < 0.6:
            axes.append((name, size))
            continue
        part = int(rng.choice([n for n in range(1, size + 1) if size % n == 0]))
        outer = (inner, size // part), (name, part)
        axes += outer if name == "N" else ((name, size // part), (inner, part))
    order = rng.permutation(len(axes))
    step, strides = item, {}
    for place in reversed(order.tolist()):
        name, size = axes[place]
        strides[name] = step
        step *= size
        if rng.random() < 0.3:
            step += item * int(rng.integers(1, 5))
    offset = (end + int(rng.integers(0, 3)) * 40 + 15) // 16 * 16
    names, sizes = zip(*axes, strict=True)
    return Placement(names, sizes, tuple(strides[name] for name in names), offset, item)
