// The text around the picture: position, caption, and legend of the colours.
"use strict";

// Describes a plan in one sentence.
function summary() {
  const mine = plan(), pools = mine.pools.filter((pool) => pool.stage === view.stage);
  const blocks = pools.map((pool) => `${count(pool.blocks)} blocks of ${size(pool.block_bytes)}`).join(" and ");
  const each = mine.ranks > 1 ? ` on each of ${mine.ranks} ranks` : "";
  const groups = mine.groups.length < 2 ? "" : `, ${pools.length > 1 ? "for" : "shared by"} ${mine.groups.length} groups of layers`;
  return `${blocks}${each}, ${count(mine.knobs.block)} tokens a block${groups}.`;
}

function renderMinimap() {
  const canvas = byId("minimap"), width = pictureWidth, mini = canvas.getContext("2d");
  canvas.hidden = byId("minimap-note").hidden = view.level === "memory";
  if (canvas.hidden) return;
  fitCanvas(canvas, width, 14);
  const pool = poolOf(plan(), view);
  mini.fillStyle = styled("--track");
  mini.fillRect(0, 3, width, 8);
  mini.fillStyle = styled("--accent");
  for (const row of drawn.rows) {
    const x = Math.min(width - 2, (row.start / pool.bytes) * width);
    mini.fillRect(x, 1, Math.max(2, (row.nbytes / pool.bytes) * width), 12);
  }
  say("minimap-note", `pool ${pool.index}, ${size(pool.bytes)}; marked: the part that the picture shows`);
}

function renderCaption() {
  const notes = [];
  const mine = plan(), pool = poolOf(mine, view);
  if (view.level === "pool") {
    const first = Math.floor(view.block / BLOCKS_SHOWN) * BLOCKS_SHOWN;
    const last = Math.min(pool.blocks, first + BLOCKS_SHOWN) - 1;
    const others = pool.blocks > BLOCKS_SHOWN ? "; the others have the same layout" : "";
    notes.push(`Blocks ${count(first)}–${count(last)} of ${count(pool.blocks)}${others}.`);
  }
  if (view.level === "memory") notes.push("One rank's memory, to scale.");
  else if (view.level === "cell") notes.push(`Each row is at most ${view.width} bytes; each box is one element.`);
  else notes.push("Each row is contiguous memory, to scale; rows further down have higher addresses.");
  if (isFine()) notes.push("A pixel that covers several fields has their mean colour.");
  if (drawn.every > 1) notes.push(`A sample: ${count(drawn.rows.length)} of ${count(drawn.of)} rows, every ${ordinal(drawn.every)}.`);
  say("caption", notes.join(" "));
  renderOrder();
  renderLegend();
}

// Returns whether a drawn field is narrower than a pixel.
function isFine() {
  if (!drawn.place || view.level === "cell") return false;
  const fields = regionsOf(plan(), view).flatMap((region) => plan().pages[region.page].fields);
  return fields.some(({ box }) => innermost(box, BY_CELL)[0] * drawn.place.scale < 1);
}

function ordinal(number) {
  const teens = number % 100 > 10 && number % 100 < 14;
  return number + ((!teens && { 1: "st", 2: "nd", 3: "rd" }[number % 10]) || "th");
}

const AXIS_WORDS = {
  L: "L counts the pages of a block: one per layer", B: "B counts blocks of the pool", H: "H counts heads on this rank",
  N: "N counts states of a block: one per token in plain attention", k: "k counts parts of a block, the blocks that kernels see",
  C: "C is content: the bytes of one cell",
};
const AXES = { L: "layers", B: "blocks", H: "heads", N: "tokens", k: "parts of a block", C: "bytes" };

// Returns the largest field of the largest region of a group.
function mainField() {
  const mine = plan(), regions = regionsOf(mine, view);
  const largest = regions.reduce((one, two) => (two.page_bytes * two.layers.length > one.page_bytes * one.layers.length ? two : one));
  const bytes = ({ box }) => box[2].filter(([axis]) => axis !== "B" && axis !== "L").reduce((all, [, many]) => all * many, box[1]);
  const field = mine.pages[largest.page].fields.reduce((one, two) => (bytes(two) > bytes(one) ? two : one));
  return { region: largest, field };
}

// Returns how the axes of the shown field nest. L occurs twice if several identical regions hold several layers each, as packs do.
function nestingHere() {
  const { region, field } = mainField(), looks = (one) => JSON.stringify([shapeOf(plan().pages[one.page]), one.layers.length]);
  const offsets = regionsOf(plan(), view).filter((one) => looks(one) === looks(region))
    .map((one) => plan().pages[one.page].fields.find(({ name }) => name === field.name).box[0]).sort((one, two) => one - two);
  const axes = nesting(field);
  if (offsets.length > 1) axes.push(["L", offsets.length, offsets[1] - offsets[0], plan().knobs.pack > 1 && region.tokens_per_state ? "packs" : "regions"]);
  return axes.sort((one, two) => two[2] - one[2]);
}

// Shows the axes of the order, outermost first.
function renderOrder() {
  const box = byId("order"), { region } = mainField(), axes = nestingHere(), alone = axes.filter(([axis]) => axis === "L").length < 2;
  const nameOf = ([axis, , , regions]) => (axis === "N" && region.tokens_per_state !== 1 ? "states" : regions && !alone ? `${regions} of layers` : AXES[axis]);
  box.replaceChildren();
  box.hidden = view.level === "memory";
  for (const one of axes) {
    const item = make("li", null, { title: AXIS_WORDS[one[0]] });
    item.append(make("b", one[0]), ` ${count(one[1])} ${nameOf(one)}`);
    box.append(item);
  }
}

function swatch(fill, text) {
  const one = make("span", null, { class: "key" }), box = make("i");
  box.style.background = fill;
  one.append(box, text);
  return one;
}

function renderLegend() {
  const legend = byId("legend"), mine = plan();
  legend.replaceChildren();
  if (view.level === "memory") {
    for (const part of memoryParts()) legend.append(swatch(part.fill || "var(--hatch)", `${part.name}, ${size(part.bytes)}`));
    return;
  }
  const fields = regionsOf(mine, view).flatMap((region) => mine.pages[region.page].fields.map((field) => [region, field]));
  const named = fields.filter(([, field]) => !field.padding);
  if (paint.mode === "field") {
    const names = new Set(named.map(([, field]) => field.name));
    names.forEach((name) => legend.append(swatch(word(fieldNumber(name)), name)));
  } else {
    rampLegend(legend, named.map(([, field]) => field));
  }
  const padded = fields.some(([, field]) => field.padding) || regionsOf(mine, view).some((region) => mine.pages[region.page].padding);
  if (padded) legend.append(swatch("var(--hatch)", "padding"));
  if ((mine.unused[`${view.stage}/${view.group}`] || []).length) legend.append(swatch("var(--hatch-pale)", "unused by this group"));
}

// Returns the number of heads of a field in the whole model.
const headsOf = ({ box, shard, whole }) => (shard === "H" ? whole : axisOf(box, "H")[1]);

// Lists up to 16 heads; otherwise shows the colours from the first to the last value.
function rampLegend(legend, fields) {
  const heads = headsHere(), whole = Math.max(1, ...fields.filter(({ box }) => axisOf(box, "H")).map(headsOf));
  if (paint.mode === "head" && heads && whole <= 16) {
    for (let head = heads[0]; head <= heads[1]; head++) legend.append(swatch(ramp(head / Math.max(1, whole - 1)), head === heads[0] ? `head ${head}` : head));
  } else {
    const shown = [0, 0.25, 0.5, 0.75, 1].map(ramp).join(", ");
    const part = heads && heads[1] - heads[0] + 1 < whole ? `, here ${heads[0]}–${heads[1]}` : "";
    const which = paint.mode === "head" && heads ? `head 0 to ${whole - 1}${part}` : `${paint.mode}, first to last`;
    legend.append(swatch(`linear-gradient(90deg, ${shown})`, which));
  }
  const pale = [...new Set(fields.filter((field) => paleness(field.name)).map((field) => field.name))];
  if (pale.length) legend.append(make("span", `${pale.join(", ")} fainter`, { class: "key" }));
  if (paint.mode === "head" && fields.some((field) => !axisOf(field.box, "H"))) legend.append(swatch(dark ? "#59606d" : "#b4b8c0", "without heads"));
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
