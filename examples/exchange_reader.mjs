// Read documents of the exchange format without kvatlas: docs/reference/exchange.md as code.
// Only Node's own modules are used, and the checks have the order of the specification.
import { createHash } from "node:crypto";

const MOST = Number.MAX_SAFE_INTEGER;
const ITEMS = { fp32: 4, bf16: 2, fp16: 2, e4m3: 1, e5m2: 1, e2m1: 1, nvfp4: 1, mxfp4: 1, ue8m0: 1,
  int8: 1, int4: 1, uint8: 1, uint4: 1, uint3: 1 };

export class Refusal extends Error { constructor(code) { super(code); this.code = code; } }
const check = (condition, code) => { if (!condition) throw new Refusal(code); };
const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);

export function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const keys = Object.keys(value).sort();
  return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join(",")}}`;
}

// A structure is a function of a value that is true if the value has this structure.
const integer = (least, most = MOST) => (value) => Number.isSafeInteger(value) && value >= least && value <= most;
const text = (pattern) => (value) => typeof value === "string" && pattern.test(value);
const list = (one, least = 0, most = Infinity) => (value) =>
  Array.isArray(value) && value.length >= least && value.length <= most && value.every(one);
const pair = (one, other) => (value) => Array.isArray(value) && value.length === 2 && one(value[0]) && other(value[1]);
const maybe = (one) => (value) => value === null || one(value);
const plain = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const object = (keys, optional = {}) => (value) => plain(value) &&
  Object.keys(keys).every((key) => Object.hasOwn(value, key)) &&
  Object.keys(value).every((key) => Object.hasOwn(keys, key) ? keys[key](value[key])
    : Object.hasOwn(optional, key) && optional[key](value[key]));

const number = integer(0), count = integer(1), name = text(/^[ !#-\[\]-~]{1,256}$/);
const axes = (value) => plain(value) && Object.entries(value).every(([axis, steps]) =>
  /^[A-Z]$/.test(axis) && list(pair(count, number), 1, 8)(steps));
const FIELD = object({ name, dtype: name, region: number, offset: number, axes, shard: number },
  { scale: text(/^[0-9a-f]{8}$/) });
const LAYER = object({ name, index: number, group: number, fields: list(FIELD, 1) });
const GROUP = object({ pool: number, holds: text(/^(tokens|state|ring)$/), tokens: count, context: count,
  keeps: object({}, { window: count, chunk: count, source: count }) });
const SHARD = object({ axis: text(/^[A-Z]?$/), size: count, ranks: list(maybe(list(pair(number, count), 1)), 1) });
const HEAD = { format: () => true, version: () => true };
const DOCUMENT = object({ ...HEAD, model: name, identity: text(/^([0-9a-f]{64})?$/), ranks: integer(1, 65536),
  regions: list(count, 1), groups: list(GROUP, 1), shards: list(SHARD, 1), layers: list(LAYER, 1) });
const TABLES = object({ ...HEAD, cache: text(/^[0-9a-f]{64}$/),
  tables: list(object({ group: number, tokens: pair(number, number), blocks: list(maybe(number)) })) });

function decode(bytes, format, structure) {
  let value;
  try {
    value = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch { check(false, "unreadable"); }
  check(plain(value) && value.format === format && count(value.version), "bad_exchange");
  check(value.version === 1, "unlike_versions");
  check(structure(value), "bad_exchange");
  check(Buffer.from(canonical(value)).equals(bytes), "not_canonical");
  return value;
}

export function readDocument(bytes) {
  const document = decode(bytes, "kv-exchange", DOCUMENT);
  checkReferences(document);
  const fields = document.layers.flatMap((layer) => layer.fields.map((field) => ({
    layer, field, group: document.groups[layer.group], shard: document.shards[field.shard],
    item: Object.hasOwn(ITEMS, field.dtype) ? ITEMS[field.dtype] : 0 })));
  check(fields.every((one) => one.item), "unknown_dtype");
  check(document.shards.every((shard) => shardFits(shard, document.ranks)), "bad_field");
  check(fields.every(axesFit), "bad_field");
  check(partsAgree(fields), "bad_field");
  for (const { field, item } of fields) {
    const strides = Object.values(field.axes).flat().map((step) => step[1]);
    check([field.offset, ...strides].every((one) => one % item === 0), "misaligned");
  }
  for (const one of fields) check(place(one).stop <= document.regions[one.field.region], "out_of_bounds");
  checkOverlap(fields);
  return { ...document, all: fields, digest: createHash("sha256").update(bytes).digest("hex") };
}

function checkReferences({ layers, groups, regions, shards }) {
  const seen = new Map();
  const same = (key, value) => check((seen.get(key) ?? seen.set(key, value).get(key)) === value, "bad_exchange");
  for (const layer of layers) {
    check(layer.group < groups.length, "bad_exchange");
    same(`layer ${layer.name}`, layer.index);
    for (const field of layer.fields) {
      check(field.region < regions.length && field.shard < shards.length, "bad_exchange");
      same(`region ${field.region}`, groups[layer.group].pool);
    }
  }
  check(groups.every((group) => group.context === 1 || group.holds === "tokens"), "bad_exchange");
}

const heldRows = (ranges) => sum(ranges.map((range) => range[1]));
const total = (steps) => steps.reduce((many, [size]) => many * size, 1);

function shardFits({ axis, size, ranks }, count) {
  const held = ranks.filter((ranges) => ranges !== null);
  return ranks.length === count && held.length > 0 && (axis !== "" || size === 1) &&
    held.every((ranges) => heldRows(ranges) === heldRows(held[0]) &&
      ranges.every(([start, length], n) =>
        n + 1 < ranges.length ? start + length < ranges[n + 1][0] : start + length <= size));
}

function axesFit({ field: { axes }, group, shard }) {
  const rows = heldRows(shard.ranks.find((ranges) => ranges !== null));
  return Object.values(axes).every((steps) => total(steps) <= MOST) &&
    axes.B?.length === 1 && shard.axis !== "B" && shard.axis !== "N" &&
    ("N" in axes) === (group.holds !== "state") &&
    (group.holds !== "tokens" || group.tokens % total(axes.N) === 0) &&
    (shard.axis === "" || (axes[shard.axis]?.length === 1 && axes[shard.axis][0][0] === rows));
}

// What must be equal in all parts of a field, and in the source and the destination of a copy.
function content({ field, shard, group }) {
  const rows = Object.fromEntries(Object.entries(field.axes).filter(([axis]) => axis !== "B" && axis !== "N")
    .map(([axis, steps]) => [axis, axis === shard.axis ? shard.size : total(steps)]));
  const perState = group.holds === "tokens" ? group.tokens / total(field.axes.N) : 0;
  const sizes = canonical([rows, shard.axis, group.holds, perState]);
  return { sizes, numbers: canonical([field.dtype, field.scale ?? ""]) };
}

function partsAgree(fields) {
  const seen = new Map(), agree = (key, value) => (seen.get(key) ?? seen.set(key, value).get(key)) === value;
  return fields.every((one) => {
    const names = one.layer.fields.map((field) => field.name).sort();
    return new Set(names).size === names.length && agree(canonical(one.layer.name), canonical(names)) &&
      agree(canonical([one.layer.name, one.field.name]), canonical(content(one)));
  });
}

// The extent of a field in its region: its axes of more than one coordinate, the outermost first.
function place({ field, item }) {
  const steps = Object.values(field.axes).flat().filter((step) => step[0] > 1).sort((a, b) => b[1] - a[1]);
  return extent(field.offset, steps, item);
}
const extent = (start, steps, item) =>
  ({ start, steps, item, stop: start + sum(steps.map(([size, stride]) => (size - 1) * stride)) + item });

function checkOverlap(fields) {
  for (const one of fields) {
    let span = one.item;
    for (const [size, stride] of place(one).steps.reverse()) {
      check(stride >= span, "overlap");
      span += (size - 1) * stride;
    }
  }
  const gathered = (key) => {
    const found = new Map();
    for (const one of fields) found.set(key(one), [...(found.get(key(one)) ?? []), one]);
    return [...found.values()];
  };
  gathered(({ field, layer }) => `${field.region} ${layer.group}`).forEach((own) => checkApart(own.map(place)));
  gathered(({ field }) => field.region).forEach((own) => checkCells(own));
}

function checkApart(parts) {
  const clusters = [];
  let reach = 0;
  for (const part of [...parts].sort((a, b) => a.start - b.start)) {
    if (!clusters.length || part.start >= reach) clusters.push([]);
    clusters.at(-1).push(part);
    reach = Math.max(reach, part.stop);
  }
  for (const own of clusters.filter((cluster) => cluster.length > 1)) {
    const [outer] = own[0].steps;
    check(outer && own.every(({ steps }) => steps.length && canonical(steps[0]) === canonical(outer)), "overlap");
    const inner = own.map(({ start, steps, item }) => extent(start, steps.slice(1), item));
    const span = Math.max(...inner.map((one) => one.stop)) - Math.min(...inner.map((one) => one.start));
    check(span <= outer[1], "overlap");
    checkApart(inner);
  }
}

function checkCells(fields) {
  if (fields.every(({ layer }) => layer.group === fields[0].layer.group)) return;
  const [[count, cell]] = fields[0].field.axes.B;
  for (const { field, item } of fields) {
    check(field.axes.B[0][0] === count && field.axes.B[0][1] === cell, "overlap");
    if (count === 1) continue;
    const steps = Object.entries(field.axes).flatMap(([axis, own]) => axis === "B" ? [] : own);
    const inside = sum(steps.map(([size, stride]) => stride % (cell * count) ? (size - 1) * stride : 0));
    check(Math.floor(field.offset / cell) % count === 0 && (field.offset % cell) + inside + item <= cell, "overlap");
  }
}

export function readTables(bytes, document) {
  const { cache, tables } = decode(bytes, "kv-exchange-tables", TABLES);
  check(cache === document.digest, "checksum");
  const most = new Map(), found = new Map(), taken = new Set();
  for (const { layer, field } of document.all) {
    most.set(layer.group, Math.min(field.axes.B[0][0], most.get(layer.group) ?? MOST));
  }
  for (const table of tables) {
    check(most.has(table.group) && !found.has(table.group), "bad_exchange");
    found.set(table.group, table);
  }
  for (const { group: index, tokens: [first, stop], blocks } of tables) {
    const group = document.groups[index];
    check(first <= stop, "bad_tokens");
    const span = group.tokens * group.context, tokens = group.holds === "tokens";
    const from = tokens ? Math.floor(first / span) : 0, to = tokens ? Math.ceil(stop / span) : 1;
    if (first === stop) continue;
    const needed = blocks.slice(from, to);
    check(to <= blocks.length && (tokens || blocks.length === 1) && !needed.includes(null), "missing_blocks");
    for (const block of needed) {
      check(block < most.get(index), "out_of_range");
      check(!taken.has(`${group.pool} ${block}`), "twice");
      taken.add(`${group.pool} ${block}`);
    }
  }
  return found;
}

// The byte offset of each coordinate of an axis, or of several axes in row-major order.
const positions = (steps) => steps.reduce((found, [size, stride]) =>
  found.flatMap((base) => Array.from({ length: size }, (_, n) => base + n * stride)), [0]);

// What a rank holds of a field for one request: offsets by state, by row, and of the other elements.
function held({ layer, field, group, shard, item }, tables, rank) {
  const { tokens: [first, stop], blocks } = tables.get(layer.group) ?? check(false, "missing_blocks");
  const { B: [[, stride]], N = [], ...axes } = field.axes;
  const within = positions(N), many = within.length, states = new Map(), rows = new Map();
  const put = (state, local) => states.set(state,
    field.offset + blocks[Math.floor(local / many)] * stride + within[local % many]);
  if (group.holds === "state" && first < stop) put(stop, 0);
  if (group.holds === "ring") for (let t = Math.max(first, stop - many); t < stop; t++) put(t, t % many);
  if (group.holds === "tokens") {
    const span = group.tokens / many, { context } = group;
    for (let n = Math.floor(first / span); n < Math.floor(stop / span); n++) {
      if (n % context === rank % context) put(n, Math.floor(n / context));
    }
  }
  const local = positions(axes[shard.axis] ?? []);
  for (const [start, length] of shard.ranks[rank]) {
    for (let row = start; row < start + length; row++) rows.set(row, local[rows.size]);
  }
  const others = Object.keys(axes).filter((axis) => axis !== shard.axis).sort();
  return { states, rows, others: positions(others.flatMap((axis) => axes[axis])), item, region: field.region, stop };
}

export function runs({ document, tables, rank }, layer, field, range) {
  check(rank < document.ranks, "bad_rank");
  const own = document.all.filter((one) => one.layer.name === layer);
  check(own.length, "unknown_layer");
  const parts = own.filter((one) => one.field.name === field);
  check(parts.length, "unknown_field");
  const found = [], [from, to] = range ?? [0, MOST];
  for (const one of parts.filter(({ shard }) => shard.ranks[rank] !== null)) {
    const { states, rows, others, item, region } = held(one, tables, rank);
    for (const state of states.values()) {
      for (const [row, at] of rows) {
        if (row >= from && row < to) for (const other of others) found.push([region, state + at + other, item]);
      }
    }
  }
  return joined(found);
}

export function copy(source, destination) {
  check(source.document.identity === destination.document.identity, "different_identity");
  check([source, destination].every(({ document, rank }) => rank < document.ranks), "bad_rank");
  const keys = ({ document }, key) => canonical([...new Set(document.all.map(key))].sort());
  const both = (key, code) => check(keys(source, key) === keys(destination, key), code);
  both((one) => one.layer.name, "missing_layers");
  both((one) => canonical([one.layer.name, one.field.name, content(one).sizes]), "unlike_layers");
  both((one) => canonical([one.layer.name, one.field.name, content(one).numbers]), "unlike_dtypes");
  const found = [], on = ({ document, rank }) => document.all.filter(({ shard }) => shard.ranks[rank] !== null);
  const pairs = on(destination).map((one) => ({ one, parts: on(source).filter(({ layer, field }) =>
    layer.name === one.layer.name && field.name === one.field.name) })).filter(({ parts }) => parts.length);
  const ends = pairs.map(({ one, parts }) => ({ one, there: held(one, destination.tables, destination.rank),
    sources: parts.map((part) => held(part, source.tables, source.rank)) }));
  check(ends.every(({ one, there, sources }) => one.group.holds !== "state" ||
    sources.every((here) => here.stop === there.stop)), "bad_tokens");
  for (const { one, there, sources } of ends) {
    const done = new Set();
    for (const here of sources) for (const [row, to] of there.rows) {
      if (!here.rows.has(row) || done.has(row)) continue;
      done.add(row);
      for (const [state, base] of there.states) {
        if (!here.states.has(state)) continue;
        const from = here.states.get(state) + here.rows.get(row);
        there.others.forEach((other, n) =>
          found.push([here.region, from + here.others[n], there.region, base + to + other, one.item]));
      }
    }
  }
  return joined(found);
}

// Sort runs by their last region and offset, and join runs that follow each other at every end.
function joined(found) {
  const out = [];
  found.sort((a, b) => a.at(-3) - b.at(-3) || a.at(-2) - b.at(-2));
  for (const run of found) {
    const last = out.at(-1), nbytes = last?.at(-1);
    const follows = last && run.slice(0, -1).every((at, n) => at === last[n] + (n % 2 ? nbytes : 0));
    follows ? (last[last.length - 1] += run.at(-1)) : out.push(run);
  }
  return out;
}
