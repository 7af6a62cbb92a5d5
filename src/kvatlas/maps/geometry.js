// Addresses and coordinates. An address is the offset plus the sum of index x stride. The inverse
// divides by the strides, largest first. Boxes come from Python's Placement:
// [offset, item bytes, [[axis, size, stride], ...]].
"use strict";

// Returns the axes by stride, largest first. Cached in the box, because it is needed for every pixel.
function axesBySize(box) {
  if (!box[3]) box[3] = [...box[2]].sort((one, two) => two[2] - one[2]);
  return box[3];
}

// Returns the values that `divide` needs, cached in the box: its extent in bytes, and the names,
// last indices and strides of its axes.
function divisorOf(box) {
  if (!box[4]) {
    const axes = axesBySize(box), zeros = Object.fromEntries([["rest", 0], ...axes.map(([axis]) => [axis, 0])]);
    const extent = axes.reduce((sum, [, size, stride]) => sum + (size - 1) * stride, box[1]);
    box[4] = { extent, zeros, names: axes.map(([axis]) => axis), last: axes.map(([, size]) => size - 1), strides: axes.map(([, , stride]) => stride) };
  }
  return box[4];
}

const indices = [];

// Returns the coordinates of an address in a box, or null if it is outside of all items. Uses plain
// loops and objects of one shape, because a picture calls it tens of thousands of times.
function divide(box, address) {
  const { extent, zeros, names, last, strides } = divisorOf(box);
  let rest = address - box[0];
  if (rest < 0 || rest >= extent) return null;
  for (let n = 0; n < names.length; n++) {
    const stride = strides[n], index = stride ? Math.min(Math.floor(rest / stride), last[n]) : 0;
    indices[n] = index;
    rest -= index * stride;
  }
  if (rest >= box[1]) return null;
  const at = { ...zeros };
  at.rest = rest;
  for (let n = 0; n < names.length; n++) at[names[n]] = indices[n];
  return at;
}

// Returns the address of some coordinates. Missing axes count as 0.
function addressOf(box, at) {
  return box[2].reduce((sum, [axis, , stride]) => sum + (at[axis] || 0) * stride, box[0]);
}

function axisOf(box, name) {
  return box[2].find(([axis]) => axis === name);
}

// Returns the innermost axes of a box that are contiguous together: their bytes, and [axis, stride] of each.
function innermost(box, outer) {
  let nbytes = box[1];
  const inside = [];
  for (const [axis, size, stride] of [...axesBySize(box)].reverse()) {
    if (size === 1) continue;
    if (outer.includes(axis) || stride !== nbytes) break;
    inside.push([axis, stride]);
    nbytes *= size;
  }
  return [nbytes, inside];
}

// Returns how the axes of a field nest in memory, outermost first: [axis, size, stride], C in bytes.
function nesting(field) {
  const axes = axesBySize(field.box).filter(([axis, size]) => size > 1 && "LBkHN".includes(axis));
  return [...axes, ["C", axes.length ? axes[axes.length - 1][2] : field.box[1], 1]];
}

// Yields the address of every item of a box with the coordinates in `fixed`.
function* starts(box, fixed) {
  const free = box[2].filter(([axis]) => !(axis in fixed)), index = free.map(() => 0);
  let address = addressOf(box, fixed), n = 0;
  while (n >= 0) {
    yield address;
    for (n = free.length - 1; n >= 0; n--) {
      const [, size, stride] = free[n];
      address += stride;
      if (++index[n] < size) break;
      address -= size * stride;
      index[n] = 0;
    }
  }
}

// Finds the field, the padding or the unused bytes at an address, if the block belongs to a group.
// `hint` is the last result, or an object with the region to try first: neighbours are mostly together.
function find(plan, stage, group, address, hint) {
  const again = hint && hint.region && findIn(plan, hint.region, address, hint.number || 0);
  if (again) return again;
  for (const region of plan.regions) {
    if (region.stage !== stage || region.group !== group) continue;
    const found = findIn(plan, region, address, 0);
    if (found) return found;
  }
  for (const box of plan.unused[`${stage}/${group}`] || []) {
    const at = divide(box, address);
    if (at) return { kind: "unused", region: null, at, address, nbytes: box[1] };
  }
  return null;
}

function findIn(plan, region, address, first) {
  const page = plan.pages[region.page];
  const count = page.fields.length;
  for (let n = 0; n < count; n++) {
    const number = (first + n) % count;
    const field = page.fields[number];
    const at = divide(field.box, address);
    if (at) {
      const kind = field.padding ? "padding" : "field";
      return { kind, region, page, field, number, at, address };
    }
  }
  const at = page.padding && divide(page.padding, address);
  if (at) return { kind: "padding", region, page, number: 0, at, address, nbytes: page.padding[1] };
  return null;
}

// Returns the first byte after the contiguous piece of a point, within which no `outer` axis changes.
function pieceEnd(point, outer) {
  const { at, address } = point, box = point.field ? point.field.box : null;
  if (!box) return address - at.rest + point.nbytes;
  const [nbytes, inside] = remembered(box, outer, () => innermost(box, outer));
  return inside.reduce((start, [axis, stride]) => start - at[axis] * stride, address - at.rest) + nbytes;
}

const answers = new Map();

// Returns the cached result of `make` for a thing and a key.
function remembered(thing, key, make) {
  let known = answers.get(thing);
  if (!known) answers.set(thing, known = new Map());
  let answer = known.get(key);
  if (answer === undefined) known.set(key, answer = make());
  return answer;
}

// Returns the index in the whole model of a rank's head, or of a row of a convolution.
function globalRow(region, field, at, tpRank) {
  if (!field.shard || !(field.shard in at)) return null;
  const part = region.parts.length ? region.parts[at.L] : 0;
  const local = at[field.shard];
  for (const [begin, start, length] of field.ranges[tpRank * region.splits + part]) {
    if (local >= begin && local < begin + length) return start + local - begin;
  }
  return null;
}

// Returns the index of the head in the whole model; null if the field has no heads.
function headOf(point, tpRank) {
  if (point.kind !== "field" || !("H" in point.at)) return null;
  const row = point.field.shard === "H" ? globalRow(point.region, point.field, point.at, tpRank) : null;
  return row === null ? point.at.H : row;
}

// Returns all tensor-parallel ranks that hold the same row.
function ranksOf(plan, region, field, at, tpRank) {
  if (!field.shard) return [...Array(plan.tp).keys()];
  const row = globalRow(region, field, at, tpRank);
  const ranks = [];
  for (let rank = 0; rank < plan.tp; rank++) {
    const held = field.ranges.slice(rank * region.splits, (rank + 1) * region.splits).flat();
    if (held.some(([, start, length]) => row >= start && row < start + length)) ranks.push(rank);
  }
  return ranks;
}

// Returns the state within the block; null for recurrent states.
function stateOf(point) {
  const each = point.region && point.region.tokens_per_state;
  if (!each || !("N" in point.at)) return null;
  return (point.at.k || 0) * axisOf(point.field.box, "N")[1] + point.at.N;
}

// Returns the first and the last token of a point's state, within the block.
function tokensOf(point) {
  const state = stateOf(point);
  if (state === null) return null;
  const each = point.region.tokens_per_state;
  return [state * each, state * each + each - 1];
}

const MOST_RUNS = 200000;

// Counts the runs of a selection in block 0, {layer, heads: [first, last], token}, with the bytes of
// the smallest and the largest run. Returns null if there are too many to count.
function countRuns(plan, stage, group, tpRank, chosen) {
  const boxes = boxesOf(plan, stage, group, tpRank, chosen).sort((one, two) => one[0] - two[0]);
  const many = boxes.reduce((sum, box) => sum + box[2].reduce((all, [, size]) => all * size, 1), 0);
  const apart = boxes.every((box, n) => !n || boxes[n - 1][0] + divisorOf(boxes[n - 1]).extent < box[0]);
  if (!apart && many > MOST_RUNS) return null;
  const runs = apart ? boxes : joinRuns(boxes);
  let least = Infinity, most = 0;
  for (const [, nbytes] of runs) { least = Math.min(least, nbytes); most = Math.max(most, nbytes); }
  return { many: apart ? many : runs.length, least, most };
}

// Returns the boxes of a selection. Adjacent boxes of a page are joined.
function boxesOf(plan, stage, group, tpRank, chosen) {
  const boxes = [];
  for (const region of plan.regions) {
    if (region.stage !== stage || region.group !== group) continue;
    const fields = plan.pages[region.page].fields.filter((field) => !field.padding);
    for (const index of layersApart(region, chosen)) {
      boxes.push(...joinBoxes(fields.flatMap((field) => narrowed(region, field, index, tpRank, chosen))));
    }
  }
  return boxes;
}

// Returns the layers to examine one by one; null stands for all layers at once.
function layersApart(region, chosen) {
  if (chosen.layer !== undefined) return [...region.layers.keys()].filter((index) => region.layers[index] === chosen.layer);
  return region.parts.length ? [...region.layers.keys()] : [null];
}

// Selects some heads and a token of a field in block 0, in one layer or in all. Returns boxes without B.
function narrowed(region, field, index, tpRank, chosen) {
  let boxes = [cut(field.box, "B", 0, 1)];
  if (index !== null) boxes = [cut(boxes[0], "L", index, 1)];
  if (chosen.heads) {
    const [first, last] = chosen.heads;
    if (!axisOf(field.box, "H")) return [];
    const part = region.parts.length ? region.parts[index] : 0;
    const held = field.shard === "H"
      ? field.ranges[tpRank * region.splits + part] : [[0, 0, axisOf(field.box, "H")[1]]];
    boxes = held.flatMap(([local, start, length]) => {
      const begin = Math.max(first, start), stop = Math.min(last + 1, start + length);
      return begin < stop ? [cut(boxes[0], "H", local + begin - start, stop - begin)] : [];
    });
  }
  if (chosen.token !== undefined) {
    const each = region.tokens_per_state, states = axisOf(field.box, "N");
    if (!each || !states) return [];
    const state = Math.floor(chosen.token / each);
    const kernels = (axisOf(field.box, "k") || ["k", 1])[1];
    if (state >= states[1] * kernels) return [];
    boxes = boxes.map((box) => cut(cut(box, "N", state % states[1], 1), "k", Math.floor(state / states[1]), 1));
  }
  return boxes;
}

function cut(box, name, begin, length) {
  const axis = axisOf(box, name);
  if (!axis) return box;
  const axes = box[2].map((one) => (one === axis ? [name, length, axis[2]] : one));
  return [box[0] + begin * axis[2], box[1], axes];
}

// Returns the same bytes with longer items: contiguous axes become part of the item.
function folded([offset, item, axes]) {
  const [nbytes, inside] = innermost([offset, item, axes], []);
  const outer = axes.filter(([axis, size]) => size > 1 && !inside.some(([one]) => one === axis));
  return [offset, nbytes, outer];
}

// Joins boxes that are always adjacent, such as k and v of a cell.
function joinBoxes(boxes) {
  const made = [];
  for (const box of boxes.map(folded).sort((one, two) => one[0] - two[0])) {
    const last = made[made.length - 1];
    const behind = last && last[0] + last[1] === box[0] && JSON.stringify(last[2]) === JSON.stringify(box[2]);
    if (behind) made[made.length - 1] = folded([last[0], last[1] + box[1], last[2]]);
    else made.push(box);
  }
  return made;
}

// Returns the runs of boxes, [start, bytes] by address. Adjacent runs are joined.
function joinRuns(boxes) {
  const made = [], runs = boxes.flatMap((box) => [...starts(box, {})].map((start) => [start, box[1]]));
  for (const [start, nbytes] of runs.sort((one, two) => one[0] - two[0])) {
    const last = made[made.length - 1];
    if (last && last[0] + last[1] === start) last[1] += nbytes;
    else made.push([start, nbytes]);
  }
  return made;
}
