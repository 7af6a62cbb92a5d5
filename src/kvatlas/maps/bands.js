// Two plans and the route between them: both ends as columns of memory, to scale, and a band
// for every run from one to the other, coloured by its length.
"use strict";

const CLASSES = [[1024, "under 1 KiB"], [16384, "1 to 16 KiB"], [262144, "16 to 256 KiB"], [Infinity, "256 KiB and more"]];
const STRANDS = {
  light: ["#d55e00", "#e69f00", "#56b4e9", "#0060a0"],
  dark: ["#ff8a3d", "#f5bd41", "#6cc3f2", "#2f86d6"],
};

let shownPair = 0;
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
  const [src, dst] = routeEnds();
  byId("route-title").textContent = `From ${endName(src)} to ${endName(dst)}`;
  if (!check.ok) {
    byId("route-note").textContent = "No: " + check.reasons.map((one) => `${one.got} (${one.code})`).join("; ") + ".";
    byId("bands").hidden = true;
    return;
  }
  byId("route-note").textContent =
    `A request of ${count(check.tokens)} tokens is ${size(check.bytes)} in ${count(check.descriptors)} descriptors, its blocks scattered. `
    + `Drawn are its first ${count(tokens)} tokens: each band is one run, contiguous at both ends.`;
  showPairs();
  renderRoute();
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
  for (const name of ["from rank", "to rank", "bytes", "descriptors", "median", "largest", "better"]) head.append(make("th", name));
  table.append(head);
  data.route.check.pairs.forEach((pair, number) => {
    const row = make("tr", null, { "aria-selected": String(number === shownPair), tabindex: "0" });
    const cells = [pair.src_rank, pair.dst_rank, size(pair.bytes), count(pair.descriptors), size(pair.median), size(pair.largest), pair.stage ? "staged" : "direct"];
    for (const text of cells) row.append(make("td", text));
    const choose = () => { if (number < data.route.pairs.length) { shownPair = number; showPairs(); renderRoute(); } };
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
    table.append(row);
  });
}

// Stretches of one end that the runs touch, one below the other: [pool, start, stop, y].
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

function renderRoute() {
  const pair = data.route.pairs[shownPair];
  if (!pair) return;
  const canvas = byId("bands"), width = canvas.parentElement.clientWidth;
  const height = Math.min(620, Math.max(360, innerHeight * 0.6)), top = 30, side = Math.max(64, Math.min(180, width * 0.16));
  fitCanvas(canvas, width, height + top + 12);
  const brush = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  brush.clearRect(0, 0, width, height + top + 12);
  const ends = [columnOf(pair.runs, 0, height), columnOf(pair.runs, 1, height)];
  columns = { ends, top, side, width, pair };
  const faint = pair.runs.length > 1500 ? 0.16 : pair.runs.length > 200 ? 0.38 : 0.62;
  for (const [srcPool, dstPool, src, dst, length] of pair.runs) {
    const one = top + heightAt(ends[0], srcPool, src), two = top + heightAt(ends[1], dstPool, dst);
    const tall = [Math.max(0.6, length * ends[0].scale), Math.max(0.6, length * ends[1].scale)];
    const middle = width / 2;
    brush.globalAlpha = faint;
    brush.fillStyle = strand(lengthClass(length));
    brush.beginPath();
    brush.moveTo(side, one);
    brush.bezierCurveTo(middle, one, middle, two, width - side, two);
    brush.lineTo(width - side, two + tall[1]);
    brush.bezierCurveTo(middle, two + tall[1], middle, one + tall[0], side, one + tall[0]);
    brush.fill();
  }
  brush.globalAlpha = 1;
  ends.forEach((column, end) => paintEnd(brush, pair, column, end));
  brush.fillStyle = style.getPropertyValue("--ink");
  brush.font = "600 13px system-ui, sans-serif";
  brush.textBaseline = "alphabetic";
  brush.fillText(`rank ${pair.src_rank}`, 0, 18);
  brush.textAlign = "right";
  brush.fillText(`rank ${pair.dst_rank}`, width, 18);
  brush.textAlign = "start";
  showLengths(pair);
}

// An end, coloured by head as the picture above is.
function paintEnd(brush, pair, column, end) {
  const { top, side, width } = columns, one = routeEnds()[end];
  const left = end ? width - side + 3 : 0, wide = side - 3;
  const rank = end ? pair.dst_rank : pair.src_rank;
  const own = { stage: Math.floor(rank / one.tp), tpRank: rank % one.tp, level: "block" };
  for (const stretch of column.joined) {
    const tall = Math.max(0.7, (stretch.stop - stretch.start) * column.scale);
    for (let y = 0; y < tall; y++) {
      const address = Math.min(stretch.stop - 1, Math.floor(stretch.start + ((y + 0.5) / tall) * (stretch.stop - stretch.start)));
      const point = runPoint(end, own, address, stretch.pool);
      brush.fillStyle = point ? colourOf(one, own, point, paint.mode === "group" ? "head" : paint.mode) : "#888888";
      brush.fillRect(left, top + stretch.y + y, wide, Math.min(1, tall - y) + 0.3);
    }
  }
}

// What lies at an address of the drawn request: its block says which group holds it.
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
    if (!counted[n]) return;
    const one = make("span", null, { class: "key" }), swatch = make("i");
    swatch.style.background = strand(n);
    one.append(swatch, `${count(counted[n])} ${counted[n] === 1 ? "run" : "runs"} ${name}`);
    box.append(one);
  });
  const part = pair.runs.length < pair.counted ? `, ${count(pair.runs.length)} of them drawn` : "";
  box.append(make("span", `${count(pair.counted)} ${pair.counted === 1 ? "run" : "runs"} carry ${size(pair.nbytes)}${part}.`));
}

function runAt(x, y) {
  const { ends, top, side, width, pair } = columns;
  const share = Math.max(0, Math.min(1, (x - side) / (width - 2 * side)));
  const eased = share * share * (3 - 2 * share);
  let best = null, least = 12;
  for (const run of pair.runs) {
    const one = heightAt(ends[0], run[0], run[2]), two = heightAt(ends[1], run[1], run[3]);
    const begin = top + one + (two - one) * eased, tall = run[4] * (ends[0].scale + (ends[1].scale - ends[0].scale) * eased);
    const away = y < begin ? begin - y : y > begin + tall ? y - begin - tall : 0;
    if (away < least) { least = away; best = run; }
  }
  return best;
}

function runFacts(run) {
  const { pair } = columns;
  return [pair.src_rank, pair.dst_rank].map((rank, end) => {
    const one = routeEnds()[end], own = { stage: Math.floor(rank / one.tp), tpRank: rank % one.tp };
    const point = runPoint(end, own, run[2 + end], run[end]);
    const bytes = `bytes ${count(run[2 + end])} – ${count(run[2 + end] + run[4] - 1)}`;
    if (!point) return bytes;
    const head = headOf(point, own.tpRank), tokens = tokensOf(point);
    return [shortName(data.names[point.region.layers[point.at.L]]), point.field.name, head === null ? "" : `head ${head}`,
      tokens ? `token ${tokens[0]} of block ${count(point.at.B)}` : `block ${count(point.at.B)}`, bytes].filter(Boolean).join(", ");
  });
}

byId("bands").addEventListener("mousemove", (event) => {
  if (!columns) return;
  const box = byId("bands").getBoundingClientRect();
  const run = runAt(event.clientX - box.left, event.clientY - box.top), told = byId("run-facts");
  told.replaceChildren();
  if (!run) return;
  const [from, to] = runFacts(run);
  told.append(make("b", `${count(run[4])} bytes in one run`), make("span", `from ${from}`), make("span", `to ${to}`));
});
