// The page: what is looked at (`view`), how it is drawn, and what the reader does.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const picture = byId("picture"), pen = picture.getContext("2d");
const LEVELS = ["memory", "pool", "block", "page", "cell"];
const MODES = ["head", "layer", "token", "field", "group"];

let view = { plan: 0, stage: 0, tpRank: 0, group: 0, block: 0, level: "block" };
let paint = { mode: "head", follow: null };
let drawn = { rows: [], place: null, leftOut: 0, memory: [] };
let cursor = null;

const plan = () => data.plans[view.plan];

// -- small helpers ----------------------------------------------------------------------------

function make(tag, text, attributes) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  return element;
}

const count = (number) => number.toLocaleString("en");

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) { bytes /= 1024; unit++; }
  return `${+bytes.toPrecision(3)} ${units[unit]}`;
}

const words = (kind) => kind.replaceAll("_", " ");

// -- drawing ----------------------------------------------------------------------------------

function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
}

function render() {
  dark = isDark();
  const width = byId("stage").clientWidth;
  view.width = width < 560 ? 16 : 32;
  if (view.level === "memory") {
    renderMemory(width);
  } else {
    const { rows, leftOut } = rowsOf(plan(), view);
    const place = layOut(rows, width, view.level);
    drawn = { rows, place, leftOut, memory: [] };
    fitCanvas(picture, width, place.total);
    pen.clearRect(0, 0, width, place.total);
    paintRows(pen, plan(), view, rows, place, paint);
    paintLabels();
  }
  renderCrumbs();
  renderMinimap();
  renderCaption();
  paintCursor();
}

function paintLabels() {
  const { rows, place } = drawn;
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--quiet");
  pen.font = `${place.left < 100 ? 10 : innerWidth > 2000 ? 15 : 12}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const every = Math.max(1, Math.ceil(13 / place.height));
  rows.forEach((row, n) => {
    if (n % every) return;
    const label = rowLabel(data, plan(), view, row);
    const short = place.left < 100 ? label.replace("layer ", "L").replace("tokens ", "t").replace("token ", "t") : label;
    pen.fillText(short, place.left - 8, n * place.height + place.top + (place.height - place.gap) / 2, place.left - 10);
  });
  pen.textAlign = "start";
}

function memoryParts() {
  const machine = data.machine, mine = plan();
  const pools = mine.pools.filter((pool) => pool.stage === view.stage);
  const parts = pools.map((pool) => ({
    name: pools.length > 1 ? `pool ${pool.index}` : "cache pool", bytes: pool.bytes, pool,
    more: `${count(pool.blocks)} blocks of ${count(pool.block_bytes)} bytes`,
  }));
  const cached = pools.reduce((sum, pool) => sum + pool.bytes, 0);
  const slack = { name: "left over", bytes: mine.memory - cached, more: "less than a block, or kept apart" };
  if (!machine) return [...parts, slack];
  const taken = machine.weights + machine.overhead + mine.memory;
  return [
    { name: "weights", bytes: machine.weights, more: `of ${machine.gpu}`, solid: 7 },
    ...parts, slack,
    { name: "overhead", bytes: machine.overhead, more: "contexts, activations, graphs", solid: 3 },
    { name: "not taken", bytes: Math.max(0, machine.memory - taken), more: "left to others" },
  ];
}

function renderMemory(width) {
  const parts = memoryParts(), tall = 200, total = parts.reduce((sum, part) => sum + part.bytes, 0);
  fitCanvas(picture, width, tall + 34);
  pen.clearRect(0, 0, width, tall + 34);
  const faint = hatch(pen, false);
  let x = 0;
  drawn = { rows: [], place: null, leftOut: 0, memory: [] };
  for (const part of parts) {
    const wide = (part.bytes / total) * width;
    pen.fillStyle = part.pool ? word(part.pool.index) : part.solid !== undefined ? word(part.solid) : faint;
    pen.fillRect(x, 2, Math.max(1, wide - 2), tall);
    drawn.memory.push({ ...part, x, wide });
    if (wide > 70) {
      const light = part.pool || part.solid !== undefined;
      pen.fillStyle = light ? "#ffffff" : getComputedStyle(document.documentElement).getPropertyValue("--ink");
      pen.textBaseline = "middle";
      pen.font = "600 14px system-ui, sans-serif";
      pen.fillText(part.name, x + 12, 48, wide - 20);
      pen.font = "12px system-ui, sans-serif";
      pen.fillText(size(part.bytes), x + 12, 70, wide - 20);
    }
    x += wide;
  }
}

function renderMinimap() {
  const canvas = byId("minimap"), width = canvas.clientWidth, mini = canvas.getContext("2d");
  fitCanvas(canvas, width, 14);
  const style = getComputedStyle(document.documentElement), pool = poolOf(plan(), view);
  mini.fillStyle = style.getPropertyValue("--track");
  mini.fillRect(0, 3, width, 8);
  mini.fillStyle = style.getPropertyValue("--accent");
  const stretches = view.level === "memory" ? [{ start: 0, nbytes: pool.bytes }] : drawn.rows;
  for (const row of stretches) {
    const x = (row.start / pool.bytes) * width;
    mini.fillRect(x, 1, Math.max(2, (row.nbytes / pool.bytes) * width), 12);
  }
}

function renderCaption() {
  const notes = [];
  const mine = plan(), pool = poolOf(mine, view);
  if (view.level === "pool") {
    const first = Math.floor(view.block / BLOCKS_SHOWN) * BLOCKS_SHOWN;
    const last = Math.min(pool.blocks, first + BLOCKS_SHOWN) - 1;
    notes.push(`Blocks ${count(first)}–${count(last)} of ${count(pool.blocks)}; the others lie alike.`);
  }
  if (view.level === "memory") notes.push("One rank's memory, to scale.");
  else if (view.level === "cell") notes.push(`Each row is ${view.width} bytes at most; each box one element.`);
  else notes.push("Each row is contiguous memory, to scale; the next row is the next higher address.");
  if (drawn.leftOut) notes.push(`${count(drawn.leftOut)} more rows are alike and not drawn.`);
  const missing = regionsOf(mine, view).reduce((sum, region) => sum + region.left_out, 0);
  if (missing) notes.push(`${count(missing)} more layers are not drawn.`);
  byId("caption").textContent = notes.join(" ");
  renderLegend();
}

function renderLegend() {
  const legend = byId("legend"), mine = plan();
  legend.replaceChildren();
  const entry = (fill, text) => {
    const one = make("span", null, { class: "key" });
    const box = make("i");
    box.style.background = fill;
    one.append(box, text);
    legend.append(one);
  };
  if (view.level === "memory") return;
  const regions = regionsOf(mine, view);
  if (paint.mode === "field") {
    const named = new Set(regions.flatMap((region) => mine.pages[region.page].fields.filter((one) => !one.padding).map((one) => one.name)));
    named.forEach((name) => entry(word(fieldNumber(name)), name));
  } else if (paint.mode === "group") {
    entry(word(view.group), `group ${view.group}, ${words(mine.groups[view.group].kind)}`);
  } else {
    const shown = [0, 0.25, 0.5, 0.75, 1].map(ramp).join(", ");
    entry(`linear-gradient(90deg, ${shown})`, `${paint.mode}, first to last; a cell's second field is paler`);
  }
  entry("var(--hatch)", "padding");
}

const LEVEL_NAMES = {
  memory: () => (data.machine ? data.machine.gpu : "memory"),
  pool: () => `pool ${plan().groups[view.group].pool}`,
  block: () => `block ${count(view.block)}`,
  page: () => shortName(data.names[view.region.layers[view.index]]) + partName(view.region, view.index),
  cell: () => ("N" in view.at ? cellName() : `${view.field.name} row`),
};

function partName(region, index) {
  return region.parts.length ? `, part ${region.parts[index]}` : "";
}

function cellName() {
  const point = { kind: "field", region: view.region, field: view.field, at: view.at };
  const head = headOf(point, view.tpRank), tokens = tokensOf(point);
  return [head === null ? "" : `head ${head}`, tokens ? `token ${tokens[0]}` : ""].filter(Boolean).join(", ") || "cell";
}

function renderCrumbs() {
  const crumbs = byId("crumbs");
  crumbs.replaceChildren();
  LEVELS.slice(0, LEVELS.indexOf(view.level) + 1).forEach((level) => {
    const here = level === view.level;
    const button = make("button", LEVEL_NAMES[level](), here ? { "aria-current": "page" } : {});
    button.addEventListener("click", () => go({ level }));
    crumbs.append(button);
  });
}

// -- moving about ---------------------------------------------------------------------------------

function go(changes) {
  const before = view;
  view = { ...view, ...changes };
  if (view.level === "page" || view.level === "cell") {
    if (!view.region || view.region.group !== view.group) view = { ...view, level: "block" };
  }
  cursor = null;
  byId("tip").hidden = true;
  update();
  if (before.level !== view.level && !stillness()) {
    picture.animate([{ opacity: 0.25, transform: "scale(0.985)" }, { opacity: 1, transform: "none" }], { duration: 180 });
  }
}

function goIn(point, part) {
  if (view.level === "memory") {
    if (part && part.pool) {
      const group = plan().groups.findIndex((one) => one.pool === part.pool.index);
      const stays = plan().groups[view.group].pool === part.pool.index;
      go({ level: "pool", group: stays ? view.group : group });
    }
    return;
  }
  if (!point) return;
  if (view.level === "pool") go({ level: "block", block: point.at.B ?? view.block });
  else if (!point.region || !("L" in point.at)) return;
  else if (view.level === "block") go({ level: "page", region: point.region, index: point.at.L });
  else if (view.level === "page" && point.kind === "field") go({ level: "cell", at: point.at, field: point.field });
}

function goOut() {
  const at = LEVELS.indexOf(view.level);
  if (at > 0) go({ level: LEVELS[at - 1] });
}

const stillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// Another plan, rank, group or block: cells move from where they were to where they are.
function change(changes) {
  const from = cellsShown();
  const next = { ...view, ...changes };
  const mine = data.plans[next.plan];
  next.tpRank = Math.min(next.tpRank, mine.tp - 1);
  next.stage = Math.min(next.stage, mine.ranks / mine.tp - 1);
  if (next.group >= mine.groups.length || !mine.regions.some((one) => one.group === next.group && one.stage === next.stage)) {
    next.group = mine.regions.find((one) => one.stage === next.stage).group;
  }
  const pool = poolOf(mine, next);
  next.block = Math.min(next.block, pool.blocks - 1);
  if (["page", "cell"].includes(next.level)) next.level = "block";
  view = next;
  cursor = null;
  paint.follow = paint.follow && changes.group === undefined ? paint.follow : null;
  update();
  if (view.level === "block" && !stillness()) animate(from, cellsShown());
}

const MOST_MOVING = 4000;

// Where cells are drawn now, by what they are.
function cellsShown() {
  const cells = new Map();
  if (view.level !== "block" || !drawn.place) return cells;
  const mine = plan(), { rows, place } = drawn;
  const order = rows.map((row, n) => [row.start, n]);
  const total = regionsOf(mine, view).reduce((sum, region) => sum + region.layers.length * mine.pages[region.page].fields
    .reduce((n, field) => n + field.box[2].filter(([a]) => "kHN".includes(a)).reduce((m, [, s]) => m * s, 1), 0), 0);
  const skip = Math.max(1, Math.ceil(total / MOST_MOVING));
  for (const region of regionsOf(mine, view)) {
    for (const field of mine.pages[region.page].fields) {
      const inner = field.box[2].filter(([axis]) => !"BLkHN".includes(axis));
      const wide = inner.reduce((most, [, n, stride]) => most + (n - 1) * stride, field.box[1]);
      const box = [field.box[0], wide, field.box[2].filter(([axis]) => "BLkHN".includes(axis))];
      for (const [start, at] of starts(box, { B: view.block })) {
        const state = (at.k || 0) * 4096 + (at.N || 0);
        if (at.L >= region.layers.length || (state + (at.H || 0)) % skip) continue;
        let low = 0, high = order.length - 1;
        while (low < high) { const middle = (low + high + 1) >> 1; if (order[middle][0] <= start) low = middle; else high = middle - 1; }
        const row = rows[low];
        if (!row || start < row.start || start >= row.start + row.nbytes) continue;
        const point = { kind: "field", region, field, number: mine.pages[region.page].fields.indexOf(field), at, address: start };
        cells.set(`${region.layers[at.L]}/${field.name}/${headOf(point, view.tpRank)}/${state}`, {
          x: place.left + (start - row.start) * place.scale, y: low * place.height + place.top,
          wide: Math.max(1, wide * place.scale), tall: place.height - place.gap,
          colour: field.padding ? null : colourOf(mine, view, point, paint.mode), lit: follows(point, paint.follow, view.tpRank),
        });
      }
    }
  }
  return cells;
}

function animate(from, to) {
  const moving = [...to].filter(([key, cell]) => from.has(key) && cell.colour).map(([key, cell]) => [from.get(key), cell]);
  if (!moving.length) return;
  const begin = performance.now(), width = byId("stage").clientWidth, tall = drawn.place.total;
  const token = (animate.token = {});
  const step = (now) => {
    if (animate.token !== token) return;
    const share = Math.min(1, (now - begin) / 650);
    if (share === 1) { render(); return; }
    const eased = share < 0.5 ? 4 * share ** 3 : 1 - (2 - 2 * share) ** 3 / 2;
    pen.clearRect(0, 0, width, tall);
    for (const [one, two] of moving) {
      pen.globalAlpha = two.lit ? 0.95 : 0.15;
      pen.fillStyle = two.colour;
      pen.fillRect(one.x + (two.x - one.x) * eased, one.y + (two.y - one.y) * eased,
        one.wide + (two.wide - one.wide) * eased, one.tall + (two.tall - one.tall) * eased);
    }
    pen.globalAlpha = 1;
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

// -- events ---------------------------------------------------------------------------------------

function update() {
  render();
  byId("title").textContent = data.title;
  byId("answer").textContent = `${plan().label.replace(`${data.title}, `, "")}. ${plan().answer}`;
  showKnobs();
  showFollowed();
  showTransfer();
  showGroups();
  const point = (cursor && cursor.point) || firstPoint();
  if (point) showFacts(point);
}

// The keyboard's place: a row and a share of it.
function setCursor(at, byKeyboard) {
  const { rows, place } = drawn;
  if (!place || !rows.length) return;
  const row = Math.max(0, Math.min(rows.length - 1, at.row));
  const pixels = Math.max(1, Math.round(rows[row].nbytes * place.scale));
  const x = place.left + Math.max(0, Math.min(pixels - 1, Math.floor(at.x * pixels)));
  const y = row * place.height + place.top + (place.height - place.gap) / 2;
  cursor = { row, x: (x - place.left + 0.5) / pixels, point: pointAt(x, y), pixel: [x, y] };
  if (cursor.point) { showFacts(cursor.point); showTip(cursor.point, x, y); }
  if (byKeyboard) { render(); }
}

function paintCursor() {
  if (!cursor || !cursor.pixel || !drawn.place || document.activeElement !== picture) return;
  const [x, y] = cursor.pixel;
  pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
  pen.lineWidth = 2;
  pen.strokeRect(x - 5, y - drawn.place.height / 2, 10, drawn.place.height - 2);
}

function mouse(event) {
  const box = picture.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

picture.addEventListener("mousemove", (event) => {
  const [x, y] = mouse(event);
  if (view.level === "memory") {
    const part = drawn.memory.find((one) => x >= one.x && x < one.x + one.wide);
    byId("tip").hidden = !part;
    if (part) { byId("tip").textContent = `${part.name}: ${count(part.bytes)} bytes, ${part.more}`; byId("tip").style.left = `${Math.max(0, Math.min(x, byId("stage").clientWidth - 330))}px`; byId("tip").style.top = `${y + 18}px`; }
    return;
  }
  const point = pointAt(x, y);
  byId("tip").hidden = !point;
  if (!point) return;
  cursor = { row: Math.floor((y - drawn.place.top) / drawn.place.height), x: 0, point };
  showFacts(point);
  showTip(point, x, y);
});
picture.addEventListener("mouseleave", () => { byId("tip").hidden = true; });
picture.addEventListener("click", (event) => {
  const [x, y] = mouse(event);
  const point = pointAt(x, y);
  if (event.shiftKey && point && point.kind === "field") {
    followKind(paint.follow ? paint.follow.kind : headOf(point, view.tpRank) === null ? "token" : "head", point);
  } else goIn(point, drawn.memory.find((one) => x >= one.x && x < one.x + one.wide));
});

let turned = 0, resting = 0;
picture.addEventListener("wheel", (event) => {
  const inner = view.level === "cell", outer = view.level === "memory";
  if ((event.deltaY < 0 && inner) || (event.deltaY > 0 && outer)) return;
  event.preventDefault();
  if (performance.now() < resting) return;
  turned += event.deltaY;
  if (Math.abs(turned) < 60) return;
  resting = performance.now() + 300;
  const [x, y] = mouse(event);
  if (turned < 0) goIn(pointAt(x, y), drawn.memory.find((one) => x >= one.x && x < one.x + one.wide));
  else goOut();
  turned = 0;
}, { passive: false });

picture.addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key in moves && drawn.place) {
    const [down, right] = moves[event.key], from = cursor && cursor.pixel ? cursor : { row: 0, x: 0 };
    const step = event.shiftKey ? 10 : 1;
    const pixels = drawn.place.width - drawn.place.left;
    setCursor({ row: from.row + down * step, x: from.x + (right * step * 4) / pixels }, true);
  } else if (event.key === "Enter") goIn(cursor && cursor.point, drawn.memory.find((one) => one.pool));
  else if (event.key === "Escape" || event.key === "Backspace") goOut();
  else return;
  event.preventDefault();
});

addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  const last = poolOf(plan(), view).blocks - 1;
  if (event.key === "/") { byId("query").focus(); event.preventDefault(); }
  if (event.key === "[") go({ block: Math.max(0, view.block - 1) });
  if (event.key === "]") go({ block: Math.min(last, view.block + 1) });
});

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const found = search(byId("query").value);
  byId("query").setAttribute("aria-invalid", String(!found));
  if (found) picture.focus({ preventScroll: true });
});
byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  update();
  if (data.route) renderRoute();
});

let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => { render(); if (data.route) renderRoute(); });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { update(); if (data.route) renderRoute(); });

// Where there are no heads to tell apart, tokens or fields say more.
if (!headsHere() || headsHere()[0] === headsHere()[1]) paint.mode = "field";
for (const one of data.plans) for (const page of one.pages) for (const field of page.fields) if (!field.padding) fieldNumber(field.name);
update();
if (data.route) startRoute();
