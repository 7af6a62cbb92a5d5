// Details about the byte under the cursor.
"use strict";

function pointAt(x, y) {
  const { rows, place } = drawn;
  if (!place) return null;
  const row = rows[Math.floor((y - place.top) / place.height)];
  if (!row || x < place.left) return null;
  const pixels = Math.max(1, Math.round(row.nbytes * place.scale));
  if (x - place.left >= pixels) return null;
  const share = (Math.floor(x - place.left) + 0.5) / pixels;
  const address = row.start + Math.min(row.nbytes - 1, Math.floor(share * row.nbytes));
  return find(plan(), view.stage, view.group, address) || { kind: "unused", at: {}, address, region: null };
}

const layerName = (region, index) => data.names[region.layers[index]];

// Returns names and values of all details of a point.
function factsOf(point) {
  const mine = plan(), facts = [];
  const add = (name, value) => { if (value !== null && value !== undefined) facts.push([name, String(value)]); };
  if (point.kind === "unused") {
    add("unused", `by ${words(mine.groups[view.group].kind)}: ${point.nbytes ? count(point.nbytes) + " bytes of the block" : "here"}`);
    add("block", count(point.at.B ?? view.block));
    add("address", count(point.address));
    return facts;
  }
  const { region, at } = point;
  add("layer", layerName(region, at.L) + partName(region, at.L));
  if (point.kind === "padding") {
    add("padding", point.nbytes ? `${count(point.nbytes)} bytes after the page` : `field ${point.field.name}`);
    add("block", count(at.B));
    add("address", count(point.address));
    return facts;
  }
  const { field } = point;
  add("field", `${field.name}, ${field.dtype}`);
  const head = headOf(point, view.tpRank);
  if (head !== null) add("head", `${head}${field.shard === "H" ? ` of ${field.whole}` : ""}`);
  else if (field.shard) add("row", `${globalRow(region, field, at, view.tpRank)} of ${field.whole}`);
  const ranks = ranksOf(mine, region, field, at, view.tpRank);
  add("tp rank", view.tpRank + (ranks.length > 1 ? `, the same bytes on ${ranks.length} ranks` : ""));
  add("block", count(at.B));
  const tokens = tokensOf(point);
  if (tokens) add("token", (tokens[0] === tokens[1] ? tokens[0] : `${tokens[0]}–${tokens[1]}`) + " of the block");
  else if (!region.tokens_per_state) add("token", "the request's state after its last token");
  const inner = field.box[2].filter(([axis]) => !["B", "L", "k", "H", "N"].includes(axis));
  add("element", inner.map(([axis]) => `${axis} ${at[axis]}`).join(", ") || null);
  const start = point.address - at.rest;
  add("bytes", `${count(start)} – ${count(start + field.box[1] - 1)}`);
  add("address", count(point.address));
  add("stride", field.box[2].filter(([, n]) => n > 1).map(([axis, , stride]) => `${axis}\u00a0${count(stride)}`).join(" · "));
  return facts;
}

function showFacts(point) {
  const list = byId("facts");
  list.replaceChildren();
  for (const [name, value] of factsOf(point)) {
    list.append(make("dt", name), make("dd", value, { "data-fact": name }));
  }
  const names = { field: "This byte", padding: "Padding", unused: "Unused" };
  byId("facts-title").textContent = cursor && cursor.point ? names[point.kind] : `First byte in view; ${byHand("point at", "tap")} another`;
}

function showTip(point, x, y) {
  const facts = new Map(factsOf(point));
  const name = facts.get("layer") ? shortName(facts.get("layer")) : "";
  const field = point.kind === "field" ? point.field.name : point.kind;
  const parts = [name, field, facts.has("head") ? `head ${facts.get("head").split(" ")[0]}` : "",
    point.kind === "field" && tokensOf(point) ? `token ${facts.get("token").split(" ")[0]}` : "", `byte ${facts.get("address")}`];
  tell(parts.filter(Boolean).join(" · "), x, y);
}

// Shows a tooltip next to the mouse.
function tell(text, x, y) {
  const tip = byId("tip"), wide = byId("stage").clientWidth;
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = `${Math.max(0, Math.min(x + 14, wide - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18}px`;
}

// Lists the parts of a GPU's memory, for the outermost level.
function showMemory() {
  byId("facts-title").textContent = "Memory of one rank";
  byId("facts").replaceChildren(...drawn.memory.flatMap((part) => [make("dt", part.name), make("dd", `${count(part.bytes)} bytes, ${part.more}`)]));
}
