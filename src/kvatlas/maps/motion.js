// From one plan to another: cells move from where they were to where they are.
"use strict";

const MOST_MOVING = 800; // cells: they are found before the first frame of a motion

const motionLater = later();
let motion = 0; // the frame that is asked for, if any was
let inMotion = false;

// Has cells move from where they were. A motion begins with the picture as it was, so the first frame, for which a reader
// waits, shows the controls alone.
function startMotion(from) {
  inMotion = true;
  motionLater(() => animate(from, cellsShown()));
}

// Ends what goes on from frame to frame: a motion, and rows that are still to be painted.
function stopMotion() {
  cancelAnimationFrame(motion);
  motion = 0;
  motionLater(null);
  inMotion = false;
  rowsLater(null);
  painting = false;
}

// Where cells are drawn now, by what they are. One picture is asked twice: when it comes, and when it goes.
function cellsShown() {
  drawn.cells ||= view.level === "block" && drawn.place ? findCells() : new Map();
  return drawn.cells;
}

function findCells() {
  const cells = new Map(), mine = plan(), { rows, place: { left, top, height, gap, scale } } = drawn;
  const fields = regionsOf(mine, view).flatMap((region) => mine.pages[region.page].fields
    .filter((field) => !field.padding).map((field) => ({ region, field, sizes: sizesIn(region, field) })));
  const total = fields.reduce((sum, { sizes }) => sum + sizes.reduce((all, many) => all * many, 1), 0);
  const skip = Math.ceil(total / MOST_MOVING) | 1; // odd: it does not fall into step with heads or tokens
  for (const { region, field, sizes } of fields) {
    const inner = field.box[2].filter(([axis]) => !"BLkHN".includes(axis));
    const nbytes = inner.reduce((most, [, n, stride]) => most + (n - 1) * stride, field.box[1]);
    const wide = Math.max(1, nbytes * scale), tall = height - gap;
    const named = ["k", "H", "N"].filter((axis) => axisOf(field.box, axis));
    for (const coordinates of everyOf(sizes, skip)) {
      const at = { B: view.block, L: coordinates.L };
      for (const axis of named) at[axis] = coordinates[axis];
      const address = addressOf(field.box, at), n = rowAt(rows, address);
      if (n < 0) continue;
      const point = { kind: "field", region, field, at, address };
      const key = `${region.layers[at.L]}/${field.name}/${headOf(point, view.tpRank)}/${at.k}/${at.N}`;
      cells.set(key, { point, x: left + (address - rows[n].start) * scale, y: n * height + top, wide, tall });
    }
  }
  return cells;
}

function sizesIn(region, field) {
  return [region.layers.length, ...["k", "H", "N"].map((name) => (axisOf(field.box, name) || [name, 1])[1])];
}

// Every so manieth coordinate of L, k, H and N.
function* everyOf([layers, parts, heads, states], skip) {
  const total = layers * parts * heads * states;
  for (let n = 0; n < total; n += skip) {
    const rest = Math.floor(n / states), head = rest % heads, outer = Math.floor(rest / heads);
    yield { L: Math.floor(outer / parts), k: outer % parts, H: head, N: n % states };
  }
}

// The row that has an address, -1 for none.
function rowAt(rows, address) {
  let low = 0, high = rows.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rows[middle].start <= address) low = middle; else high = middle - 1;
  }
  const row = rows[low];
  return row && address >= row.start && address < row.start + row.nbytes ? low : -1;
}

function animate(from, to) {
  const moving = [...to].filter(([key]) => from.has(key)).map(([key, cell]) => ({
    one: from.get(key), two: cell, colour: colourOf(plan(), view, cell.point, paint.mode), lit: follows(cell.point, paint.follow, view.tpRank),
  }));
  if (!moving.length) { endMotion(); return; }
  const begin = performance.now(), { width } = drawn.place;
  const step = (now) => {
    const share = Math.max(0, Math.min(1, (now - begin) / 650)); // a frame's time may lie before what asked for it
    if (share === 1) { endMotion(); return; }
    const eased = share < 0.5 ? 4 * share ** 3 : 1 - (2 - 2 * share) ** 3 / 2;
    clearPicture(width);
    for (const { one, two, colour, lit } of moving) {
      pen.globalAlpha = lit ? 0.95 : 0.15;
      pen.fillStyle = colour;
      pen.fillRect(one.x + (two.x - one.x) * eased, one.y + (two.y - one.y) * eased,
        one.wide + (two.wide - one.wide) * eased, one.tall + (two.tall - one.tall) * eased);
    }
    pen.globalAlpha = 1;
    motion = requestAnimationFrame(step);
  };
  motion = requestAnimationFrame(step);
}

function endMotion() {
  inMotion = false;
  paintPicture();
}
