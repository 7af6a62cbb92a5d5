// Rows of memory on a canvas: every pixel is an address, and its colour says what lies there.
"use strict";

// Axes that tell the pieces of a picture apart; at the level of a cell, every element is one.
const BY_CELL = ["B", "L", "k", "H", "N"], BY_STATE = ["B", "L", "H", "T"], BY_ELEMENT = { includes: () => true };

function outerAxes(point, level) {
  return level === "cell" ? BY_ELEMENT : "N" in point.at ? BY_CELL : BY_STATE;
}

// A colour of the style sheet. Asking the browser has it work out all styles: it is asked once for each theme.
function styled(name) {
  return remembered(styled, `${dark} ${name}`, () => getComputedStyle(document.documentElement).getPropertyValue(name).trim());
}

function hatch(strong) {
  return remembered(hatch, `${dark} ${strong} ${rem()}`, () => hatchNow(strong));
}

function hatchNow(strong) {
  const tile = document.createElement("canvas");
  const wide = Math.max(8, Math.round(rem() / 2)); // large letters are read from further away
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

// Of the picture, alone or above a route, and of the route's bands: all of the page shall go on one sheet.
const PAPER = { width: 720, height: 240, letters: 11, aboveRoute: 160, bands: 220 };

// Pixels of a canvas for each of the page's: paper has finer ones than screens.
const pixelRatio = () => (printing ? 2 : window.devicePixelRatio || 1);

// Where rows go on a canvas of some width: their height, the scale, and room for labels.
function layOut(rows, width, left, level) {
  const widest = rows.reduce((most, row) => Math.max(most, row.nbytes), 1);
  const highest = rem() * (level === "cell" ? 2.9 : rows.length < 9 ? 6 : 3.3);
  const [lowest, room] = printing ? [2, data.route ? PAPER.aboveRoute : PAPER.height] : [7, innerHeight * 0.6];
  const height = Math.max(lowest, Math.min(highest, Math.floor(room / Math.max(1, rows.length))));
  return { left, scale: (width - left - 2) / widest, height, gap: height > 12 ? 3 : 1, width, top: 5, total: rows.length * height + 10 };
}

// How often a pixel's bytes are looked up: an answer within a tenth of a second allows so many lookups, and
// more than a few of a pixel are not told apart. Where rows are many, pixels share some.
const FINEST = 4, MANY_LOOKUPS = 16000, MOST_LOOKUPS = 40000;

function lookupsOfPixel(pixels) {
  return Math.min(FINEST, Math.max(MANY_LOOKUPS / pixels, Math.min(0.5, MOST_LOOKUPS / pixels)));
}

// Makes a function that does work once the next frame is on its way. Other work takes its place, null calls it off.
function later() {
  let turn = 0;
  return (work) => {
    const mine = ++turn;
    if (work) requestAnimationFrame(() => setTimeout(() => { if (mine === turn) work(); }));
  };
}

const FRAME_WORK = 20; // milliseconds of a frame that rows are painted in

const rowsLater = later();
let painting = false; // whether rows are left for later

// Rows that look alike are painted once, on a canvas of their own, and copied from there: copying from the picture
// onto itself would have the browser copy the whole of it for each row. Rows that take longer than a frame has are
// painted in the next; paper waits for no frame.
function paintRows(context, plan, view, rows, place, paint) {
  const brush = brushOf(context, paint), ratio = pixelRatio();
  const looks = rows.map((row) => lookOf(plan, view, row, paint)), alike = new Map(), tiles = new Map();
  for (const look of looks) alike.set(look, (alike.get(look) || 0) + 1);
  brush.finest = lookupsOfPixel(alike.size * place.width * ratio);
  const paintOne = (row, n) => {
    const look = looks[n], y = n * place.height + place.top, tall = place.height - place.gap;
    const wide = Math.max(1, Math.round(row.nbytes * place.scale));
    if (alike.get(look) === 1) {
      paintRow(brush, plan, view, [row], { x: place.left, y, wide, tall });
      return;
    }
    if (!tiles.has(look)) {
      drawLines(brush, view); // the tile's lines wait on the same sheet
      tiles.set(look, paintTile(brush, plan, view, row, wide, tall));
    }
    context.drawImage(tiles.get(look), place.left, y, wide, tall);
  };
  const paintFrom = (first) => {
    const until = printing || stillness() ? Infinity : performance.now() + FRAME_WORK;
    let n = first;
    do { paintOne(rows[n], n); n++; } while (n < rows.length && performance.now() < until);
    drawLines(brush, view);
    painting = n < rows.length;
    rowsLater(painting ? () => paintFrom(n) : null);
  };
  if (rows.length) paintFrom(0);
}

function paintTile(brush, plan, view, row, wide, tall) {
  const tile = document.createElement("canvas");
  fitCanvas(tile, wide, tall);
  const own = { ...brush, context: tile.getContext("2d"), lines: [] };
  paintRow(own, plan, view, [row], { x: 0, y: 0, wide, tall });
  drawLines(own, view);
  return tile;
}

// What is needed to paint rows, asked once for each picture.
function brushOf(context, paint) {
  return {
    context, paint, lines: [], ground: styled("--panel"), gap: rgb(styled("--panel")), mark: rgb(styled("--mark")), finest: FINEST,
    font: `${0.8 * rem()}px system-ui, sans-serif`, widths: new Map(), faded: { unlit: new Map(), elsewhere: new Map() },
    patterns: { padding: hatch(true), unused: hatch(false) },
    empty: { padding: rgb(styled("--hatch-line")), unused: rgb(styled("--hatch-ground")) },
  };
}

// Stretches of memory side by side in one line; `at.plain` is one without gaps and words. A pixel has the mean of the
// colours of its bytes, so that pieces narrower than pixels make no stripes of their own. It is seen once
// `drawLines` has drawn what is waiting.
function paintRow(brush, plan, view, stretches, at) {
  const ratio = pixelRatio();
  const pixels = Math.max(1, Math.round(at.wide * ratio));
  const each = stretches.reduce((sum, one) => sum + one.nbytes, 0) / pixels;
  const line = emptyLine(pixels), over = [];
  let before = 0;
  for (const row of stretches) {
    const { start, nbytes } = row, shift = before - start;
    for (const [point, first, last, whole] of piecesOfRow(plan, view, row, each / brush.finest)) {
      const from = (first + shift) / each, to = (last + shift) / each, apart = whole && to - from > 5 && !at.plain ? ratio : 0;
      const [colour, lit] = lookAt(brush, plan, view, point);
      blend(line, colour, lit, from, to - apart);
      if (apart) blend(line, brush.gap, 0, to - apart, to);
      if (whole && to - from > 3) over.push({ point, colour, x: at.x + from / ratio, wide: (to - from - apart) / ratio });
    }
    before += nbytes;
  }
  if (brush.lines.length === LINES_AT_ONCE || strip.width < pixels) drawLines(brush, view);
  writeLine(brush, line, pixels);
  brush.lines.push({ pixels, at, over });
}

// Where what is followed has its mark: the lowest pixels of a row.
function underline(at) {
  const tall = Math.min(3, at.tall);
  return { ...at, y: at.y + at.tall - tall, tall };
}

// The pieces of a stretch: [point, first byte, byte behind, whether it is one piece]. Of tiny ones, one stands for several.
function* piecesOfRow(plan, view, row, least) {
  const { start, nbytes } = row;
  let hint = row, turn = 0;
  for (let at = start; at < start + nbytes;) {
    const point = find(plan, view.stage, view.group, Math.floor(at), hint);
    if (point && point.region) hint = point;
    turn = (turn + 0.618) % 1; // uneven steps do not fall into step with what is drawn
    const end = point ? pieceEnd(point, outerAxes(point, view.level)) : 0, next = at + least * (0.5 + turn);
    const last = Math.min(start + nbytes, Math.max(end, next));
    yield [point, at, last, end >= next];
    at = last;
  }
}

// Sums of colours and of light for every pixel of a line. One line is summed up at a time, in memory that stays.
const sums = { colours: new Float32Array(0), lights: new Float32Array(0) };

function emptyLine(pixels) {
  if (sums.lights.length < pixels) {
    sums.colours = new Float32Array(pixels * 3);
    sums.lights = new Float32Array(pixels);
  }
  return { colours: sums.colours.subarray(0, pixels * 3).fill(0), lights: sums.lights.subarray(0, pixels).fill(0) };
}

// Adds a colour and its light to the pixels between two places, by the part of each that is covered.
function blend({ colours, lights }, [red, green, blue], light, from, to) {
  const last = Math.min(lights.length, to);
  for (let n = Math.max(0, Math.floor(from)); n < last; n++) {
    const share = Math.min(n + 1, to) - Math.max(n, from), at = n * 3;
    colours[at] += red * share;
    colours[at + 1] += green * share;
    colours[at + 2] += blue * share;
    lights[n] += light * share;
  }
}

// Lines wait on a sheet, one below the other, and are given to the browser together: each time costs.
const LINES_AT_ONCE = 16;
const strip = document.createElement("canvas");
strip.height = 2 * LINES_AT_ONCE; // lines, and below them their marks
let sheet = null;

// Writes a line onto the sheet; where something is followed its marks too, as far as pixels are lit.
function writeLine({ lines, paint, mark }, { colours, lights }, pixels) {
  if (strip.width < pixels) strip.width = pixels;
  if (!sheet || sheet.width !== strip.width) sheet = strip.getContext("2d").createImageData(strip.width, strip.height);
  const { data } = sheet, below = LINES_AT_ONCE * sheet.width * 4;
  for (let n = 0, from = 0, to = lines.length * sheet.width * 4; n < pixels; n++, from += 3, to += 4) {
    data[to] = colours[from];
    data[to + 1] = colours[from + 1];
    data[to + 2] = colours[from + 2];
    data[to + 3] = 255;
  }
  if (!paint.follow) return;
  for (let n = 0, to = lines.length * sheet.width * 4 + below; n < pixels; n++, to += 4) {
    data[to] = mark[0];
    data[to + 1] = mark[1];
    data[to + 2] = mark[2];
    data[to + 3] = 255 * lights[n];
  }
}

// Draws the lines that wait, each as high as its row, then what lies over them.
function drawLines(brush, view) {
  const { context, lines, paint } = brush;
  if (!lines.length) return;
  const draw = (n, pixels, at) => context.drawImage(strip, 0, n, pixels, 1, at.x, at.y, at.wide, at.tall);
  strip.getContext("2d").putImageData(sheet, 0, 0, 0, 0, sheet.width, paint.follow ? sheet.height : lines.length);
  context.imageSmoothingEnabled = false;
  lines.forEach(({ pixels, at, over }, n) => {
    draw(n, pixels, at);
    for (const one of over) paintOver(brush, view, one, at);
    if (paint.follow) draw(LINES_AT_ONCE + n, pixels, underline(at));
  });
  lines.length = 0;
}

// The colour of a point as numbers, and whether it is one of those that are followed.
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

// A colour that steps back: what is not followed, and other blocks.
function fade({ faded, ground }, kind, colour) {
  const known = faded[kind];
  if (!known.has(colour)) known.set(colour, rgb(mix(ground, colour, SHARES[kind])));
  return known.get(colour);
}

const NARROWEST_WORD = 10; // pixels

// What only wide pieces have room for: hatching, and words.
function paintOver(brush, view, piece, at) {
  const { context, patterns, paint } = brush, { point, colour, x, wide } = piece;
  if (!point || point.kind !== "field") {
    context.globalAlpha = paint.follow ? 0.4 : 1;
    context.fillStyle = patterns[point ? point.kind : "unused"];
    context.fillRect(x, at.y, wide, at.tall);
    context.globalAlpha = 1;
    return;
  }
  const text = at.tall >= 15 && wide > NARROWEST_WORD && !at.plain ? pieceLabel(view, point) : "";
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

// Dark or light letters, whichever is read better on a colour.
function inkOn(colour) {
  const [red, green, blue] = colour.map((part) => (part / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#10131a" : "#ffffff";
}

// What decides how a row looks: rows that differ in their layer, block or region alone are copied.
function lookOf(plan, view, row, paint) {
  const first = row.region && find(plan, view.stage, view.group, row.start, row);
  if (!first) return `unused ${row.nbytes}`;
  if (first.kind !== "field" || view.level === "cell") return `alone ${row.start}`;
  const layers = paint.mode === "layer" || (paint.follow && paint.follow.kind === "layer");
  const { B, L, ...inside } = first.at;
  const own = [row.block === view.block, layers ? first.region.layers[L] : 0, first.region.parts[L]];
  return JSON.stringify([shapeOf(plan.pages[first.region.page]), first.number, row.nbytes, inside, own]);
}

// A page's fields and padding wherever it lies: the same for regions that are alike.
function shapeOf(page) {
  return remembered(page, "shape", () => {
    const boxes = [...page.fields.map((field) => field.box), page.padding].filter(Boolean);
    const from = ([offset, item, axes]) => [offset - boxes[0][0], item, axes.filter(([axis]) => axis !== "L" && axis !== "B")];
    return JSON.stringify([page.fields.map((field) => [field.name, field.ranges]), boxes.map(from)]);
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
