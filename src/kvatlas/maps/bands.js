// The route between two plans: both ends as columns of memory, to scale, and a band for every run,
// coloured by its length.
"use strict";

const CLASSES = [[1024, "under 1 KiB"], [16384, "1 to 16 KiB"], [262144, "16 to 256 KiB"], [Infinity, "256 KiB and more"]];
const STRANDS = {
  light: ["#d55e00", "#e69f00", "#56b4e9", "#0060a0"],
  dark: ["#ff8a3d", "#f5bd41", "#6cc3f2", "#2f86d6"],
};

const FEW = 48, SOME = 400;
const askForBand = () => say("run-facts", `${byHand("Point at", "Tap")} a band to see its source and destination.`);

let shownPair = 0;
let shownRuns = FEW;
let columns = null;

function lengthClass(length) {
  return CLASSES.findIndex(([limit]) => length < limit);
}

function strand(number) {
  return STRANDS[dark ? "dark" : "light"][number];
}

function startRoute() {
  const { check, tokens } = data.route;
  byId("route").hidden = false;
  document.body.classList.add("routed");
  const [src, dst] = routeEnds();
  byId("route-title").textContent = `From ${endName(src)} to ${endName(dst)}`;
  if (!check.ok) {
    byId("route-note").textContent = "No: " + check.reasons.map((one) => `${one.got} (${one.code})`).join("; ") + ".";
    byId("bands").hidden = true;
    return;
  }
  askForBand();
  byId("route-note").textContent =
    `A request of ${count(check.tokens)} tokens takes ${size(check.bytes)} in ${count(check.descriptors)} descriptors if its blocks are scattered${sumOfRuns()}. `
    + `The picture shows its first ${count(tokens)} tokens, both ends to scale: each band is one run, contiguous at both ends. Gaps are memory that is not copied.`;
  showPairs();
  renderRoute();
}

// Explains the number of descriptors as a product, if all pairs and all parts of the request have equally many runs.
function sumOfRuns() {
  const { check, tokens, pairs } = data.route, times = check.tokens / tokens;
  const [first] = pairs, alike = check.pairs.length === pairs.length && pairs.every(({ counted }) => counted === first.counted);
  if (!pairs.length || !alike || first.counted * times * pairs.length !== check.descriptors) return "";
  const among = pairs.length > 1 ? ` × ${pairs.length} pairs of ranks` : "";
  return `: ${count(first.counted)} runs × ${count(times)} blocks of ${count(tokens)} tokens${among}`;
}

function routeEnds() {
  return [data.plans[0], data.plans[Math.min(1, data.plans.length - 1)]];
}

function endName(one) {
  return `${one.knobs.order}, tp ${one.tp}${one.ranks > one.tp ? `, pp ${one.ranks / one.tp}` : ""}, blocks of ${one.knobs.block}`;
}

function showPairs() {
  const table = byId("pairs");
  table.replaceChildren();
  const head = make("tr");
  for (const name of ["from rank", "to rank", "bytes", "descriptors", "median", "largest", "faster"]) head.append(make("th", name, { scope: "col" }));
  table.append(head);
  data.route.check.pairs.forEach((pair, number) => {
    const row = make("tr", null, { tabindex: "0" });
    const cells = [pair.src_rank, pair.dst_rank, size(pair.bytes), count(pair.descriptors), size(pair.median), size(pair.largest), pair.stage ? "staged" : "direct"];
    for (const text of cells) row.append(make("td", text));
    const choose = () => { if (number < data.route.pairs.length) { shownPair = number; askForBand(); markPair(); renderRoute(); } };
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
    table.append(row);
  });
  markPair();
}

// Marks the line of the shown pair. Lines are not replaced, so that the keyboard focus stays.
function markPair() {
  [...byId("pairs").rows].slice(1).forEach((row, number) => row.setAttribute("aria-selected", String(number === shownPair)));
}

// Returns the ranges of one end that the runs cover, one below the other: { pool, start, stop, y }.
function columnOf(runs, end, height) {
  const spans = runs.map((run) => [run[end], run[2 + end], run[2 + end] + run[4]]).sort((one, two) => one[0] - two[0] || one[1] - two[1]);
  const joined = [];
  for (const [pool, start, stop] of spans) {
    const last = joined[joined.length - 1];
    if (last && last.pool === pool && start <= last.stop) last.stop = Math.max(last.stop, stop);
    else joined.push({ pool, start, stop });
  }
  const total = joined.reduce((sum, one) => sum + one.stop - one.start, 0);
  const gap = Math.min(3, (height * 0.25) / Math.max(1, joined.length - 1));
  const scale = (height - gap * (joined.length - 1)) / Math.max(1, total);
  let y = 0;
  for (const one of joined) { one.y = y; y += (one.stop - one.start) * scale + gap; }
  return { joined, scale };
}

function heightAt(column, pool, address) {
  let low = 0, high = column.joined.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1, one = column.joined[middle];
    if (one.pool < pool || (one.pool === pool && one.start <= address)) low = middle; else high = middle - 1;
  }
  const one = column.joined[low];
  return one.y + (address - one.start) * column.scale;
}

// Returns the first runs by source address, as many as the reader chose.
function runsShown(pair) {
  if (!pair.sorted) pair.sorted = [...pair.runs].sort((one, two) => one[0] - two[0] || one[2] - two[2]);
  return pair.sorted.slice(0, shownRuns);
}

function showHowMany(pair) {
  const drawable = pair.runs.length;
  const values = [FEW, SOME].filter((many) => many < drawable).map((many) => [many, `first ${many}`]);
  values.push([Infinity, drawable < pair.counted ? `${count(drawable)} sampled` : `all ${count(drawable)}`]);
  const now = values.some(([many]) => many === shownRuns) ? shownRuns : Infinity;
  byId("shown").hidden = values.length === 1;
  showIn(byId("shown"), [["runs drawn", values, now, (many) => { shownRuns = many; renderRoute(); }]]);
}

function renderRoute() {
  const pair = data.route.pairs[shownPair], canvas = byId("bands"), width = printing ? PAPER.width : canvas.clientWidth;
  if (!pair || !width) return;
  readTheme();
  showHowMany(pair);
  const height = printing ? PAPER.bands : Math.round(Math.max(320, innerHeight * 0.6)), top = 2.2 * rem();
  fitCanvas(canvas, width, height + top + 4);
  const brush = canvas.getContext("2d"), runs = runsShown(pair);
  brush.font = labelFont();
  const ends = [0, 1].map((end) => {
    const column = columnOf(runs, end, height);
    column.labels = labelsOf(column).map(([stretch, middle]) => [stretchLabel(pair, end, stretch), middle]);
    return column;
  });
  const wide = Math.max(0, ...ends.flatMap((column) => column.labels.map(([label]) => brush.measureText(label).width)));
  const bar = Math.max(16, width * 0.03), side = Math.round(Math.min(wide + 10, width * 0.28) + bar);
  columns = { ends, top, side, bar, width, pair, runs };
  ends.forEach((column, end) => paintEnd(brush, column, end));
  bandsLater(null);
  paintBands(brush, 0);
  showLengths(pair);
}

// Paints some bands in each frame, so that the first of thousands are visible at once. Printing paints all in one go.
const BANDS_AT_ONCE = 250;
const bandsLater = later();

function paintBands(brush, first) {
  const { runs } = columns, { canvas } = brush, next = first + (printing || stillness() ? Infinity : BANDS_AT_ONCE);
  brush.globalAlpha = runs.length > 1500 ? 0.16 : runs.length > 200 ? 0.38 : 0.55;
  for (const run of runs.slice(first, next)) {
    brush.fillStyle = strand(lengthClass(run[4]));
    paintBand(brush, run);
  }
  brush.globalAlpha = 1;
  if (next < runs.length) {
    bandsLater(() => paintBands(brush, next));
    return;
  }
  columns.still = document.createElement("canvas");
  columns.still.width = canvas.width;
  columns.still.height = canvas.height;
  columns.still.getContext("2d").drawImage(canvas, 0, 0);
}

// Returns the position and the height of a run at both ends.
function placeOf(run) {
  return columns.ends.map((column, end) => [columns.top + heightAt(column, run[end], run[2 + end]), Math.max(0.8, run[4] * column.scale)]);
}

function paintBand(brush, run) {
  const { side, width } = columns, third = (width - 2 * side) / 3;
  const [[one, oneTall], [two, twoTall]] = placeOf(run);
  brush.beginPath();
  brush.moveTo(side, one);
  brush.bezierCurveTo(side + third, one, width - side - third, two, width - side, two);
  brush.lineTo(width - side, two + twoTall);
  brush.bezierCurveTo(width - side - third, two + twoTall, side + third, one + oneTall, side, one + oneTall);
  brush.fill();
}

// Returns the view of the rank at one end.
function endView(pair, end) {
  const rank = end ? pair.dst_rank : pair.src_rank, { tp } = routeEnds()[end];
  return { stage: Math.floor(rank / tp), tpRank: rank % tp, level: "block" };
}

// Paints one end: its ranges in the colours of the picture above, with labels.
function paintEnd(brush, column, end) {
  const { top, side, bar, width, pair } = columns, one = routeEnds()[end], own = endView(pair, end);
  const left = end ? width - side : side - bar;
  brush.textAlign = end ? "left" : "right";
  brush.textBaseline = "middle";
  let painted = -1; // skips ranges within the last painted pixel
  for (const stretch of column.joined) {
    const bytes = stretch.stop - stretch.start, tall = tallness(column, stretch);
    if (Math.floor(stretch.y + tall) === painted) continue;
    painted = Math.floor(stretch.y + tall);
    for (let y = 0; y < tall; y++) {
      const point = runPoint(end, own, Math.min(stretch.stop - 1, Math.floor(stretch.start + ((y + 0.5) / tall) * bytes)), stretch.pool);
      brush.fillStyle = point ? colourOf(one, own, point, tokensOf(point) ? paint.mode : "field") : "#888888";
      brush.fillRect(left, top + stretch.y + y, bar, Math.min(1, tall - y) + 0.3);
    }
  }
  brush.fillStyle = styled("--quiet");
  brush.font = labelFont();
  for (const [label, middle] of column.labels) {
    brush.fillText(label, end ? left + bar + 8 : left - 8, top + middle, side - bar - 8);
  }
  brush.fillStyle = styled("--ink");
  brush.font = `600 ${rem()}px system-ui, sans-serif`;
  brush.fillText(`${endName(one).split(",")[0]} rank ${end ? pair.dst_rank : pair.src_rank}`, end ? left : left + bar, rem());
  brush.textAlign = "start";
}

const tallness = (column, { start, stop }) => Math.max(0.7, (stop - start) * column.scale);

// Returns the ranges that have space for a label, and the position of the label.
function labelsOf(column) {
  const made = [];
  let free = -Infinity;
  for (const stretch of column.joined) {
    const middle = stretch.y + tallness(column, stretch) / 2;
    if (middle - free < 1.1 * rem()) continue;
    free = middle;
    made.push([stretch, middle]);
  }
  return made;
}

// Labels a range by what its first and last byte have in common.
function stretchLabel(pair, end, stretch) {
  const own = endView(pair, end);
  const [one, two] = [stretch.start, stretch.stop - 1].map((at) => runPoint(end, own, at, stretch.pool));
  if (!one || !two) return "";
  const [first, last] = [one, two].map((point) => shortName(layerName(point.region, point.at.L)));
  const heads = [one, two].map((point) => headOf(point, own.tpRank));
  const tokens = [one, two].map((point) => (tokensOf(point) || [null])[0]);
  const parts = [first === last ? first : `${first.replace("layer", "layers")}–${last.replace("layer ", "")}`];
  if (heads[0] !== null && heads[1] !== null && (heads[0] === heads[1] || first !== last)) {
    parts.unshift(heads[0] === heads[1] ? `head ${heads[0]}` : `heads ${heads[0]}–${heads[1]}`);
  }
  if (tokens[0] !== null && tokens[0] === tokens[1] && first === last) parts.push(`token ${tokens[0]}`);
  return parts.join(", ");
}

// Finds the field at an address of the drawn request. The block determines the group.
function runPoint(end, own, address, pool) {
  const one = routeEnds()[end], tables = data.route.tables[end];
  for (const [group, blocks] of Object.entries(tables)) {
    if (one.groups[group].pool !== pool) continue;
    const point = find(one, own.stage, Number(group), address);
    if (point && point.kind === "field" && blocks.includes(point.at.B)) return point;
  }
  return null;
}

function showLengths(pair) {
  const box = byId("lengths");
  box.replaceChildren();
  const counted = CLASSES.map(() => 0);
  for (const [least, number] of Object.entries(pair.sizes)) counted[lengthClass(Number(least))] += number;
  CLASSES.forEach(([, name], n) => {
    if (counted[n]) box.append(swatch(strand(n), `${count(counted[n])} ${counted[n] === 1 ? "run" : "runs"} ${name}`));
  });
  const part = pair.runs.length < pair.counted ? `, ${count(pair.runs.length)} of them drawn` : "";
  box.append(make("span", `${count(pair.counted)} ${pair.counted === 1 ? "run" : "runs"} carry ${size(pair.nbytes)}${part}.`));
}

function runAt(x, y) {
  const { side, width, runs } = columns;
  const share = Math.max(0, Math.min(1, (x - side) / (width - 2 * side)));
  const eased = share * share * (3 - 2 * share); // the same easing as the curve of a band
  let best = null, least = 12;
  for (const run of runs) {
    const [[one, oneTall], [two, twoTall]] = placeOf(run);
    const begin = one + (two - one) * eased, tall = oneTall + (twoTall - oneTall) * eased;
    const away = y < begin ? begin - y : y > begin + tall ? y - begin - tall : 0;
    if (away < least) { least = away; best = run; }
  }
  return best;
}

function runFacts(run) {
  const { pair } = columns;
  return [0, 1].map((end) => {
    const own = endView(pair, end);
    const point = runPoint(end, own, run[2 + end], run[end]);
    const bytes = `bytes ${count(run[2 + end])} – ${count(run[2 + end] + run[4] - 1)}`;
    if (!point) return bytes;
    const head = headOf(point, own.tpRank), tokens = tokensOf(point);
    return [shortName(layerName(point.region, point.at.L)), point.field.name, head === null ? "" : `head ${head}`,
      tokens ? `token ${tokens[0]} of block ${count(point.at.B)}` : `block ${count(point.at.B)}`, bytes].filter(Boolean).join(", ");
  });
}

byId("bands").addEventListener("mousemove", (event) => {
  if (!columns) return;
  const box = byId("bands").getBoundingClientRect();
  const run = runAt(event.clientX - box.left, event.clientY - box.top), told = byId("run-facts");
  const brush = byId("bands").getContext("2d");
  told.replaceChildren();
  if (columns.still) { // all bands are painted
    brush.clearRect(0, 0, columns.width, box.height);
    brush.drawImage(columns.still, 0, 0, columns.width, box.height);
  }
  if (!run) return;
  if (columns.still) {
    brush.fillStyle = styled("--mark");
    paintBand(brush, run);
  }
  const [from, to] = runFacts(run);
  told.append(make("b", `${count(run[4])} bytes in one run`), make("span", `from ${from}`), make("span", `to ${to}`));
});
