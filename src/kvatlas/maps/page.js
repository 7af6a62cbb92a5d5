// The page: its state (`view`), the drawing, and the events.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const picture = byId("picture"), pen = picture.getContext("2d");
const LEVELS = ["memory", "pool", "block", "page", "cell"];
const MODES = ["head", "layer", "token", "field"];

let view = { plan: 0, stage: 0, tpRank: 0, group: 0, block: 0, level: "block" };
let paint = { mode: "head", chosen: "", follow: null };
let drawn = { rows: [], labels: [], place: null, every: 1, of: 0, memory: [] };
let cursor = null;
let printing = false;
let pictureWidth = 0; // read once per drawing, because reading it forces a layout of the whole page
let pictureHeight = 0; // of the current or the next picture

const plan = () => data.plans[view.plan];

// -- small helpers ----------------------------------------------------------------------------

function make(tag, text, attributes) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  return element;
}

const numerals = new Intl.NumberFormat("en"); // made once, because making it is slower than formatting
const count = (number) => numerals.format(number);

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) { bytes /= 1024; unit++; }
  return `${+bytes.toPrecision(3)} ${units[unit]}`;
}

// Sets the text of an element. Equal text is not set again, because that would repaint it.
function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

const words = (kind) => kind.replaceAll("_", " ");

// -- drawing ----------------------------------------------------------------------------------

// Sets the size of a canvas, and clears it.
function fitCanvas(canvas, width, height) {
  clearCanvas(canvas, width, height);
  canvas.style.height = `${height}px`;
}

// Clears a canvas of some size. Allocates new memory only if the size differs.
function clearCanvas(canvas, width, height) {
  const ratio = pixelRatio(), context = canvas.getContext("2d");
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
}

// Clears the picture. Its canvas is large enough for any picture, and only the drawn part is visible: a canvas of another size
// would make the browser repaint the whole page.
function clearPicture(width) {
  clearCanvas(picture, width, printing ? pictureHeight : Math.max(pictureHeight, tallestPicture()));
}

// Draws the picture. If cells are about to move, the old picture stays until the animation starts.
function render(moving) {
  if (!pictureWidth) return; // the frame is hidden
  view.width = pictureWidth < 560 ? 16 : 32;
  if (view.level === "memory") renderMemory(pictureWidth);
  else {
    arrange(pictureWidth);
    if (!moving) paintPicture();
  }
}

// Computes the rows and their places.
function arrange(width) {
  const { rows, every, of } = rowsOf(plan(), view);
  const labels = rows.map((row) => rowLabel(data, plan(), view, row)).map((label) => (width < 560 ? shorter(label) : label));
  pen.font = labelFont();
  const left = labels.reduce((most, label) => Math.max(most, pen.measureText(label).width), 0) + rem();
  const place = layOut(rows, width, Math.round(Math.min(left, width * 0.3)), view.level);
  drawn = { rows, labels, place, every, of, memory: [] };
  pictureHeight = place.total;
}

function paintPicture() {
  const { rows, labels, place } = drawn;
  if (!place) return;
  clearPicture(place.width);
  paintRows(pen, plan(), view, rows, place, paint);
  paintLabels(labels, place);
}

const labelFont = () => `${0.86 * rem()}px system-ui, sans-serif`;
const shorter = (label) => label.replace("layer ", "L").replace("tokens ", "t").replace("token ", "t").replace("block ", "b");

function paintLabels(labels, place) {
  pen.fillStyle = styled("--quiet");
  pen.font = labelFont();
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const every = Math.max(1, Math.ceil(rem() / place.height));
  labels.forEach((label, n) => {
    if (n % every) return;
    pen.fillText(label, place.left - rem() / 2, n * place.height + place.top + (place.height - place.gap) / 2, place.left - rem() / 2);
  });
  pen.textAlign = "start";
}

function memoryParts() {
  const machine = data.machine, mine = plan();
  const pools = mine.pools.filter((pool) => pool.stage === view.stage);
  const parts = pools.map((pool) => ({
    name: pools.length > 1 ? `pool ${pool.index}` : "cache pool", bytes: pool.bytes, pool, fill: word(pool.index),
    more: `${count(pool.blocks)} blocks of ${count(pool.block_bytes)} bytes`,
  }));
  const cached = pools.reduce((sum, pool) => sum + pool.bytes, 0);
  const slack = { name: "slack", bytes: mine.memory - cached, more: "less than a block, or reserved" };
  if (!machine) return [...parts, slack];
  const taken = machine.weights + machine.overhead + mine.memory;
  return [
    { name: "weights", bytes: machine.weights, more: ["of the model, on this rank", machine.weights_source, ...machine.weights_warnings].join("; "), fill: word(7) },
    ...parts, slack,
    { name: "overhead", bytes: machine.overhead, more: "contexts, activations, graphs", fill: word(3) },
    { name: "free", bytes: Math.max(0, machine.memory - taken), more: "not used by the engine" },
  ];
}

function renderMemory(width) {
  const parts = memoryParts(), tall = Math.round(innerHeight * 0.48), total = parts.reduce((sum, part) => sum + part.bytes, 0);
  pictureHeight = tall + 4;
  clearPicture(width);
  drawn = { rows: [], labels: [], place: null, every: 1, of: 0, memory: [] };
  let x = 0;
  for (const part of parts) {
    const wide = (part.bytes / total) * width;
    pen.fillStyle = part.fill || hatch(false);
    pen.fillRect(x, 2, Math.max(1, wide - 2), tall);
    drawn.memory.push({ ...part, x, wide });
    pen.font = `600 ${rem()}px system-ui, sans-serif`;
    if (wide > pen.measureText(part.name).width + 24) {
      pen.fillStyle = part.fill ? inkOn(rgb(part.fill)) : styled("--ink");
      pen.textBaseline = "middle";
      pen.fillText(part.name, x + 12, 2.2 * rem());
      pen.font = labelFont();
      pen.fillText(size(part.bytes), x + 12, 3.7 * rem());
    }
    x += wide;
  }
}

// -- moving about ---------------------------------------------------------------------------------

function go(changes) {
  const before = view;
  forgetNotes();
  view = { ...view, ...changes };
  if (view.level === "page" || view.level === "cell") {
    if (!view.region || view.region.group !== view.group) view = { ...view, level: "block" };
  }
  cursor = null;
  byId("tip").hidden = true;
  update();
  if (before.level !== view.level && !stillness()) {
    picture.animate([{ opacity: 0.25 }, { opacity: 1 }], { duration: 180 }); // a fade only, because scaling without a GPU is slower than painting
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

// Shows another plan, rank, group or block. Cells move from their old to their new place.
function change(changes) {
  const from = stillness() || view.level !== "block" ? null : cellsShown();
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
  byId("tip").hidden = true;
  forgetNotes();
  const lit = paint.follow && changes.group === undefined ? runsOf(chosenBy(paint.follow)) : { many: 0 };
  if (lit && !lit.many) paint.follow = null; // the highlighted part is not in the new view
  update(Boolean(from));
  if (from) startMotion(from);
}

// -- events ---------------------------------------------------------------------------------------

// Redraws the picture and the controls at once, and the text in the next frame, so that the response to a click does not
// wait for the text. Until then everything below the picture stays in place, because moving it would repaint it. With
// reduced motion, all is drawn at once.
function update(moving) {
  showPicture(moving);
  if (stillness()) { showWords(); return; }
  wordsDue = true;
  wordsLater(showWords);
}

const wordsLater = later();
let wordsDue = false;

function showPicture(moving) {
  stopMotion();
  readTheme();
  pictureWidth = printing ? PAPER.width : byId("stage").clientWidth;
  paint.mode = modesHere().includes(paint.chosen) ? paint.chosen : bestMode();
  render(moving);
  renderCrumbs();
  showKnobs();
  showCursor();
}

function showWords() {
  wordsDue = false;
  if (!pictureWidth) return;
  picture.style.height = `${pictureHeight}px`;
  say("title", data.route ? `${data.title}: ${routeEnds().map(endName).join(" → ")}` : data.title);
  say("answer", `${summary()} ${plan().answer}`);
  renderMinimap();
  renderCaption();
  showTransfer();
  showGroups();
  const point = (cursor && cursor.point) || firstPoint();
  if (view.level === "memory") showMemory();
  else if (point) showFacts(point);
}

// Sets the keyboard cursor: a row, a position in it from 0 to 1, and the byte if a pixel covers several.
function setCursor(at) {
  const { rows, place } = drawn;
  if (!place || !rows.length) return;
  const row = Math.max(0, Math.min(rows.length - 1, at.row));
  const pixels = Math.max(1, Math.round(rows[row].nbytes * place.scale));
  const x = place.left + Math.max(0, Math.min(pixels - 1, Math.floor(at.x * pixels)));
  const y = row * place.height + place.top + (place.height - place.gap) / 2;
  cursor = { row, x: (x - place.left + 0.5) / pixels, point: at.point || pointAt(x, y), pixel: [x, y] };
  if (cursor.point) { showFacts(cursor.point); showTip(cursor.point, x, y); }
  showCursor();
}

// Shows the keyboard cursor while the picture has the focus. It is a separate element, so that nothing is repainted.
function showCursor() {
  const shown = Boolean(cursor && cursor.pixel && drawn.place), { style } = byId("cursor");
  byId("cursor").hidden = !shown;
  if (!shown) return;
  const [x, y] = cursor.pixel, { height, gap } = drawn.place;
  style.transform = `translate(${x - 5}px, ${y - height / 2}px)`;
  style.height = `${height - gap + 2}px`;
}

picture.addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key in moves && drawn.place) {
    const [down, right] = moves[event.key], from = cursor && cursor.pixel ? cursor : { row: 0, x: 0 };
    const step = event.shiftKey ? 10 : 1;
    const pixels = drawn.place.width - drawn.place.left;
    setCursor({ row: from.row + down * step, x: from.x + (right * step * 4) / pixels });
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

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  updateAll();
});

// Chooses what colours show: heads if they are distinguishable, else tokens for keys and values, else fields.
function bestMode() {
  const heads = headsHere(), fields = regionsOf(plan(), view).flatMap((region) => plan().pages[region.page].fields);
  if (heads && heads[1] > heads[0] && headsAreApart()) return "head";
  return fields.some((field) => axisOf(field.box, "N")) && fields.every((field) => ["k", "v"].includes(field.name)) ? "token" : "field";
}

const NARROWEST_HEAD = 2.5; // pixels; narrower heads flicker

// Returns whether the picture of a pool or block is wide enough to distinguish heads.
function headsAreApart() {
  const heads = axisOf(mainField().field.box, "H"), rows = { pool: poolRows, block: blockRows }[view.level];
  if (!heads || !rows) return true;
  const widest = rows(plan(), view).reduce((most, row) => Math.max(most, row.nbytes), 1);
  return (heads[2] / widest) * pictureWidth > NARROWEST_HEAD;
}

// Returns the colour modes: heads only if there are some.
const modesHere = () => MODES.filter((mode) => mode !== "head" || headsHere());

function updateAll() {
  showPicture();
  showWords();
  if (data.route) renderRoute();
}

let waiting = 0;

// Redraws after the page has its new size.
function updateSoon() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(updateAll);
}

addEventListener("resize", updateSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", updateAll);

// Printing always uses the light theme.
let theme = "";
addEventListener("beforeprint", () => {
  theme = document.documentElement.dataset.theme || "";
  document.documentElement.dataset.theme = "light";
  printing = true;
  updateAll();
});
addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = theme;
  printing = false;
  updateSoon();
});

for (const one of data.plans) for (const page of one.pages) for (const field of page.fields) if (!field.padding) fieldNumber(field.name);
showPicture();
showWords();
if (data.route) startRoute();
// The browser makes a canvas a separate layer when it is drawn on again: do that now, not on the first click.
later()(() => pen.clearRect(0, 0, 1, 1));
