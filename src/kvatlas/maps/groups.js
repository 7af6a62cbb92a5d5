// Groups that lie over the same bytes: a block as each of them holds it, one strip below the other.
"use strict";

// Returns the groups; identical ones are listed once.
function alikeGroups() {
  return remembered(plan(), `alike ${view.stage}`, findAlike);
}

function findAlike() {
  const mine = plan(), alike = new Map();
  mine.groups.forEach((group, number) => {
    const regions = mine.regions.filter((one) => one.stage === view.stage && one.group === number);
    if (!regions.length) return;
    const key = JSON.stringify([group.kind, group.pool, regions.map((one) => [one.page, one.layers.length])]);
    if (!alike.has(key)) alike.set(key, { group, regions, numbers: [] });
    alike.get(key).numbers.push(number);
  });
  return [...alike.values()];
}

let stripsShown = "";

// Shows the strips. Unchanged strips are not redrawn, and their elements are reused for the next plan.
function showGroups() {
  const mine = plan(), kinds = alikeGroups(), holes = kinds.some((kind) => wasteOf(kind).text);
  byId("sharing").hidden = kinds.length === 1 && !holes;
  if (byId("sharing").hidden) return;
  say("sharing-note", mine.groups.length > 1
    ? `Groups of layers share the same bytes; a block id belongs to one group at a time. Each strip is block ${count(view.block)}, byte by byte, `
      + `as one group uses it. Choose one to see it above.${holes ? " Hatched bytes have no content; search for “padding” to go there." : ""}`
    : "All layers share one block table.");
  const looks = JSON.stringify([view.plan, view.stage, dark, rem(), pictureWidth]);
  if (looks !== stripsShown) makeStrips(kinds);
  stripsShown = looks;
  kinds.forEach(({ numbers }, n) => byId("groups").children[n].setAttribute("aria-pressed", String(numbers.includes(view.group))));
}

function makeStrips(kinds) {
  const box = byId("groups");
  while (box.children.length > kinds.length) box.lastChild.remove();
  while (box.children.length < kinds.length) box.append(emptyStrip(box.children.length));
  kinds.forEach((kind, n) => describeStrip(box.children[n], kind));
  const wastes = kinds.map(wasteOf);
  byId("groups-legend").replaceChildren(
    swatch(`linear-gradient(90deg, ${PAGES[dark ? "dark" : "light"].map((fill, n) => `${fill} ${n * 50}% ${n * 50 + 50}%`).join(", ")})`, "pages, one after the other"),
    ...(wastes.some(({ padding }) => padding) ? [swatch("var(--hatch)", "padding in a page")] : []),
    ...(wastes.some(({ unused }) => unused) ? [swatch("var(--hatch-pale)", "unused by the group")] : []));
  const width = stripWidth();
  kinds.forEach((kind, n) => paintStrip(box.children[n].querySelector("canvas"), kind, width));
}

// Returns the width of the strips. Cached by the page's width, because reading it forces a layout of the whole page.
function stripWidth() {
  const known = remembered(stripWidth, `${pictureWidth} ${rem()} ${innerWidth}`, () => ({ width: 0 }));
  known.width ||= byId("groups").querySelector("canvas").clientWidth;
  return known.width;
}

// Makes an empty strip. Another click selects the next identical group.
function emptyStrip(place) {
  const card = make("button", null, { type: "button", class: "group" }), name = make("span");
  name.append(make("b"), make("small"));
  card.append(name, make("canvas"), make("small"));
  card.addEventListener("click", () => {
    const { numbers } = alikeGroups()[place];
    change({ group: numbers[(numbers.indexOf(view.group) + 1) % numbers.length] });
  });
  return card;
}

function describeStrip(card, kind) {
  const { group, regions, numbers } = kind, [name, layers, waste] = card.querySelectorAll("b, small");
  name.textContent = `${numbers.length > 1 ? `${numbers.length} × ` : ""}${words(group.kind)}`;
  layers.textContent = layersOf(group, regions);
  waste.textContent = wasteOf(kind).text || "no padding";
}

// Describes the layers of a group: their number, the first and the last.
function layersOf(group, regions) {
  const names = [...new Set(regions.flatMap((one) => one.layers.map((layer) => shortName(data.names[layer]).replace("layer ", ""))))];
  const [first, last] = [names[0].split(" "), names[names.length - 1].split(" ")];
  if (first[1] === last[1]) first.length = 1;
  const which = names.length === 1 ? `layer ${names[0]}` : `${names.length} layers, ${first.join(" ")} … ${last.join(" ")}`;
  const { splits } = regions[0], parts = splits > 1 ? `, 1/${splits} of the state of each` : "";
  return `${which}${parts}; ${count(group.block_size)} tokens${group.window ? `, window ${count(group.window)}` : ""}`;
}

// Returns the padding and the unused bytes of a block, and a description.
function wasteOf({ group, regions, numbers }) {
  const mine = plan(), pool = mine.pools.find((one) => one.stage === view.stage && one.index === group.pool);
  let padding = 0;
  for (const region of regions) {
    const page = mine.pages[region.page], pages = region.layers.length;
    if (page.padding) padding += page.padding[1] * pages;
    for (const field of page.fields) {
      if (field.padding) padding += field.box[2].filter(([a]) => a !== "B" && a !== "L").reduce((n, [, s]) => n * s, field.box[1]) * pages;
    }
  }
  const left = mine.unused[`${view.stage}/${numbers[0]}`] || [];
  const unused = left.reduce((sum, one) => sum + one[1], 0);
  const last = left.length === 1 && (left[0][0] % pool.block_bytes) + left[0][1] === pool.block_bytes;
  const share = (bytes) => `${count(bytes)} bytes (${+((100 * bytes) / pool.block_bytes).toPrecision(2)}%)`;
  const parts = [padding ? `${share(padding)} padding in its pages` : "", unused ? `${share(unused)} unused${last ? " at the block's end" : ""}` : ""];
  return { padding, unused, text: parts.filter(Boolean).join(", ") };
}

function paintStrip(canvas, { numbers }, width) {
  const tall = Math.round(1.3 * rem());
  if (!width) return;
  fitCanvas(canvas, width, tall);
  const own = { ...view, group: numbers.includes(view.group) ? view.group : numbers[0], level: "strip" };
  const rows = blockRows(plan(), own).sort((one, two) => one.start - two.start);
  const brush = brushOf(canvas.getContext("2d"), { mode: "page", follow: null }), at = { x: 0, y: 0, wide: width, tall, plain: true };
  brush.finest = 1;
  const stretches = rows.length * 4 < width ? rows.flatMap((row) => partsOfRow(own, row)) : joined(rows);
  paintLine(brush, own, cutLine(brush, plan(), own, stretches, at), ({ point }) => lookAt(brush, plan(), own, point), [at]);
  drawLines(brush, own);
}

const MOST_HOLES = 16; // ranges of padding in a row; rows with more are sampled pixel by pixel

// Divides a row within one page where padding begins and ends. Each part has one colour, so one lookup is enough.
function partsOfRow(own, row) {
  if (!row.region) return [{ ...row, point: { kind: "unused", region: null, at: {} } }];
  const [first, last] = [row.start, row.start + row.nbytes - 1].map((at) => find(plan(), own.stage, own.group, at, row));
  if (!first || !last || first.region !== last.region || first.at.L !== last.at.L) return [row];
  const holes = holesOf(own, row, first);
  if (holes.reduce((sum, box) => sum + itemsOf(box), 0) > MOST_HOLES) return [row];
  const edges = holes.flatMap((box) => [...starts(box, {})].flatMap((start) => [start, start + box[1]]));
  return splitAt(row, edges).map((part) => ({ ...part, point: find(plan(), own.stage, own.group, part.start, row) }));
}

const itemsOf = ([, , axes]) => axes.reduce((all, [, many]) => all * many, 1);

// Returns the padding of a row's page, without scattered padding of less than a hundredth of the row, which is invisible.
function holesOf(own, row, { region, at }) {
  const { fields, padding } = plan().pages[region.page];
  const boxes = [...(padding ? [padding] : []), ...fields.filter((field) => field.padding).map(({ box }) => box)];
  return boxes.map((box) => folded(cut(cut(box, "B", own.block, 1), "L", at.L, 1)))
    .filter((box) => itemsOf(box) <= MOST_HOLES || itemsOf(box) * box[1] * 100 > row.nbytes);
}

// Divides a range at some addresses.
function splitAt({ start, nbytes, region }, edges) {
  const inside = edges.filter((edge) => edge > start && edge < start + nbytes);
  const cuts = [...new Set([start, ...inside, start + nbytes])].sort((one, two) => one - two);
  return cuts.slice(1).map((stop, n) => ({ start: cuts[n], nbytes: stop - cuts[n], region }));
}

// Joins adjacent rows of a region.
function joined(rows) {
  const made = [];
  for (const row of rows) {
    const last = made[made.length - 1];
    if (last && last.region === row.region && last.start + last.nbytes === row.start) last.nbytes += row.nbytes;
    else made.push({ ...row });
  }
  return made;
}
