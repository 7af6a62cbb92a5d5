// The rows of memory to draw, their labels and colours. A row is a contiguous range, drawn to scale
// from left to right.
"use strict";

// From dark to light through hues, so that the order is visible to colour-blind readers and in grey prints.
const RAMPS = {
  light: ["#2b2a6b", "#2b5c8f", "#2a8a8f", "#4bb07a", "#a3cc52", "#f5dd3c"],
  dark: ["#7a74e6", "#5a94dd", "#45bcc2", "#6fd39a", "#b9e06a", "#ffec66"],
};
// Colours by Okabe and Ito, which are distinct for colour-blind readers.
const WORDS = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8d00", "#555555"],
  dark: ["#4aa3df", "#f0b429", "#2fc49b", "#e39ac4", "#8fd0f5", "#f07f3c", "#d8d85a", "#a8a8a8"],
};
// Alternating colours of the pages of a group: the accent colour, and a paler one.
const PAGES = { light: ["#0060a0", "#4c90bd"], dark: ["#6cb6f0", "#4a7ea7"] };
const byId = (id) => document.getElementById(id);
const BLOCKS_SHOWN = 16;
const MOST_ROWS = 160;
const MOST_UNUSED = 12; // maximum rows for unused bytes, if other rows are much shorter

// The theme and the font size. Read once per drawing, because reading them computes all styles.
let dark = false, letterSize = 16;

const rem = () => letterSize;

function readTheme() {
  dark = isDark();
  letterSize = printing ? PAPER.letters : parseFloat(getComputedStyle(document.documentElement).fontSize);
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function rgb(colour) {
  return remembered(rgb, colour, () => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
}

function hex(parts) {
  return "#" + parts.map((part) => Math.round(part).toString(16).padStart(2, "0")).join("");
}

function mix(one, two, share) {
  return remembered(mix, one + two + share, () => {
    const other = rgb(two);
    return hex(rgb(one).map((part, n) => part + (other[n] - part) * share));
  });
}

const STEPS = 256; // colours of a ramp

function ramp(share) {
  const step = Math.round(share * STEPS);
  return remembered(ramp, dark ? step : step + 1000, () => rampAt(step / STEPS));
}

function rampAt(share) {
  const stops = RAMPS[dark ? "dark" : "light"];
  const place = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  return mix(stops[first], stops[first + 1], place - first);
}

function word(number) {
  const words = WORDS[dark ? "dark" : "light"];
  return words[number % words.length];
}

// -- which rows there are ---------------------------------------------------------------------

// Returns the rows of a view by address; a sample if there are very many.
function rowsOf(plan, view) {
  const made = { pool: poolRows, block: blockRows, page: pageRows, cell: cellRows }[view.level](plan, view);
  made.sort((one, two) => one.start - two.start);
  const every = Math.ceil(made.length / MOST_ROWS);
  return { rows: made.filter((_, n) => n % every === 0), every, of: made.length };
}

function regionsOf(plan, view) {
  return plan.regions.filter((one) => one.stage === view.stage && one.group === view.group);
}

function poolOf(plan, view) {
  const index = plan.groups[view.group].pool;
  return plan.pools.find((pool) => pool.stage === view.stage && pool.index === index);
}

function blockRows(plan, view) {
  const rows = [];
  for (const region of regionsOf(plan, view)) {
    for (const box of plan.pages[region.page].block_rows) {
      for (const start of starts(box, { B: view.block })) rows.push({ start, nbytes: box[1], region });
    }
  }
  const widest = rows.reduce((most, row) => Math.max(most, row.nbytes), 1);
  for (const box of plan.unused[`${view.stage}/${view.group}`] || []) {
    const first = addressOf(box, { B: view.block });
    const step = Math.max(widest, Math.ceil(box[1] / MOST_UNUSED));
    for (let at = 0; at < box[1]; at += step) {
      rows.push({ start: first + at, nbytes: Math.min(step, box[1] - at), region: null });
    }
  }
  return rows;
}

function pageRows(plan, view) {
  const rows = [];
  for (const box of plan.pages[view.region.page].page_rows) {
    for (const start of starts(box, { B: view.block, L: view.index })) {
      rows.push({ start, nbytes: box[1], region: view.region });
    }
  }
  return rows;
}

// Returns one row per block if blocks are outermost; else one row per outer coordinate.
function poolRows(plan, view) {
  const pool = poolOf(plan, view);
  const first = Math.floor(view.block / BLOCKS_SHOWN) * BLOCKS_SHOWN;
  const count = Math.min(BLOCKS_SHOWN, pool.blocks - first);
  const regions = regionsOf(plan, view);
  const drawn = regions.flatMap((region) => plan.pages[region.page].block_rows.map((box) => [region, box]));
  const strides = drawn.map(([, box]) => axisOf(box, "B")[2]);
  if (strides.every((stride) => stride === pool.block_bytes || pool.blocks === 1)) {
    return [...Array(count).keys()].map((n) => ({
      start: (first + n) * pool.block_bytes, nbytes: pool.block_bytes, region: regions[0], block: first + n,
    }));
  }
  const rows = [];
  drawn.forEach(([region, box], n) => {
    for (const start of starts(box, { B: first })) {
      if (strides[n] === 0 || strides[n] >= box[1]) rows.push({ start, nbytes: strides[n] * (count - 1) + box[1], region });
    }
  });
  return rows;
}

// Returns the bytes of one cell in rows of equal width; for a recurrent state, one row of its field.
function cellRows(plan, view) {
  const rows = [];
  const width = view.width;
  const page = plan.pages[view.region.page];
  const cells = "N" in view.at;
  const outer = cells ? ["B", "L", "k", "H", "N"] : view.field.box[2].slice(0, -1).map(([axis]) => axis);
  for (const field of cells ? page.fields : [view.field]) {
    if (cells && !axisOf(field.box, "N")) continue;
    const at = {};
    for (const axis of outer) at[axis] = view.at[axis] || 0;
    const [item, inside] = innermost(field.box, outer);
    const known = [...outer, ...inside.map(([axis]) => axis)];
    const apart = field.box[2].filter(([axis, size]) => size > 1 && !known.includes(axis));
    for (const begin of starts([addressOf(field.box, at), item, apart], {})) {
      for (let from = 0; from < item; from += width) {
        rows.push({ start: begin + from, nbytes: Math.min(width, item - from), region: view.region, item: field.box[1] });
      }
    }
  }
  return rows;
}

// -- how it is coloured -----------------------------------------------------------------------

const fieldNames = [];

// Returns a number for a field's name, the same in all plans.
function fieldNumber(name) {
  if (!fieldNames.includes(name)) fieldNames.push(name);
  return fieldNames.indexOf(name);
}

function shareOf(plan, view, point, mode) {
  const { at, field, region } = point;
  const last = (axis) => { const one = axisOf(field.box, axis); return one ? Math.max(1, one[1] - 1) : 1; };
  if (mode === "layer") return at.L / last("L");
  if (mode === "head") {
    const head = headOf(point, view.tpRank);
    return head === null ? null : head / Math.max(1, (field.shard === "H" ? field.whole : last("H") + 1) - 1);
  }
  const state = stateOf(point);
  return state === null ? null : state / Math.max(1, (last("N") + 1) * ((axisOf(field.box, "k") || ["k", 1])[1]) - 1);
}

function colourOf(plan, view, point, mode) {
  if (mode === "field") return word(fieldNumber(point.field.name));
  if (mode === "page") return PAGES[dark ? "dark" : "light"][point.at.L % 2];
  const share = shareOf(plan, view, point, mode);
  if (share === null) return dark ? "#59606d" : "#b4b8c0";
  const { field } = point, step = Math.round(share * STEPS);
  return remembered(field, dark ? step : step + 1000, () => {
    const base = ramp(share), pale = paleness(field.name);
    return pale ? mix(base, dark ? "#14161a" : "#ffffff", pale) : base;
  });
}

// Fields of one head share a colour: values are paler than keys, and scales are paler still.
function paleness(name) {
  return name.includes("scale") ? 0.58 : name.startsWith("v") ? 0.32 : 0;
}

// Returns whether a point belongs to the highlighted part.
function follows(point, follow, tpRank) {
  if (!follow) return true;
  if (!point || point.kind !== "field") return false;
  if (follow.kind === "layer") return point.region.layers[point.at.L] === follow.value;
  const head = headOf(point, tpRank);
  if (follow.kind === "head") return head === follow.value;
  if (follow.kind === "heads") return head !== null && head >= follow.value[0] && head <= follow.value[1];
  const tokens = tokensOf(point);
  return tokens !== null && tokens[0] <= follow.value && follow.value <= tokens[1];
}

// -- labels of the rows ------------------------------------------------------------------------

function shortName(name) {
  const parts = name.split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  if (number < 0) return name;
  const last = parts[parts.length - 1];
  const plain = ["attn", "self_attn", "mixer", "linear_attn"].includes(last);
  return `layer ${parts[number]}${plain ? "" : " " + last}`;
}

// Returns the last byte of a row that belongs to a field, ignoring padding at the end of the row.
function lastOf(plan, view, row) {
  let point = find(plan, view.stage, view.group, row.start + row.nbytes - 1, row);
  while (point && point.kind === "padding" && point.address - point.at.rest > row.start) {
    point = find(plan, view.stage, view.group, point.address - point.at.rest - 1, row);
  }
  return point && point.kind === "field" ? point : null;
}

// Labels a row by what its first and last byte have in common.
function rowLabel(data, plan, view, row) {
  if (view.level === "pool" && row.block !== undefined) return `block ${count(row.block)}`;
  if (view.level === "cell") {
    const point = find(plan, view.stage, view.group, row.start, row);
    return point ? `${point.field.name} +${point.address - cellStart(point)}` : "";
  }
  const one = find(plan, view.stage, view.group, row.start, row);
  if (!one || one.kind === "unused") return "unused";
  if (one.kind === "padding") return "padding";
  const last = lastOf(plan, view, row) || one;
  if (view.level !== "page" && one.at.L === last.at.L) {
    const name = shortName(data.names[one.region.layers[one.at.L]] || "");
    const heads = [headOf(one, view.tpRank), headOf(last, view.tpRank)];
    const several = axisOf(one.field.box, "H") && axisOf(one.field.box, "H")[1] > 1;
    if (several && heads[0] === heads[1]) return `${name} h${heads[0]}`;
    const tokens = [tokensOf(one), tokensOf(last)];
    const part = tokens[0] && tokens[1] && tokens[1][1] - tokens[0][0] + 1 < plan.groups[view.group].block_size;
    return part ? `${name} t${tokens[0][0]}–${tokens[1][1]}` : name;
  }
  const heads = [headOf(one, view.tpRank), headOf(last, view.tpRank)];
  const tokens = [tokensOf(one), tokensOf(last)];
  if (heads[0] !== null && heads[0] === heads[1]) {
    const manyHeads = axisOf(one.field.box, "H")[1] > 1 || !tokens[0];
    if (manyHeads) return `head ${heads[0]}`;
  }
  if (tokens[0] && tokens[1]) {
    return tokens[0][0] === tokens[1][1] ? `token ${tokens[0][0]}` : `tokens ${tokens[0][0]}–${tokens[1][1]}`;
  }
  return one.field.name;
}

function cellStart(point) {
  const at = {};
  for (const axis of ["B", "L", "k", "H", "N"]) at[axis] = point.at[axis] || 0;
  if (!("N" in point.at)) for (const [axis] of point.field.box[2].slice(0, -1)) at[axis] = point.at[axis];
  return addressOf(point.field.box, at);
}
