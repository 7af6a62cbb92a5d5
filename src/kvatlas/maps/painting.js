// Rows of memory on a canvas: every pixel is an address, coloured by its content.
"use strict";

// Returns a colour of the style sheet. Cached per theme, because reading it computes all styles.
function styled(name) {
  return remembered(styled, `${dark} ${name}`, () => getComputedStyle(document.documentElement).getPropertyValue(name).trim());
}

function hatch(strong) {
  return remembered(hatch, `${dark} ${strong} ${rem()}`, () => hatchNow(strong));
}

function hatchNow(strong) {
  const tile = document.createElement("canvas");
  const wide = Math.max(8, Math.round(rem() / 2)); // large text is read from further away
  tile.width = tile.height = wide;
  const pen = tile.getContext("2d");
  pen.fillStyle = styled("--hatch-ground");
  pen.fillRect(0, 0, wide, wide);
  pen.strokeStyle = styled(strong ? "--hatch-line" : "--hatch-faint");
  pen.lineWidth = wide / 5;
  for (const by of [-wide, 0, wide]) {
    pen.beginPath();
    pen.moveTo(by, wide);
    pen.lineTo(by + wide, 0);
    pen.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

// Sizes for printing the picture, alone or above a route, and the bands, so that the page fits on one sheet.
const PAPER = { width: 720, height: 240, letters: 11, aboveRoute: 160, bands: 220 };

// Canvas pixels per page pixel. Paper has a higher resolution than screens.
const pixelRatio = () => (printing ? 2 : window.devicePixelRatio || 1);

// Returns the layout of rows on a canvas of some width: their height, the scale, and the space for labels.
function layOut(rows, width, left, level) {
  const widest = rows.reduce((most, row) => Math.max(most, row.nbytes), 1);
  const highest = rem() * (level === "cell" ? 2.9 : rows.length < 9 ? 6 : 3.3);
  const [lowest, room] = printing ? [2, data.route ? PAPER.aboveRoute : PAPER.height] : [LOWEST_ROW, roomForRows()];
  const height = Math.max(lowest, Math.min(highest, Math.floor(room / Math.max(1, rows.length))));
  return { left, scale: (width - left - 2) / widest, height, gap: height > 12 ? 3 : 1, width, top: ABOVE_ROWS, total: rows.length * height + 2 * ABOVE_ROWS };
}

const LOWEST_ROW = 7, ABOVE_ROWS = 5; // pixels
const roomForRows = () => innerHeight * 0.6;

// Returns the maximum height of any picture on this screen.
const tallestPicture = () => Math.ceil(Math.max(roomForRows(), MOST_ROWS * LOWEST_ROW)) + 2 * ABOVE_ROWS;

// Limits on lookups, so that a picture is drawn within a tenth of a second. More than FINEST lookups per pixel make no
// visible difference. With many rows, pixels share lookups. A row is painted in one go, so it has its own limit.
const FINEST = 4, ROW_LOOKUPS = 4000, MANY_LOOKUPS = 16000, MOST_LOOKUPS = 40000;

function lookupsOfPixel(rows, width) {
  const pixels = rows * width;
  return Math.min(FINEST, ROW_LOOKUPS / width, Math.max(MANY_LOOKUPS / pixels, Math.min(0.5, MOST_LOOKUPS / pixels)));
}

// Makes a function that runs work after the next frame. New work replaces pending work; null cancels it.
function later() {
  let turn = 0;
  return (work) => {
    const mine = ++turn;
    if (work) requestAnimationFrame(() => setTimeout(() => { if (mine === turn) work(); }));
  };
}

// Milliseconds of painting before the first frame, for which the reader waits, and before each later frame.
const FIRST_WORK = 10, FRAME_WORK = 24;

const rowsLater = later();
let painting = false; // whether rows remain to be painted

// Paints identical rows together. Rows that exceed the time of a frame are painted in the next one. Printing paints all in
// one go.
function paintRows(context, plan, view, rows, place, paint) {
  const brush = brushOf(context, paint), groups = alikeRows(plan, view, rows, place, paint);
  const cuts = new Set(groups.map(({ shape }) => shape)).size; // a row whose shape is known takes a quarter of the time
  brush.finest = lookupsOfPixel(Math.max(cuts, groups.length / 4), place.width * pixelRatio());
  const paintFrom = (first) => {
    const until = printing || stillness() ? Infinity : performance.now() + (first ? FRAME_WORK : FIRST_WORK);
    let n = first;
    do { paintAlike(brush, plan, view, groups[n]); n++; } while (n < groups.length && performance.now() < until);
    drawLines(brush, view);
    painting = n < groups.length;
    rowsLater(painting ? () => paintFrom(n) : null);
  };
  if (groups.length) paintFrom(0);
}

// Groups identical rows: one row of each look, and all places.
function alikeRows(plan, view, rows, place, paint) {
  const groups = new Map();
  rows.forEach((row, n) => {
    const look = lookOf(plan, view, row, paint), known = groups.get(look.look) || { ...look, row, places: [] };
    const y = n * place.height + place.top, wide = Math.max(1, Math.round(row.nbytes * place.scale));
    known.places.push({ x: place.left, y, wide, tall: place.height - place.gap });
    groups.set(look.look, known);
  });
  return [...groups.values()];
}

const FEW_OVER = 4; // labels and hatches that are drawn in each row instead of copied

// Paints identical rows. A row with many labels is painted once, on a separate canvas, and copied from there: copying within
// the picture would make the browser copy the whole picture for each row.
function paintAlike(brush, plan, view, group) {
  const { shape, row, places } = group, [{ wide, tall }] = places;
  const known = brush.cuts.get(shape) || cutLine(brush, plan, view, [row], places[0]);
  const over = known.pieces.filter((piece) => isOver(piece, places[0])).length;
  if (places.length === 1 || over <= FEW_OVER) { paintCut(brush, plan, view, group, known, places); return; }
  drawLines(brush, view); // the lines of the tile use the same sheet
  const tile = document.createElement("canvas"), own = { ...brush, context: tile.getContext("2d", UNSEEN), lines: [] };
  fitCanvas(tile, wide, tall);
  paintCut(own, plan, view, group, known, [{ x: 0, y: 0, wide, tall }]);
  drawLines(own, view);
  for (const { x, y } of places) brush.context.drawImage(tile, x, y, wide, tall);
}

// Paints a row of pieces. Rows of one shape are divided once: they differ only in their layer, so for later rows only one
// piece of each kind is looked up.
function paintCut(brush, plan, view, { shape, first }, cut, places) {
  if (!brush.cuts.has(shape)) {
    brush.cuts.set(shape, Object.assign(cut, { first }));
    paintLine(brush, view, cut, ({ point }) => lookAt(brush, plan, view, point), places);
    return;
  }
  cut.kinds ||= kindsOf(brush, plan, view, cut.pieces);
  const looks = cut.kinds.map((point) => lookAt(brush, plan, view, inLayerOf(plan, first, cut.first, point)));
  paintLine(brush, view, cut, ({ kind }) => looks[kind], places);
}

// Collects colours, fonts and caches for painting rows, once per picture.
function brushOf(context, paint) {
  return {
    context, paint, lines: [], ground: styled("--panel"), gap: rgb(styled("--panel")), mark: rgb(styled("--mark")), finest: FINEST,
    cuts: new Map(), font: `${0.8 * rem()}px system-ui, sans-serif`, widths: new Map(), faded: { unlit: new Map(), elsewhere: new Map() },
    patterns: { padding: hatch(true), unused: hatch(false) },
    empty: { padding: rgb(styled("--hatch-line")), unused: rgb(styled("--hatch-ground")) },
  };
}

// Returns the colour of a point as numbers, and whether it is highlighted.
function lookAt(brush, plan, view, point) {
  const { paint, empty } = brush;
  if (!point || point.kind !== "field") return [empty[point ? point.kind : "unused"], 0];
  const colour = colourOf(plan, view, point, paint.mode);
  const lit = follows(point, paint.follow, view.tpRank);
  const here = view.level !== "pool" || point.at.B === view.block;
  const shown = !lit ? fade(brush, "unlit", colour) : !here && !paint.follow ? fade(brush, "elsewhere", colour) : rgb(colour);
  return [shown, Number(Boolean(paint.follow && lit))];
}

const SHARES = { unlit: 0.13, elsewhere: 0.35 };

// Returns a faded colour, for parts that are not highlighted and for other blocks.
function fade({ faded, ground }, kind, colour) {
  const known = faded[kind];
  if (!known.has(colour)) known.set(colour, rgb(mix(ground, colour, SHARES[kind])));
  return known.get(colour);
}

const NARROWEST_HATCH = 3, NARROWEST_WORD = 10, LOWEST_WORD = 15; // pixels

// Returns whether a piece is large enough for hatching or a label.
function isOver({ point, from, to, whole }, { tall, plain }) {
  const hatched = !point || point.kind !== "field";
  return whole && (hatched ? to - from > NARROWEST_HATCH : to - from > NARROWEST_WORD && tall >= LOWEST_WORD && !plain);
}

// Draws hatching or a label over a piece.
function paintOver(brush, view, piece, at) {
  const { context, patterns, paint } = brush, { point, colour, wide } = piece, x = at.x + piece.from;
  if (!point || point.kind !== "field") {
    context.globalAlpha = paint.follow ? 0.4 : 1;
    context.fillStyle = patterns[point ? point.kind : "unused"];
    context.fillRect(x, at.y, wide, at.tall);
    context.globalAlpha = 1;
    return;
  }
  const text = wide > NARROWEST_WORD ? pieceLabel(view, point) : "";
  if (!text || wordWidth(brush, text) > wide - 6) return;
  context.font = brush.font;
  context.fillStyle = inkOn(colour);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x + wide / 2, at.y + at.tall / 2);
  context.textAlign = "start";
}

function wordWidth({ context, font, widths }, text) {
  if (!widths.has(text)) {
    context.font = font;
    widths.set(text, context.measureText(text).width);
  }
  return widths.get(text);
}

// Returns dark or light text, whichever is more readable on a colour.
function inkOn(colour) {
  const [red, green, blue] = colour.map((part) => (part / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#10131a" : "#ffffff";
}

// Returns keys for the shape and the look of a row, and its first byte. Rows of one shape differ only in layer, block or
// region; rows of one look do not differ.
function lookOf(plan, view, row, paint) {
  const first = row.region && find(plan, view.stage, view.group, row.start, row);
  if (!first) return lookNamed(`unused ${row.nbytes}`, "", null);
  if (first.kind !== "field" || view.level === "cell") return lookNamed(`alone ${row.start}`, "", first);
  const { B, L, ...inside } = first.at, page = plan.pages[first.region.page];
  const { parts, tokens_per_state } = first.region;
  const shape = JSON.stringify([shapeOf(page), first.number, row.nbytes, inside, row.block === view.block, parts[L], tokens_per_state]);
  return lookNamed(shape, layerLook(page, view, row, first, paint), first);
}

function lookNamed(shape, layer, first) {
  return { shape, look: `${shape} ${layer}`, first };
}

// Returns how the layer affects the look of a row: its colour, or whether it is highlighted.
function layerLook(page, view, row, { region, at }, { mode, follow }) {
  const layer = region.layers[at.L], alone = view.level === "page" || (row.block === undefined && page.block_rows.every((box) => axisOf(box, "L")));
  if (mode === "layer" || (follow && follow.kind === "layer" && !alone)) return layer;
  return follow && follow.kind === "layer" ? layer === follow.value : "";
}

// Numbers the kinds of pieces in a line, and returns one point of each kind.
function kindsOf({ paint }, plan, view, pieces) {
  const numbers = new Map(), points = [];
  for (const piece of pieces) {
    const { point } = piece, key = kindOf(plan, view, point, paint);
    if (!numbers.has(key)) { numbers.set(key, points.length); points.push(point); }
    piece.kind = numbers.get(key);
  }
  return points;
}

function kindOf(plan, view, point, { mode, follow }) {
  if (!point || point.kind !== "field") return point ? point.kind : "";
  const lit = !follow || follow.kind === "layer" || follows(point, follow, view.tpRank);
  return [point.number, point.at.L, lit, point.at.B === view.block, mode === "layer" ? "" : colourOf(plan, view, point, mode)].join(" ");
}

// Translates a point of one row to another row of the same shape, by the first bytes of both.
function inLayerOf(plan, first, known, point) {
  if (!point || point.kind !== "field") return point;
  const { region } = first, page = plan.pages[region.page], L = point.at.L + first.at.L - known.at.L;
  return { ...point, region, page, field: page.fields[point.number], at: { ...point.at, L } };
}

let shapes = 0;

// Returns a number for the fields and padding of a page, independent of its address: equal for identical regions.
function shapeOf(page) {
  return remembered(page, "shape", () => {
    const boxes = [...page.fields.map((field) => field.box), page.padding].filter(Boolean);
    const from = ([offset, item, axes]) => [offset - boxes[0][0], item, axes.filter(([axis]) => axis !== "L" && axis !== "B")];
    const text = JSON.stringify([page.fields.map((field) => [field.name, field.ranges]), boxes.map(from)]);
    return remembered(shapeOf, text, () => ++shapes);
  });
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
