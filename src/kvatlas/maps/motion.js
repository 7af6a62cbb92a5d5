// Animates the change from one plan to another: cells move from their old to their new place.
"use strict";

const MOST_MOVING = 800; // cells, because all of them are computed before the first frame

const motionLater = later();
let motion = 0; // the requested frame, if any
let inMotion = false;

// Starts to move cells from their old places. The animation begins with the old picture, so the first frame updates only the
// controls and is fast.
function startMotion(from) {
  inMotion = true;
  motionLater(() => animate(from, cellsShown()));
}

// Stops the animation, and the painting of remaining rows.
function stopMotion() {
  cancelAnimationFrame(motion);
  motion = 0;
  motionLater(null);
  inMotion = false;
  rowsLater(null);
  painting = false;
}

// Returns the places of cells by their identity. Cached, because a picture needs them when it appears and when it goes.
function cellsShown() {
  drawn.cells ||= view.level === "block" && drawn.place ? findCells() : new Map();
  return drawn.cells;
}

function findCells() {
  const cells = new Map(), mine = plan(), { rows, place: { left, top, height, gap, scale } } = drawn;
  const fields = regionsOf(mine, view).flatMap((region) => mine.pages[region.page].fields
    .filter((field) => !field.padding).map((field) => ({ region, field, sizes: sizesIn(region, field) })));
  const total = fields.reduce((sum, { sizes }) => sum + sizes.reduce((all, many) => all * many, 1), 0);
  const skip = Math.ceil(total / MOST_MOVING) | 1; // odd, to avoid aliasing with heads or tokens
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

// Yields every `skip`-th coordinate of L, k, H and N.
function* everyOf([layers, parts, heads, states], skip) {
  const total = layers * parts * heads * states;
  for (let n = 0; n < total; n += skip) {
    const rest = Math.floor(n / states), head = rest % heads, outer = Math.floor(rest / heads);
    yield { L: Math.floor(outer / parts), k: outer % parts, H: head, N: n % states };
  }
}

// Returns the index of the row that contains an address, or -1.
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
    const share = Math.max(0, Math.min(1, (now - begin) / 650)); // the time of a frame may be earlier than its request
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
