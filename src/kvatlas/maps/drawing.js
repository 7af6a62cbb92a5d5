// Rows of memory on a canvas. A row is one contiguous stretch, drawn to scale from left to
// right; every pixel is an address, and its colour says what lies there.
"use strict";

// From dark to light through hues, so that colour-blind readers and grey prints keep the order.
const RAMPS = {
  light: ["#2b2a6b", "#2b5c8f", "#2a8a8f", "#4bb07a", "#a3cc52", "#f5dd3c"],
  dark: ["#7a74e6", "#5a94dd", "#45bcc2", "#6fd39a", "#b9e06a", "#ffec66"],
};
// Okabe and Ito's colours, which colour-blind readers tell apart.
const WORDS = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8d00", "#555555"],
  dark: ["#4aa3df", "#f0b429", "#2fc49b", "#e39ac4", "#8fd0f5", "#f07f3c", "#d8d85a", "#a8a8a8"],
};
const byId = (id) => document.getElementById(id);
const BLOCKS_SHOWN = 16;
const MOST_ROWS = 160;

// Whether colours are dark, asked once for each drawing: it is needed for every pixel.
let dark = false;

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const known = new Map();

// What `make` gives for a key, remembered: few colours are asked for very often.
function remembered(key, make) {
  let value = known.get(key);
  if (value === undefined) {
    if (known.size > 50000) known.clear();
    value = make();
    known.set(key, value);
  }
  return value;
}

function rgb(colour) {
  return remembered(colour, () => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
}

function hex(parts) {
  return "#" + parts.map((part) => Math.round(part).toString(16).padStart(2, "0")).join("");
}

function mix(one, two, share) {
  return remembered(one + two + share, () => {
    const other = rgb(two);
    return hex(rgb(one).map((part, n) => part + (other[n] - part) * share));
  });
}

function ramp(share) {
  const step = Math.round(share * 256) / 256;
  return remembered((dark ? 1000 : 0) + step, () => rampAt(step));
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

// The rows of a view, in the order of memory, and how many are left out.
function rowsOf(plan, view) {
  const made = { pool: poolRows, block: blockRows, page: pageRows, cell: cellRows }[view.level](plan, view);
  made.sort((one, two) => one.start - two.start);
  return { rows: made.slice(0, MOST_ROWS), leftOut: Math.max(0, made.length - MOST_ROWS) };
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
    const box = plan.pages[region.page].block_rows;
    for (const [start] of starts(box, { B: view.block })) rows.push({ start, nbytes: box[1], region });
  }
  for (const box of plan.unused[`${view.stage}/${view.group}`] || []) {
    rows.push({ start: addressOf(box, { B: view.block }), nbytes: box[1], region: null });
  }
  return rows;
}

function pageRows(plan, view) {
  const rows = [];
  for (const box of plan.pages[view.region.page].page_rows) {
    for (const [start] of starts(box, { B: view.block, L: view.index })) {
      rows.push({ start, nbytes: box[1], region: view.region });
    }
  }
  return rows;
}

// Blocks below each other where they are outermost; else what is outside of them.
function poolRows(plan, view) {
  const pool = poolOf(plan, view);
  const first = Math.floor(view.block / BLOCKS_SHOWN) * BLOCKS_SHOWN;
  const count = Math.min(BLOCKS_SHOWN, pool.blocks - first);
  const regions = regionsOf(plan, view);
  const strides = regions.map((region) => axisOf(plan.pages[region.page].block_rows, "B")[2]);
  if (strides.every((stride) => stride === pool.block_bytes || pool.blocks === 1)) {
    return [...Array(count).keys()].map((n) => ({
      start: (first + n) * pool.block_bytes, nbytes: pool.block_bytes, region: regions[0], block: first + n,
    }));
  }
  const rows = [];
  regions.forEach((region, n) => {
    const box = plan.pages[region.page].block_rows;
    for (const [start] of starts(box, { B: first })) {
      if (strides[n] === 0 || strides[n] >= box[1]) rows.push({ start, nbytes: strides[n] * (count - 1) + box[1], region });
    }
  });
  return rows;
}

// The bytes of one cell, a row for every so many; of a recurrent state, one row of its field.
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
    const inner = field.box[2].filter(([axis]) => !outer.includes(axis));
    let item = field.box[1];
    const apart = [];
    for (const [axis, size, stride] of [...inner].sort((one, two) => one[2] - two[2])) {
      if (size === 1) continue;
      if (!apart.length && stride === item) item *= size;
      else apart.push([axis, size, stride]);
    }
    for (const [begin] of starts([addressOf(field.box, at), item, apart], {})) {
      for (let from = 0; from < item; from += width) {
        rows.push({ start: begin + from, nbytes: Math.min(width, item - from), region: view.region, item: field.box[1] });
      }
    }
  }
  return rows;
}

// -- how it is coloured -----------------------------------------------------------------------

// What two neighbouring bytes must share to be drawn as one piece.
function keyOf(point, level) {
  if (!point) return "none";
  if (point.kind !== "field") return point.kind;
  const { at, number } = point;
  if (level === "cell") return `${number}/${point.address - at.rest}`;
  const rows = "N" in at ? `${at.k || 0}/${at.H}/${at.N}` : `${at.H}/${at.T}`;
  return `${at.B}/${at.L}/${number}/${rows}`;
}

const fieldNames = [];

// A number for each field's name, the same in all plans.
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
    return head === null ? 0.35 : head / Math.max(1, (field.shard === "H" ? field.whole : last("H") + 1) - 1);
  }
  const state = stateOf(point);
  return state === null ? 0.35 : state / Math.max(1, (last("N") + 1) * ((axisOf(field.box, "k") || ["k", 1])[1]) - 1);
}

function colourOf(plan, view, point, mode) {
  if (mode === "field") return word(fieldNumber(point.field.name));
  if (mode === "group") return word(point.region.group);
  const base = ramp(shareOf(plan, view, point, mode));
  // A second field of a cell is the same colour, paler: V beside K.
  return point.number % 2 ? mix(base, dark ? "#14161a" : "#ffffff", 0.32) : base;
}

// Whether a point belongs to what is followed.
function follows(point, follow, tpRank) {
  if (!follow) return true;
  if (!point || point.kind !== "field") return false;
  if (follow.kind === "layer") return point.region.layers[point.at.L] === follow.value;
  if (follow.kind === "head") return headOf(point, tpRank) === follow.value;
  const tokens = tokensOf(point);
  return tokens !== null && tokens[0] <= follow.value && follow.value <= tokens[1];
}

// -- painting ---------------------------------------------------------------------------------

function hatch(context, strong) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--hatch-ground");
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = style.getPropertyValue(strong ? "--hatch-line" : "--hatch-faint");
  pen.lineWidth = 1.6;
  for (const by of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(by, 8);
    pen.lineTo(by + 8, 0);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

// Where rows go on a canvas of some width: their height, the scale, and room for labels.
function layOut(rows, width, level) {
  const left = width < 560 ? 64 : width > 2000 ? 170 : 128;
  const widest = Math.max(1, ...rows.map((row) => row.nbytes));
  const target = Math.min(innerHeight * 0.62, 900);
  const height = Math.max(7, Math.min(level === "cell" ? 40 : rows.length < 9 ? 84 : 46, Math.floor(target / Math.max(1, rows.length))));
  const scale = (width - left - 2) / widest;
  return { left, scale, height, gap: height > 12 ? 3 : 1, width, top: 5, total: rows.length * height + 10 };
}

function paintRows(context, plan, view, rows, place, paint) {
  const patterns = { padding: hatch(context, true), unused: hatch(context, false) };
  const style = getComputedStyle(document.documentElement);
  const [ground, mark] = ["--panel", "--mark"].map((name) => style.getPropertyValue(name).trim());
  paint = { ...paint, ground, mark, patterns };
  const painted = new Map(), ratio = window.devicePixelRatio || 1;
  rows.forEach((row, n) => {
    const y = n * place.height + place.top, tall = place.height - place.gap;
    const same = lookOf(plan, view, row, paint);
    if (same !== null && painted.has(same)) {
      const from = [0, painted.get(same) * ratio, context.canvas.width, tall * ratio];
      context.drawImage(context.canvas, ...from, 0, y, context.canvas.width / ratio, tall);
      return;
    }
    painted.set(same, y);
    const pixels = Math.max(1, Math.round(row.nbytes * place.scale));
    let begin = 0, key = null, piece = null, hint = null;
    for (let x = 0; x <= pixels; x++) {
      let point = null, next = "end";
      if (x < pixels) {
        const address = row.start + Math.min(row.nbytes - 1, Math.floor(((x + 0.5) / pixels) * row.nbytes));
        point = find(plan, view.stage, view.group, address, hint);
        if (point && point.region) hint = point;
        next = keyOf(point, view.level);
      }
      if (next === key) continue;
      if (key !== null) {
        const at = { x: place.left + begin, y, wide: x - begin, tall, each: row.nbytes / pixels };
        paintPiece(context, plan, view, piece, at, paint);
      }
      begin = x;
      key = next;
      piece = point;
    }
  });
}

// What decides how a row looks: rows that differ in their layer or block alone are copied.
function lookOf(plan, view, row, paint) {
  const first = find(plan, view.stage, view.group, row.start);
  if (!first || first.kind !== "field" || view.level === "cell") return null;
  const layers = paint.mode === "layer" || (paint.follow && paint.follow.kind === "layer");
  const { B, L, ...inside } = first.at;
  const own = [row.block === view.block, layers ? L : 0];
  return JSON.stringify([first.region.page, first.number, row.nbytes, inside, own]);
}

function paintPiece(context, plan, view, point, at, paint) {
  const { ground, patterns } = paint;
  const wide = at.wide > 5 ? at.wide - 1 : at.wide;
  const shown = follows(point, paint.follow, view.tpRank);
  const here = view.level !== "pool" || !point || point.at.B === view.block;
  if (!point || point.kind !== "field") {
    context.globalAlpha = paint.follow ? 0.4 : 1;
    context.fillStyle = patterns[point ? point.kind : "unused"] || patterns.unused;
    context.fillRect(at.x, at.y, wide, at.tall);
    context.globalAlpha = 1;
    return;
  }
  let colour = at.wide === 1 ? blended(plan, view, point, at.each, paint.mode) : colourOf(plan, view, point, paint.mode);
  if (!shown) colour = mix(ground, colour, 0.13);
  else if (!here && !paint.follow) colour = mix(ground, colour, 0.35);
  context.fillStyle = colour;
  context.fillRect(at.x, at.y, wide, at.tall);
  if (paint.follow && shown) {
    context.fillStyle = paint.mark;
    context.fillRect(at.x, at.y + at.tall - 3, wide, 3);
  }
  const text = at.tall >= 15 && wide > 12 ? pieceLabel(view, point) : "";
  if (text && wide > 7 * text.length + 6) {
    const [red, green, blue] = rgb(colour);
    context.fillStyle = red * 0.3 + green * 0.59 + blue * 0.11 > 140 ? "#10131a" : "#ffffff";
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, at.x + wide / 2, at.y + at.tall / 2);
    context.textAlign = "start";
  }
}

// The colours of all that a pixel covers, mixed: pieces narrower than a pixel make no stripes.
function blended(plan, view, point, each, mode) {
  const sum = [0, 0, 0];
  let found = 0;
  for (const step of [-0.34, 0, 0.33]) {
    const near = findIn(plan, point.region, point.address + Math.round(step * each), point.number);
    if (!near || near.kind !== "field") continue;
    rgb(colourOf(plan, view, near, mode)).forEach((part, n) => { sum[n] += part; });
    found++;
  }
  const [red, green, blue] = sum.map((part) => Math.round(part / found / 8));
  return remembered(red * 4096 + green * 64 + blue + 5000, () => hex([red, green, blue].map((part) => Math.min(255, part * 8))));
}

function pieceLabel(view, point) {
  if (view.level === "cell") {
    const inner = point.field.box[2].filter(([axis]) => !["B", "L", "k", "H", "N"].includes(axis));
    return inner.length ? String(point.at[inner[inner.length - 1][0]]) : "0";
  }
  if (view.level === "pool") return "";
  const head = headOf(point, view.tpRank);
  return head === null ? point.field.name : `${point.field.name} h${head}`;
}

// -- words beside the rows --------------------------------------------------------------------

function shortName(name) {
  const parts = name.split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  if (number < 0) return name;
  const last = parts[parts.length - 1];
  const plain = ["attn", "self_attn", "mixer", "linear_attn"].includes(last);
  return `layer ${parts[number]}${plain ? "" : " " + last}`;
}

// What all of a row has in common, from its first and last byte.
function rowLabel(data, plan, view, row) {
  if (view.level === "pool" && row.block !== undefined) return `block ${row.block.toLocaleString("en")}`;
  if (view.level === "cell") {
    const point = find(plan, view.stage, view.group, row.start);
    return point ? `${point.field.name} +${point.address - cellStart(point)}` : "";
  }
  const ends = [row.start, row.start + row.nbytes - 1].map((at) => find(plan, view.stage, view.group, at));
  const [one, two] = ends;
  if (!one || one.kind === "unused") return "unused";
  if (one.kind === "padding") return "padding";
  const last = two && two.kind === "field" ? two : one;
  if (view.level !== "page" && one.at.L === last.at.L) {
    const name = shortName(data.names[one.region.layers[one.at.L]] || "");
    const heads = [headOf(one, view.tpRank), headOf(last, view.tpRank)];
    const several = axisOf(one.field.box, "H") && axisOf(one.field.box, "H")[1] > 1;
    return several && heads[0] === heads[1] ? `${name} h${heads[0]}` : name;
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
