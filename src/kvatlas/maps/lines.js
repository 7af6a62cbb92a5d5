// Lines of pixels: memory is divided into pieces, a pixel gets the mean colour of its bytes, and lines are collected on a
// sheet and drawn together.
"use strict";

// Axes that separate the pieces of a picture. In a cell every element is a piece, in a strip every page.
const BY_CELL = ["B", "L", "k", "H", "N"], BY_STATE = ["B", "L", "H", "T"], BY_PAGE = ["B", "L"], BY_ELEMENT = { includes: () => true };

function outerAxes(point, level) {
  return level === "cell" ? BY_ELEMENT : level === "strip" ? BY_PAGE : "N" in point.at ? BY_CELL : BY_STATE;
}

// Yields the pieces of a range: [point, first byte, end, whether it is one piece]. Bytes are relative to the start of the
// range, so that identical ranges have identical pieces. One tiny piece stands for several.
function* piecesOfRow(plan, view, row, least) {
  const { start, nbytes } = row;
  let hint = row, turn = 0;
  if (row.point) { yield [row.point, 0, nbytes, nbytes >= least]; return; }
  for (let at = 0; at < nbytes;) {
    const point = find(plan, view.stage, view.group, start + Math.floor(at), hint);
    if (point && point.region) hint = point;
    turn = (turn + 0.618) % 1; // uneven steps avoid aliasing with the pattern of the pieces
    const end = point ? pieceEnd(point, outerAxes(point, view.level)) - start : 0, next = at + least * (0.5 + turn);
    const last = Math.min(nbytes, Math.max(end, next));
    yield [point, at, last, end >= next];
    at = last;
  }
}

// Returns the pieces of adjacent ranges in one line: the point, begin and end in pixels, whether it is one piece, and the
// gap after it in pixels. `plain` omits the gaps.
function cutLine(brush, plan, view, stretches, { wide, plain }) {
  const ratio = pixelRatio(), pixels = Math.max(1, Math.round(wide * ratio)), pieces = [];
  const each = stretches.reduce((sum, one) => sum + one.nbytes, 0) / pixels;
  let before = 0;
  for (const row of stretches) {
    for (const [point, first, last, whole] of piecesOfRow(plan, view, row, each / brush.finest)) {
      const from = (before + first) / each, to = (before + last) / each;
      pieces.push({ point, from, to, whole, gap: whole && to - from > 5 && !plain ? ratio : 0 });
    }
    before += row.nbytes;
  }
  return { pixels, pieces };
}

// Colours the pieces of a line, for all places where it is drawn. `lookOfPiece` returns colour and light of a piece. A pixel
// has the mean colour of its bytes, so that pieces narrower than a pixel cause no stripes. `drawLines` makes the line visible.
function paintLine(brush, view, { pixels, pieces }, lookOfPiece, places) {
  const line = emptyLine(pixels), over = [], ratio = pixelRatio();
  for (const piece of pieces) {
    const { point, from, to, gap } = piece, [colour, lit] = lookOfPiece(piece);
    blend(line, colour, lit, from, to - gap);
    if (gap) blend(line, brush.gap, 0, to - gap, to);
    if (isOver(piece, places[0])) over.push({ point, colour, from: from / ratio, wide: (to - from - gap) / ratio });
  }
  if (brush.lines.length === LINES_AT_ONCE || strip.width < pixels) drawLines(brush, view);
  writeLine(brush, line, pixels);
  brush.lines.push({ pixels, places, over });
}

// Sums of colours and of light for every pixel of a line. The memory is reused, because only one line is summed at a time.
const sums = { colours: new Float32Array(0), lights: new Float32Array(0) };

function emptyLine(pixels) {
  if (sums.lights.length < pixels) {
    sums.colours = new Float32Array(pixels * 3);
    sums.lights = new Float32Array(pixels);
  }
  return { colours: sums.colours.subarray(0, pixels * 3).fill(0), lights: sums.lights.subarray(0, pixels).fill(0) };
}

// Adds a colour and its light to the pixels between two positions, weighted by coverage.
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

// Lines are collected on a sheet, one below the other, and drawn together, because each call to the browser is expensive.
const LINES_AT_ONCE = 16;
const UNSEEN = { willReadFrequently: true }; // keeps a canvas that is only a copy source in main memory
const strip = document.createElement("canvas"), stripPen = strip.getContext("2d", UNSEEN);
strip.height = 2 * LINES_AT_ONCE; // lines, and below them their marks
let sheet = null;

// Writes a line to the sheet, and its marks if something is highlighted.
function writeLine({ lines, paint, mark }, { colours, lights }, pixels) {
  if (strip.width < pixels) strip.width = pixels;
  if (!sheet || sheet.width !== strip.width) sheet = stripPen.createImageData(strip.width, strip.height);
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

// Draws the collected lines, each as high as its row, and then hatching and labels over them.
function drawLines(brush, view) {
  const { context, lines, paint } = brush;
  if (!lines.length) return;
  const draw = (n, pixels, at) => context.drawImage(strip, 0, n, pixels, 1, at.x, at.y, at.wide, at.tall);
  stripPen.putImageData(sheet, 0, 0, 0, 0, sheet.width, paint.follow ? sheet.height : lines.length);
  context.imageSmoothingEnabled = false;
  lines.forEach(({ pixels, places, over }, n) => {
    for (const at of places) {
      draw(n, pixels, at);
      for (const one of over) paintOver(brush, view, one, at);
      if (paint.follow) draw(LINES_AT_ONCE + n, pixels, underline(at));
    }
  });
  lines.length = 0;
}

// Returns the place of the highlight mark: the lowest pixels of a row.
function underline(at) {
  const tall = Math.min(3, at.tall);
  return { ...at, y: at.y + at.tall - tall, tall };
}
