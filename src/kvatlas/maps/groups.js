// Groups that lie over the same bytes: a block as each of them holds it, one strip below the other.
"use strict";

// Groups that look the same, once.
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

// The strips; they are made anew only where they look different from those that are shown.
function showGroups() {
  const mine = plan(), kinds = alikeGroups();
  byId("sharing").hidden = kinds.length === 1 && !wasteOf(kinds[0]).text;
  say("sharing-note", mine.groups.length > 1
    ? "Groups of layers lie over the same bytes; a block id belongs to one of them at a time. Each strip is block "
      + `${count(view.block)}, byte by byte, as one group holds it; hatched bytes are padding, which holds nothing then. Choose one to see it above.`
    : "All layers share one block table.");
  const looks = JSON.stringify([view.plan, view.stage, dark, rem(), pictureWidth]);
  if (looks !== stripsShown) makeStrips(kinds);
  stripsShown = looks;
  kinds.forEach(({ numbers }, n) => byId("groups").children[n].setAttribute("aria-pressed", String(numbers.includes(view.group))));
}

function makeStrips(kinds) {
  const box = byId("groups");
  box.replaceChildren(...kinds.map(groupStrip));
  byId("groups-legend").replaceChildren(
    swatch(`linear-gradient(90deg, ${PAGES[dark ? "dark" : "light"].map((fill, n) => `${fill} ${n * 50}% ${n * 50 + 50}%`).join(", ")})`, "pages, one after the other"),
    swatch("var(--hatch)", "padding in a page"), swatch("var(--hatch-pale)", "unused by the group"));
  const canvases = [...box.querySelectorAll("canvas")], widths = canvases.map((canvas) => canvas.clientWidth);
  kinds.forEach((kind, n) => paintStrip(canvases[n], kind, widths[n]));
}

function groupStrip(kind) {
  const { group, regions, numbers } = kind;
  const card = make("button", null, { type: "button", class: "group" });
  const times = numbers.length > 1 ? `${numbers.length} × ` : "";
  const name = make("span");
  name.append(make("b", `${times}${words(group.kind)}`), make("small", layersOf(group, regions)));
  card.append(name, make("canvas"), make("small", wasteOf(kind).text || "no padding"));
  card.addEventListener("click", () => change({ group: numbers[(numbers.indexOf(view.group) + 1) % numbers.length] }));
  return card;
}

// The layers of a group: how many, the first and the last.
function layersOf(group, regions) {
  const names = [...new Set(regions.flatMap((one) => one.layers.map((layer) => shortName(data.names[layer]).replace("layer ", ""))))];
  const [first, last] = [names[0].split(" "), names[names.length - 1].split(" ")];
  if (first[1] === last[1]) first.length = 1;
  const which = names.length === 1 ? `layer ${names[0]}` : `${names.length} layers, ${first.join(" ")} … ${last.join(" ")}`;
  const { splits } = regions[0], parts = splits > 1 ? `, 1/${splits} of the state of each` : "";
  return `${which}${parts}; ${count(group.block_size)} tokens${group.window ? `, window ${count(group.window)}` : ""}`;
}

// Bytes of a block that a group leaves, and in which way.
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
  const own = { ...view, group: numbers.includes(view.group) ? view.group : numbers[0], level: "block" };
  const rows = joined(blockRows(plan(), own).sort((one, two) => one.start - two.start));
  const brush = brushOf(canvas.getContext("2d"), { mode: "page", follow: null });
  brush.finest = 1;
  paintRow(brush, plan(), own, rows, { x: 0, y: 0, wide: width, tall, plain: true });
  drawLines(brush, own);
}

// Rows of a region that follow each other in memory, as one.
function joined(rows) {
  const made = [];
  for (const row of rows) {
    const last = made[made.length - 1];
    if (last && last.region === row.region && last.start + last.nbytes === row.start) last.nbytes += row.nbytes;
    else made.push({ ...row });
  }
  return made;
}
